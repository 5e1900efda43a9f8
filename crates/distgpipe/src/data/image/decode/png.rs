//! PNG files, read by the crate `png`.

use super::{checked_size, ImageDefect, PIXELS_MAX};
use crate::data::FilePosition;
use std::io::Cursor;

pub fn decode(bytes: &[u8], into: &mut Vec<u8>) -> Result<(usize, usize), ImageDefect> {
    let defect = |got: String| ImageDefect { place: FilePosition::File, expected: "a PNG image", got };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), png::Limits { bytes: 4 * PIXELS_MAX });
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(|e| defect(e.to_string()))?;
    let size = checked_size(reader.info().width as usize, reader.info().height as usize)?;
    let bytes = reader.output_buffer_size().ok_or_else(|| defect("an impossible size".to_owned()))?;
    let mut pixels = vec![0; bytes];
    reader.next_frame(&mut pixels).map_err(|e| defect(e.to_string()))?;
    into.clear();
    match reader.output_color_type().0 {
        png::ColorType::Rgb => *into = pixels,
        png::ColorType::Rgba => into.extend(pixels.chunks_exact(4).flat_map(|pixel| &pixel[..3])),
        png::ColorType::Grayscale => into.extend(pixels.iter().flat_map(|grey| [grey; 3])),
        png::ColorType::GrayscaleAlpha => into.extend(pixels.chunks_exact(2).flat_map(|pixel| [pixel[0]; 3])),
        png::ColorType::Indexed => return Err(defect("a palette that was not expanded".to_owned())),
    }
    match into.len() == 3 * size.0 * size.1 {
        true => Ok(size),
        false => Err(defect(format!("{} values for {}×{} pixels", into.len(), size.0, size.1))),
    }
}

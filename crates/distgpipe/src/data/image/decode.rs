//! JPEG and PNG files to red, green and blue. The files may be anybody's: what is allocated is bounded, and what is
//! damaged gives an error with the place.

use crate::data::Place;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// The most pixels of an image: 200 MB once decoded.
const PIXELS_MAX: usize = 1 << 26;
/// A side of more is no photograph.
const SIDE_MAX: usize = 1 << 14;
/// Where the end of an image is looked for first.
const TAIL_BYTES: u64 = 4096;

const JPEG: [u8; 3] = [0xff, 0xd8, 0xff];
const JPEG_START: [u8; 2] = [0xff, 0xd8];
const JPEG_SCAN: [u8; 2] = [0xff, 0xda];
const JPEG_END: [u8; 2] = [0xff, 0xd9];
const PNG: [u8; 8] = *b"\x89PNG\r\n\x1a\n";
const PNG_END: [u8; 4] = *b"IEND";

/// What is wrong with a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Flaw {
    pub place: Place,
    pub expected: &'static str,
    pub got: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Jpeg,
    Png,
}

fn format(start: &[u8]) -> Result<Format, Flaw> {
    if start.starts_with(&JPEG) {
        Ok(Format::Jpeg)
    } else if start.starts_with(&PNG) {
        Ok(Format::Png)
    } else {
        let got = if start.is_empty() {
            "an empty file".to_owned()
        } else {
            format!("{:02x?}", &start[..start.len().min(8)])
        };
        Err(Flaw { place: Place::Byte(0), expected: "a JPEG or PNG image", got })
    }
}

/// Looks at both ends of a file, without decoding it: cheap enough for every file before a run.
pub fn look(file: &mut File) -> Result<(), Flaw> {
    let unread =
        |error: std::io::Error| Flaw { place: Place::Whole, expected: "a readable file", got: error.to_string() };
    let mut start = Vec::new();
    file.take(PNG.len() as u64).read_to_end(&mut start).map_err(unread)?;
    let format = format(&start)?;
    let length = file.seek(SeekFrom::End(0)).map_err(unread)?;
    // Something may come after the image, so the end is looked for backwards, and at last in the whole file.
    for tail_bytes in [TAIL_BYTES.min(length), length] {
        file.seek(SeekFrom::Start(length - tail_bytes)).map_err(unread)?;
        let mut tail = Vec::new();
        file.take(tail_bytes).read_to_end(&mut tail).map_err(unread)?;
        match ends(format, &tail) {
            Some(true) => return Ok(()),
            Some(false) => break,
            None => {}
        }
    }
    Err(Flaw { place: Place::Byte(length), expected: "the rest of the image", got: "the end of the file".to_owned() })
}

/// Whether an image ends in these last bytes of its file; `None` if they do not tell.
fn ends(format: Format, tail: &[u8]) -> Option<bool> {
    match format {
        // Neither pair occurs inside a scan, so the last one decides.
        Format::Jpeg => {
            tail.windows(2).rev().find(|pair| **pair == JPEG_END || **pair == JPEG_SCAN).map(|pair| *pair == JPEG_END)
        }
        Format::Png => tail.windows(4).rev().any(|word| *word == PNG_END).then_some(true),
    }
}

/// Writes the pixels of a file's content, and says width and height.
pub fn decode(bytes: &[u8], into: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let format = format(bytes)?;
    if ends(format, bytes) != Some(true) {
        return Err(Flaw {
            place: Place::Byte(bytes.len() as u64),
            expected: "the rest of the image",
            got: "the end of the file".to_owned(),
        });
    }
    match format {
        Format::Jpeg => jpeg(bytes, into),
        Format::Png => png(bytes, into),
    }
}

fn checked_size(width: usize, height: usize) -> Result<(usize, usize), Flaw> {
    let pixels = width.checked_mul(height).filter(|&pixels| pixels > 0 && pixels <= PIXELS_MAX);
    pixels.map(|_| (width, height)).ok_or_else(|| Flaw {
        place: Place::Whole,
        expected: "an image of 1 to 67,108,864 pixels",
        got: format!("{width}×{height}"),
    })
}

/// What is missing comes out of a decoder as grey, and would be learned. Strict mode tells codes that cannot be, and a scan
/// that runs out of bytes; but not one that runs into the mark of the end, so a scan is decoded without that.
fn jpeg(bytes: &[u8], into: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let flaw = |at: usize, expected, got: String| Flaw { place: Place::Byte(at as u64), expected, got };
    let outline = Outline::of(bytes)
        .ok_or_else(|| flaw(bytes.len(), "the rest of the image", "the end of the file".to_owned()))?;
    if outline.restarts < outline.restarts_due {
        let got = format!("{} of its {} restarts", outline.restarts, outline.restarts_due);
        return Err(flaw(outline.end, "a whole JPEG image", got));
    }
    // Later scans refine the first ones, and may be missing without a trace.
    if outline.progressive {
        return strict_jpeg(bytes, Place::Whole, into);
    }
    // The decoder reads ahead by less than this.
    const AHEAD: [u8; 16] = [0; 16];
    strict_jpeg(&[&bytes[..outline.end], &AHEAD].concat(), Place::Byte(outline.end as u64), into)
}

/// The marks and segments of a JPEG file, as far as they tell whether all of it is there.
struct Outline {
    /// Whether it comes in scans that refine each other.
    progressive: bool,
    /// Where the mark of the image's end is; another image may follow.
    end: usize,
    /// How often the first scan starts anew, and how often it must.
    restarts: usize,
    restarts_due: usize,
}

impl Outline {
    /// `None` if the image does not end.
    fn of(bytes: &[u8]) -> Option<Outline> {
        let mut outline = Outline { progressive: false, end: 0, restarts: 0, restarts_due: 0 };
        let (mut frame, mut interval, mut scans) = (None, 0, 0);
        let mut at = JPEG_START.len();
        loop {
            // Between segments there may be anything; inside a scan, codes, and zeros after codes that look like a mark.
            at += bytes.get(at..)?.iter().position(|&byte| byte == 0xff)?;
            let kind = *bytes.get(at + 1)?;
            match kind {
                0xff => {
                    at += 1;
                    continue;
                }
                0x00 | 0x01 | 0xd8 => {
                    at += 2;
                    continue;
                }
                0xd0..=0xd7 => {
                    outline.restarts += usize::from(scans == 1);
                    at += 2;
                    continue;
                }
                0xd9 => {
                    outline.end = at;
                    return Some(outline);
                }
                _ => {}
            }
            let length = usize::from(u16::from_be_bytes(*bytes.get(at + 2..)?.first_chunk()?));
            let segment = bytes.get(at + 4..at + 2 + length.max(2))?;
            match kind {
                0xc0..=0xc2 => {
                    outline.progressive = kind == 0xc2;
                    frame = Frame::of(segment);
                }
                0xdd => interval = usize::from(u16::from_be_bytes(*segment.first_chunk()?)),
                0xda => {
                    scans += 1;
                    let units = frame.as_ref().filter(|frame: &&Frame| segment.first() == Some(&frame.components));
                    if let Some(units) = units.filter(|_| scans == 1 && interval > 0).map(|frame| frame.units) {
                        outline.restarts_due = units.div_ceil(interval).saturating_sub(1);
                    }
                }
                _ => {}
            }
            at += 2 + length.max(2);
        }
    }
}

/// What a scan of all components is counted in.
struct Frame {
    components: u8,
    /// Blocks of 8×8 pixels, or as many of them as the components that are sampled least have one of.
    units: usize,
}

impl Frame {
    fn of(segment: &[u8]) -> Option<Frame> {
        let &[_, h0, h1, w0, w1, components] = segment.first_chunk()?;
        let [height, width] = [[h0, h1], [w0, w1]].map(|side| usize::from(u16::from_be_bytes(side)));
        let sampling = segment.get(6..)?.chunks_exact(3).map(|component| component[1]);
        let most = |nibble: fn(u8) -> u8| sampling.clone().map(nibble).max().filter(|_| components > 1);
        let (across, down) = (most(|s| s >> 4).unwrap_or(1).max(1), most(|s| s & 15).unwrap_or(1).max(1));
        let units = width.div_ceil(8 * usize::from(across)) * height.div_ceil(8 * usize::from(down));
        Some(Frame { components, units })
    }
}

/// Decodes as it is; pixels that are not there are said to be missing at `end`.
fn strict_jpeg(bytes: &[u8], end: Place, into: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let flaw = |got: String| Flaw { place: Place::Whole, expected: "a whole JPEG image", got };
    let options = DecoderOptions::default()
        .set_max_width(SIDE_MAX)
        .set_max_height(SIDE_MAX)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|e| flaw(e.to_string()))?;
    let (width, height) = decoder.dimensions().ok_or_else(|| flaw("no dimensions".to_owned()))?;
    let size = checked_size(width, height)?;
    if decoder.output_buffer_size() != Some(3 * width * height) {
        return Err(flaw(format!(
            "colours that cannot be made red, green and blue ({:?})",
            decoder.input_colorspace()
        )));
    }
    into.resize(3 * width * height, 0);
    decoder.set_options(options.set_strict_mode(true));
    decoder.decode_into(into).map_err(|e| Flaw { place: end, ..flaw(e.to_string()) })?;
    Ok(size)
}

fn png(bytes: &[u8], into: &mut Vec<u8>) -> Result<(usize, usize), Flaw> {
    let flaw = |got: String| Flaw { place: Place::Whole, expected: "a PNG image", got };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), png::Limits { bytes: 4 * PIXELS_MAX });
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(|e| flaw(e.to_string()))?;
    let size = checked_size(reader.info().width as usize, reader.info().height as usize)?;
    let bytes = reader.output_buffer_size().ok_or_else(|| flaw("an impossible size".to_owned()))?;
    let mut pixels = vec![0; bytes];
    reader.next_frame(&mut pixels).map_err(|e| flaw(e.to_string()))?;
    into.clear();
    match reader.output_color_type().0 {
        png::ColorType::Rgb => *into = pixels,
        png::ColorType::Rgba => into.extend(pixels.chunks_exact(4).flat_map(|pixel| &pixel[..3])),
        png::ColorType::Grayscale => into.extend(pixels.iter().flat_map(|grey| [grey; 3])),
        png::ColorType::GrayscaleAlpha => into.extend(pixels.chunks_exact(2).flat_map(|pixel| [pixel[0]; 3])),
        png::ColorType::Indexed => return Err(flaw("a palette that was not expanded".to_owned())),
    }
    match into.len() == 3 * size.0 * size.1 {
        true => Ok(size),
        false => Err(flaw(format!("{} values for {}×{} pixels", into.len(), size.0, size.1))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;
    use std::path::PathBuf;

    /// A file and what Pillow makes of it.
    struct Golden {
        name: String,
        bytes: Vec<u8>,
        size: (usize, usize),
        pixels: Vec<u8>,
    }

    fn golden() -> Vec<Golden> {
        let directory = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"));
        let text = std::fs::read_to_string(directory.join("images.json")).unwrap();
        let golden: Value = serde_json::from_str(&text).unwrap();
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let entry = |file: &Value| Golden {
            name: file["name"].as_str().unwrap().to_owned(),
            bytes: std::fs::read(directory.join("images").join(file["name"].as_str().unwrap())).unwrap(),
            size: (number(&file["size"][0]), number(&file["size"][1])),
            pixels: file["pixels"].as_array().unwrap().iter().map(|v| number(v) as u8).collect(),
        };
        golden["files"].as_array().unwrap().iter().map(entry).collect()
    }

    #[test]
    fn every_form_decodes_to_what_pillow_decodes() {
        for Golden { name, bytes, size, pixels: expected } in golden() {
            let mut pixels = vec![7; 5];
            assert_eq!(decode(&bytes, &mut pixels), Ok(size), "{name}");
            let away = pixels.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max();
            // JPEG decoders may differ in the rounding of their transforms.
            let allowed = if name.ends_with("png") { 0 } else { 3 };
            assert!(pixels.len() == expected.len() && away <= Some(allowed), "{name}: {away:?}");
        }
    }

    #[test]
    fn a_file_that_was_cut_short_is_told_by_its_ends() {
        let directory = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/images"));
        for Golden { name, bytes, .. } in golden() {
            look(&mut File::open(directory.join(&name)).unwrap()).unwrap_or_else(|flaw| panic!("{name}: {flaw:?}"));
            let format = format(&bytes).ok();
            for cut in [bytes.len() - 9, bytes.len() / 2] {
                let flaw = decode(&bytes[..cut], &mut Vec::new()).unwrap_err();
                assert_eq!(flaw.place, Place::Byte(cut as u64), "{name}: {flaw:?}");
                assert_ne!(format.and_then(|format| ends(format, &bytes[..cut])), Some(true), "{name}");
            }
            let trailer = [&bytes[..], &[0; 5000]].concat();
            assert!(decode(&trailer, &mut Vec::new()).is_ok(), "{name}");
        }
        // The end of a thumbnail is not the image's.
        let thumbnail = [&JPEG[..], &JPEG_END, &JPEG_SCAN, &[1, 2, 3]].concat();
        assert_eq!(ends(Format::Jpeg, &thumbnail), Some(false));
        for bytes in [&b""[..], b"GIF89a", &JPEG, &PNG] {
            assert!(decode(bytes, &mut Vec::new()).is_err(), "{bytes:?}");
        }
    }

    /// The end is there, and what should come before it is not. A progressive JPEG that ends early is an image.
    #[test]
    fn a_file_that_lacks_its_middle_is_told_by_decoding() {
        for Golden { name, bytes, .. } in golden().into_iter().filter(|file| file.name != "progressive.jpg") {
            let end: &[u8] = if name.ends_with("png") { b"\0\0\0\0IEND\xaeB\x60\x82" } else { &JPEG_END };
            for part in [bytes.len() / 2, bytes.len() * 3 / 4] {
                let gutted = [&bytes[..part], end].concat();
                assert!(decode(&gutted, &mut Vec::new()).is_err(), "{name}, {part} of {} bytes", bytes.len());
            }
        }
    }

    fn whole() -> Vec<(PathBuf, Vec<u8>)> {
        let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/images/whole"));
        let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        paths.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
    }

    /// Wherever the end comes too early, except in the last bytes of a scan, by which the decoder is ahead; and whatever
    /// follows, as the second image of a telephone does.
    #[test]
    fn a_photograph_that_ends_early_is_told_and_one_with_plain_last_rows_is_not() {
        assert_eq!(whole().len(), 4);
        for (path, bytes) in whole() {
            assert_eq!(decode(&bytes, &mut Vec::new()), Ok((64, 96)), "{path:?}");
            assert_eq!(decode(&[&bytes[..], &bytes].concat(), &mut Vec::new()), Ok((64, 96)), "{path:?} twice");
            let scan = bytes.windows(2).rposition(|pair| *pair == JPEG_SCAN).unwrap() + 14;
            for end in scan..bytes.len() - 24 {
                let cut = [&bytes[..end], &JPEG_END[..]].concat();
                let followed = [&cut, &bytes[..]].concat();
                for bytes in [cut, followed] {
                    let flaw = decode(&bytes, &mut Vec::new());
                    assert!(flaw.is_err(), "{path:?} cut at {end} of {}", bytes.len());
                }
            }
        }
    }

    /// Cameras and editors leave such things behind; they harm nothing.
    #[test]
    fn stray_bytes_between_headers_do_no_harm() {
        let plain = golden().into_iter().find(|file| file.name == "plain.jpg").unwrap();
        let segment = usize::from(u16::from_be_bytes([plain.bytes[4], plain.bytes[5]]));
        let (start, rest) = plain.bytes.split_at(4 + segment);
        let strayed = [start, &[0; 9], rest].concat();
        assert_eq!(decode(&strayed, &mut Vec::new()), Ok(plain.size));
    }

    proptest! {
        #[test]
        fn bytes_never_panic(which in 0usize..10, changes in prop::collection::vec((any::<u16>(), any::<u8>()), 1..8)) {
            let mut bytes = golden().swap_remove(which).bytes;
            for (place, value) in changes {
                let place = usize::from(place) % bytes.len();
                bytes[place] = value;
            }
            let _ = decode(&bytes, &mut Vec::new());
        }
    }
}

//! JPEG files, read by zune-jpeg.

use super::{checked_size, ImageDefect};
use crate::data::FilePosition;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

const JPEG_START: [u8; 2] = [0xff, 0xd8];

/// The largest side accepted, in pixels.
const SIDE_MAX: usize = 1 << 14;

/// Decoders fill missing pixels with grey, which would be trained on. Strict mode detects invalid codes and a scan that
/// runs out of bytes, but not one that runs into the end-of-image marker, so the file is decoded without that marker.
pub fn decode(bytes: &[u8], into: &mut Vec<u8>) -> Result<(usize, usize), ImageDefect> {
    let defect = |at: usize, expected, got: String| ImageDefect { place: FilePosition::Byte(at as u64), expected, got };
    let outline = Outline::of(bytes)
        .ok_or_else(|| defect(bytes.len(), "the rest of the image", "the end of the file".to_owned()))?;
    if outline.restarts < outline.restarts_due {
        let got = format!("{} of its {} restarts", outline.restarts, outline.restarts_due);
        return Err(defect(outline.end, "a whole JPEG image", got));
    }
    // Later scans refine earlier ones, and nothing shows when they are missing.
    if outline.progressive {
        return strict_jpeg(bytes, FilePosition::File, into);
    }
    // The decoder reads ahead by fewer bytes than this.
    const AHEAD: [u8; 16] = [0; 16];
    strict_jpeg(&[&bytes[..outline.end], &AHEAD].concat(), FilePosition::Byte(outline.end as u64), into)
}

/// The markers and segments of a JPEG file that show whether it is complete.
struct Outline {
    /// Whether the file is progressive: scans that refine each other.
    progressive: bool,
    /// The offset of the end-of-image marker. Another image may follow.
    end: usize,
    /// The number of restart markers in the first scan, and the required number.
    restarts: usize,
    restarts_due: usize,
}

impl Outline {
    /// Scans the file; `None` if there is no end-of-image marker.
    fn of(bytes: &[u8]) -> Option<Outline> {
        let mut outline = Outline { progressive: false, end: 0, restarts: 0, restarts_due: 0 };
        let (mut frame, mut interval, mut scans) = (None, 0, 0);
        let mut at = JPEG_START.len();
        loop {
            // Anything may stand between segments. In a scan, a zero follows codes that look like a marker.
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
                    frame = JpegFrame::of(segment);
                }
                0xdd => interval = usize::from(u16::from_be_bytes(*segment.first_chunk()?)),
                0xda => {
                    scans += 1;
                    let units = frame.as_ref().filter(|frame: &&JpegFrame| segment.first() == Some(&frame.components));
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

/// The minimum coded unit of a scan with all components.
struct JpegFrame {
    components: u8,
    /// Blocks of 8×8 pixels, multiplied by the largest sampling factors.
    units: usize,
}

impl JpegFrame {
    fn of(segment: &[u8]) -> Option<JpegFrame> {
        let &[_, h0, h1, w0, w1, components] = segment.first_chunk()?;
        let [height, width] = [[h0, h1], [w0, w1]].map(|side| usize::from(u16::from_be_bytes(side)));
        let sampling = segment.get(6..)?.chunks_exact(3).map(|component| component[1]);
        let most = |nibble: fn(u8) -> u8| sampling.clone().map(nibble).max().filter(|_| components > 1);
        let (across, down) = (most(|s| s >> 4).unwrap_or(1).max(1), most(|s| s & 15).unwrap_or(1).max(1));
        let units = width.div_ceil(8 * usize::from(across)) * height.div_ceil(8 * usize::from(down));
        Some(JpegFrame { components, units })
    }
}

/// Decodes the bytes as they are, and reports missing pixels at `end`.
fn strict_jpeg(bytes: &[u8], end: FilePosition, into: &mut Vec<u8>) -> Result<(usize, usize), ImageDefect> {
    let defect = |got: String| ImageDefect { place: FilePosition::File, expected: "a whole JPEG image", got };
    let options = DecoderOptions::default()
        .set_max_width(SIDE_MAX)
        .set_max_height(SIDE_MAX)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|e| defect(e.to_string()))?;
    let (width, height) = decoder.dimensions().ok_or_else(|| defect("no dimensions".to_owned()))?;
    let size = checked_size(width, height)?;
    if decoder.output_buffer_size() != Some(3 * width * height) {
        return Err(defect(format!(
            "colours that cannot be made red, green and blue ({:?})",
            decoder.input_colorspace()
        )));
    }
    into.resize(3 * width * height, 0);
    decoder.set_options(options.set_strict_mode(true));
    decoder.decode_into(into).map_err(|e| ImageDefect { place: end, ..defect(e.to_string()) })?;
    Ok(size)
}

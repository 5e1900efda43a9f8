//! Decodes JPEG and PNG files to RGB. The files are untrusted: allocation is bounded, and corruption gives an error with
//! its place.

#[cfg(feature = "jpeg")]
mod jpeg;
#[cfg(feature = "png")]
mod png;

use crate::data::FilePosition;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// The largest image accepted, in pixels: 200 MB when decoded.
#[cfg(any(feature = "jpeg", feature = "png"))]
const PIXELS_MAX: usize = 1 << 26;
/// How many bytes at the end of a file are searched first for the end of the image.
const TAIL_BYTES: u64 = 4096;

const JPEG: [u8; 3] = [0xff, 0xd8, 0xff];
const JPEG_SCAN: [u8; 2] = [0xff, 0xda];
const JPEG_END: [u8; 2] = [0xff, 0xd9];
const PNG: [u8; 8] = *b"\x89PNG\r\n\x1a\n";
const PNG_END: [u8; 4] = *b"IEND";

/// An error in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct ImageDefect {
    pub place: FilePosition,
    pub expected: &'static str,
    pub got: String,
}

/// Why a file cannot be decoded.
#[derive(Debug, PartialEq, Eq)]
pub enum DecodeError {
    Damaged(ImageDefect),
    /// The decoder of this format belongs to a feature of the crate that is off.
    MissingFeature {
        format: &'static str,
        feature: &'static str,
    },
}

impl From<ImageDefect> for DecodeError {
    fn from(defect: ImageDefect) -> Self {
        DecodeError::Damaged(defect)
    }
}

/// Writes the pixels and returns width and height.
type DecodeFn = fn(&[u8], &mut Vec<u8>) -> Result<(usize, usize), ImageDefect>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Jpeg,
    Png,
}

#[cfg(feature = "jpeg")]
const JPEG_DECODER: Option<DecodeFn> = Some(jpeg::decode);
#[cfg(not(feature = "jpeg"))]
const JPEG_DECODER: Option<DecodeFn> = None;

#[cfg(feature = "png")]
const PNG_DECODER: Option<DecodeFn> = Some(png::decode);
#[cfg(not(feature = "png"))]
const PNG_DECODER: Option<DecodeFn> = None;

impl Format {
    fn decoder(self) -> Result<DecodeFn, DecodeError> {
        let (decoder, format, feature) = match self {
            Format::Jpeg => (JPEG_DECODER, "JPEG images", "jpeg"),
            Format::Png => (PNG_DECODER, "PNG images", "png"),
        };
        decoder.ok_or(DecodeError::MissingFeature { format, feature })
    }
}

fn format(start: &[u8]) -> Result<Format, ImageDefect> {
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
        Err(ImageDefect { place: FilePosition::Byte(0), expected: "a JPEG or PNG image", got })
    }
}

/// Checks the beginning and the end of a file without decoding it: cheap enough to do for every file before a run.
pub fn check_ends(file: &mut File) -> Result<(), DecodeError> {
    let unread = |error: std::io::Error| ImageDefect {
        place: FilePosition::File,
        expected: "a readable file",
        got: error.to_string(),
    };
    let mut start = Vec::new();
    file.take(PNG.len() as u64).read_to_end(&mut start).map_err(unread)?;
    let format = format(&start)?;
    format.decoder()?;
    let length = file.seek(SeekFrom::End(0)).map_err(unread)?;
    // Data may follow the image, so the end is searched for backwards, and finally in the whole file.
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
    Err(cut_short(length))
}

/// Whether an image ends within these last bytes of its file; `None` if they do not show it.
fn ends(format: Format, tail: &[u8]) -> Option<bool> {
    match format {
        // Neither marker occurs inside a scan, so the last one decides.
        Format::Jpeg => {
            tail.windows(2).rev().find(|pair| **pair == JPEG_END || **pair == JPEG_SCAN).map(|pair| *pair == JPEG_END)
        }
        Format::Png => tail.windows(4).rev().any(|word| *word == PNG_END).then_some(true),
    }
}

/// Decodes a file's content into `into` and returns its width and height.
pub fn decode(bytes: &[u8], into: &mut Vec<u8>) -> Result<(usize, usize), DecodeError> {
    let format = format(bytes)?;
    let decoder = format.decoder()?;
    if ends(format, bytes) != Some(true) {
        return Err(cut_short(bytes.len() as u64));
    }
    Ok(decoder(bytes, into)?)
}

fn cut_short(length: u64) -> DecodeError {
    let got = "the end of the file".to_owned();
    DecodeError::Damaged(ImageDefect { place: FilePosition::Byte(length), expected: "the rest of the image", got })
}

#[cfg(any(feature = "jpeg", feature = "png"))]
fn checked_size(width: usize, height: usize) -> Result<(usize, usize), ImageDefect> {
    let pixels = width.checked_mul(height).filter(|&pixels| pixels > 0 && pixels <= PIXELS_MAX);
    pixels.map(|_| (width, height)).ok_or_else(|| ImageDefect {
        place: FilePosition::File,
        expected: "an image of 1 to 67,108,864 pixels",
        got: format!("{width}×{height}"),
    })
}

#[cfg(all(test, feature = "jpeg", feature = "png"))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;
    use std::path::PathBuf;

    /// A file and Pillow's decoding of it.
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
            // JPEG decoders may round their transforms differently.
            let allowed = if name.ends_with("png") { 0 } else { 3 };
            assert!(pixels.len() == expected.len() && away <= Some(allowed), "{name}: {away:?}");
        }
    }

    #[test]
    fn a_file_that_was_cut_short_is_told_by_its_ends() {
        let directory = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/images"));
        for Golden { name, bytes, .. } in golden() {
            check_ends(&mut File::open(directory.join(&name)).unwrap())
                .unwrap_or_else(|defect| panic!("{name}: {defect:?}"));
            let format = format(&bytes).ok();
            for cut in [bytes.len() - 9, bytes.len() / 2] {
                assert_eq!(decode(&bytes[..cut], &mut Vec::new()), Err(cut_short(cut as u64)), "{name}");
                assert_ne!(format.and_then(|format| ends(format, &bytes[..cut])), Some(true), "{name}");
            }
            let trailer = [&bytes[..], &[0; 5000]].concat();
            assert!(decode(&trailer, &mut Vec::new()).is_ok(), "{name}");
        }
        // The end of an embedded thumbnail is not the end of the image.
        let thumbnail = [&JPEG[..], &JPEG_END, &JPEG_SCAN, &[1, 2, 3]].concat();
        assert_eq!(ends(Format::Jpeg, &thumbnail), Some(false));
        for bytes in [&b""[..], b"GIF89a", &JPEG, &PNG] {
            assert!(decode(bytes, &mut Vec::new()).is_err(), "{bytes:?}");
        }
    }

    /// The end marker is there, but data before it is missing. A progressive JPEG that ends early is a valid image.
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

    /// An early end is detected anywhere, except in the last bytes of a scan, which the decoder reads ahead; and whatever
    /// follows, such as the second image that phones append.
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
                    let defect = decode(&bytes, &mut Vec::new());
                    assert!(defect.is_err(), "{path:?} cut at {end} of {}", bytes.len());
                }
            }
        }
    }

    /// Cameras and editors leave such data behind; it is harmless.
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

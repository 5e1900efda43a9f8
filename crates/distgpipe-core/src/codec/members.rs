//! The registry of codecs: their numbers on the wire, their names, and the parser of texts such as `sort:6+2`.

use super::half_adapter::HalfPrecisionAdapter;
use super::{delta, fast, feedback, half, power_svd, raw, sort, tile, top_k, uniform, zstd};
use super::{Codec, CodecError};
use crate::wire::numbered;

numbered! {
    /// A codec's number in a frame's header. Numbers are never reused.
    pub enum CodecId {
        /// [`raw`]: the bytes of the tensor.
        Raw = 1,
        /// [`half`]: IEEE half precision.
        F16 = 2,
        /// [`half`]: bfloat16, the upper half of a float.
        BF16 = 3,
        /// [`uniform`]: one grid over the tensor's range.
        Uniform = 4,
        /// [`sort`]: a grid for each quantile bin.
        Sort = 5,
        /// [`tile`]: a grid for each block of neighbours.
        Tile = 6,
        /// [`fast`]: quantile bins estimated from a sample.
        Fast = 7,
        /// [`top_k`]: the values of largest magnitude.
        TopK = 8,
        /// [`power_svd`]: low-rank factors of each matrix.
        PowerSvd = 9,
        /// [`feedback`]: another codec with error feedback.
        Feedback = 10,
        /// [`delta`]: another codec on differences to the sample's last visit.
        Delta = 11,
        /// [`zstd`]: another codec's body, compressed without loss.
        Zstd = 12,
    }
}

/// Every codec, in the order in which users see them.
pub const ALL: &[Member] = &[
    raw::MEMBER,
    half::F16,
    half::BF16,
    uniform::MEMBER,
    sort::MEMBER,
    tile::MEMBER,
    fast::MEMBER,
    top_k::MEMBER,
    power_svd::MEMBER,
    feedback::MEMBER,
    delta::MEMBER,
    zstd::MEMBER,
];

/// One codec of the registry, as users see it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Member {
    /// The name that [`parse`] knows it by.
    pub name: &'static str,
    /// Its number in a frame's header.
    pub id: CodecId,
    /// Texts for [`parse`] that together use every parameter of the codec. The conformance tests run each of them.
    pub examples: &'static [&'static str],
    /// One line of description for the help text and for tables.
    pub about: &'static str,
    /// Makes the codec from what follows its name.
    pub(super) parse: Parse,
}

type Parse = fn(Arguments<'_>) -> Result<Box<dyn Codec>, CodecError>;

/// What follows a codec's name in `name:parameter(inner)`. Both parts are optional.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments<'a> {
    pub parameter: Option<&'a str>,
    pub inner: Option<&'a str>,
}

impl<'a> Arguments<'a> {
    /// Checks that a codec without parameters was given none.
    pub fn none(self, codec: &'static str, expected: &'static str) -> Result<(), CodecError> {
        match (self.parameter(codec, expected)?, self.parameter) {
            (_, None) => Ok(()),
            (got, _) => Err(CodecError::parameter(codec, expected, got)),
        }
    }

    /// The parameter of a codec that wraps no other codec; empty if there is none.
    pub fn parameter(self, codec: &'static str, expected: &'static str) -> Result<&'a str, CodecError> {
        match self.inner {
            None => Ok(self.parameter.unwrap_or("")),
            Some(inner) => Err(CodecError::parameter(codec, expected, &format!("({inner})"))),
        }
    }
}

/// The longest text that [`parse`] accepts, in bytes. It bounds the nesting of codecs.
const TEXT_BYTES_MAX: usize = 64;

/// Makes the codec that a text describes: a name of [`ALL`], then a colon and the parameters if it has any, such as
/// `sort:6+2`, then in parentheses the codec that it wraps, such as `feedback(tile:4)`. The codec takes `F32`, `F16`
/// and `BF16` tensors; `raw` and `zstd` take every type.
pub fn parse(text: &str) -> Result<Box<dyn Codec>, CodecError> {
    let codec = parse_f32(text)?;
    Ok(if codec.is_lossless() { codec } else { Box::new(HalfPrecisionAdapter::around(codec)) })
}

/// As [`parse`], without the adapter for two-byte floats.
pub(super) fn parse_f32(text: &str) -> Result<Box<dyn Codec>, CodecError> {
    let unknown = || CodecError::UnknownName { got: beginning(text) };
    if text.len() > TEXT_BYTES_MAX {
        return Err(unknown());
    }
    let (front, inner) = match text.split_once('(') {
        Some((front, rest)) => (front, Some(rest)),
        None => (text, None),
    };
    let (name, parameter) = match front.split_once(':') {
        Some((name, parameter)) => (name, Some(parameter)),
        None => (front, None),
    };
    let member = ALL.iter().find(|member| member.name == name).ok_or_else(unknown)?;
    let unclosed = || CodecError::Unclosed { codec: member.name, got: beginning(text) };
    let inner = inner.map(|rest| rest.strip_suffix(')').ok_or_else(unclosed)).transpose()?;
    (member.parse)(Arguments { parameter, inner }).map_err(|error| match error {
        // The codec knows its own part of the text only.
        CodecError::Parameter { codec, expected, .. } if codec == member.name => {
            CodecError::parameter(codec, expected, text)
        }
        other => other,
    })
}

/// The names of all codecs, for error messages.
pub(super) fn names() -> String {
    let names: Vec<_> = ALL.iter().map(|member| member.name).collect();
    names.join(", ")
}

/// As much of a text as an error message shows.
pub(super) fn beginning(text: &str) -> String {
    text.chars().take(64).collect()
}

/// A number in its canonical spelling: no sign, spaces or leading zeros.
pub(super) fn number(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_lists_the_codecs() {
        let Err(error) = parse("zip") else {
            panic!("there is no codec zip");
        };
        assert_eq!(
            error.to_string(),
            "expected a codec out of: raw, f16, bf16, uniform, sort, tile, fast, topk, svd, feedback, delta, zstd; got `zip`"
        );
    }

    #[test]
    fn wrong_parameters_are_answered_with_the_right_ones() {
        let told = |text: &str| match parse(text) {
            Ok(_) => panic!("{text} is no codec"),
            Err(error) => error.to_string(),
        };
        assert_eq!(told("raw:1"), "expected raw, which has no parameter; got `raw:1`");
        assert_eq!(told("f16:8"), "expected f16 or bf16, which have no parameter; got `f16:8`");
        assert_eq!(
            told("uniform:17"),
            "expected uniform:Q with Q from 1 to 16 bits, such as uniform:8; got `uniform:17`"
        );
        assert!(told("sort")
            .ends_with("such as sort:6+2, or sort:16, sort:12, sort:8, sort:4 for 12+4, 9+3, 6+2, 3+1; got `sort`"));
        for text in ["zstd", "zstd:", "zstd()", "zstd:0(raw)", "feedback", "feedback()", "delta()", "raw(tile:4)"] {
            assert!(told(text).ends_with(&format!("; got `{text}`")), "{}", told(text));
        }
        for text in ["zstd(", "zstd(tile:4", "feedback(tile:4"] {
            assert!(told(text).starts_with(&format!("expected `)` at the end of `{text}`")), "{}", told(text));
        }
        assert!(told("zip(raw").starts_with("expected a codec out of"), "{}", told("zip(raw"));
        for text in [
            "uniform",
            "uniform:",
            "uniform:0",
            "uniform:+8",
            "uniform:08",
            "uniform: 8",
            "uniform:8+2",
            "uniform:99999999999",
            "sort:6",
            "sort:0+4",
            "sort:12+5",
            "sort:6+",
            "sort:+2",
            "sort:6+2+1",
            "sort:6-2",
            "sort:4294967295+1",
            "tile",
            "tile:0",
            "tile:17",
            "tile:4/0",
            "tile:4/4097",
            "tile:4/",
            "tile:/64",
            "tile:4/64/2",
            "tile:~4",
            "tile:4~~",
            "tile:4~/64",
            "fast:6",
            "fast:6+2/15",
            "fast:6+2/",
            "fast:8/1048577",
            "topk",
            "topk:",
            "topk:0",
            "topk:0.0",
            "topk:1.1",
            "topk:2",
            "topk:.5",
            "topk:0.",
            "topk:+0.5",
            "topk:1e-2",
            "topk:0.0000000001",
            "topk:0.5.5",
            "svd",
            "svd:0",
            "svd:4097",
            "svd:08",
            "svd:8/2",
        ] {
            let name = text.split(':').next().unwrap();
            assert!(told(text).starts_with(&format!("expected {name}:")), "{}", told(text));
        }
    }
}

//! Codecs against golden vectors that other programs computed in float64, by actually sorting.
//!
//! - `golden/codecs.json`: every codec on short inputs, written by `scripts/golden_codecs.py`.
//! - `golden/codecs_1.safetensors` and `codecs_1.json`: `uniform` and `sort` on tensors of real sizes (2.7 MB). The
//!   tensors are `NAME.x`, the input, and `NAME.sort_Q_S.decoded`, `.lo` and `.step` (2^S each), where `sort_Q_0` is
//!   `uniform:Q`. The JSON has the body's size and the errors of each case. Inputs include ties, constants, one element,
//!   fewer elements than bins, denormals beside huge values, and −0.0.
//! - `golden/zstd.json`: tensors, and bodies of `zstd(raw)` that the command `zstd` compressed
//!   (`scripts/golden_zstd.py`).

use distgpipe_core::codec::{self, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use serde_json::Value;

/// Encodes and decodes `values`; returns the length of the body and the decoded values.
fn round_trip(text: &str, values: &[f32]) -> (usize, Vec<f32>) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let dims = [values.len()];
    let mut codec = codec::parse(text).unwrap();
    let mut body = Vec::new();
    let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes };
    codec.encode(view, &CodecContext::default(), &mut body).unwrap();
    let shape = Shape::new(&dims).unwrap();
    let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: codec.id() };
    let mut out = vec![0; bytes.len()];
    codec.decode(&meta, &body, &mut out).unwrap();
    (body.len(), out.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect())
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |max, value| f64::max(max, value.abs().into()))
}

fn mean_squared_error(values: &[f32], decoded: &[f32]) -> f64 {
    let squares = values.iter().zip(decoded).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2));
    squares.sum::<f64>() / values.len().max(1) as f64
}

/// Half the step of a grid over the whole range. No codec has a coarser grid, apart from a tile's rounding.
fn half_step_max(text: &str, values: &[f32]) -> f64 {
    let digits = text.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty());
    let code_max = 2f64.powi(digits.unwrap().parse().unwrap()) - 1.0;
    let range = values.iter().copied().fold(f32::MIN, f32::max) - values.iter().copied().fold(f32::MAX, f32::min);
    let coarser = if text.starts_with("tile") { largest(values) / 512.0 } else { 0.0 };
    (f64::from(range.max(0.0)) + coarser) / code_max / 2.0 * 1.002
}

/// The largest acceptable mean squared error, given the golden one and a tolerance of `rounding` on every value.
fn most(golden: f64, rounding: f64) -> f64 {
    1.001 * (golden.sqrt() + rounding).powi(2)
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

#[test]
fn every_codec_on_short_inputs_matches_the_golden_vectors() {
    let golden: Value = serde_json::from_str(include_str!("golden/codecs.json")).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 12 * 26 + 11, "every input in every codec, f16 not for the huge one");
    for case in cases {
        let (input, text) = (case["input"].as_str().unwrap(), case["codec"].as_str().unwrap());
        let values = floats(&golden["inputs"][input]);
        let expected = floats(&case["decoded"]);
        let (body_bytes, decoded) = round_trip(text, &values);
        assert_eq!(body_bytes as u64, case["body_bytes"].as_u64().unwrap(), "{input} {text}");
        if text.ends_with("f16") || text.starts_with("topk") {
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&decoded), bits(&expected), "{input} {text}");
            continue;
        }
        // The other program keeps its steps in float64, which moves a value by about its last digit over a bin.
        let rounding = largest(&values) * 2f64.powi(-22) + 2f64.powi(-149);
        // A denormal step is a multiple of the smallest denormal, so these grids differ from the golden ones.
        let denormal = input == "denormals";
        let half_step = half_step_max(text, &values);
        let mut same = 0;
        for ((&x, &got), &golden) in values.iter().zip(&decoded).zip(&expected) {
            let [x, got, golden] = [x, got, golden].map(f64::from);
            let at_a_tie = ((got - x).abs() - (golden - x).abs()).abs() <= rounding;
            let equal = (got - golden).abs() <= rounding;
            assert!(denormal || equal || at_a_tie, "{input} {text}: {x} became {got}, not {golden}");
            assert!((got - x).abs() <= half_step + rounding, "{input} {text}: {x} became {got}");
            same += usize::from(equal);
        }
        assert!(denormal || same * 100 >= values.len() * 95, "{input} {text}: only {same} of {} equal", values.len());
        let (got, golden) = (mean_squared_error(&values, &decoded), mean_squared_error(&values, &expected));
        assert!(denormal || got <= most(golden, rounding), "{input} {text}: {got} > {golden}");
    }
}

#[test]
fn bodies_that_another_program_compressed_are_decoded() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("golden/zstd.json")).unwrap();
    assert_eq!(cases.len(), 9);
    let bytes = |case: &Value, name: &str| -> Vec<u8> {
        let digits = case[name].as_str().unwrap();
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
    };
    for case in &cases {
        let dtype = *DType::ALL.iter().find(|dtype| dtype.name() == case["dtype"].as_str().unwrap()).unwrap();
        let (tensor, body) = (bytes(case, "tensor"), bytes(case, "body"));
        let dims = [tensor.len() / dtype.size_bytes()];
        let mut codec = codec::parse("zstd(raw)").unwrap();
        let shape = Shape::new(&dims).unwrap();
        let meta = TensorMeta { dtype, layout: Layout::Contiguous, shape, codec: codec.id() };
        let mut out = vec![0; tensor.len()];
        assert_eq!(codec.decode(&meta, &body, &mut out), Ok(()), "{dtype} {dims:?}");
        // The tensors in the file are little-endian.
        if cfg!(target_endian = "big") {
            out.chunks_exact_mut(dtype.size_bytes()).for_each(|element| element.reverse());
        }
        assert_eq!(out, tensor, "{dtype} {dims:?}");
    }
}

struct Tensors {
    header: Value,
    data: Vec<u8>,
}

impl Tensors {
    fn get(&self, name: &str) -> Vec<f32> {
        let offset = |at: usize| self.header[name]["data_offsets"][at].as_u64().unwrap_or_else(|| panic!("no {name}"));
        let bytes = &self.data[offset(0) as usize..offset(1) as usize];
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }
}

#[test]
fn uniform_and_sort_on_large_tensors_match_the_golden_vectors() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("golden/codecs_1.json")).unwrap();
    let mut data = include_bytes!("golden/codecs_1.safetensors").to_vec();
    let length = u64::from_le_bytes(data[..8].try_into().unwrap()) as usize;
    let header = serde_json::from_slice(&data[8..8 + length]).unwrap();
    data.drain(..8 + length);
    let tensors = Tensors { header, data };
    assert!(cases.len() >= 90, "{} cases", cases.len());
    for case in &cases {
        check(case, &tensors);
    }
}

fn check(case: &Value, tensors: &Tensors) {
    let number = |name: &str| case[name].as_u64().unwrap();
    let (input, q, s) = (case["input"].as_str().unwrap(), number("q"), number("s"));
    let text = if s == 0 { format!("uniform:{q}") } else { format!("sort:{q}+{s}") };
    let values = tensors.get(&format!("{input}.x"));
    let named = |what: &str| tensors.get(&format!("{input}.sort_{q}_{s}.{what}"));
    let (golden, lo, step) = (named("decoded"), named("lo"), named("step"));
    assert_eq!(values.len() as u64, number("n"));

    let (body_bytes, decoded) = round_trip(&text, &values);
    assert_eq!(body_bytes as u64, number("body_bytes"), "{input} {text}");
    for ((&x, &got), &golden) in values.iter().zip(&decoded).zip(&golden) {
        // The last bin that begins at or below the value, according to the table; empty bins are at the end.
        let filled = values.len().min(lo.len());
        let bin = lo[..filled].iter().rposition(|&lo| lo <= x).unwrap();
        let [lo, step, x, got, golden] = [lo[bin], step[bin], x, got, golden].map(f64::from);
        let end = lo + step * (2f64.powi(q as i32) - 1.0);
        let rounding = lo.abs().max(end.abs()) * 2f64.powi(-22) + 2f64.powi(-149);
        let near = (got - golden).abs() <= rounding;
        let within = (got - x).abs() <= step / 2.0 + rounding;
        assert!(within, "{input} {text}: {x} became {got}, farther than half of {step}");
        let one_code_away = (got - golden).abs() <= step + rounding;
        assert!(near || one_code_away, "{input} {text}: {x} became {got}, not {golden}");
    }
    let rounding = largest(&values) * 2f64.powi(-22);
    let (got, golden) = (mean_squared_error(&values, &decoded), case["mse"].as_f64().unwrap());
    assert!(got <= most(golden, rounding), "{input} {text}: {got} > {golden}");
    let farthest = values.iter().zip(&decoded).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs()).fold(0.0, f64::max);
    let golden = case["max_abs_error"].as_f64().unwrap();
    assert!(farthest <= golden + rounding, "{input} {text}: {farthest} > {golden}");
}

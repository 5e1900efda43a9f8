//! The error of every lossy codec in `codec::ALL`, on all kinds of values that occur in training.
//!
//! The tables of bodies are read here as `docs/codecs.md` describes them, independently of the codecs' code.

use distgpipe_core::codec::{self, CodecContext, CodecError, CodecId, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use proptest::prelude::*;

/// The quantization that a body describes.
struct Grids {
    /// The `lo` and `step` of each value's grid.
    of: Vec<(f64, f64)>,
    /// The code of each value.
    codes: Vec<u32>,
}

/// The codec inside a wrapper's parentheses.
fn inner_of(text: &str) -> Option<&str> {
    text.split_once('(').map(|(_, inner)| inner.strip_suffix(')').unwrap())
}

/// A vector, or for codecs of matrices a matrix that is as square as possible.
fn dims_of(text: &str, elements: usize) -> Vec<usize> {
    if !text.contains("svd:") {
        return vec![elements];
    }
    let rows =
        (1..=elements).take_while(|rows| rows * rows <= elements).filter(|rows| elements.is_multiple_of(*rows)).last();
    rows.map_or(vec![0, 0], |rows| vec![rows, elements / rows])
}

fn encode(text: &str, values: &[f32]) -> Result<Vec<u8>, CodecError> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let mut body = Vec::new();
    let dims = dims_of(text, values.len());
    let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes };
    codec::parse(text).unwrap().encode(view, &CodecContext::default(), &mut body).map(|()| body)
}

fn decode(text: &str, body: &[u8], elements: usize) -> Vec<f32> {
    let mut codec = codec::parse(text).unwrap();
    let shape = Shape::new(&dims_of(text, elements)).unwrap();
    let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: codec.id() };
    let mut out = vec![0; 4 * elements];
    codec.decode(&meta, body, &mut out).unwrap();
    out.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

/// Parses Q and S of `uniform:Q` and `sort:Q+S`, or Q and T of `tile:Q/T`.
fn parameters(text: &str) -> (u32, u32) {
    let (name, argument) = text.split_once(':').unwrap();
    let (name, argument) = match name {
        // The sample size affects the table alone.
        "fast" => ("sort", argument.split('/').next().unwrap()),
        _ => (name, argument),
    };
    let number = |text: &str| text.parse::<u32>().unwrap();
    match (name, argument) {
        ("sort", "16") => (12, 4),
        ("sort", "12") => (9, 3),
        ("sort", "8") => (6, 2),
        ("sort", "4") => (3, 1),
        ("sort", _) => argument.split_once('+').map(|(q, s)| (number(q), number(s))).unwrap(),
        ("tile", _) => match argument.trim_end_matches('~').split_once('/') {
            Some((q, t)) => (number(q), number(t)),
            None => (number(argument.trim_end_matches('~')), 64),
        },
        _ => (number(argument), 0),
    }
}

/// The bits from `at` to `at + width` of the packed codes.
fn bits(packed: &[u8], at: usize, width: u32) -> u32 {
    (0..width as usize).map(|bit| u32::from(packed[(at + bit) / 8] >> ((at + bit) % 8) & 1) << bit).sum()
}

fn f16(bytes: &[u8]) -> f64 {
    let half = u16::from_le_bytes([bytes[0], bytes[1]]);
    let (sign, exponent) = (if half < 0x8000 { 1.0 } else { -1.0 }, i32::from(half >> 10 & 31));
    let fraction = f64::from(half & 0x3ff);
    sign * if exponent == 0 { fraction * 2f64.powi(-24) } else { (1024.0 + fraction) * 2f64.powi(exponent - 25) }
}

fn grids(text: &str, body: &[u8], elements: usize) -> Grids {
    let (q, second) = parameters(text);
    let f32_at = |at: usize| f64::from(f32::from_le_bytes(body[4 * at..4 * at + 4].try_into().unwrap()));
    if text.starts_with("tile") {
        let tiles = elements.div_ceil(second as usize);
        let scale = 2f64.powi(i32::from_le_bytes(body[..4].try_into().unwrap()));
        let packed = &body[4 + 4 * tiles..];
        let of = |at: usize| {
            let entry = &body[4 + 4 * (at / second as usize)..];
            (f16(&entry[..2]) * scale, f16(&entry[2..4]) * scale)
        };
        let codes = (0..elements).map(|at| bits(packed, at * q as usize, q));
        return Grids { of: (0..elements).map(of).collect(), codes: codes.collect() };
    }
    let runs = 1usize << second;
    let width = q + second;
    let packed = &body[8 * runs..];
    let symbols: Vec<u32> = (0..elements).map(|at| bits(packed, at * width as usize, width)).collect();
    Grids {
        of: symbols.iter().map(|symbol| (*symbol as usize) >> q).map(|run| (f32_at(run), f32_at(runs + run))).collect(),
        codes: symbols.iter().map(|symbol| symbol & ((1 << q) - 1)).collect(),
    }
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |max, value| f64::max(max, value.abs().into()))
}

const SMALLEST: f64 = 1.401298464324817e-45;

/// Checks one tensor in one codec; returns the decoded tensor.
fn check(text: &str, values: &[f32]) -> Vec<f32> {
    let codec = codec::parse(text).unwrap();
    let body = match encode(text, values) {
        Ok(body) => body,
        Err(CodecError::Overflow { .. }) if largest(values) >= 65520.0 => return values.to_vec(),
        // This many values do not form a matrix of the rank.
        Err(CodecError::Rank { rank, most, .. }) if rank > most => return values.to_vec(),
        Err(CodecError::Shape { got, .. }) if text.contains("svd:2") && got[0] == 1 => return values.to_vec(),
        Err(error) => panic!("{text}: {error}"),
    };
    let size = codec.encoded_bytes(DType::F32, &dims_of(text, values.len()));
    assert!(body.len() == size || codec.size_varies() && body.len() < size, "{text}");
    assert_eq!(encode(text, values).unwrap(), body, "{text} is deterministic");
    let decoded = decode(text, &body, values.len());
    match codec.id() {
        CodecId::Raw => assert_eq!(decoded, values),
        CodecId::F16 | CodecId::BF16 => {
            let (digits, least) = if text == "f16" { (-11, 2f64.powi(-25)) } else { (-8, SMALLEST * 32768.0) };
            for (&x, &y) in values.iter().zip(&decoded) {
                let [x, y] = [x, y].map(f64::from);
                assert!((y - x).abs() <= (x.abs() * 2f64.powi(digits)).max(least), "{text}: {x} became {y}");
            }
            assert_eq!(decode(text, &encode(text, &decoded).unwrap(), values.len()), decoded, "{text} again");
        }
        CodecId::PowerSvd => check_svd(text, values, &decoded),
        CodecId::TopK => check_top_k(text, values, &body, &decoded),
        CodecId::Feedback | CodecId::Delta => {
            // There is no state and no known sample yet, so only the inner codec has an effect.
            let inner = inner_of(text).unwrap();
            assert!(body.ends_with(&encode(inner, values).unwrap()), "{text}");
            assert_eq!(decoded, check(inner, values), "{text}");
        }
        CodecId::Zstd => assert_eq!(decoded, check(inner_of(text).unwrap(), values), "{text}"),
        _ => check_grids(text, values, &body, &decoded),
    }
    decoded
}

/// A projection is at most as far from the tensor as 0 is, and is its own projection.
fn check_svd(text: &str, values: &[f32], decoded: &[f32]) {
    let distance = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>().sqrt()
    };
    let norm = distance(values, &vec![0.0; values.len()]);
    let rounding = 1e-6 * norm + SMALLEST * values.len() as f64;
    assert!(distance(values, decoded) <= norm + rounding, "{text}");
    let again = decode(text, &encode(text, decoded).unwrap(), values.len());
    assert!(distance(decoded, &again) <= 4.0 * rounding, "{text} again: {}", distance(decoded, &again) / norm);
}

/// The largest values are exact, the others 0, and the positions take no more bits than the better of both encodings.
fn check_top_k(text: &str, values: &[f32], body: &[u8], decoded: &[f32]) {
    let (_, fraction) = text.split_once(':').unwrap();
    let digits = fraction.replace('.', "");
    let parts = digits.parse::<usize>().unwrap() * values.len();
    let most = parts.div_ceil(10usize.pow(digits.len() as u32 - 1));
    let mut order: Vec<usize> = (0..values.len()).filter(|&at| values[at] != 0.0).collect();
    // The sort is stable: among equal magnitudes the first comes first.
    order.sort_by(|&a, &b| values[b].abs().total_cmp(&values[a].abs()));
    order.truncate(most);
    let mut expected = vec![0f32; values.len()];
    order.iter().for_each(|&at| expected[at] = values[at]);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(decoded), bits(&expected), "{text}");

    order.sort();
    let gaps = (0..order.len()).map(|at| if at == 0 { order[0] } else { order[at] - order[at - 1] - 1 });
    let rice = |lower: usize| gaps.clone().map(|gap| (gap >> lower) + 1 + lower).sum::<usize>().div_ceil(8);
    let places = (0..50).map(rice).min().unwrap().min(values.len().div_ceil(8));
    assert_eq!(body.len(), 9 + 4 * order.len() + places, "{text}");
    assert_eq!(decode(text, &encode(text, decoded).unwrap(), values.len()), decoded, "{text} again");
}

fn check_grids(text: &str, values: &[f32], body: &[u8], decoded: &[f32]) {
    let grids = grids(text, body, values.len());
    let code_max = 2f64.powi(parameters(text).0 as i32) - 1.0;
    // The range of all bins: from the first to the last. (Other bins may be so wide that their rounded ends lie
    // beyond.)
    let first = grids.of.iter().copied().reduce(|a, b| if b < a { b } else { a }).unwrap_or_default();
    let last = grids.of.iter().copied().reduce(|a, b| if b > a { b } else { a }).unwrap_or_default();
    let (lowest, highest) = (first.0, last.0 + last.1 * code_max);
    for (at, (&x, &y)) in values.iter().zip(decoded).enumerate() {
        let (lo, step) = grids.of[at];
        let [x, y] = [x, y].map(f64::from);
        let rounding = lo.abs().max((lo + step * code_max).abs()) * 2f64.powi(-23) + SMALLEST;
        // Values outside the sample are clamped to its end, which the rounded step of the last bin may miss.
        let (x, rounding) = match text.starts_with("fast") {
            true => {
                (x.max(lowest).min(highest.max(lowest)), lowest.abs().max(highest.abs()) * 2f64.powi(-22) + SMALLEST)
            }
            false => (x, rounding),
        };
        // Stochastic rounding may choose the farther of two codes.
        let most = if text.ends_with('~') { step } else { step / 2.0 };
        assert!((y - x).abs() <= most + rounding, "{text}: {x} became {y}, farther than {most}");
        // The documented body decodes to the codec's result. The end of a tile's grid may overflow an `f32`.
        let described = ((lo + f64::from(grids.codes[at]) * step) as f32).clamp(f32::MIN, f32::MAX);
        assert_eq!(decoded[at].to_bits(), described.to_bits(), "{text}");
    }

    // Encoding the decoded values again adds no error beyond a few units in the last place of the largest value.
    let Ok(again) = encode(text, decoded) else {
        panic!("{text} does not take what it made");
    };
    let again = decode(text, &again, values.len());
    let rounding = largest(values) * 2f64.powi(-20);
    let tile = if text.starts_with("tile") { parameters(text).1 as usize } else { values.len().max(1) };
    for at in 0..values.len() {
        let (_, step) = grids.of[at];
        let in_tile = at / tile * tile..values.len().min((at / tile + 1) * tile);
        // Denormal steps are rounded coarsely, and so is a tile's `lo`: if no value has code 0, or if more than 8 bits
        // need more precision than a 16-bit step has, the second grid may differ. Stochastic rounding may also have
        // rounded the largest value down, so that the second grid ends there.
        let stochastic = text.ends_with('~');
        let other_grid = step < f64::from(f32::MIN_POSITIVE)
            || text.starts_with("tile") && (parameters(text).0 > 8 || !grids.codes[in_tile.clone()].contains(&0))
            || stochastic && !grids.codes[in_tile].contains(&(code_max as u32));
        let most = if stochastic { step } else { step / 2.0 };
        let more = if other_grid { most * 1.01 } else { 0.0 };
        let moved = (f64::from(again[at]) - f64::from(decoded[at])).abs();
        assert!(moved <= more + rounding, "{text}: {} became {} and then {}", values[at], decoded[at], again[at]);
    }
}

fn lossy() -> impl Iterator<Item = &'static str> {
    let examples = codec::ALL.iter().flat_map(|member| member.examples.iter().copied());
    examples.filter(|text| !codec::parse(text).unwrap().is_lossless())
}

/// The definition of `sort`: sort, split by rank, round within each bin.
fn sort_by_definition(values: &[f32], q: u32, s: u32) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let (shortest, longer) = (values.len() >> s, values.len() % (1 << s));
    let mut decoded = vec![0.0; values.len()];
    let mut rest = &order[..];
    for run in 0..1 << s {
        let (members, others) = rest.split_at(shortest + usize::from(run < longer));
        rest = others;
        let (Some(&first), Some(&last)) = (members.first(), members.last()) else { continue };
        let (lo, hi) = (f64::from(values[first]), f64::from(values[last]));
        let step = (hi - lo) / (2f64.powi(q as i32) - 1.0);
        for &at in members {
            let code = if step > 0.0 { ((f64::from(values[at]) - lo) / step).round_ties_even() } else { 0.0 };
            decoded[at] = lo + code * step;
        }
    }
    decoded
}

#[test]
fn awkward_tensors() {
    let ramp = |n: usize| (0..n).map(|i| i as f32 * 0.37 - 3.0).collect::<Vec<_>>();
    let tensors: Vec<Vec<f32>> = vec![
        vec![],
        vec![3.25],
        vec![-0.0],
        vec![0.0; 130],
        vec![2.5; 77],
        vec![-1e-3; 65],
        vec![-0.0, 0.0, -0.0, 1.0],
        (0..1001).map(|i| if i % 3 == 0 { -1.0 } else { 1.0 }).collect(),
        ramp(3),
        ramp(63),
        ramp(64),
        ramp(65),
        ramp(12_345),
        (0..100).map(|i| f32::from_bits(i * i)).collect(),
        (0..100).map(|i| if i % 2 == 0 { f32::from_bits(i) } else { i as f32 * 1e36 }).collect(),
        vec![f32::MIN_POSITIVE, -f32::MIN_POSITIVE, f32::from_bits(1), 0.0],
        (0..300).map(|i| 1e-8 * ((i * 37 % 101) as f32 - 50.0)).collect(),
        (0..300).map(|i| 1000.0 + 1e-3 * (i * 37 % 101) as f32).collect(),
    ];
    for text in lossy() {
        for values in &tensors {
            check(text, values);
        }
    }
}

#[test]
fn constants_and_zeros_come_back_exactly() {
    for text in lossy() {
        assert_eq!(check(text, &[0.0; 70]), [0.0; 70], "{text}");
        if text.contains("svd:") {
            // Sums of products, so not quite exactly.
            check(text, &[2.5; 70]).iter().for_each(|value| assert!((value - 2.5).abs() < 1e-6, "{text}: {value}"));
            continue;
        }
        // Among equal values, `topk` keeps the first ones.
        let kept =
            if text.contains("topk:0.") { check(text, &[2.5; 70]).iter().filter(|&&x| x != 0.0).count() } else { 70 };
        let expected: Vec<f32> = (0..70).map(|at| if at < kept { 2.5 } else { 0.0 }).collect();
        assert_eq!(check(text, &[2.5; 70]), expected, "{text}");
        // The zeros of a ReLU stay zero.
        let relu: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0).max(0.0)).collect();
        for (x, y) in relu.iter().zip(check(text, &relu)) {
            assert!(*x != 0.0 || y == 0.0, "{text}: 0 became {y}");
        }
    }
}

#[test]
fn the_largest_numbers_stay_finite_or_are_refused() {
    let values = [f32::MAX, f32::MIN, 0.0, 1.0, f32::MAX, f32::MAX];
    for text in lossy() {
        match encode(text, &values) {
            Ok(body) => assert!(decode(text, &body, values.len()).iter().all(|value| value.is_finite()), "{text}"),
            Err(error) => assert!(error.refuses_tensor(), "{text}: {error}"),
        }
    }
    assert!(encode("uniform:1", &values).is_err());
    assert!(encode("tile:1", &values).is_ok());
}

#[test]
fn sizes_are_those_of_the_formulas() {
    for (text, elements, size) in [
        ("f16", 25_088, 50_176),
        ("bf16", 3, 6),
        ("uniform:8", 25_088, 25_096),
        ("uniform:1", 9, 10),
        ("sort:16", 25_088, 50_304),
        ("sort:12", 35, 117),
        ("sort:6+2", 11, 43),
        ("sort:1+4", 1001, 754),
        ("tile:4", 64, 40),
        ("tile:4", 65, 45),
        ("tile:4/128", 1 << 20, (1 << 19) + (1 << 15) + 4),
        ("tile:3/10", 25, 26),
        ("tile:4", 0, 4),
        ("topk:0.1", 1000, 9 + 400 + 125),
        ("topk:0.1", 1001, 9 + 404 + 126),
        ("topk:1", 8, 9 + 32 + 1),
        ("topk:0.5", 0, 9),
    ] {
        assert_eq!(codec::parse(text).unwrap().encoded_bytes(DType::F32, &[elements]), size, "{text} {elements}");
    }
}

/// Large enough that nothing is sorted and values are looked up in a table.
#[test]
fn a_large_tensor_equals_the_definition() {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let values: Vec<f32> = (0..300_003).map(|_| (uniform() + uniform() + uniform() - 1.5).max(-0.2)).collect();
    for (text, q, s) in
        [("sort:16", 12, 4), ("sort:8", 6, 2), ("sort:4", 3, 1), ("sort:2+6", 2, 6), ("uniform:8", 8, 0)]
    {
        let decoded = check(text, &values);
        for ((&x, &y), expected) in values.iter().zip(&decoded).zip(sort_by_definition(&values, q, s)) {
            let [x, y] = [x, y].map(f64::from);
            let at_a_tie = ((y - x).abs() - (expected - x).abs()).abs() <= 1e-6;
            assert!((y - expected).abs() <= 1e-6 || at_a_tie, "{text}: {x} became {y}, not {expected}");
        }
    }
    for text in ["tile:4", "tile:3/100", "bf16"] {
        check(text, &values);
    }
}

fn values() -> impl Strategy<Value = Vec<f32>> {
    let tied = prop::sample::select(&[0.0f32, -0.0, 1.0, -2.5, 6.0][..]);
    let one = prop_oneof![3 => -1.0f32..1.0, 2 => tied, 1 => 4.99f32..5.01, 1 => -1e-8f32..1e-8];
    prop::collection::vec(one, 0..300)
}

fn any_finite() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(any::<f32>().prop_filter("finite", |value| value.is_finite() && value.abs() < 1e37), 0..100)
}

proptest! {
    #[test]
    fn the_error_is_half_a_step(values in values()) {
        for text in lossy() {
            check(text, &values);
        }
    }

    #[test]
    fn the_error_is_half_a_step_whatever_the_magnitudes(values in any_finite()) {
        for text in lossy() {
            check(text, &values);
        }
    }

    #[test]
    fn sort_equals_its_definition(values in values(), q in 1u32..=12, s in 0u32..=4) {
        let text = format!("sort:{q}+{s}");
        let decoded = decode(&text, &encode(&text, &values).unwrap(), values.len());
        let rounding = largest(&values) * 2f64.powi(-22);
        for ((&x, &y), expected) in values.iter().zip(&decoded).zip(sort_by_definition(&values, q, s)) {
            let [x, y] = [x, y].map(f64::from);
            let at_a_tie = ((y - x).abs() - (expected - x).abs()).abs() <= rounding;
            prop_assert!((y - expected).abs() <= rounding || at_a_tie, "{}: {} became {}, not {}", text, x, y, expected);
        }
    }
}

//! What every codec promises, run for each member of `codec::ALL`. A new codec joins that list and nothing here
//! changes; what only one codec promises is tested beside it.

use distgpipe_core::codec::{self, Codec, CodecId, Member, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use proptest::prelude::*;

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Every codec there is, with every set of parameters that its author names.
fn members() -> impl Iterator<Item = (Member, &'static str)> {
    codec::ALL.iter().flat_map(|member| member.examples.iter().map(|text| (*member, *text)))
}

fn make(text: &str) -> Box<dyn Codec> {
    codec::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn meta(codec: CodecId, dtype: DType, dims: &[usize]) -> TensorMeta {
    TensorMeta { dtype, layout: Layout::Contiguous, shape: Shape::new(dims).unwrap(), codec }
}

/// Whether a codec takes this type at all: one that is lossy has no business with labels and token ids.
fn takes(member: Member, dtype: DType) -> bool {
    member.lossless || FLOATS.contains(&dtype)
}

/// A tensor's memory: bytes out of `seed`, 0 or 1 for truth values.
fn memory(dtype: DType, dims: &[usize], seed: u64) -> Vec<u8> {
    let length = dims.iter().product::<usize>() * dtype.size_bytes();
    let mut state = seed | 1;
    let bytes = (0..length).map(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    });
    if dtype == DType::Bool {
        bytes.map(|byte| byte & 1).collect()
    } else {
        bytes.collect()
    }
}

fn encode(codec: &mut dyn Codec, dtype: DType, dims: &[usize], bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    codec.encode(TensorView { dtype, dims, bytes }, &mut out).unwrap();
    out
}

fn decode(codec: &mut dyn Codec, dtype: DType, dims: &[usize], body: &[u8]) -> Vec<u8> {
    let meta = meta(codec.id(), dtype, dims);
    let mut out = vec![0xcc; meta.decoded_bytes() as usize];
    codec.decode(&meta, body, &mut out).unwrap();
    out
}

#[test]
fn the_list_is_complete_and_parses() {
    for (member, text) in members() {
        assert_eq!(make(text).id(), member.id, "{text}");
        assert!(text.starts_with(member.name), "{text}");
    }
    for &id in CodecId::ALL {
        let members: Vec<_> = codec::ALL.iter().filter(|member| member.id == id).collect();
        assert_eq!(members.len(), 1, "{id} is listed once");
        assert!(!members[0].examples.is_empty(), "{id} is tested");
    }
    for text in ["", "RAW", " raw", "raw:1", "nothing"] {
        assert!(codec::parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn empty_and_one_element_come_back() {
    let shapes: [&[usize]; 6] = [&[], &[1], &[0], &[3, 0, 2], &[1, 1, 1, 1, 1, 1, 1, 1], &[5]];
    for (member, text) in members() {
        for &dtype in DType::ALL.iter().filter(|&&dtype| takes(member, dtype)) {
            for dims in shapes {
                let bytes = memory(dtype, dims, 3);
                let body = encode(&mut *make(text), dtype, dims, &bytes);
                let back = decode(&mut *make(text), dtype, dims, &body);
                assert_eq!(back.len(), bytes.len(), "{text} {dtype} {dims:?}");
                if member.lossless {
                    assert_eq!(back, bytes, "{text} {dtype} {dims:?}");
                }
            }
        }
    }
}

/// A NaN says that training has gone wrong; a codec may not hide it.
#[test]
fn nan_stays_nan() {
    let values = [1.0f32, f32::NAN, -3.0, f32::NAN, f32::INFINITY, -0.0];
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    for (_, text) in members() {
        let body = encode(&mut *make(text), DType::F32, &[6], &bytes);
        let back = decode(&mut *make(text), DType::F32, &[6], &body);
        let back: Vec<f32> = back.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect();
        assert!(back[1].is_nan() && back[3].is_nan(), "{text}: {back:?}");
    }
}

#[test]
fn encode_appends_and_leaves_out_alone_on_error() {
    for (_, text) in members() {
        let bytes = memory(DType::F32, &[2, 3], 1);
        let mut out = b"before".to_vec();
        for (dims, bytes) in [(&[2, 2][..], &bytes[..]), (&[2, 3], &bytes[1..]), (&[usize::MAX, 8], &[])] {
            let view = TensorView { dtype: DType::F32, dims, bytes };
            assert!(make(text).encode(view, &mut out).is_err(), "{text} {dims:?}");
            assert_eq!(out, b"before", "{text}");
        }
        let view = TensorView { dtype: DType::F32, dims: &[2, 3], bytes: &bytes };
        make(text).encode(view, &mut out).unwrap();
        assert_eq!(&out[..6], b"before", "{text}");
        assert_eq!(out[6..], encode(&mut *make(text), DType::F32, &[2, 3], &bytes), "{text}");
    }
}

#[test]
fn room_of_another_size_is_an_error() {
    for (_, text) in members() {
        let bytes = memory(DType::F32, &[4], 1);
        let mut codec = make(text);
        let body = encode(&mut *codec, DType::F32, &[4], &bytes);
        let meta = meta(codec.id(), DType::F32, &[4]);
        for length in [0, 15, 17] {
            assert!(codec.decode(&meta, &body, &mut vec![0; length]).is_err(), "{text} {length}");
        }
    }
}

#[test]
fn the_size_of_an_impossible_tensor_does_not_wrap() {
    for (_, text) in members() {
        let most = make(text).encoded_bytes(DType::F64, usize::MAX);
        assert!(most >= make(text).encoded_bytes(DType::F64, 1 << 40), "{text}");
    }
}

fn dims() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0usize..6, 0..=4)
}

proptest! {
    #[test]
    fn tensors_come_back(dims in dims(), seed in any::<u64>(), dtype in prop::sample::select(DType::ALL)) {
        for (member, text) in members().filter(|(member, _)| takes(*member, dtype)) {
            let bytes = memory(dtype, &dims, seed);
            let mut codec = make(text);
            let body = encode(&mut *codec, dtype, &dims, &bytes);
            let again = encode(&mut *make(text), dtype, &dims, &bytes);
            prop_assert_eq!(&body, &again, "{} is deterministic", text);

            let most = codec.encoded_bytes(dtype, dims.iter().product());
            prop_assert!(body.len() <= most, "{}: {} > {}", text, body.len(), most);
            let back = decode(&mut *make(text), dtype, &dims, &body);
            prop_assert_eq!(back.len(), bytes.len());
            if member.lossless {
                prop_assert_eq!(&back, &bytes, "{} is lossless", text);
            }
            if codec.is_identity(dtype) {
                prop_assert_eq!(body.len(), most);
                prop_assert_eq!(&body, &bytes, "{} is the identity", text);
            }
        }
    }

    /// A short body may be an error or a tensor, a wrong one too; neither may panic, and a codec that is the identity
    /// has nothing to leave out.
    #[test]
    fn hostile_bodies_never_panic(
        dims in dims(),
        noise in prop::collection::vec(any::<u8>(), 0..300),
        dtype in prop::sample::select(DType::ALL),
        cut in 0.0f64..1.0,
    ) {
        for (member, text) in members() {
            let mut codec = make(text);
            let meta = meta(codec.id(), dtype, &dims);
            let mut out = vec![0; meta.decoded_bytes() as usize];
            let _ = codec.decode(&meta, &noise, &mut out);
            if !takes(member, dtype) {
                continue;
            }
            let body = encode(&mut *make(text), dtype, &dims, &memory(dtype, &dims, 5));
            let short = &body[..(body.len() as f64 * cut) as usize];
            let result = make(text).decode(&meta, short, &mut out);
            if member.lossless && short.len() < body.len() {
                prop_assert!(result.is_err(), "{} from {} of {} bytes", text, short.len(), body.len());
            }
        }
    }

    #[test]
    fn parsing_a_name_never_panics(text in "\\PC{0,80}") {
        let _ = codec::parse(&text);
    }
}

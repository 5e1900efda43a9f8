use super::super::lru_cache::ENTRY_BYTES;
use super::super::parse as parse_any;
use super::*;
use crate::wire::Layout;
use proptest::prelude::*;

fn delta(inner: &str, bytes_max: usize) -> Delta {
    Delta::new(
        WrappedCodec::parse("delta", EXPECTED, Arguments { parameter: None, inner: Some(inner) }).unwrap(),
        bytes_max,
    )
}

fn pair(inner: &str) -> (Delta, Delta) {
    (delta(inner, 1 << 20), delta(inner, 1 << 20))
}

/// A tensor of rows that depend on the sample and a little on the time.
fn tensor(samples: &[u64], row: usize, time: u64) -> Vec<u8> {
    let value = |sample: u64, at: usize| {
        let base = (sample * 71 + at as u64 * 37) % 101;
        base as f32 / 25.0 - 2.0 + ((time * 13 + at as u64 * 7) % 11) as f32 * 0.01
    };
    let rows = samples.iter().flat_map(|&sample| (0..row).map(move |at| value(sample, at)));
    rows.flat_map(f32::to_ne_bytes).collect()
}

fn context(slot: u64, samples: &[u64]) -> CodecContext<'_> {
    CodecContext { slot, samples, ..CodecContext::default() }
}

fn encode(codec: &mut Delta, dims: &[usize], bytes: &[u8], context: CodecContext<'_>) -> Result<Vec<u8>, CodecError> {
    let mut body = Vec::new();
    let view = TensorView { dtype: DType::F32, dims, layout: Layout::Contiguous, bytes };
    codec.encode(view, &context, &mut body).map(|()| body)
}

fn decode(codec: &mut Delta, dims: &[usize], body: &[u8]) -> Result<Vec<u8>, CodecError> {
    let shape = Shape::new(dims).unwrap();
    let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::Delta };
    let mut out = vec![0; meta.decoded_bytes() as usize];
    codec.decode(&meta, body, &mut out).map(|()| out)
}

/// Everything that the decoding of the next body depends on.
#[derive(Debug, PartialEq)]
struct State {
    number: u64,
    chain: u64,
    oldest_first: Vec<(Key, Box<[u8]>)>,
}

fn state(memory: &Memory) -> State {
    let oldest_first = memory.rows.iter().map(|(key, row)| (*key, row.clone())).collect();
    State { number: memory.number, chain: memory.chain, oldest_first }
}

fn out_of_step(result: Result<Vec<u8>, CodecError>) -> bool {
    matches!(result, Err(CodecError::OutOfStep { .. }))
}

fn error(tensor: &[u8], decoded: &[u8]) -> f32 {
    floats(tensor).zip(floats(decoded)).fold(0.0, |max, (a, b)| max.max((a - b).abs()))
}

#[test]
fn the_first_visit_is_exact_and_a_sample_that_stays_comes_ever_closer() {
    let (mut encoder, mut decoder) = pair("tile:4");
    let (samples, dims) = ([5, 9], [2, 50]);
    let first = tensor(&samples, 50, 0);
    let body = encode(&mut encoder, &dims, &first, context(0, &samples)).unwrap();
    assert_eq!(decode(&mut decoder, &dims, &body).unwrap(), first);
    assert_eq!(body.len(), HEAD_BYTES + 16 + 1 + first.len());

    // Another tensor, four times: each error is at most a fifteenth of the one before.
    let second = tensor(&samples, 50, 3);
    let mut last = error(&first, &second);
    for visit in 0..4 {
        // Another order and another micro-batch: only the sample matters.
        let turned = [&second[200..], &second[..200]].concat();
        let body = encode(&mut encoder, &dims, &turned, context(visit << 16, &[9, 5])).unwrap();
        assert!(body.len() < first.len() / 4, "{} bytes", body.len());
        let now = error(&turned, &decode(&mut decoder, &dims, &body).unwrap());
        assert!(now <= last / 15.0 + 1e-6, "{now} after {last}");
        last = now;
    }
    assert!(last < 1e-6);
}

#[test]
fn a_lost_body_is_noticed_and_a_reset_makes_it_good() {
    let (mut encoder, mut decoder) = pair("uniform:8");
    let (samples, dims) = ([1, 2, 3], [3, 4]);
    let send =
        |encoder: &mut Delta, time| encode(encoder, &dims, &tensor(&samples, 4, time), context(0, &samples)).unwrap();
    for time in 0..3 {
        decode(&mut decoder, &dims, &send(&mut encoder, time)).unwrap();
    }
    let lost = send(&mut encoder, 3);
    let before = state(&decoder.received);
    let next = send(&mut encoder, 4);
    let error = decode(&mut decoder, &dims, &next).unwrap_err();
    assert!(error.to_string().starts_with("expected body 3 with check "), "{error}");
    assert!(error.to_string().contains(" encoder, got body 4 with check "), "{error}");
    assert!(!error.refuses_tensor());
    assert_eq!(state(&decoder.received), before);
    // The body is valid once and in time, but not twice.
    decode(&mut decoder, &dims, &lost).unwrap();
    assert!(out_of_step(decode(&mut decoder, &dims, &lost)));

    encoder.reset();
    let body = send(&mut encoder, 5);
    assert_eq!(decode(&mut decoder, &dims, &body).unwrap(), tensor(&samples, 4, 5));
    let body = send(&mut encoder, 6);
    decode(&mut decoder, &dims, &body).unwrap();
    assert_eq!(state(&decoder.received), state(&encoder.sent));
    // An old decoder understands a new encoder, but a new decoder does not understand an old encoder.
    let mut encoder = delta("uniform:8", 1 << 20);
    let body = send(&mut encoder, 7);
    assert_eq!(decode(&mut decoder, &dims, &body).unwrap(), tensor(&samples, 4, 7));
    let body = send(&mut encoder, 8);
    assert!(out_of_step(decode(&mut delta("uniform:8", 1 << 20), &dims, &body)));
    decode(&mut decoder, &dims, &body).unwrap();
}

/// The same number of bodies and rows with other content: only the check detects it.
#[test]
fn other_bases_of_the_same_number_are_noticed() {
    let samples = [1, 2];
    let (mut encoder, mut decoder) = pair("uniform:8");
    let (mut other, mut ignored) = pair("uniform:8");
    let send = |encoder: &mut Delta, decoder: &mut Delta, time| {
        let body = encode(encoder, &[2, 4], &tensor(&samples, 4, time), context(0, &samples)).unwrap();
        decode(decoder, &[2, 4], &body)
    };
    send(&mut encoder, &mut decoder, 0).unwrap();
    send(&mut other, &mut ignored, 1).unwrap();
    assert!(out_of_step(send(&mut other, &mut decoder, 2)));
    // The history differs even if no row is in use.
    let strangers = [7, 8];
    let body = |codec: &mut Delta| encode(codec, &[2, 4], &tensor(&strangers, 4, 0), context(0, &strangers)).unwrap();
    assert!(out_of_step(decode(&mut ignored, &[2, 4], &body(&mut encoder))));
}

#[test]
fn ends_of_different_sizes_are_noticed() {
    let (mut encoder, mut decoder) =
        (delta("uniform:8", 10 * (16 + ENTRY_BYTES)), delta("uniform:8", 4 * (16 + ENTRY_BYTES)));
    let samples: Vec<u64> = (0..6).collect();
    let mut send = |time| {
        let body = encode(&mut encoder, &[6, 4], &tensor(&samples, 4, time), context(0, &samples)).unwrap();
        decode(&mut decoder, &[6, 4], &body)
    };
    send(0).unwrap();
    assert!(out_of_step(send(1)));
}

#[test]
fn one_sample_in_two_rows_is_the_last_of_them() {
    let (mut encoder, mut decoder) = pair("uniform:16");
    for time in 0..3 {
        let samples = [4, 4, 6, 4];
        let mut bytes = tensor(&samples, 5, time);
        bytes[60..].copy_from_slice(&tensor(&[8], 5, time));
        let body = encode(&mut encoder, &[4, 5], &bytes, context(2, &samples)).unwrap();
        let back = decode(&mut decoder, &[4, 5], &body).unwrap();
        assert!(error(&bytes, &back) < 1e-3);
        assert_eq!(encoder.sent.base(&Key { sample: 4, tensor_index: 2 }, 20), Some(&back[60..]));
        assert_eq!(state(&decoder.received), state(&encoder.sent));
    }
}

#[test]
fn a_difference_that_overflows_goes_raw_and_leaves_no_trace() {
    let (mut encoder, mut decoder) = pair("bf16");
    let bytes = |values: [f32; 4]| values.map(f32::to_ne_bytes).concat();
    let body = encode(&mut encoder, &[2, 2], &bytes([1.0, 2.0, 3.0, -3e38]), context(0, &[1, 2])).unwrap();
    decode(&mut decoder, &[2, 2], &body).unwrap();
    let before = state(&encoder.sent);
    let refused = encode(&mut encoder, &[2, 2], &bytes([0.0, 0.0, 3.0, 3e38]), context(0, &[7, 2]));
    assert_eq!(refused, Err(CodecError::Overflow { codec: CodecId::Delta, at: 3 }));
    assert_eq!(state(&encoder.sent), before);
    let body = encode(&mut encoder, &[2, 2], &bytes([1.5, 2.0, 3.0, -2e38]), context(0, &[1, 2])).unwrap();
    decode(&mut decoder, &[2, 2], &body).unwrap();
}

#[test]
fn without_samples_nothing_is_kept() {
    let (mut encoder, mut decoder) = pair("tile:4");
    let alone = |dims: &[usize], bytes: &[u8]| {
        let mut body = vec![ALONE];
        let view = TensorView { dtype: DType::F32, dims, layout: Layout::Contiguous, bytes };
        parse_any("tile:4").unwrap().encode(view, &CodecContext::default(), &mut body).unwrap();
        body
    };
    let bytes = tensor(&[1, 2], 6, 0);
    for context in [context(0, &[]), context(0, &[1, 2, 3]), CodecContext { training: false, ..context(0, &[1, 2]) }] {
        let body = encode(&mut encoder, &[2, 6], &bytes, context).unwrap();
        assert_eq!(body, alone(&[2, 6], &bytes));
        decode(&mut decoder, &[2, 6], &body).unwrap();
    }
    for samples in [&[][..], &[1]] {
        let body = encode(&mut encoder, &[], &bytes[..4], context(0, samples)).unwrap();
        assert_eq!(body, alone(&[], &bytes[..4]));
    }
    let body = encode(&mut encoder, &[2, 0], &[], context(0, &[1, 2])).unwrap();
    assert_eq!(body, alone(&[2, 0], &[]));
    assert_eq!((encoder.sent.number, decoder.received.number), (0, 0));
}

#[test]
fn what_is_within_has_to_lose_something() {
    let told = |text: &str| parse_any(text).err().unwrap().to_string();
    for text in ["delta(raw)", "delta(delta(tile:4))", "delta(feedback(tile:4))", "feedback(delta(tile:4))"] {
        assert!(told(text).contains(" lossy codec that wraps no other, "), "{}", told(text));
    }
    for text in ["delta", "delta:64", "delta:0(tile:4)", "delta:1048577(tile:4)", "delta:x(tile:4)", "delta:(tile:4)"] {
        assert!(told(text).starts_with("expected delta(C) or delta:MIB(C) "), "{}", told(text));
    }
    assert!(parse_any("delta:1048576(tile:4)").is_ok());
}

/// What can happen between two ends.
#[derive(Clone, Debug)]
enum LinkEvent {
    Send { slot: u64, samples: Vec<u64>, row: usize },
    Lose { samples: Vec<u64> },
    Refuse { samples: Vec<u64> },
    Evaluate { samples: Vec<u64> },
    Unknown { rows: usize },
    Noise { at: usize, bit: u8 },
    Reset,
}

fn events() -> impl Strategy<Value = Vec<LinkEvent>> {
    let samples = || prop::collection::vec(0u64..8, 1..5);
    let slot = prop::sample::select(&[0u64, 1, 1 << 16, 1 << 16 | 1][..]);
    let one = prop_oneof![
        12 => (slot, samples(), 1usize..4).prop_map(|(slot, samples, row)| LinkEvent::Send { slot, samples, row: 3 * row.max(2) }),
        1 => samples().prop_map(|samples| LinkEvent::Lose { samples }),
        2 => samples().prop_map(|samples| LinkEvent::Refuse { samples }),
        2 => samples().prop_map(|samples| LinkEvent::Evaluate { samples }),
        1 => (1usize..5).prop_map(|rows| LinkEvent::Unknown { rows }),
        3 => (any::<usize>(), 0u8..8).prop_map(|(at, bit)| LinkEvent::Noise { at, bit }),
        1 => Just(LinkEvent::Reset),
    ];
    prop::collection::vec(one, 1..60)
}

/// Two ends, and whether they are known to be out of step.
struct LinkUnderTest {
    encoder: Delta,
    decoder: Delta,
    lost: bool,
    last: Option<(Vec<usize>, Vec<u8>)>,
}

impl LinkUnderTest {
    fn send(&mut self, time: u64, slot: u64, samples: &[u64], row: usize) {
        let dims = vec![samples.len(), row];
        let bytes = tensor(samples, row, time);
        let body = encode(&mut self.encoder, &dims, &bytes, context(slot, samples)).unwrap();
        let before = state(&self.decoder.received);
        let result = decode(&mut self.decoder, &dims, &body);
        if self.lost && self.encoder.sent.number > 1 {
            assert!(out_of_step(result));
            assert_eq!(state(&self.decoder.received), before);
            self.encoder.reset();
            return;
        }
        self.lost = false;
        // `decoded` still has the encoder's copy; the memory may be too small for it.
        assert_eq!(result.unwrap(), self.encoder.decoded);
        assert_eq!(state(&self.decoder.received), state(&self.encoder.sent));
        self.last = Some((dims, body));
    }

    /// Flips a bit in the last body: the result is an error or a tensor, and an error leaves the state unchanged.
    fn noise(&mut self, at: usize, bit: u8) {
        let Some((dims, mut body)) = self.last.clone() else { return };
        let at = at % body.len();
        body[at] ^= 1 << bit;
        let before = state(&self.decoder.received);
        match decode(&mut self.decoder, &dims, &body) {
            Ok(out) => {
                assert!(floats(&out).all(f32::is_finite));
                self.lost |= state(&self.decoder.received) != before;
            }
            Err(_) => assert_eq!(state(&self.decoder.received), before),
        }
    }

    fn stateless(&mut self, time: u64, samples: &[u64], context: CodecContext<'_>) {
        let states = (state(&self.encoder.sent), state(&self.decoder.received));
        let bytes = tensor(samples, 6, time);
        let body = encode(&mut self.encoder, &[samples.len(), 6], &bytes, context).unwrap();
        decode(&mut self.decoder, &[samples.len(), 6], &body).unwrap();
        assert_eq!((state(&self.encoder.sent), state(&self.decoder.received)), states);
    }

    fn apply(&mut self, time: u64, event: LinkEvent) {
        match event {
            LinkEvent::Send { slot, samples, row } => self.send(time, slot, &samples, row),
            LinkEvent::Lose { samples } => {
                let bytes = tensor(&samples, 6, time);
                encode(&mut self.encoder, &[samples.len(), 6], &bytes, context(0, &samples)).unwrap();
                self.lost = true;
            }
            LinkEvent::Refuse { samples } => {
                let before = state(&self.encoder.sent);
                let mut bytes = tensor(&samples, 6, time);
                bytes[8..12].copy_from_slice(&f32::INFINITY.to_ne_bytes());
                let refused = encode(&mut self.encoder, &[samples.len(), 6], &bytes, context(0, &samples));
                assert_eq!(refused, Err(CodecError::NotFinite { codec: CodecId::Delta, at: 2 }));
                assert_eq!(state(&self.encoder.sent), before);
            }
            LinkEvent::Evaluate { samples } => {
                self.stateless(time, &samples, CodecContext { training: false, ..context(0, &samples) });
            }
            LinkEvent::Unknown { rows } => self.stateless(time, &vec![0; rows], context(0, &[])),
            LinkEvent::Noise { at, bit } => self.noise(at, bit),
            LinkEvent::Reset => self.encoder.reset(),
        }
    }
}

proptest! {
    #[test]
    fn the_receiver_has_what_the_sender_thinks_it_has(
        events in events(),
        inner in prop::sample::select(&["tile:4", "uniform:3", "sort:8", "bf16", "topk:0.3", "svd:1"][..]),
        rows_kept in 1usize..20,
    ) {
        let bytes_max = rows_kept * (24 + ENTRY_BYTES);
        let (encoder, decoder) = (delta(inner, bytes_max), delta(inner, bytes_max));
        let mut link = LinkUnderTest { encoder, decoder, lost: false, last: None };
        for (time, event) in events.into_iter().enumerate() {
            link.apply(time as u64, event);
        }
    }
}

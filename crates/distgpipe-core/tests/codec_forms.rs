//! Codecs whose bodies other code may make and read say which form these have, and check a body as they do when they decode it.

use distgpipe_core::codec::{parse, BinEnds, BodyForm, CodecContext, CodecForm, TensorView, ALL};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use proptest::prelude::*;

#[test]
fn forms_have_the_parameters_of_the_text() {
    let bins = |code_bits, bin_bits, ends| BodyForm::Bins { code_bits, bin_bits, ends };
    for (text, body, feedback) in [
        ("uniform:11", bins(11, 0, BinEnds::Range), false),
        ("sort:8", bins(6, 2, BinEnds::Quantiles), false),
        ("feedback(sort:3+9)", bins(3, 9, BinEnds::Quantiles), true),
        ("fast:6+2/64", bins(6, 2, BinEnds::Sample(64)), false),
    ] {
        assert_eq!(parse(text).unwrap().form(), Some(CodecForm { body, feedback }), "{text}");
    }
    for text in ["raw", "topk:0.1", "svd:2", "delta(tile:4)", "zstd(tile:4)", "feedback(topk:0.1)"] {
        assert_eq!(parse(text).unwrap().form(), None, "{text}");
    }
}

proptest! {
    /// A body with some bytes replaced, or of another length, is refused by both or by neither, for the same reason.
    #[test]
    fn a_body_is_checked_as_if_it_were_decoded(
        length in 1usize..70,
        replaced in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(0x7f), Just(0xff)]), 0..8),
        cut in 0usize..2,
        dtype in prop_oneof![Just(DType::F32), Just(DType::BF16)],
    ) {
        let texts = ALL.iter().flat_map(|member| member.examples);
        for text in texts.filter(|text| parse(text).unwrap().form().is_some()) {
            let mut codec = parse(text).unwrap();
            let bytes: Vec<u8> = (0..length).flat_map(|at| ((at * 37 % 11) as f32 - 4.0).to_ne_bytes()).collect();
            let view = TensorView { dtype: DType::F32, dims: &[length], layout: Layout::Contiguous, bytes: &bytes };
            let mut body = Vec::new();
            codec.encode(view, &CodecContext::default(), &mut body).unwrap();
            for (at, byte) in &replaced {
                let at = at.index(body.len());
                body[at] = *byte;
            }
            body.truncate(body.len() - cut);
            let shape = Shape::new(&[length]).unwrap();
            let meta = TensorMeta { dtype, layout: Layout::Contiguous, shape, codec: codec.id() };
            let mut decoder = parse(text).unwrap();
            let checked = decoder.check(&meta, &body);
            let decoded = decoder.decode(&meta, &body, &mut vec![0; length * dtype.size_bytes()]);
            prop_assert_eq!(checked, decoded, "{}", text);
        }
    }
}

//! Law 1 between threads: gradients, parameters and buffers are those of one device, bit for bit.

#[path = "one_device/coded.rs"]
mod coded;
#[path = "one_device/matrix.rs"]
mod matrix;
#[path = "one_device/mod.rs"]
mod one_device;

use distgpipe::Workers;

#[test]
fn mobilenet_v2_is_transparent_between_threads() {
    matrix::check_model("mobilenet_v2", |_| Workers::Threads);
}

#[test]
fn unet_is_transparent_between_threads() {
    matrix::check_model("unet", |_| Workers::Threads);
}

#[test]
fn roberta_is_transparent_between_threads() {
    matrix::check_model("roberta", |_| Workers::Threads);
}

#[test]
fn amoebanet_d_is_transparent_between_threads() {
    matrix::check_model("amoebanet_d", |_| Workers::Threads);
}

#[test]
fn mobilenet_v2_in_bf16_is_transparent_between_threads() {
    matrix::check_model_in_bf16("mobilenet_v2", |_| Workers::Threads);
}

#[test]
fn unet_in_bf16_is_transparent_between_threads() {
    matrix::check_model_in_bf16("unet", |_| Workers::Threads);
}

#[test]
fn roberta_in_bf16_is_transparent_between_threads() {
    matrix::check_model_in_bf16("roberta", |_| Workers::Threads);
}

#[test]
fn amoebanet_d_in_bf16_is_transparent_between_threads() {
    matrix::check_model_in_bf16("amoebanet_d", |_| Workers::Threads);
}

#[test]
fn every_model_in_bf16_may_be_cut_after_any_layer() {
    matrix::check_every_cut_in_bf16(|_| Workers::Threads);
}

#[test]
fn every_model_may_be_cut_after_any_layer() {
    matrix::check_every_cut(|_| Workers::Threads);
}

#[test]
fn ten_steps_between_threads_have_the_losses_of_one_device() {
    matrix::check_ten_steps(|_| Workers::Threads);
}

#[test]
fn with_a_codec_a_pipeline_is_one_device_that_rounds_at_the_cuts() {
    coded::check_rounding(|| Workers::Threads);
}

/// A codec that remembers must not remember what nobody learns from.
#[test]
fn evaluating_in_between_changes_nothing_whatever_the_codec() {
    for text in distgpipe_core::codec::ALL.iter().map(|member| member.examples[0]) {
        let learned = |evaluate| coded::learned(coded::codecs(text, text), Workers::Threads, evaluate);
        one_device::assert_identical(text, &learned(true), &learned(false));
    }
}

#[test]
fn evaluating_in_between_changes_nothing_in_bf16_either() {
    for text in distgpipe_core::codec::ALL.iter().map(|member| member.examples[0]) {
        let learned = |evaluate| coded::learned_in_bf16(coded::codecs(text, text), Workers::Threads, evaluate);
        one_device::assert_identical(text, &learned(true), &learned(false));
    }
}

/// A skip from the first to the last of three workers does not pass through the one between.
#[test]
fn a_skip_goes_straight_to_where_it_is_popped() {
    use distgpipe_core::WorkerId;
    let subject = one_device::subjects().into_iter().find(|s| s.name == "unet").unwrap();
    let mut pipeline = distgpipe::Pipeline::builder(subject.model.clone())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .place("a,b,c")
        .micro_batches(2)
        .loss(subject.loss)
        .build()
        .unwrap();
    let outcome = pipeline.train_step(&subject.batch(4, 1)).unwrap();
    one_device::soundness::assert_sound("a step of unet", &[outcome.loss], &pipeline.state().unwrap());
    let (a, c) = (WorkerId(0), WorkerId(2));
    assert!(pipeline.plan().messages(a, c) > 0 && pipeline.plan().messages(c, a) > 0, "{}", pipeline.plan());
    let carried = |from: &str, to: &str| {
        let links = outcome.links();
        links.iter().find(|(f, t, _)| f == from && t == to).map_or(0, |(_, _, traffic)| traffic.payload_bytes)
    };
    // 4 rows of [4, 10, 10] floats: the outermost skip, and its gradient on the way back.
    let skip = 4 * 4 * 10 * 10 * 4;
    assert_eq!((carried("a", "c"), carried("c", "a")), (skip, skip));
    // The same cut without the skip: what the neighbours exchange is the activation alone.
    let summary = subject.model.summary().unwrap();
    let cut = pipeline.balance().sizes()[0];
    let activation: u64 = summary[cut - 1].output.iter().map(|s| 4 * s.bytes()).sum();
    assert_eq!((carried("a", "b"), carried("b", "a")), (activation, activation));
}

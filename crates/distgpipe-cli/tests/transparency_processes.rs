//! Law 1 between processes over TCP: gradients, parameters and buffers are those of one device, bit for bit.

#[path = "../../distgpipe/tests/one_device/coded.rs"]
mod coded;
#[path = "../../distgpipe/tests/one_device/matrix.rs"]
mod matrix;
#[path = "../../distgpipe/tests/one_device/mod.rs"]
mod one_device;
#[path = "../../distgpipe/tests/one_device/replicas.rs"]
mod replicas;
mod servers;

use distgpipe::Workers;
use servers::Servers;

#[test]
fn mobilenet_v2_is_transparent_between_processes() {
    let servers = Servers::start(3);
    matrix::check_model("mobilenet_v2", |workers| servers.first(workers - 1));
}

#[test]
fn unet_is_transparent_between_processes() {
    let servers = Servers::start(3);
    matrix::check_model("unet", |workers| servers.first(workers - 1));
}

#[test]
fn roberta_is_transparent_between_processes() {
    let servers = Servers::start(3);
    matrix::check_model("roberta", |workers| servers.first(workers - 1));
}

#[test]
fn amoebanet_d_is_transparent_between_processes() {
    let servers = Servers::start(3);
    matrix::check_model("amoebanet_d", |workers| servers.first(workers - 1));
}

#[test]
fn every_model_may_be_cut_after_any_layer_between_processes() {
    let servers = Servers::start(1);
    matrix::check_every_cut(|_| servers.first(1));
}

#[test]
fn mobilenet_v2_in_bf16_is_transparent_between_processes() {
    let servers = Servers::start(2);
    matrix::check_model_in_bf16("mobilenet_v2", |workers| servers.first(workers - 1));
}

#[test]
fn roberta_in_bf16_is_transparent_between_processes() {
    let servers = Servers::start(2);
    matrix::check_model_in_bf16("roberta", |workers| servers.first(workers - 1));
}

#[test]
fn every_model_in_bf16_may_be_cut_after_any_layer_between_processes() {
    let servers = Servers::start(1);
    matrix::check_every_cut_in_bf16(|_| servers.first(1));
}

#[test]
fn ten_steps_between_processes_have_the_losses_of_one_device() {
    let servers = Servers::start(1);
    matrix::check_ten_steps(|_| -> Workers { servers.first(1) });
}

#[test]
fn two_replicas_in_processes_are_two_devices_that_add_up_their_gradients() {
    let servers = Servers::start(3);
    replicas::check_two(one_device::subjects(), |workers| servers.first(workers - 1));
}

/// A ring of three has a direction, and a way round through the driver's process.
#[test]
fn three_replicas_train_identically_in_processes_and_threads() {
    let servers = Servers::start(5);
    replicas::check_three(one_device::subjects(), || servers.first(5));
}

#[test]
fn with_a_codec_processes_are_one_device_that_rounds_at_the_cuts() {
    let servers = Servers::start(1);
    coded::check_rounding(|| servers.first(1));
}

/// Both ends of a link keep what a codec remembers, and stay in step.
#[test]
fn every_codec_trains_identically_in_processes_and_threads() {
    let servers = Servers::start(1);
    for text in distgpipe_core::codec::ALL.iter().map(|member| member.examples[0]) {
        let learned = |workers| coded::learned(coded::codecs(text, text), workers, false);
        one_device::assert_identical(text, &learned(servers.first(1)), &learned(Workers::Threads));
        let learned = |workers| coded::learned_in_bf16(coded::codecs(text, text), workers, false);
        one_device::assert_identical(text, &learned(servers.first(1)), &learned(Workers::Threads));
    }
}

//! Law 1 between threads: gradients, parameters and buffers are those of one device, bit for bit.

#[path = "one_device/mod.rs"]
mod one_device;
#[path = "one_device/matrix.rs"]
mod matrix;

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
fn transformer_is_transparent_between_threads() {
    matrix::check_model("transformer", |_| Workers::Threads);
}

#[test]
fn ten_steps_between_threads_have_the_losses_of_one_device() {
    matrix::check_ten_steps(|_| Workers::Threads);
}

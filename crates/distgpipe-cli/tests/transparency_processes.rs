//! Law 1 between processes over TCP: gradients, parameters and buffers are those of one device, bit for bit.

#[path = "../../distgpipe/tests/one_device/matrix.rs"]
mod matrix;
#[path = "../../distgpipe/tests/one_device/mod.rs"]
mod one_device;
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
fn transformer_is_transparent_between_processes() {
    let servers = Servers::start(3);
    matrix::check_model("transformer", |workers| servers.first(workers - 1));
}

#[test]
fn ten_steps_between_processes_have_the_losses_of_one_device() {
    let servers = Servers::start(1);
    matrix::check_ten_steps(|_| -> Workers { servers.first(1) });
}

//! What a run reports about its links: how fast they deliver, and what their receivers wait for.

mod relay;
mod soundness;

use distgpipe::comm::handshake::Token;
use distgpipe::comm::notice::Notice;
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{Batch, Pipeline, ServeOptions, Server, StepLink, Workers};
use relay::relay;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc;

const RATE: f64 = 5e6;

/// A worker on a thread of this process that serves one run.
fn server(token: Token) -> SocketAddr {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let server = Server::bind(ServeOptions { once: true, ..ServeOptions::new(listen, token) }).expect("a port");
    let address = server.address().expect("an address");
    std::thread::spawn(move || server.run(|| false, |_| {}));
    address
}

/// The links of the last of a few steps of a pipeline with hidden layers of this width, across a slow link.
fn steps(width: i64, rows: i64) -> Vec<StepLink> {
    let token = Token([7; 32]);
    let address = relay(server(token), RATE).to_string();
    let model = Mlp { hidden: vec![width], dropout: 0.0, ..Mlp::default() }.model().expect("a model");
    let mut pipeline = Pipeline::builder(model)
        .device(distgpipe::Device::Cpu)
        .threads(1)
        .balance([1, 1])
        .place("client,server")
        .micro_batches(2)
        .learning_rate(1e-4)
        .workers(Workers::Remote { addresses: vec![address], token })
        .build()
        .expect("a pipeline");
    let x = Tensor::ones([rows, 1, 8, 8], (Kind::Float, Device::Cpu));
    let batch = Batch::new(x, Tensor::zeros([rows], (Kind::Int64, Device::Cpu)));
    let first = pipeline.train_step(&batch).expect("a step");
    let last = pipeline.train_step(&batch).expect("a step");
    assert!(last.loss < first.loss, "the one batch is learned: {} and {}", first.loss, last.loss);
    soundness::assert_losses_sound("two steps", &[first.loss, last.loss]);
    last.step_links
}

/// The table once showed the speed of `write`, which ends in the socket's buffer: 500 MB/s on a link of 6.25 MB/s.
#[test]
fn the_rate_of_a_slow_link_is_reported_as_it_is_delivered() {
    // 1.3 s in each direction, so that a tenth of a second in which the machine is busy elsewhere does not matter. A machine that
    // is busy for longer slows the link down; once in a few tries it does not.
    let mut tries = (0..5).map(|_| steps(16_384, 96));
    let undisturbed = |links: &Vec<StepLink>| {
        let waited = links[0].waited;
        // The server has next to nothing to compute. The client waits for the server too, which waits for what the client has sent.
        waited.link_s > 2.0 * (waited.encoding_s + waited.worker_s)
            && links.iter().all(|link| link.delivered_bytes_per_s.is_none_or(|rate| (rate / RATE - 1.0).abs() < 0.15))
    };
    let links = match tries.find(undisturbed) {
        Some(links) => links,
        None => panic!("no rate near {RATE}, or no wait for the link; the last try: {:?}", steps(16_384, 96)),
    };
    // Each direction carries 96 rows of 16,384 values, as activations or as gradients.
    for link in &links {
        assert!(link.delivered_bytes_per_s.is_some(), "{link:?}");
        let tensors = 96 * 16_384 * 4;
        assert!(link.training_bytes > tensors && link.training_bytes < tensors + 10_000, "{link:?}");
        assert!(link.waited.link_s > 0.1, "{link:?}");
    }
    assert_eq!(links.iter().map(|link| &link.from[..]).collect::<Vec<_>>(), ["client", "server"]);
}

/// What never fills the link says nothing about it.
#[test]
fn small_messages_have_no_rate() {
    for link in steps(16, 8) {
        assert_eq!(link.delivered_bytes_per_s, None, "{link:?}");
        assert!(link.training_bytes > 8 * 16 * 4, "{link:?}");
    }
}

/// It once took 20 s without a word, and the error named no option.
#[test]
fn a_worker_that_does_not_answer_is_reported_before_the_run_fails() {
    // The system accepts connections, and nobody answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address").to_string();
    let (sender, notices) = mpsc::channel();
    let timeouts = Timeouts { connect_s: 2.0, ..Timeouts::default() };
    let failed = Pipeline::builder(Mlp::default().model().expect("a model"))
        .device(distgpipe::Device::Cpu)
        .threads(1)
        .place("client,server")
        .timeouts(timeouts)
        .workers(Workers::Remote { addresses: vec![address], token: Token([7; 32]) })
        .on_notice(move |notice| drop(sender.send(notice.clone())))
        .build();
    let Err(failed) = failed else { panic!("nobody has answered") };
    let said = failed.to_string();
    assert!(
        said.contains("server failed while joining the run: no answer within 2.0 s (`Timeouts::connect_s`)"),
        "{said}"
    );
    let joining = |notice: &Notice| matches!(notice, Notice::NotJoined { worker, .. } if worker == "server");
    assert_eq!(notices.iter().filter(joining).count(), 1);
}

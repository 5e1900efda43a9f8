//! A worker that has the token and wants to hurt the driver's process.

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::handshake::{self, Token};
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::comm::transport::byte_stream::ByteStream;
use distgpipe::comm::transport::limits;
use distgpipe::comm::watchdog::CLAIMED_STALLS_MAX;
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Device, Kind as ElementKind, Tensor};
use distgpipe::{Batch, Pipeline, Workers};
use distgpipe_core::codec::{CodecId, CodecSpec};
use distgpipe_core::wire::{DType, Header, Kind, Layout, Shape, TensorMeta};
use std::io::Write;
use std::net::TcpListener;
use std::time::{Duration, Instant};

const TOKEN: Token = Token([7; 32]);

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// What a fake worker sends once the driver has sent its job.
struct Sending {
    stream: ByteStream,
    sequence: u64,
}

impl Sending {
    /// Sends a frame; false once the driver has closed the connection.
    fn frame(&mut self, header: Header, body: &[u8]) -> bool {
        self.sequence += 1;
        let mut header = Header { sequence: self.sequence, ..header };
        header.seal(body);
        self.bytes(&header, body)
    }

    fn bytes(&mut self, header: &Header, body: &[u8]) -> bool {
        self.stream.write_all(&header.encode()).and_then(|()| self.stream.write_all(body)).is_ok()
    }

    /// Says that the worker is ready, and waits for the command of the first step. The driver admits the tensors of a step from then on.
    fn take_step(&mut self) {
        assert!(self.frame(ready(), &[]));
        while handshake::receive(&mut self.stream, &[Kind::Command, Kind::Ping], LIMIT).expect("a step").header.kind
            != Kind::Command
        {}
    }

    /// A heartbeat with this status.
    fn ping(&mut self, status: &str) -> bool {
        let mut header = Header::new(Kind::Ping);
        header.seal(status.as_bytes());
        self.bytes(&header, status.as_bytes())
    }

    /// Heartbeats with these statuses, until the driver closes the connection.
    fn pings(&mut self, status: impl Fn(u64) -> String) {
        let start = Instant::now();
        for progress in 1.. {
            if !self.ping(&status(progress)) || start.elapsed() > 2 * LIMIT {
                return;
            }
            std::thread::sleep(Duration::from_millis(400));
        }
    }
}

/// What a machine with other work may add to the duration of a test.
const BUSY_MACHINE: Duration = Duration::from_secs(15);

/// A worker that welcomes its driver, takes the job, and then does this. Returns where it listens.
fn fake_worker(then: impl FnOnce(&mut Sending) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        let mut stream: ByteStream = listener.accept().expect("the driver").0.into();
        // Nobody listens any more: a driver that loses the connection finds that the worker is gone.
        drop(listener);
        stream.set_up().expect("a socket");
        handshake::receive(&mut stream, &[Kind::Hello], LIMIT).expect("a hello");
        handshake::welcome(&mut stream, 1, LIMIT).expect("the driver reads");
        handshake::receive(&mut stream, &[Kind::Job], LIMIT).expect("a job");
        then(&mut Sending { stream, sequence: 0 });
    });
    address
}

/// Why a run with this worker as its server fails.
fn failure(address: String, codec: &str, timeouts: Timeouts) -> String {
    let codec: CodecSpec = codec.parse().expect("a codec");
    let built = Pipeline::builder(Mlp::default().model().expect("a model"))
        .balance([1, 2, 1])
        .place("client,server,client")
        .micro_batches(16)
        .device(distgpipe::Device::Cpu)
        .threads(1)
        .codecs(CodecPolicy { forward: codec.clone(), backward: codec, ..CodecPolicy::default() })
        .timeouts(timeouts)
        .workers(Workers::Remote { addresses: vec![address], token: TOKEN })
        .build();
    let mut pipeline = match built {
        Ok(pipeline) => pipeline,
        Err(failed) => return failed.to_string(),
    };
    let x = Tensor::zeros([16, 1, 8, 8], (ElementKind::Float, Device::Cpu));
    let batch = Batch::new(x, Tensor::zeros([16], (ElementKind::Int64, Device::Cpu)));
    pipeline.train_step(&batch).expect_err("the server is none").to_string()
}

const PATIENT: Timeouts = Timeouts { stall_s: 60.0, silence_s: 60.0, connect_s: 60.0, reconnect_s: 60.0 };

fn ready() -> Header {
    Header { from: 1, ..Header::new(Kind::Ready) }
}

fn tensor(kind: Kind, values: u64, codec: CodecId) -> Header {
    let shape = Shape::new(&[values as usize]).expect("a shape");
    let (from, to) = if kind == Kind::Activation { (1, 2) } else { (1, 0) };
    let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec };
    Header { from, to, tensor: Some(meta), ..Header::new(kind) }
}

/// The largest resident memory that this process has had, in MB.
fn peak_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("a peak");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number") / 1000
}

/// A header of 136 bytes once made the driver allocate and clear 2 GiB, or abort where it could not have them. Nine bytes of `topk` are
/// a tensor of any size, and once took as much memory as the host had free. Each micro-batch has one row of 128 values.
#[test]
fn a_tensor_that_is_larger_than_the_models_takes_no_memory_of_the_driver() {
    let nothing_kept = [1, 0, 0, 0, 0, 0, 0, 0, 0];
    for (codec, id, body_bytes, body) in [
        ("bf16", CodecId::BF16, 1 << 28, &[0; 1 << 20][..]),
        ("zstd(raw)", CodecId::Zstd, 1 << 29, &[0; 1 << 20]),
        ("topk:0.1", CodecId::TopK, 9, &nothing_kept),
    ] {
        let before = peak_mb();
        let body = body.to_vec();
        let address = fake_worker(move |sending| {
            sending.take_step();
            let announced = Header { sequence: 2, body_bytes, ..tensor(Kind::Activation, 1 << 27, id) };
            announced.check(&limits()).expect("a frame that the limits allow");
            if body.len() as u64 == body_bytes {
                sending.frame(announced, &body);
            } else {
                sending.bytes(&announced, &body);
            }
            // The driver ends the connection.
            while handshake::receive(&mut sending.stream, &[Kind::Command, Kind::Ping], LIMIT).is_ok() {}
        });
        let said = failure(address, codec, PATIENT);
        let grown = peak_mb().saturating_sub(before);
        assert!(said.contains("expected a tensor of at most 128 values in 2F0<1"), "{codec}: {said}");
        assert!(said.contains("got one of 134217728 values"), "{codec}: {said}");
        // Another test of this process holds up to 100 MB meanwhile.
        assert!(grown < 400, "{codec}: {grown} MB for a tensor of 537 MB");
    }
}

/// Messages of any step, commands of any number and tensors that nobody has asked for once piled up as long as the memory lasted.
#[test]
fn a_worker_that_floods_the_driver_is_cut_off() {
    let before = peak_mb();
    type Message = fn(u32) -> Header;
    // Of steps that are still to come: the driver does not take them.
    let activation: Message = |n| Header { step: u64::from(1000 + n), ..tensor(Kind::Activation, 128, CodecId::Raw) };
    let report: Message = |n| Header { step: n.into(), from: 1, ..Header::new(Kind::Report) };
    let state: Message = |n| Header { micro_batch: n, ..tensor(Kind::State, 1 << 14, CodecId::Raw) };
    let small: Message = |n| Header { micro_batch: n, ..tensor(Kind::State, 1, CodecId::Raw) };
    for (message, expected) in [
        (activation, "messages of at most 2 steps that wait"),
        (report, "messages of at most 2 commands that wait"),
        (state, "at most 67108864 bytes without acknowledgement"),
        (small, "at most 16384 tensors of a state transfer that wait"),
    ] {
        let address = fake_worker(move |sending| {
            let body = vec![0; 4 << 16];
            // No step begins that would use any of this: the worker never says that it is ready. Activations are admitted in a step
            // alone, which never ends.
            if message(0).kind == Kind::Activation {
                sending.take_step();
            }
            // Far more than any limit allows.
            (0..100_000).all(|n| {
                let header = message(n);
                let bytes = header.tensor.map_or(0, |meta| meta.decoded_bytes()) as usize;
                sending.frame(header, &body[..bytes])
            });
        });
        let said = failure(address, "raw", PATIENT);
        assert!(said.contains(expected), "{said}");
    }
    let grown = peak_mb().saturating_sub(before);
    assert!(grown < 1000, "{grown} MB");
}

/// A worker that only reported progress, a little before each time-out, once held the driver for hours: as many times as its plan has
/// actions.
#[test]
fn a_worker_that_only_reports_progress_holds_the_driver_for_a_few_time_outs() {
    let address = fake_worker(|sending| sending.pings(|progress| format!("{progress} 0 busy")));
    let start = Instant::now();
    // Believed for as long as its plan has changes, it would go on for minutes.
    let said = failure(address, "raw", Timeouts { stall_s: 1.0, ..PATIENT });
    let held = start.elapsed();
    assert!(said.contains("server") && said.contains("made no progress for 1.0 s"), "{said}");
    assert!(held < BUSY_MACHINE + Duration::from_secs(1) * (CLAIMED_STALLS_MAX + 1), "{held:?}: {said}");
}

/// A link between two workers may take as long to be restored as any other, and a worker that always reconnects gets that time once.
#[test]
fn a_worker_that_always_reconnects_holds_the_driver_for_one_reconnection_more() {
    let address = fake_worker(|sending| sending.pings(|_| "1 0 busy reconnecting 0".to_owned()));
    let start = Instant::now();
    let timeouts = Timeouts { stall_s: 0.5, reconnect_s: 4.0, ..PATIENT };
    let said = failure(address, "raw", timeouts);
    let held = start.elapsed();
    assert!(said.contains("server failed while reconnecting to client: made no progress for 0.5 s"), "{said}");
    assert!(held > timeouts.reconnect(), "{held:?}: {said}");
    assert!(
        held < BUSY_MACHINE + timeouts.reconnect() + timeouts.stall() * (CLAIMED_STALLS_MAX + 1),
        "{held:?}: {said}"
    );
}

//! Large tensors over the MPI transport between ranks 0 and 1, from one stage's queue to the other's mailbox: encoding, checksums and
//! decoding are part of it. Prints one line of JSON for each size and pattern, which are those of `bench/mpi_messages.c`; `bench/mpi.py`
//! runs both. Each tensor that arrives has memory of its own, so there is one kind of window.

use distgpipe::comm::abort::AbortFlag;
use distgpipe::comm::link_codecs::LinkCodecs;
use distgpipe::comm::mailbox::Demand;
use distgpipe::comm::message::{Message, Tag};
use distgpipe::comm::notice::Notify;
use distgpipe::comm::protocol::Job;
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::comm::traffic::Counters;
use distgpipe::comm::transport::mpi::MpiLinks;
use distgpipe::comm::transport::{LinkOptions, Outgoing};
use distgpipe::engine::mpi::start_mpi;
use distgpipe::engine::Meter;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe_core::schedule::{Request, Schedule};
use distgpipe_core::wire::Kind as Frame;
use serde_json::json;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SIZES_MIB: [usize; 4] = [1, 4, 16, 64];
const WARM_UP: usize = 3;
const ROUND_TRIPS: usize = 20;
const WINDOW_MAX: usize = 64;
const WINDOW_MIB: usize = 256;
/// What each size carries in windows, after a first one.
const TOTAL_MIB: usize = 2048;

fn main() {
    if !distgpipe::engine::is_one_of_several_ranks() {
        // As `cargo test --benches` runs it.
        return println!("run it with mpirun -n 4; bench/mpi.py does");
    }
    distgpipe::tune_allocator();
    distgpipe::engine::start();
    let mpi = start_mpi().expect("MPI");
    let rank = mpi.rank();
    if rank < 2 {
        play(mpi, rank);
    }
    // The ranks that are not measured must not compete for the cores, and none may end before the others.
    let tag = 3;
    for other in (0..mpi.size()).filter(|&other| other != rank) {
        mpi.post(other, tag, Vec::new()).expect("a message");
    }
    for other in (0..mpi.size()).filter(|&other| other != rank) {
        while mpi.next(Some(other), tag).expect("MPI").map(|message| message.take().expect("a message")).is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    while !mpi.all_posted() {
        std::thread::sleep(Duration::from_millis(1));
    }
    mpi.end();
}

/// One of the two ends.
struct End {
    rank: usize,
    outgoing: Box<dyn Outgoing>,
    arrivals: mpsc::Receiver<Message>,
    sent: u64,
}

impl End {
    fn send(&mut self, tensor: Tensor) {
        let tag = Tag { kind: Frame::Activation, step: self.sent, micro_batch: 0, from: 0, to: 1 };
        self.sent += 1;
        self.outgoing.send(Message::tensors(tag, vec![Some(tensor)])).expect("a link");
    }

    fn receive(&self) -> Tensor {
        self.arrivals.recv().expect("a message").tensors.remove(0).expect("a tensor")
    }

    /// The bytes per second of one message there, and one back.
    fn ping_pong(&mut self, bytes: usize) -> f64 {
        let mut tensor = tensor_of(bytes);
        let mut start = Instant::now();
        for round in 0..WARM_UP + ROUND_TRIPS {
            if round == WARM_UP {
                start = Instant::now();
            }
            if self.rank == 0 {
                self.send(tensor);
                tensor = self.receive();
            } else {
                let received = self.receive();
                self.send(received);
                tensor = Tensor::new();
            }
        }
        (2 * ROUND_TRIPS * bytes) as f64 / start.elapsed().as_secs_f64()
    }

    /// The bytes per second of windows of messages, each of which is answered when all of it has arrived.
    fn window(&mut self, bytes: usize, messages: usize, rounds: usize) -> f64 {
        let tensor = tensor_of(bytes);
        let mut start = Instant::now();
        for round in 0..1 + rounds {
            if round == 1 {
                start = Instant::now();
            }
            if self.rank == 0 {
                (0..messages).for_each(|_| self.send(tensor.shallow_clone()));
                drop(self.receive());
            } else {
                (0..messages).for_each(|_| drop(self.receive()));
                self.send(tensor_of(4));
            }
        }
        (rounds * messages * bytes) as f64 / start.elapsed().as_secs_f64()
    }
}

fn tensor_of(bytes: usize) -> Tensor {
    Tensor::ones([i64::try_from(bytes / 4).expect("a size")], (Kind::Float, Device::Cpu))
}

fn play(mpi: &'static distgpipe::engine::mpi::Mpi, rank: usize) {
    let (arrived, arrivals) = mpsc::channel();
    let links = MpiLinks::start(mpi, 1, vec![(1 - rank, link(rank, arrived))], Demand::always()).expect("links");
    let (outgoing, _) = links.outgoing(1 - rank).expect("a link");
    let mut end = End { rank, outgoing: Box::new(outgoing), arrivals, sent: 0 };
    for mib in SIZES_MIB {
        let (bytes, messages) = (mib << 20, WINDOW_MAX.min(WINDOW_MIB / mib));
        let rates = [
            ("ping-pong", end.ping_pong(bytes)),
            ("window", end.window(bytes, messages, TOTAL_MIB / (messages * mib))),
        ];
        for (pattern, bytes_per_s) in rates.into_iter().filter(|_| rank == 0) {
            println!("{}", json!({ "mib": mib, "pattern": pattern, "bytes_per_s": bytes_per_s }));
        }
    }
    drop(end);
    links.close(Duration::from_secs(5));
}

/// An end of a link that admits everything.
fn link(rank: usize, arrived: mpsc::Sender<Message>) -> LinkOptions {
    let plan = Schedule::GPipe.plan(&Request::new("a,b".parse().expect("a placement"), 1)).expect("a plan");
    let job: Job = serde_json::from_value(json!({
        "worker": rank, "recipe": null, "balance": [1, 1], "plan": plan.to_string(), "replicas": 1, "seed": 0,
        "optim": distgpipe::Optim::sgd(0.0), "loss": distgpipe::Loss::CrossEntropy,
        "codecs": distgpipe::CodecPolicy::default(), "devices": distgpipe::Devices::from(distgpipe::Device::Cpu), "threads": 1,
        "channels_last": true, "precision": distgpipe::Precision::Fp32, "trace": false, "timeouts": Timeouts::default(),
        "faults": "", "addresses": [null, null],
    }))
    .expect("a job");
    LinkOptions {
        local: format!("rank {rank}"),
        peer: format!("rank {}", 1 - rank),
        abort: AbortFlag::default(),
        timeouts: Timeouts::default(),
        queue: WINDOW_MAX,
        meter: Meter::new(),
        link_codecs: LinkCodecs::new(&job, &plan),
        counters: Counters::default(),
        heartbeat: Box::new(String::new),
        wrap: Box::new(|link, _| link),
        admit: Box::new(|_| Ok(())),
        deliver: Box::new(move |message| {
            // The other end may be over.
            let _ = arrived.send(message);
            Ok(())
        }),
        has_room: Box::new(|| true),
        on_heartbeat: Box::new(|_| {}),
        notify: Notify::default(),
    }
}

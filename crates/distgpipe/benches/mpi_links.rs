//! Ping-pong of large tensors over the MPI transport between ranks 0 and 1, from one stage's queue to the other's mailbox: encoding,
//! checksums and decoding are part of it. Prints one line of JSON for each size. `bench/mpi.py` runs it next to plain MPI.

use distgpipe::comm::abort::AbortFlag;
use distgpipe::comm::link_codecs::LinkCodecs;
use distgpipe::comm::message::{Message, Tag};
use distgpipe::comm::notice::Notify;
use distgpipe::comm::protocol::Job;
use distgpipe::comm::timeouts::Timeouts;
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

fn play(mpi: &'static distgpipe::engine::mpi::Mpi, rank: usize) {
    let (arrived, arrivals) = mpsc::channel();
    let links = MpiLinks::start(mpi, 1, vec![(1 - rank, link(rank, arrived))]).expect("links");
    let (mut outgoing, _) = links.outgoing(1 - rank).expect("a link");
    for mib in SIZES_MIB {
        let elements = i64::try_from((mib << 20) / 4).expect("a size");
        let mut tensor = Tensor::ones([elements], (Kind::Float, Device::Cpu));
        let mut start = Instant::now();
        for round in 0..WARM_UP + ROUND_TRIPS {
            if round == WARM_UP {
                start = Instant::now();
            }
            let tag = |step| Tag { kind: Frame::Activation, step, micro_batch: 0, from: 0, to: 1 };
            let send = |tensor: Tensor| Message::tensors(tag(round as u64), vec![Some(tensor)]);
            let receive = || {
                let mut message: Message = arrivals.recv().expect("a message");
                message.tensors.remove(0).expect("a tensor")
            };
            if rank == 0 {
                outgoing.send(send(tensor)).expect("a link");
                tensor = receive();
            } else {
                outgoing.send(send(receive())).expect("a link");
                tensor = Tensor::new();
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        if rank == 0 {
            let bytes_per_s = (2 * ROUND_TRIPS * (mib << 20)) as f64 / seconds;
            println!("{}", json!({ "mib": mib, "bytes_per_s": bytes_per_s }));
        }
    }
    drop(outgoing);
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
        queue: 4,
        meter: Meter::new(),
        link_codecs: LinkCodecs::new(&job, &plan),
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

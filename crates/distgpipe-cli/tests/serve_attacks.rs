//! What attacks on `distgpipe serve` and `distgpipe worker` come to, as real processes meet them.

mod command;
mod serving;

use command::{distgpipe, tensors};
use distgpipe::comm::transport::limits;
use distgpipe_core::codec::CodecId;
use distgpipe_core::wire::{
    AbortNotice, DType, Header, Hello, Kind as FrameKind, Layout, Role, Shape, TensorMeta, HEADER_BYTES,
};
use serving::{capture, frames, path, Serve, LIMIT, TRAIN};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// More than a process may have open by default: the test raises its limit, as the server does.
const SLOW_HELLOS: usize = 1000;

fn signal(process: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().expect("kill").success());
}

/// Its process computes for as long as it likes: here it is suspended, as a build that never ends.
#[test]
fn a_client_that_is_killed_while_its_model_is_built_leaves_its_place_to_the_next() {
    let mut server = Serve::start("serve-build", &[]);
    let mut first = server.command(&[&TRAIN[..], &["--server", "box"]].concat()).spawn().expect("it runs");
    let process = server.process_of_run(0);
    signal(process, "-STOP");
    first.kill().expect("it runs");
    first.wait().expect("it ends");
    assert_eq!(server.train("next", &[]).len(), 4);
    let gone = |line: &String| line.contains("its driver had gone, so its process was ended");
    server.wait_for_ends(2);
    assert!(server.seen.iter().any(gone), "{:#?}", server.seen);
    assert!(!Path::new(&format!("/proc/{process}")).exists(), "process {process} is left");
}

/// A job that kills itself, asks for too much, or injects faults hurts nobody else.
#[test]
fn what_is_over_a_limit_is_refused_with_the_figure_and_the_server_goes_on() {
    let server = Serve::start("serve-limits", &["--threads", "2", "--memory", "1GiB"]);
    assert_eq!(server.train("before", &[]).len(), 4);
    let before_mb = usage(server.child.id()).2;
    let said = |more: &[&str]| {
        let output = server.client(&[&TRAIN[..], &["--server", "box"], more].concat(), None);
        assert_eq!(output.status.code(), Some(1), "{more:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let faults = said(&["--faults", "server:kill@1F0"]);
    assert!(faults.contains("a server injects no faults"), "{faults}");
    let threads = said(&["--threads", "3"]);
    assert!(threads.contains("at most 2, got 3"), "{threads}");
    let huge = said(&["--set", "hidden=[50000,50000,64]"]);
    assert!(huge.contains("takes 10.0 GB of memory, and this host has"), "{huge}");
    let codec = said(&["--codec", "delta:900(tile:4)"]);
    assert!(codec.contains("may keep 3600 MiB") && codec.contains("gives a job 1024 MiB"), "{codec}");
    let after_mb = usage(server.child.id()).2;
    assert!(after_mb <= before_mb + 20, "{after_mb} MB, and {before_mb} MB before");
    assert_eq!(server.train("after", &[]).len(), 4);
}

/// How long an honest client takes to join a server and to have its model built there.
fn time_to_join(server: &mut Serve, runs_before: usize) -> Duration {
    use distgpipe::prelude::*;
    let servers = vec![server.join_string.parse().expect("a join string")];
    let workers = Workers::Servers { servers, labels_leave: false, listen: None };
    let builder = Pipeline::builder(Mlp::default().model().expect("a model")).balance([1, 2, 1]);
    let builder = builder.place("client,server,client").device(Device::Cpu).threads(1).workers(workers);
    let start = Instant::now();
    let pipeline = builder.build().expect("it joins");
    let took = start.elapsed();
    drop(pipeline);
    server.wait_for_ends(runs_before + 1);
    took
}

/// Strangers that come on in a thread of their own until it is dropped.
struct Strangers {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What strangers do once a second.
type Round = Box<dyn FnMut(&mut Vec<TcpStream>) + Send>;

impl Strangers {
    /// Once a second does `round` with the connections there are. Returns after the first round.
    fn start(mut round: impl FnMut(&mut Vec<TcpStream>) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (first, begun) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut held = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let next = Instant::now() + Duration::from_secs(1);
                round(&mut held);
                let _ = first.send(());
                while Instant::now() < next && !stopped.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        });
        begun.recv().expect("it begins");
        Strangers { stop, thread: Some(thread) }
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking());
    }
}

/// 200 connections of one byte that are renewed every second, and then 1,000 hellos that come at one byte per second. An honest
/// client joins within two seconds of what it takes alone, which depends on the machine.
#[test]
fn strangers_delay_nobody_and_leave_nothing_behind() {
    distgpipe::engine::raise_open_files_limit().expect("a process may raise its limit to the hard one");
    let mut server = Serve::start("serve-strangers", &[]);
    let mut alone = [0, 1, 2].map(|run| time_to_join(&mut server, run));
    alone.sort_unstable();
    let before = server.resources();
    let address = server.address.clone();
    let one_byte = move |held: &mut Vec<TcpStream>| {
        held.clear();
        held.extend((0..200).flat_map(|_| TcpStream::connect(&address)));
        held.iter_mut().for_each(|stranger| drop(stranger.write_all(&[0x16])));
    };
    let address = server.address.clone();
    let slow = move |held: &mut Vec<TcpStream>| {
        // Those that the server has sent away come again.
        held.retain_mut(|stranger| stranger.write_all(&[0]).is_ok());
        while held.len() < SLOW_HELLOS {
            let mut stranger = TcpStream::connect(&address).expect("the hard limit of open files allows all of them");
            // The head of a record that announces a long ClientHello.
            let _ = stranger.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00]);
            held.push(stranger);
        }
    };
    let kinds: [Round; 2] = [Box::new(one_byte), Box::new(slow)];
    for (kind, round) in kinds.into_iter().enumerate() {
        let strangers = Strangers::start(round);
        // The medians, because other tests use the machine as well.
        let mut took = [0, 1, 2].map(|run| time_to_join(&mut server, 3 + 3 * kind + run));
        took.sort_unstable();
        assert!(took[1] < alone[1] + Duration::from_secs(2), "{took:?}, and {alone:?} alone");
        drop(strangers);
    }
    // Handshakes that never end are dropped after five seconds.
    let deadline = Instant::now() + LIMIT;
    while server.resources().0 > before.0 || server.resources().1 > before.1 {
        assert!(Instant::now() < deadline, "{:?}, before {before:?}", server.resources());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Nobody else connects, so nothing but the time ends them.
#[test]
fn a_silent_connection_is_closed_after_five_seconds() {
    let server = Serve::start("serve-silent-strangers", &[]);
    let silent: Vec<(TcpStream, Instant)> = (0..10)
        .map(|number| {
            let mut stranger = TcpStream::connect(&server.address).expect("it listens");
            // Some begin a handshake.
            stranger.write_all(&[0x16, 3, 1][..number % 4]).expect("it is open");
            stranger.set_read_timeout(Some(LIMIT)).expect("a time-out");
            (stranger, Instant::now())
        })
        .collect();
    for (mut stranger, since) in silent {
        assert!(!matches!(stranger.read(&mut [0]), Ok(1..)), "it says nothing");
        let held = since.elapsed();
        assert!((Duration::from_secs(3)..Duration::from_secs(15)).contains(&held), "{held:?}");
    }
}

/// A pipe that is full and that nobody reads, in place of the server's log.
#[test]
fn a_server_whose_log_nobody_reads_goes_on() {
    use std::os::unix::net::UnixStream;
    let folder = command::directory("serve-full-log");
    let (mut log, written) = UnixStream::pair().expect("a pair");
    let mut serve = distgpipe(&["serve", "--listen", "127.0.0.1:0", "--device", "cpu", "--identity"]);
    let error = std::os::fd::OwnedFd::from(written.try_clone().expect("a handle"));
    serve.arg(folder.join("identity")).stderr(Stdio::from(error));
    let (child, address) = listening(&mut serve);
    // The command has a handle on the log.
    drop(serve);
    // It has written its first lines when the last of them is here.
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("prints the join string\n") {
        let mut byte = [0];
        log.read_exact(&mut byte).expect("it goes on");
        seen.extend(byte);
    }
    written.set_nonblocking(true).expect("a socket");
    while (&written).write(&[b'.'; 1 << 12]).is_ok() {}
    while (&written).write(b".").is_ok() {}
    written.set_nonblocking(false).expect("a socket");
    for _ in 0..500 {
        let mut stranger = TcpStream::connect(&address).expect("it listens");
        let _ = stranger.write_all(&[b'?'; 200]);
    }
    let identity = folder.join("identity");
    let joining = ["serve", "--join-string", "--listen", &address, "--identity", path(&identity)];
    let printed = distgpipe(&joining).output().expect("it was built");
    let join_string = String::from_utf8_lossy(&printed.stdout).trim_end().to_owned();
    let output = distgpipe(&TRAIN).env("DISTGPIPE_SERVER", &join_string).output().expect("it runs");
    end(child);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Nothing was lost of what waited, and nothing was added to it.
    drop(written);
    let mut rest = Vec::new();
    log.read_to_end(&mut rest).expect("it has ended");
    assert!(rest.len() > 1 << 12 && rest[..1 << 12].iter().all(|&byte| byte == b'.'));
}

/// The memory of a job whose parameters fit and whose activations do not. The process ends with its job.
#[test]
fn a_job_that_needs_more_memory_than_it_has_in_a_step_is_told_so_and_the_next_is_accepted() {
    let mut server = Serve::start("serve-out-of-memory", &["--memory", "1GiB"]);
    // 8192 rows of 30,000 values at the server are 983 MB.
    let output = server.client(&[&WIDE[..], &["--server", "box", "--set", "hidden=[16,30000,16]"]].concat(), None);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    server.wait_for_ends(1);
    let ended = server.wait_for("ended after");
    assert!(said.contains("memory") || ended.contains("memory"), "{said}\n{ended}");
    assert!(said.contains("1F0") || ended.contains("at its memory limit"), "in a step: {said}\n{ended}");
    assert_eq!(server.train("next", &[]).len(), 4);
}

/// Its heartbeats go on, and it is not idle: one action takes longer than the owner allows.
#[test]
fn a_job_that_hangs_in_an_action_is_ended_by_the_server() {
    let mut server = Serve::start("serve-hang", &["--idle", "1", "--threads", "1"]);
    // A forward pass of 590 GFLOP.
    let slow = ["--server", "box", "--threads", "1", "--set", "hidden=[16,6000,6000]"];
    let output = server.client(&[&WIDE[..], &slow].concat(), None);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("made no progress for 1 s"), "{said}");
    server.wait_for_ends(1);
    assert!(!Path::new(&format!("/proc/{}", server.process_of_run(0))).exists());
    assert_eq!(server.train("next", &[]).len(), 4);
}

/// One step with a batch of 8192 rows in one micro-batch; the two larger layers are at the server.
const WIDE: [&str; 19] = [
    "train",
    "--model",
    "mlp",
    "--balance",
    "1,2,1",
    "--place",
    "client,server,client",
    "--steps",
    "1",
    "--data",
    "synthetic",
    "--samples",
    "8192",
    "--batch",
    "8192",
    "--no-evaluate",
    "--chunks=1",
    "--restarts",
    "0",
];

/// A client whose heartbeats go on holds a server no longer than the owner allows.
#[test]
fn a_job_without_commands_ends_at_the_idle_limit() {
    use distgpipe::prelude::*;
    let mut server = Serve::start("serve-idle", &["--idle", "2"]);
    let servers = vec![server.join_string.parse().expect("a join string")];
    let workers = Workers::Servers { servers, labels_leave: false, listen: None };
    let pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
        .balance([1, 2, 1])
        .place("client,server,client")
        .device(Device::Cpu)
        .threads(1)
        .workers(workers)
        .build()
        .expect("it starts");
    let line = server.wait_for("made no progress for 2 s");
    assert!(line.contains("server failed while waiting for work"), "{line}");
    drop(pipeline);
    assert_eq!(server.train("after", &[]).len(), 4);
}

/// The cause in the abort notice that the server sends; `None` if the connection ends without one.
fn abort_notice(stream: &mut TcpStream) -> Option<String> {
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let (mut received, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(read @ 1..) = stream.read(&mut buffer) {
        received.extend(&buffer[..read]);
        let found = frames(&received).into_iter().find(|(header, _)| header.kind == FrameKind::Abort);
        if let Some((_, body)) = found {
            return Some(AbortNotice::decode(&body).expect("a notice").message);
        }
    }
    None
}

/// The largest resident memory that a process has had, in MB.
fn peak_mb(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("a peak");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number") / 1000
}

/// What a driver sends in a step of split learning with this codec, to a server without TLS, and the memory that its job takes.
fn honest_frames(server: &mut Serve, codec: &str, runs_before: usize) -> (Vec<(Header, Vec<u8>)>, u64) {
    let (address, captured) = capture(server.address.clone());
    let pipeline = honest_run(server, &address, codec);
    let mb = peak_mb(server.process_of_run(runs_before));
    drop(pipeline);
    let sent = frames(&captured.lock().expect("not poisoned"));
    let kinds: Vec<FrameKind> = sent.iter().take(2).map(|(header, _)| header.kind).collect();
    assert_eq!(kinds, [FrameKind::Hello, FrameKind::Job]);
    server.wait_for_ends(runs_before + 1);
    (sent, mb)
}

/// A run at this address of a server without TLS that has made a step.
fn honest_run(server: &Serve, address: &str, codec: &str) -> distgpipe::Pipeline {
    use distgpipe::prelude::*;
    use distgpipe::tch::{Device as TorchDevice, Kind, Tensor};
    let token: distgpipe::Token = server.secret().parse().expect("a secret");
    let codec: CodecSpec = codec.parse().expect("a codec");
    let mut pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
        .balance([1, 2, 1])
        .place("client,server,client")
        .micro_batches(2)
        .codecs(CodecPolicy { forward: codec.clone(), backward: codec, ..CodecPolicy::default() })
        .device(Device::Cpu)
        .threads(1)
        .workers(Workers::Remote { addresses: vec![address.to_owned()], token })
        .build()
        .expect("it starts");
    let x = Tensor::rand([16, 1, 8, 8], (Kind::Float, TorchDevice::Cpu));
    let y = Tensor::zeros([16], (Kind::Int64, TorchDevice::Cpu));
    pipeline.train_step(&Batch::new(x, y)).expect("a step");
    pipeline
}

/// Connects as that driver did, and sends its first frames. If the job is among them, waits until the worker is ready.
fn begin(server: &Serve, sent: &[(Header, Vec<u8>)]) -> TcpStream {
    let mut stream = TcpStream::connect(&server.address).expect("it listens");
    for (header, body) in sent {
        stream.write_all(&header.encode()).and_then(|()| stream.write_all(body)).expect("it reads");
    }
    if sent.len() > 1 {
        read_until(&mut stream, FrameKind::Ready);
    }
    stream
}

/// Reads frames up to the first of this kind.
fn read_until(stream: &mut TcpStream, kind: FrameKind) -> Header {
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    loop {
        let mut head = [0; HEADER_BYTES];
        stream.read_exact(&mut head).unwrap_or_else(|e| panic!("{kind:?} expected: {e}"));
        let header = Header::decode(&head, &limits()).expect("a header");
        std::io::copy(&mut (&*stream).take(header.body_bytes), &mut std::io::sink()).expect("a body");
        if header.kind == kind {
            return header;
        }
    }
}

/// A header of 136 bytes once made the process allocate and clear the whole body for every codec but `raw`, and abort at its limit.
#[test]
fn a_body_that_is_announced_and_not_sent_is_refused_with_the_figure() {
    let mut server = Serve::start("serve-announced", &["--insecure", "--memory", "1GiB"]);
    let mut runs = 0;
    for (codec, id, body_bytes, expected) in [
        ("bf16", CodecId::BF16, 1 << 30, "a tensor from a peer takes 3.2 GB of memory"),
        ("zstd(raw)", CodecId::Zstd, 2 << 30, "a tensor from a peer takes 4.3 GB of memory"),
    ] {
        let (sent, honest_mb) = honest_frames(&mut server, codec, runs);
        let mut stream = begin(&server, &sent[..2]);
        let shape = Shape::new(&[1 << 29]).expect("a shape");
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: id };
        let announced =
            Header { to: 1, sequence: 1, tensor: Some(meta), body_bytes, ..Header::new(FrameKind::Activation) };
        stream.write_all(&announced.encode()).expect("it reads");
        let notice = abort_notice(&mut stream).unwrap_or_else(|| panic!("{codec}: no cause"));
        assert!(notice.contains(expected), "{codec}: {notice}");
        let mb = peak_mb(server.process_of_run(runs + 1));
        assert!(mb < honest_mb + 100, "{codec}: {mb} MB, and an honest job {honest_mb} MB");
        drop(stream);
        runs += 2;
        server.wait_for_ends(runs);
    }
    drop(honest_run(&server, &server.address, "raw"));
}

/// Replays the beginning of an honest run, which works without TLS, and goes on in other ways.
#[test]
fn a_client_with_the_secret_hurts_only_its_own_job() {
    let mut server = Serve::start("serve-malicious", &["--insecure", "--memory", "1GiB"]);
    let (sent, honest_mb) = honest_frames(&mut server, "topk:0.1", 0);
    // A frame that announces a tensor of 2 GiB, and has a body of so many zeros.
    let announced = |kind, codec, body_bytes: usize| {
        let mut header = Header { to: 1, sequence: 1, ..Header::new(kind) };
        if kind == FrameKind::State {
            (header.from, header.to) = (1, 0);
        }
        let shape = Shape::new(&[1 << 29]).expect("a shape");
        header.tensor = Some(TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec });
        let body = vec![0; body_bytes];
        header.seal(&body);
        if codec == CodecId::Raw {
            header.body_bytes = 2 << 30;
        }
        [&header.encode()[..], &body].concat()
    };
    let mut goodbye = Header { sequence: 1, ..Header::new(FrameKind::Goodbye) };
    goodbye.seal(&[]);
    let job = String::from_utf8_lossy(&sent[1].1).replace(r#""cross_entropy""#, r#""\u001b[2J""#);
    let mut malformed = Header::new(FrameKind::Job);
    malformed.seal(job.as_bytes());
    let malformed = [&malformed.encode()[..], job.as_bytes()].concat();
    let state = |number: u32, slots: u16| {
        let shape = Shape::new(&[1]).expect("a shape");
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::Raw };
        let (sequence, tensor) = (1 + u64::from(number), Some(meta));
        let mut header =
            Header { micro_batch: number, from: 1, slots, sequence, tensor, ..Header::new(FrameKind::State) };
        header.seal(&[0; 4]);
        header
    };
    let slots = state(0, 2);
    let many_states = (0..16_500).flat_map(|number| [&state(number, 1).encode()[..], &[0; 4]].concat()).collect();
    let huge = "a tensor from a peer takes 2.1 GB of memory";
    let attacks = [
        (1, malformed, r"cannot decode the job: unknown variant `\u{1b}[2J`"),
        (2, announced(FrameKind::Activation, CodecId::Raw, 0), huge),
        (2, announced(FrameKind::State, CodecId::Raw, 0), "expected a tensor of at most"),
        // Ten bytes that are to decode to gigabytes.
        (2, announced(FrameKind::Activation, CodecId::TopK, 10), huge),
        // A state tensor is a message of its own, and few of them wait.
        (2, [&slots.encode()[..], &[0; 4]].concat(), "slots"),
        (2, many_states, "at most 16384 tensors of a state transfer that wait"),
        (2, goodbye.encode().to_vec(), "the connection closed unexpectedly"),
    ];
    for (i, (honest_frames, bytes, expected)) in attacks.into_iter().enumerate() {
        // Each repeats the number of the run, so the one before must have ended.
        server.wait_for_ends(i + 1);
        let mut stream = begin(&server, &sent[..honest_frames]);
        // The worker may have cut it off before the end of a flood.
        let _ = stream.write_all(&bytes);
        // The socket stays open.
        let Some(notice) = abort_notice(&mut stream) else {
            server.wait_for_ends(i + 2);
            panic!("attack {i}: no cause; {:#?}", server.seen);
        };
        assert!(notice.contains(expected) && !notice.contains('\x1b'), "attack {i}: {notice}");
        // A process that has connections waits a moment for their ends; the one without a job is gone.
        if honest_frames > 1 {
            let mb = peak_mb(server.process_of_run(i + 1));
            assert!(mb < honest_mb + 100, "attack {i}: {mb} MB, and an honest job {honest_mb} MB");
        }
    }
    drop(honest_run(&server, &server.address, "topk:0.1"));
}

/// A stranger's job may be connected to the servers that the owner allows, and nowhere else.
#[test]
fn a_job_that_names_another_host_is_not_connected_to_it() {
    use distgpipe::prelude::*;
    let server = Serve::start("serve-elsewhere", &["--insecure"]);
    let (worker, to) = start_worker(server.secret());
    let (address, captured) = capture(to);
    let token = server.secret().parse().expect("a secret");
    let refused = Pipeline::builder(Mlp::default().model().expect("a model"))
        .balance([1, 1, 1, 1])
        .place("client,one,two,client")
        .device(Device::Cpu)
        .threads(1)
        .workers(Workers::Remote { addresses: vec![server.address.clone(), address], token })
        .build();
    let refused = refused.err().expect("an error").to_string();
    assert!(refused.contains("a server of the run that this server reaches over TLS"), "{refused}");
    end(worker);
    // The driver alone has connected to the other host.
    let sent = frames(&captured.lock().expect("not poisoned"));
    let hellos = sent.iter().filter(|(header, _)| header.kind == FrameKind::Hello);
    let roles: Vec<Role> = hellos.map(|(_, body)| Hello::decode(body).expect("a hello").role).collect();
    assert_eq!(roles, [Role::Driver]);
}

/// The tensors of a file, with their bytes.
fn tensor_bytes(path: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = |tensor: &distgpipe::tch::Tensor| {
        let values = Vec::<f32>::try_from(tensor.flatten(0, -1)).expect("floats");
        values.into_iter().flat_map(f32::to_le_bytes).collect()
    };
    tensors(path).into_iter().map(|(name, tensor)| (name, bytes(&tensor))).collect()
}

/// The crash of a job's process is its own: the client starts another, and computes what it would have computed.
#[test]
fn a_job_whose_process_crashes_is_started_again_by_its_client() {
    let mut server = Serve::start("serve-crash", &[]);
    let long: Vec<&str> = TRAIN.iter().map(|&a| if a == "4" { "600" } else { a }).collect();
    let train = |server: &Serve, name: &str| {
        let folder = server.folder.join(name);
        let [saved, weights] = ["saved", "model.safetensors"].map(|file| path(&folder.join(file)).to_owned());
        let kept = ["--checkpoint", &saved, "--checkpoint-every", "20", "--save", &weights];
        let run = [&long[..], &["--server", "box", "--epochs", "1000"], &kept].concat();
        (server.command(&run).spawn().expect("it was built"), PathBuf::from(saved), PathBuf::from(weights))
    };
    let ended = |run: Child| {
        let output = run.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        said
    };
    let (quiet, _, expected) = train(&server, "quiet");
    ended(quiet);
    let (disturbed, saved, weights) = train(&server, "disturbed");
    let process = server.process_of_run(1);
    let deadline = Instant::now() + LIMIT;
    let is_checkpoint = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("step-");
    while !std::fs::read_dir(&saved).is_ok_and(|mut all| all.any(|entry| entry.is_ok_and(is_checkpoint))) {
        assert!(Instant::now() < deadline, "no checkpoint");
        std::thread::sleep(Duration::from_millis(2));
    }
    // Rust itself handles SIGSEGV.
    signal(process, "-ILL");
    let said = ended(disturbed);
    assert!(said.contains("continuing after step"), "{said}");
    server.wait_for("crashed with signal 4");
    assert!(tensor_bytes(&weights) == tensor_bytes(&expected), "other weights:\n{said}");
}

/// A run with a server has restarts by default, without checkpoints too: the client keeps the state of the last epoch.
#[test]
fn without_checkpoints_the_client_keeps_the_state_for_a_job_that_crashes() {
    let mut server = Serve::start("serve-crash-in-memory", &[]);
    let long: Vec<&str> = TRAIN.iter().map(|&a| if a == "4" { "3000" } else { a }).collect();
    let train = |server: &mut Serve, name: &str, crash: bool| {
        let weights = server.folder.join(name).with_extension("safetensors");
        let run = [&long[..], &["--server", "box", "--epochs", "1000", "--save", path(&weights)]].concat();
        let mut run = server.command(&run).spawn().expect("it was built");
        let mut said = BufReader::new(run.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
        let mut all: Vec<String> = Vec::new();
        if crash {
            all.extend(said.by_ref().take_while(|line| !line.starts_with("epoch 2/")));
            signal(server.process_of_run(1), "-ILL");
        }
        all.extend(said);
        assert!(run.wait().expect("it ends").success(), "{all:#?}");
        (tensor_bytes(&weights), all.join("\n"))
    };
    let (expected, _) = train(&mut server, "quiet", false);
    let (weights, said) = train(&mut server, "disturbed", true);
    assert!(said.contains("the state to restart from is kept in memory"), "{said}");
    assert!(said.contains("all workers are back; continuing after step"), "{said}");
    assert!(weights == expected, "other weights:\n{said}");
}

/// A worker process with this token, and where it listens.
fn start_worker(token: &str) -> (Child, String) {
    listening(distgpipe(&["worker"]).env("DISTGPIPE_TOKEN", token).stderr(Stdio::null()))
}

fn listening(command: &mut Command) -> (Child, String) {
    let mut worker = command.stdout(Stdio::piped()).spawn().expect("it was built");
    let mut line = String::new();
    BufReader::new(worker.stdout.take().expect("piped")).read_line(&mut line).expect("text");
    (worker, line.trim_end().strip_prefix("listening ").expect("an address").to_owned())
}

fn end(mut process: Child) {
    process.kill().expect("it runs");
    process.wait().expect("it ends");
}

/// Strangers once used up the descriptors of a worker.
#[test]
fn a_worker_with_few_descriptors_serves_while_strangers_are_connected() {
    let token = "17".repeat(32);
    let few = ["-c", "ulimit -n 16; exec \"$0\" worker", env!("CARGO_BIN_EXE_distgpipe")];
    let (worker, address) =
        listening(Command::new("sh").args(few).env("DISTGPIPE_TOKEN", &token).stderr(Stdio::null()));
    let strangers: Vec<TcpStream> = (0..100).flat_map(|_| TcpStream::connect(&address)).collect();
    let flags = [&TRAIN[..], &["--workers", &address]].concat();
    let output = distgpipe(&flags).env("DISTGPIPE_TOKEN", &token).output().expect("it runs");
    drop(strangers);
    end(worker);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Descriptors, threads and resident memory in MB of a process.
fn usage(process: u32) -> (usize, usize, u64) {
    let count = |what: &str| std::fs::read_dir(format!("/proc/{process}/{what}")).expect("it runs").count();
    let pages = std::fs::read_to_string(format!("/proc/{process}/statm")).expect("it runs");
    let pages: u64 = pages.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    (count("fd"), count("task"), pages * 4096 / 1_000_000)
}

/// A run without a step. Returns what its driver sends from the hello to the command that ends the run.
fn frames_of_a_run(address: &str, token: &str) -> Vec<(Header, Vec<u8>)> {
    let (near, captured) = capture(address.to_owned());
    idle_run(&near, token);
    let sent = frames(&captured.lock().expect("not poisoned"));
    let kept = |kind| !matches!(kind, FrameKind::Goodbye | FrameKind::Ping);
    let run: Vec<(Header, Vec<u8>)> = sent.into_iter().filter(|(header, _)| kept(header.kind)).collect();
    assert!(run.iter().any(|(header, _)| header.kind == FrameKind::Command), "the driver ends the run");
    run
}

fn idle_run(address: &str, token: &str) {
    use distgpipe::prelude::*;
    let workers = Workers::Remote { addresses: vec![address.to_owned()], token: token.parse().expect("a token") };
    let builder = Pipeline::builder(Mlp::default().model().expect("a model")).balance([1, 2, 1]);
    let builder = builder.place("client,server,client").device(Device::Cpu).threads(1);
    drop(builder.workers(workers).build().expect("it starts"));
}

/// The memory of a finished job once stayed with the worker for the rest of its life.
#[test]
fn a_worker_returns_the_memory_of_a_large_job_when_the_job_ends() {
    let token = "19".repeat(32);
    let (worker, address) = start_worker(&token);
    idle_run(&address, &token);
    let small_mb = usage(worker.id()).2;
    // Some layers of 16 MB each, with their gradients and the optimizer's state: more than 200 MB in all.
    let large = ["--workers", &address, "--set", "hidden=[64,2000,2000,2000,2000,64]", "--balance", "1,5,1"];
    let output = distgpipe(&LARGE).args(large).env("DISTGPIPE_TOKEN", &token).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(peak_mb(worker.id()) > small_mb + 100, "{} MB, and {small_mb} MB before", peak_mb(worker.id()));
    let deadline = Instant::now() + LIMIT;
    while usage(worker.id()).2 > small_mb + 60 {
        assert!(Instant::now() < deadline, "{} MB, and {small_mb} MB before", usage(worker.id()).2);
        std::thread::sleep(Duration::from_millis(50));
    }
    end(worker);
}

/// A few steps of split learning; the caller says how the model is cut.
const LARGE: [&str; 13] = [
    "train",
    "--model",
    "mlp",
    "--place",
    "client,server,client",
    "--steps",
    "2",
    "--limit",
    "64",
    "--batch",
    "32",
    "--no-evaluate",
    "--chunks=4",
];

/// A driver that went on sending after the end of a run once left a thread, a descriptor and memory behind in the worker. 500 jobs,
/// over four workers.
#[test]
fn messages_after_the_end_of_a_run_leave_nothing_behind() {
    let token = "18".repeat(32);
    let workers: Vec<(Child, String)> = (0..4).map(|_| start_worker(&token)).collect();
    let run = frames_of_a_run(&workers[0].1, &token);
    std::thread::scope(|scope| {
        for (worker, to) in &workers {
            let (run, token) = (&run, &token);
            scope.spawn(move || {
                idle_run(to, token);
                let before = usage(worker.id());
                (0..125).for_each(|_| ping_after_goodbye(replay(to, run)));
                ping_for_ever(replay(to, run));
                idle_run(to, token);
                let deadline = Instant::now() + LIMIT;
                while usage(worker.id()).0 > before.0 || usage(worker.id()).1 > before.1 {
                    assert!(Instant::now() < deadline, "{:?}, before {before:?}", usage(worker.id()));
                    std::thread::sleep(Duration::from_millis(50));
                }
                let after = usage(worker.id());
                assert!(after.2 <= before.2 + 20, "{after:?}, before {before:?}");
            });
        }
    });
    workers.into_iter().for_each(|(worker, _)| end(worker));
}

/// The same with a server, whose jobs have processes of their own.
#[test]
fn jobs_whose_client_sends_after_their_end_leave_nothing_behind_in_the_server() {
    const JOBS: usize = 20;
    let mut server = Serve::start("serve-pings", &["--insecure"]);
    let token = server.secret().to_owned();
    let run = frames_of_a_run(&server.address, &token);
    server.wait_for_ends(1);
    let before = usage(server.child.id());
    for job in 0..JOBS {
        ping_after_goodbye(replay(&server.address, &run));
        // The next one has the number of this run.
        server.wait_for_ends(job + 2);
    }
    ping_for_ever(replay(&server.address, &run));
    server.wait_for_ends(JOBS + 2);
    idle_run(&server.address, &token);
    let deadline = Instant::now() + LIMIT;
    while usage(server.child.id()).0 > before.0 || usage(server.child.id()).1 > before.1 {
        assert!(Instant::now() < deadline, "{:?}, before {before:?}", usage(server.child.id()));
        std::thread::sleep(Duration::from_millis(50));
    }
    let after = usage(server.child.id());
    assert!(after.2 <= before.2 + 20, "{after:?}, before {before:?}");
}

/// Sends the frames of a driver, from the hello to the command that ends the run.
fn replay(to: &str, run: &[(Header, Vec<u8>)]) -> TcpStream {
    let mut stream = TcpStream::connect(to).expect("it listens");
    for (header, body) in run {
        // It has received nothing yet that it could acknowledge.
        let mut header = Header { acknowledged: 0, ..*header };
        header.seal(body);
        stream.write_all(&header.encode()).and_then(|()| stream.write_all(body)).expect("it reads");
    }
    stream
}

fn ping(stream: &mut TcpStream, acknowledged: u64) -> std::io::Result<()> {
    let mut header = Header { acknowledged, ..Header::new(FrameKind::Ping) };
    header.seal(b"0 0 idle");
    stream.write_all(&header.encode()).and_then(|()| stream.write_all(b"0 0 idle"))
}

/// Waits for the worker's goodbye, and sends some heartbeats after it.
fn ping_after_goodbye(mut stream: TcpStream) {
    let goodbye = read_until(&mut stream, FrameKind::Goodbye).sequence;
    // The worker may have closed its end meanwhile.
    (0..3).for_each(|_| drop(ping(&mut stream, goodbye)));
}

/// Sends heartbeats until the worker closes the connection.
fn ping_for_ever(mut stream: TcpStream) {
    let start = Instant::now();
    while ping(&mut stream, 0).is_ok() {
        assert!(start.elapsed() < LIMIT, "the worker goes on reading");
        std::thread::sleep(Duration::from_millis(20));
    }
}

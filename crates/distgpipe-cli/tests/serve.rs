//! `distgpipe serve`, `join` and `train --server`: what crosses the network, who may use a server, and what a server survives.

mod command;

use command::{directory, distgpipe, logged, refused};
use distgpipe::comm::transport::tcp::limits;
use distgpipe_core::codec::CodecId;
use distgpipe_core::wire::{AbortNotice, DType, Header, Kind as FrameKind, Layout, Shape, TensorMeta, HEADER_BYTES};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a test waits for something that takes much less.
const LIMIT: Duration = Duration::from_secs(120);

/// A server that a test started, in a directory of its own, which is also the configuration of its clients.
struct Serve {
    child: Child,
    folder: PathBuf,
    address: String,
    join_string: String,
    /// The lines of its log.
    lines: Receiver<String>,
    /// What it prints on standard output after its address, once it has ended.
    printed: Receiver<String>,
    seen: Vec<String>,
}

impl Serve {
    fn start(name: &str, flags: &[&str]) -> Self {
        let folder = directory(name);
        let identity = folder.join("identity");
        let listen = ["--listen", "127.0.0.1:0", "--device", "cpu", "--identity"];
        let mut child = distgpipe(&["serve"])
            .args(listen)
            .arg(&identity)
            .args(flags)
            .spawn()
            .expect("the binary was built with this test");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut first = String::new();
        output.read_line(&mut first).expect("text");
        let address = first.trim_end().strip_prefix("listening ").unwrap_or_else(|| panic!("{first}")).to_owned();
        let joining = ["serve", "--join-string", "--listen", &address, "--identity", path(&identity)];
        let printed = distgpipe(&joining).output().expect("the binary was built with this test");
        let join_string = String::from_utf8_lossy(&printed.stdout).trim_end().to_owned();
        let errors = BufReader::new(child.stderr.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || errors.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let (sender, printed) = mpsc::channel();
        std::thread::spawn(move || {
            let mut rest = String::new();
            output.read_to_string(&mut rest).map(|_| sender.send(rest))
        });
        let server = Serve { child, folder, address, join_string, lines, printed, seen: Vec::new() };
        let joined = server.client(&["join", "box"], Some(&server.join_string));
        assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
        server
    }

    /// A command of a client that has joined this server as `box`.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = distgpipe(arguments);
        command.env("XDG_CONFIG_HOME", self.folder.join("config"));
        command
    }

    fn client(&self, arguments: &[&str], input: Option<&str>) -> Output {
        let mut command = self.command(arguments);
        if input.is_some() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.spawn().expect("the binary was built with this test");
        if let Some(text) = input {
            writeln!(child.stdin.take().expect("piped"), "{text}").expect("it reads");
        }
        child.wait_with_output().expect("it ends")
    }

    /// Trains for a few steps over this server, and returns the losses.
    fn train(&self, log: &str, more: &[&str]) -> Vec<f64> {
        let log = self.folder.join(log);
        let output = self.client(&[&TRAIN[..], &["--server", "box", "--log", path(&log)], more].concat(), None);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        losses(&log)
    }

    /// Waits until so many runs have ended here, with their processes.
    fn wait_for_ends(&mut self, ends: usize) {
        while self.seen.iter().filter(|line| line.contains("ended after")).count() < ends {
            let line = self.lines.recv_timeout(LIMIT);
            self.seen.push(line.unwrap_or_else(|_| panic!("expected {ends} ends, got {:#?}", self.seen)));
        }
    }

    /// Waits for a line of the log that contains this text.
    fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(line) = self.seen.iter().find(|line| line.contains(text)) {
                return line.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            self.seen.push(line.unwrap_or_else(|_| panic!("expected a line with {text:?}, got {:#?}", self.seen)));
        }
    }

    /// The secret in the join string.
    fn secret(&self) -> &str {
        self.join_string.split(':').nth(3).expect("a secret")
    }

    /// The number of files and sockets that the server has open, and of its threads.
    fn resources(&self) -> (usize, usize) {
        let count = |what: &str| {
            let folder = format!("/proc/{}/{what}", self.child.id());
            std::fs::read_dir(folder).expect("it runs").count()
        };
        (count("fd"), count("task"))
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Split learning of a small network, a few steps.
const TRAIN: [&str; 15] = [
    "train",
    "--model",
    "mlp",
    "--balance",
    "1,2,1",
    "--place",
    "client,server,client",
    "--steps",
    "4",
    "--limit",
    "256",
    "--batch",
    "32",
    "--no-evaluate",
    "--chunks=4",
];

fn path(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn losses(log: &Path) -> Vec<f64> {
    logged(log, "step").iter().map(|line| line["loss"].as_f64().expect("a number")).collect()
}

/// All bytes of all files under a directory.
fn contents(folder: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a directory").flatten() {
        match entry.path() {
            path if path.is_dir() => all.extend(contents(&path)),
            path => all.extend(std::fs::read(path).expect("a file")),
        }
    }
    all
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Standard output that is not a terminal may be a journal.
#[test]
fn the_join_string_is_printed_on_a_terminal_or_on_request_and_nowhere_else() {
    let mut server = Serve::start("serve-journal", &[]);
    server.wait_for("`distgpipe serve --join-string` prints the join string");
    assert_eq!(server.secret().len(), 64);
    let _ = server.child.kill();
    assert_eq!(server.printed.recv_timeout(LIMIT).expect("it ends"), "");
    while let Ok(line) = server.lines.recv_timeout(LIMIT) {
        server.seen.push(line);
    }
    assert!(!server.seen.iter().any(|line| line.contains(server.secret())), "{:#?}", server.seen);
}

/// Without TLS the key of a run is the server's secret, which another server must not learn.
#[test]
fn a_server_without_tls_connects_to_no_other_server() {
    let said = refused(2, &["serve", "--insecure", "--listen", "127.0.0.1:0", "--allow", "gpu-2:7443"]);
    assert!(said.contains("--insecure: expected no --allow"), "{said}");
}

/// What the owner's limits and the separation of processes come to, as the system sees it.
#[test]
fn the_process_of_a_job_writes_no_files_and_has_neither_the_key_nor_the_secret() {
    use distgpipe::prelude::*;
    let mut server = Serve::start("serve-process", &[]);
    let servers = vec![server.join_string.parse().expect("a join string")];
    let pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
        .balance([1, 2, 1])
        .place("client,server,client")
        .device(Device::Cpu)
        .threads(1)
        .workers(Workers::Servers { servers, labels_leave: false, listen: None })
        .build()
        .expect("it starts");
    let line = server.wait_for(": process ");
    let process = line.rsplit(' ').next().expect("a number").to_owned();
    let of = |what: &str| std::fs::read(format!("/proc/{process}/{what}")).expect("it runs");
    let limits = String::from_utf8_lossy(&of("limits")).into_owned();
    for limit in ["Max file size", "Max core file size"] {
        let line = limits.lines().find(|line| line.starts_with(limit)).expect("a limit");
        let words: Vec<&str> = line[limit.len()..].split_whitespace().collect();
        assert_eq!(words[..2], ["0", "0"], "{line}");
    }
    let identity = server.folder.join("identity");
    let text = std::fs::read_to_string(&identity).expect("the identity");
    let key = text.lines().next().and_then(|line| line.strip_prefix("key ")).expect("a key");
    for place in ["environ", "cmdline"] {
        assert!(!contains(&of(place), server.secret()) && !contains(&of(place), key), "{place}");
    }
    for open in std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs").flatten() {
        assert_ne!(std::fs::read_link(open.path()).ok(), Some(identity.clone()));
    }
    drop(pipeline);
}

#[test]
fn split_learning_over_a_server_equals_threads_and_the_secret_stays_where_it_is() {
    let mut server = Serve::start("serve-train", &[]);
    let log = server.folder.join("threads");
    let threads = server.client(&[&TRAIN[..], &["--log", path(&log)]].concat(), None);
    assert!(threads.status.success(), "{}", String::from_utf8_lossy(&threads.stderr));
    let saved = server.folder.join("saved");
    let more = ["--trace", "--checkpoint", path(&saved)];
    assert_eq!(server.train("first", &more), losses(&log));
    server.wait_for("ended after");
    // The next job is accepted at once.
    assert_eq!(server.train("second", &[]), losses(&log));
    // What the client wrote: logs, traces, configurations, checkpoints. The key of the server is not secret.
    let secret = server.secret().to_owned();
    assert_eq!(secret.len(), 64);
    for folder in ["first", "second", "saved"] {
        assert!(!contains(&contents(&server.folder.join(folder)), &secret), "{folder}");
    }
    assert!(!server.seen.iter().any(|line| line.contains(&secret)));
    // What the client keeps is there, and it alone can read it.
    let kept = server.folder.join("config/distgpipe/servers/box");
    assert!(contains(&std::fs::read(&kept).expect("kept"), &secret));
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &Path| std::fs::metadata(path).expect("it exists").permissions().mode() & 0o777;
    assert_eq!((mode(&kept), mode(kept.parent().expect("a folder"))), (0o600, 0o700));
    let listed = server.client(&["join", "--list"], None);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains(&format!("box  {}", server.address)) && !listed.contains(&secret), "{listed}");
    assert!(server.client(&["join", "box", "--remove"], None).status.success());
    let unknown = server.client(&[&TRAIN[..], &["--server", "box"]].concat(), None);
    assert_eq!(unknown.status.code(), Some(2));
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(said.contains("`distgpipe join box`"), "{said}");
}

#[test]
fn labels_leave_the_client_only_if_the_user_says_so() {
    let server = Serve::start("serve-labels", &[]);
    let two: Vec<&str> = TRAIN.iter().map(|&a| if a == "client,server,client" { "client,server" } else { a }).collect();
    let two: Vec<&str> = two.into_iter().map(|a| if a == "1,2,1" { "2,2" } else { a }).collect();
    let refused = server.client(&[&two[..], &["--server", "box"]].concat(), None);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("labels would leave") && said.contains("--labels-leave"),
        "{said}"
    );
    let allowed = server.client(&[&two[..], &["--server", "box", "--labels-leave"]].concat(), None);
    assert!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
}

/// The environment and a file hold join strings too; the command line does not.
#[test]
fn join_strings_come_from_a_file_or_the_environment_and_wrong_ones_are_not_repeated() {
    let server = Serve::start("serve-environment", &[]);
    let file = server.folder.join("join.txt");
    std::fs::write(&file, format!("{}\n", server.join_string)).expect("a file");
    let from_file = server.client(&[&TRAIN[..], &["--server-file", path(&file)]].concat(), None);
    assert!(from_file.status.success(), "{}", String::from_utf8_lossy(&from_file.stderr));
    let output = server.command(&TRAIN).env("DISTGPIPE_SERVER", &server.join_string).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("client → server"));
    let damaged = server.join_string.replacen(":1:", ":1:0", 1);
    std::fs::write(&file, &damaged).expect("a file");
    let said = refused(2, &[&TRAIN[..], &["--server-file", path(&file)]].concat());
    assert!(said.contains("damaged") && !said.contains(server.secret()), "{said}");
}

/// Another key and another secret are told apart.
#[test]
fn a_client_hears_whether_the_key_or_the_secret_is_wrong() {
    let server = Serve::start("serve-wrong", &[]);
    let other = Serve::start("serve-wrong-other", &[]);
    let at = |join_string: &str, key: &str, secret: &str| {
        let parsed: distgpipe::JoinString = join_string.parse().expect("a join string");
        let server = distgpipe::JoinString {
            key: key.parse().expect("a key"),
            secret: secret.parse().expect("a secret"),
            ..parsed
        };
        server.to_text()
    };
    let field = |server: &Serve, n: usize| server.join_string.split(':').nth(n).expect("a field").to_owned();
    let (key, secret) = (field(&server, 2), field(&server, 3));
    for (wrong, expected) in [
        (at(&server.join_string, &field(&other, 2), &secret), "another key than the join string says"),
        (at(&server.join_string, &key, &field(&other, 3)), "does not know the server's secret"),
    ] {
        let output = server.command(&TRAIN).env("DISTGPIPE_SERVER", wrong).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(expected), "{said}");
    }
}

#[test]
fn a_second_client_hears_at_once_that_the_server_is_busy_and_a_killed_client_frees_its_place() {
    let mut server = Serve::start("serve-busy", &[]);
    let long: Vec<&str> = TRAIN.iter().map(|&a| if a == "4" { "1000000" } else { a }).collect();
    let long = [&long[..], &["--epochs", "1000000", "--server", "box"]].concat();
    let mut first = server.command(&long).spawn().expect("it runs");
    server.wait_for("partition 1 of 3");
    let start = Instant::now();
    let second = server.client(&[&TRAIN[..], &["--server", "box"]].concat(), None);
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(3), "{said}");
    assert!(said.contains("busy with another run since 20"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    first.kill().expect("it runs");
    first.wait().expect("it ends");
    let deadline = Instant::now() + LIMIT;
    loop {
        let output = server.client(&[&TRAIN[..], &["--server", "box"]].concat(), None);
        match output.status.code() {
            Some(0) => break,
            Some(3) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(200)),
            _ => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        }
    }
}

/// A job that kills itself, asks for too much, or injects faults hurts nobody else.
#[test]
fn what_is_over_a_limit_is_refused_with_the_figure_and_the_server_goes_on() {
    let server = Serve::start("serve-limits", &["--threads", "2", "--memory", "1GiB"]);
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
    assert_eq!(server.train("after", &[]).len(), 4);
}

#[test]
fn strangers_delay_nobody_and_leave_nothing_behind() {
    let mut server = Serve::start("serve-strangers", &[]);
    server.train("before", &[]);
    server.wait_for("ended after");
    let before = server.resources();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (address, stopped) = (server.address.clone(), stop.clone());
    // 200 one-byte connections, renewed all the time.
    let strangers = std::thread::spawn(move || {
        let mut held = VecDeque::new();
        while !stopped.load(Ordering::Relaxed) {
            if let Ok(mut stranger) = TcpStream::connect(&address) {
                let _ = stranger.write_all(&[0x16]);
                held.push_back(stranger);
            }
            if held.len() > 200 {
                held.pop_front();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    server.train("during", &[]);
    stop.store(true, Ordering::Relaxed);
    strangers.join().expect("they end");
    // Handshakes that never end are dropped after five seconds.
    let deadline = Instant::now() + LIMIT;
    while server.resources().0 > before.0 || server.resources().1 > before.1 {
        assert!(Instant::now() < deadline, "{:?}, before {before:?}", server.resources());
        std::thread::sleep(Duration::from_millis(100));
    }
}

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

/// Behind a router that lets nothing in, the server connects, and the roles are unchanged.
#[test]
fn a_server_that_cannot_be_reached_connects_to_the_client() {
    // A port that nobody has: the client listens there later.
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
    let server = Serve::start("serve-dial", &["--dial", &port]);
    let (direct, dialed) = (server.train("direct", &[]), server.train("dialed", &["--listen", &port]));
    assert_eq!(direct, dialed);
    // The next run is connected too.
    assert_eq!(server.train("again", &["--listen", &port]), direct);
}

/// The measurement crosses TLS, whichever end connects, and starts no process for a job.
#[test]
fn auto_measures_the_link_to_a_server() {
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
    let mut server = Serve::start("serve-auto", &["--dial", &port]);
    for more in [&[][..], &["--listen", &port]] {
        let arguments = [&TRAIN[..], &["--server", "box", "--codec", "auto"], more].concat();
        let output = server.client(&arguments, None);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(
            said.lines().any(|line| line.contains("--codec auto: ") && line.contains("/s back, round trip")),
            "{said}"
        );
        server.wait_for("has measured the link");
        server.wait_for("ended after");
        let started = server.seen.drain(..).filter(|line| line.contains(": process ")).count();
        assert_eq!(started, 1);
    }
}

/// Two servers know nothing of each other's secrets, and connect only where their owners allow it.
#[test]
fn a_pipeline_over_two_servers_equals_threads_and_needs_the_owners_permission() {
    let second = Serve::start("serve-two-b", &[]);
    let mut first = Serve::start("serve-two-a", &["--allow", &second.address]);
    let joined = first.client(&["join", "box-2"], Some(&second.join_string));
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let three: Vec<&str> = TRAIN
        .iter()
        .map(|&a| match a {
            "client,server,client" => "client,one,two,client",
            "1,2,1" => "1,1,1,1",
            other => other,
        })
        .collect();
    let log = |name: &str| first.folder.join(name);
    let (threads, servers) = (log("threads"), log("servers"));
    for (log, flags) in [(&threads, &[][..]), (&servers, &["--server", "box", "--server", "box-2"])] {
        let output = first.client(&[&three[..], &["--log", path(log)], flags].concat(), None);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(losses(&servers), losses(&threads));
    // The other way round, the first of the two dials, and its owner has allowed nothing.
    let output = first.client(&[&three[..], &["--server", "box-2", "--server", "box"]].concat(), None);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("has not allowed it to connect to"), "{said}");
    first.wait_for("ended after");
}

/// Passes connections on to an address, and keeps what the clients send.
fn capture(to: String) -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let captured = Arc::new(Mutex::new(Vec::new()));
    let kept = captured.clone();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let far = TcpStream::connect(&to).expect("it listens");
            let (mut from, mut back) = (near.try_clone().expect("a handle"), near);
            let (mut into, mut answers) = (far.try_clone().expect("a handle"), far);
            std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let kept = kept.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 1 << 16];
                while let Ok(read @ 1..) = from.read(&mut buffer) {
                    kept.lock().expect("not poisoned").extend(&buffer[..read]);
                    if into.write_all(&buffer[..read]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    (address, captured)
}

/// Passes connections on to an address, and cuts them: the first after the first of these numbers of bytes, in both directions
/// together, the next one after the next. When none are left, connections last.
fn cutting_relay(to: String, cuts: &[usize]) -> (String, Arc<Mutex<VecDeque<usize>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let left = Arc::new(Mutex::new(VecDeque::from(cuts.to_vec())));
    let cuts = left.clone();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            // Nobody listens: so it is for whoever has connected.
            let Ok(far) = TcpStream::connect(&to) else { continue };
            let passed = Arc::new(AtomicUsize::new(0));
            for (from, into) in [(&near, &far), (&far, &near)] {
                let (mut from, mut into) = (from.try_clone().expect("a handle"), into.try_clone().expect("a handle"));
                let (cuts, passed) = (cuts.clone(), passed.clone());
                std::thread::spawn(move || {
                    let mut buffer = [0; 512];
                    while let Ok(read @ 1..) = from.read(&mut buffer) {
                        let total = passed.fetch_add(read, Ordering::SeqCst) + read;
                        let mut cuts = cuts.lock().expect("not poisoned");
                        if cuts.front().is_some_and(|&cut| total >= cut) {
                            cuts.pop_front();
                            break;
                        }
                        drop(cuts);
                        if into.write_all(&buffer[..read]).is_err() {
                            break;
                        }
                    }
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = into.shutdown(Shutdown::Both);
                });
            }
        }
    });
    (address, left)
}

/// Losses of a few steps, bit for bit, in split learning over these servers.
fn losses_over(servers: &[(&str, &str)], place: &str, balance: Vec<usize>, listen: Option<String>) -> Vec<u64> {
    use distgpipe::prelude::*;
    use distgpipe::tch::{Device as TorchDevice, Kind, Tensor};
    let servers = servers.iter().map(|(join_string, address)| {
        let parsed: distgpipe::JoinString = join_string.parse().expect("a join string");
        distgpipe::JoinString { addresses: vec![(*address).to_owned()], ..parsed }
    });
    let workers = Workers::Servers { servers: servers.collect(), labels_leave: false, listen };
    let mut pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
        .balance(balance)
        .place(place)
        .micro_batches(4)
        .device(Device::Cpu)
        .threads(1)
        .workers(workers)
        .build()
        .unwrap_or_else(|failure| panic!("{failure}"));
    let x = (Tensor::arange(32 * 64, (Kind::Float, TorchDevice::Cpu)).view([32, 1, 8, 8]) * 0.37).sin();
    let y = Tensor::arange(32, (Kind::Int64, TorchDevice::Cpu)).remainder(10);
    let step = |_| {
        let report = pipeline.train_step(&Batch::new(x.shallow_clone(), y.shallow_clone()));
        report.unwrap_or_else(|error| panic!("{error}")).loss.to_bits()
    };
    (0..8).map(step).collect()
}

/// In the data, in the handshake of TLS, and in the first frames after it.
const CUTS: [usize; 5] = [25_000, 300, 15_000, 2_500, 15_000];

#[test]
fn a_connection_to_a_server_that_is_cut_is_restored_and_no_bit_changes() {
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
    let (outside, left_outside) = cutting_relay(port.clone(), &CUTS);
    let mut server = Serve::start("serve-cut", &["--dial", &outside]);
    let (join_string, address) = (server.join_string.clone(), server.address.clone());
    let split = |address: &str, listen: Option<String>| {
        losses_over(&[(&join_string, address)], "client,server,client", vec![1, 2, 1], listen)
    };
    let undisturbed = split(&address, None);
    // The place of a run is free when its process has ended.
    server.wait_for_ends(1);
    // The client connects, and connects again.
    let (relay, left) = cutting_relay(address, &CUTS);
    assert_eq!(split(&relay, None), undisturbed);
    assert!(left.lock().expect("not poisoned").is_empty(), "not all cuts have happened");
    server.wait_for_ends(2);
    // The server connects, and connects again.
    assert_eq!(split("unreachable.invalid:1", Some(port)), undisturbed);
    assert!(left_outside.lock().expect("not poisoned").is_empty(), "not all cuts have happened");
    // All that was one run each time.
    let count = |server: &Serve| server.seen.iter().filter(|line| line.contains(": process ")).count();
    server.wait_for_ends(3);
    assert_eq!(count(&server), 3, "{:#?}", server.seen);
}

/// The job of one server reaches the other through its gateway, and so it does again.
#[test]
fn a_connection_between_servers_that_is_cut_is_restored_and_no_bit_changes() {
    let mut second = Serve::start("serve-cut-second", &[]);
    let (relay, left) = cutting_relay(second.address.clone(), &[]);
    let mut first = Serve::start("serve-cut-first", &["--allow", &second.address, "--allow", &relay]);
    let over = |first: &Serve, second: &Serve, address: &str| {
        let servers = [(&first.join_string[..], &first.address[..]), (&second.join_string[..], address)];
        losses_over(&servers, "client,a,b,client", vec![1, 1, 1, 1], None)
    };
    let undisturbed = over(&first, &second, &second.address);
    first.wait_for_ends(1);
    second.wait_for_ends(1);
    left.lock().expect("not poisoned").extend(CUTS.into_iter().chain(CUTS));
    assert_eq!(over(&first, &second, &relay), undisturbed);
    assert!(left.lock().expect("not poisoned").is_empty(), "not all cuts have happened");
}

/// Every byte that leaves the client, before encryption, in split learning. The search finds labels where they do leave.
#[test]
fn no_input_label_or_sample_leaves_the_client_in_split_learning() {
    use distgpipe::prelude::*;
    use distgpipe::tch::{Device as TorchDevice, Kind, Tensor};
    let server = Serve::start("serve-capture", &["--insecure"]);
    let token: distgpipe::Token = server.secret().parse().expect("a secret");
    for (balance, place, leaves) in
        [(vec![1, 2, 1], "client,server,client", false), (vec![2, 2], "client,server", true)]
    {
        let (address, captured) = capture(server.address.clone());
        let mut pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
            .balance(balance)
            .place(place)
            .micro_batches(2)
            .device(Device::Cpu)
            .threads(1)
            .workers(Workers::Remote { addresses: vec![address], token })
            .build()
            .expect("it starts");
        let x = Tensor::rand([16, 1, 8, 8], (Kind::Float, TorchDevice::Cpu));
        let y = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]);
        for _ in 0..2 {
            pipeline.train_step(&Batch::new(x.shallow_clone(), y.shallow_clone())).expect("a step");
        }
        drop(pipeline);
        let sent = captured.lock().expect("not poisoned").clone();
        assert!(sent.len() > 10_000, "{}", sent.len());
        let has = |pattern: &[u8]| sent.windows(pattern.len()).any(|window| window == pattern);
        let values = Vec::<f32>::try_from(x.flatten(0, -1)).expect("floats");
        for four in values.chunks(4) {
            let bytes: Vec<u8> = four.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert!(!has(&bytes), "{place}: inputs left the client");
        }
        let labels = Vec::<i64>::try_from(&y).expect("integers");
        for size in [8, 4] {
            let of_width = |label: &i64| label.to_le_bytes().into_iter().take(size);
            let bytes: Vec<u8> = labels[..4].iter().flat_map(of_width).collect();
            assert_eq!(has(&bytes), leaves && size == 8, "{place}: labels of {size} bytes");
        }
    }
}

/// The frames in these bytes: header and body.
fn frames(mut bytes: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some(head) = bytes.first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(head, &limits()).expect("a valid header");
        let end = HEADER_BYTES + usize::try_from(header.body_bytes).expect("a small body");
        let Some(body) = bytes.get(HEADER_BYTES..end) else { break };
        all.push((header, body.to_vec()));
        bytes = &bytes[end..];
    }
    all
}

/// What the server sends until its abort notice.
fn abort_notice(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let mut received = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let read = stream.read(&mut buffer).expect("an answer");
        received.extend(&buffer[..read]);
        let found = frames(&received).into_iter().find(|(header, _)| header.kind == FrameKind::Abort);
        if let Some((_, body)) = found {
            return AbortNotice::decode(&body).expect("a notice").message;
        }
        assert_ne!(read, 0, "the connection ended without a cause");
    }
}

/// Replays the beginning of an honest run, which works without TLS, and goes on in other ways.
#[test]
fn a_client_with_the_secret_hurts_only_its_own_job() {
    use distgpipe::prelude::*;
    use distgpipe::tch::{Device as TorchDevice, Kind, Tensor};
    let mut server = Serve::start("serve-malicious", &["--insecure", "--memory", "1GiB"]);
    let token: distgpipe::Token = server.secret().parse().expect("a secret");
    let (address, captured) = capture(server.address.clone());
    let honest = |address: &str| {
        let mut pipeline = Pipeline::builder(Mlp::default().model().expect("a model"))
            .balance([1, 2, 1])
            .place("client,server,client")
            .micro_batches(2)
            .device(Device::Cpu)
            .threads(1)
            .workers(Workers::Remote { addresses: vec![address.to_owned()], token })
            .build()
            .expect("it starts");
        let x = Tensor::rand([16, 1, 8, 8], (Kind::Float, TorchDevice::Cpu));
        let y = Tensor::zeros([16], (Kind::Int64, TorchDevice::Cpu));
        pipeline.train_step(&Batch::new(x, y)).expect("a step");
    };
    honest(&address);
    let sent = frames(&captured.lock().expect("not poisoned"));
    let kinds: Vec<FrameKind> = sent.iter().take(2).map(|(header, _)| header.kind).collect();
    assert_eq!(kinds, [FrameKind::Hello, FrameKind::Job]);
    let mut ended = 1;
    let huge = |kind| {
        let mut header = Header { to: 1, slots: 1, ..Header::new(kind) };
        if kind == FrameKind::State {
            (header.from, header.to) = (1, 0);
        }
        let shape = Shape::new(&[1 << 29]).expect("a shape");
        let (dtype, layout, codec) = (DType::F32, Layout::Contiguous, CodecId::Raw);
        header.tensor = Some(TensorMeta { dtype, layout, shape, codec });
        header.body_bytes = 2 << 30;
        header.sequence = 1;
        header.encode().to_vec()
    };
    let mut goodbye = Header { sequence: 1, ..Header::new(FrameKind::Goodbye) };
    goodbye.seal(&[]);
    let mut malformed = Header::new(FrameKind::Job);
    malformed.seal(b"{\"worker\": \"\x1b[2J\"}");
    let mut malformed = malformed.encode().to_vec();
    malformed.extend(b"{\"worker\": \"\x1b[2J\"}");
    for (honest_frames, bytes, expected) in [
        (1, malformed, "cannot decode the job"),
        (2, huge(FrameKind::Activation), "a tensor from a peer takes 2.1 GB of memory"),
        (2, huge(FrameKind::State), "a tensor from a peer takes 2.1 GB of memory"),
        (2, goodbye.encode().to_vec(), "the connection closed unexpectedly"),
    ] {
        // The place of the job before is free when its process has ended.
        while server.seen.iter().filter(|line| line.contains("ended after")).count() < ended {
            let line = server.lines.recv_timeout(LIMIT).expect("the job ends");
            server.seen.push(line);
        }
        let mut stream = TcpStream::connect(&server.address).expect("it listens");
        for (header, body) in &sent[..honest_frames] {
            stream.write_all(&header.encode()).and_then(|()| stream.write_all(body)).expect("it reads");
        }
        stream.write_all(&bytes).expect("it reads");
        // The socket stays open.
        let notice = abort_notice(&mut stream);
        assert!(notice.contains(expected) && !notice.contains('\x1b'), "{notice}");
        ended += 1;
    }
    server.wait_for("ended after");
    while server.seen.iter().filter(|line| line.contains("ended after")).count() < ended {
        let line = server.lines.recv_timeout(LIMIT).expect("the job ends");
        server.seen.push(line);
    }
    honest(&server.address);
}

/// Strangers once used up the descriptors of a worker.
#[test]
fn a_worker_with_few_descriptors_serves_while_strangers_are_connected() {
    let token = "17".repeat(32);
    let mut worker = Command::new("sh")
        .args(["-c", "ulimit -n 16; exec \"$0\" worker", env!("CARGO_BIN_EXE_distgpipe")])
        .env("DISTGPIPE_TOKEN", &token)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell");
    let mut line = String::new();
    BufReader::new(worker.stdout.take().expect("piped")).read_line(&mut line).expect("text");
    let address = line.trim_end().strip_prefix("listening ").expect("an address").to_owned();
    let strangers: Vec<TcpStream> = (0..100).flat_map(|_| TcpStream::connect(&address)).collect();
    let flags = [&TRAIN[..], &["--workers", &address]].concat();
    let output = distgpipe(&flags).env("DISTGPIPE_TOKEN", &token).output().expect("it runs");
    drop(strangers);
    worker.kill().expect("it runs");
    worker.wait().expect("it ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A driver that went on sending after the end of a run once left a thread, a descriptor and memory behind in the worker.
#[test]
fn messages_after_the_end_of_a_run_leave_nothing_behind() {
    use distgpipe::prelude::*;
    let token = "18".repeat(32);
    let mut worker = distgpipe(&["worker"]).env("DISTGPIPE_TOKEN", &token).spawn().expect("it was built");
    let mut line = String::new();
    BufReader::new(worker.stdout.take().expect("piped")).read_line(&mut line).expect("text");
    let to = line.trim_end().strip_prefix("listening ").expect("an address").to_owned();
    let (address, captured) = capture(to.clone());
    let honest = || {
        let workers = Workers::Remote { addresses: vec![address.clone()], token: token.parse().expect("a token") };
        let builder = Pipeline::builder(Mlp::default().model().expect("a model")).balance([1, 2, 1]);
        drop(
            builder
                .place("client,server,client")
                .device(Device::Cpu)
                .threads(1)
                .workers(workers)
                .build()
                .expect("it starts"),
        );
    };
    honest();
    let sent: Vec<(Header, Vec<u8>)> = frames(&captured.lock().expect("not poisoned"));
    let kept = |kind| !matches!(kind, FrameKind::Goodbye | FrameKind::Ping);
    let run: Vec<&(Header, Vec<u8>)> = sent.iter().filter(|(header, _)| kept(header.kind)).collect();
    assert!(run.iter().any(|(header, _)| header.kind == FrameKind::Command), "the driver ends the run");
    let resources = || {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", worker.id())).expect("it runs").count();
        (count("fd"), count("task"))
    };
    honest();
    let before = resources();
    let mut ping = Header::new(FrameKind::Ping);
    ping.seal(b"0 0 idle");
    for _ in 0..3 {
        let mut stream = TcpStream::connect(&to).expect("it listens");
        for (header, body) in &run {
            // It has received nothing yet that it could acknowledge.
            let mut header = Header { acknowledged: 0, ..*header };
            header.seal(body);
            stream.write_all(&header.encode()).and_then(|()| stream.write_all(body)).expect("it reads");
        }
        // Until the worker closes the connection.
        let start = Instant::now();
        while stream.write_all(&ping.encode()).and_then(|()| stream.write_all(b"0 0 idle")).is_ok() {
            assert!(start.elapsed() < LIMIT, "the worker goes on reading");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    honest();
    let deadline = Instant::now() + LIMIT;
    while resources().0 > before.0 || resources().1 > before.1 {
        assert!(Instant::now() < deadline, "{:?}, before {before:?}", resources());
        std::thread::sleep(Duration::from_millis(50));
    }
    worker.kill().expect("it runs");
    worker.wait().expect("it ends");
}

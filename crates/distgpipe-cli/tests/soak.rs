//! A run over a server that meets a fault every second or so, for a minute: its connections are cut, the client, the server and the
//! job's process are suspended, the job's process is killed. Then the user stops it. It must have the weights of an undisturbed run of
//! as many steps; client, server and job, the memory and the descriptors that they had before.
//!
//! `scripts/soak.sh` runs the same for ten minutes: `DISTGPIPE_SOAK_S` sets for how many seconds there are faults,
//! `DISTGPIPE_SOAK_PAUSE_MS` the mean pause between two of them, and `DISTGPIPE_SOAK_SEED` the seed.

mod command;
mod serving;

use command::distgpipe;
use serving::{path, Serve};
use std::io::{BufRead, BufReader};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: `{text}` is no number")))
}

/// Draws the same numbers for the same seed (splitmix64).
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// What happens to the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Cut,
    StopJob,
    StopServer,
    StopClient,
    KillJob,
}

use Fault::{Cut, KillJob, StopClient, StopJob, StopServer};

/// How often each fault comes among ten.
const DECK: [Fault; 10] = [Cut, Cut, Cut, Cut, Cut, StopJob, StopServer, StopClient, KillJob, KillJob];

/// Draws faults in a random order. Of ten, each comes as often as in [`DECK`], whatever the seed.
struct Faults {
    draws: Draws,
    deck: Vec<Fault>,
}

impl Faults {
    fn next(&mut self) -> Fault {
        if self.deck.is_empty() {
            self.deck = DECK.to_vec();
        }
        let at = self.draws.below(self.deck.len() as u64) as usize;
        self.deck.swap_remove(at)
    }
}

/// Forwards connections to the server, and cuts those that there are.
struct Relay {
    address: SocketAddr,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    fn start(to: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let relay = Relay { address: listener.local_addr().expect("an address"), open: Arc::default() };
        let open = relay.open.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let far = TcpStream::connect(&to).expect("the server listens all along");
                let handle = |stream: &TcpStream| stream.try_clone().expect("a handle");
                open.lock().expect("no panic").extend([handle(&near), handle(&far)]);
                for (mut from, mut to) in [(handle(&near), handle(&far)), (far, near)] {
                    std::thread::spawn(move || {
                        let _ = to.set_nodelay(true);
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        relay
    }

    fn cut(&self) {
        for stream in self.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The process of the job that the server has now.
fn job(server: &mut Serve) -> Option<u32> {
    server.seen.extend(server.lines.try_iter());
    let last = server.seen.iter().rfind(|line| line.contains(": process ") || line.contains("ended after"))?;
    last.rsplit_once(": process ")?.1.parse().ok()
}

fn signal(process: u32, signal: &str) {
    // The process may have ended meanwhile.
    let _ = Command::new("kill").args([signal, &process.to_string()]).stderr(Stdio::null()).status();
}

/// What a process has.
#[derive(Clone, Copy)]
struct Usage {
    at: Instant,
    process: u32,
    memory_mb: u64,
    descriptors: usize,
    threads: u64,
}

impl Usage {
    fn of(process: u32) -> Option<Self> {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        };
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?.count();
        // One that has just been killed has no memory any more.
        let memory_mb = field("VmRSS:")? / 1000;
        Some(Usage { at: Instant::now(), process, memory_mb, descriptors, threads: field("Threads:")? })
    }
}

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} MB, {} descriptors, {} threads", self.memory_mb, self.descriptors, self.threads)
    }
}

/// Fails if a process has more in the end than after the first quarter, when everything has been allocated once.
fn assert_flat(who: &str, samples: &[Usage], slack_mb: u64, report: &str) {
    assert!(samples.len() >= 8, "{} samples of the {who}:\n{report}", samples.len());
    let quarter = samples.len() / 4;
    let median = |samples: &[Usage]| {
        let mut memory: Vec<u64> = samples.iter().map(|sample| sample.memory_mb).collect();
        memory.sort_unstable();
        memory[memory.len() / 2]
    };
    let most = |samples: &[Usage]| samples.iter().map(|sample| sample.descriptors).max().unwrap_or(0);
    let (early, late) = (&samples[quarter..2 * quarter], &samples[samples.len() - quarter..]);
    let (before, after) = (median(early), median(late));
    assert!(after <= before + slack_mb, "memory of the {who} grows from {before} MB to {after} MB:\n{report}");
    let (before, after) = (most(&samples[..2 * quarter]), most(late));
    assert!(after <= before + 4, "descriptors of the {who} grow from {before} to {after}:\n{report}");
}

/// A client of the server that it has joined under this name.
fn client(server: &Serve, name: &str, steps: u64) -> Command {
    let folder = server.folder.join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut command = server.command(&["train", "--set", "hidden=[512,512]", "--batch", "128"]);
    command
        .args([
            "--place",
            "client,server,client",
            "--codec",
            "feedback(tile:8)",
            "--no-evaluate",
            "--epochs",
            "1000000",
        ])
        .args(["--lr", "0.01", "--steps", &steps.to_string(), "--server", name, "--peer-timeout", "10"])
        .args(["--restarts", "1000000", "--checkpoint-every", "10", "--checkpoint", path(&folder.join("saved"))])
        .args(["--save", path(&folder.join("model.safetensors"))])
        .stdout(Stdio::null());
    command
}

/// The bytes of the tensors that a client has saved.
fn tensors(server: &Serve, name: &str) -> Vec<u8> {
    let saved = server.folder.join(name).join("model.safetensors");
    let bytes = std::fs::read(&saved).unwrap_or_else(|e| panic!("{}: {e}", saved.display()));
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    bytes[8 + header..].to_vec()
}

/// Has the clients of this server know it at another address, too.
fn join(server: &Serve, name: &str, address: &str) {
    let identity = server.folder.join("identity");
    let printed = distgpipe(&["serve", "--join-string", "--address", address, "--identity", path(&identity)]).output();
    let join_string = String::from_utf8(printed.expect("it runs").stdout).expect("text");
    let joined = server.client(&["join", name], Some(join_string.trim_end()));
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
}

/// A client with faults.
struct Run {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

impl Run {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().expect("it starts");
        let (lines, said) = (BufReader::new(child.stderr.take().expect("piped")), Arc::new(Mutex::new(Vec::new())));
        let all = said.clone();
        std::thread::spawn(move || {
            lines.lines().map_while(Result::ok).for_each(|line| all.lock().expect("no panic").push(line));
        });
        Run { child, said }
    }

    fn said(&self) -> String {
        self.said.lock().expect("no panic").join("\n")
    }

    fn checkpoints(&self) -> usize {
        self.said.lock().expect("no panic").iter().filter(|line| line.contains("saved step")).count()
    }

    /// Fails if it has ended.
    fn assert_runs(&mut self) {
        let ended = self.child.try_wait().expect("a child");
        assert!(ended.is_none(), "it has ended:\n{}", self.said());
    }

    /// Waits until it has saved once more.
    fn wait_for_checkpoint(&mut self) {
        let (before, start) = (self.checkpoints(), Instant::now());
        while self.checkpoints() == before {
            self.assert_runs();
            assert!(start.elapsed() < serving::LIMIT, "it makes no progress:\n{}", self.said());
            std::thread::sleep(TICK);
        }
    }

    /// Stops it as its user does. Returns the steps that it has done.
    fn stop(&mut self) -> u64 {
        signal(self.child.id(), "-INT");
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("a child") {
                Some(status) => break status,
                None => assert!(start.elapsed() < serving::LIMIT, "it does not stop:\n{}", self.said()),
            }
            std::thread::sleep(TICK);
        };
        // Its last words may be on their way.
        let stopped = |said: &str| Some(said.split_once("stopped by SIGINT after step ")?.1.split_once(' ')?.0.parse());
        loop {
            if let Some(Ok(steps)) = stopped(&self.said()) {
                assert_eq!(status.code(), Some(130), "{}", self.said());
                return steps;
            }
            assert!(start.elapsed() < serving::LIMIT, "{status}:\n{}", self.said());
            std::thread::sleep(TICK);
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How often the test looks, and how often it measures the processes.
const TICK: Duration = Duration::from_millis(20);
const SAMPLE_EVERY: Duration = Duration::from_millis(250);

/// What the processes had while the run went on.
#[derive(Default)]
struct Samples {
    client: Vec<Usage>,
    server: Vec<Usage>,
    job: Vec<Usage>,
    last: Option<Instant>,
}

impl Samples {
    fn take(&mut self, client: u32, server: &mut Serve) {
        if self.last.is_some_and(|last| last.elapsed() < SAMPLE_EVERY) {
            return;
        }
        self.last = Some(Instant::now());
        self.client.extend(Usage::of(client));
        self.server.extend(Usage::of(server.child.id()));
        self.job.extend(job(server).and_then(Usage::of));
    }

    /// Those of the job that was watched longest, without its first second, in which it builds the model.
    fn longest_job(&self) -> &[Usage] {
        let jobs = self.job.chunk_by(|a, b| a.process == b.process);
        jobs.max_by_key(|job| job.len()).map_or(&[], |job| job.get(4..).unwrap_or_default())
    }

    fn show(&self) -> String {
        let mut text = String::new();
        for (who, samples) in [("client", &self.client), ("server", &self.server), ("job", &self.job)] {
            for sample in samples.iter().step_by((samples.len() / 20).max(1)) {
                let seconds = (sample.at - samples[0].at).as_secs_f64();
                text.push_str(&format!("{who}, process {}, after {seconds:.0} s: {sample}\n", sample.process));
            }
        }
        text
    }
}

#[test]
fn a_run_with_faults_all_along_ends_with_the_weights_of_an_undisturbed_one() {
    let length = Duration::from_secs(setting("DISTGPIPE_SOAK_S", 60));
    let (pause_ms, seed) = (setting("DISTGPIPE_SOAK_PAUSE_MS", 600), setting("DISTGPIPE_SOAK_SEED", 1));
    let mut faults = Faults { draws: Draws(seed), deck: Vec::new() };
    let mut server = Serve::start("soak", &["--peer-timeout", "10"]);
    let relay = Relay::start(server.address.clone());
    join(&server, "relayed", &relay.address.to_string());
    let mut run = Run::start(client(&server, "relayed", 1_000_000_000));
    run.wait_for_checkpoint();
    let (start, mut happened, mut samples) = (Instant::now(), Vec::new(), Samples::default());
    while start.elapsed() < length {
        let until = Instant::now() + Duration::from_millis(pause_ms / 2 + faults.draws.below(pause_ms));
        while Instant::now() < until {
            run.assert_runs();
            samples.take(run.child.id(), &mut server);
            std::thread::sleep(TICK);
        }
        let (drawn, rest) = (faults.next(), Duration::from_millis(100 + faults.draws.below(1500)));
        // In the third quarter nobody kills a job, so that one of them is watched for long: its memory must be flat, too.
        let spared = start.elapsed() > length / 2 && start.elapsed() < length * 3 / 4;
        let fault = if spared && drawn == KillJob { Cut } else { drawn };
        let pause = |process: u32| {
            signal(process, "-STOP");
            std::thread::sleep(rest);
            signal(process, "-CONT");
        };
        match (fault, job(&mut server)) {
            (Cut, _) => relay.cut(),
            (StopServer, _) => pause(server.child.id()),
            (StopClient, _) => pause(run.child.id()),
            (StopJob, Some(process)) => pause(process),
            (KillJob, Some(process)) => signal(process, "-KILL"),
            // There is no job just now.
            (StopJob | KillJob, None) => continue,
        }
        happened.push(fault);
    }
    // It goes on after the last of them.
    run.wait_for_checkpoint();
    let (steps, took) = (run.stop(), start.elapsed());
    let said = run.said();
    let undisturbed = client(&server, "box", steps).output().expect("it runs");
    assert!(undisturbed.status.success(), "{}", String::from_utf8_lossy(&undisturbed.stderr));
    assert!(tensors(&server, "relayed") == tensors(&server, "box"), "other weights after {steps} steps:\n{said}");
    let count = |fault| happened.iter().filter(|&&other| other == fault).count();
    let [cuts, stopped_jobs, stopped_servers, stopped_clients, kills] =
        [Cut, StopJob, StopServer, StopClient, KillJob].map(count);
    let (restarts, restored) =
        (said.matches("continuing after step").count(), said.matches("reconnected to relayed").count());
    let report = format!(
        "{steps} steps in {:.0} s, seed {seed}: {cuts} cuts, {kills} kills of the job's process, {stopped_jobs} suspensions of it, \
         {stopped_servers} of the server and {stopped_clients} of the client; {restored} connections restored, {restarts} \
         restarts; weights equal the undisturbed run's\n{}",
        took.as_secs_f64(),
        samples.show()
    );
    println!("\n{report}");
    assert!([cuts, stopped_jobs, stopped_servers, stopped_clients, kills].iter().all(|&count| count > 0), "{report}");
    assert!(restored > 0 && restarts > 0, "{report}");
    assert_flat("client", &samples.client, 32, &report);
    assert_flat("server", &samples.server, 16, &report);
    let watched = samples.longest_job();
    let for_s = watched.first().zip(watched.last()).map_or(0.0, |(first, last)| (last.at - first.at).as_secs_f64());
    assert!(for_s >= length.as_secs_f64() / 6.0, "one job is watched for long: {for_s:.0} s\n{report}");
    assert_flat("job", watched, 16, &report);
    // A job is a new process, so none has more than another.
    let most = samples.job.iter().map(|usage| usage.descriptors).max().unwrap_or(0);
    assert!(most <= 40, "the process of a job has {most} descriptors:\n{report}");
}

/// A seed that is printed repeats the faults.
#[test]
fn faults_are_the_same_for_a_seed_and_each_kind_is_among_ten() {
    let draw = |seed, count| {
        let mut faults = Faults { draws: Draws(seed), deck: Vec::new() };
        (0..count).map(|_| faults.next()).collect::<Vec<_>>()
    };
    assert_eq!(draw(3, 30), draw(3, 30));
    assert_ne!(draw(3, 30), draw(4, 30));
    for drawn in draw(5, 30).chunks(10) {
        assert!(DECK.iter().all(|fault| drawn.contains(fault)), "{drawn:?}");
    }
}

//! A run that meets a fault every second or so: its connections are cut, its processes are suspended, its worker is killed. It
//! must end with the weights of an undisturbed run, and with the memory and the descriptors that it had in the beginning.
//!
//! The short version is a test. `scripts/soak.sh` runs a longer one: `DISTGPIPE_SOAK_STEPS` sets the steps,
//! `DISTGPIPE_SOAK_PAUSE_MS` the mean pause between two faults, `DISTGPIPE_SOAK_FAULTS` how many there are, and
//! `DISTGPIPE_SOAK_SEED` the seed.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TOKEN: &str = "5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed";

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

/// Forwards connections to the worker, and cuts those that there are.
struct Relay {
    address: SocketAddr,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let relay = Relay { address: listener.local_addr().expect("an address"), open: Arc::default() };
        let open = relay.open.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // While the worker is being started again, the driver finds an end of the connection here.
                let Ok(far) = TcpStream::connect(to) else { continue };
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

/// A worker that is started again whenever it ends.
struct Worker {
    address: SocketAddr,
    process: Arc<AtomicU32>,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    fn start() -> Self {
        // Free a moment ago; nobody else asks for it by number.
        let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
        let (process, over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (id, ended) = (process.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::SeqCst) {
                let mut child = Command::new(env!("CARGO_BIN_EXE_distgpipe"))
                    .args(["worker", "--listen", &address.to_string()])
                    .env("DISTGPIPE_TOKEN", TOKEN)
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .spawn()
                    .expect("it starts");
                id.store(child.id(), Ordering::SeqCst);
                let _ = child.wait();
                id.store(0, Ordering::SeqCst);
            }
        });
        let worker = Worker { address, process, over, thread: Some(thread) };
        worker.wait_until_it_listens();
        worker
    }

    fn wait_until_it_listens(&self) {
        let patience = Instant::now();
        while TcpStream::connect(self.address).is_err() {
            assert!(patience.elapsed() < Duration::from_secs(60), "the worker does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn process(&self) -> Option<u32> {
        Some(self.process.load(Ordering::SeqCst)).filter(|id| *id != 0)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(id) = self.process() {
            signal(id, "-KILL");
        }
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn signal(process: u32, signal: &str) {
    // The process may have ended meanwhile.
    let _ = Command::new("kill").args([signal, &process.to_string()]).stderr(Stdio::null()).status();
}

/// Resident memory in MB, descriptors and threads of a process.
fn usage(process: u32) -> Option<(u64, usize, u64)> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?.count();
    Some((field("VmRSS:")? / 1000, descriptors, field("Threads:")?))
}

fn driver(address: SocketAddr, folder: &Path, steps: u64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distgpipe"));
    command
        .args(["train", "--set", "hidden=[512,512]", "--batch", "128", "--place", "client,server,client"])
        .args([
            "--device",
            "cpu",
            "--threads",
            "1",
            "--codec",
            "feedback(tile:8)",
            "--no-evaluate",
            "--epochs",
            "100000",
        ])
        .args(["--lr", "0.01", "--steps", &steps.to_string(), "--workers", &address.to_string()])
        .args(["--checkpoint-every", "10", "--restarts", "1000000", "--peer-timeout", "10", "--checkpoint"])
        .arg(folder.join("saved"))
        .arg("--save")
        .arg(folder.join("model.safetensors"))
        .env("DISTGPIPE_TOKEN", TOKEN)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// The bytes of the tensors in a safetensors file.
fn tensors(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    bytes[8 + header..].to_vec()
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("distgpipe-soak-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn undisturbed(steps: u64) -> Vec<u8> {
    let (worker, folder) = (Worker::start(), Folder::new("quiet"));
    let output = driver(worker.address, &folder.0, steps).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tensors(&folder.0.join("model.safetensors"))
}

/// Collects what a driver says.
fn listen(child: &mut Child) -> Arc<Mutex<Vec<String>>> {
    let (lines, said) = (BufReader::new(child.stderr.take().expect("piped")), Arc::new(Mutex::new(Vec::new())));
    let all = said.clone();
    std::thread::spawn(move || {
        lines.lines().map_while(Result::ok).for_each(|line| all.lock().expect("no panic").push(line));
    });
    said
}

#[test]
fn a_run_with_faults_all_along_ends_with_the_weights_of_an_undisturbed_one() {
    let (steps, pause_ms) = (setting("DISTGPIPE_SOAK_STEPS", 500), setting("DISTGPIPE_SOAK_PAUSE_MS", 600));
    // On a machine where steps take long, faults that come by the clock would leave little time for them.
    let (seed, faults_max) = (setting("DISTGPIPE_SOAK_SEED", 1), setting("DISTGPIPE_SOAK_FAULTS", 20));
    let mut draws = Draws(seed);
    let expected = undisturbed(steps);
    let (worker, folder) = (Worker::start(), Folder::new("faults"));
    let relay = Relay::start(worker.address);
    let mut run = driver(relay.address, &folder.0, steps).spawn().expect("it starts");
    let (said, start) = (listen(&mut run), Instant::now());
    let (mut faults, mut samples, mut workers) = ([0u64; 4], Vec::new(), Vec::new());
    // A run that cannot start says so and ends.
    let started =
        |said: &Mutex<Vec<String>>| said.lock().expect("no panic").iter().any(|line| line.contains("saved step"));
    while !started(&said) && run.try_wait().expect("a child").is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = loop {
        let wait = Duration::from_millis(pause_ms / 2 + draws.below(pause_ms));
        let until = Instant::now() + wait;
        let mut ended = run.try_wait().expect("a child");
        while ended.is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            ended = run.try_wait().expect("a child");
        }
        if let Some(status) = ended {
            break status;
        }
        // Before the fault: a process that has just been started is smaller.
        samples.extend(usage(run.id()));
        workers.extend(worker.process().and_then(usage));
        if faults.iter().sum::<u64>() >= faults_max {
            continue;
        }
        let (which, rest) = (draws.below(10), Duration::from_millis(100 + draws.below(1500)));
        let pause = |process: u32| {
            signal(process, "-STOP");
            std::thread::sleep(rest);
            signal(process, "-CONT");
        };
        match (which, worker.process()) {
            (0..=4, _) => (relay.cut(), faults[0] += 1).0,
            (5..=6, Some(process)) => (pause(process), faults[1] += 1).0,
            (7, _) => (pause(run.id()), faults[2] += 1).0,
            (_, Some(process)) => (signal(process, "-KILL"), faults[3] += 1).0,
            _ => {}
        }
        let patience = Duration::from_secs(600 + steps);
        assert!(start.elapsed() < patience, "after {patience:?}:\n{}", said.lock().expect("no panic").join("\n"));
    };
    let said = said.lock().expect("no panic").join("\n");
    assert!(status.success(), "{said}");
    assert!(tensors(&folder.0.join("model.safetensors")) == expected, "other weights:\n{said}");
    let restarts = said.matches("going on after step").count();
    let restored = said.matches("reconnected to server").count();
    let [cuts, stopped_workers, stopped_drivers, kills] = faults;
    let report = format!(
        "{steps} steps in {:.0} s, seed {seed}: {cuts} cuts, {kills} kills of the worker, {stopped_workers} suspensions of it and \
         {stopped_drivers} of the driver; {restored} connections restored, {restarts} restarts; weights equal the undisturbed run's",
        start.elapsed().as_secs_f64()
    );
    println!("\n{report}");
    assert!(cuts > 0 && restored > 0, "{report}");
    let describe = |(memory, descriptors, threads): &(u64, usize, u64)| {
        format!("{memory} MB, {descriptors} descriptors, {threads} threads")
    };
    for (i, sample) in samples.iter().enumerate().step_by((samples.len() / 20).max(1)) {
        let worker = workers.get(i).map(describe).unwrap_or_default();
        println!("before fault {i}: driver {}; worker {worker}", describe(sample));
    }
    // Of the first quarter, when everything has been allocated once, and of the last.
    let quarter = (samples.len() / 4).max(1);
    let median = |samples: &[(u64, usize, u64)]| {
        let mut memory: Vec<u64> = samples.iter().map(|sample| sample.0).collect();
        memory.sort_unstable();
        memory[memory.len() / 2]
    };
    let (early, late) = (&samples[quarter.min(samples.len() - 1)..], &samples[samples.len() - quarter..]);
    let (before, after) = (median(&early[..quarter.min(early.len())]), median(late));
    assert!(after <= before + before / 4 + 32, "memory grows from {before} MB to {after} MB:\n{report}");
    let most = |samples: &[(u64, usize, u64)]| samples.iter().map(|sample| sample.1).max().unwrap_or(0);
    let (before, after) = (most(&samples[..samples.len().div_ceil(2)]), most(late));
    assert!(after <= before + 8, "descriptors grow from {before} to {after}:\n{report}");
    // Between two kills, a worker serves several connections and runs.
    assert!(most(&workers) <= 40, "a worker has {} descriptors:\n{report}", most(&workers));
    let _ = std::io::stdout().flush();
}

/// A seed that is printed repeats the faults.
#[test]
fn draws_are_the_same_for_a_seed() {
    let draw = |seed| (0..8).map(|_| Draws(seed).below(10)).collect::<Vec<_>>();
    assert_eq!(draw(3), draw(3));
    let mut from = Draws(1);
    let drawn: Vec<u64> = (0..200).map(|_| from.below(10)).collect();
    assert!((0..10).all(|value| drawn.contains(&value)), "{drawn:?}");
}

//! A run over a server that meets a fault every second or so: its connections are cut, the client, the server and the job's process
//! are suspended, the job's process is killed. It must end with the weights of an undisturbed run; the client and the server, with
//! the memory and the descriptors that they had in the beginning.
//!
//! The short version is a test. `scripts/soak.sh` runs a longer one: `DISTGPIPE_SOAK_STEPS` sets the steps,
//! `DISTGPIPE_SOAK_PAUSE_MS` the mean pause between two faults, `DISTGPIPE_SOAK_FAULTS` how many there are, and
//! `DISTGPIPE_SOAK_SEED` the seed.

mod command;
mod serving;

use command::distgpipe;
use serving::{path, Serve};
use std::io::{BufRead, BufReader, Write};
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
struct Usage {
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
        Some(Usage { memory_mb: field("VmRSS:")? / 1000, descriptors, threads: field("Threads:")? })
    }
}

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} MB, {} descriptors, {} threads", self.memory_mb, self.descriptors, self.threads)
    }
}

/// Fails if a process has more in the end than after the first quarter, when everything has been allocated once.
fn assert_flat(who: &str, samples: &[Usage], slack_mb: u64, report: &str) {
    let quarter = (samples.len() / 4).max(1);
    let median = |samples: &[Usage]| {
        let mut memory: Vec<u64> = samples.iter().map(|sample| sample.memory_mb).collect();
        memory.sort_unstable();
        memory[memory.len() / 2]
    };
    let most = |samples: &[Usage]| samples.iter().map(|sample| sample.descriptors).max().unwrap_or(0);
    let (early, late) = (&samples[quarter.min(samples.len() - 1)..], &samples[samples.len() - quarter..]);
    let (before, after) = (median(&early[..quarter.min(early.len())]), median(late));
    assert!(after <= before + slack_mb, "memory of the {who} grows from {before} MB to {after} MB:\n{report}");
    let (before, after) = (most(&samples[..samples.len().div_ceil(2)]), most(late));
    assert!(after <= before + 8, "descriptors of the {who} grow from {before} to {after}:\n{report}");
}

/// A client of the server that it has joined under this name.
fn client(server: &Serve, name: &str, steps: u64) -> Command {
    let folder = server.folder.join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut command = server.command(&["train", "--set", "hidden=[512,512]", "--batch", "128"]);
    command
        .args(["--place", "client,server,client", "--codec", "feedback(tile:8)", "--no-evaluate", "--epochs", "100000"])
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

/// Collects what a client says.
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
    let (steps, pause_ms) = (setting("DISTGPIPE_SOAK_STEPS", 1500), setting("DISTGPIPE_SOAK_PAUSE_MS", 600));
    // On a machine where steps take long, faults that come by the clock would leave little time for them.
    let (seed, faults_max) = (setting("DISTGPIPE_SOAK_SEED", 1), setting("DISTGPIPE_SOAK_FAULTS", 30));
    let mut draws = Draws(seed);
    let mut server = Serve::start("soak", &["--peer-timeout", "10"]);
    let undisturbed = client(&server, "box", steps).output().expect("it runs");
    assert!(undisturbed.status.success(), "{}", String::from_utf8_lossy(&undisturbed.stderr));
    let relay = Relay::start(server.address.clone());
    join(&server, "relayed", &relay.address.to_string());
    let mut run = client(&server, "relayed", steps).spawn().expect("it starts");
    let (said, start) = (listen(&mut run), Instant::now());
    let (mut faults, mut of_client, mut of_server, mut of_jobs) = ([0u64; 5], Vec::new(), Vec::new(), Vec::new());
    // A run that cannot start says so and ends.
    let started =
        |said: &Mutex<Vec<String>>| said.lock().expect("no panic").iter().any(|line| line.contains("saved step"));
    while !started(&said) && run.try_wait().expect("a child").is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = loop {
        let until = Instant::now() + Duration::from_millis(pause_ms / 2 + draws.below(pause_ms));
        let mut ended = run.try_wait().expect("a child");
        while ended.is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            ended = run.try_wait().expect("a child");
        }
        if let Some(status) = ended {
            break status;
        }
        let process = job(&mut server);
        // Before the fault: a process that has just been started is smaller.
        of_client.extend(Usage::of(run.id()));
        of_server.extend(Usage::of(server.child.id()));
        of_jobs.push(process.and_then(Usage::of));
        if faults.iter().sum::<u64>() >= faults_max {
            continue;
        }
        let (which, rest) = (draws.below(10), Duration::from_millis(100 + draws.below(1500)));
        let pause = |process: u32| {
            signal(process, "-STOP");
            std::thread::sleep(rest);
            signal(process, "-CONT");
        };
        match (which, process) {
            (0..=4, _) => (relay.cut(), faults[0] += 1).0,
            (5, Some(process)) => (pause(process), faults[1] += 1).0,
            (6, _) => (pause(server.child.id()), faults[2] += 1).0,
            (7, _) => (pause(run.id()), faults[3] += 1).0,
            (_, Some(process)) => (signal(process, "-KILL"), faults[4] += 1).0,
            _ => {}
        }
        let patience = Duration::from_secs(600 + steps);
        assert!(start.elapsed() < patience, "after {patience:?}:\n{}", said.lock().expect("no panic").join("\n"));
    };
    let said = said.lock().expect("no panic").join("\n");
    assert!(status.success(), "{said}");
    assert!(tensors(&server, "relayed") == tensors(&server, "box"), "other weights:\n{said}");
    let (restarts, restored) =
        (said.matches("going on after step").count(), said.matches("reconnected to relayed").count());
    let [cuts, stopped_jobs, stopped_servers, stopped_clients, kills] = faults;
    let report = format!(
        "{steps} steps in {:.0} s, seed {seed}: {cuts} cuts, {kills} kills of the job's process, {stopped_jobs} suspensions of it, \
         {stopped_servers} of the server and {stopped_clients} of the client; {restored} connections restored, {restarts} \
         restarts; weights equal the undisturbed run's",
        start.elapsed().as_secs_f64()
    );
    println!("\n{report}");
    for (i, sample) in of_client.iter().enumerate().step_by((of_client.len() / 20).max(1)) {
        let shown = |usage: Option<&Usage>| usage.map_or("none".to_owned(), Usage::to_string);
        let (server, job) = (shown(of_server.get(i)), shown(of_jobs.get(i).and_then(Option::as_ref)));
        println!("before fault {i}: client {sample}; server {server}; job {job}");
    }
    assert!(cuts > 0 && restored > 0 && kills > 0 && restarts > 0, "{report}");
    assert_flat("client", &of_client, 64, &report);
    assert_flat("server", &of_server, 16, &report);
    // Between two kills, a job's process serves several connections.
    let most = of_jobs.iter().flatten().map(|usage| usage.descriptors).max().unwrap_or(0);
    assert!(most <= 40, "the process of a job has {most} descriptors:\n{report}");
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

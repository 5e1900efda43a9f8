//! The runs that a gateway has processes for.

use super::relay::{relay, ClientEnd, RelayLimits};
use super::{GatewayEvent, Shared};
use crate::comm::acceptor::ArrivedPeer;
use crate::comm::handshake::{self, Token};
use crate::comm::listener::connect_local;
use crate::comm::transport::byte_stream::ByteStream;
use crate::driver::launch::start_process;
use crate::driver::serve::run_name;
use crate::engine;
use crate::failure::{printable, Failure, Fault};
use crate::sync::lock;
use distgpipe_core::wire::{Hello, Kind, Refuse, Role};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the process of a job may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How long a process may live on after it should have given its driver up.
const ORPHAN_LIMIT: Duration = Duration::from_secs(60);

/// How long a run whose driver was lost keeps its place when another driver wants it, and how long its process then has to end.
const PLACE_LIMIT: Duration = Duration::from_secs(2);

/// How long a driver that finds all places taken waits for one: the last run may have ended a moment ago, and nobody has noticed
/// yet.
const PLACE_PATIENCE: Duration = Duration::from_millis(500);

/// How long it waits while a driver is lost, whose run gives way after [`PLACE_LIMIT`] or goes on.
const PLACE_PATIENCE_LOST: Duration = Duration::from_secs(4);

/// The most connections of one run. Each takes four descriptors and three threads.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// Heartbeats begin when the driver has reached all workers of the run; it may take so long before.
const BEFORE_HEARTBEATS: Duration = Duration::from_secs(90);

/// Lines of a job's process that are reported, and their longest length.
const LINES_MAX: usize = 200;
const LINE_CHARS_MAX: usize = 500;

/// The runs of a gateway, by their numbers.
#[derive(Default)]
pub(super) struct Runs {
    all: Mutex<HashMap<[u8; 16], Arc<Run>>>,
    /// Notified when a run has ended.
    ended: Condvar,
}

/// A run that has a process here.
pub(super) struct Run {
    number: [u8; 16],
    /// What its peers prove to know.
    key: Token,
    /// For whom, since when.
    text: String,
    from: SocketAddr,
    process: Mutex<Process>,
    started: Condvar,
    /// Connections that are open.
    connections: AtomicUsize,
    driver: Mutex<DriverPresence>,
    /// The run whose place this one gets.
    predecessor: Mutex<Option<Arc<Run>>>,
    /// Set when the process has to end, and once it has.
    stop: Arc<AtomicBool>,
}

/// A connection of a run's driver, until the driver's direction of it ends: what its process still says is no use to it.
struct DriverConnection {
    run: Arc<Run>,
    end: ClientEnd,
}

impl DriverConnection {
    fn begin(run: &Arc<Run>) -> Self {
        let mut driver = lock(&run.driver);
        driver.connections += 1;
        driver.left = None;
        DriverConnection { run: run.clone(), end: ClientEnd::Broken }
    }

    fn end(mut self, end: ClientEnd) {
        self.end = end;
    }
}

impl Drop for DriverConnection {
    fn drop(&mut self) {
        let mut driver = lock(&self.run.driver);
        driver.connections -= 1;
        // One that has connected again has not gone.
        driver.left = (driver.connections == 0).then(|| DriverLeft { at: Instant::now(), end: self.end });
    }
}

/// Whether a run's driver is connected.
#[derive(Default)]
struct DriverPresence {
    /// Its connections: one, and another for a while when it connects again.
    connections: usize,
    /// When the last of them ended, and how. The process waits for a driver whose connection was cut.
    left: Option<DriverLeft>,
}

/// The end of a driver's connection.
#[derive(Clone, Copy)]
struct DriverLeft {
    at: Instant,
    end: ClientEnd,
}

impl DriverLeft {
    /// Whether the run gives way to a new one, unless the driver comes back meanwhile: at once if it is over, after a moment if a
    /// driver that is there would have connected again by then. One behind a network that is down cannot, and keeps the place
    /// until the process has waited for it long enough.
    fn gives_way(&self) -> bool {
        match self.end {
            ClientEnd::Cleanly => true,
            ClientEnd::Broken => self.at.elapsed() >= PLACE_LIMIT,
            ClientEnd::Silent => false,
        }
    }
}

/// Where the process of a run listens.
#[derive(Clone)]
enum Process {
    Starting,
    Listening { address: String, token: Token },
    Ended,
}

/// Whether a peer gets a process.
pub(super) enum Admission {
    /// A new run.
    New(Arc<Run>),
    /// A run that has a process.
    Known(Arc<Run>),
    /// All places are taken. A driver that has waited for so long is told why.
    Busy { reason: String, patience: Duration },
    /// It does not know the run's key.
    WrongKey,
    /// The run has as many connections as it may have. Some of them may be broken, and end soon.
    Full,
    /// It connects again to a run that has no process here.
    NotInRun,
}

impl Runs {
    /// The key of a run.
    pub fn key_of(&self, run: &[u8; 16]) -> Option<Token> {
        lock(&self.all).get(run).map(|run| run.key)
    }

    /// Decides about a peer that may connect. A run whose driver has gone gives way to a new one.
    pub fn admit(&self, hello: &Hello, from: SocketAddr, jobs: usize) -> Admission {
        let mut all = lock(&self.all);
        if let Some(run) = all.get(&hello.run) {
            let known = hello.check(&run.number, &run.key.0).is_ok();
            return match run.connections.load(Ordering::Relaxed) {
                _ if !known => Admission::WrongKey,
                CONNECTIONS_MAX.. => Admission::Full,
                _ => Admission::Known(run.clone()),
            };
        }
        // Its process has ended, or has given way to another run's.
        if hello.epoch > 0 {
            return Admission::NotInRun;
        }
        if !matches!(hello.role, Role::Driver) {
            return Admission::WrongKey;
        }
        let mut predecessor = None;
        if all.len() >= jobs {
            let gone = |run: &Run| run.driver_left().is_some_and(|left| left.gives_way());
            let Some(number) = all.values().find(|run| gone(run)).map(|run| run.number) else {
                let texts: Vec<&str> = all.values().map(|run| run.text.as_str()).collect();
                let may_give_way = |left: DriverLeft| left.end != ClientEnd::Silent;
                let lost = all.values().any(|run| run.driver_left().is_some_and(may_give_way));
                let patience = if lost { PLACE_PATIENCE_LOST } else { PLACE_PATIENCE };
                return Admission::Busy { reason: format!("busy with {}", texts.join(", and with ")), patience };
            };
            predecessor = all.remove(&number);
        }
        let run = Arc::new(Run {
            number: hello.run,
            key: Token(hello.token),
            text: format!("another run since {} (run {}, from {from})", engine::utc_now(), run_name(hello.run)),
            from,
            process: Mutex::new(Process::Starting),
            started: Condvar::new(),
            connections: AtomicUsize::new(0),
            driver: Mutex::default(),
            predecessor: Mutex::new(predecessor),
            stop: Arc::default(),
        });
        all.insert(hello.run, run.clone());
        Admission::New(run)
    }

    /// Ends all runs, and waits until their processes have ended.
    pub fn end_all(&self) {
        let mut all = lock(&self.all);
        all.values().for_each(|run| run.stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(5);
        while !all.is_empty() && Instant::now() < deadline {
            let waited = self.ended.wait_timeout(all, Duration::from_millis(100));
            all = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The run whose process says this hello.
    pub fn of_process(&self, hello: &Hello) -> Option<Arc<Run>> {
        let run = lock(&self.all).get(&hello.run).cloned()?;
        let token = match &*lock(&run.process) {
            Process::Listening { token, .. } => *token,
            _ => return None,
        };
        hello.check(&run.number, &token.0).is_ok().then_some(run)
    }

    /// Counts so many connections of a run.
    #[cfg(test)]
    pub fn set_connections(&self, run: &[u8; 16], connections: usize) {
        lock(&self.all)[run].connections.store(connections, Ordering::Relaxed);
    }

    /// Gives the place of a run back.
    pub fn remove(&self, run: &Arc<Run>) {
        let mut all = lock(&self.all);
        if all.get(&run.number).is_some_and(|known| Arc::ptr_eq(known, run)) {
            all.remove(&run.number);
        }
        self.ended.notify_all();
    }
}

impl Run {
    /// What its peers prove to know.
    pub fn key(&self) -> &Token {
        &self.key
    }

    /// Its random number.
    pub fn number(&self) -> [u8; 16] {
        self.number
    }

    /// When its connections end.
    pub fn limits(&self, shared: &Shared) -> RelayLimits {
        let silence = shared.options.limits.timeouts.silence().max(BEFORE_HEARTBEATS);
        RelayLimits { stop: self.stop.clone(), silence }
    }

    /// Waits a moment for the end of its process, and then ends it.
    fn end(&self) {
        let deadline = Instant::now() + PLACE_LIMIT;
        let mut process = lock(&self.process);
        // Ended at the latest when its thread has seen `stop`, and has killed it.
        while !matches!(*process, Process::Ended) && Instant::now() < deadline + START_LIMIT {
            if Instant::now() >= deadline {
                self.stop.store(true, Ordering::Relaxed);
            }
            let waited = self.started.wait_timeout(process, Duration::from_millis(20));
            process = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// How the driver left; `None` while it is connected.
    fn driver_left(&self) -> Option<DriverLeft> {
        lock(&self.driver).left
    }

    fn name(&self) -> String {
        run_name(self.number)
    }

    fn set(&self, process: Process) {
        *lock(&self.process) = process;
        self.started.notify_all();
    }

    /// Where the process listens, once it does.
    fn listening(&self) -> Result<(String, Token), Fault> {
        let mut process = lock(&self.process);
        let deadline = Instant::now() + START_LIMIT;
        loop {
            match process.clone() {
                Process::Listening { address, token } => return Ok((address, token)),
                Process::Ended => return Err(Fault::Lost),
                Process::Starting if Instant::now() >= deadline || self.stop.load(Ordering::Relaxed) => {
                    return Err(Fault::Lost)
                }
                Process::Starting => {
                    let waited = self.started.wait_timeout(process, Duration::from_millis(100));
                    process = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}

/// Starts the process of a run, connects its driver to it, and waits for its end.
pub(super) fn run_job(shared: &Arc<Shared>, run: &Arc<Run>, mut driver: ArrivedPeer) {
    let predecessor = lock(&run.predecessor).take();
    predecessor.iter().for_each(|before| before.end());
    drop(predecessor);
    let start = Instant::now();
    let mut children = Vec::new();
    let started = Token::random().and_then(|token| {
        let address = start_process(&shared.program, &token, Stdio::piped(), START_LIMIT, &mut children)?;
        Ok(Process::Listening { address, token })
    });
    let mut child = children.pop();
    if let Some(child) = &mut child {
        let event = GatewayEvent::RunStarted { run: run.name(), from: run.from, process: child.id() };
        (shared.report)(&event);
        report_lines(shared, run, child);
    }
    match started {
        Ok(listening) => {
            run.set(listening);
            let (shared, of_run) = (shared.clone(), run.clone());
            // A thread that cannot be started drops the driver's connection, which orphans the run.
            let attached = engine::spawn("connection", move || attach(&shared, &of_run, driver));
            if attached.is_err() {
                lock(&run.driver).left = Some(DriverLeft { at: Instant::now(), end: ClientEnd::Broken });
            }
        }
        Err(fault) => {
            let reason = format!("the server cannot start a process for the job: {fault}");
            let body = Refuse { reason }.encode();
            let _ = handshake::send_text(&mut driver.stream, Kind::Refuse, &body, Duration::from_secs(1));
            (shared.report)(&GatewayEvent::Rejected(Failure::new("a job", "starting its process", fault)));
            run.stop.store(true, Ordering::Relaxed);
        }
    }
    let end = child.map_or_else(|| "it did not start".to_owned(), |child| wait_for_end(shared, run, child));
    run.stop.store(true, Ordering::Relaxed);
    run.set(Process::Ended);
    shared.runs.remove(run);
    (shared.report)(&GatewayEvent::RunEnded { run: run.name(), duration: start.elapsed(), end });
}

/// Waits until the process has ended, and ends it if it must.
fn wait_for_end(shared: &Shared, run: &Run, mut child: Child) -> String {
    let timeouts = &shared.options.limits.timeouts;
    // The process itself gives the driver up earlier.
    let orphan_limit = timeouts.silence() + timeouts.reconnect() + ORPHAN_LIMIT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return describe(status),
            Ok(None) => {}
            Err(e) => return format!("waiting for its process: {e}"),
        }
        let orphaned = run.driver_left().is_some_and(|left| left.at.elapsed() >= orphan_limit);
        if run.stop.load(Ordering::Relaxed) || orphaned {
            let _ = child.kill();
            let _ = child.wait();
            return "its driver had gone, so its process was ended".to_owned();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(0), _) => "done".to_owned(),
        (Some(code), _) => format!("failed with status {code}"),
        (None, Some(libc::SIGKILL)) => "killed, by its owner or for lack of memory".to_owned(),
        (None, Some(libc::SIGABRT)) => "aborted, probably at its memory limit".to_owned(),
        (None, signal) => format!("crashed with signal {}", signal.unwrap_or(0)),
    }
}

/// Reports the lines that the process writes to its standard error.
fn report_lines(shared: &Arc<Shared>, run: &Arc<Run>, child: &mut Child) {
    let Some(output) = child.stderr.take() else { return };
    let (shared, run) = (shared.clone(), run.name());
    let reading = move || {
        let mut output = BufReader::new(output);
        for _ in 0..LINES_MAX {
            let mut line = Vec::new();
            match output.by_ref().take(LINE_CHARS_MAX as u64).read_until(b'\n', &mut line) {
                Ok(read) if read > 0 => {}
                _ => return,
            }
            let line = printable(String::from_utf8_lossy(&line).trim_end());
            (shared.report)(&GatewayEvent::RunSaid { run: run.clone(), line });
        }
        // Reads on, so that the process never blocks on a full pipe.
        let _ = std::io::copy(&mut output, &mut std::io::sink());
    };
    drop(engine::spawn("output of a job", reading));
}

/// Connects a peer to the process of its run, until one of the two closes.
pub(super) fn attach(shared: &Arc<Shared>, run: &Arc<Run>, mut peer: ArrivedPeer) {
    run.connections.fetch_add(1, Ordering::Relaxed);
    let driver = (peer.hello.role == Role::Driver).then(|| DriverConnection::begin(run));
    let from = peer.from;
    let attached = dial_process(run, &peer.hello).and_then(|worker| {
        let client = peer.stream.try_clone().map_err(|e| Fault::io("duplicating a socket", e))?;
        relay(client, worker, &run.limits(shared), move |end| {
            if let Some(driver) = driver {
                driver.end(end);
            }
        })
    });
    if let Err(fault) = attached {
        let body = Refuse { reason: format!("the process of the job does not answer: {fault}") }.encode();
        let _ = handshake::send_text(&mut peer.stream, Kind::Refuse, &body, Duration::from_secs(1));
        (shared.report)(&GatewayEvent::Rejected(Failure::new(from.to_string(), "connecting", fault)));
    }
    run.connections.fetch_sub(1, Ordering::Relaxed);
}

/// Connects to the process, and introduces the peer to it with the token of the process.
fn dial_process(run: &Run, hello: &Hello) -> Result<ByteStream, Fault> {
    let (address, token) = run.listening()?;
    let mut stream = connect_local(&address)?;
    stream.set_up()?;
    let hello = Hello { token: token.0, ..hello.clone() };
    handshake::send_text(&mut stream, Kind::Hello, &hello.encode(), START_LIMIT)?;
    Ok(stream)
}

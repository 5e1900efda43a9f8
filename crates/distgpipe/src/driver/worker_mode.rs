//! Worker mode: one program is the driver of a run and, started in another way, one of its workers. A worker of your own
//! program can build your own layers.
//!
//! ```text
//! my-app                                            drives a run
//! my-app worker --child                             started by the driver, with `Workers::processes`
//! my-app worker --listen 0.0.0.0:7000 --expose      started by hand, on another machine
//! ```
//!
//! The `distgpipe` command serves its `worker` in the same way, with the models of the zoo.

use crate::comm::handshake::Token;
use crate::driver::job_limits::JobLimits;
use crate::driver::launch::declare_worker_process;
use crate::driver::log_queue::LogQueue;
use crate::driver::serve::{JobInfo, ServeEvent, ServeOptions, Server, StuckPolicy};
use crate::engine::{exit_at_once, spawn, tune_allocator, utc_now};
use crate::failure::{Failure, Fault};
use crate::files::open_stream;
use crate::model::exported::allow_operators;
use crate::model::zoo::ModelError;
use crate::model::{Model, ModelSpec};
use crate::sync::lock;
use std::ffi::OsString;
use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The first argument of a program that is to be a worker.
pub(super) const WORKER: &str = "worker";

/// The flag of a worker that its driver started.
pub(super) const CHILD: &str = "--child";

/// The environment variable that holds the token, for driver and worker.
pub const TOKEN_VARIABLE: &str = "DISTGPIPE_TOKEN";

/// The environment variable that holds join strings of servers, for a driver.
pub const SERVER_VARIABLE: &str = "DISTGPIPE_SERVER";

/// The flag of a child that a server started, with the limits of its job as JSON.
pub const LIMITS: &str = "--limits";

/// The flag of a worker that lets exported models use one more operator.
pub(super) const ALLOW_OP: &str = "--allow-op";

/// How long the thread of a child may take to end after its run.
const CHILD_STUCK_AFTER: Duration = Duration::from_secs(3);

/// The largest token file that is read; a token is much shorter.
const TOKEN_BYTES_MAX: u64 = 4096;

/// The flags of a worker, for people.
const USAGE: &str = "\
usage: PROGRAM worker [--listen ADDR] [--expose] [--token-file FILE] [--once] [--allow-op NAME]

Waits for a driver that has the token, and runs the partitions it assigns. Prints `listening ADDRESS` once it accepts connections.

  --listen ADDR      address to listen on [default: 127.0.0.1:0; with port 0, the system chooses a port]
  --expose           allow an address that other machines can reach; network traffic is not encrypted
  --token-file FILE  file whose first line is the token [default: the environment variable DISTGPIPE_TOKEN, or a new token, which
                     is printed]
  --once             exit after the first job
  --allow-op NAME    let exported models use this operator too, such as erfinv.default; repeatable
";

/// Turns this process into a worker if it was started as one, and returns at once if it was not. Call it first in `main`:
///
/// ```no_run
/// use distgpipe::{Model, ModelSpec, SampleShape};
/// use distgpipe::zoo::{self, ModelError};
///
/// /// Builds a model by its spec, on the driver and on every worker.
/// fn models(spec: &ModelSpec) -> Result<Model, ModelError> {
///     match spec.name.as_str() {
///         "mine" => Ok(Model::new(vec![/* layers of your own */], vec![SampleShape::float(&[2])]).with_spec(spec.clone())),
///         _ => zoo::build(spec),
///     }
/// }
///
/// fn main() {
///     distgpipe::worker_mode(models);
///     // … the program
/// }
/// ```
///
/// A process is a worker if its first argument is `worker`. [`Workers::processes`](crate::Workers::processes) starts copies
/// of this program in that way. On another machine, start `my-app worker --listen 0.0.0.0:7000 --expose`, and name it in
/// [`Workers::Remote`](crate::Workers::Remote); `my-app worker --help` lists the flags.
///
/// In a worker this function does not return: it prints the address it listens on, [tunes the allocator](tune_allocator),
/// serves, reports failures on standard error, and ends the process, with status 1 after a failure and 2 for wrong usage.
/// A program that needs its first argument for itself, or that must not be ended, runs a [`Server`] instead.
pub fn worker_mode(models: fn(&ModelSpec) -> Result<Model, ModelError>) {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|first| first != WORKER) {
        return;
    }
    tune_allocator();
    let note = |text: &str| drop(writeln!(std::io::stderr(), "{text}"));
    let mut child = false;
    let served = WorkerFlags::parse(arguments).and_then(|flags| {
        let Some(flags) = flags else { return print(USAGE) };
        let worker = flags.start(models)?;
        child = flags.child;
        if let Some(token) = worker.new_token() {
            note(&format!("connect to {} with the token {TOKEN_VARIABLE}={token}", worker.address()?));
        }
        worker.serve(note)
    });
    exit_at_once(match served {
        Ok(()) => 0,
        Err(error) if child && error.is_of_run() => 1,
        Err(error) => {
            note(&format!("error: {error}"));
            if matches!(error, WorkerModeError::Usage(_)) {
                2
            } else {
                1
            }
        }
    })
}

/// Why a worker ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerModeError {
    /// A flag, or what it names, is wrong.
    #[error("{0}")]
    Usage(String),
    /// The worker cannot listen.
    #[error(transparent)]
    Start(#[from] Fault),
    /// The job failed.
    #[error(transparent)]
    Job(#[from] Failure),
    /// Standard output is closed.
    #[error("writing to standard output: {0}")]
    Output(#[source] std::io::Error),
}

impl WorkerModeError {
    /// Whether the run failed. The driver of a child says so itself, on the same terminal.
    pub fn is_of_run(&self) -> bool {
        matches!(self, WorkerModeError::Job(_))
    }
}

fn usage(text: impl Into<String>) -> WorkerModeError {
    WorkerModeError::Usage(text.into())
}

/// How a worker is started.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerFlags {
    /// The address to listen on; with port 0, the system chooses a port.
    pub listen: String,
    /// Whether to allow an address that other machines can reach.
    pub expose: bool,
    /// The file whose first line is the token.
    pub token_file: Option<PathBuf>,
    /// Whether to end after the first job.
    pub once: bool,
    /// Whether a driver on this host started the worker: it reads the token from standard input, and ends the process when
    /// standard input closes.
    pub child: bool,
    /// The limits of the job, if a server started the worker for a stranger.
    pub limits: Option<JobLimits>,
    /// Further operators that exported models may use; see [`allow_operators`].
    pub allow_ops: Vec<String>,
}

impl Default for WorkerFlags {
    fn default() -> Self {
        WorkerFlags {
            listen: "127.0.0.1:0".to_owned(),
            expose: false,
            token_file: None,
            once: false,
            child: false,
            limits: None,
            allow_ops: Vec::new(),
        }
    }
}

impl WorkerFlags {
    /// Parses the arguments after `worker`. `None` if they ask for help.
    fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Option<Self>, WorkerModeError> {
        let mut flags = WorkerFlags::default();
        let mut arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
        while let Some(argument) = arguments.next() {
            let (flag, inline) = match argument.split_once('=') {
                Some((flag, value)) => (flag, Some(value.to_owned())),
                None => (&argument[..], None),
            };
            let mut value = || {
                let given = inline.clone().or_else(|| arguments.next());
                given.ok_or_else(|| usage(format!("{flag}: expected a value after it\n\n{USAGE}")))
            };
            match flag {
                "--listen" => flags.listen = value()?,
                "--token-file" => flags.token_file = Some(value()?.into()),
                "--expose" if inline.is_none() => flags.expose = true,
                "--once" if inline.is_none() => flags.once = true,
                CHILD if inline.is_none() => flags.child = true,
                ALLOW_OP => flags.allow_ops.push(value()?),
                LIMITS => flags.limits = Some(limits_of(&value()?)?),
                "--help" | "-h" => return Ok(None),
                _ => return Err(usage(format!("expected flags of a worker, got `{argument}`\n\n{USAGE}"))),
            }
        }
        Ok(Some(flags))
    }

    /// Opens the port. `models` builds the models of jobs.
    pub fn start(
        &self,
        models: fn(&ModelSpec) -> Result<Model, ModelError>,
    ) -> Result<ListeningWorker, WorkerModeError> {
        match &self.limits {
            Some(limits) => limits.enter()?,
            None => declare_worker_process(),
        }
        allow_operators(&self.allow_ops).map_err(|e| usage(format!("{ALLOW_OP}: {e}")))?;
        let given = if self.child { Some(token_from_parent()?) } else { given_token(self.token_file.as_deref())? };
        let token = given.map_or_else(Token::random, Ok)?;
        let listen = self.address()?;
        let options = ServeOptions {
            expose: self.expose,
            once: self.once || self.child,
            models,
            limits: self.limits.clone(),
            // The driver that started a child waits for its end.
            stuck_after: if self.child { CHILD_STUCK_AFTER } else { ServeOptions::new(listen, token).stuck_after },
            on_stuck: StuckPolicy::ExitProcess,
            ..ServeOptions::new(listen, token)
        };
        if !options.listen.ip().is_loopback() && !options.expose {
            return Err(usage(format!(
                "--listen {}: other machines can reach this address, and network traffic is not encrypted: add --expose to \
                 allow it, or listen on 127.0.0.1",
                self.listen
            )));
        }
        Ok(ListeningWorker {
            server: Server::bind(options)?,
            new_token: given.is_none().then_some(token),
            quiet: self.child && self.limits.is_none(),
            of_server: self.limits.is_some(),
            current: CurrentRun::default(),
        })
    }

    fn address(&self) -> Result<SocketAddr, WorkerModeError> {
        let found = self.listen.to_socket_addrs().ok().and_then(|mut all| all.next());
        found.ok_or_else(|| {
            usage(format!("--listen {}: expected an address and a port, such as 127.0.0.1:7000", self.listen))
        })
    }
}

/// A worker that listens.
pub struct ListeningWorker {
    server: Server,
    new_token: Option<Token>,
    /// Whether its log is left to the driver that started it.
    quiet: bool,
    /// Whether a server started it.
    of_server: bool,
    current: CurrentRun,
}

/// The run that a worker is in, for a program that a signal ends.
#[derive(Clone, Debug, Default)]
pub struct CurrentRun(Arc<Mutex<Option<(String, Instant)>>>);

impl CurrentRun {
    fn set(&self, run: Option<String>) {
        *lock(&self.0) = run.map(|run| (run, Instant::now()));
    }

    /// The last line of the worker's log if this ends its process now.
    pub fn ended_by(&self, cause: &str) -> String {
        let line = match &*lock(&self.0) {
            Some((run, start)) => {
                format!("run {run} failed after {:.1} s: {cause} ended this worker", start.elapsed().as_secs_f64())
            }
            None => format!("{cause} ended this worker"),
        };
        format!("{} {line}", utc_now())
    }
}

impl ListeningWorker {
    /// The token, if the worker was given none and made one.
    pub fn new_token(&self) -> Option<Token> {
        self.new_token
    }

    /// The address it listens on.
    pub fn address(&self) -> Result<SocketAddr, WorkerModeError> {
        Ok(self.server.address()?)
    }

    /// The run that it is in, also while it serves.
    pub fn current_run(&self) -> CurrentRun {
        self.current.clone()
    }

    /// Prints `listening ADDRESS` on standard output and serves until the process is killed, or until the first job is over
    /// where the flags say so. Passes the lines of its log to `note`.
    pub fn serve(&self, note: impl Fn(&str) + Send + 'static) -> Result<(), WorkerModeError> {
        let log = LogQueue::start(note)?;
        print(&format!("listening {}\n", self.server.listening()))?;
        let report = |event: &ServeEvent<'_>| {
            match event {
                ServeEvent::JobStarted(job) => self.current.set(Some(job.run.to_string())),
                ServeEvent::JobEnded { .. } => self.current.set(None),
                _ => {}
            }
            let Some(line) = log_line(event, self.quiet) else { return };
            // A server writes the time before each line of its jobs.
            log.write(if self.of_server { line } else { format!("{} {line}", utc_now()) });
        };
        Ok(self.server.run(|| false, report)?)
    }
}

/// A line of the worker's log. `None` for what the driver of a child reports itself.
fn log_line(event: &ServeEvent<'_>, quiet: bool) -> Option<String> {
    let line = match event {
        ServeEvent::Stuck(failure) => format!("error: {failure}; its thread does not end, so this process exits"),
        // A child's standard error is its driver's terminal, which shows the run.
        _ if quiet => return None,
        ServeEvent::Rejected(failure) => failure.to_string(),
        ServeEvent::JobStarted(job) => started(job),
        ServeEvent::JobEnded { job, duration, failure: None } => {
            format!("run {} is done after {:.1} s", job.run, duration.as_secs_f64())
        }
        ServeEvent::JobEnded { job, duration, failure: Some(failure) } => {
            format!("run {} failed after {:.1} s: {failure}", job.run, duration.as_secs_f64())
        }
        ServeEvent::RefusedBusy(driver) => format!("refused {driver}: busy with a run"),
        ServeEvent::Probed(peer) => format!("{peer} has measured the link"),
        ServeEvent::Notice(notice) => notice.to_string(),
    };
    Some(line)
}

fn started(job: &JobInfo) -> String {
    let partitions: Vec<String> = job.partitions.iter().map(ToString::to_string).collect();
    let s = |count: usize| if count == 1 { "" } else { "s" };
    let mut line = format!(
        "run {} from {}: {} as `{}`, partition{} {} of {}, {} thread{}",
        job.run,
        job.driver,
        job.model,
        job.worker,
        s(partitions.len()),
        partitions.join(","),
        job.partitions_in_all,
        job.threads,
        s(job.threads),
    );
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if job.threads > cores {
        line.push_str(&format!(
            "; warning: this host has {cores} core{}, so the threads slow each other down: give the driver fewer threads",
            s(cores)
        ));
    }
    line
}

/// The limits in the argument of [`LIMITS`].
pub fn limits_of(text: &str) -> Result<JobLimits, WorkerModeError> {
    serde_json::from_str(text).map_err(|e| usage(format!("{LIMITS}: {e}")))
}

fn print(text: &str) -> Result<(), WorkerModeError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(WorkerModeError::Output)
}

/// The token from the file, or else from the environment.
pub fn given_token(file: Option<&Path>) -> Result<Option<Token>, WorkerModeError> {
    let (from, text) = match (file, std::env::var(TOKEN_VARIABLE)) {
        (Some(path), _) => {
            let from = format!("--token-file {}", path.display());
            let mut text = String::new();
            let read = open_stream(path).and_then(|file| file.take(TOKEN_BYTES_MAX).read_to_string(&mut text));
            read.map_err(|e| usage(format!("{from}: {e}")))?;
            (from, text.lines().next().unwrap_or_default().to_owned())
        }
        (None, Ok(text)) => (format!("the variable {TOKEN_VARIABLE}"), text),
        (None, Err(_)) => return Ok(None),
    };
    text.parse().map(Some).map_err(|e| usage(format!("{from}: {e}")))
}

/// Reads the token from standard input, and ends this process when standard input closes, so that it does not outlive the
/// driver.
fn token_from_parent() -> Result<Token, WorkerModeError> {
    let mut line = String::new();
    let read = std::io::stdin().lock().take(TOKEN_BYTES_MAX).read_line(&mut line);
    read.map_err(|e| usage(format!("{CHILD}: reading the token from standard input: {e}")))?;
    let token = line.parse().map_err(|e| usage(format!("{CHILD}: first line of standard input: {e}")))?;
    spawn("end of the driver", || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        exit_at_once(1);
    })
    .map_err(Fault::from)?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Option<WorkerFlags>, String> {
        WorkerFlags::parse(arguments.iter().map(OsString::from)).map_err(|e| e.to_string())
    }

    #[test]
    fn flags_are_parsed_and_wrong_ones_come_with_the_usage() {
        assert_eq!(parse(&[]), Ok(Some(WorkerFlags::default())));
        let all = WorkerFlags {
            listen: "0.0.0.0:7000".to_owned(),
            expose: true,
            token_file: Some("token.txt".into()),
            once: true,
            child: false,
            limits: None,
            allow_ops: vec!["erfinv.default".to_owned()],
        };
        let given = ["--listen", "0.0.0.0:7000", "--expose", "--token-file=token.txt", "--once"];
        assert_eq!(parse(&[&given[..], &["--allow-op", "erfinv.default"]].concat()), Ok(Some(all)));
        assert_eq!(parse(&["--once", "--help"]), Ok(None));
        for (wrong, named) in
            [(&["--listen"][..], "--listen: "), (&["--port", "7"], "`--port`"), (&["--once=x"], "`--once=x`")]
        {
            let refused = parse(wrong).unwrap_err();
            assert!(refused.contains(named) && refused.contains("usage: PROGRAM worker"), "{refused}");
        }
    }

    #[test]
    fn an_address_that_others_can_reach_needs_expose_and_one_that_is_none_is_named() {
        for (listen, remedy) in [("0.0.0.0:0", "--expose"), ("nowhere", "such as 127.0.0.1:7000")] {
            let flags = WorkerFlags { listen: listen.to_owned(), ..WorkerFlags::default() };
            let refused = flags.start(crate::model::zoo::build).err().unwrap();
            assert!(matches!(&refused, WorkerModeError::Usage(text) if text.contains(remedy)), "{refused}");
        }
    }
}

//! `distgpipe serve`: a server for clients on networks that nobody trusts.

use crate::balance_options::size;
use crate::exit::usage;
use crate::report;
use crate::server_store::config_directory;
use anyhow::Context;
use distgpipe::comm::server_identity::ServerIdentity;
use distgpipe::driver::gateway::{Gateway, GatewayOptions};
use distgpipe::driver::job_limits::{AllowedModels, JobLimits};
use distgpipe::driver::log_queue::LogQueue;
use distgpipe::engine::{self, utc_now, Device, Devices};
use distgpipe::{JoinString, Timeouts, Workers};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// A kind of models that a server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ModelKind {
    /// Models of the zoo
    Builtin,
    /// Graphs that clients exported from PyTorch
    Exported,
}

/// Flags of `distgpipe serve`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  On the server, which generates a key on its first start and prints its join string on a terminal:
      distgpipe serve
  On the client, which has the data:
      distgpipe join gpu-box
      distgpipe train --place client,server,client --server gpu-box …

Every job runs in a separate process with resource limits. Traffic is encrypted (TLS 1.3). Only those who have the join string \
may send jobs, so treat it as a password. docs/deploy.md explains how to set up a server, and docs/security.md what each party can \
and cannot do.")]
pub struct ServeArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:7443")]
    listen: String,
    /// Address for the join string, where clients reach this server; repeatable [default: --listen, or this host's address]
    #[arg(long, value_name = "HOST[:PORT]")]
    address: Vec<String>,
    /// Device of the jobs: cpu, cuda:N, or auto (the first GPU, or the CPU if there is none)
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Devices,
    /// Maximum number of jobs at a time; the server tells further clients that it is busy
    #[arg(long, value_name = "N", default_value_t = 1)]
    jobs: usize,
    /// Memory limit of each job, such as 8GiB [default: 80 % of the free memory, divided by --jobs]
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Maximum number of libtorch threads per job [default: the cores of this host]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// End a job that makes no progress for this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1800.0)]
    idle: f64,
    /// Treat the connection to a client as broken when nothing arrives for this many seconds; its job then waits up to 120 s for the
    /// client to reconnect
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
    peer_timeout: f64,
    /// Address of a client that cannot reach this server: the server connects to it, where `train --listen` waits; repeatable
    #[arg(long, value_name = "HOST:PORT")]
    dial: Vec<String>,
    /// Another server that jobs here may be connected to, in pipelines over several servers; repeatable
    #[arg(long, value_name = "HOST[:PORT]")]
    allow: Vec<String>,
    /// Models that jobs may use: builtin, exported, or both as `builtin,exported`; --allow-op adds operators to those that
    /// exported models may use
    #[arg(long, value_name = "KINDS", value_delimiter = ',', default_value = "builtin,exported")]
    models: Vec<ModelKind>,
    /// File with the key and the secret of this server [default: $XDG_CONFIG_HOME/distgpipe/server]
    #[arg(long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Print the join string, and exit
    #[arg(long)]
    join_string: bool,
    /// Use plain TCP instead of TLS, on a loopback address, for benchmarks: others on this host can read and change everything
    #[arg(long)]
    insecure: bool,
}

/// Serves until stopped.
pub fn run(args: &ServeArgs) -> anyhow::Result<()> {
    // Otherwise the first client would hear that there is no such device.
    for device in args.device.iter().filter(|device| *device != Device::Auto && !args.join_string) {
        device.open().map_err(|e| usage(format!("--device {device}: {e}")))?;
    }
    let path = args.identity.clone().map_or_else(|| config_directory().map(|folder| folder.join("server")), Ok)?;
    let identity = ServerIdentity::load_or_create(&path).with_context(|| "the identity of this server")?;
    let listen = listen_address(&args.listen)?;
    if args.join_string {
        return report::print(&format!("{}\n", join_string(args, &identity, listen)?.to_text()));
    }
    let options = options(args, identity.clone(), listen)?;
    engine::raise_open_files_limit().context("raising the limit of open files")?;
    let (jobs, memory) = (options.jobs, options.limits.memory_bytes);
    let log = LogQueue::start(report::note)?;
    let gateway = Gateway::bind(options, move |event| log.write(format!("{} {event}", utc_now())))?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("taking over SIGINT and SIGTERM")?;
    }
    report::print(&format!("listening {}\n", gateway.address()))?;
    let memory = memory.map_or_else(|| "no limit of".to_owned(), |bytes| format!("{:.1} GB of", bytes as f64 / 1e9));
    report::note(&format!("{jobs} job{} at a time, {memory} memory each", if jobs == 1 { "" } else { "s" }));
    if args.insecure {
        report::note("warning: --insecure: nothing is encrypted, not even the secret");
    }
    // Output that goes elsewhere may be kept, in a journal for instance, which must not hold the secret.
    if std::io::stdout().is_terminal() {
        let text = join_string(args, &identity, gateway.address())?.to_text();
        report::note("on the client, run `distgpipe join NAME` and paste this line, which is secret:");
        report::print(&format!("{text}\n"))?;
    } else {
        report::note("`distgpipe serve --join-string` prints the join string");
    }
    gateway.run(|| stop.load(Ordering::Relaxed));
    Ok(())
}

fn options(args: &ServeArgs, identity: ServerIdentity, listen: SocketAddr) -> anyhow::Result<GatewayOptions> {
    if !(1..=64).contains(&args.jobs) {
        return Err(usage(format!("--jobs {}: expected 1 to 64", args.jobs)));
    }
    for (flag, seconds) in [("--idle", args.idle), ("--peer-timeout", args.peer_timeout)] {
        if !(seconds.is_finite() && (0.1..=1e7).contains(&seconds)) {
            return Err(usage(format!("{flag} {seconds}: expected seconds, from 0.1 to 1e7")));
        }
    }
    if args.insecure && !listen.ip().is_loopback() {
        return Err(usage(format!(
            "--insecure: expected --listen with a loopback address such as 127.0.0.1:7443, got {listen}"
        )));
    }
    if args.insecure && !args.allow.is_empty() {
        return Err(usage(
            "--insecure: expected no --allow: without TLS other servers would learn the secret of this one",
        ));
    }
    let memory_bytes =
        match &args.memory {
            Some(text) => {
                let bytes = size(text).filter(|&bytes| bytes >= 64 << 20);
                Some(bytes.ok_or_else(|| {
                    usage(format!("--memory {text}: expected a size of at least 64MiB, such as 8GiB"))
                })?)
            }
            None => engine::available_bytes().map(|bytes| bytes / 10 * 8 / args.jobs as u64),
        };
    let threads = args.threads.unwrap_or_else(|| engine::default_threads(1));
    engine::check_threads(threads).map_err(|e| usage(format!("--threads: {e}")))?;
    let limits = JobLimits {
        memory_bytes,
        threads,
        idle_s: args.idle,
        timeouts: Timeouts { silence_s: args.peer_timeout, ..Timeouts::default() },
        devices: args.device.clone(),
        models: match [ModelKind::Builtin, ModelKind::Exported].map(|kind| args.models.contains(&kind)) {
            [true, false] => AllowedModels::BuiltIn,
            [false, true] => AllowedModels::Exported,
            _ => AllowedModels::All,
        },
        ..JobLimits::default()
    };
    let Workers::Processes(program) = Workers::processes() else { anyhow::bail!("no program for jobs") };
    if let Some(wrong) = args.dial.iter().find(|address| !address.contains(':')) {
        return Err(usage(format!("--dial {wrong}: expected an address and a port, such as laptop.example.org:7444")));
    }
    let (allow, dial) = (args.allow.clone(), args.dial.clone());
    Ok(GatewayOptions { listen, identity, jobs: args.jobs, program, limits, allow, dial, insecure: args.insecure })
}

fn listen_address(text: &str) -> anyhow::Result<SocketAddr> {
    let found = text.to_socket_addrs().ok().and_then(|mut all| all.next());
    found.ok_or_else(|| usage(format!("--listen {text}: expected an address and a port, such as 0.0.0.0:7443")))
}

/// What a client needs to reach this server.
fn join_string(args: &ServeArgs, identity: &ServerIdentity, listen: SocketAddr) -> anyhow::Result<JoinString> {
    let with_port = |host: &String| match host.rsplit_once(':') {
        Some((_, port)) if port.parse::<u16>().is_ok() => host.clone(),
        _ => format!("{host}:{}", listen.port()),
    };
    let addresses = match args.address.is_empty() {
        false => args.address.iter().map(with_port).collect(),
        true if listen.ip().is_unspecified() => vec![SocketAddr::new(own_address(), listen.port()).to_string()],
        true => vec![listen.to_string()],
    };
    let server = JoinString { addresses, key: identity.key, secret: identity.secret };
    let valid = server.to_text().parse::<JoinString>().is_ok_and(|parsed| parsed == server);
    match valid {
        true => Ok(server),
        false => Err(usage("--address: expected a host name or an address, such as gpu-box or gpu-box:7443")),
    }
}

/// The address by which this host reaches others. No packet is sent.
fn own_address() -> IpAddr {
    let probe = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        // An address for documentation (RFC 5737): the system only chooses the route.
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    probe.map_or(IpAddr::from([127, 0, 0, 1]), |address| address.ip())
}

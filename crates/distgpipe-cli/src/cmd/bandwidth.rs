//! `distgpipe bandwidth`: measures a link as runs use it, before a run does.

mod output;

use crate::balance_options::size;
use crate::exit::usage;
use crate::files::NewFile;
use crate::report::{note, units};
use crate::server_store;
use anyhow::Context;
use clap::ArgGroup;
use distgpipe::comm::probe::bandwidth::{Direction, LinkTest, Transfer, CODECS_MAX, ROW_BYTES, TENSOR_BYTES_MAX};
use distgpipe::driver::bandwidth::{LinkPeer, LinkUnderTest};
use distgpipe::engine;
use distgpipe::{JoinString, Timeouts, Workers};
use distgpipe_core::codec::CodecSpec;
use std::path::PathBuf;

/// How many times a round trip is measured; the shortest counts.
const ROUND_TRIPS: usize = 20;
const EXCHANGES: usize = 5;

/// A size whose tensor would take longer than this to go there and back is left out.
const EXCHANGE_S_MAX: f64 = 20.0;

/// Flags of `distgpipe bandwidth`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  Measure the link to a server, with the codecs that suit most links:
      distgpipe bandwidth --server gpu-box
  Measure what this host can do, without a network, and plot it:
      distgpipe bandwidth --workers 2 --plot bandwidth.svg
  Measure one size and one codec:
      distgpipe bandwidth --server gpu-box --codec 'zstd(tile:4)' --sizes 16MiB

Tensors pass through the threads, frames, checksums and codecs of a training run. At a server they also pass through TLS and a job \
process, so a server whose --jobs are all in use refuses the measurement as busy. The receiver times them, from the arrival of the \
first to that of the last. A round trip is one tensor there and one back. `limited by` names the slowest part: the wire (everything \
between the two ends, including a server's relay), encoding, decoding, or copying (including checksums and encryption). With \
--workers 2, the other end is a process on this host: once over plain TCP, and once over TLS through a server that the command \
starts.")]
#[command(group = ArgGroup::new("peer").required(true))]
pub struct BandwidthArgs {
    /// Server to measure the link to, by the name that `distgpipe join` gave it
    #[arg(long, value_name = "NAME", group = "peer")]
    server: Option<String>,
    /// File with the join string of the server, instead of --server
    #[arg(long, value_name = "FILE", group = "peer")]
    server_file: Option<PathBuf>,
    /// Measure between this process and another one on this host; N must be 2
    #[arg(long, value_name = "N", group = "peer")]
    workers: Option<usize>,
    /// Codecs to measure; repeatable
    #[arg(long, value_name = "CODEC,…", value_delimiter = ',', default_value = "raw,tile:4,sort:8,zstd(tile:4)")]
    codec: Vec<CodecSpec>,
    /// Sizes of the tensors in memory, multiples of 4KiB
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = "4KiB,32KiB,256KiB,2MiB,16MiB,128MiB")]
    sizes: Vec<String>,
    /// Duration of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    seconds: f64,
    /// Threads that encode and decode at each end
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Plot throughput over size to this file
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    plot: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The figures of one link.
struct Link {
    name: String,
    transport: &'static str,
    round_trip_s: f64,
    rows: Vec<Row>,
}

/// The figures of one codec and size.
struct Row {
    codec: CodecSpec,
    tensor_bytes: u64,
    round_trip_s: f64,
    there: Transfer,
    back: Transfer,
}

/// Measures, and prints the result.
pub fn run(args: &BandwidthArgs) -> anyhow::Result<()> {
    let plot = args.plot.as_deref().map(|path| NewFile::at("--plot", path)).transpose()?;
    let (test, sizes) = (test(args)?, sizes(args)?);
    let mut links = Vec::new();
    for (name, transport, peer) in peers(args)? {
        let link = measure(&name, transport, &peer, &test, &sizes, args.seconds);
        links.push(link.with_context(|| format!("measuring the link to {name}"))?);
    }
    if let Some(plot) = plot {
        plot.write(output::plot(&links).as_bytes())?;
    }
    output::print(&links, args)
}

fn test(args: &BandwidthArgs) -> anyhow::Result<LinkTest> {
    let mut codecs: Vec<CodecSpec> = Vec::new();
    for codec in &args.codec {
        if !codecs.contains(codec) {
            codecs.push(codec.clone());
        }
    }
    if codecs.len() > CODECS_MAX {
        return Err(usage(format!("--codec: expected at most {CODECS_MAX} codecs, got {}", codecs.len())));
    }
    engine::check_threads(args.threads).map_err(|e| usage(format!("--threads: {e}")))?;
    if !(args.seconds.is_finite() && (0.001..=10.0).contains(&args.seconds)) {
        return Err(usage(format!("--seconds {}: expected seconds, from 0.001 to 10", args.seconds)));
    }
    let test = LinkTest { codecs, threads: args.threads };
    test.check().map_err(|e| usage(format!("--codec: {e}")))?;
    Ok(test)
}

/// The sizes in bytes, in rising order.
fn sizes(args: &BandwidthArgs) -> anyhow::Result<Vec<u64>> {
    let mut sizes = Vec::new();
    for text in &args.sizes {
        let valid = |bytes: &u64| (ROW_BYTES..=TENSOR_BYTES_MAX).contains(bytes) && bytes.is_multiple_of(ROW_BYTES);
        let bytes = size(text).filter(valid);
        sizes.push(bytes.ok_or_else(|| {
            usage(format!("--sizes {text}: expected a multiple of 4KiB, from 4KiB to {}MiB", TENSOR_BYTES_MAX >> 20))
        })?);
    }
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}

/// The links to measure, with their names and transports.
fn peers(args: &BandwidthArgs) -> anyhow::Result<Vec<(String, &'static str, LinkPeer)>> {
    let server = |name: String, server: JoinString| vec![(name, "tls", LinkPeer::Server(server))];
    match (&args.server, &args.server_file, args.workers) {
        (Some(name), ..) => Ok(server(name.clone(), server_store::read(name)?)),
        (None, Some(path), _) => match &server_store::in_file(path)?[..] {
            [one] => Ok(server(one.addresses.join(", "), one.clone())),
            several => Err(usage(format!(
                "--server-file {}: expected the join string of one server, got {}",
                path.display(),
                several.len()
            ))),
        },
        (None, None, workers) => {
            if workers != Some(2) {
                let got = workers.map_or_else(|| "none".to_owned(), |workers| workers.to_string());
                return Err(usage(format!("--workers: expected 2, this process and another one; got {got}")));
            }
            let Workers::Processes(program) = Workers::processes() else { anyhow::bail!("no program for workers") };
            Ok(vec![
                ("a process on this host".to_owned(), "tcp", LinkPeer::Process(program.clone())),
                ("a server on this host".to_owned(), "tls", LinkPeer::LocalServer(program)),
            ])
        }
    }
}

fn measure(
    name: &str,
    transport: &'static str,
    peer: &LinkPeer,
    test: &LinkTest,
    sizes: &[u64],
    seconds: f64,
) -> anyhow::Result<Link> {
    let mut link = LinkUnderTest::connect(peer, test, Timeouts::default())?;
    let end = link.end()?;
    let mut round_trip_s = f64::INFINITY;
    for _ in 0..ROUND_TRIPS {
        round_trip_s = round_trip_s.min(end.round_trip()?.as_secs_f64());
    }
    let mut rows = Vec::new();
    for (index, codec) in test.codecs.iter().enumerate() {
        let mut last: Option<(u64, f64)> = None;
        for &tensor_bytes in sizes {
            let expected_s = last.map_or(0.0, |(bytes, took)| took * tensor_bytes as f64 / bytes as f64);
            if expected_s > EXCHANGE_S_MAX {
                note(&format!(
                    "{name}, {codec}: {} and larger tensors are left out: one would take about {} there and back",
                    units::bytes(tensor_bytes as f64),
                    units::duration(expected_s)
                ));
                break;
            }
            let (mut exchange_s, mut spent) = (f64::INFINITY, 0.0);
            for _ in 0..EXCHANGES {
                let took = end.exchange(index, tensor_bytes)?.as_secs_f64();
                (exchange_s, spent) = (exchange_s.min(took), spent + took);
                if spent >= seconds {
                    break;
                }
            }
            last = Some((tensor_bytes, exchange_s));
            let there = end.measure(Direction::There, index, tensor_bytes, exchange_s, seconds)?;
            let back = end.measure(Direction::Back, index, tensor_bytes, exchange_s, seconds)?;
            rows.push(Row { codec: codec.clone(), tensor_bytes, round_trip_s: exchange_s, there, back });
        }
    }
    Ok(Link { name: name.to_owned(), transport, round_trip_s, rows })
}

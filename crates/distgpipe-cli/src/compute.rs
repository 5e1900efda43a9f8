//! What the workers of a run compute on: devices and libtorch threads.

use crate::args::TrainFlags;
use crate::exit::usage;
use crate::report::units::plural;
use distgpipe::engine::{check_threads, default_threads, Devices, THREADS_MAX};
use distgpipe::{GraphMode, Workers};
use std::fmt;

/// The cores of this host that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The value of `--threads`; by default the cores of this host, divided by the workers on the host that has most.
pub fn threads(given: Option<usize>, workers_on_host: usize) -> anyhow::Result<usize> {
    match given {
        None => Ok(default_threads(workers_on_host)),
        Some(threads) => {
            check_threads(threads).map_err(|e| usage(format!("--threads {}: use 1 to {THREADS_MAX}", e.got)))
        }
    }
}

/// Devices and threads of a run. Its text is one of the first lines that a run prints.
pub struct Compute {
    /// As opened on this host: `auto` is resolved.
    devices: Vec<String>,
    /// libtorch threads of each worker.
    pub threads: usize,
    /// How many workers the cores were divided by, if the number of threads is the default.
    shared_by: Option<usize>,
    /// Workers on this host.
    local_workers: usize,
    remote: bool,
    /// Whether workers on GPUs would use CUDA graphs if they were not replicas.
    replicas_lack_graphs: bool,
}

impl Compute {
    /// Checks `--device` and `--threads`, and fills in the number of threads. `worker_count` includes all replicas.
    pub fn new(flags: &TrainFlags, workers: &Workers, worker_count: usize) -> anyhow::Result<Self> {
        let workers_on_host = workers.most_on_one_host(worker_count);
        let remote = workers.open_devices_elsewhere();
        Ok(Compute {
            devices: open_devices(&flags.devices(), worker_count, remote)?,
            threads: threads(flags.threads, workers_on_host)?,
            shared_by: flags.threads.is_none().then_some(workers_on_host),
            local_workers: workers.on_this_host(worker_count),
            remote,
            replicas_lack_graphs: flags.replicas.unwrap_or(1) > 1 && flags.graphs.unwrap_or_default() != GraphMode::Off,
        })
    }

    /// A warning if the workers of this host have more threads than it has cores.
    pub fn warning(&self) -> Option<String> {
        let threads = self.threads.saturating_mul(self.local_workers);
        // Few libtorch threads have work to do while a GPU computes.
        let on_cpu = self.devices.iter().any(|device| device == "cpu");
        (threads > cores() && self.threads > 1 && on_cpu).then(|| {
            format!(
                "warning: {} on this host with {} each, but it has {}: threads that share a core slow each other down; use \
                 --threads {}, or leave it out",
                plural(self.local_workers, "worker"),
                plural(self.threads, "thread"),
                plural(cores(), "core"),
                default_threads(self.local_workers)
            )
        })
    }

    /// Whether workers that this process starts run on a GPU.
    pub fn uses_gpu(&self) -> bool {
        self.devices.iter().any(|device| device.starts_with("cuda"))
    }
}

impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device{} {}", if self.devices.len() == 1 { "" } else { "s" }, self.devices.join(", "))?;
        if self.remote {
            f.write_str(" on this host")?;
        }
        write!(f, ", {} per worker", plural(self.threads, "thread"))?;
        if let Some(workers) = self.shared_by {
            let where_to = if self.remote { " per host at most" } else { "" };
            write!(f, " ({}, {}{where_to})", plural(cores(), "core"), plural(workers, "worker"))?;
        }
        if self.replicas_lack_graphs && self.uses_gpu() {
            f.write_str("; without CUDA graphs, because replicas share gradients while backward passes run")?;
        }
        Ok(())
    }
}

/// Checks that there are no more devices than workers, and opens those of the workers that this process starts. Returns their
/// names, with `auto` resolved.
fn open_devices(devices: &Devices, worker_count: usize, remote: bool) -> anyhow::Result<Vec<String>> {
    if devices.count() > worker_count {
        return Err(usage(format!(
            "--device {devices}: there are {} devices and {}: name fewer devices, or use more partitions",
            devices.count(),
            plural(worker_count, "worker")
        )));
    }
    let here = if remote { 1 } else { devices.count() };
    let open = |device: distgpipe::engine::Device| {
        device.open().map_err(|e| usage(format!("--device: {e}")))?;
        Ok(device.resolved().to_string())
    };
    devices.iter().take(here).map(open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::comm::handshake::Token;

    fn remote(addresses: &[&str]) -> Workers {
        let addresses = addresses.iter().map(|&address| address.to_owned()).collect();
        Workers::Remote { addresses, token: Token::random().unwrap() }
    }

    #[test]
    fn threads_share_the_cores_of_the_host() {
        assert_eq!(Workers::Threads.most_on_one_host(6), 6);
        assert_eq!(remote(&["10.0.0.2:7000", "server:7000"]).most_on_one_host(3), 1);
        assert_eq!(remote(&["127.0.0.1:7000", "[::1]:7000", "localhost:1", "h:1"]).most_on_one_host(5), 4);
        assert_eq!(threads(None, 1).unwrap(), cores().min(THREADS_MAX));
        assert_eq!((threads(None, usize::MAX).unwrap(), threads(Some(7), 1).unwrap()), (1, 7));
        assert!(threads(Some(0), 1).is_err() && threads(Some(THREADS_MAX + 1), 1).is_err());
    }

    /// 1024 threads on two cores once ran at a fraction of the speed without a word.
    #[test]
    fn more_threads_than_cores_are_worth_a_warning() {
        let cpu = TrainFlags { device: Some("cpu".parse().unwrap()), ..TrainFlags::default() };
        let warning = |threads: Option<usize>, workers: &Workers, count| {
            let flags = TrainFlags { threads, ..cpu.clone() };
            Compute::new(&flags, workers, count).unwrap().warning()
        };
        let cores = cores();
        let said = warning(Some(cores + 1), &Workers::Threads, 1).unwrap();
        assert!(said.contains("1 worker on this host") && said.contains(&format!("--threads {cores}")), "{said}");
        assert!(warning(Some(cores.max(2)), &Workers::Threads, 2).is_some(), "two workers share the cores");
        for (threads, workers, count) in [
            (Some(cores), Workers::Threads, 1),
            (None, Workers::Threads, 100),
            (Some(1), Workers::Threads, 100),
            (Some(cores), remote(&["10.0.0.2:7000"]), 2),
        ] {
            assert_eq!(warning(threads, &workers, count), None, "{threads:?} {count}");
        }
    }

    #[test]
    fn the_first_lines_name_devices_and_threads() {
        let text =
            |flags: &TrainFlags, workers: &Workers, count| Compute::new(flags, workers, count).unwrap().to_string();
        let cpu = TrainFlags { device: Some("cpu".parse().unwrap()), ..TrainFlags::default() };
        let (cores, given) = (cores(), TrainFlags { threads: Some(3), ..cpu.clone() });
        let s = if cores == 1 { "" } else { "s" };
        assert_eq!(
            text(&cpu, &Workers::Threads, cores + 1),
            format!("device cpu, 1 thread per worker ({cores} core{s}, {} workers)", cores + 1)
        );
        assert_eq!(text(&given, &Workers::Threads, 2), "device cpu, 3 threads per worker");
        let far = text(&cpu, &remote(&["10.0.0.2:7000"]), 2);
        assert!(far.starts_with("device cpu on this host, ") && far.ends_with("1 worker per host at most)"), "{far}");
        assert_eq!(
            text(&TrainFlags { device: Some("cpu,cpu".parse().unwrap()), ..given }, &Workers::Threads, 2),
            "devices cpu, cpu, 3 threads per worker"
        );
        let replicas = TrainFlags { replicas: Some(2), ..cpu };
        let on_cpu = Compute::new(&replicas, &Workers::Threads, 2).unwrap();
        assert!(!on_cpu.to_string().contains("graphs"));
        let on_gpu = Compute { devices: vec!["cuda:0".to_owned()], ..on_cpu };
        assert!(on_gpu
            .to_string()
            .ends_with("; without CUDA graphs, because replicas share gradients while backward passes run"));
    }
}

//! The memory of a run, counted as the published tables count it.

use super::{FinishedRun, Metric, RunFigure};
use crate::report::units;
use distgpipe::engine::Device;
use distgpipe::train::WorkerSummary;
use distgpipe::Optim;
use std::collections::BTreeMap;

/// Bytes of an fp32 parameter.
const PARAMETER_BYTES: u64 = 4;
const GIB: f64 = (1u64 << 30) as f64;

/// The memory of all workers together, or a part of it.
pub(super) fn memory(metric: Metric, ran: &FinishedRun<'_>) -> RunFigure {
    let workers = &ran.report.summary.workers;
    let on_gpu = workers.iter().any(|worker| worker.reserved_bytes.is_some());
    // A GPU's allocator counts all threads of a process together: each worker on the GPU reports the same figure.
    let threads = ran.flags.workers.as_deref().unwrap_or("threads") == "threads";
    let devices = ran.flags.devices();
    let shared = |worker: usize| match devices.for_worker(worker).resolved() {
        Device::Cuda(gpu) if threads => Some(gpu),
        _ => None,
    };
    let gpus: Vec<Option<usize>> = (0..workers.len()).map(shared).collect();
    let peak = together(workers, &gpus, peak_of);
    let held = together(workers, &gpus, |worker| worker.peak_bytes);
    // As in the published benchmark: copies of the parameters, and everything else is activations.
    let copies = copies(ran.optim);
    let model = ran.report.parameters * PARAMETER_BYTES * copies * ran.report.replicas as u64;
    let less = if metric == Metric::ActivationMemory { model } else { 0 };
    let bytes = match metric {
        Metric::ModelMemory => model,
        _ => peak.saturating_sub(less),
    };
    let mut text = amount(bytes);
    if metric == Metric::ModelMemory {
        text = format!("{text}, counted as {copies} copies of the parameters");
    } else if on_gpu {
        text = format!("{text} reserved on the GPU, {} of it in tensors", amount(held.saturating_sub(less)));
    }
    // Some rows have the memory of each GPU.
    let alone = gpus.iter().enumerate().all(|(i, gpu)| gpu.is_none() || !gpus[..i].contains(gpu));
    let mut apart = BTreeMap::new();
    if metric == Metric::Memory && alone && workers.len() > 1 {
        let each = workers.iter().map(|worker| format!("{} {}", worker.name, amount(peak_of(worker))));
        text = format!("{text}: {}", each.collect::<Vec<_>>().join(", "));
        apart.extend(workers.iter().map(|worker| (worker.name.clone(), peak_of(worker) as f64)));
    }
    RunFigure::Measured { text, value: Some(bytes as f64), workers: apart }
}

/// The sum over all workers, in which workers that share a GPU count once.
fn together(workers: &[WorkerSummary], gpus: &[Option<usize>], bytes: fn(&WorkerSummary) -> u64) -> u64 {
    let (mut alone, mut shared) = (0, BTreeMap::<usize, u64>::new());
    for (worker, gpu) in workers.iter().zip(gpus) {
        match gpu {
            None => alone += bytes(worker),
            Some(gpu) => {
                let most = shared.entry(*gpu).or_default();
                *most = bytes(worker).max(*most);
            }
        }
    }
    alone + shared.values().sum::<u64>()
}

/// The published measure: memory reserved by a GPU's allocator; on a CPU, the peak of tensors.
fn peak_of(worker: &WorkerSummary) -> u64 {
    worker.reserved_bytes.unwrap_or(worker.peak_bytes)
}

/// Bytes as text, from 1 GiB on in the unit of the published tables.
fn amount(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= GIB => format!("{:.2} GiB", bytes / GIB),
        bytes => units::bytes(bytes),
    }
}

/// How many copies of the parameters a run keeps: parameters, gradients and the optimizer's state.
fn copies(optim: Optim) -> u64 {
    2 + distgpipe::UpdateRule::state_tensors(&optim) as u64
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;
    use crate::args::TrainFlags;

    /// The published table of AmoebaNet-D counts three copies of the parameters, that of U-Net two.
    #[test]
    fn copies_of_the_parameters_depend_on_the_optimizer() {
        let optims = [Optim::sgd(0.0), Optim::sgd(0.9), Optim::rms_prop(0.0), Optim::adamw()];
        assert_eq!(optims.map(copies), [2, 3, 3, 4]);
    }

    /// Published figures are memory reserved by allocators. Threads share an allocator.
    #[test]
    fn memory_reserved_on_a_gpu_counts_once_for_threads_that_share_it() {
        let said = |metric, reserved, workers: &str| {
            let (workers, devices) = match workers {
                "two GPUs" => ("threads", "cuda:0,cuda:1"),
                "one GPU twice" => ("threads", "cuda:0,cuda:0"),
                "CPU" => ("threads", "cpu"),
                workers => (workers, "cuda:0"),
            };
            let device = Some(devices.parse().unwrap());
            let flags = TrainFlags { workers: Some(workers.to_owned()), device, ..TrainFlags::default() };
            let report = report(reserved, 1);
            let RunFigure::Measured { text, value, .. } =
                memory(metric, &FinishedRun { report: &report, flags: &flags, optim: Optim::sgd(0.0) })
            else {
                panic!("memory is always measured")
            };
            (text, value)
        };
        let whole = |reserved, workers| said(Metric::Memory, reserved, workers);
        let taken = "90.0 MB reserved on the GPU, 70.0 MB of it in tensors";
        assert_eq!(whole(Some(90_000_000), "threads"), (taken.to_owned(), Some(90e6)));
        let each = "180.0 MB reserved on the GPU, 140.0 MB of it in tensors: w0 90.0 MB, w1 90.0 MB";
        assert_eq!(whole(Some(90_000_000), "processes"), (each.to_owned(), Some(180e6)));
        assert_eq!(whole(Some(90_000_000), "two GPUs"), (each.to_owned(), Some(180e6)));
        assert_eq!(whole(Some(90_000_000), "one GPU twice"), (taken.to_owned(), Some(90e6)));
        assert_eq!(whole(None, "CPU"), ("140.0 MB: w0 70.0 MB, w1 70.0 MB".to_owned(), Some(140e6)));
        let above = "80.0 MB reserved on the GPU, 60.0 MB of it in tensors";
        let activations = said(Metric::ActivationMemory, Some(90_000_000), "threads");
        assert_eq!(activations, (above.to_owned(), Some(80e6)));
    }
}

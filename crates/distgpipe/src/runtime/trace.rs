//! Timing: workers record how long each phase takes, and single events in a traced run. Tables, the progress display
//! and trace files all read these records.

mod chrome;

pub use chrome::ChromeTrace;

use crate::engine::cuda::{self, CudaStream};
use crate::sync::lock;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::Write;
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What a worker spends its time on.
///
/// On a GPU these are the times to launch kernels. The kernels' own time appears where the worker next waits for the
/// device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Forward passes, in training or evaluation.
    Forward,
    /// Forward passes that are run again for their activations.
    Recompute,
    /// Backward passes, without the wait for gradients.
    Backward,
    /// Handing messages to links.
    Send,
    /// Waiting for messages from other workers.
    ReceiveWait,
    /// Receiving rows from the driver, and copying them to the device. The loader has finished the batch before.
    Loading,
    /// The optimizer's update and the batch-norm commit.
    Optimizer,
    /// Waiting, after the backward pass, for the sum of the replicas' gradients.
    GradientWait,
    /// Summing a bucket of the replicas' gradients, on a thread of its own.
    AllReduce,
    /// Encoding by a codec, on the link's thread.
    Encode,
    /// Decoding by a codec, on the link's thread.
    Decode,
}

impl Phase {
    /// The phases of a worker's own thread, in the order of tables. Together they make up a step. Encoding, decoding
    /// and the all-reduce run in the background.
    pub const ALL: [Phase; 8] = [
        Phase::Forward,
        Phase::Recompute,
        Phase::Backward,
        Phase::Send,
        Phase::ReceiveWait,
        Phase::Loading,
        Phase::Optimizer,
        Phase::GradientWait,
    ];

    /// The name in tables and traces.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
            Phase::Send => "send",
            Phase::ReceiveWait => "receive wait",
            Phase::Loading => "loading",
            Phase::Optimizer => "optimizer",
            Phase::GradientWait => "gradient wait",
            Phase::AllReduce => "all-reduce",
            Phase::Encode => "encode",
            Phase::Decode => "decode",
        }
    }
}

/// Nanoseconds in each phase of [`Phase::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseTimes(pub [u64; 8]);

impl PhaseTimes {
    /// Adds time to a phase. Phases outside [`Phase::ALL`] are ignored.
    pub fn add(&mut self, phase: Phase, ns: u64) {
        if let Some(time) = self.0.get_mut(phase as usize) {
            *time = time.saturating_add(ns);
        }
    }

    /// Nanoseconds in a phase.
    pub fn time_in(&self, phase: Phase) -> u64 {
        self.0.get(phase as usize).copied().unwrap_or(0)
    }

    /// The sum of two measurements, phase by phase.
    pub fn plus(mut self, other: &PhaseTimes) -> PhaseTimes {
        for (a, b) in self.0.iter_mut().zip(other.0) {
            *a = a.saturating_add(b);
        }
        self
    }

    /// Nanoseconds in all phases together.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, ns| sum.saturating_add(*ns))
    }
}

/// One event of a traced run: what a worker did in one interval of time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The worker's number among all members of the run.
    pub worker: u32,
    /// The number of the step.
    pub step: u64,
    /// The phase that the time counts towards.
    pub phase: Phase,
    /// The action of the plan, such as `1F3`; empty outside the plan.
    pub action: String,
    /// Start, in nanoseconds since 1970.
    pub start_ns: u64,
    /// End, in nanoseconds since 1970.
    pub end_ns: u64,
}

/// The time in nanoseconds since 1970. It never goes backwards within a process.
///
/// Times of different hosts are comparable only as far as their clocks agree.
pub fn now_ns() -> u64 {
    static ORIGIN: OnceLock<(Instant, u64)> = OnceLock::new();
    let (instant, epoch) = ORIGIN.get_or_init(|| {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        (Instant::now(), u64::try_from(epoch).unwrap_or(0))
    });
    epoch + u64::try_from(instant.elapsed().as_nanos()).unwrap_or(u64::MAX / 2)
}

/// What the time of a phase covers on a GPU. On a CPU there is no difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseTiming {
    /// The launch of its kernels, which the worker does not wait for.
    #[default]
    Launch,
    /// Their execution: the worker waits for the GPU after each action. Nothing overlaps within a worker then, so steps take longer.
    Exact,
}

impl FromStr for PhaseTiming {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "launch" => Ok(PhaseTiming::Launch),
            "exact" => Ok(PhaseTiming::Exact),
            _ => Err("expected `launch` or `exact`".to_owned()),
        }
    }
}

impl fmt::Display for PhaseTiming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PhaseTiming::Launch => "launch",
            PhaseTiming::Exact => "exact",
        })
    }
}

/// Records the phases of a worker's own thread.
#[derive(Debug)]
pub struct Recorder {
    worker: u32,
    keep: bool,
    /// The GPU whose work belongs to a phase.
    awaited: Option<usize>,
    /// Time per phase since the last [`Recorder::take`].
    pub times: PhaseTimes,
    /// Events since the last [`Recorder::take`].
    pub spans: Vec<Span>,
}

impl Recorder {
    /// The recorder of a worker on a device. Single events are recorded only with `keep`.
    pub fn new(worker: u32, keep: bool, timing: PhaseTiming, device: tch::Device) -> Self {
        let awaited = cuda::index(device).filter(|_| timing == PhaseTiming::Exact);
        Recorder { worker, keep, awaited, times: PhaseTimes::default(), spans: Vec::new() }
    }

    /// Records a phase that started at `start_ns` and ends now.
    pub fn record(&mut self, step: u64, phase: Phase, action: impl FnOnce() -> String, start_ns: u64) {
        if let Some(device) = self.awaited {
            // A GPU that fails ends the run at the next operation.
            let _ = CudaStream::current(device).and_then(CudaStream::synchronize);
        }
        let end_ns = now_ns();
        self.times.add(phase, end_ns.saturating_sub(start_ns));
        if self.keep {
            self.spans.push(Span { worker: self.worker, step, phase, action: action(), start_ns, end_ns });
        }
    }

    /// Returns the records since the last call.
    pub fn take(&mut self) -> (PhaseTimes, Vec<Span>) {
        (std::mem::take(&mut self.times), std::mem::take(&mut self.spans))
    }
}

/// Records the events of a worker's links, which run on threads of their own.
#[derive(Clone, Debug)]
pub struct BackgroundRecorder {
    worker: u32,
    /// Absent if the run is not traced.
    spans: Option<Arc<Mutex<Vec<Span>>>>,
}

impl BackgroundRecorder {
    /// The recorder of a worker. Single events are recorded only with `keep`.
    pub fn new(worker: u32, keep: bool) -> Self {
        BackgroundRecorder { worker, spans: keep.then(Arc::default) }
    }

    /// Records a phase that started at `start_ns` and ends now.
    pub fn record(&self, step: u64, phase: Phase, action: &dyn fmt::Display, start_ns: u64) {
        let Some(spans) = &self.spans else { return };
        let span = Span { worker: self.worker, step, phase, action: action.to_string(), start_ns, end_ns: now_ns() };
        lock(spans).push(span);
    }

    /// Returns the records since the last call.
    pub fn take(&self) -> Vec<Span> {
        self.spans.as_ref().map(|spans| std::mem::take(&mut *lock(spans))).unwrap_or_default()
    }
}

/// Writes events as JSON, one per line.
pub fn write_jsonl(out: &mut impl Write, spans: &[Span]) -> std::io::Result<()> {
    for span in spans {
        serde_json::to_writer(&mut *out, span)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timing_is_written_as_it_is_read() {
        for timing in [PhaseTiming::Launch, PhaseTiming::Exact] {
            assert_eq!(timing.to_string().parse(), Ok(timing));
            assert_eq!(serde_json::to_string(&timing).unwrap(), format!("\"{timing}\""));
        }
        assert!("gpu".parse::<PhaseTiming>().is_err());
    }
}

//! What happened when. Stages emit typed events; progress bars, tables and trace files are readers of them.

use serde::{Deserialize, Serialize};
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What a worker spends its time on.
///
/// On a GPU these are the times of launching; the work itself shows where the worker next waits for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Forward passes.
    Forward,
    /// Forward passes done again for their activations.
    Recompute,
    /// Backward passes.
    Backward,
    /// Handing messages to links.
    Send,
    /// Waiting for messages of other workers.
    ReceiveWait,
    /// Waiting for input from the loader.
    Loading,
    /// Optimizer step, batch-norm commit, and adding up the gradients of replicas.
    Optimizer,
    /// Encoding by a link's codec, on the link's thread.
    Encode,
    /// Decoding by a link's codec, on the link's thread.
    Decode,
}

impl Phase {
    /// Those of a stage's own thread, in the order tables show them. Together they make up a step; encoding and decoding
    /// go on beside it.
    pub const ALL: [Phase; 7] = [
        Phase::Forward,
        Phase::Recompute,
        Phase::Backward,
        Phase::Send,
        Phase::ReceiveWait,
        Phase::Loading,
        Phase::Optimizer,
    ];

    /// The word tables and traces use.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
            Phase::Send => "send",
            Phase::ReceiveWait => "receive wait",
            Phase::Loading => "loading",
            Phase::Optimizer => "optimizer",
            Phase::Encode => "encode",
            Phase::Decode => "decode",
        }
    }
}

/// Nanoseconds per [`Phase`] of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseTimes(pub [u64; 7]);

impl PhaseTimes {
    /// Adds time to a phase.
    pub fn add(&mut self, phase: Phase, ns: u64) {
        if let Some(time) = self.0.get_mut(phase as usize) {
            *time = time.saturating_add(ns);
        }
    }

    /// The time of a phase.
    pub fn of(&self, phase: Phase) -> u64 {
        self.0.get(phase as usize).copied().unwrap_or(0)
    }

    /// The sum of two measurements.
    pub fn plus(mut self, other: &PhaseTimes) -> PhaseTimes {
        for (a, b) in self.0.iter_mut().zip(other.0) {
            *a = a.saturating_add(b);
        }
        self
    }

    /// All phases together.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, ns| sum.saturating_add(*ns))
    }
}

/// One event: a worker did something from then to then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The worker's number.
    pub worker: u32,
    /// The step.
    pub step: u64,
    /// What it was.
    pub phase: Phase,
    /// The action, such as `1F3`; empty where there is none.
    pub action: String,
    /// Start, in nanoseconds since 1970.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

/// Now, in nanoseconds since 1970, never going backwards within a process.
///
/// Workers on several hosts agree as well as their clocks do.
pub fn now_ns() -> u64 {
    static ORIGIN: OnceLock<(Instant, u64)> = OnceLock::new();
    let (instant, epoch) = ORIGIN.get_or_init(|| {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        (Instant::now(), u64::try_from(epoch).unwrap_or(0))
    });
    epoch + u64::try_from(instant.elapsed().as_nanos()).unwrap_or(u64::MAX / 2)
}

/// Gathers times, and events if wanted.
#[derive(Debug)]
pub struct Recorder {
    worker: u32,
    keep: bool,
    /// Time per phase since the last [`Recorder::take`].
    pub times: PhaseTimes,
    /// Events since the last [`Recorder::take`].
    pub spans: Vec<Span>,
}

impl Recorder {
    /// For a worker; `keep` says whether single events are wanted.
    pub fn new(worker: u32, keep: bool) -> Self {
        Recorder { worker, keep, times: PhaseTimes::default(), spans: Vec::new() }
    }

    /// Records what started at `start_ns` and ends now.
    pub fn record(&mut self, step: u64, phase: Phase, action: impl FnOnce() -> String, start_ns: u64) {
        let end_ns = now_ns();
        self.times.add(phase, end_ns.saturating_sub(start_ns));
        if self.keep {
            self.spans.push(Span { worker: self.worker, step, phase, action: action(), start_ns, end_ns });
        }
    }

    /// Takes what was gathered.
    pub fn take(&mut self) -> (PhaseTimes, Vec<Span>) {
        (std::mem::take(&mut self.times), std::mem::take(&mut self.spans))
    }
}

/// Gathers the events of a worker's links, whose threads work beside its stage.
#[derive(Clone, Debug)]
pub struct Beside {
    worker: u32,
    /// Absent if single events are not wanted.
    spans: Option<Arc<Mutex<Vec<Span>>>>,
}

impl Beside {
    /// For a worker; `keep` says whether single events are wanted.
    pub fn new(worker: u32, keep: bool) -> Self {
        Beside { worker, spans: keep.then(Arc::default) }
    }

    /// Records what started at `start_ns` and ends now.
    pub fn record(&self, step: u64, phase: Phase, action: &dyn std::fmt::Display, start_ns: u64) {
        let Some(spans) = &self.spans else { return };
        let span = Span { worker: self.worker, step, phase, action: action.to_string(), start_ns, end_ns: now_ns() };
        spans.lock().unwrap_or_else(|e| e.into_inner()).push(span);
    }

    /// Takes what was gathered.
    pub fn take(&self) -> Vec<Span> {
        self.spans
            .as_ref()
            .map(|spans| std::mem::take(&mut *spans.lock().unwrap_or_else(|e| e.into_inner())))
            .unwrap_or_default()
    }
}

/// Writes events as JSON, one a line.
pub fn write_jsonl(out: &mut impl Write, spans: &[Span]) -> std::io::Result<()> {
    for span in spans {
        serde_json::to_writer(&mut *out, span)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

/// Writes events in the trace format that Chrome and Perfetto open. `names` are the workers'.
pub fn write_chrome(out: &mut impl Write, spans: &[Span], names: &[String]) -> std::io::Result<()> {
    let origin = spans.iter().map(|s| s.start_ns).min().unwrap_or(0);
    let micros = |ns: u64| ns as f64 / 1e3;
    // A line for each worker's stage and one for each way of its links: what overlaps must not share one.
    let lane = |phase: Phase| match phase {
        Phase::Encode => 1,
        Phase::Decode => 2,
        _ => 0,
    };
    let lines = names.iter().enumerate().flat_map(|(i, name)| {
        ["", " encodes", " decodes"].iter().enumerate().map(move |(lane, does)| (3 * i + lane, format!("{name}{does}")))
    });
    let mut events: Vec<serde_json::Value> = lines
        .map(|(line, name)| serde_json::json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": line, "args": {"name": name}}))
        .collect();
    events.extend(spans.iter().map(|s| {
        let name = if s.action.is_empty() { s.phase.name() } else { &s.action };
        serde_json::json!({
            "ph": "X", "name": name, "cat": s.phase.name(), "pid": 0, "tid": 3 * s.worker + lane(s.phase),
            "ts": micros(s.start_ns - origin), "dur": micros(s.end_ns.saturating_sub(s.start_ns)), "args": {"step": s.step},
        })
    }));
    serde_json::to_writer(out, &serde_json::json!({"traceEvents": events, "displayTimeUnit": "ms"}))?;
    Ok(())
}

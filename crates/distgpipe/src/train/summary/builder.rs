//! Computes the figures of epochs and of a run from the outcomes of steps.

use super::{
    BatchTimes, CodecSummary, EdgeSummary, EpochSummary, Evaluation, LinkLimit, LinkSummary, RunEnd, RunSummary,
    WorkerSummary,
};
use crate::comm::codec_policy::CodecPolicy;
use crate::comm::traffic::{EdgeTraffic, PartitionEdge};
use crate::driver::pipeline::{LinkTraffic, Pipeline, StepOutcome, StepWait};
use crate::runtime::trace::{Phase, PhaseTimes};
use crate::train::events::StepDone;
use crate::train::metrics::ClassCounts;
use distgpipe_core::codec::CodecSpec;
use distgpipe_core::schedule::Plan;
use distgpipe_core::WorkerId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Sums over an epoch. A checkpoint in the middle of one keeps them.
// The fields are in alphabetical order, as in the manifest of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EpochTotals {
    classes: Option<ClassCounts>,
    correct: Option<u64>,
    /// Classes of the data set, which may have more than occur in the batches.
    data_classes: Option<usize>,
    loss_sum: f64,
    rows: usize,
    seconds: f64,
    steps: u64,
}

impl EpochTotals {
    /// Sums of no steps yet, for a data set with this many classes.
    pub fn new(data_classes: Option<usize>) -> Self {
        EpochTotals { data_classes, ..EpochTotals::default() }
    }

    pub fn add(&mut self, outcome: &StepOutcome, seconds: f64) {
        self.steps += 1;
        self.rows += outcome.rows;
        self.loss_sum += outcome.loss * outcome.rows as f64;
        self.correct = outcome.correct.map(|correct| correct + self.correct.unwrap_or(0));
        if let Some(classes) = &outcome.classes {
            self.classes.get_or_insert_default().add(classes);
        }
        self.seconds += seconds;
    }

    fn f1(&self) -> Option<f64> {
        self.classes.as_ref().map(|counts| counts.f1(self.data_classes.unwrap_or(counts.actual.len())))
    }

    fn matthews(&self) -> Option<f64> {
        self.classes.as_ref().map(ClassCounts::matthews)
    }

    fn per_row(&self, sum: f64) -> f64 {
        sum / self.rows.max(1) as f64
    }

    pub fn loss(&self) -> f64 {
        self.per_row(self.loss_sum)
    }

    fn accuracy(&self) -> Option<f64> {
        self.correct.map(|correct| self.per_row(correct as f64))
    }

    pub fn evaluation(&self) -> Evaluation {
        Evaluation {
            rows: self.rows,
            batches: self.steps,
            loss: self.loss(),
            accuracy: self.accuracy(),
            classes: self.data_classes,
            f1: self.f1(),
            matthews: self.matthews(),
            seconds: self.seconds,
        }
    }

    pub fn summary(&self, epoch: u64, test: Option<EpochTotals>) -> EpochSummary {
        let test = test.as_ref().map(EpochTotals::evaluation);
        EpochSummary {
            epoch,
            steps: self.steps,
            train_loss: self.loss(),
            train_accuracy: self.accuracy(),
            test_loss: test.as_ref().map(|test| test.loss),
            test_accuracy: test.as_ref().and_then(|test| test.accuracy),
            test_classes: test.as_ref().and_then(|test| test.classes),
            test_f1: test.as_ref().and_then(|test| test.f1),
            test_matthews: test.as_ref().and_then(|test| test.matthews),
            samples_per_s: rate(self.rows, self.seconds).unwrap_or(0.0),
            train_s: self.seconds,
            test_s: test.map_or(0.0, |test| test.seconds),
        }
    }
}

fn rate(rows: usize, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| rows as f64 / seconds)
}

/// The receiver of a link that waits for less than this share of its steps is not limited by the link.
const WAIT_SHARE_MIN: f64 = 0.05;

/// What a receiver with steps of so many seconds waited for most.
fn limit(waited: StepWait, steps_s: f64) -> Option<LinkLimit> {
    if waited.total_s() < WAIT_SHARE_MIN * steps_s || waited.total_s() == 0.0 {
        return None;
    }
    let StepWait { link_s, encoding_s, worker_s } = waited;
    match link_s.max(encoding_s).max(worker_s) {
        most if most == link_s => Some(LinkLimit::Link),
        most if most == encoding_s => Some(LinkLimit::Encoding),
        _ => Some(LinkLimit::Worker),
    }
}

/// What a codec did to these tensors.
fn coded(codec: &CodecSpec, sent: &EdgeTraffic, decode_ns: u64) -> CodecSummary {
    CodecSummary {
        codec: codec.to_string(),
        tensors: sent.tensors,
        raw_bytes: sent.raw_bytes,
        wire_bytes: sent.wire_bytes,
        ratio: (sent.wire_bytes > 0).then(|| sent.raw_bytes as f64 / sent.wire_bytes as f64),
        encode_ms: sent.encode_ns as f64 / 1e6,
        decode_ms: decode_ns as f64 / 1e6,
        sent_raw: sent.sent_raw,
        refusals: sent.refusals.clone(),
    }
}

/// Computes a [`RunSummary`] from the outcomes of steps.
pub(crate) struct SummaryBuilder {
    summary: RunSummary,
    plan: Plan,
    codecs: CodecPolicy,
    phases: Vec<PhaseTimes>,
    /// Rows and seconds of each measured step.
    measured: Vec<(usize, f64)>,
    /// What the receivers of the links waited for in the measured steps, by the names of sender and receiver.
    waited: BTreeMap<(String, String), StepWait>,
    /// What the links had carried before the run.
    before: LinkTraffic,
    /// Steps since the links were opened.
    link_steps: u64,
}

impl SummaryBuilder {
    /// For a run of a pipeline. `warm_up_steps` are left out of times and speeds.
    pub fn new(pipeline: &Pipeline, resumed_at: Option<u64>, warm_up_steps: u64) -> Self {
        let topology = pipeline.topology();
        let worker = |worker| WorkerSummary {
            name: topology.name(worker),
            phases_s: BTreeMap::new(),
            steps_s: 0.0,
            peak_bytes: 0,
            reserved_bytes: None,
        };
        let summary = RunSummary {
            epochs: Vec::new(),
            end: RunEnd::Complete,
            best: None,
            resumed_at,
            steps: 0,
            warm_up_steps,
            samples_per_s_median: None,
            samples_per_s_mean: None,
            seconds: 0.0,
            loading_s: 0.0,
            batch_times: None,
            workers: topology.members().map(worker).collect(),
            links: Vec::new(),
        };
        SummaryBuilder {
            summary,
            plan: pipeline.plan().clone(),
            codecs: pipeline.codecs().clone(),
            phases: vec![PhaseTimes::default(); topology.size()],
            measured: Vec::new(),
            waited: BTreeMap::new(),
            before: pipeline.link_traffic.clone(),
            link_steps: 0,
        }
    }

    pub fn add_step(&mut self, done: &StepDone<'_>) {
        let measured = self.summary.steps >= self.summary.warm_up_steps;
        self.summary.steps += 1;
        self.link_steps += 1;
        for (i, worker) in done.outcome.workers.iter().enumerate() {
            let summary = &mut self.summary.workers[i];
            summary.peak_bytes = summary.peak_bytes.max(worker.report.peak_bytes);
            summary.reserved_bytes = summary.reserved_bytes.max(worker.report.reserved_bytes);
            if measured {
                summary.steps_s += worker.report.step_ns as f64 / 1e9;
                self.phases[i] = self.phases[i].plus(&worker.report.phases);
            }
        }
        if measured {
            self.summary.loading_s += done.loading_s;
            self.measured.push((done.outcome.rows, done.seconds));
            for link in &done.outcome.step_links {
                let waited = self.waited.entry((link.from.clone(), link.to.clone())).or_default();
                *waited = waited.plus(link.waited);
            }
        }
        self.set_links(done.outcome);
    }

    /// The workers were started again, and the last steps are repeated. Times include those that were lost; the figures of links
    /// begin again.
    pub fn restarted(&mut self, steps_repeated: u64) {
        self.summary.steps = self.summary.steps.saturating_sub(steps_repeated);
        (self.before, self.link_steps) = (LinkTraffic::default(), 0);
    }

    /// Replaces the link figures. Counters run since the pipeline was built, so the sum is the last reading less the one before
    /// the run.
    pub fn set_links(&mut self, outcome: &StepOutcome) {
        self.summary.links.clear();
        for (from, worker) in outcome.workers.iter().enumerate() {
            for (to, now) in &worker.report.links {
                let traffic = self.before.added(from, *to, now);
                let there = outcome.workers.get(to.index()).map(|worker| &worker.report);
                let back = there.and_then(|report| report.links.iter().find(|(peer, _)| peer.index() == from));
                let back = back.map(|(_, now)| self.before.added(to.index(), WorkerId::new(from), now));
                let decoded = back.as_ref().map_or(&[][..], |traffic| &traffic.decoded_ns);
                let bytes_per_step = traffic.training_bytes as f64 / self.link_steps.max(1) as f64;
                self.summary.links.push(LinkSummary {
                    from: worker.name.clone(),
                    to: self.summary.workers.get(to.index()).map(|worker| worker.name.clone()).unwrap_or_default(),
                    messages: traffic.messages,
                    payload_bytes: traffic.payload_bytes,
                    wire_bytes: traffic.wire_bytes,
                    bytes_per_step,
                    delivered_bytes_per_s: back.as_ref().and_then(|traffic| traffic.delivered.bytes_per_s()),
                    // Added at the end of the run.
                    receiver_waited: StepWait::default(),
                    limited_by: None,
                    edges: traffic.sent.iter().map(|(edge, sent)| self.edge(*edge, sent, decoded)).collect(),
                    shares: (traffic.shares.tensors > 0).then(|| {
                        let decode_ns = back.as_ref().map_or(0, |traffic| traffic.shares_decoded_ns);
                        coded(&self.codecs.replicas, &traffic.shares, decode_ns)
                    }),
                });
            }
        }
    }

    fn edge(&self, edge: PartitionEdge, sent: &EdgeTraffic, decoded: &[(PartitionEdge, u64)]) -> EdgeSummary {
        let decode_ns = decoded.iter().find(|(other, _)| *other == edge).map_or(0, |(_, ns)| *ns);
        let codec = self.codecs.codec(&self.plan, edge.pass, edge.from, edge.to);
        EdgeSummary { edge, coded: coded(codec, sent, decode_ns) }
    }

    pub fn finish(mut self, seconds: f64) -> RunSummary {
        self.summary.seconds = seconds;
        for (worker, phases) in self.summary.workers.iter_mut().zip(&self.phases) {
            worker.phases_s =
                Phase::ALL.iter().map(|&phase| (phase.name(), phases.time_in(phase) as f64 / 1e9)).collect();
        }
        let (steps, loading_s) = (self.measured.len() as f64, self.summary.loading_s);
        self.summary.batch_times = self.phases.first().filter(|_| steps > 0.0).map(|first| {
            let spent =
                |phases: &[Phase]| phases.iter().map(|&phase| first.time_in(phase) as f64 / 1e9).sum::<f64>() / steps;
            BatchTimes {
                // The trainer has waited for the loader before the worker began its step.
                transfer_s: loading_s / steps + spent(&[Phase::Loading]),
                forward_s: spent(&[Phase::Forward]),
                backward_s: spent(&[Phase::Recompute, Phase::Backward, Phase::GradientWait, Phase::Optimizer]),
            }
        });
        for link in &mut self.summary.links {
            let waited = self.waited.get(&(link.from.clone(), link.to.clone())).copied().unwrap_or_default();
            let receiver = self.summary.workers.iter().find(|worker| worker.name == link.to);
            link.limited_by = limit(waited, receiver.map_or(0.0, |worker| worker.steps_s));
            link.receiver_waited = waited;
        }
        let (rows, time) = self.measured.iter().fold((0, 0.0), |(r, s), (rows, seconds)| (r + rows, s + seconds));
        self.summary.samples_per_s_mean = rate(rows, time);
        let mut rates: Vec<f64> = self.measured.iter().filter_map(|&(rows, seconds)| rate(rows, seconds)).collect();
        rates.sort_by(f64::total_cmp);
        self.summary.samples_per_s_median = rates.get(rates.len() / 2).copied();
        self.summary
    }
}

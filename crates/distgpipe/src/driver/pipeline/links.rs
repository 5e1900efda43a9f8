//! What each link did in a step: the difference between what its counters read after the step and after the last one.

use super::WorkerStep;
use crate::comm::traffic::Traffic;
use distgpipe_core::WorkerId;
use serde::Serialize;
use std::collections::BTreeMap;

/// What one direction of a link did in one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepLink {
    /// The name of the sending worker.
    pub from: String,
    /// The name of the receiving worker.
    pub to: String,
    /// Bytes of the step's tensors, if the step trained: on the wire with their headers, or in memory between threads.
    pub training_bytes: u64,
    /// The rate at which the link delivered, as the receiver timed it, in bytes per second. Absent between threads, and where
    /// too little arrived in one go to measure it.
    pub delivered_bytes_per_s: Option<f64>,
    /// How long the receiving worker waited for messages of this link.
    pub waited: StepWait,
}

/// How long the receiving worker waited for messages of one link, by what it waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepWait {
    /// Seconds in which the link was delivering.
    pub link_s: f64,
    /// Seconds of encoding at the sending end and of decoding at the receiving end. Encoding counts as far as nothing was arriving
    /// meanwhile.
    pub encoding_s: f64,
    /// Seconds in which nothing was arriving for other reasons: the worker at the other end had not got so far, or the message was
    /// on its way (the link's latency).
    pub worker_s: f64,
}

impl StepWait {
    /// The sum of two waits.
    pub fn plus(self, other: StepWait) -> StepWait {
        StepWait {
            link_s: self.link_s + other.link_s,
            encoding_s: self.encoding_s + other.encoding_s,
            worker_s: self.worker_s + other.worker_s,
        }
    }

    /// All seconds of waiting.
    pub fn total_s(&self) -> f64 {
        self.link_s + self.encoding_s + self.worker_s
    }
}

/// The counters of all links after the last step, by sender and receiver.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkTraffic(BTreeMap<(usize, WorkerId), Traffic>);

impl LinkTraffic {
    /// What a link, of which `now` are the counters, has carried since these were read.
    pub fn added(&self, from: usize, to: WorkerId, now: &Traffic) -> Traffic {
        self.0.get(&(from, to)).map_or_else(|| now.clone(), |before| now.since(before))
    }

    /// What each link did since the last call, from the workers' reports on a step.
    pub fn step(&mut self, workers: &[WorkerStep]) -> Vec<StepLink> {
        let mut links = Vec::new();
        for (from, worker) in workers.iter().enumerate() {
            for (to, sent) in &worker.report.links {
                let Some(receiver) = workers.get(to.index()) else { continue };
                let back = WorkerId::new(from);
                let received = receiver.report.links.iter().find(|(peer, _)| *peer == back);
                let added = self.added(from, *to, sent);
                let received = received.map(|(_, now)| self.added(to.index(), back, now)).unwrap_or_default();
                let (delivered, waited) = (received.delivered, received.waited);
                let encoded_ns = match sent.wire_bytes {
                    // Between threads, encoding is part of `codec_ns`; but the ring of replicas encodes before it sends.
                    0 => 0,
                    _ => encode_ns(&added),
                };
                let encoded_ns = encoded_ns.saturating_add(added.shares.encode_ns);
                let encoding_ns = encoded_ns.min(waited.peer_ns);
                let seconds = |ns: u64| ns as f64 / 1e9;
                links.push(StepLink {
                    from: worker.name.clone(),
                    to: receiver.name.clone(),
                    training_bytes: added.training_bytes,
                    delivered_bytes_per_s: delivered.bytes_per_s(),
                    waited: StepWait {
                        link_s: seconds(waited.link_ns),
                        encoding_s: seconds(waited.codec_ns) + seconds(encoding_ns),
                        worker_s: seconds(waited.peer_ns - encoding_ns),
                    },
                });
            }
        }
        for (from, worker) in workers.iter().enumerate() {
            for (to, traffic) in &worker.report.links {
                self.0.insert((from, *to), traffic.clone());
            }
        }
        links
    }
}

fn encode_ns(traffic: &Traffic) -> u64 {
    // The figures come from another process.
    traffic.sent.iter().fold(0, |sum, (_, sent)| sum.saturating_add(sent.encode_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::arrivals::{Delivered, LinkWait};
    use crate::comm::protocol::StepReport;
    use crate::comm::traffic::{EdgeTraffic, PartitionEdge};
    use distgpipe_core::schedule::Pass;
    use distgpipe_core::PartitionId;

    fn worker(name: &str, peer: u32, traffic: Traffic) -> WorkerStep {
        let report = StepReport { links: vec![(WorkerId(peer), traffic)], ..StepReport::default() };
        WorkerStep { name: name.to_owned(), report }
    }

    /// What the sender has sent and encoded so far.
    fn sent(training_bytes: u64, encode_ns: u64) -> Traffic {
        let edge = PartitionEdge { pass: Pass::Forward, from: PartitionId(0), to: PartitionId(1) };
        let traffic = EdgeTraffic { encode_ns, ..EdgeTraffic::default() };
        Traffic { wire_bytes: 1, training_bytes, sent: vec![(edge, traffic)], ..Traffic::default() }
    }

    /// What the receiver has received and waited so far.
    fn received(ns: u64, [link_ns, codec_ns, peer_ns]: [u64; 3]) -> Traffic {
        let waited = LinkWait { link_ns, codec_ns, peer_ns };
        Traffic { delivered: Delivered { bytes: 5 * ns / 1000, ns }, waited, ..Traffic::default() }
    }

    #[test]
    fn a_step_has_what_was_added_in_it() {
        const S: u64 = 1_000_000_000;
        let mut links = LinkTraffic::default();
        links.step(&[worker("a", 1, sent(100, S)), worker("b", 0, received(S, [S, S, S]))]);
        let step =
            links.step(&[worker("a", 1, sent(350, 3 * S)), worker("b", 0, received(3 * S, [2 * S, 4 * S, 6 * S]))]);
        assert_eq!(step.len(), 2);
        let waited = StepWait { link_s: 1.0, encoding_s: 3.0 + 2.0, worker_s: 5.0 - 2.0 };
        let expected = StepLink {
            from: "a".to_owned(),
            to: "b".to_owned(),
            training_bytes: 250,
            delivered_bytes_per_s: Some(5e6),
            waited,
        };
        assert_eq!(step[0], expected);
        assert_eq!((step[1].training_bytes, step[1].waited), (0, StepWait::default()));
        // Encoding that the receiver did not wait for is no reason to wait.
        let step =
            links.step(&[worker("a", 1, sent(350, 9 * S)), worker("b", 0, received(3 * S, [2 * S, 4 * S, 7 * S]))]);
        assert_eq!(step[0].waited, StepWait { link_s: 0.0, encoding_s: 1.0, worker_s: 0.0 });
        assert_eq!(step[0].delivered_bytes_per_s, None);
    }
}

//! Finds the worker or the link that a stalled run waits for.
//!
//! The driver calls [`blame`] when no worker's [status](WorkerStatus) has changed for
//! [`Timeouts::stall_s`](crate::comm::timeouts::Timeouts::stall_s).

use crate::comm::status::{Activity, WorkerStatus};
use crate::comm::topology::Topology;
use distgpipe_core::schedule::{Action, Op, Pass, Plan};
use distgpipe_core::WorkerId;

/// Returns the name of the worker or link at fault, and what it should have done, as the worker and the phase of a
/// [`Failure`](crate::failure::Failure). `plan` is the plan that the replicas are running; `statuses` has one entry per
/// member of the topology.
///
/// A link that is broken is at fault. Otherwise a worker that computes, or that waits for something that no worker has to send, is at
/// fault itself. If all workers wait, some message was sent and has not arrived, because a checked plan has no deadlock: its link is
/// at fault.
pub fn blame(topology: &Topology, plan: &Plan, statuses: &[WorkerStatus]) -> (String, String) {
    broken_link(topology, statuses)
        .or_else(|| busy_worker(topology, statuses))
        .or_else(|| missing_message(topology, plan, statuses))
        .or_else(|| missing_segment(topology, statuses))
        .unwrap_or_else(|| ("the run".to_owned(), "waiting, with every worker waiting for another".to_owned()))
}

/// For how many times [`Timeouts::stall_s`](crate::comm::timeouts::Timeouts::stall_s) the driver waits for workers in other
/// processes that report progress while nothing of it reaches this process. A worker here makes progress with each message of theirs.
///
/// Honest workers need several: `stall_s` bounds one action, and a step can have many in other processes before one here. With the
/// loss on a server, GPipe runs the forward passes of all micro-batches there before the first gradient leaves it.
pub const CLAIMED_STALLS_MAX: u32 = 10;

/// Which changes of the workers' statuses count as progress in one wait of the driver.
///
/// A worker in another process says itself how far it is. One that says so for ever is not believed: only a count beyond its
/// furthest is progress, no more often than the run's plan has its status change, and not for longer than
/// [`CLAIMED_STALLS_MAX`] allows.
pub struct Progress {
    workers: Vec<Furthest>,
}

/// What one wait believes of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Believed {
    /// How often its status may change.
    pub changes_max: usize,
    /// Whether it is a thread of this process.
    pub is_here: bool,
}

/// How progress is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// A worker of this process has made some.
    Here,
    /// Others say that they have.
    Claimed,
}

struct Furthest {
    progress: Option<u64>,
    believed: Believed,
}

impl Progress {
    /// For these workers.
    pub fn new(workers: impl IntoIterator<Item = Believed>) -> Self {
        let furthest = |believed| Furthest { progress: None, believed };
        Progress { workers: workers.into_iter().map(furthest).collect() }
    }

    /// Whether a worker has made progress since the last call.
    pub fn moved(&mut self, statuses: &[WorkerStatus]) -> Option<Moved> {
        let mut moved = None;
        for (worker, status) in self.workers.iter_mut().zip(statuses) {
            let left = &mut worker.believed.changes_max;
            if *left > 0 && worker.progress.is_none_or(|furthest| status.progress > furthest) {
                worker.progress = Some(status.progress);
                *left -= 1;
                moved = match worker.believed.is_here {
                    true => Some(Moved::Here),
                    false => moved.or(Some(Moved::Claimed)),
                };
            }
        }
        moved
    }
}

/// The first worker that reconnects, and to which peer.
fn broken_link(topology: &Topology, statuses: &[WorkerStatus]) -> Option<(String, String)> {
    topology.members().zip(statuses).find_map(|(member, status)| {
        // A remote worker's status comes over the network and may name any peer.
        let peer = status.reconnecting.and_then(|peer| topology.members().find(|&other| other == peer))?;
        Some((topology.name(member), format!("reconnecting to {}", topology.name(peer))))
    })
}

/// The first worker that is not waiting.
fn busy_worker(topology: &Topology, statuses: &[WorkerStatus]) -> Option<(String, String)> {
    topology.members().zip(statuses).find_map(|(member, status)| match status.activity {
        Activity::Running(action) => Some((topology.name(member), action.to_string())),
        Activity::Busy => Some((topology.name(member), "building, updating or collecting its parameters".to_owned())),
        Activity::Idle | Activity::Waiting(_) | Activity::AllReduce => None,
    })
}

/// The link, or the driver, whose message a worker waits for although it has been sent.
fn missing_message(topology: &Topology, plan: &Plan, statuses: &[WorkerStatus]) -> Option<(String, String)> {
    for (member, status) in topology.members().zip(statuses) {
        let Activity::Waiting(action) = status.activity else { continue };
        let name = topology.name(member);
        let Op::Receive { pass, from } = action.op else {
            return Some(("the driver".to_owned(), format!("sending the input that {name} waits for in {action}")));
        };
        // A remote worker's status comes over the network and may name any partition.
        if from.index() >= plan.partitions() {
            continue;
        }
        let role = plan.placement().worker_of(from);
        let sender = topology.member(topology.replica_of(member), role);
        let sender_status = statuses.get(sender.index()).copied().unwrap_or_default();
        if has_sent(plan, role, sender_status, action) {
            let what = if pass == Pass::Forward { "activation" } else { "gradient" };
            let link = format!("the link {} → {name}", topology.name(sender));
            return Some((link, format!("carrying the {what} of {action}")));
        }
    }
    None
}

/// Whether a worker has sent what `receive` waits for.
fn has_sent(plan: &Plan, role: WorkerId, status: WorkerStatus, receive: Action) -> bool {
    let Op::Receive { pass, from } = receive.op else { return false };
    // A sender that is idle or in the all-reduce has run all its actions.
    matches!(status.activity, Activity::Idle | Activity::AllReduce)
        || plan.actions(role).iter().take(status.done).any(|action| {
            action.partition == from
                && action.micro_batch == receive.micro_batch
                && matches!(action.op, Op::Send { pass: p, to } if p == pass && to == receive.partition)
        })
}

/// The link whose segment is missing in an all-reduce. Every member of a ring sends before it waits, so the segment that
/// the member with the fewest received segments waits for is in flight.
fn missing_segment(topology: &Topology, statuses: &[WorkerStatus]) -> Option<(String, String)> {
    let waiting = topology.members().zip(statuses).filter(|(_, status)| status.activity == Activity::AllReduce);
    let (member, status) = waiting.min_by_key(|(_, status)| status.done)?;
    let (previous, name) = (topology.name(topology.previous(member)), topology.name(member));
    Some((format!("the link {previous} → {name}"), format!("carrying gradient segment {}", status.done + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::schedule::{Request, Schedule};

    /// Three replicas of client, server, client, with the status of each of the six members.
    fn blamed(statuses: [&str; 6]) -> (String, String) {
        let request = Request::new("client,server,client".parse().unwrap(), 2);
        let topology = Topology::new(Schedule::OneFOneB.plan(&request).unwrap(), 3);
        let statuses = statuses.map(|text| format!("1 {text}").parse().unwrap());
        blame(&topology, topology.plan(), &statuses)
    }

    fn believed(changes_max: usize, is_here: bool) -> Believed {
        Believed { changes_max, is_here }
    }

    /// A worker that only changed its status every now and then once held the driver for days.
    #[test]
    fn a_worker_that_reports_changes_for_ever_makes_progress_as_often_as_its_plan_has_actions() {
        let at = |progress| WorkerStatus { progress, ..WorkerStatus::default() };
        let mut progress = Progress::new([believed(10, true), believed(10, false)]);
        assert_eq!(progress.moved(&[at(0), at(0)]), Some(Moved::Here));
        assert_eq!(progress.moved(&[at(0), at(0)]), None);
        assert_eq!((1..1000).filter(|&n| progress.moved(&[at(0), at(n)]) == Some(Moved::Claimed)).count(), 9);
        // The other worker is believed on.
        assert_eq!(progress.moved(&[at(1), at(1000)]), Some(Moved::Here));
    }

    #[test]
    fn a_status_that_goes_back_and_forth_is_no_progress() {
        let at = |progress, done| WorkerStatus { progress, done, ..WorkerStatus::default() };
        let mut progress = Progress::new([believed(100, false)]);
        assert!(progress.moved(&[at(5, 0)]).is_some());
        for (count, done) in [(4, 0), (5, 1), (0, 2), (5, 0)] {
            assert_eq!(progress.moved(&[at(count, done)]), None);
        }
        assert!(progress.moved(&[at(6, 0)]).is_some());
    }

    fn pair(who: &str, what: &str) -> (String, String) {
        (who.to_owned(), what.to_owned())
    }

    #[test]
    fn the_worker_that_does_not_wait_is_to_blame_in_any_replica() {
        let got = blamed(["0 share", "0 share", "3 wait 0B0<1", "2 run 1B0", "0 share", "0 idle"]);
        assert_eq!(got, pair("server/1", "1B0"));
        let got = blamed(["1 share", "1 share", "1 share", "1 busy", "0 share", "0 share"]);
        assert_eq!(got.0, "server/1");
    }

    #[test]
    fn a_link_that_is_being_reconnected_is_to_blame_whatever_the_workers_do() {
        let got = blamed(["0 share", "0 share", "3 wait 0B0<1 reconnecting 3", "2 run 1B0", "0 share", "0 idle"]);
        assert_eq!(got, pair("client/1", "reconnecting to server/1"));
        // A worker may say anything.
        let got = blamed(["0 share", "0 share", "3 wait 0B0<1 reconnecting 9", "2 run 1B0", "0 share", "0 idle"]);
        assert_eq!(got, pair("server/1", "1B0"));
    }

    /// The server has run its actions and waits in the all-reduce, so the gradient is in flight.
    #[test]
    fn a_missing_message_within_a_replica_is_the_fault_of_its_link() {
        let got = blamed(["1 share", "1 share", "3 wait 0B0<1", "0 share", "1 share", "1 share"]);
        assert_eq!(got, pair("the link server/1 → client/1", "carrying the gradient of 0B0<1"));
        let got = blamed(["0 idle", "0 idle", "0 wait 0F0", "0 wait 1F0<0", "0 idle", "0 idle"]);
        assert_eq!(got, pair("the driver", "sending the input that client/1 waits for in 0F0"));
    }

    #[test]
    fn in_an_all_reduce_the_link_to_the_member_with_the_fewest_segments_is_to_blame() {
        let got = blamed(["3 share", "2 share", "2 share", "3 share", "3 share", "1 share"]);
        assert_eq!(got, pair("the link server/1 → server/2", "carrying gradient segment 2"));
        let got = blamed(["0 share", "2 share", "2 share", "2 share", "1 share", "1 share"]);
        assert_eq!(got, pair("the link client/2 → client/0", "carrying gradient segment 1"));
    }
}

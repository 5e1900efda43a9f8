//! Which messages a peer may send, and which mailbox each goes to.

use crate::comm::mailbox::Mailbox;
use crate::comm::message::{Message, Tag};
use crate::comm::tensor_bounds::TensorBounds;
use crate::comm::topology::Topology;
use crate::failure::Fault;
use crate::runtime::all_reduce::GRADIENT_SHARE_BYTES_MAX;
use distgpipe_core::wire::{Header, Kind};
use distgpipe_core::{PartitionId, WorkerId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The driver's process, which also runs worker 0.
    Driver,
    /// The process of another worker.
    Worker(WorkerId),
}

/// Puts the messages of one peer into the mailboxes of this process, and rejects those that the plan does not have this
/// peer send.
pub struct Delivery {
    /// The members of the run and their plan.
    pub topology: Arc<Topology>,
    /// The process that sends the messages.
    pub peer: Peer,
    /// The mailboxes of the workers in this process.
    pub workers: BTreeMap<WorkerId, Arc<Mailbox>>,
    /// The driver's mailbox, if the driver is in this process.
    pub driver: Option<Arc<Mailbox>>,
    /// How large the tensors may be.
    pub bounds: Arc<TensorBounds>,
}

impl Delivery {
    /// Checks a frame's header before its body is read: whether this peer may send such a frame, and whether it may now.
    pub fn admit(&self, header: &Header) -> Result<(), Fault> {
        match header.kind {
            Kind::Ping | Kind::Abort | Kind::Goodbye => Ok(()),
            Kind::Share if header.body_bytes > GRADIENT_SHARE_BYTES_MAX => {
                let expected = format!("a gradient segment of at most {GRADIENT_SHARE_BYTES_MAX} bytes");
                Err(Fault::protocol(expected, header.body_bytes.to_string()))
            }
            kind => {
                let mailbox = self.mailbox_of(kind, header.micro_batch, header.from, header.to)?;
                mailbox.check_budget(self.worker(), kind, header.step)?;
                self.bounds.check(header)
            }
        }
    }

    /// The worker in the other process.
    fn worker(&self) -> WorkerId {
        match self.peer {
            Peer::Driver => WorkerId(0),
            Peer::Worker(peer) => peer,
        }
    }

    /// Puts a message into the mailbox it is for, and never waits: the reader must hear heartbeats. Fails if this peer may not send it, or has sent it before.
    pub fn deliver(&self, message: Message) -> Result<(), Fault> {
        let Tag { kind, micro_batch, from, to, .. } = message.tag;
        self.mailbox_of(kind, micro_batch, from, to)?.put_at_once(self.worker(), message)
    }

    /// Whether every mailbox has room for another message. The peer's messages are acknowledged only then.
    pub fn has_room(&self) -> bool {
        self.workers.values().chain(&self.driver).all(|mailbox| mailbox.has_room())
    }

    /// The mailbox that a message with this tag is for, if the plan has this peer send it.
    fn mailbox_of(&self, kind: Kind, micro_batch: u32, from: u32, to: u32) -> Result<&Mailbox, Fault> {
        let (topology, plan) = (&self.topology, self.topology.plan());
        let partition = |p: u32| Some(PartitionId(p)).filter(|p| p.index() < plan.partitions());
        let worker_of = |p: PartitionId| plan.placement().worker_of(p);
        let last = PartitionId::new(plan.partitions() - 1);
        let in_batch = (micro_batch as usize) < plan.micro_batches();
        let peer = self.worker();
        let mailbox = match (kind, self.peer) {
            (Kind::Activation | Kind::Gradient, _) => partition(from).zip(partition(to)).and_then(|(from, to)| {
                let activation = kind == Kind::Activation;
                let edges = if activation { plan.out_edges(from) } else { plan.in_edges(from) };
                let on_edge = edges.contains(&to) && (activation || plan.has_backward(to));
                let planned = in_batch && on_edge && worker_of(from) == topology.role_of(peer);
                let receiver = topology.member(topology.replica_of(peer), worker_of(to));
                self.workers.get(&receiver).filter(|_| planned)
            }),
            (Kind::Share, _) if from == peer.0 && to == topology.next(peer).0 => self.workers.get(&WorkerId(to)),
            (Kind::Input, Peer::Driver) if in_batch && to == 0 => self.worker_with(PartitionId(0)),
            (Kind::Target, Peer::Driver) if in_batch && to == last.0 => self.worker_with(last),
            (Kind::Command | Kind::State, Peer::Driver) => self.workers.get(&WorkerId(from)),
            (Kind::Ready | Kind::Report | Kind::State, Peer::Worker(peer)) if from == peer.0 => self.driver.as_ref(),
            (Kind::Output, Peer::Worker(peer)) if from == last.0 && worker_of(last) == topology.role_of(peer) => {
                // Outputs are numbered over all replicas. Each replica has at least one micro-batch, and as many as the others.
                let replica = topology.replica_of(peer);
                let numbers = replica..(replica + 1) * plan.micro_batches();
                self.driver.as_ref().filter(|_| numbers.contains(&(micro_batch as usize)))
            }
            _ => None,
        };
        mailbox.map(Arc::as_ref).ok_or_else(|| {
            let got = format!("{kind:?} of micro-batch {micro_batch} from {from} to {to}");
            Fault::protocol("a message that the plan has this peer send to this process", got)
        })
    }

    /// The mailbox of the worker in this process that runs a partition. A process other than the driver's has one worker.
    fn worker_with(&self, partition: PartitionId) -> Option<&Arc<Mailbox>> {
        let role = self.topology.plan().placement().worker_of(partition);
        self.workers.iter().find(|(&member, _)| self.topology.role_of(member) == role).map(|(_, mailbox)| mailbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::abort::AbortFlag;
    use distgpipe_core::schedule::{Request, Schedule};

    /// Whether the process of worker `here` admits a message (kind, micro-batch, from, to) of a peer.
    fn admits(replicas: usize, here: u32, peer: Peer, message: (Kind, u32, u32, u32)) -> bool {
        let request = Request::new("client,server,client".parse().unwrap(), 2);
        let topology = Arc::new(Topology::new(Schedule::OneFOneB.plan(&request).unwrap(), replicas));
        let mailbox = || Mailbox::new(AbortFlag::default(), 1);
        let workers = BTreeMap::from([(WorkerId(here), mailbox())]);
        let bounds = Arc::new(TensorBounds::of_worker());
        let delivery = Delivery { topology, peer, workers, driver: (here == 0).then(mailbox), bounds };
        let (kind, micro_batch, from, to) = message;
        delivery.admit(&Header { micro_batch, from, to, ..Header::new(kind) }).is_ok()
    }

    fn worker(number: u32) -> Peer {
        Peer::Worker(WorkerId(number))
    }

    /// Three replicas: clients 0, 2, 4 and servers 1, 3, 5.
    #[test]
    fn segments_are_admitted_from_the_previous_replica_alone() {
        for (here, peer, from, to, expected) in [
            (3, worker(1), 1, 3, true),
            (1, worker(5), 5, 1, true),
            (2, Peer::Driver, 0, 2, true),
            (0, worker(4), 4, 0, true),
            (0, worker(2), 2, 0, false),
            (1, worker(3), 3, 1, false),
            (3, worker(1), 5, 3, false),
            (3, worker(1), 1, 5, false),
            (3, worker(2), 2, 3, false),
            (3, Peer::Driver, 1, 3, false),
            (3, worker(1), 1, u32::MAX, false),
        ] {
            assert_eq!(admits(3, here, peer, (Kind::Share, 0, from, to)), expected, "{peer:?}: {from} to {to}");
        }
        assert!(!admits(1, 1, Peer::Driver, (Kind::Share, 0, 0, 1)), "one replica has no all-reduce");
    }

    #[test]
    fn activations_and_gradients_stay_within_a_replica() {
        assert!(admits(3, 3, worker(2), (Kind::Activation, 1, 0, 1)));
        assert!(!admits(3, 3, Peer::Driver, (Kind::Activation, 1, 0, 1)), "worker 0 belongs to another replica");
        assert!(admits(3, 2, worker(3), (Kind::Gradient, 0, 1, 0)));
        assert!(!admits(3, 2, worker(3), (Kind::Gradient, 2, 1, 0)), "there are two micro-batches");
        // Outputs are numbered over all replicas.
        for (number, expected) in [(1, false), (2, true), (5, true), (6, false)] {
            assert_eq!(admits(3, 0, worker(4), (Kind::Output, number, 2, 2)), expected, "{number}");
        }
    }

    #[test]
    fn a_segment_is_no_larger_than_a_bucket() {
        let request = Request::new("one".parse().unwrap(), 1);
        let topology = Arc::new(Topology::new(Schedule::OneFOneB.plan(&request).unwrap(), 2));
        let workers = BTreeMap::from([(WorkerId(1), Mailbox::new(AbortFlag::default(), 1))]);
        let bounds = Arc::new(TensorBounds::of_worker());
        let delivery = Delivery { topology, peer: Peer::Driver, workers, driver: None, bounds };
        let header = |body_bytes| Header { to: 1, body_bytes, ..Header::new(Kind::Share) };
        assert!(delivery.admit(&header(GRADIENT_SHARE_BYTES_MAX)).is_ok());
        assert!(delivery.admit(&header(GRADIENT_SHARE_BYTES_MAX + 1)).is_err());
    }
}

//! Ring all-reduce: sums the gradients of all replicas, one bucket after another.
//!
//! ```text
//!   3 replicas; a bucket is cut into 3 shares   a b c     (each replica starts with its own values)
//!
//!   reduce-scatter   0 sends a, 1 sends b, 2 sends c      then 1 has a₀+a₁, 2 has b₁+b₂, 0 has c₂+c₀
//!                    1 sends a, 2 sends b, 0 sends c      then 2 has the sum of a, 0 of b, 1 of c
//!   all-gather       2 sends a, 0 sends b, 1 sends c  ×2  then every replica has all three sums
//! ```
//!
//! Each replica sends and receives `2 (R−1)/R` times the size of the gradients, whatever `R` is. Each share is summed
//! once, in ring order starting at the replica with the share's number, and the sum is then copied. So all replicas
//! have the same bits, and a run gives the same bits again whatever the transport.

use crate::comm::message::{EncodeOptions, Message, Tag};
use crate::comm::status::Activity;
use crate::comm::topology::Topology;
use crate::failure::Fault;
use crate::runtime::stage::Stage;
use crate::runtime::trace::{now_ns, Phase};
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use tch::Tensor;

/// The most elements in one bucket: 16 MiB of 32-bit floats.
const BUCKET_ELEMENTS_MAX: i64 = 4 << 20;

/// The most shares that a worker receives when the gradients of this many parameters are summed.
pub fn shares_max(parameters: u64, replicas: usize) -> usize {
    // Two buckets in a row have more than one bucket's elements, and tensors larger than that are cut into pieces.
    let pieces = 3 * (parameters / BUCKET_ELEMENTS_MAX as u64) + 2;
    usize::try_from(pieces).unwrap_or(usize::MAX).saturating_mul(2 * replicas.saturating_sub(1))
}

/// The most bytes in one share: a whole bucket of 64-bit floats.
pub const GRADIENT_SHARE_BYTES_MAX: u64 = 8 * BUCKET_ELEMENTS_MAX as u64;

/// One worker's position in the ring of the replicas of its role.
pub struct RingAllReduce {
    member: WorkerId,
    next: WorkerId,
    previous: WorkerId,
    /// The number of this worker's replica.
    replica: usize,
    replicas: usize,
}

impl RingAllReduce {
    /// The ring of a worker, or `None` if the run has no replicas.
    pub fn new(topology: &Topology, member: WorkerId) -> Option<Self> {
        let (next, previous) = (topology.next(member), topology.previous(member));
        let (replica, replicas) = (topology.replica_of(member), topology.replicas());
        (replicas > 1).then_some(RingAllReduce { member, next, previous, replica, replicas })
    }

    /// Replaces each tensor by its sum over the replicas, in place. All replicas must pass as many tensors of the same
    /// sizes, and at most once in a step.
    pub fn all_reduce(&self, stage: &mut Stage, step: u64, tensors: &[Tensor]) -> Result<(), Fault> {
        let encoding = EncodeOptions { training: true, ..EncodeOptions::default() };
        self.run(Exchange { ring: self, stage, step, shares: 0, encoding }, tensors)
    }

    /// Replaces each tensor by the first replica's, in place, before the first step.
    pub fn broadcast(&self, stage: &mut Stage, tensors: &[Tensor]) -> Result<(), Fault> {
        self.zero_unless_first(tensors)?;
        self.run(Exchange { ring: self, stage, step: 0, shares: 0, encoding: EncodeOptions::default() }, tensors)
    }

    fn run(&self, mut exchange: Exchange<'_>, tensors: &[Tensor]) -> Result<(), Fault> {
        for bucket in buckets(tensors) {
            let start = now_ns();
            // A single contiguous tensor is summed through a view of it.
            let flat = bucket.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
            let flat = if let [one] = &flat[..] { one.shallow_clone() } else { Tensor::f_cat(&flat, 0)? };
            exchange.record(Phase::Optimizer, start);
            for mut piece in flat.f_split(BUCKET_ELEMENTS_MAX, 0)? {
                let sum = exchange.sum(&piece)?;
                let start = now_ns();
                // The shares of this piece that were sent have been read by now, because their sums have come back.
                piece.f_copy_(&sum)?;
                exchange.record(Phase::Optimizer, start);
            }
            let (start, mut from) = (now_ns(), 0);
            for tensor in bucket.iter().filter(|tensor| tensor.data_ptr() != flat.data_ptr()) {
                let elements = tensor.numel() as i64;
                let sum = flat.f_narrow(0, from, elements)?.f_view(&tensor.size()[..])?;
                tensor.shallow_clone().f_copy_(&sum)?;
                from += elements;
            }
            exchange.record(Phase::Optimizer, start);
        }
        Ok(())
    }

    /// Sets the tensors to 0 in all replicas but the first, so that an [all-reduce](Self::all_reduce) of them is a
    /// broadcast from the first replica.
    pub fn zero_unless_first(&self, tensors: &[Tensor]) -> Result<(), Fault> {
        if self.replica > 0 {
            tensors.iter().try_for_each(|tensor| tensor.shallow_clone().f_zero_().map(drop))?;
        }
        Ok(())
    }
}

/// Groups consecutive tensors into buckets. A tensor larger than a bucket is alone in its group.
fn buckets(tensors: &[Tensor]) -> Vec<&[Tensor]> {
    let (mut buckets, mut first, mut elements) = (Vec::new(), 0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let more = tensor.numel() as i64;
        if i > first && elements + more > BUCKET_ELEMENTS_MAX {
            buckets.push(&tensors[first..i]);
            (first, elements) = (i, 0);
        }
        elements += more;
    }
    buckets.extend((first < tensors.len()).then(|| &tensors[first..]));
    buckets
}

/// The messages of one all-reduce.
struct Exchange<'a> {
    ring: &'a RingAllReduce,
    stage: &'a mut Stage,
    step: u64,
    /// How many shares have been sent, which is also how many have been received.
    shares: usize,
    /// How the shares are sent: as part of a training step, or not.
    encoding: EncodeOptions,
}

impl Exchange<'_> {
    /// The sum of a flat tensor over the replicas.
    fn sum(&mut self, flat: &Tensor) -> Result<Tensor, Fault> {
        let &RingAllReduce { replica, replicas, .. } = self.ring;
        let mut shares = flat.f_tensor_split(replicas as i64, 0)?;
        for round in 0..2 * (replicas - 1) {
            // The share received in one round is sent in the next. The previous replica's share numbers are lower by 1.
            let sent = (replica + 2 * replicas - round) % replicas;
            let received = (sent + replicas - 1) % replicas;
            let arrived = self.send_and_receive(&shares[sent], &shares[received])?;
            let start = now_ns();
            // Not in place: a share that was sent may still be in flight.
            let reducing = round + 1 < replicas;
            shares[received] = if reducing { arrived.f_add(&shares[received])? } else { arrived };
            self.record(Phase::Optimizer, start);
        }
        Ok(Tensor::f_cat(&shares, 0)?)
    }

    /// Sends a share to the next replica and receives one from the previous replica, which must have the size and type
    /// of `like`.
    fn send_and_receive(&mut self, share: &Tensor, like: &Tensor) -> Result<Tensor, Fault> {
        let &RingAllReduce { member, next, previous, .. } = self.ring;
        let number = u32::try_from(self.shares)
            .map_err(|_| Fault::internal("fewer than 2³² shares in a step", self.shares.to_string()))?;
        let tag = |from: WorkerId, to: WorkerId| Tag {
            kind: Kind::Share,
            step: self.step,
            micro_batch: number,
            from: from.0,
            to: to.0,
        };
        let (sent, received) = (tag(member, next), tag(previous, member));
        let start = now_ns();
        let outgoing = self.stage.outgoing.get_mut(&next);
        let outgoing = outgoing.ok_or_else(|| Fault::internal("a link to the next replica", "none"))?;
        let message = Message::tensors(sent, vec![Some(share.shallow_clone())]);
        outgoing.send(Message { encoding: self.encoding.clone(), ..message })?;
        self.record(Phase::Send, start);
        let start = now_ns();
        self.stage.status.begin(Activity::AllReduce, self.shares);
        let mut message = self.stage.take_from(previous, &received)?;
        let arrived = message.tensors.pop().flatten();
        let arrived = arrived.ok_or_else(|| Fault::protocol("a share of gradients", "a message without one"))?;
        if arrived.size() != like.size() || arrived.kind() != like.kind() {
            let from = self.stage.topology.name(previous);
            let expected = format!("a share of {:?} {:?} from {from}", like.kind(), like.size());
            return Err(Fault::protocol(expected, format!("{:?} {:?}", arrived.kind(), arrived.size())));
        }
        let arrived = arrived.f_to_device(self.stage.device)?;
        self.stage.status.begin(Activity::Busy, self.shares);
        self.shares += 1;
        self.record(Phase::ReceiveWait, start);
        Ok(arrived)
    }

    fn record(&mut self, phase: Phase, start_ns: u64) {
        let shares = self.shares;
        self.stage.recorder.record(self.step, phase, || format!("share {shares}"), start_ns);
    }
}

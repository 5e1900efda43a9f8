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

use crate::comm::mailbox::Mailbox;
use crate::comm::message::{EncodeOptions, Message, Tag};
use crate::comm::status::{Activity, SharedStatus};
use crate::comm::topology::Topology;
use crate::comm::traffic::Counters;
use crate::comm::transport::Outgoing;
use crate::failure::Fault;
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use tch::Tensor;

/// The most elements in one bucket: 4 MiB of 32-bit floats. Smaller buckets begin sooner during a backward pass, larger ones
/// have fewer messages.
const BUCKET_ELEMENTS_MAX: i64 = 1 << 20;

/// The most shares that a worker receives when the gradients of this many parameters are summed.
pub fn shares_max(parameters: u64, replicas: usize) -> usize {
    // Two buckets in a row have more than one bucket's elements, and tensors larger than that are cut into pieces. Gradients and
    // what follows them have buckets of their own.
    let pieces = 3 * (parameters / BUCKET_ELEMENTS_MAX as u64) + 4;
    usize::try_from(pieces).unwrap_or(usize::MAX).saturating_mul(2 * replicas.saturating_sub(1))
}

/// The most bytes in one share: a whole bucket of 64-bit floats.
pub const GRADIENT_SHARE_BYTES_MAX: u64 = 8 * BUCKET_ELEMENTS_MAX as u64;

/// One worker's position in the ring of the replicas of its role, with its links there.
pub struct RingAllReduce {
    member: WorkerId,
    next: WorkerId,
    previous: WorkerId,
    previous_name: String,
    /// The number of this worker's replica.
    replica: usize,
    replicas: usize,
    device: tch::Device,
    /// The link to the next replica. Nothing else uses it.
    link: Box<dyn Outgoing>,
    mailbox: Arc<Mailbox>,
    /// The counters of the link from the previous replica.
    arrivals: Option<Counters>,
}

/// How far an all-reduce has come. While the worker's own thread computes, the worker's status is what that thread does; once it
/// waits for the all-reduce, the status is this.
pub struct ShareProgress {
    status: Arc<SharedStatus>,
    state: Mutex<ShareState>,
}

#[derive(Clone, Copy, Default)]
struct ShareState {
    /// Whether the worker waits for the all-reduce.
    awaited: bool,
    /// Whether the all-reduce waits for a share.
    waits: bool,
    /// How many shares have been received.
    shares: usize,
}

impl ShareProgress {
    /// Of an all-reduce that the worker does not wait for yet.
    pub fn new(status: Arc<SharedStatus>) -> Arc<Self> {
        Arc::new(ShareProgress { status, state: Mutex::default() })
    }

    /// The worker does nothing else from here on.
    pub fn begin_wait(&self) {
        self.update(|state| state.awaited = true);
    }

    fn update(&self, change: impl FnOnce(&mut ShareState)) {
        let mut state = self.lock();
        change(&mut state);
        if state.awaited {
            let activity = if state.waits { Activity::AllReduce } else { Activity::Busy };
            self.status.begin(activity, state.shares);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ShareState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl RingAllReduce {
    /// The ring of a worker, or `None` if the run has no replicas. Takes the link to the next replica out of `outgoing`.
    pub fn new(
        topology: &Topology,
        member: WorkerId,
        device: tch::Device,
        mailbox: &Arc<Mailbox>,
        outgoing: &mut BTreeMap<WorkerId, Box<dyn Outgoing>>,
        links: &[(WorkerId, Counters)],
    ) -> Result<Option<Self>, Fault> {
        let (replica, replicas) = (topology.replica_of(member), topology.replicas());
        if replicas == 1 {
            return Ok(None);
        }
        let (next, previous) = (topology.next(member), topology.previous(member));
        let link = outgoing.remove(&next).ok_or_else(|| Fault::internal("a link to the next replica", "none"))?;
        Ok(Some(RingAllReduce {
            member,
            next,
            previous,
            previous_name: topology.name(previous),
            replica,
            replicas,
            device,
            link,
            mailbox: mailbox.clone(),
            arrivals: links.iter().find(|(worker, _)| *worker == previous).map(|(_, counters)| counters.clone()),
        }))
    }

    /// Begins the all-reduce of a step. All replicas must [sum](Exchange::sum) tensors of the same sizes in the same order, and
    /// begin at most once in a step.
    pub fn begin(&mut self, step: u64, progress: Arc<ShareProgress>) -> Exchange<'_> {
        let encoding = EncodeOptions { training: true, ..EncodeOptions::default() };
        Exchange { ring: self, step, shares: 0, encoding, progress }
    }

    /// Replaces each tensor by the first replica's, in place, before the first step.
    pub fn broadcast(&mut self, status: &Arc<SharedStatus>, tensors: &[Tensor]) -> Result<(), Fault> {
        self.zero_unless_first(tensors)?;
        let progress = ShareProgress::new(status.clone());
        progress.begin_wait();
        let encoding = EncodeOptions::default();
        Exchange { ring: self, step: 0, shares: 0, encoding, progress }.replace(tensors)
    }

    /// Sets the tensors to 0 in all replicas but the first, so that their sum is a broadcast from the first replica.
    pub fn zero_unless_first(&self, tensors: &[Tensor]) -> Result<(), Fault> {
        if self.replica > 0 {
            tensors.iter().try_for_each(|tensor| tensor.shallow_clone().f_zero_().map(drop))?;
        }
        Ok(())
    }
}

/// Groups consecutive tensors with these numbers of elements into buckets. A tensor larger than a bucket is alone in its group.
pub fn buckets(elements: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let (mut buckets, mut first, mut sum, mut end) = (Vec::new(), 0, 0, 0);
    for (i, more) in elements.into_iter().enumerate() {
        if i > first && sum + more > BUCKET_ELEMENTS_MAX as usize {
            buckets.push(first..i);
            (first, sum) = (i, 0);
        }
        sum += more;
        end = i + 1;
    }
    buckets.extend((first < end).then_some(first..end));
    buckets
}

/// Copies the sum of a bucket back into its tensors.
pub fn scatter(sum: &Tensor, tensors: &[Tensor]) -> Result<(), Fault> {
    let mut from = 0;
    for tensor in tensors {
        let elements = tensor.numel() as i64;
        tensor.shallow_clone().f_copy_(&sum.f_narrow(0, from, elements)?.f_view(&tensor.size()[..])?)?;
        from += elements;
    }
    Ok(())
}

/// The messages of one all-reduce.
pub struct Exchange<'a> {
    ring: &'a mut RingAllReduce,
    step: u64,
    /// How many shares have been sent, which is also how many have been received.
    shares: usize,
    /// How the shares are sent: as part of a training step, or not.
    encoding: EncodeOptions,
    progress: Arc<ShareProgress>,
}

impl Exchange<'_> {
    /// The sum of a bucket over the replicas, as one flat tensor. The tensors themselves stay as they are.
    pub fn sum(&mut self, bucket: &[Tensor]) -> Result<Tensor, Fault> {
        let flat = bucket.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
        let flat = if let [one] = &flat[..] { one.shallow_clone() } else { Tensor::f_cat(&flat, 0)? };
        let pieces = flat.f_split(BUCKET_ELEMENTS_MAX, 0)?;
        let sums = pieces.iter().map(|piece| self.sum_piece(piece)).collect::<Result<Vec<_>, _>>()?;
        Ok(if let [one] = &sums[..] { one.shallow_clone() } else { Tensor::f_cat(&sums, 0)? })
    }

    /// Replaces each tensor by its sum over the replicas, in place.
    pub fn replace(&mut self, tensors: &[Tensor]) -> Result<(), Fault> {
        for bucket in buckets(tensors.iter().map(Tensor::numel)) {
            let sum = self.sum(&tensors[bucket.clone()])?;
            // The shares of this bucket that were sent have been read by now, because their sums have come back.
            scatter(&sum, &tensors[bucket])?;
        }
        Ok(())
    }

    /// Sets the tensors to 0 in all replicas but the first.
    pub fn zero_unless_first(&self, tensors: &[Tensor]) -> Result<(), Fault> {
        self.ring.zero_unless_first(tensors)
    }

    /// The sum of a flat tensor of at most a bucket's size.
    fn sum_piece(&mut self, flat: &Tensor) -> Result<Tensor, Fault> {
        let &mut RingAllReduce { replica, replicas, .. } = self.ring;
        let mut shares = flat.f_tensor_split(replicas as i64, 0)?;
        for round in 0..2 * (replicas - 1) {
            // The share received in one round is sent in the next. The previous replica's share numbers are lower by 1.
            let sent = (replica + 2 * replicas - round) % replicas;
            let received = (sent + replicas - 1) % replicas;
            let arrived = self.send_and_receive(&shares[sent], &shares[received])?;
            // Not in place: a share that was sent may still be in flight.
            let reducing = round + 1 < replicas;
            shares[received] = if reducing { arrived.f_add(&shares[received])? } else { arrived };
        }
        Ok(Tensor::f_cat(&shares, 0)?)
    }

    /// Sends a share to the next replica and receives one from the previous replica, which must have the size and type
    /// of `like`.
    fn send_and_receive(&mut self, share: &Tensor, like: &Tensor) -> Result<Tensor, Fault> {
        let &mut RingAllReduce { member, next, previous, device, .. } = self.ring;
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
        let message = Message::tensors(sent, vec![Some(share.shallow_clone())]);
        self.ring.link.send(message.encoded_with(self.encoding.clone()))?;
        self.progress.update(|state| state.waits = true);
        let take = || self.ring.mailbox.take(&received);
        let mut message = match &self.ring.arrivals {
            Some(counters) => counters.arrivals().waiting(take)?,
            None => take()?,
        };
        let arrived = message.tensors.pop().flatten();
        let arrived = arrived.ok_or_else(|| Fault::protocol("a share of gradients", "a message without one"))?;
        if arrived.size() != like.size() || arrived.kind() != like.kind() {
            let expected = format!("a share of {:?} {:?} from {}", like.kind(), like.size(), self.ring.previous_name);
            return Err(Fault::protocol(expected, format!("{:?} {:?}", arrived.kind(), arrived.size())));
        }
        let arrived = arrived.f_to_device(device)?;
        self.shares += 1;
        let shares = self.shares;
        self.progress.update(|state| *state = ShareState { waits: false, shares, ..*state });
        Ok(arrived)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_have_all_tensors_in_order_and_are_no_larger_than_they_may_be() {
        let full = BUCKET_ELEMENTS_MAX as usize;
        assert!(buckets([]).is_empty());
        assert_eq!(buckets([0]).len(), 1);
        assert_eq!(buckets([full / 2, full / 2, 1, full + 7, 3, 4]), [0..2, 2..3, 3..4, 4..6]);
    }
}

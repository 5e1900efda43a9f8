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
//!
//! **With a codec** ([`CodecPolicy::replicas`]), each partial sum is encoded for its hop: `R − 1` times in the reduce-scatter. The
//! replica that completes a sum encodes it once more, the encoding goes round, and all replicas use what it decodes to, that one
//! included. So a value is encoded `R` times, and the replicas still have the same bits. An encoded share is a message of bytes; one
//! that the codec refuses travels raw. What is not a gradient (buffers, numbers of users, first parameters) is never encoded.
//!
//! [`CodecPolicy::replicas`]: crate::comm::codec_policy::CodecPolicy::replicas

use crate::comm::abort::AbortFlag;
use crate::comm::link_codecs::{Hop, LinkCodecs, ShareCodecs};
use crate::comm::mailbox::Mailbox;
use crate::comm::message::{EncodeOptions, Message, Tag};
use crate::comm::status::{Activity, SharedStatus};
use crate::comm::topology::Topology;
use crate::comm::traffic::Counters;
use crate::comm::transport::Outgoing;
use crate::failure::Fault;
use crate::sync::lock;
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard};
use tch::{Kind as ElementKind, Tensor};

/// How replicas sum their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduce {
    /// In a ring of their own links: the same bits on every transport.
    #[default]
    Ring,
    /// With `MPI_Iallreduce`, whose order of additions is that of the MPI library.
    Mpi,
}

impl FromStr for Reduce {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ring" => Ok(Reduce::Ring),
            "mpi" => Ok(Reduce::Mpi),
            _ => Err("expected `ring` or `mpi`".to_owned()),
        }
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Reduce::Ring => "ring",
            Reduce::Mpi => "mpi",
        })
    }
}

/// Sums a flat tensor over the replicas.
type Collective = Box<dyn Fn(&Tensor) -> Result<Tensor, Fault> + Send>;

/// What `MPI_Iallreduce` sums, for a worker of this run.
#[cfg(feature = "mpi")]
fn mpi_collective(topology: &Topology, member: WorkerId, abort: &AbortFlag) -> Result<Collective, Fault> {
    let mpi =
        crate::engine::mpi::started_mpi().filter(|mpi| (mpi.rank(), mpi.size()) == (member.index(), topology.size()));
    let mpi = mpi.ok_or_else(|| Fault::invalid_job("`Builder::reduce`", REDUCE_MPI))?;
    let (workers, abort) = (topology.size() / topology.replicas(), abort.clone());
    Ok(Box::new(move |values| mpi.sum(workers, values, || abort.check())))
}

#[cfg(not(feature = "mpi"))]
fn mpi_collective(_: &Topology, _: WorkerId, _: &AbortFlag) -> Result<Collective, Fault> {
    Err(Fault::invalid_job("`Builder::reduce`", REDUCE_MPI))
}

/// What [`Reduce::Mpi`] needs.
pub const REDUCE_MPI: &str =
    "expected workers that are all the ranks of an MPI program, for MPI to sum gradients: start it with mpirun, or use the ring";

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
    arrivals: Counters,
    /// Absent if gradients travel raw.
    codecs: Option<ShareCodecs>,
    /// Sums in place of the ring.
    collective: Option<Collective>,
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
        lock(&self.state)
    }
}

/// What [`RingAllReduce::new`] needs.
pub struct RingOptions<'a> {
    /// All members of the run.
    pub topology: &'a Topology,
    /// The worker.
    pub member: WorkerId,
    /// The worker's device.
    pub device: tch::Device,
    /// The worker's mailbox.
    pub mailbox: &'a Arc<Mailbox>,
    /// The worker's links to other workers.
    pub outgoing: &'a mut BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The counters of these links.
    pub links: &'a [(WorkerId, Counters)],
    /// The codecs of the worker.
    pub link_codecs: &'a LinkCodecs,
    /// How gradients are summed.
    pub reduce: Reduce,
    /// Ends a sum that waits for another replica.
    pub abort: &'a AbortFlag,
}

impl RingAllReduce {
    /// The ring of a worker, or `None` if the run has no replicas. Takes the link to the next replica out of `outgoing`.
    pub fn new(options: RingOptions<'_>) -> Result<Option<Self>, Fault> {
        let RingOptions { topology, member, device, mailbox, outgoing, links, link_codecs, reduce, abort } = options;
        let (replica, replicas) = (topology.replica_of(member), topology.replicas());
        if replicas == 1 {
            return Ok(None);
        }
        let (next, previous) = (topology.next(member), topology.previous(member));
        let link = outgoing.remove(&next).ok_or_else(|| Fault::internal("a link to the next replica", "none"))?;
        let counters = |member| {
            let found = links.iter().find(|(worker, _)| *worker == member).map(|(_, counters)| counters.clone());
            found.ok_or_else(|| Fault::internal("counters of the links between replicas", "none"))
        };
        let (sent, arrivals) = (counters(next)?, counters(previous)?);
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
            collective: match reduce {
                Reduce::Ring => None,
                Reduce::Mpi => Some(mpi_collective(topology, member, abort)?),
            },
            codecs: ShareCodecs::new(link_codecs, replicas, sent, arrivals.clone()),
            arrivals,
        }))
    }

    /// Begins the all-reduce of a step. All replicas must [sum](Exchange::sum) tensors of the same sizes in the same order, and
    /// begin at most once in a step.
    pub fn begin(&mut self, step: u64, encoding: EncodeOptions, progress: Arc<ShareProgress>) -> Exchange<'_> {
        Exchange { ring: self, step, shares: 0, pieces: 0, encoding, progress }
    }

    /// Replaces each tensor by the first replica's, in place, before the first step.
    pub fn broadcast(&mut self, status: &Arc<SharedStatus>, tensors: &[Tensor]) -> Result<(), Fault> {
        self.zero_unless_first(tensors)?;
        let progress = ShareProgress::new(status.clone());
        progress.begin_wait();
        let encoding = EncodeOptions::default();
        self.begin(0, encoding, progress).replace(tensors)
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

/// What a bucket has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Gradients, which a codec may encode.
    Gradients,
    /// What all replicas must have exactly.
    Exact,
}

/// A share as it travels: its values, or the bytes of their encoding.
struct Parcel {
    tensor: Tensor,
    is_encoded: bool,
}

/// The messages of one all-reduce.
pub struct Exchange<'a> {
    ring: &'a mut RingAllReduce,
    step: u64,
    /// How many shares have been sent, which is also how many have been received.
    shares: usize,
    /// How many pieces have been summed.
    pieces: u64,
    /// Whether the shares belong to a training step, and whether their codec encodes gradients.
    encoding: EncodeOptions,
    progress: Arc<ShareProgress>,
}

impl Exchange<'_> {
    /// The sum of a bucket of gradients over the replicas, as one flat tensor. The tensors themselves stay as they are.
    pub fn sum(&mut self, bucket: &[Tensor]) -> Result<Tensor, Fault> {
        self.sum_bucket(bucket, Content::Gradients)
    }

    fn sum_bucket(&mut self, bucket: &[Tensor], content: Content) -> Result<Tensor, Fault> {
        let flat = bucket.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
        let flat = if let [one] = &flat[..] { one.shallow_clone() } else { Tensor::f_cat(&flat, 0)? };
        let pieces = flat.f_split(BUCKET_ELEMENTS_MAX, 0)?;
        let sums = pieces.iter().map(|piece| self.sum_piece(piece, content)).collect::<Result<Vec<_>, _>>()?;
        Ok(if let [one] = &sums[..] { one.shallow_clone() } else { Tensor::f_cat(&sums, 0)? })
    }

    /// Replaces each tensor, none of which is a gradient, by its sum over the replicas, in place.
    pub fn replace(&mut self, tensors: &[Tensor]) -> Result<(), Fault> {
        for bucket in buckets(tensors.iter().map(Tensor::numel)) {
            let sum = self.sum_bucket(&tensors[bucket.clone()], Content::Exact)?;
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
    fn sum_piece(&mut self, flat: &Tensor, content: Content) -> Result<Tensor, Fault> {
        if let Some(collective) = &self.ring.collective {
            self.progress.update(|state| state.waits = true);
            // MPI has no 16-bit floats.
            let kind = flat.kind();
            let wide = if kind == ElementKind::Double { kind } else { ElementKind::Float };
            let sum = collective(&flat.f_to_kind(wide)?)?.f_to_device(self.ring.device)?.f_to_kind(kind)?;
            self.progress.update(|state| *state = ShareState { waits: false, shares: state.shares + 1, ..*state });
            return Ok(sum);
        }
        let &mut RingAllReduce { replica, replicas, .. } = self.ring;
        let piece = self.pieces;
        self.pieces += 1;
        let mut shares = flat.f_tensor_split(replicas as i64, 0)?;
        // The share received in one round is sent in the next. The previous replica's share numbers are lower by 1.
        let sent = |round: usize| (replica + 2 * replicas - round) % replicas;
        let last = replicas - 1;
        for round in 0..last {
            let (own, other) = (sent(round), sent(round + 1));
            let parcel = self.encode(&shares[own], Hop { piece, round }, content)?;
            let arrived = self.send_and_receive(parcel, &shares[own], &shares[other], content)?;
            let arrived = self.decode(&arrived, &shares[other])?;
            // Not in place: a share that was sent may still be in flight.
            shares[other] = arrived.f_add(&shares[other])?;
        }
        let own = sent(last);
        let mut parcel = self.encode(&shares[own], Hop { piece, round: last }, content)?;
        // This replica must not have more exact values than the others.
        shares[own] = self.decode(&parcel, &shares[own])?;
        for round in last..2 * last {
            let (held, other) = (sent(round), sent(round + 1));
            parcel = self.send_and_receive(parcel, &shares[held], &shares[other], content)?;
            shares[other] = self.decode(&parcel, &shares[other])?;
        }
        Ok(Tensor::f_cat(&shares, 0)?)
    }

    /// A share as it travels.
    fn encode(&mut self, share: &Tensor, hop: Hop, content: Content) -> Result<Parcel, Fault> {
        let encodes = content == Content::Gradients && self.encoding.compress && share.numel() > 0;
        let encoded = match &mut self.ring.codecs {
            Some(codecs) if encodes => codecs.encode(share, hop, &self.encoding)?,
            _ => None,
        };
        Ok(match encoded {
            Some(body) => Parcel { tensor: body, is_encoded: true },
            None => Parcel { tensor: share.shallow_clone(), is_encoded: false },
        })
    }

    /// The values of a share that has the size and type of `like`, on the worker's device.
    fn decode(&mut self, parcel: &Parcel, like: &Tensor) -> Result<Tensor, Fault> {
        let device = self.ring.device;
        match &mut self.ring.codecs {
            Some(codecs) if parcel.is_encoded => Ok(codecs.decode(&parcel.tensor, like)?.f_to_device(device)?),
            _ => Ok(parcel.tensor.f_to_device(device)?),
        }
    }

    /// Sends the share `sent` to the next replica as `parcel`, and receives one from the previous replica, which must have the size and
    /// type of `like` once it is decoded.
    fn send_and_receive(
        &mut self,
        parcel: Parcel,
        sent: &Tensor,
        like: &Tensor,
        content: Content,
    ) -> Result<Parcel, Fault> {
        let &mut RingAllReduce { member, next, previous, .. } = self.ring;
        let number = u32::try_from(self.shares)
            .map_err(|_| Fault::internal("fewer than 2³² shares in a step", self.shares.to_string()))?;
        let tag = |from: WorkerId, to: WorkerId| Tag {
            kind: Kind::Share,
            step: self.step,
            micro_batch: number,
            from: from.0,
            to: to.0,
        };
        let (outgoing, incoming) = (tag(member, next), tag(previous, member));
        let raw_bytes = (sent.numel() * sent.kind().elt_size_in_bytes()) as u64;
        if let Some(codecs) = self.ring.codecs.as_ref().filter(|_| content == Content::Gradients) {
            codecs.count(&parcel.tensor, raw_bytes);
        }
        let message = Message::tensors(outgoing, vec![Some(parcel.tensor)]).encoded_from(raw_bytes);
        self.ring.link.send(message.encoded_with(self.encoding.clone()))?;
        self.progress.update(|state| state.waits = true);
        let mut message = self.ring.arrivals.arrivals().waiting(|| self.ring.mailbox.take(&incoming))?;
        let arrived = message.tensors.pop().flatten();
        let arrived = arrived.ok_or_else(|| Fault::protocol("a share of gradients", "a message without one"))?;
        let is_encoded = arrived.kind() == ElementKind::Uint8;
        let may_be_encoded = content == Content::Gradients && self.ring.codecs.is_some();
        let fits = arrived.size() == like.size() && arrived.kind() == like.kind();
        if !(fits || is_encoded && may_be_encoded) {
            let expected = format!("a share of {:?} {:?} from {}", like.kind(), like.size(), self.ring.previous_name);
            return Err(Fault::protocol(expected, format!("{:?} {:?}", arrived.kind(), arrived.size())));
        }
        self.shares += 1;
        let shares = self.shares;
        self.progress.update(|state| *state = ShareState { waits: false, shares, ..*state });
        Ok(Parcel { tensor: arrived, is_encoded })
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

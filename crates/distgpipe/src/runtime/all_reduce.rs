//! How replicas agree on a gradient: each adds up what all of them have, a part at a time, round a ring.
//!
//! ```text
//!   3 replicas, a bucket cut into 3 shares   a b c     (each has its own values)
//!
//!   adding     0 sends a, 1 sends b, 2 sends c         then 1 has a₀+a₁, 2 has b₁+b₂, 0 has c₂+c₀
//!              1 sends a, 2 sends b, 0 sends c         then 2 has all of a, 0 all of b, 1 all of c
//!   handing on 2 sends a, 0 sends b, 1 sends c  ×2     then everybody has all of all
//! ```
//!
//! Each replica sends and receives `2 (R−1)/R` times the gradients, whatever `R`. Every share is added up once, in the
//! order of the ring from its own number on, and then copied: so all replicas have the same bits, and the same again in
//! the next run, whatever the transport.

use crate::failure::Fault;
use crate::mailbox::{Message, Tag};
use crate::roster::Roster;
use crate::stage::Stage;
use crate::status::Doing;
use crate::trace::{now_ns, Phase};
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use tch::Tensor;

/// Numbers that go round at a time: 16 MiB of them.
const BUCKET_MAX: i64 = 4 << 20;

/// No share takes more bytes.
pub const SHARE_BYTES_MAX: u64 = 8 * BUCKET_MAX as u64;

/// A member's place in the ring.
pub struct Ring {
    member: WorkerId,
    next: WorkerId,
    previous: WorkerId,
    /// Its replica's number.
    place: usize,
    replicas: usize,
}

impl Ring {
    /// The ring of a member; `None` without replicas.
    pub fn of(roster: &Roster, member: WorkerId) -> Option<Self> {
        let (next, previous) = (roster.next(member), roster.previous(member));
        let (place, replicas) = (roster.replica_of(member), roster.replicas());
        (replicas > 1).then_some(Ring { member, next, previous, place, replicas })
    }

    /// Sets each tensor to the sum over the replicas, in place. All replicas must give as many, of the same sizes, once in
    /// a step.
    pub fn add_up(&self, stage: &mut Stage, step: u64, tensors: &[Tensor]) -> Result<(), Fault> {
        let mut shares = Shares { ring: self, stage, step, passed: 0 };
        for bucket in buckets(tensors) {
            let start = now_ns();
            // A view, where one tensor lies so.
            let flat = bucket.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
            let flat = if let [one] = &flat[..] { one.shallow_clone() } else { Tensor::f_cat(&flat, 0)? };
            shares.record(Phase::Optimizer, start);
            for mut piece in flat.f_split(BUCKET_MAX, 0)? {
                let sum = shares.sum(&piece)?;
                let start = now_ns();
                // What was sent of the piece has been read: its sum has come back.
                piece.f_copy_(&sum)?;
                shares.record(Phase::Optimizer, start);
            }
            let (start, mut from) = (now_ns(), 0);
            for tensor in bucket.iter().filter(|tensor| tensor.data_ptr() != flat.data_ptr()) {
                let elements = tensor.numel() as i64;
                let sum = flat.f_narrow(0, from, elements)?.f_view(&tensor.size()[..])?;
                tensor.shallow_clone().f_copy_(&sum)?;
                from += elements;
            }
            shares.record(Phase::Optimizer, start);
        }
        Ok(())
    }

    /// Clears tensors of all replicas but the first, so that [adding up](Self::add_up) gives everybody the first one's.
    pub fn leave_to_first(&self, tensors: &[Tensor]) -> Result<(), Fault> {
        if self.place > 0 {
            tensors.iter().try_for_each(|tensor| tensor.shallow_clone().f_zero_().map(drop))?;
        }
        Ok(())
    }
}

/// Tensors one after the other, as many at a time as make a bucket; one that is larger comes alone.
fn buckets(tensors: &[Tensor]) -> Vec<&[Tensor]> {
    let (mut buckets, mut first, mut elements) = (Vec::new(), 0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let more = tensor.numel() as i64;
        if i > first && elements + more > BUCKET_MAX {
            buckets.push(&tensors[first..i]);
            (first, elements) = (i, 0);
        }
        elements += more;
    }
    buckets.extend((first < tensors.len()).then(|| &tensors[first..]));
    buckets
}

/// A step's way round the ring.
struct Shares<'a> {
    ring: &'a Ring,
    stage: &'a mut Stage,
    step: u64,
    /// How many have been sent, and as many received.
    passed: usize,
}

impl Shares<'_> {
    /// The sum over the replicas of a flat tensor.
    fn sum(&mut self, flat: &Tensor) -> Result<Tensor, Fault> {
        let &Ring { place, replicas, .. } = self.ring;
        let mut shares = flat.f_tensor_split(replicas as i64, 0)?;
        for round in 0..2 * (replicas - 1) {
            // What was got in a round is sent on in the next; it comes from the replica before, whose numbers are one less.
            let sent = (place + 2 * replicas - round) % replicas;
            let got = (sent + replicas - 1) % replicas;
            let arrived = self.pass(&shares[sent], &shares[got])?;
            let start = now_ns();
            // Never in place: what was sent may still be under way.
            let adding = round + 1 < replicas;
            shares[got] = if adding { arrived.f_add(&shares[got])? } else { arrived };
            self.record(Phase::Optimizer, start);
        }
        Ok(Tensor::f_cat(&shares, 0)?)
    }

    /// Sends a share on and takes the next, which is to be like one that is here.
    fn pass(&mut self, share: &Tensor, like: &Tensor) -> Result<Tensor, Fault> {
        let &Ring { member, next, previous, .. } = self.ring;
        let number =
            u32::try_from(self.passed).map_err(|_| Fault::protocol("fewer shares", self.passed.to_string()))?;
        let tag = |from: WorkerId, to: WorkerId| Tag {
            kind: Kind::Share,
            step: self.step,
            micro_batch: number,
            from: from.0,
            to: to.0,
        };
        let (outgoing, incoming) = (tag(member, next), tag(previous, member));
        let start = now_ns();
        let port = self.stage.ports.get_mut(&next).ok_or(Fault::Lost)?;
        port.send(Message::tensors(outgoing, vec![Some(share.shallow_clone())]))?;
        self.record(Phase::Send, start);
        let start = now_ns();
        self.stage.status.begin(Doing::Sharing, self.passed);
        let mut message = self.stage.mailbox.take(&incoming)?;
        let arrived = message.tensors.pop().flatten().ok_or_else(|| Fault::protocol("a share of gradients", "none"))?;
        if arrived.size() != like.size() || arrived.kind() != like.kind() {
            let from = self.stage.roster.name(previous);
            let expected = format!("a share of {:?} of {:?} from {from}", like.size(), like.kind());
            return Err(Fault::protocol(expected, format!("{:?} of {:?}", arrived.size(), arrived.kind())));
        }
        let arrived = arrived.f_to_device(self.stage.device)?;
        self.stage.status.begin(Doing::Busy, self.passed);
        self.passed += 1;
        self.record(Phase::ReceiveWait, start);
        Ok(arrived)
    }

    fn record(&mut self, phase: Phase, start_ns: u64) {
        let passed = self.passed;
        self.stage.recorder.record(self.step, phase, || format!("share {passed}"), start_ns);
    }
}

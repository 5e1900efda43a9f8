//! Messages that have arrived and wait for the plan to use them.
//!
//! Every worker has one mailbox, and so has the driver. Messages arrive in any order and are taken by tag, so the plan
//! and not the network decides what a stage does next. A mailbox is bounded: `put` blocks while it is full. What arrives over a
//! socket is put in at once, and acknowledged only while there is room, until the sender waits. A peer that does not wait, or sends
//! what no plan has it send so early, is found out by the [budget](Mailbox::check_budget) of each peer.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::message::{Message, Tag};
use crate::failure::Fault;
use crate::sync::lock;
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::Thread;
use std::time::Instant;

/// The numbers of steps, and those of commands, of which messages of one peer may wait. A step begins when the last one has been
/// reported, for which its messages were taken; but a peer may begin before this end hears of it.
const NUMBERS_MAX: usize = 2;

/// Tensors of a state transfer from one peer that may wait. The driver asks for groups of 256, except for gradients.
const STATES_MAX: usize = 16_384;

/// Whether a thread waits for a message of a mailbox. A transport that must poll does so eagerly only then: while the stage
/// computes, each look at the network takes time from it.
#[derive(Debug, Default)]
pub struct Demand {
    waiting: AtomicUsize,
    poller: OnceLock<Thread>,
}

impl Demand {
    /// One that never ends, for a receiver without a stage.
    pub fn always() -> Arc<Self> {
        Arc::new(Demand { waiting: AtomicUsize::new(1), poller: OnceLock::new() })
    }

    /// Whether a thread waits.
    pub fn is_there(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Has the current thread unparked whenever a thread begins to wait. The first call counts.
    pub fn wakes_this_thread(&self) {
        let _ = self.poller.set(std::thread::current());
    }

    fn begin(&self) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        if let Some(poller) = self.poller.get() {
            poller.unpark();
        }
    }

    fn end(&self) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The mailbox of a worker or of the driver.
#[derive(Debug)]
pub struct Mailbox {
    abort: AbortFlag,
    capacity: usize,
    arrived: Mutex<Arrived>,
    changed: Condvar,
    demand: Arc<Demand>,
}

/// The messages that wait.
#[derive(Debug, Default)]
struct Arrived {
    /// With the peer that has sent it, if it came from another process.
    messages: HashMap<Tag, (Option<WorkerId>, Message)>,
    of_peers: BTreeMap<WorkerId, Waiting>,
}

impl Arrived {
    fn remove(&mut self, tag: &Tag) -> Option<Message> {
        let (peer, message) = self.messages.remove(tag)?;
        if let Some(waiting) = peer.and_then(|peer| self.of_peers.get_mut(&peer)) {
            waiting.remove(tag);
        }
        Some(message)
    }
}

/// What waits of one peer.
#[derive(Debug, Default)]
struct Waiting {
    states: usize,
    /// Messages other than states.
    others: usize,
    /// The number of messages of each step and each command.
    numbers: BTreeMap<(bool, u64), usize>,
}

impl Waiting {
    /// The step or the command that a message belongs to. The two are counted apart.
    fn number(kind: Kind, step: u64) -> (bool, u64) {
        (matches!(kind, Kind::Command | Kind::State | Kind::Ready | Kind::Report), step)
    }

    fn count(&mut self, kind: Kind) -> &mut usize {
        match kind {
            Kind::State => &mut self.states,
            _ => &mut self.others,
        }
    }

    fn add(&mut self, tag: &Tag) {
        *self.count(tag.kind) += 1;
        *self.numbers.entry(Self::number(tag.kind, tag.step)).or_default() += 1;
    }

    fn remove(&mut self, tag: &Tag) {
        *self.count(tag.kind) -= 1;
        let number = Self::number(tag.kind, tag.step);
        if let Some(left) = self.numbers.get_mut(&number) {
            *left -= 1;
            if *left == 0 {
                self.numbers.remove(&number);
            }
        }
    }
}

impl Mailbox {
    /// A mailbox for at most `capacity` messages at a time. All waits on it end when `abort` is set.
    pub fn new(abort: AbortFlag, capacity: usize) -> Arc<Self> {
        let (arrived, changed, demand) = (Mutex::default(), Condvar::new(), Arc::default());
        Arc::new(Mailbox { abort, capacity: capacity.max(1), arrived, changed, demand })
    }

    /// Whether a thread waits in [`take`](Self::take).
    pub fn demand(&self) -> &Arc<Demand> {
        &self.demand
    }

    /// Adds a message; blocks while the mailbox is full. Fails if a message with the same tag is still there.
    pub fn put(&self, mut message: Message) -> Result<(), Fault> {
        message.hand_over()?;
        let mut arrived = self.lock();
        while arrived.messages.len() >= self.capacity {
            self.abort.check()?;
            arrived = self.changed.wait_timeout(arrived, POLL).unwrap_or_else(|e| e.into_inner()).0;
        }
        self.insert(&mut arrived, None, message)
    }

    /// Adds a message of a peer whether there is room or not: the sender knows from its acknowledgements when to wait. Fails as
    /// [`put`](Self::put) does.
    pub fn put_at_once(&self, peer: WorkerId, mut message: Message) -> Result<(), Fault> {
        message.hand_over()?;
        self.insert(&mut self.lock(), Some(peer), message)
    }

    /// Whether another message of a peer may wait here. Acknowledgements ask a peer to wait; this bounds what one gains that does
    /// not, whatever its messages decode to. No honest peer comes near: all of a step fits, and so do two.
    pub fn check_budget(&self, peer: WorkerId, kind: Kind, step: u64) -> Result<(), Fault> {
        let arrived = self.lock();
        let Some(waiting) = arrived.of_peers.get(&peer) else { return Ok(()) };
        let (count, max, what) = match kind {
            Kind::State => (waiting.states, STATES_MAX, "tensors of a state transfer"),
            _ => (waiting.others, 2 * self.capacity, "messages"),
        };
        if count >= max {
            let got = format!("one more, {kind:?} {step}");
            return Err(Fault::protocol(format!("at most {max} {what} that wait to be used"), got));
        }
        let number = Waiting::number(kind, step);
        let of_class = || waiting.numbers.keys().filter(|(class, _)| *class == number.0);
        if !waiting.numbers.contains_key(&number) && of_class().count() >= NUMBERS_MAX {
            let known: Vec<String> = of_class().map(|(_, number)| number.to_string()).collect();
            let (what, known) = (if number.0 { "commands" } else { "steps" }, known.join(" and "));
            let expected = format!("messages of at most {NUMBERS_MAX} {what} that wait to be used");
            return Err(Fault::protocol(expected, format!("{kind:?} {step}, while those of {known} wait")));
        }
        Ok(())
    }

    /// Whether [`put`](Self::put) would not wait.
    pub fn has_room(&self) -> bool {
        self.lock().messages.len() < self.capacity
    }

    fn insert(&self, arrived: &mut Arrived, peer: Option<WorkerId>, message: Message) -> Result<(), Fault> {
        let tag = message.tag;
        if arrived.messages.contains_key(&tag) {
            return Err(Fault::protocol("each message once", format!("{tag} twice")));
        }
        arrived.messages.insert(tag, (peer, message));
        if let Some(peer) = peer {
            arrived.of_peers.entry(peer).or_default().add(&tag);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Takes the message with this tag; blocks until it arrives or the run fails. There is no time-out here, because the
    /// caller cannot know whether the other workers still make progress; the driver's watchdog does.
    pub fn take(&self, tag: &Tag) -> Result<Message, Fault> {
        self.take_while(tag, || Ok(()))
    }

    /// Like [`take`](Self::take), but calls `watch` about every [`POLL`] while it waits. An error of `watch` ends the wait.
    pub fn take_while(&self, tag: &Tag, watch: impl FnMut() -> Result<(), Fault>) -> Result<Message, Fault> {
        let mut message = match self.remove(tag) {
            Some(message) => message,
            None => {
                self.demand.begin();
                let awaited = self.wait_for(tag, watch);
                self.demand.end();
                awaited?
            }
        };
        message.take_over()?;
        Ok(message)
    }

    fn remove(&self, tag: &Tag) -> Option<Message> {
        let message = self.lock().remove(tag)?;
        self.changed.notify_all();
        Some(message)
    }

    fn wait_for(&self, tag: &Tag, mut watch: impl FnMut() -> Result<(), Fault>) -> Result<Message, Fault> {
        let mut arrived = self.lock();
        let mut watched = Instant::now();
        loop {
            if let Some(message) = arrived.remove(tag) {
                self.changed.notify_all();
                return Ok(message);
            }
            self.abort.check()?;
            let (guard, wait) = self.changed.wait_timeout(arrived, POLL).unwrap_or_else(|e| e.into_inner());
            arrived = guard;
            if wait.timed_out() || watched.elapsed() >= POLL {
                drop(arrived);
                watch()?;
                watched = Instant::now();
                arrived = self.lock();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arrived> {
        lock(&self.arrived)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn tag(step: u64) -> Tag {
        Tag { kind: Kind::Activation, step, micro_batch: 0, from: 0, to: 1 }
    }

    #[test]
    fn a_wait_for_a_message_wakes_the_thread_that_polls() {
        let mailbox = Mailbox::new(AbortFlag::default(), 4);
        let demand = mailbox.demand().clone();
        assert!(!demand.is_there());
        let (ready, is_ready) = std::sync::mpsc::channel();
        let polling = {
            let (mailbox, demand) = (mailbox.clone(), demand.clone());
            std::thread::spawn(move || {
                const LIMIT: Duration = Duration::from_secs(60);
                demand.wakes_this_thread();
                ready.send(()).unwrap();
                let start = Instant::now();
                while !demand.is_there() && start.elapsed() < LIMIT {
                    std::thread::park_timeout(LIMIT);
                }
                mailbox.put(Message::tensors(tag(0), Vec::new())).unwrap();
                start.elapsed() < LIMIT
            })
        };
        is_ready.recv().unwrap();
        mailbox.take(&tag(0)).unwrap();
        assert!(polling.join().unwrap(), "only its time-out woke it");
        assert!(!demand.is_there(), "the wait is over");
    }

    #[test]
    fn there_is_no_demand_for_what_has_arrived_or_after_a_wait_that_failed() {
        let mailbox = Mailbox::new(AbortFlag::default(), 4);
        mailbox.put(Message::tensors(tag(0), Vec::new())).unwrap();
        mailbox.take_while(&tag(0), || panic!("no wait")).unwrap();
        let mut waited = false;
        let fault = mailbox.take_while(&tag(1), || {
            waited = mailbox.demand().is_there();
            Err(Fault::Lost)
        });
        assert!(fault.is_err() && waited, "a wait is a demand");
        assert!(!mailbox.demand().is_there());
        assert!(Demand::always().is_there());
    }

    fn message(kind: Kind, step: u64, micro_batch: u32) -> Message {
        Message::tensors(Tag { kind, step, micro_batch, from: 0, to: 1 }, Vec::new())
    }

    /// What a peer gets in, of messages that nobody takes, and why no more.
    fn flood(mailbox: &Mailbox, messages: impl Iterator<Item = Message>) -> (usize, String) {
        for (i, message) in messages.enumerate() {
            let Tag { kind, step, .. } = message.tag;
            if let Err(refused) = mailbox.check_budget(WorkerId(1), kind, step) {
                return (i, refused.to_string());
            }
            mailbox.put_at_once(WorkerId(1), message).unwrap();
        }
        panic!("nothing was refused");
    }

    /// Tags of any step, and segments and tensors of any number, once piled up for as long as the memory lasted.
    #[test]
    fn a_peer_that_does_not_wait_gets_in_no_more_than_two_steps_have() {
        let mailbox = || Mailbox::new(AbortFlag::default(), 10);
        let (in_it, why) = flood(&mailbox(), (0..50_000).map(|step| message(Kind::Activation, step, 0)));
        assert_eq!(in_it, 2);
        assert!(why.contains("at most 2 steps") && why.contains("Activation 2, while those of 0 and 1"), "{why}");
        let (in_it, why) = flood(&mailbox(), (0..50_000).map(|number| message(Kind::Command, number, 0)));
        assert!(in_it == 2 && why.contains("at most 2 commands"), "{in_it}: {why}");
        let (in_it, why) = flood(&mailbox(), (0..50_000).map(|number| message(Kind::Share, 7, number)));
        assert!(in_it == 20 && why.contains("at most 20 messages"), "{in_it}: {why}");
        let (in_it, why) = flood(&mailbox(), (0..50_000).map(|number| message(Kind::State, 7, number)));
        assert!(in_it == STATES_MAX && why.contains("at most 16384 tensors of a state transfer"), "{in_it}: {why}");
    }

    /// What is taken makes room again, and what one peer has piled up is no other's fault.
    #[test]
    fn a_run_of_any_length_stays_within_the_budget() {
        let mailbox = Mailbox::new(AbortFlag::default(), 10);
        for step in 0..1000 {
            for micro_batch in 0..4 {
                for next in [step, step + 1] {
                    mailbox.check_budget(WorkerId(1), Kind::Activation, next).unwrap();
                }
                mailbox.put_at_once(WorkerId(1), message(Kind::Activation, step, micro_batch)).unwrap();
                mailbox.put_at_once(WorkerId(1), message(Kind::State, step, micro_batch)).unwrap();
            }
            for micro_batch in 0..4 {
                for kind in [Kind::Activation, Kind::State] {
                    mailbox.take(&message(kind, step, micro_batch).tag).unwrap();
                }
            }
        }
        flood(&mailbox, (0..50_000).map(|step| message(Kind::Activation, step, 0)));
        mailbox.check_budget(WorkerId(2), Kind::Activation, 7).unwrap();
    }
}

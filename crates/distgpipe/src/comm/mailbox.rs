//! Messages that have arrived and wait for the plan to use them.
//!
//! Every worker has one mailbox, and so has the driver. Messages arrive in any order and are taken by tag, so the plan
//! and not the network decides what a stage does next. A mailbox is bounded: `put` blocks while it is full. What arrives over a
//! socket is put in at once, and acknowledged only while there is room, until the sender waits.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::message::{Message, Tag};
use crate::failure::Fault;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::Thread;
use std::time::Instant;

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
    arrived: Mutex<HashMap<Tag, Message>>,
    changed: Condvar,
    demand: Arc<Demand>,
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
        while arrived.len() >= self.capacity {
            self.abort.check()?;
            arrived = self.changed.wait_timeout(arrived, POLL).unwrap_or_else(|e| e.into_inner()).0;
        }
        self.insert(&mut arrived, message)
    }

    /// Adds a message whether there is room or not: the sender knows from its acknowledgements when to wait. Fails as
    /// [`put`](Self::put) does.
    pub fn put_at_once(&self, mut message: Message) -> Result<(), Fault> {
        message.hand_over()?;
        self.insert(&mut self.lock(), message)
    }

    /// Whether [`put`](Self::put) would not wait.
    pub fn has_room(&self) -> bool {
        self.lock().len() < self.capacity
    }

    fn insert(&self, arrived: &mut HashMap<Tag, Message>, message: Message) -> Result<(), Fault> {
        let tag = message.tag;
        if arrived.insert(tag, message).is_some() {
            return Err(Fault::protocol("each message once", format!("{tag} twice")));
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

    fn lock(&self) -> MutexGuard<'_, HashMap<Tag, Message>> {
        self.arrived.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::wire::Kind;
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
}

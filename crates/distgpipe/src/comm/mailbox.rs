//! Messages that have arrived and wait for the plan to use them.
//!
//! Every worker has one mailbox, and so has the driver. Messages arrive in any order and are taken by tag, so the plan
//! and not the network decides what a stage does next. A mailbox is bounded: `put` blocks while it is full. What arrives over a
//! socket is put in at once, and acknowledged only while there is room, until the sender waits.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::message::{Message, Tag};
use crate::failure::Fault;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// The mailbox of a worker or of the driver.
#[derive(Debug)]
pub struct Mailbox {
    abort: AbortFlag,
    capacity: usize,
    arrived: Mutex<HashMap<Tag, Message>>,
    changed: Condvar,
}

impl Mailbox {
    /// A mailbox for at most `capacity` messages at a time. All waits on it end when `abort` is set.
    pub fn new(abort: AbortFlag, capacity: usize) -> Arc<Self> {
        Arc::new(Mailbox { abort, capacity: capacity.max(1), arrived: Mutex::default(), changed: Condvar::new() })
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
    pub fn take_while(&self, tag: &Tag, mut watch: impl FnMut() -> Result<(), Fault>) -> Result<Message, Fault> {
        let mut arrived = self.lock();
        let mut watched = Instant::now();
        loop {
            if let Some(mut message) = arrived.remove(tag) {
                self.changed.notify_all();
                drop(arrived);
                message.take_over()?;
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

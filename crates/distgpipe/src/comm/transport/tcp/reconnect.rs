//! How a link gets another connection when one breaks.
//!
//! The end that dialled dials again, and says which frame it expects; the other end waits for it, and answers with the frame
//! that it expects itself. Every attempt has a higher epoch than the one before. The end that listens accepts only rising
//! epochs, so a connection that was given up can never take the place of a newer one.

use super::outbox::Outbox;
use crate::comm::abort::AbortFlag;
use crate::comm::transport::byte_stream::ByteStream;
use crate::failure::Fault;
use crate::sync::lock;
use distgpipe_core::wire::Hello;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What an end that connects again says.
#[derive(Clone, Debug)]
pub struct Resume {
    /// The number of the attempt.
    pub epoch: u64,
    /// The first frame that it has not received.
    pub next: u64,
    /// How long the attempt may take.
    pub limit: Duration,
    /// Ends the attempt when it is set.
    pub abort: AbortFlag,
}

impl Resume {
    /// For the first connection of a link, of a run that nothing ends meanwhile.
    pub fn first(limit: Duration) -> Self {
        Resume { epoch: 0, next: 1, limit, abort: AbortFlag::default() }
    }
}

/// Connects to the peer again. Returns the stream, and the first frame that the peer has not received.
pub type Dial = Box<dyn Fn(Resume) -> Result<(ByteStream, u64), Fault> + Send>;

/// Where the next connection of a link comes from.
pub enum Reconnect {
    /// This end dials.
    Dial(Dial),
    /// The peer dials, and whoever listens [offers](super::Connection::offer) the connection.
    Await,
}

/// Whether the error of an attempt to connect again shows that the peer is gone for good: nobody listens at its address, or
/// whoever does knows nothing of the run.
pub(crate) fn proves_gone(fault: &Fault) -> bool {
    match fault {
        // Only a server that has shown its key says so.
        Fault::WrongSecret(_) => true,
        Fault::Refused { .. } | Fault::Busy { .. } => true,
        Fault::Io { source, .. } => source.kind() == ErrorKind::ConnectionRefused,
        _ => false,
    }
}

/// A connection of the peer that waits for the reader to take it.
pub(super) struct Offer {
    pub stream: ByteStream,
    pub epoch: u64,
    /// The first frame that the peer has not received.
    pub next: u64,
}

/// Passes connections of the peer from the thread that listens to the reader of the link.
#[derive(Clone)]
pub(super) struct Offers {
    outbox: Arc<Outbox>,
    state: Arc<Mutex<OfferState>>,
}

#[derive(Default)]
struct OfferState {
    /// The highest epoch that was offered.
    epoch: u64,
    offer: Option<Offer>,
}

impl Offers {
    pub fn new(outbox: Arc<Outbox>) -> Self {
        Offers { outbox, state: Arc::default() }
    }

    /// Offers a connection whose hello has been checked. Ends the current one, so that the reader looks for another. Returns
    /// the stream if its epoch is not above all before.
    pub fn put(&self, stream: ByteStream, hello: &Hello) -> Result<(), ByteStream> {
        let mut state = self.lock();
        if hello.epoch <= state.epoch {
            return Err(stream);
        }
        state.epoch = hello.epoch;
        state.offer = Some(Offer { stream, epoch: hello.epoch, next: hello.next });
        self.outbox.cut();
        Ok(())
    }

    pub fn take(&self) -> Option<Offer> {
        self.lock().offer.take()
    }

    fn lock(&self) -> MutexGuard<'_, OfferState> {
        lock(&self.state)
    }
}

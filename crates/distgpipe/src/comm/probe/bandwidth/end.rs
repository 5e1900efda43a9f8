//! One end of a link test: a connection as in a run, whose reader times what arrives and keeps nothing of it.

use super::{edge, LinkTest, Order, OrderReport, Receipt, Sending, ROW_BYTES, TENSOR_BYTES_MAX, TEXT_BYTES_MAX};
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::link_codecs::LinkCodecs;
use crate::comm::message::{Message, Tag};
use crate::comm::notice::Notify;
use crate::comm::probe::xorshift;
use crate::comm::timeouts::Timeouts;
use crate::comm::traffic::{Counters, PartitionEdge};
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::tcp::{Connection, Reconnect, TcpOptions};
use crate::comm::transport::{LinkOptions, Outgoing};
use crate::engine::{self, Layout, Meter};
use crate::failure::{Failure, Fault};
use crate::sync::lock;
use distgpipe_core::schedule::Pass;
use distgpipe_core::wire::{Header, Kind};
use distgpipe_core::WorkerId;
use serde::Serialize;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tch::Tensor;

/// Messages that may wait to be encoded. They share one tensor.
const QUEUE: usize = 1024;

/// Events that may wait. The protocol has at most two.
const EVENTS: usize = 4;

/// How long the goodbyes may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);

/// Which end this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Dialing,
    Listening,
}

impl Side {
    /// The pass of the tensors that this end sends.
    fn sends(self) -> Pass {
        match self {
            Side::Dialing => Pass::Forward,
            Side::Listening => Pass::Backward,
        }
    }

    fn receives(self) -> Pass {
        match self {
            Side::Dialing => Pass::Backward,
            Side::Listening => Pass::Forward,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Side::Dialing => "client",
            Side::Listening => "server",
        }
    }
}

fn kind_of(pass: Pass) -> Kind {
    match pass {
        Pass::Forward => Kind::Activation,
        Pass::Backward => Kind::Gradient,
    }
}

/// What an end learns from its peer.
#[derive(Debug)]
pub(super) enum Event {
    Order(Order),
    Received(Receipt),
    Report(OrderReport),
}

impl Event {
    pub fn name(&self) -> &'static str {
        match self {
            Event::Order(_) => "an order",
            Event::Received(_) => "tensors",
            Event::Report(_) => "a report",
        }
    }
}

/// A series of messages that this end expects, and what has come of it.
#[derive(Debug)]
struct Expected {
    edge: PartitionEdge,
    tensor_bytes: u64,
    messages: u64,
    arrived: u64,
    first: Option<Moment>,
}

/// What is compared between the first and the last message.
#[derive(Debug)]
struct Moment {
    at: Instant,
    decode_ns: u64,
    cpu: Duration,
}

/// What arrives at an end. The reading thread of the connection calls it.
#[derive(Clone)]
struct Arriving {
    side: Side,
    codecs: usize,
    counters: Counters,
    expected: Arc<Mutex<Option<Expected>>>,
    events: SyncSender<Event>,
}

impl Arriving {
    fn lock(&self) -> MutexGuard<'_, Option<Expected>> {
        lock(&self.expected)
    }

    /// Expects the messages of an order. The series before it must be over.
    fn expect(&self, order: &Order) -> Result<(), Fault> {
        order.check(self.codecs)?;
        let messages = match self.side {
            Side::Dialing => order.back,
            Side::Listening => order.there,
        };
        let mut expected = self.lock();
        if expected.is_some() {
            return Err(Fault::protocol("the rest of the last order", "another order"));
        }
        let (edge, tensor_bytes) = (edge(self.side.receives(), order.codec), order.tensor_bytes);
        *expected = (messages > 0).then_some(Expected { edge, tensor_bytes, messages, arrived: 0, first: None });
        Ok(())
    }

    /// Decides from its header whether a frame is read: nothing that was not asked for is allocated.
    fn admit(&self, header: &Header) -> Result<(), Fault> {
        let text = match self.side {
            Side::Dialing => Kind::Report,
            Side::Listening => Kind::Command,
        };
        match header.kind {
            Kind::Ping | Kind::Abort | Kind::Goodbye => Ok(()),
            kind if kind == text && header.body_bytes <= TEXT_BYTES_MAX => Ok(()),
            kind if kind == kind_of(self.side.receives()) => {
                let bytes = header.tensor.map_or(0, |tensor| tensor.decoded_bytes());
                let asked = self.lock().as_ref().is_some_and(|expected| {
                    Tag::of(header).edge() == Some(expected.edge)
                        && bytes == expected.tensor_bytes
                        && expected.arrived < expected.messages
                });
                match asked && header.slots == 1 && header.body_bytes <= 2 * TENSOR_BYTES_MAX {
                    true => Ok(()),
                    false => {
                        Err(Fault::protocol("a tensor of the order", format!("{} of {bytes} bytes", Tag::of(header))))
                    }
                }
            }
            kind => Err(Fault::protocol("a message of a link test", format!("{kind} of {} bytes", header.body_bytes))),
        }
    }

    fn deliver(&self, message: Message) -> Result<(), Fault> {
        let event = match message.tag.kind {
            Kind::Command => {
                let order: Order = parsed("an order", &message.text)?;
                self.expect(&order)?;
                Some(Event::Order(order))
            }
            Kind::Report => Some(Event::Report(parsed("a report", &message.text)?)),
            _ => self.arrived()?.map(Event::Received),
        };
        match event.map(|event| self.events.try_send(event)) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(_)) => Err(Fault::protocol("one order at a time", "more")),
        }
    }

    /// Counts a tensor that has arrived. Returns the receipt with the last one.
    fn arrived(&self) -> Result<Option<Receipt>, Fault> {
        let mut expected = self.lock();
        let Some(series) = expected.as_mut() else { return Err(Fault::protocol("an order", "a tensor")) };
        series.arrived += 1;
        let is_last = series.arrived == series.messages;
        if series.first.is_some() && !is_last {
            return Ok(None);
        }
        let now = self.moment(series.edge);
        let Some(first) = series.first.take().filter(|_| is_last) else {
            series.first = Some(now);
            // A series of one message has a receipt without figures.
            return Ok(is_last.then(|| *expected = None).map(|()| Receipt::default()));
        };
        let receipt = Receipt {
            messages: series.messages - 1,
            ns: nanoseconds(now.at.saturating_duration_since(first.at)),
            decode_ns: now.decode_ns.saturating_sub(first.decode_ns),
            cpu_ns: nanoseconds(now.cpu.saturating_sub(first.cpu)),
        };
        *expected = None;
        Ok(Some(receipt))
    }

    fn moment(&self, edge: PartitionEdge) -> Moment {
        let decoded = self.counters.read().decoded_ns;
        let decode_ns = decoded.iter().find(|(other, _)| *other == edge).map_or(0, |(_, ns)| *ns);
        Moment { at: Instant::now(), decode_ns, cpu: engine::thread_cpu_time() }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn parsed<T: serde::de::DeserializeOwned>(what: &'static str, text: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(text).map_err(|e| Fault::malformed(what, e))
}

pub(super) struct End {
    side: Side,
    connection: Connection,
    arriving: Arriving,
    events: Receiver<Event>,
    abort: AbortFlag,
    /// The values that this end sends, once it has sent any.
    values: Option<Tensor>,
    /// Numbers the messages, so that each has a tag of its own.
    sent: u64,
}

impl End {
    pub fn start(stream: ByteStream, test: &LinkTest, side: Side, timeouts: Timeouts) -> Result<Self, Fault> {
        engine::start();
        let (plan, codecs) = test.plan()?;
        let (sender, events) = mpsc::sync_channel(EVENTS);
        let (abort, counters) = (AbortFlag::default(), Counters::default());
        let arriving = Arriving {
            side,
            codecs: test.codecs.len(),
            counters: counters.clone(),
            expected: Arc::default(),
            events: sender,
        };
        let (admitting, delivering) = (arriving.clone(), arriving.clone());
        let peer = if side == Side::Dialing { Side::Listening } else { Side::Dialing };
        let link = LinkOptions {
            local: side.name().to_owned(),
            peer: peer.name().to_owned(),
            abort: abort.clone(),
            // A measurement over two sockets would measure neither.
            timeouts: Timeouts { reconnect_s: 0.0, ..timeouts },
            queue: QUEUE,
            meter: Meter::new(),
            link_codecs: LinkCodecs::of_test(codecs, plan, test.threads),
            counters,
            heartbeat: Box::new(String::new),
            wrap: Box::new(|link, _| link),
            admit: Box::new(move |header| admitting.admit(header)),
            deliver: Box::new(move |message| delivering.deliver(message)),
            has_room: Box::new(|| true),
            on_heartbeat: Box::new(|_| {}),
            notify: Notify::default(),
        };
        let options = TcpOptions { link, reconnect: Reconnect::Await, on_reconnecting: Box::new(|_| {}) };
        let connection = Connection::start(stream, options)?;
        Ok(End { side, connection, arriving, events, abort, values: None, sent: 0 })
    }

    /// Expects the messages of an order, which is sent next.
    pub fn expect(&self, order: &Order) -> Result<(), Fault> {
        self.arriving.expect(order)
    }

    pub fn peer_has_ended(&self) -> bool {
        self.connection.peer_has_ended()
    }

    /// The next event, if there is one within `wait`.
    pub fn poll_event(&self, wait: Duration) -> Result<Option<Event>, Fault> {
        match self.events.recv_timeout(wait) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => self.abort.check().map(|()| None),
            Err(RecvTimeoutError::Disconnected) => Err(Fault::Lost),
        }
    }

    /// The next event. It must come within `limit`, whatever else the peer sends.
    pub fn next_event(&self, limit: Duration) -> Result<Event, Fault> {
        let start = Instant::now();
        loop {
            if let Some(event) = self.poll_event(POLL)? {
                return Ok(event);
            }
            if self.peer_has_ended() {
                return Err(Fault::Lost);
            }
            if start.elapsed() >= limit {
                return Err(too_long(limit));
            }
        }
    }

    pub fn send_text(&mut self, kind: Kind, text: &impl Serialize) -> Result<(), Fault> {
        let text = serde_json::to_vec(text).map_err(|e| Fault::internal("a text", e.to_string()))?;
        self.sent += 1;
        self.send(Message::text(Tag::control(kind, self.sent, WorkerId(1)), text))
    }

    /// Makes the values of tensors of this size, so that the time for it counts nowhere.
    pub fn prepare(&mut self, tensor_bytes: u64) -> Result<(), Fault> {
        let rows = rows(tensor_bytes);
        if self.values.as_ref().is_none_or(|values| values.size()[0] < rows) {
            self.values = None;
            self.values = Some(activations(rows)?);
        }
        Ok(())
    }

    /// Sends tensors of a size that was [prepared](Self::prepare). Fails if a peer that does not acknowledge what it gets keeps the
    /// queue full for as long as `limit`.
    pub fn send_tensors(
        &mut self,
        codec: usize,
        tensor_bytes: u64,
        messages: u64,
        limit: Duration,
    ) -> Result<(), Fault> {
        let start = Instant::now();
        let values = self.values.as_ref().ok_or_else(|| Fault::internal("values to send", "none"))?;
        let tensor = values.f_narrow(0, 0, rows(tensor_bytes))?;
        let PartitionEdge { pass, from, to } = edge(self.side.sends(), codec);
        for _ in 0..messages {
            self.sent += 1;
            let tag = Tag { kind: kind_of(pass), step: self.sent, micro_batch: 0, from: from.0, to: to.0 };
            let mut message = Message::tensors(tag, vec![Some(tensor.shallow_clone())]);
            message.encoding.compress = true;
            // A queue that is full would make the sender wait without an end.
            self.wait_for_queue(QUEUE - 1, start, limit)?;
            self.send(message)?;
        }
        Ok(())
    }

    /// Waits until everything has been written to the socket.
    pub fn wait_until_sent(&self, limit: Duration) -> Result<(), Fault> {
        self.wait_for_queue(0, Instant::now(), limit)
    }

    fn send(&self, message: Message) -> Result<(), Fault> {
        self.connection.outgoing().ok_or(Fault::Lost)?.send(message)
    }

    /// Waits until at most so many messages wait in the queue or are being sent.
    fn wait_for_queue(&self, messages: usize, start: Instant, limit: Duration) -> Result<(), Fault> {
        while self.connection.counters().queued() > messages {
            self.abort.check()?;
            if start.elapsed() >= limit {
                return Err(too_long(limit));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// What sending with a codec has cost so far.
    pub fn sending(&self, codec: usize) -> Sending {
        let edge = edge(self.side.sends(), codec);
        let sent = self.connection.counters().read().sent;
        let traffic = sent.into_iter().find(|(other, _)| *other == edge).map(|(_, traffic)| traffic);
        let (traffic, cpu) = (traffic.unwrap_or_default(), self.connection.sender_cpu_times());
        Sending {
            messages: traffic.tensors,
            wire_bytes: traffic.wire_bytes,
            encode_ns: traffic.encode_ns,
            encoder_cpu_ns: nanoseconds(cpu.encoder),
            writer_cpu_ns: nanoseconds(cpu.writer),
        }
    }

    pub fn sent_since(&self, codec: usize, before: &Sending) -> Sending {
        let now = self.sending(codec);
        Sending {
            messages: now.messages.saturating_sub(before.messages),
            wire_bytes: now.wire_bytes.saturating_sub(before.wire_bytes),
            encode_ns: now.encode_ns.saturating_sub(before.encode_ns),
            encoder_cpu_ns: now.encoder_cpu_ns.saturating_sub(before.encoder_cpu_ns),
            writer_cpu_ns: now.writer_cpu_ns.saturating_sub(before.writer_cpu_ns),
        }
    }

    /// Tells the peer why the test ends.
    pub fn fail(&self, fault: &Fault) {
        let reported = Fault::Refused { reason: fault.to_string() };
        self.abort.fail(Failure::new(self.side.name(), "measuring the link", reported));
    }

    pub fn close(self) {
        self.connection.close(CLOSE_LIMIT);
    }
}

fn rows(tensor_bytes: u64) -> i64 {
    i64::try_from(tensor_bytes / ROW_BYTES).unwrap_or(i64::MAX)
}

pub(super) fn too_long(limit: Duration) -> Fault {
    Fault::TimedOut { what: "measuring the link".to_owned(), limit_s: limit.as_secs_f64() }
}

/// Rows of values as a network has them behind its rectifiers: normally distributed, and 0 where they would be negative.
fn activations(rows: i64) -> Result<Tensor, Fault> {
    let row = i64::try_from(ROW_BYTES / 4).unwrap_or(1);
    let mut tensor = engine::empty(&[rows, row], tch::Kind::Float, Layout::Contiguous)?;
    let values = engine::floats_mut(&mut tensor).ok_or_else(|| Fault::internal("a dense tensor", "another"))?;
    let mut state = 0x9e37_79b9_7f4a_7c15;
    for value in values {
        state = xorshift(state);
        // The sum of four uniform numbers is close enough to a normal one.
        let sum: u64 = (0..4).map(|part| state >> (16 * part) & 0xffff).sum();
        *value = ((sum as f32 - 131_070.0) / 37_837.0).max(0.0);
    }
    Ok(tensor)
}

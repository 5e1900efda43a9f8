//! Measures a link with what a run uses: its frames, codecs, threads and, at a server, its process and relay.
//!
//! ```text
//! dialing end     Hello (role Driver) ──►  Probe (LinkTest) ──►  Order ──►  activations ──►            …  Goodbye ──►
//! listening end   ◄── Welcome                                    ◄── gradients   ◄── OrderReport
//! ```
//!
//! From the [`LinkTest`] on, both ends are a [`Connection`](crate::comm::transport::tcp::Connection) as in a run. The end that
//! receives a series of messages times it, from the arrival of the first to the arrival of the last, which leaves out the first:
//! what the sockets' buffers hold at the start belongs to it.
//!
//! A peer has shown its credentials, and is trusted no further. What it may make this end allocate is bounded by
//! [`TENSOR_BYTES_MAX`], [`CODECS_MAX`] and [`KEPT_BYTES_MAX`], and how long it may keep it busy by [`Durations`].

mod end;

use crate::comm::abort::POLL;
use crate::comm::codec_policy::{CodecPolicy, LinkName, LinkOverride};
use crate::comm::handshake;
use crate::comm::timeouts::Timeouts;
use crate::comm::traffic::PartitionEdge;
use crate::comm::transport::byte_stream::ByteStream;
use crate::engine;
use crate::failure::Fault;
use distgpipe_core::codec::CodecSpec;
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{Pass, Plan, Request, Schedule};
use distgpipe_core::wire::Kind;
use distgpipe_core::PartitionId;
use end::{too_long, End, Event, Side};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{Duration, Instant};

/// The largest tensor of a test in bytes. An end has at most five of this size: the values that it sends, a message that it
/// encodes, a frame that waits to be sent, a frame that arrives, and the tensor that it is decoded to.
pub const TENSOR_BYTES_MAX: u64 = 128 << 20;

/// The size of every tensor is a multiple of this: one row of 32-bit floats.
pub const ROW_BYTES: u64 = 4 << 10;

/// The most messages of one order, in both directions together, and the most bytes of their tensors.
const MESSAGES_MAX: u64 = 1 << 17;
const ORDER_BYTES_MAX: u64 = 8 << 30;

/// The most codecs of one test, and the most bytes of earlier tensors that they may keep at an end.
pub const CODECS_MAX: usize = 16;
pub const KEPT_BYTES_MAX: u64 = 1 << 30;

/// How long a test may keep an end busy.
#[derive(Clone, Copy, Debug)]
pub struct Durations {
    /// How long a listening end takes part in one test.
    pub test: Duration,
    /// How long a listening end waits for an order.
    pub idle: Duration,
    /// How long either end waits for the tensors or the report of an order.
    pub order: Duration,
}

impl Default for Durations {
    fn default() -> Self {
        Durations { test: Duration::from_secs(30 * 60), idle: Duration::from_secs(60), order: Duration::from_secs(120) }
    }
}

/// The longest text of an order or a report.
const TEXT_BYTES_MAX: u64 = 4 << 10;

/// What a dialing end asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkTest {
    /// The codecs to measure. Orders name them by their index.
    pub codecs: Vec<CodecSpec>,
    /// The threads that encode and decode at each end.
    pub threads: usize,
}

impl LinkTest {
    /// Checks a test, which may come from another process.
    pub fn check(&self) -> Result<(), Fault> {
        if !(1..=CODECS_MAX).contains(&self.codecs.len()) {
            let wrong = format!("expected 1 to {CODECS_MAX} codecs, got {}", self.codecs.len());
            return Err(Fault::invalid_job("`LinkTest::codecs`", wrong));
        }
        engine::check_threads(self.threads).map_err(|e| Fault::invalid_job("`LinkTest::threads`", e))?;
        let kept = self.codecs.iter().map(|codec| 2 * u128::from(codec.kept_bytes_max())).sum::<u128>();
        if kept > u128::from(KEPT_BYTES_MAX) {
            let wrong = format!(
                "expected codecs that keep at most {} MiB of earlier tensors, got {} MiB: use a smaller `delta:MIB`",
                KEPT_BYTES_MAX >> 20,
                kept >> 20
            );
            return Err(Fault::invalid_job("`LinkTest::codecs`", wrong));
        }
        Ok(())
    }

    /// A plan with a cut from the dialing to the listening end for each codec, and the codecs of these cuts.
    fn plan(&self) -> Result<(Plan, CodecPolicy), Fault> {
        let workers = vec!["client,server"; self.codecs.len()].join(",");
        let placement: Placement = workers.parse().map_err(|e| Fault::internal("a placement", format!("{e}")))?;
        let plan = Schedule::GPipe.plan(&Request::new(placement, 1));
        let plan = plan.map_err(|e| Fault::internal("a plan for a test", e.to_string()))?;
        let link = |(index, codec): (usize, &CodecSpec)| {
            let PartitionEdge { from, to, .. } = edge(Pass::Forward, index);
            let link = LinkName::Partitions(from, to);
            LinkOverride { link, forward: codec.clone(), backward: codec.clone() }
        };
        let links = self.codecs.iter().enumerate().map(link).collect();
        Ok((plan, CodecPolicy { links, ..CodecPolicy::default() }))
    }
}

/// The edge of a codec: activations go from the dialing end to the listening end, and gradients back.
fn edge(pass: Pass, codec: usize) -> PartitionEdge {
    let (client, server) = (PartitionId::new(2 * codec), PartitionId::new(2 * codec + 1));
    match pass {
        Pass::Forward => PartitionEdge { pass, from: client, to: server },
        Pass::Backward => PartitionEdge { pass, from: server, to: client },
    }
}

/// Which way tensors go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the dialing to the listening end.
    There,
    /// From the listening to the dialing end.
    Back,
}

/// What the listening end does next: receives `there` messages, then sends `back` messages, then reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Order {
    codec: usize,
    tensor_bytes: u64,
    there: u64,
    back: u64,
}

impl Order {
    fn check(&self, codecs: usize) -> Result<(), Fault> {
        let Order { codec, tensor_bytes, there, back } = *self;
        let messages = there.saturating_add(back);
        let valid_size =
            (ROW_BYTES..=TENSOR_BYTES_MAX).contains(&tensor_bytes) && tensor_bytes.is_multiple_of(ROW_BYTES);
        if codec < codecs && valid_size && messages <= messages_max(tensor_bytes) {
            return Ok(());
        }
        let expected = format!(
            "an order for tensors of {ROW_BYTES} to {TENSOR_BYTES_MAX} bytes, at most {MESSAGES_MAX} of them and {} GiB",
            ORDER_BYTES_MAX >> 30
        );
        Err(Fault::protocol(expected, format!("{messages} of {tensor_bytes} bytes with codec {codec} of {codecs}")))
    }
}

fn messages_max(tensor_bytes: u64) -> u64 {
    MESSAGES_MAX.min(ORDER_BYTES_MAX / tensor_bytes.max(1))
}

/// What an end measured while it received a series of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Receipt {
    /// The messages after the first.
    messages: u64,
    /// From the arrival of the first message to the arrival of the last.
    ns: u64,
    /// Time in which tensors were decoded.
    decode_ns: u64,
    /// Processor time of the thread that received and decoded.
    cpu_ns: u64,
}

/// What an end measured while it sent a series of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Sending {
    messages: u64,
    /// Bytes of the frames.
    wire_bytes: u64,
    /// Time in which tensors were encoded.
    encode_ns: u64,
    /// Processor time of the thread that encoded, and of the thread that wrote to the socket.
    encoder_cpu_ns: u64,
    writer_cpu_ns: u64,
}

/// What the listening end measured during an order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct OrderReport {
    received: Receipt,
    sent: Sending,
}

/// A series of messages in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The messages that were timed.
    pub messages: u64,
    /// The size of each tensor in memory.
    pub tensor_bytes: u64,
    /// The size of each frame.
    pub frame_bytes: f64,
    /// How long the receiver took to receive and decode them.
    pub seconds: f64,
    /// Time that the sender spent encoding, and the receiver decoding, in codecs other than raw.
    pub encode_s: f64,
    pub decode_s: f64,
    /// Processor time of the busiest thread of the connection beside its codec: copying, checksums, and TLS at the dialing end.
    pub copy_s: f64,
}

/// What limits a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Neither end: the network between them, a relay, or the latency of single messages.
    Wire,
    /// The sender's codec.
    Encode,
    /// The receiver's codec.
    Decode,
    /// Copying to or from the socket, checksums, and encryption.
    Copy,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limit::Wire => "wire",
            Limit::Encode => "encode",
            Limit::Decode => "decode",
            Limit::Copy => "copy",
        })
    }
}

/// A thread that is busy for less of the time than this limits nothing.
const BUSY_SHARE: f64 = 0.5;

impl Transfer {
    fn new(received: Receipt, sent: Sending, tensor_bytes: u64) -> Self {
        let seconds = |ns: u64| ns as f64 / 1e9;
        // The sender also counts the message that is not timed.
        let timed = received.messages as f64 / sent.messages.max(1) as f64;
        let (encode, decode) = (seconds(sent.encode_ns) * timed, seconds(received.decode_ns));
        let beside_codec = [
            seconds(sent.writer_cpu_ns) * timed,
            seconds(sent.encoder_cpu_ns) * timed - encode,
            seconds(received.cpu_ns) - decode,
        ];
        Transfer {
            messages: received.messages,
            tensor_bytes,
            frame_bytes: sent.wire_bytes as f64 / sent.messages.max(1) as f64,
            // A clock that stands still must not make a rate infinite.
            seconds: seconds(received.ns).max(1e-6),
            encode_s: encode,
            decode_s: decode,
            copy_s: beside_codec.into_iter().fold(0.0, f64::max),
        }
    }

    /// Bytes of tensors per second.
    pub fn tensor_bytes_per_s(&self) -> f64 {
        self.messages as f64 * self.tensor_bytes as f64 / self.seconds
    }

    /// Bytes of frames per second.
    pub fn wire_bytes_per_s(&self) -> f64 {
        self.messages as f64 * self.frame_bytes / self.seconds
    }

    /// What the transfer was waiting for most of the time.
    pub fn limit(&self) -> Limit {
        let busy = [(self.encode_s, Limit::Encode), (self.decode_s, Limit::Decode), (self.copy_s, Limit::Copy)];
        let busiest = busy.into_iter().fold((0.0, Limit::Wire), |best, next| if next.0 > best.0 { next } else { best });
        match busiest.0 >= BUSY_SHARE * self.seconds {
            true => busiest.1,
            false => Limit::Wire,
        }
    }
}

/// The end of a test that gives the orders.
pub struct DialingEnd {
    end: End,
    codecs: usize,
    durations: Durations,
}

impl DialingEnd {
    /// Starts a test over a stream whose peer has welcomed this end as a driver.
    pub fn start(mut stream: ByteStream, test: &LinkTest, timeouts: Timeouts) -> Result<Self, Fault> {
        test.check()?;
        let text = serde_json::to_vec(test).map_err(|e| Fault::internal("a test that serializes", e.to_string()))?;
        handshake::send_text(&mut stream, Kind::Probe, &text, timeouts.connect())?;
        let end = End::start(stream, test, Side::Dialing, timeouts)?;
        Ok(DialingEnd { end, codecs: test.codecs.len(), durations: Durations::default() })
    }

    /// The time from an order without messages to its report.
    pub fn round_trip(&mut self) -> Result<Duration, Fault> {
        let start = Instant::now();
        self.order(Order { codec: 0, tensor_bytes: ROW_BYTES, there: 0, back: 0 })?;
        self.report()?;
        Ok(start.elapsed())
    }

    /// The time from sending one tensor to the arrival of one of the same size, both encoded and decoded.
    pub fn exchange(&mut self, codec: usize, tensor_bytes: u64) -> Result<Duration, Fault> {
        let order = Order { codec, tensor_bytes, there: 1, back: 1 };
        self.end.prepare(tensor_bytes)?;
        self.end.expect(&order)?;
        let start = Instant::now();
        self.order(order)?;
        self.end.send_tensors(codec, tensor_bytes, 1, self.durations.order)?;
        self.received()?;
        let took = start.elapsed();
        self.report()?;
        Ok(took)
    }

    /// Sends or receives this many messages, and one more, which is not timed.
    pub fn transfer(
        &mut self,
        direction: Direction,
        codec: usize,
        tensor_bytes: u64,
        messages: u64,
    ) -> Result<Transfer, Fault> {
        let messages = messages.clamp(1, messages_max(tensor_bytes).saturating_sub(1).max(1)) + 1;
        let order = |there, back| Order { codec, tensor_bytes, there, back };
        match direction {
            Direction::There => {
                self.end.prepare(tensor_bytes)?;
                let before = self.end.sending(codec);
                self.order(order(messages, 0))?;
                self.end.send_tensors(codec, tensor_bytes, messages, self.durations.order)?;
                let report = self.report()?;
                Ok(Transfer::new(report.received, self.end.sent_since(codec, &before), tensor_bytes))
            }
            Direction::Back => {
                self.end.expect(&order(0, messages))?;
                self.order(order(0, messages))?;
                let received = self.received()?;
                let report = self.report()?;
                Ok(Transfer::new(received, report.sent, tensor_bytes))
            }
        }
    }

    /// Measures one direction for about this long, given how long one message takes at most.
    pub fn measure(
        &mut self,
        direction: Direction,
        codec: usize,
        tensor_bytes: u64,
        message_s: f64,
        seconds: f64,
    ) -> Result<Transfer, Fault> {
        let messages = |message_s: f64, seconds: f64| (seconds / message_s.max(1e-7)) as u64;
        // Messages that follow each other overlap, so that the first series only says how many fill the time.
        let pilot = self.transfer(direction, codec, tensor_bytes, messages(message_s, seconds / 4.0))?;
        self.transfer(direction, codec, tensor_bytes, messages(pilot.seconds / pilot.messages as f64, seconds))
    }

    /// Ends the test.
    pub fn close(self) {
        self.end.close();
    }

    fn order(&mut self, order: Order) -> Result<(), Fault> {
        order.check(self.codecs)?;
        self.end.send_text(Kind::Command, &order)
    }

    fn received(&self) -> Result<Receipt, Fault> {
        match self.end.next_event(self.durations.order)? {
            Event::Received(receipt) => Ok(receipt),
            other => Err(Fault::protocol("tensors", other.name())),
        }
    }

    fn report(&self) -> Result<OrderReport, Fault> {
        match self.end.next_event(self.durations.order)? {
            Event::Report(report) => Ok(report),
            other => Err(Fault::protocol("a report", other.name())),
        }
    }
}

/// Takes the orders of a peer whose test has been [checked](LinkTest::check), until it says goodbye or a limit is reached.
pub(crate) fn answer(
    stream: ByteStream,
    test: &LinkTest,
    timeouts: Timeouts,
    durations: &Durations,
) -> Result<(), Fault> {
    let mut end = End::start(stream, test, Side::Listening, timeouts)?;
    let answered = answer_orders(&mut end, durations);
    if let Err(fault) = &answered {
        end.fail(fault);
    }
    end.close();
    answered
}

fn answer_orders(end: &mut End, limits: &Durations) -> Result<(), Fault> {
    let (start, mut idle) = (Instant::now(), Instant::now());
    loop {
        if start.elapsed() >= limits.test {
            return Err(too_long(limits.test));
        }
        let order = match end.poll_event(POLL)? {
            Some(Event::Order(order)) => order,
            Some(other) => return Err(Fault::protocol("an order", other.name())),
            None if end.peer_has_ended() => return Ok(()),
            None if idle.elapsed() >= limits.idle => return Err(Fault::Idle { limit_s: limits.idle.as_secs_f64() }),
            None => continue,
        };
        let mut report = OrderReport::default();
        if order.there > 0 {
            match end.next_event(limits.order)? {
                Event::Received(receipt) => report.received = receipt,
                other => return Err(Fault::protocol("tensors", other.name())),
            }
        }
        if order.back > 0 {
            end.prepare(order.tensor_bytes)?;
            let before = end.sending(order.codec);
            end.send_tensors(order.codec, order.tensor_bytes, order.back, limits.order)?;
            end.wait_until_sent(limits.order)?;
            report.sent = end.sent_since(order.codec, &before);
        }
        end.send_text(Kind::Report, &report)?;
        idle = Instant::now();
    }
}

#[cfg(test)]
mod tests;

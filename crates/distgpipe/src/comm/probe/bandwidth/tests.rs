use super::*;
use crate::comm::handshake::{Credentials, Token};
use crate::driver::serve::{ServeOptions, Server};
use distgpipe_core::wire::Role;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

const LIMIT: Duration = Duration::from_secs(60);

fn test(codecs: &[&str]) -> LinkTest {
    LinkTest { codecs: codecs.iter().map(|codec| codec.parse().unwrap()).collect(), threads: 1 }
}

/// An end that dials, and the result of the other one, which has these limits.
fn ends(durations: Durations) -> (End, JoinHandle<Result<(), Fault>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let answering = std::thread::spawn(move || answer(far.into(), &test(&["raw"]), Timeouts::default(), &durations));
    (End::start(near.into(), &test(&["raw"]), Side::Dialing, Timeouts::default()).unwrap(), answering)
}

fn order(tensor_bytes: u64, there: u64, back: u64) -> Order {
    Order { codec: 0, tensor_bytes, there, back }
}

/// What the listening end says about a peer that does this.
fn refused(durations: Durations, act: impl FnOnce(&mut End)) -> String {
    let (mut end, answering) = ends(durations);
    act(&mut end);
    let refused = answering.join().unwrap().unwrap_err().to_string();
    // The peer learns it too, perhaps after a report on what was in order.
    while end.next_event(LIMIT).is_ok() {}
    refused
}

#[test]
fn orders_beyond_the_limits_and_tensors_that_were_not_ordered_end_the_test() {
    let limits = Durations::default();
    for wrong in [
        order(TENSOR_BYTES_MAX + ROW_BYTES, 1, 0),
        order(ROW_BYTES - 1, 0, 0),
        order(0, 0, 0),
        order(ROW_BYTES, u64::MAX, 1),
        order(TENSOR_BYTES_MAX, 0, 1 + ORDER_BYTES_MAX / TENSOR_BYTES_MAX),
        Order { codec: 1, ..order(ROW_BYTES, 1, 0) },
    ] {
        let said = refused(limits, |end| end.send_text(Kind::Command, &wrong).unwrap());
        assert!(said.contains("expected an order for tensors of 4096 to 134217728 bytes"), "{wrong:?}: {said}");
    }
    let tensors = |order: Option<Order>, bytes, messages| {
        refused(limits, move |end| {
            end.prepare(bytes).unwrap();
            if let Some(order) = order {
                end.send_text(Kind::Command, &order).unwrap();
            }
            // The connection may have ended meanwhile.
            let _ = end.send_tensors(0, bytes, messages, LIMIT);
        })
    };
    for (order, bytes, messages) in [
        (None, ROW_BYTES, 1),
        (Some(order(ROW_BYTES, 2, 0)), 2 * ROW_BYTES, 1),
        (Some(order(ROW_BYTES, 2, 0)), ROW_BYTES, 3),
    ] {
        let said = tensors(order, bytes, messages);
        assert!(said.contains("expected a tensor of the order"), "{order:?}: {said}");
    }
    let twice = refused(limits, |end| {
        for _ in 0..2 {
            let _ = end.send_text(Kind::Command, &order(ROW_BYTES, 2, 0));
        }
    });
    assert!(twice.contains("expected the rest of the last order"), "{twice}");
}

/// Its heartbeats keep the connection alive.
#[test]
fn a_peer_that_gives_no_orders_or_does_not_keep_them_is_left_in_time() {
    let short = Duration::from_millis(100);
    let said = refused(Durations { idle: short, ..Durations::default() }, |_| ());
    assert!(said.contains("made no progress"), "{said}");
    let limits = Durations { order: short, ..Durations::default() };
    let said = refused(limits, |end| end.send_text(Kind::Command, &order(ROW_BYTES, 1, 0)).unwrap());
    assert!(said.contains("measuring the link"), "{said}");
    let said = refused(Durations { test: short, ..Durations::default() }, |_| ());
    assert!(said.contains("measuring the link"), "{said}");
}

/// The end that dials trusts the other one as little.
#[test]
fn a_listening_end_that_sends_what_was_not_ordered_ends_the_test() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let dialing = End::start(near.into(), &test(&["raw"]), Side::Dialing, Timeouts::default()).unwrap();
    let mut listening = End::start(far.into(), &test(&["raw"]), Side::Listening, Timeouts::default()).unwrap();
    dialing.expect(&order(ROW_BYTES, 0, 1)).unwrap();
    listening.prepare(2 * ROW_BYTES).unwrap();
    listening.send_tensors(0, 2 * ROW_BYTES, 1, LIMIT).unwrap();
    let said = dialing.next_event(LIMIT).unwrap_err().to_string();
    assert!(said.contains("expected a tensor of the order") && said.contains("8192 bytes"), "{said}");
}

#[test]
fn a_test_names_a_bounded_number_of_codecs_that_keep_a_bounded_number_of_bytes() {
    assert!(test(&["raw", "delta:256(tile:4)"]).check().is_ok());
    for (wrong, said) in [
        (test(&[]), "expected 1 to 16 codecs, got 0"),
        (test(&["raw"; CODECS_MAX + 1]), "got 17"),
        (test(&["delta:1024(tile:4)"]), "got 2048 MiB"),
        (test(&["delta:1048576(tile:4)"; CODECS_MAX]), "use a smaller `delta:MIB`"),
        (LinkTest { threads: 0, ..test(&["raw"]) }, "expected 1 to 1024 threads"),
    ] {
        let error = wrong.check().unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// Stops a server even if its test fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_worker_is_measured_refuses_others_meanwhile_and_takes_the_next_peer() {
    let token = Token([3; 32]);
    let server = Server::bind(ServeOptions::new("127.0.0.1:0".parse().unwrap(), token)).unwrap();
    let address = server.address().unwrap().to_string();
    let over = AtomicBool::new(false);
    let dial = |run| {
        let credentials = Credentials { run: [run; 16], token };
        handshake::dial(&address, Role::Driver, &credentials, LIMIT)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| server.run(|| over.load(Ordering::Relaxed), |_| {}).unwrap());
        let _stop = StopAtEnd(&over);
        for run in 1..3 {
            let codecs = test(&["raw", "tile:4"]);
            // On a slow machine the last test takes a moment to end.
            let (start, mut dialed) = (Instant::now(), dial(run));
            while matches!(dialed, Err(Fault::Busy { .. })) && start.elapsed() < LIMIT {
                dialed = dial(run);
            }
            let mut end = DialingEnd::start(dialed.unwrap(), &codecs, Timeouts::default()).unwrap();
            assert!(end.round_trip().unwrap() > Duration::ZERO);
            assert!(matches!(dial(9), Err(Fault::Busy { .. })));
            // 65,536 values: 32 bits each, or 4 and two 16-bit numbers for every 64 of them behind the codec's parameters.
            for (codec, frame_bytes) in [(0, 136 + 262_144), (1, 136 + 4 + 65_536 * 4 / 8 + 65_536 / 64 * 4)] {
                assert!(end.exchange(codec, 64 * ROW_BYTES).unwrap() > Duration::ZERO);
                for direction in [Direction::There, Direction::Back] {
                    let transfer = end.transfer(direction, codec, 64 * ROW_BYTES, 5).unwrap();
                    assert_eq!((transfer.messages, transfer.frame_bytes), (5, f64::from(frame_bytes)), "{transfer:?}");
                    assert!(transfer.seconds > 0.0 && transfer.tensor_bytes_per_s() > 0.0, "{transfer:?}");
                    assert_eq!(transfer.decode_s > 0.0, codec == 1, "{transfer:?}");
                }
            }
            end.close();
        }
    });
}

#[test]
fn the_busiest_thread_is_the_limit_and_otherwise_the_wire() {
    let received = Receipt { messages: 10, ns: 1_000_000_000, decode_ns: 100_000_000, cpu_ns: 300_000_000 };
    let sent = |encode_ns, encoder_cpu_ns, writer_cpu_ns| Sending {
        messages: 11,
        wire_bytes: 11 * 500,
        encode_ns,
        encoder_cpu_ns,
        writer_cpu_ns,
    };
    for (sent, limit) in [
        (sent(110_000_000, 110_000_000, 220_000_000), Limit::Wire),
        (sent(880_000_000, 880_000_000, 220_000_000), Limit::Encode),
        (sent(110_000_000, 990_000_000, 220_000_000), Limit::Copy),
        (sent(110_000_000, 110_000_000, 990_000_000), Limit::Copy),
    ] {
        let transfer = Transfer::new(received, sent, 4096);
        assert_eq!(transfer.limit(), limit, "{transfer:?}");
        assert_eq!((transfer.tensor_bytes_per_s(), transfer.wire_bytes_per_s()), (40_960.0, 5_000.0));
    }
    let decoding = Receipt { decode_ns: 900_000_000, cpu_ns: 950_000_000, ..received };
    assert_eq!(Transfer::new(decoding, sent(0, 0, 0), 4096).limit(), Limit::Decode);
}

/// A peer that orders tensors and then reads nothing once held its place for as long as it liked.
#[test]
fn a_peer_that_does_not_take_what_it_ordered_ends_the_test() {
    let (relay, listener) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let near = TcpStream::connect(relay.local_addr().unwrap()).unwrap();
    let (mut from_near, mut to_far) =
        (relay.accept().unwrap().0, TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let far = listener.accept().unwrap().0;
    // Nothing comes back through the relay.
    let relaying = std::thread::spawn(move || std::io::copy(&mut from_near, &mut to_far));
    let limits = Durations { order: Duration::from_millis(500), ..Durations::default() };
    let answering = std::thread::spawn(move || answer(far.into(), &test(&["raw"]), Timeouts::default(), &limits));
    let mut end = End::start(near.into(), &test(&["raw"]), Side::Dialing, Timeouts::default()).unwrap();
    let start = Instant::now();
    end.send_text(Kind::Command, &order(1 << 20, 0, 4096)).unwrap();
    let refused = answering.join().unwrap().unwrap_err().to_string();
    assert!(refused.contains("0.5 s") && start.elapsed() < LIMIT, "{refused}");
    drop(end);
    let _ = relaying.join();
}

//! The promises of durable links: whatever breaks, every frame arrives once and in order, what is kept is bounded, and
//! numbers of a faulty peer are errors.

use distgpipe_core::wire::{ReceiveWindow, Received, SendWindow, SequenceError};
use proptest::prelude::*;
use std::collections::VecDeque;

/// What happens next on a link.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The stage sends a frame of this size, if there is room.
    Push(u64),
    /// The writer writes a frame to the connection.
    Write,
    /// The reader reads the next frame of the connection, if one is under way.
    Read,
    /// The reader's acknowledgement arrives.
    Acknowledge,
    /// An acknowledgement that was under way for long arrives.
    AcknowledgeOld,
    /// The connection breaks: what is under way is lost. Both ends connect again.
    Cut,
    /// The connection breaks, and the first attempt to resume breaks after the peer has been heard.
    CutTwice,
    /// A frame arrives a second time.
    Duplicate,
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1u64..100).prop_map(Event::Push),
        6 => Just(Event::Write),
        6 => Just(Event::Read),
        2 => Just(Event::Acknowledge),
        1 => Just(Event::AcknowledgeOld),
        1 => Just(Event::Cut),
        1 => Just(Event::CutTwice),
        1 => Just(Event::Duplicate),
    ]
}

const BYTES_MAX: u64 = 300;

/// One direction of a link. Frames are their numbers.
struct Link {
    sending: SendWindow,
    kept: VecDeque<u64>,
    receiving: ReceiveWindow,
    /// Frames that the connection has taken and not delivered.
    under_way: VecDeque<u64>,
    delivered: Vec<u64>,
    earlier_acknowledgement: u64,
}

impl Link {
    fn new() -> Self {
        Link {
            sending: SendWindow::new(BYTES_MAX),
            kept: VecDeque::new(),
            receiving: ReceiveWindow::default(),
            under_way: VecDeque::new(),
            delivered: Vec::new(),
            earlier_acknowledgement: 0,
        }
    }

    fn drop_kept(&mut self, count: usize) {
        self.kept.drain(..count);
    }

    fn write(&mut self) -> bool {
        let Some(at) = self.sending.next_to_send() else { return false };
        self.under_way.push_back(self.kept[at]);
        self.sending.mark_sent();
        true
    }

    fn read(&mut self) -> bool {
        let Some(frame) = self.under_way.pop_front() else { return false };
        if self.receiving.check(frame).unwrap() == Received::New {
            self.receiving.complete();
            self.delivered.push(frame);
        }
        true
    }

    fn resume(&mut self) {
        self.under_way.clear();
        let dropped = self.sending.resume(self.receiving.next()).unwrap();
        self.drop_kept(dropped);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Push(bytes) if self.sending.has_room() => {
                self.kept.push_back(self.sending.next_new());
                self.sending.push(bytes);
            }
            Event::Push(_) => {}
            Event::Write => drop(self.write()),
            Event::Read => drop(self.read()),
            Event::Acknowledge => {
                let dropped = self.sending.acknowledge(self.receiving.last()).unwrap();
                self.drop_kept(dropped);
                self.earlier_acknowledgement = self.receiving.last() / 2;
            }
            Event::AcknowledgeOld => {
                let dropped = self.sending.acknowledge(self.earlier_acknowledgement).unwrap();
                self.drop_kept(dropped);
            }
            Event::Cut => self.resume(),
            Event::CutTwice => {
                self.resume();
                self.write();
                self.resume();
            }
            Event::Duplicate => {
                if let Some(&frame) = self.delivered.last() {
                    assert_eq!(self.receiving.check(frame), Ok(Received::Duplicate));
                }
            }
        }
        assert_eq!(
            self.kept.len() as u64,
            self.sending.next_new() - self.kept.front().unwrap_or(&self.sending.next_new())
        );
        assert!(self.sending.bytes() < BYTES_MAX + 100, "{} bytes are kept", self.sending.bytes());
    }
}

proptest! {
    #[test]
    fn every_frame_arrives_once_and_in_order(events in prop::collection::vec(any_event(), 0..300)) {
        let mut link = Link::new();
        events.into_iter().for_each(|event| link.happen(event));
        while link.write() || link.read() {}
        let expected: Vec<u64> = (1..link.sending.next_new()).collect();
        prop_assert_eq!(&link.delivered, &expected);
        link.happen(Event::Acknowledge);
        prop_assert!(link.sending.is_empty() && link.sending.bytes() == 0);
    }

    /// Whatever a peer says, the sender neither panics nor drops a frame that was not sent.
    #[test]
    fn numbers_of_a_faulty_peer_are_errors(
        (pushed, sent) in (0u64..20).prop_flat_map(|pushed| (Just(pushed), 0..=pushed)),
        said in prop::collection::vec((any::<bool>(), prop_oneof![0u64..30, any::<u64>()]), 0..20),
    ) {
        let mut window = SendWindow::new(u64::MAX);
        (0..pushed).for_each(|_| window.push(1));
        (0..sent).for_each(|_| assert!(window.mark_sent()));
        for (resumes, number) in said {
            let before = window.clone();
            let result = if resumes { window.resume(number) } else { window.acknowledge(number) };
            prop_assert!(window.bytes() >= pushed - sent, "an unsent frame was dropped");
            if result.is_err() {
                prop_assert_eq!(format!("{before:?}"), format!("{window:?}"), "an error changes nothing");
            }
        }
        prop_assert_eq!(window.next_new(), pushed + 1);
    }
}

#[test]
fn a_gap_and_a_wrong_resume_are_named() {
    let receiving = ReceiveWindow::default();
    assert_eq!(receiving.check(2), Err(SequenceError::Gap { expected: 1, got: 2 }));
    assert_eq!(receiving.check(u64::MAX), Err(SequenceError::Gap { expected: 1, got: u64::MAX }));
    let mut sending = SendWindow::new(10);
    sending.push(1);
    assert_eq!(sending.acknowledge(1), Err(SequenceError::Acknowledged { expected_max: 0, got: 1 }));
    assert!(sending.mark_sent());
    assert_eq!(sending.acknowledge(1), Ok(1));
    // A peer that has lost its state would begin at the first frame, which is not kept.
    assert_eq!(sending.resume(1), Err(SequenceError::Resume { expected_min: 2, expected_max: 2, got: 1 }));
    assert_eq!(sending.resume(0), Err(SequenceError::Resume { expected_min: 2, expected_max: 2, got: 0 }));
}

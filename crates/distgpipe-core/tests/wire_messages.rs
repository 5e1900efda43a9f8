//! The promises of the handshake and the abort notice: they survive a round trip, their format does not change by
//! accident, and no bytes make a reader panic or allocate more than it received.

use distgpipe_core::wire::{AbortNotice, Hello, Limits, MessageError, Refuse, Role, Welcome};
use distgpipe_core::WorkerId;
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn hello() -> Hello {
    Hello {
        run: *b"0123456789abcdef",
        token: [0xa5; 32],
        role: Role::Worker(WorkerId(7)),
        epoch: 3,
        next: 258,
        build: "0.1.0".into(),
    }
}

#[test]
fn the_format_is_the_committed_one() {
    let worker = concat!(
        "30313233343536373839616263646566",
        "a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5",
        "0107000000",
        "0300000000000000",
        "0201000000000000",
        "0500302e312e30",
    );
    assert_eq!(hex(&hello().encode()), worker);
    let driver = Hello { role: Role::Driver, ..hello() };
    assert_eq!(hex(&driver.encode()), worker.replace("0107000000", "0000000000"));
    let probe = Hello { role: Role::Probe, ..hello() };
    assert_eq!(hex(&probe.encode()), worker.replace("0107000000", "0200000000"));

    let welcome = Welcome { worker: Some(WorkerId(258)), next: 1, build: "0.1.0".into() };
    assert_eq!(hex(&welcome.encode()), "010201000001000000000000000500302e312e30");
    let welcome = Welcome { worker: None, next: 0, build: String::new() };
    assert_eq!(hex(&welcome.encode()), "000000000000000000000000000000");

    let refuse = Refuse { reason: "full".into() };
    assert_eq!(hex(&refuse.encode()), "040066756c6c");

    let notice = AbortNotice { worker: "w1".into(), phase: "2F0".into(), message: "é".into() };
    assert_eq!(hex(&notice.encode()), "0200773103003246300200c3a9");
}

#[test]
fn long_texts_are_cut_off_between_characters() {
    let long = "é".repeat(20_000);
    // 513 bytes truncated to 512: the cut would fall inside a character.
    let refuse = Refuse { reason: format!("x{long}") };
    let back = Refuse::decode(&refuse.encode()).unwrap();
    assert_eq!(back.reason.len(), 511);
    assert!(refuse.reason.starts_with(&back.reason));

    let notice = AbortNotice { worker: long.clone(), phase: long.clone(), message: long.clone() };
    let bytes = notice.encode();
    assert_eq!(bytes.len(), AbortNotice::BYTES_MAX);
    let back = AbortNotice::decode(&bytes).unwrap();
    assert_eq!(back.worker.len(), AbortNotice::NAME_BYTES_MAX);
    assert_eq!(back.phase.len(), AbortNotice::NAME_BYTES_MAX);
    assert_eq!(back.message.len(), AbortNotice::MESSAGE_BYTES_MAX);
    assert!(long.starts_with(&back.message));

    let hello = Hello { build: long.clone(), ..hello() };
    assert_eq!(hello.encode().len(), Hello::BYTES_MAX);
    assert_eq!(Hello::decode(&hello.encode()).unwrap().build.len(), 64);
}

#[test]
fn every_message_fits_the_default_limits() {
    let limits = Limits::default();
    for bytes in [Hello::BYTES_MAX, Welcome::BYTES_MAX, Refuse::BYTES_MAX] {
        assert!(bytes as u64 <= limits.handshake_bytes_max);
    }
    assert!(AbortNotice::BYTES_MAX as u64 <= limits.text_bytes_max);
}

#[test]
fn a_text_beyond_its_maximum_is_refused() {
    let mut bytes = 513u16.to_le_bytes().to_vec();
    bytes.resize(2 + 513, b'x');
    let error = Refuse::decode(&bytes).unwrap_err();
    assert!(matches!(error, MessageError::TooLong { expected_max: 512, got: 513, .. }), "{error}");
}

#[test]
fn a_text_that_is_not_utf8_is_refused() {
    let error = Refuse::decode(&[3, 0, b'o', b'k', 0xff]).unwrap_err();
    assert!(matches!(error, MessageError::Utf8 { at: 2, .. }), "{error}");
}

#[test]
fn bytes_that_mean_nothing_are_refused() {
    let mut bytes = hello().encode();
    bytes[48] = 3;
    let error = Hello::decode(&bytes).unwrap_err();
    assert!(matches!(error, MessageError::Unknown { field: "role", got: 3, .. }), "{error}");
    for without_number in [0, 2] {
        bytes[48] = without_number;
        let error = Hello::decode(&bytes).unwrap_err();
        assert!(matches!(error, MessageError::NotZero { field: "role", got: 7, .. }), "{error}");
    }
    bytes[48] = 1;
    bytes.push(0);
    let error = Hello::decode(&bytes).unwrap_err();
    assert!(matches!(error, MessageError::Trailing { got: 1, .. }), "{error}");
}

#[test]
fn a_message_cut_short_anywhere_is_refused() {
    let whole = hello().encode();
    for length in 0..whole.len() {
        let error = Hello::decode(&whole[..length]).unwrap_err();
        assert!(matches!(error, MessageError::Truncated { .. }), "{length}: {error}");
    }
    let notice = AbortNotice { worker: "a".into(), phase: "b".into(), message: "c".into() };
    let whole = notice.encode();
    for length in 0..whole.len() {
        assert!(AbortNotice::decode(&whole[..length]).is_err(), "{length}");
    }
}

proptest! {
    #[test]
    fn messages_come_back(
        run in prop::array::uniform16(any::<u8>()),
        token in prop::array::uniform32(any::<u8>()),
        worker in prop::option::of(any::<u32>().prop_map(WorkerId)),
        (epoch, next) in any::<(u64, u64)>(),
        build in "\\PC{0,16}",
        text in "\\PC{0,32}",
    ) {
        for role in [worker.map_or(Role::Driver, Role::Worker), Role::Probe] {
            let hello = Hello { run, token, role, epoch, next, build: build.clone() };
            prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
        let welcome = Welcome { worker, next, build: build.clone() };
        prop_assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
        let refuse = Refuse { reason: text.clone() };
        prop_assert_eq!(Refuse::decode(&refuse.encode()), Ok(refuse));
        let notice = AbortNotice { worker: build, phase: text.clone(), message: text };
        prop_assert_eq!(AbortNotice::decode(&notice.encode()), Ok(notice));
    }

    /// A message that decodes has exactly one encoding, so nothing is skipped, and takes no more memory than its bytes.
    #[test]
    fn arbitrary_bytes_never_panic_or_grow(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        ascii in prop::collection::vec(0u8..8, 0..200),
    ) {
        for bytes in [bytes, ascii] {
            if let Ok(hello) = Hello::decode(&bytes) {
                prop_assert!(hello.build.capacity() <= bytes.len());
                prop_assert_eq!(hello.encode(), &bytes[..]);
            }
            if let Ok(welcome) = Welcome::decode(&bytes) {
                prop_assert!(welcome.build.capacity() <= bytes.len());
                prop_assert_eq!(welcome.encode(), &bytes[..]);
            }
            if let Ok(refuse) = Refuse::decode(&bytes) {
                prop_assert!(refuse.reason.capacity() <= bytes.len());
                prop_assert_eq!(refuse.encode(), &bytes[..]);
            }
            if let Ok(notice) = AbortNotice::decode(&bytes) {
                let held = notice.worker.capacity() + notice.phase.capacity() + notice.message.capacity();
                prop_assert!(held <= bytes.len());
                prop_assert_eq!(notice.encode(), &bytes[..]);
            }
        }
    }
}

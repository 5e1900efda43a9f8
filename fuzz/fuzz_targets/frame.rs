//! Bytes from a peer: a header and its body, then the messages that a body may contain.
#![no_main]

use distgpipe_core::wire::{AbortNotice, BodyHasher, Header, Hello, Limits, ReceiveWindow, Refuse, SendWindow, Welcome, HEADER_BYTES};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let body = match data.split_first_chunk::<HEADER_BYTES>() {
        Some((bytes, body)) => {
            header(bytes, body);
            body
        }
        None => data,
    };
    messages(body);
});

fn header(bytes: &[u8; HEADER_BYTES], body: &[u8]) {
    let limits = Limits::default();
    let Ok(header) = Header::decode(bytes, &limits) else {
        return;
    };
    assert_eq!(header.encode(), *bytes, "a header has one encoding");
    assert!(header.body_bytes <= limits.body_bytes_max);
    if let Some(tensor) = header.tensor {
        assert!(tensor.decoded_bytes() <= limits.body_bytes_max);
    }
    // Numbers of any size are errors, never a panic.
    let _ = ReceiveWindow::default().check(header.sequence);
    let mut window = SendWindow::new(1);
    window.push(1);
    window.mark_sent();
    let _ = window.acknowledge(header.acknowledged);
    let _ = window.resume(header.sequence);
    let mut hasher = BodyHasher::new(&header);
    let (front, back) = body.split_at(body.len() / 2);
    hasher.update(front);
    hasher.update(back);
    assert_eq!(header.verify(body), hasher.verify(), "in pieces or whole");
    let mut sealed = header;
    sealed.seal(body);
    assert_eq!(sealed.verify(body), Ok(()));
}

fn messages(body: &[u8]) {
    if let Ok(hello) = Hello::decode(body) {
        assert_eq!(hello.encode(), body);
        let _ = hello.check(&[0; 16], &hello.token);
    }
    if let Ok(welcome) = Welcome::decode(body) {
        assert_eq!(welcome.encode(), body);
    }
    if let Ok(refuse) = Refuse::decode(body) {
        assert_eq!(refuse.encode(), body);
    }
    if let Ok(notice) = AbortNotice::decode(body) {
        assert_eq!(notice.encode(), body);
    }
}

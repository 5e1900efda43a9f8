//! The promises of frames: a sealed frame decodes to itself, corruption is detected, the format does not change by
//! accident, and no header makes a receiver panic or allocate more than the limits allow.

use distgpipe_core::codec::CodecId;
use distgpipe_core::wire::{
    BodyHasher, DType, Header, Kind, Layout, Limits, Shape, ShapeError, TensorMeta, WireError, HEADER_BYTES, VERSION,
};
use proptest::prelude::*;

/// A header is plain data, so decoding one cannot allocate.
const _: () = {
    const fn is_copy<T: Copy>() {}
    is_copy::<Header>();
};

fn meta(dtype: DType, dims: &[usize]) -> TensorMeta {
    TensorMeta { dtype, layout: Layout::Contiguous, shape: Shape::new(dims).unwrap(), codec: CodecId::Raw }
}

/// A header that uses every field, and its body.
fn sealed(kind: Kind) -> (Header, Vec<u8>) {
    let mut header = Header { step: 0x0102_0304_0506_0708, micro_batch: 9, from: 2, to: 3, ..Header::new(kind) };
    (header.sequence, header.acknowledged) = (0x1112_1314, 0x2122_2324);
    let mut body = kind.name().as_bytes().to_vec();
    if kind.carries_tensors() {
        // A message of state has one tensor.
        (header.slot, header.slots) = if kind == Kind::State { (0, 1) } else { (1, 2) };
        header.tensor = Some(TensorMeta { layout: Layout::ChannelsLast, ..meta(DType::F16, &[1, 2, 1, 3]) });
        body = (0..12).collect();
    }
    header.seal(&body);
    (header, body)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The committed encoding of one header per kind, with a line per group of fields: magic, version, kind, zero | step |
/// micro-batch, from, to | slot, slots | tensor, zero | dimensions | sequence | acknowledged |
/// body bytes | checksum. A difference means that two
/// releases cannot communicate: increase `VERSION` instead.
fn snapshot(header: &Header) -> String {
    let bytes = header.encode();
    let cuts = [0, 8, 16, 28, 32, 40, 72, 104, 112, 120, 128, HEADER_BYTES];
    let groups: Vec<_> = cuts.windows(2).map(|cut| hex(&bytes[cut[0]..cut[1]])).collect();
    groups.join(" ")
}

#[test]
fn the_format_is_the_committed_one() {
    let mut got = String::new();
    for &kind in Kind::ALL {
        got += &format!("{kind} {}\n", snapshot(&sealed(kind).0));
    }
    got += &format!(
        "absent {}\n",
        snapshot(&{
            let mut absent = Header::new(Kind::Gradient);
            absent.seal(&[]);
            absent
        })
    );
    let expected = include_str!("wire_frame.hex");
    for (expected, got) in expected.lines().zip(got.lines()) {
        assert_eq!(expected, got);
    }
    assert_eq!(expected, got);
}

#[test]
fn every_kind_survives_a_round_trip() {
    for &kind in Kind::ALL {
        let (header, body) = sealed(kind);
        let back = Header::decode(&header.encode(), &Limits::default()).unwrap();
        assert_eq!(back, header);
        assert_eq!(back.verify(&body), Ok(()));
    }
}

/// The numbers are repeated here on purpose: they must not change.
#[test]
fn numbers_are_never_reused() {
    let kinds = [
        "Hello",
        "Welcome",
        "Refuse",
        "Job",
        "Ready",
        "Input",
        "Target",
        "Activation",
        "Gradient",
        "Output",
        "Command",
        "Report",
        "State",
        "Abort",
        "Ping",
        "Goodbye",
        "Share",
        "Probe",
    ];
    for (index, name) in kinds.iter().enumerate() {
        assert_eq!(Kind::from_number(index as u8 + 1).unwrap().name(), *name);
    }
    let dtypes = ["F32", "F64", "F16", "BF16", "I64", "I32", "U8", "Bool", "I16", "I8"];
    for (index, name) in dtypes.iter().enumerate() {
        assert_eq!(DType::from_number(index as u8 + 1).unwrap().name(), *name);
    }
    assert_eq!(Layout::from_number(1), Some(Layout::Contiguous));
    assert_eq!(Layout::from_number(2), Some(Layout::ChannelsLast));
    assert_eq!(CodecId::from_number(1), Some(CodecId::Raw));
    assert_eq!(CodecId::from_number(8), Some(CodecId::TopK));
    assert_eq!(CodecId::from_number(9), Some(CodecId::PowerSvd));
    assert_eq!(CodecId::from_number(10), Some(CodecId::Feedback));
    assert_eq!(CodecId::from_number(11), Some(CodecId::Delta));
    for number in 0..=255 {
        assert!(Kind::from_number(number).is_none_or(|kind| kind.number() == number));
    }
    assert_eq!(Kind::from_number(0), None);
    assert_eq!(Kind::from_number(19), None);
}

fn is_found(bytes: &[u8; HEADER_BYTES], body: &[u8]) -> bool {
    match Header::decode(bytes, &Limits::default()) {
        Ok(header) => header.verify(body).is_err(),
        Err(_) => true,
    }
}

#[test]
fn every_flipped_bit_is_found() {
    let (mut long, _) = sealed(Kind::State);
    // Beyond 240 bytes the hash uses another code path.
    let long_body: Vec<u8> = (0..300usize).map(|i| (i * i) as u8).collect();
    long.tensor = Some(meta(DType::F32, &[5, 15]));
    long.seal(&long_body);
    let mut empty = Header::new(Kind::Ping);
    empty.seal(&[]);
    let mut frames: Vec<_> = Kind::ALL.iter().map(|&kind| sealed(kind)).collect();
    frames.extend([(long, long_body), (empty, Vec::new())]);

    for (header, body) in frames {
        let mut bytes = header.encode();
        assert!(!is_found(&bytes, &body), "{} is whole", header.kind);
        for bit in 0..HEADER_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(is_found(&bytes, &body), "{} header bit {bit}", header.kind);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let mut body = body;
        for bit in 0..body.len() * 8 {
            body[bit / 8] ^= 1 << (bit % 8);
            assert!(is_found(&bytes, &body), "{} body bit {bit}", header.kind);
            body[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn a_body_of_another_length_is_found() {
    let (header, mut body) = sealed(Kind::Activation);
    body.push(0);
    let error = header.verify(&body).unwrap_err();
    assert_eq!(error, WireError::BodyLength { expected: 12, got: 13 });
    let error = header.verify(&body[..11]).unwrap_err();
    assert_eq!(error, WireError::BodyLength { expected: 12, got: 11 });
}

#[test]
fn a_foreign_protocol_gets_the_advice_to_check_the_port() {
    let mut bytes = [b' '; HEADER_BYTES];
    bytes[..16].copy_from_slice(b"GET / HTTP/1.1\r\n");
    let error = Header::decode(&bytes, &Limits::default()).unwrap_err();
    assert_eq!(error, WireError::Magic { got: *b"GET " });
    assert!(error.to_string().contains("check the host and the port"), "{error}");
}

#[test]
fn the_error_names_the_end_to_upgrade() {
    for (theirs, who) in [(VERSION + 1, "upgrade distgpipe on this end"), (0, "upgrade distgpipe on the peer")] {
        let mut bytes = sealed(Kind::Hello).0.encode();
        bytes[4..6].copy_from_slice(&theirs.to_le_bytes());
        // In a newer version the rest may have any meaning.
        bytes[6..].fill(0xff);
        let error = Header::decode(&bytes, &Limits::default()).unwrap_err();
        assert_eq!(error, WireError::Version { ours: VERSION, theirs });
        let text = error.to_string();
        assert!(text.contains(who), "{text}");
        assert!(text.contains(&format!("version {theirs} ")), "{text}");
        assert!(text.contains(&format!("version {VERSION}")), "{text}");
    }
}

/// The error for a valid Activation header with some bytes replaced.
fn refused(at: usize, with: &[u8]) -> WireError {
    let mut bytes = sealed(Kind::Activation).0.encode();
    bytes[at..at + with.len()].copy_from_slice(with);
    Header::decode(&bytes, &Limits::default()).unwrap_err()
}

#[test]
fn each_field_is_checked() {
    let unknown = |field, expected_max, got| WireError::Unknown { field, expected_max, got };
    assert_eq!(refused(6, &[19]), unknown("kind", 18, 19));
    assert_eq!(refused(6, &[0]), unknown("kind", 18, 0));
    assert_eq!(refused(32, &[11]), unknown("dtype", 10, 11));
    assert_eq!(refused(33, &[3]), unknown("layout", 2, 3));
    assert_eq!(refused(34, &[13]), unknown("codec", 12, 13));
    assert_eq!(refused(34, &[0]), unknown("codec", 12, 0));
    assert_eq!(refused(35, &[9]), WireError::Shape(ShapeError::Rank { got: 9 }));
    assert_eq!(refused(35, &[3]), WireError::NotZero { field: "dimensions beyond the rank" });
    assert_eq!(refused(7, &[1]), WireError::NotZero { field: "byte 7" });
    assert_eq!(refused(39, &[1]), WireError::NotZero { field: "bytes 36 to 39" });
    assert_eq!(refused(32, &[0]), WireError::NotZero { field: "layout, codec and rank without a tensor" });
    assert_eq!(refused(32, &[0; 4]), WireError::NotZero { field: "dimensions without a tensor" });
    assert_eq!(refused(28, &[2]), WireError::Slot { slot: 2, slots: 2 });
    assert_eq!(refused(28, &[0; 4]), WireError::Slot { slot: 0, slots: 0 });
    assert_eq!(refused(40, &[0xff; 8]), WireError::Shape(ShapeError::Elements));
    assert_eq!(refused(40, &[0xff; 32]), WireError::Shape(ShapeError::Elements));
    assert!(matches!(refused(120, &[13]), WireError::RawLength { expected: 12, got: 13, .. }));
    assert!(matches!(refused(120, &[0]), WireError::RawLength { expected: 12, got: 0, .. }));
    assert!(matches!(refused(6, &[Kind::Job.number()]), WireError::Slots { slots: 2, .. }));
}

#[test]
fn fields_that_contradict_each_other_are_refused() {
    let limits = Limits::default();
    let tensor_in_text = Header { tensor: Some(meta(DType::U8, &[0])), ..Header::new(Kind::Report) };
    let error = tensor_in_text.check(&limits).unwrap_err();
    assert_eq!(error, WireError::TensorUnexpected { kind: Kind::Report });

    let mut absent = Header::new(Kind::Gradient);
    assert_eq!(absent.check(&limits), Ok(()));
    absent.body_bytes = 1;
    let error = absent.check(&limits).unwrap_err();
    assert_eq!(error, WireError::AbsentBody { kind: Kind::Gradient, got: 1 });
    absent.kind = Kind::State;
    assert_eq!(absent.check(&limits), Ok(()), "state may have a body of its own");

    let flat = Header {
        tensor: Some(TensorMeta { layout: Layout::ChannelsLast, ..meta(DType::U8, &[0, 3]) }),
        ..Header::new(Kind::Activation)
    };
    assert_eq!(flat.check(&limits), Err(WireError::ChannelsLast { got: 2 }));
}

#[test]
fn limits_hold_at_their_edges() {
    let limits = Limits {
        body_bytes_max: 1000,
        tensors_per_message_max: 3,
        text_bytes_max: 20,
        job_bytes_max: 30,
        handshake_bytes_max: 10,
    };
    let at_limit = |header: Header, limit: &str| match header.check(&limits) {
        Ok(()) => true,
        Err(error @ WireError::Limit { .. }) => {
            let text = error.to_string();
            assert!(text.contains(&format!("(limit {limit}), got ")) && !text.ends_with(": "), "{text}");
            false
        }
        Err(other) => panic!("{other}"),
    };
    for &kind in Kind::ALL {
        let (max, limit) = match kind {
            Kind::Hello | Kind::Welcome | Kind::Refuse => (10, "handshake_bytes_max"),
            Kind::Job => (30, "job_bytes_max"),
            _ if kind.carries_tensors() => (1000, "body_bytes_max"),
            _ => (20, "text_bytes_max"),
        };
        let with_body = |bytes: u64| {
            let tensor = meta(DType::U8, &[bytes as usize]);
            Header { body_bytes: bytes, tensor: kind.carries_tensors().then_some(tensor), ..Header::new(kind) }
        };
        assert!(at_limit(with_body(max), limit), "{kind}");
        assert!(!at_limit(with_body(max + 1), limit), "{kind}");
        // The same with the encoded header, and with the largest number.
        let mut bytes = with_body(max).encode();
        assert!(Header::decode(&bytes, &limits).is_ok(), "{kind}");
        bytes[120..128].fill(0xff);
        let error = Header::decode(&bytes, &limits).unwrap_err();
        assert!(matches!(error, WireError::Limit { got: u64::MAX, .. }), "{kind}: {error}");

        let with_slots = |slots| Header { slots, slot: slots - 1, ..Header::new(kind) };
        if kind.carries_tensors() && kind != Kind::State {
            assert!(at_limit(with_slots(3), "tensors_per_message_max"), "{kind}");
            assert!(!at_limit(with_slots(4), "tensors_per_message_max"), "{kind}");
        } else {
            assert_eq!(with_slots(2).check(&limits), Err(WireError::Slots { kind, slots: 2 }));
        }
    }
}

/// The limit applies to the decoded tensor too, however short the body is.
#[test]
fn a_small_body_cannot_ask_for_a_large_tensor() {
    let bomb = Header { tensor: Some(meta(DType::F32, &[1 << 40])), body_bytes: 4, ..Header::new(Kind::Activation) };
    let error = bomb.check(&Limits::default()).unwrap_err();
    assert!(matches!(error, WireError::Limit { what: "decoded bytes", .. }), "{error}");
}

fn any_header() -> impl Strategy<Value = Header> {
    let kind = prop::sample::select(Kind::ALL);
    let dtype = prop::sample::select(DType::ALL);
    let dims = prop::collection::vec(0usize..5, 0..=8);
    let tensor = (dtype, dims, any::<bool>()).prop_map(|(dtype, dims, last)| {
        let last = last && dims.len() == 4;
        TensorMeta { layout: if last { Layout::ChannelsLast } else { Layout::Contiguous }, ..meta(dtype, &dims) }
    });
    let place = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<(u64, u64)>());
    let slots = (1u16..=64).prop_flat_map(|slots| (0..slots, Just(slots)));
    (kind, place, slots, prop::option::of(tensor)).prop_map(|(kind, place, slots, tensor)| {
        let (step, micro_batch, from, to, (sequence, acknowledged)) = place;
        let header = Header { step, micro_batch, from, to, sequence, acknowledged, ..Header::new(kind) };
        if kind.carries_tensors() {
            let (slot, slots) = if kind == Kind::State { (0, 1) } else { slots };
            Header { slot, slots, tensor, ..header }
        } else {
            header
        }
    })
}

fn body_of(header: &Header, filler: &[u8]) -> Vec<u8> {
    let length = match &header.tensor {
        Some(tensor) => tensor.decoded_bytes() as usize,
        None if header.kind.carries_tensors() => 0,
        None => filler.len(),
    };
    filler.iter().copied().cycle().take(length).collect()
}

proptest! {
    #[test]
    fn a_frame_survives_a_round_trip(
        mut header in any_header(),
        filler in prop::collection::vec(any::<u8>(), 1..600),
        cuts in prop::collection::vec(1usize..100, 1..8),
    ) {
        let body = body_of(&header, &filler);
        header.seal(&body);
        let back = Header::decode(&header.encode(), &Limits::default()).unwrap();
        prop_assert_eq!(back, header);
        prop_assert_eq!(back.verify(&body), Ok(()));

        // The same in pieces.
        let mut hasher = BodyHasher::new(&Header { checksum: 0, ..header });
        let mut rest = &body[..];
        for cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at((*cut).min(rest.len()));
            hasher.update(piece);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(hasher.clone().seal(), Ok(header));
        let mut hasher = BodyHasher::new(&header);
        hasher.update(&body);
        prop_assert_eq!(hasher.clone().verify(), Ok(()));
        hasher.update(&[0]);
        let too_long = matches!(hasher.verify(), Err(WireError::BodyLength { .. }));
        prop_assert!(too_long);
    }

    #[test]
    fn a_change_after_sealing_is_found(
        mut header in any_header(),
        filler in prop::collection::vec(any::<u8>(), 1..600),
    ) {
        let body = body_of(&header, &filler);
        header.seal(&body);
        let moved = Header { step: header.step ^ 1, ..header };
        let found = matches!(moved.verify(&body), Err(WireError::Checksum { .. }));
        prop_assert!(found);
    }

    /// Bytes that begin with the magic, so that the fields after it are reached.
    #[test]
    fn arbitrary_bytes_give_a_header_within_the_limits_or_an_error(
        noise in prop::collection::vec((0usize..HEADER_BYTES, any::<u8>()), 0..12),
        good in any_header(),
        anything in prop::array::uniform32(any::<u8>()),
    ) {
        let limits = Limits::default();
        let mut bytes = good.encode();
        for (at, byte) in noise {
            bytes[at] = byte;
        }
        if let Ok(header) = Header::decode(&bytes, &limits) {
            prop_assert_eq!(header.encode(), bytes, "one header has one encoding");
            prop_assert!(header.body_bytes <= limits.body_bytes_max);
            if let Some(tensor) = header.tensor {
                prop_assert!(tensor.decoded_bytes() <= limits.body_bytes_max);
            }
            let _ = header.verify(&anything);
        }
        let mut bytes = [0; HEADER_BYTES];
        for (byte, from) in bytes.iter_mut().zip(anything.iter().cycle()) {
            *byte = *from;
        }
        let _ = Header::decode(&bytes, &limits);
    }
}

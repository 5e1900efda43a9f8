//! An untrusted weight file: an archive of torch.save down to its pickle, a bare pickle, or a safetensors header.
#![no_main]

use distgpipe_core::weights::{pickle, safetensors, zip};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    listed(data);
    header(data);
    archive(data);
});

fn listed(data: &[u8]) {
    for tensor in pickle::tensors(data).unwrap_or_default() {
        let (elements, span) = (tensor.elements(), tensor.span());
        assert!(elements <= tensor.storage_elements);
        assert!(tensor.offset + span <= tensor.storage_elements);
        assert!(!tensor.is_contiguous() || span == elements);
    }
}

fn header(data: &[u8]) {
    let total = data.len() as u64;
    let Ok(length) = safetensors::header_bytes(data, total) else {
        return;
    };
    let first = safetensors::LENGTH_BYTES;
    let header = &data[first..first + length as usize];
    let mut end = first as u64 + length;
    for entry in safetensors::entries(header, total).unwrap_or_default() {
        assert_eq!(entry.range.start, end, "one behind the other");
        end = entry.range.end;
        assert!(end <= total);
    }
}

fn archive(data: &[u8]) {
    let total = data.len() as u64;
    let tail = &data[data.len() - data.len().min(zip::TAIL_BYTES as usize)..];
    let Ok(directory) = zip::directory(tail, total) else {
        return;
    };
    let bytes = &data[directory.start as usize..directory.end as usize];
    for entry in zip::entries(bytes, directory.start).unwrap_or_default() {
        let local = usize::try_from(entry.header).ok().and_then(|at| data.get(at..));
        let Some(local) = local.and_then(|rest| rest.first_chunk()) else {
            continue;
        };
        let Ok(range) = zip::data(&entry, local, total) else {
            continue;
        };
        let inside = &data[range.start as usize..range.end as usize];
        if entry.name.ends_with("/data.pkl") {
            listed(inside);
        }
    }
}

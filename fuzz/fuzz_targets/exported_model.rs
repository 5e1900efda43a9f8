//! An untrusted model of torch.export: the archive, its JSON alone, and a graph as it arrives from another process.
#![no_main]

use distgpipe_core::pt2::archive;
use distgpipe_core::pt2::{Boundaries, Graph, Pt2Error};
use libfuzzer_sys::fuzz_target;
use std::ops::Range;

fuzz_target!(|data: &[u8]| {
    let total = data.len() as u64;
    let read = |range: Range<u64>| Ok::<_, Pt2Error>(data[range.start as usize..range.end as usize].to_vec());
    for (tensor, start) in archive::weights(total, &mut { read }).unwrap_or_default() {
        assert!(start + tensor.span() * tensor.dtype.size_bytes() <= total, "inside the file");
    }
    archive::graph(total, &mut { read }).iter().for_each(cut);
    serde_json::from_slice::<Graph>(data).iter().for_each(cut);
});

fn cut(graph: &Graph) {
    for boundaries in [Boundaries::Modules, Boundaries::All] {
        for pair in graph.layers(boundaries).unwrap_or_default().windows(2) {
            assert_eq!(pair[0].outputs, pair[1].inputs);
        }
    }
    graph.used_again();
}

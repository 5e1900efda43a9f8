//! Exported models for tests.

use std::path::Path;

/// A network for the digits from PyTorch, and the same with an operator that is not on the list in place of one ReLU.
pub fn exported(folder: &Path) -> [String; 2] {
    let plain = Path::new(env!("CARGO_MANIFEST_DIR")).join("../distgpipe/tests/golden/pt2/digits.pt2");
    let mut content = std::fs::read(&plain).expect("a file of this repository");
    let [from, to] = [b"torch.ops.aten.relu.default", b"torch.ops.aten.sinc.default"];
    let at = content.windows(from.len()).position(|bytes| bytes == from).expect("a ReLU");
    // The file in the archive that has the operator, and what the archive says of its checksum.
    let number = |from: usize, bytes: usize| {
        content[from..from + bytes].iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte))
    };
    let places = |of: &[u8]| {
        let places = content.windows(of.len()).enumerate().filter(|(_, bytes)| *bytes == of);
        places.map(|(at, _)| at).collect::<Vec<_>>()
    };
    let header = places(b"PK\x03\x04").into_iter().rfind(|header| *header < at).expect("a local header");
    let entry = places(b"PK\x01\x02")
        .into_iter()
        .find(|entry| number(entry + 42, 4) == header)
        .expect("an entry of the directory");
    let begin = header + 30 + number(header + 26, 2) + number(header + 28, 2);
    let file = begin..begin + number(entry + 20, 4);
    let checksum = content[entry + 16..entry + 20].to_vec();
    let checksums = places(&checksum);
    content[at..at + to.len()].copy_from_slice(to);
    let checksum = crc32fast::hash(&content[file]).to_le_bytes();
    checksums.into_iter().for_each(|at| content[at..at + 4].copy_from_slice(&checksum));
    let other = folder.join("sinc.pt2");
    std::fs::write(&other, content).expect("a folder of this test");
    [plain, other].map(|path| path.to_str().expect("UTF-8").to_owned())
}

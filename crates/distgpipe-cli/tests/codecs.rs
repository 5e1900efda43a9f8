//! `distgpipe codecs` as its users meet it. Bytes on the wire are compared with the formulas of docs/codecs.md, and errors
//! with what the written file differs in.

mod command;

use command::directory;
use distgpipe_core::codec::ALL;
use distgpipe_core::wire::HEADER_BYTES;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Command;

fn fine(arguments: &[&str]) -> String {
    command::fine(&[&["codecs"], arguments].concat())
}

fn json(arguments: &[&str]) -> Value {
    command::json(&[&["codecs"], arguments, &["--json"]].concat())
}

/// Standard error of a command that was called wrongly.
fn refused(arguments: &[&str]) -> String {
    command::refused(2, &[&["codecs"], arguments].concat())
}

fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// A tensor of a file: name, type, dimensions, bytes.
type Entry = (&'static str, Dtype, Vec<usize>, Vec<u8>);

/// Numbers without a pattern, between −1 and 1, those of each channel multiplied by twice as much as the last one's.
fn floats(dims: &[usize]) -> Vec<u8> {
    let channel_values: usize = dims.iter().skip(2).product();
    let channels = dims.get(1).copied().unwrap_or(1);
    let value = |i: usize| {
        let noise = (i as u32).wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32 * 2.0 - 1.0;
        noise * (1 << (i / channel_values.max(1) % channels)) as f32
    };
    (0..dims.iter().product::<usize>()).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// Floats as bfloat16, cut off.
fn upper_halves(floats: &[u8]) -> Vec<u8> {
    floats.chunks_exact(4).flat_map(|bytes| [bytes[2], bytes[3]]).collect()
}

fn entries() -> Vec<Entry> {
    let f32 = |name, dims: &[usize]| (name, Dtype::F32, dims.to_vec(), floats(dims));
    let mut broken = f32("layer.broken", &[3, 5]);
    broken.3[16..20].copy_from_slice(&f32::NAN.to_le_bytes());
    let mut huge = f32("layer.huge", &[7]);
    huge.3[8..12].copy_from_slice(&1e6f32.to_le_bytes());
    vec![
        f32("activation", &[2, 5, 9, 7]),
        f32("gradient", &[301]),
        f32("scalar", &[]),
        f32("empty", &[0, 4]),
        broken,
        huge,
        ("half", Dtype::F16, vec![3, 2], (0..12).collect()),
        ("brain", Dtype::BF16, vec![2, 5, 3, 3], upper_halves(&floats(&[2, 5, 3, 3]))),
        ("double", Dtype::F64, vec![2], (0..16).collect()),
        ("tokens", Dtype::I64, vec![2, 2], (0..32).collect()),
        ("sizes", Dtype::U32, vec![1], vec![9, 0, 0, 0]),
        ("mask", Dtype::BOOL, vec![3], vec![1, 0, 1]),
    ]
}

fn write(path: &Path, entries: &[Entry]) -> Vec<u8> {
    let views = entries
        .iter()
        .map(|(name, dtype, dims, bytes)| (*name, TensorView::new(*dtype, dims.clone(), bytes).expect("a tensor")));
    let metadata = HashMap::from([("written by".to_owned(), "a test, \"quoted\" and ünïcode".to_owned())]);
    let bytes = safetensors::serialize(views, &Some(metadata)).expect("a file");
    std::fs::write(path, &bytes).expect("written");
    bytes
}

fn metadata(file: &[u8]) -> Option<HashMap<String, String>> {
    SafeTensors::read_metadata(file).expect("a header").1.metadata().clone()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The body's size by docs/codecs.md, the same whatever the type; of `raw`, for F32.
fn body_bytes(codec: &str, values: usize) -> usize {
    match codec {
        "raw" => 4 * values,
        "f16" | "bf16" => 2 * values,
        "uniform:8" => 8 + values,
        "uniform:3" => 8 + (3 * values).div_ceil(8),
        "sort:6+2" => 8 * 4 + values,
        "tile:4" => 4 + 4 * values.div_ceil(64) + (4 * values).div_ceil(8),
        "tile:3/16" => 4 + 4 * values.div_ceil(16) + (3 * values).div_ceil(8),
        other => panic!("no formula for {other}"),
    }
}

const CODECS: [&str; 8] = ["raw", "f16", "bf16", "uniform:8", "uniform:3", "sort:6+2", "tile:4", "tile:3/16"];

/// Whether a codec encodes this tensor. Lossy ones take floats without NaN, and 1e6 is beyond f16.
fn encodes(codec: &str, (name, dtype, ..): &Entry) -> bool {
    is_float(*dtype) && (codec == "raw" || *name != "layer.broken" && (*name, codec) != ("layer.huge", "f16"))
}

fn wire_bytes(codec: &str, entry: &Entry) -> usize {
    let length = entry.3.len();
    let encoded = codec != "raw" && encodes(codec, entry);
    HEADER_BYTES + if encoded { body_bytes(codec, length / entry.1.size()) } else { length }
}

fn is_float(dtype: Dtype) -> bool {
    [Dtype::F32, Dtype::F16, Dtype::BF16].contains(&dtype)
}

/// The values of a tensor's bytes.
fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let value = |b: &[u8]| match (dtype, b) {
        (Dtype::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (Dtype::BF16, &[a, b]) => f64::from(f32::from_le_bytes([0, 0, a, b])),
        // None of the test is negative.
        (Dtype::F16, &[a, b]) => match (u16::from_le_bytes([a, b]) >> 10, u16::from_le_bytes([a, b]) & 0x3ff) {
            (0, fraction) => f64::from(fraction) * 2f64.powi(-24),
            (exponent, fraction) => (1024.0 + f64::from(fraction)) * 2f64.powi(i32::from(exponent) - 25),
        },
        other => panic!("{other:?} is no float here"),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

/// Squared errors, squares and the largest error of values, where they are numbers at all.
fn errors(before: Vec<f64>, after: Vec<f64>) -> (f64, f64, f64) {
    let pairs = before.into_iter().zip(after).filter(|(before, _)| !before.is_nan());
    pairs.fold((0.0, 0.0, 0.0), |(errors, squares, max), (before, after)| {
        let error = (before - after).abs();
        (errors + error * error, squares + before * before, f64::max(max, error))
    })
}

/// Holds what was told about a tensor against what became of it.
fn check_tensor(codec: &str, entry: &Entry, after: &[u8], told: &Value) {
    let (name, dtype, dims, before) = entry;
    assert_eq!((&told["shape"], &told["dtype"]), (&serde_json::json!(dims), &format!("{dtype:?}").into()), "{name}");
    assert_eq!(number(&told["raw_bytes"]), before.len() as f64, "{name}");
    assert_eq!(number(&told["wire_bytes"]), wire_bytes(codec, entry) as f64, "{codec} {name}");
    let raw = !encodes(codec, entry);
    assert_eq!(told["codec"].as_str(), Some(if raw { "raw" } else { codec }), "{told}");
    assert_eq!(told["sent_raw"].is_string(), raw && codec != "raw", "{told}");
    if raw || codec == "raw" {
        assert_eq!(after, before, "{codec} {name}");
        assert_eq!((number(&told["mse"]), number(&told["max_error"])), (0.0, 0.0), "{told}");
    } else {
        let (squares, _, max) = errors(values(*dtype, before), values(*dtype, after));
        let count = before.len() / dtype.size();
        assert!(close(number(&told["mse"]), squares / count.max(1) as f64), "{codec} {told}");
        assert_eq!(number(&told["max_error"]), max, "{codec} {told}");
    }
}

/// Holds what was told about a file against what became of its tensors.
fn check_totals(codec: &str, entries: &[Entry], written: &SafeTensors<'_>, told: &Value) {
    let wire: usize = entries.iter().map(|entry| wire_bytes(codec, entry)).sum();
    assert_eq!(number(&told["wire_bytes"]), wire as f64, "{codec}");
    let raw: usize = entries.iter().map(|entry| entry.3.len()).sum();
    assert!(close(number(&told["ratio"]), raw as f64 / wire as f64), "{codec} {told}");
    let refused = entries.iter().filter(|entry| codec != "raw" && !encodes(codec, entry)).count();
    assert_eq!(number(&told["tensors_sent_raw"]), refused as f64, "{codec}");
    let floats = || entries.iter().filter(|entry| is_float(entry.1));
    let before: Vec<f64> = floats().flat_map(|entry| values(entry.1, &entry.3)).collect();
    let after: Vec<f64> =
        floats().flat_map(|entry| values(entry.1, written.tensor(entry.0).expect("there").data())).collect();
    let count = before.len() as f64;
    let (error_squares, squares, max) = errors(before, after);
    assert!(close(number(&told["mse"]), error_squares / count), "{codec} {told}");
    assert!(close(number(&told["relative_mse"]), error_squares / squares), "{codec} {told}");
    assert_eq!(number(&told["max_error"]), max, "{codec}");
}

fn close(a: f64, b: f64) -> bool {
    // The sums are added up in another order.
    (a - b).abs() <= 1e-12 * b.abs()
}

#[test]
fn the_table_and_the_help_have_every_codec() {
    let table = fine(&["--shape", "2,3,8,8"]);
    let rows: Vec<&str> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let help = fine(&["--help"]).split_whitespace().collect::<Vec<_>>().join(" ");
    for member in ALL {
        assert!(rows.contains(&member.examples[0]), "{}: {table}", member.name);
        assert!(help.contains(&format!("{} {}", member.name, member.about)), "{}: {help}", member.name);
    }
    assert!(rows.contains(&"copy"), "{table}");
    assert!(table.contains("2×3×8×8, relu values, seed 0") && table.contains("one thread"), "{table}");
    assert!(help.contains("Examples:"), "{help}");
}

#[test]
fn figures_of_the_default_tensor_count_the_header() {
    let value = json(&["--codec", "raw,tile:4"]);
    let values = 8 * 32 * 112 * 112;
    assert_eq!(value["shape"], serde_json::json!([8, 32, 112, 112]));
    let [raw, tile] = [&value["codecs"][0], &value["codecs"][1]];
    assert_eq!((raw["codec"].as_str(), tile["codec"].as_str()), (Some("raw"), Some("tile:4")));
    assert_eq!(number(&raw["wire_bytes"]), (HEADER_BYTES + 4 * values) as f64);
    assert!(number(&raw["ratio"]) < 1.0 && number(&raw["ratio"]) > 0.9999, "{raw}");
    assert_eq!((number(&raw["mse"]), number(&raw["max_error"])), (0.0, 0.0));
    assert_eq!(number(&tile["wire_bytes"]), (HEADER_BYTES + body_bytes("tile:4", values)) as f64);
    assert!((number(&tile["ratio"]) - 7.11).abs() < 0.005, "{tile}");
    // 16 values over a range of 3 or so, in tiles of which half is 0.
    assert!((1e-3..1e-2).contains(&number(&tile["relative_mse"])), "{tile}");
    assert!(number(&tile["encode_gb_per_s"]) > 0.0 && number(&value["copy_gb_per_s"]) > 0.0);
}

#[test]
fn made_up_values_are_what_they_are_called_and_repeat() {
    let figures = |more: &[&str]| {
        let value = json(&[&["--shape", "64,64", "--codec", "uniform:8"], more].concat());
        (number(&value["codecs"][0]["mse"]), number(&value["codecs"][0]["relative_mse"]))
    };
    // mse / relative mse is the mean square: 1 for normal values, half of that where half is 0.
    let (mse, relative) = figures(&["--values", "gaussian"]);
    assert!((mse / relative - 1.0).abs() < 0.1, "{mse} {relative}");
    let (mse, relative) = figures(&["--values", "relu"]);
    assert!((mse / relative - 0.5).abs() < 0.05, "{mse} {relative}");
    assert_eq!((mse, relative), figures(&[]));
    assert_ne!((mse, relative), figures(&["--seed", "1"]));
}

#[test]
fn a_file_comes_back_with_everything_but_the_rounding() {
    let directory = directory("round-trip");
    let (input, output) = (directory.join("in.safetensors"), directory.join("out.safetensors"));
    let entries = entries();
    let file = write(&input, &entries);
    for codec in CODECS {
        let value = json(&["--input", plain(&input), "--codec", codec, "--write-decoded", plain(&output)]);
        assert_eq!(std::fs::read(&input).expect("there"), file, "the input is left alone");
        let bytes = std::fs::read(&output).expect("written");
        let written = SafeTensors::deserialize(&bytes).expect("a file");
        assert_eq!(metadata(&bytes), metadata(&file));
        assert!(metadata(&bytes).is_some());
        assert_eq!(written.len(), entries.len());
        assert_eq!(bytes == file, codec == "raw", "{codec}");
        let told = &value["codecs"][0];
        for entry in &entries {
            let view = written.tensor(entry.0).expect("the same names");
            assert_eq!((view.dtype(), view.shape()), (entry.1, &entry.2[..]), "{}", entry.0);
            let tensor = told["tensors"].as_array().and_then(|all| all.iter().find(|one| one["name"] == entry.0));
            check_tensor(codec, entry, view.data(), tensor.expect("every tensor is listed"));
        }
        check_totals(codec, &entries, &written, told);
    }
    assert_eq!(std::fs::read_dir(&directory).expect("there").count(), 2, "nothing else is left behind");
}

#[test]
fn channels_last_encodes_in_that_order_and_writes_in_the_files() {
    let directory = directory("channels-last");
    let (input, output) = (directory.join("in.safetensors"), directory.join("out.safetensors"));
    let entries = [("a", Dtype::F32, vec![2, 8, 6, 10], floats(&[2, 8, 6, 10]))];
    let file = write(&input, &entries);
    let decoded = |codec: &str, more: &[&str]| {
        let told =
            json(&[&["--input", plain(&input), "--codec", codec, "--write-decoded", plain(&output)], more].concat());
        (told["codecs"][0].clone(), std::fs::read(&output).expect("written"))
    };
    assert_eq!(decoded("raw", &["--channels-last"]).1, file);
    // Tiles are of the pixels of a channel, whatever lies side by side in memory; the sample of `fast` goes by memory.
    let (contiguous, same) = decoded("tile:6/60", &[]);
    let (tiled, bytes) = decoded("tile:6/60", &["--channels-last"]);
    assert!(bytes == same && close(number(&tiled["mse"]), number(&contiguous["mse"])), "{tiled} {contiguous}");
    let (_, other) = decoded("fast:3+2/16", &[]);
    let (last, bytes) = decoded("fast:3+2/16", &["--channels-last"]);
    assert_ne!(bytes, other);
    let written = SafeTensors::deserialize(&bytes).expect("a file");
    let of = |bytes: &[u8]| values(Dtype::F32, bytes);
    let (squares, _, max) = errors(of(&entries[0].3), of(written.tensor("a").expect("there").data()));
    assert!(close(number(&last["mse"]), squares / 960.0) && number(&last["max_error"]) == max, "{last}");
}

#[test]
fn tensors_that_go_raw_are_counted_and_named() {
    let input = directory("raw").join("in.safetensors");
    write(&input, &entries());
    let table = fine(&["--input", plain(&input), "--codec", "raw,f16,tile:4"]);
    for words in [
        "12 tensors of in.safetensors",
        "6 tensors sent raw: ",
        "layer.broken (a NaN or an infinity at 4)",
        "layer.huge (a value too large at 2, or too wide a range, with f16)",
        "tokens (I64, codecs take F32, F16 and BF16)",
    ] {
        assert!(table.contains(words), "expected `{words}` in: {table}");
    }
    let sent_raw = |codec: &str| {
        let line = table.lines().find(|line| line.starts_with(codec)).expect("a row");
        line.split_whitespace().nth(8).map(str::to_owned)
    };
    assert_eq!((sent_raw("raw"), sent_raw("f16"), sent_raw("tile:4")), (None, Some("6".into()), Some("5".into())));
    let one = json(&["--input", plain(&input), "--tensor", "grad", "--codec", "tile:4"]);
    assert_eq!(one["codecs"][0]["tensors"].as_array().map(Vec::len), Some(1));
    let taken = fine(&["--input", plain(&input), "--tensor", "grad", "--codec", "f16,sort:8,tile:4"]);
    assert!(!taken.contains("sent raw"), "{taken}");
}

/// `zstd` takes every type and changes no bit of what its inner codec leaves: integers, masks, and with `raw` everything.
#[test]
fn zstd_carries_tensors_of_every_type() {
    let directory = directory("zstd");
    let (input, output) = (directory.join("in.safetensors"), directory.join("out.safetensors"));
    let mut entries = entries();
    entries.retain(|(name, ..)| *name != "sizes");
    entries.push((
        "padding",
        Dtype::I64,
        vec![8, 128],
        (0..1024i64).flat_map(|i| i64::from(i % 128 < 9).to_le_bytes()).collect(),
    ));
    let file = write(&input, &entries);
    let told = |codec: &str| {
        let arguments = ["--input", plain(&input), "--codec", codec, "--write-decoded", plain(&output)];
        (json(&arguments)["codecs"][0].clone(), std::fs::read(&output).expect("written"))
    };
    let (raw, bytes) = told("zstd(raw)");
    assert_eq!((number(&raw["tensors_sent_raw"]), number(&raw["mse"])), (0.0, 0.0), "{raw}");
    assert_eq!(bytes, file);
    let (tile, _) = told("zstd(tile:4)");
    assert_eq!(number(&tile["tensors_sent_raw"]), 1.0, "the one with a NaN: {tile}");
    for codec in [raw, tile] {
        let padding = codec["tensors"].as_array().expect("tensors").iter().find(|tensor| tensor["name"] == "padding");
        let wire = number(&padding.expect("there")["wire_bytes"]) - HEADER_BYTES as f64;
        assert!(wire < 8192.0 / 50.0, "{wire}");
    }
}

#[test]
fn the_picture_has_every_codec() {
    let picture = directory("plot").join("codecs.svg");
    fine(&["--shape", "4,4,16,16", "--plot", plain(&picture)]);
    let svg = std::fs::read_to_string(&picture).expect("written");
    for member in ALL {
        assert!(svg.contains(&format!(">{}</text>", member.examples[0])), "{}", member.name);
    }
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}

#[test]
fn wrong_calls_end_with_2_and_name_flag_and_remedy() {
    let directory = directory("wrong");
    let file = |name: &str, bytes: &[u8]| {
        let path = directory.join(name);
        std::fs::write(&path, bytes).expect("written");
        plain(&path).to_owned()
    };
    let good = write(&directory.join("good.safetensors"), &entries());
    let good = file("good.safetensors", &good);
    let cut = file("cut.safetensors", &std::fs::read(&good).expect("there")[..999]);
    let other = file("other.safetensors", b"[package]\nname = \"distgpipe\"\n");
    let (empty, none) = (file("empty.safetensors", b""), file("none.safetensors", b"\x02\0\0\0\0\0\0\0{}"));
    let link = directory.join("link.safetensors");
    std::os::unix::fs::symlink(&good, &link).expect("a link");
    let nowhere = plain(&directory.join("no/where")).to_owned();
    let folder = plain(&directory).to_owned();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--codec", "zip"], &["--codec", "expected a codec out of: raw", "got `zip`"]),
        (&["--codec", "raw,sort:6"], &["--codec", "such as sort:6+2", "got `sort:6`"]),
        (&["--shape", "4,0,4"], &["--shape 4,0,4", "1 or more"]),
        (&["--shape", "100000,100000"], &["--shape 100000,100000", "at most 268435456", "use fewer"]),
        (&["--shape", "1,1,1,1,1,1,1,1,1"], &["--shape", "at most 8 dimensions"]),
        (&["--shape", "4294967296,4294967296,4294967296"], &["--shape", "with a larger product"]),
        (&["--shape", "4,x"], &["--shape", "'x'"]),
        (&["--values", "cauchy"], &["--values", "relu, gaussian"]),
        (&["--shape", "4,4", "--channels-last"], &["--channels-last", "N,C,H,W", "got --shape 4,4"]),
        (&["--input", &good, "--tensor", "gradient", "--channels-last"], &["--channels-last", "got none"]),
        (&["--input", &nowhere], &["--input", "no/where", "No such file"]),
        (&["--input", &folder], &["--input", "expected a regular file, got a directory"]),
        (&["--input", "/dev/zero"], &["--input /dev/zero", "expected a regular file, got a device"]),
        (&["--input", &cut], &["cut.safetensors", "at byte 999", "the file is truncated"]),
        (&["--input", &other], &["other.safetensors", "expected a safetensors file", "is this the right file?"]),
        (&["--input", &empty], &["empty.safetensors", "got 0 bytes"]),
        (&["--input", &none], &["none.safetensors", "a file without any", "name another"]),
        (&["--input", &good, "--tensor", "missing"], &["--tensor missing", "which has: ", "gradient", "and 4 more"]),
        (&["--input", &good, "--shape", "4"], &["--shape", "--input"]),
        (&["--tensor", "a"], &["--input"]),
        (&["--write-decoded", "out.safetensors", "--codec", "raw"], &["--input"]),
        (
            &["--input", &good, "--write-decoded", "o"],
            &["--write-decoded", "expected one codec, got none", "--codec tile:4"],
        ),
        (&["--input", &good, "--write-decoded", "o", "--codec", "raw,f16"], &["--write-decoded", "got 2"]),
        (&["--input", &good, "--write-decoded", &good, "--codec", "f16"], &["--write-decoded", "the file of --input"]),
        (&["--input", &good, "--write-decoded", plain(&link), "--codec", "f16"], &["--write-decoded", "name another"]),
        (&["--input", plain(&link), "--write-decoded", &good, "--codec", "f16"], &["--write-decoded", "name another"]),
        (
            &["--input", &good, "--write-decoded", &nowhere, "--codec", "f16"],
            &["--write-decoded", "a directory that exists"],
        ),
        (&["--input", &good, "--write-decoded", &folder, "--codec", "f16"], &["--write-decoded", "got a directory"]),
        (&["--input", &good, "--plot", &good], &["--plot", "the file of --input"]),
        (&["--plot", &nowhere], &["--plot", "a directory that exists"]),
        (&["--plot", "x.svg", "--codec", "raw", "--codec", "raw"], &["--plot", "several codecs", "got one"]),
    ];
    let before = std::fs::read(&good).expect("there");
    for (arguments, words) in cases {
        let said = refused(arguments);
        for word in *words {
            assert!(said.contains(word), "{arguments:?}: expected `{word}` in: {said}");
        }
    }
    assert!(std::fs::read(&good).expect("there") == before, "the input is left alone");
}

/// What is written whole by renaming would take the place of a pipe, or of /dev/null.
#[test]
fn a_pipe_is_written_to_and_not_replaced() {
    let pipe = directory("pipe").join("pipe.svg");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read_to_string(pipe).expect("read")
    });
    fine(&["--shape", "64", "--plot", plain(&pipe)]);
    assert!(std::fs::metadata(&pipe).expect("there").file_type().is_fifo());
    assert!(reader.join().expect("it ends").ends_with("</svg>\n"));
}

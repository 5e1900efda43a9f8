//! `distgpipe train` with codecs: the flags, the table, the warning, the captured file, the trace.

mod command;
mod servers;

use command::{directory, ended};
use serde_json::Value;
use servers::{Servers, TOKEN};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

fn fine(arguments: &[&str]) -> (String, String) {
    ended(0, &[&["train"], arguments].concat())
}

/// Standard error of a run that was asked for wrongly.
fn refused(arguments: &[&str]) -> String {
    command::refused(2, &[&["train"], arguments].concat())
}

fn json(arguments: &[&str]) -> Value {
    command::json(&[&["train"], arguments, &["--json"]].concat())
}

/// The cuts of a report: pass and codec, with the ratio.
fn cuts(report: &Value) -> Vec<(String, String, f64)> {
    let links = report["links"].as_array().unwrap().iter();
    let cuts = links.flat_map(|link| link["cuts"].as_array().unwrap());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    cuts.map(|cut| (text(&cut["pass"]), text(&cut["codec"]), cut["ratio"].as_f64().unwrap())).collect()
}

/// Rows of 256 floats in messages of 16: large enough that headers and tables hardly show.
const RUN: [&str; 12] = [
    "--set",
    "hidden=[256,256]",
    "--partitions",
    "3",
    "--place",
    "client,server,client",
    "--chunks",
    "4",
    "--steps",
    "4",
    "--batch",
    "64",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], more].concat()
}

#[test]
fn each_direction_and_each_link_has_the_codec_it_was_given() {
    let report = json(&with(&["--codec", "sort:8", "--codec-backward", "uniform:8"]));
    let named = |report: &Value| cuts(report).into_iter().map(|(pass, codec, _)| (pass, codec)).collect::<Vec<_>>();
    let pair = |pass: &str, codec: &str| (pass.to_owned(), codec.to_owned());
    // From the client: activations 0 → 1 and gradients 2 → 1; from the server the others.
    let expected = [pair("forward", "sort:8"), pair("backward", "uniform:8")];
    assert_eq!(named(&report), [&expected[..], &expected].concat());
    assert!(cuts(&report).iter().all(|(_, _, ratio)| (3.6..4.0).contains(ratio)), "{:?}", cuts(&report));

    let one = json(&with(&["--codec", "f16", "--codec-link", "1-2=tile:4,raw"]));
    let expected =
        [pair("forward", "f16"), pair("backward", "raw"), pair("forward", "tile:4"), pair("backward", "f16")];
    assert_eq!(named(&one), expected);
}

#[test]
fn replicas_share_gradients_through_the_codec_they_are_given() {
    let run = ["--set", "hidden=[256,256]", "--replicas", "2", "--steps", "3", "--batch", "64"];
    let with = |more: &[&'static str]| [&run[..], more].concat();
    let report = json(&with(&["--codec-replicas", "tile:8"]));
    for link in report["links"].as_array().unwrap() {
        let shares = &link["shares"];
        assert_eq!((shares["codec"].as_str(), shares["sent_raw"].as_u64()), (Some("tile:8"), Some(0)), "{link}");
        assert!((3.5..3.8).contains(&shares["ratio"].as_f64().unwrap()), "{link}");
        assert!(link["payload_bytes"].as_u64() > shares["raw_bytes"].as_u64(), "{link}");
    }
    assert!(json(&run)["links"].as_array().unwrap().iter().all(|link| link["shares"].is_null()));
    let (table, _) = fine(&with(&["--codec-replicas", "feedback(tile:4)"]));
    assert!(table.contains("gradients of replicas  feedback(tile:4)"), "{table}");
    let said = refused(&with(&["--codec-replicas", "delta(tile:4)"]));
    assert!(said.contains("--codec-replicas: expected a codec for flat tensors of gradients"), "{said}");
    let (_, said) = fine(&["--steps", "1", "--codec-replicas", "bf16"]);
    assert!(said.contains("--codec-replicas: it has no effect without replicas"), "{said}");
}

#[test]
fn mpi_sums_gradients_only_under_mpirun() {
    for workers in ["threads", "processes"] {
        let said = refused(&["--replicas", "2", "--steps", "1", "--reduce", "mpi", "--workers", workers]);
        assert!(said.contains("--reduce: expected workers that are all the ranks of an MPI program"), "{said}");
    }
}

#[test]
fn the_flags_of_the_original_work_as_they_stand() {
    let log = directory("original");
    let directory = log.to_str().unwrap();
    let original = ["--sortquant", "--quant", "6", "--split", "2", "--chunk", "8", "--log", directory];
    let report = json(&[&["--partitions", "2", "--steps", "3"], &original[..]].concat());
    assert_eq!(report["micro_batches"], 8);
    assert!(cuts(&report).iter().all(|(_, codec, _)| codec == "sort:6+2"));
    // The log repeats the run.
    let config = log.join("config.toml");
    let again = json(&["--config", config.to_str().unwrap()]);
    let losses = |report: &Value| report["epochs"][0]["train_loss"].clone();
    assert_eq!(losses(&again), losses(&report));
    let same = json(&["--partitions", "2", "--steps", "3", "--chunks", "8", "--codec", "sort:8"]);
    assert_eq!(losses(&same), losses(&report));
}

#[test]
fn wrong_codec_flags_end_with_2_and_name_the_remedy() {
    let cases: [(&[&str], &str); 9] = [
        (&["--codec", "zip"], "expected a codec out of: raw, f16"),
        (&["--codec-backward", "sort:6"], "such as sort:6+2"),
        (&["--codec", "tile:4", "--sortquant"], "keep one"),
        (&["--split", "2"], "--split: it applies to --sortquant"),
        (&["--sortquant", "--quant", "15", "--split", "2"], "Q+S at most 16 bits"),
        (&["--codec-link", "0-2=raw"], "one of the run's links, 0-1, 1-2"),
        (&["--codec-link", "raw"], "expected LINK=CODEC"),
        (&["--capture-step", "3"], "add --capture DIR"),
        (&["--capture", "x", "--capture-step", "0"], "counted from 1"),
    ];
    for (arguments, remedy) in cases {
        let said = refused(&with(arguments));
        assert!(said.contains(remedy), "{arguments:?}: {said}");
    }
    assert!(refused(&["--capture", "x"]).contains("nothing crosses between partitions"));
}

/// Who asks for a codec expects it to be used.
#[test]
fn a_codec_without_a_link_is_reported() {
    let told = |arguments: &[&str]| fine(&[&["--steps", "1"], arguments].concat()).1.contains("nothing to encode");
    assert!(told(&["--codec", "tile:4"]) && told(&["--codec-backward", "tile:4", "--replicas", "2"]));
    assert!(!told(&[]) && !told(&["--codec", "tile:4", "--partitions", "2"]));
}

/// The attention mask is of integers: it goes raw every time, and the user hears of it once per link.
#[test]
fn a_tensor_that_a_codec_rejects_is_reported_once_and_counted() {
    let small = ["layers=2", "hidden=16", "heads=2", "feed_forward=16", "tokens=8", "vocabulary=50"];
    let mut arguments = vec!["--model", "roberta", "--data", "synthetic", "--samples", "64", "--batch", "16"];
    small.iter().for_each(|setting| arguments.extend(["--set", setting]));
    arguments.extend(["--partitions", "2", "--codec", "tile:8", "--epochs", "1", "--workers", "processes"]);
    let (out, err) = fine(&arguments);
    assert_eq!(err.matches("warning: w0 sends some activations 0 → 1 raw").count(), 1, "{err}");
    assert!(err.contains("expected an F32, F16 or BF16 tensor for codec"), "{err}");
    // 4 training steps and 1 test step of 4 micro-batches, one mask in each.
    assert!(out.lines().any(|line| line.contains("activations 0 → 1") && line.ends_with("20 of 40")), "{out}");
}

#[test]
fn a_captured_step_is_a_safetensors_file_of_what_crossed_the_links() {
    let path = directory("captured");
    let capture = ["--codec", "tile:4", "--capture", path.to_str().unwrap(), "--capture-step", "2"];
    let (_, err) = fine(&with(&capture));
    assert!(err.contains("step-2.safetensors"), "{err}");
    let bytes = std::fs::read(path.join("step-2.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names().into_iter().cloned().collect::<Vec<_>>();
    names.sort();
    let cut = |what: &str| (0..4).map(|m| format!("{what}.{m}.0")).collect::<Vec<_>>();
    let expected = ["activation.0-1", "activation.1-2", "gradient.1-0", "gradient.2-1"].map(cut).concat();
    assert_eq!(names, expected);
    assert_eq!(file.tensor("activation.0-1.0.0").unwrap().shape(), [16, 256]);
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1, "nothing half-written is left");
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let about = header.metadata().as_ref().unwrap();
    assert_eq!((&about["step"][..], &about["format"][..]), ("2", "pt"));
}

/// Encoding and decoding have lines of their own in the trace, beside the stage they overlap with.
#[test]
fn the_trace_shows_encoding_and_decoding_beside_the_stages() {
    let log = directory("traced");
    fine(&with(&["--codec", "sort:8", "--workers", "processes", "--log", log.to_str().unwrap(), "--trace"]));
    let events: Vec<Value> = serde_json::from_slice(&std::fs::read(log.join("trace.json")).unwrap()).unwrap();
    let lanes = events.iter().filter(|event| event["name"] == "thread_name");
    let lines: Vec<&str> = lanes.filter_map(|event| event["args"]["name"].as_str()).collect();
    let named = |worker: &str| ["", " encodes", " decodes", " all-reduces"].map(|lane| format!("{worker}{lane}"));
    assert_eq!(lines, [named("client"), named("server")].concat());
    for category in ["encode", "decode"] {
        let spans: Vec<&Value> = events.iter().filter(|event| event["cat"] == category).collect();
        // 4 steps of 4 micro-batches over two cuts, there and back.
        assert_eq!(spans.len(), 4 * 4 * 4, "{category}");
        let stages = [0, 4].map(Value::from);
        assert!(spans.iter().all(|span| !stages.contains(&span["tid"])), "{category} is not on a stage's line");
    }
}

/// Forwards one connection after the other to `to`, in both directions, at no more than 20 MB/s.
fn throttled(to: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, to) = (listener.local_addr().unwrap().to_string(), to.to_owned());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&to).unwrap());
            for (mut from, mut to) in [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)] {
                std::thread::spawn(move || {
                    let mut piece = vec![0; 1 << 16];
                    while let Ok(bytes @ 1..) = from.read(&mut piece) {
                        std::thread::sleep(Duration::from_secs_f64(bytes as f64 / 20e6));
                        if to.write_all(&piece[..bytes]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    address
}

#[test]
fn auto_measures_the_link_and_says_what_it_chose() {
    let (_, said) = fine(&with(&["--codec", "auto"]));
    assert!(said.contains("--codec auto: raw, because all workers are threads of this process"), "{said}");

    let servers = Servers::start(1);
    let address = throttled(&servers.addresses()[0]);
    let saved = directory("auto_codec");
    let saved = saved.to_str().unwrap();
    let arguments = with(&["--codec", "auto", "--workers", &address, "--checkpoint", saved, "--json"]);
    let run =
        command::distgpipe(&[&["train"], &arguments[..]].concat()).env("DISTGPIPE_TOKEN", TOKEN).output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}");
    let line = said.lines().find(|line| line.contains("--codec auto")).unwrap();
    assert!(line.contains(&format!("zstd(tile:4), for the link to {address}: ")), "{line}");
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert!(cuts(&report).iter().all(|(_, codec, _)| codec == "zstd(tile:4)"), "{report}");
    // The run goes on with the codec that it has, whatever the link is then.
    let (_, said) = fine(&["--checkpoint", saved, "--resume", "--workers", "threads", "--steps", "5"]);
    assert!(!said.contains("--codec auto"), "{said}");
}

#[test]
fn auto_says_which_link_it_could_not_measure() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let arguments = with(&["--codec", "auto", "--workers", &address]);
    let run =
        command::distgpipe(&[&["train"], &arguments[..]].concat()).env("DISTGPIPE_TOKEN", TOKEN).output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("measuring the link to {address} for --codec auto")), "{said}");
}

//! `distgpipe balance` as a user meets it: cuts that are given, measurements that are kept, time that is limited.

mod command;

use command::{directory, distgpipe, ended, refused};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Four layers, of which the two in the middle have nearly all of the work: of all cuts into two, 2,2 is the best, clearly.
const TWO_LARGE: [&str; 4] = ["balance", "mlp", "--set", "hidden=[1024,1024,1024]"];

/// Estimates of memory do not vary, so a few rounds are enough, and a call with kept costs never measures more.
const ENOUGH: [&str; 4] = ["--partitions", "2", "--balance-by", "memory"];

/// Runs with a cache directory of the test's own.
fn run_with(cache: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = distgpipe(arguments).env("XDG_CACHE_HOME", cache).output().expect("the binary was built");
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.code().unwrap_or(-1), out, err)
}

fn json_with(cache: &Path, arguments: &[&str]) -> Value {
    let (status, out, err) = run_with(cache, &[arguments, &["--json"]].concat());
    assert_eq!(status, 0, "{err}");
    serde_json::from_str(&out).expect("--json prints JSON and nothing else")
}

fn kept_files(cache: &Path) -> Vec<PathBuf> {
    let folder = cache.join("distgpipe/layer-costs");
    std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_given_cut_is_estimated_beside_the_best() {
    let cache = directory("given-cut");
    let value = json_with(&cache, &[&TWO_LARGE[..], &["--balance", "3,1"]].concat());
    assert_eq!(value["balance"], serde_json::json!([2, 2]), "{value}");
    let given = &value["given"];
    assert_eq!(given["balance"], serde_json::json!([3, 1]));
    assert!(given["step_s"].as_f64() > value["step_s"].as_f64(), "{value}");
    assert!(given["workers"][0]["memory_bytes"].as_u64() > Some(0), "{value}");
    // Compared with the best cut, and not with the second best.
    assert_eq!(value["order"]["rival"], serde_json::json!([3, 1]));
    assert_eq!(value["order"]["verdict"], "faster", "{value}");
    let (status, out, err) = run_with(&cache, &[&TWO_LARGE[..], &["--balance", "3,1"]].concat());
    assert_eq!(status, 0, "{err}");
    for said in
        ["faster than the given cut (3,1) in ", "given cut 3,1:", "longer than with the best cut", "--balance 2,2"]
    {
        assert!(out.contains(said), "expected `{said}` in: {out}");
    }
    // A cut by rule implies the placement of split learning, as it does in training.
    let value = json_with(&cache, &["balance", "mlp", "--cut", "first=1,last=1"]);
    assert_eq!(value["given"]["balance"], serde_json::json!([1, 2, 1]));
    assert_eq!(value["given"]["partitions"][2]["worker"], "client");
}

#[test]
fn cuts_that_do_not_fit_are_refused() {
    let cases: [(&[&str], &str); 6] = [
        (&["--balance", "1,2"], "--balance: "),
        (&["--balance", "2,2", "--cut", "first=1,last=1"], "--balance and --cut both name a cut"),
        (&["--balance", "2,2", "--partitions", "3"], "--balance has 2 partitions, and --partitions has 3"),
        (&["--balance", "2,2", "--place", "a,b,a"], "--balance has 2 partitions, and --place has 3"),
        (&[], "add --partitions N"),
        (&["--partitions", "2", "--time-limit", "0"], "--time-limit 0: expected seconds above 0"),
    ];
    for (flags, said) in cases {
        let error = refused(2, &[&["balance", "mlp"], flags].concat());
        assert!(error.contains(said), "{flags:?}: expected `{said}` in: {error}");
    }
}

#[test]
fn measurements_are_kept_until_something_they_depend_on_changes() {
    let cache = directory("kept-costs");
    let flags = [&TWO_LARGE[..], &ENOUGH, &["--rows", "4", "--threads", "1"]].concat();
    let first = json_with(&cache, &flags);
    assert_eq!(first["costs"]["source"], "measured");
    let file = kept_files(&cache);
    assert_eq!(file.len(), 1);
    assert_eq!(first["costs"]["path"].as_str(), file[0].to_str());
    // Another search with the same layers.
    let again = json_with(&cache, &[&flags[..], &["--chunks", "8"]].concat());
    assert_eq!((&again["costs"]["source"], &again["costs"]["rounds"]), (&"kept".into(), &first["costs"]["rounds"]));
    let (_, out, _) = run_with(&cache, &flags);
    let read = out.lines().find(|line| line.contains(&format!("read from {}", file[0].display())));
    let read = read.unwrap_or_else(|| panic!("the costs are read: {out}"));
    assert!(read.ends_with("; --measure-again measures them again"), "{read}");
    for known in [", measured ", " ago; a round took ", " in the median"] {
        assert!(read.contains(known), "expected `{known}` in: {read}");
    }
    let round = &again["costs"]["round"];
    assert!(again["costs"]["age_s"].as_f64() >= Some(0.0) && round["min_s"].as_f64() <= round["max_s"].as_f64());
    // The file is one that --costs takes, with the same result.
    let given = json_with(&cache, &[&flags[..], &["--costs", file[0].to_str().unwrap()]].concat());
    assert_eq!((&given["balance"], &given["step_s"]), (&first["balance"], &first["step_s"]));
    for other in [["--rows", "5"], ["--threads", "2"], ["--precision", "bf16"], ["--set", "classes=11"]] {
        let changed: Vec<&str> =
            flags.iter().copied().filter(|flag| !matches!(*flag, "--rows" | "4" | "--threads" | "1")).collect();
        assert_eq!(json_with(&cache, &[&changed[..], &other].concat())["costs"]["source"], "measured", "{other:?}");
    }
    assert_eq!(kept_files(&cache).len(), 5);
    let anew = json_with(&cache, &[&flags[..], &["--measure-again"]].concat());
    assert_eq!(anew["costs"]["source"], "measured");
}

/// `train --auto-balance` measures the same layers with the same rows.
#[test]
fn training_and_balance_share_their_measurements() {
    let cache = directory("shared-costs");
    let model = ["--set", "hidden=[1024,1024,1024]", "--threads", "1"];
    let train = |more: &[&str]| {
        let run = ["train", "--auto-balance", "2", "--batch", "16", "--chunks", "4", "--steps", "1", "--no-evaluate"];
        let (status, _, said) = run_with(&cache, &[&run[..], &model, more].concat());
        assert_eq!(status, 0, "{said}");
        said
    };
    let said = train(&[]);
    let file = kept_files(&cache);
    assert_eq!(file.len(), 1, "{said}");
    let kept =
        format!("layers measured with 4 rows in fp32 on cpu with 1 thread in 5 rounds, kept in {}", file[0].display());
    assert!(said.contains(&kept), "expected `{kept}` in: {said}");
    let read = format!("read from {}", file[0].display());
    assert!(train(&["--link-rate", "1gbit"]).contains(&read));
    let balance = [&["balance", "mlp"], &model[..], &ENOUGH, &["--rows", "4", "--device", "cpu"]].concat();
    assert_eq!(json_with(&cache, &balance)["costs"]["source"], "kept");
    train(&["--no-channels-last"]);
    assert_eq!(kept_files(&cache).len(), 2, "another layout has other costs");
}

#[test]
fn a_damaged_file_of_kept_costs_is_reported_and_replaced() {
    let cache = directory("damaged-costs");
    let flags = [&TWO_LARGE[..], &ENOUGH].concat();
    json_with(&cache, &flags);
    let file = kept_files(&cache).pop().expect("one file");
    let whole = std::fs::read_to_string(&file).unwrap();
    for damaged in [&whole[..whole.len() / 2], "[1,1,1,1]", &whole.replace("\"rows\":8", "\"rows\":9"), ""] {
        std::fs::write(&file, damaged).unwrap();
        let (status, out, err) = run_with(&cache, &flags);
        assert!(status == 0 && out.contains("layers measured with"), "{out} {err}");
        assert!(err.contains("warning: kept costs ") && err.contains("the layers are measured again"), "{err}");
        assert!(run_with(&cache, &flags).1.contains("read from"), "it was replaced");
    }
    // A directory that cannot be written costs the user nothing but the next measurement.
    let (status, out, err) = run_with(Path::new("/proc"), &flags);
    assert!(status == 0 && out.contains("layers measured with"), "{out} {err}");
    assert!(err.contains("warning: the measurements are not kept"), "{err}");
}

/// It had not ended after 40 seconds: finding the input of each of the 3,000 layers took a pass over all of them.
#[test]
fn three_thousand_layers_are_measured_and_cut_within_the_time_limit() {
    let hidden = format!("hidden=[{}8]", "8,".repeat(2998));
    let flags = ["balance", "mlp", "--set", &hidden, "--rows", "1", "--partitions", "6", "--json"];
    let start = Instant::now();
    let (out, _) = ended(0, &[&flags[..], &["--time-limit", "30"]].concat());
    assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
    let value: Value = serde_json::from_str(&out).unwrap();
    let layers: u64 = value["balance"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(layers, 3000);
    assert!(value["step_s"].as_f64() <= value["even"]["step_s"].as_f64(), "{value}");
    // A limit that is too short for a single measurement of each layer.
    let said = refused(2, &[&flags[..], &["--time-limit", "0.001", "--measure-again"]].concat());
    assert!(said.contains("--time-limit 0.001: the 3000 layers were not all measured once"), "{said}");
}

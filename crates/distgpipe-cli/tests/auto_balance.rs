//! Cuts that are found by measuring, as a user meets them: the table, the links, the memory.

mod command;

use command::{directory, ended, json};
use serde_json::Value;

const HEADINGS: [&str; 11] = [
    "partition",
    "worker",
    "layers",
    "from",
    "to",
    "forward",
    "backward",
    "sends forward",
    "sends backward",
    "parameters",
    "memory",
];

/// A narrow layer at the start and the work behind it: the even cut is wide, the narrow one uneven.
const FUNNEL: [&str; 5] = ["--model", "mlp", "--set", "hidden=[4,1024,1024,1024,1024]", "--no-evaluate"];

#[test]
fn balance_shows_what_each_partition_computes_sends_and_holds() {
    let flags = ["balance", "mlp", "--partitions", "3", "--place", "client,server,client", "--link-rate", "100mbit"];
    let (table, _) = ended(0, &flags);
    let heading = table.lines().next().expect("a heading");
    let mut rest = heading;
    for name in HEADINGS {
        rest = rest.split_once(name).unwrap_or_else(|| panic!("expected `{name}` in order in: {heading}")).1;
    }
    assert_eq!(table.lines().skip(1).take(3).filter(|line| line.contains("ms") || line.contains("µs")).count(), 3);
    for said in ["memory by worker: client", "links of 12.5 MB/s", "with equal numbers of layers", "of all 3 cuts"] {
        assert!(table.contains(said), "expected `{said}` in: {table}");
    }
    let value = json(&[&flags[..], &["--json", "--link-latency", "2", "--codec", "f16"]].concat());
    assert_eq!(value["link"], serde_json::json!({ "bytes_per_s": 12.5e6, "latency_s": 0.002 }));
    let partition = |i: usize| &value["partitions"][i];
    // What the client sends on, the server sends back; nothing goes beyond the ends.
    assert_eq!(partition(0)["forward_bytes"], partition(1)["backward_bytes"]);
    assert_eq!((&partition(2)["forward_bytes"], &partition(0)["backward_bytes"]), (&0.into(), &0.into()));
    assert_eq!(partition(2)["worker"], "client");
    assert!(value["workers"][0]["memory_bytes"].as_u64() > Some(0));
}

#[test]
fn a_memory_limit_that_no_cut_meets_reports_what_would_be_enough() {
    let needed = json(&["balance", "mlp", "--partitions", "2", "--balance-by", "memory", "--json"]);
    let most = needed["workers"].as_array().expect("workers").iter().map(|w| w["memory_bytes"].as_u64()).max();
    assert!(most.flatten() > Some(1000), "{needed}");
    let train = ["train", "--auto-balance", "2", "--steps", "1", "--memory-limit", "1kB"];
    for flags in [&["balance", "mlp", "--partitions", "2", "--memory-limit", "1kB"][..], &train] {
        let (_, said) = ended(2, flags);
        for word in ["--memory-limit: ", "no cut keeps every worker within 1.0 kB", "kB on worker w", "Raise the limit"]
        {
            assert!(said.contains(word), "expected `{word}` in: {said}");
        }
    }
    ended(0, &["balance", "mlp", "--partitions", "2", "--memory-limit", "1GiB"]);
}

#[test]
fn training_cuts_where_little_crosses_a_slow_link() {
    let trained = |more: &[&str]| {
        let flags = ["--auto-balance", "2", "--batch", "32", "--steps", "1", "--json"];
        let (out, said) = ended(0, &[&["train"], &FUNNEL[..], &flags, more].concat());
        for name in HEADINGS {
            assert!(said.contains(name), "expected `{name}` in: {said}");
        }
        let report: Value = serde_json::from_str(&out).expect("--json prints JSON and nothing else");
        let sent = report["links"][0]["payload_bytes"].as_u64().expect("a number");
        (report["balance"].clone(), sent, said)
    };
    let (wide, wide_bytes, said) = trained(&[]);
    assert_ne!(wide[0], 1, "{wide}");
    assert!(said.contains("with free links") && !said.contains("--link-rate"), "{said}");
    let (narrow, narrow_bytes, said) = trained(&["--link-rate", "100kbit"]);
    assert_eq!(narrow, serde_json::json!([1, 5]));
    assert!(said.contains("links of 12.5 kB/s"), "{said}");
    assert!(narrow_bytes * 100 < wide_bytes, "{narrow_bytes} {wide_bytes}");
    // Between processes links cost something, and the user is told how to count it.
    assert!(trained(&["--workers", "processes"]).2.contains("--link-rate"));
}

/// Measured again, the cut might be another, and with a codec the losses.
#[test]
fn a_log_keeps_the_cut_that_was_found() {
    let log = directory("found-cut").join("log");
    let flags = ["--auto-balance", "2", "--link-rate", "100kbit", "--steps", "1", "--log", log.to_str().unwrap()];
    let report = json(&[&["train"], &FUNNEL[..], &flags, &["--json"]].concat());
    let config = std::fs::read_to_string(log.join("config.toml")).unwrap();
    let cut: Vec<String> = report["balance"].as_array().unwrap().iter().map(Value::to_string).collect();
    assert!(config.contains(&format!("balance = \"{}\"", cut.join(","))), "{config}");
    assert!(!config.contains("auto-balance") && !config.contains("link-rate"), "{config}");
}

#[test]
fn costs_measured_with_other_settings_are_rejected_and_the_limit_is_printed() {
    let file = directory("other-costs").join("costs.json");
    let (costs, _) = ended(0, &["models", "mlp", "--set", "hidden=[8,8]", "--profile", "--rows", "2", "--json"]);
    std::fs::write(&file, costs).unwrap();
    let balance = |hidden: &str, status| {
        let model = ["balance", "mlp", "--set", hidden, "--partitions", "2", "--memory-limit", "1GiB"];
        ended(status, &[&model[..], &["--costs", file.to_str().unwrap()]].concat())
    };
    let (found, _) = balance("hidden=[8,8]", 0);
    assert!(found.contains("within 1.1 GB per worker"), "{found}");
    let (_, said) = balance("hidden=[8,9]", 2);
    assert!(said.contains("measured with hidden=[8,8], and the model has hidden=[8,9]"), "{said}");
}

#[test]
fn flags_without_effect_are_rejected() {
    let cases: [(&[&str], &str); 7] = [
        (&["train", "--link-rate", "1gbit"], "--link-rate: it applies to --auto-balance only: add --auto-balance"),
        (&["train", "--partitions", "2", "--balance-by", "memory"], "--balance-by: it applies to --auto-balance"),
        (&["train", "--auto-balance", "2", "--link-latency", "1"], "add --link-rate"),
        (&["train", "--auto-balance", "2", "--link-rate", "100mb"], "such as 100mbit or 1gbit"),
        (&["balance", "mlp", "--partitions", "2", "--memory-limit", "2GiBs"], "such as 2GiB"),
        (&["balance", "mlp", "--partitions", "2", "--link-rate", "1gbit", "--link-latency=-1"], "milliseconds"),
        (&["balance", "mlp", "--partitions", "2", "--balance-by", "luck"], "`time`, `memory`"),
    ];
    for (flags, said) in cases {
        let (_, error) = ended(2, flags);
        assert!(error.contains(said), "{flags:?}: expected `{said}` in: {error}");
    }
}

#[test]
fn costs_without_memory_give_no_memory_estimate() {
    let file = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("costs-without-memory.json");
    std::fs::write(&file, "[1, 1, 1, 5]").expect("written");
    let costs = ["balance", "mlp", "--partitions", "2", "--costs", file.to_str().expect("a plain path")];
    assert!(json(&[&costs[..], &["--json"]].concat())["partitions"][0]["memory_bytes"].is_null());
    let (_, said) = ended(2, &[&costs[..], &["--balance-by", "memory"]].concat());
    assert!(said.contains("has no memory figures"), "{said}");
}

/// A report said fp32 of costs that were measured in bf16, and counted four bytes for values of two.
#[test]
fn costs_of_a_file_keep_the_precision_they_were_measured_in() {
    let file = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("costs-in-bf16.json");
    let sent = |precision: &str| {
        let (costs, _) = ended(0, &["models", "mlp", "--profile", "--rows", "2", "--precision", precision, "--json"]);
        std::fs::write(&file, costs).expect("written");
        let name = file.to_str().expect("a plain path");
        let value = json(&["balance", "mlp", "--partitions", "4", "--costs", name, "--json"]);
        assert_eq!((&value["precision"], &value["rows"]), (&precision.into(), &2.into()));
        let measured = ["balance", "mlp", "--partitions", "4", "--rows", "2", "--precision", precision, "--json"];
        let bytes = |value: &Value| value["partitions"][0]["forward_bytes"].as_u64().expect("a number");
        assert_eq!(bytes(&value), bytes(&json(&measured)), "{precision}");
        bytes(&value)
    };
    assert_eq!(sent("fp32"), 2 * sent("bf16"));
}

#[test]
fn costs_with_zero_or_too_many_rows_are_rejected() {
    let file = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("costs-of-odd-rows.json");
    let layer = r#"{"forward_s":1,"backward_s":1,"held_bytes":1}"#;
    let typed = r#"{"forward_s":1,"backward_s":1,"held_bytes":1,"output_types":["F33"]}"#;
    for (rows, first, said) in [
        (0, layer, "1 row or more, got 0"),
        (u64::MAX, layer, "use fewer rows"),
        (1 << 61, layer, "use fewer rows"),
        (1, typed, "F32 or BF16, got `F33`"),
    ] {
        let text = format!(r#"{{"rows":{rows},"layers":[{first},{layer},{layer},{layer}]}}"#);
        std::fs::write(&file, text).expect("written");
        let name = file.to_str().expect("a plain path");
        let (_, error) = ended(2, &["balance", "mlp", "--partitions", "2", "--costs", name]);
        assert!(error.contains("--costs") && error.contains(said), "{rows}: expected `{said}` in: {error}");
    }
}

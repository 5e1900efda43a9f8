//! The command as its users meet it: what it prints, how it ends, and that it does what it says.

mod command;

use command::{directory, distgpipe, ended, fine, json, logged, refused};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::Stdio;

#[test]
fn every_command_has_help_with_examples() {
    let all = fine(&["--help"]);
    // The list that clap prints, where a description that is wrapped is indented further than a name.
    let listed = all.split("Commands:\n").nth(1).expect("a list of commands").split("\n\n").next().expect("lines");
    let names = listed.lines().filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')));
    let commands: Vec<&str> =
        names.filter_map(|name| name.split_whitespace().next()).filter(|n| *n != "help").collect();
    assert!(commands.len() >= 9, "expected a list of all commands, got {commands:?} in {all}");
    for command in commands {
        let help = fine(&[command, "--help"]);
        assert!(help.contains("Usage: distgpipe"), "{help}");
        // `demo` has nothing to choose, and `data` is taught by its own commands.
        assert!(["demo", "data"].contains(&command) || help.contains("Examples:"), "{help}");
    }
    let train = fine(&["train", "--help"]);
    assert!(train.contains("Micro-batches per batch, in each replica [default: 4]"), "{train}");
    assert!(!train.contains("--faults"), "{train}");
}

/// The driver hands targets to the last worker, and inputs to the first of each replica, whoever else talks to them.
#[test]
fn every_connection_is_among_the_links() {
    let carried = |more: &[&str]| -> Vec<(String, String)> {
        let run = ["train", "--workers", "processes", "--steps", "2", "--no-evaluate", "--json"];
        let report: Value = serde_json::from_str(&fine(&[&run, more].concat())).expect("JSON");
        let links = report["links"].as_array().unwrap().iter().filter(|link| link["payload_bytes"] != 0);
        let name = |name: &Value| name.as_str().unwrap().to_owned();
        links.map(|link| (name(&link["from"]), name(&link["to"]))).collect()
    };
    assert!(carried(&["--partitions", "3"]).contains(&("w0".to_owned(), "w2".to_owned())));
    let ring = carried(&["--replicas", "4", "--chunks", "1"]);
    assert!(ring.contains(&("w0/0".to_owned(), "w0/2".to_owned())), "{ring:?}");
}

#[test]
fn wrong_flags_end_with_2_and_name_flag_and_remedy() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["train", "--batch", "4", "--chunks", "8"], &["--batch 4", "use --batch 8 or more"]),
        (&["train", "--replicas", "0"], &["--replicas 0", "expected 1 to 256"]),
        (
            &["train", "--replicas", "2", "--graphs", "on"],
            &["--graphs on: replicas run without CUDA graphs", "--graphs auto"],
        ),
        (
            &["train", "--replicas", "3", "--batch", "11"],
            &[
                "--batch 11",
                "4 micro-batches in each of 3 replicas",
                "use --batch 12 or more",
                "at most 3 micro-batches, or fewer --replicas",
            ],
        ),
        (
            &["train", "--replicas", "2", "--partitions", "2", "--workers", "h:1"],
            &["expected 3 addresses for 4 workers", "--replicas"],
        ),
        (&["train", "--workers", "h:1"], &["--workers", "one partition", "--replicas"]),
        (
            &["train", "--replicas", "9", "--chunks", "1", "--batch", "8"],
            &["use --batch 9 or more, or fewer --replicas"],
        ),
        (&["train", "--chunks", "0"], &["--chunks 0", "use 1"]),
        (&["train", "--partitions", "3", "--workers", "h:1,h:1"], &["--workers", "h:1 is named twice"]),
        (&["train", "--batch", "9223372036854775808"], &["--batch", "expected at most 9223372036854775807"]),
        (&["train", "--balance", "1,2"], &["--balance", "use for example 2,2"]),
        (&["train", "--balance", "1,3", "--place", "a,b,a"], &["--balance makes 2", "--place names workers for 3"]),
        (&["train", "--partitions", "9"], &["--partitions", "use fewer partitions"]),
        (&["train", "--partitions", "2", "--balance", "2,2"], &["--partitions and --balance", "keep one"]),
        (&["train", "--cut", "first=1,last=1", "--balance", "2,2"], &["--balance and --cut", "keep one"]),
        (&["train", "--cut", "first=2,last=2"], &["--cut", "leave a layer between them", "of 4 layers"]),
        (&["train", "--model", "alexnet"], &["--model", "expected one of mobilenet_v2"]),
        (&["train", "--set", "clases=3"], &["--set clases=3", "classes=10"]),
        (&["train", "--workers", "process"], &["--workers process", "expected `threads`, `processes`"]),
        (&["train", "--partitions", "2", "--workers", "h:1"], &["--workers", "--token-file"]),
        (&["train", "--partitions", "2", "--workers", "h:1,h:2"], &["--workers", "expected 1 address for 2 workers"]),
        (&["train", "--schedule", "zb"], &["--schedule", "`gpipe`, `1f1b`, `interleaved`"]),
        (&["train", "--trace"], &["--trace", "add --log DIR"]),
        (&["train", "--device", "cpu,tpu"], &["--device", "`tpu`", "`cpu`, `cuda:N` or `auto`"]),
        (&["train", "--device", "cpu,cpu"], &["--device cpu,cpu", "2 devices and 1 worker:"]),
        (&["train", "--optimizer", "adamw", "--momentum", "0.5"], &["--momentum", "remove it"]),
        (&["train", "--optimizer", "adam", "--nesterov"], &["--nesterov", "--optimizer sgd"]),
        (&["train", "--nesterov", "--momentum", "0"], &["--nesterov", "--momentum above 0"]),
        (&["train", "--lr-decay", "cosine", "--lr-power", "3"], &["--lr-power", "use --lr-decay polynomial"]),
        (&["train", "--lr-decay", "polynomial", "--lr-power", "0"], &["--lr-power 0", "above 0"]),
        (&["train", "--lr-steps", "3"], &["--lr-steps: it applies to --lr-decay steps only"]),
        (&["train", "--lr-decay", "steps"], &["add --lr-steps EPOCH,…"]),
        (&["train", "--lr-decay", "steps", "--lr-steps", "3,x"], &["--lr-steps 3,x: expected epochs from 1 on"]),
        (&["train", "--lr-decay", "steps", "--lr-steps", "3", "--lr-factor", "-1"], &["--lr-factor -1", "at least 0"]),
        (&["train", "--lr-warm-up", "4ep"], &["4epochs"]),
        (&["train", "--normalise", "0,0,0/1,1,1"], &["--normalise: digits has no images of three colours"]),
        (&["train", "--normalise", "cifar"], &["expected `imagenet`, or three means"]),
        (&["train", "--loss", "mean-squared"], &["--loss: the model's output is class scores"]),
        (&["train", "--lr-warm-up", "600%"], &["--lr-warm-up", "from 0% to 100%"]),
        (&["train", "--optimizer", "adam", "--momentum", "0"], &["adam has no momentum", "rmsprop"]),
        (&["train", "--optimizer", "rmsprop", "--fused-optimizer"], &["--fused-optimizer", "sgd, adam or adamw"]),
        (&["train", "--tf32", "maybe"], &["--tf32", "expected `on`, `off` or `convolutions`"]),
        (&["train", "--optimizer", "rmsprop", "--momentum", "2"], &["--momentum 2", "from 0 to 1"]),
        (&["train", "--accumulate", "0"], &["--accumulate 0", "use 1"]),
        (&["train", "--clip-norm", "0"], &["--clip-norm 0", "above 0"]),
        (&["train", "--clip-norm", "nan"], &["--clip-norm NaN", "leave it out"]),
        (&["train", "--label-smoothing", "1"], &["--label-smoothing 1", "below 1"]),
        (
            &["train", "--model", "unet", "--data", "synthetic", "--label-smoothing", "0.1"],
            &["--label-smoothing", "no classes"],
        ),
        (&["train", "--batch", "2000"], &["--batch 2000", "use a smaller batch"]),
        (&["train", "--batch", "0"], &["--batch 0: expected at least 1 row"]),
        (&["train", "--seed", "99999999999999999999"], &["--seed", "expected at most 9223372036854775807"]),
        (&["train", "--data-dir", "/nowhere"], &["--data-dir", "--data digits reads no files", "remove it"]),
        (
            &["train", "--partitions", "2", "--steps", "2", "--capture", "captured", "--capture-step", "99"],
            &["--capture-step", "from 1 to the run's last, 2; got 99"],
        ),
        (&["train", "--model", "unet"], &["--data digits", "use --data synthetic"]),
        (&["train", "--weights", "missing.safetensors"], &["--weights missing.safetensors"]),
        (&["train", "--config", "missing.toml"], &["--config missing.toml"]),
        (
            &["train", "--data", "cifar10", "--data-dir", "/nowhere"],
            &["--data cifar10: /nowhere/data_batch_1.bin", "`distgpipe data get cifar10 --dir /nowhere`"],
        ),
        (
            &["train", "--data", "food101", "--data-dir", "/nowhere"],
            &["/nowhere/meta/classes.txt", "`distgpipe data get food101 --dir /nowhere`"],
        ),
        (&["train", "--data", "image-folder"], &["--data image-folder", "--data-dir DIR"]),
        (&["train", "--data", "rte", "--model", "roberta"], &["--data rte", "--tokenizer PATH"]),
        (&["train", "--data", "cola"], &["--data cola", "use --model roberta"]),
        (&["train", "--tokenizer", "x"], &["--tokenizer", "remove it"]),
        (&["train", "--limit", "0"], &["--limit 0", "1 or more"]),
        (&["train", "--loader-threads", "0"], &["--loader-threads 0", "use 1 to"]),
        (&["train", "--threads", "10000"], &["--threads 10000", "use 1 to 1024"]),
        (&["train", "--samples", "9"], &["--samples", "--limit"]),
        (&["data", "get", "mnist"], &["data get mnist", "expected one of cifar10"]),
        (&["data", "get", "cifar10", "--from", "/nowhere"], &["--from /nowhere"]),
        (&["schedule", "--chunks", "0"], &["--chunks", "use 1 to run the batch in one piece"]),
        (&["schedule", "--forward", "1,2,3"], &["--forward", "each of 2 partitions"]),
        (&["balance", "mlp", "--partitions", "5"], &["--partitions", "use fewer partitions"]),
        (&["train", "--model", "resnet50"], &["unknown model `resnet50`", "use resnet and --set depth=50"]),
        (&["train", "--partitions", "2", "--workers", "h:99999"], &["--workers h:99999", "a port from 1 to 65535"]),
        (&["train", "--auto-balance", "2", "--link-rate", "-5mbit"], &["--link-rate -5mbit", "such as 100mbit"]),
        (&["balance", "mlp", "--partitions", "2", "--memory-limit", "-2GiB"], &["--memory-limit -2GiB", "2GiB"]),
        (&["train", "--batch", "-1"], &["--batch", "at least 1"]),
        (&["train", "--limit", "-1"], &["--limit", "at least 1"]),
        (&["train", "--codec", "zstd(tile:4"], &["--codec", "expected `)` at the end of `zstd(tile:4`"]),
        (&["train", "--codec", "zstd"], &["--codec", "got `zstd`"]),
        (&["worker", "--listen", "0.0.0.0:0"], &["--listen", "--expose"]),
        (&["worker", "--listen", "nowhere"], &["--listen nowhere", "such as 127.0.0.1:7000"]),
        (&["train", "--partitions", "2", "--listen", "0.0.0.0:7443"], &["--listen 0.0.0.0:7443", "add --server NAME"]),
        (&["serve", "--device", "cuda:63"], &["--device cuda:63", "cuda:63"]),
    ];
    for (arguments, words) in cases {
        let said = refused(2, arguments);
        for word in *words {
            assert!(said.contains(word), "{arguments:?}: expected `{word}` in: {said}");
        }
    }
}

#[test]
fn a_schedule_goes_through_its_own_check_and_a_broken_one_does_not() {
    let directory = directory("schedule");
    let file = directory.join("plan.txt");
    let name = file.to_str().expect("a plain path");
    for schedule in ["gpipe", "1f1b", "interleaved"] {
        let flags =
            ["schedule", "--schedule", schedule, "--place", "a,b,a,b", "--recompute", "except-last", "--skip", "0>2"];
        let plan = fine(&flags);
        std::fs::write(&file, &plan).expect("written");
        assert!(fine(&["schedule", "--check", name]).starts_with("valid: 4 partitions on 2 workers, 4 micro-batches"));
        assert_eq!(
            fine(&["schedule", "--check", name, "--text"]).split_once('\n').map(|(_, plan)| plan),
            Some(&plan[..])
        );
    }
    let plan = fine(&["schedule", "--partitions", "2", "--chunks", "2"]);
    std::fs::write(&file, plan.replace("0F1>1 ", "")).expect("written");
    let said = refused(1, &["schedule", "--check", name]);
    assert!(said.contains("plan.txt") && said.contains("missing send `0F1>1`"), "{said}");
    std::fs::write(&file, "no plan").expect("written");
    assert!(refused(1, &["schedule", "--check", name]).contains("expected `distgpipe plan 1`"));
    // The same broken plan stops a run before it starts.
    assert!(refused(2, &["train", "--plan", name]).contains("--plan"));
}

#[test]
fn a_schedule_is_simulated_and_drawn() {
    let drawn =
        fine(&["schedule", "--partitions", "2", "--chunks", "3", "--schedule", "gpipe", "--backward", "1", "--draw"]);
    assert!(drawn.starts_with("w0  F0 F1 F2 ......B2 B1 B0\nw1  ...F0 F1 F2 B2 B1 B0 ...\n"), "{drawn}");
    let file = directory("drawn").join("plan.svg");
    let name = file.to_str().expect("a plain path");
    fine(&["schedule", "--place", "client,server,client", "--forward", "1,4,1", "--link", "0.5", "--svg", name]);
    assert!(std::fs::read_to_string(&file).expect("written").starts_with("<svg"));
    // (n − 1) / (m + n − 1) for GPipe with equal costs.
    let value = json(&["schedule", "--partitions", "4", "--chunks", "8", "--schedule", "gpipe", "--json"]);
    assert!((value["bubble"].as_f64().expect("a number") - 3.0 / 11.0).abs() < 1e-9);
}

#[test]
fn models_are_listed_and_counted() {
    let value = json(&["models", "mobilenet_v2", "--set", "classes=1000", "--json"]);
    assert_eq!(value["parameters"], 3_504_872);
    assert_eq!(value["layers"].as_array().map(Vec::len), Some(20));
    let all = json(&["models", "--json"]);
    assert_eq!(all.as_array().map(Vec::len), Some(7));
    assert!(fine(&["models", "mlp", "--profile", "--rows", "4"]).contains("backward"));
    let profiled = json(&["models", "mlp", "--profile", "--json"]);
    assert!(profiled["layers"][0]["forward_s"].as_f64().expect("a number") > 0.0);
}

#[test]
fn a_balance_comes_from_costs_measured_or_given() {
    let directory = directory("balance");
    let file = directory.join("costs.json");
    let name = file.to_str().expect("a plain path");
    std::fs::write(&file, "[1, 1, 1, 5]").expect("written");
    let value = json(&["balance", "mlp", "--partitions", "2", "--costs", name, "--json"]);
    assert_eq!(value["balance"], serde_json::json!([3, 1]));
    assert!(value["step_s"].as_f64() < value["even"]["step_s"].as_f64());
    std::fs::write(&file, fine(&["models", "mlp", "--profile", "--json"])).expect("written");
    assert!(fine(&["balance", "mlp", "--partitions", "2", "--costs", name]).contains("to use the best cut: --balance "));
    std::fs::write(&file, "[1, 2]").expect("written");
    assert!(refused(2, &["balance", "mlp", "--partitions", "2", "--costs", name]).contains("each of 4 layers, got 2"));
    assert!(fine(&["balance", "mlp", "--partitions", "3", "--rows", "4"]).contains("to use the best cut: --balance "));
}

/// The losses of every epoch and test: what must not change with how it was run.
fn losses(report: &Value) -> Vec<(f64, f64)> {
    let epochs = report["epochs"].as_array().expect("epochs");
    let number = |value: &Value| value.as_f64().expect("a number");
    epochs.iter().map(|epoch| (number(&epoch["train_loss"]), number(&epoch["test_loss"]))).collect()
}

/// A MobileNetV2 for digits of 8 × 8, with enough pixels left at its end for batch norms.
const SMALL_MOBILENET: [&str; 8] =
    ["--model", "mobilenet_v2", "--set", "image=8", "--set", "width=0.25", "--set", "strides=[1,1,1,2,1,1,2,1]"];

const SPLIT: [&str; 11] = [
    "train",
    "--balance",
    "1,2,1",
    "--place",
    "client,server,client",
    "--chunks",
    "3",
    "--batch",
    "50",
    "--epochs",
    "2",
];

#[test]
fn threads_and_processes_train_identically() {
    let with = |more: &[&str]| json(&[&SPLIT[..], &["--json"], more].concat());
    let threads = with(&["--workers", "threads"]);
    let processes = with(&["--workers", "processes", "--device", "cpu,cpu"]);
    assert_eq!(losses(&threads).len(), 2);
    assert_eq!(losses(&threads), losses(&processes));
    let link = &processes["links"][0];
    assert!(link["wire_bytes"].as_u64() > link["payload_bytes"].as_u64(), "headers count: {link}");
    assert_eq!(threads["links"][0]["wire_bytes"], 0);
}

/// The client sees how good the model is wherever the layers run; F1 and Matthews only where they say more.
#[test]
fn a_test_with_two_classes_reports_f1_and_matthews() {
    let split = ["train", "--cut", "first=1,last=1", "--workers", "processes", "--epochs", "1"];
    let said = |more: &[&str]| ended(0, &[&split[..], more].concat()).1;
    let two = said(&["--data", "synthetic", "--set", "classes=2", "--samples", "64", "--batch", "16"]);
    for word in ["epoch 1/1: loss ", "; test loss ", ", accuracy ", ", F1 ", ", Matthews "] {
        assert!(two.contains(word), "expected `{word}` in: {two}");
    }
    let ten = said(&["--steps", "4"]);
    assert!(ten.contains(", accuracy ") && !ten.contains("F1") && !ten.contains("Matthews"), "{ten}");
    let epoch = &json(&[&split[..], &["--steps", "4", "--json"]].concat())["epochs"][0];
    assert!(epoch["test_f1"].is_f64() && epoch["test_matthews"].is_f64() && epoch["test_classes"] == 10, "{epoch}");
}

#[test]
fn classes_that_the_data_lacks_are_reported() {
    let said = |classes: &str| ended(0, &["train", "--set", classes, "--steps", "1"]).1;
    assert!(said("classes=12").contains("12 classes, and the data has 10: use --set classes=10"));
    assert!(!said("classes=10").contains("classes"));
}

#[test]
fn the_learning_rate_follows_warm_up_and_decay() {
    let log = directory("rates");
    let name = log.to_str().expect("a plain path");
    let flags = ["--lr", "0.5", "--lr-decay", "polynomial", "--lr-warm-up", "25%", "--steps", "8", "--log", name];
    fine(&[&["train"], &flags[..], &["--json"]].concat());
    let lines = std::fs::read_to_string(log.join("steps.jsonl")).expect("written");
    let line = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["learning_rate"].as_f64();
    let rates: Vec<f64> = lines.lines().filter_map(line).collect(); // A test has no rate.
    let squares = (0..6).map(|left: i32| 0.5 * (1.0 - f64::from(left) / 6.0).powi(2));
    let expected: Vec<f64> = [0.0, 0.25].into_iter().chain(squares).collect();
    let near = |(got, expected): (&f64, &f64)| (got - expected).abs() < 1e-12;
    assert!(rates.len() == 8 && rates.iter().zip(&expected).all(near), "{rates:?} instead of {expected:?}");
    // What the log keeps of a share is a share.
    assert!(std::fs::read_to_string(log.join("config.toml")).expect("written").contains("lr-warm-up = \"25%\""));
}

/// A step stays one batch; the learning rate and the norms are those of updates.
#[test]
fn accumulated_and_clipped_steps_are_logged_with_their_updates() {
    let log = directory("updates");
    let name = log.to_str().expect("a plain path");
    let flags = ["--accumulate", "3", "--clip-norm", "0.5", "--lr", "1", "--lr-decay", "linear", "--batch", "400"];
    let split = ["--cut", "first=1,last=1", "--workers", "processes", "--epochs", "2", "--label-smoothing", "0.1"];
    // 1437 rows make 3 batches an epoch. 5 steps end inside the second update, so the run ends after it.
    let report = json(&[&["train"], &flags[..], &split[..], &["--steps", "5", "--log", name, "--json"]].concat());
    assert_eq!(report["steps"], 6);
    let lines = logged(&log, "step");
    let rates: Vec<f64> = lines.iter().filter_map(|line| line["learning_rate"].as_f64()).collect();
    assert_eq!(rates, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]);
    let clipped: Vec<bool> = lines.iter().map(|line| line["gradient_norm"].is_f64()).collect();
    assert_eq!(clipped, [false, false, true, false, false, true]);
    // The same in one process.
    let alone = json(&[&["train"], &flags[..], &split[4..], &["--steps", "5", "--json"]].concat());
    assert_eq!(losses(&report), losses(&alone));
}

#[test]
fn a_file_of_flags_is_the_same_as_flags_and_a_log_repeats_its_run() {
    let directory = directory("config");
    let file = directory.join("run.toml");
    let name = file.to_str().expect("a plain path");
    let toml = "balance = [1, 2, 1]\nplace = \"client,server,client\"\nmicro-batches = 3\nbatch = 50\nepochs = 7\n[set]\ndropout = 0.0\n";
    std::fs::write(&file, toml).expect("written");
    let log = directory.join("log");
    let log_name = log.to_str().expect("a plain path");
    let flags = json(&[&SPLIT[..], &["--set", "dropout=0.0", "--json", "--log", log_name, "--trace"]].concat());
    let from_file = json(&["train", "--config", name, "--epochs", "2", "--json"]);
    assert_eq!(losses(&flags), losses(&from_file));
    let over = refused(2, &["train", "--steps", "1", "--log", log_name]);
    assert!(over.contains("has the log of another run: choose another one"), "{over}");
    let flags_file = log.join("config.toml");
    let again = json(&["train", "--config", flags_file.to_str().expect("a plain path"), "--json"]);
    assert_eq!(losses(&flags), losses(&again));
    let lines = |name: &str| std::fs::read_to_string(log.join(name)).expect("written");
    let (steps, tests) = (logged(&log, "step"), logged(&log, "test"));
    assert_eq!((steps.len(), tests.len()), (2 * (1437 / 50), 2));
    let spans: Vec<Value> =
        lines("trace.jsonl").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(spans.iter().any(|span| span["action"] == "1B2"), "every action is there");
    // Steps and epochs count from 1 in every file; evaluations are not counted.
    let ends = |lines: &[Value], what: &str| [&lines[0][what], &lines[lines.len() - 1][what]].map(Value::as_u64);
    assert_eq!(ends(&steps, "step"), [Some(1), Some(2 * (1437 / 50))]);
    assert_eq!(ends(&spans, "step"), ends(&steps, "step"));
    assert_eq!((ends(&steps, "epoch"), ends(&tests, "epoch")), ([Some(1), Some(2)], [Some(1), Some(2)]));
    assert_eq!(ends(&tests, "step"), [Some(1437 / 50), Some(2 * (1437 / 50))]);
    assert_eq!(ends(flags["epochs"].as_array().expect("epochs"), "epoch"), [Some(1), Some(2)]);
    let tested: Vec<&Value> = tests.iter().map(|test| &test["test_loss"]).collect();
    assert_eq!(tested, [&flags["epochs"][0]["test_loss"], &flags["epochs"][1]["test_loss"]]);
    let chrome: Vec<Value> = serde_json::from_str(&lines("trace.json")).expect("JSON");
    // Each span, and a name for the process and for the four lanes of each of two workers.
    assert_eq!(chrome.len(), spans.len() + 9);
    assert_eq!(chrome[chrome.len() - 1]["args"]["step"], steps[steps.len() - 1]["step"]);
    assert_eq!(losses(&serde_json::from_str(&lines("summary.json")).expect("JSON")), losses(&flags));
    std::fs::write(&file, "chonks = 3").expect("written");
    assert!(refused(2, &["train", "--config", name]).contains("unknown key `chonks`: did you mean `chunks`?"));
}

#[test]
fn a_plan_file_trains_as_the_schedule_it_came_from() {
    let file = directory("plan").join("plan.txt");
    let name = file.to_str().expect("a plain path");
    std::fs::write(&file, fine(&["schedule", "--place", "client,server,client", "--chunks", "3"])).expect("written");
    let common = ["--balance", "1,2,1", "--batch", "50", "--epochs", "1", "--json"];
    let by_plan = json(&[&["train", "--plan", name], &common[..]].concat());
    let by_schedule = json(&[&["train", "--place", "client,server,client", "--chunks", "3"], &common[..]].concat());
    assert_eq!(losses(&by_plan), losses(&by_schedule));
}

#[test]
fn a_cut_by_name_is_split_learning() {
    let small = ["--batch", "64", "--chunks", "2", "--epochs", "1", "--steps", "1", "--json"];
    let common = [&["train"], &SMALL_MOBILENET[..], &small].concat();
    let by_name = json(&[&common[..], &["--cut", "first=1,last=1"]].concat());
    assert_eq!(by_name["balance"], serde_json::json!([1, 18, 1]));
    assert_eq!(by_name["placement"], serde_json::json!(["client", "server", "client"]));
    let counts = ["--balance", "1,18,1", "--place", "client,server,client"];
    assert_eq!(losses(&by_name), losses(&json(&[&common[..], &counts].concat())));
    let placed = json(&[&common[..], &["--cut", "after=features.3", "--place", "a,b"]].concat());
    assert_eq!(
        (&placed["balance"], &placed["placement"]),
        (&serde_json::json!([4, 16]), &serde_json::json!(["a", "b"]))
    );
    let wrong = refused(2, &[&common[..], &["--cut", "after=features.19"]].concat());
    assert!(wrong.contains("--cut") && wrong.contains("features.0, features.1"), "{wrong}");
}

#[test]
fn a_roberta_has_the_sizes_of_its_config_json() {
    let file = directory("roberta").join("config.json");
    let config = r#"{"model_type": "roberta", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2,
        "intermediate_size": 24, "vocab_size": 40, "max_position_embeddings": 20}"#;
    std::fs::write(&file, config).expect("written");
    let set = format!("config={}", file.display());
    let shown = json(&["models", "roberta", "--set", &set, "--set", "tokens=8", "--json"]);
    assert_eq!((&shown["settings"]["hidden"], &shown["settings"]["tokens"]), (&16.into(), &8.into()));
    assert_eq!(shown["layers"].as_array().map(Vec::len), Some(6));
    let run =
        ["--data", "synthetic", "--samples", "16", "--batch", "8", "--steps", "2", "--cut", "roberta-3", "--json"];
    let report = json(&[&["train", "--model", "roberta", "--set", &set], &run[..]].concat());
    assert_eq!(report["balance"], serde_json::json!([2, 3, 1]));
    let wrong = refused(2, &["models", "roberta", "--set", "config=/nowhere/config.json"]);
    assert!(wrong.contains("--set config /nowhere/config.json"), "{wrong}");
}

#[test]
fn made_up_data_serves_every_model() {
    let small: [(&str, &[&str]); 6] = [
        ("resnet", &["--set", "depth=18", "--set", "image=64", "--set", "width=4", "--set", "classes=10"]),
        ("vgg13", &["--set", "image=32", "--set", "width=4", "--set", "hidden=16", "--set", "classes=10"]),
        ("amoebanet_d", &["--set", "image=64", "--set", "layers=3", "--set", "filters=8", "--set", "classes=10"]),
        ("unet", &["--set", "image=16", "--set", "channels=4", "--set", "convolutions=1", "--set", "depth=2"]),
        (
            "roberta",
            &[
                "--set",
                "layers=1",
                "--set",
                "hidden=16",
                "--set",
                "heads=2",
                "--set",
                "tokens=8",
                "--set",
                "vocabulary=40",
            ],
        ),
        ("mobilenet_v2", &["--set", "image=64", "--set", "width=0.25"]),
    ];
    for (model, set) in small {
        // One batch again and again: its loss must fall.
        let data = ["--data", "synthetic", "--samples", "32", "--batch", "32", "--epochs", "8"];
        let report = json(&[&["train", "--model", model], set, &data, &["--auto-balance", "2", "--json"]].concat());
        assert_eq!(report["steps"], 8, "{model}");
        assert_eq!(report["placement"], serde_json::json!(["w0", "w1"]));
    }
}

#[test]
fn a_failed_run_ends_with_1_and_names_the_cause() {
    let said = ended(1, &[&SPLIT[..], &["--faults", "server:error@1F1"]].concat()).1;
    assert!(said.contains("server failed while running 1F1"), "{said}");
}

#[test]
fn a_worker_that_is_not_there_is_missed_and_one_that_a_signal_ends_says_so() {
    let token = "5a".repeat(32);
    let mut worker = distgpipe(&["worker"]);
    let mut worker = worker.env("DISTGPIPE_TOKEN", &token).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(worker.stdout.take().expect("piped")).read_line(&mut line).expect("it says where it listens");
    let address = line.trim().strip_prefix("listening ").expect("listening ADDRESS");
    let run =
        ["train", "--partitions", "2", "--epochs", "100000", "--no-evaluate", "--restarts", "0", "--workers", address];
    let drive = || distgpipe(&run).env("DISTGPIPE_TOKEN", &token).spawn().expect("it starts");
    let driver = drive();
    let mut log = BufReader::new(worker.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
    log.find(|line| line.contains(" from 127.0.0.1:")).expect("the start of the run");
    let ended = std::process::Command::new("kill").arg(worker.id().to_string()).status().expect("kill");
    assert!(ended.success());
    let last = log.last().expect("a last line");
    assert!(last.contains(" UTC run ") && last.contains(" s: SIGTERM ended this worker"), "{last}");
    assert_eq!(worker.wait().expect("it ends").code(), Some(143));
    assert_eq!(driver.wait_with_output().expect("it ends").status.code(), Some(1));
    let output = drive().wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    let expected = format!("w1 failed while joining the run: no worker listens at {address}: start `distgpipe worker");
    assert!(output.status.code() == Some(1) && said.contains(&expected), "{said}");
}

#[test]
fn a_worker_logs_its_runs_with_the_time() {
    let token = "5a".repeat(32);
    let mut worker = distgpipe(&["worker", "--once"]);
    let mut worker = worker.env("DISTGPIPE_TOKEN", &token).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(worker.stdout.take().expect("piped")).read_line(&mut line).expect("it says where it listens");
    let address = line.trim().strip_prefix("listening ").expect("listening ADDRESS");
    let mut driver = distgpipe(&["train", "--partitions", "2", "--steps", "3", "--no-evaluate", "--workers", address]);
    let driver = driver.env("DISTGPIPE_TOKEN", &token).output().expect("it runs");
    assert!(driver.status.success(), "{}", String::from_utf8_lossy(&driver.stderr));
    let log = String::from_utf8(worker.wait_with_output().expect("it ends").stderr).expect("text");
    // A starved process also notes that it did not run for a while.
    let [start, end] = log.lines().filter(|line| line.contains(" UTC run ")).collect::<Vec<_>>()[..] else {
        panic!("expected two lines: {log}")
    };
    let time = |line: &str| {
        let (time, rest) = line.split_once(" UTC run ").unwrap_or_else(|| panic!("{line}"));
        assert!(time.len() == 19 && time.starts_with("20") && time.as_bytes()[13] == b':', "{line}");
        let (run, rest) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}"));
        (run.to_owned(), rest.to_owned())
    };
    let ((run, what), (same, how)) = (time(start), time(end));
    assert!(run.len() == 8 && run == same, "{log}");
    assert!(
        what.starts_with("from 127.0.0.1:") && what.ends_with(": mlp as `w1`, partition 1 of 2, 1 thread"),
        "{log}"
    );
    assert!(how.starts_with("is done after "), "{log}");
}

/// A worker's end used to run libtorch's destructors under its computing stage, and one in three crashed.
#[test]
fn a_worker_whose_driver_is_gone_ends_by_itself_and_does_not_crash() {
    let token = "5a".repeat(32);
    for _ in 0..3 {
        let mut worker = distgpipe(&["worker", "--child"]);
        let mut worker = worker.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let mut input = worker.stdin.take().expect("piped");
        writeln!(input, "{token}").expect("it reads");
        let mut line = String::new();
        let mut output = BufReader::new(worker.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("it says where it listens");
        let address = line.trim().strip_prefix("listening ").expect("listening ADDRESS");
        let model =
            ["train", "--model", "mobilenet_v2", "--set", "image=32", "--partitions", "2", "--workers", address];
        let data = ["--data", "synthetic", "--samples", "16", "--batch", "8", "--no-evaluate"];
        let mut driver =
            distgpipe(&[&model[..], &data, &["--epochs", "10000", "--lr", "0", "--restarts", "0"]].concat());
        let mut driver = driver.env("DISTGPIPE_TOKEN", &token).spawn().expect("it starts");
        let mut said = BufReader::new(driver.stderr.take().expect("piped"));
        // What it does, and then a line each epoch: many are to come when the driver is gone.
        for _ in 0..4 {
            said.read_line(&mut line).expect("it says how far it is");
        }
        drop(input);
        assert_eq!(worker.wait().expect("it ends").code(), Some(1));
        assert_eq!(driver.wait().expect("it ends").code(), Some(1));
        said.read_to_string(&mut line).expect("it says why");
        assert!(line.contains("error: lost the connection to w1"), "{line}");
    }
}

#[test]
fn an_output_that_cannot_be_written_is_named() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device of every Linux");
    let output = distgpipe(&["schedule", "--partitions", "2"]).stdout(full).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("error: writing to standard output: No space left"), "{said}");
}

/// The table of phases once showed 0.0 % everywhere.
#[test]
fn a_run_that_ends_within_its_warm_up_claims_no_shares() {
    let out = fine(&["train", "--partitions", "2", "--steps", "2", "--no-evaluate"]);
    let row = out.lines().find(|line| line.trim_start().starts_with("w1 ")).unwrap_or_else(|| panic!("{out}"));
    assert!(row.contains('–') && !row.contains('%'), "{out}");
}

/// The times per batch are those of the report, whether phases are timed exactly or by their launches: on a CPU, both are the same.
#[test]
fn a_run_prints_what_its_first_worker_spends_per_batch() {
    let log = directory("phases-exact");
    let train = ["train", "--partitions", "2", "--chunks", "2", "--steps", "6", "--no-evaluate", "--log"];
    let run = |name: &str, more: &[&str]| {
        let log = log.join(name);
        let out = fine(&[&train[..], &[log.to_str().expect("a plain path")], more].concat());
        let summary = std::fs::read_to_string(log.join("summary.json")).expect("a summary");
        let summary: Value = serde_json::from_str(&summary).expect("JSON");
        let losses: Vec<Value> = logged(&log, "step").iter().map(|step| step["loss"].clone()).collect();
        (out, summary, losses)
    };
    let (launched, exact) = (run("launch", &[]), run("exact", &["--phases", "exact"]));
    assert_eq!((launched.2.len(), &launched.2), (6, &exact.2), "timing changes no loss");
    assert_eq!((&launched.1["phases"], &exact.1["phases"]), (&"launch".into(), &"exact".into()));
    for (out, summary, _) in [&launched, &exact] {
        let line = out.lines().find(|line| line.starts_with("per batch, ")).unwrap_or_else(|| panic!("{out}"));
        let rest = line.strip_prefix("per batch, w0 spends ").unwrap_or_else(|| panic!("{line}"));
        let (transfer, rest) =
            rest.split_once(" on data transfer (including the wait for the loader), ").expect("its first part");
        let (forward, rest) = rest.split_once(" on forward and ").expect("its second part");
        let what = " on backward passes (including recomputation, exchange of gradients and update)";
        let backward = rest.strip_suffix(what).unwrap_or_else(|| panic!("{line}"));
        for (printed, key) in [(transfer, "transfer_s"), (forward, "forward_s"), (backward, "backward_s")] {
            let (number, unit) = printed.split_once(' ').expect("a number and its unit");
            let scale = match unit {
                "s" => 1.0,
                "ms" => 1e-3,
                "µs" => 1e-6,
                other => panic!("{other}: {line}"),
            };
            let (printed, reported) =
                (scale * number.parse::<f64>().expect("a number"), summary["batch_times"][key].as_f64());
            let reported = reported.unwrap_or_else(|| panic!("{key}: {summary}"));
            // Seconds, ms and µs are printed with at least one decimal.
            assert!(reported > 0.0 && (printed - reported).abs() <= 0.051 * scale, "{key} {reported}: {line}");
        }
    }
}

#[test]
fn a_closed_output_does_not_panic() {
    let mut child = distgpipe(&["schedule", "--partitions", "8", "--chunks", "200"]).spawn().expect("it starts");
    // As `head` does, only at once.
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

#[test]
fn the_demo_trains_on_digits_over_tcp() {
    let report = json(&["demo", "--json"]);
    assert_eq!(report["placement"], serde_json::json!(["client", "server", "client"]));
    let epochs = report["epochs"].as_array().expect("epochs").iter();
    let losses: Vec<f64> = epochs.map(|epoch| epoch["train_loss"].as_f64().expect("a number")).collect();
    command::soundness::assert_losses_sound("the demo", &losses);
    let accuracy = report["epochs"].as_array().and_then(|epochs| epochs.last()?["test_accuracy"].as_f64());
    assert!(accuracy.expect("a number") > 0.95, "{accuracy:?}");
    assert!(report["links"].as_array().is_some_and(|links| links.len() == 2));
    assert!(report["links"][0]["wire_bytes"].as_u64() > Some(1_000_000));
}

/// Files of the library's tests.
fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../distgpipe/tests/golden").join(name)
}

#[test]
fn images_in_folders_are_trained_on_and_their_loading_is_measured() {
    let root = directory("images");
    for (part, class, file) in [
        ("train", "a", "plain.jpg"),
        ("train", "a", "plain.png"),
        ("train", "b", "grey.jpg"),
        ("train", "b", "alpha.png"),
        ("test", "b", "palette.png"),
    ] {
        let folder = root.join(part).join(class);
        std::fs::create_dir_all(&folder).expect("created");
        std::fs::copy(golden("images").join(file), folder.join(file)).expect("copied");
    }
    let name = root.to_str().expect("a plain path");
    let train = ["train", "--data", "image-folder", "--data-dir", name, "--model", "mobilenet_v2", "--set", "image=96"];
    // Of 96 × 96 pixels, 3 × 3 are left at the end, so that a batch norm has 18 values of each channel in two rows.
    let small = ["--set", "width=0.35", "--batch", "4", "--chunks", "2", "--epochs", "8", "--lr", "0.005", "--json"];
    let runs = ["1", "3"].map(|threads| json(&[&train[..], &small, &["--loader-threads", threads]].concat()));
    assert_eq!(runs[0]["steps"], 8);
    // The number of loading threads changes nothing in the training.
    assert_eq!(losses(&runs[0]), losses(&runs[1]));
    let speed = json(&[
        "data",
        "speed",
        "--data",
        "image-folder",
        "--data-dir",
        name,
        "--image",
        "16",
        "--batch",
        "2",
        "--seconds",
        "0.05",
        "--json",
    ]);
    assert!(speed["rows_per_s"].as_f64().expect("a number") > 0.0);
    std::fs::write(root.join("train/a/plain.jpg"), "nothing").expect("written");
    let said = refused(2, &train);
    assert!(said.contains("plain.jpg, byte 0: expected a JPEG or PNG image"), "{said}");
}

#[test]
fn sentences_are_fetched_and_trained_on() {
    let root = directory("sentences");
    let (from, into) = (root.join("RTE"), root.join("got"));
    std::fs::create_dir_all(&from).expect("created");
    let rows = |count: usize| {
        let row = |i: usize| {
            let label = if i.is_multiple_of(2) { "entailment" } else { "not_entailment" };
            format!("{i}\tThe facts are {i}.\tDay by day.\t{label}\n")
        };
        format!("index\tsentence1\tsentence2\tlabel\n{}", (0..count).map(row).collect::<String>())
    };
    std::fs::write(from.join("train.tsv"), rows(2490)).expect("written");
    std::fs::write(from.join("dev.tsv"), rows(276)).expect("written");
    let (root_name, into_name) = (root.to_str().expect("a plain path"), into.to_str().expect("a plain path"));
    let get = ["data", "get", "rte", "--dir", into_name, "--from", root_name];
    // A row too few is not taken, and leaves nothing behind.
    assert!(refused(1, &get).contains("RTE/dev.tsv: expected its 277 rows, got 276: use another copy of it"));
    assert_eq!(std::fs::read_dir(&into).expect("made").count(), 0);
    std::fs::write(from.join("dev.tsv"), rows(277)).expect("written");
    assert!(fine(&get).contains(&format!("to train on it: distgpipe train --data rte --data-dir {into_name}")));
    assert!(fine(&get).contains("is already there and complete"));
    let tokenizer = golden("tokenizer");
    let small = [
        "vocabulary=400",
        "hidden=8",
        "heads=2",
        "layers=1",
        "feed_forward=8",
        "tokens=32",
        "positions=34",
        "classes=2",
    ];
    let mut train = vec!["train", "--data", "rte", "--data-dir", into_name, "--model", "roberta"];
    small.iter().for_each(|setting| train.extend(["--set", setting]));
    train.extend(["--tokenizer", tokenizer.to_str().expect("a plain path")]);
    train.extend(["--limit", "32", "--batch", "16", "--epochs", "1", "--json"]);
    let run = json(&train);
    assert_eq!(run["steps"], 2);
    train.extend(["--set", "vocabulary=30"]);
    assert!(refused(2, &train).contains("--set vocabulary="));
}

#[test]
fn truncated_data_files_are_rejected() {
    let root = directory("not-taken");
    let (from, into) = (root.join("from"), root.join("into"));
    std::fs::create_dir_all(&from).expect("created");
    for file in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"] {
        std::fs::write(from.join(format!("{file}.bin")), "abc").expect("written");
    }
    let names = [&from, &into].map(|path| path.to_str().expect("a plain path"));
    let said = refused(1, &["data", "get", "cifar10", "--from", names[0], "--dir", names[1]]);
    let words = "from/data_batch_1.bin: expected 30730000 bytes, got 3: use another copy of it";
    assert!(said.contains(words), "{said}");
    std::fs::remove_file(from.join("data_batch_4.bin")).expect("removed");
    let said = refused(1, &["data", "get", "cifar10", "--from", names[0], "--dir", names[1]]);
    assert!(said.contains("expected data_batch_4.bin in "), "{said}");
    assert_eq!(std::fs::read_dir(&into).expect("made").count(), 0);
}

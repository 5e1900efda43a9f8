//! `distgpipe recipe` as its users meet it: the published figures beside those of the run, and what differs.

mod command;

use command::{ended, fine, json};
use serde_json::Value;

/// Standard error of a command that was called wrongly.
fn refused(arguments: &[&str]) -> String {
    ended(2, arguments).1
}

#[test]
fn a_recipe_is_listed_and_shown_anywhere() {
    let list = fine(&["recipe", "list"]);
    let line = list.lines().find(|line| line.starts_with("cifar10-sort8 ")).expect("a line");
    assert!(line.contains("mobilenet_v2  cifar10") && line.contains("95.7±0.03 %, ratio 0.25, 89.51 G/s"), "{line}");
    let all = json(&["recipe", "list", "--json"]);
    assert_eq!(all.as_array().map(Vec::len), Some(list.lines().count() - 1));
    let shown = fine(&["recipe", "show", "rte-roberta-pipeline-2-batch-32"]);
    for part in ["78.59±0.21 %", "78.33±0.31", "62.19/s", "0.8×", "2 GPUs", "distgpipe train --model roberta"] {
        assert!(shown.contains(part), "{part} is not in: {shown}");
    }
    for part in ["Weights: published with presumably RoBERTa-base's", "--tokenizer PATH", "`distgpipe data get rte`"] {
        assert!(shown.contains(part), "{part} is not in: {shown}");
    }
    let shown = json(&["recipe", "show", "cifar10-sort8", "--json"]);
    assert_eq!(shown["recipe"]["published"]["accuracy"], "95.7±0.03");
    assert!(shown["command"].as_str().is_some_and(|command| command.contains("--codec sort:8")), "{shown}");
}

#[test]
fn the_command_that_is_shown_is_the_recipe() {
    let command = json(&["recipe", "show", "resnet101-speed-pipeline-8", "--json"])["command"].clone();
    let command = command.as_str().expect("text").to_owned();
    let arguments: Vec<&str> = command.split(' ').skip(1).collect();
    // Far enough to know that every flag was understood, and no further.
    let said = refused(&[&arguments[..], &["--threads", "0"]].concat());
    assert!(said.contains("--threads 0"), "{said}");
}

#[test]
fn an_unknown_name_suggests_the_nearest() {
    for verb in ["show", "run"] {
        let said = refused(&["recipe", verb, "cifar10-sort9"]);
        assert!(said.contains("unknown recipe `cifar10-sort9`: did you mean `cifar10-sort"), "{said}");
        assert!(said.contains("distgpipe recipe list"), "{said}");
    }
}

#[test]
fn a_data_parallel_row_has_the_times_of_a_batch() {
    // One batch again and again, with 2 × 2 pixels of 8 rows left for the last batch norms: its loss falls.
    let small = ["--set", "image=64", "--data", "synthetic", "--samples", "24", "--batch", "24", "--device", "cpu"];
    let run = json(&[&["recipe", "run", "time-mobilenet-sgd-3", "--epochs", "8", "--json"], &small[..]].concat());
    assert_eq!(run["run"]["replicas"], 3);
    let names: Vec<&str> =
        run["run"]["workers"].as_array().unwrap().iter().map(|w| w["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["w0/0", "w0/1", "w0/2"]);
    let value = |metric: &str| {
        let lines = run["comparison"].as_array().unwrap();
        let line = lines.iter().find(|line| line["metric"] == metric).unwrap_or_else(|| panic!("{metric}: {lines:?}"));
        assert!(line["published"].as_str().is_some(), "{line}");
        line["value"].as_f64().unwrap_or_else(|| panic!("{line}"))
    };
    let (batch, moving, backward) = (value("batch_time"), value("transfer_time"), value("backward_time"));
    assert!(moving > 0.0 && backward > 0.0 && moving + backward < batch, "{moving} {backward} {batch}");
}

#[test]
fn missing_data_gives_the_same_error_as_train() {
    let said = refused(&["recipe", "run", "cifar10-sort8", "--data-dir", "/nowhere"]);
    assert!(said.contains("`distgpipe data get cifar10 --dir /nowhere`"), "{said}");
    let said = refused(&["recipe", "run", "rte-sort8"]);
    assert!(said.contains("--tokenizer PATH"), "{said}");
}

#[test]
fn a_run_prints_the_seeds_row_beside_ours_and_what_differs() {
    let said = fine(&[
        "recipe",
        "run",
        "resnet101-speed-pipeline-2",
        "--set",
        "depth=18",
        "--set",
        "image=64",
        "--set",
        "width=8",
        "--batch",
        "16",
        "--chunks",
        "2",
        "--samples",
        "80",
        "--epochs",
        "1",
        "--lr",
        "0.02",
        "--device",
        "cpu",
    ]);
    let row = |name: &str| said.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {said}"));
    let throughput = row("throughput");
    assert!(throughput.contains("135.539/s"), "{throughput}");
    let ours = throughput.split_whitespace().last().and_then(|rate| rate.strip_suffix("/s")?.parse::<f64>().ok());
    assert!(ours.is_some_and(|rate| rate > 0.0), "{throughput}");
    assert!(row("speed-up").contains("1.414×") && row("speed-up").contains("resnet101-speed-baseline"), "{said}");
    assert!(row("parameters").contains('–'), "{said}");
    for part in [
        "What differs:",
        "- Hardware: published on 2 Tesla P40 GPUs; this run on ",
        "- Epochs: 1 instead of the recipe's 10.",
        "- --batch 16 instead of 25000.",
        "- Model settings changed: depth=18, image=64, width=8.",
        "- The benchmark repeats one random batch",
    ] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
}

#[test]
fn a_codec_recipe_measures_ratio_bandwidth_and_accuracy() {
    let run = json(&[
        "recipe",
        "run",
        "cifar10-sort8",
        "--data",
        "digits",
        "--set",
        "image=8",
        "--set",
        "width=0.35",
        "--set",
        "strides=[1,1,1,2,1,1,2,1]",
        "--batch",
        "96",
        "--chunks",
        "4",
        "--epochs",
        "4",
        "--lr",
        "0.05",
        "--device",
        "cpu",
        "--json",
    ]);
    let line = |metric: &str| {
        let lines = run["comparison"].as_array().expect("lines");
        lines.iter().find(|line| line["metric"] == metric).unwrap_or_else(|| panic!("{metric}: {run}")).clone()
    };
    // 8 of 32 bits, tables and headers.
    let ratio = line("compression");
    assert_eq!(ratio["published"], "0.25");
    assert!(ratio["value"].as_f64().is_some_and(|ratio| (0.25..0.27).contains(&ratio)), "{ratio}");
    assert_eq!(line("accuracy")["published"], "95.7±0.03 %");
    // Of ten classes, chance is 10 %. The figure is that of the run's last test.
    let accuracy = line("accuracy")["value"].as_f64().expect("a number");
    assert!((40.0..=100.0).contains(&accuracy), "{run}");
    let tested = run["run"]["epochs"].as_array().and_then(|epochs| epochs.last()?["test_accuracy"].as_f64());
    assert!((accuracy - 100.0 * tested.expect("a number")).abs() < 1e-9, "{run}");
    // A rate for each link, unless its messages are too small to time, as they may be here.
    let bandwidth = line("bandwidth")["ours"].as_str().expect("a text").to_owned();
    let measured = bandwidth.contains("client → server");
    assert!(measured || bandwidth.contains("too small to measure"), "{run}");
    assert!(line("memory")["value"].as_f64().is_some_and(|bytes| bytes > 1e5), "{run}");
    let has_matthews = |line: &Value| line["metric"] == "matthews";
    assert!(!run["comparison"].as_array().is_some_and(|lines| lines.iter().any(has_matthews)), "{run}");
    let each = line("memory")["ours"].to_string();
    assert!(each.contains(": client ") && each.contains(", server "), "{each}");
    let differs = run["deviations"].to_string();
    assert!(differs.contains("this run starts from random weights, because --weights is not given"), "{differs}");
    assert!(differs.contains("--data digits instead of cifar10"), "{differs}");
    assert_eq!(run["run"]["model"], "mobilenet_v2");
}

/// The published table has the parts and no sum, so that names such as "of it the model's" would refer to nothing.
#[test]
fn memory_of_the_model_is_computed_and_labelled_as_such() {
    let shown = fine(&["recipe", "show", "amoebanet-memory-pipeline-2"]);
    assert!(shown.contains("model memory       6.07 GiB"), "{shown}");
    let run = json(&[
        "recipe",
        "run",
        "amoebanet-memory-pipeline-2",
        "--set",
        "layers=3",
        "--set",
        "filters=16",
        "--set",
        "image=64",
        "--set",
        "classes=10",
        "--balance",
        "4,5",
        "--batch",
        "16",
        "--chunks",
        "2",
        "--samples",
        "16",
        "--epochs",
        "8",
        "--lr",
        "0.0003",
        "--device",
        "cpu",
        "--json",
    ]);
    let lines = run["comparison"].as_array().expect("lines");
    let model = lines.iter().find(|line| line["metric"] == "model_memory").expect("it is published");
    let parameters = run["run"]["parameters"].as_u64().expect("a count");
    // Parameters, gradients and what RMSprop keeps, of four bytes each.
    assert_eq!(model["value"].as_f64(), Some((parameters * 4 * 3) as f64), "{model}");
    assert!(
        model["ours"].as_str().is_some_and(|text| text.ends_with(", counted as 3 copies of the parameters")),
        "{model}"
    );
}

//! `distgpipe recipe` as its users meet it: the published figures beside those of the run, and what differs.

mod command;

use command::{directory, ended, fine, json};
use distgpipe::engine::Device;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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
    for part in ["Weights: published with RoBERTa-base's weights", "--tokenizer PATH", "`distgpipe data get rte`"] {
        assert!(shown.contains(part), "{part} is not in: {shown}");
    }
    let shown = json(&["recipe", "show", "cifar10-sort8", "--json"]);
    assert_eq!(shown["recipe"]["published"]["accuracy"], "95.7±0.03");
    assert!(shown["command"].as_str().is_some_and(|command| command.contains("--codec sort:8")), "{shown}");
}

#[test]
fn recipes_are_listed_by_words_of_their_titles_rows_and_tables() {
    let names = |words: &[&str]| -> Vec<String> {
        let listed = json(&[&["recipe", "list"], words, &["--json"]].concat());
        listed.as_array().unwrap().iter().map(|recipe| recipe["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&["RTE", "8bits"]), ["rte-sort8"]);
    // A title of a table, and a column of the row.
    assert_eq!(names(&["For VGG13", "4 gpus"]), ["time-vgg13-sgd-4"]);
    let said = refused(&["recipe", "list", "no-such-word"]);
    assert!(said.contains("no recipe has all of these words: no-such-word"), "{said}");
}

#[test]
fn a_table_has_our_figures_or_the_reason_beside_the_published_ones() {
    let tables = fine(&["recipe", "tables"]);
    let line = |name: &str| tables.lines().find(|line| line.split(' ').next() == Some(name)).expect("a line");
    assert!(line("unet-speed").contains("U-Net (5, 64) Speed Benchmark"), "{tables}");
    let counts = |name: &str| line(name).split_whitespace().skip(1).take(4).map(str::to_owned).collect::<Vec<_>>();
    // Rows, and how many of them have all figures, some, and simulated ones.
    assert!(tables.lines().next().is_some_and(|line| line.contains("rows  measured  in part  simulated")), "{tables}");
    assert_eq!(counts("cola"), ["4", "4", "0", "0"], "{tables}");
    // Their scores were not measured.
    assert_eq!(counts("resnet101-imagenet"), ["8", "0", "0", "6"], "{tables}");
    assert_eq!(counts("food101"), ["4", "1", "3", "0"], "{tables}");
    // By its title, from a document that the user has open.
    let cola = fine(&["recipe", "table", "Ablation Study: COLA"]);
    let row = |text: &str, part: &str| {
        text.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("{part}: {text}")).to_owned()
    };
    // The mean and the deviation of 12.8, 15.8 and 16.4 in the committed reports.
    let found = row(&cola, "63.20±0.12");
    assert!(found.contains("15.01 ± 1.96") && found.contains("0.252"), "{cola}");
    assert!(row(&cola, "- Model:").contains("not comparable with the published ones"), "{cola}");
    let food = fine(&["recipe", "table", "food101"]);
    let needs = "Validation Acc needs Food-101 (`distgpipe data get food101`) and a CPU (`--device cpu`) or a GPU (`--device cuda:0`); \
                 MobileNetV2's ImageNet weights for a score that compares";
    assert!(row(&food, "83.77%").contains(needs), "{food}");
    let shown = fine(&["recipe", "table", "parameters"]);
    assert!(row(&shown, "133.05").contains("133,047,848"), "{shown}");
    let shown = json(&["recipe", "table", "food101", "--json"]);
    assert!(shown["rows"][1]["not_measured"].as_str().is_some_and(|why| why.contains(needs)), "{shown}");
}

/// CI runs this test: no figure gets into a README by hand.
#[test]
fn the_tables_of_the_readmes_are_made_from_the_committed_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = [root.join("README.md"), root.join("crates/distgpipe-cli/recipes/README.md")];
    let [first, second] = files.each_ref().map(|file| file.to_str().expect("a plain path"));
    fine(&["recipe", "readme", "--check", first, second]);
    // A figure that no file has is found, and replaced.
    let copy = directory("readme").join("README.md");
    let text = std::fs::read_to_string(second).unwrap();
    std::fs::write(&copy, text.replacen("15.01 ± 1.96", "64.00 ± 0.10", 1)).unwrap();
    let copied = copy.to_str().expect("a plain path");
    let said = ended(1, &["recipe", "readme", "--check", copied]).1;
    assert!(said.contains("the tables are not those of runs/recipes"), "{said}");
    fine(&["recipe", "readme", copied]);
    assert!(std::fs::read_to_string(&copy).unwrap() == text);
}

/// The cells of a Markdown table, without its first two lines. `heading` is its first line up to the end of a cell.
fn cells(markdown: &str, heading: &str) -> Vec<Vec<String>> {
    let from = markdown.find(heading).unwrap_or_else(|| panic!("no table starts with: {heading}"));
    let rows = markdown[from..].lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// These tables have several runs side by side, so `recipe readme` does not make them: they were typed.
#[test]
fn the_accuracies_of_the_readme_are_those_of_the_committed_reports() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let readme = read("README.md");
    let report = |path: String| -> Value { serde_json::from_str(&read(&path)).unwrap() };
    let last =
        |report: &Value, figure: &str| report["epochs"].as_array().unwrap().last().unwrap()[figure].as_f64().unwrap();
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let with_deviation = |values: &[f64], decimals: usize| {
        let squares: f64 = values.iter().map(|value| (value - mean(values)).powi(2)).sum();
        let deviation = (squares / (values.len() - 1) as f64).sqrt();
        format!("{:.decimals$} ± {deviation:.decimals$}", mean(values))
    };
    let wire_of_raw = |cuts: &mut dyn Iterator<Item = &Value>| {
        let (mut wire, mut raw) = (0.0, 0.0);
        for cut in cuts {
            wire += cut["wire_bytes"].as_f64().unwrap();
            raw += cut["raw_bytes"].as_f64().unwrap();
        }
        wire / raw
    };

    let table = cells(&readme, "| codec | bytes relative to `raw` |");
    assert_eq!(table.len(), 6, "{table:?}");
    for row in table {
        let codec = row[0].trim_matches('`').replace(':', "-");
        let cifar10 = report(format!("runs/2026-11-15-mobilenet-cifar10/{codec}.json"));
        let seeds =
            |task: &str| [0, 1, 2].map(|seed| report(format!("runs/2026-11-15-{task}/{task}-{codec}-seed{seed}.json")));
        let (cola, rte) = (seeds("cola"), seeds("rte"));
        let of = |reports: &[Value; 3], figure: &str, scale: f64| {
            reports.each_ref().map(|report| scale * last(report, figure))
        };
        let expected = [
            format!("{:.2}", 100.0 * last(&cifar10, "test_accuracy")),
            with_deviation(&of(&cola, "test_matthews", 100.0), 1),
            with_deviation(&of(&rte, "train_loss", 1.0), 3),
            with_deviation(&of(&rte, "test_accuracy", 100.0), 1),
        ];
        assert_eq!(row[2..], expected, "{codec}");
        let (above, below) = row[1].split_once('/').unwrap_or((&row[1], "1"));
        let share = above.parse::<f64>().unwrap() / below.parse::<f64>().unwrap();
        for report in cola.iter().chain(&rte).chain([&cifar10]).filter(|_| codec != "raw") {
            let links = report["links"].as_array().unwrap();
            let measured = wire_of_raw(&mut links.iter().flat_map(|link| link["cuts"].as_array().unwrap()));
            // A fraction of small numbers, beside bytes with their headers.
            assert!((measured / share - 1.0).abs() < 0.03, "{codec}: {measured}, not {}", row[1]);
        }
    }

    let lines =
        |path: &str| -> Vec<Value> { read(path).lines().map(|line| serde_json::from_str(line).unwrap()).collect() };
    let (runs, bits) =
        (lines("runs/2026-11-16-few-bits/cifar10.jsonl"), lines("runs/2026-11-16-few-bits/cifar10-bits.jsonl"));
    let accuracy = |codec: &str| {
        let runs: Vec<f64> =
            runs.iter().filter(|run| run["codec"] == codec).map(|run| 100.0 * last(run, "test_accuracy")).collect();
        assert_eq!(runs.len(), 2, "{codec}: the seeds");
        mean(&runs)
    };
    let table = cells(&readme, "| codecs for activations and gradients | bits per value |");
    assert_eq!(table.len(), 3, "{table:?}");
    for row in table {
        // zstd changes the bits, and not the values.
        let zstd = row[0].replace(['`', ' '], "");
        let codecs: Vec<&str> =
            zstd.split(',').map(|codec| codec.trim_start_matches("zstd(").trim_end_matches(')')).collect();
        let found = accuracy(&codecs.join(","));
        assert_eq!(row[2], format!("{found:.2}"), "{zstd}");
        if zstd == "raw" {
            assert_eq!(row[1..].join("|"), format!("32|{found:.2}|"));
            continue;
        }
        let both = [codecs[0], codecs.last().unwrap()].map(|codec| format!("zstd({codec})")).join(",");
        let sizes = bits.iter().find(|line| line["codecs"] == both).unwrap_or_else(|| panic!("no sizes of {both}"));
        let per_value = 32.0 * wire_of_raw(&mut sizes["cuts"].as_array().unwrap().iter());
        assert_eq!(row[1], format!("{per_value:.2}"), "{zstd}");
        let loss: f64 = row[3].replace('−', "-").parse().unwrap();
        assert!((found - accuracy("raw") - loss).abs() <= 0.0051, "{zstd}: {loss}");
    }
}

#[test]
fn the_cifar100_table_of_the_readme_is_that_of_the_committed_runs() {
    let readme = include_str!("../../../README.md");
    let table = cells(readme, "| codec | bytes relative to `raw` | CIFAR-100 accuracy, % |");
    assert_eq!(table.len(), 5, "{table:?}");
    let view = |name: &str| -> Value { serde_json::from_str(&fine(&["recipe", "table", name, "--json"])).unwrap() };
    for row in table {
        let codec = row[0].trim_matches('`');
        let (name, file) = match codec {
            "sort:4+4" => ("cifar100-sort8-1to1".to_owned(), "altogether"),
            other => (format!("cifar100-{}", other.replace(':', "")), "cifar100"),
        };
        let printed = view(file);
        let shown = printed["rows"].as_array().unwrap().iter().find(|row| row["recipe"] == name).unwrap();
        let mut cells = shown["cells"].as_array().unwrap().iter().map(|cell| cell.as_str().unwrap());
        let published = cells.find(|cell| cell.trim_end_matches('%') == row[3]);
        assert!(published.is_some(), "{codec}: {} is not published: {shown}", row[3]);
        assert_eq!(cells.next(), Some(&format!("{} %", row[2])[..]), "{codec}");
        let ratio = shown["cells"].to_string();
        let (above, below) = row[1].split_once('/').unwrap_or((&row[1], "1"));
        let share = above.parse::<f64>().unwrap() / below.parse::<f64>().unwrap();
        assert!(ratio.contains(&format!("\"{share:.3}\"")), "{codec}: {share} is not in {ratio}");
    }
}

/// Small enough for a test: everything about a row is there but its size.
const TINY: [&str; 12] = [
    "--set",
    "image=64",
    "--data",
    "synthetic",
    "--samples",
    "24",
    "--batch",
    "24",
    "--epochs",
    "4",
    "--no-evaluate",
    "--lr=0.01",
];

#[test]
fn a_table_is_run_with_all_seeds_and_printed_from_the_file() {
    let out = directory("table-run");
    let place = out.to_str().expect("a plain path");
    let arguments = ["recipe", "run", "--table", "time-mobilenet", "--rows", "sgd", "--seeds", "0,1", "--out", place];
    let printed = fine(&[&arguments[..], &TINY].concat());
    let file: Value = serde_json::from_str(&std::fs::read_to_string(out.join("time-mobilenet.json")).unwrap()).unwrap();
    let rows = file["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3, "{file}");
    for (row, replicas) in rows.iter().zip([2, 3, 4]) {
        assert_eq!(row["recipe"], format!("time-mobilenet-sgd-{replicas}"));
        let runs = row["runs"].as_array().unwrap();
        assert_eq!(runs.iter().map(|run| run["seed"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1], "{row}");
        assert!(runs.iter().all(|run| run["figures"]["batch_time"].as_f64().is_some_and(|s| s > 0.0)), "{row}");
        assert!(row["deviations"].to_string().contains("--data synthetic instead of cifar10"), "{row}");
    }
    let runs = rows[0]["runs"].as_array().unwrap();
    let [a, b] = [0, 1].map(|i| runs[i]["figures"]["batch_time"].as_f64().unwrap());
    // A deviation that rounds to 0 is left out.
    let deviation = format!("{:.3}", (a - b).abs() / 2f64.sqrt());
    let mean = format!("{:.3}{}", (a + b) / 2.0, if deviation == "0.000" { " s" } else { " ± " });
    let line = printed.lines().find(|line| line.contains("0.341")).expect("the published row");
    assert!(line.contains(&mean), "{mean} is not in: {line}");
    // Another command prints the same from the file.
    assert_eq!(fine(&["recipe", "table", "time-mobilenet", "--runs", place]), printed);
    let said = refused(&arguments);
    assert!(said.contains("time-mobilenet.json of an earlier run: add --add to run the rows that it lacks"), "{said}");
}

/// A table whose run was interrupted is finished, and one of few seeds gets more. What was measured stays as it is.
#[test]
fn rows_and_seeds_are_added_to_the_file_of_a_table() {
    let out = directory("table-added");
    let (path, place) = (out.join("time-mobilenet.json"), out.to_str().expect("a plain path"));
    let table = ["recipe", "run", "--table", "time-mobilenet", "--out", place];
    let file = || -> Value { serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap() };
    fine(&[&table[..], &["--rows", "sgd-2"], &TINY].concat());
    let first = file();
    assert_eq!((first["rows"].as_array().unwrap().len(), &first["rows"][0]["added"]), (1, &Value::Null));
    // As if it had been measured elsewhere.
    let elsewhere =
        std::fs::read_to_string(&path).unwrap().replace(first["machine"].as_str().unwrap(), "another machine");
    std::fs::write(&path, elsewhere).unwrap();

    let printed = fine(&[&table[..], &["--rows", "sgd-3", "--add"], &TINY].concat());
    let second = file();
    assert_eq!(second["rows"][0], first["rows"][0], "what was there stays");
    let added = &second["rows"][1];
    assert_eq!(added["recipe"], "time-mobilenet-sgd-3");
    assert_eq!((&added["added"]["machine"], &second["machine"]), (&first["machine"], &"another machine".into()));
    assert!(added["added"]["command"].as_str().unwrap().contains("--rows sgd-3 --add"), "{added}");
    for machine in ["another machine", first["machine"].as_str().unwrap()] {
        assert!(printed.contains(&format!("time-mobilenet.json; {machine}; produced by ")), "{machine}: {printed}");
    }

    // Nothing is left to do for these rows, and another seed is a run of all seeds.
    fine(&[&table[..], &["--rows", "sgd-3", "--add"], &TINY].concat());
    assert_eq!(file(), second);
    fine(&[&table[..], &["--rows", "sgd-3", "--seeds", "1", "--add"], &TINY].concat());
    let third = file();
    let seeds: Vec<u64> =
        third["rows"][1]["runs"].as_array().unwrap().iter().map(|run| run["seed"].as_u64().unwrap()).collect();
    assert_eq!((seeds, &third["rows"][0]), (vec![0, 1], &first["rows"][0]));

    // A speed and a score: nobody knows which of them another run would replace.
    let mut several = third.clone();
    several["rows"].as_array_mut().unwrap().push(third["rows"][1].clone());
    std::fs::write(&path, several.to_string()).unwrap();
    let said = refused(&[&table[..], &["--rows", "sgd-3", "--seeds", "2", "--add"], &TINY].concat());
    assert!(said.contains("--add: time-mobilenet-sgd-3: the file has several rows of it"), "{said}");
    assert_eq!(file(), several);
}

/// A row that went on alone would hold the cores, or the GPU.
#[test]
fn a_row_ends_with_the_command_that_started_it() {
    let out = directory("table-killed");
    let place = out.to_str().expect("a plain path");
    let arguments = ["recipe", "run", "--table", "time-mobilenet", "--rows", "sgd-2", "--out", place];
    let long = TINY.map(|word| if word == "4" { "100000" } else { word });
    let mut command = Command::new(env!("CARGO_BIN_EXE_distgpipe"))
        .args([&arguments[..], &long, &["--device", "cpu", "--threads", "1"]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut said = BufReader::new(command.stderr.take().expect("piped"));
    let mut text = String::new();
    while !text.contains("device cpu") {
        assert!(said.read_line(&mut text).expect("text") > 0, "{text}");
    }
    let tasks = format!("/proc/{0}/task/{0}/children", command.id());
    let row = std::fs::read_to_string(tasks).expect("a Linux with /proc").trim().to_owned();
    assert!(!row.is_empty() && !row.contains(' '), "the processes of the command: {row}");
    command.kill().expect("it runs");
    command.wait().expect("it ends");
    let patience = Instant::now();
    // A process that nobody waits for stays as a zombie where nothing reaps orphans.
    let runs = || std::fs::read_to_string(format!("/proc/{row}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    while runs() {
        assert!(patience.elapsed() < Duration::from_secs(60), "the row runs on: {row}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One device stands for two. The row that the speed-up is relative to is run too, although no word names it.
#[test]
fn a_row_that_needs_more_devices_is_simulated_and_marked() {
    let out = directory("table-simulated");
    let place = out.to_str().expect("a plain path");
    let table = ["recipe", "run", "--table", "unet-speed", "--rows", "pipeline-2", "--simulate", "--out", place];
    let small = ["--set", "image=64", "--set", "channels=4", "--batch", "8", "--chunks", "4", "--steps", "4"];
    let printed = fine(&[&table[..], &small, &["--device", "cpu", "--threads", "1", "--lr=0.01"]].concat());
    let file: Value = serde_json::from_str(&std::fs::read_to_string(out.join("unet-speed.json")).unwrap()).unwrap();
    let run = &file["rows"][0]["runs"][0];
    assert_eq!((&file["rows"][0]["recipe"], &run["outcome"]), (&"unet-speed-pipeline-2".into(), &"simulated".into()));
    assert_eq!((&run["costs"]["rows"], &run["costs"]["balance"]), (&2.into(), &serde_json::json!([104, 137])));
    for cost in ["forward_s", "recompute_s", "backward_s", "optimizer_s"] {
        let costs: Vec<f64> = serde_json::from_value(run["costs"][cost].clone()).unwrap();
        assert!(costs.len() == 2 && costs.iter().all(|&seconds| seconds > 0.0), "{cost}: {costs:?}");
    }
    // Measured one after the other: the partition would recompute while the next one computes.
    assert_eq!(run["costs"]["recompute_s"], run["costs"]["forward_s"]);
    assert!(run["command"].as_str().unwrap().contains("--recompute never"), "{run}");
    // At most as fast as the slower partition with all four micro-batches, of which three are recomputed.
    let of = |cost: &str, partition: usize| run["costs"][cost][partition].as_f64().unwrap();
    let slower = [0, 1].map(|p| 4.0 * of("forward_s", p) + 3.0 * of("recompute_s", p) + 4.0 * of("backward_s", p));
    let rate = run["figures"]["throughput"].as_f64().unwrap();
    assert!(rate > 0.0 && rate < 8.0 / slower[0].max(slower[1]), "{rate}: {run}");
    assert_eq!(file["rows"][1]["runs"][0]["outcome"], "complete", "{file}");
    let line = |part: &str| printed.lines().find(|line| line.contains(part)).expect("a row").to_owned();
    assert_eq!(line("35.502/s").matches("(simulated)").count(), 2, "{printed}");
    assert!(!line("28.500/s").contains("simulated") && printed.contains("- Simulated, not measured: "), "{printed}");
    let limited = directory("table-limited");
    let place = limited.to_str().expect("a plain path");
    let said =
        refused(&["recipe", "run", "--table", "unet-speed", "--row-limit", "0.2", "--device", "cpu", "--out", place]);
    assert!(said.contains("unet-speed-baseline: skipped: it took longer than "), "{said}");
}

#[test]
fn rows_that_cannot_run_are_skipped_with_the_reason_and_memory_is_an_outcome() {
    let out = directory("table-skips");
    let place = out.to_str().expect("a plain path");
    let table = ["recipe", "run", "--table", "time-vgg13", "--out", place];
    // Larger than the memory of any machine.
    let huge = ["--set", "image=65536", "--data", "synthetic", "--samples", "128", "--no-evaluate"];
    let run = json(&[&table[..], &huge, &["--json"]].concat());
    for row in run["rows"].as_array().unwrap() {
        assert_eq!(row["runs"][0]["outcome"], "out-of-memory", "{run}");
    }
    let printed = fine(&["recipe", "table", "time-vgg13", "--runs", place]);
    assert!(printed.lines().any(|line| line.contains("0.704") && line.contains("out of memory")), "{printed}");
    // The same command with data that is not there.
    let other = directory("table-skips-all");
    let other = other.to_str().expect("a plain path");
    let said = refused(&["recipe", "run", "--table", "cola", "--seeds", "0,1", "--out", other]);
    assert!(said.contains("cola-sort16: skipped: ") && said.contains("--tokenizer PATH"), "{said}");
    assert!(said.contains("--table cola: no row can run here"), "{said}");
    assert!(!Path::new(other).join("cola.json").exists());
    let said = refused(&["recipe", "run", "--table", "cola", "--save", "model.safetensors"]);
    assert!(said.contains("--save: it belongs to one run: name a recipe instead of --table"), "{said}");
}

/// Without `--device`, a row asks for as many GPUs as were published. Nothing is missing where there are as many.
#[test]
fn a_row_that_lacks_gpus_says_how_many_and_what_will_do_instead() {
    let gpus = (0..2).filter(|&index| Device::Cuda(index).open().is_ok()).count();
    if gpus > 0 {
        return;
    }
    let out = directory("table-no-gpu");
    let mut command = Command::new(env!("CARGO_BIN_EXE_distgpipe"));
    command.args(["recipe", "run", "--table", "time-vgg13", "--threads", "1", "--out"]).arg(&out);
    let output = command.output().expect("the binary was built with this test");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let instead = "--device cpu, or --device cuda:0, has all workers share one device";
    for (recipe, count) in [("time-vgg13-sgd-2", 2), ("time-vgg13-sgd-4", 4)] {
        let why = format!("{recipe}: skipped: it needs {count} GPUs, and this machine has 0; {instead}");
        assert!(said.contains(&why), "{why} is not in: {said}");
    }
    assert!(said.contains("--table time-vgg13: no row can run here; the first: it needs 2 GPUs"), "{said}");
    assert!(!out.join("time-vgg13.json").exists());
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

/// The benchmark has binary cross-entropy, whose formula the golden tests check. The flag says it otherwise.
#[test]
fn unet_trains_with_binary_cross_entropy() {
    let small =
        ["--set", "convolutions=1", "--set", "channels=4", "--set", "image=64", "--batch", "8", "--samples", "32"];
    let run = ["recipe", "run", "unet-speed-baseline", "--epochs", "3", "--lr", "0.01", "--device", "cpu", "--json"];
    let first = |loss: &[&str]| {
        let run = json(&[&run[..], &small, loss].concat());
        (run["run"]["epochs"][0]["train_loss"].as_f64().unwrap(), run["deviations"].to_string())
    };
    let (as_published, differs) = first(&[]);
    // About ln 2, before anything is learnt.
    assert!((0.6..1.3).contains(&as_published) && !differs.contains("--loss"), "{as_published}: {differs}");
    let (squared, differs) = first(&["--loss", "mean-squared"]);
    assert!((squared - as_published).abs() > 0.01, "{squared} and {as_published}");
    assert!(differs.contains("--loss mean-squared instead of binary-cross-entropy"), "{differs}");
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
        "--momentum",
        "0.9",
        "--lr-warm-up",
        "0",
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
    // A rate for each link whose messages are large enough to time, which those of either may not be here. The figure is the client's.
    let bandwidth = line("bandwidth");
    let text = bandwidth["ours"].as_str().expect("a text").to_owned();
    let [there, back] = ["client → server", "server → client"].map(|link| text.contains(link));
    assert!(there || back || text.contains("too small to measure"), "{run}");
    assert_eq!(bandwidth["value"].as_f64().is_some(), there, "{run}");
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

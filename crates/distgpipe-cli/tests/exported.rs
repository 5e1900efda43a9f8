//! A model from PyTorch in every command: `--model FILE.pt2`.

mod command;
mod servers;

use command::{directory, ended, refused, tensors};
use distgpipe::tch::{Device, Kind, Tensor};
use servers::{Servers, TOKEN};
use std::path::{Path, PathBuf};

/// A network for the digits, which scripts/golden_pt2.py exported.
fn exported() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../distgpipe/tests/golden/pt2/digits.pt2");
    path.to_str().expect("a plain path").to_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// One batch again and again, so that its loss falls.
fn train(model: &str, more: &[&str]) -> String {
    let common = ["train", "--model", model, "--limit", "64", "--batch", "64", "--chunks", "4", "--lr", "0.05"];
    ended(0, &[&common[..], more].concat()).1
}

/// The bytes of a file of tensors, by name.
fn state(path: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = |tensor| distgpipe::engine::bytes(&tensor).expect("a dense tensor").to_vec();
    tensors(path).into_iter().map(|(name, tensor)| (name, bytes(tensor))).collect()
}

#[test]
fn a_model_from_pytorch_trains_alike_on_threads_processes_and_machines() {
    let (folder, model, servers) = (directory("exported"), exported(), Servers::start(1));
    let token = folder.join("token");
    std::fs::write(&token, TOKEN).unwrap();
    let saved = |name: &str| -> PathBuf { folder.join(format!("{name}.safetensors")) };
    let run = ["--epochs", "6", "--no-evaluate", "--seed", "1"];
    let whole = saved("whole");
    train(&model, &[&run[..], &["--save", text(&whole)]].concat());
    let cut = [&run[..], &["--cut", "after=1,5", "--recompute", "always"]].concat();
    let workers = servers.addresses().join(",");
    for (name, more) in [
        ("threads", vec!["--workers", "threads", "--layers", "all"]),
        ("processes", vec!["--workers", "processes"]),
        ("machines", vec!["--workers", &workers, "--token-file", text(&token)]),
    ] {
        let path = saved(name);
        train(&model, &[&cut[..], &more, &["--save", text(&path)]].concat());
        assert!(state(&path) == state(&whole), "{name}: other bits than without a cut");
    }
    let names: Vec<String> = state(&whole).into_iter().map(|(name, _)| name).collect();
    for name in ["0.weight", "2.norm.running_var", "2.norm.num_batches_tracked", "7.bias"] {
        assert!(names.iter().any(|known| known == name), "{name} is not in {names:?}");
    }
    let (said, _) = ended(0, &["evaluate", "--weights", text(&whole), "--limit", "64", "--device", "cpu"]);
    assert!(said.contains("accuracy"), "{said}");
}

#[test]
fn a_run_of_a_model_from_pytorch_resumes_with_another_cut() {
    let (folder, model) = (directory("exported-resume"), exported());
    let [through, resumed] = ["through", "resumed"].map(|name| folder.join(format!("{name}.safetensors")));
    let checkpoint = folder.join("saved");
    let run = ["--no-evaluate", "--seed", "2", "--cut", "first=2,last=1"];
    train(&model, &[&run[..], &["--epochs", "6", "--save", text(&through)]].concat());
    train(&model, &[&run[..], &["--epochs", "3", "--checkpoint", text(&checkpoint)]].concat());
    let again = ["train", "--checkpoint", text(&checkpoint), "--resume", "--epochs", "6", "--cut", "after=4"];
    ended(0, &[&again[..], &["--save", text(&resumed)]].concat());
    assert!(state(&resumed) == state(&through), "other bits than those of a run that went through");
}

/// Masks are named by node and tensors by name, so neither depends on the division into layers.
#[test]
fn layers_may_change_when_a_run_resumes_or_is_evaluated_and_the_model_may_not() {
    let (folder, model) = (directory("exported-layers"), exported());
    let [through, resumed] = ["through", "resumed"].map(|name| folder.join(format!("{name}.safetensors")));
    let checkpoint = folder.join("saved");
    let run = ["--no-evaluate", "--seed", "2", "--balance", "3,5"];
    train(&model, &[&run[..], &["--epochs", "4", "--save", text(&through)]].concat());
    train(&model, &[&run[..], &["--epochs", "2", "--checkpoint", text(&checkpoint)]].concat());
    let again = ["train", "--checkpoint", text(&checkpoint), "--resume", "--epochs", "4"];
    ended(0, &[&again[..], &["--layers", "all", "--partitions", "2", "--save", text(&resumed)]].concat());
    assert!(state(&resumed) == state(&through), "other bits than those of a run that went through");
    let weights = ["evaluate", "--weights", text(&resumed), "--limit", "64", "--device", "cpu"];
    for (flags, said) in [
        (vec!["--untie"], "--untie: the file of --weights has the graph"),
        (vec!["--model", &model], "the file of --weights has the graph"),
    ] {
        let got = refused(2, &[&weights[..], &flags].concat());
        assert!(got.contains(said), "{flags:?}: {got}");
    }
    refused(2, &[&weights[..], &["--layers", "modules", "--partitions", "9"]].concat());
    ended(0, &[&weights[..], &["--layers", "all", "--partitions", "9"]].concat());
}

/// The first and the last layer of GPT-2 share a matrix: the client has both. The tokens come from a file of tensors.
#[test]
fn tied_weights_are_trained_by_one_worker_or_untied() {
    let folder = directory("exported-tied");
    let model = exported().replace("digits.pt2", "gpt2.pt2");
    let file = folder.join("tokens.safetensors");
    let tokens = Tensor::arange(40 * 9, (Kind::Int, Device::Cpu)).remainder(37).view([40, 9]);
    let pair = [("input", tokens.narrow(1, 0, 8)), ("target", tokens.narrow(1, 1, 8))];
    let pair = pair.map(|(name, part)| (name, part.contiguous()));
    Tensor::write_safetensors(&pair, &file).unwrap();
    let data = ["train", "--model", &model, "--data", "tensors", "--data-dir", text(&file), "--batch", "4"];
    let run =
        ["--chunks", "2", "--steps", "3", "--no-evaluate", "--optimizer", "adamw", "--clip-norm", "1", "--seed", "3"];
    let saved = |name: &str| folder.join(format!("{name}.safetensors"));
    let (whole, split) = (saved("whole"), saved("split"));
    ended(0, &[&data[..], &run, &["--save", text(&whole)]].concat());
    let cut = ["--cut", "first=1,last=1", "--workers", "processes", "--save", text(&split)];
    ended(0, &[&data[..], &run, &cut].concat());
    assert!(state(&split) == state(&whole), "other bits than without a cut");
    let names: Vec<String> = state(&whole).into_iter().map(|(name, _)| name).collect();
    assert!(names.iter().any(|name| name == "model.lm_head.weight"), "both names are saved: {names:?}");
    let apart = refused(2, &[&data[..], &run, &["--partitions", "2"]].concat());
    assert!(apart.contains("--place") && apart.contains("--untie") && apart.contains("wte.weight"), "{apart}");
    ended(0, &[&data[..], &run, &["--partitions", "2", "--untie"]].concat());
    let (table, _) = ended(0, &["models", &model]);
    assert!(table.contains("wte.weight is tied: layers"), "{table}");
    let balance = ["balance", &model, "--time-limit", "0.5", "--rows", "2"];
    let (found, _) = ended(0, &[&balance[..], &["--place", "client,server,client", "--partitions", "3"]].concat());
    assert!(found.contains("--balance"), "{found}");
    let none = refused(2, &[&balance[..], &["--partitions", "2"]].concat());
    assert!(none.contains("no cut keeps layers that share a tensor on one worker"), "{none}");
    let given = refused(2, &[&balance[..], &["--cut", "after=model.transformer.h.0"]].concat());
    assert!(given.contains("--place") && given.contains("client,server,client"), "{given}");
    let mut numbers = pair;
    numbers[1].1 = &numbers[1].1 + 10;
    Tensor::write_safetensors(&numbers, &file).unwrap();
    let beyond = refused(2, &data);
    assert!(beyond.contains("expected class numbers from 0 to 39"), "{beyond}");
}

/// A GPT from PyTorch, cut in the middle, learns the text of a file byte by byte.
#[test]
fn a_language_model_from_pytorch_learns_a_text() {
    let folder = directory("exported-text");
    let model = exported().replace("digits.pt2", "gpt.pt2");
    let (file, log) = (folder.join("poem.txt"), folder.join("log"));
    std::fs::write(&file, "the quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    let data = ["train", "--model", &model, "--data", "text", "--data-dir", text(&file), "--cut", "after=h.0"];
    let run = ["--batch", "20", "--chunks", "2", "--epochs", "12", "--optimizer", "adam", "--lr", "0.01"];
    let (_, said) = ended(0, &[&data[..], &run, &["--log", text(&log)]].concat());
    let tests = command::logged(&log, "test");
    let [first, last] = [&tests[0], &tests[tests.len() - 1]].map(|test| test["test_loss"].as_f64().expect("a loss"));
    // ln 256 = 5.5 before any training; nearly nothing of this text is surprising afterwards.
    assert!(first < 5.6 && last < 1.2, "test losses from {first} to {last}");
    let shown = said.rsplit_once("perplexity ").and_then(|(_, rest)| rest.split(';').next()?.parse::<f64>().ok());
    assert!(shown.is_some_and(|shown| (shown / last.exp() - 1.0).abs() < 0.01), "{said}");
    let small = refused(2, &[&data[..7], &["--tokenizer", "nowhere.json"]].concat());
    assert!(small.contains("nowhere.json"), "{small}");
    let no_tokens = refused(2, &["train", "--model", &exported(), "--data", "text", "--data-dir", text(&file)]);
    assert!(no_tokens.contains("must take token numbers"), "{no_tokens}");
}

#[test]
fn its_layers_are_listed_and_balanced() {
    let model = exported();
    let (table, said) = ended(0, &["models", &model]);
    assert!(!said.contains("not compared"), "{said}");
    let (_, said) = ended(0, &["models", &model.replace("digits.pt2", "plain.pt2")]);
    assert!(said.contains("plain.pt2: it was not compared with the module"), "{said}");
    assert!(table.contains("8 layers") && table.contains("8×8×8"), "{table}");
    let count = |layers: &str| {
        let (json, _) = ended(0, &["models", &model, "--layers", layers, "--json"]);
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        json["layers"].as_array().expect("a list").len()
    };
    assert_eq!(count("modules"), 8);
    assert!(count("all") > 8);
    let (found, _) = ended(0, &["balance", &model, "--partitions", "2", "--time-limit", "1"]);
    assert!(found.contains("--balance"), "{found}");
}

#[test]
fn its_layers_are_profiled() {
    let (model, profile) = (exported(), directory("exported-profile").join("profile.json"));
    assert!(ended(0, &["models", &model, "--profile", "--rows", "4"]).0.contains("backward"));
    let profiled = command::json(&["models", &model, "--profile", "--rows", "4", "--json"]);
    let layers = profiled["layers"].as_array().expect("a list");
    assert_eq!(layers.len(), 8);
    for layer in layers {
        let seconds = ["forward_s", "backward_s"].map(|key| layer[key].as_f64().expect("a number"));
        assert!(seconds.iter().all(|&seconds| seconds > 0.0), "{layer}");
    }
    assert_eq!(layers[2]["parameters"], 8 * 8 * 9 + 16, "a convolution and a batch norm");
    std::fs::write(&profile, profiled.to_string()).unwrap();
    let (found, _) = ended(0, &["balance", &model, "--costs", text(&profile), "--partitions", "3"]);
    assert!(found.contains("--balance"), "{found}");
}

/// A recipe's settings belong to its model, and so do its numbers of layers.
#[test]
fn a_recipe_runs_with_a_model_from_pytorch() {
    let model = exported();
    let small =
        ["--model", &model, "--data", "digits", "--limit", "64", "--batch", "32", "--chunks", "2", "--epochs", "1"];
    for (name, more) in [("cifar10-sort8", &[][..]), ("unet-speed-pipeline-2", &["--loss", "cross-entropy"])] {
        let (said, noted) = ended(0, &[&["recipe", "run", name], &small[..], more, &["--no-evaluate"]].concat());
        let said = said + &noted;
        assert!(said.contains("digits.pt2 instead of"), "{said}");
        assert!(said.contains("Without the recipe's --set"), "{said}");
        if name == "cifar10-sort8" {
            assert!(said.contains("this run starts from those in") && said.contains("digits.pt2."), "{said}");
        }
    }
    let setting = refused(2, &[&["recipe", "run", "cifar10-sort8"], &small[..], &["--set", "classes=10"]].concat());
    assert!(setting.contains("an exported model has no settings"), "{setting}");
}

/// Replicas, and codecs, which round alike wherever the workers are.
#[test]
fn replicas_and_codecs_compute_alike_on_threads_and_processes() {
    let (folder, model) = (directory("exported-replicas"), exported());
    let run = ["--epochs", "2", "--no-evaluate", "--seed", "1", "--cut", "first=2,last=1", "--place", "a,b,a"];
    for (name, more) in [("replicas", ["--replicas", "2"]), ("codec", ["--codec", "tile:4"])] {
        let trained = ["threads", "processes"].map(|workers| {
            let [path, log] = ["safetensors", "log"].map(|end| folder.join(format!("{name}-{workers}.{end}")));
            let flags = ["--workers", workers, "--save", text(&path), "--log", text(&log)];
            train(&model, &[&run[..], &more, &flags].concat());
            let losses = command::logged(&log, "step").iter().map(|step| step["loss"].as_f64()).collect::<Vec<_>>();
            (losses, state(&path))
        });
        assert!(
            !trained[0].0.is_empty() && trained[0].0 == trained[1].0,
            "{name}: losses {:?} and {:?}",
            trained[0].0,
            trained[1].0
        );
        assert!(trained[0].1 == trained[1].1, "{name}: other bits on processes than on threads");
    }
}

/// Weights that an earlier run saved replace those of the archive.
#[test]
fn training_goes_on_from_weights_of_an_earlier_run() {
    let (folder, model) = (directory("exported-weights"), exported());
    let [first, second] = ["first", "second"].map(|name| folder.join(name));
    let weights = folder.join("first.safetensors");
    let losses = |log: &Path| -> Vec<f64> {
        command::logged(log, "step").iter().map(|step| step["loss"].as_f64().expect("a loss")).collect()
    };
    let run = ["--no-evaluate", "--seed", "1", "--log"];
    train(&model, &[&run[..], &[text(&first), "--epochs", "12", "--save", text(&weights)]].concat());
    train(&model, &[&run[..], &[text(&second), "--epochs", "1", "--weights", text(&weights)]].concat());
    let (before, after) = (losses(&first), losses(&second)[0]);
    assert!(before[11] < before[0] * 0.9, "it learns: {before:?}");
    assert!(after < before[10], "{after} after {before:?}");
}

#[test]
fn what_cannot_be_used_is_refused_with_its_flag() {
    let (folder, model) = (directory("exported-refused"), exported());
    let content = std::fs::read(&model).unwrap();
    let truncated = folder.join("truncated.pt2");
    std::fs::write(&truncated, &content[..content.len() / 2]).unwrap();
    let altered = folder.join("altered.pt2");
    let at = content.windows(7).position(|bytes| bytes == b"\"2.11.0").unwrap();
    let mut other = content.clone();
    other[at + 4] = b'9';
    std::fs::write(&altered, other).unwrap();
    // One bit of a weight, which stands within 64 bytes after the name of its file.
    let damaged = folder.join("damaged.pt2");
    let at = content.windows(8).position(|bytes| bytes == b"weight_0").unwrap();
    let mut other = content.clone();
    other[at + 128] ^= 1;
    std::fs::write(&damaged, other).unwrap();
    for (arguments, said) in [
        (vec!["--model", text(&damaged)], "weight_0` with the checksum"),
        (vec!["--model", "mlp", "--weights", text(&damaged)], "weight_0` with the checksum"),
        (vec!["--model", text(&truncated)], "the file is truncated"),
        (vec!["--model", text(&altered)], "export the model with PyTorch 2.11"),
        (vec!["--model", "nowhere.pt2"], "nowhere.pt2"),
        (vec!["--model", &model, "--set", "classes=3"], "change it in Python"),
        (vec!["--model", "mlp", "--layers", "all"], "--layers"),
        (vec!["--model", &model, "--cut", "after=8"], "the model has 0, 1, 2"),
    ] {
        let got = refused(2, &[&["train"], &arguments[..]].concat());
        assert!(got.contains(said), "{arguments:?}: {got}");
    }
}

/// The recipe of docs/models.md for a Hugging Face model: its inputs are token ids and a mask, and both cross the cuts that need them.
#[test]
fn a_model_with_two_inputs_trains_on_sentences_and_classifies_them() {
    let folder = directory("exported-sentences");
    let golden = exported().replace("pt2/digits.pt2", "");
    let (model, tokenizer) = (format!("{golden}pt2/roberta_masked.pt2"), format!("{golden}tokenizer"));
    std::fs::create_dir_all(folder.join("RTE")).unwrap();
    for (file, rows) in [("train.tsv", 2490), ("dev.tsv", 277)] {
        // The second sentence gives the answer.
        let rest = |i: usize| ["Day by day.\tentailment", "The facts.\tnot_entailment"][i % 2];
        let rows: String = (0..rows).map(|i| format!("{i}\tThe facts are {i}.\t{}\n", rest(i))).collect();
        std::fs::write(folder.join("RTE").join(file), format!("index\tsentence1\tsentence2\tlabel\n{rows}")).unwrap();
    }
    let data =
        ["--data", "rte", "--data-dir", text(&folder), "--tokenizer", &tokenizer, "--limit", "64", "--device", "cpu"];
    let run =
        ["--batch", "32", "--chunks", "3", "--epochs", "20", "--optimizer", "adam", "--lr", "0.01", "--seed", "1"];
    let saved = |name: &str| folder.join(format!("{name}.safetensors"));
    let train = |name: &str, more: &[&str]| {
        let path = saved(name);
        ended(0, &[&["train", "--model", &model], &data[..], &run, more, &["--save", text(&path)]].concat());
        state(&path)
    };
    let whole = train("whole", &["--no-evaluate"]);
    let names = "after=model.roberta.embeddings,model.roberta.encoder.layer.0";
    let cut = train("cut", &["--no-evaluate", "--cut", names, "--workers", "processes", "--recompute", "always"]);
    assert!(cut == whole, "other bits than without a cut");
    let weights = saved("cut");
    let predict = ["predict", "--weights", text(&weights), "--device", "cpu", "--json", "--tokenizer", &tokenizer];
    let pairs = ["The facts are 0. ||| Day by day.", "The facts are 17.|||The facts."];
    let (out, _) = ended(0, &[&predict[..], &pairs].concat());
    let outcomes: Vec<serde_json::Value> = serde_json::from_str(&out).expect("JSON");
    let classes: Vec<String> = outcomes.iter().map(|outcome| outcome["classes"][0]["class"].to_string()).collect();
    assert_eq!(classes, ["\"entailment\"", "\"not_entailment\""], "{out}");
}

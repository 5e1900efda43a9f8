//! The ways in which a run is not the published experiment, as sentences: the recipe's own list, and what follows from the flags and
//! the machine.

use super::Recipe;
use crate::args::TrainFlags;
use crate::compute::cores;
use crate::config::is_exported;
use crate::report::units::plural;

/// Flags that do not change the experiment, and flags with a sentence of their own.
const UNREPORTED_FLAGS: [&str; 30] = [
    "weights",
    "init-missing",
    "data-dir",
    "tokenizer",
    "limit",
    "limit-test",
    "loader-threads",
    "token-file",
    "server",
    "server-file",
    "listen",
    "labels-leave",
    "timeout",
    "peer-timeout",
    "reconnect",
    "restarts",
    "capture",
    "capture-step",
    "device",
    "threads",
    "seed",
    "epochs",
    "checkpoint",
    "checkpoint-every",
    "keep",
    "resume",
    "save",
    "log",
    "trace",
    "json",
];

/// All deviations, the hardware first. `run` has the flags of the recipe, overridden by those of this run.
pub fn deviations(recipe: &Recipe, run: &TrainFlags) -> anyhow::Result<Vec<String>> {
    let mut all = vec![hardware(recipe, run)];
    all.extend(weights(recipe, run));
    all.extend(run.tokenizer.as_ref().map(|path| format!("Tokenizer: {}.", path.display())));
    all.extend(passes(recipe, run));
    all.extend(rows(run));
    all.extend(changed(&recipe.run, run)?);
    all.extend(recipe.deviations.iter().cloned());
    Ok(all)
}

fn hardware(recipe: &Recipe, run: &TrainFlags) -> String {
    let cores = cores();
    let devices: Vec<String> = run.devices().iter().map(|device| device.resolved().to_string()).collect();
    let compute = match &devices[..] {
        [device] => format!("every worker computes on {device}"),
        devices => format!("workers compute on {} in turn", devices.join(", ")),
    };
    let workers = match run.workers.as_deref().unwrap_or("threads") {
        "threads" => "workers are threads of one process on one machine".to_owned(),
        "processes" => "workers are processes on one machine".to_owned(),
        addresses => format!("workers are this process and {addresses}"),
    };
    format!(
        "Hardware: published on {}; this run on {}, {compute} with {}, {workers}.",
        recipe.published.hardware,
        plural(cores, "core"),
        plural(run.threads.unwrap_or(1), "libtorch thread")
    )
}

/// The initial weights of both runs, where the published one presumably did not start from random weights.
pub fn weights(recipe: &Recipe, run: &TrainFlags) -> Option<String> {
    let from = recipe.starts_from.as_ref()?;
    Some(match (&run.weights, &run.model) {
        (None, Some(model)) if is_exported(model) => {
            format!("Weights: published with {from}; this run starts from those in {model}.")
        }
        (None, _) => format!(
            "Weights: published with {from}; this run starts from random weights, because --weights is not given."
        ),
        (Some(path), _) => format!("Weights: published with {from}; this run starts from {}.", path.display()),
    })
}

fn passes(recipe: &Recipe, run: &TrainFlags) -> Option<String> {
    let (planned, wanted) = (recipe.run.epochs?, run.epochs?);
    (planned != wanted).then(|| format!("Epochs: {wanted} instead of the recipe's {planned}."))
}

fn rows(run: &TrainFlags) -> Option<String> {
    let test = run.limit_test.or(run.limit);
    match (run.limit, test) {
        (Some(train), Some(test)) => Some(format!("Data: at most {train} training rows and {test} test rows.")),
        (None, Some(test)) => Some(format!("Data: at most {test} test rows.")),
        _ => None,
    }
}

/// A sentence for each flag that differs from the recipe.
fn changed(recipe: &TrainFlags, run: &TrainFlags) -> anyhow::Result<Vec<String>> {
    let (before, after) = (toml::Table::try_from(recipe)?, toml::Table::try_from(run)?);
    let text = |value: &toml::Value| match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let mut all = Vec::new();
    for (name, value) in &after {
        let old = before.get(name);
        if UNREPORTED_FLAGS.contains(&name.as_str()) || old == Some(value) {
            continue;
        }
        all.push(match (name.as_str(), old) {
            ("set", _) => {
                let added: Vec<&str> =
                    run.set.iter().filter(|setting| !recipe.set.contains(setting)).map(String::as_str).collect();
                format!("Model settings changed: {}.", added.join(", "))
            }
            (_, Some(old)) => format!("--{name} {} instead of {}.", text(value), text(old)),
            (_, None) => format!("--{name} {}, which is not in the recipe.", text(value)),
        });
    }
    for (name, value) in before.iter().filter(|(name, _)| !after.contains_key(*name)) {
        all.push(format!("Without the recipe's --{name} {}.", text(value)));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{all, find};

    fn said(name: &str, given: TrainFlags) -> String {
        let recipe = find(name).unwrap();
        let run = recipe.with(&given).unwrap();
        deviations(&recipe, &run).unwrap().join("\n")
    }

    #[test]
    fn an_unchanged_recipe_deviates_by_hardware_weights_and_its_own_list() {
        let said = said("cifar10-sort8", TrainFlags::default());
        assert!(
            said.starts_with("Hardware: published on client and server, GPU model not stated; this run on "),
            "{said}"
        );
        assert!(said.contains("workers are processes on one machine"), "{said}");
        assert!(
            said.contains(
                "Weights: published with MobileNetV2's ImageNet weights (as in the author's public code); this run starts from random weights"
            ),
            "{said}"
        );
        assert!(said.contains("Learning rate: not stated; we use 0.01"), "{said}");
        assert!(!said.contains("instead of") && !said.contains(" rows"), "{said}");
    }

    /// Recipes once presented guesses as published: no table names weights, and none has the word "epoch". The code of the author
    /// has both.
    #[test]
    fn guesses_are_marked_as_not_stated() {
        for recipe in all().unwrap() {
            let said = deviations(&recipe, &recipe.run).unwrap();
            if let Some(from) = &recipe.starts_from {
                assert!(from.ends_with("(as in the author's public code)"), "{}", recipe.name);
            }
            let marked = |sentence: &String| {
                let sentence = sentence.to_lowercase();
                sentence.contains(": not stated; ") && (sentence.contains("epochs") || sentence.contains("steps"))
            };
            assert!(said.iter().any(marked), "{}: where its number of epochs comes from: {said:#?}", recipe.name);
        }
    }

    #[test]
    fn every_changed_flag_is_a_deviation() {
        let said = said(
            "cifar10-sort8",
            TrainFlags {
                batch: Some(32),
                epochs: Some(1),
                limit: Some(512),
                limit_test: Some(64),
                set: vec!["image=32".to_owned()],
                balance: Some("2,16,2".to_owned()),
                weights: Some("mine.safetensors".into()),
                steps: Some(3),
                threads: Some(2),
                ..TrainFlags::default()
            },
        );
        for part in [
            "--batch 32 instead of 256.",
            "Epochs: 1 instead of the recipe's 40.",
            "Data: at most 512 training rows and 64 test rows.",
            "Model settings changed: image=32.",
            "Without the recipe's --cut first=1,last=1.",
            "Without the recipe's --place client,server,client.",
            "--balance 2,16,2, which is not in the recipe.",
            "this run starts from mine.safetensors.",
            "--steps 3, which is not in the recipe.",
            "with 2 libtorch threads",
        ] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
    }
}

//! In which ways a run here is not the experiment of the seed, in words: the recipe's own list, and what follows from the
//! flags and the machine.

use super::Recipe;
use crate::args::TrainFlags;

/// Flags that change where things are or how the run is watched, and those that have a sentence of their own.
const SILENT: [&str; 23] = [
    "weights",
    "init-missing",
    "data-dir",
    "tokenizer",
    "limit",
    "limit-test",
    "loader-threads",
    "token-file",
    "timeout",
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

/// What differs, the machine first. `run` is what the recipe became with the flags of this run.
pub fn differences(recipe: &Recipe, run: &TrainFlags) -> anyhow::Result<Vec<String>> {
    let mut all = vec![hardware(recipe, run)];
    all.extend(weights(recipe, run));
    all.extend(run.tokenizer.as_ref().map(|path| format!("Tokenizer: that of {}.", path.display())));
    all.extend(passes(recipe, run));
    all.extend(rows(run));
    all.extend(changed(&recipe.run, run)?);
    all.extend(recipe.differs.iter().cloned());
    Ok(all)
}

fn hardware(recipe: &Recipe, run: &TrainFlags) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let devices = run.device.clone().unwrap_or_default();
    let devices: Vec<String> = devices.iter().map(|device| device.found().to_string()).collect();
    let compute = match &devices[..] {
        [device] => format!("every worker computes on {device}"),
        devices => format!("workers compute on {} in turn", devices.join(", ")),
    };
    let workers = match run.workers.as_deref().unwrap_or("threads") {
        "threads" => "workers are threads of one process on one machine".to_owned(),
        "processes" => "workers are processes on one machine".to_owned(),
        addresses => format!("workers are here and at {addresses}"),
    };
    format!(
        "Hardware: there {}; here {cores} core(s), {compute} with {} libtorch thread(s), {workers}.",
        recipe.seed.hardware,
        run.threads.unwrap_or(1)
    )
}

/// What both started from, where the seed presumably did not start at random.
pub fn weights(recipe: &Recipe, run: &TrainFlags) -> Option<String> {
    let from = recipe.starts_from.as_ref()?;
    Some(match &run.weights {
        None => format!("Weights: there {from}; here random ones, because --weights is not given."),
        Some(path) => format!("Weights: there {from}; here those of {}.", path.display()),
    })
}

fn passes(recipe: &Recipe, run: &TrainFlags) -> Option<String> {
    let (planned, wanted) = (recipe.run.epochs?, run.epochs?);
    (planned != wanted).then(|| format!("Epochs: {wanted} instead of the recipe's {planned}."))
}

fn rows(run: &TrainFlags) -> Option<String> {
    let test = run.limit_test.or(run.limit);
    match (run.limit, test) {
        (Some(train), Some(test)) => {
            Some(format!("Data: {train} rows to learn from and {test} to test with, at most."))
        }
        (None, Some(test)) => Some(format!("Data: {test} rows to test with, at most.")),
        _ => None,
    }
}

/// A sentence for each flag that is not as in the recipe.
fn changed(recipe: &TrainFlags, run: &TrainFlags) -> anyhow::Result<Vec<String>> {
    let (before, after) = (toml::Table::try_from(recipe)?, toml::Table::try_from(run)?);
    let text = |value: &toml::Value| match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let mut all = Vec::new();
    for (name, value) in &after {
        let old = before.get(name);
        if SILENT.contains(&name.as_str()) || old == Some(value) {
            continue;
        }
        all.push(match (name.as_str(), old) {
            ("set", _) => {
                let added: Vec<&str> =
                    run.set.iter().filter(|setting| !recipe.set.contains(setting)).map(String::as_str).collect();
                format!("Settings of the model changed: {}.", added.join(", "))
            }
            (_, Some(old)) => format!("--{name} {} instead of {}.", text(value), text(old)),
            (_, None) => format!("--{name} {}, which the recipe does not have.", text(value)),
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
        differences(&recipe, &run).unwrap().join("\n")
    }

    #[test]
    fn a_run_as_written_differs_by_machine_weights_and_what_the_recipe_says() {
        let said = said("cifar10-sort8", TrainFlags::default());
        assert!(said.starts_with("Hardware: there client and server, GPUs whose kind is not said; here "), "{said}");
        assert!(said.contains("workers are processes on one machine"), "{said}");
        assert!(
            said.contains(
                "Weights: there presumably MobileNetV2's ImageNet weights (the seed does not say); here random ones"
            ),
            "{said}"
        );
        assert!(said.contains("The learning rate is not said: 0.02"), "{said}");
        assert!(!said.contains("instead of") && !said.contains("rows to"), "{said}");
    }

    /// Recipes once told guesses as if the tables had them: no seed names weights, and none has the word "epoch".
    #[test]
    fn what_no_seed_says_is_not_told_as_if_it_did() {
        for recipe in all().unwrap() {
            let said = differences(&recipe, &recipe.run).unwrap();
            if let Some(from) = &recipe.starts_from {
                assert!(
                    from.starts_with("presumably ") && from.ends_with("(the seed does not say)"),
                    "{}",
                    recipe.name
                );
            }
            let told = |sentence: &String| {
                let sentence = sentence.to_lowercase();
                sentence.contains("not said: ") && (sentence.contains("epochs") || sentence.contains("steps"))
            };
            assert!(said.iter().any(told), "{}: where its number of epochs comes from: {said:#?}", recipe.name);
        }
    }

    #[test]
    fn whatever_is_changed_is_told() {
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
            "Data: 512 rows to learn from and 64 to test with, at most.",
            "Settings of the model changed: image=32.",
            "Without the recipe's --cut first=1,last=1.",
            "Without the recipe's --place client,server,client.",
            "--balance 2,16,2, which the recipe does not have.",
            "here those of mine.safetensors.",
            "--steps 3, which the recipe does not have.",
            "with 2 libtorch thread(s)",
        ] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
    }
}

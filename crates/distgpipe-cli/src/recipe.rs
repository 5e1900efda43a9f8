//! Published experiments to reproduce: each row of the published tables is a file in `recipes/`, and all files are built into the
//! binary.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`published`] | the published row and its figures |
//! | [`comparison`] | the figures of a run, compared with the published ones |
//! | [`deviations`] | the ways in which a run is not the published experiment |
//! | [`tables`] | the published tables, whose rows name recipes |
//! | [`requirements`] | the GPUs, data and weights that a recipe needs |
//! | [`table_run`] | runs all rows of a table |
//! | [`row_process`] | runs one row in a process of its own |
//! | [`simulated`] | predicts rows for which there are too few GPUs |
//! | [`measured`] | the files with our figures, which it writes |
//! | [`table_view`] | a table with our figures beside the published ones |
//! | [`readme`] | the tables of Markdown files, made from those files |
//!
//! A recipe describes its run with the flags of `distgpipe train`, which are parsed and validated by the same code.

pub mod comparison;
pub mod deviations;
pub mod measured;
pub mod published;
pub mod readme;
pub mod requirements;
mod row_process;
mod simulated;
pub mod table_run;
pub mod table_view;
pub mod tables;

use crate::args::{from_toml, TrainFlags};
use crate::exit::usage;
use crate::report::{nearest, unknown};
use anyhow::Context;
use published::PublishedRow;
pub use row_process::end_with_parent;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Name and text of every recipe, sorted by name.
const TEXTS: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// How an experiment distributes its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Workers run partitions of the model.
    Pipeline,
    /// Replicas run the whole model, each on a part of the batch.
    DataParallel,
}

impl Method {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Method::Pipeline => "pipeline",
            Method::DataParallel => "data-parallel",
        }
    }
}

/// The content of a file in `recipes/`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RecipeFile {
    title: String,
    starts_from: Option<String>,
    #[serde(default)]
    deviations: Vec<String>,
    published: PublishedRow,
    run: toml::Table,
}

/// A published experiment, and the run that reproduces it.
#[derive(Clone, Debug, Serialize)]
pub struct Recipe {
    /// The name of the file, without its extension.
    pub name: String,
    /// What the experiment is.
    pub title: String,
    /// The names of the published tables that have the row.
    pub tables: Vec<String>,
    /// How the work is distributed.
    pub method: Method,
    /// The weights that the published run started from, and where that is known from; the user has to provide them.
    pub starts_from: Option<String>,
    /// How the run deviates from the published experiment on any machine.
    pub deviations: Vec<String>,
    pub published: PublishedRow,
    /// The run, as flags of `distgpipe train`.
    pub run: TrainFlags,
}

impl Recipe {
    /// Parses the text of a recipe file.
    fn parse(name: &str, text: &str) -> anyhow::Result<Self> {
        let file = PathBuf::from(format!("recipes/{name}.toml"));
        let written: RecipeFile = toml::from_str(text).with_context(|| file.display().to_string())?;
        let run = from_toml(&toml::to_string(&written.run)?, &file)?;
        Ok(Recipe {
            name: name.to_owned(),
            title: written.title,
            tables: tables::with_recipe(name)?.map(|table| table.name.clone()).collect(),
            starts_from: written.starts_from,
            deviations: written.deviations,
            published: written.published,
            method: if run.replicas.is_some() { Method::DataParallel } else { Method::Pipeline },
            run,
        })
    }

    /// The flags of the recipe, overridden by the given ones.
    pub fn with(&self, given: &TrainFlags) -> anyhow::Result<TrainFlags> {
        let mut flags = self.run.clone().overlaid(given)?;
        if flags.weights.is_some() && self.starts_from.is_some() && flags.init_missing.is_none() {
            // Every such experiment trains a new classifier.
            flags.init_missing = Some(true);
        }
        Ok(flags)
    }
}

impl Recipe {
    /// Whether every word is part of the name, the title, the row, or the name, title or document of a table that has it.
    pub fn matches(&self, words: &[String]) -> anyhow::Result<bool> {
        let mut text = format!("{} {} {}", self.name, self.title, self.published.row);
        for table in tables::with_recipe(&self.name)? {
            text += &format!(" {} {} {}", table.name, table.title, table.document);
        }
        let text = text.to_lowercase();
        Ok(words.iter().all(|word| text.contains(&word.to_lowercase())))
    }
}

/// All recipes, sorted by name.
pub fn all() -> anyhow::Result<Vec<Recipe>> {
    TEXTS.iter().map(|(name, text)| Recipe::parse(name, text)).collect()
}

/// The recipe with this name.
pub fn find(name: &str) -> anyhow::Result<Recipe> {
    if let Some((name, text)) = TEXTS.iter().find(|(known, _)| *known == name) {
        return Recipe::parse(name, text);
    }
    let unknown = unknown("recipe", name, nearest(name, TEXTS.iter().map(|(known, _)| *known)));
    Err(usage(format!("{unknown} `distgpipe recipe list` lists all {}", TEXTS.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::DataName;
    use crate::config::RunConfig;
    use distgpipe::engine::Device;
    use serde_json::Value;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn directory() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes")
    }

    fn names() -> BTreeSet<String> {
        TEXTS.iter().map(|(name, _)| (*name).to_owned()).collect()
    }

    #[test]
    fn every_recipe_file_is_in_the_binary_unchanged() {
        let mut files = BTreeSet::new();
        for entry in std::fs::read_dir(directory()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "toml") {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                let text = TEXTS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text);
                assert_eq!(text, Some(&std::fs::read_to_string(&path).unwrap()[..]), "{name}");
                files.insert(name);
            }
        }
        assert_eq!(files, names());
    }

    #[test]
    fn the_readme_links_every_recipe_and_nothing_else() {
        let text = std::fs::read_to_string(directory().join("README.md")).unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(".toml)"));
        // The text before the extension is the name, unless the link leads elsewhere.
        let linked: BTreeSet<String> =
            links.map(|(name, _)| name.to_owned()).filter(|name| !name.contains([')', '/'])).collect();
        assert_eq!(linked, names());
    }

    /// Validated with synthetic rows instead of the data set, as many as a batch needs.
    #[test]
    fn every_recipe_is_a_valid_run() {
        for recipe in all().unwrap() {
            let name = &recipe.name;
            let run = TrainFlags {
                data: Some(DataName::Synthetic),
                samples: recipe.run.batch,
                normalise: None,
                device: Some(Device::Cpu.into()),
                no_evaluate: Some(true),
                ..recipe.run.clone()
            };
            let config = RunConfig::new(&run).unwrap_or_else(|e| panic!("{name}: {e:#}"));
            let output = config.model.summary().unwrap().pop().unwrap().output;
            let classes = match recipe.run.data {
                Some(DataName::Cifar10) => Some(10),
                Some(DataName::Cifar100) => Some(100),
                Some(DataName::Food101) => Some(101),
                Some(DataName::Rte | DataName::Cola) => Some(2),
                Some(DataName::ImageFolder) => Some(1000),
                _ => None,
            };
            if let Some(classes) = classes {
                assert_eq!(output[0].dims, [classes], "{name}");
            }
            for given in [run.batch.is_some(), run.epochs.is_some(), run.lr.is_some(), run.chunks.is_some()] {
                assert!(
                    given,
                    "{name}: batch, epochs, lr and chunks belong to an experiment and are not left to defaults"
                );
            }
            assert!(run.weights.is_none() && run.data_dir.is_none() && run.tokenizer.is_none(), "{name}: paths");
        }
    }

    /// Six of the recipes with the author's schedule and normalisation did not say so.
    #[test]
    fn recipes_with_the_same_settings_deviate_alike() {
        let (mut schedules, mut colours) = (0, 0);
        for name in names() {
            let recipe = find(&name).unwrap();
            let says = |part: &str| recipe.deviations.iter().any(|sentence| sentence.contains(part));
            if !matches!(recipe.run.data, Some(DataName::Cifar10 | DataName::Cifar100)) {
                continue;
            }
            if recipe.run.lr_warm_up.is_some() {
                assert!(says("changes the learning rate once per epoch"), "{name}");
                schedules += 1;
            }
            if recipe.run.normalise.is_some() {
                assert!(says("Normalisation: not stated"), "{name}");
                colours += 1;
            }
        }
        assert!(schedules > 20 && colours > 20, "{schedules} {colours}");
    }

    /// What the published tables leave open, as the author's public code has it. Several of these were wrong once.
    #[test]
    fn settings_that_were_not_published_are_those_of_the_authors_code() {
        let (mut cuts, mut rates, mut scores) = (0, 0, 0);
        for recipe in all().unwrap() {
            let (name, run) = (&recipe.name, serde_json::to_value(&recipe.run).unwrap());
            let is = |key: &str, value: Value| assert_eq!(run[key], value, "{name}: {key}");
            let data = recipe.run.data.unwrap();
            let (images, sentences) = (
                matches!(data, DataName::Cifar10 | DataName::Cifar100 | DataName::Food101),
                matches!(data, DataName::Rte | DataName::Cola),
            );
            if !images && !sentences {
                continue;
            }
            let pipeline = recipe.method == Method::Pipeline;
            let four_gpus = requirements::devices(&recipe) == 4;
            let weights = match &run["model"] {
                model if model == "roberta" => "RoBERTa-base's weights",
                model if model == "vgg13" => "VGG-13's ImageNet weights",
                _ => "MobileNetV2's ImageNet weights",
            };
            let starts_from = recipe.starts_from.as_ref().unwrap_or_else(|| panic!("{name}: random weights"));
            assert_eq!(starts_from, &format!("{weights} (as in the author's public code)"), "{name}");
            scores += 1;
            if sentences {
                is("epochs", 20.into());
                is("lr-decay", "polynomial".into());
                is("lr-power", 1.0.into());
                is("lr-warm-up", if pipeline { "10%" } else { "500" }.into());
                if pipeline {
                    is("optimizer", "adamw".into());
                    is("weight-decay", 0.0.into());
                    // Embeddings and layer 0, and layer 11 and the classifier, with the client.
                    match four_gpus {
                        true => is("balance", "3,8,8,4,3".into()),
                        false => is("cut", "roberta-1".into()),
                    }
                    cuts += 1;
                }
                continue;
            }
            is("epochs", 40.into());
            let colours = match data {
                DataName::Cifar10 => "0.4914,0.4822,0.4465/0.2023,0.1994,0.201".into(),
                DataName::Cifar100 => "0.5071,0.4867,0.4408/0.2675,0.2565,0.2761".into(),
                _ => Value::Null,
            };
            is("normalise", colours);
            if data == DataName::Cifar10 {
                assert_eq!(run["set"][0], "classes=10", "{name}");
            }
            is("lr-warm-up", "4epochs".into());
            is("lr-decay", "cosine".into());
            if pipeline {
                is("optimizer", "sgd".into());
                is("momentum", 0.0.into());
                rates += 1;
            }
            if pipeline && four_gpus {
                is("balance", "1,2,4,12,1".into());
                cuts += 1;
            }
            // The ablation study.
            if recipe.run.codec.is_some() {
                is("lr", 0.01.into());
            }
        }
        assert!(cuts > 15 && rates > 20 && scores > 50, "{cuts} {rates} {scores}");
    }

    #[test]
    fn rows_refer_to_rows_that_exist() {
        let recipes = all().unwrap();
        for recipe in &recipes {
            let name = &recipe.name;
            let other = |other: &Option<String>| {
                other.as_ref().map(|other| recipes.iter().find(|r| r.name == *other).expect("a recipe's name"))
            };
            let parallel = recipe.published.row.to_lowercase().replace(' ', "").contains("dataparallel");
            assert_eq!(recipe.method == Method::DataParallel, parallel, "{name}");
            if let Some(first) = other(&recipe.published.speed_up_to) {
                assert_eq!(first.published.speed_up, Some(1.0), "{name}");
                // Published figures are rounded to two or three digits.
                let ratio = recipe.published.throughput_per_s.unwrap() / first.published.throughput_per_s.unwrap();
                let off = (ratio / recipe.published.speed_up.unwrap() - 1.0).abs();
                assert!(off < 0.01 || name == "cifar10-mobilenet-pipeline-2-f4l3", "{name}: {ratio}");
            }
        }
    }

    #[test]
    fn a_wrong_key_is_named_with_its_file() {
        let parse = |key: &str| {
            let text = format!("title=''\n[published]\nrow=''\nhardware=''\n[run]\n{key}=1");
            format!("{:#}", Recipe::parse("x", &text).map(|recipe| recipe.name).unwrap_err())
        };
        assert!(
            parse("bach").contains("recipes/x.toml: unknown key `bach`: did you mean `batch`?"),
            "{}",
            parse("bach")
        );
        let text = TEXTS[0].1.replace("[published]", "[published]\nacuracy = '1'");
        let error = format!("{:#}", Recipe::parse("x", &text).map(|recipe| recipe.name).unwrap_err());
        assert!(error.contains("recipes/x.toml") && error.contains("acuracy"), "{error}");
    }

    #[test]
    fn given_flags_override_the_recipe() {
        let recipe = find("unet-speed-pipeline-2").unwrap();
        let given = TrainFlags { batch: Some(8), set: vec!["image=32".to_owned()], ..TrainFlags::default() };
        let flags = recipe.with(&given).unwrap();
        assert_eq!((flags.batch, flags.chunks, flags.balance.as_deref()), (Some(8), Some(32), Some("104,137")));
        assert_eq!(flags.set.last().map(String::as_str), Some("image=32"));
        let flags = recipe.with(&TrainFlags { partitions: Some(3), ..given.clone() }).unwrap();
        assert_eq!((flags.partitions, flags.balance), (Some(3), None));
        let flags = recipe.with(&TrainFlags { data: Some(DataName::Digits), ..given }).unwrap();
        assert_eq!(flags.samples, None);
        // With pretrained weights, the classifier of the new task is initialized.
        let given = TrainFlags { weights: Some("w".into()), ..TrainFlags::default() };
        assert_eq!(find("cifar10-sort8").unwrap().with(&given).unwrap().init_missing, Some(true));
        assert_eq!(recipe.with(&given).unwrap().init_missing, None);
    }
}

//! The experiments that the project was asked to reproduce: each row of the seeds' tables is a file in `recipes/`, and all of
//! them are in the binary.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`seed`] | the row as the seed has it |
//! | [`beside`] | what a run here reached, metric by metric beside it |
//! | [`differs`] | in which ways the two are not the same experiment |
//!
//! What a recipe runs is written with the flags of `distgpipe train`, so that one reader and one set of checks serve both.

#[path = "recipe/comparison.rs"]
pub mod beside;
#[path = "recipe/deviations.rs"]
pub mod differs;
#[path = "recipe/published.rs"]
pub mod seed;

use crate::args::{from_toml, TrainFlags};
use crate::exit::usage;
use anyhow::Context;
use seed::Seed;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Name and text of every recipe, by name.
const TEXTS: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// How an experiment spreads its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The model is cut.
    Pipeline,
    /// The batch is cut: every replica has the whole model.
    DataParallel,
}

impl Method {
    /// For tables.
    pub fn name(self) -> &'static str {
        match self {
            Method::Pipeline => "pipeline",
            Method::DataParallel => "data-parallel",
        }
    }
}

/// A file of `recipes/`, as it is written.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Written {
    title: String,
    table: String,
    starts_from: Option<String>,
    #[serde(default)]
    differs: Vec<String>,
    seed: Seed,
    run: toml::Table,
}

/// An experiment.
#[derive(Clone, Debug, Serialize)]
pub struct Recipe {
    /// The file's name without its ending.
    pub name: String,
    /// What it is.
    pub title: String,
    /// Which of the seeds' tables the row is in.
    pub table: String,
    /// How the work is spread.
    pub method: Method,
    /// The weights that the run of the row presumably started from, in words; the user has to bring them.
    pub starts_from: Option<String>,
    /// What is not as in the seed, whoever runs it.
    pub differs: Vec<String>,
    /// The row.
    pub seed: Seed,
    /// The experiment as flags of `distgpipe train`.
    pub run: TrainFlags,
}

impl Recipe {
    /// Reads the text of a recipe's file.
    fn parse(name: &str, text: &str) -> anyhow::Result<Self> {
        let file = PathBuf::from(format!("recipes/{name}.toml"));
        let written: Written = toml::from_str(text).with_context(|| file.display().to_string())?;
        let run = from_toml(&toml::to_string(&written.run)?, &file)?;
        Ok(Recipe {
            name: name.to_owned(),
            title: written.title,
            table: written.table,
            starts_from: written.starts_from,
            differs: written.differs,
            seed: written.seed,
            method: if run.replicas.is_some() { Method::DataParallel } else { Method::Pipeline },
            run,
        })
    }

    /// What to run when somebody gives flags of his own, which win.
    pub fn with(&self, given: &TrainFlags) -> anyhow::Result<TrainFlags> {
        let mut flags = self.run.clone().overlaid(given)?;
        if flags.weights.is_some() && self.starts_from.is_some() && flags.init_missing.is_none() {
            // The classifier is a new one in each of them.
            flags.init_missing = Some(true);
        }
        Ok(flags)
    }
}

/// All recipes, by name.
pub fn all() -> anyhow::Result<Vec<Recipe>> {
    TEXTS.iter().map(|(name, text)| Recipe::parse(name, text)).collect()
}

/// The recipe of this name.
pub fn find(name: &str) -> anyhow::Result<Recipe> {
    if let Some((name, text)) = TEXTS.iter().find(|(known, _)| *known == name) {
        return Recipe::parse(name, text);
    }
    let likeness = |known: &str| strsim::jaro_winkler(known, name);
    let nearest = TEXTS.iter().map(|(known, _)| *known).max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    Err(usage(format!(
        "unknown recipe `{name}`: the nearest is `{}`; `distgpipe recipe list` has all {}",
        nearest.unwrap_or_default(),
        TEXTS.len()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::DataName;
    use crate::config::RunConfig;
    use distgpipe::engine::Device;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn directory() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes")
    }

    fn names() -> BTreeSet<String> {
        TEXTS.iter().map(|(name, _)| (*name).to_owned()).collect()
    }

    #[test]
    fn every_file_is_in_the_binary_as_it_is() {
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
        // What stands before the ending is the name, unless the link was to something else.
        let linked: BTreeSet<String> =
            links.map(|(name, _)| name.to_owned()).filter(|name| !name.contains(')')).collect();
        assert_eq!(linked, names());
    }

    /// All that can be judged without the data: made-up rows take its place, as many as a batch needs.
    #[test]
    fn every_recipe_makes_a_run_that_could_start() {
        for recipe in all().unwrap() {
            let name = &recipe.name;
            let run = TrainFlags {
                data: Some(DataName::Synthetic),
                samples: recipe.run.batch,
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
                assert!(given, "{name}: batch, epochs, lr and chunks are part of an experiment, not left to defaults");
            }
            assert!(run.weights.is_none() && run.data_dir.is_none() && run.tokenizer.is_none(), "{name}: paths");
        }
    }

    #[test]
    fn rows_name_other_rows_that_exist() {
        let recipes = all().unwrap();
        for recipe in &recipes {
            let name = &recipe.name;
            let other = |other: &Option<String>| {
                other.as_ref().map(|other| recipes.iter().find(|r| r.name == *other).expect("a recipe's name"))
            };
            let told = recipe.seed.row.to_lowercase().replace(' ', "").contains("dataparallel");
            assert_eq!(recipe.method == Method::DataParallel, told, "{name}");
            if let Some(first) = other(&recipe.seed.speed_up_to) {
                assert_eq!(first.seed.speed_up, Some(1.0), "{name}");
                // The seeds round to two or three figures.
                let ratio = recipe.seed.throughput_per_s.unwrap() / first.seed.throughput_per_s.unwrap();
                let off = (ratio / recipe.seed.speed_up.unwrap() - 1.0).abs();
                assert!(off < 0.01 || name == "cifar10-mobilenet-pipeline-2-f4l3", "{name}: {ratio}");
            }
        }
    }

    #[test]
    fn a_wrong_key_is_named_with_its_file() {
        let parse = |key: &str| {
            let text = format!("title=''\ntable=''\n[seed]\nrow=''\nhardware=''\n[run]\n{key}=1");
            format!("{:#}", Recipe::parse("x", &text).map(|recipe| recipe.name).unwrap_err())
        };
        assert!(
            parse("bach").contains("recipes/x.toml: unknown key `bach`: the nearest is `batch`"),
            "{}",
            parse("bach")
        );
        let text = TEXTS[0].1.replace("[seed]", "[seed]\nacuracy = '1'");
        let error = format!("{:#}", Recipe::parse("x", &text).map(|recipe| recipe.name).unwrap_err());
        assert!(error.contains("recipes/x.toml") && error.contains("acuracy"), "{error}");
    }

    #[test]
    fn given_flags_win_and_say_things_once() {
        let recipe = find("unet-speed-pipeline-2").unwrap();
        let given = TrainFlags { batch: Some(8), set: vec!["image=32".to_owned()], ..TrainFlags::default() };
        let flags = recipe.with(&given).unwrap();
        assert_eq!((flags.batch, flags.chunks, flags.balance.as_deref()), (Some(8), Some(32), Some("104,137")));
        assert_eq!(flags.set.last().map(String::as_str), Some("image=32"));
        let flags = recipe.with(&TrainFlags { partitions: Some(3), ..given.clone() }).unwrap();
        assert_eq!((flags.partitions, flags.balance), (Some(3), None));
        let flags = recipe.with(&TrainFlags { data: Some(DataName::Digits), ..given }).unwrap();
        assert_eq!(flags.samples, None);
        // With weights, the classifier of a new task is a new one.
        let given = TrainFlags { weights: Some("w".into()), ..TrainFlags::default() };
        assert_eq!(find("cifar10-sort8").unwrap().with(&given).unwrap().init_missing, Some(true));
        assert_eq!(recipe.with(&given).unwrap().init_missing, None);
    }
}

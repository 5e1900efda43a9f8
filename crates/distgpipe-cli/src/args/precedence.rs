//! How the flags of one source override those of another: the command line over a TOML file, both over a recipe or over the
//! flags of the checkpoint to resume from.

use super::TrainFlags;
use crate::config::is_exported;
use crate::exit::usage;

/// Flags that exclude others. Where the overriding source gives one of the first list, the flags of the second list are dropped
/// from the source below, so that users get no error about flags that they did not give.
const EXCLUDED_FLAGS: [(&[&str], &[&str]); 10] = [
    (&["partitions", "balance", "cut", "auto-balance"], &CUTS),
    (&["plan"], &["place", "chunks", "schedule", "recompute"]),
    (&["chunks", "schedule", "recompute"], &["plan"]),
    (&["codec"], &["sortquant", "quant", "split"]),
    (&["sortquant"], &["codec"]),
    (&["lr-decay"], &["lr-power", "lr-steps", "lr-factor"]),
    (&["evaluate-every"], &["no-evaluate"]),
    (&["no-evaluate"], &["evaluate-every", "patience", "save-best"]),
    (&["workers"], &["server", "server-file", "listen", "labels-leave"]),
    (&["server", "server-file"], &["workers", "token-file", "server", "server-file"]),
];

/// The flags that describe or depend on one cut of the model.
const CUTS: [&str; 11] = [
    "partitions",
    "balance",
    "cut",
    "auto-balance",
    "plan",
    "place",
    "balance-by",
    "memory-limit",
    "link-rate",
    "link-latency",
    "codec-link",
];

/// The same, where the overriding source changes the flag's value.
const EXCLUDED_BY_CHANGE: [(&str, &[&str]); 3] = [
    ("optimizer", &["momentum", "nesterov", "lr", "weight-decay"]),
    ("data", &["data-dir", "samples", "normalise"]),
    // Numbers of layers in each partition do not fit another division into layers.
    ("layers", &["balance"]),
];

impl TrainFlags {
    /// These flags, overridden by those that `other` gives. Model settings are merged by key, unless `other` names an exported
    /// model instead.
    pub fn overlaid(self, other: &Self) -> anyhow::Result<Self> {
        let exported = other.model.as_deref().is_some_and(is_exported) && other.model != self.model;
        if exported {
            return self
                .without_model()
                .overlaid(&TrainFlags { model: None, ..other.clone() })
                .map(|flags| TrainFlags { model: other.model.clone(), ..flags });
        }
        let key = |setting: &str| setting.split('=').next().unwrap_or_default().trim().to_owned();
        let changed: Vec<String> = other.set.iter().map(|setting| key(setting)).collect();
        let mut set: Vec<String> =
            self.set.iter().filter(|setting| !changed.contains(&key(setting))).cloned().collect();
        set.extend(other.set.iter().cloned());
        let (mut table, overriding) = (self.table()?, other.table()?);
        for (given, excluded) in EXCLUDED_FLAGS {
            if given.iter().any(|name| overriding.contains_key(*name)) {
                table.retain(|name, _| !excluded.contains(&name));
            }
        }
        for (given, excluded) in EXCLUDED_BY_CHANGE {
            if overriding.contains_key(given) && overriding.get(given) != table.get(given) {
                table.retain(|name, _| !excluded.contains(&name));
            }
        }
        table.extend(overriding);
        let mut flags: TrainFlags = table.try_into()?;
        flags.set = set;
        Ok(flags)
    }

    /// These flags without what belongs to their model: its settings, which an exported model does not have, and its numbers of
    /// layers. The number of partitions stays.
    fn without_model(mut self) -> Self {
        let partitions = self.balance.take().map(|balance| balance.split(',').count());
        self.partitions = self.partitions.or(partitions);
        (self.set, self.model, self.plan) = (Vec::new(), None, None);
        self
    }

    /// These flags as TOML, which is text, and whose numbers are smaller than those of some flags.
    fn table(&self) -> anyhow::Result<toml::Table> {
        for (flag, path) in self.clone().paths_mut() {
            if let Some(path) = path.as_deref().filter(|path| path.to_str().is_none()) {
                return Err(usage(format!("{flag} {}: expected a path in UTF-8: rename it", path.display())));
            }
        }
        let values = serde_json::to_value(self)?;
        let numbers =
            values.as_object().into_iter().flatten().filter_map(|(name, value)| Some((name, value.as_u64()?)));
        for (name, number) in numbers {
            if i64::try_from(number).is_err() {
                return Err(usage(format!("--{name} {number}: expected at most {}", i64::MAX)));
            }
        }
        Ok(toml::Table::try_from(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::from_toml;
    use distgpipe_core::schedule::Schedule;
    use std::path::Path;

    fn parse(text: &str) -> anyhow::Result<TrainFlags> {
        from_toml(text, Path::new("run.toml"))
    }

    #[test]
    fn a_number_that_a_file_cannot_hold_is_refused_by_the_name_of_its_flag() {
        let line = TrainFlags { seed: Some(u64::MAX), batch: Some(7), ..TrainFlags::default() };
        let said = TrainFlags::default().overlaid(&line).unwrap_err().to_string();
        assert_eq!(said, "--seed 18446744073709551615: expected at most 9223372036854775807");
        let largest = TrainFlags { seed: Some(i64::MAX as u64), ..TrainFlags::default() };
        assert_eq!(TrainFlags::default().overlaid(&largest).unwrap().seed, largest.seed);
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file = parse(
            "batch = 32\nmicro_batches = 2\nbalance = [1, 2]\nschedule = 'gpipe'\n[set]\nclasses = 5\nhidden = [8, 8]",
        )
        .unwrap();
        assert_eq!(parse("lr = 1").unwrap().lr, Some(1.0));
        let line = TrainFlags { batch: Some(16), set: vec!["classes=7".to_owned()], ..TrainFlags::default() };
        let flags = file.overlaid(&line).unwrap();
        assert_eq!((flags.batch, flags.chunks, flags.balance.as_deref()), (Some(16), Some(2), Some("1,2")));
        assert_eq!(flags.set, ["hidden=[8,8]", "classes=7"]);
        assert_eq!(flags.schedule, Some(Schedule::GPipe));
    }

    #[test]
    fn an_exported_model_replaces_a_built_in_one_with_its_settings() {
        let recipe = || parse("model = 'mlp'\nbalance = [1, 2]\nplace = 'a,b'\nlr = 1\n[set]\nclasses = 5").unwrap();
        let exported = TrainFlags { model: Some("mine.pt2".to_owned()), ..TrainFlags::default() };
        let flags = recipe().overlaid(&exported).unwrap();
        assert_eq!((&flags.model, flags.set, flags.balance), (&exported.model, Vec::new(), None));
        assert_eq!((flags.partitions, flags.lr, flags.place.as_deref()), (Some(2), Some(1.0), Some("a,b")));
        let given = TrainFlags { balance: Some("3,4".to_owned()), set: vec!["classes=3".to_owned()], ..exported };
        let flags = recipe().overlaid(&given).unwrap();
        assert_eq!((flags.balance.as_deref(), flags.partitions), (Some("3,4"), None));
        assert_eq!(flags.set, ["classes=3"], "a setting that the user gives is refused, not dropped");
        let other = TrainFlags { model: Some("vgg".to_owned()), ..TrainFlags::default() };
        assert_eq!(recipe().overlaid(&other).unwrap().set, ["classes=5"]);
    }

    #[test]
    fn whether_a_run_evaluates_is_said_by_the_overriding_source_alone() {
        let speed = parse("no-evaluate = true").unwrap();
        let often = TrainFlags { evaluate_every: Some(2), ..TrainFlags::default() };
        let flags = speed.clone().overlaid(&often).unwrap();
        assert_eq!((flags.no_evaluate, flags.evaluate_every), (None, Some(2)));
        let best = parse("evaluate-every = 2\npatience = 4\nsave-best = 'loss'").unwrap();
        let flags = best.overlaid(&speed).unwrap();
        assert_eq!((flags.no_evaluate, flags.evaluate_every), (Some(true), None));
        assert!(flags.patience.is_none() && flags.save_best.is_none());
    }
}

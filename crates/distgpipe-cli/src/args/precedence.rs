//! How the flags of one source override those of another: the command line over a TOML file, both over a recipe or over the
//! flags of the checkpoint to resume from.

use super::TrainFlags;
use crate::exit::usage;

/// Flags that exclude others. Where the overriding source gives one of the first list, the flags of the second list are dropped
/// from the source below, so that users get no error about flags that they did not give.
const EXCLUDED_FLAGS: [(&[&str], &[&str]); 8] = [
    (&["partitions", "balance", "cut", "auto-balance"], &CUTS),
    (&["plan"], &["place", "chunks", "schedule", "recompute"]),
    (&["chunks", "schedule", "recompute"], &["plan"]),
    (&["codec"], &["sortquant", "quant", "split"]),
    (&["sortquant"], &["codec"]),
    (&["lr-decay"], &["lr-power", "lr-steps", "lr-factor"]),
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
    /// These flags, overridden by those that `other` gives. Model settings are merged by key.
    pub fn overlaid(self, other: &Self) -> anyhow::Result<Self> {
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
}

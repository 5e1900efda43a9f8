//! Flags as a command line for a shell, and their defaults in the help.

use super::TrainFlags;
use clap::Args as _;
use std::any::TypeId;
use std::str::FromStr;

impl TrainFlags {
    /// These flags as a command for a shell, in pieces of one flag with its value.
    pub fn to_words(&self) -> anyhow::Result<Vec<String>> {
        let mut words = vec!["distgpipe train".to_owned()];
        words.extend(self.given()?.into_iter().map(|(flag, value)| match value {
            None => flag,
            Some(value) if value == "false" => format!("{flag}=false"),
            Some(value) => with_value(&flag, &value),
        }));
        Ok(words)
    }

    /// These flags as arguments of a process, which no shell reads.
    pub fn to_arguments(&self) -> anyhow::Result<Vec<String>> {
        let arguments = self.given()?.into_iter().map(|(flag, value)| match value {
            None => flag,
            Some(value) => format!("{flag}={value}"),
        });
        Ok(arguments.collect())
    }

    /// The given flags with their values, in the order of the help. A switch that is on has no value.
    fn given(&self) -> anyhow::Result<Vec<(String, Option<String>)>> {
        let table = toml::Table::try_from(self)?;
        let text = |value: &toml::Value| match value {
            toml::Value::Boolean(true) => None,
            toml::Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let mut all = Vec::new();
        for name in names() {
            let flag = format!("--{name}");
            match table.get(&name) {
                Some(toml::Value::Array(values)) => all.extend(values.iter().map(|v| (flag.clone(), text(v)))),
                Some(value) => all.push((flag, text(value))),
                None => {}
            }
        }
        Ok(all)
    }

    /// These flags as a command for a shell, on one line.
    pub fn to_command(&self) -> anyhow::Result<String> {
        Ok(self.to_words()?.join(" "))
    }
}

/// A flag and its value for a POSIX shell. A value that looks like a flag is joined to it.
pub fn with_value(flag: &str, value: &str) -> String {
    let joint = if value.starts_with('-') { '=' } else { ' ' };
    format!("{flag}{joint}{}", quoted(value))
}

/// A word quoted for a POSIX shell, where it needs to be.
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// The long names of all flags, in the order of the help.
pub(super) fn names() -> Vec<String> {
    let command = TrainFlags::augment_args(clap::Command::new("train"));
    command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned)).collect()
}

/// Adds the default value to the help of a flag that has a fixed one.
pub fn show_defaults(arg: clap::Arg) -> clap::Arg {
    let table = toml::Table::try_from(TrainFlags::defaults()).unwrap_or_default();
    let default = arg.get_long().and_then(|name| table.get(name)).map(|value| match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Float(number) => number.to_string(),
        other => other.to_string(),
    });
    match (default, arg.get_help().map(ToString::to_string)) {
        (Some(default), Some(help)) => arg.help(format!("{help} [default: {default}]")),
        _ => arg,
    }
}

/// Makes flags that take a number accept a negative one as their value, so that the error names the numbers that the flag takes.
/// clap would take it for another flag.
pub fn explain_numbers(mut command: clap::Command) -> clap::Command {
    for subcommand in command.get_subcommands_mut() {
        *subcommand = explain_numbers(std::mem::take(subcommand));
    }
    command.mut_args(|arg| {
        if !arg.get_action().takes_values() {
            return arg;
        }
        let takes = arg.get_value_parser().type_id();
        let name = arg.get_long().unwrap_or_default().to_owned();
        let arg = arg.allow_negative_numbers(true);
        if takes == TypeId::of::<usize>() {
            arg.value_parser(move |text: &str| whole_number::<usize>(&name, text))
        } else if takes == TypeId::of::<u64>() {
            arg.value_parser(move |text: &str| whole_number::<u64>(&name, text))
        } else if WITH_UNIT.contains(&&name[..]) {
            arg.allow_hyphen_values(true)
        } else {
            arg
        }
    })
}

/// Flags that take a number with a unit: clap would take a negative one for another flag.
const WITH_UNIT: [&str; 2] = ["link-rate", "memory-limit"];

/// Flags that take whole numbers, 0 too. All others start at 1.
const FROM_0: [&str; 5] = ["codec-warm-up", "frozen", "seed", "seeds", "split"];

/// The whole numbers that a flag takes, for an error.
pub(super) fn whole_numbers(flag: &str) -> &'static str {
    match FROM_0.contains(&flag) {
        true => "a whole number of at least 0",
        false => "a whole number of at least 1",
    }
}

fn whole_number<T: FromStr>(flag: &str, text: &str) -> Result<T, String> {
    let too_large = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().map_err(|_| match too_large {
        true => format!("expected at most {}", i64::MAX),
        false => format!("expected {}", whole_numbers(flag)),
    })
}

//! Flags from and to TOML: `--config` files, recipes, and the config.toml of a run's log.

use super::command_line::{names, whole_numbers};
use super::TrainFlags;
use crate::exit::usage;
use crate::files::read_text;
use crate::report::{nearest, unknown};
use std::path::Path;

/// The largest configuration file that is read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

impl TrainFlags {
    /// These flags, on top of those in the file that `--config` names.
    pub fn with_config(self) -> anyhow::Result<Self> {
        let Some(path) = self.config.clone() else {
            return Ok(self);
        };
        let text = read_text("--config", &path, CONFIG_BYTES_MAX)?;
        let mut flags = from_toml(&text, &path)?.overlaid(&self)?;
        flags.config = Some(path);
        Ok(flags)
    }

    /// These flags as the text of a `--config` file.
    pub fn to_toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(self)?)
    }
}

/// Parses the text of a TOML file. Errors name `path` and the key.
pub fn from_toml(text: &str, path: &Path) -> anyhow::Result<TrainFlags> {
    let wrong = |why: String| usage(format!("--config {}: {why}", path.display()));
    let table: toml::Table =
        text.parse().map_err(|e: toml::de::Error| wrong(too_large(text, &e).unwrap_or_else(|| e.to_string())))?;
    let mut known = names();
    known.retain(|name| name != "config");
    let mut flags = toml::Table::new();
    for (written, value) in table {
        let mut key = written.replace('_', "-");
        if key == "micro-batches" || key == "chunk" {
            key = "chunks".to_owned();
        }
        if !known.contains(&key) {
            let unknown = unknown("key", &written, nearest(&key, known.iter().map(String::as_str)));
            return Err(wrong(format!("{unknown} Keys are the flags of `distgpipe train`")));
        }
        let value = normalized(&key, value).map_err(|why| wrong(format!("`{written}`: {why}")))?;
        // Parsed one by one, so that the error names the key.
        let alone = toml::Table::from_iter([(key.clone(), value.clone())]);
        alone.try_into::<TrainFlags>().map_err(|e| wrong(format!("`{written}`: {}", plain(&key, e.message()))))?;
        flags.insert(key, value);
    }
    let mut flags: TrainFlags = flags.try_into().map_err(|e: toml::de::Error| wrong(e.message().to_owned()))?;
    for (flag, path) in flags.paths_mut() {
        if path.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            return Err(wrong(format!("`{}`: expected a path, got an empty text", flag.trim_start_matches('-'))));
        }
    }
    Ok(flags)
}

/// The error of a whole number that the parser of TOML cannot represent; `None` for another error.
fn too_large(text: &str, error: &toml::de::Error) -> Option<String> {
    let span = error.span()?;
    let got = text.get(span.clone()).filter(|got| got.parse::<i64>().is_err())?;
    let whole = got.bytes().all(|byte| byte.is_ascii_digit()) && !got.is_empty();
    let line = text[..span.start].lines().count().max(1);
    whole.then(|| format!("line {line}: expected whole numbers of at most {}, got {got}", i64::MAX))
}

/// The message of the parser about a key in the words of the command line, without the names of Rust's types.
fn plain(key: &str, message: &str) -> String {
    let rest = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    let Some((got, expected)) = rest.and_then(|rest| rest.split_once(", expected ")) else {
        return message.to_owned();
    };
    let expected = match expected {
        "u32" | "u64" | "usize" => whole_numbers(key),
        "f32" | "f64" => "a number",
        "path string" => "a path",
        other => other,
    };
    format!("expected {expected}, got {got}")
}

/// Brings a value into the form that the command line has: a file may write comma-separated lists as arrays, and model settings
/// as a table.
fn normalized(key: &str, value: toml::Value) -> Result<toml::Value, String> {
    let word = |value: &toml::Value| match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Ok(match (key, value) {
        ("balance" | "place" | "workers" | "lr-steps", toml::Value::Array(values)) => {
            toml::Value::String(values.iter().map(word).collect::<Vec<_>>().join(","))
        }
        // As --resume alone.
        ("resume", toml::Value::Boolean(true)) => toml::Value::String("newest".to_owned()),
        ("freeze" | "group", toml::Value::String(text)) => toml::Value::Array(vec![toml::Value::String(text)]),
        ("set", toml::Value::Table(settings)) => {
            let setting = |(key, value): (String, toml::Value)| {
                let value = serde_json::to_string(&value).map_err(|e| e.to_string())?;
                Ok(toml::Value::String(format!("{key}={value}")))
            };
            toml::Value::Array(settings.into_iter().map(setting).collect::<Result<_, String>>()?)
        }
        (_, value) => value,
    })
}

#[cfg(test)]
mod tests {
    use super::super::ResumeName;
    use super::*;

    fn parse(text: &str) -> anyhow::Result<TrainFlags> {
        from_toml(text, Path::new("run.toml"))
    }

    #[test]
    fn errors_in_a_file_name_the_key_and_the_nearest_one() {
        let error = |text: &str| parse(text).unwrap_err().to_string();
        assert!(error("shedule = 'gpipe'").contains("unknown key `shedule`: did you mean `schedule`?"));
        for (text, expected) in [
            ("batch = 'many'", "`batch`: expected a whole number of at least 1, got string \"many\""),
            ("seed = -1", "`seed`: expected a whole number of at least 0, got integer `-1`"),
            ("quant = 1.5", "`quant`: expected a whole number of at least 1, got floating point `1.5`"),
            ("lr = 'low'", "`lr`: expected a number, got string \"low\""),
            ("log = 7", "`log`: expected a path, got integer `7`"),
        ] {
            assert!(error(text).ends_with(expected), "{}", error(text));
        }
        assert!(error("checkpoint = ''").ends_with("`checkpoint`: expected a path, got an empty text"));
        assert_eq!(parse("resume = true").unwrap().resume, Some(ResumeName::Newest));
        for number in ["9223372036854775808", "18446744073709551616"] {
            let said = error(&format!("lr = 0.1\nseed = {number}"));
            let expected = format!("line 2: expected whole numbers of at most 9223372036854775807, got {number}");
            assert!(said.ends_with(&expected), "{said}");
        }
        // Nothing resembles it.
        assert!(error("foo = 1").ends_with("unknown key `foo`. Keys are the flags of `distgpipe train`"));
        assert!(error("config = 'other.toml'").contains("unknown key"));
        assert!(error("batch = ").contains("--config run.toml"));
    }

    #[test]
    fn defaults_survive_a_round_trip_through_toml() {
        let flags = TrainFlags { trace: Some(true), set: vec!["a='b c'".to_owned()], ..TrainFlags::defaults() };
        assert_eq!(parse(&flags.to_toml().unwrap()).unwrap(), flags);
        let command = flags.to_command().unwrap();
        assert!(command.starts_with("distgpipe train --model mlp --set 'a='\\''b c'\\''' --data digits"), "{command}");
        assert!(command.contains("--trace"), "{command}");
    }
}

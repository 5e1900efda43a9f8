//! Translates the names of library options into flags.
//!
//! Errors of the library name its own options, such as `` `Timeouts::stall_s` ``. Users of the command know flags: every line for
//! standard error passes through [`with_flags`].

use std::borrow::Cow;

/// The options that the library names in its errors, and the flags that set them.
const FLAGS: &[(&str, &str)] = &[
    ("AutoBalance::objective", "--balance-by"),
    ("AutoBalance::link", "--link-rate"),
    ("AutoBalance::memory_limit_bytes", "--memory-limit"),
    ("AutoBalance::partitions", "--auto-balance"),
    ("Builder::auto_balance", "--auto-balance"),
    ("Builder::auto_balance_with", "--auto-balance"),
    ("Builder::balance", "--balance"),
    ("Builder::channels_last", "--no-channels-last"),
    ("Builder::clip_norm", "--clip-norm"),
    ("Builder::codecs", "--codec"),
    ("Builder::cudnn_benchmark", "--cudnn-benchmark"),
    ("Builder::cudnn_deterministic", "--cudnn-deterministic"),
    ("Builder::device", "--device"),
    ("Builder::faults", "--faults"),
    ("Builder::freeze", "--freeze"),
    ("Builder::graphs", "--graph-streams"),
    ("Builder::fused_optimizer", "--fused-optimizer"),
    ("Builder::learning_rate", "--lr"),
    ("Builder::micro_batches", "--chunks"),
    ("Builder::optimizer", "--optimizer"),
    ("Builder::parameter_group", "--group"),
    ("Builder::phases", "--phases"),
    ("Builder::place", "--place"),
    ("Builder::plan", "--plan"),
    ("Builder::precision", "--precision"),
    ("Builder::recompute", "--recompute"),
    ("Builder::reduce", "--reduce"),
    ("Builder::replicas", "--replicas"),
    ("Builder::schedule", "--schedule"),
    ("Builder::seed", "--seed"),
    ("Builder::tf32", "--tf32"),
    ("Builder::threads", "--threads"),
    ("Builder::timeouts", "--timeout"),
    ("Builder::trace", "--trace"),
    ("Builder::workers", "--workers"),
    ("CodecPolicy::backward", "--codec-backward"),
    ("CodecPolicy::evaluate", "--evaluate-raw"),
    ("CodecPolicy::forward", "--codec"),
    ("CodecPolicy::links", "--codec-link"),
    ("CodecPolicy::replicas", "--codec-replicas"),
    ("CodecPolicy::warm_up_steps", "--codec-warm-up"),
    ("ExportedOptions::untie", "--untie"),
    ("LoaderOptions::batch_rows", "--batch"),
    ("LoaderOptions::seed", "--seed"),
    ("LoaderOptions::threads", "--loader-threads"),
    ("Pipeline::load_partial", "--init-missing"),
    ("Pipeline::set_clip_norm", "--clip-norm"),
    ("Pipeline::set_learning_rate", "--lr"),
    ("ProfileOptions::device", "--device"),
    ("ProfileOptions::precision", "--precision"),
    ("ProfileOptions::threads", "--threads"),
    ("ServeOptions::expose", "--expose"),
    ("ServeOptions::listen", "--listen"),
    ("ServeOptions::once", "--once"),
    ("ServeOptions::token", "--token-file"),
    ("Timeouts::connect_s", "--peer-timeout"),
    ("Timeouts::reconnect_s", "--reconnect"),
    ("Timeouts::silence_s", "--peer-timeout"),
    ("Timeouts::stall_s", "--timeout"),
    ("TrainOptions::accumulate", "--accumulate"),
    ("TrainOptions::best", "--save-best"),
    ("TrainOptions::capture", "--capture-step"),
    ("TrainOptions::epochs", "--epochs"),
    ("TrainOptions::patience", "--patience"),
    ("TrainOptions::rate_schedule", "--lr-decay"),
    ("TrainOptions::restarts", "--restarts"),
    ("TrainOptions::steps_max", "--steps"),
    ("TrainOptions::test_every", "--evaluate-every"),
    ("Workers::Servers::labels_leave", "--labels-leave"),
    ("zoo::allow_operators", "--allow-op"),
];

/// The text with each option of the library, in backticks, replaced by its flag.
pub fn with_flags(text: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed(text);
    if text.contains("::") {
        for (option, flag) in FLAGS {
            let quoted = format!("`{option}`");
            if text.contains(&quoted) {
                text = text.replace(&quoted, flag).into();
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    #[test]
    fn options_become_flags() {
        let text = "worker 1 made no progress for 300 s: raise `Timeouts::stall_s`, or lower `Builder::learning_rate`";
        assert_eq!(with_flags(text), "worker 1 made no progress for 300 s: raise --timeout, or lower --lr");
        assert!(matches!(with_flags("--lr: expected `a::b`"), Cow::Borrowed(_)));
    }

    #[test]
    fn every_flag_exists() {
        let command = crate::Args::command();
        let flags: BTreeSet<String> = command
            .get_subcommands()
            .chain([&command])
            .flat_map(|command| command.get_arguments().filter_map(|flag| flag.get_long()))
            .map(|flag| format!("--{flag}"))
            .collect();
        for (option, flag) in FLAGS {
            assert!(flags.contains(*flag), "{option}: {flag} is not a flag");
        }
    }

    /// The library's source files without their tests and comments; empty outside the repository.
    fn library() -> Vec<(PathBuf, String)> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../distgpipe/src");
        let (mut directories, mut files) = (vec![root.clone()], Vec::new());
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
                    let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
                    files.push((path.strip_prefix(&root).unwrap().to_owned(), code.join("\n")));
                }
            }
        }
        files
    }

    #[test]
    fn every_option_that_the_library_names_has_a_flag() {
        let types: BTreeSet<&str> = FLAGS.iter().filter_map(|(option, _)| option.split("::").next()).collect();
        for (path, code) in library() {
            // Every second piece is in backticks.
            for option in code.lines().flat_map(|line| line.split('`').skip(1).step_by(2)) {
                let Some((owner, _)) = option.split_once("::").filter(|(owner, _)| types.contains(owner)) else {
                    continue;
                };
                let known = FLAGS.iter().any(|(known, _)| *known == option);
                assert!(known, "{}: no flag for `{option}` of {owner}", path.display());
            }
        }
    }

    #[test]
    fn errors_of_the_library_name_no_flags() {
        for (path, code) in library() {
            for text in code.split("#[error(").skip(1) {
                let text = text.split(")]").next().unwrap_or_default();
                let flag = text.split("--").skip(1).find(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()));
                assert!(flag.is_none(), "{}: an error names a flag: {text}", path.display());
            }
        }
    }
}

//! The flags of `evaluate` and `predict`: those of `train` that say which model runs where. The others are hidden from the help, and
//! an error if they are given.

use super::TrainFlags;
use crate::exit::usage;

/// The flags of `train` that both commands have.
const BOTH: &[&str] = &[
    "weights",
    "model",
    "set",
    "layers",
    "untie",
    "data",
    "data-dir",
    "tokenizer",
    "normalise",
    "partitions",
    "balance",
    "cut",
    "place",
    "workers",
    "token-file",
    "server",
    "server-file",
    "listen",
    "labels-leave",
    "replicas",
    "chunks",
    "timeout",
    "peer-timeout",
    "reconnect",
    "codec",
    "codec-link",
    "device",
    "threads",
    "precision",
    "tf32",
    "cudnn-benchmark",
    "cudnn-deterministic",
    "no-channels-last",
    "batch",
    "json",
    "faults",
];

/// The flags that only `evaluate` has besides.
const EVALUATE: &[&str] = &["limit", "loader-threads", "loss", "samples", "seed"];

/// Help where that of `train` does not fit.
const HELP: &[(&str, &str)] = &[
    ("weights", "The trained model: a file that `train --save` wrote, a checkpoint, a --checkpoint directory (its newest), or, with --model, any safetensors or torch.save file"),
    ("model", "Model that the weights belong to; only if the --weights file does not name its model"),
    ("set", "Model setting, such as classes=10, on top of those in the file; repeatable"),
    ("data-dir", "Directory with the data set's files [default: the one that the model was trained on]"),
    ("tokenizer", "RoBERTa tokenizer: a tokenizer.json file, or the directory with vocab.json and merges.txt [default: the one that the model was trained with]"),
    ("normalise", "Normalisation of colours: `imagenet`, or means and deviations [default: as in training]"),
    ("loss", "Loss of outputs that are not class scores: mean-squared or binary-cross-entropy [default: as in training]"),
    ("limit", "Evaluate on N rows only, spread evenly over the test data [default: all rows]"),
    ("samples", "Training rows of the synthetic data, whose test rows follow them [default: as in training]"),
    ("seed", "Random seed of the synthetic data [default: as in training]"),
    ("loader-threads", "Threads that load and prepare batches in the background"),
    ("partitions", "Cut the model into N partitions with equal numbers of layers [default: as many as --place names, or 1]"),
    ("replicas", "Data parallelism: run N copies of the pipeline, and split each batch among them [default: 1]"),
    ("chunks", "Micro-batches per batch, in each replica [default: 1 with one worker, otherwise 4]"),
    ("batch", "Rows per batch [default: as in the tests of the training run, or 64]"),
    ("codec", "Codec for activations between workers; `auto` chooses by the measured links [default: raw]"),
    ("codec-link", "Codec for one link, named by its partitions or its workers: 0-1=tile:4; repeatable"),
    ("workers", "Where workers run: as threads of this process, as processes on this host, or at the addresses of `distgpipe worker` processes, one for each worker after the first [default: threads]"),
    ("timeout", "Abort when no worker makes progress for this many seconds [default: 300]"),
    ("device", "Device of the workers: cpu, cuda:N, or auto (the first GPU, or the CPU if there is none). The devices of a list, such as cuda:0,cuda:1, are assigned to workers in turn [default: auto]"),
    ("precision", "Precision of the computation: fp32 or bf16 [default: as in training, or fp32]"),
    ("tf32", "Operations whose inputs GPUs may round to TF32: convolutions, on (matrix products too) or off [default: as in training, or convolutions]"),
];

const DATA_HELP: [(&str, &str); 2] = [
    ("evaluate", "Data set, of which the test data is used [default: the one that the model was trained on]"),
    (
        "predict",
        "Data set whose preprocessing to apply to the inputs; only if the --weights file does not name its data set",
    ),
];

fn flags(command: &str) -> impl Iterator<Item = &'static str> {
    let more: &[&str] = if command == "evaluate" { EVALUATE } else { &[] };
    BOTH.iter().chain(more).copied()
}

/// Adapts a flag of `train` to the help of `evaluate` or `predict`.
pub fn for_inference(command: &'static str) -> impl Fn(clap::Arg) -> clap::Arg {
    move |arg| {
        let Some(name) = arg.get_long().map(str::to_owned) else { return arg };
        if arg.get_help_heading().is_none() {
            return arg; // A flag of the command itself.
        }
        let data = DATA_HELP.iter().filter(|(of, _)| name == "data" && *of == command);
        let help = HELP.iter().filter(|(flag, _)| *flag == name).chain(data).map(|(_, help)| *help).next();
        let arg = if flags(command).any(|kept| kept == name) { arg } else { arg.hide(true) };
        match help {
            Some(help) => arg.help(help),
            None => arg,
        }
    }
}

impl TrainFlags {
    /// Whether only flags that `evaluate` or `predict` has were given.
    pub fn check_inference(&self, command: &str) -> anyhow::Result<()> {
        let given = toml::Table::try_from(self)?;
        let config = self.config.as_ref().map(|_| "config");
        let others = given.keys().map(String::as_str).chain(config);
        match others.into_iter().find(|name| flags(command).all(|kept| kept != *name)) {
            Some(other) => Err(usage(format!(
                "--{other}: `distgpipe {command}` has no such flag: remove it; `distgpipe {command} --help` lists all"
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::command_line::names;

    #[test]
    fn the_flags_of_inference_are_flags_of_train() {
        let known = names();
        let listed = BOTH.iter().chain(EVALUATE).chain(HELP.iter().map(|(name, _)| name));
        for name in listed {
            assert!(known.iter().any(|known| known == name), "--{name}");
        }
    }

    #[test]
    fn flags_of_training_are_refused() {
        let refused = |flags: TrainFlags, command| flags.check_inference(command).unwrap_err().to_string();
        let lr = TrainFlags { lr: Some(0.1), ..TrainFlags::default() };
        assert!(refused(lr, "evaluate").contains("--lr: `distgpipe evaluate` has no such flag"));
        let limit = TrainFlags { limit: Some(1), ..TrainFlags::default() };
        assert!(limit.check_inference("evaluate").is_ok() && refused(limit, "predict").contains("--limit"));
        let config = TrainFlags { config: Some("x".into()), ..TrainFlags::default() };
        assert!(refused(config, "predict").contains("--config"));
    }
}

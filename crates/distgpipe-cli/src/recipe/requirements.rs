//! What a recipe needs: GPUs, data, weights.

use super::comparison::Metric;
use super::Recipe;
use crate::args::DataName;
use crate::report::units::plural;
use std::collections::BTreeSet;

/// How many devices the published experiment ran on: one for each worker of each replica.
pub fn devices(recipe: &Recipe) -> usize {
    let run = &recipe.run;
    let items = |list: &String| list.split(',').map(|item| item.trim().to_owned()).collect::<Vec<_>>();
    let workers = match (&run.place, &run.balance, run.auto_balance.or(run.partitions)) {
        (Some(place), _, _) => items(place).into_iter().collect::<BTreeSet<_>>().len(),
        (None, Some(balance), _) => items(balance).len(),
        (None, None, partitions) => partitions.unwrap_or(1),
    };
    workers * run.replicas.unwrap_or(1)
}

/// The least with which this program measures a figure of a row, in words. Neither the published GPUs nor the published weights are
/// needed: a measurement without them says how it deviates. Speeds, times and memory are those of a GPU, because the published ones
/// are; the other figures do not depend on the device.
pub fn needs(recipe: &Recipe, metric: Metric) -> String {
    let needed = match metric {
        metric if metric.is_a_score() => return score(recipe),
        // Between threads there is no link.
        Metric::Bandwidth | Metric::Compression => {
            format!("{} processes on a CPU (`--workers processes --device cpu`)", devices(recipe))
        }
        _ => gpu(recipe, metric),
    };
    // None of these depends on what the rows contain.
    match recipe.run.data.is_some_and(|data| data != DataName::Synthetic) {
        true => format!("{needed}; `--data synthetic` will do"),
        false => needed,
    }
}

/// A GPU, and how it does for several workers. Only speeds are simulated.
fn gpu(recipe: &Recipe, metric: Metric) -> String {
    match (devices(recipe), recipe.run.replicas.unwrap_or(1)) {
        (1, _) => "a GPU".to_owned(),
        (workers, 1) if metric == Metric::Throughput => {
            format!(
                "a GPU that {workers} workers share (`--device cuda:0`) or that stands for {workers} (`--simulate`)"
            )
        }
        (workers, _) => format!("a GPU that {workers} workers share (`--device cuda:0`)"),
    }
}

fn score(recipe: &Recipe) -> String {
    let data = match recipe.run.data {
        Some(DataName::Cifar10) => Some("CIFAR-10 (`distgpipe data get cifar10`)"),
        Some(DataName::Cifar100) => Some("CIFAR-100 (`distgpipe data get cifar100`)"),
        Some(DataName::Food101) => Some("Food-101 (`distgpipe data get food101`)"),
        Some(DataName::ImageFolder) => Some("ImageNet"),
        Some(DataName::Rte) => Some("RTE (`distgpipe data get rte`), a tokenizer"),
        Some(DataName::Cola) => Some("CoLA (`distgpipe data get cola`), a tokenizer"),
        Some(DataName::Digits | DataName::Synthetic | DataName::Text | DataName::Tensors) | None => None,
    };
    let device = match devices(recipe) {
        1 => "a CPU (`--device cpu`) or a GPU",
        _ => "a CPU (`--device cpu`) or a GPU (`--device cuda:0`)",
    };
    let needed = data.map_or_else(|| device.to_owned(), |data| format!("{data} and {device}"));
    let weights = recipe.starts_from.as_ref().map(|weights| weights.split(" (").next().unwrap_or(weights));
    weights.map_or(needed.clone(), |weights| format!("{needed}; {weights} for a score that compares"))
}

/// `a GPU`, `2 GPUs`.
pub fn gpus(count: usize) -> String {
    match count {
        1 => "a GPU".to_owned(),
        count => plural(count, "GPU"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::find;

    /// It said that rows need as many GPUs as were published, beside others that had been measured on one, and that codecs and scores
    /// need a GPU.
    #[test]
    fn needs_are_the_least_that_a_figure_takes() {
        let said = |name, metric| needs(&find(name).unwrap(), metric);
        let (speed, score) = (Metric::Throughput, Metric::Accuracy);
        assert_eq!(said("unet-speed-baseline", speed), "a GPU");
        assert_eq!(
            said("unet-speed-pipeline-8", speed),
            "a GPU that 8 workers share (`--device cuda:0`) or that stands for 8 (`--simulate`)"
        );
        assert_eq!(said("unet-speed-pipeline-8", Metric::Memory), "a GPU that 8 workers share (`--device cuda:0`)");
        assert_eq!(
            said("rte-roberta-data-parallel-3", speed),
            "a GPU that 3 workers share (`--device cuda:0`); `--data synthetic` will do"
        );
        assert_eq!(
            said("rte-roberta-data-parallel-3", score),
            "RTE (`distgpipe data get rte`), a tokenizer and a CPU (`--device cpu`) or a GPU (`--device cuda:0`); RoBERTa-base's weights \
             for a score that compares"
        );
        assert_eq!(
            said("imagenet-resnet101-pipeline-1k", Metric::Error),
            "ImageNet and a CPU (`--device cpu`) or a GPU (`--device cuda:0`)"
        );
        for metric in [Metric::Bandwidth, Metric::Compression] {
            assert_eq!(
                said("cifar10-sort16", metric),
                "2 processes on a CPU (`--workers processes --device cpu`); `--data synthetic` will do"
            );
        }
        // Client and three servers.
        assert_eq!(devices(&find("cifar10-mobilenet-pipeline-4-chunks-4").unwrap()), 4);
    }
}

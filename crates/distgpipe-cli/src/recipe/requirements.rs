//! What a recipe needs: GPUs, data, weights.

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

/// What the published experiment needs, in words: `2 GPUs, RTE and RoBERTa-base's weights`.
pub fn needs(recipe: &Recipe) -> String {
    let mut all = vec![gpus(devices(recipe))];
    all.extend(data_and_weights(recipe));
    listed(all)
}

/// What a score needs. Speed does not matter to it, so the workers may share a device.
pub fn score_needs(recipe: &Recipe) -> String {
    match data_and_weights(recipe) {
        all if all.is_empty() => needs(recipe),
        all => listed(all),
    }
}

/// What a speed needs. It does not depend on data and weights.
pub fn speed_needs(recipe: &Recipe) -> String {
    gpus(devices(recipe))
}

fn data_and_weights(recipe: &Recipe) -> Vec<String> {
    let data = match recipe.run.data {
        Some(DataName::Cifar10) => Some("CIFAR-10"),
        Some(DataName::Cifar100) => Some("CIFAR-100"),
        Some(DataName::Food101) => Some("Food-101"),
        Some(DataName::ImageFolder) => Some("ImageNet"),
        Some(DataName::Rte) => Some("RTE"),
        Some(DataName::Cola) => Some("CoLA"),
        Some(DataName::Digits | DataName::Synthetic | DataName::Text | DataName::Tensors) | None => None,
    };
    let weights = recipe.starts_from.as_ref().map(|weights| weights.split(" (").next().unwrap_or(weights).to_owned());
    data.map(str::to_owned).into_iter().chain(weights).collect()
}

fn listed(mut all: Vec<String>) -> String {
    match all.pop() {
        Some(last) if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        last => last.unwrap_or_default(),
    }
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

    #[test]
    fn needs_follow_from_the_run() {
        let said = |name| needs(&find(name).unwrap());
        assert_eq!(said("unet-speed-baseline"), "a GPU");
        assert_eq!(said("unet-speed-pipeline-8"), "8 GPUs");
        assert_eq!(said("imagenet-resnet101-pipeline-1k"), "8 GPUs and ImageNet");
        assert_eq!(said("rte-roberta-data-parallel-3"), "3 GPUs, RTE and RoBERTa-base's weights");
        // Client and three servers.
        assert_eq!(
            said("cifar10-mobilenet-pipeline-4-chunks-4"),
            "4 GPUs, CIFAR-10 and MobileNetV2's ImageNet weights"
        );
        // One figure of a row may need less than the whole row.
        let recipe = find("rte-roberta-data-parallel-3").unwrap();
        assert_eq!(score_needs(&recipe), "RTE and RoBERTa-base's weights");
        assert_eq!(speed_needs(&recipe), "3 GPUs");
    }
}

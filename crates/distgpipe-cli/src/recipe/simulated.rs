//! Predicts the throughput of a run on more GPUs than there are.
//!
//! One worker for each partition trains on the one device, with a single micro-batch in each step and without recomputation, which
//! a worker would begin while the next one still computes. So only one partition runs a pass at a time, which takes as long as on a device
//! of its own; a pass that is run again is taken to last as long as the first time. Only the update of a partition coincides with the
//! backward pass of the one before it. The schedule of the recipe is simulated with these times; replicas run it side by side. Messages
//! cost nothing, and loading is hidden by computation.

use super::deviations::deviations;
use super::row_process::{self, Ended, RunOutput};
use super::Recipe;
use crate::args::TrainFlags;
use anyhow::Context;
use distgpipe::runtime::trace::{Phase, PhaseTiming};
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{simulate, Costs, Recompute, Request};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Steps of the run that measures the partitions, unless --steps is given.
const STEPS: u64 = 10;

/// How long the layers are measured at most, where the recipe leaves the cut to measurements.
const CHOICE_S: f64 = 10.0;

/// What each partition took for one micro-batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionCosts {
    /// Rows of the micro-batch.
    pub rows: usize,
    /// Layers of the partitions.
    pub balance: Vec<usize>,
    pub forward_s: Vec<f64>,
    /// Forward passes that are run again, which are taken to last as long as the first time; all 0 if none are.
    pub recompute_s: Vec<f64>,
    pub backward_s: Vec<f64>,
    /// The optimizer, once a step.
    pub optimizer_s: Vec<f64>,
}

/// A prediction.
pub struct Predicted {
    pub throughput_per_s: f64,
    pub costs: PartitionCosts,
    /// The command that measured the costs.
    pub command: String,
    pub deviations: Vec<String>,
}

/// Measures the partitions of a recipe, and simulates its step. The inner error is the reason why that was not possible.
pub fn predict(
    recipe: &Recipe,
    given: &TrainFlags,
    limit: Option<Duration>,
) -> anyhow::Result<Result<Predicted, String>> {
    let run = TrainFlags { steps: None, ..recipe.with(given)? };
    let chosen = match run.auto_balance {
        Some(partitions) => match of_one_device(choose(&run, partitions, limit)?) {
            Ok(cut) => Some(cut.balance),
            Err(why) => return Ok(Err(why)),
        },
        None => None,
    };
    let output = row_process::run(recipe, &measuring(&run, given, chosen.as_deref())?, limit)?;
    let output = match of_one_device(output) {
        Ok(output) => output,
        Err(why) => return Ok(Err(why)),
    };
    let Some(costs) = PartitionCosts::measured(&output.run, &run) else {
        let warm_up = output.run.warm_up_steps;
        return Ok(Err(format!("the costs of its partitions need more than {warm_up} steps: raise --steps")));
    };
    let mut deviations = deviations(recipe, &run)?;
    let devices: Vec<String> = run.devices().iter().map(|device| device.resolved().to_string()).collect();
    deviations[0] = format!(
        "Simulated, not measured: the schedule was simulated for the number of GPUs in the row, with the times that each partition \
         took for one micro-batch on {}, while no other partition ran a pass; a pass that is run again counts as the first one did. Links \
         cost nothing, and loading is hidden.",
        devices.join(", ")
    );
    Ok(Ok(Predicted {
        throughput_per_s: costs.throughput_per_s(&run)?,
        costs,
        command: output.run.command,
        deviations,
    }))
}

/// What a measurement found. All partitions are on the one device, so its memory says nothing about the row.
fn of_one_device<T>(ended: Ended<T>) -> Result<T, String> {
    match ended {
        Ended::Complete(output) => Ok(output),
        Ended::OutOfMemory => {
            Err("its partitions do not fit on one device together, so that none was measured".to_owned())
        }
        Ended::Failed(why) => Err(why),
    }
}

/// What is taken from the output of `distgpipe balance --json`.
#[derive(Deserialize)]
struct Cut {
    balance: Vec<usize>,
}

/// The cut that the run itself would choose.
fn choose(run: &TrainFlags, partitions: usize, limit: Option<Duration>) -> anyhow::Result<Ended<Cut>> {
    let model = run.model.clone().unwrap_or_default();
    let mut arguments = vec!["balance".to_owned(), model, "--json".to_owned()];
    let mut put = |flag: &str, value: String| arguments.push(format!("--{flag}={value}"));
    run.set.iter().for_each(|setting| put("set", setting.clone()));
    put("partitions", partitions.to_string());
    put("rows", rows(run).to_string());
    put("time-limit", CHOICE_S.to_string());
    put("chunks", run.chunks.unwrap_or(1).to_string());
    put("device", run.devices().iter().next().unwrap_or_default().to_string());
    run.schedule.iter().for_each(|schedule| put("schedule", schedule.to_string()));
    run.recompute.iter().for_each(|recompute| put("recompute", recompute.to_string()));
    run.place.iter().for_each(|place| put("place", place.clone()));
    run.threads.iter().for_each(|threads| put("threads", threads.to_string()));
    row_process::call(arguments, limit)
}

/// Rows of a micro-batch.
fn rows(run: &TrainFlags) -> usize {
    let micro_batches = run.chunks.unwrap_or(1).saturating_mul(run.replicas.unwrap_or(1));
    run.batch.unwrap_or(1).div_ceil(micro_batches.max(1))
}

/// The number of partitions, which all recipes of pipelines state.
fn partitions(run: &TrainFlags) -> usize {
    let items = |list: &String| list.split(',').count();
    let listed = run.place.as_ref().or(run.balance.as_ref()).map(items);
    listed.or(run.auto_balance).or(run.partitions).unwrap_or(1)
}

/// The flags that measure the partitions of a run: one worker for each, one micro-batch in a step.
fn measuring(run: &TrainFlags, given: &TrainFlags, chosen: Option<&[usize]>) -> anyhow::Result<TrainFlags> {
    let workers: Vec<String> = (0..partitions(run)).map(|partition| format!("p{partition}")).collect();
    let chosen = chosen.map(|sizes| sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(","));
    Ok(TrainFlags {
        // Naming a cut drops the placement of the recipe, and the other way round its own cut stays.
        balance: chosen.or_else(|| given.balance.clone()),
        place: Some(workers.join(",")),
        workers: Some("threads".to_owned()),
        replicas: run.replicas.map(|_| 1),
        batch: Some(rows(run)),
        chunks: Some(1),
        recompute: Some(Recompute::Never),
        phases: Some(PhaseTiming::Exact),
        steps: Some(given.steps.unwrap_or(STEPS)),
        no_evaluate: Some(true),
        evaluate_every: None,
        patience: None,
        save_best: None,
        ..given.clone()
    })
}

impl PartitionCosts {
    /// The costs of the partitions of `run`, by a run whose workers have one of them each; `None` if that ended with its warm-up.
    fn measured(output: &RunOutput, run: &TrainFlags) -> Option<Self> {
        let steps = output.steps.checked_sub(output.warm_up_steps).filter(|&steps| steps > 0)? as f64;
        let spent = |phase: Phase| -> Vec<f64> {
            let seconds = output.workers.iter().map(|worker| worker.phases_s.get(phase.name()).copied().unwrap_or(0.0));
            seconds.map(|seconds| seconds / steps).collect()
        };
        let forward_s = spent(Phase::Forward);
        Some(PartitionCosts {
            rows: rows(run),
            balance: output.balance.clone(),
            recompute_s: match run.recompute.unwrap_or_default() {
                Recompute::Never => vec![0.0; forward_s.len()],
                Recompute::ExceptLast | Recompute::Always => forward_s.clone(),
            },
            forward_s,
            backward_s: spent(Phase::Backward),
            optimizer_s: spent(Phase::Optimizer),
        })
    }

    /// Rows per second of a run with these flags, in which every worker of every replica has a device of its own.
    pub fn throughput_per_s(&self, run: &TrainFlags) -> anyhow::Result<f64> {
        let placement = match &run.place {
            Some(place) => place.parse().context("the placement of the recipe")?,
            None => Placement::one_worker_each(self.balance.len()),
        };
        let mut request = Request::new(placement.clone(), run.chunks.unwrap_or(1));
        request.recompute = run.recompute.unwrap_or_default();
        let plan = run.schedule.unwrap_or_default().plan(&request).context("the schedule of the recipe")?;
        let costs = Costs {
            recompute: self.recompute_s.clone(),
            ..Costs::new(self.forward_s.clone(), self.backward_s.clone())
        };
        let passes = simulate(&plan, &costs).context("simulating the step")?.makespan;
        let of_worker = |worker| {
            let partitions = placement.partition_ids().filter(|&p| placement.worker_of(p) == worker);
            partitions.map(|p| self.optimizer_s.get(p.index()).copied().unwrap_or(0.0)).sum::<f64>()
        };
        let updates = plan.placement().worker_ids().map(of_worker).fold(0.0, f64::max);
        Ok(run.batch.unwrap_or(0) as f64 / (passes + updates))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::find;
    use crate::recipe::row_process::WorkerOutput;

    fn costs(partitions: usize, pass_s: f64) -> PartitionCosts {
        let each = |seconds: f64| vec![seconds; partitions];
        PartitionCosts {
            rows: 1,
            balance: vec![1; partitions],
            forward_s: each(pass_s),
            recompute_s: each(pass_s),
            backward_s: each(2.0 * pass_s),
            optimizer_s: each(0.0),
        }
    }

    /// With equal partitions, the passes of all micro-batches on one worker, and those of one on the others, follow each other. A
    /// pass is run again while a worker waits for gradients, so that only the last partition's delays the others.
    #[test]
    fn a_step_is_simulated_with_the_schedule_of_the_recipe() {
        let rate = |name: &str| costs(4, 0.1).throughput_per_s(&find(name).unwrap().run).unwrap();
        let (forward, backward) = (0.1 * (4.0 + 3.0), 0.2 * (4.0 + 3.0) + 0.1 * 3.0);
        let four = rate("amoebanet-speed-n4-m4");
        assert!((four - 360.0 / (forward + backward)).abs() < 1e-6, "{four}");
        let one = rate("amoebanet-speed-n4-m1");
        assert!((one - 160.0 / (0.1 * 4.0 + 0.1 + 0.2 * 4.0)).abs() < 1e-6, "{one}");
    }

    #[test]
    fn the_updates_of_a_worker_are_counted_once_a_step() {
        let run = find("cifar10-mobilenet-pipeline-4-chunks-4").unwrap().run;
        let updates = |run: &TrainFlags| {
            let step = |costs: PartitionCosts| 256.0 / costs.throughput_per_s(run).unwrap();
            step(PartitionCosts { optimizer_s: vec![0.5; 5], ..costs(5, 0.01) }) - step(costs(5, 0.01))
        };
        // The client has the first and the last partition.
        assert!((updates(&run) - 1.0).abs() < 1e-9, "{}", updates(&run));
        let apart = TrainFlags { place: None, ..run };
        assert!((updates(&apart) - 0.5).abs() < 1e-9, "{}", updates(&apart));
    }

    #[test]
    fn replicas_share_the_batch_and_run_side_by_side() {
        let run = find("imagenet-resnet101-data-parallel-1k").unwrap().run;
        assert_eq!((rows(&run), partitions(&run)), (128, 1));
        let rate = PartitionCosts { optimizer_s: vec![0.1], ..costs(1, 0.3) }.throughput_per_s(&run).unwrap();
        assert!((rate - 1024.0 / (0.3 + 0.6 + 0.1)).abs() < 1e-6, "{rate}");
        let flags = measuring(&run, &TrainFlags::default(), None).unwrap();
        assert_eq!((flags.replicas, flags.batch, flags.place.as_deref()), (Some(1), Some(128), Some("p0")));
    }

    #[test]
    fn one_worker_for_each_partition_is_measured_with_one_micro_batch() {
        let recipe = find("resnet101-speed-pipeline-2").unwrap();
        let given = TrainFlags { steps: Some(7), evaluate_every: Some(2), ..TrainFlags::default() };
        let run = recipe.with(&given).unwrap();
        let flags = recipe.with(&measuring(&run, &given, Some(&[20, 17])).unwrap()).unwrap();
        assert_eq!((flags.no_evaluate, flags.evaluate_every), (Some(true), None));
        assert_eq!((flags.batch, flags.chunks, flags.steps), (Some(15), Some(1), Some(7)));
        assert_eq!((flags.balance.as_deref(), flags.place.as_deref()), (Some("20,17"), Some("p0,p1")));
        // A pass that is run again would coincide with one of the next partition.
        assert_ne!(run.recompute, Some(Recompute::Never));
        assert_eq!((flags.auto_balance, flags.recompute), (None, Some(Recompute::Never)));
        let client = find("cifar10-mobilenet-pipeline-2").unwrap();
        let run = client.with(&given).unwrap();
        let flags = client.with(&measuring(&run, &given, None).unwrap()).unwrap();
        assert_eq!((flags.cut.as_deref(), flags.place.as_deref()), (Some("first=1,last=1"), Some("p0,p1,p2")));
        assert_eq!((flags.batch, flags.recompute), (Some(16), Some(Recompute::Never)));
    }

    #[test]
    fn passes_that_are_run_again_cost_as_much_as_the_first_time() {
        let worker = |forward: f64| WorkerOutput {
            phases_s: [("forward", forward), ("backward", 8.0), ("optimizer", 2.0)]
                .map(|(n, s)| (n.to_owned(), s))
                .into(),
        };
        let output = RunOutput {
            command: String::new(),
            balance: vec![1, 2],
            steps: 6,
            warm_up_steps: 2,
            workers: vec![worker(4.0), worker(6.0)],
        };
        let run = |recompute| TrainFlags { batch: Some(8), recompute: Some(recompute), ..TrainFlags::default() };
        for (recompute, recompute_s) in [(Recompute::Always, [1.0, 1.5]), (Recompute::Never, [0.0, 0.0])] {
            let costs = PartitionCosts::measured(&output, &run(recompute)).unwrap();
            assert_eq!((&costs.forward_s[..], &costs.recompute_s[..]), (&[1.0, 1.5][..], &recompute_s[..]));
            assert_eq!((&costs.backward_s[..], &costs.optimizer_s[..]), (&[2.0, 2.0][..], &[0.5, 0.5][..]));
        }
        let ended = RunOutput { steps: 2, ..output };
        assert_eq!(PartitionCosts::measured(&ended, &run(Recompute::Never)), None);
    }
}

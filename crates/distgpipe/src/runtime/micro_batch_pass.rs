//! One micro-batch in one partition, from its forward to its backward pass.
//!
//! ```text
//!   kept:        F (graph) ───────────── held ─────────────► B
//!   recomputed:  F (no graph, input held) ──► R (graph) ───► B
//! ```
//!
//! R runs the same layers on the same input with the same random streams, so it makes the same activations bit for
//! bit. It comes before the gradient is waited for, so it fills a bubble if there is one. Whether a micro-batch is
//! recomputed is in the plan, not decided here.

use crate::engine::{self, Layout, Stream};
use crate::failure::Fault;
use crate::layer::Passing;
use crate::loss::Loss;
use crate::metrics::ClassCounts;
use crate::partition::Partition;
use crate::portal::Parcel;
use distgpipe_core::{MicroBatchId, PartitionId};
use tch::Tensor;

/// What the last partition does with its output.
pub struct Goal {
    /// The loss.
    pub loss: Loss,
    /// What the output should be.
    pub target: Tensor,
    /// This micro-batch's share of the batch, so that the sum over micro-batches is the batch's mean.
    pub share: f64,
}

/// What the last partition found.
pub struct Score {
    /// The mean loss of the micro-batch.
    pub loss: Tensor,
    /// How many rows are right, where that can be said.
    pub correct: Option<Tensor>,
    /// What each class was taken for, in evaluation.
    pub classes: Option<ClassCounts>,
}

/// What a forward pass leaves for the backward pass.
enum Held {
    /// Nothing: the plan recomputes.
    Input,
    /// The outputs with their graphs, per later partition; or the loss.
    Graph(Vec<Parcel>),
}

/// A micro-batch that has gone forward and not yet backward.
pub struct InFlight {
    micro_batch: MicroBatchId,
    stream: Stream,
    arrived: Vec<Parcel>,
    goal: Option<Goal>,
    held: Held,
}

/// What a forward pass makes.
pub struct Forwarded {
    /// Tensors for later partitions, without their graphs.
    pub parcels: Vec<Parcel>,
    /// The last partition's score.
    pub score: Option<Score>,
}

/// A forward pass that is about to be run.
pub struct Forward<'a> {
    /// Where.
    pub partition: &'a mut Partition,
    /// Of which micro-batch.
    pub micro_batch: MicroBatchId,
    /// Randomness of this step and micro-batch.
    pub stream: Stream,
    /// The input: parcels of earlier partitions.
    pub arrived: Vec<Parcel>,
    /// For the last partition, if there is a target.
    pub goal: Option<Goal>,
}

/// Gradients for an earlier partition; absent where a tensor has none.
pub type GradientParcel = (PartitionId, Vec<Option<Tensor>>);

/// The later partition that the loss counts as, so that the last partition has an output like any other.
const LOSS: PartitionId = PartitionId(u32::MAX);

impl Forward<'_> {
    /// Evaluates: nothing is held.
    pub fn evaluate(self) -> Result<Forwarded, Fault> {
        let Forward { partition, micro_batch, stream, arrived, goal } = self;
        tch::no_grad(|| run(partition, Passing::Evaluate, micro_batch, stream, &arrived, goal.as_ref()))
            .map(|(_, made)| made)
    }

    /// Goes forward for training; `recompute` says whether the plan does it again before the backward pass.
    pub fn train(self, recompute: bool) -> Result<(Forwarded, InFlight), Fault> {
        let Forward { partition, micro_batch, stream, arrived, goal } = self;
        // The gradient of the data itself goes nowhere, so it is not computed.
        let arrived = if partition.is_first() { arrived } else { leaves(arrived)? };
        let mut pass = || run(partition, Passing::Train, micro_batch, stream, &arrived, goal.as_ref());
        let (held, made) = if recompute {
            let (_, made) = tch::no_grad(pass)?;
            (Held::Input, made)
        } else {
            let (graph, made) = pass()?;
            (Held::Graph(graph), made)
        };
        Ok((made, InFlight { micro_batch, stream, arrived, goal, held }))
    }
}

impl InFlight {
    /// Gets the activations back.
    pub fn recompute(&mut self, partition: &mut Partition) -> Result<(), Fault> {
        let (graph, _) =
            run(partition, Passing::Replay, self.micro_batch, self.stream, &self.arrived, self.goal.as_ref())?;
        self.held = Held::Graph(graph);
        Ok(())
    }

    /// Goes backward with the gradients of each later partition, in order of partitions; gives those for the earlier
    /// ones. Gradients of the parameters gather in the parameters.
    pub fn backward(self, gradients: Vec<Vec<Option<Tensor>>>) -> Result<Vec<GradientParcel>, Fault> {
        let Held::Graph(graph) = self.held else {
            return Err(Fault::protocol("a recomputed micro-batch", "one of which only the input was held"));
        };
        let mut roots = Vec::new();
        match &self.goal {
            Some(goal) => {
                for (_, tensors) in graph {
                    for loss in tensors {
                        let share = loss.f_full_like(goal.share)?;
                        roots.push((loss, Some(share)));
                    }
                }
            }
            None => {
                for ((to, tensors), gradients) in graph.into_iter().zip(gradients) {
                    if tensors.len() != gradients.len() {
                        let expected = format!("{} gradients from partition {to}", tensors.len());
                        return Err(Fault::protocol(expected, gradients.len().to_string()));
                    }
                    for (tensor, gradient) in tensors.into_iter().zip(gradients) {
                        if let (true, Some(gradient)) = (tensor.requires_grad(), gradient) {
                            if gradient.kind() != tensor.kind() {
                                // libtorch would cast it without a word.
                                let expected = format!("a gradient of {:?} from partition {to}", tensor.kind());
                                return Err(Fault::protocol(expected, format!("{:?}", gradient.kind())));
                            }
                            roots.push((tensor, Some(gradient)));
                        }
                    }
                }
            }
        }
        roots.retain(|(tensor, _)| tensor.requires_grad());
        if !roots.is_empty() {
            engine::backward(&roots)?;
        }
        let back = self.arrived.into_iter().map(|(from, tensors)| (from, tensors.iter().map(engine::grad).collect()));
        Ok(back.collect())
    }
}

/// Cuts the graph at the partition's border: what arrives is a leaf that gathers the gradient to send back.
fn leaves(arrived: Vec<Parcel>) -> Result<Vec<Parcel>, Fault> {
    let leaf = |tensor: Tensor| -> Result<Tensor, Fault> {
        let float = engine::is_float(&tensor);
        let tensor = tensor.f_detach()?;
        Ok(if float { tensor.f_set_requires_grad(true)? } else { tensor })
    };
    arrived
        .into_iter()
        .map(|(from, tensors)| Ok((from, tensors.into_iter().map(leaf).collect::<Result<_, _>>()?)))
        .collect()
}

/// Runs the layers; gives the outputs with their graphs and what is to be sent.
fn run(
    partition: &mut Partition,
    passing: Passing,
    micro_batch: MicroBatchId,
    stream: Stream,
    arrived: &[Parcel],
    goal: Option<&Goal>,
) -> Result<(Vec<Parcel>, Forwarded), Fault> {
    let _casting = partition.autocast()?;
    let (input, skips) = partition.unpack(arrived)?;
    let versions = || arrived.iter().flat_map(|(_, tensors)| tensors).map(engine::version).collect::<Vec<_>>();
    let before = versions();
    let (output, skips) = partition.forward(passing, micro_batch, stream, input, skips)?;
    if versions() != before {
        // libtorch cannot notice: without a graph, recomputation would start from the changed values.
        return Err(
            partition.fault_of_first_layer("it changes its input in place, which another pass or worker still needs")
        );
    }
    let last = partition.is_last();
    let mut score = None;
    let graph = match goal {
        Some(goal) => {
            let output = output.into_iter().next().ok_or_else(|| Fault::protocol("an output", "none"))?;
            let loss = if passing == Passing::Evaluate { goal.loss.in_evaluation() } else { goal.loss };
            let loss = loss.compute(&output, &goal.target)?;
            if passing != Passing::Replay {
                let correct = tch::no_grad(|| goal.loss.correct(&output, &goal.target))?;
                let classes = match passing {
                    Passing::Evaluate => goal.loss.classes(&output, &goal.target)?,
                    _ => None,
                };
                score = Some(Score { loss: loss.f_detach()?, correct, classes });
            }
            vec![(LOSS, vec![loss])]
        }
        None if last => vec![(LOSS, output)],
        None => partition.pack(dense(output)?, skips)?,
    };
    let detach = |tensors: &[Tensor]| tensors.iter().map(Tensor::f_detach).collect::<Result<Vec<_>, _>>();
    let mut parcels = Vec::new();
    if passing != Passing::Replay {
        for (to, tensors) in &graph {
            parcels.push((*to, detach(tensors)?));
        }
    }
    if passing == Passing::Evaluate {
        return Ok((Vec::new(), Forwarded { parcels, score }));
    }
    Ok((graph, Forwarded { parcels, score }))
}

/// Tensors without gaps, so that they are laid out alike whichever transport carries them.
fn dense(tensors: Vec<Tensor>) -> Result<Vec<Tensor>, Fault> {
    let dense = |t: Tensor| if engine::layout(&t).is_some() { Ok(t) } else { Ok(t.f_contiguous()?) };
    tensors.into_iter().map(dense).collect()
}

/// An image in the layout that convolutions are fastest on; anything else as it is.
pub fn for_convolutions(tensor: Tensor) -> Result<Tensor, Fault> {
    match tensor.dim() {
        4 if engine::is_float(&tensor) => engine::with_layout(&tensor, Layout::ChannelsLast),
        _ => Ok(tensor),
    }
}

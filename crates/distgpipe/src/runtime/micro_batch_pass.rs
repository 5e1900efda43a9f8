//! One micro-batch in one partition, from its forward pass to its backward pass.
//!
//! ```text
//!   kept:        F (graph) ───────────── held ─────────────► B
//!   recomputed:  F (no graph, input held) ──► R (graph) ───► B
//!   frozen:      F (no graph)
//! ```
//!
//! R runs the same layers on the same input with the same random streams, so its activations have the same bits. The
//! plan places R before the wait for the gradient, so it fills a bubble if there is one. The plan also says which
//! micro-batches are recomputed, and which partitions have no backward pass; nothing is decided here.

use crate::engine::{self, Layout, Stream, WatchedParameters};
use crate::failure::Fault;
use crate::model::layer::PassMode;
use crate::model::loss::LossFunction;
use crate::runtime::partition::Partition;
use crate::runtime::portal::Parcel;
use crate::train::metrics::ClassCounts;
use distgpipe_core::{MicroBatchId, PartitionId};
use std::sync::Arc;
use tch::Tensor;

/// The loss that the last partition computes of its output.
pub struct LossTarget {
    /// The loss function of the run.
    pub loss: Arc<dyn LossFunction>,
    /// What the output is compared with.
    pub target: Tensor,
    /// The factor of this micro-batch's mean loss in the loss of the update: its part of the batch's rows, divided by
    /// the number of accumulated batches.
    pub share: f64,
}

impl LossTarget {
    pub(crate) fn shallow_clone(&self) -> Self {
        LossTarget { loss: self.loss.clone(), target: self.target.shallow_clone(), share: self.share }
    }
}

/// The loss and score of one micro-batch, from the last partition.
pub struct Score {
    /// The mean loss over the rows of the micro-batch.
    pub loss: Tensor,
    /// How many rows are classified correctly; absent for losses without classes.
    pub correct: Option<Tensor>,
    /// Predicted against actual classes, in evaluation only.
    pub classes: Option<ClassCounts>,
}

impl Score {
    /// Handles of the same tensors. A training pass counts no classes.
    pub(crate) fn shallow_clone(&self) -> Self {
        let correct = self.correct.as_ref().map(Tensor::shallow_clone);
        Score { loss: self.loss.shallow_clone(), correct, classes: self.classes.clone() }
    }
}

/// What a forward pass keeps for the backward pass.
enum SavedActivations {
    /// Only the input: the plan recomputes the rest.
    Input,
    /// The outputs with their autograd graphs, per later partition; in the last partition, the loss.
    Graph(Vec<Parcel>),
    /// Everything, in the memory of a CUDA graph; see [`WorkerGraphs`](crate::runtime::graphs::WorkerGraphs).
    Recorded,
}

/// What a training pass keeps for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Everything.
    Activations,
    /// Only the input: the rest is computed again.
    Input,
    /// Nothing: there is no backward pass, because neither this partition nor one before it has a parameter to train. Dropout draws,
    /// and batch norms use and collect the statistics of the batch, as in any training.
    Nothing,
}

/// A micro-batch between its forward and its backward pass in one partition.
pub struct InFlight {
    micro_batch: MicroBatchId,
    stream: Stream,
    arrived: Vec<Parcel>,
    goal: Option<LossTarget>,
    held: SavedActivations,
}

/// The results of a forward pass.
pub struct ForwardOutput {
    /// Tensors for later partitions, detached from their graphs.
    pub parcels: Vec<Parcel>,
    /// Present in the last partition if it had a [`LossTarget`].
    pub score: Option<Score>,
}

/// The arguments of a forward pass.
pub struct Forward<'a> {
    /// The partition whose layers run.
    pub partition: &'a mut Partition,
    /// The micro-batch, counted within the replica.
    pub micro_batch: MicroBatchId,
    /// The random stream of this step and micro-batch.
    pub stream: Stream,
    /// The input: the parcels of earlier partitions.
    pub arrived: Vec<Parcel>,
    /// For the last partition, if there is a target.
    pub goal: Option<LossTarget>,
}

/// Gradients for an earlier partition, one per tensor that it sent; absent where a tensor has none.
pub type GradientParcel = (PartitionId, Vec<Option<Tensor>>);

/// Stands for the receiver of the loss, so that the last partition has an output like any other.
const LOSS: PartitionId = PartitionId(u32::MAX);

impl Forward<'_> {
    /// Runs a forward pass that has no backward pass.
    pub fn evaluate(self) -> Result<ForwardOutput, Fault> {
        let Forward { partition, micro_batch, stream, arrived, goal } = self;
        tch::no_grad(|| run_layers(partition, PassMode::Evaluate, micro_batch, stream, &arrived, goal.as_ref()))
            .map(|(_, output)| output)
    }

    /// Runs a forward pass in training. If it keeps only the input, [`InFlight::recompute`] must be called before the backward pass.
    /// `needs_gradient` tells of each earlier partition whether it has a backward pass.
    pub fn train(
        self,
        kept: Kept,
        needs_gradient: impl Fn(PartitionId) -> bool,
    ) -> Result<(ForwardOutput, Option<InFlight>), Fault> {
        let Forward { partition, micro_batch, stream, arrived, goal } = self;
        // Nobody needs the gradient of the data itself, so it is not computed.
        let no_leaves = kept == Kept::Nothing || partition.is_first();
        let arrived = if no_leaves { arrived } else { leaves(arrived, needs_gradient)? };
        let mut pass = || run_layers(partition, PassMode::Train, micro_batch, stream, &arrived, goal.as_ref());
        let (held, output) = match kept {
            Kept::Nothing => return Ok((tch::no_grad(pass)?.1, None)),
            Kept::Input => (SavedActivations::Input, tch::no_grad(pass)?.1),
            Kept::Activations => {
                let (graph, output) = pass()?;
                (SavedActivations::Graph(graph), output)
            }
        };
        Ok((output, Some(InFlight { micro_batch, stream, arrived, goal, held })))
    }
}

impl InFlight {
    /// A micro-batch whose forward pass has run as a CUDA graph.
    pub(crate) fn recorded(
        micro_batch: MicroBatchId,
        stream: Stream,
        arrived: Vec<Parcel>,
        goal: Option<LossTarget>,
    ) -> Self {
        InFlight { micro_batch, stream, arrived, goal, held: SavedActivations::Recorded }
    }

    /// Whether its activations are in the memory of a CUDA graph.
    pub(crate) fn is_recorded(&self) -> bool {
        matches!(self.held, SavedActivations::Recorded)
    }

    /// What arrived from earlier partitions, as leaves.
    pub(crate) fn arrived(&self) -> &[Parcel] {
        &self.arrived
    }

    /// Where the backward pass starts, with these gradients of the later partitions, in the order of partitions.
    pub(crate) fn roots(&self, gradients: &[Vec<Option<Tensor>>]) -> Result<Vec<Root>, Fault> {
        let SavedActivations::Graph(graph) = &self.held else {
            return Err(Fault::internal("a forward pass with its autograd graph", "none"));
        };
        let mut roots = match &self.goal {
            Some(goal) => loss_roots(graph, goal.share)?,
            None => output_roots(graph, gradients)?,
        };
        roots.retain(|(tensor, _)| tensor.requires_grad());
        Ok(roots)
    }

    /// Runs the forward pass again, this time with its graph.
    pub fn recompute(&mut self, partition: &mut Partition) -> Result<(), Fault> {
        let goal = self.goal.as_ref();
        let (graph, _) =
            run_layers(partition, PassMode::Recompute, self.micro_batch, self.stream, &self.arrived, goal)?;
        self.held = SavedActivations::Graph(graph);
        Ok(())
    }

    /// Runs the backward pass. Takes the gradients of the later partitions, in the order of partitions, and returns
    /// those for the earlier ones. Gradients of the parameters accumulate in the parameters, and `watched` hears of them.
    pub fn backward(
        self,
        gradients: Vec<Vec<Option<Tensor>>>,
        watched: Option<&WatchedParameters<'_>>,
    ) -> Result<Vec<GradientParcel>, Fault> {
        let roots = self.roots(&gradients)?;
        if !roots.is_empty() {
            engine::backward(&roots, watched)?;
        }
        let back = self.arrived.into_iter().map(|(from, tensors)| {
            let gradients = tensors.iter().map(engine::own_grad).collect::<Result<_, _>>()?;
            Ok((from, gradients))
        });
        back.collect()
    }
}

/// A tensor from which a backward pass starts, with its upstream gradient.
pub(crate) type Root = (Tensor, Option<Tensor>);

/// The roots of the last partition: its losses, weighted by the micro-batch's share.
fn loss_roots(graph: &[Parcel], share: f64) -> Result<Vec<Root>, Fault> {
    let losses = graph.iter().flat_map(|(_, tensors)| tensors);
    losses.map(|loss| Ok((loss.shallow_clone(), Some(loss.f_full_like(share)?)))).collect()
}

/// The roots of any other partition: its outputs, with the gradients that arrived for them.
fn output_roots(graph: &[Parcel], gradients: &[Vec<Option<Tensor>>]) -> Result<Vec<Root>, Fault> {
    let mut roots = Vec::new();
    for ((to, tensors), gradients) in graph.iter().zip(gradients) {
        if tensors.len() != gradients.len() {
            let expected = format!("{} gradients from partition {to}", tensors.len());
            return Err(Fault::protocol(expected, gradients.len().to_string()));
        }
        for (tensor, gradient) in tensors.iter().zip(gradients) {
            if let (true, Some(gradient)) = (tensor.requires_grad(), gradient) {
                if gradient.kind() != tensor.kind() {
                    // libtorch would cast it silently.
                    let expected = format!("a gradient of type {:?} from partition {to}", tensor.kind());
                    return Err(Fault::protocol(expected, format!("{:?}", gradient.kind())));
                }
                roots.push((tensor.shallow_clone(), Some(gradient.shallow_clone())));
            }
        }
    }
    Ok(roots)
}

/// Cuts the graph at the partition's border: each float tensor that arrives from a partition with a backward pass
/// becomes a leaf, which accumulates the gradient to send back.
fn leaves(arrived: Vec<Parcel>, needs_gradient: impl Fn(PartitionId) -> bool) -> Result<Vec<Parcel>, Fault> {
    let leaf = |from: PartitionId, tensor: Tensor| -> Result<Tensor, Fault> {
        let wanted = needs_gradient(from) && engine::is_float(&tensor);
        let tensor = tensor.f_detach()?;
        Ok(if wanted { tensor.f_set_requires_grad(true)? } else { tensor })
    };
    arrived
        .into_iter()
        .map(|(from, tensors)| Ok((from, tensors.into_iter().map(|t| leaf(from, t)).collect::<Result<_, _>>()?)))
        .collect()
}

/// Runs the layers and, in the last partition, the loss. Returns the outputs with their graphs (none in evaluation) and
/// detached results (none when recomputing).
fn run_layers(
    partition: &mut Partition,
    mode: PassMode,
    micro_batch: MicroBatchId,
    stream: Stream,
    arrived: &[Parcel],
    goal: Option<&LossTarget>,
) -> Result<(Vec<Parcel>, ForwardOutput), Fault> {
    if mode == PassMode::Train {
        partition.norms().merge_if_full(micro_batch)?;
    }
    let _autocast = partition.autocast()?;
    let (input, skips) = partition.unpack(arrived)?;
    let versions = || arrived.iter().flat_map(|(_, tensors)| tensors).map(engine::version).collect::<Vec<_>>();
    let before = versions();
    let (output, skips) = partition.forward(mode, micro_batch, stream, input, skips)?;
    if versions() != before {
        // libtorch cannot detect this without a graph, and a recomputation would start from the changed values.
        let why =
            "it changes its input in place, which another pass or worker still needs; use an out-of-place operation";
        return Err(Fault::layer(partition.first_layer_name(), why));
    }
    let (graph, score) = match goal {
        Some(goal) => {
            let output = output.into_iter().next();
            let output = output.ok_or_else(|| Fault::layer(partition.last_layer_name(), "it returned no output"))?;
            let (loss, score) = compute_loss(goal, mode, &output)?;
            (vec![(LOSS, vec![loss])], score)
        }
        None if partition.is_last() => (vec![(LOSS, output)], None),
        None => {
            let output = output.into_iter().map(dense).collect::<Result<_, _>>()?;
            (partition.pack(output, skips)?, None)
        }
    };
    let detach = |tensors: &[Tensor]| tensors.iter().map(Tensor::f_detach).collect::<Result<Vec<_>, _>>();
    let mut parcels = Vec::new();
    if mode != PassMode::Recompute {
        for (to, tensors) in &graph {
            parcels.push((*to, detach(tensors)?));
        }
    }
    let graph = if mode == PassMode::Evaluate { Vec::new() } else { graph };
    Ok((graph, ForwardOutput { parcels, score }))
}

/// The loss with its graph, and the score unless the pass is a recomputation.
fn compute_loss(goal: &LossTarget, mode: PassMode, output: &Tensor) -> Result<(Tensor, Option<Score>), Fault> {
    let loss = match mode {
        PassMode::Evaluate => goal.loss.evaluate(output, &goal.target)?,
        PassMode::Train | PassMode::Recompute => goal.loss.compute(output, &goal.target)?,
    };
    if mode == PassMode::Recompute {
        return Ok((loss, None));
    }
    let correct = tch::no_grad(|| goal.loss.correct(output, &goal.target))?;
    let classes = match mode {
        PassMode::Evaluate => goal.loss.classes(output, &goal.target)?,
        _ => None,
    };
    let score = Score { loss: loss.f_detach()?, correct, classes };
    Ok((loss, Some(score)))
}

/// Makes a tensor dense, so that it has the same layout whichever transport carries it.
fn dense(tensor: Tensor) -> Result<Tensor, Fault> {
    match engine::layout(&tensor) {
        Some(_) => Ok(tensor),
        None => Ok(tensor.f_contiguous()?),
    }
}

/// Converts a batch of images to channels-last, on which convolutions are fastest. Other tensors are returned as they
/// are.
pub fn for_convolutions(tensor: Tensor) -> Result<Tensor, Fault> {
    match tensor.dim() {
        4 if engine::is_float(&tensor) => engine::with_layout(&tensor, Layout::ChannelsLast),
        _ => Ok(tensor),
    }
}

//! A worker's training passes as CUDA graphs.
//!
//! Launching the kernels of a small micro-batch takes a GPU's host longer than running them takes the GPU. So a worker records the
//! forward pass, the recomputation and the backward pass of each micro-batch once, and then starts each with one call.
//!
//! ```text
//!   steps 0 1      as any other: libtorch chooses algorithms and allocates workspaces
//!   step  2        each pass is recorded and then run, in the order of the plan
//!   steps 3 …      input ─copy─► static tensors ─► graph ─► static tensors ─► as any output
//! ```
//!
//! - Micro-batches are dealt to lanes: a stream and a pool of memory each. The passes of a lane run in the order in which they were
//!   recorded, so a pass may use memory that an earlier one no longer needs, as without graphs. Lanes run beside each other and
//!   fill the GPU. Gradients are added in the order of the plan, whatever the number of lanes, so their bits do not depend on it.
//! - A backward pass is recorded in parts. Each ends when it has found a part of the parameters' gradients, which are then added by a
//!   graph of their own: a lane holds the gradients of one part, and the next part uses their memory again.
//! - A step of another size (the last batch of an epoch), evaluation, and passes that cannot be recorded run without graphs.
//! - No tensor of a graph is used after the step: a worker waits for its GPU before it reports.

use crate::comm::protocol::StepCommand;
use crate::engine::cuda::{self, CudaStream, Event, Graph, GraphPool, HeldStream, IndexedGradients, LastGradients};
use crate::engine::{self, Device, SeedTable, TensorList};
use crate::failure::Fault;
use crate::runtime::deferred_batch_norm::CollectedStatistics;
use crate::runtime::micro_batch_pass::{Forward, ForwardOutput, GradientParcel, InFlight, Kept, LossTarget, Score};
use crate::runtime::partition::Partition;
use crate::runtime::portal::Parcel;
use distgpipe_core::schedule::{Op, Plan};
use distgpipe_core::{MicroBatchId, PartitionId};
use serde::{Deserialize, Serialize};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;
use tch::Tensor;

/// Steps of one size before passes are recorded.
const WARM_UP_STEPS: usize = 2;

/// The steps until graphs are recorded, the recording included: they are slower than those after them.
pub(crate) const STEPS_UNTIL_RECORDED: u64 = WARM_UP_STEPS as u64 + 1;

/// A backward pass is cut whenever it holds 1/`BACKWARD_PARTS` of the bytes of its parameters. A lane then holds that much and the gradient
/// that was found last.
const BACKWARD_PARTS: usize = 4;

/// The fewest bytes of gradients for which a backward pass is cut: small models would launch more graphs and hardly hold less.
const PART_BYTES_MIN: usize = 4 << 20;

/// The bytes of gradients at which a backward pass is cut.
fn part_bytes(parameters: &[Tensor]) -> usize {
    let bytes = |parameter: &Tensor| parameter.numel() * parameter.kind().elt_size_in_bytes();
    (parameters.iter().map(bytes).sum::<usize>() / BACKWARD_PARTS).max(PART_BYTES_MIN)
}

/// The most lanes of a worker.
pub const LANES_MAX: usize = 8;

/// Whether the passes of a worker on a GPU are recorded as CUDA graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphMode {
    /// Where it is possible. The report of the run says where it is not.
    #[default]
    Auto,
    /// As `Auto`, but a pass that cannot be recorded ends the run.
    On,
    /// Never.
    Off,
}

impl GraphMode {
    /// Whether any worker with one of these devices may record graphs. What [`Device::Auto`] is, the worker's host decides.
    pub(crate) fn records_on(self, devices: &[Device]) -> bool {
        self != GraphMode::Off && devices.iter().any(|&device| device != Device::Cpu)
    }
}

impl FromStr for GraphMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(GraphMode::Auto),
            "on" => Ok(GraphMode::On),
            "off" => Ok(GraphMode::Off),
            _ => Err("expected `auto`, `on` or `off`".to_owned()),
        }
    }
}

impl fmt::Display for GraphMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            GraphMode::Auto => "auto",
            GraphMode::On => "on",
            GraphMode::Off => "off",
        })
    }
}

/// How workers on GPUs use CUDA graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphOptions {
    /// Whether passes are recorded.
    pub mode: GraphMode,
    /// How many micro-batches of a worker the GPU may compute at a time: 1 to [`LANES_MAX`]. By default the workers of a GPU share 4,
    /// or 2 if micro-batches are recomputed to save memory.
    pub streams: Option<usize>,
}

/// What a worker has recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphReport {
    /// How many micro-batches of its partitions run as graphs.
    pub micro_batches: usize,
    /// How many of them the GPU computes at a time.
    pub streams: usize,
    /// The partitions that run without graphs, and why.
    pub refused: BTreeMap<u32, String>,
}

/// What the graphs of a step depend on besides shapes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct StepSize {
    rows: usize,
    all_micro_batches: usize,
    first: usize,
    batches: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// How many steps of this size have run.
    WarmUp(usize),
    /// This step records.
    Recording,
    Recorded,
}

/// A stream, and the memory of the graphs that run in it.
struct Lane {
    stream: CudaStream,
    pool: GraphPool,
    /// Keeps the stream from others; the first lane's is the thread's.
    _held: Option<HeldStream>,
}

/// The gradients of a partition's parameters, to which recorded passes add.
struct GradientSums {
    parameters: Vec<Tensor>,
    sums: Vec<Tensor>,
    /// Whether the parameter had no gradient before.
    created: Vec<bool>,
    /// The part of a backward pass that first had a gradient for the parameter, if any has. It is the chain of the sum: the additions to
    /// the sums of a chain wait for each other.
    chains: Vec<Option<usize>>,
}

impl GradientSums {
    fn new(parameters: Vec<Tensor>) -> Result<Self, Fault> {
        let (mut sums, mut created) = (Vec::new(), Vec::new());
        for parameter in &parameters {
            let gradient = engine::grad(parameter);
            created.push(gradient.is_none());
            sums.push(match gradient {
                Some(gradient) => gradient,
                None => {
                    let zeros = parameter.f_detach()?.f_zeros_like()?;
                    cuda::set_grad(parameter, &zeros)?;
                    zeros
                }
            });
        }
        Ok(GradientSums { chains: vec![None; parameters.len()], parameters, sums, created })
    }

    /// Records the addition of the gradients that a part of a backward pass has found. Frees them.
    fn record_addition(
        &mut self,
        pool: &GraphPool,
        part: usize,
        gradients: IndexedGradients,
    ) -> Result<Option<Addition>, Fault> {
        if gradients.is_empty() {
            return Ok(None);
        }
        let mut chains: Vec<usize> =
            gradients.iter().map(|&(index, _)| *self.chains[index].get_or_insert(part)).collect();
        chains.sort_unstable();
        chains.dedup();
        let terms = gradients.iter().map(|(index, gradient)| (&self.sums[*index], gradient));
        // libtorch adds gradients of one type with one kernel for many, and those of casts with one for each.
        let (of_casts, others): (Vec<_>, Vec<_>) = terms.partition(|(sum, gradient)| sum.kind() != gradient.kind());
        let (graph, ()) = pool.record(|| {
            [of_casts, others].into_iter().filter(|terms| !terms.is_empty()).try_for_each(|terms| {
                let (to, from): (TensorList, TensorList) = terms.into_iter().unzip();
                tch::no_grad(|| to.add_(&from).map(drop))
            })
        })?;
        Ok(Some(Addition { graph, chains }))
    }

    /// Takes the zeros away from parameters that no pass uses: the optimizer must not see a gradient of theirs.
    fn clear_unused(&self) {
        let unused = self.chains.iter().zip(&self.created).map(|(chain, created)| *created && chain.is_none());
        self.parameters.iter().zip(unused).filter(|(_, unused)| *unused).for_each(|(p, _)| engine::clear_grad(p));
    }

    /// Drops the sums of parameters that no pass uses.
    fn keep_used(&mut self) {
        self.clear_unused();
        for tensors in [&mut self.parameters, &mut self.sums] {
            let mut chains = self.chains.iter();
            tensors.retain(|_| chains.next().is_some_and(Option::is_some));
        }
        self.chains.retain(Option::is_some);
    }

    /// Sets all sums to 0 and makes them the gradients again.
    fn clear(&self) -> Result<(), Fault> {
        tch::no_grad(|| self.sums.iter().collect::<TensorList>().zero_().map(drop))?;
        self.parameters.iter().zip(&self.sums).try_for_each(|(parameter, sum)| cuda::set_grad(parameter, sum))
    }
}

/// A recorded micro-batch of a partition.
struct RecordedPass {
    inputs: Vec<Parcel>,
    goal: Option<LossTarget>,
    seeds: SeedTable,
    forward: Graph,
    parcels: Vec<Parcel>,
    score: Option<Score>,
    statistics: CollectedStatistics,
    recomputation: Option<Graph>,
    backward: Option<RecordedBackward>,
}

struct RecordedBackward {
    /// Its graphs, each with the addition of the parameters' gradients that it finds, if any.
    parts: Vec<(Graph, Option<Addition>)>,
    upstream: Vec<Vec<Option<Tensor>>>,
    gradients: Vec<GradientParcel>,
}

/// Adds gradients to sums.
struct Addition {
    graph: Graph,
    /// The chains of these sums: several if this pass was cut elsewhere than the one that was recorded first.
    chains: Vec<usize>,
}

/// The last addition of each chain of each partition in this step. Additions to one sum follow each other in the order of the plan,
/// because each waits for the event of its chain and replaces it.
type LastAdditions = BTreeMap<(PartitionId, usize), Event>;

/// The graphs of one worker.
pub struct WorkerGraphs {
    mode: GraphMode,
    device: usize,
    lanes: Vec<Lane>,
    size: Option<StepSize>,
    progress: Progress,
    /// Whether the current step uses graphs.
    active: bool,
    /// Whether recording has failed in the current step.
    abandoned: bool,
    /// How many lanes the current step still uses.
    lanes_used: usize,
    current: usize,
    passes: HashMap<(PartitionId, MicroBatchId), RecordedPass>,
    sums: BTreeMap<PartitionId, GradientSums>,
    /// Casts of parameters that the passes of a partition read, and the parameters, which may have changed since the last step.
    casts: BTreeMap<PartitionId, (TensorList, TensorList)>,
    added: LastAdditions,
    refused: BTreeMap<PartitionId, String>,
    report: Option<GraphReport>,
}

impl WorkerGraphs {
    /// The graphs of a worker whose thread has entered its own stream; `None` if it has none. `sharing` is how many workers of the run
    /// have the same device.
    pub fn new(options: GraphOptions, plan: &Plan, device: tch::Device, sharing: usize) -> Result<Option<Self>, Fault> {
        let Some(device) = cuda::index(device).filter(|_| options.mode != GraphMode::Off) else { return Ok(None) };
        let mut actions = plan.placement().worker_ids().flat_map(|worker| plan.actions(worker));
        let on_device = if actions.any(|action| action.op == Op::Recompute) { 2 } else { 4 };
        let streams = options.streams.unwrap_or((on_device / sharing.max(1)).max(1));
        let lane = |stream, held| Lane { stream, pool: GraphPool::new(device), _held: held };
        let mut lanes = vec![lane(CudaStream::current(device)?, None)];
        // Without a stream of its own, the worker reports at its first recording that there is none.
        let wanted = if cuda::current_is_unshared(device)? { streams } else { 1 };
        while lanes.len() < wanted {
            let Some(held) = HeldStream::unshared(device)? else { break };
            lanes.push(lane(*held, Some(held)));
        }
        Ok(Some(WorkerGraphs {
            mode: options.mode,
            device,
            lanes,
            size: None,
            progress: Progress::WarmUp(0),
            active: false,
            abandoned: false,
            lanes_used: 1,
            current: 0,
            passes: HashMap::new(),
            sums: BTreeMap::new(),
            casts: BTreeMap::new(),
            added: LastAdditions::new(),
            refused: BTreeMap::new(),
            report: None,
        }))
    }

    /// Decides how the passes of a training step run.
    pub fn begin_step(&mut self, step: &StepCommand) -> Result<(), Fault> {
        let &StepCommand { rows, all_micro_batches, first, batches, .. } = step;
        let size = Some(StepSize { rows, all_micro_batches, first, batches });
        let same = self.size == size;
        self.active = match self.progress {
            Progress::WarmUp(steps) if same && steps >= WARM_UP_STEPS => {
                self.progress = Progress::Recording;
                // What the steps so far have left would be held beside the pools.
                if !engine::gpu_memory_is_shared() {
                    cuda::empty_cache()?;
                }
                true
            }
            Progress::WarmUp(steps) => {
                self.progress = Progress::WarmUp(if same { steps + 1 } else { 1 });
                self.size = size;
                false
            }
            Progress::Recording | Progress::Recorded => same,
        };
        self.lanes_used = 1;
        if self.active {
            self.casts
                .values()
                .try_for_each(|(casts, parameters)| tch::no_grad(|| casts.copy_(parameters).map(drop)))?;
        }
        if self.active && self.refused.is_empty() {
            self.lanes_used = self.lanes.len();
            let begun = Event::record(self.device)?;
            for lane in &self.lanes[1..] {
                lane.stream.enter()?;
                begun.wait()?;
            }
            self.lanes[0].stream.enter()?;
        }
        Ok(())
    }

    /// Makes the lane of a micro-batch the thread's current stream.
    pub fn enter_lane(&mut self, micro_batch: MicroBatchId) -> Result<(), Fault> {
        let lane = micro_batch.index() % self.lanes_used;
        if lane != self.current {
            self.lanes[lane].stream.enter()?;
            self.current = lane;
        }
        Ok(())
    }

    /// Ends a training step: the worker's own stream waits for all lanes.
    pub fn end_step(&mut self) -> Result<(), Fault> {
        if self.lanes_used > 1 {
            let mut done = Vec::new();
            for lane in &self.lanes[1..] {
                lane.stream.enter()?;
                done.push(Event::record(self.device)?);
            }
            self.enter_own_stream()?;
            done.iter().try_for_each(Event::wait)?;
        }
        if self.progress == Progress::Recording {
            self.progress = Progress::Recorded;
            self.sums.values_mut().for_each(GradientSums::keep_used);
            let refused = self.refused.iter().map(|(partition, why)| (partition.0, why.clone())).collect();
            let streams = if self.refused.is_empty() { self.lanes.len() } else { 1 };
            self.report = Some(GraphReport { micro_batches: self.passes.len(), streams, refused });
        }
        (self.active, self.abandoned) = (false, false);
        self.added.clear();
        self.lanes_used = 1;
        self.enter_own_stream()
    }

    fn enter_own_stream(&mut self) -> Result<(), Fault> {
        self.current = 0;
        self.lanes[0].stream.enter()
    }

    /// What was recorded in the last step, once.
    pub fn take_report(&mut self) -> Option<GraphReport> {
        self.report.take()
    }

    /// Must be called after gradients were cleared: passes that were recorded add to tensors of their own.
    pub fn clear_gradients(&mut self) -> Result<(), Fault> {
        if self.progress == Progress::Recorded {
            self.sums.values().try_for_each(GradientSums::clear)?;
        }
        Ok(())
    }

    /// Goes on without lanes beside each other, for a pass without a graph: libtorch would add its gradients to the same sums.
    fn leave_lanes(&mut self) -> Result<(), Fault> {
        if self.lanes_used > 1 {
            self.lanes.iter().try_for_each(|lane| lane.stream.synchronize())?;
            self.lanes_used = 1;
            self.enter_own_stream()?;
        }
        Ok(())
    }

    /// Notes that a partition runs without graphs from now on. The rest of the step runs without any, and the next one records the other
    /// partitions again, on one lane: passes that were recorded on several cannot run beside one without a graph.
    fn refuse(&mut self, id: PartitionId, fault: Fault) -> Result<(), Fault> {
        if self.mode == GraphMode::On {
            return Err(fault);
        }
        self.leave_lanes()?;
        self.refused.entry(id).or_insert_with(|| fault.to_string());
        self.sums.values().for_each(GradientSums::clear_unused);
        self.sums.clear();
        self.passes.clear();
        // libtorch does not take a pool into use again that has lost its last graph.
        self.lanes.iter_mut().for_each(|lane| lane.pool = GraphPool::new(self.device));
        (self.active, self.abandoned) = (false, true);
        self.progress = Progress::WarmUp(WARM_UP_STEPS);
        Ok(())
    }

    /// Merges the statistics of batch norms if there are many, on the worker's own stream and after the lanes that compute them.
    fn merge_norms(&self, partition: &mut Partition, next: MicroBatchId) -> Result<(), Fault> {
        if !partition.norms().is_full() {
            return Ok(());
        }
        self.lanes.iter().try_for_each(|lane| lane.stream.synchronize())?;
        self.lanes[0].stream.enter()?;
        partition.norms().merge_if_full(next)?;
        self.lanes[self.current].stream.enter()
    }

    /// Runs the forward pass of a micro-batch in training.
    pub fn forward(
        &mut self,
        id: PartitionId,
        forward: Forward<'_>,
        kept: Kept,
        needs_gradient: impl Fn(PartitionId) -> bool,
    ) -> Result<(ForwardOutput, Option<InFlight>), Fault> {
        let place = (id, forward.micro_batch);
        if self.active {
            if self.passes.get(&place).is_some_and(|pass| pass.fits(&forward)) {
                self.merge_norms(&mut *forward.partition, forward.micro_batch)?;
                let pass = self.passes.get_mut(&place).ok_or_else(|| Fault::internal("a recorded pass", "none"))?;
                return pass.run_forward(forward, kept);
            }
            if self.progress == Progress::Recording && !self.refused.contains_key(&id) {
                return self.record_forward(id, forward, kept, needs_gradient);
            }
            self.leave_lanes()?;
        }
        forward.train(kept, needs_gradient)
    }

    fn record_forward(
        &mut self,
        id: PartitionId,
        forward: Forward<'_>,
        kept: Kept,
        needs_gradient: impl Fn(PartitionId) -> bool,
    ) -> Result<(ForwardOutput, Option<InFlight>), Fault> {
        let Forward { partition, micro_batch, stream, arrived, goal } = forward;
        let arrived = arrived
            .iter()
            .map(|(from, tensors)| Ok((*from, tensors.iter().map(engine::copy).collect::<Result<Vec<_>, _>>()?)))
            .collect::<Result<Vec<Parcel>, Fault>>()?;
        let goal = match goal {
            Some(goal) => Some(LossTarget { target: engine::copy(&goal.target)?, ..goal }),
            None => None,
        };
        self.merge_norms(partition, micro_batch)?;
        if let Entry::Vacant(entry) = self.casts.entry(id) {
            entry.insert(partition.make_casts()?);
            // Other lanes read them, too.
            self.lanes[self.current].stream.synchronize()?;
        }
        let mut seeds = SeedTable::new(tch::Device::Cuda(self.device))?;
        partition.use_lane(Some(self.current))?;
        let lane = &self.lanes[self.current];
        let recorded = lane.pool.record(|| {
            seeds.record(|| {
                let arrived = clones(&arrived);
                let goal = goal.as_ref().map(LossTarget::shallow_clone);
                let forward = Forward { partition: &mut *partition, micro_batch, stream, arrived, goal };
                forward.train(kept, &needs_gradient)
            })
        });
        partition.use_lane(None)?;
        let (graph, (output, in_flight)) = match recorded {
            Ok(recorded) => recorded,
            Err(fault) => {
                self.refuse(id, fault)?;
                return Forward { partition, micro_batch, stream, arrived, goal }.train(kept, needs_gradient);
            }
        };
        seeds.fill(stream)?;
        graph.launch()?;
        let inputs = in_flight.as_ref().map_or_else(|| clones(&arrived), |in_flight| clones(in_flight.arrived()));
        let pass = RecordedPass {
            inputs,
            goal,
            seeds,
            forward: graph,
            parcels: clones(&output.parcels),
            score: output.score.as_ref().map(Score::shallow_clone),
            statistics: partition.norms().collected(micro_batch),
            recomputation: None,
            backward: None,
        };
        self.passes.insert((id, micro_batch), pass);
        Ok((output, in_flight))
    }

    /// Runs the forward pass of a micro-batch again, this time for its backward pass.
    pub fn recompute(
        &mut self,
        id: PartitionId,
        micro_batch: MicroBatchId,
        partition: &mut Partition,
        in_flight: &mut InFlight,
    ) -> Result<(), Fault> {
        let pass = self.passes.get_mut(&(id, micro_batch)).filter(|_| self.active);
        let recorded = match pass {
            Some(RecordedPass { recomputation: Some(graph), .. }) if in_flight.is_recorded() => return graph.launch(),
            Some(pass) if self.progress == Progress::Recording => {
                let lane = &self.lanes[self.current];
                partition.use_lane(Some(self.current))?;
                let recorded = lane.pool.record(|| pass.seeds.record(|| in_flight.recompute(partition)));
                partition.use_lane(None)?;
                recorded.map(|(graph, ())| pass.recomputation.insert(graph).launch())
            }
            _ => return in_flight.recompute(partition),
        };
        match recorded {
            Ok(launched) => launched,
            Err(fault) => {
                self.refuse(id, fault)?;
                in_flight.recompute(partition)
            }
        }
    }

    /// Runs the backward pass of a micro-batch; see [`InFlight::backward`].
    pub fn backward(
        &mut self,
        id: PartitionId,
        micro_batch: MicroBatchId,
        partition: &mut Partition,
        mut in_flight: InFlight,
        upstream: Vec<Vec<Option<Tensor>>>,
    ) -> Result<Vec<GradientParcel>, Fault> {
        let pass = self.passes.get(&(id, micro_batch)).filter(|_| self.active);
        match pass {
            Some(RecordedPass { backward: Some(backward), .. })
                if in_flight.is_recorded() && backward.fits(&upstream) =>
            {
                backward.copy_upstream(&upstream)?;
                return backward.run(id, self.device, self.lanes_used, &mut self.added);
            }
            Some(_) if self.progress == Progress::Recording => {
                match self.record_backward(id, micro_batch, partition, &in_flight, &upstream) {
                    Ok(gradients) => return Ok(gradients),
                    Err(fault) => self.refuse(id, fault)?,
                }
            }
            _ => {}
        }
        self.leave_lanes()?;
        // A recording that failed may have freed a part of the autograd graph, or the graph may have the leaves of another lane.
        if in_flight.is_recorded() || self.abandoned {
            in_flight.recompute(partition)?;
        }
        if matches!(self.progress, Progress::WarmUp(_)) {
            let roots = in_flight.roots(&upstream)?;
            partition.find_casts(&roots.iter().map(|(root, _)| root).collect::<Vec<_>>())?;
        }
        // Leaves in static memory are those of all steps.
        in_flight.arrived().iter().flat_map(|(_, tensors)| tensors).for_each(engine::clear_grad);
        in_flight.backward(upstream, None)
    }

    fn record_backward(
        &mut self,
        id: PartitionId,
        micro_batch: MicroBatchId,
        partition: &mut Partition,
        in_flight: &InFlight,
        upstream: &[Vec<Option<Tensor>>],
    ) -> Result<Vec<GradientParcel>, Fault> {
        let copy = |gradient: &Option<Tensor>| gradient.as_ref().map(engine::copy).transpose();
        let upstream = upstream
            .iter()
            .map(|gradients| gradients.iter().map(copy).collect())
            .collect::<Result<Vec<Vec<Option<Tensor>>>, Fault>>()?;
        let parameters = partition.use_lane(Some(self.current))?;
        let own = partition.use_lane(None)?;
        let sums = match self.sums.entry(id) {
            Entry::Occupied(sums) => sums.into_mut(),
            Entry::Vacant(entry) => entry.insert(GradientSums::new(own)?),
        };
        let lane = &self.lanes[self.current];
        let arrived = || in_flight.arrived().iter().flat_map(|(_, tensors)| tensors);
        let mut additions = Vec::new();
        let (graphs, found) = lane.pool.record_parts(|recording| {
            let roots = in_flight.roots(&upstream)?;
            let leaves: Vec<&Tensor> = arrived().filter(|t| t.requires_grad()).collect();
            if roots.is_empty() {
                return Ok(LastGradients {
                    of_parameters: Vec::new(),
                    of_inputs: leaves.iter().map(|_| None).collect(),
                });
            }
            let mut add = |gradients| {
                let part = additions.len();
                additions.push(recording.cut(|| sums.record_addition(&lane.pool, part, gradients))?);
                Ok(())
            };
            let mut found = cuda::gradients_in_parts(&roots, &parameters, &leaves, part_bytes(&parameters), &mut add)?;
            // libtorch gives the gradient that it keeps in a leaf the layout of the leaf.
            for (gradient, leaf) in found.of_inputs.iter_mut().zip(&leaves) {
                if let (Some(dense), Some(layout)) = (gradient.as_mut(), engine::layout(leaf)) {
                    *dense = engine::with_layout(dense, layout)?;
                }
            }
            Ok(found)
        })?;
        additions.push(sums.record_addition(&lane.pool, additions.len(), found.of_parameters)?);
        let mut leaves = found.of_inputs.into_iter();
        let mut gradient = |tensor: &Tensor| tensor.requires_grad().then(|| leaves.next().flatten()).flatten();
        let gradients: Vec<GradientParcel> = in_flight
            .arrived()
            .iter()
            .map(|(from, tensors)| (*from, tensors.iter().map(&mut gradient).collect()))
            .collect();
        let parts = graphs.into_iter().zip(additions).collect();
        let backward = RecordedBackward { parts, upstream, gradients };
        let gradients = backward.run(id, self.device, self.lanes_used, &mut self.added)?;
        if let Some(pass) = self.passes.get_mut(&(id, micro_batch)) {
            pass.backward = Some(backward);
        }
        Ok(gradients)
    }
}

/// Handles of the same tensors.
fn clones(parcels: &[Parcel]) -> Vec<Parcel> {
    parcels.iter().map(|(of, tensors)| (*of, tensors.iter().map(Tensor::shallow_clone).collect())).collect()
}

fn same_shape(a: &Tensor, b: &Tensor) -> bool {
    a.size() == b.size() && a.kind() == b.kind()
}

impl RecordedPass {
    /// Whether the recorded pass computes what this one would.
    fn fits(&self, forward: &Forward<'_>) -> bool {
        let inputs = self.inputs.len() == forward.arrived.len()
            && self.inputs.iter().zip(&forward.arrived).all(|((from, own), (sender, arrived))| {
                from == sender && own.len() == arrived.len() && own.iter().zip(arrived).all(|(a, b)| same_shape(a, b))
            });
        let goals = match (&self.goal, &forward.goal) {
            (None, None) => true,
            (Some(own), Some(other)) => own.share == other.share && same_shape(&own.target, &other.target),
            _ => false,
        };
        inputs && goals
    }

    fn run_forward(&mut self, forward: Forward<'_>, kept: Kept) -> Result<(ForwardOutput, Option<InFlight>), Fault> {
        let Forward { partition, micro_batch, stream, arrived, goal } = forward;
        for ((_, own), (_, arrived)) in self.inputs.iter().zip(&arrived) {
            own.iter().zip(arrived).try_for_each(|(own, arrived)| cuda::copy(own, arrived))?;
        }
        if let (Some(own), Some(goal)) = (&self.goal, &goal) {
            cuda::copy(&own.target, &goal.target)?;
        }
        self.seeds.fill(stream)?;
        self.forward.launch()?;
        partition.norms().enter(micro_batch, &self.statistics)?;
        let output =
            ForwardOutput { parcels: clones(&self.parcels), score: self.score.as_ref().map(Score::shallow_clone) };
        let goal = self.goal.as_ref().map(LossTarget::shallow_clone);
        let in_flight =
            (kept != Kept::Nothing).then(|| InFlight::recorded(micro_batch, stream, clones(&self.inputs), goal));
        Ok((output, in_flight))
    }
}

impl RecordedBackward {
    /// Runs the backward pass, and adds its gradients after those of the passes before it in the plan.
    fn run(
        &self,
        id: PartitionId,
        device: usize,
        lanes: usize,
        added: &mut LastAdditions,
    ) -> Result<Vec<GradientParcel>, Fault> {
        for (graph, addition) in &self.parts {
            graph.launch()?;
            let Some(Addition { graph, chains }) = addition else { continue };
            for &chain in chains {
                if let Some(before) = added.remove(&(id, chain)) {
                    before.wait()?;
                }
            }
            graph.launch()?;
            if lanes > 1 {
                for &chain in chains {
                    added.insert((id, chain), Event::record(device)?);
                }
            }
        }
        let clone = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Ok(self.gradients.iter().map(|(to, tensors)| (*to, tensors.iter().map(clone).collect())).collect())
    }

    fn fits(&self, upstream: &[Vec<Option<Tensor>>]) -> bool {
        let same = |(a, b): (&Option<Tensor>, &Option<Tensor>)| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => same_shape(a, b),
            _ => false,
        };
        self.upstream.len() == upstream.len()
            && self.upstream.iter().zip(upstream).all(|(a, b)| a.len() == b.len() && a.iter().zip(b).all(same))
    }

    fn copy_upstream(&self, upstream: &[Vec<Option<Tensor>>]) -> Result<(), Fault> {
        let pairs = self.upstream.iter().flatten().zip(upstream.iter().flatten());
        pairs
            .filter_map(|(own, arrived)| own.as_ref().zip(arrived.as_ref()))
            .try_for_each(|(own, t)| cuda::copy(own, t))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::schedule::{Request, Schedule};

    #[test]
    fn a_mode_is_written_as_it_is_read() {
        for mode in [GraphMode::Auto, GraphMode::On, GraphMode::Off] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
            assert_eq!(serde_json::to_string(&mode).unwrap(), format!("\"{mode}\""));
        }
        assert!("yes".parse::<GraphMode>().is_err());
    }

    #[test]
    fn graphs_may_be_recorded_where_a_worker_may_have_a_gpu() {
        let records = |mode: GraphMode| {
            [vec![Device::Cpu], vec![Device::Cpu, Device::Cuda(0)], vec![Device::Auto]].map(|all| mode.records_on(&all))
        };
        assert_eq!(records(GraphMode::Auto), [false, true, true]);
        assert_eq!(records(GraphMode::Off), [false; 3]);
    }

    #[test]
    fn a_worker_on_the_cpu_has_no_graphs() {
        let plan = Schedule::GPipe.plan(&Request::new("a,b".parse().unwrap(), 2)).unwrap();
        for mode in [GraphMode::Auto, GraphMode::On, GraphMode::Off] {
            let graphs = WorkerGraphs::new(GraphOptions { mode, streams: None }, &plan, tch::Device::Cpu, 1);
            assert!(matches!(graphs, Ok(None)));
        }
    }

    #[test]
    fn only_large_gradients_are_added_in_parts() {
        let parameter = |mib: i64| Tensor::empty([mib << 18], (tch::Kind::Float, tch::Device::Cpu));
        assert_eq!(part_bytes(&[]), PART_BYTES_MIN);
        assert_eq!(part_bytes(&[parameter(6), parameter(2)]), PART_BYTES_MIN);
        assert_eq!(part_bytes(&[parameter(20), parameter(12)]), 8 << 20);
        assert_eq!(part_bytes(&[parameter(20).to_kind(tch::Kind::BFloat16), parameter(30)]), 10 << 20);
    }

    #[test]
    fn parameters_that_no_pass_uses_have_no_gradient() {
        let leaf = || Tensor::ones([2], (tch::Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let parameters: Vec<Tensor> = (0..3).map(|_| leaf()).collect();
        let mut sums = GradientSums::new(parameters.iter().map(Tensor::shallow_clone).collect()).unwrap();
        assert!(parameters.iter().all(|p| engine::grad(p).is_some()));
        sums.chains = vec![Some(1), None, Some(0)];
        sums.keep_used();
        let has_gradient: Vec<bool> = parameters.iter().map(|p| engine::grad(p).is_some()).collect();
        assert_eq!(has_gradient, [true, false, true]);
        assert_eq!((sums.parameters.len(), sums.sums.len()), (2, 2));
        sums.clear().unwrap();
        assert!(engine::grad(&parameters[1]).is_none());
    }
}

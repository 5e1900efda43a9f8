//! Chooses a cut by the cost of the layers: turns a profile, the shapes and the codecs into a problem for the search in
//! [`distgpipe_core::balance`].
//!
//! Times, held memory and output types are measured. The bytes that cross a cut are computed from shapes, types and
//! codecs. The time of encoding is not counted, because a link encodes while its worker computes.

use crate::comm::codec_policy::CodecPolicy;
use crate::comm::link_codecs::dtype_of;
use crate::driver::builder::BuildError;
use crate::driver::pipeline::Batch;
use crate::driver::profile::LayerProfile;
use crate::failure::Fault;
use crate::model::layer::{Role, SampleShape, SkipShapes};
use crate::model::Model;
use crate::runtime::optimizer::Optim;
use distgpipe_core::balance::{self, Link, Objective, Problem, Sent, Sizes, SkipSpan};
use distgpipe_core::codec::{Codec, CodecSpec, SerialExecutor};
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{Pass, Recompute, Request, Schedule};
use distgpipe_core::wire::DType;
use distgpipe_core::PartitionId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The most bytes of a tensor. The search computes in 64-bit floats, which are exact up to this number.
const BYTES_MAX: u64 = 1 << 53;

/// How to choose a cut by measuring the model.
///
/// Fields may be added in later versions: end a literal with `..AutoBalance::new(partitions, sample)`.
///
/// ```
/// use distgpipe::prelude::*;
/// use distgpipe::{AutoBalance, Link};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Mlp::default().model()?;
/// let digits = Digits::new(Split::Train, Default::default())?;
/// let sample = digits.batch(&[0, 1, 2, 3, 4, 5, 6, 7], LoadPass::new(0, 0))?; // one micro-batch
/// let pipeline = Pipeline::builder(model)
///     .auto_balance_with(AutoBalance {
///         link: Some(Link { bytes_per_s: 12.5e6, latency_s: 1e-3 }),
///         ..AutoBalance::new(3, sample)
///     })
///     .place("client,server,client")
///     .micro_batches(4)
///     .build()?;
/// println!("cut {}", pipeline.balance());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AutoBalance {
    /// The number of partitions.
    pub partitions: usize,
    /// The batch to measure with. It must have as many rows as a micro-batch, because its times, bytes and memory count as
    /// those of one.
    pub sample: Batch,
    /// What the search minimizes.
    pub objective: Objective,
    /// The link between any two workers; `None` if links cost nothing.
    pub link: Option<Link>,
    /// The most bytes that any worker may hold.
    pub memory_limit_bytes: Option<u64>,
    /// The costs of the layers on such a sample, if they were measured before; `None` to measure them.
    pub profile: Option<Vec<LayerProfile>>,
    /// After how long the search ends with the best cut found so far; `None` to search to the end.
    pub search_limit: Option<Duration>,
}

impl AutoBalance {
    /// Minimizes the time of a step, with free links and unlimited memory.
    pub fn new(partitions: usize, sample: Batch) -> Self {
        AutoBalance {
            partitions,
            sample,
            objective: Objective::Time,
            link: None,
            memory_limit_bytes: None,
            profile: None,
            search_limit: None,
        }
    }

    /// The search problem, for a profile of the sample.
    pub fn problem(&self, model: &Model, profile: &[LayerProfile], run: RunShape<'_>) -> Result<Problem, BuildError> {
        let mut problem = problem(model, profile, self.sample.rows(), run)?;
        problem.objective = self.objective;
        problem.link = self.link;
        problem.memory_limit_bytes = self.memory_limit_bytes;
        Ok(problem)
    }
}

/// The settings of a run that the cost of its cut depends on.
#[derive(Clone, Debug)]
pub struct RunShape<'a> {
    /// The worker of each partition.
    pub placement: Placement,
    /// The order of forward and backward passes.
    pub schedule: Schedule,
    /// Micro-batches per batch, in each replica.
    pub micro_batches: usize,
    /// Which micro-batches are computed again in the backward pass.
    pub recompute: Recompute,
    /// The codecs of the links.
    pub codecs: &'a CodecPolicy,
    /// The optimizer, which keeps state for each parameter.
    pub optim: Optim,
    /// The number of layers at the front that have nothing to train. They have no backward pass.
    pub frozen_layers: usize,
}

/// The search problem that minimizes time with free links, for a profile of a micro-batch of `rows` rows.
pub fn problem(model: &Model, profile: &[LayerProfile], rows: usize, run: RunShape<'_>) -> Result<Problem, BuildError> {
    let tensors = CutTensors::of(model, profile, rows)?;
    let inputs = model.input.iter().map(|shape| CutTensor::of(shape, None, rows));
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    let parameter_bytes = |i: usize| {
        let parameters = model.layers[i].tensors().into_iter().filter(|spec| spec.role == Role::Parameter);
        parameters.map(|spec| spec.elements() * spec.kind.elt_size_in_bytes() as u64).sum()
    };
    let layer = |(i, cost): (usize, &LayerProfile)| {
        let frozen = i < run.frozen_layers;
        balance::LayerCost {
            forward_s: cost.forward_s,
            backward_s: if frozen { 0.0 } else { cost.backward_s },
            held_bytes: if frozen { 0 } else { cost.held_bytes },
            parameter_bytes: parameter_bytes(i),
        }
    };
    Ok(Problem {
        layers: profile.iter().enumerate().map(layer).collect(),
        skips: tensors.skips.iter().map(|(span, _)| *span).collect(),
        together: model.ties().into_iter().map(|tie| tie.layers).collect(),
        input_bytes: inputs.iter().map(|input| input.bytes).sum(),
        in_memory: tensors.sizes(|tensor| tensor.bytes),
        sent: tensors.sent(&run)?,
        state_factor: model.update_rule(run.optim).state_tensors() as f64,
        placement: run.placement,
        schedule: run.schedule,
        micro_batches: run.micro_batches,
        recompute: run.recompute,
        link: None,
        objective: Objective::Time,
        memory_limit_bytes: None,
    })
}

/// A tensor that crosses a cut, if one is made where it passes.
struct CutTensor {
    dims: Vec<usize>,
    dtype: DType,
    bytes: u64,
}

impl CutTensor {
    /// A tensor of `rows` rows. `measured` is the type that the layer returned, if the profile has it.
    fn of(shape: &SampleShape, measured: Option<DType>, rows: usize) -> Result<Self, BuildError> {
        let dtype = measured.map_or_else(|| dtype_of(shape.kind), Ok).map_err(BuildError::CutTensor)?;
        let dims = shape.dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0));
        let dims: Vec<usize> = [rows].into_iter().chain(dims).collect();
        let bytes = dims.iter().try_fold(dtype.size_bytes() as u64, |bytes, &dim| bytes.checked_mul(dim as u64));
        let bytes = bytes.filter(|&bytes| bytes <= BYTES_MAX).ok_or_else(|| {
            let wrong =
                format!("expected tensors of at most {BYTES_MAX} bytes, got dimensions {dims:?}: use fewer rows");
            BuildError::CutTensor(Fault::invalid_job("the sample", wrong))
        })?;
        Ok(CutTensor { dims, dtype, bytes })
    }

    /// Bytes on a link, or a bound on them where the size depends on the values.
    fn encoded_bytes(&self, codec: &dyn Codec, pass: Pass) -> u64 {
        match (self.dtype, pass) {
            (DType::F32 | DType::F16 | DType::BF16, _) if !codec.refuses_shape(&self.dims) => {
                let bytes = codec.encoded_bytes(self.dtype, &self.dims) as u64;
                // A bound that exceeds the raw size says little about the actual size.
                if codec.size_varies() {
                    bytes.min(self.bytes)
                } else {
                    bytes
                }
            }
            // Tensors that the codec refuses are sent raw.
            (DType::F32 | DType::F16 | DType::BF16 | DType::F64, _) | (_, Pass::Forward) => self.bytes,
            // Integers have no gradient.
            (_, Pass::Backward) => 0,
        }
    }
}

/// All tensors that some cut makes cross a link: the outputs of each layer, and the skips.
struct CutTensors {
    outputs: Vec<Vec<CutTensor>>,
    skips: Vec<(SkipSpan, CutTensor)>,
}

impl CutTensors {
    fn of(model: &Model, profile: &[LayerProfile], rows: usize) -> Result<Self, BuildError> {
        let mut shapes = model.input.clone();
        let mut open_skips = SkipShapes::new();
        let mut stashed: BTreeMap<String, (usize, CutTensor)> = BTreeMap::new();
        let (mut outputs, mut skips) = (Vec::new(), Vec::new());
        for (i, layer) in model.layers.iter().enumerate() {
            let made = |output: usize| profile.get(i)?.output_types.get(output).copied();
            shapes = layer.shapes(shapes, &mut open_skips)?;
            let tensors = shapes.iter().enumerate().map(|(output, shape)| CutTensor::of(shape, made(output), rows));
            outputs.push(tensors.collect::<Result<_, _>>()?);
            let uses = layer.skips();
            for name in uses.pop {
                if let Some((stash, tensor)) = stashed.remove(&name) {
                    skips.push((SkipSpan { stash, pop: i }, tensor));
                }
            }
            for name in uses.stash {
                if let Some(shape) = open_skips.get(&name) {
                    let made = profile.get(i).and_then(|cost| cost.stash_types.get(&name)).copied();
                    stashed.insert(name, (i, CutTensor::of(shape, made, rows)?));
                }
            }
        }
        Ok(CutTensors { outputs, skips })
    }

    fn sizes(&self, size: impl Fn(&CutTensor) -> u64) -> Sizes {
        Sizes {
            outputs: self.outputs.iter().map(|tensors| tensors.iter().map(&size).sum()).collect(),
            skips: self.skips.iter().map(|(_, tensor)| size(tensor)).collect(),
        }
    }

    fn sent(&self, run: &RunShape<'_>) -> Result<Sent, BuildError> {
        let codecs = run.codecs;
        let mut links = BTreeMap::new();
        if !codecs.links.is_empty() {
            // The codec of a link depends on the placement alone, so any plan with this placement will do.
            let plan = Schedule::GPipe.plan(&Request::new(run.placement.clone(), 1))?;
            let ids = || (0..plan.partitions()).map(PartitionId::new);
            for (from, to) in ids().flat_map(|from| ids().map(move |to| (from, to))).filter(|(from, to)| from < to) {
                for (a, b, pass) in [(from, to, Pass::Forward), (to, from, Pass::Backward)] {
                    links.insert((a, b, pass), self.encoded(codecs.codec(&plan, pass, a, b), pass, run.frozen_layers));
                }
            }
        }
        Ok(Sent {
            forward: self.encoded(&codecs.forward, Pass::Forward, run.frozen_layers),
            backward: self.encoded(&codecs.backward, Pass::Backward, run.frozen_layers),
            links,
        })
    }

    fn encoded(&self, spec: &CodecSpec, pass: Pass, frozen_layers: usize) -> Sizes {
        let codec = spec.codec(Arc::new(SerialExecutor));
        let mut sizes = self.sizes(|tensor| tensor.encoded_bytes(codec.as_ref(), pass));
        if pass == Pass::Backward {
            // No gradient goes back to layers that need none.
            sizes.outputs.iter_mut().take(frozen_layers).for_each(|bytes| *bytes = 0);
            let skips = sizes.skips.iter_mut().zip(&self.skips);
            skips.filter(|(_, (span, _))| span.stash < frozen_layers).for_each(|(bytes, _)| *bytes = 0);
        }
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::profile;
    use crate::engine::{Device, Precision};
    use crate::model::zoo::{self, Mlp};

    fn run<'a>(codecs: &'a CodecPolicy, place: &str) -> RunShape<'a> {
        RunShape {
            placement: place.parse().unwrap(),
            schedule: Schedule::OneFOneB,
            micro_batches: 4,
            recompute: Recompute::Never,
            codecs,
            optim: Optim::adamw(),
            frozen_layers: 0,
        }
    }

    fn made(model: &Model, codecs: &CodecPolicy) -> Problem {
        let cost = |name: &str| LayerProfile {
            name: name.to_owned(),
            forward_s: 1.0,
            backward_s: 2.0,
            held_bytes: 5,
            output_types: Vec::new(),
            stash_types: BTreeMap::new(),
        };
        let profile: Vec<LayerProfile> = model.layers.iter().map(|layer| cost(layer.name())).collect();
        problem(model, &profile, 6, run(codecs, "a,b,c")).unwrap()
    }

    #[test]
    fn what_crosses_a_cut_is_what_the_codec_of_its_link_makes_of_it() {
        let model = Mlp { hidden: vec![32, 16], ..Mlp::default() }.model().unwrap();
        let mut codecs = CodecPolicy::all("uniform:8".parse().unwrap());
        codecs.links = vec!["0-1=raw,f16".parse().unwrap()];
        let problem = made(&model, &codecs);
        let floats: Vec<u64> = model
            .summary()
            .unwrap()
            .iter()
            .map(|layer| 6 * layer.output[0].dims.iter().product::<i64>() as u64)
            .collect();
        let of = |factor: u64| floats.iter().map(|n| factor * n).collect::<Vec<u64>>();
        assert_eq!(problem.in_memory.outputs, of(4));
        // A byte each, and what the codec says of its range.
        assert!(problem.sent.forward.outputs.iter().zip(&floats).all(|(sent, n)| sent - n < 40));
        let link = |a, b, pass| &problem.sent.links[&(PartitionId(a), PartitionId(b), pass)].outputs;
        assert_eq!(link(0, 1, Pass::Forward), &of(4));
        assert_eq!(link(1, 0, Pass::Backward), &of(2));
        assert_eq!(link(1, 2, Pass::Forward), &problem.sent.forward.outputs);
        let parameters: u64 = problem.layers.iter().map(|layer| layer.parameter_bytes).sum();
        assert_eq!((parameters, problem.state_factor), (4 * model.parameters(), 2.0));
        problem.search().unwrap();
    }

    #[test]
    fn skips_and_whole_numbers_are_sized_too() {
        let unet = zoo::build(&crate::model::ModelSpec {
            name: "unet".to_owned(),
            settings: zoo::default_settings("unet").unwrap(),
        });
        let problem = made(&unet.unwrap(), &CodecPolicy::default());
        // One at each depth, innermost first; twice as large with every step outwards.
        assert_eq!(problem.skips.len(), 5);
        assert!(problem.skips.iter().all(|skip| skip.stash < skip.pop));
        let sizes = &problem.in_memory.skips;
        assert!(sizes[0] > 0 && sizes.windows(2).all(|pair| pair[1] == 2 * pair[0]), "{sizes:?}");
        assert_eq!(problem.sent.backward, problem.in_memory);
        let roberta = zoo::build(&crate::model::ModelSpec {
            name: "roberta".to_owned(),
            settings: zoo::default_settings("roberta").unwrap(),
        });
        let problem = made(&roberta.unwrap(), &CodecPolicy::default());
        // The mask goes along with every activation, and has no gradient.
        let (forward, backward) = (problem.sent.forward.outputs[3], problem.sent.backward.outputs[3]);
        assert_eq!((forward - backward, backward), (6 * 128 * 8, 6 * 128 * 768 * 4));
    }

    fn measured(model: &Model, precision: Precision, codec: &str) -> Problem {
        let options =
            profile::ProfileOptions { device: Device::Cpu, threads: 1, channels_last: true, precision, rounds: 1 };
        let costs = profile::measure(model, &profile::sample(model, 6, 0).unwrap(), &options).unwrap();
        problem(model, &costs, 6, run(&CodecPolicy::all(codec.parse().unwrap()), "a,b,c")).unwrap()
    }

    /// Shapes promise 32 bits, and four bytes a value were counted whatever the precision.
    #[test]
    fn values_count_as_many_bytes_as_the_precision_gives_them() {
        let model = Mlp { hidden: vec![32, 16], ..Mlp::default() }.model().unwrap();
        let wide = measured(&model, Precision::Fp32, "raw");
        let half = |sizes: &Sizes| sizes.outputs.iter().map(|bytes| bytes / 2).collect::<Vec<u64>>();
        let narrow = measured(&model, Precision::Bf16, "raw");
        for sizes in [&narrow.in_memory, &narrow.sent.forward, &narrow.sent.backward] {
            assert_eq!(sizes.outputs, half(&wide.in_memory));
        }
        assert_eq!(narrow.input_bytes, wide.input_bytes);
        // Codes of eight bits are as many in either.
        let coded = [Precision::Fp32, Precision::Bf16].map(|precision| measured(&model, precision, "uniform:8").sent);
        assert_eq!(coded[0], coded[1]);
        let unet = zoo::UNet { convolutions: 1, channels: 4, depth: 2, image: 32, dropout: 0.0 }.model().unwrap();
        let [wide, narrow] = [Precision::Fp32, Precision::Bf16].map(|precision| measured(&unet, precision, "raw"));
        assert!(narrow.sent.forward.skips.iter().sum::<u64>() < wide.sent.forward.skips.iter().sum::<u64>());
    }

    /// A codec that was chosen badly makes a tensor larger, and then it travels so; only what it refuses goes raw.
    #[test]
    fn what_a_codec_makes_larger_counts_as_larger() {
        let model = Mlp { hidden: vec![32, 16], ..Mlp::default() }.model().unwrap();
        let raw = made(&model, &CodecPolicy::default());
        let larger = made(&model, &CodecPolicy::all("svd:6".parse().unwrap()));
        assert!(larger.sent.forward.outputs[1] > raw.sent.forward.outputs[1]);
        // Of 6 rows there is no factor of 7.
        for refusing in ["svd:7", "feedback(svd:7)"] {
            assert_eq!(made(&model, &CodecPolicy::all(refusing.parse().unwrap())).sent, raw.sent, "{refusing}");
        }
    }

    #[test]
    fn more_rows_than_can_be_counted_are_refused() {
        let model = Mlp::default().model().unwrap();
        for rows in [usize::MAX, 1 << 52] {
            let refused = problem(&model, &[], rows, run(&CodecPolicy::default(), "a,b")).unwrap_err().to_string();
            assert!(refused.contains("at most 9007199254740992 bytes") && refused.contains("fewer rows"), "{refused}");
        }
    }
}

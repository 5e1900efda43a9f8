//! Cuts a model by what its layers cost: from a profile, the shapes and the codecs to the search of
//! [`distgpipe_core::balance`].
//!
//! Times, what layers hold and of which types their outputs are is measured; what crosses a cut is computed, since shapes,
//! types and codecs say it. The time of coding is not counted: a link codes while its worker computes.

use crate::codecs::Codecs;
use crate::coding::dtype_of;
use crate::layer::{Role, SampleShape, SkipShapes};
use crate::model::Model;
use crate::optim::Optim;
use crate::pipeline::{Batch, BuildError};
use crate::profile::LayerCost;
use distgpipe_core::balance::{self, Link, Objective, Problem, Sent, Sizes, SkipSpan};
use distgpipe_core::codec::{Alone, Codec, Spec};
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{Pass, Recompute, Request, Schedule};
use distgpipe_core::wire::DType;
use distgpipe_core::PartitionId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most bytes of a tensor: as many as the search, which counts in floats, counts exactly.
const BYTES_MAX: u64 = 1 << 53;

/// How a model shall be cut by measuring it.
///
/// ```
/// use distgpipe::core::balance::{Link, Objective};
/// use distgpipe::models::Mlp;
/// use distgpipe::{profile, AutoBalance, Pipeline};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Mlp::default().model()?;
/// let sample = profile::sample(&model, 8, 0)?; // one micro-batch
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
    /// Into how many partitions.
    pub partitions: usize,
    /// What is measured; as large as a micro-batch, so that times, bytes and memory are those of one.
    pub sample: Batch,
    /// What the cut should make small.
    pub by: Objective,
    /// What is between any two workers; absent where that costs nothing.
    pub link: Option<Link>,
    /// The most that any worker may hold.
    pub memory_limit_bytes: Option<u64>,
}

impl AutoBalance {
    /// By time, with links that cost nothing and as much memory as it takes.
    pub fn new(partitions: usize, sample: Batch) -> Self {
        AutoBalance { partitions, sample, by: Objective::Time, link: None, memory_limit_bytes: None }
    }

    /// What is to be searched, for a profile of the sample.
    pub fn problem(&self, model: &Model, profile: &[LayerCost], run: Run<'_>) -> Result<Problem, BuildError> {
        let mut problem = problem(model, profile, self.sample.rows(), run)?;
        problem.objective = self.by;
        problem.link = self.link;
        problem.memory_limit_bytes = self.memory_limit_bytes;
        Ok(problem)
    }
}

/// What of a run its cut depends on.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// Which worker runs which partition.
    pub placement: Placement,
    /// The order of the work.
    pub schedule: Schedule,
    /// Per batch.
    pub micro_batches: usize,
    /// Which of them are computed again.
    pub recompute: Recompute,
    /// What travels in which form.
    pub codecs: &'a Codecs,
    /// What keeps state for each parameter.
    pub optim: Optim,
}

/// What is to be searched: by time, with free links, for costs of so many rows.
pub fn problem(model: &Model, profile: &[LayerCost], rows: usize, run: Run<'_>) -> Result<Problem, BuildError> {
    let tensors = Tensors::of(model, profile, rows)?;
    let inputs = model.input.iter().map(|shape| Crossing::of(shape, None, rows));
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    let parameter_bytes = |i: usize| {
        let learned = model.layers[i].tensors().into_iter().filter(|spec| spec.role == Role::Parameter);
        learned.map(|spec| spec.elements() * spec.kind.elt_size_in_bytes() as u64).sum()
    };
    let layer = |(i, cost): (usize, &LayerCost)| balance::LayerCost {
        forward_s: cost.forward_s,
        backward_s: cost.backward_s,
        held_bytes: cost.held_bytes,
        parameter_bytes: parameter_bytes(i),
    };
    Ok(Problem {
        layers: profile.iter().enumerate().map(layer).collect(),
        skips: tensors.skips.iter().map(|(span, _)| *span).collect(),
        input_bytes: inputs.iter().map(|input| input.bytes).sum(),
        in_memory: tensors.sizes(|tensor| tensor.bytes),
        sent: tensors.sent(&run)?,
        state_factor: run.optim.remembers() as f64,
        placement: run.placement,
        schedule: run.schedule,
        micro_batches: run.micro_batches,
        recompute: run.recompute,
        link: None,
        objective: Objective::Time,
        memory_limit_bytes: None,
    })
}

/// A tensor that may cross a cut.
struct Crossing {
    dims: Vec<usize>,
    dtype: DType,
    /// As it lies in memory.
    bytes: u64,
}

impl Crossing {
    /// Of so many rows, and of the type that a layer made if that is known.
    fn of(shape: &SampleShape, made: Option<DType>, rows: usize) -> Result<Self, BuildError> {
        let wrong = |text: String| BuildError::Settings(text);
        let dtype = made.map_or_else(|| dtype_of(shape.kind), Ok).map_err(|fault| wrong(fault.to_string()))?;
        let dims = shape.dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0));
        let dims: Vec<usize> = [rows].into_iter().chain(dims).collect();
        let bytes = dims.iter().try_fold(dtype.size_bytes() as u64, |bytes, &dim| bytes.checked_mul(dim as u64));
        let bytes = bytes.filter(|&bytes| bytes <= BYTES_MAX).ok_or_else(|| {
            wrong(format!("expected tensors of at most {BYTES_MAX} bytes, got dimensions {dims:?}: use fewer rows"))
        })?;
        Ok(Crossing { dims, dtype, bytes })
    }

    /// What it takes on a link; at most, where that depends on its numbers.
    fn coded_bytes(&self, codec: &dyn Codec, pass: Pass) -> u64 {
        match (self.dtype, pass) {
            (DType::F32 | DType::F16 | DType::BF16, _) if !codec.refuses_shape(&self.dims) => {
                let bytes = codec.encoded_bytes(self.dtype, &self.dims) as u64;
                // A bound beyond the tensor itself says little of what it will take.
                if codec.size_varies() {
                    bytes.min(self.bytes)
                } else {
                    bytes
                }
            }
            // What codecs refuse goes raw.
            (DType::F32 | DType::F16 | DType::BF16 | DType::F64, _) | (_, Pass::Forward) => self.bytes,
            // Whole numbers have no gradient.
            (_, Pass::Backward) => 0,
        }
    }
}

/// Everything that may cross a cut.
struct Tensors {
    outputs: Vec<Vec<Crossing>>,
    skips: Vec<(SkipSpan, Crossing)>,
}

impl Tensors {
    fn of(model: &Model, profile: &[LayerCost], rows: usize) -> Result<Self, BuildError> {
        let mut shapes = model.input.clone();
        let mut on_their_way = SkipShapes::new();
        let mut stashed: BTreeMap<String, (usize, Crossing)> = BTreeMap::new();
        let (mut outputs, mut skips) = (Vec::new(), Vec::new());
        for (i, layer) in model.layers.iter().enumerate() {
            let made = |output: usize| profile.get(i)?.output_types.get(output).copied();
            shapes = layer.shapes(shapes, &mut on_their_way)?;
            let crossing = shapes.iter().enumerate().map(|(output, shape)| Crossing::of(shape, made(output), rows));
            outputs.push(crossing.collect::<Result<_, _>>()?);
            let uses = layer.skips();
            for name in uses.pop {
                if let Some((stash, tensor)) = stashed.remove(&name) {
                    skips.push((SkipSpan { stash, pop: i }, tensor));
                }
            }
            for name in uses.stash {
                if let Some(shape) = on_their_way.get(&name) {
                    let made = profile.get(i).and_then(|cost| cost.stash_types.get(&name)).copied();
                    stashed.insert(name, (i, Crossing::of(shape, made, rows)?));
                }
            }
        }
        Ok(Tensors { outputs, skips })
    }

    fn sizes(&self, size: impl Fn(&Crossing) -> u64) -> Sizes {
        Sizes {
            outputs: self.outputs.iter().map(|tensors| tensors.iter().map(&size).sum()).collect(),
            skips: self.skips.iter().map(|(_, tensor)| size(tensor)).collect(),
        }
    }

    fn sent(&self, run: &Run<'_>) -> Result<Sent, BuildError> {
        let codecs = run.codecs;
        let mut links = BTreeMap::new();
        if !codecs.links.is_empty() {
            // Which link has which codec depends on the placement alone, so any plan with it will do.
            let plan = Schedule::GPipe.plan(&Request::new(run.placement.clone(), 1))?;
            let ids = || (0..plan.partitions()).map(PartitionId::new);
            for (from, to) in ids().flat_map(|from| ids().map(move |to| (from, to))).filter(|(from, to)| from < to) {
                for (a, b, pass) in [(from, to, Pass::Forward), (to, from, Pass::Backward)] {
                    links.insert((a, b, pass), self.coded(codecs.of(&plan, pass, a, b), pass));
                }
            }
        }
        Ok(Sent {
            forward: self.coded(&codecs.forward, Pass::Forward),
            backward: self.coded(&codecs.backward, Pass::Backward),
            links,
        })
    }

    fn coded(&self, spec: &Spec, pass: Pass) -> Sizes {
        let codec = spec.codec(Arc::new(Alone));
        self.sizes(|tensor| tensor.coded_bytes(codec.as_ref(), pass))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Device, Precision};
    use crate::models::{self, Mlp};
    use crate::profile;

    fn run<'a>(codecs: &'a Codecs, place: &str) -> Run<'a> {
        Run {
            placement: place.parse().unwrap(),
            schedule: Schedule::OneFOneB,
            micro_batches: 4,
            recompute: Recompute::Never,
            codecs,
            optim: Optim::adamw(),
        }
    }

    fn made(model: &Model, codecs: &Codecs) -> Problem {
        let cost = |name: &str| LayerCost {
            name: name.to_owned(),
            forward_s: 1.0,
            backward_s: 2.0,
            held_bytes: 5,
            output_types: Vec::new(),
            stash_types: BTreeMap::new(),
        };
        let profile: Vec<LayerCost> = model.layers.iter().map(|layer| cost(layer.name())).collect();
        problem(model, &profile, 6, run(codecs, "a,b,c")).unwrap()
    }

    #[test]
    fn what_crosses_a_cut_is_what_the_codec_of_its_link_makes_of_it() {
        let model = Mlp { hidden: vec![32, 16], ..Mlp::default() }.model().unwrap();
        let mut codecs = Codecs::all("uniform:8".parse().unwrap());
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
        let unet = models::build(&crate::model::Recipe {
            name: "unet".to_owned(),
            settings: models::default_settings("unet").unwrap(),
        });
        let problem = made(&unet.unwrap(), &Codecs::default());
        // One at each depth, innermost first; twice as large with every step outwards.
        assert_eq!(problem.skips.len(), 5);
        assert!(problem.skips.iter().all(|skip| skip.stash < skip.pop));
        let sizes = &problem.in_memory.skips;
        assert!(sizes[0] > 0 && sizes.windows(2).all(|pair| pair[1] == 2 * pair[0]), "{sizes:?}");
        assert_eq!(problem.sent.backward, problem.in_memory);
        let roberta = models::build(&crate::model::Recipe {
            name: "roberta".to_owned(),
            settings: models::default_settings("roberta").unwrap(),
        });
        let problem = made(&roberta.unwrap(), &Codecs::default());
        // The mask goes along with every activation, and has no gradient.
        let (forward, backward) = (problem.sent.forward.outputs[3], problem.sent.backward.outputs[3]);
        assert_eq!((forward - backward, backward), (6 * 128 * 8, 6 * 128 * 768 * 4));
    }

    fn measured(model: &Model, precision: Precision, codec: &str) -> Problem {
        let options = profile::Options { device: Device::Cpu, threads: 1, channels_last: true, precision, rounds: 1 };
        let costs = profile::measure(model, &profile::sample(model, 6, 0).unwrap(), &options).unwrap();
        problem(model, &costs, 6, run(&Codecs::all(codec.parse().unwrap()), "a,b,c")).unwrap()
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
        let unet = models::UNet { convolutions: 1, channels: 4, depth: 2, image: 32, dropout: 0.0 }.model().unwrap();
        let [wide, narrow] = [Precision::Fp32, Precision::Bf16].map(|precision| measured(&unet, precision, "raw"));
        assert!(narrow.sent.forward.skips.iter().sum::<u64>() < wide.sent.forward.skips.iter().sum::<u64>());
    }

    /// A codec that was chosen badly makes a tensor larger, and then it travels so; only what it refuses goes raw.
    #[test]
    fn what_a_codec_makes_larger_counts_as_larger() {
        let model = Mlp { hidden: vec![32, 16], ..Mlp::default() }.model().unwrap();
        let raw = made(&model, &Codecs::default());
        let larger = made(&model, &Codecs::all("svd:6".parse().unwrap()));
        assert!(larger.sent.forward.outputs[1] > raw.sent.forward.outputs[1]);
        // Of 6 rows there is no factor of 7.
        for refusing in ["svd:7", "feedback(svd:7)"] {
            assert_eq!(made(&model, &Codecs::all(refusing.parse().unwrap())).sent, raw.sent, "{refusing}");
        }
    }

    #[test]
    fn more_rows_than_can_be_counted_are_refused() {
        let model = Mlp::default().model().unwrap();
        for rows in [usize::MAX, 1 << 52] {
            let refused = problem(&model, &[], rows, run(&Codecs::default(), "a,b")).unwrap_err().to_string();
            assert!(refused.contains("at most 9007199254740992 bytes") && refused.contains("fewer rows"), "{refused}");
        }
    }
}

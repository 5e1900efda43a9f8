//! Cuts a model by what its layers cost: from a profile, the shapes and the codecs to the search of
//! [`distgpipe_core::balance`].
//!
//! Times and what layers hold are measured; what crosses a cut is computed, since shapes and codecs say it. The time of
//! coding is not counted: a link codes while its worker computes.

use crate::codecs::Codecs;
use crate::layer::{Role, SampleShape, ShapeError, SkipShapes};
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
use tch::Kind;

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
    let tensors = Tensors::of(model, rows)?;
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
        input_bytes: model.input.iter().map(|shape| shape.bytes() * rows as u64).sum(),
        in_memory: tensors.sizes(|shape| shape.bytes() * rows as u64),
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

/// The shapes of everything that may cross a cut.
struct Tensors {
    rows: usize,
    outputs: Vec<Vec<SampleShape>>,
    skips: Vec<(SkipSpan, SampleShape)>,
}

impl Tensors {
    fn of(model: &Model, rows: usize) -> Result<Self, ShapeError> {
        let mut shapes = model.input.clone();
        let mut on_their_way = SkipShapes::new();
        let mut stashed: BTreeMap<String, (usize, SampleShape)> = BTreeMap::new();
        let (mut outputs, mut skips) = (Vec::new(), Vec::new());
        for (i, layer) in model.layers.iter().enumerate() {
            shapes = layer.shapes(shapes, &mut on_their_way)?;
            outputs.push(shapes.clone());
            let uses = layer.skips();
            for name in uses.pop {
                if let Some((stash, shape)) = stashed.remove(&name) {
                    skips.push((SkipSpan { stash, pop: i }, shape));
                }
            }
            for name in uses.stash {
                if let Some(shape) = on_their_way.get(&name) {
                    stashed.insert(name, (i, shape.clone()));
                }
            }
        }
        Ok(Tensors { rows, outputs, skips })
    }

    fn sizes(&self, size: impl Fn(&SampleShape) -> u64) -> Sizes {
        Sizes {
            outputs: self.outputs.iter().map(|shapes| shapes.iter().map(&size).sum()).collect(),
            skips: self.skips.iter().map(|(_, shape)| size(shape)).collect(),
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
        self.sizes(|shape| self.coded_bytes(codec.as_ref(), shape, pass))
    }

    /// What a tensor takes on a link; at most, where that depends on its numbers.
    fn coded_bytes(&self, codec: &dyn Codec, shape: &SampleShape, pass: Pass) -> u64 {
        let raw = shape.bytes() * self.rows as u64;
        match (shape.kind, pass) {
            (Kind::Float, _) => {
                let dims = shape.dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(0));
                let dims: Vec<usize> = [self.rows].into_iter().chain(dims).collect();
                // What a codec makes larger or does not take goes raw.
                raw.min(codec.encoded_bytes(DType::F32, &dims) as u64)
            }
            // Codecs refuse other types.
            (Kind::Double | Kind::Half | Kind::BFloat16, _) | (_, Pass::Forward) => raw,
            // Whole numbers have no gradient.
            (_, Pass::Backward) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{self, Mlp};

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
        let cost = |name: &str| LayerCost { name: name.to_owned(), forward_s: 1.0, backward_s: 2.0, held_bytes: 5 };
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
}

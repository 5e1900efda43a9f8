//! How large a tensor from a peer may be. The model's shapes say so before one arrives.
//!
//! A codec such as `topk` encodes a tensor of any size in a few bytes, and the receiver allocates what the header announces. So a
//! header may announce no more values than the model has there for the rows of a micro-batch.

use crate::comm::message::Tag;
use crate::failure::Fault;
use crate::model::layer::{SampleShape, ShapeError, SkipShapes};
use crate::model::Model;
use distgpipe_core::partition::Balance;
use distgpipe_core::skip::{SkipLayout, SkipUse};
use distgpipe_core::wire::{Header, Kind};
use distgpipe_core::PartitionId;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// The bounds at one process of a run.
pub struct TensorBounds {
    /// The rows of the largest micro-batch of the step in progress. `u64::MAX` where they are not known.
    rows: AtomicU64,
    sizes: OnceLock<PlannedSizes>,
}

/// The numbers of values that the model's shapes give.
struct PlannedSizes {
    /// By a partition and a later one: for one row of each tensor that the first sends the second. The gradients are as large.
    edges: BTreeMap<(u32, u32), Vec<u64>>,
    /// For one row of each input and of each output of the model.
    input: Vec<u64>,
    output: Vec<u64>,
    /// In the largest parameter or buffer. No gradient and no state of an optimizer is larger.
    parameter: u64,
    /// For one row of the largest tensor between two partitions.
    largest: u64,
}

impl TensorBounds {
    /// In the driver's process, which decides the rows of each step: none until the [first](Self::begin_step).
    pub fn of_driver() -> Self {
        TensorBounds { rows: AtomicU64::new(0), sizes: OnceLock::new() }
    }

    /// In the process of another worker. A tensor of a step may arrive there before the command that has the number of rows, so the
    /// bounds are those of a row, and the memory of the process bounds the rows.
    pub fn of_worker() -> Self {
        TensorBounds { rows: AtomicU64::new(u64::MAX), sizes: OnceLock::new() }
    }

    /// Admits tensors from here on, as large as a model that is cut like this has them.
    pub fn set_model(&self, model: &Model, balance: &Balance) -> Result<(), Fault> {
        if self.sizes.get().is_none() {
            let sizes = PlannedSizes::new(model, balance)?;
            self.sizes.get_or_init(|| sizes);
        }
        Ok(())
    }

    /// Admits tensors of so many rows, in the driver's process. Must be called before any worker hears of the step.
    pub fn begin_step(&self, rows: usize) {
        self.rows.store(rows as u64, Ordering::Release);
    }

    /// Checks the tensor that a header announces, before anything is allocated for it.
    pub fn check(&self, header: &Header) -> Result<(), Fault> {
        let Some(tensor) = header.tensor.filter(|_| !matches!(header.kind, Kind::Share | Kind::Target)) else {
            // A segment has a limit of its own. The loss alone knows what a target looks like, which crosses links raw.
            return Ok(());
        };
        let sizes = self.sizes.get().ok_or_else(|| {
            Fault::protocol("tensors only after this worker has built its partitions", Tag::of(header).to_string())
        })?;
        let known = Some(self.rows.load(Ordering::Acquire)).filter(|&rows| rows != u64::MAX);
        let rows = known.unwrap_or_else(|| tensor.shape.dims().first().copied().unwrap_or(1).max(1));
        let of_row = |values: &[u64]| {
            let slot = usize::from(header.slot);
            let planned = values.get(slot).filter(|_| usize::from(header.slots) <= values.len());
            planned.copied().ok_or_else(|| {
                let expected = format!("{} tensors in {}", values.len(), Tag::of(header));
                Fault::protocol(expected, header.slots.to_string())
            })
        };
        let edge = |from, to| sizes.edges.get(&(from, to)).map_or(&[][..], Vec::as_slice);
        let values_max = match header.kind {
            Kind::Activation => of_row(edge(header.from, header.to))?.saturating_mul(rows),
            Kind::Gradient => of_row(edge(header.to, header.from))?.saturating_mul(rows),
            Kind::Input => of_row(&sizes.input)?.saturating_mul(rows),
            Kind::Output => of_row(&sizes.output)?.saturating_mul(rows),
            // The driver also collects copies of what workers have sent each other.
            _ => sizes.parameter.max(known.map_or(0, |rows| sizes.largest.saturating_mul(rows))),
        };
        let values = tensor.shape.elements();
        if values <= values_max {
            return Ok(());
        }
        let expected = format!("a tensor of at most {values_max} values in {}, by the model's shapes", Tag::of(header));
        Err(Fault::protocol(expected, format!("one of {values} values")))
    }
}

impl PlannedSizes {
    fn new(model: &Model, balance: &Balance) -> Result<Self, Fault> {
        let uses: Vec<SkipUse> = model.layers.iter().map(|layer| layer.skips()).collect();
        let layout = SkipLayout::new(&uses, balance).map_err(Fault::invalid_model)?;
        let LayerShapes { outputs, skips } = shapes(model).map_err(Fault::invalid_model)?;
        let values = |shapes: &[SampleShape]| shapes.iter().map(values_of).collect::<Vec<_>>();
        let mut edges = BTreeMap::new();
        for to in (1..balance.partitions()).map(PartitionId::new) {
            let before = balance.range(to).start.checked_sub(1).and_then(|layer| outputs.get(layer));
            edges.insert((to.0 - 1, to.0), before.map_or_else(Vec::new, |shapes| values(shapes)));
        }
        for portal in layout.portals() {
            // A layer that does not tell the shape of its skip has no bound.
            let skip = skips.get(&portal.name).map_or(u64::MAX, values_of);
            edges.entry((portal.from.0, portal.to.0)).or_default().push(skip);
        }
        let largest = edges.values().flatten().copied().max().unwrap_or(0);
        let output = outputs.last().map_or_else(Vec::new, |shapes| values(shapes));
        let tensors = model.layers.iter().flat_map(|layer| layer.tensors());
        let parameter = tensors.map(|spec| spec.elements()).max().unwrap_or(0);
        Ok(PlannedSizes { edges, input: values(&model.input), output, parameter, largest })
    }
}

fn values_of(shape: &SampleShape) -> u64 {
    shape.dims.iter().fold(1, |values, &dim| values.saturating_mul(u64::try_from(dim).unwrap_or(0)))
}

/// The shapes of one row between the layers of a model.
struct LayerShapes {
    outputs: Vec<Vec<SampleShape>>,
    skips: HashMap<String, SampleShape>,
}

fn shapes(model: &Model) -> Result<LayerShapes, ShapeError> {
    let (mut input, mut open, mut skips) = (model.input.clone(), SkipShapes::new(), HashMap::new());
    let outputs = model.layers.iter().map(|layer| {
        input = layer.shapes(std::mem::take(&mut input), &mut open)?;
        for name in layer.skips().stash {
            skips.extend(open.get(&name).map(|shape| (name, shape.clone())));
        }
        Ok(input.clone())
    });
    let outputs = outputs.collect::<Result<_, ShapeError>>()?;
    Ok(LayerShapes { outputs, skips })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::zoo::{Mlp, UNet};
    use distgpipe_core::codec::CodecId;
    use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};

    fn header(kind: Kind, from: u32, to: u32, dims: &[usize]) -> Header {
        let shape = Shape::new(dims).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::TopK };
        Header { from, to, tensor: Some(meta), ..Header::new(kind) }
    }

    fn refused(bounds: &TensorBounds, header: &Header) -> String {
        bounds.check(header).err().map(|fault| fault.to_string()).unwrap_or_default()
    }

    /// A model of 64 inputs, two hidden layers of 32 and 10 outputs.
    fn driver() -> TensorBounds {
        let mlp = Mlp { hidden: vec![32, 32], ..Mlp::default() };
        let (model, bounds) = (mlp.model().unwrap(), TensorBounds::of_driver());
        let layers = model.layers.len();
        bounds.set_model(&model, &Balance::new(vec![1, layers - 2, 1]).unwrap()).unwrap();
        bounds
    }

    #[test]
    fn a_tensor_is_no_larger_than_the_rows_of_the_step_make_it() {
        let bounds = driver();
        let first = header(Kind::Activation, 1, 2, &[1]);
        assert!(refused(&bounds, &first).contains("at most 0 values"), "before the first step");
        for rows in [4, 400, 7] {
            bounds.begin_step(rows);
            for (kind, from, to, values) in [
                (Kind::Activation, 1, 2, 32 * rows),
                (Kind::Gradient, 1, 0, 32 * rows),
                (Kind::Output, 2, 2, 10 * rows),
                (Kind::Input, 0, 0, 64 * rows),
                // The first layer's weights, or a copy of the activations between partitions.
                (Kind::State, 1, 0, (64 * 32).max(32 * rows)),
            ] {
                assert_eq!(refused(&bounds, &header(kind, from, to, &[values])), "", "{kind:?} of {rows} rows");
                let said = refused(&bounds, &header(kind, from, to, &[values + 1]));
                let figures = format!("at most {values} values");
                assert!(said.contains(&figures) && said.contains(&(values + 1).to_string()), "{kind:?}: {said}");
            }
        }
        let second = Header { slot: 1, slots: 2, ..header(Kind::Activation, 1, 2, &[1]) };
        assert!(refused(&bounds, &second).contains("1 tensors"), "{}", refused(&bounds, &second));
        assert!(!refused(&bounds, &header(Kind::Activation, 0, 2, &[1])).is_empty(), "there is no skip");
    }

    /// It may hear of a step later than the worker that sends the tensor.
    #[test]
    fn a_worker_that_does_not_know_the_rows_checks_a_row() {
        let bounds = TensorBounds::of_worker();
        let early = refused(&bounds, &header(Kind::Activation, 0, 1, &[1]));
        assert!(early.contains("only after this worker has built its partitions"), "{early}");
        let model = Mlp { hidden: vec![32, 32], ..Mlp::default() }.model().unwrap();
        let layers = model.layers.len();
        bounds.set_model(&model, &Balance::new(vec![1, layers - 2, 1]).unwrap()).unwrap();
        for (rows, row, allowed) in [(1, 32, true), (5000, 32, true), (1, 33, false), (5000, 33, false)] {
            let said = refused(&bounds, &header(Kind::Gradient, 2, 1, &[rows, row]));
            assert_eq!(said.is_empty(), allowed, "{rows} rows of {row}: {said}");
        }
        assert_eq!(refused(&bounds, &header(Kind::State, 1, 0, &[64, 32])), "");
        assert!(!refused(&bounds, &header(Kind::State, 1, 0, &[65, 32])).is_empty());
    }

    /// Between neighbours, a skip travels behind the activation; otherwise alone.
    #[test]
    fn skips_have_the_bounds_of_their_own_shapes() {
        let model = UNet { depth: 2, ..UNet::default() }.model().unwrap();
        let balance = Balance::even(model.layers.len(), 3).unwrap();
        let bounds = TensorBounds::of_driver();
        bounds.set_model(&model, &balance).unwrap();
        bounds.begin_step(2);
        let sizes = PlannedSizes::new(&model, &balance).unwrap();
        assert!(sizes.edges.contains_key(&(0, 2)), "a skip passes partition 1");
        for (&(from, to), values) in &sizes.edges {
            for (slot, &of_row) in values.iter().enumerate() {
                assert!((1..1 << 40).contains(&of_row), "{of_row}");
                let of = |rows| Header {
                    slot: slot as u16,
                    slots: values.len() as u16,
                    ..header(Kind::Activation, from, to, &[rows, of_row as usize])
                };
                assert_eq!(refused(&bounds, &of(2)), "");
                assert!(!refused(&bounds, &of(3)).is_empty());
            }
        }
    }
}

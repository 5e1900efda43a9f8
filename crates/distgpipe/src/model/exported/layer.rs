//! Consecutive nodes of an exported graph as a layer.

use super::step::{kind, Memory, Pass, Slots, Step, Value};
use crate::engine;
use crate::failure::Fault;
use crate::model::layer::{Context, Init, Layer, LayerTensors, Role, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::sync::lock;
use distgpipe_core::pt2::{layers, Graph, ValueId};
use distgpipe_core::skip::SkipUse;
use distgpipe_core::weights::TensorType;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use tch::{Device, Tensor};

/// A value that enters or leaves a layer.
struct Passed {
    slot: usize,
    shape: SampleShape,
}

/// A constant of the graph, built when the layer first runs.
struct ConstantSlot {
    slot: usize,
    shape: SampleShape,
    bytes: Arc<[u8]>,
}

/// A layer that calls the operators of its nodes.
pub(super) struct ExportedLayer {
    name: String,
    also: Vec<String>,
    multiply_adds: u64,
    specs: Vec<TensorSpec>,
    /// The slots of the tensors, in the order of `specs`.
    tensors: Vec<usize>,
    inputs: Vec<Passed>,
    outputs: Vec<Passed>,
    pops: Vec<(String, Passed)>,
    stashes: Vec<(String, Passed)>,
    constants: Vec<ConstantSlot>,
    built: Mutex<Option<(Device, Vec<Tensor>)>>,
    steps: Vec<Step>,
    slots: usize,
}

/// The shape of a value for one sample. The graph's checks made sure that it has one.
pub(super) fn sample_shape(graph: &Graph, value: ValueId) -> SampleShape {
    let info = &graph.values[value as usize];
    SampleShape { dims: info.sample_dims().unwrap_or_default(), kind: kind(info.dtype) }
}

impl ExportedLayer {
    /// Prepares the nodes of a layer. Fails if libtorch lacks an operator or argument, which the error names.
    /// `decoded` has the bytes of the graph's constants.
    pub(super) fn new(graph: &Graph, plan: layers::Layer, decoded: &[Arc<[u8]>]) -> Result<Self, String> {
        let (mut slots, results) = (Slots::default(), graph.results());
        let mut passed = |values: &[ValueId]| -> Vec<Passed> {
            values.iter().map(|&v| Passed { slot: slots.of(v), shape: sample_shape(graph, v) }).collect()
        };
        let (inputs, outputs) = (passed(&plan.inputs), passed(&plan.outputs));
        let mut named = |skips: &[(String, ValueId)]| -> Vec<(String, Passed)> {
            let one = |(name, v): &(String, ValueId)| (name.clone(), passed(&[*v]).remove(0));
            skips.iter().map(one).collect()
        };
        let (pops, stashes) = (named(&plan.pops), named(&plan.stashes));
        let used: HashSet<ValueId> = plan.nodes.iter().flat_map(|&node| graph.nodes[node].tensors()).collect();
        let specs = plan.states.iter().map(|&state| tensor_spec(graph, state, &used)).collect::<Result<_, _>>()?;
        let tensors = plan.states.iter().map(|&state| slots.of(graph.state_value(state))).collect();
        let steps = plan.nodes.iter().map(|&node| Step::new(graph, node, results[node].start, &mut slots));
        let mut steps = steps.collect::<Result<Vec<_>, String>>()?;
        let constants = constants(graph, &used, &mut slots, decoded);
        let kept: HashSet<usize> =
            outputs.iter().chain(stashes.iter().map(|(_, passed)| passed)).map(|passed| passed.slot).collect();
        note_last_uses(&mut steps, &kept);
        Ok(ExportedLayer {
            name: plan.name,
            also: plan.also,
            multiply_adds: plan.multiply_adds,
            specs,
            tensors,
            inputs,
            outputs,
            pops,
            stashes,
            constants,
            built: Mutex::new(None),
            steps,
            slots: slots.len(),
        })
    }

    fn place_constants(&self, memory: &mut Memory<'_>, device: Device) -> Result<(), Fault> {
        if self.constants.is_empty() {
            return Ok(());
        }
        let mut built = lock(&self.built);
        if built.as_ref().is_none_or(|(on, _)| *on != device) {
            let tensors = self.constants.iter().map(|constant| constant.build(device));
            *built = Some((device, tensors.collect::<Result<_, Fault>>()?));
        }
        let tensors = built.iter().flat_map(|(_, tensors)| tensors);
        for (constant, tensor) in self.constants.iter().zip(tensors) {
            memory[constant.slot] = Some(Value::Owned(tensor.shallow_clone()));
        }
        Ok(())
    }

    fn take(&self, memory: &mut Memory<'_>, passed: &Passed) -> Result<Tensor, Fault> {
        let value = memory[passed.slot].as_deref().map(Tensor::shallow_clone);
        value.ok_or_else(|| Fault::internal("every output of the layer", self.name.clone()))
    }
}

impl ConstantSlot {
    fn build(&self, device: Device) -> Result<Tensor, Fault> {
        let mut tensor = engine::empty(&self.shape.dims, self.shape.kind, engine::Layout::Contiguous)?;
        match engine::bytes_mut(&mut tensor).filter(|into| into.len() == self.bytes.len()) {
            Some(into) => into.copy_from_slice(&self.bytes),
            None => {
                let expected = format!("the bytes of a constant of {:?}", self.shape);
                return Err(Fault::internal(expected, self.bytes.len().to_string()));
            }
        }
        Ok(tensor.f_to_device(device)?)
    }
}

impl Layer for ExportedLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn also_named(&self) -> &[String] {
        &self.also
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.specs.clone()
    }

    fn skips(&self) -> SkipUse {
        let names = |skips: &[(String, Passed)]| skips.iter().map(|(name, _)| name.clone()).collect();
        SkipUse { stash: names(&self.stashes), pop: names(&self.pops) }
    }

    fn shapes(&self, input: Vec<SampleShape>, skips: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        if !input.iter().eq(self.inputs.iter().map(|passed| &passed.shape)) {
            let expected: Vec<&SampleShape> = self.inputs.iter().map(|passed| &passed.shape).collect();
            return Err(ShapeError { layer: self.name.clone(), expected: format!("{expected:?}"), got: input });
        }
        for (name, _) in &self.pops {
            skips.remove(name);
        }
        for (name, passed) in &self.stashes {
            skips.insert(name.clone(), passed.shape.clone());
        }
        Ok(self.outputs.iter().map(|passed| passed.shape.clone()).collect())
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let rows = input.first().and_then(|x| x.size().first().copied());
        let (Some(rows), true) = (rows, input.len() == self.inputs.len()) else {
            let got = format!("{} tensors for layer `{}`", input.len(), self.name);
            return Err(Fault::internal(format!("{} inputs with rows", self.inputs.len()), got));
        };
        let device = input[0].device();
        let mut memory: Memory<'_> = Vec::new();
        memory.resize_with(self.slots, || None);
        for (passed, tensor) in self.inputs.iter().zip(input) {
            memory[passed.slot] = Some(Value::Owned(tensor));
        }
        for (name, passed) in &self.pops {
            memory[passed.slot] = Some(Value::Owned(context.pop(name)?));
        }
        for &slot in &self.tensors {
            memory[slot] = Some(Value::Lent(tensors.next()));
        }
        self.place_constants(&mut memory, device)?;
        for step in &self.steps {
            step.run(&mut memory, Pass { rows, device }, context)?;
        }
        for (name, passed) in &self.stashes {
            let tensor = self.take(&mut memory, passed)?;
            context.stash(name, tensor);
        }
        self.outputs.iter().map(|passed| self.take(&mut memory, passed)).collect()
    }

    fn multiply_adds(&self, _: &[SampleShape]) -> u64 {
        self.multiply_adds
    }
}

/// The tensor of a parameter or buffer. The archive has its first values, so the initial value here does not matter. A
/// parameter that no node uses gets no gradient and is not trained.
fn tensor_spec(graph: &Graph, state: usize, used: &HashSet<ValueId>) -> Result<TensorSpec, String> {
    let (value, entry) = (graph.state_value(state), &graph.states[state]);
    let info = &graph.values[value as usize];
    if entry.trained && info.dtype != TensorType::F32 {
        return Err(format!(
            "`{}`: expected parameters of 32-bit floats, got {}: export the model with .float(), and train it with bf16 precision",
            entry.name,
            info.dtype.name()
        ));
    }
    let trained = entry.trained && used.contains(&value);
    Ok(TensorSpec {
        name: entry.name.clone(),
        dims: info.fixed_dims().unwrap_or_default(),
        kind: kind(info.dtype),
        role: if trained { Role::Parameter } else { Role::Buffer },
        init: if trained { Init::Normal { deviation: 0.02 } } else { Init::Constant(0.0) },
    })
}

fn constants(graph: &Graph, used: &HashSet<ValueId>, slots: &mut Slots, decoded: &[Arc<[u8]>]) -> Vec<ConstantSlot> {
    let mut values: Vec<(ValueId, usize)> =
        used.iter().filter_map(|&value| Some((value, graph.constant_of(value)?))).collect();
    values.sort_unstable();
    let one = |(value, constant): (ValueId, usize)| {
        let info = &graph.values[value as usize];
        let shape = SampleShape { dims: info.fixed_dims().unwrap_or_default(), kind: kind(info.dtype) };
        ConstantSlot { slot: slots.of(value), shape, bytes: decoded[constant].clone() }
    };
    values.into_iter().map(one).collect()
}

/// Tells each step which values nothing uses after it, so that their memory is freed.
fn note_last_uses(steps: &mut [Step], kept: &HashSet<usize>) {
    let mut last: HashMap<usize, usize> = HashMap::new();
    for (index, step) in steps.iter().enumerate() {
        last.extend(step.slots().map(|slot| (slot, index)));
    }
    for (slot, index) in last {
        if !kept.contains(&slot) {
            steps[index].last_uses.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_whose_bytes_do_not_fit_its_shape_is_a_fault() {
        let constant = |bytes: &[u8]| ConstantSlot { slot: 0, shape: SampleShape::float(&[2]), bytes: bytes.into() };
        assert!(constant(&[0; 7]).build(Device::Cpu).unwrap_err().to_string().contains("a constant"));
        assert_eq!(constant(&[0; 8]).build(Device::Cpu).unwrap(), Tensor::from_slice(&[0.0_f32, 0.0]));
    }
}

//! What a model from PyTorch computes for one batch: its output in evaluation, loss and gradients, and its state after a step
//! with a learning rate of zero. `python/tests/test_bits.py` compares them with PyTorch's, computed on the same machine.
//!
//! `cargo run --example exported_model -- my.pt2 batch.safetensors computed.safetensors`, where the batch has the tensors
//! `input`, or `input.0`, `input.1`, …, and `target`. Without arguments, it takes a small network of the tests and random images.

use distgpipe::prelude::*;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::zoo::Exported;
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [model, batch, computed] => {
            let tensors = Tensor::read_safetensors(batch)?;
            let find = |name: &str| tensors.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor.copy());
            let numbered = (0..).map_while(|i| find(&format!("input.{i}")));
            let inputs: Vec<Tensor> = find("input").into_iter().chain(numbered).collect();
            let Some(target) = find("target").filter(|_| !inputs.is_empty()) else {
                return Err(
                    format!("{batch}: expected the tensors `input`, or `input.0` and more, and `target`").into()
                );
            };
            Tensor::write_safetensors(
                &compute(Path::new(model), &Batch { inputs, target, samples: Vec::new() })?,
                computed,
            )?;
        }
        [] => {
            let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pt2/digits.pt2");
            let target = Tensor::arange(10, (Kind::Int64, Device::Cpu));
            let batch = Batch::new(Tensor::randn([10, 1, 8, 8], (Kind::Float, Device::Cpu)), target);
            for (name, tensor) in compute(&model, &batch)? {
                println!("{name} {:?}", tensor.size());
            }
        }
        _ => return Err("expected MODEL.pt2 BATCH.safetensors COMPUTED.safetensors, or nothing".into()),
    }
    Ok(())
}

/// Everything by name. The order of operations is PyTorch's: one thread, one micro-batch, and memory in the order of dimensions.
fn compute(model: &Path, batch: &Batch) -> Result<Vec<(String, Tensor)>, Box<dyn Error>> {
    let loss = if batch.target.kind() == Kind::Int64 { Loss::CrossEntropy } else { Loss::MeanSquared };
    let mut pipeline = Pipeline::builder(Exported::open(model)?)
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .channels_last(false)
        .loss(loss)
        .learning_rate(0.0)
        .build()?;
    let inputs = batch.inputs.iter().map(Tensor::shallow_clone).collect();
    let mut all = vec![("evaluation".to_owned(), pipeline.predict(inputs)?)];
    let (outcome, gradients) = pipeline.gradients(batch)?;
    all.push(("loss".to_owned(), Tensor::from(outcome.loss)));
    all.extend(gradients.into_iter().map(|(name, tensor)| (format!("gradient/{name}"), tensor)));
    pipeline.train_step(batch)?;
    all.extend(pipeline.state()?.into_iter().map(|(name, tensor)| (format!("state/{name}"), tensor)));
    Ok(all.into_iter().map(|(name, tensor)| (name, tensor.contiguous())).collect())
}

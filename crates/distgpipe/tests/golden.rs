//! Against PyTorch itself: figures that `scripts/golden_*.py` computed with torch 2.11.0 and torchvision 0.26.0.
//!
//! Each figure is a float64 result; the files also say how far PyTorch's own float32 run is from it. Ours may be a few
//! times that far, because kernels add in another order, and no more.

use distgpipe::engine;
use distgpipe::models::MobileNetV2;
use distgpipe::optim::{Optim, Optimizer};
use distgpipe::tch::{Kind, Tensor};
use distgpipe::{Batch, Pipeline, Recompute, Schedule};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)
}

fn json(file: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(golden(file)).unwrap()).unwrap()
}

fn tensors() -> BTreeMap<String, Tensor> {
    Tensor::read_safetensors(golden("mobilenet_v2.safetensors")).unwrap().into_iter().collect()
}

fn under(all: &BTreeMap<String, Tensor>, prefix: &str) -> BTreeMap<String, Tensor> {
    all.iter().filter_map(|(k, v)| k.strip_prefix(prefix).map(|name| (name.to_owned(), v.shallow_clone()))).collect()
}

/// How many times PyTorch's own float32 deviation ours may be.
const TIMES: f64 = 4.0;

/// The largest deviation, absolute and relative to the largest expected value.
fn deviation(got: &Tensor, expected: &Tensor) -> (f64, f64) {
    assert_eq!(got.size(), expected.size());
    let expected = expected.to_kind(Kind::Double);
    let gap = f64::try_from((got.to_kind(Kind::Double) - &expected).abs().max()).unwrap();
    (gap, gap / f64::try_from(expected.abs().max()).unwrap().max(f64::MIN_POSITIVE))
}

fn pipeline(weights: &BTreeMap<String, Tensor>) -> Pipeline {
    let model = MobileNetV2 { width: 0.25, image: 64, dropout: 0.0, ..MobileNetV2::default() }.model().unwrap();
    let mut pipeline = Pipeline::builder(model)
        .place("client,server,client")
        .balance([1, 18, 1])
        .micro_batches(1)
        .schedule(Schedule::GPipe)
        .recompute(Recompute::Always)
        // The parameters must not move, the batch norms' statistics must.
        .optimizer(Optim::sgd(0.0), 0.0)
        .build()
        .unwrap();
    pipeline.load(weights).unwrap();
    pipeline
}

#[test]
fn mobilenet_v2_has_the_outputs_gradients_and_buffers_of_torchvision() {
    let all = tensors();
    let facts = json("mobilenet_v2.json");
    let allowed =
        |group: &str, measure: &str| TIMES * facts["pytorch_float32_deviation"][group][measure].as_f64().unwrap();
    let (absolute, relative) = ("largest_absolute", "largest_relative_to_tensor_max");
    let mut pipeline = pipeline(&under(&all, "weight/"));

    let logits = pipeline.predict(vec![all["x"].shallow_clone()]).unwrap();
    let (_, gap) = deviation(&logits, &all["eval_logits"]);
    assert!(gap <= allowed("eval_logits", relative), "evaluation logits are off by {gap:e}");

    let batch = Batch::new(all["x"].shallow_clone(), all["labels"].to_kind(Kind::Int64));
    let (outcome, gradients) = pipeline.gradients(&batch).unwrap();
    let loss = f64::try_from(&all["loss"]).unwrap();
    assert!((outcome.loss - loss).abs() <= allowed("loss", absolute), "loss {} against {loss}", outcome.loss);

    let expected = under(&all, "grad/");
    assert_eq!(gradients.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    let zeros: Vec<&str> = facts["gradients_that_are_zero_but_for_rounding"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_str().unwrap())
        .collect();
    for (name, expected) in &expected {
        let (absolute_gap, relative_gap) = deviation(&gradients[name], expected);
        let zero = zeros.contains(&format!("grad/{name}").as_str());
        let (gap, limit) =
            if zero { (absolute_gap, allowed("grad", absolute)) } else { (relative_gap, allowed("grad", relative)) };
        assert!(gap <= limit, "gradient of {name} is off by {gap:e}, allowed {limit:e}");
    }

    pipeline.train_step(&batch).unwrap();
    let state = pipeline.state().unwrap();
    for (name, expected) in under(&all, "buffer/") {
        let (_, gap) = deviation(&state[&name], &expected);
        assert!(gap <= allowed("buffer", relative), "buffer {name} is off by {gap:e}");
    }
}

#[test]
fn ten_steps_of_each_optimizer_are_those_of_torch_optim() {
    let facts = json("optimizers.json");
    let vector =
        |v: &serde_json::Value| -> Vec<f64> { v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
    let mut compared = 0;
    for (name, case) in facts["cases"].as_object().unwrap() {
        let option = |key: &str| case["options"][key].as_f64().unwrap_or(0.0);
        let optim = match case["optimizer"].as_str().unwrap() {
            "SGD" => Optim::Sgd {
                momentum: option("momentum"),
                weight_decay: option("weight_decay"),
                nesterov: case["options"]["nesterov"].as_bool().unwrap_or(false),
            },
            "AdamW" => Optim::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: option("weight_decay") },
            // Kept in the file for the optimizers that are still to come.
            _ => continue,
        };
        let start: Vec<f32> = vector(&facts["start"]).iter().map(|&x| x as f32).collect();
        let parameter = Tensor::from_slice(&start).set_requires_grad(true);
        let mut optimizer = Optimizer::new(optim, 1);
        for (step, gradient) in facts["gradients"].as_array().unwrap().iter().enumerate() {
            let gradient: Vec<f32> = vector(gradient).iter().map(|&x| x as f32).collect();
            engine::clear_grad(&parameter);
            (&parameter * Tensor::from_slice(&gradient)).sum(Kind::Float).backward();
            optimizer.step(std::iter::once(&parameter), option("lr")).unwrap();
            let expected = Tensor::from_slice(&vector(&case["parameters_after_step"][step]));
            let (gap, _) = deviation(&parameter.detach(), &expected);
            let limit = TIMES * case["float32_deviation"].as_f64().unwrap();
            assert!(gap <= limit, "{name}, step {step}: off by {gap:e}, allowed {limit:e}");
        }
        compared += 1;
    }
    assert!(compared >= 5, "only {compared} optimizers were compared");
}

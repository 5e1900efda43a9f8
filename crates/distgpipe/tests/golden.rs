//! Against PyTorch itself: figures that `scripts/golden_*.py` computed with torch 2.11.0 and torchvision 0.26.0.
//!
//! Each figure is a float64 result; the files also say how far PyTorch's own float32 runs are from it at most, with the
//! instruction sets it was tried with (`scripts/golden_deviations.py`), or its run under autocast to bfloat16. Ours may be a few
//! times that far, because kernels add in another order, and no more.

mod soundness;

use distgpipe::engine::{self, Precision};
use distgpipe::model::layer::Role;
use distgpipe::model::zoo::{self, Mlp, MobileNetV2};
use distgpipe::model::ModelSpec;
use distgpipe::runtime::optimizer::{Optim, Optimizer};
use distgpipe::tch::{Kind, Tensor};
use distgpipe::train::learning_rate::{Decay, RateSchedule, WarmUp};
use distgpipe::{Batch, Loss, LossFunction, Pipeline, Recompute, Schedule, TensorSpec};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)
}

fn json(file: &str) -> Value {
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
        .device(engine::Device::Cpu)
        .threads(1)
        .place("client,server,client")
        .balance([1, 18, 1])
        .micro_batches(1)
        .schedule(Schedule::GPipe)
        .recompute(Recompute::Always)
        // The parameters must not move, the batch norms' statistics must.
        .optimizer(Optim::sgd(0.0))
        .learning_rate(0.0)
        .build()
        .unwrap();
    pipeline.load_state(weights).unwrap();
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

/// The numbers of `values` in scripts/golden_models.py: pseudo-random, in [-1, 1), exact in 32-bit floats.
fn values(seed: u64, name: &str, dims: &[i64]) -> Tensor {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let start = format!("{seed}/{name}").bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    let value = |i: u64| {
        let z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(start);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 40) as f32 - 8_388_608.0) / 8_388_608.0
    };
    let count: i64 = dims.iter().product();
    let values: Vec<f32> = (1..=count as u64).map(value).collect();
    Tensor::from_slice(&values).view(dims)
}

/// The tensor of that name: `weight` in scripts/golden_models.py.
fn weight(seed: u64, spec: &TensorSpec) -> Tensor {
    if spec.kind == Kind::Int64 {
        return Tensor::from(7_i64);
    }
    let unit = values(seed, &spec.name, &spec.dims);
    if spec.dims.len() >= 2 {
        let inputs: i64 = spec.dims[1..].iter().product();
        return unit * f64::from((6.0 / inputs as f64).sqrt() as f32);
    }
    match spec.name.rsplit('.').next() {
        Some("weight") => unit * 0.25 + 0.625,
        Some("bias") => unit * 0.25 + 0.75,
        Some("running_mean") => unit * 0.25,
        _ => unit * 0.5 + 1.0,
    }
}

fn floats(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(floats).collect(),
        value => vec![value.as_f64().unwrap()],
    }
}

fn ints(value: &Value) -> Tensor {
    let rows: Vec<Vec<f64>> = value.as_array().unwrap().iter().map(floats).collect();
    let flat: Vec<i64> = rows.concat().iter().map(|&x| x as i64).collect();
    Tensor::from_slice(&flat).view([rows.len() as i64, -1])
}

/// How far a tensor is from what the file keeps of it, relative to its size; for one that is zero, absolutely.
fn gap_to_digest(name: &str, got: &Tensor, kept: &Value) -> f64 {
    let flat = got.to_kind(Kind::Double).contiguous().view(-1);
    let number = |key: &str| kept[key].as_f64().unwrap();
    let gap = |got: Tensor, expected: f64| (f64::try_from(got).unwrap() - expected).abs();
    let (norm, largest) = if number("largest") > 1e-9 { (number("norm"), number("largest")) } else { (1.0, 1.0) };
    let probe = values(0, &format!("probe/{name}"), &flat.size());
    let places = (0_i64..).map(|i| (i * 2_654_435_761 + 12_345) % flat.size()[0]);
    let single = places.zip(floats(&kept["values"])).map(|(place, expected)| gap(flat.get(place), expected) / largest);
    let whole = [
        gap(flat.norm(), number("norm")) / norm,
        gap((&flat * probe).sum(Kind::Double), number("probe")) / norm,
        gap(flat.abs().max(), number("largest")) / largest,
    ];
    single.chain(whole).fold(0.0, f64::max)
}

fn median_deviation(group: &Value) -> f64 {
    let mut all: Vec<f64> =
        group.as_object().unwrap().values().map(|kept| kept["deviation"].as_f64().unwrap()).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// Holds a model against the figures of scripts/golden_models.py or golden_bf16.py: outputs, loss, every gradient and every
/// buffer. Gives each gradient's distance to the truth as a multiple of PyTorch's, sorted.
fn check(file: &str) -> Vec<f64> {
    let facts = json(file);
    let seed = facts["seed"].as_u64().unwrap();
    let recipe = ModelSpec { name: facts["model"].as_str().unwrap().to_owned(), settings: facts["settings"].clone() };
    let model = zoo::build(&recipe).unwrap();
    let specs: Vec<TensorSpec> = model.layers.iter().flat_map(|layer| layer.tensors()).collect();
    let inputs = match facts.get("ids") {
        Some(ids) => vec![ints(ids), ints(&facts["mask"])],
        None => {
            vec![2.0 * values(seed, "x", &floats(&facts["input_dims"]).iter().map(|&n| n as i64).collect::<Vec<_>>())]
        }
    };
    let classifies = facts["labels"].is_array();
    let mut pipeline = Pipeline::builder(model)
        .device(engine::Device::Cpu)
        .threads(1)
        .place("client,server,client")
        .micro_batches(1)
        .schedule(Schedule::GPipe)
        .recompute(Recompute::Always)
        .loss(if classifies { Loss::CrossEntropy } else { Loss::MeanSquared })
        .precision(facts["precision"].as_str().map_or(Precision::Fp32, |text| text.parse().unwrap()))
        // The parameters must not move, the batch norms' statistics must.
        .optimizer(Optim::sgd(0.0))
        .learning_rate(0.0)
        .build()
        .unwrap();
    pipeline.load_state(&specs.iter().map(|spec| (spec.name.clone(), weight(seed, spec))).collect()).unwrap();
    let allowed = |output: &str| TIMES * facts[output].as_f64().unwrap();

    let output = pipeline.predict(inputs.iter().map(Tensor::shallow_clone).collect()).unwrap();
    let expected = Tensor::from_slice(&floats(&facts["eval_output"])).view(&output.size()[..]);
    let (_, gap) = deviation(&output, &expected);
    assert!(gap <= allowed("eval_output_deviation"), "{file}: the output is off by {gap:e}");

    let target = match classifies {
        true => ints(&facts["labels"]).view(-1),
        false => values(seed, "target", &output.size()),
    };
    let batch = Batch { inputs, target, samples: Vec::new() };
    let (outcome, gradients) = pipeline.gradients(&batch).unwrap();
    let loss = facts["loss"].as_f64().unwrap();
    // The loss is a float of outputs that are this far off.
    let limit = allowed("train_output_deviation") * loss;
    assert!((outcome.loss - loss).abs() <= limit, "{file}: loss {} against {loss}", outcome.loss);

    pipeline.train_step(&batch).unwrap();
    let state = pipeline.state().unwrap();
    let (mut compared, mut multiples) = (0, Vec::new());
    for spec in specs.iter().filter(|spec| spec.kind == Kind::Float) {
        let (group, got) = match spec.role {
            Role::Parameter => ("gradients", &gradients[&spec.name]),
            Role::Buffer => ("buffers", &state[&spec.name]),
        };
        let kept = &facts[group][&spec.name];
        // A tensor that PyTorch happened to round well may be rounded as most are.
        let deviation = kept["deviation"].as_f64().unwrap();
        let limit = TIMES * deviation.max(median_deviation(&facts[group]));
        assert_eq!(got.kind(), Kind::Float, "{file}: {}", spec.name);
        let gap = gap_to_digest(&spec.name, got, kept);
        if spec.role == Role::Parameter {
            multiples.push(gap / deviation.max(f64::MIN_POSITIVE));
        }
        assert!(gap <= limit, "{file}: {group} {} is off by {gap:e}, allowed {limit:e}", spec.name);
        compared += 1;
    }
    let kept = ["gradients", "buffers"].map(|group| facts[group].as_object().unwrap().len());
    assert_eq!(compared, kept.iter().sum::<usize>(), "{file}: tensors that only PyTorch has");
    multiples.sort_by(f64::total_cmp);
    multiples
}

/// The same under autocast: as far from the truth as bfloat16 takes PyTorch, and no nearer either.
fn check_bf16(file: &str) {
    let multiples = check(file);
    let median = multiples[multiples.len() / 2];
    assert!((0.1..=1.5).contains(&median), "{file}: gradients are {median} times as far off as PyTorch's");
}

#[test]
fn resnet_of_basic_blocks_has_the_outputs_gradients_and_buffers_of_torchvision() {
    check("resnet18.json");
}

#[test]
fn resnet_of_bottlenecks_has_the_outputs_gradients_and_buffers_of_torchvision() {
    check("resnet50.json");
}

#[test]
fn vgg13_has_the_outputs_and_gradients_of_torchvision() {
    check("vgg13.json");
}

#[test]
fn amoebanet_d_has_the_outputs_gradients_and_buffers_of_pytorch() {
    check("amoebanet_d.json");
}

#[test]
fn unet_has_the_outputs_and_gradients_of_pytorch() {
    check("unet.json");
}

#[test]
fn roberta_has_the_outputs_and_gradients_of_hugging_faces_definition() {
    check("roberta.json");
}

#[test]
fn mlp_in_bf16_has_the_outputs_and_gradients_of_pytorchs_autocast() {
    check_bf16("mlp_bf16.json");
}

#[test]
fn mobilenet_v2_in_bf16_has_the_outputs_gradients_and_buffers_of_pytorchs_autocast() {
    check_bf16("mobilenet_v2_bf16.json");
}

#[test]
fn roberta_in_bf16_has_the_outputs_and_gradients_of_pytorchs_autocast() {
    check_bf16("roberta_bf16.json");
}

#[test]
fn ten_steps_of_each_optimizer_are_those_of_torch_optim() {
    let facts = json("optimizers.json");
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
            "Adam" => Optim::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: option("weight_decay") },
            "RMSprop" => Optim::RmsProp {
                alpha: option("alpha"),
                eps: option("eps"),
                momentum: option("momentum"),
                weight_decay: option("weight_decay"),
            },
            other => panic!("{name}: no such optimizer as {other}"),
        };
        let start: Vec<f32> = floats(&facts["start"]).iter().map(|&x| x as f32).collect();
        let parameter = Tensor::from_slice(&start).set_requires_grad(true);
        let mut optimizer = Optimizer::new(std::sync::Arc::new(optim), 1);
        for (step, gradient) in facts["gradients"].as_array().unwrap().iter().enumerate() {
            let gradient: Vec<f32> = floats(gradient).iter().map(|&x| x as f32).collect();
            engine::clear_grad(&parameter);
            (&parameter * Tensor::from_slice(&gradient)).sum(Kind::Float).backward();
            optimizer.step(std::iter::once(&parameter), option("lr")).unwrap();
            let expected = Tensor::from_slice(&floats(&case["parameters_after_step"][step]));
            let (gap, _) = deviation(&parameter.detach(), &expected);
            let limit = TIMES * case["float32_deviation"].as_f64().unwrap();
            assert!(gap <= limit, "{name}, step {step}: off by {gap:e}, allowed {limit:e}");
        }
        compared += 1;
    }
    assert!(compared >= 13, "only {compared} optimizers were compared");
}

#[test]
fn the_learning_rate_follows_hugging_faces_schedules() {
    let facts = json("rates.json");
    let mut compared = 0;
    for case in facts["cases"].as_array().unwrap() {
        let decay = match case["decay"].as_str().unwrap() {
            "constant" => Decay::Constant,
            "cosine" => Decay::Cosine,
            "linear" => Decay::Linear,
            "polynomial" => Decay::Polynomial { power: case["power"].as_f64().unwrap() },
            other => panic!("no such decay as {other}"),
        };
        let number = |key: &str| case[key].as_u64().unwrap();
        let schedule = RateSchedule { decay, warm_up: WarmUp::Updates(number("warm_up")) };
        for (update, expected) in (0..).zip(floats(&case["rates"])) {
            let got = schedule.factor(update, number("updates"));
            assert!((got - expected).abs() < 1e-12, "{case}: update {update}: {got}");
            compared += 1;
        }
    }
    assert!(compared >= 200, "only {compared} rates were compared");
}

#[test]
fn a_stepped_learning_rate_follows_pytorchs_multi_step_lr() {
    let facts = json("rates.json");
    let cases = facts["steps"].as_array().unwrap();
    for case in cases {
        let number = |key: &str| case[key].as_u64().unwrap();
        let epochs = floats(&case["milestones"]).iter().map(|&epoch| epoch as u64).collect();
        let schedule = RateSchedule::from(Decay::Steps { epochs, factor: case["factor"].as_f64().unwrap() });
        let rates = floats(&case["rates"]);
        assert_eq!(rates.len() as u64, number("epochs") * number("per_epoch"));
        for (update, expected) in (0..).zip(&rates) {
            let got = schedule.factor_in_epochs(update, rates.len() as u64, number("per_epoch"));
            assert!((got - expected).abs() < 1e-12, "{case}: update {update}: {got}");
        }
    }
    assert!(cases.len() >= 4);
}

#[test]
fn binary_cross_entropy_and_its_gradient_are_those_of_pytorch() {
    let facts = json("losses.json");
    let shape: Vec<i64> = floats(&facts["shape"]).iter().map(|&n| n as i64).collect();
    for case in facts["binary_cross_entropy"].as_array().unwrap() {
        let output = Tensor::from_slice(&floats(&facts["scores"])).view(&shape[..]).set_requires_grad(true);
        let target = Tensor::from_slice(&floats(&case["target"])).view(&shape[..]);
        let loss = Loss::BinaryCrossEntropy.compute(&output, &target).unwrap();
        loss.backward();
        let gap = (f64::try_from(&loss).unwrap() - case["loss"].as_f64().unwrap()).abs();
        let (gradient, _) = deviation(&output.grad(), &Tensor::from_slice(&floats(&case["gradient"])).view(&shape[..]));
        assert!(gap < 1e-12 && gradient < 1e-12, "{}: off by {gap:e} and {gradient:e}", case["name"]);
        assert!(Loss::BinaryCrossEntropy.correct(&output, &target).unwrap().is_none());
    }
}

/// Three workers, and a step of three micro-batches, against PyTorch's one module and one batch.
#[test]
fn clipped_and_smoothed_steps_are_those_of_pytorch() {
    let facts = json("clipping.json");
    let ints = |key: &str| floats(&facts[key]).iter().map(|&n| n as i64).collect::<Vec<_>>();
    let (seed, rows, classes) = (facts["seed"].as_u64().unwrap(), ints("rows")[0], ints("classes")[0]);
    let mlp = Mlp { input: ints("input"), hidden: ints("hidden"), classes, dropout: 0.0 };
    let batch = |step: i64| {
        let x = 2.0 * values(seed, &format!("x{step}"), &[rows, 1, 3, 4]);
        let target: Vec<i64> = (0..rows).map(|row| (3 * row + step) % classes).collect();
        Batch::new(x, Tensor::from_slice(&target))
    };
    for case in facts["cases"].as_array().unwrap() {
        let number = |key: &str| case[key].as_f64().unwrap();
        let loss = match number("label_smoothing") {
            0.0 => Loss::CrossEntropy,
            label_smoothing => Loss::SmoothedCrossEntropy { label_smoothing },
        };
        let model = mlp.model().unwrap();
        let specs: Vec<TensorSpec> = model.layers.iter().flat_map(|layer| layer.tensors()).collect();
        let rate = facts["learning_rate"].as_f64().unwrap();
        let builder =
            Pipeline::builder(model).device(engine::Device::Cpu).threads(1).place("a,b,c").micro_batches(3).loss(loss);
        let mut pipeline = builder.optimizer(Optim::sgd(0.9)).learning_rate(rate).build().unwrap();
        pipeline.load_state(&specs.iter().map(|spec| (spec.name.clone(), weight(seed, spec))).collect()).unwrap();
        pipeline.set_clip_norm(Some(number("norm_max")));
        let near = |what: &str, got: &[f64], expected: &Value| {
            let (gap, gap_relative) = deviation(&Tensor::from_slice(got), &Tensor::from_slice(&floats(expected)));
            let limit = TIMES * case["float32_deviation"][what].as_f64().unwrap();
            assert!(gap_relative <= limit, "{what} off by {gap:e}, allowed {limit:e}: {got:?}");
        };
        let steps = case["losses"].as_array().unwrap().len() as i64;
        let outcomes: Vec<_> = (0..steps).map(|step| pipeline.train_step(&batch(step)).unwrap()).collect();
        let losses: Vec<f64> = outcomes.iter().map(|o| o.loss).collect();
        soundness::assert_pipeline_sound(&case.to_string(), &losses, &mut pipeline, &batch(0));
        near("losses", &losses, &case["losses"]);
        near("norms", &outcomes.iter().map(|o| o.gradient_norm.unwrap()).collect::<Vec<_>>(), &case["norms"]);
        near("evaluation_loss", &[pipeline.evaluate(&batch(0)).unwrap().loss], &case["evaluation_loss"]);
        let state = pipeline.state().unwrap();
        let flat = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).view(-1)).unwrap();
        let expected: Vec<Value> = specs.iter().map(|spec| case["parameters"][&spec.name].clone()).collect();
        let got: Vec<f64> = specs.iter().flat_map(|spec| flat(&state[&spec.name])).collect();
        near("parameters", &got, &Value::Array(expected));
    }
}

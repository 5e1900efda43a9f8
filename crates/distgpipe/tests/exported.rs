//! Models from PyTorch: what they compute is what PyTorch computes, and where they are cut changes nothing, to the last bit.
//! `scripts/golden_pt2.py` wrote the archives and the figures.

#[allow(dead_code)]
#[path = "one_device/mod.rs"]
mod one_device;

use distgpipe::driver::profile;
use distgpipe::engine;
use distgpipe::model::exported::NAME;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::zoo::{self, Exported, ExportedOptions};
use distgpipe::{Batch, Loss, Model, ModelSpec, Optim, Pipeline, Precision, Recompute, Schedule, StepError, Workers};
use distgpipe_core::pt2::graph::{GraphParts, Number};
use distgpipe_core::pt2::{archive as reader, operators, Pt2Error};
use distgpipe_core::pt2::{Arg, Boundaries, Graph, Node, Size, ValueInfo};
use distgpipe_core::weights::TensorType;
use one_device::{assert_identical, Tensors};
use proptest::prelude::*;
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const ROWS: i64 = 5;

/// How many times the deviation of PyTorch's own float32 tensor ours may be, and the least that is allowed, relative to the
/// tensor's norm. Equal bits are for `python/tests/test_bits.py`: they differ between processors.
const TIMES: f64 = 8.0;
const DEVIATION_MIN: f64 = 2e-6;

const MODELS: [&str; 16] = [
    "digits",
    "mobilenet_v2",
    "resnet18",
    "vit",
    "convnext",
    "efficientnet",
    "swin",
    "densenet",
    "unet",
    "lstm",
    "encoder",
    "gpt",
    "roberta",
    "roberta_masked",
    "gpt2",
    "llama",
];

fn archive(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pt2").join(format!("{name}.pt2"))
}

/// `values` in scripts/golden_pt2.py.
fn values(count: i64, seed: i64) -> Vec<f64> {
    let value = |i: i64| ((i * 7919 + seed * 104_729 + i * i % 1013 * 31) % 2003) as f64 / 1001.5 - 1.0;
    (0..count).map(value).collect()
}

/// The batch of the figures, with a target for the loss of [`loss`].
fn batch(model: &Model) -> Batch {
    let rows_of = |dims: &[i64]| std::iter::once(ROWS).chain(dims.iter().copied()).collect::<Vec<i64>>();
    let dims = rows_of(&model.input[0].dims);
    let numbers = values(dims.iter().product(), 1);
    let input = match model.input[0].kind {
        Kind::Float => Tensor::from_slice(&numbers).to_kind(Kind::Float),
        _ => {
            // Every model of the list has at least 20 tokens, and the figures say how many.
            let tokens = vocabulary(model);
            let ids: Vec<i64> = numbers.iter().map(|v| ((v + 1.0) * 1e6) as i64 % (tokens - 3) + 3).collect();
            Tensor::from_slice(&ids)
        }
    };
    // A second input is the mask of sentences with 3, 4, 5, … tokens.
    let mask = |dims: &[i64]| {
        let tokens = Tensor::arange(dims[0], (Kind::Int64, Device::Cpu));
        let lengths = Tensor::arange_start(3, 3 + ROWS, (Kind::Int64, Device::Cpu)).unsqueeze(1);
        tokens.lt_tensor(&lengths).to_kind(Kind::Int64)
    };
    let masks = model.input[1..].iter().map(|shape| mask(&shape.dims));
    let inputs = std::iter::once(input.view(&dims[..])).chain(masks).collect();
    let output = output_dims(model);
    let target = match output[..] {
        [classes] => Tensor::arange(ROWS, (Kind::Int64, Device::Cpu)).remainder(classes),
        _ => Tensor::zeros(&rows_of(&output)[..], (Kind::Float, Device::Cpu)),
    };
    Batch { inputs, target, samples: Vec::new() }
}

fn output_dims(model: &Model) -> Vec<i64> {
    model.summary().unwrap().pop().unwrap().output[0].dims.clone()
}

/// The number of rows of the first embedding.
fn vocabulary(model: &Model) -> i64 {
    let tensors = model.layers.iter().flat_map(|layer| layer.tensors());
    tensors.filter(|spec| spec.dims.len() == 2).map(|spec| spec.dims[0]).next().unwrap()
}

fn loss(model: &Model) -> Loss {
    match output_dims(model).len() {
        1 => Loss::CrossEntropy,
        _ => Loss::MeanSquared,
    }
}

/// The model without dropout and stochastic depth, whose masks PyTorch draws otherwise.
fn without_masks(name: &str) -> Model {
    let model = Exported::open(archive(name)).unwrap();
    let settings: Exported = model.spec.as_ref().unwrap().settings().unwrap();
    Model { weights: model.weights, ..graph_without_masks(settings.graph) }
}

fn graph_without_masks(graph: Graph) -> Model {
    let mut parts: GraphParts = graph.into();
    for node in &mut parts.nodes {
        if node.op == "bernoulli_.float" {
            // Its mean, which the graph then divides by itself.
            node.op = "fill_.Scalar".to_owned();
            node.args.iter_mut().filter(|(name, _)| name == "p").for_each(|(name, _)| *name = "value".to_owned());
        }
        for (argument, value) in &mut node.args {
            match (&node.op[..], &argument[..]) {
                ("dropout.default" | "dropout_.default", "train") => *value = Arg::Bool(false),
                ("scaled_dot_product_attention.default", "dropout_p") => *value = Arg::Float(Number(0.0)),
                ("lstm.input", "dropout") => *value = Arg::Float(Number(0.0)),
                _ => {}
            }
        }
    }
    Exported { graph: Graph::try_from(parts).unwrap(), layers: Boundaries::Modules }.model().unwrap()
}

fn with(layers: Boundaries) -> ExportedOptions {
    ExportedOptions { layers, untie: false }
}

fn pipeline(model: &Model, partitions: usize, precision: Precision) -> Pipeline {
    let layers = model.layers.len();
    let sizes = (0..partitions).map(|p| (p + 1) * layers / partitions - p * layers / partitions);
    // Two workers take turns, so that every boundary between partitions is one between workers. Layers that share a tensor
    // are on a third.
    let tied: Vec<usize> = model.ties().into_iter().flat_map(|tie| tie.layers).collect();
    let shares = |p: usize| tied.iter().any(|layer| layer * partitions / layers == p);
    let place: Vec<&str> = (0..partitions).map(|p| if shares(p) { "c" } else { ["a", "b"][p % 2] }).collect();
    Pipeline::builder(model.clone())
        .device(engine::Device::Cpu)
        .threads(1)
        .place(place.join(","))
        .balance(sizes.collect::<Vec<_>>())
        .micro_batches(2)
        .schedule(Schedule::GPipe)
        .recompute(if partitions > 1 { Recompute::Always } else { Recompute::Never })
        .precision(precision)
        .loss(loss(model))
        .learning_rate(1e-3)
        .build()
        .unwrap()
}

fn summary(tensor: &Tensor) -> [f64; 2] {
    let flat = tensor.to_kind(Kind::Double).contiguous().view(-1);
    let probe = Tensor::from_slice(&values(flat.size()[0], 2));
    [f64::try_from(flat.norm()).unwrap(), f64::try_from((flat * probe).sum(Kind::Double)).unwrap()]
}

#[test]
fn exported_models_compute_what_pytorch_computes() {
    let file = std::fs::read(archive("figures").with_extension("json")).unwrap();
    let facts: Value = serde_json::from_slice(&file).unwrap();
    for name in MODELS {
        let model = without_masks(name);
        let batch = batch(&model);
        let mut pipeline = Pipeline::builder(model.clone())
            .device(engine::Device::Cpu)
            .threads(1)
            .channels_last(false)
            .loss(loss(&model))
            .learning_rate(0.0)
            .build()
            .unwrap();
        let mut got = Tensors::new();
        got.insert(
            "evaluation".to_owned(),
            pipeline.predict(batch.inputs.iter().map(Tensor::shallow_clone).collect()).unwrap(),
        );
        let (outcome, gradients) = pipeline.gradients(&batch).unwrap();
        got.insert("loss".to_owned(), Tensor::from(outcome.loss));
        got.extend(gradients.into_iter().map(|(name, tensor)| (format!("gradient/{name}"), tensor)));
        pipeline.train_step(&batch).unwrap();
        let state = pipeline.state().unwrap();
        got.extend(state.into_iter().map(|(name, tensor)| (format!("buffer/{name}"), tensor)));
        let [expected, cancelled] = ["figures", "cancelled"].map(|key| facts[name][key].as_object().unwrap());
        let find = |tensor: &str| got.get(tensor).unwrap_or_else(|| panic!("{name} has no {tensor}"));
        for (tensor, figures) in expected {
            let [norm, product, deviation] = [0, 1, 2].map(|i| figures[i].as_f64().unwrap());
            assert!(norm > 0.0, "{name}: {tensor} is zero, so it shows nothing");
            let [our_norm, our_product] = summary(find(tensor));
            let gap = (our_norm - norm).abs().max((our_product - product).abs()) / norm;
            let allowed = (TIMES * deviation).max(DEVIATION_MIN);
            assert!(gap <= allowed, "{name}: {tensor} is off by {gap:e}, allowed {allowed:e}");
        }
        for (tensor, norm) in cancelled {
            let (ours, allowed) = (summary(find(tensor))[0], TIMES * norm.as_f64().unwrap() + DEVIATION_MIN);
            assert!(ours <= allowed, "{name}: {tensor} is zero but for rounding, got {ours:e}, allowed {allowed:e}");
        }
        let gradients = |key: &&String| key.starts_with("gradient/");
        let all = expected.keys().chain(cancelled.keys()).filter(gradients).count();
        assert_eq!(got.keys().filter(gradients).count(), all, "{name}");
    }
}

/// The same operations in the same order: the graph of torchvision's MobileNetV2 and the hand-written one, from the same
/// weights. Dropout is off in both, because a mask is named by its node in the one and by its layer in the other.
#[test]
fn the_exported_mobilenet_v2_equals_the_built_in_one_over_ten_steps() {
    let graph = std::fs::read(archive("mobilenet_v2_whole").with_extension("json")).unwrap();
    let exported = graph_without_masks(serde_json::from_slice(&graph).unwrap());
    let built_in = zoo::MobileNetV2 { width: 0.25, image: 64, dropout: 0.0, ..zoo::MobileNetV2::default() };
    let build = |model: Model| {
        let builder = Pipeline::builder(model).device(engine::Device::Cpu).threads(1).micro_batches(2);
        builder.optimizer(Optim::sgd(0.9)).learning_rate(0.05).build().unwrap()
    };
    let (mut ours, mut theirs) = (build(built_in.model().unwrap()), build(exported));
    let start = ours.state().unwrap();
    let names: Vec<String> = start.keys().cloned().collect();
    theirs.load_from(&names, |name| Ok::<_, StepError>(start[name].copy())).unwrap();
    let input = Tensor::from_slice(&values(8 * 3 * 64 * 64, 5)).to_kind(Kind::Float).view([8, 3, 64, 64]);
    let batch = Batch::new(input, Tensor::arange(8, (Kind::Int64, Device::Cpu)));
    let mut losses = Vec::new();
    for step in 0..10 {
        let [expected, got] = [&mut ours, &mut theirs].map(|pipeline| pipeline.train_step(&batch).unwrap().loss);
        assert_eq!(got.to_bits(), expected.to_bits(), "step {step}: {got} and {expected}");
        losses.push(got);
    }
    assert!(losses[9] < losses[0], "it learns: {losses:?}");
    assert_identical("after ten steps", &theirs.state().unwrap(), &ours.state().unwrap());
}

/// Loss, gradients, and parameters and buffers after a step.
fn step(model: &Model, partitions: usize, precision: Precision) -> (f64, Tensors, Tensors) {
    let batch = batch(model);
    let mut pipeline = pipeline(model, partitions, precision);
    let (outcome, gradients) = pipeline.gradients(&batch).unwrap();
    pipeline.train_step(&batch).unwrap();
    (outcome.loss, gradients, pipeline.state().unwrap())
}

fn assert_cut_changes_nothing(name: &str, boundaries: Boundaries, precision: Precision) {
    let model = Exported::open_with(archive(name), with(boundaries)).unwrap();
    let whole = step(&model, 1, precision);
    let cut = step(&model, model.layers.len(), precision);
    assert_eq!(cut.0, whole.0, "{name}: loss");
    assert_identical(&format!("{name}: gradients"), &cut.1, &whole.1);
    assert_identical(&format!("{name}: state"), &cut.2, &whole.2);
}

/// With dropout, stochastic depth, recomputation and a ragged batch.
#[test]
fn an_exported_model_may_be_cut_after_all_of_its_modules_at_once() {
    MODELS.iter().for_each(|name| assert_cut_changes_nothing(name, Boundaries::Modules, Precision::Fp32));
}

#[test]
fn an_exported_model_may_be_cut_at_every_legal_boundary_at_once() {
    MODELS.iter().for_each(|name| assert_cut_changes_nothing(name, Boundaries::All, Precision::Fp32));
}

#[test]
fn an_exported_model_in_bf16_may_be_cut_after_all_of_its_modules_at_once() {
    // Without the LSTM: libtorch asks the processor whether it has oneDNN's in bfloat16, and fails where ONEDNN_MAX_CPU_ISA forbids it.
    for name in ["mobilenet_v2", "vit", "gpt"] {
        assert_cut_changes_nothing(name, Boundaries::Modules, Precision::Bf16);
    }
}

/// Masks are named by the node, so they do not depend on where layers end.
#[test]
fn the_division_into_layers_changes_nothing() {
    for name in ["mobilenet_v2", "vit", "convnext"] {
        let [modules, all] = [Boundaries::Modules, Boundaries::All]
            .map(|boundaries| step(&Exported::open_with(archive(name), with(boundaries)).unwrap(), 1, Precision::Fp32));
        assert_identical(&format!("{name}: gradients"), &modules.1, &all.1);
        assert_identical(&format!("{name}: state"), &modules.2, &all.2);
    }
}

/// A model travels as its spec.
#[test]
fn a_model_built_from_its_spec_is_the_same_and_a_damaged_spec_is_refused() {
    let model = Exported::open(archive("vit")).unwrap();
    let text = serde_json::to_string(model.spec.as_ref().unwrap()).unwrap();
    let again = zoo::build(&serde_json::from_str(&text).unwrap()).unwrap();
    let names = |model: &Model| model.layers.iter().map(|layer| layer.name().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&again), names(&model));
    let mut spec: ModelSpec = serde_json::from_str(&text).unwrap();
    assert_eq!(spec.name, NAME);
    spec.settings["graph"]["nodes"][0]["op"] = "from_file.default".into();
    let refused = zoo::build(&spec).err().unwrap().to_string();
    assert!(refused.contains("`aten.from_file.default` in `conv_proj`"), "{refused}");
}

/// A cut may name any module whose call ends at a boundary.
#[test]
fn a_cut_names_modules() {
    let model = Exported::open(archive("mobilenet_v2")).unwrap();
    let sizes = |text: &str| zoo::cut(&model, text).map(|balance| balance.sizes().to_vec());
    let names: Vec<&str> = model.layers.iter().map(|layer| layer.name()).collect();
    let place = |name: &str| names.iter().position(|&layer| layer == name).unwrap() + 1;
    assert_eq!(sizes("after=features.1").unwrap()[0], place("features.1"));
    // `features` ends where its last block ends.
    assert_eq!(sizes("after=features").unwrap()[1], names.iter().filter(|name| name.starts_with("classifier")).count());
    assert!(sizes("after=features.99").unwrap_err().to_string().contains("the model has features.0.0, "));
}

/// How to train GPT-2, whose first and last layers share a matrix.
#[derive(Clone, Copy, Debug)]
struct TiedRun {
    schedule: Schedule,
    recompute: Recompute,
    replicas: usize,
    clip_norm: Option<f64>,
}

fn tied_pipeline(model: &Model, sizes: &[usize], place: &str, run: TiedRun) -> Pipeline {
    let builder = Pipeline::builder(model.clone())
        .device(engine::Device::Cpu)
        .threads(1)
        .balance(sizes.to_vec())
        .place(place)
        .micro_batches(if run.replicas > 1 { 2 } else { 3 })
        .schedule(run.schedule)
        .recompute(run.recompute)
        .replicas(run.replicas)
        .optimizer(Optim::adamw())
        .loss(loss(model))
        .learning_rate(1e-3);
    match run.clip_norm {
        Some(norm) => builder.clip_norm(norm).build().unwrap(),
        None => builder.build().unwrap(),
    }
}

fn optimizer_state(pipeline: &mut Pipeline) -> Tensors {
    let mut state = Tensors::new();
    let take = |name: &str, tensor: Tensor| {
        assert!(state.insert(name.to_owned(), tensor).is_none(), "{name} is stored twice");
        Ok::<(), StepError>(())
    };
    pipeline.optimizer_each(take).unwrap();
    state
}

const TIED: &str = "model.transformer.wte.weight";

/// The sum of the gradients of both uses has the bits that it has on one device, whatever the schedule does in between: a
/// leaf that both uses shared would add them in the order in which the passes happen to run.
#[test]
fn gpt2_with_tied_weights_trains_as_client_server_client_like_on_one_device() {
    let model = Exported::open(archive("gpt2")).unwrap();
    let layers = model.layers.len();
    assert!(layers > 4, "{layers} layers");
    let batch = batch(&model);
    let plain = TiedRun { schedule: Schedule::GPipe, recompute: Recompute::Never, replicas: 1, clip_norm: None };
    for run in [
        TiedRun { recompute: Recompute::Always, clip_norm: Some(0.1), ..plain },
        TiedRun { schedule: Schedule::OneFOneB, recompute: Recompute::ExceptLast, ..plain },
        TiedRun { schedule: Schedule::OneFOneB, replicas: 2, clip_norm: Some(0.1), ..plain },
    ] {
        let mut whole = tied_pipeline(&model, &[layers], "client", run);
        let mut cut = tied_pipeline(&model, &[1, layers - 3, 2], "client,server,client", run);
        let ((expected, gradients), (got, ours)) = (whole.gradients(&batch).unwrap(), cut.gradients(&batch).unwrap());
        assert_eq!(got.loss, expected.loss, "{run:?}");
        assert_identical(&format!("{run:?}: gradients"), &ours, &gradients);
        for _ in 0..3 {
            let [expected, got] = [&mut whole, &mut cut].map(|pipeline| pipeline.train_step(&batch).unwrap());
            assert_eq!((got.loss, got.gradient_norm), (expected.loss, expected.gradient_norm), "{run:?}");
        }
        assert_identical(&format!("{run:?}: state"), &cut.state().unwrap(), &whole.state().unwrap());
        let [expected, got] = [&mut whole, &mut cut].map(optimizer_state);
        assert_identical(&format!("{run:?}: optimizer"), &got, &expected);
        assert_eq!(i64::try_from(&got[&format!("steps.{TIED}")]).unwrap(), 3, "updated once in each step");
    }
}

/// State that one cut saves is loaded by another, and training goes on with the same bits.
#[test]
fn a_run_with_tied_weights_goes_on_under_another_cut() {
    let model = Exported::open(archive("gpt2")).unwrap();
    let (layers, batch) = (model.layers.len(), batch(&model));
    let run = TiedRun { schedule: Schedule::GPipe, recompute: Recompute::Never, replicas: 1, clip_norm: None };
    let mut first = tied_pipeline(&model, &[1, layers - 2, 1], "client,server,client", run);
    first.train_step(&batch).unwrap();
    let mut second = tied_pipeline(&model, &[2, 2, layers - 4], "a,b,a", run);
    let (state, optimizer) = (first.state().unwrap(), optimizer_state(&mut first));
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<String>>();
    second.load_from(&names(&state), |name| Ok::<_, StepError>(state[name].copy())).unwrap();
    second.load_optimizer_from(&names(&optimizer), |name| Ok::<_, StepError>(optimizer[name].copy())).unwrap();
    second.set_batches_trained(first.batches_trained());
    for pipeline in [&mut first, &mut second] {
        pipeline.train_step(&batch).unwrap();
    }
    assert_identical("state", &second.state().unwrap(), &first.state().unwrap());
    assert_ne!(second.state().unwrap()[TIED], state[TIED], "it is trained");
}

/// A server whose driver places the uses apart would otherwise train a copy of its own.
#[test]
fn tied_weights_on_two_workers_are_refused() {
    let model = Exported::open(archive("gpt2")).unwrap();
    let layers = model.layers.len();
    let builder = || Pipeline::builder(model.clone()).device(engine::Device::Cpu);
    for (sizes, place) in [(vec![2, layers - 2], "client,server"), (vec![1, 1, layers - 2], "a,b,c")] {
        let error = builder().balance(sizes).place(place).build().err().unwrap().to_string();
        assert!(error.contains(TIED) && error.contains("only one worker can hold it"), "{error}");
    }
    // Both searches for a cut know: the ends of the model are on one worker, or there is no cut.
    let sample = || profile::sample(&model, 2, 0).unwrap();
    let found = builder().auto_balance(3, sample()).place("client,server,client").build().unwrap();
    assert_eq!(found.balance().partitions(), 3);
    let none = builder().auto_balance(2, sample()).build().err().unwrap().to_string();
    assert!(none.contains("three partitions with `Builder::place` w0,w1,w0"), "{none}");
}

#[test]
fn tied_weights_are_counted_and_saved_as_in_the_state_dict() {
    let model = Exported::open_with(archive("gpt2"), with(Boundaries::All)).unwrap();
    let holders = model.layers.iter().filter(|layer| layer.tensors().iter().any(|spec| spec.name == TIED));
    assert_eq!(holders.count(), 2);
    let untied = ExportedOptions { untie: true, ..ExportedOptions::default() };
    let copies = Exported::open_with(archive("gpt2"), untied).unwrap();
    let tensors = model.layers.iter().flat_map(|layer| layer.tensors());
    let tied = tensors.filter(|spec| spec.name == TIED).map(|spec| spec.elements()).next();
    assert_eq!(copies.parameters() - model.parameters(), tied.unwrap());
    let path = std::env::temp_dir().join(format!("distgpipe-tied-{}.safetensors", std::process::id()));
    let mut pipeline = pipeline(&model, 1, Precision::Fp32);
    pipeline.save(&path).unwrap();
    let saved: Tensors = Tensor::read_safetensors(&path).unwrap().into_iter().collect();
    assert_eq!(
        saved["model.lm_head.weight"], saved["model.transformer.wte.weight"],
        "both names, as in the state dict"
    );
    pipeline.load(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
}

/// An independent copy of a tied parameter starts from the same values, and the two gradients add up to that of the tied one.
#[test]
fn untied_weights_are_copies_and_may_be_cut_apart() {
    let options = ExportedOptions { layers: Boundaries::Modules, untie: true };
    let model = Exported::open_with(archive("gpt2"), options).unwrap();
    assert!(model.layers.len() > 3, "{} layers", model.layers.len());
    let (whole, cut) = (step(&model, 1, Precision::Fp32), step(&model, model.layers.len(), Precision::Fp32));
    assert_identical("gpt2 untied: gradients", &cut.1, &whole.1);
    assert_identical("gpt2 untied: state", &cut.2, &whole.2);
    let tied = step(&Exported::open(archive("gpt2")).unwrap(), 1, Precision::Fp32);
    assert_eq!(whole.0, tied.0, "the loss of the first step");
    let (head, embedding) = ("model.lm_head.weight", "model.transformer.wte.weight");
    let gap = (&whole.1[head] + &whole.1[embedding] - &tied.1[embedding]).abs().max();
    assert!(f64::try_from(gap).unwrap() < 1e-6);
    assert_ne!(whole.2[head], whole.2[embedding], "each is updated by its own gradient");
}

/// x + (-1 · einsum(x), in place) + empty + x is x, if einsum does not return its operand and empty memory holds zeros.
#[test]
fn einsum_of_one_operand_is_a_copy_and_empty_tensors_are_zeros() {
    let node = |op: &str, args: Vec<(&str, Arg)>| {
        let args = args.into_iter().map(|(name, arg)| (name.to_owned(), arg)).collect();
        Node { op: op.to_owned(), args, results: 1, modules: Vec::new(), no_grad: false }
    };
    let add = |a, b| node("add.Tensor", vec![("self", Arg::Tensor(a)), ("other", Arg::Tensor(b))]);
    let equation = ("equation", Arg::Text("ij->ij".to_owned()));
    let nodes = vec![
        node("mul.Scalar", vec![("self", Arg::Tensor(0)), ("other", Arg::Float(Number(1.0)))]),
        node("einsum.default", vec![equation, ("tensors", Arg::Tensors(vec![Some(1)]))]),
        node("neg_.default", vec![("self", Arg::Tensor(2))]),
        node("empty_like.default", vec![("self", Arg::Tensor(1))]),
        add(1, 3),
        add(5, 4),
        add(6, 1),
    ];
    let row = ValueInfo { dtype: TensorType::F32, dims: vec![Size::BATCH, Size::Fixed(64)] };
    let graph = GraphParts { inputs: 1, values: vec![row; nodes.len() + 1], nodes, output: 7, ..GraphParts::default() };
    let model = Exported { graph: Graph::try_from(graph).unwrap(), layers: Boundaries::Modules }.model().unwrap();
    let mut pipeline = Pipeline::builder(model).device(engine::Device::Cpu).threads(1).build().unwrap();
    let x = Tensor::from_slice(&values(3 * 64, 4)).to_kind(Kind::Float).view([3, 64]);
    for _ in 0..3 {
        // Memory that is likely to be allocated next.
        drop(Tensor::full([3, 64], 7.0, (Kind::Float, Device::Cpu)));
        assert_eq!(pipeline.predict(vec![x.shallow_clone()]).unwrap(), x);
    }
}

#[test]
fn an_exported_model_trains_over_threads_from_the_weights_of_its_file() {
    let model = Exported::open(archive("gpt")).unwrap();
    let mut pipeline = Pipeline::builder(model.clone())
        .device(engine::Device::Cpu)
        .threads(1)
        .place("client,server")
        .workers(Workers::Threads)
        .loss(Loss::MeanSquared)
        .learning_rate(0.1)
        .build()
        .unwrap();
    let batch = batch(&model);
    let losses: Vec<f64> = (0..20).map(|_| pipeline.train_step(&batch).unwrap().loss).collect();
    assert!(losses[19] < losses[0] * 0.9, "{losses:?}");
}

/// An archive whose JSON can be changed so that its checksum still fits: without that, every change ends at the checksum.
struct Mutable {
    content: Vec<u8>,
    json: Range<usize>,
    checksums: Vec<usize>,
}

impl Mutable {
    fn open(name: &str) -> Self {
        let content = std::fs::read(archive(name)).unwrap();
        let number = |at: usize, bytes: usize| {
            content[at..at + bytes].iter().rev().fold(0_usize, |sum, &byte| sum << 8 | usize::from(byte))
        };
        let named = |entry: &usize| content[entry + 46..][..number(entry + 28, 2)].ends_with(b"models/model.json");
        let entry = (0..content.len() - 46).filter(|&at| content[at..].starts_with(b"PK\x01\x02")).find(named).unwrap();
        let header = number(entry + 42, 4);
        let begin = header + 30 + number(header + 26, 2) + number(header + 28, 2);
        let json = begin..begin + number(entry + 20, 4);
        let checksum = &content[entry + 16..entry + 20];
        let checksums: Vec<usize> = (0..content.len() - 4).filter(|&at| &content[at..at + 4] == checksum).collect();
        let mutable = Mutable { json, checksums, content };
        assert_eq!(mutable.with(&[]), mutable.content, "the checksum is that of the JSON");
        mutable
    }

    /// The archive with bytes replaced, the places counted from the start of the JSON.
    fn with(&self, changes: &[(usize, u8)]) -> Vec<u8> {
        let mut content = self.content.clone();
        changes.iter().for_each(|&(at, byte)| content[self.json.start + at] = byte);
        let checksum = content[self.json.clone()].iter().fold(u32::MAX, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 })
        });
        self.checksums.iter().for_each(|&at| content[at..at + 4].copy_from_slice(&(!checksum).to_le_bytes()));
        content
    }
}

/// Reads an archive and prepares its operators for both divisions into layers. Whether there was a model.
fn prepared(content: &[u8]) -> bool {
    let read = |range: Range<u64>| Ok::<_, Pt2Error>(content[range.start as usize..range.end as usize].to_vec());
    reader::graph(content.len() as u64, &mut { read }).is_ok_and(prepared_graph)
}

fn prepared_graph(graph: Graph) -> bool {
    let models = [Boundaries::Modules, Boundaries::All].map(|layers| Exported { graph: graph.clone(), layers }.model());
    let fine = models.iter().any(Result::is_ok);
    models.into_iter().flatten().for_each(|model| drop(model.summary()));
    fine
}

static SMALL_ARCHIVES: LazyLock<[Mutable; 2]> = LazyLock::new(|| ["digits", "lstm"].map(Mutable::open));

#[test]
fn the_archives_that_are_mutated_are_models_and_most_changes_pass_the_checksum() {
    for mutable in &*SMALL_ARCHIVES {
        assert!(prepared(&mutable.content));
        // Spaces between the parts of the JSON are many, and none of our business.
        let space = mutable.content[mutable.json.clone()].iter().position(|&byte| byte == b' ').unwrap();
        assert!(prepared(&mutable.with(&[(space, b'\n')])));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(256), ..ProptestConfig::default() })]

    /// From the bytes of a file to operators of libtorch that are ready to be called. Digits become other digits, so that
    /// the JSON stays JSON, and every third byte anything.
    #[test]
    fn mutated_archives_never_panic_on_their_way_to_a_model(
        which in 0..2_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let mutable = &SMALL_ARCHIVES[which];
        let json = &mutable.content[mutable.json.clone()];
        let digits: Vec<usize> = (0..json.len()).filter(|&at| json[at].is_ascii_digit()).collect();
        let change = |(at, byte): (prop::sample::Index, u8)| match byte % 3 {
            0 => (at.index(json.len()), byte),
            _ => (digits[at.index(digits.len())], b'0' + byte % 10),
        };
        let changes: Vec<(usize, u8)> = changes.into_iter().map(change).collect();
        prepared(&mutable.with(&changes));
    }

    /// A hostile driver sends a graph, in which operators have the arguments of others.
    #[test]
    fn mutated_graphs_never_panic_on_their_way_to_a_model(
        which in 0..2_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..4_u8), 1..4),
    ) {
        let content = &SMALL_ARCHIVES[which].content;
        let read = |range: Range<u64>| Ok::<_, Pt2Error>(content[range.start as usize..range.end as usize].to_vec());
        let mut parts: GraphParts = reader::graph(content.len() as u64, &mut { read }).unwrap().into();
        let every: Vec<&str> = operators::all().collect();
        for (node, other, kind) in changes {
            let args: Vec<(String, Arg)> = parts.nodes.iter().flat_map(|node| node.args.clone()).collect();
            let node = node.index(parts.nodes.len());
            let node = &mut parts.nodes[node];
            match (kind, node.args.is_empty()) {
                (0, _) => node.op = (*other.get(&every)).to_owned(),
                (1, _) => node.args.push(other.get(&args).clone()),
                (2, false) => drop(node.args.remove(other.index(node.args.len()))),
                (3, false) => {
                    let at = other.index(node.args.len());
                    node.args[at].1 = other.get(&args).1.clone();
                }
                _ => {}
            }
        }
        if let Ok(graph) = Graph::try_from(parts) {
            prepared_graph(graph);
        }
    }
}

//! Parameter groups: the updates are those of libtorch's own optimizers with the same groups, and each parameter is updated as by
//! an optimizer that has its settings for all parameters.

#[path = "one_device/mod.rs"]
#[allow(dead_code)]
mod one_device;

use distgpipe::data::{Digits, Loader, LoaderOptions, Split};
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::nn::{self, OptimizerConfig};
use distgpipe::tch::{Device, Kind};
use distgpipe::{Batch, BuildError, Optim, ParameterGroup, Pipeline};
use one_device::{same_bits, soundness, Tensors};
use std::sync::Arc;

fn batch() -> Batch {
    let digits = Digits::new(Split::Train, Default::default()).unwrap();
    Loader::new(Arc::new(digits), LoaderOptions::training(64, 3)).unwrap().epoch(0).next().unwrap().unwrap()
}

/// The parameters after one step from the same start.
fn stepped(place: &str, optim: Optim, learning_rate: f64, groups: &[ParameterGroup]) -> Tensors {
    let model = Mlp { hidden: vec![16, 16, 16], ..Mlp::default() }.model().unwrap();
    let builder = Pipeline::builder(model).device(distgpipe::engine::Device::Cpu).threads(1).place(place);
    let builder = builder.micro_batches(2).optimizer(optim).learning_rate(learning_rate);
    let mut pipeline =
        groups.iter().fold(builder, |builder, group| builder.parameter_group(group.clone())).build().unwrap();
    let loss = pipeline.train_step(&batch()).unwrap().loss;
    soundness::assert_pipeline_sound("one step", &[loss], &mut pipeline, &batch());
    pipeline.state().unwrap()
}

#[test]
fn every_parameter_has_the_rate_and_the_decay_of_its_groups_whatever_the_cut() {
    let groups = [
        ParameterGroup::new("layers.[01].*").rate_factor(0.25).weight_decay(0.5),
        ParameterGroup::new("*.bias").weight_decay(0.0),
        ParameterGroup::new("layers.1.weight").rate_factor(0.0),
    ];
    let settings = |name: &str| match name {
        "layers.0.weight" => (0.25, 0.5),
        "layers.1.weight" => (0.0, 0.5),
        "layers.0.bias" | "layers.1.bias" => (0.25, 0.0),
        "layers.2.bias" | "layers.3.bias" => (1.0, 0.0),
        _ => (1.0, 0.1),
    };
    for (optim, rate) in [
        (Optim::Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: true }, 0.1),
        (Optim::adam().with_weight_decay(0.1), 0.01),
        (Optim::adamw().with_weight_decay(0.1), 0.01),
        (Optim::rms_prop(0.9).with_weight_decay(0.1), 0.001),
    ] {
        let alone = |(factor, decay): (f64, f64)| stepped("a", optim.with_weight_decay(decay), rate * factor, &[]);
        for place in ["a", "a,b", "a,b,a"] {
            let state = stepped(place, optim, rate, &groups);
            assert_eq!(state.len(), 8);
            for (name, tensor) in &state {
                let expected = &alone(settings(name))[name];
                assert!(same_bits(tensor, expected), "{optim:?} on {place}: {name}");
            }
        }
    }
}

/// Five steps on two workers, beside `torch::optim` on one device, which gets the same gradients.
#[test]
fn the_updates_are_those_of_libtorchs_optimizers_with_the_same_groups() {
    let (rate, decay) = (0.02, 0.1);
    let sgd = nn::Sgd { momentum: 0.9, dampening: 0.0, wd: decay, nesterov: false };
    let adam = nn::Adam { wd: decay, ..nn::Adam::default() };
    let adamw = nn::AdamW { wd: decay, ..nn::AdamW::default() };
    type Build<'a> = &'a dyn Fn(&nn::VarStore) -> nn::Optimizer;
    let cases: [(Optim, Build<'_>); 3] = [
        (Optim::sgd(0.9), &|store| sgd.build(store, rate).unwrap()),
        (Optim::adam(), &|store| adam.build(store, rate).unwrap()),
        (Optim::adamw(), &|store| adamw.build(store, rate).unwrap()),
    ];
    for (optim, build) in cases {
        let model = Mlp { hidden: vec![16, 16], ..Mlp::default() }.model().unwrap();
        let mut pipeline = Pipeline::builder(model)
            .device(distgpipe::engine::Device::Cpu)
            .threads(1)
            .place("a,b")
            .micro_batches(2)
            .optimizer(optim.with_weight_decay(decay))
            .learning_rate(rate)
            .parameter_group(ParameterGroup::new("layers.0.*").rate_factor(0.1))
            .parameter_group(ParameterGroup::new("*.bias").weight_decay(0.0))
            .build()
            .unwrap();
        let store = nn::VarStore::new(Device::Cpu);
        let group = |name: &str| 2 * usize::from(name.starts_with("layers.0.")) + usize::from(name.ends_with(".bias"));
        // A name in a store may have no dots.
        let variables: Tensors = pipeline
            .state()
            .unwrap()
            .into_iter()
            .map(|(name, tensor)| {
                let variable = store.root().set_group(group(&name)).var_copy(&name.replace('.', "-"), &tensor);
                (name, variable)
            })
            .collect();
        let mut reference = build(&store);
        for number in 0..4 {
            reference.set_lr_group(number, if number >= 2 { 0.1 * rate } else { rate });
            reference.set_weight_decay_group(number, if number % 2 == 1 { 0.0 } else { decay });
        }
        let mut losses = Vec::new();
        for step in 0..5 {
            let (_, gradients) = pipeline.gradients(&batch()).unwrap();
            losses.push(pipeline.train_step(&batch()).unwrap().loss);
            reference.zero_grad();
            for (name, variable) in &variables {
                (variable * &gradients[name]).sum(Kind::Float).backward();
            }
            reference.step();
            for (name, tensor) in pipeline.state().unwrap() {
                let gap = f64::try_from((&variables[&name].detach() - &tensor).abs().max()).unwrap();
                assert!(gap < 2e-6, "{optim:?}, step {step}: {name} is off by {gap:e}");
            }
        }
        soundness::assert_pipeline_sound("five steps", &losses, &mut pipeline, &batch());
    }
}

#[test]
fn a_pattern_that_matches_nothing_is_refused_with_close_names() {
    let model = Mlp::default().model().unwrap();
    let group = ParameterGroup::new("layer.1.weight").rate_factor(0.1);
    let refused = Pipeline::builder(model).parameter_group(group).build().err().unwrap();
    assert!(matches!(refused, BuildError::ParameterGroups(_)));
    let said = refused.to_string();
    assert!(
        said.contains("`Builder::parameter_group`: no parameter matches") && said.contains("`layers.1.weight`"),
        "{said}"
    );
}

//! Data parallelism between threads: replicas of a pipeline share each batch and learn the same.

#[allow(dead_code)]
#[path = "one_device/mod.rs"]
mod one_device;
#[allow(dead_code)]
#[path = "one_device/replicas.rs"]
mod replicas;

use distgpipe::comm::timeouts::Timeouts;
use distgpipe::failure::Fault;
use distgpipe::model::layer::Role;
use distgpipe::model::zoo::Mlp;
use distgpipe::runtime::accumulation::AccumulationStep;
use distgpipe::runtime::trace::{Phase, Span};
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{
    Batch, BuildError, Context, Init, Layer, LayerTensors, Loss, Model, Optim, Pipeline, Precision, SampleShape,
};
use distgpipe::{Builder, ShapeError, SkipShapes, StepError, StepOutcome, TensorSpec, Workers};
use one_device::{assert_identical, soundness, subjects, Subject, Tensors};
use replicas::replicas;
use std::sync::Arc;

fn subject(name: &str) -> Subject {
    subjects().into_iter().find(|subject| subject.name == name).unwrap()
}

/// The largest difference of two sets of tensors, each as a share of its tensor's largest number. Gradients that are zero
/// but for rounding, such as that of a bias before a batch norm, count as those of all tensors together.
fn gap(a: &Tensors, b: &Tensors) -> f64 {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    let most = |t: Tensor| f64::try_from(t.to_kind(Kind::Double).abs().max()).unwrap();
    let all = b.values().map(|t| most(t.shallow_clone())).fold(0.0, f64::max);
    let gap = |(name, a): (&String, &Tensor)| most(a - &b[name]) / most(b[name].shallow_clone()).max(1e-4 * all);
    a.iter().map(gap).fold(0.0, f64::max)
}

#[test]
fn two_replicas_are_two_devices_that_add_up_their_gradients() {
    replicas::check_two(subjects(), |_| Workers::Threads);
}

#[test]
fn two_replicas_in_bf16_are_two_devices_in_bf16() {
    replicas::check_two(one_device::in_bf16(subjects()), |_| Workers::Threads);
}

/// The shares of all others wait for the one whose server is late.
#[test]
fn many_replicas_wait_for_a_slow_one() {
    let model = Mlp { hidden: vec![16, 16], dropout: 0.0, ..Mlp::default() }.model().unwrap();
    let mut pipeline = Pipeline::builder(model)
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .place("client,server")
        .replicas(40)
        .timeouts(Timeouts { stall_s: 10.0, ..Timeouts::default() })
        .faults("client/7>server/7:delay=4000@0")
        .build()
        .unwrap();
    let x = Tensor::ones([40, 1, 8, 8], (Kind::Float, Device::Cpu));
    let batch = Batch::new(x, Tensor::zeros([40], (Kind::Int64, Device::Cpu)));
    let loss = pipeline.train_step(&batch).unwrap().loss;
    soundness::assert_pipeline_sound("40 replicas", &[loss], &mut pipeline, &batch);
}

/// Multiplies by its weight: always, never, or where the first number is positive.
struct Branch(&'static str);

impl Layer for Branch {
    fn name(&self) -> &str {
        self.0
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::parameter(format!("{}.weight", self.0), &[3], Init::Constant(0.5))]
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(input)
    }

    fn forward(&self, own: &mut LayerTensors<'_>, x: Vec<Tensor>, _: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
        let weight = own.next();
        let used = match self.0 {
            "all" => true,
            "some" => x[0].double_value(&[0, 0]) > 0.0,
            _ => false,
        };
        Ok(if used { vec![x[0].f_mul(weight)?] } else { x })
    }
}

/// A part of the model that only some replicas used gets their gradient everywhere, and one that nobody used gets none.
#[test]
fn parameters_that_some_replicas_did_not_use_get_the_gradient_of_the_others() {
    let layers = ["none", "some", "all"].map(|name| Arc::new(Branch(name)) as Arc<dyn Layer>);
    let model = Model::new(layers.to_vec(), vec![SampleShape::float(&[3])]);
    let build = |count: usize, micro_batches: usize| {
        let builder = Pipeline::builder(model.clone())
            .device(distgpipe::engine::Device::Cpu)
            .threads(1)
            .place("a,b,a")
            .micro_batches(micro_batches)
            .replicas(count);
        builder.loss(Loss::MeanSquared).build().unwrap()
    };
    // Rows of the second replica alone make `some` work.
    let x = Tensor::from_slice(&[-1f32, 2.0, 3.0, -4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, -2.0, -3.0]).view([4, 3]);
    let batch = Batch::new(x, Tensor::zeros([4, 3], (Kind::Float, Device::Cpu)));
    let expected = build(1, 4).gradients(&batch).unwrap().1;
    assert_eq!(expected.keys().collect::<Vec<_>>(), ["all.weight", "some.weight"]);
    let mut two = build(2, 2);
    let got = two.gradients(&batch).unwrap().1;
    assert!(gap(&got, &expected) < 1e-6, "{got:?} {expected:?}");
    two.train_step(&batch).unwrap();
}

/// One pipeline with as many micro-batches adds up the same numbers in another order.
#[test]
fn any_number_of_replicas_has_the_gradients_of_one_pipeline() {
    for subject in subjects() {
        for count in [3, 4, 5] {
            let batch = subject.batch(43, 1);
            let mut one = replicas(&subject, 1, "one").micro_batches(2 * count).build().unwrap();
            let (expected, truth) = one.gradients(&batch).unwrap();
            let mut many = replicas(&subject, count, "client,server,client").build().unwrap();
            let (outcome, gradients) = many.gradients(&batch).unwrap();
            assert!((outcome.loss - expected.loss).abs() <= 1e-12 * expected.loss.abs());
            assert_eq!(outcome.correct, expected.correct);
            let gap = gap(&gradients, &truth);
            assert!(gap < 1e-5, "{} {count}: {gap}", subject.name);
            // The order of additions is fixed.
            let mut again = replicas(&subject, count, "client,server,client").build().unwrap();
            assert_identical(subject.name, &again.gradients(&batch).unwrap().1, &gradients);
        }
    }
}

/// Tensors that fill a bucket between them, and one that takes several.
#[test]
fn gradients_of_any_size_are_reduced() {
    let model = Mlp { hidden: vec![3000, 2500, 300], dropout: 0.0, ..Mlp::default() }.model().unwrap();
    let subject = Subject { name: "mlp", model, loss: Loss::CrossEntropy, precision: Precision::Fp32 };
    assert!(subject.model.layers.iter().flat_map(|l| l.tensors()).any(|spec| spec.elements() > 7 << 20));
    let x = Tensor::arange(6 * 64, (Kind::Float, Device::Cpu)).sin().view([6, 1, 8, 8]);
    let batch = Batch::new(x, Tensor::arange(6, (Kind::Int64, Device::Cpu)));
    let mut one = replicas(&subject, 1, "one").micro_batches(6).build().unwrap();
    let mut many = replicas(&subject, 3, "one").build().unwrap();
    let gap = gap(&many.gradients(&batch).unwrap().1, &one.gradients(&batch).unwrap().1);
    assert!(gap < 1e-5, "{gap}");
}

/// Whatever the rows, each is looked at once and comes back at its place; by all replicas, so they have learned the same.
#[test]
fn evaluation_and_prediction_are_those_of_one_pipeline() {
    let subject = subject("mobilenet_v2");
    let mut many = replicas(&subject, 3, "client,server,client").build().unwrap();
    let mut losses: Vec<f64> = (0..2).map(|step| many.train_step(&subject.batch(12, step)).unwrap().loss).collect();
    let mut one = replicas(&subject, 1, "one").build().unwrap();
    many.capture_next();
    losses.push(many.train_step(&subject.batch(12, 2)).unwrap().loss);
    one.load_state(&many.state().unwrap()).unwrap();
    soundness::assert_pipeline_sound("three replicas", &losses, &mut one, &subject.batch(12, 0));
    for rows in [1, 2, 3, 4, 7, 12] {
        let batch = subject.batch(rows, 9);
        let (expected, outcome) = (one.evaluate(&batch).unwrap(), many.evaluate(&batch).unwrap());
        assert!((outcome.loss - expected.loss).abs() <= 1e-6 * expected.loss, "{rows} rows");
        assert_eq!((outcome.correct, &outcome.classes), (expected.correct, &expected.classes), "{rows} rows");
        let predict = |pipeline: &mut Pipeline| {
            let inputs = batch.inputs.iter().map(Tensor::shallow_clone).collect();
            pipeline.predict(inputs).unwrap()
        };
        let (expected, got) = (predict(&mut one), predict(&mut many));
        assert_eq!(got.size(), expected.size());
        assert!(got.allclose(&expected, 1e-5, 1e-6, false), "{rows} rows");
        if rows == 1 {
            // Nobody has anything of an earlier step.
            assert!(many.captured().unwrap().is_empty());
        }
        // What the links have carried is told by those who sat out, too.
        assert_eq!(
            outcome.links().len(),
            3 * 2 + 6 * 2,
            "two ways in each replica, two round each of two rings of three"
        );
    }
}

/// Accumulated, clipped, and stepped by an optimizer that remembers.
#[test]
fn updates_are_those_of_one_pipeline() {
    let subject = subject("roberta");
    let losses = |count: usize, micro_batches: usize| {
        let builder = replicas(&subject, count, "client,server,client").micro_batches(micro_batches);
        let mut pipeline = builder.optimizer(Optim::adamw()).learning_rate(1e-3).build().unwrap();
        pipeline.set_clip_norm(Some(0.5));
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..6 {
            let part = AccumulationStep { index: step % 2, of: 2 };
            let outcome = pipeline.train_part(&subject.batch(12, step), part).unwrap();
            losses.push(outcome.loss);
            norms.extend(outcome.gradient_norm);
        }
        soundness::assert_pipeline_sound("updates", &losses, &mut pipeline, &subject.batch(12, 0));
        [losses, norms].concat()
    };
    let (one, many) = (losses(1, 6), losses(3, 2));
    assert_eq!(one.len(), 6 + 3, "a norm for each update");
    for (one, many) in one.iter().zip(&many) {
        assert!((one - many).abs() <= 1e-5 * one.abs(), "{one} {many}");
    }
}

/// What a run is stored as does not depend on how many share it.
#[test]
fn a_run_resumes_with_another_number_of_replicas() {
    let subject = subject("unet");
    let build = |count: usize, micro_batches: usize| {
        replicas(&subject, count, "client,server,client").micro_batches(micro_batches).build().unwrap()
    };
    let step = |pipeline: &mut Pipeline, step: u64| pipeline.train_step(&subject.batch(12, step)).unwrap().loss;
    let mut first = build(2, 3);
    for n in 0..3 {
        step(&mut first, n);
    }
    let state = first.state().unwrap();
    let mut memory = Tensors::new();
    let kept = first.optimizer_each::<StepError>(|name, tensor| {
        memory.insert(name.to_owned(), tensor);
        Ok(())
    });
    kept.unwrap();
    let names: Vec<String> = memory.keys().cloned().collect();
    let learned = first.batches_trained();
    let on: Vec<f64> = (3..6).map(|n| step(&mut first, n)).collect();
    soundness::assert_pipeline_sound("unet", &on, &mut first, &subject.batch(12, 0));
    for (count, micro_batches) in [(2, 3), (3, 2), (1, 6)] {
        let mut other = build(count, micro_batches);
        other.load_state(&state).unwrap();
        other.load_optimizer_from(&names, |name| Ok::<_, StepError>(memory[name].copy())).unwrap();
        other.set_batches_trained(learned);
        for (n, expected) in (3..6).zip(&on) {
            let got = step(&mut other, n);
            let tolerance = if count == 2 { 0.0 } else { 1e-5 };
            assert!((got - expected).abs() <= tolerance * expected, "{count} replicas, step {n}: {got} {expected}");
        }
    }
}

/// Replicas with layers large enough that each has a bucket of its own, and a batch for them.
fn wide_replicas(count: usize) -> (Builder, Batch) {
    let model = Mlp { hidden: vec![1200; 6], dropout: 0.0, ..Mlp::default() }.model().unwrap();
    let builder = Pipeline::builder(model).device(distgpipe::engine::Device::Cpu).threads(1).replicas(count);
    let x = Tensor::arange(256 * 64, (Kind::Float, Device::Cpu)).sin().view([256, 1, 8, 8]);
    let batch = Batch::new(x, Tensor::arange(256, (Kind::Int64, Device::Cpu)).remainder(10));
    (builder.micro_batches(2), batch)
}

/// The spans of the first worker.
fn spans<'a>(outcome: &'a StepOutcome, phase: Phase, action: &'static str) -> impl Iterator<Item = &'a Span> {
    outcome.spans().filter(move |span| span.worker == 0 && span.phase == phase && span.action.contains(action))
}

/// Whether a bucket was summed in the first half of the last micro-batch's backward pass.
fn shares_early(outcome: &StepOutcome) -> bool {
    // Six layers of 1.4 million weights each are buckets of their own.
    assert!(spans(outcome, Phase::AllReduce, "").count() >= 5);
    // The wait of the worker for the rest is a phase of its own.
    assert_eq!(spans(outcome, Phase::GradientWait, "").count(), 1);
    // The last layer's gradients are final after a sixth of the pass.
    let last = spans(outcome, Phase::Backward, "0B").max_by_key(|span| span.end_ns).unwrap();
    let middle = last.start_ns + (last.end_ns - last.start_ns) / 2;
    let early = spans(outcome, Phase::AllReduce, "").any(|span| span.start_ns < middle);
    early
}

/// The first buckets are summed while the backward pass still computes the gradients of earlier layers.
#[test]
fn gradients_are_shared_during_the_backward_pass() {
    let (builder, batch) = wide_replicas(2);
    let mut pipeline = builder.trace(true).build().unwrap();
    let mut losses = Vec::new();
    // A busy machine may run the thread of the all-reduce late, but not in every step.
    let mut early = 0;
    for _ in 0..20 {
        let outcome = pipeline.train_step(&batch).unwrap();
        losses.push(outcome.loss);
        early += usize::from(shares_early(&outcome));
    }
    soundness::assert_pipeline_sound("shared early", &losses, &mut pipeline, &batch);
    assert!(early > 0, "no bucket was summed in the first half of the backward pass");
}

/// The gradients of an update of several batches are final in its last batch, and shared during its backward pass.
#[test]
fn gradients_of_several_batches_are_shared_during_the_last_backward_pass() {
    let (builder, batch) = wide_replicas(2);
    let mut pipeline = builder.trace(true).build().unwrap();
    let (mut losses, mut early) = (Vec::new(), 0);
    for step in 0..20 {
        let part = AccumulationStep { index: step % 2, of: 2 };
        let outcome = pipeline.train_part(&batch, part).unwrap();
        losses.push(outcome.loss);
        match part.is_last() {
            true => early += usize::from(shares_early(&outcome)),
            false => assert_eq!(spans(&outcome, Phase::AllReduce, "").count(), 0, "they are not final yet"),
        }
    }
    soundness::assert_pipeline_sound("shared early", &losses, &mut pipeline, &batch);
    assert!(early > 0, "no bucket was summed in the first half of the last backward pass");
}

/// Each bucket is summed in a fixed order: whichever share comes late, the bits are those of a run in which none does. The sum of two
/// numbers would not show an order.
#[test]
fn delays_in_the_ring_change_no_bit() {
    let learned = |scenario: &str| {
        let (builder, batch) = wide_replicas(3);
        let mut pipeline = builder.place("w").optimizer(Optim::sgd(0.9)).faults(scenario).build().unwrap();
        let part = |step: u64| AccumulationStep { index: step % 2, of: 2 };
        let losses: Vec<f64> = (0..4).map(|step| pipeline.train_part(&batch, part(step)).unwrap().loss).collect();
        soundness::assert_losses_sound(scenario, &losses);
        (losses, pipeline.gradients(&batch).unwrap().1, pipeline.state().unwrap())
    };
    let undisturbed = learned("");
    for seed in 0..3 {
        let late = ["w/0>w/1", "w/1>w/2", "w/2>w/0"].map(|link| format!("{link}:delay=20@0")).join(";");
        let disturbed = learned(&format!("seed={seed};{late}"));
        let what = format!("delays of seed {seed}");
        assert_eq!(disturbed.0, undisturbed.0, "{what}");
        assert_identical(&what, &disturbed.1, &undisturbed.1);
        assert_identical(&what, &disturbed.2, &undisturbed.2);
    }
}

/// Each replica hands on `2 (R−1)/R` times the gradients and the floating buffers, and a number for each parameter.
#[test]
fn the_ring_carries_no_more_than_it_must() {
    let subject = subject("mobilenet_v2");
    for count in [2, 4] {
        let mut pipeline = replicas(&subject, count, "one").build().unwrap();
        let specs = pipeline.state_specs();
        let parameters = specs.iter().filter(|spec| spec.role == Role::Parameter).count() as u64;
        let floats = specs.iter().filter(|spec| spec.kind == Kind::Float);
        let bytes = 4 * (floats.map(|spec| spec.dims.iter().product::<i64>() as u64).sum::<u64>() + parameters);
        let mut carried = |step: u64| -> Vec<u64> {
            let outcome = pipeline.train_step(&subject.batch(12, step)).unwrap();
            outcome.links().iter().map(|(_, _, traffic)| traffic.payload_bytes).collect()
        };
        // The first step's count includes what they agreed on before it.
        let (before, after) = (carried(0), carried(1));
        soundness::assert_pipeline_sound("a ring", &[], &mut pipeline, &subject.batch(12, 0));
        assert_eq!(after.len(), if count == 2 { 2 } else { 2 * count }, "one way round, and the other for two");
        let each: Vec<u64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        assert_eq!(each.iter().sum::<u64>(), 2 * (count as u64 - 1) * bytes, "{count} replicas together");
        let (most, fair) = (each.iter().max().unwrap(), 2 * (count as u64 - 1) * bytes / count as u64);
        assert!(*most <= fair + 4 * 2 * count as u64, "{count} replicas: {most} of {fair}");
    }
}

#[test]
fn invalid_numbers_of_replicas_and_rows_are_rejected() {
    let subject = subject("mobilenet_v2");
    for count in [0, 5000] {
        let error = replicas(&subject, count, "one").build().err().unwrap();
        assert!(matches!(error, BuildError::Replicas { .. }), "{error}");
        assert!(error.to_string().contains("`Builder::replicas`: expected 1 to 256"), "{error}");
    }
    let mut pipeline = replicas(&subject, 3, "one").build().unwrap();
    let error = pipeline.train_step(&subject.batch(5, 0)).unwrap_err();
    assert!(error.to_string().contains("got 5 rows for 6 micro-batches"), "{error}");
    // Nothing has happened, so it can be used on.
    let loss = pipeline.train_step(&subject.batch(24, 0)).unwrap().loss;
    soundness::assert_pipeline_sound("after an error", &[loss], &mut pipeline, &subject.batch(24, 0));
}

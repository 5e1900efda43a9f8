//! Clipping and accumulation: what an update is does not depend on the cut, nor on how its rows were cut into batches.

#[path = "one_device/mod.rs"]
#[allow(dead_code)]
mod one_device;

use distgpipe::driver::pipeline::StepError;
use distgpipe::engine::{self, Layout, Stream};
use distgpipe::model::zoo::Mlp;
use distgpipe::runtime::accumulation::AccumulationStep;
use distgpipe::runtime::optimizer::Optim;
use distgpipe::tch::{Kind, Tensor};
use distgpipe::{Batch, Pipeline};
use one_device::{assert_identical, Tensors};

fn batch(rows: i64, seed: u64) -> Batch {
    let mut x = engine::empty(&[rows, 1, 8, 8], Kind::Float, Layout::Contiguous).unwrap();
    Stream::new(seed).normal(&mut x, 0.0, 1.0).unwrap();
    let target = (x.flatten(1, -1).select(1, 0) * 9.0).abs().to_kind(Kind::Int64).remainder(10);
    Batch::new(x, target)
}

/// These rows, one batch after the other, as one.
fn joined(batches: &[Batch]) -> Batch {
    let inputs: Vec<&Tensor> = batches.iter().map(|b| &b.inputs[0]).collect();
    let targets: Vec<&Tensor> = batches.iter().map(|b| &b.target).collect();
    Batch::new(Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0))
}

fn pipeline(place: &str, micro_batches: usize, dropout: f64, optim: Optim) -> Pipeline {
    let model = Mlp { hidden: vec![16, 16, 16], dropout, ..Mlp::default() }.model().unwrap();
    Pipeline::builder(model)
        .device(engine::Device::Cpu)
        .threads(1)
        .place(place)
        .micro_batches(micro_batches)
        .optimizer(optim)
        .learning_rate(0.1)
        .build()
        .unwrap()
}

/// Makes one update of these batches, which must be sound; gives the norm before clipping.
fn update(pipeline: &mut Pipeline, batches: &[Batch]) -> Option<f64> {
    let of = batches.len() as u64;
    let (mut norm, mut losses) = (None, Vec::new());
    for (index, batch) in (0..).zip(batches) {
        assert_eq!(norm, None, "before the last batch");
        let outcome = pipeline.train_part(batch, AccumulationStep { index, of }).unwrap();
        norm = outcome.gradient_norm;
        losses.push(outcome.loss);
    }
    one_device::soundness::assert_pipeline_sound("an update", &losses, pipeline, &batches[0]);
    norm
}

#[test]
fn clipped_parameters_do_not_depend_on_the_cut() {
    for (norm_max, clips) in [(0.25, true), (1e6, false)] {
        for parts in [1, 2] {
            let learned = |place: &str| -> (Vec<u64>, Tensors) {
                let mut pipeline = pipeline(place, 3, 0.1, Optim::sgd(0.9));
                pipeline.set_clip_norm(Some(norm_max));
                let norms = (0..4).map(|step| {
                    let batches: Vec<Batch> = (0..parts).map(|part| batch(7, 10 * step + part)).collect();
                    let norm = update(&mut pipeline, &batches).unwrap();
                    assert_eq!(norm > norm_max, clips, "norm {norm}: the test must test something");
                    norm.to_bits()
                });
                (norms.collect(), pipeline.state().unwrap())
            };
            let (norms, expected) = learned("a");
            for place in ["a,b", "a,b,c", "a,b,a"] {
                let (got, state) = learned(place);
                assert_eq!(got, norms, "{place}: norms at {norm_max}");
                assert_identical(place, &state, &expected);
            }
        }
    }
}

/// Where nothing is above the norm, the two commands do what one does.
#[test]
fn a_norm_that_is_never_reached_changes_nothing() {
    let learned = |norm_max: Option<f64>| {
        let mut pipeline = pipeline("a,b", 2, 0.1, Optim::adamw());
        pipeline.set_clip_norm(norm_max);
        (0..3).for_each(|step| assert_eq!(update(&mut pipeline, &[batch(6, step)]).is_some(), norm_max.is_some()));
        pipeline.state().unwrap()
    };
    assert_identical("clipped at 1e9", &learned(Some(1e9)), &learned(None));
}

/// Four batches of 8 rows in 2 micro-batches are one of 32 in 8: the same micro-batches, with shares that are powers
/// of two, added in the same order. So even the bits agree. Three of 5 rows agree to rounding.
#[test]
fn accumulated_batches_are_one_large_batch() {
    for (count, rows, micro_batches, tolerance) in [(4, 8, 2, 0.0), (3, 5, 2, 1e-5)] {
        for norm_max in [None, Some(0.5)] {
            let learned = |accumulated: bool| {
                let chunks = if accumulated { micro_batches } else { micro_batches * count };
                let mut pipeline = pipeline("a,b,a", chunks, 0.0, Optim::sgd(0.9));
                pipeline.set_clip_norm(norm_max);
                for step in 0..3 {
                    let batches: Vec<Batch> = (0..count).map(|i| batch(rows, (100 * step + i) as u64)).collect();
                    update(&mut pipeline, &if accumulated { batches } else { vec![joined(&batches)] });
                }
                pipeline.state().unwrap()
            };
            let (got, expected) = (learned(true), learned(false));
            if tolerance == 0.0 {
                assert_identical("accumulated", &got, &expected);
            }
            for (name, expected) in &expected {
                let gap = f64::try_from((&got[name] - expected).abs().max()).unwrap();
                assert!(gap <= tolerance, "{count} batches of {rows}: {name} is off by {gap:e}");
            }
        }
    }
}

/// Random streams are named by batches, whatever they are an update of; and a test may come at any time.
#[test]
fn dropout_does_not_depend_on_accumulation_nor_on_tests_in_between() {
    use one_device::soundness;
    let learned = |of: u64, evaluate: bool| {
        let mut pipeline = pipeline("a,b", 2, 0.5, Optim::sgd(0.0));
        // With a rate of 0 the parameters stay, so that the losses can be compared.
        pipeline.set_learning_rate(0.0);
        let losses: Vec<f64> = (0..4)
            .map(|step| {
                if evaluate {
                    pipeline.evaluate(&batch(6, 99)).unwrap();
                }
                pipeline.train_part(&batch(6, step), AccumulationStep { index: step % of, of }).unwrap().loss
            })
            .collect();
        pipeline.set_learning_rate(0.1);
        for index in 0..4 {
            if evaluate {
                pipeline.evaluate(&batch(6, 99)).unwrap();
            }
            pipeline.train_part(&batch(6, index), AccumulationStep { index, of: 4 }).unwrap();
        }
        soundness::assert_losses_sound("dropout", &losses);
        soundness::assert_pipeline_sound("dropout", &[], &mut pipeline, &batch(6, 0));
        (losses, pipeline.state().unwrap())
    };
    let (losses, state) = learned(1, false);
    for (of, evaluate) in [(2, false), (4, true)] {
        let (got, got_state) = learned(of, evaluate);
        assert_eq!(got, losses, "{of} batches an update");
        assert_identical("accumulated", &got_state, &state);
    }
}

#[test]
fn the_batches_of_an_update_come_in_order() {
    let mut pipeline = pipeline("a,b", 2, 0.0, Optim::sgd(0.0));
    let mut part = |index, of| pipeline.train_part(&batch(4, 0), AccumulationStep { index, of });
    assert!(matches!(part(1, 3), Err(StepError::Accumulation { .. })));
    part(0, 3).unwrap();
    let error = part(0, 1).unwrap_err().to_string();
    assert!(error.contains("needs batch 2 of 3 next, got 1 of 1"), "{error}");
    assert!(part(2, 3).is_err() && part(1, 2).is_err());
    part(1, 3).unwrap();
    part(2, 3).unwrap();
    assert!(part(0, 0).is_err() && part(5, 5).is_err());
    part(0, 1).unwrap();
    one_device::soundness::assert_pipeline_sound("updates in order", &[], &mut pipeline, &batch(4, 0));
    // Looking at gradients would clear those that have gathered.
    pipeline.train_part(&batch(4, 0), AccumulationStep { index: 0, of: 2 }).unwrap();
    assert!(matches!(pipeline.gradients(&batch(4, 0)), Err(StepError::Accumulation { .. })));
    pipeline.set_clip_norm(Some(f64::NAN));
    let last = pipeline.train_part(&batch(4, 0), AccumulationStep { index: 1, of: 2 });
    assert!(matches!(last, Err(StepError::ClipNorm { .. })));
}

/// As `clip_grad_norm_` does: NaN in one worker's gradients makes all parameters NaN, so that the next loss tells.
///
/// The first pixel has no weight, so its values, one huge in each direction, change nothing but its own gradient:
/// infinite in one micro-batch, minus infinite in the other. All else is finite.
#[test]
fn clipping_does_not_hide_a_gradient_that_is_not_finite() {
    let learned = |norm_max: Option<f64>| {
        let mut pipeline = pipeline("a,b", 2, 0.0, Optim::sgd(0.0));
        let mut state = pipeline.state().unwrap();
        let _ = state["layers.0.weight"].select(1, 0).fill_(0.0);
        state.insert("layers.3.weight".to_owned(), &state["layers.3.weight"] * 1e4);
        pipeline.load_state(&state).unwrap();
        pipeline.set_clip_norm(norm_max);
        let row = batch(1, 0);
        let with = |value: f64| {
            let x = row.inputs[0].copy();
            let _ = x.flatten(1, -1).select(1, 0).fill_(value);
            Batch::new(x, row.target.shallow_clone())
        };
        let outcome = pipeline.train_step(&joined(&[with(3e38), with(-3e38)])).unwrap();
        assert!(outcome.loss.is_finite());
        (outcome.gradient_norm, pipeline.state().unwrap())
    };
    let numbers = |state: &Tensors, name: &str| bool::try_from(state[name].isfinite().all()).unwrap();
    let (_, unclipped) = learned(None);
    assert!(!numbers(&unclipped, "layers.0.weight"));
    assert!(numbers(&unclipped, "layers.0.bias") && numbers(&unclipped, "layers.3.weight"), "the other worker's");
    let (norm, clipped) = learned(Some(1.0));
    assert!(norm.unwrap().is_nan());
    for (name, tensor) in &clipped {
        assert!(bool::try_from(tensor.isnan().all()).unwrap(), "{name}");
    }
}

/// Training that explodes without becoming NaN, and training that does not learn, are both found.
#[test]
fn unsound_training_is_found() {
    use one_device::soundness;
    let fails = |check: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err();
    let falling: Vec<f64> = (0..12).map(|step| 2.3 * 0.97f64.powi(step)).collect();
    let weights = |value: f64| Tensors::from([("layer.weight".to_owned(), Tensor::from_slice(&[0.5, value]))]);
    let statistics = Tensors::from([("norm.running_var".to_owned(), Tensor::from_slice(&[1e6]))]);
    soundness::assert_sound("sound", &falling, &weights(-3.0));
    soundness::assert_sound("sound", &[2.3, 2.4], &statistics);
    let rising: Vec<f64> = falling.iter().rev().copied().collect();
    for losses in [&rising[..], &[2.3, 4.0], &[2.3, f64::NAN], &[f64::INFINITY]] {
        assert!(fails(&|| soundness::assert_sound("losses", losses, &weights(1.0))), "{losses:?}");
    }
    for value in [1e15, f64::NAN, f64::NEG_INFINITY] {
        assert!(fails(&|| soundness::assert_sound("weights", &falling, &weights(value))), "{value}");
        assert!(fails(&|| soundness::assert_gradients_moderate("gradients", &weights(value))), "{value}");
    }
}

/// The comparison behind every promise of equality to the bit.
#[test]
fn bits_are_compared_and_not_values() {
    use one_device::same_bits;
    let float = |bits: u32| Tensor::from_slice(&[1.0, f32::from_bits(bits)]);
    let (zero, negative_zero) = (0, 0x8000_0000);
    let (nan, other_nan) = (0x7fc0_0000, 0x7fc0_0001);
    for bits in [zero, negative_zero, nan, other_nan] {
        assert!(same_bits(&float(bits), &float(bits)), "{bits:x}");
    }
    assert!(!same_bits(&float(zero), &float(negative_zero)) && !same_bits(&float(nan), &float(other_nan)));
    // By place, whatever the order in memory.
    let square = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]).view([2, 2]);
    assert!(same_bits(&square.tr().contiguous(), &square.tr()) && !same_bits(&square, &square.tr()));
    assert!(!same_bits(&square, &square.view([4])) && !same_bits(&square, &square.to_kind(Kind::Double)));
}

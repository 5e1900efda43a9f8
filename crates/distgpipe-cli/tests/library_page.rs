//! docs/library.md: every snippet of the page is in this file, or in a file of `distgpipe new`, so it compiles. The tests run
//! them.

#[path = "../../distgpipe/tests/soundness/mod.rs"]
mod soundness;

use distgpipe::prelude::*;
use distgpipe::tch::{Kind, Reduction, Tensor};
use distgpipe::zoo::{self, ModelError};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

struct Points {
    rows: Vec<([f32; 2], i64)>,
    input: Vec<SampleShape>,
}

impl Dataset for Points {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn classes(&self) -> Option<usize> {
        Some(2)
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    fn batch(&self, rows: &[usize], _: LoadPass<'_>) -> Result<Batch, DataError> {
        let (x, y): (Vec<[f32; 2]>, Vec<i64>) = rows.iter().map(|&row| self.rows[row]).unzip();
        Ok(Batch::new(Tensor::f_from_slice(&x.concat())?.f_view([-1, 2])?, Tensor::f_from_slice(&y)?))
    }
}

/// y = tanh(W x)
struct Tanh {
    name: &'static str,
    inputs: i64,
    outputs: i64,
}

impl Layer for Tanh {
    fn name(&self) -> &str {
        self.name
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let name = format!("{}.weight", self.name);
        vec![TensorSpec::parameter(name, &[self.outputs, self.inputs], Init::fan_in(self.inputs))]
    }

    fn shapes(&self, _: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(vec![SampleShape::float(&[self.outputs])])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: Vec<Tensor>,
        _: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        Ok(vec![x[0].f_linear(tensors.next(), None::<&Tensor>)?.f_tanh()?])
    }
}

fn models(spec: &ModelSpec) -> Result<Model, ModelError> {
    match spec.name.as_str() {
        "tanh" => {
            let tanh = |name, inputs, outputs| Arc::new(Tanh { name, inputs, outputs }) as Arc<dyn Layer>;
            let layers = vec![tanh("first", 2, 32), tanh("second", 32, 32), tanh("last", 32, 2)];
            Ok(Model::new(layers, vec![SampleShape::float(&[2])]).with_spec(spec.clone()))
        }
        _ => zoo::build(spec),
    }
}

struct Weighted {
    weights: Vec<f32>,
}

impl LossFunction for Weighted {
    fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        let weights = Tensor::f_from_slice(&self.weights)?.f_to_device(output.device())?;
        Ok(output.f_cross_entropy_loss(target, Some(&weights), Reduction::Mean, -100, 0.0)?)
    }

    fn correct(&self, output: &Tensor, target: &Tensor) -> Result<Option<Tensor>, Fault> {
        Ok(Some(output.f_argmax(-1, false)?.f_eq_tensor(target)?.f_sum(Kind::Int64)?))
    }
}

/// 400 points on a grid; class 1 is right of the diagonal.
fn grid() -> (Tensor, Tensor) {
    let side = |i: usize| i as f32 / 10.0 - 1.0;
    let points: Vec<[f32; 2]> = (0..400).map(|i| [side(i % 20), side(i / 20)]).collect();
    let classes: Vec<i64> = points.iter().map(|[x, y]| i64::from(x > y)).collect();
    (Tensor::from_slice(&points.concat()).view([-1, 2]), Tensor::from_slice(&classes))
}

/// A folder that is removed with this value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("library-page-{name}"));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_model_of_own_layers_trains_and_is_saved_and_exported() {
    trains().unwrap();
}

fn trains() -> Result<(), Box<dyn Error>> {
    let folder = Folder::new("trains");
    let file = folder.0.join("model.safetensors");
    let (points, classes) = grid();
    let data = TensorDataset::new(points, classes)?;
    let train = Loader::new(data.clone(), LoaderOptions::training(50, 0))?;
    let test = Loader::new(data, LoaderOptions::testing(100))?;

    let mut pipeline = Pipeline::builder(models(&ModelSpec::new("tanh"))?)
        .balance([1, 1, 1])
        .micro_batches(4)
        .optimizer(Optim::adam())
        .learning_rate(0.01)
        .build()?;
    for epoch in 0..5 {
        for batch in train.epoch(epoch) {
            pipeline.train_step(&batch?)?;
        }
        let tested = pipeline.evaluate_all(&test)?;
        println!("epoch {epoch}: loss {:.3}, accuracy {:.3}", tested.loss, tested.accuracy.unwrap_or(0.0));
    }

    let mut confident = 0.0;
    for batch in test.epoch(0) {
        let scores = pipeline.predict(batch?.inputs)?.softmax(-1, Kind::Float);
        confident += f64::try_from(scores.amax(-1, false).gt(0.8).sum(Kind::Double))?;
    }
    println!("{:.1} % of the rows are above 0.8", 100.0 * confident / test.data_rows() as f64);

    pipeline.save(&file)?;
    let mut other = Pipeline::builder(models(&ModelSpec::new("tanh"))?).build()?;
    other.load(&file)?;

    soundness::assert_parameters_moderate("five epochs", &pipeline.state()?);
    let (trained, loaded) = (pipeline.evaluate_all(&test)?, other.evaluate_all(&test)?);
    assert!(trained.accuracy > Some(0.9), "{trained:?}");
    assert_eq!(trained.accuracy, loaded.accuracy);
    let entries = distgpipe::train::weights::open(&file)?;
    let names: Vec<&str> = entries.entries().iter().map(|entry| &entry.name[..]).collect();
    assert_eq!(names, ["first.weight", "second.weight", "last.weight"]);
    Ok(())
}

#[test]
fn own_data_and_an_own_loss_train_with_checkpoints() {
    let folder = Folder::new("checkpoints");
    let first = with_checkpoints(&folder.0, 8).unwrap();
    assert_eq!((first.steps, first.resumed_at), (8, None));
    let resumed = with_checkpoints(&folder.0, 16).unwrap();
    assert_eq!((resumed.steps, resumed.resumed_at), (8, Some(8)));
}

fn with_checkpoints(folder: &Path, steps: u64) -> Result<RunSummary, Box<dyn Error>> {
    let (points, classes) = grid();
    let points: Vec<[f32; 2]> = Vec::<f32>::try_from(points.view([-1]))?.chunks(2).map(|p| [p[0], p[1]]).collect();
    let rows = points.into_iter().zip(Vec::<i64>::try_from(classes)?).collect();

    let data = Points { rows, input: vec![SampleShape::float(&[2])] };
    let train = Loader::new(data, LoaderOptions::training(50, 0))?;

    let model = models(&ModelSpec::new("tanh"))?.with_loss(Weighted { weights: vec![1.0, 2.0] });

    let mut pipeline = Pipeline::builder(model).balance([2, 1]).micro_batches(2).build()?;
    let options = TrainOptions { epochs: 10, steps_max: Some(steps), ..TrainOptions::default() };
    let checkpoints = Checkpoints::open(folder, 2)?;
    let mut trainer = Trainer::new(&mut pipeline, train, None, options)?;
    trainer = trainer.save_to(&checkpoints, SaveEvery::Steps(4), Default::default());
    if let (Some(newest), _) = checkpoints.newest()? {
        trainer = trainer.resume(&newest)?;
    }
    let summary = trainer.run(|event, _| {
        if let Event::StepDone(done) = event {
            println!("step {}: loss {:.3}", done.step, done.outcome.loss);
        }
        Ok(())
    })?;
    soundness::assert_parameters_moderate("steps with an own loss", &pipeline.state()?);
    Ok(summary)
}

/// Never run here: it would turn the test program into a driver of copies of itself. crates/distgpipe/tests/worker_mode.rs does.
#[allow(dead_code)]
fn main() -> Result<(), Box<dyn Error>> {
    distgpipe::worker_mode(models);
    let workers = match std::env::var("WORKERS") {
        Err(_) => Workers::processes(),
        Ok(addresses) => Workers::Remote {
            addresses: addresses.split(',').map(str::to_owned).collect(),
            token: std::env::var("DISTGPIPE_TOKEN")?.parse()?,
        },
    };
    let pipeline = Pipeline::builder(models(&ModelSpec::new("tanh"))?)
        .balance([1, 1, 1])
        .place("client,server,client")
        .workers(workers)
        .build()?;
    drop(pipeline);
    Ok(())
}

/// The lines of a text without their indentation, and without empty lines.
fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

/// The page promises that its snippets compile.
#[test]
fn every_snippet_of_the_page_is_in_a_file_that_is_compiled() {
    let page = include_str!("../../../docs/library.md");
    let sources = [
        include_str!("library_page.rs"),
        include_str!("../template/build.rs"),
        include_str!("../template/config.toml"),
        include_str!("../template/gitignore"),
    ];
    let sources = sources.map(lines);
    let mut checked = 0;
    // Text and blocks alternate.
    for block in page.split("```").skip(1).step_by(2) {
        let (language, code) = block.split_once('\n').expect("a block has lines");
        if !["rust", "toml"].contains(&language) {
            continue;
        }
        let code = lines(code);
        // Manifests differ in the path of the dependency.
        if language == "toml" && code.first() == Some(&"[dependencies]") {
            continue;
        }
        checked += 1;
        let found = sources.iter().any(|source| source.windows(code.len()).any(|window| window == code));
        assert!(found, "docs/library.md has a snippet that no file has:\n{}", code.join("\n"));
    }
    assert!(checked >= 10, "{checked} snippets were found");
}

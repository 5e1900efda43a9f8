//! Layers of your own on workers in other processes: this test program is its own worker, through `worker_mode`.
//!
//! It has no test harness, because its `main` must call `worker_mode` first.

mod soundness;

use distgpipe::prelude::*;
use distgpipe::tch::{Reduction, Tensor};
use distgpipe::zoo::{self, ModelError};
use distgpipe::{ServeOptions, Server, Token};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// y = x · sin(W x), which no layer of the library computes.
struct SineGate {
    name: String,
    width: i64,
}

impl Layer for SineGate {
    fn name(&self) -> &str {
        &self.name
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::parameter(
            format!("{}.weight", self.name),
            &[self.width, self.width],
            Init::fan_in(self.width),
        )]
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(input)
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: Vec<Tensor>,
        _: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let gate = x[0].f_linear(tensors.next(), None::<&Tensor>)?.f_sin()?;
        Ok(vec![x[0].f_mul(&gate)?])
    }
}

/// Weighs rows of class 0 twice: a loss of your own travels with the model.
struct Weighted;

impl LossFunction for Weighted {
    fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        let weights = Tensor::f_from_slice(&[2.0_f32, 1.0, 1.0])?;
        Ok(output.f_cross_entropy_loss(target, Some(&weights), Reduction::Mean, -100, 0.0)?)
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Settings {
    width: i64,
    gates: usize,
}

fn models(spec: &ModelSpec) -> Result<Model, ModelError> {
    match spec.name.as_str() {
        "sine_gates" => {
            let Settings { width, gates } = spec.settings()?;
            let gate = |i: usize| Arc::new(SineGate { name: format!("gate{i}"), width }) as Arc<dyn Layer>;
            let classifier = Mlp { input: vec![width], hidden: vec![], classes: 3, dropout: 0.0 }.model()?;
            let layers = (0..gates).map(gate).chain(classifier.layers).collect();
            Ok(Model::new(layers, vec![SampleShape::float(&[width])]).with_loss(Weighted).with_spec(spec.clone()))
        }
        _ => zoo::build(spec),
    }
}

fn model() -> Model {
    models(&ModelSpec::with_settings("sine_gates", &Settings { width: 6, gates: 3 }).unwrap()).unwrap()
}

/// Learnable rows: the class is the largest of the first three values.
fn data() -> TensorDataset {
    let values: Vec<f32> = (0..90 * 6).map(|i| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0).collect();
    let rows = Tensor::from_slice(&values).view([90, 6]);
    let classes = rows.narrow(1, 0, 3).argmax(1, false);
    TensorDataset::new(rows, classes).unwrap()
}

fn builder(workers: Workers) -> Builder {
    Pipeline::builder(model())
        .balance([1, 2, 1])
        .place("client,server,client")
        .micro_batches(3)
        .device(Device::Cpu)
        .threads(1)
        .optimizer(Optim::adam())
        .learning_rate(0.02)
        .workers(workers)
}

/// The losses and the state of a run.
fn trained(workers: Workers) -> (Vec<f64>, BTreeMap<String, Tensor>) {
    let mut pipeline = builder(workers).build().unwrap();
    let loader = Loader::new(data(), LoaderOptions::training(30, 0)).unwrap();
    let mut losses = Vec::new();
    for epoch in 0..6 {
        for batch in loader.epoch(epoch) {
            losses.push(pipeline.train_step(&batch.unwrap()).unwrap().loss);
        }
    }
    let state = pipeline.state().unwrap();
    soundness::assert_sound("sine gates", &losses, &state);
    (losses, state)
}

fn bits((losses, state): &(Vec<f64>, BTreeMap<String, Tensor>)) -> (Vec<u64>, Vec<(String, Vec<u8>)>) {
    let bytes = |tensor: &Tensor| distgpipe::engine::bytes(tensor).unwrap().to_vec();
    (
        losses.iter().map(|loss| loss.to_bits()).collect(),
        state.iter().map(|(name, tensor)| (name.clone(), bytes(tensor))).collect(),
    )
}

/// A process of this program that listens, killed with this value.
struct Started(Child, String);

impl Started {
    fn new(token: Token, flags: &[&str]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("worker")
            .args(flags)
            .env("DISTGPIPE_TOKEN", token.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening ").unwrap_or_else(|| panic!("got `{line}`")).to_owned();
        Started(child, address)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn own_layers_train_over_processes_and_over_tcp_as_over_threads() {
    let expected = bits(&trained(Workers::Threads));
    assert_eq!(bits(&trained(Workers::processes())), expected, "copies of this program");
    let token = Token::random().unwrap();
    let mut worker = Started::new(token, &["--listen", "127.0.0.1:0", "--once"]);
    let remote = Workers::Remote { addresses: vec![worker.1.clone()], token };
    assert_eq!(bits(&trained(remote)), expected, "a worker that was started by hand");
    assert!(worker.0.wait().unwrap().success(), "with --once it ends after the job");
}

/// A worker without our models, as `distgpipe worker` is one.
fn a_worker_that_does_not_know_the_model_names_the_remedy() {
    let token = Token::random().unwrap();
    let server = Server::bind(ServeOptions { once: true, ..ServeOptions::new("127.0.0.1:0".parse().unwrap(), token) });
    let server = server.unwrap();
    let addresses = vec![server.address().unwrap().to_string()];
    let thread = std::thread::spawn(move || server.run(|| false, |_| {}));
    let refused = builder(Workers::Remote { addresses, token }).build().err().unwrap().to_string();
    for part in
        ["expected a model that this worker knows, got `sine_gates`", "distgpipe::worker_mode(models)", "worker`"]
    {
        assert!(refused.contains(part), "{refused}");
    }
    assert!(thread.join().unwrap().is_err());
    let unnamed = Model { spec: None, ..model() };
    let refused = Pipeline::builder(unnamed).place("a,b").workers(Workers::processes()).build().err().unwrap();
    assert!(refused.to_string().contains("`distgpipe::worker_mode`"), "{refused}");
}

/// A program that forgot `worker_mode` would start copies of itself without end.
fn a_program_that_does_not_call_worker_mode_is_told_to() {
    let program = std::env::current_exe().unwrap();
    let forgetful = WorkerProgram { program, arguments: vec![FORGETFUL.to_owned()] };
    let refused = builder(Workers::Processes(forgetful)).build().err().unwrap().to_string();
    assert!(refused.contains("`distgpipe::worker_mode`") && refused.contains(COPY_REFUSED), "{refused}");
}

/// The argument that makes `main` go on as if it had not called `worker_mode`.
const FORGETFUL: &str = "forgetful";
const COPY_REFUSED: &str = "the copy was refused its own copies";

/// What a copy does that takes itself for the driver. Its first line is what the driver of the copy reads.
fn drive_as_a_copy() {
    let refused = builder(Workers::processes()).build().err().map(|error| error.to_string());
    match refused {
        Some(text) if text.contains("started as a worker itself") => println!("{COPY_REFUSED}"),
        other => println!("expected an error, got {other:?}"),
    }
}

fn wrong_flags_end_with_status_2_and_the_usage() {
    let program = || Command::new(std::env::current_exe().unwrap());
    let output = program().args(["worker", "--port", "7000"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("`--port`") && said.contains("--listen ADDR"), "{said}");
    let output = program().args(["worker", "--help"]).output().unwrap();
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("--token-file"));
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test worker` gives every test program the argument `worker` alone, as a filter.
    if arguments != ["worker"] {
        distgpipe::worker_mode(models);
    }
    let filter = arguments.first().map_or("", String::as_str);
    if filter == FORGETFUL {
        return drive_as_a_copy();
    }
    macro_rules! tests {
        ($($test:ident),* $(,)?) => {
            [$((concat!("worker_mode::", stringify!($test)), $test as fn())),*]
        };
    }
    let tests = tests![
        own_layers_train_over_processes_and_over_tcp_as_over_threads,
        a_worker_that_does_not_know_the_model_names_the_remedy,
        a_program_that_does_not_call_worker_mode_is_told_to,
        wrong_flags_end_with_status_2_and_the_usage,
    ];
    for (name, test) in tests.into_iter().filter(|(name, _)| filter.starts_with('-') || name.contains(filter)) {
        test();
        println!("test {name} ... ok");
    }
}

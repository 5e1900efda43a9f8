//! `distgpipe models`: lists models and their layers, and measures layers.

use crate::args::{LayersName, TrainFlags};
use crate::compute;
use crate::config::{listed, model, ExportedFlags};
use crate::exit::usage;
use crate::report;
use crate::report::activity::Activity;
use crate::report::table::{Side, Table};
use crate::report::units;
use distgpipe::driver::profile::{self, LayerProfile, ProfileProgress};
use distgpipe::engine::Device;
use distgpipe::model::zoo;
use distgpipe::model::LayerSummary;
use distgpipe::{Model, Precision, SampleShape};
use serde_json::{json, Value};

/// Flags of `distgpipe models`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe models
  distgpipe models mobilenet_v2 --set classes=1000
  distgpipe models roberta --set config=config.json
  distgpipe models roberta --set layers=2 --profile --rows 8
  distgpipe models my.pt2 --layers all")]
pub struct ModelsArgs {
    /// Model whose layers to show: one of the list, or a file of `python3 -m distgpipe_export` [default: list all models]
    #[arg(value_name = "NAME|FILE.pt2")]
    name: Option<String>,
    /// Model setting, such as classes=1000; repeatable
    #[arg(long, value_name = "KEY=VALUE", requires = "name")]
    set: Vec<String>,
    /// Where the layers of an exported model end: with modules, or at all places where it can be cut [default: modules]
    #[arg(long, value_name = "modules|all", requires = "name")]
    layers: Option<LayersName>,
    /// Make tied parameters of an exported model independent copies, so that it can be cut between their uses
    #[arg(long)]
    untie: bool,
    /// Measure the time and memory of each layer
    #[arg(long, requires = "name", help_heading = "Measurement")]
    profile: bool,
    #[command(flatten)]
    sample: SampleArgs,
    /// Print the result as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// How often each layer is measured; the fastest time counts.
const ROUNDS: usize = 5;

/// How layers are measured, for `models` and `balance`.
#[derive(Debug, clap::Args)]
pub struct SampleArgs {
    /// Rows of the batch that the layers are measured with
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Measurement")]
    pub rows: usize,
    /// libtorch threads [default: the cores of this host, in `balance` divided by the number of workers]
    #[arg(long, value_name = "N", help_heading = "Measurement")]
    threads: Option<usize>,
    /// Device to measure on: cpu, cuda:N, or auto (the first GPU, or the CPU if there is none)
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Measurement")]
    device: Device,
    /// Precision to measure in: fp32 or bf16
    #[arg(long, value_name = "fp32|bf16", default_value_t = Precision::Fp32, help_heading = "Measurement")]
    pub precision: Precision,
    /// Whether images are stored channels-last.
    #[arg(skip = true)]
    pub channels_last: bool,
}

impl SampleArgs {
    /// Measures as a run with these flags computes, of which a micro-batch has so many rows.
    pub fn of_run(flags: &TrainFlags, threads: usize, rows: usize) -> Self {
        SampleArgs {
            rows,
            threads: Some(threads),
            device: flags.devices().iter().next().unwrap_or(Device::Auto),
            precision: flags.precision.unwrap_or_default(),
            channels_last: flags.no_channels_last != Some(true),
        }
    }

    /// The libtorch threads that each of `workers` workers on this host would have.
    pub fn threads(&self, workers: usize) -> anyhow::Result<usize> {
        compute::threads(self.threads, workers)
    }

    /// The device to measure on.
    pub fn device(&self) -> Device {
        self.device.resolved()
    }

    /// What the layers are measured with, for people.
    pub fn describe(&self, workers: usize) -> anyhow::Result<String> {
        let (rows, threads) = (units::plural(self.rows, "row"), units::plural(self.threads(workers)?, "thread"));
        Ok(format!("{rows} in {} on {} with {threads}", self.precision, self.device()))
    }

    /// Measures each layer of a model.
    fn measure(&self, model: &Model) -> anyhow::Result<Vec<LayerProfile>> {
        let (mut activity, mut fastest, mut rounds) = (Activity::new(), Vec::new(), 0);
        self.measure_while(model, 1, &mut |progress| {
            match progress {
                ProfileProgress::Layer { round, layer } => activity.show(|| {
                    format!("measuring layer {} of {}, round {round} of {ROUNDS}", layer + 1, model.layers.len())
                }),
                ProfileProgress::Round(costs) => {
                    profile::keep_fastest(&mut fastest, costs);
                    rounds += 1;
                }
            }
            rounds < ROUNDS
        })?;
        Ok(fastest)
    }

    /// Measures each layer of a model in rounds, with the threads that each of `workers` workers on this host would have, until
    /// `go_on` returns false.
    pub fn measure_while(&self, model: &Model, workers: usize, go_on: &mut profile::GoOn<'_>) -> anyhow::Result<()> {
        let threads = self.threads(workers)?;
        if self.rows == 0 {
            return Err(usage("--rows 0: use 1 or more"));
        }
        self.device.open().map_err(|e| usage(format!("--device: {e}")))?;
        let sample = profile::sample(model, self.rows, 0).map_err(|e| usage(format!("--rows {}: {e}", self.rows)))?;
        let options = profile::ProfileOptions {
            device: self.device,
            threads,
            channels_last: self.channels_last,
            precision: self.precision,
            rounds: ROUNDS,
        };
        Ok(profile::measure_while(model, &sample, &options, go_on)?)
    }
}

/// Lists the models, or the layers of one.
pub fn run(args: &ModelsArgs) -> anyhow::Result<()> {
    match &args.name {
        None => list(args.json),
        Some(name) => show(name, args),
    }
}

fn list(json: bool) -> anyhow::Result<()> {
    let mut table = Table::new(&[
        ("model", Side::Left),
        ("layers", Side::Right),
        ("parameters", Side::Right),
        ("multiply-adds", Side::Right),
        ("input", Side::Left),
    ]);
    let mut entries = Vec::new();
    for &name in zoo::NAMES {
        let model = model("NAME", name, &[], ExportedFlags::default())?;
        let adds: u64 = model.summary()?.iter().map(|layer| layer.multiply_adds).sum();
        table.row(vec![
            name.to_owned(),
            model.layers.len().to_string(),
            units::count(model.parameters()),
            units::count(adds),
            shapes(&model.input),
        ]);
        entries.push(json!({
            "name": name,
            "layers": model.layers.len(),
            "parameters": model.parameters(),
            "multiply_adds": adds,
            "input": dims(&model.input),
            "settings": model.spec.as_ref().map(|spec| &spec.settings),
        }));
    }
    if json {
        return report::print_json(&entries);
    }
    report::print(&format!(
        "{}\nFigures are for default settings and one sample. `distgpipe models NAME` shows layers and settings.\n",
        table.render()
    ))
}

fn show(name: &str, args: &ModelsArgs) -> anyhow::Result<()> {
    let model = model("NAME", name, &args.set, ExportedFlags { layers: args.layers, untie: Some(args.untie) })?;
    let layers = model.summary()?;
    let costs = if args.profile { Some(args.sample.measure(&model)?) } else { None };
    let settings = model.spec.as_ref().map(|spec| spec.settings.clone()).unwrap_or_default();
    if args.json {
        return report::print_json(&json!({
            "name": name,
            "settings": listed(&settings).map(|(key, value)| (key.clone(), value.clone())).collect::<serde_json::Map<_, _>>(),
            "input": dims(&model.input),
            "parameters": model.parameters(),
            "multiply_adds": layers.iter().map(|layer| layer.multiply_adds).sum::<u64>(),
            "rows": costs.as_ref().map(|_| args.sample.rows),
            "precision": costs.as_ref().map(|_| args.sample.precision),
            "layers": layers.iter().enumerate().map(|(i, layer)| layer_json(layer, costs.as_ref().and_then(|c| c.get(i)))).collect::<Vec<_>>(),
        }));
    }
    let mut text = layer_table(&layers, costs.as_deref());
    let adds: u64 = layers.iter().map(|layer| layer.multiply_adds).sum();
    text.push_str(&format!(
        "\n{} layers, {} parameters, {} multiply-adds for one sample of {}\nsettings: {}\n",
        layers.len(),
        units::count(model.parameters()),
        units::count(adds),
        shapes(&model.input),
        listed(&settings).map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" "),
    ));
    let graph = model.spec.as_ref().filter(|_| name.ends_with(".pt2")).map(|spec| spec.settings::<zoo::Exported>());
    for (name, cuts) in graph.transpose()?.iter().flat_map(|exported| exported.graph.used_again()) {
        let cuts = units::plural(cuts, "cut");
        text.push_str(&format!("{name} is used in several places, which no cut may separate: it rules out {cuts}\n"));
    }
    for tie in model.ties() {
        let names: Vec<&str> = tie.layers.iter().map(|&layer| model.layers[layer].name()).collect();
        text.push_str(&format!(
            "{} is tied: layers {} use it and must be on one worker, or see --untie\n",
            tie.tensor,
            names.join(", ")
        ));
    }
    if args.profile {
        text.push_str(&format!("times and memory for {}, the fastest of {ROUNDS} rounds\n", args.sample.describe(1)?));
    }
    report::print(&text)
}

fn layer_table(layers: &[LayerSummary], costs: Option<&[LayerProfile]>) -> String {
    let mut columns = vec![
        ("#", Side::Right),
        ("layer", Side::Left),
        ("output", Side::Left),
        ("parameters", Side::Right),
        ("multiply-adds", Side::Right),
    ];
    if costs.is_some() {
        columns.extend([("forward", Side::Right), ("backward", Side::Right), ("kept for backward", Side::Right)]);
    }
    let mut table = Table::new(&columns);
    for (i, layer) in layers.iter().enumerate() {
        let mut cells = vec![
            i.to_string(),
            layer.name.clone(),
            shapes(&layer.output),
            units::count(layer.parameters),
            units::count(layer.multiply_adds),
        ];
        if let Some(cost) = costs.and_then(|costs| costs.get(i)) {
            cells.extend([
                units::seconds(cost.forward_s),
                units::seconds(cost.backward_s),
                units::bytes(cost.held_bytes as f64),
            ]);
        }
        table.row(cells);
    }
    table.render()
}

fn layer_json(layer: &LayerSummary, cost: Option<&LayerProfile>) -> Value {
    let mut value = json!({
        "name": layer.name,
        "output": dims(&layer.output),
        "parameters": layer.parameters,
        "multiply_adds": layer.multiply_adds,
    });
    if let (Some(Value::Object(cost)), Some(object)) = (cost.map(layer_cost_json), value.as_object_mut()) {
        object.extend(cost);
    }
    value
}

/// The measured costs of a layer.
pub fn layer_cost_json(cost: &LayerProfile) -> Value {
    let types: Vec<&str> = cost.output_types.iter().map(|dtype| dtype.name()).collect();
    let stashed = cost.stash_types.iter().map(|(name, dtype)| (name.clone(), dtype.name().into()));
    json!({
        "name": cost.name,
        "forward_s": cost.forward_s,
        "backward_s": cost.backward_s,
        "held_bytes": cost.held_bytes,
        "output_types": types,
        "stash_types": Value::Object(stashed.collect()),
    })
}

fn dims(shapes: &[SampleShape]) -> Vec<&[i64]> {
    shapes.iter().map(|shape| &shape.dims[..]).collect()
}

/// `3×224×224`, several tensors joined by ` + `.
fn shapes(shapes: &[SampleShape]) -> String {
    let one = |shape: &SampleShape| shape.dims.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
    shapes.iter().map(one).collect::<Vec<_>>().join(" + ")
}

//! `distgpipe models`: what there is, layer by layer, and what each layer costs.

use crate::config::model;
use crate::exit::usage;
use crate::report;
use crate::report::table::{Side, Table};
use crate::report::units;
use distgpipe::engine::Device;
use distgpipe::model::LayerSummary;
use distgpipe::profile::{self, LayerCost};
use distgpipe::{models, Model, Precision, SampleShape};
use serde_json::json;

/// Flags of `distgpipe models`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe models
  distgpipe models mobilenet_v2 --set classes=1000
  distgpipe models roberta --set config=config.json
  distgpipe models roberta --set layers=2 --profile --rows 8")]
pub struct ModelsArgs {
    /// Show this one's layers; without a name, list all
    name: Option<String>,
    /// A setting of the model, such as classes=1000; may be repeated
    #[arg(long, value_name = "KEY=VALUE", requires = "name")]
    set: Vec<String>,
    /// Measure each layer's time and memory
    #[arg(long, requires = "name")]
    profile: bool,
    #[command(flatten)]
    sample: SampleArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// How layers are measured; of `models` and of `balance`.
#[derive(Debug, clap::Args)]
pub struct SampleArgs {
    /// Rows of the sample that is measured
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub rows: usize,
    /// libtorch threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Where to measure: cpu, cuda:N or auto
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,
    /// What to measure in: fp32 or bf16
    #[arg(long, value_name = "fp32|bf16", default_value_t = Precision::Fp32)]
    pub precision: Precision,
}

impl SampleArgs {
    /// What each layer of a model costs.
    pub fn measure(&self, model: &Model) -> anyhow::Result<Vec<LayerCost>> {
        if self.rows == 0 || self.threads == 0 {
            return Err(usage("--rows and --threads: use 1 or more"));
        }
        self.device.open().map_err(|e| usage(format!("--device: {e}")))?;
        let sample = profile::sample(model, self.rows, 0)?;
        let options = profile::Options {
            device: self.device,
            threads: self.threads,
            channels_last: true,
            precision: self.precision,
            rounds: 5,
        };
        Ok(profile::measure(model, &sample, &options)?)
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
    for name in models::NAMES {
        let model = model("NAME", name, &[])?;
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
            "settings": model.recipe.as_ref().map(|recipe| &recipe.settings),
        }));
    }
    if json {
        return report::print_json(&entries);
    }
    report::print(&format!(
        "{}\nWith default settings and for one sample; `distgpipe models NAME` shows layers and settings.\n",
        table.render()
    ))
}

fn show(name: &str, args: &ModelsArgs) -> anyhow::Result<()> {
    let model = model("NAME", name, &args.set)?;
    let layers = model.summary()?;
    let costs = if args.profile { Some(args.sample.measure(&model)?) } else { None };
    let settings = model.recipe.as_ref().map(|recipe| recipe.settings.clone()).unwrap_or_default();
    if args.json {
        return report::print_json(&json!({
            "name": name,
            "settings": settings,
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
        settings
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, value)| format!("{key}={value}"))
            .collect::<Vec<_>>()
            .join(" "),
    ));
    if args.profile {
        let SampleArgs { rows, precision, .. } = &args.sample;
        text.push_str(&format!("times and memory for {rows} rows in {precision}, the quickest of 5 rounds\n"));
    }
    report::print(&text)
}

fn layer_table(layers: &[LayerSummary], costs: Option<&[LayerCost]>) -> String {
    let mut columns = vec![
        ("#", Side::Right),
        ("layer", Side::Left),
        ("output", Side::Left),
        ("parameters", Side::Right),
        ("multiply-adds", Side::Right),
    ];
    if costs.is_some() {
        columns.extend([("forward", Side::Right), ("backward", Side::Right), ("held", Side::Right)]);
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

fn layer_json(layer: &LayerSummary, cost: Option<&LayerCost>) -> serde_json::Value {
    let mut value = json!({
        "name": layer.name,
        "output": dims(&layer.output),
        "parameters": layer.parameters,
        "multiply_adds": layer.multiply_adds,
    });
    if let (Some(cost), Some(object)) = (cost, value.as_object_mut()) {
        object.insert("forward_s".to_owned(), cost.forward_s.into());
        object.insert("backward_s".to_owned(), cost.backward_s.into());
        object.insert("held_bytes".to_owned(), cost.held_bytes.into());
        let types: Vec<&str> = cost.output_types.iter().map(|dtype| dtype.name()).collect();
        object.insert("output_types".to_owned(), types.into());
        let stashed = cost.stash_types.iter().map(|(name, dtype)| (name.clone(), dtype.name().into()));
        object.insert("stash_types".to_owned(), serde_json::Value::Object(stashed.collect()));
    }
    value
}

fn dims(shapes: &[SampleShape]) -> Vec<&[i64]> {
    shapes.iter().map(|shape| &shape.dims[..]).collect()
}

/// `3×224×224`, tensors joined by +.
fn shapes(shapes: &[SampleShape]) -> String {
    let one = |shape: &SampleShape| shape.dims.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
    shapes.iter().map(one).collect::<Vec<_>>().join(" + ")
}

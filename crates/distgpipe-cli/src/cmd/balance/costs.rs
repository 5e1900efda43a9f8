//! The costs of the layers: times in rounds, memory and element types. Read from a file, or kept in one.

use crate::cmd::models::{layer_cost_json, SampleArgs};
use crate::exit::usage;
use crate::files::read_text;
use crate::report::units;
use distgpipe::driver::profile::LayerProfile;
use distgpipe::{Model, Precision};
use distgpipe_core::wire::DType;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// The largest file of costs that is read.
pub const COSTS_BYTES_MAX: u64 = 64 << 20;

/// The costs of all layers, measured or read from a file.
#[derive(Clone, Debug)]
pub struct LayerCosts {
    /// Names, memory, element types, and the shortest times of all rounds.
    pub layers: Vec<LayerProfile>,
    /// The times in each round; none if the file has only one time for each layer.
    pub rounds: Vec<Round>,
    /// Rows of the micro-batch that was measured.
    pub rows: usize,
    pub precision: Precision,
    pub memory_known: bool,
}

/// How long the rounds took: the sum of all layers' times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub min_s: f64,
    pub median_s: f64,
    pub max_s: f64,
}

/// A median this many times the shortest round shows that the machine was busy.
const BUSY: f64 = 1.25;

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [min, median, max] = [self.min_s, self.median_s, self.max_s].map(units::seconds);
        write!(f, "a round took {min} to {max}, {median} in the median")?;
        if self.median_s > BUSY * self.min_s {
            f.write_str(", so the machine was busy, or its speed varied: measure again when it is idle")?;
        }
        Ok(())
    }
}

/// The times of all layers in one round, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    pub forward_ns: Vec<u64>,
    pub backward_ns: Vec<u64>,
}

impl Round {
    pub fn new(layers: &[LayerProfile]) -> Self {
        let ns = |seconds: f64| (seconds * 1e9).round() as u64;
        Round {
            forward_ns: layers.iter().map(|layer| ns(layer.forward_s)).collect(),
            backward_ns: layers.iter().map(|layer| ns(layer.backward_s)).collect(),
        }
    }

    /// The forward and backward times of each layer in seconds.
    pub fn seconds(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let seconds = |ns: &u64| *ns as f64 / 1e9;
        self.forward_ns.iter().map(seconds).zip(self.backward_ns.iter().map(seconds))
    }

    /// The shortest time of each layer in some rounds.
    pub fn fastest(rounds: &[Round]) -> Round {
        let mut fastest = rounds.first().cloned().unwrap_or_default();
        for round in rounds {
            let shorten = |kept: &mut [u64], others: &[u64]| {
                kept.iter_mut().zip(others).for_each(|(kept, other)| *kept = (*kept).min(*other));
            };
            shorten(&mut fastest.forward_ns, &round.forward_ns);
            shorten(&mut fastest.backward_ns, &round.backward_ns);
        }
        fastest
    }
}

/// The cost of a layer in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum GivenCost {
    Total(f64),
    Measured {
        forward_s: f64,
        backward_s: f64,
        held_bytes: Option<u64>,
        #[serde(default)]
        output_types: Vec<String>,
        #[serde(default)]
        stash_types: BTreeMap<String, String>,
    },
}

/// A file of costs.
#[derive(Deserialize)]
#[serde(untagged)]
enum GivenCosts {
    List(Vec<GivenCost>),
    Models {
        settings: Option<serde_json::Map<String, Value>>,
        rows: Option<usize>,
        precision: Option<Precision>,
        layers: Vec<GivenCost>,
        #[serde(default)]
        rounds: Vec<Round>,
    },
}

impl LayerCosts {
    /// The costs in the file that `--costs` names.
    pub fn read(path: &Path, model: &Model, sample: &SampleArgs) -> anyhow::Result<Self> {
        let text = read_text("--costs", path, COSTS_BYTES_MAX)?;
        Self::parse(&text, &format!("--costs {}", path.display()), model, sample)
    }

    /// Parses a file of costs. Errors start with `flag`. The rows and the precision of `sample` apply where the file has none.
    pub fn parse(text: &str, flag: &str, model: &Model, sample: &SampleArgs) -> anyhow::Result<Self> {
        let wrong = |why: String| usage(format!("{flag}: {why}"));
        let given: GivenCosts = serde_json::from_str(text).map_err(|_| {
            wrong("expected a list of numbers, or the output of `distgpipe models NAME --profile --json`".to_owned())
        })?;
        let (costs, settings, rows, precision, rounds) = match given {
            GivenCosts::List(costs) => (costs, None, None, None, Vec::new()),
            GivenCosts::Models { settings, rows, precision, layers, rounds } => {
                (layers, settings, rows, precision, rounds)
            }
        };
        let asked = model.spec.as_ref().map(|spec| &spec.settings);
        for (name, measured) in settings.iter().flatten() {
            if let Some(asked) = asked.and_then(|asked| asked.get(name)).filter(|asked| *asked != measured) {
                return Err(wrong(format!(
                    "measured with {name}={measured}, and the model has {name}={asked}: measure again, or use --set {name}={measured}"
                )));
            }
        }
        let (rows, precision) = (rows.unwrap_or(sample.rows), precision.unwrap_or(sample.precision));
        if rows == 0 {
            return Err(usage(format!("--rows or {flag}: expected costs of 1 row or more, got 0")));
        }
        let layers = model.layers.len();
        let whole = |round: &Round| round.forward_ns.len() == layers && round.backward_ns.len() == layers;
        if costs.len() != layers || !rounds.iter().all(whole) {
            return Err(wrong(format!("expected a cost for each of {layers} layers, got {}", costs.len())));
        }
        let memory_known = costs.iter().all(|cost| matches!(cost, GivenCost::Measured { held_bytes: Some(_), .. }));
        let layers = costs.into_iter().zip(&model.layers).map(|(cost, layer)| profile(cost, layer.name().to_owned()));
        let layers = layers.collect::<Result<_, String>>().map_err(wrong)?;
        Ok(LayerCosts { layers, rounds, rows, precision, memory_known })
    }

    /// How much the rounds differ; `None` if there are none.
    pub fn spread(&self) -> Option<Spread> {
        let mut totals: Vec<f64> = self
            .rounds
            .iter()
            .map(|round| round.seconds().map(|(forward, backward)| forward + backward).sum())
            .collect();
        totals.sort_by(f64::total_cmp);
        let (min_s, max_s) = (*totals.first()?, *totals.last()?);
        Some(Spread { min_s, median_s: totals[totals.len() / 2], max_s })
    }

    /// The same as a file, with `key`, which says what was measured.
    pub fn json(&self, key: serde_json::Map<String, Value>) -> anyhow::Result<Value> {
        let mut value = Value::Object(key);
        value["layers"] = self.layers.iter().map(layer_cost_json).collect();
        value["rounds"] = serde_json::to_value(&self.rounds)?;
        Ok(value)
    }
}

fn profile(cost: GivenCost, name: String) -> Result<LayerProfile, String> {
    Ok(match cost {
        // Only the sum is known: assume that a backward pass takes twice as long as a forward pass.
        GivenCost::Total(cost) => LayerProfile {
            name,
            forward_s: cost / 3.0,
            backward_s: cost * 2.0 / 3.0,
            held_bytes: 0,
            output_types: Vec::new(),
            stash_types: BTreeMap::new(),
        },
        GivenCost::Measured { forward_s, backward_s, held_bytes, output_types, stash_types } => LayerProfile {
            name,
            forward_s,
            backward_s,
            held_bytes: held_bytes.unwrap_or(0),
            output_types: output_types.iter().map(|name| dtype(name)).collect::<Result<_, _>>()?,
            stash_types: stash_types
                .into_iter()
                .map(|(skip, name)| Ok((skip, dtype(&name)?)))
                .collect::<Result<_, String>>()?,
        },
    })
}

fn dtype(name: &str) -> Result<DType, String> {
    let found = DType::ALL.iter().find(|dtype| dtype.name() == name);
    found.copied().ok_or_else(|| {
        let got: String = name.chars().take(40).collect();
        format!("expected element types such as F32 or BF16, got `{got}`")
    })
}

//! Keeps measured costs for the next call, in the user's cache directory.
//!
//! A file belongs to one model with its settings, and to everything else that the times depend on: rows, precision,
//! threads, device, processor, and the versions of distgpipe and libtorch. It is also a file for `--costs`.

use super::costs::{LayerCosts, COSTS_BYTES_MAX};
use crate::cmd::models::SampleArgs;
use crate::files::{read_text, user_directory, NewFile};
use crate::report;
use distgpipe::data::md5;
use distgpipe::engine::Device;
use distgpipe::Model;
use serde_json::{json, Map, Value};
use std::path::{Path, PathBuf};

/// The libtorch that distgpipe is built against.
const LIBTORCH: &str = "2.11.0";

/// The file in which the costs of one model are kept, and what identifies them.
pub struct Cache {
    path: PathBuf,
    key: Map<String, Value>,
}

/// Costs from an earlier call.
pub struct Kept {
    pub costs: LayerCosts,
    /// How long measuring them took.
    pub measured_s: f64,
    /// How long ago they were written, in seconds, if the file system knows.
    pub age_s: Option<f64>,
}

impl Cache {
    /// The file for these costs; `None` if the user has no cache directory, or the model cannot be described.
    pub fn new(model: &Model, sample: &SampleArgs, workers: usize) -> anyhow::Result<Option<Self>> {
        let (Some(spec), Some(directory)) = (&model.spec, user_directory("XDG_CACHE_HOME", ".cache")) else {
            return Ok(None);
        };
        let device = sample.device();
        let key = json!({
            "name": spec.name,
            "settings": spec.settings,
            "rows": sample.rows,
            "precision": sample.precision,
            "threads": sample.threads(workers)?,
            "device": device.to_string(),
            "processor": processor(device),
            "distgpipe": env!("CARGO_PKG_VERSION"),
            "libtorch": LIBTORCH,
        });
        let Value::Object(mut key) = key else { return Ok(None) };
        if !sample.channels_last {
            key.insert("channels_last".to_owned(), false.into());
        }
        let hash = md5(serde_json::to_string(&key)?.as_bytes())?;
        let path = directory.join("distgpipe/layer-costs").join(format!("{}-{}.json", spec.name, &hash[..16]));
        Ok(Some(Cache { path, key }))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The costs that an earlier call kept. A file that cannot be used is reported, and then ignored.
    pub fn read(&self, model: &Model, sample: &SampleArgs) -> Option<Kept> {
        if !self.path.exists() {
            return None;
        }
        match self.parse(model, sample) {
            Ok(kept) => Some(kept),
            Err(error) => {
                report::note(&format!("warning: {error:#}; the layers are measured again"));
                None
            }
        }
    }

    fn parse(&self, model: &Model, sample: &SampleArgs) -> anyhow::Result<Kept> {
        const FLAG: &str = "kept costs";
        let text = read_text(FLAG, &self.path, COSTS_BYTES_MAX)?;
        let flag = format!("{FLAG} {}", self.path.display());
        let costs = LayerCosts::parse(&text, &flag, model, sample)?;
        let value: Value = serde_json::from_str(&text)?;
        if let Some((name, expected)) = self.key.iter().find(|(name, expected)| value.get(*name) != Some(*expected)) {
            anyhow::bail!("{flag}: expected {name} {expected}, got {}", value[name]);
        }
        let measured_s = value["measured_s"].as_f64().filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
        match measured_s {
            Some(measured_s) if !costs.rounds.is_empty() && costs.memory_known => {
                let written = std::fs::metadata(&self.path).and_then(|file| file.modified()).ok();
                let age = written.and_then(|written| written.elapsed().ok());
                Ok(Kept { costs, measured_s, age_s: age.map(|age| age.as_secs_f64()) })
            }
            _ => anyhow::bail!("{flag}: the file is incomplete"),
        }
    }

    /// Keeps the costs for the next call. A failure is reported, because the result of this call does not depend on it.
    pub fn write(&self, kept: &Kept) -> bool {
        let written = self.text(kept).and_then(|text| {
            if let Some(directory) = self.path.parent() {
                std::fs::create_dir_all(directory)?;
            }
            NewFile::at("kept costs", &self.path)?.write(text.as_bytes())
        });
        if let Err(error) = &written {
            report::note(&format!("warning: the measurements are not kept: {}: {error:#}", self.path.display()));
        }
        written.is_ok()
    }

    fn text(&self, kept: &Kept) -> anyhow::Result<String> {
        let mut value = kept.costs.json(self.key.clone())?;
        value["measured_s"] = kept.measured_s.into();
        Ok(serde_json::to_string(&value)? + "\n")
    }
}

/// The name of the processor that computes: home directories are shared between hosts, and processors are replaced.
fn processor(device: Device) -> String {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let named = |text: &str, field: &str| {
        let line = text.lines().find(|line| line.starts_with(field));
        line.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_owned())
    };
    match device {
        Device::Cuda(_) => {
            let gpus = std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
            let mut gpus: Vec<String> =
                gpus.filter_map(|gpu| named(&read(&gpu.path().join("information")), "Model")).collect();
            gpus.sort();
            gpus.join(", ")
        }
        _ => named(&read(Path::new("/proc/cpuinfo")), "model name").unwrap_or_default(),
    }
}

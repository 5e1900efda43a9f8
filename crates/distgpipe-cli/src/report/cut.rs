//! The table of a cut that the search found: time, traffic and memory of each partition.

use super::table::{Side, Table};
use super::units;
use distgpipe::Model;
use distgpipe_core::balance::{Estimate, Found, Link, Method};
use distgpipe_core::partition::Balance;
use distgpipe_core::placement::Placement;
use distgpipe_core::PartitionId;
use serde_json::{json, Value};

/// A cut and what it was searched with.
pub struct CutReport<'a> {
    /// The result of the search.
    pub found: &'a Found,
    pub model: &'a Model,
    /// The worker of each partition.
    pub placement: &'a Placement,
    pub micro_batches: usize,
    /// The link that the search assumed between workers.
    pub link: Option<Link>,
    /// The memory limit of a worker.
    pub memory_limit_bytes: Option<u64>,
    /// Whether the memory of layers was measured.
    pub memory_known: bool,
}

impl CutReport<'_> {
    /// The table and the estimate of a step, beside that of the even cut.
    pub fn text(&self) -> String {
        let Found { balance, estimate, even, even_estimate, method, tried, complete, .. } = self.found;
        let how = match method {
            Method::Exhaustive if *tried == 1 => "the only cut".to_owned(),
            Method::Exhaustive if *complete => format!("best of all {} cuts", units::count(*tried as u64)),
            _ => format!("best of {} cuts tried", units::count(*tried as u64)),
        };
        let early = if *complete { "" } else { ", the best found so far: the search ended early" };
        let within = match self.memory_limit_bytes {
            Some(bytes) => format!(" within {} per worker", units::bytes(bytes as f64)),
            None => String::new(),
        };
        format!(
            "{}with equal numbers of layers ({even}): {}\n{how}{within}{early}\n",
            self.cut_text(balance, estimate),
            self.step(even_estimate),
        )
    }

    /// The table of a cut and the estimate of a step.
    pub fn cut_text(&self, balance: &Balance, estimate: &Estimate) -> String {
        let links = match self.link {
            Some(link) if link.latency_s > 0.0 => {
                let latency = units::seconds(link.latency_s);
                format!("links of {}/s and {latency} latency", units::bytes(link.bytes_per_s))
            }
            Some(link) => format!("links of {}/s", units::bytes(link.bytes_per_s)),
            None => "free links".to_owned(),
        };
        format!(
            "{}{}simulated step of {} micro-batches with {links}: {}\n",
            self.table(balance, estimate),
            self.workers(estimate),
            self.micro_batches,
            self.step(estimate),
        )
    }

    fn step(&self, estimate: &Estimate) -> String {
        let most = match self.memory_known {
            true => format!(", {} at most on one worker", units::bytes(estimate.memory_bytes() as f64)),
            false => String::new(),
        };
        format!("{}, {} idle{most}", units::seconds(estimate.step_s), units::percent(estimate.bubble))
    }

    fn name(&self, partition: PartitionId) -> &str {
        self.placement.name(self.placement.worker_of(partition))
    }

    fn table(&self, balance: &Balance, estimate: &Estimate) -> String {
        let mut table = Table::new(&[
            ("partition", Side::Right),
            ("worker", Side::Left),
            ("layers", Side::Right),
            ("from", Side::Left),
            ("to", Side::Left),
            ("forward", Side::Right),
            ("backward", Side::Right),
            ("sends forward", Side::Right),
            ("sends backward", Side::Right),
            ("parameters", Side::Right),
            ("memory", Side::Right),
        ]);
        let sent = |bytes: u64| if bytes == 0 { "–".to_owned() } else { units::bytes(bytes as f64) };
        for (i, partition) in estimate.partitions.iter().enumerate() {
            let id = PartitionId::new(i);
            let range = balance.range(id);
            table.row(vec![
                id.to_string(),
                self.name(id).to_owned(),
                range.len().to_string(),
                self.model.layers[range.start].name().to_owned(),
                self.model.layers[range.end - 1].name().to_owned(),
                units::seconds(partition.forward_s),
                units::seconds(partition.backward_s),
                sent(partition.forward_bytes),
                sent(partition.backward_bytes),
                units::bytes(partition.parameter_bytes as f64),
                self.memory(partition.memory_bytes),
            ]);
        }
        table.render()
    }

    fn memory(&self, bytes: u64) -> String {
        if self.memory_known {
            units::bytes(bytes as f64)
        } else {
            "–".to_owned()
        }
    }

    /// Memory by worker, where a worker has several partitions.
    fn workers(&self, estimate: &Estimate) -> String {
        if !self.memory_known || self.placement.workers() == self.placement.partitions() {
            return String::new();
        }
        let worker = estimate.workers.iter();
        let worker = worker.map(|worker| format!("{} {}", worker.name, units::bytes(worker.memory_bytes as f64)));
        format!("memory by worker: {}\n", worker.collect::<Vec<_>>().join(", "))
    }

    /// The same figures as JSON.
    pub fn json(&self) -> Value {
        let Found { balance, estimate, even, even_estimate, method, tried, complete, .. } = self.found;
        let mut value = self.cut_json(balance, estimate);
        value["micro_batches"] = self.micro_batches.into();
        value["even"] =
            json!({ "balance": even.sizes(), "step_s": even_estimate.step_s, "bubble": even_estimate.bubble });
        value["link"] =
            self.link.map(|link| json!({ "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s })).into();
        value["exhaustive"] = (*method == Method::Exhaustive && *complete).into();
        value["complete"] = (*complete).into();
        value["tried"] = (*tried).into();
        value
    }

    /// A cut and its estimate as JSON.
    pub fn cut_json(&self, balance: &Balance, estimate: &Estimate) -> Value {
        let memory = |bytes: u64| self.memory_known.then_some(bytes);
        let partition = |(i, partition): (usize, &distgpipe_core::balance::PartitionEstimate)| {
            let id = PartitionId::new(i);
            json!({
                "worker": self.name(id),
                "layers": balance.range(id).len(),
                "forward_s": partition.forward_s,
                "backward_s": partition.backward_s,
                "forward_bytes": partition.forward_bytes,
                "backward_bytes": partition.backward_bytes,
                "parameter_bytes": partition.parameter_bytes,
                "memory_bytes": memory(partition.memory_bytes),
            })
        };
        let workers = estimate.workers.iter();
        let workers = workers.map(|worker| json!({ "name": worker.name, "memory_bytes": memory(worker.memory_bytes) }));
        json!({
            "balance": balance.sizes(),
            "partitions": estimate.partitions.iter().enumerate().map(partition).collect::<Vec<_>>(),
            "workers": workers.collect::<Vec<_>>(),
            "step_s": estimate.step_s,
            "bubble": estimate.bubble,
        })
    }
}

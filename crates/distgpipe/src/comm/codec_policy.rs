//! Which codec encodes which tensors. The policy is chosen once for a run and sent to every worker with the job.

use crate::comm::protocol::StepCommand;
use crate::comm::topology::Topology;
use distgpipe_core::codec::{CodecError, CodecSpec, SerialExecutor};
use distgpipe_core::schedule::{Pass, Plan};
use distgpipe_core::{PartitionId, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The codecs of a run. They apply to activations and gradients between partitions on different workers, and to the gradients
/// that replicas share; tensors that stay on a worker are never encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodecPolicy {
    /// The codec of activations.
    pub forward: CodecSpec,
    /// The codec of gradients.
    pub backward: CodecSpec,
    /// Codecs of single links, which replace the two above. The last one that matches a link applies.
    pub links: Vec<LinkOverride>,
    /// The codec of the gradients that replicas share; see [`crate::runtime::all_reduce`].
    #[serde(default, skip_serializing_if = "CodecSpec::is_raw")]
    pub replicas: CodecSpec,
    /// The number of training steps at the start of a run that send tensors raw.
    pub warm_up_steps: u64,
    /// Whether evaluation uses the codecs too, as the deployed model will; otherwise it sends tensors raw.
    pub evaluate: bool,
}

impl Default for CodecPolicy {
    fn default() -> Self {
        CodecPolicy {
            forward: CodecSpec::default(),
            backward: CodecSpec::default(),
            links: Vec::new(),
            replicas: CodecSpec::default(),
            warm_up_steps: 0,
            evaluate: true,
        }
    }
}

/// A codec policy that cannot be parsed, or that does not fit the plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecPolicyError {
    /// The text for one link does not have the form LINK=CODEC.
    #[error("expected LINK=CODEC or LINK=FORWARD,BACKWARD with two partitions or two workers as the link, such as 0-1=tile:4 or client-server=tile:4,raw; got `{got}`")]
    Text {
        /// The text as given.
        got: String,
    },
    /// The text names a codec that does not exist.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The run has no such link.
    #[error("expected codecs for one of the run's links, {}; got some for {got}", list(links))]
    NoSuchLink {
        /// The link as given.
        got: LinkName,
        /// The links of the run, as pairs of partitions.
        links: Vec<(PartitionId, PartitionId)>,
    },
    /// The codec cannot encode the gradients that replicas share.
    #[error("`CodecPolicy::replicas`: expected a codec for flat tensors of gradients, such as bf16, tile:8 or feedback(tile:4); got `{got}`, which {why}")]
    Replicas {
        /// The codec as given.
        got: CodecSpec,
        /// What it would need.
        why: &'static str,
    },
}

fn list(links: &[(PartitionId, PartitionId)]) -> String {
    match links {
        [] => "of which it has none".to_owned(),
        links => links.iter().map(|(a, b)| format!("{a}-{b}")).collect::<Vec<_>>().join(", "),
    }
}

impl CodecPolicy {
    /// The same codec for activations and gradients on all links between partitions.
    pub fn all(spec: CodecSpec) -> Self {
        CodecPolicy { forward: spec.clone(), backward: spec, ..CodecPolicy::default() }
    }

    /// The codec for what partition `from` sends to partition `to`.
    pub fn codec(&self, plan: &Plan, pass: Pass, from: PartitionId, to: PartitionId) -> &CodecSpec {
        let link = self.links.iter().rev().find(|codecs| codecs.link.matches(plan, from, to));
        match (pass, link) {
            (Pass::Forward, Some(link)) => &link.forward,
            (Pass::Backward, Some(link)) => &link.backward,
            (Pass::Forward, None) => &self.forward,
            (Pass::Backward, None) => &self.backward,
        }
    }

    /// Whether the codecs apply in this step. Warm-up steps, and evaluation without [`CodecPolicy::evaluate`], send raw.
    pub fn applies_in(&self, step: &StepCommand) -> bool {
        step.trained_batches >= self.warm_up_steps && (step.purpose.runs_backward() || self.evaluate)
    }

    /// Whether anything that worker `from` sends to worker `to` has a codec other than `raw`.
    pub fn encodes_between(&self, plan: &Plan, from: WorkerId, to: WorkerId) -> bool {
        let worker_of = |partition| plan.placement().worker_of(partition);
        crossings(plan).into_iter().any(|(a, b)| {
            let forward = (worker_of(a), worker_of(b)) == (from, to) && !self.codec(plan, Pass::Forward, a, b).is_raw();
            let backward =
                (worker_of(b), worker_of(a)) == (from, to) && !self.codec(plan, Pass::Backward, b, a).is_raw();
            forward || backward
        })
    }

    /// Whether a codec keeps state per sample, so that steps must name the samples of their batches.
    pub fn needs_sample_ids(&self) -> bool {
        let links = self.links.iter().flat_map(|link| [&link.forward, &link.backward]);
        links.chain([&self.forward, &self.backward]).any(CodecSpec::wants_samples)
    }

    /// How many bytes the codecs of a worker's links, and of the gradients that it shares with other replicas, keep of earlier
    /// tensors at most.
    pub fn kept_bytes_max(&self, topology: &Topology, worker: WorkerId) -> u64 {
        let plan = topology.plan();
        let is_here = |partition| plan.placement().worker_of(partition) == topology.role_of(worker);
        let links = crossings(plan).into_iter().filter(|&(a, b)| is_here(a) || is_here(b));
        let kept = links.flat_map(|(a, b)| {
            let (forward, backward) = (self.codec(plan, Pass::Forward, a, b), self.codec(plan, Pass::Backward, b, a));
            [forward.kept_bytes_max(), backward.kept_bytes_max()]
        });
        // A worker has an encoder for each round of the all-reduce.
        let rounds = if topology.replicas() > 1 { topology.replicas() as u64 } else { 0 };
        kept.fold(rounds.saturating_mul(self.replicas.kept_bytes_max()), u64::saturating_add)
    }

    /// Whether any codec remembers earlier tensors, so that [`Pipeline::reset_codecs`](crate::Pipeline::reset_codecs) changes what it
    /// sends.
    pub fn remembers(&self) -> bool {
        let links = self.links.iter().flat_map(|link| [&link.forward, &link.backward]);
        links.chain([&self.forward, &self.backward, &self.replicas]).any(CodecSpec::remembers)
    }

    /// Checks that every link in [`CodecPolicy::links`] is a link of the plan, and that [`CodecPolicy::replicas`] suits gradients.
    pub fn check(&self, plan: &Plan) -> Result<(), CodecPolicyError> {
        let links = crossings(plan);
        for LinkOverride { link, .. } in &self.links {
            if !links.iter().any(|&(a, b)| link.matches(plan, a, b)) {
                return Err(CodecPolicyError::NoSuchLink { got: link.clone(), links });
            }
        }
        self.check_replicas()
    }

    fn check_replicas(&self) -> Result<(), CodecPolicyError> {
        let codec = self.replicas.codec(Arc::new(SerialExecutor));
        let why = if codec.wants_samples() {
            "compares the rows of samples, and a sum of gradients has none: use feedback(C)"
        } else if codec.refuses_shape(&[FLAT_ELEMENTS]) {
            "encodes matrices only"
        } else {
            return Ok(());
        };
        Err(CodecPolicyError::Replicas { got: self.replicas.clone(), why })
    }
}

/// The size of a large flat tensor, as an example.
const FLAT_ELEMENTS: usize = 1 << 16;

/// The pairs of partitions on different workers that exchange tensors, in the forward direction.
fn crossings(plan: &Plan) -> Vec<(PartitionId, PartitionId)> {
    let worker_of = |partition| plan.placement().worker_of(partition);
    let from = (0..plan.partitions()).map(PartitionId::new);
    from.flat_map(|a| plan.out_edges(a).iter().map(move |&b| (a, b)))
        .filter(|&(a, b)| worker_of(a) != worker_of(b))
        .collect()
}

/// The codecs of one link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkOverride {
    /// The link that these codecs are for.
    pub link: LinkName,
    /// The codec of activations.
    pub forward: CodecSpec,
    /// The codec of gradients.
    pub backward: CodecSpec,
}

impl FromStr for LinkOverride {
    type Err = CodecPolicyError;

    fn from_str(text: &str) -> Result<Self, CodecPolicyError> {
        let wrong = || CodecPolicyError::Text { got: text.to_owned() };
        let (link, codecs) = text.split_once('=').ok_or_else(wrong)?;
        let (forward, backward) = codecs.split_once(',').unwrap_or((codecs, codecs));
        let (a, b) = link.split_once('-').filter(|(a, b)| !a.is_empty() && !b.is_empty()).ok_or_else(wrong)?;
        let link = match (a.parse(), b.parse()) {
            (Ok(a), Ok(b)) => LinkName::Partitions(PartitionId(a), PartitionId(b)),
            _ => LinkName::Workers(link.to_owned()),
        };
        Ok(LinkOverride { link, forward: forward.parse()?, backward: backward.parse()? })
    }
}

/// Names a link by its two ends, in either order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkName {
    /// The link between two partitions.
    Partitions(PartitionId, PartitionId),
    /// All links between two workers, as `NAME-NAME`. It is kept as one text because names may contain `-` too.
    Workers(String),
}

impl LinkName {
    fn matches(&self, plan: &Plan, from: PartitionId, to: PartitionId) -> bool {
        match self {
            LinkName::Partitions(a, b) => (*a, *b) == (from, to) || (*b, *a) == (from, to),
            LinkName::Workers(text) => {
                let name = |partition| plan.placement().name(plan.placement().worker_of(partition));
                let (from, to) = (name(from), name(to));
                *text == format!("{from}-{to}") || *text == format!("{to}-{from}")
            }
        }
    }
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkName::Partitions(a, b) => write!(f, "{a}-{b}"),
            LinkName::Workers(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::placement::Placement;
    use distgpipe_core::schedule::{Request, Schedule};

    fn plan() -> Plan {
        let placement: Placement = "client,server,client".parse().unwrap();
        Schedule::GPipe.plan(&Request::new(placement, 2)).unwrap()
    }

    fn spec(text: &str) -> CodecSpec {
        text.parse().unwrap()
    }

    #[test]
    fn a_link_can_override_the_codecs() {
        let (plan, p) = (plan(), PartitionId);
        let mut codecs = CodecPolicy { forward: spec("sort:8"), backward: spec("uniform:8"), ..CodecPolicy::default() };
        assert_eq!(codecs.codec(&plan, Pass::Forward, p(1), p(2)), &spec("sort:8"));
        assert_eq!(codecs.codec(&plan, Pass::Backward, p(2), p(1)), &spec("uniform:8"));
        codecs.links = vec!["server-client=f16".parse().unwrap(), "0-1=tile:4/128,raw".parse().unwrap()];
        codecs.check(&plan).unwrap();
        assert_eq!(codecs.codec(&plan, Pass::Forward, p(0), p(1)), &spec("tile:4/128"));
        assert_eq!(codecs.codec(&plan, Pass::Backward, p(1), p(0)), &spec("raw"));
        assert_eq!(codecs.codec(&plan, Pass::Backward, p(2), p(1)), &spec("f16"));
    }

    #[test]
    fn an_invalid_link_is_answered_with_the_valid_ones() {
        let error = |text: &str| match text.parse::<LinkOverride>() {
            Ok(link) => {
                CodecPolicy { links: vec![link], ..CodecPolicy::default() }.check(&plan()).unwrap_err().to_string()
            }
            Err(refused) => refused.to_string(),
        };
        assert_eq!(error("0-2=raw"), "expected codecs for one of the run's links, 0-1, 1-2; got some for 0-2");
        assert_eq!(error("a-b=raw"), "expected codecs for one of the run's links, 0-1, 1-2; got some for a-b");
        for text in ["", "0-1", "0=raw", "-1=raw", "0-=raw"] {
            assert!(error(text).starts_with("expected LINK=CODEC"), "{text}: {}", error(text));
        }
        assert!(error("0-1=zip").starts_with("expected a codec out of"));
        assert!(error("0-1=raw,").starts_with("expected a codec out of"));
    }

    #[test]
    fn a_codec_that_cannot_encode_flat_gradients_is_refused() {
        let check = |text: &str| CodecPolicy { replicas: spec(text), ..CodecPolicy::default() }.check(&plan());
        for text in
            ["raw", "bf16", "tile:8", "sort:8", "feedback(tile:4)", "feedback(topk:0.1)", "zstd(feedback(tile:4))"]
        {
            check(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        }
        for (text, why) in [
            ("delta(tile:4)", "a sum of gradients has none: use feedback(C)"),
            ("zstd(delta(tile:4))", "a sum of gradients has none: use feedback(C)"),
            ("svd:2", "encodes matrices only"),
            ("feedback(svd:2)", "encodes matrices only"),
        ] {
            let error = check(text).unwrap_err().to_string();
            assert!(error.contains(&format!("got `{text}`")) && error.ends_with(why), "{error}");
        }
    }

    #[test]
    fn only_links_with_a_codec_encode() {
        let plan = plan();
        let (client, server) = (WorkerId(0), WorkerId(1));
        let codecs = |forward, backward| CodecPolicy {
            forward: spec(forward),
            backward: spec(backward),
            ..CodecPolicy::default()
        };
        assert!(!CodecPolicy::default().encodes_between(&plan, client, server));
        assert!(codecs("f16", "raw").encodes_between(&plan, client, server));
        // The server sends both activations and gradients of its partition to the client.
        assert!(codecs("raw", "f16").encodes_between(&plan, server, client));
        let one = CodecPolicy { links: vec!["0-1=f16,raw".parse().unwrap()], ..CodecPolicy::default() };
        assert!(one.encodes_between(&plan, client, server) && !one.encodes_between(&plan, server, client));
    }
}

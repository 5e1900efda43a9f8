//! Which codec carries which tensors: chosen once for a run, and known to every worker.

use crate::job::{Purpose, Step};
use distgpipe_core::codec::{CodecError, Spec};
use distgpipe_core::schedule::{Pass, Plan};
use distgpipe_core::{PartitionId, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The codecs of a run. What crosses no link is never encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Codecs {
    /// Of activations.
    pub forward: Spec,
    /// Of gradients.
    pub backward: Spec,
    /// Other ones for single links; where several fit, the last one counts.
    pub links: Vec<LinkCodecs>,
    /// Training steps at the start that go raw.
    pub warm_up_steps: u64,
    /// Whether evaluation has the codecs of training, as the model will have when it is used; otherwise it goes raw.
    pub evaluate: bool,
}

impl Default for Codecs {
    fn default() -> Self {
        Codecs {
            forward: Spec::default(),
            backward: Spec::default(),
            links: Vec::new(),
            warm_up_steps: 0,
            evaluate: true,
        }
    }
}

/// Why codecs do not fit a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecsError {
    /// The text for one link is not one.
    #[error("expected LINK=CODEC or LINK=FORWARD,BACKWARD with two partitions or two workers as the link, such as 0-1=tile:4 or client-server=tile:4,raw; got `{got}`")]
    Text {
        /// The text.
        got: String,
    },
    /// A codec that does not exist.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// Codecs for a link that the run does not have.
    #[error("expected codecs for one of the run's links, {}; got some for {got}", list(links))]
    NoSuchLink {
        /// The link.
        got: LinkName,
        /// The links that there are, as partitions.
        links: Vec<(PartitionId, PartitionId)>,
    },
}

fn list(links: &[(PartitionId, PartitionId)]) -> String {
    match links {
        [] => "of which it has none".to_owned(),
        links => links.iter().map(|(a, b)| format!("{a}-{b}")).collect::<Vec<_>>().join(", "),
    }
}

impl Codecs {
    /// One codec for everything.
    pub fn all(spec: Spec) -> Self {
        Codecs { forward: spec.clone(), backward: spec, ..Codecs::default() }
    }

    /// The codec of what one partition sends another.
    pub fn of(&self, plan: &Plan, pass: Pass, from: PartitionId, to: PartitionId) -> &Spec {
        let link = self.links.iter().rev().find(|codecs| codecs.link.is(plan, from, to));
        match (pass, link) {
            (Pass::Forward, Some(link)) => &link.forward,
            (Pass::Backward, Some(link)) => &link.backward,
            (Pass::Forward, None) => &self.forward,
            (Pass::Backward, None) => &self.backward,
        }
    }

    /// Whether what this step sends is encoded at all.
    pub fn apply_to(&self, step: &Step) -> bool {
        let learning = matches!(step.purpose, Purpose::Train | Purpose::Gradients);
        step.learned >= self.warm_up_steps && (learning || self.evaluate)
    }

    /// Whether anything that one worker sends another has a codec other than `raw`.
    pub fn encode_between(&self, plan: &Plan, from: WorkerId, to: WorkerId) -> bool {
        let worker_of = |partition| plan.placement().worker_of(partition);
        crossings(plan).into_iter().any(|(a, b)| {
            let forward = (worker_of(a), worker_of(b)) == (from, to) && !self.of(plan, Pass::Forward, a, b).is_raw();
            let backward = (worker_of(b), worker_of(a)) == (from, to) && !self.of(plan, Pass::Backward, b, a).is_raw();
            forward || backward
        })
    }

    /// Whether one of them remembers samples, so that it has to be told which are in a batch.
    pub fn want_samples(&self) -> bool {
        let links = self.links.iter().flat_map(|link| [&link.forward, &link.backward]);
        links.chain([&self.forward, &self.backward]).any(Spec::wants_samples)
    }

    /// Whether every link that codecs were given for is one of the plan's.
    pub fn check(&self, plan: &Plan) -> Result<(), CodecsError> {
        let links = crossings(plan);
        for LinkCodecs { link, .. } in &self.links {
            if !links.iter().any(|&(a, b)| link.is(plan, a, b)) {
                return Err(CodecsError::NoSuchLink { got: link.clone(), links });
            }
        }
        Ok(())
    }
}

/// The pairs of partitions between which tensors cross from worker to worker, in the forward direction.
fn crossings(plan: &Plan) -> Vec<(PartitionId, PartitionId)> {
    let worker_of = |partition| plan.placement().worker_of(partition);
    let from = (0..plan.partitions()).map(PartitionId::new);
    from.flat_map(|a| plan.out_edges(a).iter().map(move |&b| (a, b)))
        .filter(|&(a, b)| worker_of(a) != worker_of(b))
        .collect()
}

/// The codecs of one link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCodecs {
    /// Which.
    pub link: LinkName,
    /// Of activations.
    pub forward: Spec,
    /// Of gradients.
    pub backward: Spec,
}

impl FromStr for LinkCodecs {
    type Err = CodecsError;

    fn from_str(text: &str) -> Result<Self, CodecsError> {
        let wrong = || CodecsError::Text { got: text.to_owned() };
        let (link, codecs) = text.split_once('=').ok_or_else(wrong)?;
        let (forward, backward) = codecs.split_once(',').unwrap_or((codecs, codecs));
        let (a, b) = link.split_once('-').filter(|(a, b)| !a.is_empty() && !b.is_empty()).ok_or_else(wrong)?;
        let link = match (a.parse(), b.parse()) {
            (Ok(a), Ok(b)) => LinkName::Partitions(PartitionId(a), PartitionId(b)),
            _ => LinkName::Workers(link.to_owned()),
        };
        Ok(LinkCodecs { link, forward: forward.parse()?, backward: backward.parse()? })
    }
}

/// A link, by what is at its ends, in either order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkName {
    /// One cut of the model.
    Partitions(PartitionId, PartitionId),
    /// All cuts between two workers: their names with a `-` between, which names may have too.
    Workers(String),
}

impl LinkName {
    fn is(&self, plan: &Plan, from: PartitionId, to: PartitionId) -> bool {
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

    fn spec(text: &str) -> Spec {
        text.parse().unwrap()
    }

    #[test]
    fn a_link_may_have_codecs_of_its_own() {
        let (plan, p) = (plan(), PartitionId);
        let mut codecs = Codecs { forward: spec("sort:8"), backward: spec("uniform:8"), ..Codecs::default() };
        assert_eq!(codecs.of(&plan, Pass::Forward, p(1), p(2)), &spec("sort:8"));
        assert_eq!(codecs.of(&plan, Pass::Backward, p(2), p(1)), &spec("uniform:8"));
        codecs.links = vec!["server-client=f16".parse().unwrap(), "0-1=tile:4/128,raw".parse().unwrap()];
        codecs.check(&plan).unwrap();
        assert_eq!(codecs.of(&plan, Pass::Forward, p(0), p(1)), &spec("tile:4/128"));
        assert_eq!(codecs.of(&plan, Pass::Backward, p(1), p(0)), &spec("raw"));
        assert_eq!(codecs.of(&plan, Pass::Backward, p(2), p(1)), &spec("f16"));
    }

    #[test]
    fn wrong_links_are_told_the_right_ones() {
        let told = |text: &str| match text.parse::<LinkCodecs>() {
            Ok(link) => Codecs { links: vec![link], ..Codecs::default() }.check(&plan()).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert_eq!(told("0-2=raw"), "expected codecs for one of the run's links, 0-1, 1-2; got some for 0-2");
        assert_eq!(told("a-b=raw"), "expected codecs for one of the run's links, 0-1, 1-2; got some for a-b");
        for text in ["", "0-1", "0=raw", "-1=raw", "0-=raw"] {
            assert!(told(text).starts_with("expected LINK=CODEC"), "{text}: {}", told(text));
        }
        assert!(told("0-1=zip").starts_with("expected a codec out of"));
        assert!(told("0-1=raw,").starts_with("expected a codec out of"));
    }

    #[test]
    fn only_links_with_a_codec_encode() {
        let plan = plan();
        let (client, server) = (WorkerId(0), WorkerId(1));
        let codecs =
            |forward, backward| Codecs { forward: spec(forward), backward: spec(backward), ..Codecs::default() };
        assert!(!Codecs::default().encode_between(&plan, client, server));
        assert!(codecs("f16", "raw").encode_between(&plan, client, server));
        // The server sends activations of its own partition and gradients of it: both ways carry both.
        assert!(codecs("raw", "f16").encode_between(&plan, server, client));
        let one = Codecs { links: vec!["0-1=f16,raw".parse().unwrap()], ..Codecs::default() };
        assert!(one.encode_between(&plan, client, server) && !one.encode_between(&plan, server, client));
    }
}

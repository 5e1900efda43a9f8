//! The placement: which worker runs which partition.
//!
//! A worker may run several partitions. `client,server,client` is split learning, where the client keeps the first
//! layers next to the data and the last layers next to the labels. The workers may come in any order.

use crate::{PartitionId, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The longest name of a worker in bytes.
pub const WORKER_NAME_BYTES_MAX: usize = 64;

/// Why a placement is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// There is no partition to place.
    #[error(
        "expected at least one partition to place, got none: name a worker per partition, as in `client,server,client`"
    )]
    Empty,
    /// The name of a worker is too long, or has a character that is not allowed in plans, file names and logs.
    #[error(
        "expected a worker name of 1 to {WORKER_NAME_BYTES_MAX} letters, digits, `_`, `.` or `-`, got `{got}` for partition {partition}: \
         write the placement as `client,server,client`"
    )]
    BadName {
        /// The partition whose worker has this name.
        partition: usize,
        /// The beginning of the name.
        got: String,
    },
    /// Two workers have the same name.
    #[error("expected a different name for every worker, got `{name}` twice: rename one of them")]
    SameName {
        /// The name of both workers.
        name: String,
    },
    /// A worker number has no partition.
    #[error("expected the workers to be numbered 0..{workers} with at least one partition each, got no partition on worker {missing}: renumber the workers")]
    NotDense {
        /// The number without a partition.
        missing: usize,
        /// The number of workers, according to the largest number.
        workers: usize,
    },
    /// A partition is placed on a worker that has no name.
    #[error("expected a worker below {workers} for partition {partition}, got {got}: name every worker")]
    UnknownWorker {
        /// The number of the partition.
        partition: usize,
        /// The worker number of that partition.
        got: usize,
        /// The number of workers with a name.
        workers: usize,
    },
}

/// The worker of every partition, and the names of the workers. Every worker has at least one partition.
///
/// ```
/// use distgpipe_core::{placement::Placement, PartitionId, WorkerId};
/// let split: Placement = "client,server,client".parse()?;
/// assert_eq!((split.partitions(), split.workers()), (3, 2));
/// assert_eq!(split.worker_of(PartitionId(2)), WorkerId(0));
/// assert_eq!(split.name(WorkerId(1)), "server");
/// # Ok::<(), distgpipe_core::placement::PlacementError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "PlacementFields", into = "PlacementFields")]
pub struct Placement {
    names: Vec<String>,
    worker_of: Vec<WorkerId>,
}

/// The serialized form. It has worker numbers as well as names, because the number of a worker (its rank) need not
/// follow the order in which partitions mention it.
#[derive(Serialize, Deserialize)]
struct PlacementFields {
    workers: Vec<String>,
    partitions: Vec<usize>,
}

impl Placement {
    /// One worker for each partition, named w0, w1 and so on.
    ///
    /// # Panics
    /// If `partitions` is 0.
    pub fn one_worker_each(partitions: usize) -> Self {
        let workers: Vec<usize> = (0..partitions).collect();
        Self::from_workers(&workers).expect("at least one partition, and dense by construction")
    }

    /// Places partition `i` on worker `workers[i]`. The workers are named w0, w1 and so on, and every number below the
    /// largest must occur.
    pub fn from_workers(workers: &[usize]) -> Result<Self, PlacementError> {
        let count = workers.iter().max().map_or(0, |&max| max.saturating_add(1));
        // Checked first, so that one large number does not allocate a name for every number below it.
        if count > workers.len() {
            let missing = (0..count).find(|worker| !workers.contains(worker));
            return Err(PlacementError::NotDense { missing: missing.unwrap_or(0), workers: count });
        }
        Self::with_names((0..count).map(|worker| format!("w{worker}")).collect(), workers)
    }

    /// Places partition `i` on worker `workers[i]`, whose name is `names[workers[i]]`. For workers whose numbers have a
    /// meaning, such as ranks.
    pub fn with_names(names: Vec<String>, workers: &[usize]) -> Result<Self, PlacementError> {
        if workers.is_empty() {
            return Err(PlacementError::Empty);
        }
        let mut used = vec![false; names.len()];
        for (partition, &worker) in workers.iter().enumerate() {
            let slot = used.get_mut(worker).ok_or(PlacementError::UnknownWorker {
                partition,
                got: worker,
                workers: names.len(),
            })?;
            *slot = true;
            check_name(partition, &names[worker])?;
        }
        if let Some(missing) = used.iter().position(|used| !used) {
            return Err(PlacementError::NotDense { missing, workers: names.len() });
        }
        let mut sorted: Vec<&String> = names.iter().collect();
        sorted.sort();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(PlacementError::SameName { name: pair[0].clone() });
        }
        Ok(Self { worker_of: workers.iter().map(|&worker| WorkerId::new(worker)).collect(), names })
    }

    /// The name of a worker of one of `replicas` replicas: its own, followed by `/` and the replica if there are several.
    ///
    /// # Panics
    /// If there is no such worker.
    pub fn member_name(&self, worker: WorkerId, replica: usize, replicas: usize) -> String {
        match replicas {
            1 => self.name(worker).to_owned(),
            _ => format!("{}/{replica}", self.name(worker)),
        }
    }

    /// The worker that runs a partition.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn worker_of(&self, partition: PartitionId) -> WorkerId {
        self.worker_of[partition.index()]
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.names.len()
    }

    /// The number of partitions.
    pub fn partitions(&self) -> usize {
        self.worker_of.len()
    }

    /// The name of a worker.
    ///
    /// # Panics
    /// If there is no such worker.
    pub fn name(&self, worker: WorkerId) -> &str {
        &self.names[worker.index()]
    }

    /// The partitions of one worker, from the input on.
    pub fn partitions_of(&self, worker: WorkerId) -> Vec<PartitionId> {
        self.partition_ids().filter(|&partition| self.worker_of(partition) == worker).collect()
    }

    /// All workers, by number.
    pub fn worker_ids(&self) -> impl DoubleEndedIterator<Item = WorkerId> {
        (0..self.workers()).map(WorkerId::new)
    }

    /// All partitions, from the input on.
    pub fn partition_ids(&self) -> impl DoubleEndedIterator<Item = PartitionId> {
        (0..self.partitions()).map(PartitionId::new)
    }

    /// The worker with this name, if there is one.
    pub fn find(&self, name: &str) -> Option<WorkerId> {
        self.names.iter().position(|known| known == name).map(WorkerId::new)
    }
}

fn check_name(partition: usize, name: &str) -> Result<(), PlacementError> {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    if name.is_empty() || name.len() > WORKER_NAME_BYTES_MAX || !name.bytes().all(fine) {
        let got = name.chars().take(WORKER_NAME_BYTES_MAX).collect();
        return Err(PlacementError::BadName { partition, got });
    }
    Ok(())
}

/// Parses one worker name per partition, separated by commas. Workers are numbered in order of first appearance.
impl FromStr for Placement {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        if text.trim().is_empty() {
            return Err(PlacementError::Empty);
        }
        let mut numbers = std::collections::HashMap::new();
        let mut names = Vec::new();
        let mut workers = Vec::new();
        for (partition, name) in text.split(',').map(str::trim).enumerate() {
            check_name(partition, name)?;
            workers.push(*numbers.entry(name).or_insert_with(|| {
                names.push(name.to_string());
                names.len() - 1
            }));
        }
        Self::with_names(names, &workers)
    }
}

/// The worker name of each partition, as [`FromStr`] reads them. The text does not contain worker numbers; serde keeps
/// those that do not follow the order of first appearance.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, &worker) in self.worker_of.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}", self.name(worker))?;
        }
        Ok(())
    }
}

impl From<Placement> for PlacementFields {
    fn from(placement: Placement) -> Self {
        Self { partitions: placement.worker_of.iter().map(|worker| worker.index()).collect(), workers: placement.names }
    }
}

impl TryFrom<PlacementFields> for Placement {
    type Error = PlacementError;

    fn try_from(raw: PlacementFields) -> Result<Self, PlacementError> {
        Self::with_names(raw.workers, &raw.partitions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_workers_in_order_of_first_appearance() {
        let placement: Placement = " b , a,b,c ".parse().unwrap();
        assert_eq!(placement.workers(), 3);
        assert_eq!(placement.worker_of, [WorkerId(0), WorkerId(1), WorkerId(0), WorkerId(2)]);
        assert_eq!(placement.find("a"), Some(WorkerId(1)));
        assert_eq!(placement.find("d"), None);
        assert_eq!(placement.partitions_of(WorkerId(0)), [PartitionId(0), PartitionId(2)]);
        assert_eq!(placement.to_string(), "b,a,b,c");
        assert_eq!(placement.to_string().parse::<Placement>().unwrap(), placement);
    }

    #[test]
    fn bad_placements_say_what_to_write() {
        for bad in ["", "  ", "a,,b", "a,b c", "a,b:", "ä", "a,"] {
            let error = bad.parse::<Placement>().unwrap_err().to_string();
            assert!(error.contains("client,server,client"), "{bad:?}: {error}");
        }
        assert!("x".repeat(65).parse::<Placement>().is_err());
        assert!(matches!(Placement::from_workers(&[0, 2]), Err(PlacementError::NotDense { missing: 1, workers: 3 })));
        assert!(Placement::from_workers(&[usize::MAX]).is_err());
        assert_eq!(Placement::from_workers(&[]), Err(PlacementError::Empty));
        assert!(matches!(
            Placement::with_names(vec!["a".into(), "a".into()], &[0, 1]),
            Err(PlacementError::SameName { .. })
        ));
    }

    #[test]
    fn serde_keeps_the_numbers() {
        let placement = Placement::from_workers(&[1, 0, 1]).unwrap();
        assert_eq!(placement.to_string(), "w1,w0,w1");
        let json = serde_json::to_string(&placement).unwrap();
        assert_eq!(json, r#"{"workers":["w0","w1"],"partitions":[1,0,1]}"#);
        assert_eq!(serde_json::from_str::<Placement>(&json).unwrap(), placement);
        for bad in [r#"{"workers":["a"],"partitions":[1]}"#, r#"{"workers":["a","b"],"partitions":[0]}"#] {
            assert!(serde_json::from_str::<Placement>(bad).is_err());
        }
    }
}

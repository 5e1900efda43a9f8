//! Breaks things on purpose, reproducibly: a scenario is a line of text, and the same line breaks the same thing.
//!
//! ```text
//! server:panic@1F2          the worker panics when it comes to that action
//! server:error@1B0          it returns an error
//! server:kill@1F1           its process is killed (SIGKILL); a thread cannot be, so it panics
//! server:hang@1F1           it stops there for ever
//! client>server:delay=20@0  that link holds every message from the 1st on back for up to 20 ms (seeded)
//! client>server:stall@3     that link stops carrying anything at the 4th message
//! client>server:corrupt@3   the 4th message has one bit flipped
//! client>server:cut@3       the link breaks off at the 4th message
//! seed=7                    of the delays and the flipped bit
//! ```
//!
//! Several are joined by `;`. Delays must change nothing but the time; everything else must end the run with the
//! cause named.

use super::Outgoing;
use crate::engine::Stream;
use crate::failure::{Fate, Fault, POLL};
use crate::mailbox::Message;
use distgpipe_core::schedule::Action;
use distgpipe_core::wire::Kind;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What a worker does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerFault {
    /// Panics.
    Panic,
    /// Returns an error.
    Error,
    /// Is killed.
    Kill,
    /// Stops for ever.
    Hang,
}

/// What a link does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFault {
    /// Holds every message from then on back for up to so many milliseconds.
    Delay(u64),
    /// Carries nothing from then on.
    Stall,
    /// Flips a bit of that message.
    Corrupt,
    /// Breaks off.
    Cut,
}

/// One thing that goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// At an action of a worker.
    Worker {
        /// Its name.
        worker: String,
        /// What it does.
        fault: WorkerFault,
        /// When it comes to this.
        at: Action,
    },
    /// At a message of a link.
    Link {
        /// The sending worker.
        from: String,
        /// The receiving worker.
        to: String,
        /// What it does.
        fault: LinkFault,
        /// At the message with this number, from 0.
        at: u64,
    },
}

/// Everything that goes wrong in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scenario {
    /// What happens.
    pub mishaps: Vec<Mishap>,
    /// Of delays and flipped bits.
    pub seed: u64,
}

/// A scenario's text is wrong.
#[derive(Debug, thiserror::Error)]
#[error("fault scenario `{got}`: expected `WORKER:panic|error|kill|hang@ACTION`, `FROM>TO:delay=MS|stall|corrupt|cut@MESSAGE` or `seed=N`, joined by `;`")]
pub struct ScenarioError {
    got: String,
}

impl Scenario {
    /// What this worker does wrong at this action.
    pub fn of_worker(&self, name: &str, action: Action) -> Option<WorkerFault> {
        self.mishaps.iter().find_map(|m| match m {
            Mishap::Worker { worker, fault, at } if worker == name && *at == action => Some(*fault),
            _ => None,
        })
    }

    /// The sending end of a link, with its faults if it has any.
    pub fn wrap(&self, from: &str, to: &str, fate: &Fate, link: Box<dyn Outgoing>) -> Box<dyn Outgoing> {
        let of_link = |m: &Mishap| match m {
            Mishap::Link { from: f, to: t, fault, at } if f == from && t == to => Some((*at, *fault)),
            _ => None,
        };
        let faults: Vec<(u64, LinkFault)> = self.mishaps.iter().filter_map(of_link).collect();
        if faults.is_empty() {
            return link;
        }
        Box::new(Faulty { link, faults, sent: 0, stream: Stream::new(self.seed), fate: fate.clone() })
    }
}

/// A link that goes wrong.
struct Faulty {
    link: Box<dyn Outgoing>,
    faults: Vec<(u64, LinkFault)>,
    sent: u64,
    stream: Stream,
    fate: Fate,
}

impl Outgoing for Faulty {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        // Signs of life come when they come: counting them would make a scenario depend on the time.
        let number = self.sent;
        let counted = message.tag.kind != Kind::Ping;
        self.sent += u64::from(counted);
        let draw = self.stream.at(number).seed();
        for (at, fault) in self.faults.clone() {
            match fault {
                LinkFault::Delay(ms) if number >= at && counted => {
                    std::thread::sleep(Duration::from_millis(draw % (ms + 1)))
                }
                LinkFault::Stall if number >= at => loop {
                    self.fate.check()?;
                    std::thread::sleep(POLL);
                },
                LinkFault::Corrupt if number == at && counted => return self.link.send_damaged(message, draw),
                LinkFault::Cut if number == at && counted => self.link.cut(),
                _ => {}
            }
        }
        self.link.send(message)
    }

    fn send_damaged(&mut self, message: Message, seed: u64) -> Result<(), Fault> {
        self.link.send_damaged(message, seed)
    }

    fn cut(&mut self) {
        self.link.cut();
    }
}

impl FromStr for Scenario {
    type Err = ScenarioError;

    fn from_str(text: &str) -> Result<Self, ScenarioError> {
        let mut scenario = Scenario::default();
        for part in text.split(';').map(str::trim).filter(|p| !p.is_empty()) {
            let wrong = || ScenarioError { got: part.to_owned() };
            if let Some(seed) = part.strip_prefix("seed=") {
                scenario.seed = seed.parse().map_err(|_| wrong())?;
                continue;
            }
            let (who, what) = part.split_once(':').ok_or_else(wrong)?;
            let (fault, at) = what.split_once('@').ok_or_else(wrong)?;
            scenario.mishaps.push(match who.split_once('>') {
                Some((from, to)) => Mishap::Link {
                    from: from.to_owned(),
                    to: to.to_owned(),
                    fault: link_fault(fault).ok_or_else(wrong)?,
                    at: at.parse().map_err(|_| wrong())?,
                },
                None => Mishap::Worker {
                    worker: who.to_owned(),
                    fault: worker_fault(fault).ok_or_else(wrong)?,
                    at: at.parse().map_err(|_| wrong())?,
                },
            });
        }
        Ok(scenario)
    }
}

fn worker_fault(text: &str) -> Option<WorkerFault> {
    Some(match text {
        "panic" => WorkerFault::Panic,
        "error" => WorkerFault::Error,
        "kill" => WorkerFault::Kill,
        "hang" => WorkerFault::Hang,
        _ => return None,
    })
}

fn link_fault(text: &str) -> Option<LinkFault> {
    Some(match text {
        "stall" => LinkFault::Stall,
        "corrupt" => LinkFault::Corrupt,
        "cut" => LinkFault::Cut,
        _ => LinkFault::Delay(text.strip_prefix("delay=")?.parse().ok()?),
    })
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed={}", self.seed)?;
        for mishap in &self.mishaps {
            match mishap {
                Mishap::Worker { worker, fault, at } => {
                    write!(f, ";{worker}:{}@{at}", format!("{fault:?}").to_lowercase())?;
                }
                Mishap::Link { from, to, fault: LinkFault::Delay(ms), at } => {
                    write!(f, ";{from}>{to}:delay={ms}@{at}")?;
                }
                Mishap::Link { from, to, fault, at } => {
                    write!(f, ";{from}>{to}:{}@{at}", format!("{fault:?}").to_lowercase())?;
                }
            }
        }
        Ok(())
    }
}

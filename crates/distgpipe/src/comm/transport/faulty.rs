//! Injects faults, reproducibly, for tests. A scenario is a line of text, and the same line causes the same faults:
//!
//! ```text
//! server:panic@1F2          the worker panics when it comes to that action
//! server:error@1B0          it returns an error there
//! server:kill@1F1           its process is killed there (SIGKILL); a worker that is a thread panics instead
//! server:hang@1F1           it hangs there forever
//! client>server:delay=20@0  that link delays every message from the 1st on by up to 20 ms (seeded)
//! client>server:stall@3     that link carries nothing from the 4th message on
//! client>server:corrupt@3   the 4th message has one bit flipped (seeded)
//! client>server:cut@3       the link breaks before the 4th message
//! server>client:kill@3      the process of the sender is killed before the 4th message
//! seed=7                    the seed of the delays and of the flipped bit
//! ```
//!
//! Faults are joined by `;`. Delays must change nothing but the time; every other fault must end the run with the cause
//! named.
//!
//! The transports have no code for this. A link within the process is wrapped by [`Scenario::wrap`]: a cut drops it, and
//! there are no bytes to damage. A link between processes is wrapped by [`Scenario::wrap_remote`], and its [`LinkControl`] ends
//! its connection or damages a frame. A connection that is cut is restored, unless the run's time-outs rule that out.

use super::{LinkControl, Outgoing, Wrap};
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::message::Message;
use crate::engine::{self, Stream};
use crate::failure::Fault;
use distgpipe_core::schedule::Action;
use distgpipe_core::wire::Kind;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// A fault of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerFault {
    /// The worker panics at the action.
    Panic,
    /// The action returns an error.
    Error,
    /// The worker's process is killed.
    Kill,
    /// The worker hangs forever.
    Hang,
}

/// A fault of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFault {
    /// Delays every message from then on by up to this many milliseconds.
    Delay(u64),
    /// Carries no message from then on.
    Stall,
    /// Flips one bit of that message.
    Corrupt,
    /// Breaks before that message.
    Cut,
    /// The process of the sender is killed before that message.
    Kill,
}

/// One fault of a scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// A fault of a worker at an action.
    Worker {
        /// The name of the worker.
        worker: String,
        /// What happens to it.
        fault: WorkerFault,
        /// The action at which it happens.
        at: Action,
    },
    /// A fault of a link at a message.
    Link {
        /// The name of the sending worker.
        from: String,
        /// The name of the receiving worker.
        to: String,
        /// What happens to the link.
        fault: LinkFault,
        /// The message at which it happens, counted from 0. Heartbeats are not counted.
        at: u64,
    },
}

/// The faults to inject into a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scenario {
    /// The faults, in any order.
    pub faults: Vec<InjectedFault>,
    /// The seed of delays and flipped bits.
    pub seed: u64,
}

/// The text is not a fault scenario.
#[derive(Debug, thiserror::Error)]
#[error("fault scenario `{got}`: expected `WORKER:panic|error|kill|hang@ACTION`, `FROM>TO:delay=MS|stall|corrupt|cut@MESSAGE` or `seed=N`, joined by `;`")]
pub struct ScenarioError {
    got: String,
}

impl Scenario {
    /// The fault of a worker at an action.
    pub fn of_worker(&self, name: &str, action: Action) -> Option<WorkerFault> {
        self.faults.iter().find_map(|fault| match fault {
            InjectedFault::Worker { worker, fault, at } if worker == name && *at == action => Some(*fault),
            _ => None,
        })
    }

    /// Wraps the sending end of a link within this process, if the scenario has faults for it.
    pub fn wrap(&self, from: &str, to: &str, abort: &AbortFlag, link: Box<dyn Outgoing>) -> Box<dyn Outgoing> {
        match self.of_link(from, to) {
            faults if faults.is_empty() => link,
            faults => self.faulty(faults, abort, link, None),
        }
    }

    /// Returns what wraps the sending end of a link between processes, if the scenario has faults for it.
    pub fn wrap_remote(&self, from: &str, to: &str, abort: &AbortFlag) -> Wrap {
        let faults = self.of_link(from, to);
        if faults.is_empty() {
            return Box::new(|link, _| link);
        }
        let (scenario, abort) = (self.clone(), abort.clone());
        Box::new(move |link, control| scenario.faulty(faults, &abort, link, Some(control)))
    }

    /// The faults of a link, with the messages at which they happen.
    fn of_link(&self, from: &str, to: &str) -> Vec<(u64, LinkFault)> {
        let of_link = |fault: &InjectedFault| match fault {
            InjectedFault::Link { from: f, to: t, fault, at } if f == from && t == to => Some((*at, *fault)),
            _ => None,
        };
        self.faults.iter().filter_map(of_link).collect()
    }

    fn faulty(
        &self,
        faults: Vec<(u64, LinkFault)>,
        abort: &AbortFlag,
        link: Box<dyn Outgoing>,
        control: Option<LinkControl>,
    ) -> Box<dyn Outgoing> {
        let (stream, abort) = (Stream::new(self.seed), abort.clone());
        Box::new(Faulty { link: Some(link), control, faults, sent: 0, stream, abort })
    }
}

/// A link with faults.
struct Faulty {
    /// `None` after a cut.
    link: Option<Box<dyn Outgoing>>,
    /// Acts on the socket under the link, if the link leads to another process.
    control: Option<LinkControl>,
    faults: Vec<(u64, LinkFault)>,
    sent: u64,
    stream: Stream,
    abort: AbortFlag,
}

impl Outgoing for Faulty {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        // Heartbeats depend on the time, so counting them would make a scenario irreproducible.
        let number = self.sent;
        let counted = message.tag.kind != Kind::Ping;
        self.sent += u64::from(counted);
        let draw = self.stream.at(number).seed();
        for (at, fault) in self.faults.clone() {
            match fault {
                LinkFault::Delay(ms) if number >= at && counted => {
                    let (start, delay) = (Instant::now(), Duration::from_millis(draw % ms.saturating_add(1)));
                    while start.elapsed() < delay {
                        self.abort.check()?;
                        std::thread::sleep(delay.saturating_sub(start.elapsed()).min(POLL));
                    }
                }
                LinkFault::Stall if number >= at => loop {
                    self.abort.check()?;
                    std::thread::sleep(POLL);
                },
                LinkFault::Corrupt if number == at && counted => self.damage(&message, draw)?,
                LinkFault::Cut if number == at && counted => self.cut(),
                LinkFault::Kill if number == at && counted => engine::kill_worker_process(),
                _ => {}
            }
        }
        self.link.as_mut().ok_or(Fault::Lost)?.send(message)
    }
}

impl Faulty {
    /// Has one bit of the message flipped, which `draw` selects. Within a process there are no bytes to damage, so this
    /// reports the damage as a receiver would.
    fn damage(&self, message: &Message, draw: u64) -> Result<(), Fault> {
        match &self.control {
            Some(control) => (control.damage_next)(draw),
            None => return Err(Fault::Injected(format!("{} arrived with bit {} flipped", message.tag, draw % 64))),
        }
        Ok(())
    }

    /// Breaks the link. The connection over a closed socket notices by itself, as it would with a pulled cable.
    fn cut(&mut self) {
        match &self.control {
            Some(control) => (control.cut)(),
            None => self.link = None,
        }
    }
}

impl FromStr for Scenario {
    type Err = ScenarioError;

    fn from_str(text: &str) -> Result<Self, ScenarioError> {
        let mut scenario = Scenario::default();
        for part in text.split(';').map(str::trim).filter(|p| !p.is_empty()) {
            let invalid = || ScenarioError { got: part.to_owned() };
            if let Some(seed) = part.strip_prefix("seed=") {
                scenario.seed = seed.parse().map_err(|_| invalid())?;
                continue;
            }
            let (place, rest) = part.split_once(':').ok_or_else(invalid)?;
            let (fault, at) = rest.split_once('@').ok_or_else(invalid)?;
            scenario.faults.push(match place.split_once('>') {
                Some((from, to)) => InjectedFault::Link {
                    from: from.to_owned(),
                    to: to.to_owned(),
                    fault: link_fault(fault).ok_or_else(invalid)?,
                    at: at.parse().map_err(|_| invalid())?,
                },
                None => InjectedFault::Worker {
                    worker: place.to_owned(),
                    fault: worker_fault(fault).ok_or_else(invalid)?,
                    at: at.parse().map_err(|_| invalid())?,
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
        "kill" => LinkFault::Kill,
        _ => LinkFault::Delay(text.strip_prefix("delay=")?.parse().ok()?),
    })
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed={}", self.seed)?;
        for fault in &self.faults {
            match fault {
                InjectedFault::Worker { worker, fault, at } => {
                    write!(f, ";{worker}:{}@{at}", format!("{fault:?}").to_lowercase())?;
                }
                InjectedFault::Link { from, to, fault: LinkFault::Delay(ms), at } => {
                    write!(f, ";{from}>{to}:delay={ms}@{at}")?;
                }
                InjectedFault::Link { from, to, fault, at } => {
                    write!(f, ";{from}>{to}:{}@{at}", format!("{fault:?}").to_lowercase())?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_prints_as_it_is_parsed() {
        let text = "seed=7;server:panic@1F2;server/1:error@1B0;server:kill@1F1;a:hang@0F0;client>server:delay=20@0;\
                    client>server:stall@3;client>server:corrupt@4;server>client:cut@5;server>client:kill@6";
        let scenario: Scenario = text.parse().unwrap();
        assert_eq!(scenario.faults.len(), 9);
        assert_eq!(scenario.to_string(), text);
        for text in ["nonsense", "server:panic", "server:cut@1F0", "a>b:panic@1", "a>b:cut@1F0", "seed=x"] {
            let error = text.parse::<Scenario>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }
}

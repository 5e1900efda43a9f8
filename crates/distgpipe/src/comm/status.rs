//! What each worker is doing right now, so that whoever stands still can be told from those who wait for him.

use crate::roster::Roster;
use distgpipe_core::schedule::{Action, Op, Pass, Plan};
use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;

/// What a worker is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Doing {
    /// Waiting for a command.
    #[default]
    Idle,
    /// Building, stepping the optimizer, or collecting state.
    Busy,
    /// Running an action.
    Running(Action),
    /// Waiting for what this action receives.
    Waiting(Action),
    /// Waiting for gradients of the replica before; [`State::done`] counts those that came in this step.
    Sharing,
}

/// A worker's state at a moment: what it does, and how much it has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Counts everything begun.
    pub progress: u64,
    /// How many actions of the current step are done, or how many shares of gradients have come.
    pub done: usize,
    /// What it does.
    pub doing: Doing,
}

/// A worker's state, written by the worker and read by the watchdog.
#[derive(Debug, Default)]
pub struct Status(Mutex<State>);

impl Status {
    /// The worker turns to something else.
    pub fn begin(&self, doing: Doing, done: usize) {
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        *state = State { progress: state.progress + 1, done, doing };
    }

    /// As of now.
    pub fn read(&self) -> State {
        *self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes over a state that came over a link.
    pub fn set(&self, state: State) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = state;
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.progress, self.done)?;
        match self.doing {
            Doing::Idle => f.write_str("idle"),
            Doing::Busy => f.write_str("busy"),
            Doing::Running(action) => write!(f, "run {action}"),
            Doing::Waiting(action) => write!(f, "wait {action}"),
            Doing::Sharing => f.write_str("share"),
        }
    }
}

impl FromStr for State {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split_ascii_whitespace();
        let progress = words.next().and_then(|w| w.parse().ok()).ok_or(())?;
        let done = words.next().and_then(|w| w.parse().ok()).ok_or(())?;
        let kind = words.next().ok_or(())?;
        let mut action = || words.next().and_then(|w| w.parse().ok()).ok_or(());
        let doing = match kind {
            "idle" => Doing::Idle,
            "busy" => Doing::Busy,
            "run" => Doing::Running(action()?),
            "wait" => Doing::Waiting(action()?),
            "share" => Doing::Sharing,
            _ => return Err(()),
        };
        Ok(State { progress, done, doing })
    }
}

/// Who is to blame when nothing has moved for too long: the name of a worker or link, and what it should have done. The
/// plan is the one that each replica follows at the moment.
///
/// A worker that computes, or that waits for something nobody has to send, is at fault itself. If all wait, then
/// some message was sent and has not arrived, because a checked plan has no deadlock: its link is at fault.
pub fn blame(roster: &Roster, plan: &Plan, states: &[State]) -> (String, String) {
    let members = || roster.members().zip(states);
    for (member, state) in members() {
        match state.doing {
            Doing::Running(action) => return (roster.name(member), action.to_string()),
            Doing::Busy => {
                return (roster.name(member), "preparing, updating or collecting its parameters".to_owned());
            }
            Doing::Idle | Doing::Waiting(_) | Doing::Sharing => {}
        }
    }
    for (member, state) in members() {
        let Doing::Waiting(action) = state.doing else { continue };
        let name = roster.name(member);
        let Op::Receive { pass, from } = action.op else {
            return ("the driver".to_owned(), format!("handing out the input that {name} waits for in {action}"));
        };
        // What a worker says of itself comes over a link and may be anything.
        if from.index() >= plan.partitions() {
            continue;
        }
        let role = plan.placement().worker_of(from);
        let sender = roster.member(roster.replica_of(member), role);
        let state = states.get(sender.index()).copied().unwrap_or_default();
        let sent = plan.actions(role).iter().take(state.done).any(|a| {
            a.partition == from
                && a.micro_batch == action.micro_batch
                && matches!(a.op, Op::Send { pass: p, to } if p == pass && to == action.partition)
        });
        // A sender that is idle or shares gradients has run all its actions, so it has sent everything.
        if sent || matches!(state.doing, Doing::Idle | Doing::Sharing) {
            let what = if pass == Pass::Forward { "activation" } else { "gradient" };
            return (format!("the link {} → {name}", roster.name(sender)), format!("carrying the {what} of {action}"));
        }
    }
    // Round the ring everybody sends before he waits, so whoever has got least waits for what is under way.
    let sharing = members().filter(|(_, state)| state.doing == Doing::Sharing);
    if let Some((member, state)) = sharing.min_by_key(|(_, state)| state.done) {
        let before = roster.name(roster.previous(member));
        let what = format!("carrying share {} of the gradients", state.done + 1);
        return (format!("the link {before} → {}", roster.name(member)), what);
    }
    ("the run".to_owned(), "waiting, with every worker waiting for another".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::schedule::{Request, Schedule};

    /// Three replicas of client, server, client, of whom each member is given by what it does.
    fn blamed(states: [&str; 6]) -> (String, String) {
        let request = Request::new("client,server,client".parse().unwrap(), 2);
        let roster = Roster::new(Schedule::OneFOneB.plan(&request).unwrap(), 3);
        let states = states.map(|text| format!("1 {text}").parse().unwrap());
        blame(&roster, roster.plan(), &states)
    }

    fn pair(who: &str, what: &str) -> (String, String) {
        (who.to_owned(), what.to_owned())
    }

    #[test]
    fn whoever_does_not_wait_is_to_blame_in_any_replica() {
        let got = blamed(["0 share", "0 share", "3 wait 0B0<1", "2 run 1B0", "0 share", "0 idle"]);
        assert_eq!(got, pair("server/1", "1B0"));
        let got = blamed(["1 share", "1 share", "1 share", "1 busy", "0 share", "0 share"]);
        assert_eq!(got.0, "server/1");
    }

    /// The server has run its actions and waits in the ring, so the gradient is under way.
    #[test]
    fn a_message_within_a_replica_is_looked_for_there() {
        let got = blamed(["1 share", "1 share", "3 wait 0B0<1", "0 share", "1 share", "1 share"]);
        assert_eq!(got, pair("the link server/1 → client/1", "carrying the gradient of 0B0<1"));
        let got = blamed(["0 idle", "0 idle", "0 wait 0F0", "0 wait 1F0<0", "0 idle", "0 idle"]);
        assert_eq!(got, pair("the driver", "handing out the input that client/1 waits for in 0F0"));
    }

    #[test]
    fn of_a_ring_the_link_to_whoever_got_least_is_to_blame() {
        let got = blamed(["3 share", "2 share", "2 share", "3 share", "3 share", "1 share"]);
        assert_eq!(got, pair("the link server/1 → server/2", "carrying share 2 of the gradients"));
        let got = blamed(["0 share", "2 share", "2 share", "2 share", "1 share", "1 share"]);
        assert_eq!(got, pair("the link client/2 → client/0", "carrying share 1 of the gradients"));
    }
}

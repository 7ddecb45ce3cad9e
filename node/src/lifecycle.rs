//! The life of a sandbox: one enum, and the one function that moves it.
//!
//! ```text
//!             born                end               cleaned
//!  creating ────────▶ running ──────────▶ killing ──────────▶ gone
//!     │ │ │              │ pause             ▲
//!     │ │ │ end          ▼           end     │
//!     │ │ └──────────────┼───────────────────┤
//!     │ │             pausing ───────────────┤
//!     │ │                │ asleep    end     │
//!     │ │             paused  ───────────────┘
//!     │ │ replaced       │ replaced (of pausing too)
//!     │ └────────────▶ replaced
//!     │  create failed
//!     └────────────────▶ failed
//! ```
//!
//! * `creating`: a process may exist; no request passes.
//! * `running`: the agent has acknowledged its identity and the record is stored.
//! * `killing`: no request passes, open streams are cut, the process is being ended
//!   and everything on the host is being removed. The first cause is kept.
//! * `pausing`: no request passes; it is being written to disk.
//! * `paused`: on disk, without a process.
//! * `replaced`: the table has another incarnation of the same sandbox: one that resumes,
//!   one that runs on after a pause that failed, one that is paused again.
//! * `gone`, `failed`: nothing is left on the host; the sandbox is not in the table.
//!
//! This file decides only which step is allowed. [`crate::sandboxes`] does the work.

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Creating,
    Running,
    Pausing,
    Paused,
    Replaced,
    Killing(EndCause),
    Gone(EndCause),
    Failed,
}

/// Why a sandbox ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// Somebody asked.
    Request,
    /// Its time was over.
    Timeout,
    /// Its process ended by itself.
    Died,
    /// The node was told to stop all.
    NodeStop,
    /// Whoever asked for it left before it could learn its id.
    Abandoned,
}

impl EndCause {
    /// Label in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Timeout => "timeout",
            Self::Died => "died",
            Self::NodeStop => "node_stop",
            Self::Abandoned => "abandoned",
        }
    }
}

/// What happens to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The process runs, the agent knows who it is, the record is stored.
    Born,
    /// It shall be put on disk.
    Pause,
    /// It is on disk and has no process.
    Asleep,
    /// Another incarnation takes its place.
    Replaced,
    /// It shall end.
    End(EndCause),
    /// Nothing of it is left on the host.
    Cleaned,
    /// It could not be made, and nothing of it is left on the host.
    CreateFailed,
}

/// The event makes no sense in this phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("event {event:?} in phase {phase:?}")]
pub struct Refused {
    phase: Phase,
    event: Event,
}

/// The next phase.
///
/// # Errors
/// [`Refused`] if the event cannot happen in this phase.
pub fn step(phase: Phase, event: Event) -> Result<Phase, Refused> {
    match (phase, event) {
        (Phase::Creating, Event::Born) => Ok(Phase::Running),
        (Phase::Running, Event::Pause) => Ok(Phase::Pausing),
        (Phase::Pausing, Event::Asleep) => Ok(Phase::Paused),
        (Phase::Creating | Phase::Pausing | Phase::Paused, Event::Replaced) => Ok(Phase::Replaced),
        (Phase::Creating | Phase::Running | Phase::Pausing | Phase::Paused, Event::End(cause)) => {
            Ok(Phase::Killing(cause))
        }
        (Phase::Creating, Event::CreateFailed) => Ok(Phase::Failed),
        (Phase::Killing(first), Event::End(_)) => Ok(Phase::Killing(first)),
        (Phase::Killing(cause), Event::Cleaned | Event::CreateFailed) => Ok(Phase::Gone(cause)),
        (Phase::Killing(_), Event::Born | Event::Pause | Event::Asleep | Event::Replaced)
        | (Phase::Creating, Event::Cleaned | Event::Pause | Event::Asleep)
        | (
            Phase::Running,
            Event::Born | Event::CreateFailed | Event::Cleaned | Event::Asleep | Event::Replaced,
        )
        | (Phase::Pausing, Event::Born | Event::CreateFailed | Event::Cleaned | Event::Pause)
        | (
            Phase::Paused,
            Event::Born | Event::CreateFailed | Event::Cleaned | Event::Pause | Event::Asleep,
        )
        | (Phase::Gone(_) | Phase::Failed | Phase::Replaced, _) => Err(Refused { phase, event }),
    }
}

impl Phase {
    /// Nothing of the sandbox is left, or another incarnation has all of it.
    pub fn is_over(self) -> bool {
        match self {
            Self::Gone(_) | Self::Failed | Self::Replaced => true,
            Self::Creating | Self::Running | Self::Pausing | Self::Paused | Self::Killing(_) => {
                false
            }
        }
    }

    /// The sandbox runs or is paused, or is on its way from one to the other.
    pub fn lasts(self) -> bool {
        match self {
            Self::Running | Self::Pausing | Self::Paused => true,
            Self::Creating | Self::Replaced | Self::Killing(_) | Self::Gone(_) | Self::Failed => {
                false
            }
        }
    }

    /// Something is being done to the sandbox that ends by itself.
    pub fn is_passing(self) -> bool {
        match self {
            Self::Creating | Self::Pausing => true,
            Self::Running
            | Self::Paused
            | Self::Replaced
            | Self::Killing(_)
            | Self::Gone(_)
            | Self::Failed => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT: EndCause = EndCause::Timeout;
    const REQUEST: EndCause = EndCause::Request;

    #[test]
    fn whole_life_by_request_passes_all_phases() {
        let phase = step(Phase::Creating, Event::Born).unwrap();
        let phase = step(phase, Event::End(REQUEST)).unwrap();
        let phase = step(phase, Event::Cleaned).unwrap();
        assert_eq!(phase, Phase::Gone(REQUEST));
    }

    #[test]
    fn kill_during_create_keeps_first_cause() {
        let phase = step(Phase::Creating, Event::End(REQUEST)).unwrap();
        let phase = step(phase, Event::End(TIMEOUT)).unwrap();
        assert_eq!(step(phase, Event::Born).ok(), None);
        assert_eq!(step(phase, Event::CreateFailed), Ok(Phase::Gone(REQUEST)));
    }

    #[test]
    fn paused_sandbox_never_runs_again_itself() {
        let phase = step(Phase::Running, Event::Pause).unwrap();
        assert!(step(phase, Event::Pause).is_err());
        let phase = step(phase, Event::Asleep).unwrap();
        assert!(step(phase, Event::Born).is_err());
        assert_eq!(step(phase, Event::End(REQUEST)), Ok(Phase::Killing(REQUEST)));
        let phase = step(phase, Event::Replaced).unwrap();
        assert!(phase.is_over() && step(phase, Event::End(REQUEST)).is_err());
    }

    #[test]
    fn birth_of_the_dead_is_refused() {
        assert!(step(Phase::Gone(TIMEOUT), Event::Born).is_err());
        assert!(step(Phase::Failed, Event::End(TIMEOUT)).is_err());
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            Just(Event::Born),
            Just(Event::End(REQUEST)),
            Just(Event::End(TIMEOUT)),
            Just(Event::Cleaned),
            Just(Event::CreateFailed),
            Just(Event::Pause),
            Just(Event::Asleep),
            Just(Event::Replaced),
        ];
        proptest::collection::vec(event, 0..12)
    }

    proptest! {
        #[test]
        fn no_event_revives(events in events()) {
            let mut phase = Phase::Creating;
            let mut was_ending = false;
            for event in events {
                if let Ok(next) = step(phase, event) {
                    prop_assert!(!phase.is_over());
                    phase = next;
                }
                was_ending |= !matches!(
                    phase,
                    Phase::Creating | Phase::Running | Phase::Pausing | Phase::Paused
                );
                prop_assert!(!was_ending || phase != Phase::Running);
            }
        }
    }
}

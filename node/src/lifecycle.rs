//! The life of a sandbox: one enum, and the one function that moves it.
//!
//! ```text
//!             born                end               cleaned
//!  creating ────────▶ running ──────────▶ killing ──────────▶ gone
//!     │  │                end                ▲
//!     │  └───────────────────────────────────┘
//!     │  create failed
//!     └────────────────▶ failed
//! ```
//!
//! * `creating`: a process may exist; no request passes.
//! * `running`: the agent has acknowledged its identity and the record is stored.
//! * `killing`: no request passes, open streams are cut, the process is being ended
//!   and everything on the host is being removed. The first cause is kept.
//! * `gone`, `failed`: nothing is left on the host; the sandbox is not in the table.
//!
//! This file decides only which step is allowed. [`crate::sandboxes`] does the work.

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Creating,
    Running,
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
        (Phase::Creating | Phase::Running, Event::End(cause)) => Ok(Phase::Killing(cause)),
        (Phase::Creating, Event::CreateFailed) => Ok(Phase::Failed),
        (Phase::Killing(first), Event::End(_)) => Ok(Phase::Killing(first)),
        (Phase::Killing(cause), Event::Cleaned | Event::CreateFailed) => Ok(Phase::Gone(cause)),
        (Phase::Killing(_), Event::Born)
        | (Phase::Creating | Phase::Running, Event::Cleaned)
        | (Phase::Running, Event::Born | Event::CreateFailed)
        | (Phase::Gone(_) | Phase::Failed, _) => Err(Refused { phase, event }),
    }
}

impl Phase {
    /// Nothing of the sandbox is left.
    pub fn is_over(self) -> bool {
        match self {
            Self::Gone(_) | Self::Failed => true,
            Self::Creating | Self::Running | Self::Killing(_) => false,
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
                was_ending |= !matches!(phase, Phase::Creating | Phase::Running);
                prop_assert!(!was_ending || phase != Phase::Running);
            }
        }
    }
}

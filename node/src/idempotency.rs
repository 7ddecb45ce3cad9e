//! A create that is asked again with the same key gives the same answer.
//!
//! Keys belong to an API key. While the first create is under way, others with the
//! same key wait for it; if it fails, the next one tries. Finished ones are stored
//! with the sandbox, in the same batch, and kept for a while.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::{SignedDuration, Timestamp};
use tokio::sync::watch;

use crate::store::{Change, IdempotencyRecord, SandboxRecord};

/// Clients repeat within seconds; a restarted job within minutes.
const KEEP_FOR: SignedDuration = SignedDuration::from_mins(15);
/// Bounds memory and the store: about a kilobyte each.
const ENTRIES_MAX: usize = 16_384;
/// As the specification has it.
const KEY_BYTES_MAX: usize = 255;

/// All keys of the node; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Idempotency(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    entries: HashMap<String, Entry>,
    /// Finished entries, oldest first.
    finished: VecDeque<(Timestamp, String)>,
    /// To be removed from the store with the next batch.
    expired: Vec<String>,
}

#[derive(Debug)]
enum Entry {
    UnderWay { digest: String, end: watch::Receiver<()> },
    Finished { digest: String, sandbox: Arc<SandboxRecord> },
}

/// What to do with a request.
#[derive(Debug)]
pub enum Begin {
    /// Do it.
    New(Ticket),
    /// It was done; this was made.
    Replay(Arc<SandboxRecord>),
    /// The key was used for another request.
    Mismatch,
    /// It is being done: wait for the end, then begin again.
    UnderWay(watch::Receiver<()>),
}

impl Idempotency {
    /// Takes over what was stored.
    pub fn load(records: Vec<IdempotencyRecord>) -> Self {
        let mut state = State::default();
        let mut records = records;
        records.sort_by_key(|record| record.expires_at);
        for record in records {
            state.finished.push_back((record.expires_at, record.key.clone()));
            let entry = Entry::Finished {
                digest: record.request_digest,
                sandbox: Arc::from(record.sandbox),
            };
            state.entries.insert(record.key, entry);
        }
        Self(Arc::new(Mutex::new(state)))
    }

    /// Whether a key has the right form.
    pub fn is_valid(key: &str) -> bool {
        (1..=KEY_BYTES_MAX).contains(&key.len())
            && key
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    }

    /// Looks a key up. `digest` stands for the request.
    pub fn begin(&self, key_id: &str, key: &str, digest: String) -> Begin {
        let name = format!("{key_id}/{key}");
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.expire(Timestamp::now());
        match state.entries.get(&name) {
            Some(Entry::Finished { digest: known, sandbox }) if *known == digest => {
                Begin::Replay(Arc::clone(sandbox))
            }
            Some(Entry::UnderWay { digest: known, end }) if *known == digest => {
                Begin::UnderWay(end.clone())
            }
            Some(Entry::Finished { .. } | Entry::UnderWay { .. }) => Begin::Mismatch,
            None => {
                let (ended, end) = watch::channel(());
                state.entries.insert(name.clone(), Entry::UnderWay { digest: digest.clone(), end });
                Begin::New(Ticket {
                    all: self.clone(),
                    name,
                    digest,
                    expires_at: Timestamp::now() + KEEP_FOR,
                    _ended: ended,
                })
            }
        }
    }
}

impl State {
    fn expire(&mut self, now: Timestamp) {
        while self.finished.front().is_some_and(|(at, _)| *at <= now)
            || self.finished.len() > ENTRIES_MAX
        {
            if let Some((_, name)) = self.finished.pop_front() {
                self.entries.remove(&name);
                self.expired.push(name);
            }
        }
    }
}

/// The right to do a request. Dropped without [`Ticket::complete`], the next one with
/// the same key may try.
#[derive(Debug)]
pub struct Ticket {
    all: Idempotency,
    name: String,
    digest: String,
    expires_at: Timestamp,
    /// Dropped with the ticket, which wakes those who wait.
    _ended: watch::Sender<()>,
}

impl Ticket {
    /// What goes into the store with the sandbox.
    pub fn changes(&self, sandbox: &SandboxRecord) -> Vec<Change> {
        let mut state = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changes: Vec<Change> =
            state.expired.drain(..).map(Change::RemoveIdempotency).collect();
        changes.push(Change::PutIdempotency(Box::new(IdempotencyRecord {
            key: self.name.clone(),
            request_digest: self.digest.clone(),
            expires_at: self.expires_at,
            sandbox: Box::new(without_environment(sandbox.clone())),
        })));
        changes
    }

    /// The sandbox is there and stored.
    pub fn complete(self, sandbox: SandboxRecord) {
        let mut state = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = Entry::Finished {
            digest: self.digest.clone(),
            sandbox: Arc::new(without_environment(sandbox)),
        };
        state.entries.insert(self.name.clone(), entry);
        state.finished.push_back((self.expires_at, self.name.clone()));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(state.entries.get(&self.name), Some(Entry::UnderWay { .. })) {
            state.entries.remove(&self.name);
        }
    }
}

fn without_environment(mut sandbox: SandboxRecord) -> SandboxRecord {
    sandbox.environment.clear();
    sandbox
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixtures::sandbox_record;

    fn new(all: &Idempotency, digest: &str) -> Ticket {
        match all.begin("k", "a", digest.to_owned()) {
            Begin::New(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn finished_request_is_replayed() {
        let all = Idempotency::default();
        new(&all, "d").complete(sandbox_record("x"));
        match all.begin("k", "a", "d".to_owned()) {
            Begin::Replay(sandbox) => assert_eq!(sandbox.id.as_str(), "x"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn other_request_with_same_key_is_a_mismatch() {
        let all = Idempotency::default();
        new(&all, "d").complete(sandbox_record("x"));
        assert!(matches!(all.begin("k", "a", "e".to_owned()), Begin::Mismatch));
        assert!(matches!(all.begin("other", "a", "e".to_owned()), Begin::New(_)));
    }

    #[tokio::test]
    async fn failed_request_lets_the_next_one_try() {
        let all = Idempotency::default();
        let ticket = new(&all, "d");
        let Begin::UnderWay(mut end) = all.begin("k", "a", "d".to_owned()) else { panic!() };
        drop(ticket);
        assert!(end.changed().await.is_err());
        new(&all, "d");
    }

    #[test]
    fn stored_record_survives_a_restart_until_it_expires() {
        let all = Idempotency::default();
        let ticket = new(&all, "d");
        let changes = ticket.changes(&sandbox_record("x"));
        let Some(Change::PutIdempotency(record)) = changes.into_iter().next() else { panic!() };
        let again = Idempotency::load(vec![(*record).clone()]);
        assert!(matches!(again.begin("k", "a", "d".to_owned()), Begin::Replay(_)));
        let old = IdempotencyRecord { expires_at: Timestamp::UNIX_EPOCH, ..*record };
        let again = Idempotency::load(vec![old]);
        assert!(matches!(again.begin("k", "a", "d".to_owned()), Begin::New(_)));
    }

    #[test]
    fn form_of_keys_is_checked() {
        assert!(Idempotency::is_valid("0f-a"));
        assert!(!Idempotency::is_valid(""));
        assert!(!Idempotency::is_valid("A"));
        assert!(!Idempotency::is_valid(&"a".repeat(256)));
    }
}

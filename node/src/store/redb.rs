//! The store in one `redb` file, with one writer thread.
//!
//! The thread takes all batches that wait and commits them in one transaction, so
//! that many creates share one fsync. `redb` refuses everything after an I/O error;
//! the thread then opens the file anew, which falls back to the last good commit.
//! A full disk would also block removals, which give space back: a reserve file is
//! sacrificed then, and made again once there is room.

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use futures_util::future::BoxFuture;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use super::{Change, Contents, Store, StoreError};

type Table = TableDefinition<'static, &'static str, &'static [u8]>;

/// Name of the store in the state directory.
const FILE: &str = "warren.redb";

const META: TableDefinition<'static, &'static str, u64> = TableDefinition::new("meta");
const KEYS: Table = TableDefinition::new("keys");
const TEMPLATES: Table = TableDefinition::new("templates");
const SANDBOXES: Table = TableDefinition::new("sandboxes");
const IDEMPOTENCY: Table = TableDefinition::new("idempotency");

const SCHEMA_KEY: &str = "schema";
const SCHEMA_VERSION: u64 = 1;
/// Batches that share one transaction; bounds the time the first one waits.
const BATCHES_MAX: usize = 256;
/// Batches that wait; more means the disk is stuck, and creates should wait too.
const QUEUE_LENGTH: usize = 4096;
/// The records of an 8,000-sandbox node take about 8 MiB. Page cache of `redb`.
const CACHE_BYTES: usize = 16 << 20;
/// Room for some hundred removals on a full disk.
const RESERVE_BYTES: usize = 4 << 20;

struct Job {
    batch: Vec<Change>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

/// The embedded store.
#[derive(Debug)]
pub struct RedbStore {
    jobs: mpsc::SyncSender<Job>,
}

impl RedbStore {
    /// Whether there is a store in a state directory.
    pub fn exists(directory: &Path) -> bool {
        directory.join(FILE).exists()
    }

    /// Opens or makes `warren.redb` in `directory`, reads it and starts the writer.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn open(directory: &Path) -> Result<(Self, Contents), StoreError> {
        let writer = Writer::open(directory.to_owned())?;
        let contents = writer.load()?;
        let (jobs, queue) = mpsc::sync_channel(QUEUE_LENGTH);
        // Ends when the last sender is dropped; every committed batch is on disk then.
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || writer.run(&queue))
            .map_err(|error| StoreError::Write(error.to_string()))?;
        Ok((Self { jobs }, contents))
    }
}

impl Store for RedbStore {
    fn commit(&self, batch: Vec<Change>) -> BoxFuture<'_, Result<(), StoreError>> {
        let (done, reply) = oneshot::channel();
        let sent = self.jobs.try_send(Job { batch, done });
        Box::pin(async move {
            match sent {
                Ok(()) => reply.await.unwrap_or(Err(StoreError::Closed)),
                Err(mpsc::TrySendError::Full(_)) => {
                    Err(StoreError::Write("too many writes wait for the disk".to_owned()))
                }
                Err(mpsc::TrySendError::Disconnected(_)) => Err(StoreError::Closed),
            }
        })
    }
}

struct Writer {
    directory: PathBuf,
    /// `None` after a failure until the file could be opened anew.
    database: Option<Database>,
    reserve: Reserve,
}

impl Writer {
    fn open(directory: PathBuf) -> Result<Self, StoreError> {
        let reserve = Reserve::make(&directory);
        let path = directory.join(FILE);
        if !path.exists() {
            make_database(&path)?;
        }
        let database = open_database(&path)?;
        let found = initialise(&database)
            .map_err(|source| StoreError::Open { path: path.clone(), source: Box::new(source) })?;
        if found != SCHEMA_VERSION {
            return Err(StoreError::Schema { path, found, known: SCHEMA_VERSION });
        }
        Ok(Self { directory, database: Some(database), reserve })
    }

    fn load(&self) -> Result<Contents, StoreError> {
        let database = self.database.as_ref().ok_or(StoreError::Closed)?;
        Ok(Contents {
            keys: read_table(database, KEYS, "keys")?,
            templates: read_table(database, TEMPLATES, "templates")?,
            sandboxes: read_table(database, SANDBOXES, "sandboxes")?,
            idempotency: read_table(database, IDEMPOTENCY, "idempotency")?,
        })
    }

    fn run(mut self, queue: &mpsc::Receiver<Job>) {
        while let Ok(first) = queue.recv() {
            let mut jobs = vec![first];
            jobs.extend(queue.try_iter().take(BATCHES_MAX - 1));
            let outcome = self.commit(&jobs);
            if outcome.is_err() && jobs.len() > 1 {
                // One bad batch must not fail the others.
                for job in jobs {
                    let outcome = self.commit(std::slice::from_ref(&job));
                    let _ = job.done.send(outcome);
                }
            } else {
                // Here either all went well or there is one job.
                let mut outcome = Some(outcome);
                for job in jobs {
                    let _ = job.done.send(outcome.take().unwrap_or(Ok(())));
                }
            }
        }
    }

    fn commit(&mut self, jobs: &[Job]) -> Result<(), StoreError> {
        let failure = match self.try_commit(jobs) {
            Ok(()) => {
                self.reserve.restore();
                return Ok(());
            }
            Err(failure) => failure,
        };
        self.database = None;
        let only_removals = jobs.iter().flat_map(|job| &job.batch).all(Change::is_removal);
        if only_removals && self.reserve.release() {
            return self.try_commit(jobs).inspect_err(|_| self.database = None);
        }
        Err(failure)
    }

    fn try_commit(&mut self, jobs: &[Job]) -> Result<(), StoreError> {
        let database = match &mut self.database {
            Some(database) => database,
            slot => slot.insert(open_database(&self.directory.join(FILE))?),
        };
        let encoded: Vec<Encoded> = jobs
            .iter()
            .flat_map(|job| &job.batch)
            .map(Encoded::of)
            .collect::<Result<_, _>>()
            .map_err(StoreError::Encode)?;
        write(database, &encoded).map_err(|error| StoreError::Write(error.to_string()))
    }
}

impl Change {
    fn is_removal(&self) -> bool {
        match self {
            Self::RemoveKey(_)
            | Self::RemoveTemplate(_)
            | Self::RemoveSandbox(_)
            | Self::RemoveIdempotency(_) => true,
            Self::PutKey(_)
            | Self::PutTemplate(_)
            | Self::PutSandbox(_)
            | Self::PutIdempotency(_) => false,
        }
    }
}

/// A change as bytes; no value removes the key.
struct Encoded {
    table: Table,
    key: String,
    value: Option<Vec<u8>>,
}

impl Encoded {
    fn of(change: &Change) -> Result<Self, serde_json::Error> {
        let (table, key, value) = match change {
            Change::PutKey(record) => (KEYS, record.id.clone(), Some(serde_json::to_vec(record)?)),
            Change::RemoveKey(id) => (KEYS, id.clone(), None),
            Change::PutTemplate(record) => {
                (TEMPLATES, record.name.to_string(), Some(serde_json::to_vec(record)?))
            }
            Change::RemoveTemplate(name) => (TEMPLATES, name.to_string(), None),
            Change::PutSandbox(record) => {
                (SANDBOXES, record.id.to_string(), Some(serde_json::to_vec(record)?))
            }
            Change::RemoveSandbox(id) => (SANDBOXES, id.to_string(), None),
            Change::PutIdempotency(record) => {
                (IDEMPOTENCY, record.key.clone(), Some(serde_json::to_vec(record)?))
            }
            Change::RemoveIdempotency(key) => (IDEMPOTENCY, key.clone(), None),
        };
        Ok(Self { table, key, value })
    }
}

/// Makes a new file at `path` in one step: a full disk or a kill leaves no half of one.
fn make_database(path: &Path) -> Result<(), StoreError> {
    let failed =
        |source: redb::Error| StoreError::Open { path: path.to_owned(), source: Box::new(source) };
    let unfinished = path.with_extension("new");
    let make = || {
        initialise(&open_database(&unfinished)?).map_err(failed)?;
        std::fs::rename(&unfinished, path).map_err(|error| failed(error.into()))
    };
    // Of an earlier try; if it cannot be removed, opening it says why.
    let _ = std::fs::remove_file(&unfinished);
    make().inspect_err(|_| {
        // What is left of it takes room that the next try needs.
        let _ = std::fs::remove_file(&unfinished);
    })
}

fn open_database(path: &Path) -> Result<Database, StoreError> {
    Database::builder()
        .set_cache_size(CACHE_BYTES)
        .create(path)
        .map_err(|error| StoreError::Open { path: path.to_owned(), source: Box::new(error.into()) })
}

/// Makes the tables of a new file; returns the schema version of the file.
fn initialise(database: &Database) -> Result<u64, redb::Error> {
    let transaction = database.begin_write()?;
    let version = {
        let mut meta = transaction.open_table(META)?;
        let found = meta.get(SCHEMA_KEY)?.map(|value| value.value());
        match found {
            Some(version) => version,
            None => {
                meta.insert(SCHEMA_KEY, SCHEMA_VERSION)?;
                SCHEMA_VERSION
            }
        }
    };
    for table in [KEYS, TEMPLATES, SANDBOXES, IDEMPOTENCY] {
        transaction.open_table(table)?;
    }
    transaction.commit()?;
    Ok(version)
}

fn write(database: &Database, changes: &[Encoded]) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    for change in changes {
        let mut table = transaction.open_table(change.table)?;
        match &change.value {
            Some(value) => table.insert(change.key.as_str(), value.as_slice())?,
            None => table.remove(change.key.as_str())?,
        };
    }
    transaction.commit()?;
    Ok(())
}

fn read_table<T: DeserializeOwned>(
    database: &Database,
    table: Table,
    name: &'static str,
) -> Result<Vec<T>, StoreError> {
    fn failed<E: Into<redb::Error>>(error: E) -> StoreError {
        StoreError::Read(Box::new(error.into()))
    }
    let transaction = database.begin_read().map_err(failed)?;
    let table = transaction.open_table(table).map_err(failed)?;
    let mut records = Vec::new();
    for entry in table.iter().map_err(failed)? {
        let (key, value) = entry.map_err(failed)?;
        let record = serde_json::from_slice(value.value()).map_err(|source| {
            StoreError::Decode { table: name, key: key.value().to_owned(), source }
        })?;
        records.push(record);
    }
    Ok(records)
}

/// A file that only holds space.
struct Reserve {
    path: PathBuf,
    held: bool,
}

impl Reserve {
    fn make(directory: &Path) -> Self {
        let mut reserve = Self { path: directory.join("reserve"), held: false };
        reserve.restore();
        reserve
    }

    fn restore(&mut self) {
        if !self.held {
            // A failure means there is no room; tried again after the next commit.
            self.held = std::fs::write(&self.path, vec![0; RESERVE_BYTES]).is_ok();
            if !self.held {
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }

    fn release(&mut self) -> bool {
        std::mem::take(&mut self.held) && std::fs::remove_file(&self.path).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::super::ApiKeyRecord;
    use super::*;

    fn key(id: &str) -> ApiKeyRecord {
        ApiKeyRecord {
            id: id.to_owned(),
            name: "test".to_owned(),
            digest: "00".to_owned(),
            prefix: "e2b_0".to_owned(),
            created_at: Timestamp::UNIX_EPOCH,
        }
    }

    #[tokio::test]
    async fn first_start_that_broke_off_does_not_hinder_the_next() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("warren.new"), "half a database").unwrap();
        let (store, contents) = RedbStore::open(directory.path()).unwrap();
        assert!(contents.keys.is_empty());
        drop(store);
        assert!(!directory.path().join("warren.new").exists());
    }

    #[tokio::test]
    async fn committed_batch_is_there_after_reopening() {
        let directory = tempfile::tempdir().unwrap();
        let (store, contents) = RedbStore::open(directory.path()).unwrap();
        assert!(contents.keys.is_empty());
        store.commit(vec![Change::PutKey(key("a")), Change::PutKey(key("b"))]).await.unwrap();
        store.commit(vec![Change::RemoveKey("a".to_owned())]).await.unwrap();
        drop(store);
        let contents = reopen(directory.path()).await;
        assert_eq!(contents.keys, vec![key("b")]);
    }

    #[tokio::test]
    async fn many_batches_at_once_are_all_written() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = RedbStore::open(directory.path()).unwrap();
        let commits = (0..500).map(|n| store.commit(vec![Change::PutKey(key(&n.to_string()))]));
        for outcome in futures_util::future::join_all(commits).await {
            outcome.unwrap();
        }
        drop(store);
        assert_eq!(reopen(directory.path()).await.keys.len(), 500);
    }

    /// The writer closes the file a moment after the store is dropped.
    async fn reopen(directory: &Path) -> Contents {
        for _ in 0..100 {
            match RedbStore::open(directory) {
                Ok((_, contents)) => return contents,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            }
        }
        panic!("store stays locked");
    }
}

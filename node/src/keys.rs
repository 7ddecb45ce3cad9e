//! API keys. A key is `e2b_` and 40 hexadecimal digits, the form that clients check;
//! only its digest is stored.

use std::collections::HashMap;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::random::{self, encode_hex};
use crate::store::{ApiKeyRecord, Change, Store, StoreError};

const PREFIX: &str = "e2b_";
const KEY_BYTES: usize = 20;
/// Characters of a key that are shown to recognise it by.
const SHOWN_CHARACTERS: usize = 8;
const NAME_CHARACTERS_MAX: usize = 100;

/// All API keys; cheap to clone.
#[derive(Clone)]
pub struct ApiKeys {
    store: Arc<dyn Store>,
    by_digest: Arc<RwLock<HashMap<String, ApiKeyRecord>>>,
}

/// Why a key was not made.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("a key's name has 1 to {NAME_CHARACTERS_MAX} printable characters")]
    Name,
    #[error("store the key")]
    Store(#[from] StoreError),
    #[error("save the first key to {path}")]
    Save {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
}

impl ApiKeys {
    pub fn new(store: Arc<dyn Store>, records: Vec<ApiKeyRecord>) -> Self {
        let by_digest = records.into_iter().map(|record| (record.digest.clone(), record)).collect();
        Self { store, by_digest: Arc::new(RwLock::new(by_digest)) }
    }

    /// The id of a key, if it is known. Looking up a digest tells nothing about keys
    /// by its time.
    pub fn check(&self, key: &str) -> Option<String> {
        let keys = self.by_digest.read().unwrap_or_else(PoisonError::into_inner);
        keys.get(&digest(key)).map(|record| record.id.clone())
    }

    /// Makes a key; the second value is the key itself, which is not kept.
    pub async fn add(&self, name: &str) -> Result<(ApiKeyRecord, String), KeyError> {
        let length = name.chars().count();
        if !(1..=NAME_CHARACTERS_MAX).contains(&length) || name.chars().any(char::is_control) {
            return Err(KeyError::Name);
        }
        let key = format!("{PREFIX}{}", random::hex::<KEY_BYTES>());
        let record = ApiKeyRecord {
            id: format!("key_{}", random::base36(12)),
            name: name.to_owned(),
            digest: digest(&key),
            prefix: key[..SHOWN_CHARACTERS].to_owned(),
            created_at: Timestamp::now(),
        };
        self.store.commit(vec![Change::PutKey(record.clone())]).await?;
        let mut keys = self.by_digest.write().unwrap_or_else(PoisonError::into_inner);
        keys.insert(record.digest.clone(), record.clone());
        Ok((record, key))
    }

    /// All keys, oldest first.
    pub fn list(&self) -> Vec<ApiKeyRecord> {
        let keys = self.by_digest.read().unwrap_or_else(PoisonError::into_inner);
        let mut list: Vec<ApiKeyRecord> = keys.values().cloned().collect();
        list.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        list
    }

    /// Removes a key by its id. `false`: there is none.
    pub async fn remove(&self, id: &str) -> Result<bool, StoreError> {
        if !self.list().iter().any(|record| record.id == id) {
            return Ok(false);
        }
        self.store.commit(vec![Change::RemoveKey(id.to_owned())]).await?;
        let mut keys = self.by_digest.write().unwrap_or_else(PoisonError::into_inner);
        keys.retain(|_, record| record.id != id);
        Ok(true)
    }

    /// Makes the first key of a node and saves it. `false`: there are keys already.
    pub async fn ensure_first(&self, path: &Path) -> Result<bool, KeyError> {
        if !self.list().is_empty() {
            return Ok(false);
        }
        let (record, key) = self.add("first").await?;
        if let Err(source) = save(path, &key) {
            // A key that nobody can know would keep the next start from making one.
            self.remove(&record.id).await?;
            return Err(KeyError::Save { path: path.to_owned(), source });
        }
        Ok(true)
    }
}

fn save(path: &Path, key: &str) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    writeln!(file, "{key}")?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}

fn digest(key: &str) -> String {
    encode_hex(&Sha256::digest(key.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::tests::fixtures::MemoryStore;

    #[tokio::test]
    async fn first_key_is_saved_for_its_owner_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api-key");
        let keys = ApiKeys::new(Arc::new(MemoryStore::default()), Vec::new());
        assert!(keys.ensure_first(&path).await.unwrap());
        assert!(!keys.ensure_first(&path).await.unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        let key = text.trim();
        assert_eq!(key.len(), 44);
        assert!(keys.check(key).is_some());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn removed_key_is_unknown() {
        let keys = ApiKeys::new(Arc::new(MemoryStore::default()), Vec::new());
        let (record, key) = keys.add("a").await.unwrap();
        assert!(keys.remove(&record.id).await.unwrap());
        assert_eq!(keys.check(&key), None);
        assert!(!keys.remove(&record.id).await.unwrap());
        assert!(matches!(keys.add("").await, Err(KeyError::Name)));
    }
}

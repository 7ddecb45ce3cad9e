//! The templates of the node: names, aliases, building and removing.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::ids::TemplateName;
use crate::kinds::{BuildError, BuildPlan, Kind, KindError, KindName, Progress};
use crate::store::{Change, Store, StoreError, TemplateRecord};

/// Templates of a node; beyond that somebody builds in a loop.
const TEMPLATES_MAX: usize = 1024;
/// A tag that every template has.
const DEFAULT_TAG: &str = "default";

/// All templates; cheap to clone.
#[derive(Clone)]
pub struct Templates(Arc<Shared>);

struct Shared {
    store: Arc<dyn Store>,
    kinds: BTreeMap<KindName, Arc<dyn Kind>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    records: BTreeMap<TemplateName, Arc<TemplateRecord>>,
    spawns: BTreeMap<TemplateName, u64>,
    /// Names and aliases of builds under way.
    reserved: HashSet<TemplateName>,
}

/// Why a template was not built.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error(
        "the name or alias {0} is taken; choose another, or remove the template that has it: warren template rm {0}"
    )]
    Taken(TemplateName),
    #[error("template {0} is being built")]
    UnderWay(TemplateName),
    #[error("the node has {TEMPLATES_MAX} templates, as many as it is allowed to")]
    TooMany,
    #[error("kind {0} is not available on this node")]
    NoKind(KindName),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error("store the template")]
    Store(#[from] StoreError),
}

/// Why a template was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error("store the removal of the template")]
    Store(#[from] StoreError),
    #[error("remove the template")]
    Discard(#[from] KindError),
    #[error("{0} paused sandboxes need the template; kill them or wait until they have ended")]
    Needed(usize),
}

impl Templates {
    pub fn new(
        store: Arc<dyn Store>,
        kinds: &[Arc<dyn Kind>],
        records: Vec<TemplateRecord>,
    ) -> Self {
        let records =
            records.into_iter().map(|record| (record.name.clone(), Arc::new(record))).collect();
        Self(Arc::new(Shared {
            store,
            kinds: kinds.iter().map(|kind| (kind.name(), Arc::clone(kind))).collect(),
            state: Mutex::new(State { records, ..State::default() }),
        }))
    }

    /// The template that a client means: its name, an alias, either with the tag
    /// `default` or none. With the alias, if it was one.
    pub fn resolve(&self, text: &str) -> Option<(Arc<TemplateRecord>, Option<String>)> {
        let name = match text.split_once(':') {
            Some((name, DEFAULT_TAG)) => name,
            Some(_) => return None,
            None => text,
        };
        let name = TemplateName::parse(name).ok()?;
        let state = self.state();
        if let Some(record) = state.records.get(&name) {
            return Some((Arc::clone(record), None));
        }
        let record = state.records.values().find(|record| record.aliases.contains(&name))?;
        Some((Arc::clone(record), Some(name.to_string())))
    }

    pub fn names(&self) -> Vec<TemplateName> {
        self.state().records.keys().cloned().collect()
    }

    /// All templates with the number of sandboxes made from each since the start.
    pub fn list(&self) -> Vec<(Arc<TemplateRecord>, u64)> {
        let state = self.state();
        let spawns = |name| state.spawns.get(name).copied().unwrap_or(0);
        state.records.values().map(|record| (Arc::clone(record), spawns(&record.name))).collect()
    }

    pub fn count_spawn(&self, name: &TemplateName) {
        *self.state().spawns.entry(name.clone()).or_default() += 1;
    }

    /// Builds and stores a template. Run it in a task of its own: it must not be
    /// given up half-way.
    pub async fn build(
        &self,
        kind: KindName,
        plan: BuildPlan,
        progress: Progress,
    ) -> Result<Arc<TemplateRecord>, TemplateError> {
        let kind = self.0.kinds.get(&kind).ok_or(TemplateError::NoKind(kind))?;
        let _reservation = self.reserve(&plan)?;
        let name = plan.name.clone();
        let record = kind.build(plan, progress).await?;
        if let Err(error) = self.0.store.commit(vec![Change::PutTemplate(record.clone())]).await {
            if let Err(cleanup) = kind.discard(name.clone()).await {
                tracing::error!(template = %name, error = %crate::error::chain(&cleanup),
                    "something of a template that was not stored is left");
            }
            return Err(error.into());
        }
        let record = Arc::new(record);
        self.state().records.insert(name, Arc::clone(&record));
        Ok(record)
    }

    /// Removes a template; its sandboxes live on. `false`: there is none.
    pub async fn remove(&self, text: &str) -> Result<bool, RemoveError> {
        let Some((record, _)) = self.resolve(text) else { return Ok(false) };
        self.0.store.commit(vec![Change::RemoveTemplate(record.name.clone())]).await?;
        self.state().records.remove(&record.name);
        if let Some(kind) = self.0.kinds.get(&record.kind) {
            kind.discard(record.name.clone()).await?;
        }
        Ok(true)
    }

    fn reserve(&self, plan: &BuildPlan) -> Result<Reservation, TemplateError> {
        let mut state = self.state();
        if state.records.len() >= TEMPLATES_MAX {
            return Err(TemplateError::TooMany);
        }
        let names: Vec<TemplateName> =
            std::iter::once(&plan.name).chain(&plan.aliases).cloned().collect();
        if let Some(name) = names.iter().find(|name| state.reserved.contains(*name)) {
            return Err(TemplateError::UnderWay(name.clone()));
        }
        let taken = names.iter().find(|name| {
            let mut records = state.records.values();
            records.any(|known| known.name == **name || known.aliases.contains(*name))
        });
        if let Some(name) = taken {
            return Err(TemplateError::Taken(name.clone()));
        }
        state.reserved.extend(names.iter().cloned());
        drop(state);
        Ok(Reservation { all: self.clone(), names })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names held while a build is under way.
struct Reservation {
    all: Templates,
    names: Vec<TemplateName>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.all.state();
        for name in &self.names {
            state.reserved.remove(name);
        }
    }
}

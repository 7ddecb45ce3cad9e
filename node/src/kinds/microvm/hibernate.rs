//! Pausing, resuming and forking clones.
//!
//! ```text
//! pause:   stop the vCPUs ▶ checkpoint ▶ frozen process: save into STATE/…/snapshot.new
//!          ▶ rename to STATE/…/snapshot ▶ end the clone and the frozen process
//! resume:  template process: spawn from STATE/…/snapshot ▶ (stored) ▶ remove the snapshot
//! fork:    checkpoint ▶ frozen process: spawn each child ▶ end the frozen process
//! ```
//!
//! Until a snapshot has its name the clone is there and goes on when a step fails. A
//! snapshot is never written again: what is resumed from it writes to a new delta.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warren_vmm_api::{
    CheckpointReply, CheckpointRequest, SaveReply, SpawnReply, SpawnRequest, TemplateVerb, VmState,
    VmStatus, VmVerb,
};

use super::template::SPAWN_LIMIT;
use super::{DISK, Microvms, blocking, control, find_process, layout};
use crate::ids::{SandboxId, TemplateName};
use crate::kinds::KindError;

/// vCPUs stop within milliseconds; generous for a host under pressure.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// A fork copies page tables.
const CHECKPOINT_LIMIT: Duration = Duration::from_secs(60);
/// All of a guest's memory, to a slow disk.
const SAVE_LIMIT: Duration = Duration::from_secs(600);

const SNAPSHOT: &str = "snapshot";
const UNFINISHED_SNAPSHOT: &str = "snapshot.new";
/// Run directory of the frozen process, in the clone's.
const FROZEN: &str = "frozen";
const LAYERS_FILE: &str = "layers.json";

/// What a snapshot's disk consists of.
#[derive(Debug, Serialize, Deserialize)]
struct Layers {
    /// Files in the sandbox's state directory, oldest first.
    disk: Vec<String>,
}

impl Microvms {
    /// Puts a clone on disk and ends its process. On failure it runs on.
    pub(super) async fn hibernate(&self, id: &SandboxId) -> Result<(), KindError> {
        self.ask(id, VmVerb::Pause).await?;
        let saved = self.put_on_disk(id).await;
        self.end_frozen(id).await?;
        if let Err(error) = saved {
            self.ask(id, VmVerb::Resume).await?;
            return Err(error);
        }
        // From here on it is paused, whatever happens to this daemon.
        self.leave_run_directory(id).await
    }

    async fn ask(&self, id: &SandboxId, verb: VmVerb) -> Result<VmStatus, KindError> {
        let step = match &verb {
            VmVerb::Pause => "stop the sandbox's vCPUs",
            VmVerb::Resume => "let the sandbox's vCPUs run again",
            _ => "ask the sandbox's VMM",
        };
        let control = self.layout.sandbox_run(id).join("control.sock");
        control::ask(&control, verb, STOP_LIMIT).await.map_err(|error| error.into_kind(step))
    }

    async fn put_on_disk(&self, id: &SandboxId) -> Result<(), KindError> {
        let state = self.layout.sandbox_state(id);
        let unfinished = state.join(UNFINISHED_SNAPSHOT);
        layout::remove_tree(&unfinished).map_err(KindError::io("remove an unfinished snapshot"))?;
        std::fs::create_dir(&unfinished).map_err(KindError::io("make the snapshot's directory"))?;
        let outcome = self.write_snapshot(id, &state, &unfinished).await;
        if outcome.is_err() {
            // What is left of it takes room.
            layout::remove_tree(&unfinished)
                .map_err(KindError::io("remove an unfinished snapshot"))?;
        }
        outcome
    }

    async fn write_snapshot(
        &self,
        id: &SandboxId,
        state: &Path,
        unfinished: &Path,
    ) -> Result<(), KindError> {
        let reply = self.checkpoint(id).await?;
        let disk = layer_names(&reply, state)?;
        let frozen = self.frozen_socket(id);
        let verb = TemplateVerb::Save { directory: unfinished.to_owned() };
        let saved: SaveReply = control::ask(&frozen, verb, SAVE_LIMIT)
            .await
            .map_err(|error| error.into_kind("write the sandbox's memory"))?;
        tracing::debug!(sandbox_id = %id, pause_us = reply.timings.pause_us,
            save_us = saved.save_us, page_bytes = saved.page_bytes, "snapshot written");
        let (state, unfinished) = (state.to_owned(), unfinished.to_owned());
        let finish = move || -> std::io::Result<()> {
            let path = unfinished.join(LAYERS_FILE);
            std::fs::write(&path, serde_json::to_vec(&Layers { disk })?)?;
            File::open(&path)?.sync_all()?;
            File::open(&unfinished)?.sync_all()?;
            let snapshot = state.join(SNAPSHOT);
            layout::remove_tree(&snapshot)?;
            std::fs::rename(&unfinished, &snapshot)?;
            File::open(&state)?.sync_all()
        };
        blocking(move || finish().map_err(KindError::io("finish the snapshot"))).await
    }

    /// Keeps a clone's moment as a frozen process.
    async fn checkpoint(&self, id: &SandboxId) -> Result<CheckpointReply, KindError> {
        let run = self.layout.sandbox_run(id);
        let directory = run.join(FROZEN);
        self.end_frozen(id).await?;
        std::fs::create_dir(&directory)
            .map_err(KindError::io("make the checkpoint's run directory"))?;
        let disks = self.next_delta(id)?;
        let verb = VmVerb::Checkpoint(CheckpointRequest { directory, disks });
        control::ask(&run.join("control.sock"), verb, CHECKPOINT_LIMIT)
            .await
            .map_err(|error| error.into_kind("take a checkpoint of the sandbox"))
    }

    fn frozen_socket(&self, id: &SandboxId) -> PathBuf {
        self.layout.sandbox_run(id).join(FROZEN).join("control.sock")
    }

    /// Ends the frozen process of a sandbox, if there is one.
    pub(super) async fn end_frozen(&self, id: &SandboxId) -> Result<(), KindError> {
        if let Some(process) = find_process(&self.frozen_socket(id)).await? {
            process.kill().map_err(KindError::io("end a frozen process"))?;
            process.ended().await;
        }
        layout::remove_tree(&self.layout.sandbox_run(id).join(FROZEN))
            .map_err(KindError::io("remove the run directory of a checkpoint"))
    }

    /// A file that no delta of the sandbox has had yet.
    fn next_delta(&self, id: &SandboxId) -> Result<BTreeMap<String, PathBuf>, KindError> {
        let state = self.layout.sandbox_state(id);
        let names = layout::entries(&state).map_err(KindError::io("read the sandbox's files"))?;
        let number = |name: &String| match name.strip_prefix(DISK)?.strip_prefix('.') {
            Some(number) => number.parse::<u64>().ok(),
            None => Some(0),
        };
        let next = names.iter().filter_map(number).max().map_or(0, |last| last + 1);
        Ok(BTreeMap::from([(DISK.to_owned(), delta(&state, next))]))
    }

    /// Brings a paused sandbox back; its snapshot stays until [`Self::drop_snapshot`].
    pub(super) async fn wake(
        &self,
        id: &SandboxId,
        template: &TemplateName,
    ) -> Result<SpawnReply, KindError> {
        let run = self.layout.sandbox_run(id);
        let state = self.layout.sandbox_state(id);
        let snapshot = state.join(SNAPSHOT);
        std::fs::create_dir(&run).map_err(KindError::io("make the sandbox's run directory"))?;
        let layers = read_layers(&snapshot).map_err(KindError::io("read the snapshot"))?;
        let request = SpawnRequest {
            id: id.to_string(),
            directory: run,
            disks: self.next_delta(id)?,
            snapshot: Some(snapshot),
            layers: layers_of(&state, &layers.disk),
        };
        self.templates.spawn(template, request).await
    }

    /// Whether the sandbox is on disk.
    pub(super) fn is_on_disk(&self, id: &SandboxId) -> bool {
        self.layout.sandbox_state(id).join(SNAPSHOT).exists()
    }

    /// Removes the snapshot of a sandbox that runs again, and what is left of one that was
    /// never finished.
    pub(super) async fn drop_snapshot(&self, id: &SandboxId) -> Result<(), KindError> {
        let state = self.layout.sandbox_state(id);
        blocking(move || {
            layout::remove_tree(&state.join(SNAPSHOT))
                .and_then(|()| layout::remove_tree(&state.join(UNFINISHED_SNAPSHOT)))
                .map_err(KindError::io("remove the snapshot"))
        })
        .await
    }

    /// After a daemon was killed while it paused a clone: the clone goes on.
    pub(super) async fn go_on(&self, id: &SandboxId) -> Result<(), KindError> {
        self.end_frozen(id).await?;
        self.drop_snapshot(id).await?;
        match self.ask(id, VmVerb::Status).await?.state {
            VmState::Paused => self.ask(id, VmVerb::Resume).await.map(drop),
            VmState::Running | VmState::Stopping => Ok(()),
        }
    }

    /// Children of a running clone, in the order of `children`.
    pub(super) async fn fork_clone(
        &self,
        parent: &SandboxId,
        children: &[SandboxId],
    ) -> Result<Vec<Result<SpawnReply, KindError>>, KindError> {
        let state = self.layout.sandbox_state(parent);
        let reply = self.checkpoint(parent).await?;
        let names = layer_names(&reply, &state)?;
        let frozen = self.frozen_socket(parent);
        let mut born = Vec::with_capacity(children.len());
        for child in children {
            born.push(self.bear(&frozen, &state, &names, child).await);
        }
        self.end_frozen(parent).await?;
        Ok(born)
    }

    async fn bear(
        &self,
        frozen: &Path,
        parent_state: &Path,
        layers: &[String],
        child: &SandboxId,
    ) -> Result<SpawnReply, KindError> {
        let (run, state) = (self.layout.sandbox_run(child), self.layout.sandbox_state(child));
        std::fs::create_dir(&run).map_err(KindError::io("make the sandbox's run directory"))?;
        std::fs::create_dir(&state).map_err(KindError::io("make the sandbox's state directory"))?;
        // Links, so that each sandbox's files are its own to remove.
        for name in layers {
            std::fs::hard_link(parent_state.join(name), state.join(name))
                .map_err(KindError::io("share the disk of the sandbox"))?;
        }
        let request = SpawnRequest {
            id: child.to_string(),
            directory: run,
            disks: self.next_delta(child)?,
            snapshot: None,
            layers: layers_of(&state, layers),
        };
        control::ask(frozen, TemplateVerb::Spawn(request), SPAWN_LIMIT)
            .await
            .map_err(|error| error.into_kind("fork the frozen process"))
    }
}

/// File of the delta with this number.
pub(super) fn delta(state: &Path, number: u64) -> PathBuf {
    match number {
        0 => state.join(DISK),
        number => state.join(format!("{DISK}.{number}")),
    }
}

fn layers_of(state: &Path, names: &[String]) -> BTreeMap<String, Vec<PathBuf>> {
    let paths = names.iter().map(|name| state.join(name)).collect();
    BTreeMap::from([(DISK.to_owned(), paths)])
}

/// Names in `state` of the layers that a checkpoint told of.
fn layer_names(reply: &CheckpointReply, state: &Path) -> Result<Vec<String>, KindError> {
    let name = |path: &PathBuf| {
        let name = path.strip_prefix(state).ok().and_then(Path::to_str).map(str::to_owned);
        name.ok_or_else(|| KindError::Refused {
            step: "take a checkpoint of the sandbox".to_owned(),
            message: format!("{} is not a file of the sandbox", path.display()),
            advice: String::new(),
        })
    };
    reply.layers.get(DISK).into_iter().flatten().map(name).collect()
}

fn read_layers(snapshot: &Path) -> std::io::Result<Layers> {
    Ok(serde_json::from_slice(&std::fs::read(snapshot.join(LAYERS_FILE))?)?)
}

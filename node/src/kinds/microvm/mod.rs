//! MicroVMs: clones of template processes, each a `warren-vmm` process.
//!
//! ```text
//! create:  mkdir RUN/sandboxes/<id>, STATE/sandboxes/<id>
//!          template process ── spawn ──▶ clone (pid) ── pidfd
//! adopt:   connect RUN/sandboxes/<id>/control.sock, SO_PEERCRED ── pid ── pidfd
//! stop:    SIGKILL through the pidfd (nothing of a killed sandbox is kept)
//! clean:   both directories and the control group
//! pause, resume, fork: see `hibernate`
//! strays:  directories and groups without record; children of template processes
//!          that are no known clone
//! ```
//!
//! None of the processes is tied to the daemon's life.

mod build;
mod control;
mod files;
mod hibernate;
mod instance;
mod layout;
mod template;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio_util::task::TaskTracker;
use warren_vmm_api::{SpawnReply, SpawnRequest};

use self::layout::Layout;
use self::template::Templates;
use super::{
    Birth, BuildError, BuildPlan, Children, Found, Instance, Kind, KindError, KindName, Progress,
    Recorded,
};
use crate::cgroup::Cgroups;
use crate::config::Config;
use crate::error::chain;
use crate::ids::{SandboxId, TemplateName};
use crate::process::{self, Process};
use crate::store::TemplateRecord;

/// Id of the writable disk, and name of its first delta.
const DISK: &str = "disk";

/// The kind `microvm`.
#[derive(Debug)]
pub struct Microvms {
    layout: Layout,
    vmm: PathBuf,
    templates: Arc<Templates>,
    cgroups: Option<Cgroups>,
    /// Moves into control groups, off the create path.
    tracker: TaskTracker,
    /// One build at a time: booting a guest is heavy.
    building: tokio::sync::Mutex<()>,
}

impl Microvms {
    /// Makes the directories.
    pub fn new(config: &Config, tracker: TaskTracker) -> std::io::Result<Self> {
        let layout = Layout::new(&config.state_directory, &config.run_directory);
        layout.make()?;
        Ok(Self {
            templates: Arc::new(Templates::new(
                config.vmm.clone(),
                layout.clone(),
                config.spawns_max,
            )),
            layout,
            vmm: config.vmm.clone(),
            cgroups: Cgroups::detect(config.cgroup, &config.run_directory),
            tracker,
            building: tokio::sync::Mutex::new(()),
        })
    }

    async fn give_birth(&self, birth: Birth) -> Result<Arc<dyn Instance>, KindError> {
        let run = self.layout.sandbox_run(&birth.id);
        let state = self.layout.sandbox_state(&birth.id);
        std::fs::create_dir(&run).map_err(KindError::io("make the sandbox's run directory"))?;
        std::fs::create_dir(&state).map_err(KindError::io("make the sandbox's state directory"))?;
        let request = SpawnRequest {
            id: birth.id.to_string(),
            directory: run,
            disks: BTreeMap::from([(DISK.to_owned(), hibernate::delta(&state, 0))]),
            snapshot: None,
            layers: BTreeMap::new(),
        };
        let reply = self.templates.spawn(&birth.template, request).await?;
        self.take_hold(&birth.id, &reply)
    }

    fn take_hold(
        &self,
        id: &SandboxId,
        reply: &SpawnReply,
    ) -> Result<Arc<dyn Instance>, KindError> {
        tracing::debug!(sandbox_id = %id, pid = reply.pid, total_us = reply.timings.total_us,
            fork_us = reply.timings.fork_us, vm_us = reply.timings.vm_us, "clone runs");
        let process = Process::open(reply.pid).map_err(KindError::io("take hold of the clone"))?;
        self.place(id, &process);
        Ok(Arc::new(instance::Clone::new(process, self.layout.sandbox_run(id))))
    }

    async fn bring_back(&self, birth: Birth) -> Result<Arc<dyn Instance>, KindError> {
        let reply = self.wake(&birth.id, &birth.template).await?;
        self.take_hold(&birth.id, &reply)
    }

    async fn bear_children(&self, parent: SandboxId, children: Vec<SandboxId>) -> Children {
        let born = self.fork_clone(&parent, &children).await?;
        let hold = |(id, reply): (&SandboxId, Result<SpawnReply, KindError>)| {
            reply.and_then(|reply| self.take_hold(id, &reply))
        };
        Ok(children.iter().zip(born).map(hold).collect())
    }

    fn place(&self, id: &SandboxId, process: &Process) {
        let Some(cgroups) = self.cgroups.clone() else { return };
        let (id, process) = (id.clone(), process.clone());
        self.tracker.spawn_blocking(move || {
            // The sandbox may have ended meanwhile.
            if let Err(error) = cgroups.place(&id, &process) {
                tracing::debug!(sandbox_id = %id, %error, "not moved into a control group");
            }
        });
    }

    async fn find(&self, id: SandboxId, recorded: Recorded) -> Result<Found, KindError> {
        let run = self.layout.sandbox_run(&id);
        let process = find_process(&run.join("control.sock")).await?;
        match (recorded, process) {
            (Recorded::Running, Some(process)) => {
                self.go_on(&id).await?;
                self.place(&id, &process);
                Ok(Found::Running(Arc::new(instance::Clone::new(process, run))))
            }
            (Recorded::Running, None) | (Recorded::Paused, _) => {
                if !self.is_on_disk(&id) {
                    return Ok(Found::Nothing);
                }
                self.leave_run_directory(&id).await?;
                Ok(Found::Paused)
            }
        }
    }

    /// Ends what runs of a sandbox that is on disk, and removes what it has outside its
    /// state directory.
    async fn leave_run_directory(&self, id: &SandboxId) -> Result<(), KindError> {
        self.sweep(id, vec![self.layout.sandbox_run(id)]).await
    }

    async fn remove(&self, id: SandboxId) -> Result<(), KindError> {
        let directories = vec![self.layout.sandbox_run(&id), self.layout.sandbox_state(&id)];
        self.sweep(&id, directories).await
    }

    /// Ends what runs of a sandbox and nobody holds, then removes `directories` and its
    /// control group.
    async fn sweep(&self, id: &SandboxId, directories: Vec<PathBuf>) -> Result<(), KindError> {
        self.end_frozen(id).await?;
        // Of a birth or resume that failed half-way, or was never answered.
        if let Some(process) =
            find_process(&self.layout.sandbox_run(id).join("control.sock")).await?
        {
            process.kill().map_err(KindError::io("kill a stray clone"))?;
            process.ended().await;
        }
        let (id, cgroups) = (id.clone(), self.cgroups.clone());
        blocking(move || {
            let removed = directories
                .iter()
                .map(|path| {
                    layout::remove_tree(path)
                        .map_err(KindError::io(format!("remove {}", path.display())))
                })
                .fold(Ok(()), Result::and);
            let ungrouped = cgroups.map_or(Ok(()), |cgroups| {
                cgroups.remove(&id).map_err(KindError::io("remove the control group"))
            });
            removed.and(ungrouped)
        })
        .await
    }

    async fn find_strays(&self, known: Vec<SandboxId>) -> Result<Vec<SandboxId>, KindError> {
        self.end_unnamed(&known).await?;
        let mut found = BTreeSet::new();
        for directory in [self.layout.sandboxes_run(), self.layout.sandboxes_state()] {
            let names = layout::entries(&directory)
                .map_err(KindError::io(format!("read {}", directory.display())))?;
            found.extend(names.iter().filter_map(|name| SandboxId::parse(name).ok()));
        }
        if let Some(cgroups) = &self.cgroups {
            found.extend(cgroups.leftovers());
        }
        let known: HashSet<SandboxId> = known.into_iter().collect();
        Ok(found.into_iter().filter(|id| !known.contains(id)).collect())
    }

    /// Ends clones that are still being born for a daemon that was killed: they have no
    /// socket yet to find them by, but their parent is a template process.
    async fn end_unnamed(&self, known: &[SandboxId]) -> Result<(), KindError> {
        let mut named = HashSet::new();
        for id in known {
            let socket = self.layout.sandbox_run(id).join("control.sock");
            named.extend(find_process(&socket).await?.map(|process| process.pid()));
        }
        let directory = self.layout.templates_run();
        for name in layout::entries(&directory).map_err(KindError::io("read the templates"))? {
            let socket = directory.join(&name).join("control.sock");
            let Some(template) = find_process(&socket).await? else { continue };
            for pid in process::children(template.pid()) {
                if !named.contains(&pid)
                    && let Ok(child) = Process::open(pid)
                {
                    tracing::warn!(template = name, pid, "ending a clone that nobody knows");
                    child.kill().map_err(KindError::io("kill a clone that nobody knows"))?;
                    child.ended().await;
                }
            }
        }
        Ok(())
    }

    async fn calm_down(&self, known: Vec<TemplateName>) -> Result<(), KindError> {
        self.remove_broken_builds().await?;
        for name in known.clone() {
            // Ahead of the first create, which would start it too.
            let templates = Arc::clone(&self.templates);
            self.tracker.spawn(async move {
                if let Err(error) = templates.ensure(&name).await {
                    tracing::error!(template = %name, error = %chain(&error), "template not started");
                }
            });
        }
        let read = |directory: &std::path::Path| {
            layout::entries(directory)
                .map_err(KindError::io(format!("read {}", directory.display())))
        };
        for name in read(&self.layout.templates_run())? {
            let Ok(name) = TemplateName::parse(&name) else { continue };
            if !known.contains(&name) {
                self.drop_template(name).await?;
            }
        }
        for name in read(&self.layout.templates())? {
            match TemplateName::parse(&name) {
                Ok(name) if known.contains(&name) => {}
                Ok(_) | Err(_) => {
                    tracing::warn!(directory = %name, "removing a template without record");
                    let path = self.layout.templates().join(&name);
                    layout::remove_tree(&path)
                        .map_err(KindError::io(format!("remove {}", path.display())))?;
                }
            }
        }
        Ok(())
    }

    /// Builds of a daemon that was killed.
    async fn remove_broken_builds(&self) -> Result<(), KindError> {
        let builds = self.layout.builds_run();
        for name in layout::entries(&builds).map_err(KindError::io("read the builds"))? {
            let path = builds.join(&name);
            if let Some(process) = find_process(&path.join("control.sock")).await? {
                process.kill().map_err(KindError::io("kill an unfinished build"))?;
                process.ended().await;
            }
            layout::remove_tree(&path).map_err(KindError::io("remove an unfinished build"))?;
        }
        Ok(())
    }

    /// Ends the template processes, those that an earlier daemon started too.
    async fn end_templates(&self) -> Result<(), KindError> {
        let directory = self.layout.templates_run();
        for name in layout::entries(&directory).map_err(KindError::io("read the templates"))? {
            let Ok(name) = TemplateName::parse(&name) else { continue };
            self.templates.stop(&name).await?;
        }
        Ok(())
    }

    async fn drop_template(&self, name: TemplateName) -> Result<(), KindError> {
        self.templates.stop(&name).await?;
        for path in [self.layout.template_run(&name), self.layout.template(&name)] {
            layout::remove_tree(&path)
                .map_err(KindError::io(format!("remove {}", path.display())))?;
        }
        Ok(())
    }
}

impl Drop for Microvms {
    fn drop(&mut self) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.remove_if_empty();
        }
    }
}

/// Does work on files on a thread for such.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, KindError> + Send + 'static,
) -> Result<T, KindError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(KindError::Busy(format!("work on files broke off: {error}"))))
}

/// The process that listens on a control socket, if any does.
async fn find_process(socket: &std::path::Path) -> Result<Option<Process>, KindError> {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};

    let outcome = async {
        let stream = control::connect(socket).await?;
        Process::listener_of(&stream)
    };
    match outcome.await {
        Ok(process) => Ok(Some(process)),
        Err(error) if matches!(error.kind(), ConnectionRefused | NotFound) => Ok(None),
        Err(source) => {
            Err(KindError::Io { step: format!("connect to {}", socket.display()), source })
        }
    }
}

impl Kind for Microvms {
    fn name(&self) -> KindName {
        KindName::Microvm
    }

    fn settle(&self, known: Vec<TemplateName>) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(self.calm_down(known))
    }

    fn create(&self, birth: Birth) -> BoxFuture<'_, Result<Arc<dyn Instance>, KindError>> {
        Box::pin(self.give_birth(birth))
    }

    fn pause(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(async move { self.hibernate(&id).await })
    }

    fn resume(&self, birth: Birth) -> BoxFuture<'_, Result<Arc<dyn Instance>, KindError>> {
        Box::pin(self.bring_back(birth))
    }

    fn resumed(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(async move { self.drop_snapshot(&id).await })
    }

    fn give_up_resume(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(async move { self.leave_run_directory(&id).await })
    }

    fn fork(&self, parent: SandboxId, children: Vec<SandboxId>) -> BoxFuture<'_, Children> {
        Box::pin(self.bear_children(parent, children))
    }

    fn adopt(&self, id: SandboxId, recorded: Recorded) -> BoxFuture<'_, Result<Found, KindError>> {
        Box::pin(self.find(id, recorded))
    }

    fn strays(&self, known: Vec<SandboxId>) -> BoxFuture<'_, Result<Vec<SandboxId>, KindError>> {
        Box::pin(self.find_strays(known))
    }

    fn clean(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(self.remove(id))
    }

    fn build(
        &self,
        plan: BuildPlan,
        progress: Progress,
    ) -> BoxFuture<'_, Result<TemplateRecord, BuildError>> {
        Box::pin(self.build_template(plan, progress))
    }

    fn retire(&self) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(self.end_templates())
    }

    fn discard(&self, template: TemplateName) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(self.drop_template(template))
    }
}

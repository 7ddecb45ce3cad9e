//! Template processes: started on demand, found again after a restart, asked for
//! births. At most a few births are asked for at once per template; more wait in a
//! bounded queue.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use warren_vmm_api::{SpawnReply, SpawnRequest, TemplateStatus, TemplateVerb};

use super::control::{self, ControlError};
use super::layout::Layout;
use crate::ids::TemplateName;
use crate::kinds::KindError;
use crate::process::{self, Process};

/// Loading a template reads its RAM image.
const START_LIMIT: Duration = Duration::from_secs(120);
const START_POLL: Duration = Duration::from_millis(5);
/// Normally a millisecond; generous for a host under pressure.
pub(super) const SPAWN_LIMIT: Duration = Duration::from_secs(20);
const STATUS_LIMIT: Duration = Duration::from_secs(20);
/// Births that wait per template; the last one waits some seconds.
const QUEUE_LENGTH_MAX: usize = 2048;
/// Lines of a process's log that go into an error message.
const LOG_LINES: usize = 8;

/// All template processes of the node.
#[derive(Debug)]
pub struct Templates {
    vmm: PathBuf,
    layout: Layout,
    spawns_max: usize,
    hosts: Mutex<HashMap<TemplateName, Arc<Host>>>,
}

#[derive(Debug)]
struct Host {
    /// Places for births under way.
    places: Semaphore,
    waiting: AtomicUsize,
    /// Held while the process is started.
    starting: tokio::sync::Mutex<()>,
}

impl Templates {
    pub fn new(vmm: PathBuf, layout: Layout, spawns_max: usize) -> Self {
        Self { vmm, layout, spawns_max, hosts: Mutex::default() }
    }

    /// Gives birth to a clone, starting the template process if it does not run.
    pub async fn spawn(
        &self,
        template: &TemplateName,
        request: SpawnRequest,
    ) -> Result<SpawnReply, KindError> {
        let host = self.host(template);
        let _waiting = Waiting::enter(&host.waiting).ok_or_else(|| {
            KindError::Busy(format!(
                "{QUEUE_LENGTH_MAX} sandboxes of template {template} wait to be born"
            ))
        })?;
        let Ok(_place) = host.places.acquire().await else {
            return Err(KindError::Busy("the node is stopping".to_owned()));
        };
        let socket = self.socket(template);
        let verb = TemplateVerb::Spawn(request);
        match control::ask(&socket, verb.clone(), SPAWN_LIMIT).await {
            Err(error) if error.is_dead() => {
                self.revive(&host, template, error).await?;
                control::ask(&socket, verb, SPAWN_LIMIT).await
            }
            outcome => outcome,
        }
        .map_err(|error| error.into_kind("fork the template process"))
    }

    /// Starts the process of a template unless it runs.
    pub async fn ensure(&self, template: &TemplateName) -> Result<TemplateStatus, KindError> {
        let host = self.host(template);
        let _guard = host.starting.lock().await;
        match self.status(template).await {
            Ok(status) => Ok(status),
            Err(error) if error.is_dead() => self.start(template).await,
            Err(error) => Err(error.into_kind("ask the template process for its state")),
        }
    }

    /// Waits until no birth is under way; a process answers one request after the other.
    pub async fn status(&self, template: &TemplateName) -> Result<TemplateStatus, ControlError> {
        control::ask(&self.socket(template), TemplateVerb::Status, STATUS_LIMIT).await
    }

    /// Ends the process of a template, if it runs, and forgets it.
    pub async fn stop(&self, template: &TemplateName) -> Result<(), KindError> {
        let host = self.host(template);
        let _guard = host.starting.lock().await;
        if let Ok(stream) = control::connect(&self.socket(template)).await {
            let process = Process::listener_of(&stream)
                .map_err(KindError::io("find the template process"))?;
            process.kill().map_err(KindError::io("kill the template process"))?;
            process.ended().await;
            // A socket without a listener is no harm, but looks like a template that runs.
            let _ = std::fs::remove_file(self.socket(template));
        }
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).remove(template);
        Ok(())
    }

    fn socket(&self, template: &TemplateName) -> PathBuf {
        self.layout.template_run(template).join("control.sock")
    }

    fn host(&self, template: &TemplateName) -> Arc<Host> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let host = hosts.entry(template.clone()).or_insert_with(|| {
            Arc::new(Host {
                places: Semaphore::new(self.spawns_max),
                waiting: AtomicUsize::new(0),
                starting: tokio::sync::Mutex::new(()),
            })
        });
        Arc::clone(host)
    }

    /// After a birth failed because somebody died: if it was the clone and not the
    /// template, the failure stands.
    async fn revive(
        &self,
        host: &Host,
        template: &TemplateName,
        cause: ControlError,
    ) -> Result<(), KindError> {
        let _guard = host.starting.lock().await;
        match self.status(template).await {
            Ok(_) if matches!(cause, ControlError::Closed { .. }) => Err(KindError::Refused {
                step: "fork the template process".to_owned(),
                message: "the clone ended during its birth".to_owned(),
                advice: "see vmm.log of the template".to_owned(),
            }),
            Ok(_) => Ok(()),
            Err(_) => {
                tracing::warn!(%template, error = %cause, "template process is not there, starting it");
                self.start(template).await.map(|_| ())
            }
        }
    }

    async fn start(&self, template: &TemplateName) -> Result<TemplateStatus, KindError> {
        let run = self.layout.template_run(template);
        let socket = self.socket(template);
        std::fs::create_dir_all(&run)
            .map_err(KindError::io("make the template's run directory"))?;
        let _ = std::fs::remove_file(&socket);
        let log_path = run.join("vmm.log");
        let log = std::fs::File::create(&log_path)
            .map_err(KindError::io("make the template process's log"))?;
        let log_too = log.try_clone().map_err(KindError::io("share the template process's log"))?;
        let mut child = tokio::process::Command::new(&self.vmm)
            .arg("template")
            .arg("--directory")
            .arg(self.layout.template(template))
            .arg("--socket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(log_too)
            .process_group(0)
            .spawn()
            .map_err(KindError::io(format!("start {}", self.vmm.display())))?;
        let deadline = tokio::time::Instant::now() + START_LIMIT;
        loop {
            match self.status(template).await {
                Ok(status) => {
                    tracing::info!(%template, pid = status.pid, "template process runs");
                    return Ok(status);
                }
                Err(ControlError::Connect { .. }) => {}
                Err(error) => {
                    let _ = child.start_kill();
                    return Err(error.into_kind("wait for the template process"));
                }
            }
            if let Ok(Some(status)) = child.try_wait() {
                return Err(KindError::Refused {
                    step: "start the template process".to_owned(),
                    message: format!("{status}: {}", process::tail_lines(&log_path, LOG_LINES)),
                    advice: String::new(),
                });
            }
            if tokio::time::Instant::now() > deadline {
                let _ = child.start_kill();
                return Err(KindError::Timeout("the start of the template process".to_owned()));
            }
            tokio::time::sleep(START_POLL).await;
        }
    }
}

/// A place in the queue.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(counter: &'a AtomicUsize) -> Option<Self> {
        let place = Self(counter);
        (counter.fetch_add(1, Ordering::Relaxed) < QUEUE_LENGTH_MAX).then_some(place)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

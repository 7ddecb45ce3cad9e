//! Contexts: what keeps state between cells.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::rc::{Rc, Weak};

use serde_json::{Value, json};
use warren_base::spawn::Terminal;

use super::install::Installed;
use super::kernel::{Kernel, KernelError, plumbing};
use super::language::Language;
use super::zygote::Zygote;
use crate::agent::Agent;
use crate::children::Program;
use crate::runtime::Lock;
use crate::users::User;

/// Where a context begins when nobody says.
const DEFAULT_DIRECTORY: &str = "/home/user";

/// All contexts.
pub struct Contexts {
    agent: Rc<Agent>,
    zygote: Zygote,
    installed: Installed,
    known: RefCell<Vec<Rc<Context>>>,
    this: Weak<Contexts>,
}

/// One context. Its process is started when it is first needed and again after
/// it died.
pub struct Context {
    pub id: String,
    pub language: Language,
    pub cwd: String,
    /// Cells run one at a time.
    pub turn: Lock,
    kernel: RefCell<Option<Rc<Kernel>>>,
    starting: Lock,
    /// The identity that the kernel has seen.
    generation: Cell<u64>,
    sandbox: RefCell<Option<String>>,
    is_default: bool,
    contexts: Weak<Contexts>,
}

impl Contexts {
    /// The default contexts, without processes.
    pub fn new(agent: Rc<Agent>) -> Rc<Self> {
        let contexts = Rc::new_cyclic(|this| Contexts {
            agent,
            zygote: Zygote::default(),
            installed: Installed::default(),
            known: RefCell::default(),
            this: this.clone(),
        });
        // The one that every client expects is always listed.
        contexts.default_of(Language::Python);
        contexts
    }

    /// The context of cells that name none.
    pub fn default_of(&self, language: Language) -> Rc<Context> {
        let found = self
            .known
            .borrow()
            .iter()
            .find(|context| context.is_default && context.language == language)
            .cloned();
        found.unwrap_or_else(|| self.add(language, self.default_directory(), true))
    }

    /// A new context, with its process.
    pub async fn create(
        &self,
        language: Language,
        cwd: Option<&str>,
    ) -> Result<Rc<Context>, KernelError> {
        let user = self.user()?;
        let cwd = match cwd.filter(|cwd| !cwd.is_empty()) {
            None => self.default_directory(),
            Some(cwd) => {
                let path = crate::paths::resolve(cwd, &user, self.agent.workdir().as_deref())
                    .map_err(|_| KernelError::Directory(cwd.to_owned()))?;
                path.to_string_lossy().into_owned()
            }
        };
        if !std::fs::metadata(&cwd).is_ok_and(|meta| meta.is_dir()) {
            return Err(KernelError::Directory(cwd));
        }
        let context = self.add(language, cwd, false);
        match context.kernel().await {
            Ok(_) => Ok(context),
            Err(error) => {
                self.remove(&context.id);
                Err(error)
            }
        }
    }

    /// A context by its id.
    pub fn find(&self, id: &str) -> Option<Rc<Context>> {
        self.known.borrow().iter().find(|context| context.id == id).cloned()
    }

    /// Forgets a context.
    pub fn remove(&self, id: &str) {
        self.known.borrow_mut().retain(|context| context.id != id);
    }

    /// All contexts as clients see them.
    pub fn list(&self) -> Vec<Value> {
        self.known.borrow().iter().map(|context| context.describe()).collect()
    }

    fn add(&self, language: Language, cwd: String, is_default: bool) -> Rc<Context> {
        let context = Rc::new(Context {
            id: new_id(),
            language,
            cwd,
            turn: Lock::default(),
            kernel: RefCell::default(),
            starting: Lock::default(),
            generation: Cell::new(0),
            sandbox: RefCell::default(),
            is_default,
            contexts: self.this.clone(),
        });
        self.known.borrow_mut().push(context.clone());
        context
    }

    fn default_directory(&self) -> String {
        let home = || self.user().map_or_else(|_| "/".to_owned(), |user| user.home.clone());
        let usual = std::fs::metadata(DEFAULT_DIRECTORY).is_ok_and(|meta| meta.is_dir());
        self.agent
            .workdir()
            .unwrap_or_else(|| if usual { DEFAULT_DIRECTORY.to_owned() } else { home() })
    }

    fn user(&self) -> Result<Rc<User>, KernelError> {
        self.agent.user(None).map_err(|error| KernelError::User(error.message))
    }

    fn start(&self, context: &Context) -> Result<Kernel, KernelError> {
        let user = self.user()?;
        let programs = self.installed.directory().map_err(KernelError::Install)?;
        let program = |name: &str| programs.join(name).to_string_lossy().into_owned();
        let environment = self.agent.environment(&user, &BTreeMap::new());
        match context.language {
            Language::Python => {
                let request = json!({
                    "cwd": context.cwd,
                    "environment": environment,
                    "seed": random_hex::<32>(),
                });
                self.zygote.fork(&self.agent, &user, &program("python"), &request)
            }
            Language::Bash => {
                let arguments =
                    ["--norc".to_owned(), "--noprofile".to_owned(), program("kernel.sh")];
                self.start_child(context, &user, "bash", &arguments, &environment)
            }
            Language::JavaScript => {
                let arguments = [program("kernel.js")];
                self.start_child(context, &user, "node", &arguments, &environment)
            }
        }
    }

    fn start_child(
        &self,
        context: &Context,
        user: &User,
        program: &'static str,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
    ) -> Result<Kernel, KernelError> {
        let (ours, theirs) = plumbing()?;
        let child = self
            .agent
            .children
            .start(&Program {
                command: program,
                arguments,
                environment,
                directory: &context.cwd,
                directory_is_default: context.is_default,
                identity: &user.identity,
                stdio: [
                    Some(theirs.control.as_fd()),
                    Some(theirs.stdout.as_fd()),
                    Some(theirs.stderr.as_fd()),
                ],
                terminal: Terminal::None,
            })
            .map_err(|source| KernelError::start(program, source))?;
        Ok(Kernel::new(ours, Some(child)))
    }

    /// The agent.
    pub fn agent(&self) -> &Rc<Agent> {
        &self.agent
    }

    /// Where cells of languages that read files can be put.
    pub fn scratch(&self) -> std::io::Result<&std::path::Path> {
        self.installed.directory()
    }
}

impl Context {
    /// The kernel, started if there is none.
    pub async fn kernel(&self) -> Result<Rc<Kernel>, KernelError> {
        let _turn = self.starting.acquire().await;
        if let Some(kernel) = self.kernel.borrow().as_ref() {
            return Ok(kernel.clone());
        }
        let contexts = self.owner()?;
        let kernel = Rc::new(contexts.start(self)?);
        kernel.ready(&self.cwd).await?;
        self.kernel.replace(Some(kernel.clone()));
        self.see_identity(&contexts.agent);
        Ok(kernel)
    }

    /// What of a new identity the kernel has to be told before its next cell:
    /// the environment, and for another sandbox a seed too.
    pub fn news(&self, agent: &Agent) -> (Option<BTreeMap<String, String>>, Option<String>) {
        if self.generation.get() == agent.generation.get() {
            return (None, None);
        }
        let before = self.sandbox.borrow().clone();
        self.see_identity(agent);
        let other = before != *self.sandbox.borrow();
        let settings = agent.settings.borrow();
        let mut environment = settings.identity.clone();
        environment.extend(settings.environment.clone());
        (Some(environment), other.then(random_hex::<32>))
    }

    fn see_identity(&self, agent: &Agent) {
        self.generation.set(agent.generation.get());
        let id = agent.settings.borrow().identity.get("WARREN_SANDBOX_ID").cloned();
        self.sandbox.replace(id);
    }

    /// Ends the kernel; the next cell starts another.
    pub fn stop(&self) {
        if let Some(kernel) = self.kernel.take() {
            kernel.kill();
        }
    }

    /// Forgets a kernel that died, unless another has taken its place.
    pub fn lost(&self, kernel: &Rc<Kernel>) {
        self.kernel.borrow_mut().take_if(|current| Rc::ptr_eq(current, kernel));
    }

    /// A fresh kernel.
    pub async fn restart(&self) -> Result<(), KernelError> {
        self.stop();
        self.kernel().await.map(drop)
    }

    /// The context as clients see it.
    pub fn describe(&self) -> Value {
        json!({ "id": self.id, "language": self.language.name(), "cwd": self.cwd })
    }

    /// Whose context this is.
    pub fn owner(&self) -> Result<Rc<Contexts>, KernelError> {
        self.contexts.upgrade().ok_or(KernelError::NotReady("has no owner any more"))
    }
}

fn new_id() -> String {
    let id = random_hex::<16>();
    format!("{}-{}-{}-{}-{}", &id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..])
}

/// Random bytes of the kernel as hexadecimal digits.
fn random_hex<const BYTES: usize>() -> String {
    let mut bytes = [0; BYTES];
    let flags = rustix::rand::GetRandomFlags::empty();
    let drawn = rustix::rand::getrandom(&mut bytes[..], flags);
    assert_eq!(drawn, Ok(BYTES), "short reads do not happen below 256 bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

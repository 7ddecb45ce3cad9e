//! What the services share: settings from `/init`, users, children.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, header};

use crate::children::Children;
use crate::connect::{Code, ConnectError};
use crate::init::Machine;
use crate::users::{User, Users};

/// The search path of processes that bring none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What `/init` may change.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Token that clients must show; none when not yet set.
    pub access_token: Option<String>,
    /// Environment of every process, from the sandbox's creator.
    pub environment: BTreeMap<String, String>,
    /// Environment that tells a process which sandbox it is in.
    pub identity: BTreeMap<String, String>,
    /// Whom to run as when a request names nobody.
    pub default_user: Option<String>,
    /// Where to run when a request names no place.
    pub default_workdir: Option<String>,
}

/// The agent.
pub struct Agent {
    /// Settings from `/init`.
    pub settings: RefCell<Settings>,
    /// Users of the sandbox.
    pub users: Users,
    /// Starting and reaping of processes.
    pub children: Rc<Children>,
    /// The kernel's part of the sandbox's identity.
    pub machine: Machine,
    /// How often an identity was taken; long-lived helpers compare it.
    pub generation: Cell<u64>,
}

impl Agent {
    /// An agent for the system it runs on.
    pub fn new(children: Rc<Children>, machine: Machine) -> Rc<Self> {
        Rc::new(Agent {
            settings: RefCell::default(),
            users: Users::of("/etc"),
            children,
            machine,
            generation: Cell::new(0),
        })
    }

    /// Whether `shown` is the token clients must show; anything is while none
    /// is set. Takes the same time wherever the two differ.
    pub fn token_is(&self, shown: Option<&str>) -> bool {
        let settings = self.settings.borrow();
        let Some(token) = settings.access_token.as_deref() else { return true };
        constant_time_eq(token.as_bytes(), shown.unwrap_or_default().as_bytes())
    }

    /// Whether a request shows the token in its header.
    pub fn header_token_ok(&self, headers: &HeaderMap) -> bool {
        self.token_is(headers.get("x-access-token").and_then(|value| value.to_str().ok()))
    }

    /// The user that a request names by `Authorization: Basic`, or the default.
    pub fn user_of(&self, headers: &HeaderMap) -> Result<Rc<User>, ConnectError> {
        let refuse = |message: &str| ConnectError::new(Code::Unauthenticated, message);
        let Some(value) = headers.get(header::AUTHORIZATION) else { return self.user(None) };
        let text = value.to_str().ok().filter(|text| {
            text.get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("basic "))
        });
        // Another scheme is not about users: proxies use this header too.
        let Some(text) = text else { return self.user(None) };
        let decoded =
            STANDARD.decode(text[6..].trim()).ok().and_then(|b| String::from_utf8(b).ok());
        let decoded = decoded.ok_or_else(|| refuse("the Authorization header is malformed"))?;
        let name = decoded.split(':').next().unwrap_or_default();
        self.user(Some(name).filter(|name| !name.is_empty()))
    }

    /// A user by name; `None` is the default user.
    pub fn user(&self, name: Option<&str>) -> Result<Rc<User>, ConnectError> {
        if let Some(name) = name {
            return self.users.named(name).ok_or_else(|| {
                ConnectError::new(Code::Unauthenticated, format!("invalid username: '{name}'"))
            });
        }
        let default = self.settings.borrow().default_user.clone();
        if let Some(name) = default {
            return self.user(Some(&name));
        }
        // Nobody was named, here or by /init: `user` where the image has it.
        self.users.named("user").map_or_else(|| self.user(Some("root")), Ok)
    }

    /// The environment of a process of `user`, later entries winning.
    pub fn environment(
        &self,
        user: &User,
        request: &BTreeMap<String, String>,
    ) -> BTreeMap<String, String> {
        let settings = self.settings.borrow();
        let mut environment = BTreeMap::from([
            ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
            ("HOME".to_owned(), user.home.clone()),
            ("USER".to_owned(), user.name.clone()),
            ("LOGNAME".to_owned(), user.name.clone()),
        ]);
        for layer in [&settings.identity, &settings.environment, request] {
            environment.extend(layer.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        environment
    }

    /// Where relative paths of requests start; `None` is the user's home.
    pub fn workdir(&self) -> Option<String> {
        self.settings.borrow().default_workdir.clone().filter(|dir| !dir.is_empty())
    }
}

/// Compares without telling where the difference is.
pub fn constant_time_eq(left: &[u8], right: &[u8]) -> bool {
    let difference = left.iter().zip(right).fold(0, |difference, (l, r)| difference | (l ^ r));
    std::hint::black_box(difference) == 0 && left.len() == right.len()
}

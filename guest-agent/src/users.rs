//! Users and groups, from `/etc/passwd` and `/etc/group`.
//!
//! The files are parsed once. An inotify descriptor on `/etc`, read before each
//! look-up, tells whether they may have changed: that is one cheap system call
//! where reading both files would be eight.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use warren_base::spawn::Identity;

/// A user of the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// Ids, supplementary groups included.
    pub identity: Identity,
    /// Home directory.
    pub home: String,
}

#[derive(Debug, Default)]
struct Database {
    users: HashMap<String, Rc<User>>,
    user_names: HashMap<u32, String>,
    group_names: HashMap<u32, String>,
}

/// The sandbox's users.
pub struct Users {
    root: PathBuf,
    changes: Option<OwnedFd>,
    known: RefCell<Option<Rc<Database>>>,
}

impl Users {
    /// Users of the system whose `etc` directory this is.
    pub fn of(etc: impl Into<PathBuf>) -> Self {
        let root = etc.into();
        let flags = CreateFlags::CLOEXEC | CreateFlags::NONBLOCK;
        let changes = inotify::init(flags).ok().filter(|fd| {
            let events = WatchFlags::CLOSE_WRITE
                | WatchFlags::MOVED_TO
                | WatchFlags::CREATE
                | WatchFlags::DELETE;
            inotify::add_watch(fd, &root, events).is_ok()
        });
        Users { root, changes, known: RefCell::default() }
    }

    /// The user of this name.
    pub fn named(&self, name: &str) -> Option<Rc<User>> {
        if self.changed() {
            self.known.take();
        }
        self.database().users.get(name).cloned()
    }

    /// Name of a user id, or the number. As of the last [`Users::named`], which
    /// every request begins with.
    pub fn user_name(&self, uid: u32) -> String {
        self.database().user_names.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// Name of a group id, or the number. As of the last [`Users::named`].
    pub fn group_name(&self, gid: u32) -> String {
        self.database().group_names.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }

    fn database(&self) -> Rc<Database> {
        if let Some(known) = self.known.borrow().as_ref() {
            return known.clone();
        }
        let text = |name: &str| {
            let bytes = std::fs::read(self.root.join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let database = Rc::new(Database::parse(&text("passwd"), &text("group")));
        self.known.replace(Some(database.clone()));
        database
    }

    fn changed(&self) -> bool {
        let Some(changes) = &self.changes else { return true };
        let mut buffer = [0; 4096];
        let mut changed = false;
        // Names are not looked at: a write to /etc is rare, and reading the two
        // files again is cheap beside it.
        while rustix::io::read(changes, &mut buffer[..]).is_ok_and(|count| count > 0) {
            changed = true;
        }
        changed
    }
}

impl Database {
    fn parse(passwd: &str, group: &str) -> Self {
        let mut database = Database::default();
        let mut memberships: HashMap<&str, Vec<u32>> = HashMap::new();
        for line in group.lines() {
            let mut fields = line.split(':');
            let (Some(name), Some(_), Some(gid)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let Ok(gid) = gid.parse::<u32>() else { continue };
            database.group_names.entry(gid).or_insert_with(|| name.to_owned());
            for member in fields.next().unwrap_or_default().split(',') {
                if !member.is_empty() {
                    memberships.entry(member).or_default().push(gid);
                }
            }
        }
        for line in passwd.lines() {
            let fields: Vec<_> = line.split(':').collect();
            let [name, _, uid, gid, _, home, ..] = fields[..] else { continue };
            let (Ok(uid), Ok(gid)) = (uid.parse::<u32>(), gid.parse::<u32>()) else { continue };
            if name.is_empty() {
                continue;
            }
            let mut groups = vec![gid];
            groups.extend(memberships.get(name).into_iter().flatten().filter(|g| **g != gid));
            let home = if home.is_empty() { "/" } else { home };
            let user = User {
                name: name.to_owned(),
                identity: Identity { uid, gid, groups },
                home: home.to_owned(),
            };
            database.user_names.entry(uid).or_insert_with(|| name.to_owned());
            database.users.entry(name.to_owned()).or_insert_with(|| Rc::new(user));
        }
        database
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:\n\
                          broken\nbad:x:none:0::/:\nnohome:x:1001:100:::\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:user\nusers:x:100:user\n";

    fn etc() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("passwd"), PASSWD).unwrap();
        std::fs::write(directory.path().join("group"), GROUP).unwrap();
        directory
    }

    #[test]
    fn named_user_has_supplementary_groups() {
        let etc = etc();
        let user = Users::of(etc.path()).named("user").unwrap();
        assert_eq!(user.identity.groups, [1000, 27, 100]);
        assert_eq!(user.home, "/home/user");
    }

    #[test]
    fn named_malformed_lines_are_skipped() {
        let etc = etc();
        let users = Users::of(etc.path());
        assert!(users.named("bad").is_none());
        assert_eq!(users.named("nohome").unwrap().home, "/");
    }

    #[test]
    fn named_user_added_later_is_found() {
        let etc = etc();
        let users = Users::of(etc.path());
        assert!(users.named("late").is_none());
        std::fs::write(etc.path().join("passwd"), "late:x:7:7::/late:/bin/sh\n").unwrap();
        assert_eq!(users.named("late").unwrap().identity.uid, 7);
        assert!(users.named("user").is_none());
    }

    #[test]
    fn names_unknown_ids_are_numbers() {
        let etc = etc();
        let users = Users::of(etc.path());
        assert_eq!(users.user_name(0), "root");
        assert_eq!(users.user_name(4242), "4242");
        assert_eq!(users.group_name(27), "sudo");
        assert_eq!(users.group_name(4242), "4242");
    }
}

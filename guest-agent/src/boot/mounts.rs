//! File systems of a microVM.
//!
//! The root is a read-only image. Where there is a writable disk, an overlay of
//! the disk over the image becomes the root:
//!
//! ```text
//!   /dev/vda  EROFS  ─ lower ─┐
//!   /dev/vdb  ext4   ─ upper ─┴─ overlay ─> /        /tmp lies on it
//! ```
//!
//! Without a disk the upper layer is a tmpfs, so that a guest can always write.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::Mode;
use rustix::mount::{MountFlags, UnmountFlags};

/// The writable disk.
const DISK: &str = "/dev/vdb";

/// Where the new root is put together: a directory that every image has.
const STAGE: &str = "/run";

/// What could not be mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// A mount failed.
    #[error("mount {what} on {place}")]
    Mount {
        /// The file system.
        what: &'static str,
        /// The mount point.
        place: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A directory, file or link could not be made.
    #[error("make {place}")]
    Make {
        /// Its path.
        place: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The root could not be changed.
    #[error("change the root to {place}")]
    Pivot {
        /// The new root.
        place: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// Mounts everything.
pub fn prepare() -> Result<(), MountError> {
    mount_devices()?;
    if !root_is_writable() {
        overlay_root()?;
    }
    mount_rest()?;
    identity_files();
    Ok(())
}

const NO_PROGRAMS: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

fn mount_devices() -> Result<(), MountError> {
    let flags = MountFlags::NOSUID;
    match mount("devtmpfs", "devtmpfs", "/dev", flags, Some(c"mode=0755")) {
        // The kernel may have mounted it already.
        Err(MountError::Mount { source, .. }) if source.raw_os_error() == Some(16) => Ok(()),
        other => other,
    }
}

fn root_is_writable() -> bool {
    rustix::fs::statvfs("/")
        .is_ok_and(|root| !root.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

fn overlay_root() -> Result<(), MountError> {
    mount("tmpfs", "tmpfs", STAGE, MountFlags::empty(), Some(c"mode=0755"))?;
    let at = |name: &str| format!("{STAGE}/{name}");
    let (disk, root) = (at("disk"), at("root"));
    make_directory(&disk)?;
    make_directory(&root)?;
    if Path::new(DISK).exists() {
        let options = c"noauto_da_alloc,errors=remount-ro";
        mount("ext4", DISK, &disk, MountFlags::NOATIME, Some(options))?;
    } else {
        crate::console::progress(format_args!("no {DISK}: writes go to memory"));
    }
    let (upper, work) = (format!("{disk}/upper"), format!("{disk}/work"));
    make_directory(&upper)?;
    make_directory(&work)?;
    let options = format!("lowerdir=/,upperdir={upper},workdir={work}");
    let options = std::ffi::CString::new(options).expect("no NUL in our paths");
    mount("overlay", "overlay", &root, MountFlags::NOATIME, Some(&options))?;
    // The old root goes where the stage was and is let go of: the overlay
    // holds what it needs of it. /dev moves along.
    let new_dev = format!("{root}/dev");
    rustix::mount::mount_move("/dev", &new_dev).map_err(|error| MountError::Mount {
        what: "/dev",
        place: new_dev,
        source: error.into(),
    })?;
    let pivot = || -> io::Result<()> {
        rustix::process::chdir(&root)?;
        match rustix::process::pivot_root(".", ".") {
            Ok(()) => rustix::mount::unmount(".", UnmountFlags::DETACH)?,
            // The first root of an initramfs cannot be left, only covered.
            Err(rustix::io::Errno::INVAL) => {
                rustix::mount::mount_move(".", "/")?;
                rustix::process::chroot(".")?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(rustix::process::chdir("/")?)
    };
    pivot().map_err(|source| MountError::Pivot { place: root, source })
}

fn mount_rest() -> Result<(), MountError> {
    let run = MountFlags::NOSUID | MountFlags::NODEV;
    mount("proc", "proc", "/proc", NO_PROGRAMS, None)?;
    mount("sysfs", "sysfs", "/sys", NO_PROGRAMS, None)?;
    mount("tmpfs", "tmpfs", "/run", run, Some(c"mode=0755"))?;
    for place in ["/dev/pts", "/dev/shm", "/run/lock"] {
        make_directory(place)?;
    }
    let pts = Some(c"gid=5,mode=620,ptmxmode=666");
    mount("devpts", "devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, pts)?;
    mount("tmpfs", "tmpfs", "/dev/shm", run, Some(c"mode=1777"))?;
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = rustix::fs::symlink(target, link);
    }
    // A kernel without control groups is a smaller kernel.
    let _ = mount("cgroup2", "cgroup2", "/sys/fs/cgroup", NO_PROGRAMS, None);
    make_directory("/tmp")?;
    let open = std::fs::Permissions::from_mode(0o1777);
    std::fs::set_permissions("/tmp", open)
        .map_err(|source| MountError::Make { place: "/tmp".to_owned(), source })
}

/// Files that `/init` rewrites for each clone live in /run, where a write costs
/// little; their usual places point there. None of them stops the boot.
fn identity_files() {
    let report = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            crate::console::error(format_args!("{what}: {error}"));
        }
    };
    report("write /run/machine-id", std::fs::write(crate::init::MACHINE_ID, "uninitialized\n"));
    let link = "/etc/machine-id";
    let _ = std::fs::remove_file(link);
    report(
        "link /etc/machine-id",
        rustix_result(rustix::fs::symlink(crate::init::MACHINE_ID, link)),
    );
    let kernel = crate::init::KERNEL_BOOT_ID;
    let copied = std::fs::read(kernel).and_then(|id| std::fs::write(crate::init::BOOT_ID, id));
    report("copy the boot id", copied);
    let bound = rustix::mount::mount_bind(crate::init::BOOT_ID, kernel);
    report("cover the boot id", rustix_result(bound));
    report("write /run/hosts", std::fs::write(crate::init::HOSTS, crate::init::hosts("sandbox")));
    // An image that brings its own table keeps it.
    let link = "/etc/hosts";
    if std::fs::read_to_string(link).is_ok_and(|text| text.trim().is_empty()) {
        let _ = std::fs::remove_file(link);
    }
    if !Path::new(link).exists() {
        report("link /etc/hosts", rustix_result(rustix::fs::symlink(crate::init::HOSTS, link)));
    }
}

fn rustix_result(result: rustix::io::Result<()>) -> io::Result<()> {
    result.map_err(Into::into)
}

fn make_directory(place: &str) -> Result<(), MountError> {
    match rustix::fs::mkdir(place, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => Err(MountError::Make { place: place.to_owned(), source: error.into() }),
    }
}

fn mount(
    what: &'static str,
    source: &str,
    place: &str,
    flags: MountFlags,
    options: Option<&std::ffi::CStr>,
) -> Result<(), MountError> {
    rustix::mount::mount(source, place, what, flags, options).map_err(|error| MountError::Mount {
        what,
        place: place.to_owned(),
        source: error.into(),
    })
}

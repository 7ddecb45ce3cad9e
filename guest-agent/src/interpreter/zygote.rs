//! The warm Python of which contexts are forked.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Signal;
use serde_json::Value;
use warren_base::spawn::Terminal;

use super::kernel::{Ends, Kernel, KernelError, borrowed, plumbing};
use crate::agent::Agent;
use crate::children::{Child, Program};
use crate::users::User;

/// Makes kernels; starts its process when there is none.
#[derive(Default)]
pub struct Zygote {
    running: RefCell<Option<Running>>,
}

struct Running {
    socket: OwnedFd,
    child: Child,
    user: String,
}

impl Zygote {
    /// A new kernel for `user`.
    pub fn fork(
        &self,
        agent: &Rc<Agent>,
        user: &User,
        program: &str,
        request: &Value,
    ) -> Result<Kernel, KernelError> {
        let (ours, theirs) = plumbing()?;
        // The process may have been killed since the last fork: then once more
        // with a new one.
        for _ in 0..2 {
            self.start(agent, user, program)?;
            let running = self.running.borrow();
            let running = running.as_ref().expect("just started");
            match send(&running.socket, request, &theirs) {
                Ok(()) => return Ok(Kernel::new(ours, None)),
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                Err(error) => return Err(KernelError::Zygote(error)),
            }
        }
        Err(KernelError::NotReady("ended at once"))
    }

    fn start(&self, agent: &Rc<Agent>, user: &User, program: &str) -> Result<(), KernelError> {
        let mut running = self.running.borrow_mut();
        if let Some(old) = running.as_ref() {
            if old.child.exit.status().is_none() && old.user == user.name {
                return Ok(());
            }
            old.child.signal_group(Signal::KILL);
            *running = None;
        }
        let flags = SocketFlags::CLOEXEC;
        let (socket, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(|error| KernelError::Plumbing(error.into()))?;
        let mut environment = agent.environment(user, &Default::default());
        environment.insert("PYTHONUTF8".to_owned(), "1".to_owned());
        environment.insert("PYTHONDONTWRITEBYTECODE".to_owned(), "1".to_owned());
        let child = agent
            .children
            .start(&Program {
                command: "python3",
                arguments: &[program.to_owned()],
                environment: &environment,
                directory: &user.home,
                directory_is_default: true,
                identity: &user.identity,
                stdio: [Some(theirs.as_fd()), None, Some(rustix::stdio::stderr())],
                terminal: Terminal::None,
            })
            .map_err(|source| KernelError::start("python3", source))?;
        *running = Some(Running { socket, child, user: user.name.clone() });
        Ok(())
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.child.signal_group(Signal::KILL);
        }
    }
}

fn send(socket: &OwnedFd, request: &Value, ends: &Ends) -> io::Result<()> {
    let bytes = serde_json::to_vec(request).expect("our messages have string keys");
    let descriptors = borrowed(ends);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let slices = [IoSlice::new(&bytes)];
    rustix::net::sendmsg(socket, &slices, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

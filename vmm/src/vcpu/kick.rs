//! Interrupting a thread inside `KVM_RUN`.

use std::cell::Cell;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::thread::JoinHandle;

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;

thread_local! {
    /// The shared page of this thread's vCPU, for the signal handler.
    static RUN: Cell<*mut kvm_run> = const { Cell::new(ptr::null_mut()) };
}

/// Real-time signal that only vCPU threads are sent.
fn number() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn handler(_: libc::c_int) {
    let run = RUN.get();
    if !run.is_null() {
        // SAFETY: the pointer is to the shared page of the vCPU that this very thread
        // owns, set by `enter` and cleared by `leave` before the page is unmapped.
        unsafe { ptr::addr_of_mut!((*run).immediate_exit).write_volatile(1) };
    }
}

/// Installs the handler for the process.
pub(super) fn install() -> std::io::Result<()> {
    // SAFETY: an all-zero sigaction is valid; the handler only writes one byte through a
    // thread-local pointer, which is async-signal-safe.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(number(), &raw const action, ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Makes this thread the one that runs `vcpu`.
pub(super) fn enter(vcpu: &mut VcpuFd) {
    RUN.set(vcpu.get_kvm_run());
}

/// This thread runs no vCPU any more.
pub(super) fn leave() {
    RUN.set(ptr::null_mut());
}

/// Interrupts `thread`. A thread that has ended is left alone by the kernel.
pub(super) fn send<T>(thread: &JoinHandle<T>) {
    // SAFETY: the handle keeps the thread joinable, so its id is not used again.
    let result = unsafe { libc::pthread_kill(thread.as_pthread_t(), number()) };
    if result != 0 {
        tracing::debug!(result, "vCPU thread not interrupted");
    }
}

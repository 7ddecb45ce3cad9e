//! Settings of this process that keep a microVM small and let it grow.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Call once, before the first thread.
pub fn prepare() {
    use_one_heap();
    allow_all_descriptors();
}

/// One heap for all threads. A heap of its own costs each vCPU thread an address range of
/// 128 MiB and several pages, for a few small allocations in its life.
fn use_one_heap() {
    // SAFETY: the call changes a setting of the allocator and touches no memory of ours.
    let accepted = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    if accepted == 0 {
        tracing::debug!("the allocator keeps a heap per thread");
    }
}

/// Connections of the guest are descriptors: take as many as the host allows.
fn allow_all_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "limit of descriptors stays as it is");
    }
}

//! Kernel settings. They make a guest cheap to run and quiet when idle; none of
//! them changes what a program sees, and a kernel that lacks one is left alone.

/// Settings and why.
const SETTINGS: [(&str, &str); 8] = [
    // Anonymous memory in pieces of 64 KiB: a third of the faults of allocating
    // programs, and no zeroing of whole huge pages.
    ("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled", "always"),
    ("/sys/kernel/mm/transparent_hugepage/enabled", "madvise"),
    // Programs that know better may ask; nothing scans for them.
    ("/sys/kernel/mm/transparent_hugepage/khugepaged/defrag", "0"),
    ("/sys/kernel/mm/ksm/run", "0"),
    // No periodic compaction and no periodic write-back: they wake an idle
    // guest. Dirty pages of the disk are part of the same image as the memory
    // that holds them, and go out by memory pressure and by sync.
    ("/proc/sys/vm/compaction_proactiveness", "0"),
    ("/proc/sys/vm/dirty_writeback_centisecs", "0"),
    ("/proc/sys/vm/stat_interval", "3600"),
    ("/proc/sys/kernel/hung_task_timeout_secs", "0"),
];

/// Applies what the kernel has.
pub fn apply() {
    for (path, value) in SETTINGS {
        let _ = std::fs::write(path, value);
    }
}

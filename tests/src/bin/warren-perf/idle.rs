//! What an idle sandbox costs: memory and CPU of the host.
//!
//! Memory is Δ MemAvailable ÷ N, all in. The split comes from the processes' own
//! accounts and from /proc/meminfo; what no counter shows is the difference.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::Subject;
use crate::quantile::rounded;

/// Clones settle for this long after the last create.
const SETTLE: Duration = Duration::from_secs(20);
/// CPU is counted over this time.
const WATCH: Duration = Duration::from_secs(60);

pub fn run(subject: &Subject, count: u32) {
    let first = subject.create();
    std::thread::sleep(Duration::from_secs(3));
    let before = Memory::now();
    eprintln!("creating {count} sandboxes");
    let sandboxes: Vec<_> = (0..count).map(|_| subject.create().id).collect();
    eprintln!("waiting {} s for them to settle", SETTLE.as_secs());
    std::thread::sleep(SETTLE);
    let after = Memory::now();
    let processes: Vec<u32> =
        sandboxes.iter().filter_map(|id| subject.node.process_of(id)).collect();
    let split = Split::of(&processes);
    eprintln!("counting CPU for {} s", WATCH.as_secs());
    let cpu = cpu_ms(&processes);
    let begin = Instant::now();
    std::thread::sleep(WATCH);
    let cpu = (cpu_ms(&processes) - cpu) / begin.elapsed().as_secs_f64();
    drop(first);

    let n = f64::from(count);
    let per_clone = |bytes: f64| (bytes / n).round();
    let kernel = (after.kernel_bytes - before.kernel_bytes) as f64;
    let report = json!({
        "n": count,
        "memory_mib": subject.memory_mib,
        "bytes_per_clone": per_clone((before.available_bytes - after.available_bytes) as f64),
        "process_bytes": per_clone((split.anonymous_bytes - split.guest_bytes) as f64),
        "kernel_bytes": per_clone(kernel),
        "page_table_bytes": per_clone((after.page_table_bytes - before.page_table_bytes) as f64),
        "guest_private_bytes": per_clone(split.guest_bytes as f64),
        "host_cpu_ms_per_clone_s": rounded(cpu / n),
    });
    println!("{report}");
}

/// The host's memory, from /proc/meminfo.
struct Memory {
    available_bytes: i64,
    kernel_bytes: i64,
    page_table_bytes: i64,
}

impl Memory {
    fn now() -> Self {
        let text = std::fs::read_to_string("/proc/meminfo").expect("read /proc/meminfo");
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            let number = line.split_whitespace().nth(1).and_then(|word| word.parse::<i64>().ok());
            number.unwrap_or(0) * 1024
        };
        Self {
            available_bytes: field("MemAvailable:"),
            kernel_bytes: field("Slab:")
                + field("KernelStack:")
                + field("VmallocUsed:")
                + field("Percpu:")
                + field("SecPageTables:"),
            page_table_bytes: field("PageTables:"),
        }
    }
}

/// Anonymous memory of the clones' processes.
struct Split {
    anonymous_bytes: i64,
    guest_bytes: i64,
}

impl Split {
    fn of(processes: &[u32]) -> Self {
        let mut split = Self { anonymous_bytes: 0, guest_bytes: 0 };
        for pid in processes {
            let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
            let (all, guest) = anonymous(&text);
            split.anonymous_bytes += all;
            split.guest_bytes += guest;
        }
        split
    }
}

/// Anonymous bytes of all mappings, and of those that are guest RAM: 2 MiB or more in
/// size, without a name or over the template's image.
fn anonymous(smaps: &str) -> (i64, i64) {
    const GUEST_MAPPING_BYTES_MIN: i64 = 2 << 20;
    let (mut all, mut guest) = (0, 0);
    let mut is_guest = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some((start, end)) = first.split_once('-')
            && let (Ok(start), Ok(end)) =
                (i64::from_str_radix(start, 16), i64::from_str_radix(end, 16))
        {
            let name = words.nth(4).unwrap_or_default();
            let named_for_guest = name.is_empty() || name.starts_with("/memfd:warren-template");
            is_guest = end - start >= GUEST_MAPPING_BYTES_MIN && named_for_guest;
        } else if first == "Anonymous:" {
            let bytes = words.next().and_then(|word| word.parse::<i64>().ok()).unwrap_or(0) * 1024;
            all += bytes;
            if is_guest {
                guest += bytes;
            }
        }
    }
    (all, guest)
}

/// CPU time of processes so far, in milliseconds.
fn cpu_ms(processes: &[u32]) -> f64 {
    let of = |pid: &u32| {
        // Nanoseconds on a CPU, of all threads.
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let times = tasks.filter_map(Result::ok).filter_map(|task| {
            let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse::<f64>().ok()
        });
        Some(times.sum::<f64>() / 1e6)
    };
    processes.iter().filter_map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ram_is_told_from_the_process() {
        let smaps = "7f0000000000-7f0008000000 rw-p 00000000 00:01 1 /memfd:warren-template (deleted)\n\
                     Anonymous:            40 kB\n\
                     7f0010000000-7f0010021000 rw-p 00000000 00:00 0 \n\
                     Anonymous:             8 kB\n\
                     7f0020000000-7f0040000000 rw-p 00000000 00:00 0 \n\
                     Anonymous:           100 kB\n";
        assert_eq!(anonymous(smaps), (148 * 1024, 140 * 1024));
    }
}

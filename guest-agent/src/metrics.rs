//! `GET /metrics`: what the sandbox uses. The files stay open, so a sample is
//! one call for each.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// More than the files have in a guest of 128 CPUs.
const READ_BYTES: usize = 64 * 1024;

/// One sample. Sizes are in bytes unless the name says otherwise.
#[derive(Debug, Serialize)]
pub struct Sample {
    ts: u64,
    cpu_count: usize,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Sampler of this system.
#[derive(Default)]
pub struct Metrics {
    files: RefCell<Option<(File, File)>>,
    last: Cell<Ticks>,
}

/// CPU time since the boot, in clock ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    total: u64,
}

impl Metrics {
    /// Takes a sample. CPU use is since the sample before, or since the boot.
    pub fn sample(&self) -> io::Result<Sample> {
        let mut files = self.files.borrow_mut();
        if files.is_none() {
            *files = Some((File::open("/proc/stat")?, File::open("/proc/meminfo")?));
        }
        let (stat, meminfo) = files.as_ref().expect("just opened");
        let (ticks, cpu_count) = parse_stat(&read(stat)?);
        let memory = parse_meminfo(&read(meminfo)?);
        let disk = rustix::fs::statvfs("/")?;
        let last = self.last.replace(ticks);
        let total = ticks.total.saturating_sub(last.total);
        let busy = ticks.busy.saturating_sub(last.busy);
        // Exact below 2^53 ticks, which no boot reaches.
        #[allow(clippy::cast_precision_loss)]
        let cpu_used_pct =
            if total == 0 { 0.0 } else { (busy as f64 / total as f64 * 10_000.0).round() / 100.0 };
        let ts = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Sample {
            ts,
            cpu_count,
            cpu_used_pct,
            mem_total: memory.total,
            mem_used: memory.used(),
            mem_cache: memory.cache,
            mem_total_mib: memory.total >> 20,
            mem_used_mib: memory.used() >> 20,
            disk_used: (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            disk_total: disk.f_blocks * disk.f_frsize,
        })
    }
}

fn read(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; READ_BYTES];
    let length = file.read_at(&mut bytes, 0)?;
    bytes.truncate(length);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn parse_stat(text: &str) -> (Ticks, usize) {
    let numbers = |line: &str| -> Vec<u64> {
        line.split_ascii_whitespace().skip(1).filter_map(|number| number.parse().ok()).collect()
    };
    let mut ticks = Ticks::default();
    let mut cpu_count = 0;
    for line in text.lines().take_while(|line| line.starts_with("cpu")) {
        if !line.starts_with("cpu ") {
            cpu_count += 1;
            continue;
        }
        // user nice system idle iowait irq softirq steal; guest time is part of
        // user time.
        let numbers = numbers(line);
        ticks.total = numbers.iter().take(8).sum();
        ticks.busy = ticks.total - numbers.iter().skip(3).take(2).sum::<u64>();
    }
    (ticks, cpu_count)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    total: u64,
    available: u64,
    cache: u64,
}

impl Memory {
    fn used(&self) -> u64 {
        self.total.saturating_sub(self.available)
    }
}

fn parse_meminfo(text: &str) -> Memory {
    let mut memory = Memory::default();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(name), Some(number)) = (words.next(), words.next()) else { continue };
        let bytes = number.parse::<u64>().unwrap_or(0) * 1024;
        match name {
            "MemTotal:" => memory.total = bytes,
            "MemAvailable:" => memory.available = bytes,
            "Cached:" | "SReclaimable:" => memory.cache += bytes,
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_stat_idle_time_is_not_busy() {
        let text = "cpu  10 0 20 60 10 0 0 0 5 0\ncpu0 5 0 0 0\ncpu1 5 0 0 0\nintr 1\n";
        assert_eq!(parse_stat(text), (Ticks { busy: 30, total: 100 }, 2));
    }

    #[test]
    fn parse_meminfo_sums_caches() {
        let text = "MemTotal: 100 kB\nMemAvailable: 60 kB\nCached: 5 kB\nSReclaimable: 2 kB\n";
        let memory = parse_meminfo(text);
        assert_eq!((memory.used(), memory.cache), (40 * 1024, 7 * 1024));
    }
}

//! What a create costs: the VMM's part alone, and until the agent has acknowledged.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warren_vmm_api::{SpawnRequest, TemplateClient, VmClient, VmVerb};

use crate::quantile::{quantile, rounded};
use crate::{Subject, floor, qemu};

/// Clones alive at once; each new one beyond ends the oldest.
const ALIVE_MAX: usize = 20;
/// Creates under way at once when the rate is measured.
const CONCURRENCY: u32 = 2;
const QEMU_STARTS: u32 = 3;
const TIMEOUT: Duration = Duration::from_secs(60);

pub fn run(subject: &Subject, count: u32) {
    let memory_mib = subject.memory_mib;
    // Starts the template process.
    drop(subject.create());

    eprintln!("floor and spawn, in turn ({count} of each)");
    let mut floors = Vec::new();
    let mut spawns = Spawns::default();
    let batch = 50.min(count);
    for _ in 0..count.div_ceil(batch) {
        floors.extend(floor::measure(batch, memory_mib));
        spawns.measure(subject, batch);
    }
    eprintln!(
        "spawn, parts at p50 in us: fork {}, VM {}, devices {}",
        quantile(&spawns.fork_us, 0.5),
        quantile(&spawns.vm_us, 0.5),
        quantile(&spawns.devices_us, 0.5)
    );

    eprintln!("create through the API, one at a time ({count})");
    let ready = creates(subject, count);
    eprintln!("create through the API, {CONCURRENCY} at a time ({count})");
    let rate = rate(subject, count);
    let work = work_of_one(subject);

    eprintln!("QEMU microvm, cold ({QEMU_STARTS})");
    let qemu = qemu::measure(subject.node.artifacts(), QEMU_STARTS, memory_mib);
    let or_null = |sample: &[f64]| {
        if sample.is_empty() { Value::Null } else { json!(rounded(quantile(sample, 0.5))) }
    };
    let report = json!({
        "creates": count,
        "creates_per_s": rounded(rate),
        "spawn_ms_p50": rounded(quantile(&spawns.total_ms, 0.5)),
        "spawn_ms_p99": rounded(quantile(&spawns.total_ms, 0.99)),
        "ready_ms_p50": rounded(quantile(&ready, 0.5)),
        "ready_ms_p99": rounded(quantile(&ready, 0.99)),
        "floor_ms_p50": rounded(quantile(&floors, 0.5)),
        "floor_ms_p99": rounded(quantile(&floors, 0.99)),
        "qemu_ready_ms_p50": or_null(&qemu),
        "ready_emulated_instructions": work.0,
        "ready_exits": work.1,
        "memory_mib": memory_mib,
    });
    println!("{report}");
}

#[derive(Default)]
struct Spawns {
    total_ms: Vec<f64>,
    fork_us: Vec<f64>,
    vm_us: Vec<f64>,
    devices_us: Vec<f64>,
}

impl Spawns {
    /// Spawns straight from the template process; each clone is stopped before the next.
    fn measure(&mut self, subject: &Subject, count: u32) {
        let templates = subject.node.run_directory().join("templates");
        let socket = templates.join(subject.template).join("control.sock");
        let template = TemplateClient::new(&socket, TIMEOUT);
        let scratch = tempfile::Builder::new().prefix("wp").tempdir_in("/tmp").expect("directory");
        for number in 0..count {
            let directory = scratch.path().join(number.to_string());
            std::fs::create_dir(&directory).expect("make a directory");
            let request = request(&directory);
            let begin = Instant::now();
            let reply = template.spawn(request).expect("spawn a clone");
            self.total_ms.push(begin.elapsed().as_secs_f64() * 1000.0);
            self.fork_us.push(reply.timings.fork_us as f64);
            self.vm_us.push(reply.timings.vm_us as f64);
            self.devices_us.push(reply.timings.devices_us as f64);
            let mut clone = VmClient::connect(&directory.join("control.sock"), TIMEOUT)
                .expect("connect to the clone");
            clone.verb(VmVerb::Stop).expect("stop the clone");
        }
    }
}

fn request(directory: &Path) -> SpawnRequest {
    SpawnRequest {
        id: "perf".to_owned(),
        directory: directory.to_owned(),
        disks: BTreeMap::from([("disk".to_owned(), directory.join("disk"))]),
        snapshot: None,
        layers: BTreeMap::new(),
    }
}

/// Milliseconds from request to 201: the agent has acknowledged by then.
fn creates(subject: &Subject, count: u32) -> Vec<f64> {
    let mut alive = std::collections::VecDeque::new();
    let sample = (0..count)
        .map(|_| {
            let begin = Instant::now();
            let sandbox = subject.create();
            let took = begin.elapsed().as_secs_f64() * 1000.0;
            alive.push_back(sandbox.id);
            if alive.len() > ALIVE_MAX
                && let Some(oldest) = alive.pop_front()
            {
                drop(subject.node.kill(&oldest));
            }
            took
        })
        .collect();
    alive.iter().for_each(|id| drop(subject.node.kill(id)));
    sample
}

/// Creates per second with [`CONCURRENCY`] clients, each killing what it made.
fn rate(subject: &Subject, count: u32) -> f64 {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENCY {
            scope.spawn(|| drop(creates(subject, count / CONCURRENCY)));
        }
    });
    f64::from(count) / begin.elapsed().as_secs_f64()
}

/// Instructions that KVM emulated and exits it took until the agent had acknowledged,
/// for one sandbox.
fn work_of_one(subject: &Subject) -> (Value, Value) {
    let sandbox = subject.create();
    let detail =
        subject.node.api().get(&format!("/v1/sandboxes/{}", sandbox.id)).expect(200).json();
    drop(subject.node.kill(&sandbox.id));
    let kvm = &detail["stats"]["vmm"]["kvm"];
    (kvm["emulated_instructions"].clone(), kvm["exits"].clone())
}

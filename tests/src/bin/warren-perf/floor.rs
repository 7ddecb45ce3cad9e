//! The floor: what `tests/perf/floor.c` measures, compiled with the C compiler at hand.

use std::path::PathBuf;
use std::process::Command;

/// Milliseconds from fork to the guest's first instruction, `count` times.
///
/// # Panics
/// If there is no C compiler or the program fails.
pub fn measure(count: u32, memory_mib: u32) -> Vec<f64> {
    let directory = tempfile::TempDir::new().expect("make a directory");
    let program = directory.path().join("floor");
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("perf/floor.c");
    let compiled = Command::new("cc").arg("-O2").arg("-o").arg(&program).arg(&source).status();
    assert!(compiled.is_ok_and(|status| status.success()), "compile {}", source.display());
    let output = Command::new(&program)
        .args([count.to_string(), memory_mib.to_string()])
        .output()
        .expect("run the floor program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| line.parse::<f64>().expect("microseconds") / 1000.0)
        .collect()
}

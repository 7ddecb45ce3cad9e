//! A clone that runs: its process, its sockets.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use warren_vmm_api::{VmStats, VmVerb};

use super::control;
use crate::kinds::{GuestPort, Instance, KindError};
use crate::process::{self, Process};

/// A guest on a slow host may need long to accept.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
const STATS_LIMIT: Duration = Duration::from_secs(5);
/// A killed process tears its VM down; more than this means the host is stuck.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// `OK <n>\n` with room to spare.
const GREETING_BYTES_MAX: usize = 32;

/// A clone that runs.
#[derive(Debug)]
pub struct Clone {
    process: Process,
    directory: PathBuf,
}

impl Clone {
    pub fn new(process: Process, directory: PathBuf) -> Self {
        Self { process, directory }
    }
}

impl Instance for Clone {
    fn connect(&self, port: GuestPort) -> BoxFuture<'_, io::Result<UnixStream>> {
        Box::pin(connect_vsock(self.directory.join("vsock.sock"), port))
    }

    fn stats(&self) -> BoxFuture<'_, Result<serde_json::Value, KindError>> {
        Box::pin(async move {
            let stats: VmStats =
                control::ask(&self.directory.join("control.sock"), VmVerb::Stats, STATS_LIMIT)
                    .await
                    .map_err(|error| error.into_kind("ask the VMM for its counters"))?;
            let pid = self.process.pid();
            let memory =
                tokio::task::spawn_blocking(move || resident(pid)).await.unwrap_or_default();
            Ok(json!({ "pid": pid, "vmm": stats, "memory": memory }))
        })
    }

    fn console(&self, bytes_max: u64) -> BoxFuture<'_, io::Result<Vec<u8>>> {
        let path = self.directory.join("console.log");
        Box::pin(async move {
            tokio::task::spawn_blocking(move || process::tail(&path, bytes_max))
                .await
                .map_err(io::Error::other)?
        })
    }

    fn stop(&self) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(async move {
            self.process.kill().map_err(KindError::io("kill the VMM"))?;
            tokio::time::timeout(STOP_LIMIT, self.process.ended())
                .await
                .map_err(|_| KindError::Timeout("the end of the killed VMM".to_owned()))
        })
    }

    fn ended(&self) -> BoxFuture<'static, ()> {
        let process = self.process.clone();
        Box::pin(async move { process.ended().await })
    }
}

/// Opens a stream to a guest port through the VMM's vsock socket.
pub async fn connect_vsock(path: PathBuf, port: GuestPort) -> io::Result<UnixStream> {
    tokio::time::timeout(CONNECT_LIMIT, async {
        let mut stream = control::connect(&path).await?;
        stream.write_all(format!("CONNECT {}\n", port.number()).as_bytes()).await?;
        read_greeting(&mut stream).await?;
        Ok(stream)
    })
    .await
    .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Reads `OK <n>\n` and not a byte more.
async fn read_greeting(stream: &mut UnixStream) -> io::Result<()> {
    let mut line = Vec::with_capacity(GREETING_BYTES_MAX);
    loop {
        // The peer closes without a word when nobody listens on the guest's port.
        let byte = match stream.read_u8().await {
            Ok(byte) => byte,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
                ) =>
            {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            Err(error) => return Err(error),
        };
        if byte == b'\n' {
            break;
        }
        if line.len() == GREETING_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "vsock greeting is too long"));
        }
        line.push(byte);
    }
    if line.starts_with(b"OK ") {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "vsock greeting is not OK"))
    }
}

/// Memory of a process as the kernel counts it, in bytes.
fn resident(pid: u32) -> serde_json::Value {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(Path::new(&path)).unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    };
    json!({
        "residentBytes": field("Rss:"),
        "proportionalBytes": field("Pss:"),
        "privateDirtyBytes": field("Private_Dirty:"),
        "swappedBytes": field("Swap:"),
    })
}

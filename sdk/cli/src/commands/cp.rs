//! `cp`: files between here and a sandbox.

use std::io;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::client::connect::Agent;
use crate::client::{Http, streamed};
use crate::error::CliError;
use crate::flags::Cp;
use crate::output::{self, Output};

/// Files are read in pieces of this size.
const PIECE_BYTES: usize = 256 * 1024;
/// Pieces read ahead of the network.
const PIECES_AHEAD: usize = 4;

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Stream,
    Local(PathBuf),
    Remote { sandbox: String, path: String },
}

pub(super) async fn cp(http: &Http, cp: &Cp, output: Output) -> Result<(), CliError> {
    let mut copier =
        Copier { recursive: cp.recursive, output, files: 0, bytes: 0, left_out: Vec::new() };
    match (place(&cp.source), place(&cp.destination)) {
        (Place::Remote { sandbox, path }, destination @ (Place::Local(_) | Place::Stream)) => {
            let agent = Agent::of(http, &sandbox, cp.user.as_deref()).await?;
            copier.fetch(&agent, &path, destination).await?;
        }
        (source @ (Place::Local(_) | Place::Stream), Place::Remote { sandbox, path }) => {
            let agent = Agent::of(http, &sandbox, cp.user.as_deref()).await?;
            copier.send(&agent, source, &path).await?;
        }
        (Place::Remote { .. }, Place::Remote { .. }) => {
            return Err(CliError::said(
                "both paths are in a sandbox",
                "copy to a local path first, or stream: warren cp A:PATH - | warren cp - B:PATH",
            ));
        }
        (Place::Local(_) | Place::Stream, Place::Local(_) | Place::Stream) => {
            return Err(CliError::said("neither path is in a sandbox", "write it as ID:PATH"));
        }
    }
    let Copier { files, bytes, left_out, .. } = copier;
    if output.is_json() {
        let value = serde_json::json!({"files": files, "bytes": bytes, "leftOut": left_out});
        output.result(&value, String::new);
    } else {
        output.progress(&format!("copied {files} file(s), {}", output::bytes(bytes)));
    }
    Ok(())
}

/// `ID:PATH` is remote when `ID` looks like one, so that `./a:b` stays local.
fn place(text: &str) -> Place {
    if text == "-" {
        return Place::Stream;
    }
    match text.split_once(':') {
        Some((sandbox, path))
            if !sandbox.is_empty() && sandbox.bytes().all(|byte| byte.is_ascii_alphanumeric()) =>
        {
            Place::Remote { sandbox: sandbox.to_owned(), path: path.to_owned() }
        }
        Some(_) | None => Place::Local(PathBuf::from(text)),
    }
}

struct Copier {
    recursive: bool,
    output: Output,
    files: u64,
    bytes: u64,
    /// Links and special files inside a directory.
    left_out: Vec<String>,
}

impl Copier {
    fn leave_out(&mut self, path: String) {
        self.output.progress(&format!("left out: {path} is a link or a special file"));
        self.left_out.push(path);
    }

    async fn send(&mut self, agent: &Agent, source: Place, path: &str) -> Result<(), CliError> {
        let local = match source {
            Place::Local(local) => local,
            Place::Stream | Place::Remote { .. } => {
                return self.send_stream(agent, tokio::io::stdin(), None, path).await;
            }
        };
        let name = file_name(&local)?;
        let into = path.is_empty()
            || path.ends_with('/')
            || agent.stat(path).await?.is_some_and(|entry| entry.is_directory());
        let target = if into { join(path, &name) } else { path.to_owned() };

        let mut left = vec![(local, target)];
        let mut is_named = true;
        while let Some((local, target)) = left.pop() {
            // What the user names may be a link; what a directory holds is copied as it is.
            let named = std::mem::replace(&mut is_named, false);
            let metadata = match named {
                true => tokio::fs::metadata(&local).await,
                false => tokio::fs::symlink_metadata(&local).await,
            };
            let metadata = metadata.map_err(CliError::file("look at", &local))?;
            if !named && !metadata.is_dir() && !metadata.is_file() {
                self.leave_out(local.display().to_string());
                continue;
            }
            if !metadata.is_dir() {
                let file =
                    tokio::fs::File::open(&local).await.map_err(CliError::file("open", &local))?;
                self.output_file(&target);
                let length = metadata.is_file().then_some(metadata.len());
                self.send_stream(agent, file, length, &target).await?;
                continue;
            }
            self.need_recursive(&local.display().to_string())?;
            agent.make_directory(&target).await?;
            let list = CliError::file("list", &local);
            for entry in read_directory(&local).await.map_err(list)? {
                let target = join(&target, &file_name(&entry)?);
                left.push((entry, target));
            }
        }
        Ok(())
    }

    async fn send_stream(
        &mut self,
        agent: &Agent,
        reader: impl AsyncRead + Send + Unpin + 'static,
        length: Option<u64>,
        path: &str,
    ) -> Result<(), CliError> {
        let (pieces, body) = mpsc::channel(PIECES_AHEAD);
        let reading = tokio::spawn(read_pieces(reader, pieces));
        agent.upload(path, length, streamed(body)).await?;
        let count = reading
            .await
            .map_err(|error| CliError::io("read the file")(io::Error::other(error)))?;
        self.files += 1;
        self.bytes += count;
        Ok(())
    }

    async fn fetch(
        &mut self,
        agent: &Agent,
        path: &str,
        destination: Place,
    ) -> Result<(), CliError> {
        let entry = agent.stat(path).await?.ok_or_else(|| {
            CliError::said(
                format!("there is no {path} in the sandbox"),
                "check the path: warren exec ID -- ls",
            )
        })?;
        let local = match destination {
            Place::Local(local) => local,
            Place::Stream | Place::Remote { .. } => {
                return self.fetch_file(agent, &entry.path, &mut tokio::io::stdout()).await;
            }
        };
        let local = if local.is_dir() { local.join(&entry.name) } else { local };
        let mut left = vec![(entry, local)];
        while let Some((entry, local)) = left.pop() {
            if !entry.is_directory() {
                let mut file = tokio::fs::File::create(&local)
                    .await
                    .map_err(CliError::file("create", &local))?;
                self.output_file(&entry.path);
                self.fetch_file(agent, &entry.path, &mut file).await?;
                continue;
            }
            self.need_recursive(&entry.path)?;
            tokio::fs::create_dir_all(&local).await.map_err(CliError::file("create", &local))?;
            for inner in agent.list(&entry.path).await? {
                if !inner.is_directory() && !inner.is_file() {
                    self.leave_out(inner.path);
                    continue;
                }
                let local = local.join(plain_name(&inner.name)?);
                left.push((inner, local));
            }
        }
        Ok(())
    }

    async fn fetch_file(
        &mut self,
        agent: &Agent,
        path: &str,
        writer: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), CliError> {
        let mut download = agent.download(path).await?;
        let mut count = 0;
        while let Some(piece) = download.next().await? {
            writer.write_all(&piece).await.map_err(CliError::io("write the copy"))?;
            count += piece.len() as u64;
        }
        writer.flush().await.map_err(CliError::io("write the copy"))?;
        if download.length.is_some_and(|length| length != count) {
            return Err(CliError::said(
                format!("{path} arrived short: {count} bytes of {}", download.length.unwrap_or(0)),
                "copy it again",
            ));
        }
        self.files += 1;
        self.bytes += count;
        Ok(())
    }

    fn need_recursive(&self, path: &str) -> Result<(), CliError> {
        if self.recursive {
            return Ok(());
        }
        Err(CliError::said(format!("{path} is a directory"), "copy it with -r"))
    }

    /// With -r a copy may be long: name each file.
    fn output_file(&self, path: &str) {
        if self.recursive && output::stderr_is_terminal() {
            self.output.progress(path);
        }
    }
}

/// Reads to the end, hands on pieces, returns the bytes read. A read error goes
/// to the receiver, which fails the request.
async fn read_pieces(
    mut reader: impl AsyncRead + Unpin,
    pieces: mpsc::Sender<io::Result<bytes::Bytes>>,
) -> u64 {
    let mut total = 0;
    loop {
        let mut buffer = bytes::BytesMut::with_capacity(PIECE_BYTES);
        let piece = match reader.read_buf(&mut buffer).await {
            Ok(0) => return total,
            Ok(count) => {
                total += count as u64;
                Ok(buffer.freeze())
            }
            Err(error) => Err(error),
        };
        let failed = piece.is_err();
        if pieces.send(piece).await.is_err() || failed {
            return total;
        }
    }
}

async fn read_directory(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut reader = tokio::fs::read_dir(path).await?;
    let mut entries = Vec::new();
    while let Some(entry) = reader.next_entry().await? {
        entries.push(entry.path());
    }
    Ok(entries)
}

fn join(directory: &str, name: &str) -> String {
    if directory.is_empty() {
        name.to_owned()
    } else {
        format!("{}/{name}", directory.trim_end_matches('/'))
    }
}

fn file_name(path: &Path) -> Result<String, CliError> {
    let canonical;
    let named = match path.file_name() {
        Some(_) => path,
        None => {
            canonical = path.canonicalize().map_err(CliError::file("look at", path))?;
            &canonical
        }
    };
    named.file_name().and_then(|name| name.to_str()).map(str::to_owned).ok_or_else(|| {
        CliError::said(format!("{} has no name that is text", path.display()), "rename it first")
    })
}

/// A name from a sandbox is hostile: it must not lead out of the directory.
fn plain_name(name: &str) -> Result<&str, CliError> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(CliError::said(
            format!("the sandbox names a file {name:?}"),
            "copy the other files one by one",
        ));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_with_an_id_is_remote() {
        let remote = Place::Remote { sandbox: "abc1".to_owned(), path: "/etc/hosts".to_owned() };
        assert_eq!(place("abc1:/etc/hosts"), remote);
        assert_eq!(place("./a:b"), Place::Local(PathBuf::from("./a:b")));
        assert_eq!(place("-"), Place::Stream);
    }

    #[test]
    fn plain_name_refuses_a_way_out() {
        assert!(plain_name("..").is_err());
        assert!(plain_name("a/b").is_err());
        assert_eq!(plain_name("a b").unwrap(), "a b");
    }

    #[test]
    fn join_keeps_relative_paths_relative() {
        assert_eq!(join("", "a"), "a");
        assert_eq!(join("/tmp/", "a"), "/tmp/a");
        assert_eq!(join("/", "a"), "/a");
    }
}

//! Downloads.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::task::{Context, Poll};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use rustix::fs::OFlags;

use super::FileError;
use super::encoding::{self, Coding};
use crate::http::{Body, ChunkStream, Reply};

/// Bytes read and sent at once.
const CHUNK_BYTES: usize = 128 * 1024;

/// Below this gzip makes a reply longer or saves nothing.
const GZIP_BYTES_MIN: u64 = 1024;

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0x5a; CHUNK_BYTES]);
}

/// Answers with the file's bytes.
pub fn answer(path: &Path, headers: &HeaderMap) -> Result<Reply, FileError> {
    let shown = path.display();
    // Without the flag, opening a FIFO would wait for a writer.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("a small constant");
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let mut file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            FileError::new(StatusCode::NOT_FOUND, format!("path '{shown}' does not exist"))
        }
        _ => FileError::from_io(format_args!("open '{shown}'"), &error),
    })?;
    let meta = file
        .metadata()
        .map_err(|error| FileError::from_io(format_args!("stat '{shown}'"), &error))?;
    if meta.is_dir() {
        return Err(FileError::bad_request(format_args!("path '{shown}' is a directory")));
    }
    if !meta.is_file() {
        return Err(FileError::bad_request(format_args!("path '{shown}' is not a regular file")));
    }
    let coding = encoding::wanted(headers)?;
    let length = meta.len();
    let mut reply = Reply::new(Body::Empty);
    let range = headers.get(header::RANGE).filter(|_| length > 0);
    if let Some(range) = range.and_then(|value| parse_range(value, length)) {
        let Ok((start, end)) = range else {
            let message = format!("the file has {length} bytes");
            return Err(FileError::new(StatusCode::RANGE_NOT_SATISFIABLE, message));
        };
        file.seek(SeekFrom::Start(start))
            .map_err(|error| FileError::from_io(format_args!("seek in '{shown}'"), &error))?;
        *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
        let value = format!("bytes {start}-{}/{length}", end - 1);
        let value = HeaderValue::try_from(value).expect("digits are valid in a header");
        reply.headers_mut().insert(header::CONTENT_RANGE, value);
        *reply.body_mut() = Body::stream(FileStream::new(file, Some(end - start)));
    } else if coding == Coding::Gzip && length >= GZIP_BYTES_MIN {
        let encoder = GzEncoder::new(Vec::new(), Compression::fast());
        let file = FileStream::new(file, None);
        *reply.body_mut() = Body::stream(GzipStream { file, encoder: Some(encoder) });
        let gzip = HeaderValue::from_static("gzip");
        reply.headers_mut().insert(header::CONTENT_ENCODING, gzip);
    } else {
        // Files of /proc claim to be empty: their length is known at the end, and some
        // refuse to be read at all.
        let left = Some(length).filter(|length| *length > 0);
        let mut stream = FileStream::new(file, left);
        if left.is_none() {
            stream
                .read_ahead()
                .map_err(|error| FileError::from_io(format_args!("read '{shown}'"), &error))?;
        }
        *reply.body_mut() = Body::stream(stream);
    }
    let headers = reply.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    Ok(reply)
}

/// One range of a `Range` header as start and end; `None` when the header is
/// of a form we do not serve, which means the whole file.
fn parse_range(value: &HeaderValue, length: u64) -> Option<Result<(u64, u64), ()>> {
    let (start, end) = value.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    let (start, end) = (start.trim(), end.trim());
    if start.is_empty() {
        let suffix: u64 = end.parse().ok()?;
        if suffix == 0 {
            return Some(Err(()));
        }
        return Some(Ok((length.saturating_sub(suffix), length)));
    }
    let start: u64 = start.parse().ok()?;
    let end = if end.is_empty() { length } else { end.parse::<u64>().ok()?.saturating_add(1) };
    if start >= length || start >= end {
        return Some(Err(()));
    }
    Some(Ok((start, end.min(length))))
}

struct FileStream {
    file: File,
    /// Bytes promised to the client; `None` is until the end.
    left: Option<u64>,
    /// What was read before the answer began.
    ahead: Option<Bytes>,
}

impl FileStream {
    fn new(file: File, left: Option<u64>) -> Self {
        Self { file, left, ahead: None }
    }

    /// Reads the first bytes, so that a file which cannot be read is told in the status.
    fn read_ahead(&mut self) -> io::Result<()> {
        self.ahead = Some(self.read()?);
        Ok(())
    }

    fn read(&mut self) -> io::Result<Bytes> {
        let limit =
            self.left.map_or(usize::MAX, |left| usize::try_from(left).unwrap_or(usize::MAX));
        SCRATCH.with_borrow_mut(|scratch| {
            let room = limit.min(scratch.len());
            if room == 0 {
                return Ok(Bytes::new());
            }
            let count = rustix::io::read(&self.file, &mut scratch[..room])?;
            if let Some(left) = &mut self.left {
                if count == 0 {
                    // The connection breaks, which tells the client that the
                    // file became shorter under its hands.
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                *left -= u64::try_from(count).expect("a read is small");
            }
            Ok(Bytes::copy_from_slice(&scratch[..count]))
        })
    }
}

impl ChunkStream for FileStream {
    fn poll_chunk(&mut self, _: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        match self.ahead.take().map_or_else(|| self.read(), Ok) {
            Ok(bytes) if bytes.is_empty() => Poll::Ready(None),
            other => Poll::Ready(Some(other)),
        }
    }

    fn length(&self) -> Option<u64> {
        self.left
    }
}

struct GzipStream {
    file: FileStream,
    encoder: Option<GzEncoder<Vec<u8>>>,
}

impl GzipStream {
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        let Some(mut encoder) = self.encoder.take() else { return Ok(None) };
        loop {
            let plain = self.file.read()?;
            if plain.is_empty() {
                return Ok(Some(encoder.finish()?.into()));
            }
            encoder.write_all(&plain)?;
            let packed = std::mem::take(encoder.get_mut());
            if !packed.is_empty() {
                self.encoder = Some(encoder);
                return Ok(Some(packed.into()));
            }
        }
    }
}

impl ChunkStream for GzipStream {
    fn poll_chunk(&mut self, _: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        Poll::Ready(self.next().transpose())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Option<Result<(u64, u64), ()>> {
        parse_range(&HeaderValue::from_str(text).unwrap(), 100)
    }

    #[test]
    fn parse_range_forms() {
        assert_eq!(range("bytes=0-9"), Some(Ok((0, 10))));
        assert_eq!(range("bytes=90-"), Some(Ok((90, 100))));
        assert_eq!(range("bytes=-5"), Some(Ok((95, 100))));
        assert_eq!(range("bytes=50-500"), Some(Ok((50, 100))));
        assert_eq!(range("bytes=100-"), Some(Err(())));
        assert_eq!(range("bytes=0-1,5-6"), None);
        assert_eq!(range("lines=1-2"), None);
    }
}

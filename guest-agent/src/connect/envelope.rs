//! Envelopes: one byte of flags, four of length, then a JSON message.

use bytes::{Bytes, BytesMut};
use serde::Serialize;

use super::{Code, ConnectError};
use crate::http::RequestBody;

const HEADER_BYTES: usize = 5;
const FLAG_COMPRESSED: u8 = 1;
const FLAG_END: u8 = 2;

/// Wraps the message that `write` appends.
pub fn frame(capacity: usize, write: impl FnOnce(&mut Vec<u8>)) -> Bytes {
    enveloped(0, capacity, write)
}

/// Wraps a message.
pub fn frame_json(message: &impl Serialize) -> Bytes {
    frame(128, |out| serde_json::to_writer(out, message).expect("our messages have string keys"))
}

/// The frame that ends a stream.
pub fn last_frame(error: Option<&ConnectError>) -> Bytes {
    enveloped(FLAG_END, 128, |out| match error {
        None => out.extend_from_slice(b"{}"),
        Some(error) => {
            let value = serde_json::json!({ "error": error.to_json() });
            serde_json::to_writer(out, &value).expect("our messages have string keys");
        }
    })
}

/// The frame that ends a stream well.
pub fn end_frame() -> Bytes {
    Bytes::from_static(&[FLAG_END, 0, 0, 0, 2, b'{', b'}'])
}

fn enveloped(flags: u8, capacity: usize, write: impl FnOnce(&mut Vec<u8>)) -> Bytes {
    let mut out = Vec::with_capacity(HEADER_BYTES + capacity);
    out.extend_from_slice(&[flags, 0, 0, 0, 0]);
    write(&mut out);
    let length = u32::try_from(out.len() - HEADER_BYTES).expect("our messages are small");
    out[1..HEADER_BYTES].copy_from_slice(&length.to_be_bytes());
    out.into()
}

/// Envelopes of a request's body.
pub struct Envelopes {
    body: RequestBody,
    buffer: BytesMut,
    limit: usize,
}

impl Envelopes {
    /// Reads from `body` messages of at most `limit` bytes.
    pub fn new(body: RequestBody, limit: usize) -> Self {
        Envelopes { body, buffer: BytesMut::new(), limit }
    }

    /// The next message; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ConnectError> {
        loop {
            if let Some((flags, message)) = take(&mut self.buffer, self.limit)? {
                return match flags {
                    0 => Ok(Some(message)),
                    FLAG_END => Ok(None),
                    _ => Err(ConnectError::new(
                        Code::Unimplemented,
                        if flags & FLAG_COMPRESSED != 0 {
                            "compressed messages are not supported".to_owned()
                        } else {
                            format!("unknown envelope flags {flags:#x}")
                        },
                    )),
                };
            }
            match self.body.next().await {
                Some(Ok(chunk)) => self.buffer.extend_from_slice(&chunk),
                Some(Err(_)) => {
                    return Err(ConnectError::new(Code::Canceled, "the client went away"));
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => {
                    let message = "the stream ends in the middle of a message";
                    return Err(ConnectError::new(Code::InvalidArgument, message));
                }
            }
        }
    }
}

fn take(buffer: &mut BytesMut, limit: usize) -> Result<Option<(u8, Bytes)>, ConnectError> {
    let Some([flags, length @ ..]) = buffer.first_chunk::<HEADER_BYTES>().copied() else {
        return Ok(None);
    };
    let length = usize::try_from(u32::from_be_bytes(length)).expect("usize has 64 bits");
    if length > limit {
        let message = format!("a message of {length} bytes is larger than {limit}");
        return Err(ConnectError::new(Code::ResourceExhausted, message));
    }
    if buffer.len() < HEADER_BYTES + length {
        return Ok(None);
    }
    let _ = buffer.split_to(HEADER_BYTES);
    Ok(Some((flags, buffer.split_to(length).freeze())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_round_trip() {
        let mut buffer = BytesMut::from(&frame_json(&serde_json::json!({"a": 1}))[..]);
        buffer.extend_from_slice(&end_frame());
        let (flags, message) = take(&mut buffer, 100).unwrap().unwrap();
        assert_eq!((flags, &message[..]), (0, &b"{\"a\":1}"[..]));
        let (flags, message) = take(&mut buffer, 100).unwrap().unwrap();
        assert_eq!((flags, &message[..]), (FLAG_END, &b"{}"[..]));
        assert!(take(&mut buffer, 100).unwrap().is_none());
    }

    #[test]
    fn take_partial_waits_for_more() {
        let whole = frame_json(&"hello");
        for length in 0..whole.len() {
            let mut buffer = BytesMut::from(&whole[..length]);
            assert!(take(&mut buffer, 100).unwrap().is_none());
        }
    }

    #[test]
    fn take_oversized_is_refused() {
        let mut buffer = BytesMut::from(&[0, 0xff, 0xff, 0xff, 0xff][..]);
        assert_eq!(take(&mut buffer, 100).unwrap_err().code, Code::ResourceExhausted);
    }
}

//! Enveloped messages of the Connect protocol.

use serde_json::Value;

const HEADER_BYTES: usize = 5;

/// One message in its envelope.
pub(crate) fn envelope(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let length = u32::try_from(text.len()).expect("requests are small");
    let mut bytes = vec![0];
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// All messages of a stream, the end-of-stream message last.
pub(crate) fn messages(mut bytes: &[u8]) -> Vec<Value> {
    let mut found = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let [_, a, b, c, d] = *header;
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).expect("32 bits fit");
        assert!(rest.len() >= length, "the stream was cut inside a message");
        let (message, after) = rest.split_at(length);
        found.push(serde_json::from_slice(message).expect("messages are JSON"));
        bytes = after;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_is_the_inverse_of_envelope() {
        let message = serde_json::json!({"a": 1});
        let bytes = [envelope(&message), envelope(&message)].concat();
        assert_eq!(messages(&bytes), [message.clone(), message]);
    }
}

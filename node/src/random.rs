//! Random names, tokens and seeds from the kernel's generator.

use rustix::rand::{GetRandomFlags, getrandom};

const BASE36: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
const HEX: &[u8; 16] = b"0123456789abcdef";

/// `N` random bytes.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut buffer = [0; N];
    let mut filled = 0;
    while filled < N {
        // Fails only with EINTR (retried) or on kernels older than 3.17.
        if let Ok(count) = getrandom(&mut buffer[filled..], GetRandomFlags::empty()) {
            filled += count;
        }
    }
    buffer
}

/// `length` characters of `[0-9a-z]`, unbiased.
pub fn base36(length: usize) -> String {
    let mut text = String::with_capacity(length);
    while text.len() < length {
        for byte in bytes::<32>() {
            // 252 is the largest multiple of 36 in a byte.
            if byte < 252 && text.len() < length {
                text.push(char::from(BASE36[usize::from(byte % 36)]));
            }
        }
    }
    text
}

/// `N` random bytes in lower-case hexadecimal.
pub fn hex<const N: usize>() -> String {
    encode_hex(&bytes::<N>())
}

/// Lower-case hexadecimal.
pub fn encode_hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(HEX[usize::from(byte >> 4)]));
        text.push(char::from(HEX[usize::from(byte & 15)]));
    }
    text
}

/// A random UUID (version 4, RFC 9562).
pub fn uuid() -> String {
    let mut bytes = bytes::<16>();
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex = encode_hex(&bytes);
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base36_has_length_and_alphabet() {
        let text = base36(100);
        assert_eq!(text.len(), 100);
        assert!(text.bytes().all(|byte| BASE36.contains(&byte)));
    }

    #[test]
    fn uuid_has_version_and_variant() {
        let text = uuid();
        assert_eq!(text.len(), 36);
        assert_eq!(&text[14..15], "4");
        assert!(matches!(&text[19..20], "8" | "9" | "a" | "b"));
    }
}

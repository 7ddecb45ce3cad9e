//! Output as text: UTF-8 decoded piece by piece.

/// A decoder that keeps the beginning of a character for the next piece.
#[derive(Debug, Default)]
pub struct TextDecoder(Vec<u8>);

impl TextDecoder {
    /// The text of the next piece; bytes that are no text are replaced.
    pub fn decode(&mut self, piece: &[u8]) -> String {
        self.0.extend_from_slice(piece);
        let keep = incomplete_tail(&self.0);
        let tail = self.0.split_off(self.0.len() - keep);
        let whole = std::mem::replace(&mut self.0, tail);
        String::from_utf8_lossy(&whole).into_owned()
    }

    /// What is left at the end.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.0)).into_owned()
    }
}

/// How many bytes at the end may be the beginning of a character.
fn incomplete_tail(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let byte = bytes[bytes.len() - back];
        let needs = match byte {
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            0x80..=0xbf => continue,
            _ => return 0,
        };
        return if needs > back { back } else { 0 };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn decode_keeps_half_a_character() {
        let mut decoder = TextDecoder::default();
        assert_eq!(decoder.decode(&[b'a', 0xe2, 0x82]), "a");
        assert_eq!(decoder.decode(&[0xac]), "€");
        assert_eq!(decoder.decode(&[0xff, b'b']), "\u{fffd}b");
        decoder.decode(&[0xf0]);
        assert_eq!(decoder.finish(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn decode_pieces_equal_the_whole(text in "\\PC{0,40}", cut in 1usize..8) {
            let mut decoder = TextDecoder::default();
            let mut got: String = text.as_bytes().chunks(cut).map(|p| decoder.decode(p)).collect();
            got.push_str(&decoder.finish());
            prop_assert_eq!(got, text);
        }
    }
}

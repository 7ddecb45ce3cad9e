//! `multipart/form-data`, parsed as it arrives.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memmem;

use super::FileError;
use super::encoding::PlainBody;

/// Headers of one part; ours have two short ones.
const PART_HEADERS_BYTES_MAX: usize = 16 * 1024;

/// Longest boundary that the format allows.
const BOUNDARY_BYTES_MAX: usize = 70;

/// Blanks that may stand behind a boundary.
const PADDING_BYTES_MAX: usize = 256;

/// What a part says of itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Name of the form's field.
    pub name: String,
    /// File name, with its path when the client sent one.
    pub file_name: Option<String>,
}

/// A form being read.
pub struct Multipart<'a> {
    body: &'a mut PlainBody,
    parser: Parser,
}

impl<'a> Multipart<'a> {
    /// Reads a form whose content type this is.
    pub fn new(content_type: &str, body: &'a mut PlainBody) -> Result<Self, FileError> {
        let boundary = parameter(content_type, "boundary")
            .filter(|boundary| (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len()))
            .ok_or_else(|| {
                FileError::bad_request("the multipart boundary is missing or too long")
            })?;
        Ok(Multipart { body, parser: Parser::new(&boundary) })
    }

    /// The next part; what is left of the one before is passed over.
    pub async fn next_part(&mut self) -> Result<Option<Part>, FileError> {
        loop {
            match self.parser.next_part()? {
                Step::Done(part) => return Ok(part),
                Step::NeedMore => self.fill().await?,
            }
        }
    }

    /// The next bytes of the current part; `None` at its end.
    pub async fn next_chunk(&mut self) -> Result<Option<Bytes>, FileError> {
        loop {
            match self.parser.next_chunk() {
                Step::Done(chunk) => return Ok(chunk),
                Step::NeedMore => self.fill().await?,
            }
        }
    }

    async fn fill(&mut self) -> Result<(), FileError> {
        match self.body.next().await? {
            Some(chunk) => self.parser.feed(&chunk),
            None => {
                let message = "the multipart body ends before its last boundary";
                return Err(FileError::bad_request(message));
            }
        }
        Ok(())
    }
}

enum Step<T> {
    Done(T),
    NeedMore,
}

/// The form without its input: bytes are fed, parts and chunks come out.
struct Parser {
    /// Line break, two dashes, boundary.
    delimiter: Vec<u8>,
    buffer: BytesMut,
    in_part: bool,
}

impl Parser {
    fn new(boundary: &str) -> Self {
        // The first boundary may stand at the very beginning: with a line break
        // before it, it is like any other.
        let delimiter = format!("\r\n--{boundary}").into_bytes();
        Parser { delimiter, buffer: BytesMut::from(&b"\r\n"[..]), in_part: true }
    }

    fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    fn next_part(&mut self) -> Result<Step<Option<Part>>, FileError> {
        while self.in_part {
            match self.next_chunk() {
                Step::Done(_) => {}
                Step::NeedMore => return Ok(Step::NeedMore),
            }
        }
        let after = &self.buffer[self.delimiter.len()..];
        if after.starts_with(b"--") {
            return Ok(Step::Done(None));
        }
        let Some(end) = memmem::find(after, b"\r\n\r\n") else {
            if after.len() > PART_HEADERS_BYTES_MAX {
                return Err(FileError::bad_request("the headers of a part are too long"));
            }
            return Ok(Step::NeedMore);
        };
        let headers = String::from_utf8(after[..end].to_vec())
            .map_err(|_| FileError::bad_request("the headers of a part are not UTF-8"))?;
        self.buffer.advance(self.delimiter.len() + end + 4);
        self.in_part = true;
        Ok(Step::Done(Some(describe(&headers))))
    }

    fn next_chunk(&mut self) -> Step<Option<Bytes>> {
        if !self.in_part {
            return Step::Done(None);
        }
        match self.find_delimiter() {
            (Some(0), Follows::Line) => {
                self.in_part = false;
                Step::Done(None)
            }
            (Some(0), Follows::Unknown) => Step::NeedMore,
            (Some(index), _) => Step::Done(Some(self.buffer.split_to(index).freeze())),
            (None, _) => {
                // The end of the buffer may be the beginning of a boundary.
                let safe = (self.buffer.len() + 1).saturating_sub(self.delimiter.len());
                if safe == 0 {
                    return Step::NeedMore;
                }
                Step::Done(Some(self.buffer.split_to(safe).freeze()))
            }
        }
    }

    /// The first place that is a boundary, or may be one when more is known:
    /// text that only begins like one is content.
    fn find_delimiter(&self) -> (Option<usize>, Follows) {
        let mut from = 0;
        while let Some(index) = memmem::find(&self.buffer[from..], &self.delimiter) {
            let index = from + index;
            match follows(&self.buffer[index + self.delimiter.len()..]) {
                Follows::Content => from = index + 1,
                other => return (Some(index), other),
            }
        }
        (None, Follows::Content)
    }
}

/// What stands behind a boundary's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Follows {
    /// The end of a boundary line, or of the whole form.
    Line,
    /// Something else: it was no boundary.
    Content,
    /// Not enough to tell.
    Unknown,
}

fn follows(after: &[u8]) -> Follows {
    let blanks = after.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    match (blanks, &after[blanks..]) {
        (0, [b'-', b'-', ..]) | (_, [b'\r', b'\n', ..]) => Follows::Line,
        (PADDING_BYTES_MAX.., _) => Follows::Content,
        (0, [b'-']) | (_, [] | [b'\r']) => Follows::Unknown,
        _ => Follows::Content,
    }
}

fn describe(headers: &str) -> Part {
    let disposition = headers.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    });
    let value = disposition.unwrap_or_default();
    Part {
        name: parameter(value, "name").unwrap_or_default(),
        file_name: parameter(value, "filename"),
    }
}

/// A parameter of a header's value, quoted or not. Clients escape a quote in
/// one of two ways, by a backslash or by `%22`; both are undone.
fn parameter(value: &str, wanted: &str) -> Option<String> {
    let mut rest = value.split_once(';')?.1;
    loop {
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (text, next) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        if name.trim_matches([' ', ';', '\t']).eq_ignore_ascii_case(wanted) {
            return Some(text);
        }
        rest = next;
    }
}

fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut characters = quoted.char_indices();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => {
                let text = text.replace("%22", "\"").replace("%0D", "\r").replace("%0A", "\n");
                return Some((text, &quoted[index + 1..]));
            }
            '\\' => text.push(characters.next()?.1),
            other => text.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Parts = Vec<(Part, Vec<u8>)>;

    fn parse(boundary: &str, body: &[u8], step: usize) -> Result<Parts, FileError> {
        let mut parser = Parser::new(boundary);
        let mut pieces = body.chunks(step);
        let mut parts = Parts::new();
        let mut more = |parser: &mut Parser| match pieces.next() {
            Some(piece) => {
                parser.feed(piece);
                Ok(())
            }
            None => Err(FileError::bad_request("short")),
        };
        loop {
            match parser.next_part()? {
                Step::NeedMore => more(&mut parser)?,
                Step::Done(None) => return Ok(parts),
                Step::Done(Some(part)) => parts.push((part, Vec::new())),
            }
            while let Some((_, content)) = parts.last_mut() {
                match parser.next_chunk() {
                    Step::NeedMore => more(&mut parser)?,
                    Step::Done(None) => break,
                    Step::Done(Some(chunk)) => content.extend_from_slice(&chunk),
                }
            }
        }
    }

    #[test]
    fn parse_two_files_of_any_split() {
        let body = b"preamble\r\n--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a \\\"b\"\r\n\
            Content-Type: x/y\r\n\r\none\r\n--Bx\r\n--B \r\ncontent-disposition: form-data; filename=c%22d; name=file\r\n\r\n\r\n--B--\r\n";
        for step in 1..body.len() {
            let parts = parse("B", body, step).unwrap();
            assert_eq!(parts[0].0.file_name.as_deref(), Some("/a \"b"));
            assert_eq!(parts[0].1, b"one\r\n--Bx");
            assert_eq!(parts[1].0.name, "file");
            assert_eq!(parts[1].1, b"");
            assert_eq!(parts.len(), 2);
        }
    }

    #[test]
    fn parse_cut_body_is_an_error() {
        assert!(parse("B", b"--B\r\n\r\n\r\nabc", 3).is_err());
    }

    proptest! {
        #[test]
        fn parse_returns_what_was_put_in(
            contents in prop::collection::vec(prop::collection::vec(prop::sample::select(b"\r\n-Bx".to_vec()), 0..60), 0..5),
            step in 1usize..50,
        ) {
            let boundary = "BBxB";
            let delimiter = b"\r\n--BBxB";
            prop_assume!(contents.iter().all(|content| {
                let framed = [b"\r\n", &content[..], b"\r\n--BBx"].concat();
                memmem::find(&framed, delimiter).is_none()
            }));
            let mut body = Vec::new();
            for content in &contents {
                body.extend_from_slice(b"--BBxB\r\nContent-Disposition: form-data; name=\"f\"\r\n\r\n");
                body.extend_from_slice(content);
                body.extend_from_slice(b"\r\n");
            }
            body.extend_from_slice(b"--BBxB--");
            let parts = parse(boundary, &body, step).unwrap();
            let got: Vec<_> = parts.into_iter().map(|(_, content)| content).collect();
            prop_assert_eq!(got, contents);
        }

        #[test]
        fn parse_garbage_does_not_panic(body in prop::collection::vec(any::<u8>(), 0..500), step in 1usize..50) {
            let _ = parse("B", &body, step);
        }
    }
}

//! Content codings: gzip and none.

use std::io::Write;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http::{HeaderMap, StatusCode, header};

use super::FileError;
use crate::http::RequestBody;

/// Compressed bytes decoded at once. Gzip expands at most about 1030 times, so
/// this bounds what one step can make out of them to some 4 MiB.
const COMPRESSED_STEP_BYTES: usize = 4 * 1024;

/// A coding of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// As it is.
    Identity,
    /// Compressed.
    Gzip,
}

/// The coding a client wants most among those we have.
pub fn wanted(headers: &HeaderMap) -> Result<Coding, FileError> {
    let Some(value) = headers.get(header::ACCEPT_ENCODING) else { return Ok(Coding::Identity) };
    let text = value.to_str().unwrap_or_default();
    let (mut gzip, mut identity, mut any) = (None, None, None);
    for item in text.split(',').filter(|item| !item.trim().is_empty()) {
        let (name, weight) = item.split_once(";").unwrap_or((item, "q=1"));
        let weight = weight.trim().strip_prefix("q=").and_then(|q| q.trim().parse::<f32>().ok());
        let weight = weight.unwrap_or(1.0);
        match name.trim().to_ascii_lowercase().as_str() {
            "gzip" | "x-gzip" => gzip = Some(weight),
            "identity" => identity = Some(weight),
            "*" => any = Some(weight),
            _ => {}
        }
    }
    let gzip = gzip.or(any).unwrap_or(0.0);
    // Identity is acceptable unless it is ruled out.
    let identity_allowed = identity.or(any.filter(|weight| *weight == 0.0)).unwrap_or(0.001);
    if gzip > 0.0 && gzip >= identity_allowed {
        return Ok(Coding::Gzip);
    }
    if identity_allowed > 0.0 {
        return Ok(Coding::Identity);
    }
    let message = "none of the accepted encodings is available: gzip, identity";
    Err(FileError::new(StatusCode::NOT_ACCEPTABLE, message))
}

/// A request's body with its coding undone.
pub struct PlainBody {
    body: RequestBody,
    decoder: Option<MultiGzDecoder<Vec<u8>>>,
    pending: Bytes,
}

impl PlainBody {
    /// Reads `body` as it is.
    pub fn new(body: RequestBody) -> Self {
        PlainBody { body, decoder: None, pending: Bytes::new() }
    }

    /// Undoes the coding that the headers describe.
    pub fn decode(&mut self, headers: &HeaderMap) -> Result<(), FileError> {
        let coding = headers.get(header::CONTENT_ENCODING).and_then(|value| value.to_str().ok());
        self.decoder = match coding.map(|coding| coding.trim().to_ascii_lowercase()).as_deref() {
            None | Some("" | "identity") => None,
            Some("gzip" | "x-gzip") => Some(MultiGzDecoder::new(Vec::new())),
            Some(other) => {
                let message = format!("the content encoding {other:?} is not supported");
                return Err(FileError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
            }
        };
        Ok(())
    }

    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, FileError> {
        let broken = |error: std::io::Error| {
            FileError::bad_request(format_args!("decompress the request body: {error}"))
        };
        loop {
            if self.pending.is_empty() {
                match self.body.next().await {
                    Some(Ok(chunk)) => self.pending = chunk,
                    Some(Err(error)) => {
                        let message = format_args!("read the request body: {error}");
                        return Err(FileError::bad_request(message));
                    }
                    None => {
                        let Some(decoder) = self.decoder.take() else { return Ok(None) };
                        // Tells whether the end of the compressed data was there.
                        let rest = decoder.finish().map_err(broken)?;
                        return Ok(Some(rest.into()).filter(|rest: &Bytes| !rest.is_empty()));
                    }
                }
            }
            let Some(decoder) = &mut self.decoder else {
                return Ok(Some(std::mem::take(&mut self.pending)));
            };
            let step = self.pending.split_to(self.pending.len().min(COMPRESSED_STEP_BYTES));
            decoder.write_all(&step).map_err(broken)?;
            let plain = std::mem::take(decoder.get_mut());
            if !plain.is_empty() {
                return Ok(Some(plain.into()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coding(accept: &str) -> Result<Coding, StatusCode> {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, accept.parse().unwrap());
        wanted(&headers).map_err(|error| error.status)
    }

    #[test]
    fn wanted_prefers_by_weight() {
        assert_eq!(coding("gzip"), Ok(Coding::Gzip));
        assert_eq!(coding("br, gzip;q=0.5"), Ok(Coding::Gzip));
        assert_eq!(coding("gzip;q=0.1, identity;q=0.9"), Ok(Coding::Identity));
        assert_eq!(coding("br"), Ok(Coding::Identity));
        assert_eq!(coding("gzip;q=0"), Ok(Coding::Identity));
    }

    #[test]
    fn wanted_nothing_we_have_is_refused() {
        assert_eq!(coding("br, identity;q=0"), Err(StatusCode::NOT_ACCEPTABLE));
        assert_eq!(coding("br, *;q=0"), Err(StatusCode::NOT_ACCEPTABLE));
    }
}

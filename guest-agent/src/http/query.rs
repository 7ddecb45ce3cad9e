//! Query strings.

/// Decoded parameters of a request's query.
#[derive(Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Parses a query string; parameters that are not UTF-8 when decoded are an
    /// error naming the parameter.
    pub fn parse(text: Option<&str>) -> Result<Self, String> {
        let pairs = text.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let decode = |text: &str| {
            let plain = text.replace('+', " ");
            String::from_utf8(percent_decode(&plain))
                .map_err(|_| format!("the query parameter {text:?} is not UTF-8"))
        };
        pairs
            .map(|pair| {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                Ok((decode(key)?, decode(value)?))
            })
            .collect::<Result<_, _>>()
            .map(Query)
    }

    /// The first value of a parameter.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Replaces `%XX`; a malformed escape stays as it is.
pub fn percent_decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let escape = bytes[index..].strip_prefix(b"%").and_then(|rest| rest.first_chunk::<2>());
        let value = escape.and_then(|hex| {
            let hex = std::str::from_utf8(hex).ok().filter(|hex| !hex.starts_with('+'))?;
            u8::from_str_radix(hex, 16).ok()
        });
        decoded.push(value.unwrap_or(bytes[index]));
        index += if value.is_some() { 3 } else { 1 };
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_escapes_and_plus_are_decoded() {
        let query = Query::parse(Some("path=%2Fa+b%c3%a9&x&bad=%zz")).unwrap();
        assert_eq!(query.value("path"), Some("/a bé"));
        assert_eq!(query.value("x"), Some(""));
        assert_eq!(query.value("bad"), Some("%zz"));
        assert_eq!(query.value("none"), None);
    }

    #[test]
    fn parse_invalid_utf8_is_refused() {
        assert!(Query::parse(Some("path=%ff")).is_err());
    }
}

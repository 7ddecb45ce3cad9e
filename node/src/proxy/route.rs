//! Whom a request is for.
//!
//! 1. A host name `<port>-<id>.<rest>` names a sandbox.
//! 2. Else the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port` do; one alone is an error.
//! 3. Else a signed `/files` link is for the sandbox whose token it was signed with.
//! 4. Everything else is for the API.

use http::header::HeaderMap;
use http::uri::Uri;

use super::signature::SignedLink;
use crate::ids::SandboxId;

pub const SANDBOX_ID_HEADER: &str = "e2b-sandbox-id";
pub const SANDBOX_PORT_HEADER: &str = "e2b-sandbox-port";

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub id: SandboxId,
    pub port: u16,
}

/// Whom a request is for.
#[derive(Debug, PartialEq, Eq)]
pub enum Route {
    Api,
    Sandbox(Target),
    SignedFile(SignedLink),
    Refuse(RouteError),
}

/// Why nobody can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    #[error("missing header")]
    MissingHeader,
    #[error("Invalid sandbox port")]
    Port,
    #[error("Invalid sandbox ID")]
    Id,
}

/// Decides by host, headers and path.
pub fn route(uri: &Uri, headers: &HeaderMap) -> Route {
    let host = uri.host().or_else(|| headers.get(http::header::HOST)?.to_str().ok());
    if let Some((port, id)) = host.and_then(sandbox_host) {
        return target(port, id);
    }
    match (text(headers, SANDBOX_ID_HEADER), text(headers, SANDBOX_PORT_HEADER)) {
        (Some(id), Some(port)) => target(port, id),
        (Some(_), None) | (None, Some(_)) => Route::Refuse(RouteError::MissingHeader),
        (None, None) => match SignedLink::of(uri) {
            Some(link) => Route::SignedFile(link),
            None => Route::Api,
        },
    }
}

/// `(port, id)` of a host name that has the form of a sandbox's.
fn sandbox_host(host: &str) -> Option<(&str, &str)> {
    let (label, _) = host.split_once('.')?;
    let (port, id) = label.split_once('-')?;
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    is_port.then_some((port, id))
}

fn target(port: &str, id: &str) -> Route {
    let Ok(id) = SandboxId::parse(id) else { return Route::Refuse(RouteError::Id) };
    match port.parse() {
        Ok(port) if port != 0 => Route::Sandbox(Target { id, port }),
        Ok(_) | Err(_) => Route::Refuse(RouteError::Port),
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    // Bytes that are not text can be no id and no port; an empty text is neither.
    headers.get(name).map(|value| value.to_str().unwrap_or("?")).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decide(uri: &str, headers: &[(&'static str, &str)]) -> Route {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        route(&uri.parse().unwrap(), &map)
    }

    fn sandbox(id: &str, port: u16) -> Route {
        Route::Sandbox(Target { id: SandboxId::parse(id).unwrap(), port })
    }

    #[test]
    fn headers_name_the_sandbox() {
        let headers = [
            ("host", "127.0.0.1:3000"),
            (SANDBOX_ID_HEADER, "abc"),
            (SANDBOX_PORT_HEADER, "49983"),
        ];
        assert_eq!(decide("/health", &headers), sandbox("abc", 49983));
    }

    #[test]
    fn host_names_the_sandbox_and_wins_over_headers() {
        let headers = [
            ("host", "3000-abc.sbx.test:8443"),
            (SANDBOX_ID_HEADER, "other"),
            (SANDBOX_PORT_HEADER, "1"),
        ];
        assert_eq!(decide("/", &headers), sandbox("abc", 3000));
    }

    #[test]
    fn host_in_the_request_line_counts() {
        assert_eq!(decide("http://3000-abc.sbx.test/x", &[]), sandbox("abc", 3000));
    }

    #[test]
    fn one_header_alone_is_refused() {
        let refused = Route::Refuse(RouteError::MissingHeader);
        assert_eq!(decide("/", &[(SANDBOX_ID_HEADER, "abc")]), refused);
        assert_eq!(decide("/", &[(SANDBOX_PORT_HEADER, "1")]), refused);
    }

    #[test]
    fn bad_port_and_bad_id_are_refused() {
        let with = |id: &str, port: &str| {
            decide("/", &[(SANDBOX_ID_HEADER, id), (SANDBOX_PORT_HEADER, port)])
        };
        assert_eq!(with("abc", "0"), Route::Refuse(RouteError::Port));
        assert_eq!(with("abc", "70000"), Route::Refuse(RouteError::Port));
        assert_eq!(with("a-b", "1"), Route::Refuse(RouteError::Id));
        assert_eq!(decide("/", &[("host", "70000-abc.x")]), Route::Refuse(RouteError::Port));
    }

    #[test]
    fn ordinary_hosts_are_the_api() {
        for host in ["127.0.0.1:3000", "localhost", "api.sbx.test", "my-node.example", "[::1]:3000"]
        {
            assert_eq!(decide("/v2/sandboxes", &[("host", host)]), Route::Api, "{host}");
        }
    }

    #[test]
    fn signed_file_link_is_recognised() {
        let route = decide("/files?path=%2Fa&signature=v1_x", &[("host", "127.0.0.1")]);
        assert!(matches!(route, Route::SignedFile(_)));
        assert_eq!(decide("/files?path=%2Fa", &[]), Route::Api);
    }

    proptest! {
        #[test]
        fn any_sandbox_host_is_found(port in 1u16.., id in "[a-z0-9]{1,48}", rest in "[a-z.]{1,20}") {
            let host = format!("{port}-{id}.{rest}");
            prop_assert_eq!(decide("/", &[("host", &host)]), sandbox(&id, port));
        }

        #[test]
        fn no_host_panics(host in "[ -~]{0,60}") {
            if let Ok(value) = host.parse::<http::HeaderValue>() {
                let mut headers = HeaderMap::new();
                headers.insert("host", value);
                let _ = route(&"/".parse().unwrap(), &headers);
            }
        }
    }
}

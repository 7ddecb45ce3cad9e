//! What is passed on: everything but what concerns one connection only
//! (RFC 9110, section 7.6.1).

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::route::{SANDBOX_ID_HEADER, SANDBOX_PORT_HEADER};

const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::PROXY_AUTHORIZATION,
];

/// The protocol that both ends want to switch to, if the message asks for one.
pub fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let wants = connection_options(headers).any(|option| option == "upgrade");
    wants.then(|| headers.get(header::UPGRADE).cloned()).flatten()
}

/// Removes what concerns one connection only. `upgrade` is put back if given.
pub fn strip_hop_by_hop(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    let named: Vec<HeaderName> =
        connection_options(headers).filter_map(|option| option.parse().ok()).collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol);
    }
}

/// Prepares a request's headers for the guest.
pub fn to_guest(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    strip_hop_by_hop(headers, upgrade);
    headers.remove(SANDBOX_ID_HEADER);
    headers.remove(SANDBOX_PORT_HEADER);
    // This side has answered it already.
    headers.remove(header::EXPECT);
    if let Some(host) = headers.get(header::HOST).cloned() {
        headers.entry("x-forwarded-host").or_insert(host);
    }
}

fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = String> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|option| option.trim().to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in list {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn headers_named_by_connection_go() {
        let mut map = headers(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("x-public", "2"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
        ]);
        strip_hop_by_hop(&mut map, None);
        assert_eq!(map, headers(&[("x-public", "2")]));
    }

    #[test]
    fn upgrade_is_kept_only_when_asked_for() {
        let map = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        let protocol = upgrade(&map);
        assert_eq!(protocol, Some(HeaderValue::from_static("websocket")));
        let mut passed = map.clone();
        to_guest(&mut passed, protocol);
        assert_eq!(passed, headers(&[("connection", "upgrade"), ("upgrade", "websocket")]));
        assert_eq!(upgrade(&headers(&[("upgrade", "h2c")])), None);
    }

    #[test]
    fn routing_headers_do_not_reach_the_guest() {
        let mut map =
            headers(&[(SANDBOX_ID_HEADER, "a"), (SANDBOX_PORT_HEADER, "1"), ("host", "h")]);
        to_guest(&mut map, None);
        assert_eq!(map, headers(&[("host", "h"), ("x-forwarded-host", "h")]));
    }
}

//! Lists of sandboxes: filters, order and pages.
//!
//! A page token names the last element of the page before it, so pages are right even
//! while sandboxes come and go.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderName, HeaderValue, Uri};
use jiff::Timestamp;
use percent_encoding::percent_decode_str;

use super::{ApiError, App, view};
use crate::store::SandboxRecord;

const PAGE_DEFAULT: usize = 100;
const PAGE_MAX: usize = 100;
const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
const RUNNING: &str = "running";
const PAUSED: &str = "paused";

/// What a list shall contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    metadata: BTreeMap<String, String>,
    /// Whether running ones are wanted.
    running: bool,
    /// Whether paused ones are wanted.
    paused: bool,
    template: Option<String>,
    started_after: Option<Timestamp>,
    order: Order,
    limit: usize,
    after: Option<Cursor>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Ascending,
    Descending,
}

/// Place of a sandbox in a list.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Cursor {
    started_at: Timestamp,
    id: String,
}

impl Cursor {
    fn of(record: &SandboxRecord) -> Self {
        Self { started_at: record.started_at, id: record.id.to_string() }
    }

    fn token(&self) -> String {
        URL_SAFE_NO_PAD.encode(format!("{} {}", self.started_at.as_nanosecond(), self.id))
    }

    fn parse(token: &str) -> Option<Self> {
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
        let (nanoseconds, id) = text.split_once(' ')?;
        let started_at = Timestamp::from_nanosecond(nanoseconds.parse().ok()?).ok()?;
        Some(Self { started_at, id: id.to_owned() })
    }
}

impl Query {
    fn parse(query: &str) -> Result<Self, ApiError> {
        let mut parsed = Self {
            metadata: BTreeMap::new(),
            running: true,
            paused: true,
            template: None,
            started_after: None,
            order: Order::Descending,
            limit: PAGE_DEFAULT,
            after: None,
        };
        let mut states: Vec<String> = Vec::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match name.as_ref() {
                "metadata" => parsed.metadata.extend(metadata(&value)),
                "state" => states.extend(value.split(',').map(str::to_owned)),
                "template" => parsed.template = Some(value.into_owned()),
                "startedAfter" => parsed.started_after = Some(timestamp(&value)?),
                "order" => parsed.order = order(&value)?,
                "limit" => parsed.limit = limit(&value)?,
                "nextToken" => {
                    let cursor = Cursor::parse(&value)
                        .ok_or_else(|| ApiError::bad_request("nextToken is not valid"))?;
                    parsed.after = Some(cursor);
                }
                _ => {}
            }
        }
        states.retain(|state| !state.is_empty());
        if let Some(unknown) = states.iter().find(|state| *state != RUNNING && *state != PAUSED) {
            let message = format!("state {unknown:?} is neither running nor paused");
            return Err(ApiError::bad_request(message));
        }
        let wants = |name: &str| states.is_empty() || states.iter().any(|state| state == name);
        (parsed.running, parsed.paused) = (wants(RUNNING), wants(PAUSED));
        Ok(parsed)
    }

    fn matches(&self, record: &SandboxRecord) -> bool {
        let has = |(key, value): (&String, &String)| record.metadata.get(key) == Some(value);
        let is_template = |wanted: &String| {
            record.template.as_str() == wanted || record.alias.as_ref() == Some(wanted)
        };
        (if record.paused_at.is_some() { self.paused } else { self.running })
            && self.metadata.iter().all(has)
            && self.template.as_ref().is_none_or(is_template)
            && self.started_after.is_none_or(|after| record.started_at > after)
    }

    /// One page of all that match, and the token of the next one.
    fn page(&self, records: Vec<SandboxRecord>) -> (Vec<SandboxRecord>, Option<String>) {
        let mut keyed: Vec<(Cursor, SandboxRecord)> = records
            .into_iter()
            .filter(|record| self.matches(record))
            .map(|record| (Cursor::of(&record), record))
            .filter(|(cursor, _)| match (&self.after, self.order) {
                (None, _) => true,
                (Some(after), Order::Ascending) => cursor > after,
                (Some(after), Order::Descending) => cursor < after,
            })
            .collect();
        keyed.sort_by(|(a, _), (b, _)| match self.order {
            Order::Ascending => a.cmp(b),
            Order::Descending => b.cmp(a),
        });
        let has_more = keyed.len() > self.limit;
        keyed.truncate(self.limit);
        let next = keyed.last().filter(|_| has_more).map(|(cursor, _)| cursor.token());
        (keyed.into_iter().map(|(_, record)| record).collect(), next)
    }
}

/// `k=v&k=v`; keys and values are quoted once more than the form needs.
fn metadata(text: &str) -> Vec<(String, String)> {
    let decode = |part: &str| percent_decode_str(part).decode_utf8_lossy().into_owned();
    form_urlencoded::parse(text.as_bytes())
        .map(|(key, value)| (decode(&key), decode(&value)))
        .collect()
}

fn timestamp(text: &str) -> Result<Timestamp, ApiError> {
    text.parse()
        .map_err(|_| ApiError::bad_request("startedAfter is not a time like 2026-11-30T12:00:00Z"))
}

fn order(text: &str) -> Result<Order, ApiError> {
    match text {
        "asc" => Ok(Order::Ascending),
        "desc" => Ok(Order::Descending),
        _ => Err(ApiError::bad_request("order is neither asc nor desc")),
    }
}

fn limit(text: &str) -> Result<usize, ApiError> {
    match text.parse() {
        Ok(limit) if (1..=PAGE_MAX).contains(&limit) => Ok(limit),
        Ok(_) | Err(_) => {
            Err(ApiError::bad_request(format!("limit is not a number from 1 to {PAGE_MAX}")))
        }
    }
}

fn records(app: &App) -> Vec<SandboxRecord> {
    app.sandboxes.all_lasting().iter().map(|sandbox| sandbox.record()).collect()
}

pub async fn list_v2(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, ApiError> {
    let query = Query::parse(uri.query().unwrap_or_default())?;
    let (page, next) = query.page(records(&app));
    let views: Vec<_> = page.iter().map(|record| view::listed(&app, record)).collect();
    let mut response = Json(views).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert(NEXT_TOKEN, next);
    }
    Ok(response)
}

/// The older list: running ones, all at once.
pub async fn list_v1(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, ApiError> {
    let query = Query {
        limit: usize::MAX,
        paused: false,
        ..Query::parse(uri.query().unwrap_or_default())?
    };
    let (page, _) = query.page(records(&app));
    let views: Vec<_> = page.iter().map(|record| view::listed(&app, record)).collect();
    Ok(Json(views).into_response())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::SandboxId;
    use crate::tests::fixtures::sandbox_record;

    fn record(id: &str, second: i64) -> SandboxRecord {
        SandboxRecord {
            id: SandboxId::parse(id).unwrap(),
            started_at: Timestamp::from_second(second).unwrap(),
            ..sandbox_record("x")
        }
    }

    #[test]
    fn metadata_is_decoded_twice() {
        // As the client makes it: quote, urlencode, and the encoding of the query.
        let query = Query::parse("metadata=a%252520b%3Dc%252526d").unwrap();
        assert_eq!(query.metadata, BTreeMap::from([("a b".to_owned(), "c&d".to_owned())]));
    }

    #[test]
    fn states_may_be_listed_or_repeated() {
        assert!(Query::parse("state=running%2Cpaused").unwrap().running);
        assert!(Query::parse("state=paused&state=running").unwrap().running);
        let paused = Query::parse("state=paused").unwrap();
        assert!(!paused.running && paused.paused);
        let asleep = SandboxRecord { paused_at: Some(Timestamp::UNIX_EPOCH), ..record("b", 1) };
        let (page, _) = paused.page(vec![record("a", 1), asleep]);
        assert_eq!(page.iter().map(|record| record.id.as_str()).collect::<Vec<_>>(), ["b"]);
        assert!(Query::parse("state=dead").is_err());
    }

    #[test]
    fn bad_limits_and_tokens_are_refused() {
        for query in
            ["limit=0", "limit=101", "limit=x", "nextToken=%21", "order=up", "startedAfter=x"]
        {
            assert!(Query::parse(query).is_err(), "{query}");
        }
    }

    #[test]
    fn newest_comes_first_by_default() {
        let (page, _) = Query::parse("").unwrap().page(vec![record("a", 1), record("b", 2)]);
        assert_eq!(page[0].id.as_str(), "b");
    }

    proptest! {
        #[test]
        fn pages_together_are_the_whole_list(
            seconds in proptest::collection::vec(0..5i64, 0..30),
            limit in 1..7usize,
            ascending: bool,
        ) {
            let all: Vec<SandboxRecord> = seconds
                .iter()
                .enumerate()
                .map(|(index, second)| record(&format!("s{index}"), *second))
                .collect();
            let order = if ascending { Order::Ascending } else { Order::Descending };
            let mut query = Query { limit, order, ..Query::parse("").unwrap() };
            let mut seen: Vec<Cursor> = Vec::new();
            loop {
                let (page, next) = query.page(all.clone());
                prop_assert!(page.len() <= limit);
                seen.extend(page.iter().map(Cursor::of));
                match next {
                    Some(token) => query.after = Some(Cursor::parse(&token).unwrap()),
                    None => break,
                }
            }
            let mut expected: Vec<Cursor> = all.iter().map(Cursor::of).collect();
            expected.sort();
            if !ascending {
                expected.reverse();
            }
            prop_assert_eq!(seen, expected);
        }
    }
}

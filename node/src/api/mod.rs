//! The HTTP API: E2B's control plane and `/v1`.
//!
//! | file | routes |
//! |---|---|
//! | `sandboxes.rs` | create, get, kill, timeout, connect (v1 and v2) |
//! | `listing.rs` | lists with filters and pages |
//! | `usage.rs` | metrics and logs of sandboxes |
//! | `templates.rs` | E2B's view of templates |
//! | `absent.rs` | what this version does not do, with a typed error each |
//! | `v1.rs`, `v1_templates.rs` | what E2B has no word for |
//! | `view.rs` | bodies of replies |

mod absent;
mod auth;
mod error;
mod extract;
mod listing;
mod sandboxes;
mod templates;
mod usage;
mod v1;
mod v1_templates;
mod view;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use http::{HeaderValue, StatusCode, header};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

pub use self::error::ApiError;
use crate::config::Config;
use crate::idempotency::Idempotency;
use crate::keys::ApiKeys;
use crate::metrics::Metrics;
use crate::proxy::{self, Route};
use crate::sandboxes::Sandboxes;
use crate::server::Handler;
use crate::templates::Templates;

/// What handlers work on.
pub struct App {
    pub config: Config,
    pub sandboxes: Sandboxes,
    pub templates: Templates,
    pub keys: ApiKeys,
    pub idempotency: Idempotency,
    pub metrics: Metrics,
    pub work: TaskTracker,
    pub background: TaskTracker,
    /// Asks the daemon to stop.
    pub stop: StopRequest,
    pub started_at: Timestamp,
}

/// A request to stop the daemon.
#[derive(Debug, Clone, Default)]
pub struct StopRequest {
    pub asked: CancellationToken,
    /// Cancelled before `asked` if sandboxes shall end too.
    pub kill: CancellationToken,
}

/// Answers everything that comes in on a connection.
pub fn handler(app: Arc<App>) -> Handler {
    let router = router(Arc::clone(&app));
    Arc::new(move |request| {
        let app = Arc::clone(&app);
        let router = router.clone();
        Box::pin(async move {
            match proxy::route(request.uri(), request.headers()) {
                Route::Api => match router.oneshot(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                },
                route => proxy::handle(&app.sandboxes, &app.background, route, request).await,
            }
        })
    })
}

fn router(app: Arc<App>) -> Router {
    let open = Router::new().route("/health", get(health)).route("/metrics", get(prometheus));
    let closed = Router::new()
        .merge(e2b_routes())
        .merge(v1_routes())
        .layer(middleware::from_fn_with_state(Arc::clone(&app), auth::check));
    open.merge(closed)
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), count))
        .with_state(app)
}

fn e2b_routes() -> Router<Arc<App>> {
    Router::new()
        .route("/sandboxes", get(listing::list_v1).post(sandboxes::create_v1))
        .route("/v2/sandboxes", get(listing::list_v2).post(sandboxes::create_v2))
        .route("/sandboxes/metrics", get(usage::metrics_of_many))
        .route("/sandboxes/{id}", get(sandboxes::detail).delete(sandboxes::kill))
        .route("/sandboxes/{id}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect_v2))
        .route("/sandboxes/{id}/resume", post(sandboxes::resume))
        .route("/sandboxes/{id}/metrics", get(usage::metrics))
        .route("/sandboxes/{id}/logs", get(usage::logs_v1))
        .route("/v2/sandboxes/{id}/logs", get(usage::logs_v2))
        .route("/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/sandboxes/{id}/snapshots", post(absent::snapshot))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/network", put(absent::network))
        .route("/snapshots", get(absent::snapshots))
        .route("/templates", get(templates::list).post(absent::build))
        .route("/v2/templates", get(templates::list).post(absent::build))
        .route("/v3/templates", post(absent::build))
        .route("/templates/{name}", get(templates::detail).delete(templates::remove))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route("/volumes", get(absent::volumes).post(absent::volumes))
        .route("/secrets", get(absent::secrets).post(absent::secrets))
}

fn v1_routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/node", get(v1::node))
        .route("/v1/node/stop", post(v1::stop))
        .route("/v1/keys", get(v1::keys).post(v1::add_key))
        .route("/v1/keys/{id}", delete(v1::remove_key))
        .route("/v1/sandboxes", delete(v1::kill_all))
        .route("/v1/sandboxes/{id}", get(v1::sandbox))
        .route("/v1/templates", get(v1_templates::list).post(v1_templates::build))
        .route("/v1/templates/{name}", get(v1_templates::detail).delete(v1_templates::remove))
}

async fn health() -> Response {
    axum::Json(serde_json::json!({ "status": "ok" })).into_response()
}

async fn prometheus(State(app): State<Arc<App>>) -> Response {
    let mut response = Response::new(Body::from(app.metrics.render()));
    let format =
        HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, format);
    response
}

async fn no_route() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "there is no such route")
}

async fn no_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "the route does not take this method")
}

/// Counts requests by route and status. Paths that match no route are one label.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned());
    let begin = std::time::Instant::now();
    let response = next.run(request).await;
    let status = response.status().as_u16();
    app.metrics.request(&method, &route, status);
    tracing::debug!(%method, route, status, took_ms = begin.elapsed().as_millis(), "request");
    response
}

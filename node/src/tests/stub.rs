//! A kind whose guests are tasks of the test: a small HTTP server per sandbox on unix
//! sockets, with just enough of the agent to see what the node sends.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use futures_util::future::BoxFuture;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::fixtures::template_record;
use crate::ids::{SandboxId, TemplateName};
use crate::kinds::{
    Birth, BuildError, BuildPlan, Children, Found, GuestPort, Instance, Kind, KindError, KindName,
    Progress, Recorded,
};
use crate::store::TemplateRecord;

/// What the test sees of the guests.
#[derive(Debug, Default)]
pub struct Host {
    pub guests: Mutex<HashMap<SandboxId, Arc<Guest>>>,
    /// Directories and the like that are not removed yet.
    pub dirt: Mutex<Vec<SandboxId>>,
    pub fail_create: AtomicBool,
    pub fail_init: AtomicBool,
    pub fail_pause: AtomicBool,
    /// Sandboxes that are on disk.
    pub asleep: Mutex<HashSet<SandboxId>>,
    pub create_pause: Mutex<Duration>,
    pub connections: AtomicUsize,
    /// Kernels of the templates that were built.
    pub kernels: Mutex<Vec<PathBuf>>,
}

impl Host {
    fn begin(self: &Arc<Self>, id: SandboxId) -> Arc<dyn Instance> {
        let guest = Arc::new(Guest {
            dead: CancellationToken::new(),
            inits: Mutex::default(),
            samples: AtomicUsize::new(0),
            host: Arc::clone(self),
        });
        self.guests.lock().unwrap().insert(id, Arc::clone(&guest));
        Arc::new(StubInstance(guest))
    }
}

/// One guest.
#[derive(Debug)]
pub struct Guest {
    pub dead: CancellationToken,
    pub inits: Mutex<Vec<Value>>,
    pub samples: AtomicUsize,
    host: Arc<Host>,
}

/// The kind.
#[derive(Debug, Clone)]
pub struct Stub(pub Arc<Host>);

#[derive(Debug)]
struct StubInstance(Arc<Guest>);

impl Instance for StubInstance {
    fn connect(&self, port: GuestPort) -> BoxFuture<'_, io::Result<UnixStream>> {
        let guest = Arc::clone(&self.0);
        Box::pin(async move {
            if guest.dead.is_cancelled() {
                return Err(io::ErrorKind::NotFound.into());
            }
            guest.host.connections.fetch_add(1, Ordering::Relaxed);
            let (ours, theirs) = UnixStream::pair()?;
            tokio::spawn(async move {
                let dead = guest.dead.clone();
                tokio::select! {
                    () = dead.cancelled() => {}
                    () = serve(guest, port, theirs) => {}
                }
            });
            Ok(ours)
        })
    }

    fn stats(&self) -> BoxFuture<'_, Result<Value, KindError>> {
        Box::pin(async { Ok(json!({ "pid": 1 })) })
    }

    fn console(&self, _: u64) -> BoxFuture<'_, io::Result<Vec<u8>>> {
        Box::pin(async { Ok(b"line one\r\nline two\r\n".to_vec()) })
    }

    fn stop(&self) -> BoxFuture<'_, Result<(), KindError>> {
        self.0.dead.cancel();
        Box::pin(async { Ok(()) })
    }

    fn ended(&self) -> BoxFuture<'static, ()> {
        let dead = self.0.dead.clone();
        Box::pin(async move { dead.cancelled().await })
    }
}

impl Kind for Stub {
    fn name(&self) -> KindName {
        KindName::Microvm
    }

    fn settle(&self, _: Vec<TemplateName>) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(async { Ok(()) })
    }

    fn create(&self, birth: Birth) -> BoxFuture<'_, Result<Arc<dyn Instance>, KindError>> {
        let host = Arc::clone(&self.0);
        Box::pin(async move {
            host.dirt.lock().unwrap().push(birth.id.clone());
            let pause = *host.create_pause.lock().unwrap();
            tokio::time::sleep(pause).await;
            if host.fail_create.load(Ordering::Relaxed) {
                return Err(KindError::Timeout("the test".to_owned()));
            }
            Ok(host.begin(birth.id))
        })
    }

    fn pause(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        let host = Arc::clone(&self.0);
        Box::pin(async move {
            let pause = *host.create_pause.lock().unwrap();
            tokio::time::sleep(pause).await;
            if host.fail_pause.load(Ordering::Relaxed) {
                return Err(KindError::Timeout("the test".to_owned()));
            }
            if let Some(guest) = host.guests.lock().unwrap().remove(&id) {
                guest.dead.cancel();
            }
            host.asleep.lock().unwrap().insert(id);
            Ok(())
        })
    }

    fn resume(&self, birth: Birth) -> BoxFuture<'_, Result<Arc<dyn Instance>, KindError>> {
        let host = Arc::clone(&self.0);
        Box::pin(async move {
            if host.fail_create.load(Ordering::Relaxed) {
                return Err(KindError::Timeout("the test".to_owned()));
            }
            Ok(host.begin(birth.id))
        })
    }

    fn resumed(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        self.0.asleep.lock().unwrap().remove(&id);
        Box::pin(async { Ok(()) })
    }

    fn give_up_resume(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        if let Some(guest) = self.0.guests.lock().unwrap().remove(&id) {
            guest.dead.cancel();
        }
        Box::pin(async { Ok(()) })
    }

    fn fork(&self, _: SandboxId, children: Vec<SandboxId>) -> BoxFuture<'_, Children> {
        let host = Arc::clone(&self.0);
        Box::pin(async move {
            if host.fail_create.load(Ordering::Relaxed) {
                return Err(KindError::Timeout("the test".to_owned()));
            }
            host.dirt.lock().unwrap().extend(children.iter().cloned());
            Ok(children.into_iter().map(|id| Ok(host.begin(id))).collect())
        })
    }

    fn adopt(&self, id: SandboxId, recorded: Recorded) -> BoxFuture<'_, Result<Found, KindError>> {
        let guest = self.0.guests.lock().unwrap().get(&id).cloned();
        let guest = guest.filter(|guest| !guest.dead.is_cancelled());
        let found = match guest {
            Some(guest) if recorded == Recorded::Running => {
                Found::Running(Arc::new(StubInstance(guest)))
            }
            Some(_) | None if self.0.asleep.lock().unwrap().contains(&id) => Found::Paused,
            Some(_) | None => Found::Nothing,
        };
        Box::pin(async { Ok(found) })
    }

    fn strays(&self, known: Vec<SandboxId>) -> BoxFuture<'_, Result<Vec<SandboxId>, KindError>> {
        let mut dirt = self.0.dirt.lock().unwrap().clone();
        dirt.retain(|id| !known.contains(id));
        Box::pin(async { Ok(dirt) })
    }

    fn clean(&self, id: SandboxId) -> BoxFuture<'_, Result<(), KindError>> {
        if let Some(guest) = self.0.guests.lock().unwrap().remove(&id) {
            guest.dead.cancel();
        }
        self.0.asleep.lock().unwrap().remove(&id);
        self.0.dirt.lock().unwrap().retain(|dirty| *dirty != id);
        Box::pin(async { Ok(()) })
    }

    fn build(
        &self,
        plan: BuildPlan,
        _: Progress,
    ) -> BoxFuture<'_, Result<TemplateRecord, BuildError>> {
        self.0.kernels.lock().unwrap().push(plan.kernel);
        let record =
            TemplateRecord { aliases: plan.aliases, ..template_record(plan.name.as_str()) };
        Box::pin(async { Ok(record) })
    }

    fn retire(&self) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, _: TemplateName) -> BoxFuture<'_, Result<(), KindError>> {
        Box::pin(async { Ok(()) })
    }
}

async fn serve(guest: Arc<Guest>, port: GuestPort, mut stream: UnixStream) {
    if port == GuestPort::Tunnel {
        let mut line = Vec::new();
        while let Ok(byte) = stream.read_u8().await {
            if byte == b'\n' {
                break;
            }
            line.push(byte);
        }
        let answer: &[u8] = if line == b"8080" { b"OK\n" } else { b"ERR connection refused\n" };
        if stream.write_all(answer).await.is_err() || line != b"8080" {
            return;
        }
    }
    let service = hyper::service::service_fn(move |request| {
        let guest = Arc::clone(&guest);
        async move { Ok::<_, Infallible>(answer(&guest, port, request).await) }
    });
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
}

async fn answer(guest: &Guest, port: GuestPort, mut request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let respond = |status: StatusCode, body: Body| {
        let mut response = Response::new(body);
        *response.status_mut() = status;
        response
    };
    match path.as_str() {
        "/init" if guest.host.fail_init.load(Ordering::Relaxed) => {
            respond(StatusCode::INTERNAL_SERVER_ERROR, Body::from("no entropy"))
        }
        "/init" => {
            let bytes = request.into_body().collect().await.unwrap().to_bytes();
            guest.inits.lock().unwrap().push(serde_json::from_slice(&bytes).unwrap());
            respond(StatusCode::NO_CONTENT, Body::empty())
        }
        "/health" => respond(StatusCode::NO_CONTENT, Body::empty()),
        "/metrics" => {
            guest.samples.fetch_add(1, Ordering::Relaxed);
            let body = json!({ "cpu_count": 1, "cpu_used_pct": 1.5, "mem_total": 10, "mem_used": 5,
                "mem_cache": 1, "disk_total": 100, "disk_used": 7 });
            respond(StatusCode::OK, Body::from(body.to_string()))
        }
        "/stream" => {
            let ticks = futures_util::stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_millis(10)).await;
                Some((Ok::<_, Infallible>("tick\n"), ()))
            });
            respond(StatusCode::OK, Body::from_stream(ticks))
        }
        "/echo" => respond(StatusCode::OK, Body::new(request.into_body())),
        "/switch" => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(upgrade.await.unwrap());
                let mut byte = [0];
                while stream.read_exact(&mut byte).await.is_ok() {
                    stream.write_all(&[byte[0].to_ascii_uppercase()]).await.unwrap();
                }
            });
            let mut response = respond(StatusCode::SWITCHING_PROTOCOLS, Body::empty());
            response.headers_mut().insert("connection", "upgrade".parse().unwrap());
            response.headers_mut().insert("upgrade", "shout".parse().unwrap());
            response
        }
        _ => {
            let headers: Vec<String> = request
                .headers()
                .iter()
                .map(|(name, value)| format!("{name}={}", value.to_str().unwrap_or("?")))
                .collect();
            let target = request.uri().to_string();
            let body = json!({ "port": port.number(), "target": target, "headers": headers });
            respond(StatusCode::OK, Body::from(body.to_string()))
        }
    }
}

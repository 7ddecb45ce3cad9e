//! `create`, `ls`, `pause`, `resume`, `fork`, `kill`, `logs`, `stats`.

use std::process::ExitCode;

use jiff::Timestamp;
use serde_json::json;

use crate::client::Http;
use crate::client::api::{Metrics, NewSandbox, Sandbox};
use crate::error::CliError;
use crate::flags::{Create, Fork, Kill, Ls, Pause, Resume};
use crate::output::{self, Output};

pub(super) async fn create(http: &Http, create: &Create, output: Output) -> Result<(), CliError> {
    let sandbox = http
        .create(&NewSandbox {
            template: &create.template,
            timeout_seconds: create.new.lifetime.seconds,
            metadata: &create.new.metadata,
            environment: &create.env,
        })
        .await?;
    output.result(&json!({"sandboxID": sandbox.id, "templateID": sandbox.template}), || {
        sandbox.id.clone()
    });
    Ok(())
}

pub(super) async fn ls(http: &Http, ls: &Ls, output: Output) -> Result<(), CliError> {
    let sandboxes = http.sandboxes(&ls.metadata).await?;
    output.result(&sandboxes, || {
        if ls.quiet {
            let ids: Vec<&str> = sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect();
            return ids.join("\n");
        }
        let now = Timestamp::now();
        let rows: Vec<Vec<String>> = sandboxes.iter().map(|sandbox| row(sandbox, now)).collect();
        output::table(&["ID", "TEMPLATE", "STATE", "AGE", "ENDS IN", "METADATA"], &rows)
    });
    Ok(())
}

fn row(sandbox: &Sandbox, now: Timestamp) -> Vec<String> {
    let between =
        |from: Timestamp, to: Timestamp| output::duration(to.as_second() - from.as_second());
    let age = sandbox.started_at.parse().map_or_else(|_| "?".to_owned(), |time| between(time, now));
    let left = match sandbox.end_at.parse() {
        // A paused one has no time limit.
        Ok(_) if !sandbox.runs() => "-".to_owned(),
        Ok(time) => between(now, time),
        Err(_) => "?".to_owned(),
    };
    let metadata: Vec<String> =
        sandbox.metadata.iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
    vec![
        sandbox.id.clone(),
        sandbox.alias.clone().unwrap_or_else(|| sandbox.template.clone()),
        sandbox.state.clone(),
        age,
        left,
        metadata.join(","),
    ]
}

/// Does `act` to each sandbox and tells of those to which it could not be done; gives up only
/// when nobody answers. Returns the sandboxes for which `act` said that it was done, and
/// whether none failed.
async fn each<'a>(
    ids: &'a [String],
    output: Output,
    act: impl AsyncFn(&str) -> Result<bool, CliError>,
) -> Result<(Vec<&'a str>, bool), CliError> {
    let mut done = Vec::new();
    let mut all = true;
    for id in ids {
        match act(id).await {
            Ok(true) => done.push(id.as_str()),
            Ok(false) => {}
            Err(error @ CliError::Connect { .. }) => return Err(error),
            Err(error) => {
                all = false;
                output.error(&error);
            }
        }
    }
    Ok((done, all))
}

/// Pauses all that it can; fails if one could not be paused.
pub(super) async fn pause(
    http: &Http,
    pause: &Pause,
    output: Output,
) -> Result<ExitCode, CliError> {
    let act = async |id: &str| http.pause(id).await.map(|()| true);
    let (paused, all) = each(&pause.ids, output, act).await?;
    output.result(&json!({"paused": paused}), || paused.join("\n"));
    Ok(all_or_nothing(all))
}

pub(super) async fn resume(http: &Http, resume: &Resume, output: Output) -> Result<(), CliError> {
    http.connect(&resume.id, resume.lifetime.seconds).await?;
    output.result(&json!({"resumed": resume.id}), || resume.id.clone());
    Ok(())
}

/// Prints the ids of the children; fails if there are fewer than were asked for.
pub(super) async fn fork(http: &Http, fork: &Fork, output: Output) -> Result<ExitCode, CliError> {
    let children = http.fork(&fork.id, fork.count, fork.lifetime.seconds).await?;
    let mut ids = Vec::new();
    for child in &children {
        match (&child.sandbox, &child.error) {
            (Some(sandbox), _) => ids.push(sandbox.id.as_str()),
            (None, Some(error)) => output.error(&CliError::Api {
                status: error.code,
                message: error.message.clone(),
                code: error.error_code.clone(),
            }),
            (None, None) => {}
        }
    }
    output.result(&json!({"parent": fork.id, "children": ids}), || ids.join("\n"));
    Ok(all_or_nothing(ids.len() == children.len()))
}

fn all_or_nothing(all: bool) -> ExitCode {
    if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Kills all that it can; fails if one could not be killed.
pub(super) async fn kill(http: &Http, kill: &Kill, output: Output) -> Result<ExitCode, CliError> {
    let ids = if kill.all {
        http.sandboxes(&[]).await?.into_iter().map(|sandbox| sandbox.id).collect()
    } else {
        kill.ids.clone()
    };
    let act = async |id: &str| match http.kill(id).await {
        // With --all, one that ended meanwhile is as good as killed.
        Err(CliError::Api { status: 404, .. }) if kill.all => Ok(false),
        outcome => outcome.map(|()| true),
    };
    let (killed, all) = each(&ids, output, act).await?;
    output.result(&json!({"killed": killed}), || killed.join("\n"));
    Ok(all_or_nothing(all))
}

pub(super) async fn logs(http: &Http, id: &str, output: Output) -> Result<(), CliError> {
    let logs = http.logs(id).await?;
    output.result(&logs, || {
        let lines: Vec<&str> = logs.lines.iter().map(|line| line.line.as_str()).collect();
        lines.join("\n")
    });
    Ok(())
}

/// What one sandbox uses: as it sees it, and as the host does.
struct Usage {
    id: String,
    metrics: Option<Metrics>,
    host: serde_json::Value,
    /// Why there are no metrics.
    error: Option<String>,
}

pub(super) async fn stats(http: &Http, ids: &[String], output: Output) -> Result<(), CliError> {
    let node = http.node().await?;
    let ids = if ids.is_empty() {
        let all = http.sandboxes(&[]).await?.into_iter();
        all.filter(Sandbox::runs).map(|sandbox| sandbox.id).collect()
    } else {
        ids.to_vec()
    };
    let mut usages = Vec::new();
    for id in ids {
        // One that hangs must not hide the others; one that is not there is a mistake.
        let (metrics, error) = match http.metrics(&id).await {
            Ok(mut metrics) => (metrics.pop(), None),
            Err(error @ CliError::Api { status: 404, .. }) => return Err(error),
            Err(error) => (None, Some(error.to_string())),
        };
        if let Some(error) = &error {
            output.progress(&format!("{id}: {error}"));
        }
        let host = match http.cost(&id).await {
            Ok(cost) => cost.stats,
            Err(error) if metrics.is_none() => {
                output.progress(&format!("{id}: {error}"));
                serde_json::Value::Null
            }
            Err(error) => return Err(error),
        };
        usages.push(Usage { id, metrics, host, error });
    }
    let sandboxes: Vec<_> = usages
        .iter()
        .map(|usage| {
            json!({
                "sandboxID": usage.id,
                "metrics": usage.metrics,
                "host": usage.host,
                "error": usage.error,
            })
        })
        .collect();
    output.result(&json!({"node": node, "sandboxes": sandboxes}), || {
        let rows: Vec<Vec<String>> = usages.iter().map(usage_row).collect();
        format!(
            "{} of {} sandboxes, {} of {} memory available\n{}",
            node.sandboxes.running,
            node.sandboxes.max,
            output::bytes(node.memory.available_bytes),
            output::bytes(node.memory.total_bytes),
            output::table(&["ID", "CPU", "MEMORY", "DISK", "PRIVATE ON HOST"], &rows)
        )
    });
    Ok(())
}

fn usage_row(usage: &Usage) -> Vec<String> {
    let of = |used, total| format!("{} of {}", output::bytes(used), output::bytes(total));
    let private = usage.host["memory"]["privateDirtyBytes"].as_u64();
    let private = private.map_or_else(|| "?".to_owned(), output::bytes);
    let Some(metrics) = &usage.metrics else {
        let none = || "-".to_owned();
        return vec![usage.id.clone(), none(), none(), none(), private];
    };
    vec![
        usage.id.clone(),
        format!("{:.1} % of {}", metrics.cpu_used_pct, metrics.cpu_count),
        of(metrics.mem_used, metrics.mem_total),
        of(metrics.disk_used, metrics.disk_total),
        private,
    ]
}

//! `up` and `down`: the daemon's life, and a first template.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use serde_json::json;
use tokio::process::{Child, Command};

use super::{doctor, template};
use crate::client::Http;
use crate::error::CliError;
use crate::flags::{DEFAULT_RUN_DIRECTORY, Down, RUN_DIRECTORY_VARIABLE, TemplateBuild, Up};
use crate::locate::{self, Variant};
use crate::output::Output;
use crate::settings::Settings;

const DEFAULT_TEMPLATE: &str = "base";
/// The daemon adopts what runs before it listens.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Longer than the daemon waits for work that is under way.
const STOP_PATIENCE: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(50);
/// A build boots a guest and warms it up.
const BUILD_PATIENCE: Duration = Duration::from_secs(600);
const BUILD_POLL: Duration = Duration::from_secs(1);

pub(super) async fn up(settings: &Settings, up: &Up, output: Output) -> Result<ExitCode, CliError> {
    if Http::new(settings)?.is_up().await {
        output.progress(&format!("warrend already answers at {}", settings.url()));
        ready(settings, up, output).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let blockers = doctor::blockers(&settings.state_directory);
    if !blockers.is_empty() {
        return Err(CliError::said(
            format!("this machine cannot run sandboxes:\n{}", blockers.join("\n")),
            "`warren doctor` checks again",
        ));
    }
    let mut child = start(settings, up, output)?;
    let log = log_path(up);
    wait_until_up(settings, &mut child, &log, output).await?;
    ready(settings, up, output).await?;
    if !up.foreground {
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait().await.map_err(CliError::io("wait for warrend"))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn start(settings: &Settings, up: &Up, output: Output) -> Result<Child, CliError> {
    let program = locate::program("warrend").ok_or_else(|| {
        CliError::said("warrend is not beside this program nor on the PATH", "build it: make build")
    })?;
    std::fs::create_dir_all(&up.run_dir).map_err(CliError::file("create", &up.run_dir))?;
    let mut command = Command::new(&program);
    command
        .arg("--listen")
        .arg(up.listen.as_deref().unwrap_or(&settings.address))
        .arg("--state-dir")
        .arg(&settings.state_directory)
        .arg("--run-dir")
        .arg(&up.run_dir);
    match up.kernel.clone().or_else(|| locate::kernel(Variant::Up)) {
        Some(kernel) => {
            command.arg("--kernel").arg(kernel);
        }
        None => {
            output.progress("no guest kernel is built; templates must name one (make guest-kernel)")
        }
    }
    // Few templates have several vCPUs; without this kernel warrend says what to do.
    if let Some(kernel) = up.kernel_smp.clone().or_else(|| locate::kernel(Variant::Smp)) {
        command.arg("--kernel-smp").arg(kernel);
    }
    command.args(&up.daemon_flags).stdin(Stdio::null());
    if !up.foreground {
        let log = log_path(up);
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .map_err(CliError::file("open", &log))?;
        let second = file.try_clone().map_err(CliError::file("open", &log))?;
        // A group of its own: Ctrl-C in this terminal is not meant for it.
        command.stdout(file).stderr(second).process_group(0);
    }
    output.progress(&format!("starting {}", program.display()));
    command.spawn().map_err(CliError::file("start", program))
}

async fn wait_until_up(
    settings: &Settings,
    child: &mut Child,
    log: &Path,
    output: Output,
) -> Result<(), CliError> {
    let http = Http::new(settings)?;
    let deadline = tokio::time::Instant::now() + START_PATIENCE;
    loop {
        if http.is_up().await {
            output.progress(&format!("warrend answers at {}", settings.url()));
            return Ok(());
        }
        if let Some(status) = child.try_wait().map_err(CliError::io("wait for warrend"))? {
            return Err(CliError::said(
                format!("warrend ended at once ({status}):\n{}", last_lines(log)),
                format!("its log is {}", log.display()),
            ));
        }
        if tokio::time::Instant::now() > deadline {
            return Err(CliError::said(
                format!("warrend does not answer at {}", settings.url()),
                format!("its log is {}", log.display()),
            ));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Sees that there is a template and tells how to reach the node.
async fn ready(settings: &Settings, up: &Up, output: Output) -> Result<(), CliError> {
    // Read the key again: a first start has just made it.
    let http = Http::new(settings)?;
    let templates = http.templates().await?;
    if templates.is_empty() && !up.no_template {
        match up.image.clone().or_else(|| locate::image(DEFAULT_TEMPLATE)) {
            Some(image) => {
                let request = template::request(&TemplateBuild {
                    name: DEFAULT_TEMPLATE.to_owned(),
                    image: Some(image),
                    kernel: up.kernel.clone(),
                    memory: None,
                    disk: None,
                    vcpus: None,
                    alias: Vec::new(),
                })?;
                match template::build(&http, &request, output).await {
                    Err(error) if error.is_under_way() => wait_for_template(&http, output).await?,
                    outcome => outcome?,
                }
            }
            None => {
                output.progress("no root image is built, so there is no template yet (make image)")
            }
        }
    }
    let key = settings.api_key();
    let run_directory = settings.run_directory().unwrap_or_else(|| up.run_dir.clone());
    let value = json!({
        "url": settings.url(),
        "apiKey": key,
        "stateDir": settings.state_directory,
        "runDir": run_directory,
    });
    output.result(&value, || {
        let url = settings.url();
        let key = key.clone().unwrap_or_else(|| "<key>".to_owned());
        let sdk = [("E2B_API_URL", url.clone()), ("E2B_SANDBOX_URL", url), ("E2B_API_KEY", key)];
        let run = (run_directory != Path::new(DEFAULT_RUN_DIRECTORY))
            .then(|| (RUN_DIRECTORY_VARIABLE, run_directory.display().to_string()));
        let lines = sdk.into_iter().chain(settings.variables()).chain(run);
        lines.map(|(name, value)| format!("export {name}={value}")).collect::<Vec<_>>().join("\n")
    });
    Ok(())
}

/// Another client has the template built already.
async fn wait_for_template(http: &Http, output: Output) -> Result<(), CliError> {
    output.progress(&format!("template {DEFAULT_TEMPLATE} is being built already; waiting for it"));
    let built = async {
        while http.templates().await?.is_empty() {
            tokio::time::sleep(BUILD_POLL).await;
        }
        Ok(())
    };
    tokio::time::timeout(BUILD_PATIENCE, built).await.unwrap_or_else(|_| {
        let seconds = BUILD_PATIENCE.as_secs();
        Err(CliError::said(
            format!("there is no template after {seconds} s"),
            "see the daemon's log, then `warren up` again",
        ))
    })
}

pub(super) async fn down(http: &Http, down: &Down, output: Output) -> Result<(), CliError> {
    http.stop_node(down.kill).await?;
    // A daemon that ends lets its clients wait until it has gone.
    let gone = async {
        while http.is_up().await {
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(STOP_PATIENCE, gone).await.map_err(|_| {
        let seconds = STOP_PATIENCE.as_secs();
        CliError::said(
            format!("warrend has not stopped within {seconds} s"),
            "see its log in the run directory",
        )
    })?;
    output.progress("warrend has stopped");
    output.result(&json!({"stopped": true}), String::new);
    Ok(())
}

const LOG_FILE: &str = "warrend.log";

fn log_path(up: &Up) -> PathBuf {
    up.run_dir.join(LOG_FILE)
}

fn last_lines(log: &Path) -> String {
    const LINES: usize = 15;
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

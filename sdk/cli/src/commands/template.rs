//! `template build|ls|rm`.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::client::Http;
use crate::client::templates::{BuildRequest, Progress};
use crate::error::CliError;
use crate::flags::{Template, TemplateBuild};
use crate::locate::{self, Variant};
use crate::output::{self, Output};

pub(super) async fn run(http: &Http, action: &Template, output: Output) -> Result<(), CliError> {
    match action {
        Template::Build(flags) => {
            let request = request(flags)?;
            build(http, &request, output).await?;
            output.result(&json!({"name": request.name}), || request.name.clone());
        }
        Template::Ls => list(http, output).await?,
        Template::Rm { names } => {
            for name in names {
                http.remove_template(name).await?;
            }
            output.result(&json!({"removed": names}), || names.join("\n"));
        }
    }
    Ok(())
}

/// Builds a template and shows each step as it comes.
pub(super) async fn build(
    http: &Http,
    request: &BuildRequest,
    output: Output,
) -> Result<(), CliError> {
    let started = std::time::Instant::now();
    output.progress(&format!("template {} from {}", request.name, request.rootfs.display()));
    http.build_template(request, |line: &Progress| {
        let seconds = started.elapsed().as_secs();
        output.progress(&format!(
            "template {} [{seconds:3} s] {}: {}",
            request.name, line.step, line.message
        ));
    })
    .await
}

pub(super) fn request(flags: &TemplateBuild) -> Result<BuildRequest, CliError> {
    let image = flags.image.clone().or_else(|| locate::image(&flags.name)).ok_or_else(|| {
        CliError::said(
            format!("no root image is named and none was built as '{}'", flags.name),
            format!("name one by --image, or build it from a recipe: image/build {}", flags.name),
        )
    })?;
    // The daemon's own may be from before the kernel was built.
    let variant = match flags.vcpus {
        None | Some(0 | 1) => Variant::Up,
        Some(_) => Variant::Smp,
    };
    let kernel = flags.kernel.clone().or_else(|| locate::kernel(variant));
    Ok(BuildRequest {
        name: flags.name.clone(),
        aliases: flags.alias.clone(),
        rootfs: absolute(&image)?,
        kernel: kernel.as_deref().map(absolute).transpose()?,
        vcpus: flags.vcpus,
        memory_mib: flags.memory,
        disk_mib: flags.disk,
    })
}

/// The daemon has another working directory.
fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    path.canonicalize().map_err(CliError::file("look at", path))
}

async fn list(http: &Http, output: Output) -> Result<(), CliError> {
    let templates = http.templates().await?;
    output.result(&templates, || {
        let rows: Vec<Vec<String>> = templates
            .iter()
            .map(|template| {
                vec![
                    template.name.clone(),
                    template.aliases.join(","),
                    template.vcpus.to_string(),
                    output::bytes(template.memory_mib << 20),
                    output::bytes(template.disk_mib << 20),
                ]
            })
            .collect();
        output::table(&["NAME", "ALIASES", "CPUS", "MEMORY", "DISK"], &rows)
    });
    Ok(())
}

//! From checked options to a running agent, and to its end.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::Signal;

use crate::agent::Agent;
use crate::children::Children;
use crate::envd::Envd;
use crate::init::Machine;
use crate::interpreter::Interpreter;
use crate::options::{Mounts, Options, ServiceName};
use crate::{boot, http, net, runtime, tunnel};

/// How long processes may take to end after they were asked to.
const GRACE: Duration = Duration::from_secs(2);

/// Allocations below this come from the heap, which is never given back.
const HEAP_ALLOCATION_BYTES_MAX: i32 = 4 << 20;

/// Heap touched before the first request.
const TOUCHED_BYTES: usize = 2 << 20;

/// Runs the agent until it is told to end.
pub fn run(options: Options) -> anyhow::Result<()> {
    warren_base::guest::keep_heap(HEAP_ALLOCATION_BYTES_MAX);
    touch_heap();
    // A kernel without the call is older than any that we boot; elsewhere what
    // started us is asked to hand nothing on.
    let _ = warren_base::guest::close_inherited_on_exec();
    let init = rustix::process::getpid().is_init();
    let machine = if init && options.mounts == Mounts::AsInit {
        boot::prepare().context("prepare the file systems")?;
        Machine::own().context("open the files of the identity")?
    } else {
        Machine::Shared
    };
    if !init {
        let own = Some(rustix::process::getpid());
        rustix::process::set_child_subreaper(own).context("become the reaper of orphans")?;
    }
    let children = Children::new().context("take over signals")?;
    let signal =
        runtime::run(serve(options, children.clone(), machine)).context("wait for events")??;
    boot::progress(format_args!("ending by {signal:?}"));
    if init {
        boot::end();
    }
    Ok(())
}

async fn serve(
    options: Options,
    children: Rc<Children>,
    machine: Machine,
) -> anyhow::Result<Signal> {
    let agent = Agent::new(children.clone(), machine);
    let interpreter = Rc::new(Interpreter::new(agent.clone()));
    let envd = Rc::new(Envd::new(agent.clone(), interpreter.clone()));
    let mut listeners = Vec::new();
    for (service, address) in &options.listen {
        let listener = match service {
            ServiceName::Envd => {
                let envd = envd.clone();
                net::listen(address, move |socket| http::serve(envd.clone(), socket))
            }
            ServiceName::Interpreter => {
                let interpreter = interpreter.clone();
                net::listen(address, move |socket| http::serve(interpreter.clone(), socket))
            }
            ServiceName::Tunnel => net::listen(address, tunnel::serve),
        };
        listeners.push(listener.with_context(|| format!("listen for {service:?} on {address:?}"))?);
    }
    boot::progress(format_args!("serving"));
    let signal = children.reap_until_told_to_end().await;
    drop(listeners);
    end_children(&children).await;
    Ok(signal)
}

/// Asks every process to end, and after a while does not ask.
async fn end_children(children: &Rc<Children>) {
    let reaper = children.clone();
    let _reaping = runtime::spawn(async move {
        loop {
            reaper.reap_until_told_to_end().await;
        }
    });
    children.forward(Signal::TERM);
    let limit = Instant::now() + GRACE;
    while children.running() > 0 && Instant::now() < limit {
        runtime::sleep_until(Instant::now() + Duration::from_millis(20)).await;
    }
    children.forward(Signal::KILL);
}

/// Touches heap so that requests do not fault it in.
fn touch_heap() {
    let touched = vec![0x5a_u8; TOUCHED_BYTES];
    drop(std::hint::black_box(touched));
}

"""What `make demo` shows: a node, a template, sandboxes used through the e2b SDK.

Everything runs in directories of its own and is stopped at the end. The state
directory is kept in the cache under a hash of kernel, image and programs, so
that a second run finds its template built.
"""

import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "target/x86_64-unknown-linux-gnu/release"
CROWD = 50  # idle sandboxes for the memory figure


def say(text=""):
    print(text, flush=True)


@contextmanager
def timed(what):
    say(f"--> {what}")
    started = time.monotonic()
    yield
    say(f"    {time.monotonic() - started:.2f} s")


def available_kib():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1])
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def script_output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().splitlines()[-1]


def cache():
    if os.environ.get("WARREN_CACHE"):
        return Path(os.environ["WARREN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warren"


def state_directory(kernel, image):
    digest = hashlib.sha256()
    for path in (kernel, image, PROGRAMS / "warrend", PROGRAMS / "warren-vmm"):
        status = os.stat(path)
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    folder = cache() / "demo"
    wanted = folder / digest.hexdigest()[:16]
    if folder.exists():
        for old in folder.iterdir():
            if old != wanted:
                shutil.rmtree(old)
    return wanted


class Warren:
    """The `warren` command, pointed at the demo's node."""

    def __init__(self, url, state, run):
        self.environment = {
            **os.environ, "WARREN_URL": url, "WARREN_STATE_DIR": str(state), "WARREN_RUN_DIR": str(run),
        }
        self.environment.pop("WARREN_API_KEY", None)

    def __call__(self, *arguments, check=True):
        command = [str(PROGRAMS / "warren"), *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        if check and done.returncode != 0:
            sys.exit(f"demo: `warren {arguments[0]}` failed with exit code {done.returncode}")
        return done


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main():
    kernel = script_output(ROOT / "guest-kernel/build", "--print-path")
    image = script_output(ROOT / "image/build", "base", "--print-path")
    state = state_directory(kernel, image)
    run = Path(tempfile.mkdtemp(prefix="warren-demo-"))
    url = f"http://127.0.0.1:{free_port()}"
    warren = Warren(url, state, run)

    with timed("check this machine (warren doctor)"):
        say(warren("doctor", check=False).stdout)
    try:
        with timed("start warrend and build the template 'base' if it is not there (warren up)"):
            told = json.loads(warren("up", "--kernel", kernel, "--image", image, "--json").stdout)
        os.environ.update(E2B_API_URL=url, E2B_SANDBOX_URL=url, E2B_API_KEY=told["apiKey"])
        use_sandboxes()
        crowd()
        command_line(warren)
    finally:
        say("--> stop warrend and every sandbox (warren down --kill)")
        warren("down", "--kill", check=False)
        shutil.rmtree(run, ignore_errors=True)
    say("demo: done")


def use_sandboxes():
    from e2b import CommandExitException, Sandbox

    with timed("Sandbox.create('base') by the e2b SDK"):
        sandbox = Sandbox.create("base", timeout=600)
    say(f"    sandbox {sandbox.sandbox_id}")

    with timed("shell: uname -sr; id -un; free -m"):
        say(indent(sandbox.commands.run("uname -sr; id -un; free -m | head -2", timeout=300).stdout))

    with timed("files: write and read a file"):
        sandbox.files.write("/home/user/hello.py", "import sys, uuid\nprint(sys.version.split()[0], uuid.uuid4())\n")
        say(indent(sandbox.files.read("/home/user/hello.py")))

    with timed("Python: run the file, in two sandboxes of the same template"):
        other = Sandbox.create("base", timeout=600)
        other.files.write("/home/user/hello.py", sandbox.files.read("/home/user/hello.py"))
        for one in (sandbox, other):
            say(indent(one.commands.run("python3 /home/user/hello.py", timeout=300).stdout))

    with timed("a command that fails keeps its exit code"):
        try:
            sandbox.commands.run("echo oops >&2; exit 3", timeout=300)
        except CommandExitException as error:
            say(indent(f"exit code {error.exit_code}, stderr {error.stderr!r}"))

    with timed("kill both"):
        sandbox.kill()
        other.kill()


def crowd():
    from e2b import Sandbox

    say(f"--> create {CROWD} sandboxes one after the other and leave them idle")
    before = available_kib()
    sandboxes, times = [], []
    for _ in range(CROWD):
        started = time.monotonic()
        sandboxes.append(Sandbox.create("base", timeout=600))
        times.append((time.monotonic() - started) * 1000)
    time.sleep(2)
    each = (before - available_kib()) / CROWD
    times.sort()
    say(f"    create as the SDK sees it: median {statistics.median(times):.1f} ms, slowest {times[-1]:.1f} ms")
    if each > 0:
        say(f"    memory: {each / 1024:.2f} MiB of MemAvailable for each")
    else:
        say("    memory: other programs changed MemAvailable by more than the sandboxes did")
    with timed(f"kill {CROWD} sandboxes"):
        for sandbox in sandboxes:
            sandbox.kill()


def command_line(warren):
    with timed("the command line: warren run base -- sh -c 'echo hello from $(hostname); exit 7'"):
        done = warren("run", "base", "--", "sh", "-c", "echo hello from $(hostname); exit 7", check=False)
        say(indent(f"{done.stdout.strip()}\nexit code {done.returncode}"))


def indent(text):
    return "\n".join("    | " + line for line in text.rstrip("\n").splitlines())


if __name__ == "__main__":
    main()

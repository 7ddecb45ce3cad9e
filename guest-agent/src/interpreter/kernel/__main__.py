"""The Python kernel of the code interpreter.

Started once, it is the zygote: it imports what cells will want and then waits.
For each context it is sent three descriptors and forks; the child runs cells.

    descriptor 0   zygote: a seqpacket socket; one message, one context
                   child: /dev/null
    control        a stream socket: requests in, events out, one JSON line each
    1, 2           the child's output, read by the agent

Only the standard library is used.
"""

import gc
import json
import os
import signal
import socket
import sys

# The directory of this file is not the user's business.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [HERE] + [place for place in sys.path if os.path.abspath(place or ".") != HERE]

import warren_cell  # noqa: E402
import warren_chart  # noqa: E402, F401
import warren_display  # noqa: E402
import warren_inline  # noqa: E402

sys.path.remove(HERE)

PRELOAD = "/etc/warren/kernel-preload"
MESSAGE_BYTES_MAX = 1 << 20


def preload():
    """Imports what most cells use, and what the image asks for."""
    import ast, asyncio, base64, collections, datetime, io, linecache, math  # noqa: F401, E401
    import itertools, random, re, subprocess, time, traceback, typing, uuid  # noqa: F401, E401

    try:
        with open(PRELOAD) as names:
            wanted = [name.strip() for name in names]
    except OSError:
        return
    for name in wanted:
        if name and not name.startswith("#"):
            try:
                __import__(name)
            except Exception as error:
                print(f"kernel: preload {name}: {error}", file=sys.stderr)


def zygote():
    """Forks one context for each message, for ever."""
    listener = socket.socket(fileno=0)
    # Contexts are nobody's to wait for: the agent sees their sockets close.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload()
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(listener, MESSAGE_BYTES_MAX, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            listener.detach()
            become_context(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def become_context(request, descriptors):
    control, out, err = descriptors
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in (null, out, err):
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)
    sys.stdout = text_stream(1)
    sys.stderr = text_stream(2)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    control = socket.socket(fileno=control)
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        control.sendall(json.dumps({"type": "failed", "message": str(error)}).encode() + b"\n")
        os._exit(1)
    try:
        serve(control, request)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(1)


def text_stream(descriptor):
    """A line goes out as it ends: one write for a line, none waits for the next."""
    return open(
        descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


def serve(control, request):
    waiting = []
    forked = []

    def leave_to_the_parent():
        forked.append(True)
        control.close()

    # A child that a cell forks has no cell of its own to serve.
    os.register_at_fork(after_in_child=leave_to_the_parent)

    def emit(event, more=False):
        """Sends an event; with `more`, together with the next one."""
        if forked:
            return
        waiting.append(encode(event))
        if not more:
            waiting.append(b"")
            control.sendall(b"\n".join(waiting))
            waiting.clear()

    sys.path.insert(0, "")
    sys.argv = [""]
    warren_display.install(emit)
    warren_inline.install()
    reseed(request.get("seed"))
    kernel = warren_cell.Kernel(emit)
    emit({"type": "ready", "pid": os.getpid()})
    lines = control.makefile("rb")
    for line in lines:
        message = json.loads(line)
        if message.get("environment"):
            os.environ.update(message["environment"])
        reseed(message.get("seed"))
        kernel.execute(message["code"], message.get("env_vars") or {})
        if forked:
            end_of_child()
        emit({"type": "end_of_execution", "cell": message["cell"]})
    os._exit(0)


def end_of_child():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(0)


def encode(event):
    """An event as JSON that every parser takes: it knows no NaN."""
    # The agent knows the last event by its bytes: no spaces.
    options = {"default": str, "separators": (",", ":"), "allow_nan": False}
    try:
        return json.dumps(event, **options).encode()
    except ValueError:
        return json.dumps(without_nan(event), **options).encode()


def without_nan(value):
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(name): without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def reseed(seed):
    """A clone's generators must not repeat its siblings'."""
    if not seed:
        return
    number = int(seed, 16)
    warren_cell.reseed(number)
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        generators.seed(number & 0xFFFFFFFF)


if __name__ == "__main__":
    zygote()

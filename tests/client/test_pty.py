"""Terminals by the unmodified SDK."""

import asyncio

import pytest
from e2b import CommandExitException, PtySize

SLOW = 300


def test_pty_size_input_and_end(shared_sandbox):
    terminal = shared_sandbox.pty.create(PtySize(cols=101, rows=33), timeout=SLOW)
    shared_sandbox.pty.send_stdin(terminal.pid, b"stty size; echo $TERM; [ -t 0 ] && echo is-a-tty; exit\n")
    output = bytearray()
    terminal.wait(on_pty=output.extend)
    text = output.decode()
    assert "33 101" in text
    assert "xterm-256color" in text
    assert "is-a-tty" in text.replace("echo is-a-tty", "")


def test_pty_resize_is_seen_by_the_shell(shared_sandbox):
    terminal = shared_sandbox.pty.create(PtySize(cols=80, rows=24), timeout=SLOW, cwd="/tmp", envs={"X": "y"})
    shared_sandbox.pty.resize(terminal.pid, PtySize(cols=132, rows=50))
    shared_sandbox.pty.send_stdin(terminal.pid, b"stty size; pwd; echo $X; exit\n")
    output = bytearray()
    terminal.wait(on_pty=output.extend)
    assert b"50 132" in output
    assert b"/tmp" in output


def test_pty_kill(shared_sandbox):
    terminal = shared_sandbox.pty.create(PtySize(cols=80, rows=24), timeout=SLOW)
    assert shared_sandbox.pty.kill(terminal.pid)
    with pytest.raises(CommandExitException):
        terminal.wait()
    assert not shared_sandbox.pty.kill(terminal.pid)


async def test_async_pty_interrupts_what_runs(async_sandbox):
    # The program that is interrupted says itself that it is ready: between an `echo` of the shell
    # and the next command of the line, bash loses an interrupt (on any Linux: bash waits for a
    # child that was not in the foreground yet).
    output = bytearray()
    terminal = await async_sandbox.pty.create(
        PtySize(cols=80, rows=24), on_data=output.extend, timeout=SLOW
    )
    await async_sandbox.pty.send_stdin(terminal.pid, b"sh -c 'echo ready; exec sleep 1000'\n")
    for _ in range(10 * SLOW):
        if b"ready\r\n" in output:
            break
        await asyncio.sleep(0.1)
    await async_sandbox.pty.send_stdin(terminal.pid, b"\x03")
    await async_sandbox.pty.send_stdin(terminal.pid, b"exit 0\n")
    assert (await terminal.wait()).exit_code == 0

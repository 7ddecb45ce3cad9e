"""Pause, resume and fork by the unmodified SDK."""

import time

import pytest
from e2b import NotFoundException, Sandbox, SandboxQuery, SandboxState

TIMEOUT = 1800


def listed(state):
    pages = Sandbox.list(query=SandboxQuery(state=[state]))
    found = []
    while pages.has_next:
        found.extend(sandbox.sandbox_id for sandbox in pages.next_items())
    return found


def test_pause_and_connect(create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/home/user/note", "kept")
    command = sandbox.commands.run("sleep 1000", background=True, timeout=0)
    assert sandbox.pause()
    assert not sandbox.pause()
    assert not sandbox.is_running()
    assert sandbox.get_info().state == SandboxState.PAUSED
    assert sandbox.sandbox_id in listed(SandboxState.PAUSED)
    assert sandbox.sandbox_id not in listed(SandboxState.RUNNING)

    again = Sandbox.connect(sandbox.sandbox_id, timeout=TIMEOUT)
    assert again.is_running()
    assert again.files.read("/home/user/note") == "kept"
    assert command.pid in [process.pid for process in again.commands.list()]
    # The first handle is still good: its token is.
    assert sandbox.commands.run("echo same", timeout=300).stdout == "same\n"


def test_kill_of_a_paused_sandbox(create_sandbox):
    sandbox = create_sandbox()
    sandbox.pause()
    assert sandbox.kill()
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_timeout_that_pauses_and_request_that_resumes(node):
    sandbox = Sandbox.create(
        template=node.template,
        timeout=3,
        lifecycle={"on_timeout": "pause", "auto_resume": True},
    )
    try:
        for _ in range(300):
            if sandbox.get_info().state == SandboxState.PAUSED:
                break
            time.sleep(0.2)
        assert sandbox.files.exists("/etc/passwd")
        assert sandbox.get_info().state == SandboxState.RUNNING
    finally:
        sandbox.kill()


def test_fork(create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/home/user/note", "shared")
    children = sandbox.fork(count=2, timeout=TIMEOUT)
    try:
        assert [type(child).__name__ for child in children] == ["Sandbox", "Sandbox"]
        for index, child in enumerate(children):
            assert child.files.read("/home/user/note") == "shared"
            child.files.write("/home/user/note", f"child {index}")
            assert child.commands.run("echo $WARREN_FORK_INDEX", timeout=300).stdout == f"{index}\n"
        assert sandbox.files.read("/home/user/note") == "shared"
        assert children[0].files.read("/home/user/note") == "child 0"
    finally:
        for child in children:
            child.kill()

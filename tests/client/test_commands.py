"""Commands by the unmodified SDK."""

import os
import time

import pytest
from e2b import CommandExitException, InvalidArgumentException, NotFoundException, TimeoutException

# Patience for one command, in seconds.
SLOW = 300
# Guests that are emulated copy slowly; other runs may ask for more.
LARGE_BYTES = int(os.environ.get("WARREN_TEST_LARGE_BYTES", 4_000_000))


def run(sandbox, command, **options):
    options.setdefault("timeout", SLOW)
    return sandbox.commands.run(command, **options)


def test_run_gives_output_and_exit_code(shared_sandbox):
    result = run(shared_sandbox, "echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_run_failing_command_raises_with_its_output(shared_sandbox):
    with pytest.raises(CommandExitException) as caught:
        run(shared_sandbox, "echo before; exit 42")
    assert (caught.value.exit_code, caught.value.stdout) == (42, "before\n")


def test_run_calls_back_while_it_runs(shared_sandbox):
    seen = []
    run(
        shared_sandbox,
        "echo one; sleep 2; echo two >&2",
        on_stdout=lambda text: seen.append(("out", text)),
        on_stderr=lambda text: seen.append(("err", text)),
    )
    assert seen == [("out", "one\n"), ("err", "two\n")]


def test_run_unicode_survives_splitting(shared_sandbox):
    text = "žluťoučký kůň 🐎 " * 200
    result = run(shared_sandbox, f"printf %s '{text}'")
    assert result.stdout == text


def test_run_large_output_is_whole(shared_sandbox):
    result = run(shared_sandbox, f"head -c {LARGE_BYTES} /dev/zero | tr '\\0' x")
    assert len(result.stdout) == LARGE_BYTES
    assert set(result.stdout) == {"x"}


def test_run_environment_directory_and_user(shared_sandbox):
    result = run(shared_sandbox, "echo $WORD; pwd; id -un; echo $HOME", envs={"WORD": "a b"}, cwd="/tmp")
    assert result.stdout == "a b\n/tmp\nuser\n/home/user\n"
    result = run(shared_sandbox, "pwd; id -un", user="root")
    assert result.stdout.endswith("\nroot\n")


def test_run_missing_directory_is_refused(shared_sandbox):
    with pytest.raises(InvalidArgumentException, match="cwd '/no/such' does not exist"):
        run(shared_sandbox, "true", cwd="/no/such")


def test_run_with_a_job_in_the_background_returns(shared_sandbox):
    result = run(shared_sandbox, "sleep 4321 & echo started")
    assert result.stdout == "started\n"


def test_run_past_its_timeout_is_killed(shared_sandbox):
    with pytest.raises(TimeoutException):
        run(shared_sandbox, "sleep 1234 & sleep 1234", timeout=10)
    left = run(shared_sandbox, "grep -lsa 'sleep.123[4]' /proc/[0-9]*/cmdline | wc -l")
    assert left.stdout.strip() == "0"


def test_stdin_is_sent_and_closed(shared_sandbox):
    handle = run(shared_sandbox, "cat", background=True, stdin=True)
    shared_sandbox.commands.send_stdin(handle.pid, "hello ")
    shared_sandbox.commands.send_stdin(handle.pid, "world")
    shared_sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hello world"


def test_stdin_streamed(shared_sandbox):
    handle = run(shared_sandbox, "cat", background=True, stdin=True)
    shared_sandbox.commands.stream_input(handle.pid, ["one ", b"two"], timeout=SLOW)
    shared_sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one two"


def test_list_and_kill(shared_sandbox):
    handle = run(shared_sandbox, "sleep 999", background=True)
    listed = {process.pid: process for process in shared_sandbox.commands.list()}
    assert listed[handle.pid].args == ["-l", "-c", "sleep 999"]
    assert shared_sandbox.commands.kill(handle.pid)
    with pytest.raises(CommandExitException) as caught:
        handle.wait()
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")
    assert not shared_sandbox.commands.kill(handle.pid)


def test_connect_after_a_disconnect_gets_the_rest(shared_sandbox):
    command = "echo one; while [ ! -e /tmp/go-on ]; do sleep 0.5; done; echo two; exit 7"
    handle = run(shared_sandbox, command, background=True)
    for stdout, _, _ in handle:
        assert stdout == "one\n"
        break
    handle.disconnect()
    later = shared_sandbox.commands.connect(handle.pid, timeout=SLOW)
    shared_sandbox.files.write("/tmp/go-on", "")
    with pytest.raises(CommandExitException) as caught:
        later.wait()
    assert (caught.value.stdout, caught.value.exit_code) == ("two\n", 7)


def test_connect_after_the_end_tells_of_it(shared_sandbox):
    handle = run(shared_sandbox, "exit 3", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as caught:
        shared_sandbox.commands.connect(handle.pid, timeout=SLOW).wait()
    assert caught.value.exit_code == 3
    with pytest.raises(NotFoundException):
        shared_sandbox.commands.connect(999_999)


def test_output_nobody_saw_is_bounded_and_the_stream_still_understood(shared_sandbox):
    handle = run(shared_sandbox, "sleep 3; head -c 2000000 /dev/zero; touch /tmp/all-written", background=True)
    handle.disconnect()
    limit = time.time() + SLOW
    while not shared_sandbox.files.exists("/tmp/all-written"):
        assert time.time() < limit
        time.sleep(0.5)
    result = shared_sandbox.commands.connect(handle.pid, timeout=SLOW).wait()
    assert 0 < len(result.stdout) < 2_000_000
    assert result.exit_code == 0


async def test_async_run_stream_and_kill(async_sandbox):
    result = await async_sandbox.commands.run("echo hi; id -un", timeout=SLOW)
    assert result.stdout == "hi\nuser\n"
    handle = await async_sandbox.commands.run("cat", background=True, stdin=True, timeout=SLOW)
    await async_sandbox.commands.send_stdin(handle.pid, "ping\n")
    await async_sandbox.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "ping\n"
    with pytest.raises(TimeoutException):
        await async_sandbox.commands.run("sleep 600", timeout=10)

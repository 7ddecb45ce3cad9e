"""Sandboxes by the e2b SDK: create, list, limits, connect, kill, ports."""

import asyncio
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from e2b import AsyncSandbox, Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import (
    AuthenticationException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)


def drain(paginator):
    found = []
    while paginator.has_next:
        found.extend(paginator.next_items())
    return found


def listed(**metadata):
    query = SandboxQuery(metadata=metadata) if metadata else None
    return {info.sandbox_id for info in drain(Sandbox.list(query=query))}


def test_create_and_kill(create_sandbox):
    sandbox = create_sandbox()
    assert sandbox.is_running()
    assert sandbox.sandbox_id in listed()
    assert sandbox.kill() is True
    assert sandbox.is_running() is False
    assert sandbox.sandbox_id not in listed()


def test_kill_of_a_dead_sandbox_is_false(create_sandbox):
    sandbox = create_sandbox()
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert Sandbox.kill(sandbox.sandbox_id) is False


def test_get_info(node, create_sandbox):
    before = datetime.now(timezone.utc)
    sandbox = create_sandbox(metadata={"job": "7"}, timeout=300)
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"job": "7"}
    assert info.state == SandboxState.RUNNING
    assert info.cpu_count >= 1 and info.memory_mb >= 32
    assert abs(info.started_at - before) < timedelta(seconds=60)
    assert timedelta(seconds=295) < info.end_at - info.started_at < timedelta(seconds=305)


def test_list_pages(node, create_sandbox):
    label = uuid.uuid4().hex
    made = {create_sandbox(metadata={"page": label}).sandbox_id for _ in range(5)}
    paginator = Sandbox.list(query=SandboxQuery(metadata={"page": label}), limit=2)
    pages = []
    while paginator.has_next:
        pages.append([info.sandbox_id for info in paginator.next_items()])
    assert [len(page) for page in pages] == [2, 2, 1]
    ids = [sandbox_id for page in pages for sandbox_id in page]
    assert set(ids) == made and len(ids) == len(made)


def test_list_filters_by_metadata(create_sandbox):
    label = uuid.uuid4().hex
    red = create_sandbox(metadata={"job": label, "colour": "red"})
    blue = create_sandbox(metadata={"job": label, "colour": "blue & gr=ün"})
    assert listed(job=label) == {red.sandbox_id, blue.sandbox_id}
    assert listed(job=label, colour="red") == {red.sandbox_id}
    assert listed(job=label, colour="blue & gr=ün") == {blue.sandbox_id}
    assert listed(job=label, colour="green") == set()


def test_list_filters_by_state(create_sandbox):
    label = uuid.uuid4().hex
    sandbox = create_sandbox(metadata={"job": label})

    def by_state(state):
        query = SandboxQuery(metadata={"job": label}, state=[state])
        return [info.sandbox_id for info in drain(Sandbox.list(query=query))]

    assert by_state(SandboxState.RUNNING) == [sandbox.sandbox_id]
    assert by_state(SandboxState.PAUSED) == []


def test_environment_reaches_commands(create_sandbox):
    sandbox = create_sandbox(envs={"COLOUR": "grün"})
    assert sandbox.commands.run("echo $COLOUR").stdout == "grün\n"
    assert sandbox.commands.run("echo $COLOUR", envs={"COLOUR": "rot"}).stdout == "rot\n"


def test_time_limit_ends_the_sandbox(create_sandbox):
    sandbox = create_sandbox(timeout=3)
    started = time.monotonic()
    while sandbox.is_running():
        assert time.monotonic() - started < 30
        time.sleep(0.2)
    assert time.monotonic() - started > 1


def test_set_timeout_moves_the_end(create_sandbox):
    sandbox = create_sandbox(timeout=300)
    sandbox.set_timeout(900)
    left = sandbox.get_info().end_at - datetime.now(timezone.utc)
    assert timedelta(seconds=880) < left < timedelta(seconds=905)
    sandbox.set_timeout(60)
    left = sandbox.get_info().end_at - datetime.now(timezone.utc)
    assert timedelta(seconds=40) < left < timedelta(seconds=65)


def test_set_timeout_of_a_dead_sandbox(create_sandbox):
    sandbox = create_sandbox()
    sandbox.kill()
    with pytest.raises(NotFoundException):
        sandbox.set_timeout(60)


def test_connect_gives_the_same_sandbox(create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/tmp/mark", "here")
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again.files.read("/tmp/mark") == "here"


def test_connect_only_extends(create_sandbox):
    sandbox = create_sandbox(timeout=900)
    Sandbox.connect(sandbox.sandbox_id, timeout=60)
    left = sandbox.get_info().end_at - datetime.now(timezone.utc)
    assert left > timedelta(seconds=800)
    Sandbox.connect(sandbox.sandbox_id, timeout=1500)
    left = sandbox.get_info().end_at - datetime.now(timezone.utc)
    assert left > timedelta(seconds=1400)


def test_connect_to_a_dead_sandbox(create_sandbox):
    sandbox = create_sandbox()
    sandbox.kill()
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_use_after_kill(create_sandbox):
    sandbox = create_sandbox()
    sandbox.kill()
    with pytest.raises((TimeoutException, NotFoundException)):
        sandbox.commands.run("true")
    with pytest.raises((TimeoutException, NotFoundException)):
        sandbox.files.read("/etc/hosts")


def test_kill_ends_a_running_command(create_sandbox):
    sandbox = create_sandbox()
    handle = sandbox.commands.run("sleep 600", background=True, timeout=0)
    timer = threading.Timer(1, sandbox.kill)
    timer.start()
    started = time.monotonic()
    with pytest.raises(Exception) as raised:
        handle.wait()
    timer.join()
    assert time.monotonic() - started < 60
    assert "exit code 0" not in str(raised.value)


def test_metrics(create_sandbox):
    sandbox = create_sandbox()
    deadline = time.monotonic() + 30
    samples = sandbox.get_metrics()
    while not samples and time.monotonic() < deadline:
        time.sleep(1)
        samples = sandbox.get_metrics()
    assert samples, "no sample within 30 s"
    last = samples[-1]
    assert last.cpu_count >= 1
    assert 0 < last.mem_used <= last.mem_total
    assert 0 <= last.disk_used <= last.disk_total


def test_unknown_template(node):
    with pytest.raises((NotFoundException, SandboxException), match="no-such-template"):
        Sandbox.create(template="no-such-template")


def test_wrong_api_key(node):
    with pytest.raises(AuthenticationException):
        Sandbox.create(template=node.template, api_key="e2b_" + "0" * 40)


def test_port_of_a_server_in_the_sandbox(node, create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/tmp/www/hello.txt", "hello from inside")
    sandbox.commands.run("python3 -m http.server 8000 --directory /tmp/www", background=True, timeout=0)
    assert sandbox.get_host(8000) == f"8000-{sandbox.sandbox_id}.{sandbox.sandbox_domain}"
    deadline = time.monotonic() + 120
    while True:
        status, body = through_proxy(node, sandbox, 8000, "/hello.txt")
        if status != 502 or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert (status, body) == (200, b"hello from inside")
    assert through_proxy(node, sandbox, 8000, "/none")[0] == 404


def test_port_by_host_name(node, create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/tmp/www/index.html", "by name")
    sandbox.commands.run("python3 -m http.server 8000 --directory /tmp/www", background=True, timeout=0)
    address = node.url.removeprefix("http://")
    deadline = time.monotonic() + 120
    while True:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", "/", headers={"Host": f"8000-{sandbox.sandbox_id}.sandboxes.test"})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        if response.status != 502 or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert (response.status, body) == (200, b"by name")


def test_closed_port_is_a_502_that_says_so(node, create_sandbox):
    sandbox = create_sandbox()
    status, body = through_proxy(node, sandbox, 9999, "/")
    assert status == 502
    told = json.loads(body)
    assert "port is not open" in told["message"] and told["port"] == 9999


def test_port_of_an_unknown_sandbox_is_a_502_that_says_so(node):
    class Unknown:
        sandbox_id = "nosuchsandbox"

    status, body = through_proxy(node, Unknown, 8000, "/")
    assert status == 502
    assert "was not found" in json.loads(body)["message"]


def test_agents_own_routes_are_not_reachable(node, create_sandbox):
    sandbox = create_sandbox()
    for route in ("/init", "/warmup", "/quiesce"):
        status, _ = through_proxy(node, sandbox, 49983, route, method="POST", body=b"{}")
        assert status == 404, route
    assert sandbox.is_running()


def through_proxy(node, sandbox, port, path, method="GET", body=None):
    request = urllib.request.Request(
        node.url + path,
        method=method,
        data=body,
        headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_same_idempotency_key_same_sandbox(create_sandbox):
    key = uuid.uuid4().hex
    first = create_sandbox(idempotency_key=key)
    second = create_sandbox(idempotency_key=key)
    other = create_sandbox(idempotency_key=uuid.uuid4().hex)
    assert first.sandbox_id == second.sandbox_id != other.sandbox_id


async def test_twenty_sandboxes_at_once(node):
    async def use(index):
        sandbox = await AsyncSandbox.create(template=node.template, timeout=1800, request_timeout=300)
        try:
            await sandbox.files.write("/tmp/own", f"{index}\n", request_timeout=300)
            result = await sandbox.commands.run("cat /tmp/own; hostname", timeout=300, request_timeout=300)
            return result.stdout.splitlines()[0], result.stdout.splitlines()[1], sandbox.sandbox_id
        finally:
            await sandbox.kill(request_timeout=300)

    results = await asyncio.gather(*(use(index) for index in range(20)))
    assert [own for own, _, _ in results] == [str(index) for index in range(20)]
    assert len({sandbox_id for _, _, sandbox_id in results}) == 20
    assert len({hostname for _, hostname, _ in results}) == 20


def test_what_this_version_lacks_says_so(create_sandbox):
    sandbox = create_sandbox()
    with pytest.raises(SandboxException, match="not supported"):
        sandbox.create_snapshot()
    assert sandbox.is_running()

"""Fixtures of the client suite: a node, and sandboxes made by the e2b SDK.

The node is one that the harness starts (`warren-test-node`), or one that is
named by WARREN_TEST_URL and WARREN_TEST_API_KEY. Guests may be a thousand times
slower than on bare metal, so nothing here expects speed.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ.get("WARREN_BIN") or ROOT / "target/x86_64-unknown-linux-gnu/release")

# Longest life of a test's sandbox, in seconds.
SANDBOX_TIMEOUT = 1800
# Patience for one request of the SDK, in seconds.
REQUEST_TIMEOUT = 300


@dataclass(frozen=True)
class Node:
    url: str
    api_key: str
    template: str
    log: str | None


def _missing() -> str | None:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm cannot be opened"
    if os.geteuid() != 0:
        return "not root"
    return None


def _started(*flags):
    """A node of the harness, until the generator is closed."""
    reason = _missing()
    if reason:
        pytest.skip(reason)
    process = subprocess.Popen(
        [PROGRAMS / "warren-test-node", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    if not line:
        pytest.exit(f"the test node did not start (exit code {process.wait()})", returncode=1)
    told = json.loads(line)
    try:
        yield Node(told["url"], told["apiKey"], told["template"], told["log"])
    finally:
        process.stdin.close()
        process.wait(timeout=120)


def _point_sdk_at(node, set_variable, delete_variable):
    set_variable("E2B_API_URL", node.url)
    set_variable("E2B_SANDBOX_URL", node.url)
    set_variable("E2B_API_KEY", node.api_key)
    delete_variable("E2B_DEBUG")
    delete_variable("E2B_DOMAIN")


def _named(template):
    """The node that the environment names, if it does."""
    url = os.environ.get("WARREN_TEST_URL")
    return Node(url, os.environ["WARREN_TEST_API_KEY"], template, None) if url else None


@pytest.fixture(scope="session")
def node():
    """A node with the template `base`; the SDK is pointed at it."""
    named = _named(os.environ.get("WARREN_TEST_TEMPLATE", "base"))
    for node in [named] if named else _started():
        _point_sdk_at(node, os.environ.__setitem__, lambda name: os.environ.pop(name, None))
        yield node


@pytest.fixture(scope="module")
def interpreter_node():
    """A node with the template of the code interpreter; while a file's tests run,
    the SDK is pointed at it."""
    named = _named("code-interpreter-v1")
    with pytest.MonkeyPatch.context() as patch:
        for node in [named] if named else _started("--code-interpreter"):
            _point_sdk_at(node, patch.setenv, lambda name: patch.delenv(name, raising=False))
            yield node


@pytest.fixture
def create_sandbox(node):
    """Makes sandboxes that are killed when the test ends."""
    from e2b import Sandbox

    made = []

    def create(**options):
        options.setdefault("template", node.template)
        options.setdefault("timeout", SANDBOX_TIMEOUT)
        options.setdefault("request_timeout", REQUEST_TIMEOUT)
        sandbox = Sandbox.create(**options)
        made.append(sandbox)
        return sandbox

    yield create
    for sandbox in made:
        sandbox.kill()


@pytest.fixture
def sandbox(create_sandbox):
    """A sandbox of this test alone."""
    return create_sandbox()


@pytest.fixture(scope="module")
def shared_sandbox(node):
    """One sandbox for the tests of a file that do not get into each other's way."""
    from e2b import Sandbox

    sandbox = Sandbox.create(template=node.template, timeout=SANDBOX_TIMEOUT, request_timeout=REQUEST_TIMEOUT)
    yield sandbox
    sandbox.kill()


@pytest.fixture
async def async_sandbox(node):
    """A sandbox of this test alone, for the asynchronous SDK."""
    from e2b import AsyncSandbox

    sandbox = await AsyncSandbox.create(
        template=node.template, timeout=SANDBOX_TIMEOUT, request_timeout=REQUEST_TIMEOUT
    )
    yield sandbox
    await sandbox.kill()


@pytest.fixture
def interpreter(interpreter_node):
    """A sandbox of the code interpreter's SDK, of the template that it asks for by itself."""
    from e2b_code_interpreter import Sandbox

    sandbox = Sandbox.create(timeout=SANDBOX_TIMEOUT, request_timeout=REQUEST_TIMEOUT)
    yield sandbox
    sandbox.kill()

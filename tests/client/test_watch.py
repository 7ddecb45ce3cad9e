"""Watching directories by the unmodified SDK."""

import asyncio
import time

import pytest
from e2b import FilesystemEventType, InvalidArgumentException, NotFoundException, SandboxException

SLOW = 300


def collect(handle, wanted):
    """Events until the wanted ones are there."""
    events = []
    limit = time.time() + SLOW
    while not wanted <= {(event.type, event.name) for event in events}:
        assert time.time() < limit, events
        events += handle.get_new_events()
        time.sleep(0.1)
    return events


def test_watch_tells_of_what_happens_in_a_directory(shared_sandbox):
    files = shared_sandbox.files
    files.make_dir("/home/user/watched/below")
    handle = files.watch_dir("/home/user/watched")
    files.write("/home/user/watched/file", "x")
    files.rename("/home/user/watched/file", "/home/user/watched/other")
    files.remove("/home/user/watched/other")
    files.write("/home/user/watched/below/unseen", "x")
    events = collect(
        handle,
        {
            (FilesystemEventType.CREATE, "file"),
            (FilesystemEventType.WRITE, "file"),
            (FilesystemEventType.RENAME, "file"),
            (FilesystemEventType.CREATE, "other"),
            (FilesystemEventType.REMOVE, "other"),
        },
    )
    assert not [event for event in events if "unseen" in event.name]
    assert handle.get_new_events() == []
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()


def test_watch_recursive_follows_new_directories(shared_sandbox):
    files = shared_sandbox.files
    files.make_dir("/home/user/root-of-all")
    handle = files.watch_dir("/home/user/root-of-all", recursive=True, include_entry=True)
    files.write("/home/user/root-of-all/a/b/c", "x")
    events = collect(handle, {(FilesystemEventType.CREATE, "a/b/c")})
    names = [event.name for event in events if event.type == FilesystemEventType.CREATE]
    assert names == ["a", "a/b", "a/b/c"]
    entries = {event.name: event.entry for event in events if event.entry}
    assert entries["a/b/c"].path == "/home/user/root-of-all/a/b/c"
    handle.stop()


def test_watch_unusable_places_are_told(shared_sandbox):
    with pytest.raises(NotFoundException):
        shared_sandbox.files.watch_dir("/no/such/place")
    with pytest.raises(InvalidArgumentException):
        shared_sandbox.files.watch_dir("/etc/passwd")


async def test_async_watch_streams(async_sandbox):
    await async_sandbox.files.make_dir("/home/user/streamed")
    seen = []
    handle = await async_sandbox.files.watch_dir(
        "/home/user/streamed", on_event=seen.append, recursive=True, timeout=0
    )
    await async_sandbox.files.write("/home/user/streamed/file", "x")
    for _ in range(SLOW * 10):
        if any(event.type == FilesystemEventType.WRITE for event in seen):
            break
        await asyncio.sleep(0.1)
    assert (FilesystemEventType.CREATE, "file") in {(event.type, event.name) for event in seen}
    await handle.stop()

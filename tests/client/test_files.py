"""Files by the unmodified SDK."""

import hashlib
import io
import os
import urllib.request

import pytest
from e2b import FileNotFoundException, FileType, InvalidArgumentException, SandboxException

# Guests that are emulated copy slowly; other runs may ask for more.
LARGE_BYTES = int(os.environ.get("WARREN_TEST_LARGE_BYTES", 4_000_000))
SLOW = 300


def test_write_and_read_text_and_bytes(shared_sandbox):
    files = shared_sandbox.files
    info = files.write("notes/hello.txt", "žluťoučký kůň")
    assert (info.path, info.name) == ("/home/user/notes/hello.txt", "hello.txt")
    assert files.read("/home/user/notes/hello.txt") == "žluťoučký kůň"
    blob = bytes(range(256)) * 10
    files.write("/tmp/blob", blob)
    assert bytes(files.read("/tmp/blob", format="bytes")) == blob
    files.write("/tmp/blob", b"shorter")
    assert bytes(files.read("/tmp/blob", format="bytes")) == b"shorter"


@pytest.mark.parametrize("octet_stream", [True, False])
def test_write_large_file_arrives_whole(shared_sandbox, octet_stream):
    content = os.urandom(LARGE_BYTES)
    shared_sandbox.files.write(
        "/tmp/large", content, use_octet_stream=octet_stream, request_timeout=SLOW
    )
    streamed = hashlib.sha256()
    with shared_sandbox.files.read("/tmp/large", format="stream", request_timeout=SLOW) as stream:
        for piece in stream:
            streamed.update(piece)
    assert streamed.hexdigest() == hashlib.sha256(content).hexdigest()


def test_write_gzip_and_stream(shared_sandbox):
    text = "warren " * 50_000
    shared_sandbox.files.write("/tmp/packed", text, gzip=True)
    assert shared_sandbox.files.read("/tmp/packed", gzip=True) == text
    shared_sandbox.files.write("/tmp/from-io", io.BytesIO(b"from a file object"))
    assert shared_sandbox.files.read("/tmp/from-io") == "from a file object"


def test_write_several_files_at_once(shared_sandbox):
    entries = [
        {"path": "/tmp/several/one", "data": "1"},
        {"path": "/tmp/several/with \"quotes\" and spaces", "data": b"2"},
    ]
    written = shared_sandbox.files.write_files(entries)
    assert [info.path for info in written] == [entry["path"] for entry in entries]
    assert shared_sandbox.files.read(entries[1]["path"]) == "2"


def test_owner_is_the_user_asked_for(shared_sandbox):
    shared_sandbox.files.write("/tmp/of-user/file", "x")
    info = shared_sandbox.files.get_info("/tmp/of-user/file")
    assert (info.owner, info.permissions, info.size) == ("user", "-rw-r--r--", 1)
    assert shared_sandbox.files.get_info("/tmp/of-user").owner == "user"
    shared_sandbox.files.write("/tmp/of-root", "x", user="root")
    assert shared_sandbox.files.get_info("/tmp/of-root").owner == "root"


def test_metadata_is_replaced_by_each_write(shared_sandbox):
    shared_sandbox.files.write("/home/user/meta", "x", metadata={"first": "1", "second": "2"})
    assert shared_sandbox.files.get_info("/home/user/meta").metadata == {"first": "1", "second": "2"}
    shared_sandbox.files.write("/home/user/meta", "y", metadata={"third": "3"})
    assert shared_sandbox.files.get_info("/home/user/meta").metadata == {"third": "3"}


def test_missing_and_unusable_paths_are_told(shared_sandbox):
    with pytest.raises(FileNotFoundException):
        shared_sandbox.files.read("/no/such/file")
    with pytest.raises(InvalidArgumentException):
        shared_sandbox.files.read("/tmp")
    with pytest.raises(InvalidArgumentException):
        shared_sandbox.files.write("/tmp", "x")
    with pytest.raises((InvalidArgumentException, SandboxException)):
        shared_sandbox.files.write("/tmp/a\0b", "x")


def test_directories_are_made_listed_and_removed(shared_sandbox):
    files = shared_sandbox.files
    assert files.make_dir("/tmp/tree/deep")
    assert not files.make_dir("/tmp/tree/deep")
    files.write("/tmp/tree/deep/leaf", "x")
    assert [entry.name for entry in files.list("/tmp/tree")] == ["deep"]
    entries = files.list("/tmp/tree", depth=2)
    assert [(entry.name, entry.type) for entry in entries] == [
        ("deep", FileType.DIR),
        ("leaf", FileType.FILE),
    ]
    files.remove("/tmp/tree")
    assert not files.exists("/tmp/tree")
    files.remove("/tmp/tree")
    with pytest.raises(FileNotFoundException):
        files.list("/tmp/tree")


def test_rename_moves_and_makes_parents(shared_sandbox):
    files = shared_sandbox.files
    files.write("/tmp/old-name", "content")
    moved = files.rename("/tmp/old-name", "/tmp/new/place/name")
    assert moved.path == "/tmp/new/place/name"
    assert files.read("/tmp/new/place/name") == "content"
    with pytest.raises(FileNotFoundException):
        files.rename("/tmp/old-name", "/tmp/elsewhere")


def test_links_tell_their_target(shared_sandbox):
    shared_sandbox.commands.run("mkdir -p /tmp/target && ln -sfn /tmp/target /tmp/link", timeout=SLOW)
    info = shared_sandbox.files.get_info("/tmp/link")
    assert (info.type, info.symlink_target) == (FileType.SYMLINK, "/tmp/target")


def test_signed_links_work_without_a_token(shared_sandbox):
    if not shared_sandbox._envd_access_token:
        pytest.skip("this server gives no token")
    shared_sandbox.files.write("/tmp/signed", "by link")
    with urllib.request.urlopen(shared_sandbox.download_url("/tmp/signed")) as reply:
        assert reply.read() == b"by link"
    expired = shared_sandbox.download_url("/tmp/signed", use_signature_expiration=-120)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(expired)
    assert caught.value.code == 401


async def test_async_write_read_list(async_sandbox):
    await async_sandbox.files.write("/tmp/async/file", "hello")
    assert await async_sandbox.files.read("/tmp/async/file") == "hello"
    assert [entry.name for entry in await async_sandbox.files.list("/tmp/async")] == ["file"]
    assert await async_sandbox.files.exists("/tmp/async/file")
    await async_sandbox.files.remove("/tmp/async")
    assert not await async_sandbox.files.exists("/tmp/async/file")

"""The digest cache: remembers, notices change, stays bounded, survives other processes and damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from blake3 import blake3

from punica_batch.adapters import digest
from punica_batch.adapters.digest import DigestCache, cache_folder, file_digest
from punica_batch.adapters.store import FileStamp, Folder

STAMP = FileStamp(size=3, version="1", inode=7, changed_ns=1_000_000_000)
DIGESTS = [blake3(bytes([i])).hexdigest() for i in range(40)]


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Folder, list[str]]:
    (tmp_path / "weights").write_bytes(b"abc" * 1000)
    monkeypatch.setattr(digest, "_SETTLE_SECONDS", -1.0)
    reads: list[str] = []
    real = Folder.stream
    monkeypatch.setattr(Folder, "stream", lambda self, name, *args: reads.append(name) or real(self, name, *args))
    return Folder(str(tmp_path)), reads


def digest_of(folder: Folder, cache: DigestCache | None) -> str | None:
    stamp = folder.stamp("weights")
    assert stamp is not None
    return file_digest(folder, "weights", stamp, cache)


def test_a_file_is_read_once_until_it_changes(counted: tuple[Folder, list[str]], tmp_path: Path) -> None:
    folder, reads = counted
    path = tmp_path / "weights"
    for _ in range(2):
        with DigestCache(tmp_path / "cache") as cache:
            assert digest_of(folder, cache) == blake3(path.read_bytes()).hexdigest()
    assert len(reads) == 1
    for change in (
        lambda: (path.write_bytes(b"xyz" * 1000), os.utime(path, (2, 2))),  # time
        lambda: (path.write_bytes(b"xyz"), os.utime(path, (2, 2))),  # size
        lambda: (path.rename(tmp_path / "old"), path.write_bytes(b"abc"), os.utime(path, (2, 2))),  # inode
        lambda: (path.write_bytes(b"xyz"), os.utime(path, (2, 2))),  # a time set back: the kernel's own tells
    ):
        time.sleep(0.02)  # more than a tick of the file system's clock
        change()
        with DigestCache(tmp_path / "cache") as cache:
            assert digest_of(folder, cache) == blake3(path.read_bytes()).hexdigest()
    assert len(reads) == 5
    assert digest_of(folder, None) == blake3(b"xyz").hexdigest()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
        (1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"),
        (102400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"),
    ],
)
def test_the_algorithms_own_vectors(tmp_path: Path, size: int, expected: str) -> None:
    """Of https://github.com/BLAKE3-team/BLAKE3/blob/master/test_vectors/test_vectors.json: bytes 0 to 250, repeated."""
    (tmp_path / "weights").write_bytes((bytes(range(251)) * (size // 251 + 1))[:size])
    assert digest_of(Folder(str(tmp_path)), None) == expected


def test_entries_of_another_algorithm_are_neither_read_nor_kept(tmp_path: Path) -> None:
    """Those that earlier versions wrote: SHA-256, in the same form."""
    path, key, stamp = tmp_path / "digests.json", digest._key("a"), [3, "1", 7, 1_000_000_000]
    path.write_text(json.dumps({"sha256": {key: [*stamp, DIGESTS[1]], "other": [*stamp, DIGESTS[2]]}}))
    with DigestCache(tmp_path) as cache:
        assert cache.get("a", STAMP) is None
        cache.put("a", STAMP, DIGESTS[0])
    assert json.loads(path.read_text()) == {"blake3": {key: [*stamp, DIGESTS[0]]}}


def test_a_symlinks_target_counts(counted: tuple[Folder, list[str]], tmp_path: Path) -> None:
    _, reads = counted
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").symlink_to(tmp_path / "weights")
    folder = Folder(str(tmp_path / "a"))
    with DigestCache(tmp_path / "cache") as cache:
        digest_of(folder, cache)
        (tmp_path / "weights").write_bytes(b"xyz" * 1000)
        os.utime(tmp_path / "weights", (2, 2))
        assert digest_of(folder, cache) == blake3(b"xyz" * 1000).hexdigest()
    assert len(reads) == 2


def test_a_file_just_written_is_not_remembered(
    counted: tuple[Folder, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written again within the clock's tick, it would have the same size and times."""
    folder, reads = counted
    monkeypatch.setattr(digest, "_SETTLE_SECONDS", 60.0)
    (tmp_path / "weights").write_bytes(b"new")
    os.utime(tmp_path / "weights", (1, 1))  # what it says itself does not count
    cache = DigestCache(tmp_path / "cache")
    assert digest_of(folder, cache) == digest_of(folder, cache)
    assert len(reads) == 2


def test_a_store_without_versions_is_not_remembered(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path)
    cache.put("x", FileStamp(3, None), DIGESTS[0])
    assert cache.get("x", FileStamp(3, None)) is None


def test_the_cache_is_bounded_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MAX_ENTRIES", 10)
    for start in (0, 20):
        with DigestCache(tmp_path) as cache:
            for i in range(start, start + 20):
                cache.put(f"file{i}", STAMP, DIGESTS[i])
    again = DigestCache(tmp_path)
    assert [i for i in range(40) if again.get(f"file{i}", STAMP)] == list(range(30, 40))
    assert [path.name for path in tmp_path.iterdir()] == ["digests.json"]


def test_many_entries_are_written_now_and_then_not_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    real = digest._write
    monkeypatch.setattr(digest, "_write", lambda path, new: (writes.append(len(new)), real(path, new)))
    with DigestCache(tmp_path) as cache:
        for i in range(1200):
            cache.put(f"file{i}", STAMP, DIGESTS[i % 40])
    assert writes == [500, 500, 200]


def test_a_few_entries_are_written_soon_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_FLUSH_SECONDS", 0.01)
    cache = DigestCache(tmp_path)
    for i in range(3):
        cache.put(f"file{i}", STAMP, DIGESTS[i])
        while DigestCache(tmp_path).get(f"file{i}", STAMP) != DIGESTS[i]:
            time.sleep(0.005)


def test_other_processes_entries_are_kept(tmp_path: Path) -> None:
    """Both opened the same empty cache; the second writer merges."""
    one, two = DigestCache(tmp_path), DigestCache(tmp_path)
    one.put("a", STAMP, DIGESTS[1])
    two.put("b", STAMP, DIGESTS[2])
    one.flush()
    two.flush()
    merged = DigestCache(tmp_path)
    assert (merged.get("a", STAMP), merged.get("b", STAMP)) == (DIGESTS[1], DIGESTS[2])


def test_processes_writing_at_once_never_leave_a_broken_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from punica_batch.adapters.digest import DigestCache;"
        "from punica_batch.adapters.store import FileStamp\n"
        "for i in range(60):\n"
        "    c = DigestCache(Path(sys.argv[1])); c.put(sys.argv[2] + str(i), FileStamp(1, '1'), 'a' * 64); c.flush()\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    while any(child.poll() is None for child in children):
        if (tmp_path / "digests.json").exists():
            json.loads((tmp_path / "digests.json").read_text())
    assert [child.returncode for child in children] == [0, 0]
    merged = DigestCache(tmp_path)
    assert any(merged.get(f"{name}59", FileStamp(1, "1")) for name in "ab")
    assert [path.name for path in tmp_path.iterdir()] == ["digests.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"blake3": []}', b"\xff", b"[" * 100_000, b'{"blake3": {"k": [3, "1", 7]}}',
        b'{"blake3": {"KEY": [3, "1", 7, 1000000000, "../../etc"]}}', b'{"blake3": {"KEY": {"a": 1}}}',
    ],
)  # fmt: skip
def test_an_unreadable_cache_is_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    key = digest._key("a").encode()
    (tmp_path / "digests.json").write_bytes(content.replace(b"KEY", key))
    with DigestCache(tmp_path) as cache:
        assert cache.get("a", STAMP) is None
        cache.put("a", STAMP, DIGESTS[0])
    assert DigestCache(tmp_path).get("a", STAMP) == DIGESTS[0]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with DigestCache(tmp_path / "file" / "cache") as cache:
        cache.put("a", STAMP, DIGESTS[0])
        assert cache.get("a", STAMP) == DIGESTS[0]


def test_no_path_or_url_is_stored(tmp_path: Path) -> None:
    with DigestCache(tmp_path) as cache:
        cache.put("s3://key:SECRET@bucket/a", STAMP, DIGESTS[0])
    assert b"SECRET" not in (tmp_path / "digests.json").read_bytes()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUNICA_BATCH_CACHE", "/some/where")
    assert cache_folder() == Path("/some/where")
    monkeypatch.delenv("PUNICA_BATCH_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/punica-batch")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/punica-batch")


def test_a_closed_cache_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with DigestCache(tmp_path) as cache:
        cache.put("somewhere", FileStamp(3, "1", 5, 1), "a" * 64)
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) == before
    assert DigestCache(tmp_path).get("somewhere", FileStamp(3, "1", 5, 1)) == "a" * 64

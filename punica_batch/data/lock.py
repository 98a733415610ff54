"""One run at a time for each output.

Locally: flock on a file that is never renamed or deleted, so that two processes always mean the same lock; the system
frees it when its holder dies. Remotely: a lease. Each holder creates the object of the next *epoch* exclusively, and
rewrites its own with a new heartbeat every few seconds; a lease without a heartbeat for a minute may be taken over, and
the former holder notices the higher epoch before it writes again.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from punica_batch.data.disk import disk_errors, make_folder
from punica_batch.data.layout import Layout
from punica_batch.data.store import RemoteStore, Store
from punica_batch.errors import OutputLocked, PunicaError, StoreAway

HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0
_WHOLE_WAIT_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_GLANCE_SECONDS = 0.2  # `status` holds a lock for an instant to see whether it is free


class FileLock:
    """flock on ``path``, held from construction until ``release``. Raises ``OutputLocked`` after ``wait`` seconds."""

    def __init__(self, path: Path, *, shared: bool = False, wait: float = _GLANCE_SECONDS) -> None:
        make_folder(path.parent)
        with disk_errors("open", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip()
                    os.close(self._descriptor)
                    who = f" ({holder})" if holder else ""
                    raise OutputLocked(f"another run{who} holds {path.parent}: wait for it, or stop it") from None
                time.sleep(0.05)
        if not shared:
            with suppress(OSError):  # on a full disk the lock holds without its holder's name
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def holder_of(path: Path) -> str | None:
    """Who holds the lock ``path`` alone, None when nobody does. Creates and changes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another run"
    else:
        return None
    finally:
        os.close(descriptor)


class OutputLock:
    """This run's hold on its output, or on its slice of it.

    A run of the whole holds ``lock`` alone; the runs of slices share it, and each holds a lock of its own. Remotely a
    lease stands for each, and the local work folder is locked too.
    """

    def __init__(self, layout: Layout, index: int, count: int) -> None:
        self._layout = layout
        self._held: list[FileLock] = []
        self._leases: list[Lease] = []
        own = f"-{index + 1}-of-{count}" if count > 1 else ""
        try:
            # A look from outside (``holder_of``) holds it for a moment.
            self._held.append(FileLock(layout.local / "lock", shared=count > 1, wait=_LOOK_SECONDS))
            if own:
                self._held.append(FileLock(layout.local / f"lock{own}", wait=_LOOK_SECONDS))
            if isinstance(layout.store, RemoteStore):
                self._leases.append(Lease(layout.store, layout.in_state(f"lease{own}")))
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise when a remote lease is lost."""
        for lease in self._leases:
            lease.check()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep the other slices' runs out of what belongs to all: the plan, and the last step."""
        lock: FileLock | Lease = FileLock(self._layout.local / "lock-all", wait=_WHOLE_WAIT_SECONDS)
        locks = [lock]
        try:
            if isinstance(self._layout.store, RemoteStore):
                locks.append(_wait_for_lease(self._layout.store, self._layout.in_state("lease-all")))
            yield
        finally:
            for lock in reversed(locks):
                lock.release()

    def release(self) -> None:
        for lease in self._leases:
            lease.release()
        for lock in reversed(self._held):
            lock.release()
        self._held, self._leases = [], []


def lease_holder(store: Store, name: str) -> str | None:
    """Who holds the lease ``name`` with a heartbeat of the last minute, None when nobody does."""
    epochs = sorted(int(epoch) for epoch in store.names(name) if epoch.isdecimal())
    held = json.loads(store.read(f"{name}/{epochs[-1]:08d}") or b"{}") if epochs else {}
    is_held = not held.get("released", not held) and time.time() - held["time"] < LEASE_SECONDS
    return str(held["who"]) if is_held else None


def _wait_for_lease(store: RemoteStore, name: str) -> Lease:
    deadline = time.monotonic() + _WHOLE_WAIT_SECONDS
    while True:
        try:
            return Lease(store, name)
        except OutputLocked:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1.0)


class Lease:
    """A lease on the folder ``name`` of ``store``, held from construction until ``release``.

    Raises ``OutputLocked`` when another holds it, ``UsageError`` when the store cannot create exclusively.
    """

    def __init__(self, store: RemoteStore, name: str, *, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self._store = store
        self._name = name
        self._id = uuid.uuid4().hex
        self._heartbeat = heartbeat
        self._stop = threading.Event()
        self._probe()
        self.epoch = self._acquire()
        self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)
        self._thread.start()

    def _probe(self) -> None:
        """A store that lets two creates of one name succeed would let two runs in."""
        name = f"{self._name}/probe-{self._id}"
        try:
            if not self._store.create(name, b"") or self._store.create(name, b""):
                raise self._store.no_exclusive_create()
        finally:
            self._store.remove(name)

    def _epochs(self) -> list[int]:
        return sorted(int(name) for name in self._store.names(self._name) if name.isdecimal())

    def _object(self, epoch: int) -> str:
        return f"{self._name}/{epoch:08d}"

    def _content(self, *, released: bool = False) -> bytes:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"id": self._id, "who": who, "time": time.time(), "released": released}).encode()

    def _acquire(self) -> int:
        epochs = self._epochs()
        latest = epochs[-1] if epochs else 0
        if epochs:
            held = json.loads(self._store.read(self._object(latest)) or b"{}")
            if not held.get("released", not held) and time.time() - held["time"] < LEASE_SECONDS:
                raise OutputLocked(
                    f"another run ({held['who']}) holds {self._store.shown('')}: wait for it, or stop it"
                )
        if not self._store.create(self._object(latest + 1), self._content()):
            raise OutputLocked(f"another run has just taken {self._store.shown('')}: wait for it, or stop it")
        for epoch in epochs:
            self._store.remove(self._object(epoch))
        return latest + 1

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat):
            try:
                self._store.write(self._object(self.epoch), self._content())
                self._beaten = time.monotonic()
            except (PunicaError, OSError):
                continue  # check() speaks up when it lasts

    def check(self) -> None:
        """Raise ``OutputLocked`` when another has taken over, ``StoreAway`` when the heartbeat has stopped."""
        if time.monotonic() - self._beaten > LEASE_SECONDS:
            raise StoreAway(f"{self._store.shown('')} has not answered for a minute: run the same command again later")
        if self._epochs()[-1:] != [self.epoch]:
            raise OutputLocked(f"another run has taken over {self._store.shown('')}: this one stops")

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        self._store.write(self._object(self.epoch), self._content(released=True))

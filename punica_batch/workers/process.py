"""The parent's handle of one child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from punica_batch.workers.affinity import Cores, running_on
from punica_batch.workers.messages import Channel


class ChildProcess:
    """A Python module run as a child, with a channel to it and the last line of its stderr.

    A fresh interpreter and not a fork: torch's threads do not survive one, and a child may need its own environment.
    ``cores``: those that it runs on (empty: this process's).
    """

    def __init__(self, module: str, env: Mapping[str, str] | None = None, cores: Cores = frozenset()) -> None:
        self.channel, child_fd = Channel.pair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        try:
            with running_on(cores):
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(child_fd)],
                    pass_fds=(child_fd,),
                    env={**os.environ, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                )
        finally:
            os.close(child_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> bool:
        """False when the child is gone; its end of stream tells the rest."""
        try:
            self.channel.send(message)
        except OSError:
            return False
        return True

    def receive_all(self) -> tuple[list[Any], bool]:
        """(messages that are here, whether the child is still there)"""
        messages: list[Any] = []
        try:
            while self.channel.has_message():
                messages.append(self.channel.receive())
        except (EOFError, OSError):
            return messages, False
        return messages, True

    def cause_of_death(self) -> str:
        """One line: the signal or exit status, and the last line that the child wrote to stderr."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its channel and did not exit"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last}" if last else how

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the child: it exits by itself when its channel closes; what does not is killed."""
        self.channel.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stderr.close()

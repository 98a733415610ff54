"""Named points at which a test can kill the process, to prove that what is on disk survives it.

``crashpoint(name)`` does nothing unless ``PUNICA_BATCH_CRASH_AT`` is ``name:count``; then the count-th call with that
name sends SIGKILL to the process. One stands before and after each step that the commit protocol relies on.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "PUNICA_BATCH_CRASH_AT"

CRASHPOINTS = (
    "plan.write.before",
    "plan.write.after",
    "adapters.write.before",
    "adapters.write.after",
    "journal.write.before",
    "journal.write.middle",
    "journal.write.after",
    "journal.fsync.before",
    "journal.fsync.after",
    "journal.discard.before",
    "journal.discard.after",
    "part.write.before",
    "part.write.middle",
    "part.fsync.before",
    "part.fsync.after",
    "part.rename.before",
    "part.rename.after",
    "part.fsync_folder.after",
    "commit.write.before",
    "commit.write.middle",
    "commit.write.after",
    "commit.fsync.after",
    "assemble.write.before",
    "assemble.write.middle",
    "assemble.rename.before",
    "assemble.rename.after",
    "assemble.delete.before",
    "assemble.delete.after",
    "overwrite.switch.before",
    "overwrite.remove.before",
    "overwrite.remove.after",
    "overwrite.move.before",
    "overwrite.move.after",
    "overwrite.switch.after",
    "success.write.before",
    "success.write.after",
)

_calls: Counter[str] = Counter()


def crashpoint(name: str) -> None:
    """Kill this process if the environment asks for it here."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    assert name in CRASHPOINTS, name
    _calls[name] += 1
    if wanted == f"{name}:{_calls[name]}":
        os.kill(os.getpid(), signal.SIGKILL)

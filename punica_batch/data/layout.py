"""Where everything of one output is.

x.parquet                the output, whole at the end       x/part-00000.parquet …  x/_SUCCESS
x.parquet.punica/        its state folder                   x/_punica/
    lock                 flock; never renamed or deleted
    plan.json            what binds the job; immutable
    adapters             digests of the adapters used
    commits              one checksummed line a part (remote: commits/00000.json …)
    journal/  staging/   finished rows; what is being written (remote: in --work-dir)
    parts/               of a single-file output, until it is assembled
    shard-I-of-N/        commits, journal and staging of one machine's slice
    retry/               journal of a retry
    next/                a whole new generation of the above, while --overwrite runs
    _SUCCESS             of a single-file output
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from punica_batch.config import JobConfig
from punica_batch.data.paths import JSONL_SUFFIXES, PARQUET_SUFFIXES, is_local, open_store, output_path, shown_url
from punica_batch.data.store import LocalStore, RemoteStore, Store
from punica_batch.errors import UsageError


@dataclass(frozen=True)
class Layout:
    """Names in ``store`` of one generation. ``target`` None: a folder of parts. ``local``: journal and staging."""

    store: Store
    shown: str
    target: str | None
    state: str
    parts: str
    local: Path
    jsonl: bool
    shard: str = ""

    @classmethod
    def of(cls, config: JobConfig) -> Layout:
        """The layout of ``config``'s output. Raises ``UsageError``."""
        return cls.of_output(output_path(config), config)

    @classmethod
    def of_output(cls, output: str, config: JobConfig) -> Layout:
        filesystem, path = open_store(output, config.storage_options)
        if is_local(filesystem) and not path.strip("/"):
            raise UsageError(f"the output {path} is the whole file system: name a file or a folder")
        jsonl = path.endswith(JSONL_SUFFIXES)
        single = not output.endswith("/") and path.endswith(PARQUET_SUFFIXES + JSONL_SUFFIXES)
        folder, _, name = path.rstrip("/").rpartition("/")
        root = folder if single else path.rstrip("/")
        state = f"{name}.punica" if single else "_punica"
        store: Store
        if is_local(filesystem):
            if single and os.path.isdir(path):
                raise UsageError(f"the output {path} is a folder: write {path}/ to make a dataset of it")
            store = LocalStore(Path(root))
            local = Path(root) / state
        elif config.work_dir is None:
            raise UsageError(f"the output {shown_url(output)} is remote: name a local folder with --work-dir")
        else:
            store = RemoteStore(filesystem, root)
            identity = hashlib.sha256(store.shown(name if single else "").encode()).hexdigest()[:16]
            local = Path(config.work_dir).expanduser().absolute() / f"punica-{identity}"
        return cls(
            store=store,
            shown=store.shown(name) if single else store.shown("").rstrip("/") + "/",
            target=name if single else None,
            state=state,
            parts=f"{state}/parts/" if single else "",
            local=local,
            jsonl=jsonl and single,
        )

    def next_generation(self) -> Layout:
        state = f"{self.state}/next"
        return replace(self, state=state, parts=f"{state}/parts/", local=self.local / "next")

    def for_shard(self, index: int, count: int) -> Layout:
        """The slice ``index`` (from 0) of ``count``; of one, the whole."""
        return self if count == 1 else replace(self, shard=f"shard-{index + 1}-of-{count}/")

    @property
    def suffix(self) -> str:
        return ".jsonl" if self.jsonl else ".parquet"

    @property
    def success(self) -> str:
        """Where ``_SUCCESS`` belongs, whatever the generation."""
        return "_SUCCESS" if self.target is None else f"{self.state.removesuffix('/next')}/_SUCCESS"

    def in_state(self, name: str) -> str:
        return f"{self.state}/{name}"

    def in_shard(self, name: str) -> str:
        return f"{self.state}/{self.shard}{name}"

    @property
    def journal(self) -> Path:
        return self.local / self.shard / "journal"

    @property
    def staging(self) -> Path:
        return self.local / self.shard / "staging"

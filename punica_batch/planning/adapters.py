"""``adapters ls`` and ``adapters check``: what each adapter is, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from punica_batch.adapters.check import check_adapter
from punica_batch.adapters.digest import DigestCache
from punica_batch.adapters.peft import AdapterFiles, bind_adapter, inspect_adapter
from punica_batch.adapters.registry import Registry
from punica_batch.adapters.weights import adapter_digest, load_adapter
from punica_batch.config import JobConfig
from punica_batch.errors import AdapterError, RowError
from punica_batch.types import AdapterSpec

THREADS = 8  # small files, of a remote store for the worst; contents are read whole, so not too many at a time

Modules = Mapping[str, tuple[int, int]]  # name → (out, in), as ``ModelConfig.lora_modules``


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """One adapter. ``targets``: the kinds of its adapted modules (``q_proj`` …); ``nbytes``: of its weights file;
    ``sha256``: its digest, None when it cannot be read. ``problem``: why its rows would fail."""

    name: str
    path: str
    ranks: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    nbytes: int = 0
    base_model: str | None = None
    sha256: str | None = None
    warnings: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether the registry has no adapter of this name."""
        return (self.problem or "").startswith("unknown_adapter: ")


def describe_adapters(
    registry: Registry, names: Iterable[str], config: JobConfig, modules: Modules | None, *, contents: bool
) -> list[AdapterDetails]:
    """Looks at each of ``names``, in their order: config, header, digest, and with ``modules`` the fit into a model.

    ``contents`` reads every number, too (NaN, Inf), if there are ``modules``. Raises ``StoreAway`` when a store does
    not answer: that is no adapter's fault.
    """
    cache = DigestCache()

    def describe(name: str) -> AdapterDetails:
        try:
            return _describe(registry.get(name), config, modules, cache, contents=contents)
        except RowError as error:
            return AdapterDetails(name, "", problem=str(error))

    with cache, ThreadPoolExecutor(THREADS, thread_name_prefix="adapters") as threads:
        return list(threads.map(describe, names))


def rank_problem(name: str, rank: int, config: JobConfig) -> str | None:
    """Why ``--max-lora-rank`` refuses an adapter, if it does."""
    if config.max_lora_rank is None or rank <= config.max_lora_rank:
        return None
    return f"adapter {name!r}: its rank is {rank}, above --max-lora-rank {config.max_lora_rank}"


def _describe(
    spec: AdapterSpec, config: JobConfig, modules: Modules | None, cache: DigestCache, *, contents: bool
) -> AdapterDetails:
    try:
        files = inspect_adapter(spec, config.storage_options)
    except AdapterError as error:
        return AdapterDetails(spec.name, spec.path, problem=str(error))
    warnings: tuple[str, ...] = ()
    problem = rank_problem(spec.name, files.max_rank, config)
    digest = None
    try:
        if modules is not None:
            report = check_adapter(spec, modules, config.model, config.storage_options)
            warnings, problem = report.warnings, report.error or problem
        if contents and modules is not None and problem is None:
            digest = load_adapter(files, bind_adapter(files, modules), cache).sha256
        else:
            digest = adapter_digest(files, cache)
    except AdapterError as error:
        problem = str(error)
    return AdapterDetails(
        name=spec.name,
        path=files.folder.shown(),
        ranks=_ranks(files),
        targets=_targets(files),
        nbytes=files.nbytes,
        base_model=files.base_model_name,
        sha256=digest,
        warnings=warnings,
        problem=problem,
    )


def _ranks(files: AdapterFiles) -> tuple[int, ...]:
    """The distinct ranks of the file's A tensors: [rank, in]."""
    found = {info.shape[0] for name, info in files.header.items() if ".lora_A" in name or ".lora_embedding_A" in name}
    return tuple(sorted(found))


def _targets(files: AdapterFiles) -> tuple[str, ...]:
    adapted = (name.partition(".lora_")[0] for name in files.header if ".lora_" in name)
    return tuple(sorted({name.rpartition(".")[2] for name in adapted}))

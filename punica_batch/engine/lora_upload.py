"""Adapters onto a device at the rate of reading and digesting them: their files' bytes go over as they are.

A thread reads a file into pinned memory, one copy takes it to the device, one kernel launch brings it into the packed
layout there, and the thread digests the same bytes unless it knows their digest. Little of it is Python, as the
engine's own thread needs the interpreter every few milliseconds: what can be known of an adapter from its config and
header is worked out once for all that share them, and a file is read and digested in one piece each, as every call
that lets go of the interpreter has to get it back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
from punica_batch_kernels.packing import reference
from punica_batch_kernels.packing.types import Move, Work, build_work
from punica_batch_kernels.sgmv.slot_table import GroupLayout, RowTemplate, SlotTables
from punica_batch_kernels.sgmv.types import SlotWeights
from torch import Tensor

from punica_batch.adapters.digest import DigestCache
from punica_batch.adapters.peft import (
    AdapterFiles,
    LoraModule,
    bind_adapter,
    files_changed,
    inspect_adapter,
)
from punica_batch.adapters.raw import RawAdapter, header_sha256
from punica_batch.adapters.store import FileStamp
from punica_batch.adapters.weights import check_finite
from punica_batch.engine.lora_arena import Arena
from punica_batch.engine.lora_layout import LM_HEAD, AdapterLayout, EmbeddingLayout, adapter_layout
from punica_batch.engine.lora_pack import check_rank, overflows, pack_files
from punica_batch.engine.pinned import PinnedBuffer
from punica_batch.engine.settings import EngineSettings
from punica_batch.errors import AdapterError
from punica_batch.models.llama import LlamaModel
from punica_batch.models.lora import ModelLora

_MAX_PLANS = 256
# One copies while another repacks; the link is one.
_UPLOADERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAdapter:
    """An adapter in the arena. ``rows``: what the slot tables say of it; ``embedding`` and ``lm_head`` as in
    ``PackedAdapter``. Other groups have no views: the kernels find everything in the tables."""

    sha256: str
    arena: Arena
    start: int
    nbytes: int
    bytes_copied: int
    on_gpu: bool
    rows: Tensor
    embedding: tuple[Tensor, Tensor] | None
    lm_head: SlotWeights | None

    def install(self, model_lora: ModelLora, slot: int, tables: SlotTables | None) -> None:
        """Puts it into a slot for the steps that are enqueued from now on."""
        assert tables is not None
        tables.install(slot, self.rows)
        model_lora.embeddings[slot] = self.embedding
        model_lora.lm_head.slots[slot] = self.lm_head

    def uninstall(self, model_lora: ModelLora, slot: int, tables: SlotTables | None) -> None:
        """Takes its views out. Its rows in the tables stay until the next adapter's: no step names an empty slot."""
        model_lora.embeddings[slot] = None
        model_lora.lm_head.slots[slot] = None

    def release(self, *, was_installed: bool) -> None:
        """Gives its bytes back, if it ``was_installed`` once the steps enqueued so far are over."""
        after = None
        if was_installed and self.on_gpu:
            after = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            after.record()
        self.arena.free(self.start, self.nbytes, after)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All that adapters of one config and header share."""

    files: AdapterFiles  # of the first of them
    bound: dict[str, LoraModule]
    layout: AdapterLayout
    template: RowTemplate
    work: tuple[Work, ...]


class Uploader:
    """Copies one file at a time on a stream of its own, by way of ``staging_bytes`` of the device, or more where a file
    needs them. For use by one thread at a time."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self._device = device
        self._raw = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._flag_host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self._flag_seen = self._flag_host.numpy()
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def upload(self, raw: Tensor, packed: Tensor, moves: tuple[Move, ...], work: tuple[Work, ...]) -> bool:
        """Brings pinned bytes into ``packed``; this thread alone waits. False: some value there is NaN or Inf."""
        if self._device.type != "cuda":
            self._flag.zero_()
            reference.repack(packed, raw, moves, self._flag)
            return not bool(self._flag)
        from punica_batch_kernels.packing.triton_backend import repack

        with torch.cuda.stream(self._stream):
            if self._raw.numel() < raw.numel():
                self._raw = torch.empty(raw.numel(), dtype=torch.uint8, device=self._device)
            self._raw[: raw.numel()].copy_(raw, non_blocking=True)
            repack(packed, self._raw, work, self._flag)
            self._flag_host.copy_(self._flag, non_blocking=True)
            self._done.record()
            self._done.synchronize()
            is_finite = not self._flag_seen[0]
            if not is_finite:
                self._flag.zero_()
        return is_finite

    def copy(self, source: Tensor, target: Tensor) -> None:
        """From host memory of any kind."""
        if self._device.type != "cuda":
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source)
            self._stream.synchronize()


class DeviceLoader:
    """What ``LoraStore`` runs on ``num_threads`` threads; ``arena`` hands out bytes of ``memory``. ``digests``: those
    that are known, and are made known; None: every file is digested at every load.

    Raises ``NoRoom`` where adapters have to go first, else as ``LoraStore``'s ``load``.
    """

    def __init__(
        self,
        settings: EngineSettings,
        model: LlamaModel,
        tables: SlotTables,
        memory: Tensor,
        num_threads: int,
        *,
        staging_bytes: int = 0,
        digests: DigestCache | None = None,
    ) -> None:
        self.arena = Arena(memory.nbytes)
        self._settings = settings
        self._model = model
        self._tables = tables
        self._memory = memory
        self._digests = digests
        self._shapes = model.config.lora_modules()
        self._plans: OrderedDict[tuple[str, str, int], Plan] = OrderedDict()
        self._lock, self._growing = threading.Lock(), threading.Lock()
        self._buffers: SimpleQueue[PinnedBuffer] = SimpleQueue()
        self._uploaders: SimpleQueue[Uploader] = SimpleQueue()
        for _ in range(num_threads):
            self._buffers.put(PinnedBuffer(memory.device))
        for _ in range(_UPLOADERS):
            self._uploaders.put(Uploader(memory.device, staging_bytes))

    def __call__(self, lora_id: str) -> DeviceAdapter:
        raw = RawAdapter.open(self._settings.adapters[lora_id], self._settings.storage_options)
        buffer = self._buffers.get()
        try:
            if raw.nbytes > buffer.nbytes:  # seen before memory is spent on it
                with self._growing:  # threads that begin at once make one plan
                    plan = self._likely_plan(raw) or self._inspect(raw)
                if plan.layout.moves is None:
                    return self._load_by_host(self._inspect(raw))
                buffer.reserve(raw.nbytes)
            memory = buffer.memory(raw.nbytes)
            after = raw.read(memory)
            plan = self._plan(raw, memory)
            if plan.layout.moves is None:
                return self._load_by_host(self._inspect(raw))
            return self._load(raw, plan, buffer, after)
        finally:
            self._buffers.put(buffer)

    def _load(self, raw: RawAdapter, plan: Plan, buffer: PinnedBuffer, after: FileStamp) -> DeviceAdapter:
        """From the bytes in ``buffer``, ``after`` whose reading the file had that stamp."""
        moves, header_bytes = plan.layout.moves, plan.files.header_bytes
        assert moves is not None

        def fill(packed: Tensor) -> str:
            memory, data = buffer.memory(raw.nbytes), buffer.tensor(header_bytes, raw.nbytes)
            uploader = self._uploaders.get()
            try:
                is_finite = uploader.upload(data, packed, moves, plan.work)
            finally:
                self._uploaders.put(uploader)
            if not is_finite:
                check_finite(plan.files, plan.bound, np.asarray(memory)[header_bytes:], raw.spec)
                raise overflows(raw.spec.name, self._model.dtype)
            return raw.sha256(memory, after, self._digests)

        return self._place(raw.spec.name, plan, fill, raw.nbytes - header_bytes)

    def _load_by_host(self, plan: Plan) -> DeviceAdapter:
        """Packed in host memory first, where the layout says so."""
        packed = pack_files(plan.files, plan.bound, self._model, self._digests)

        def fill(target: Tensor) -> str:
            uploader = self._uploaders.get()
            try:
                uploader.copy(packed.buffer[: target.numel()], target)
            finally:
                self._uploaders.put(uploader)
            return packed.sha256

        return self._place(plan.files.spec.name, plan, fill, packed.nbytes)

    def _place(self, name: str, plan: Plan, fill: Callable[[Tensor], str], copied: int) -> DeviceAdapter:
        """``fill`` writes the adapter's packed elements and answers its digest."""
        item = self._memory.itemsize
        nbytes = plan.layout.size * item
        if nbytes > self.arena.size:
            raise AdapterError(
                f"adapter {name!r}: its weights take {nbytes:,} bytes, and this engine keeps {self.arena.size:,} for "
                "adapters: raise max_loras"
            )
        start = self.arena.allocate(nbytes, name)
        try:
            packed = self._memory[start // item : start // item + plan.layout.size]
            sha256 = fill(packed)
            rows = plan.template.at(packed.data_ptr(), pinned=packed.is_cuda)
        except BaseException:
            self.arena.free(start, nbytes)
            raise
        views = _embedding(packed, plan.layout.embedding), self._lm_head(packed, plan.layout.groups[-1])
        return DeviceAdapter(sha256, self.arena, start, nbytes, copied, packed.is_cuda, rows, *views)

    def _lm_head(self, packed: Tensor, place: GroupLayout | None) -> SlotWeights | None:
        if place is None:
            return None
        vocab, hidden = self._shapes[LM_HEAD]
        (b,), (rank,) = place.b, place.ranks
        assert b is not None
        return SlotWeights(_view(packed, place.a, rank, hidden), (_view(packed, b, rank, vocab).t(),), place.ranks)

    def _plan(self, raw: RawAdapter, memory: memoryview) -> Plan:
        """The one made for an earlier adapter of this config and header, else a new one."""
        key = raw.config_sha256, header_sha256(memory), raw.nbytes
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
        plan = self._inspect(raw)
        if plan.files.header_sha256 != key[1]:
            raise files_changed(raw.spec)
        return plan

    def _likely_plan(self, raw: RawAdapter) -> Plan | None:
        """One for the same config and size. Only a likely one: the header is not known yet."""
        with self._lock:
            keys = [key for key in self._plans if key[0] == raw.config_sha256 and key[2] == raw.nbytes]
            return self._plans[keys[0]] if keys else None

    def _inspect(self, raw: RawAdapter) -> Plan:
        """Checks config and header of this very adapter. The one place that decides which way its weights take: see
        ``AdapterLayout.moves``. Raises ``AdapterError``."""
        files = inspect_adapter(raw.spec, self._settings.storage_options)
        if files.config_sha256 != raw.config_sha256 or files.weights_stamp != raw.stamp:
            raise files_changed(raw.spec)
        check_rank(files, self._settings.max_lora_rank)
        bound = bind_adapter(files, self._shapes)
        layout = adapter_layout(files, bound, self._model.config.num_hidden_layers)
        work = build_work(layout.moves or (), self._memory.device) if self._memory.is_cuda else ()
        plan = Plan(files, bound, layout, self._tables.template(layout.groups), work)
        with self._lock:
            self._plans[files.config_sha256, files.header_sha256, files.nbytes] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plan


def _embedding(packed: Tensor, place: EmbeddingLayout | None) -> tuple[Tensor, Tensor] | None:
    if place is None:
        return None
    a, b = _view(packed, place.a, place.rank, place.vocab), _view(packed, place.b, place.rank, place.hidden)
    return a, b.t()


def _view(packed: Tensor, start: int, rows: int, columns: int) -> Tensor:
    return packed[start : start + rows * columns].view(rows, columns)

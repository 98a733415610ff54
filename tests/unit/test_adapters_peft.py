"""Adapter folders: PEFT's own files give PEFT's own weight deltas; all else is refused, never half applied."""

from __future__ import annotations

import hashlib
import json
import os
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from adapter_files import (
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    MODULES,
    VOCAB,
    lora_config,
    lora_tensors,
    raw_file,
    safetensors_bytes,
    write_adapter,
)  # fmt: skip
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punica_batch.adapters import store
from punica_batch.adapters.digest import DigestCache
from punica_batch.adapters.header import parse_header
from punica_batch.adapters.peft import AdapterFiles, bind_adapter, inspect_adapter
from punica_batch.adapters.weights import LoadedAdapter, adapter_digest, check_base_layers, load_adapter
from punica_batch.errors import AdapterError, StoreAway
from punica_batch.types import AdapterSpec

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def inspect(path: Path | str) -> AdapterFiles:
    return inspect_adapter(AdapterSpec("night", str(path)), {})


def load(path: Path | str) -> LoadedAdapter:
    files = inspect(path)
    return load_adapter(files, bind_adapter(files, MODULES))


def peft_model(dtype: str, tie: bool, **fields: Any) -> Any:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tie,
        )
    ).to(getattr(torch, dtype))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(llama, peft.LoraConfig(**fields), autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # PEFT begins with B = 0: an adapter without effect
            torch.nn.init.normal_(parameter, std=0.3)
    return model


CASES = [
    {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    {"r": 1, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": True, "task_type": "CAUSAL_LM"},
    {"r": 4, "target_modules": r".*mlp\..*_proj", "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"up_proj": 5}},
    {"r": 2, "target_modules": ["embed_tokens", "lm_head", "o_proj"], "use_rslora": True},
    {"r": 2, "target_modules": ["k_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fields", CASES, ids=["list", "all-linear", "regex", "embeddings", "one-layer"])
def test_deltas_are_pefts(tmp_path: Path, fields: dict[str, Any], dtype: str, tie: bool) -> None:
    model = peft_model(dtype, tie, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    base = model.base_model.model
    layers = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    assert loaded.modules.keys() == layers.keys()
    for name, layer in layers.items():
        found = loaded.modules[name]
        assert found.a.dtype == found.b.dtype == (np.float16 if dtype == "float16" else np.float32)
        delta = found.scale * (found.b.astype(np.float64) @ found.a.astype(np.float64))
        expected = layer.double().get_delta_weight("default").detach().numpy()
        expected = expected if name != "model.embed_tokens" else expected.T  # PEFT: the shape of Embedding.weight
        np.testing.assert_allclose(delta, expected, rtol=1e-12, atol=1e-12)
        assert np.abs(delta).max() > 0.01
    embeddings = {n for n in layers if n in ("lm_head", "model.embed_tokens")}
    assert loaded.base_layers.keys() == embeddings
    weights = {n: base.get_submodule(n).get_base_layer().weight.detach().float().numpy() for n in embeddings}
    check_base_layers(loaded, weights.__getitem__)
    for name in embeddings:
        with pytest.raises(AdapterError, match="differs from the base"):
            check_base_layers(loaded, {**weights, name: weights[name] * 1.5}.__getitem__, rtol=2**-8)


def test_inspection_reports_rank_size_and_base(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", r=5, base_model_name_or_path="org/model")
    files = inspect(folder)
    assert (files.max_rank, files.base_model_name) == (5, "org/model")
    assert files.nbytes == (folder / "adapter_model.safetensors").stat().st_size
    assert files.header[KEY].shape == (5, HIDDEN)


def test_peft_names_with_the_adapters_name_are_taken(tmp_path: Path) -> None:
    plain = lora_tensors()
    write_adapter(tmp_path / "a", plain)
    write_adapter(tmp_path / "b", {name.replace(".weight", ".default.weight"): t for name, t in plain.items()})
    one, two = load(tmp_path / "a"), load(tmp_path / "b")
    for name, tensors in one.modules.items():
        np.testing.assert_array_equal(tensors.a, plain[f"base_model.model.{name}.lora_A.weight"])
        np.testing.assert_array_equal(tensors.a, two.modules[name].a)
        np.testing.assert_array_equal(tensors.b, two.modules[name].b)


def changed(**tensors: np.ndarray | None) -> dict[str, np.ndarray]:
    merged: dict[str, Any] = {**lora_tensors(), **tensors}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


F32 = np.float32
LAYER0 = "base_model.model.model.layers.0.self_attn"
BAD_TENSORS: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "missing A": ({KEY: None}, r"q_proj\.lora_A\.weight' is missing"),
    "missing B": ({f"{LAYER0}.q_proj.lora_B.weight": None}, r"q_proj\.lora_B\.weight' is missing"),
    "wrong rank": ({KEY: np.ones((3, HIDDEN), F32)}, "has shape"),
    "wrong width": ({KEY: np.ones((2, HIDDEN + 1), F32)}, "has shape"),
    "transposed": ({KEY: np.ones((HIDDEN, 2), F32)}, "has shape"),
    "one dimension": ({KEY: np.ones(2 * HIDDEN, F32)}, "has shape"),
    "not targeted": ({f"{LAYER0}.v_proj.lora_A.weight": np.ones((2, HIDDEN), F32)}, "does not target"),
    "no such layer": (
        {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": np.ones((2, HIDDEN), F32)}, "finds no place"
    ),
    "no prefix": ({KEY.removeprefix("base_model.model."): np.ones((2, HIDDEN), F32)}, "finds no place"),
    "dora": ({f"{LAYER0}.q_proj.lora_magnitude_vector": np.ones(HIDDEN, F32)}, "finds no place"),
    "bias": ({f"{LAYER0}.q_proj.lora_B.bias": np.ones(HIDDEN, F32)}, "finds no place"),
    "whole layer": ({f"{LAYER0}.o_proj.weight": np.ones((HIDDEN, HIDDEN), F32)}, "finds no place"),
    "embedding's name": ({f"{LAYER0}.q_proj.lora_embedding_A": np.ones((2, HIDDEN), F32)}, "finds no place"),
    "twice": ({KEY.replace(".weight", ".default.weight"): np.ones((2, HIDDEN), F32)}, "same place"),
    "two copies of a base layer": (
        {
            "base_model.model.lm_head.weight": np.ones((VOCAB, HIDDEN), F32),
            "base_model.model.lm_head.base_layer.weight": np.ones((VOCAB, HIDDEN), F32),
        },
        "same place",
    ),
    "added tokens": ({"base_model.model.lm_head.weight": np.ones((VOCAB + 1, HIDDEN), F32)}, "added tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_an_error(tmp_path: Path, case: str) -> None:
    tensors, message = BAD_TENSORS[case]
    files = inspect(write_adapter(tmp_path / "a", changed(**tensors)))
    with pytest.raises(AdapterError, match=message) as caught:
        bind_adapter(files, MODULES)
    assert "adapter 'night'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_targets_that_match_nothing_are_an_error(tmp_path: Path) -> None:
    files = inspect(write_adapter(tmp_path / "a", target_modules=["c_attn"]))
    with pytest.raises(AdapterError, match="match no module"):
        bind_adapter(files, MODULES)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_errors(tmp_path: Path, value: float, dtype: type) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in lora_tensors().items()}
    tensors[KEY][1, 3] = value
    with pytest.raises(AdapterError, match="NaN or Inf") as caught:
        load(write_adapter(tmp_path / "a", tensors))
    assert KEY in str(caught.value)


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no safetensors"),
    "seven bytes": (b"1234567", "no safetensors"),
    "huge header": ((1 << 62).to_bytes(8, "little") + b"{}", "header of"),
    "header past the end": ((100).to_bytes(8, "little") + b"{}", "cut short"),
    "not JSON": (raw_file(b"{nonsense"), "valid JSON"),
    "nested": (raw_file(b"[" * 100_000), "valid JSON"),
    "list": (raw_file([]), "JSON object"),
    "twice": (raw_file(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":1}'), "twice"),
    "overlap": (raw_file({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "places tensor"),
    "gap": (raw_file({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "places tensor"),
    "short data": (raw_file({"a": entry(0, 8)}, bytes(4)), "cut short"),
    "long data": (raw_file({"a": entry(0, 8)}, bytes(12)), "damaged"),
    "wrong size": (raw_file({"a": entry(0, 8, [3])}, bytes(8)), "bytes"),
    "negative": (raw_file({"a": entry(0, 8, [-1, -2])}, bytes(8)), "not sizes"),
    "float shape": (raw_file({"a": entry(0, 8, [2.0])}, bytes(8)), "not sizes"),
    "bool shape": (raw_file({"a": entry(0, 4, [True])}, bytes(4)), "not sizes"),
    "overflow": (raw_file({"a": entry(0, 0, [2**63, 2**63, 0])}), "not sizes"),
    "int8": (raw_file({"a": entry(0, 8, [8], "I8")}, bytes(8)), "only F32, F16 and BF16"),
    "f64": (raw_file({"a": entry(0, 8, [1], "F64")}, bytes(8)), "only F32, F16 and BF16"),
    "no dtype": (raw_file({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "wrongly"),
    "three offsets": (raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(4)), "wrongly"),
    "a number": (raw_file({"a": 3}), "wrongly"),
    "many tensors": (raw_file({f"t{i}": entry(0, 0, [0]) for i in range(100_001)}), "100001 tensors"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_weights_file_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    with pytest.raises(AdapterError, match=message) as caught:
        inspect(write_adapter(tmp_path / "a", content))
    assert "adapter 'night'" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_that_claims_a_giant_header_costs_nothing(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", b"")
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(((16 << 20) + 1).to_bytes(8, "little"))
        file.truncate(64 << 20)  # sparse
    tracemalloc.start()
    with pytest.raises(AdapterError, match="header of"):
        inspect(folder)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


VALID = safetensors_bytes(lora_tensors())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=st.integers(0, len(VALID) - 1))
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, cut: int) -> None:
    with pytest.raises(AdapterError):
        inspect(write_adapter(tmp_path / "a", VALID[:cut]))


HEADER = VALID[8 : 8 + int.from_bytes(VALID[:8], "little")]


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, len(HEADER) - 1), byte=st.integers(0, 255))
def test_a_flipped_header_byte_is_refused_or_still_tiles_the_data(position: int, byte: int) -> None:
    """No other exception than ours escapes."""
    size = len(VALID) - 8 - len(HEADER)
    flipped = HEADER[:position] + bytes([byte]) + HEADER[position + 1 :]
    try:
        tensors = parse_header(flipped, size)
    except AdapterError:
        return
    ends = [info.end for info in tensors.values()]
    assert [info.begin for info in tensors.values()] == [0, *ends[:-1]]
    assert ends[-1] == size


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"LORA"', b"[" * 100_000])
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError, match=r"adapter_config\.json: not"):
        inspect(folder)


def test_pickles_are_refused_and_the_mending_command_mends(tmp_path: Path) -> None:
    import subprocess
    import sys

    import torch

    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    tensors = {name: torch.from_numpy(tensor) for name, tensor in lora_tensors().items()}
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle") as caught:
        inspect(folder)
    command = str(caught.value).partition("python -c ")[2].strip('"')
    subprocess.run([sys.executable, "-c", command], cwd=folder, check=True)
    np.testing.assert_array_equal(load(folder).modules["model.layers.0.self_attn.q_proj"].a, tensors[KEY].numpy())


def test_safetensors_wins_over_a_pickle_beside_it(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.bin").write_bytes(b"never opened")
    assert load(folder).modules


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_files_and_fifos_are_named(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(AdapterError, match=f"there is no {name}"):
        inspect(folder)
    os.mkfifo(folder / name)
    with pytest.raises(AdapterError, match="not a regular file"):
        inspect(folder)


@pytest.mark.parametrize("change", ["data", "header", "longer", "shorter", "config", "gone"])
def test_a_file_changed_after_inspection_is_an_error(tmp_path: Path, change: str) -> None:
    folder = write_adapter(tmp_path / "a")
    files = inspect(folder)
    bound = bind_adapter(files, MODULES)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if change == "data":  # same size, other time
        write_adapter(folder, lora_tensors(seed=1))
        os.utime(weights, ns=(1, 1))
    elif change == "header":  # even with size and time as they were
        stamp = weights.stat().st_mtime_ns
        with open(weights, "r+b") as file:
            file.write(VALID.replace(b"layers.0", b"layers.9"))
        os.utime(weights, ns=(stamp, stamp))
    elif change == "longer":
        weights.write_bytes(VALID + b"more")
    elif change == "shorter":
        weights.write_bytes(VALID[:-8])
    elif change == "config":
        config.write_text(json.dumps(lora_config(lora_alpha=5)))
    else:
        weights.unlink()
    with pytest.raises(AdapterError, match=r"have changed|no such file"):
        load_adapter(files, bound)


def test_any_fsspec_store_gives_the_same_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/store/a", recursive=True)
    try:
        local, remote = load(folder), load("memory://store/a")
        assert local.sha256 == remote.sha256 == adapter_digest(inspect("memory://store/a"))
        for name, tensors in local.modules.items():
            np.testing.assert_array_equal(tensors.a, remote.modules[name].a)
    finally:
        memory.rm("/store", recursive=True)


class Flaky:
    """Fails the first ``failures`` reads of every file, some of them in mid-file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int, error: Exception) -> None:
        self.left, self.error, self.pauses = failures, error, list[float]()
        real = store.connect

        def connect(url: str, options: Any) -> Any:
            fs, path = real(url, options)
            if self.left:
                self.left -= 1
                raise self.error
            return fs, path

        monkeypatch.setattr(store, "connect", connect)
        monkeypatch.setattr(time, "sleep", self.pauses.append)


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError(), OSError("slow down"), RuntimeError("x")])
def test_a_store_that_hiccups_is_asked_again(tmp_path: Path, monkeypatch: Any, error: Exception) -> None:
    folder = write_adapter(tmp_path / "a")
    flaky = Flaky(monkeypatch, 3, error)
    assert inspect(folder).max_rank == 2
    assert flaky.pauses == [0.5, 1.0, 2.0]


def test_a_store_that_is_away_is_not_the_adapters_fault(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_adapter(tmp_path / "a")
    Flaky(monkeypatch, 99, OSError("https://user:SECRET@host/?sig=SECRET"))
    with pytest.raises(StoreAway, match="does not answer") as caught:
        inspect(folder)
    assert "SECRET" not in str(caught.value)


def test_a_permission_is_the_adapters_fault(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_adapter(tmp_path / "a")
    flaky = Flaky(monkeypatch, 1, PermissionError(13, "Permission denied"))
    with pytest.raises(AdapterError, match="Permission denied"):
        inspect(folder)
    assert flaky.pauses == []


def test_a_read_that_breaks_in_mid_file_goes_on_from_there(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_adapter(tmp_path / "a")
    files = inspect(folder)
    monkeypatch.setattr(store, "CHUNK_BYTES", 100)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    real, reads = store.Folder._retry, [0]

    class Breaking:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def readinto(self, piece: memoryview) -> int:
            reads[0] += 1
            if reads[0] % 5 == 0:
                raise ConnectionResetError
            return int(self.file.readinto(piece))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    class Store:
        def __init__(self, fs: Any) -> None:
            self.fs = fs

        def open(self, *args: Any, **kwargs: Any) -> Any:
            return Breaking(self.fs.open(*args, **kwargs))

    def retry(self: Any, name: str, action: Any) -> Any:
        return real(self, name, lambda fs, path: action(Store(fs) if action.__name__ == "read" else fs, path))

    monkeypatch.setattr(store.Folder, "_retry", retry)
    content = bytearray(files.nbytes)
    seen = bytearray()
    count = files.folder.stream(
        "adapter_model.safetensors", files.nbytes, lambda at, n: memoryview(content)[at : at + n], seen.extend
    )
    assert count == files.nbytes
    assert content == seen == (folder / "adapter_model.safetensors").read_bytes()
    assert reads[0] > 10


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:SECRET@bucket/a", "s3://bucket/a"),
        ("https://host/a?sig=SECRET#x", "https://host/a"),
        ("/plain/p@th?x", "/plain/p@th?x"),
        ("/line\nbreak", "/line\\nbreak"),
    ],
)
def test_messages_show_no_credentials(url: str, shown: str) -> None:
    assert store.redact(url) == shown


def test_a_missing_driver_or_an_unknown_protocol_is_the_adapters_fault() -> None:
    with pytest.raises(AdapterError, match="no file store"):
        inspect("nosuch://bucket/a")


def test_odd_alignment_is_delivered_aligned(tmp_path: Path) -> None:
    """A float16 tensor of odd length before a float32 one leaves the latter between float32 addresses."""
    name = "model.layers.0.self_attn.q_proj"
    a, b = np.arange(5, dtype=np.float16).reshape(1, 5), np.arange(3, dtype=np.float32).reshape(3, 1)
    content = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    files = inspect(write_adapter(tmp_path / "a", content, r=1))
    tensors = load_adapter(files, bind_adapter(files, {name: (3, 5)})).modules[name]
    assert tensors.a.flags.aligned
    assert tensors.b.flags.aligned
    np.testing.assert_array_equal(tensors.a, a)
    np.testing.assert_array_equal(tensors.b, b)


def test_the_digest_covers_config_and_weights(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    first = load(folder).sha256
    config = hashlib.sha256((folder / "adapter_config.json").read_bytes()).digest()
    weights = blake3((folder / "adapter_model.safetensors").read_bytes()).digest()
    assert first == hashlib.sha256(config + weights).hexdigest() == adapter_digest(inspect(folder))
    write_adapter(folder, lora_alpha=5)
    second = load(folder).sha256
    write_adapter(folder, lora_tensors(seed=1), lora_alpha=5)
    assert len({first, second, load(folder).sha256}) == 3


def test_loading_fills_the_digest_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("punica_batch.adapters.digest._SETTLE_SECONDS", -1.0)
    folder = write_adapter(tmp_path / "a")
    files = inspect(folder)
    with DigestCache(tmp_path / "cache") as cache:
        loaded = load_adapter(files, bind_adapter(files, MODULES), cache)
    again = DigestCache(tmp_path / "cache")
    assert again.get(files.folder.identity("adapter_model.safetensors"), files.weights_stamp) is not None
    assert adapter_digest(files, again) == loaded.sha256

"""lora_id -> adapter: names only, never paths; TOML files checked key by key."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from adapter_files import write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punica_batch.adapters import store
from punica_batch.adapters.peft import inspect_adapter
from punica_batch.adapters.registry import Registry
from punica_batch.config import JobConfig
from punica_batch.errors import AdapterError, ConfigError, RowError
from punica_batch.types import AdapterSpec


def open_registry(adapters: Path | str | None = None, **fields: Any) -> Registry:
    return Registry.open(JobConfig(adapters=None if adapters is None else str(adapters), **fields))


def refused(registry: Registry, lora_id: Any) -> str:
    with pytest.raises(RowError) as caught:
        registry.get(lora_id)
    assert caught.value.code == "unknown_adapter"
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "registry"
    for name in ("spam", "tone ü"):
        write_adapter(root / name)
    (root / ".git").mkdir()
    (root / "README.md").write_text("not an adapter")
    write_adapter(tmp_path / "outside")
    return root


def test_a_folder_of_folders(folder: Path) -> None:
    registry = open_registry(folder)
    assert registry.names() == ["spam", "tone ü"]
    spec = registry.get("spam")
    assert spec == AdapterSpec("spam", str(folder / "spam"))
    assert inspect_adapter(spec, registry.storage_options).max_rank == 2


@pytest.mark.parametrize(
    "lora_id",
    [
        "", ".", "..", "../outside", "spam/../spam", "spam/", "/spam", "spam\0", "\0", ".git", "README.md", "SPAM",
        "spam/adapter_config.json", "..\\outside", "memory://x", "org/name", "x" * 5000, "\ud800", None, 3, "~",
        "spam\n", "line\nbreak",
    ],
)  # fmt: skip
def test_what_is_not_a_name_is_unknown(folder: Path, lora_id: Any) -> None:
    assert len(refused(open_registry(folder), lora_id)) < 250


def test_absolute_paths_are_unknown(folder: Path) -> None:
    refused(open_registry(folder), str(folder / "spam"))
    refused(open_registry(folder), str(folder.parent / "outside"))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(lora_id=st.one_of(st.text(), st.lists(st.sampled_from(["..", "spam", "/", "\0", ".", "outside"])).map("".join)))
def test_only_listed_names_ever_resolve(folder: Path, lora_id: str) -> None:
    registry = open_registry(folder)
    try:
        path = registry.get(lora_id).path
    except RowError:
        assert lora_id not in ("spam", "tone ü")
    else:
        assert path in (f"{folder}/spam", f"{folder}/tone ü")


def test_symlinks_out_of_the_registry_are_refused(folder: Path) -> None:
    (folder / "out").symlink_to(folder.parent / "outside")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to("loop")
    secret = folder.parent / "outside" / "adapter_config.json"
    (folder / "spam" / "adapter_config.json").unlink()
    (folder / "spam" / "adapter_config.json").symlink_to(secret)
    registry = open_registry(folder)
    assert "leaves the registry" in refused(registry, "out")
    assert "leaves the registry" in refused(registry, "spam")
    refused(registry, "dangling")
    refused(registry, "loop")
    assert registry.names() == ["spam", "tone ü"]  # files are looked at when the adapter is asked for


def test_a_symlink_that_stays_inside_is_an_alias(folder: Path) -> None:
    (folder / "alias").symlink_to("spam")
    registry = open_registry(folder)
    assert registry.names() == ["alias", "spam", "tone ü"]
    assert inspect_adapter(registry.get("alias"), {}).max_rank == 2


def test_a_registry_that_is_itself_a_symlink_is_fine(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert open_registry(folder.parent / "link").get("spam").path == str(folder.parent / "link" / "spam")


def test_opening_reads_no_adapter_and_lists_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(2000):
        (folder / f"a{i:05}").mkdir()
    calls: list[str] = []
    for method in ("entries", "stamp", "read", "exists"):
        real = getattr(store.Folder, method)
        monkeypatch.setattr(
            store.Folder, method, lambda self, *a, real=real, m=method: calls.append(m) or real(self, *a)
        )
    registry = open_registry(folder)
    assert calls == ["exists", "stamp"]
    for i in range(2000):
        assert registry.get(f"a{i:05}").name == f"a{i:05}"
    refused(registry, "none")
    assert len(registry.names()) == 2002
    assert calls == ["exists", "stamp", "entries"]


def test_a_wrong_registry_says_what_to_give(folder: Path) -> None:
    with pytest.raises(AdapterError, match="no such folder"):
        open_registry(folder / "none")
    with pytest.raises(AdapterError, match="is one adapter"):
        open_registry(folder / "spam")
    with pytest.raises(AdapterError, match="no such folder"):
        open_registry(folder / "README.md")


def test_without_adapters_nothing_is_known() -> None:
    registry = open_registry()
    assert registry.names() == []
    refused(registry, "spam")


def test_it_travels_to_another_process_and_shows_no_secret(folder: Path) -> None:
    registry = open_registry(folder, storage_options={"secret": "SECRET"})
    assert pickle.loads(pickle.dumps(registry)).get("spam") == registry.get("spam")
    assert "SECRET" not in repr(registry)


# --- TOML


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "adapters.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_toml_registry(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        [adapters.spam]
        path = "loras/spam"
        labels = ["spam", "ham"]
        prompt_template = "Text: {prompt}"
        system_prompt = ""
        label_template = " {label}"
        chat_template = "{{ messages }}"
        max_tokens = 4
        stop = ["\\n"]
        [adapters."org/tone v2.1 ü"]
        path = "/abs/tone"
        [adapters."../up"]
        path = "../up"
        [adapters.far]
        path = "s3://bucket/far"
        chat_template = "templates/far.jinja"
        """,
    )
    registry = open_registry(path)
    assert registry.names() == sorted(["spam", "org/tone v2.1 ü", "../up", "far"])
    assert registry.get("spam") == AdapterSpec(
        name="spam",
        path=str(tmp_path / "loras/spam"),
        labels=("spam", "ham"),
        prompt_template="Text: {prompt}",
        system_prompt="",
        label_template=" {label}",
        chat_template="{{ messages }}",
        max_tokens=4,
        stop=("\n",),
    )
    assert registry.get("org/tone v2.1 ü").path == "/abs/tone"
    assert registry.get("../up").path == str(tmp_path.parent / "up")
    assert registry.get("far").path == "s3://bucket/far"
    assert registry.get("far").chat_template == str(tmp_path / "templates/far.jinja")
    refused(registry, "loras/spam")
    refused(registry, "../other")


def test_relative_paths_do_not_depend_on_the_current_folder(tmp_path: Path, monkeypatch: Any) -> None:
    toml(tmp_path, '[adapters.a]\npath = "a"')
    monkeypatch.chdir(tmp_path)
    registry = open_registry("adapters.toml")
    monkeypatch.chdir("/")
    assert registry.get("a").path == str(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapter = 1", "unknown key 'adapter'; the nearest valid one is 'adapters'"),
        ("[adapters.a]\npath = 'x'\nmax_token = 3", "adapters.'a': unknown key 'max_token'.*nearest.*'max_tokens'"),
        ("[adapters.a]\npath = 'x'\nzzz = 3", "unknown key 'zzz'; the nearest valid one is '"),
        ("[adapters.a]\nlabels = ['x']", "adapters.'a' has no path"),
        ("[adapters.a]\npath = 3", "path must be a path"),
        ("[adapters.a]\npath = ''", "path must be a path"),
        ("[adapters.a]\npath = 'x'\nmax_tokens = 0", "max_tokens must be a whole number"),
        ("[adapters.a]\npath = 'x'\nmax_tokens = true", "max_tokens must be a whole number"),
        ("[adapters.a]\npath = 'x'\nmax_tokens = '3'", "max_tokens must be a whole number"),
        ("[adapters.a]\npath = 'x'\nlabels = []", "labels must be a list"),
        ("[adapters.a]\npath = 'x'\nlabels = ['a', 'a']", "labels must be a list of different"),
        ("[adapters.a]\npath = 'x'\nlabels = 'a,b'", "labels must be a list"),
        ("[adapters.a]\npath = 'x'\nstop = ['']", "stop must be a list"),
        ("[adapters.a]\npath = 'x'\nprompt_template = 3", "prompt_template must be a text"),
        ("adapters = 3", "must be tables"),
        ("[adapters]\na = 'path'", "must be a table"),
        ('[adapters.""]\npath = "x"', "must not be empty"),
        ("[adapters.a]\npath = ", "not valid TOML"),
        ("[adapters.a]\npath = 'x'\n[adapters.a]\npath = 'y'", "not valid TOML"),
    ],
)
def test_a_wrong_toml_registry_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_registry(toml(tmp_path, text))
    assert "adapters.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_toml_file_that_is_not_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "adapters.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        open_registry(tmp_path / "adapters.toml")
    with pytest.raises(AdapterError, match="no such registry file"):
        open_registry(tmp_path / "none.toml")


# --- lora_modules and remote stores


def test_lora_modules_add_to_and_replace_in_the_registry(tmp_path: Path, folder: Path) -> None:
    registry = open_registry(folder, lora_modules={"extra": "/x/extra", "spam": "/x/spam"})
    assert registry.names() == ["extra", "spam", "tone ü"]
    assert registry.get("extra") == AdapterSpec("extra", "/x/extra")
    assert registry.get("spam").path == "/x/spam"
    path = toml(tmp_path, "[adapters.a]\npath = 'x'\nmax_tokens = 3")
    assert open_registry(path, lora_modules={"a": "/new"}).get("a") == AdapterSpec("a", "/new", max_tokens=3)
    assert open_registry(lora_modules={"a": "/new"}).names() == ["a"]


@pytest.fixture
def memory(folder: Path) -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.put(str(folder / "spam"), "/store/spam", recursive=True)
    yield fs
    fs.rm("/store", recursive=True)


def test_a_remote_folder(memory: Any) -> None:
    registry = open_registry("memory://store")
    assert registry.names() == ["spam"]
    assert registry.get("spam").path == "memory://store/spam"
    assert inspect_adapter(registry.get("spam"), {}).max_rank == 2
    for lora_id in ("..", "../store/spam", "spam/..", "/store/spam"):
        refused(registry, lora_id)
    with pytest.raises(AdapterError, match="no such folder"):
        open_registry("memory://elsewhere")


def test_a_remote_toml_file(memory: Any) -> None:
    memory.pipe("/store/adapters.toml", b"[adapters.s]\npath = 'spam'")
    registry = open_registry("memory://store/adapters.toml")
    assert registry.get("s").path == "memory://store/spam"
    assert inspect_adapter(registry.get("s"), {}).max_rank == 2


def test_a_folder_url_is_local(folder: Path) -> None:
    registry = open_registry(f"file://{folder}")
    (folder / "out").symlink_to(folder.parent / "outside")
    assert inspect_adapter(registry.get("spam"), {}).max_rank == 2
    assert "leaves" in refused(registry, "out")
    assert os.path.isdir(folder / "out")

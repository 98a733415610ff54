"""The job files in ``jobs/`` say what a job can understand, and name what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from punica_batch.config_sources import load_config
from punica_batch.text.chat import ChatTemplate

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.toml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job_file_is_understood_from_any_folder(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config([], {}, config=str(path), environ={})
    assert config.model == str(ROOT / "sample_data" / "model")
    assert config.adapters == str(ROOT / "sample_data" / "adapters.toml")
    assert all(Path(source).parent in (ROOT / "sample_data", ROOT / "jobs") for source in config.inputs)
    assert config.output is not None
    assert config.output.startswith(str(ROOT / "out"))


def test_outputs_are_three_different_kinds() -> None:
    outputs = [load_config([], {}, config=str(path), environ={}).output or "" for path in JOBS]
    assert len(outputs) == 3
    assert {Path(output).suffix for output in outputs if not output.endswith("/")} == {".parquet", ".jsonl"}
    assert sum(output.endswith("/") for output in outputs) == 1


def test_chat_job_renders_as_the_sample_adapters_were_trained() -> None:
    template = ChatTemplate((ROOT / "jobs" / "chat.jinja").read_text(), {})
    lines = (ROOT / "jobs" / "chat.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["body"] for line in lines]
    assert len({body["model"] for body in bodies}) == 8
    for body in bodies:
        (message,) = body["messages"]
        assert template.render(body["messages"]) == f"### Message\n{message['content']}\n### Answer\n"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_trial_that_a_comment_proposes_does_not_stand_in_the_whole_jobs_way(path: Path) -> None:
    """``--limit`` binds an output: of the job's own, the whole job would be refused."""
    proposed = re.findall(r"`([^`]*--limit[^`]*)`", path.read_text())
    assert all(" -o " in options for options in proposed)
    assert (path.stem == "label") == bool(proposed)

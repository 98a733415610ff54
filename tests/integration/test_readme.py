"""What the README shows is what the program prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    demo = re.search(r"^\t\$\(BIN\)/punica-batch (run sample_data.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert demo
    command = [
        sys.executable,
        "-m",
        "punica_batch",
        *demo[1].split(),
        "--device",
        "cpu",
        "-o",
        str(tmp_path / "x.parquet"),
    ]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    excerpt = re.search(r"```\n(adapter .*?)```", (ROOT / "README.md").read_text(), re.S)
    assert excerpt
    shown = [line for line in excerpt[1].splitlines() if line != "…" and not line.startswith(("output", "time"))]
    assert len(shown) > 8
    assert printed[: shown.index("rows      256 of 256")] == shown[: shown.index("rows      256 of 256")]
    assert not set(shown) - set(printed)

"""Start-up: from a command's first moment to an engine that is ready, in a process of its own, the weights' file in the
page cache."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from punica_batch.bench.device import free_memory, open_device
from punica_batch.bench.figure import figure, finish
from punica_batch.bench.options import BenchOptions
from punica_batch.bench.record import Recorder, Spread
from punica_batch.bench.scaling import write_model
from punica_batch.bench.shapes import shape_config
from punica_batch.bench.workbench import memory_folder
from punica_batch.errors import JobError
from punica_batch.types import JsonDict

_TIMEOUT = 600


def run(options: BenchOptions) -> None:
    """The first start may have kernels to compile, so it is a line of its own. Raises ``JobError`` when one fails."""
    starts = options.pick(full=5, quick=3, tiny=2)
    recorder, config = Recorder("startup", options), shape_config(options.model_shape)
    device = open_device(options.device)
    size = config.weight_bytes(options.dtype)
    with tempfile.TemporaryDirectory(dir=memory_folder(size)) as root:
        write_model(Path(root), options, config, device)
        free_memory(device)
        first, *others = [_start(Path(root), options) for _ in range(starts)]
    recorder.write("whole start", "s", first["whole"], start="first")
    recorder.write("whole start", "s", Spread.of(each["whole"] for each in others), start="later", headline=True)
    for stage in others[0]["stages"]:
        recorder.write("stage", "s", Spread.of(each["stages"][stage] for each in others), stage=stage)
    recorder.write("weights", "GB/s", Spread.of(size / each["stages"]["weights"] / 1e9 for each in others))
    draw(recorder)


def _start(root: Path, options: BenchOptions) -> JsonDict:
    command = [sys.executable, "-m", "punica_batch.bench.startup_child", str(root), options.dtype, options.device]
    done = subprocess.run([*command, str(time.monotonic())], capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode != 0:
        raise JobError(f"the engine did not start: {done.stderr.strip()[-500:]}")
    times: JsonDict = json.loads(done.stdout.splitlines()[-1])
    return times


def draw(recorder: Recorder) -> None:
    """Stages as bars, some of which run side by side; the whole as a line."""
    lines = recorder.select("stage")
    with figure(recorder, "Start-up, weights in the page cache") as [axes]:
        axes.barh([line["parameters"]["stage"] for line in lines], [line["median"] for line in lines])
        for line in recorder.select("whole start")[-1:]:
            axes.axvline(line["median"], color="black", linestyle="--", lw=1, label="the whole")
        axes.invert_yaxis()
        finish(axes, "stages may run side by side", "s", "")

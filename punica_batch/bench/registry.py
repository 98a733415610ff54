"""Which benchmarks there are. Imports nothing slow: ``punica-batch bench --help`` reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bench:
    """One command of ``punica-batch bench``. ``module`` has ``run(options: BenchOptions) -> None``.

    ``quick_seconds``: after how long it leaves out points with ``--quick``. ``in_all``: ``bench all`` runs it.
    ``needs``: modules that it imports beside those that every command has.
    """

    name: str
    module: str
    summary: str
    quick_seconds: float
    in_all: bool = True
    needs: tuple[str, ...] = ()


BENCHES = (
    Bench("batching", "punica_batch.bench.batching", "Latency of a prefill and a decode step by batch size.", 20),
    Bench("roofline", "punica_batch.bench.roofline", "SGMV's arithmetic intensity against its FLOP/s.", 18),
    Bench("sgmv", "punica_batch.bench.sgmv", "SGMV against a loop and gather-BMM in torch.", 24),
    Bench("rank", "punica_batch.bench.rank", "SGMV's latency by rank, and of a mix of ranks.", 20),
    Bench("layer", "punica_batch.bench.layer", "One transformer layer with LoRA, by batch and length.", 28),
    Bench("ablations", "punica_batch.bench.ablations", "Split-K off; tensor cores on single rows; batch size.", 32),
    Bench("engine", "punica_batch.bench.engine", "The engine on whole loads, each beside its limit.", 60),
    Bench("loading", "punica_batch.bench.loading", "Adapters never seen before: first token and copy rate.", 30),
    Bench("overhead", "punica_batch.bench.overhead", "What adapters add to a token's latency, by rank.", 35),
    Bench(
        "textgen", "punica_batch.bench.textgen", "Text generation against transformers with PEFT, and vLLM.", 50,
        needs=("transformers", "peft"),
    ),
    Bench("startup", "punica_batch.bench.startup", "An engine's start in a process of its own.", 60, in_all=False),
    Bench("scaling", "punica_batch.bench.scaling", "A whole job on one GPU and on two.", 120, in_all=False),
    Bench("tune", "punica_batch.bench.tune", "Find the fastest kernel configurations for this GPU.", 60, in_all=False),
)  # fmt: skip

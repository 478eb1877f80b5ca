"""How fast trainers of other packages run: a loop in eager, with torch.compile as each package offers it, and lazy.

In: names of trainers. Out: a table of milliseconds per step, one process per cell with empty compiler caches, and of
compiles. Run by `bench.py --trainers`. A step's time is the median after everything is compiled; rounds of processes
take turns, and ratios are medians of those within a round.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from shared.tables import Table
from shared.workers import finding_tools
from torch import nn

KINDS = ("eager", "torch.compile", "lazy")

# Steps until compiled code runs, and steps whose median counts.
_WARM_STEPS, _STEPS = 15, 150


class Laps:
    """Takes the time of each step: `lap` is called at its end."""

    def __init__(self, kind: str) -> None:
        self._is_lazy = kind == "lazy"
        self._ends: list[float] = []
        self._calls = 0

    def lap(self, *_: Any) -> None:
        self._calls += 1
        if self._is_lazy:
            import lazy_backend

            if self._calls == _WARM_STEPS:
                lazy_backend.wait_for_compiles()
            lazy_backend.wait_device_ops()  # a step that is over has run
        if self._calls >= _WARM_STEPS:
            self._ends.append(perf_counter())

    def median(self) -> float:
        return statistics.median(end - start for start, end in pairwise(self._ends))


def _rows(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(256, (count, 64), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 256, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _layers() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(12)]
    return nn.Sequential(*blocks, nn.Linear(128, 1))


def _batches() -> Any:
    inputs = torch.randn(32 * (_WARM_STEPS + _STEPS), 128)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :1]), batch_size=32)


def _transformers(kind: str, laps: Laps) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lazy_backend.integrations.transformers import LazyTrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            laps.lap()

    options: dict[str, Any] = {"max_steps": _WARM_STEPS + _STEPS, "per_device_train_batch_size": 8, "report_to": []}
    options |= {"save_strategy": "no", "logging_steps": 10, "disable_tqdm": True}
    if kind == "lazy":
        arguments: Any = LazyTrainingArguments("run", **options)
    else:
        arguments = TrainingArguments("run", use_cpu=True, torch_compile=kind == "torch.compile", **options)
    Trainer(_gpt(), arguments, train_dataset=_rows(400), callbacks=[Watch()]).train()


def _accelerate(kind: str, laps: Laps) -> None:
    import accelerate

    import lazy_backend.integrations.accelerate as ours

    backend = "inductor" if kind == "torch.compile" else None
    accelerator = ours.Accelerator() if kind == "lazy" else accelerate.Accelerator(cpu=True, dynamo_backend=backend)
    model = _gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = _rows(8 * (_WARM_STEPS + _STEPS))
    model, optimizer, data = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=8))
    for batch in data:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        laps.lap()


def _lightning(kind: str, laps: Laps) -> None:
    import lightning

    importlib.import_module("lazy_backend.integrations.lightning")  # makes accelerator="lazy" known

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *args: Any) -> None:
            laps.lap()

    module = Module()
    if kind == "torch.compile":  # of the whole module it fails within self.log, with torch 2.13 and lightning 2.6
        module.layers.compile()
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 10, "enable_progress_bar": False}
    options |= {"enable_checkpointing": False, "enable_model_summary": False, "logger": False}
    lightning.Trainer(accelerator="lazy" if kind == "lazy" else "cpu", **options).fit(module, _batches())


def _ignite(kind: str, laps: Laps) -> None:
    import ignite.engine

    import lazy_backend.integrations.ignite as ours

    model = _layers().to("lazy" if kind == "lazy" else "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    called: Any = torch.compile(model) if kind == "torch.compile" else model
    create = ours.create_supervised_trainer if kind == "lazy" else ignite.engine.create_supervised_trainer
    engine = create(called, optimizer, nn.functional.mse_loss)
    engine.add_event_handler(ignite.engine.Events.ITERATION_COMPLETED, laps.lap)
    engine.run(_batches(), max_epochs=1)


TRAINERS: dict[str, Callable[[str, Laps], None]] = {
    "transformers": _transformers,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "ignite": _ignite,
}


def measure(trainer: str, kind: str) -> dict[str, Any]:
    """Train in this process: seconds per step, and how often was compiled."""
    laps = Laps(kind)
    torch.manual_seed(0)
    TRAINERS[trainer](kind, laps)
    compiles = 0
    if kind == "lazy":
        import lazy_backend

        compiles = lazy_backend.metrics.counter_value("Compile")
    elif kind == "torch.compile":
        from torch._dynamo.utils import counters

        compiles = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]
    return {"seconds": laps.median(), "compiles": compiles}


def _run(trainer: str, kind: str, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lazy_backend_trainers_") as folder:
        environment = finding_tools({**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "LAZY_BACKEND_CACHE": "0"})
        if threads:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        measured = f"trainer_loops.measure({trainer!r}, {kind!r})"
        code = f"import json; from benchmarks import trainer_loops; print('\\n' + json.dumps({measured}))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{trainer}, {kind}:\n{done.stderr[-2000:]}")
    result: Any = json.loads(done.stdout.splitlines()[-1])
    return result  # type: ignore[no-any-return]


def _table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> Table:
    rows = []
    for trainer, by_kind in results.items():
        milliseconds = {kind: [1e3 * one["seconds"] for one in runs] for kind, runs in by_kind.items()}
        ratios = [
            statistics.median(
                other / lazy for other, lazy in zip(milliseconds[kind], milliseconds["lazy"], strict=True)
            )
            for kind in KINDS[:2]
        ]
        compiles = [max(one["compiles"] for one in by_kind[kind]) for kind in KINDS[1:]]
        times = [f"{statistics.median(milliseconds[kind]):.2f}" for kind in KINDS]
        rows.append([trainer, *times, *(f"{ratio:.2f}" for ratio in ratios), *map(str, compiles)])
    head = ["trainer", *(f"{kind}, ms" for kind in KINDS), "speed / eager's", "speed / torch.compile's"]
    return Table("Trainers: a step", [*head, "compiles, torch.compile", "compiles, lazy"], rows)


def main(threads: int, rounds: int, show: Callable[[Table], str], trainers: Sequence[str] = tuple(TRAINERS)) -> None:
    """Print the table."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {name: {kind: [] for kind in KINDS} for name in trainers}
    for number in range(rounds):
        for trainer in trainers:
            for kind in KINDS:
                result = _run(trainer, kind, threads)
                results[trainer][kind].append(result)
                about = f"round {number + 1} of {rounds}: {1e3 * result['seconds']:.2f} ms"
                print(f"bench: {trainer}, {kind}, {about}", file=sys.stderr, flush=True)
    print(show(_table(results)))

"""Serving speed: requests per second and their latency, from one thread and from several, next to other executors.

In: models and executors. Out: `measure`, whose result `tables_of` shows: per model, rates and percentiles of each
number of threads, and seconds until the first answer, imports aside; `block`, which is that for docs/serving.md. Run by
`bench.py --serve`. Each executor has a
process of its own, with one OpenMP thread per operator; the processes of a model live side by side and take turns,
round by round. An executor that is not installed is left out, with the reason (`pip install onnxruntime onnxscript`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from shared.tables import Table
from shared.workers import Worker, WorkerFailed, answer_commands
from torch import nn

Request = Callable[[], object]
Result = dict[str, Any]

_WARM_UP = 50  # requests
_RUNNERS = 2  # of AOTInductor: requests that it runs at the same time


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class _Decoder(nn.Module):
    """One token of a text: its keys and values join those of 127 others, in place."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4, places: int = 128) -> None:
        super().__init__()
        self._heads = heads
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.register_buffer("kept", torch.randn(layers, 2, heads, places, width // heads), persistent=False)
        self.register_buffer("position", torch.tensor([places - 1]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix, head, norm, kept in zip(self.mixes, self.heads, self.norms, self.kept, strict=True):
            query, *given = mix(norm(x)).view(3, self._heads, 1, -1)
            kept.index_copy_(2, self.position, torch.stack(given))
            x = x + head(nn.functional.scaled_dot_product_attention(query, *kept).reshape(x.shape)).relu()
        return x


# Of each model: how it is made, and the shape of a request.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, (8, 64)),
    "cnn": (_cnn, (4, 3, 32, 32)),
    "encoder": (_encoder, (4, 32, 128)),
    "decoder": (_Decoder, (1, 128)),
}


# ----- executors


def _eager(module: nn.Module, x: torch.Tensor) -> Request:
    return lambda: module(x)


def _compile(module: nn.Module, x: torch.Tensor) -> Request:
    compiled = torch.compile(module)
    return lambda: compiled(x)


def _aot_inductor(module: nn.Module, x: torch.Tensor) -> Request:
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.package import load_package

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.pt2")
        aoti_compile_and_package(torch.export.export(module, (x,)), package_path=path)
        loaded = load_package(path, num_runners=_RUNNERS)
    return lambda: loaded(x)


def _onnx_runtime(module: nn.Module, x: torch.Tensor) -> Request:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(module, (x,), path, dynamo=True)
        session = onnxruntime.InferenceSession(path, options)
    name, given = session.get_inputs()[0].name, x.numpy()
    return lambda: torch.from_numpy(session.run(None, {name: given})[0])


def _serve(module: nn.Module, x: torch.Tensor) -> Request:
    import lazy_backend

    served = lazy_backend.serve(module, x)
    if not isinstance(module, _Decoder):
        return lambda: served(x)
    own = threading.local()

    def request() -> object:
        if not hasattr(own, "state"):
            own.state = served.state()  # of this thread: requests without one take turns
        return served(x, state=own.state)

    return request


EXECUTORS: dict[str, Callable[[nn.Module, torch.Tensor], Request]] = {
    "eager": _eager,
    "torch.compile": _compile,
    "AOTInductor": _aot_inductor,
    "ONNX Runtime": _onnx_runtime,
    "serve": _serve,
}
_PACKAGES = {
    "torch.compile": "torch._inductor.compile_fx",
    "AOTInductor": "torch._inductor.compile_fx",
    "ONNX Runtime": "onnxruntime",
    "serve": "lazy_backend",
}


# ----- within a process


class _Server:
    """A model in one executor."""

    def __init__(self, model: str, executor: str) -> None:
        self._model, self._executor = model, executor
        self._request: Request = lambda: None

    def answer(self, command: str, **arguments: Any) -> Result:
        return self._start() if command == "start" else self._window(**arguments)

    def _start(self) -> Result:
        torch.manual_seed(0)
        package = importlib.import_module(_PACKAGES.get(self._executor, "torch"))
        make, shape = MODELS[self._model]
        module, x = make().eval(), torch.randn(shape)
        begin = perf_counter()
        with torch.no_grad():
            self._request = EXECUTORS[self._executor](module, x)
        with torch.inference_mode():
            answer = self._request()
            seconds = perf_counter() - begin
            if self._executor == "serve":
                sys.modules["lazy_backend"].wait_for_compiles()
            for _ in range(_WARM_UP):
                answer = self._request()
            torch.testing.assert_close(answer, module(x), rtol=1e-3, atol=1e-4)
        return {"first": seconds, "version": getattr(package, "__version__", "")}

    def _window(self, threads: int, seconds: float) -> Result:
        """Rate and latencies of requests from so many threads, each of which asks again once it has an answer."""
        latencies: list[list[float]] = [[] for _ in range(threads)]
        errors: list[Exception] = []
        barrier = threading.Barrier(threads)

        def ask(own: list[float]) -> None:
            with torch.inference_mode():  # of this thread
                barrier.wait()
                before = begin = perf_counter()
                while before - begin < seconds:
                    self._request()
                    after = perf_counter()
                    own.append(after - before)
                    before = after

        def guarded(own: list[float]) -> None:
            try:
                ask(own)
            except Exception as error:
                errors.append(error)

        callers = [threading.Thread(target=guarded, args=(own,)) for own in latencies]
        begin = perf_counter()
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        if errors:
            raise errors[0]
        took = perf_counter() - begin
        found = sorted(latency for own in latencies for latency in own)
        percentiles = {f"p{percent}": found[len(found) * percent // 100] for percent in (50, 99)}
        return {"rate": len(found) / took, **percentiles}


# ----- all of them


def measure(
    models: Sequence[str], executors: Sequence[str], threads: Sequence[int], rounds: int, seconds: float = 0.5
) -> Result:
    """Windows of each executor in turn. JSON-able."""
    about = {"torch": torch.__version__, "cores": os.cpu_count(), "rounds": rounds, "seconds": seconds}
    return {
        "about": about,
        "models": {name: _measure_model(name, executors, threads, rounds, seconds) for name in models},
    }


def _measure_model(model: str, executors: Sequence[str], threads: Sequence[int], rounds: int, seconds: float) -> Result:
    results: dict[str, Result] = {
        executor: {"windows": {str(count): [] for count in threads}} for executor in executors
    }
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        workers = {}
        for executor in executors:
            print(f"bench: {model}: {executor} starts", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, model, executor]
            worker = stack.enter_context(Worker(executor, command, one_thread))
            try:
                results[executor] |= worker.ask("start")
                workers[executor] = worker
            except WorkerFailed as failure:
                results[executor]["error"] = str(failure)
        for _ in range(rounds):
            for count in threads:
                for executor, worker in workers.items():
                    reply = worker.ask("window", threads=count, seconds=seconds)
                    results[executor]["windows"][str(count)].append(reply)
    return results


def tables_of(result: Result) -> list[Table]:
    """Per model: medians over the rounds."""
    return [_table(name, executors) for name, executors in result["models"].items()]


def block(result: Result) -> str:
    """The tables in markdown, with where they come from."""
    about, (executors, *_) = result["about"], result["models"].values()
    version = executors.get("ONNX Runtime", {}).get("version", "not there")
    heading = (
        f"Medians of {about['rounds']} windows of {about['seconds']} s; {about['cores']} cores, "
        f"one thread per operator; PyTorch {about['torch']},\nONNX Runtime {version}:"
    )
    return "\n\n".join([heading, *map(Table.markdown, tables_of(result))])


def _table(model: str, executors: Result) -> Table:
    counts = list(next(iter(executors.values()))["windows"])
    threads = [f"{count} thread{'s' if count != '1' else ''}" for count in counts]
    rows, notes = [], []
    for executor, found in executors.items():
        if "error" in found:
            notes.append(f"{executor}: {found['error'].split('. ')[0]}")
        else:
            cells = [_cell(found["windows"][count]) for count in counts]
            rows.append([executor, *cells, f"{found['first']:.2f}"])
    shape = " x ".join(map(str, MODELS[model][1]))
    title = f"{model}, {shape}: requests a second (p50, p99 in µs)"
    return Table(title, ["", *threads, "first answer s"], rows, "\n".join(notes))


def _cell(windows: Sequence[Result]) -> str:
    rate, *latencies = (statistics.median(window[of] for window in windows) for of in ("rate", "p50", "p99"))
    return f"{rate:,.0f} ({', '.join(f'{latency * 1e6:,.0f}' for latency in latencies)})"


if __name__ == "__main__":
    answer_commands(_Server(sys.argv[1], sys.argv[2]).answer)

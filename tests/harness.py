"""The vocabulary of the tests: same state, same bits, same program on two devices, counted events."""

from __future__ import annotations

import csv
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from forks import COMPILER, Fork, run_fork

import lazy_backend
from lazy_backend import metrics
from lazy_backend.compat import runtime
from lazy_backend.settings import FLAGS, config
from lazy_backend.tensors.contexts import contexts

Sync = Callable[[], None]
Program = Callable[[str, Sync], Sequence[Any]]
Unseen = Callable[[float], None]  # sets `unseen_number`

_initial_settings = {name: getattr(config, name) for name in FLAGS}


def unseen_number() -> float:
    """A number that code reads and no guard sees, as a function of C keeps it."""
    return (csv.field_size_limit() - _FIELD_SIZE_LIMIT) / 1000


def set_unseen_number(number: float) -> None:
    csv.field_size_limit(_FIELD_SIZE_LIMIT + round(number * 1000))


_FIELD_SIZE_LIMIT = csv.field_size_limit()


# ----- global state


def reset_state() -> None:
    """No trace, no cached program, no counter, default settings but for a backend that needs no compiler."""
    for name, value in _initial_settings.items():
        object.__setattr__(config, name, value)
    config.backend = "eager"
    config.mark_steps = "by hand"  # programs are as long as their tests say
    config.step_aside = False  # nor does what a test measures depend on time; test_aside.py has it on
    config.check_graphs = True
    config.first_sight = "record"  # more is deferred; test_first_sight.py runs the tables the other way
    config.compile = "foreground"
    config.compile_after_operators = 0
    config.cache = False
    config.verify_compiled = "off"  # tests see what compilers give; `--verify-compiled` and test_trials.py turn it on
    config.run_in_background = "always"  # the harder case; a few files run in both
    runtime.reset()
    # torch.manual_seed seeds CUDA too; where there is none it notes a traceback for later instead: 1 ms in each test
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    random.seed(0)


def settle() -> list[BaseException]:
    """Wait for every device and drop what is only recorded. Returns the errors nobody was told of."""
    errors = []
    for context in contexts.get_active_devices():
        context.locker.wait_idle()
        errors.append(context.locker.take_exception())
        with context.lock:
            context.forget_paths()
            context.new_trace()
    return [error for error in errors if error is not None]


def thread_state() -> tuple[object, ...]:
    """What this thread's modes change of all that it calls."""
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    of_autograd = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch._C._is_view_replay_enabled(),
        torch._C._is_multithreading_enabled(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch._C._functorch.peek_interpreter_stack(),
    )
    return torch.get_default_dtype(), torch._C._is_torch_function_enabled(), *of_autograd, *modes, *map(str, keys)


# ----- comparisons


def assert_same(actual: Any, expected: Any) -> None:
    """Equal values, bit by bit, and equal geometry; `actual` may be lazy."""
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(actual, expected)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(actual.items()), list(expected.items()))
    else:
        assert type(actual) is type(expected)
        assert actual == expected


def _assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert geometry(actual) == geometry(expected)
    assert actual.requires_grad == expected.requires_grad
    values = actual.detach().cpu()
    assert as_bytes(values) == as_bytes(expected.detach()), f"{values}\nis not\n{expected}"


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape, strides, offset. Strides of single elements say nothing: torch's fake kernels differ there."""
    stride = tuple(step if size > 1 else None for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dtype, tuple(tensor.shape), stride, tensor.storage_offset()


def as_bytes(tensor: torch.Tensor) -> bytes:
    # clone: one element of odd strides counts as contiguous, and then cannot be seen as bytes
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


# ----- programs on two devices


class SyncAt:
    """A `sync` for programs: marks a step at the chosen calls, all of them by default."""

    def __init__(self, *points: int) -> None:
        self.points = points
        self.calls = 0

    def __call__(self) -> None:
        if not self.points or self.calls in self.points:
            lazy_backend.mark_step()
        self.calls += 1


class NoSync:
    """A `sync` for programs that only counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def eager(program: Program) -> tuple[Sequence[Any], int]:
    """The program's results on the CPU, and how many points it could sync at."""
    sync = NoSync()
    torch.manual_seed(0)
    return program("cpu", sync), sync.calls


def assert_like_eager(program: Program, sync: Sync) -> None:
    expected, _ = eager(program)
    torch.manual_seed(0)
    assert_same(program("lazy", sync), expected)


def grid(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, ... uploaded to `device`: a tensor from outside."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=dtype).reshape(shape).clone().to(device)


# ----- modules


class Versioned(torch.nn.Module):
    """Weights that are all the same number: an answer that mixes two sets of them shows it."""

    def __init__(self, version: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(version / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).mean() for layer in self.layers])


# ----- counted events


class Counted:
    """A function that counts the calls of its body."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


@contextmanager
def count(name: str) -> Iterator[Callable[[], int]]:
    """Counts a counter's events within the block: `with count("Compile") as compiles: ...; compiles() == 0`."""
    before = metrics.counter_value(name)
    yield lambda: metrics.counter_value(name) - before


def live_tensors() -> int:
    return metrics.counter_value("CreateLtcTensor") - metrics.counter_value("DestroyLtcTensor")


# ----- other processes


def run_python(code: str, cwd: Path, **environment: str) -> str:
    """Run `code` in a new Python process; returns what it printed. Fails with its error output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# How programs for `run_ranks` begin that are given a backend as their first argument.
RANK_PROGRAM = """
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import lazy_backend
from lazy_backend import config, metrics

warnings.filterwarnings("error", category=lazy_backend.CompileWarning)  # a step that is not compiled
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
backend = sys.argv[1]
config.cache, config.compile = backend == "inductor", "foreground"
if backend != "interpreted":
    config.backend = backend
"""

# How programs for `run_ranks` begin in which rank 1 is so late that rank 0 does not wait for it any more.
LATE_RANK = """
import os
import time
from pathlib import Path

if os.environ["RANK"] == "0":
    Path("rank 0.writing").write_text(str(os.getpid()))
    Path("rank 0.writing").rename("rank 0")


def wait_until_rank_0_gave_up():
    \"\"\"However long it takes: `run_ranks` ends programs that wait in vain.\"\"\"
    while True:
        try:
            os.kill(int(Path("rank 0").read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
"""


def run_ranks(
    program: str | Path,
    cwd: Path,
    count: int = 2,
    arguments: Sequence[str] = (),
    timeout: float = 240,
    **environment: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program, text or a file, in `count` processes of one group, as `torchrun` does, each to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), **environment}
    file = program if isinstance(program, Path) else None
    text = f"import sys\nsys.argv[1:] = {list(arguments)!r}\n{program}" if file is None else file.read_text()
    environments = [{**os.environ, **shared, "RANK": str(rank)} for rank in range(count)]
    programs = [
        Fork(text, cwd, environment, file, arguments, is_dismantled=not rank)  # one rank shows how all would end
        for rank, environment in enumerate(environments)
    ]
    end = time.monotonic() + timeout
    done = []
    for one in programs:
        try:
            out, errors = one.communicate(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.send_signal(signal.SIGKILL)
            out, errors = one.communicate()
        assert one.returncode is not None
        done.append(subprocess.CompletedProcess([str(file or "-c")], one.returncode, out, errors))
    return done


def run_program(code: str, cwd: Path, imports: str = COMPILER, **environment: str) -> str:
    """As `run_python`, 3 s of a core faster: `imports` are imported already, so tests of imports cannot use it."""
    done = run_fork(code, cwd, {**os.environ, **environment}, imports=imports)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""The program that shows what a compiler gets wrong runs by itself, whatever the graph calls."""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

import lazy_backend
from lazy_backend import computation, config
from lazy_backend.archives import commands
from lazy_backend.lowering.checks import reproducer as reproducers
from lazy_backend.lowering.checks.reproducer import NotReproducible, reproducer

aten = torch.ops.aten
Tensors = list[torch.Tensor]


def script_of(program: Callable[[], Any]) -> str:
    """The script for the largest graph of a program."""
    config.compile = "off"
    made = program()
    lazy_backend.mark_step(wait=True)
    del made
    executors = [one.executor for one in computation.get_cached_computations()]
    largest = max(executors, key=lambda one: len(one.stored.get().nodes))
    return reproducer(largest.stored.get(), largest._compiler._seen or (), "how it differs")


def run(script: str, monkeypatch: pytest.MonkeyPatch, compiled: Callable[[Any], Any] = lambda program: program) -> str:
    """What the script prints, with a compiler in the place of `torch.compile`."""
    told = io.StringIO()
    monkeypatch.setattr(torch, "compile", compiled)
    with contextlib.redirect_stdout(told), inductor_config.patch(fallback_random=False):  # a script may set it
        exec(compile(script, "script", "exec"), {})
    return told.getvalue()


def lazy(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(size, dtype=dtype if dtype.is_complex else torch.float32)
    return made.to("lazy") if made.dtype is dtype else made.to(dtype).to("lazy")


def trained(module: nn.Module, *inputs: torch.Tensor) -> Any:
    module.to("lazy")
    made = module(*inputs)
    (made[0] if isinstance(made, tuple) else made).sum().backward()
    return module


def scaled() -> Any:
    model = nn.Linear(3, 3).to("lazy")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("lazy")
    scaler.scale(model(lazy(2, 3)).sum()).backward()
    scaler.step(optimizer)
    return scaler.update(), model


def expanded() -> Any:
    x = lazy(3, 1).expand(3, 4)
    lazy_backend.mark_step()
    return x + 1


def with_bits() -> Any:
    x = lazy(3, dtype=torch.complex64)
    y = x.conj()
    z = y.imag
    lazy_backend.mark_step()
    return y * 2, z + 1


def constants() -> Any:
    x = lazy(3)
    return [
        x + complex(0, math.inf),
        x * complex(1, -math.inf),
        x - complex(math.nan, -0.0),
        x.clamp(-math.inf, 1),
        x.masked_fill(x > 0, math.nan),
    ]


PROGRAMS: dict[str, Callable[[], Any]] = {
    "lstm": lambda: trained(nn.LSTM(3, 4), lazy(5, 2, 3)),
    "gru": lambda: trained(nn.GRU(3, 4), lazy(5, 2, 3)),
    "one class": lambda: trained(nn.Embedding(1, 3), torch.zeros(4, dtype=torch.int64).to("lazy")),
    "probabilities": lambda: torch.rand(4).to("lazy").bernoulli(),
    "targets": lambda: F.binary_cross_entropy(torch.rand(4).to("lazy"), torch.rand(4).to("lazy")),
    "divisors": lambda: torch.ones(8, dtype=torch.int64).to("lazy") // torch.ones(8, dtype=torch.int64).to("lazy"),
    "dropout": lambda: F.dropout(lazy(50), 0.4, training=True),
    "constants": constants,
    "bits": with_bits,
    "expanded": expanded,
    "scaled": scaled,
    "no elements": lambda: lazy(0, 3) + 1,
    "float8": lambda: lazy(3, dtype=torch.float8_e4m3fn).clone(),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16).to("lazy").clone(),
    "bfloat16": lambda: lazy(3, 4, dtype=torch.bfloat16).t() @ lazy(3, 4, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_runs_and_a_compiler_without_fault_differs_in_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(script_of(PROGRAMS[name]), monkeypatch) == ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_shows_that_results_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(program: Any) -> Any:
        return lambda *inputs: [torch.full(made.shape, 7.0).to(made.dtype) for made in program(*inputs)]

    told = run(script_of(PROGRAMS[name]), monkeypatch, faulty)
    assert ("differs by" in told) == (name != "no elements")


def test_random_operators_are_compiled_with_eagers_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(PROGRAMS["dropout"])
    assert "fallback_random = True" in script
    assert "random" not in script_of(lambda: lazy(3).exp().sum()).split("def program")[0].split('"""')[2]


def test_operators_of_the_program_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("reproduced", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("reproduced::twice", torch.empty_like, lib=library)
        script = script_of(lambda: torch.ops.reproduced.twice(lazy(3)))
        assert run(script, monkeypatch) == ""
    with pytest.raises(SystemExit, match="reproduced::twice is not PyTorch's: import the module that defines it"):
        run(script.replace("twice", "thrice").replace("thrice is", "twice is"), monkeypatch)


def test_a_graph_that_communicates_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducers, "is_collective", lambda op: op is aten.exp.default)
    with pytest.raises(NotReproducible, match=r"aten.exp.default communicates with other processes"):
        script_of(lambda: lazy(3).exp())


@pytest.mark.parametrize("words", [10, 1 << 20])
@pytest.mark.parametrize("why_not", [True, False])
def test_the_command_reads_headers_of_any_length(
    words: int, why_not: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    header = {"further": "a" * words, "refused": "it differs", "no_script" if why_not else "script": "the text"}
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + b"blobs"

    class Cache(list[Any]):
        def start_of_payload(self, hash: str, max_bytes: int) -> bytes:
            return data[:max_bytes]

    monkeypatch.setattr(commands, "open_cache", lambda readonly: Cache([SimpleNamespace(hash="12ab" * 16)]))
    monkeypatch.setattr(commands, "shared_caches", list)
    assert commands.main(["repro", "12a"]) == 0
    told = capsys.readouterr().out
    assert told == ("# 12ab12ab12ab  it differs\n# no program shows it: the text\n" if why_not else "the text\n")

"""Tracebacks end at the user's line: the frames that eager has, no frame of ours, whatever raises."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_fork
from harness import grid
from torch import nn
from torch.nn import functional

import lazy_backend
from lazy_backend import config
from lazy_backend.errors.tracebacks import hide_frames
from lazy_backend.execution import reads
from lazy_backend.execution.rules import Rules

ROOT = Path(lazy_backend.__file__).resolve().parent.parent
OURS = tuple(str(ROOT / folder) + os.sep for folder in ("lazy_backend", "lowering", "cache"))

Program = Callable[[str], Any]


def raised_by(program: Program, device: str) -> BaseException:
    try:
        program(device)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def frames(error: BaseException) -> list[tuple[str, str]]:
    """File and line of each entry, without the entry of `raised_by`."""
    return [(entry.filename, entry.line or "") for entry in traceback.extract_tb(error.__traceback__)[1:]]


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def rows(table: dict[str, Program]) -> Any:
    return pytest.mark.parametrize("program", table.values(), ids=table.keys())


# ----- errors of operators


def fail_in_backward(device: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad @ grad.reshape(1, 3) @ grad

    Fails.apply(grid(device, 3).requires_grad_()).sum().backward()


OPERATORS: dict[str, Program] = {
    "shapes": lambda device: grid(device, 3, 4) @ grid(device, 3, 4),
    "in_place": lambda device: grid(device, 3).add_(grid(device, 2, 3)),
    "a_dtype": lambda device: grid(device, 3).bitwise_and(1),
    "a_function": lambda device: functional.linear(grid(device, 3, 4), grid(device, 5, 5)),
    "a_module": lambda device: nn.Linear(3, 3).to(device)(grid(device, 3, 4)),
    "backward": fail_in_backward,
    "backward_of_many": lambda device: (grid(device, 3).requires_grad_() * 2).backward(),
    "a_factory": lambda device: torch.arange(3, 0, device=device),
    "an_argument": lambda device: grid(device, 2, 3).sum(5),
    "item": lambda device: grid(device, 3).item(),
    "attention": lambda device: functional.scaled_dot_product_attention(*[grid(device, 1, 2, n) for n in (3, 4, 5)]),
    "an_lstm": lambda device: nn.LSTM(2, 3).to(device)(grid(device, 4, 1, 5)),
}  # fmt: skip


@pytest.mark.parametrize("first_sight", ["run", "record"])
@rows(OPERATORS)
def test_frames_are_eagers(program: Program, first_sight: str) -> None:
    config.first_sight = first_sight
    error, expected = raised_by(program, "lazy"), raised_by(program, "cpu")
    assert frames(error) == frames(expected)
    assert "During handling" not in printed(error)


def test_an_index_out_of_range_ends_at_its_line() -> None:
    config.first_sight = "run"
    error, expected = (
        raised_by(lambda device: grid(device, 3)[torch.tensor([9]).to(device)], where) for where in ("lazy", "cpu")
    )
    assert type(error) is type(expected)
    assert frames(error) == frames(expected)


# ----- errors of ours


def compute_what_was_poisoned(device: str) -> None:
    x = grid(device, 3)
    lazy_backend.mark_step(wait=True)
    y = torch.ops.tracebacks.fail(x)
    with pytest.raises(lazy_backend.ExecutionError):
        lazy_backend.mark_step(wait=True)
    print(y)


def run_what_fails(device: str) -> None:
    torch.ops.tracebacks.fail(grid(device, 3))
    kept = torch.ops.tracebacks.fail(grid(device, 3))
    lazy_backend.mark_step(wait=True)
    del kept


@pytest.fixture(autouse=True)
def failing_operator() -> Any:
    with torch.library._scoped_library("tracebacks", "DEF") as library:
        library.define("fail(Tensor x) -> Tensor")
        library.impl("fail", _fail, "CPU")
        library.impl("fail", torch.empty_like, "Meta")
        yield


def _fail(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("as it was told")


def read_in_strict_mode(device: str) -> None:
    with lazy_backend.strict():
        (grid(device, 3) * 2).sum().item()


def read_in_a_strict_step(device: str) -> None:
    with lazy_backend.step(strict=True):
        (grid(device, 3) * 2).sum().item()


def end_a_step_that_may_not_run(device: str) -> None:
    with lazy_backend.allow_execution(False):
        grid(device, 3) * 2
        lazy_backend.step().__enter__()


def read_in_a_captured_function(device: str) -> None:
    lazy_backend.capture(lambda x: x.sum().item())(grid(device, 3))


def set_data(device: str) -> None:
    grid(device, 3).data = torch.ones(3)


OURS_ALONE: dict[str, Program] = {
    "two_devices": lambda device: grid(device, 3) + grid("cpu", 3),
    "a_module_and_a_batch": lambda device: functional.relu(grid(device, 3) * grid("cpu", 3)),
    "no_such_device": lambda device: torch.ones(3, device=f"{device}:7"),
    "to_no_such_device": lambda device: torch.ones(3).to(f"{device}:7"),
    "numpy": lambda device: grid(device, 3).numpy(),
    "as_subclass": lambda device: grid(device, 3).as_subclass(nn.Parameter),
    "data": set_data,
    "share_memory": lambda device: grid(device, 3).share_memory_(),
    "strict": read_in_strict_mode,
    "strict_step": read_in_a_strict_step,
    "not_allowed": end_a_step_that_may_not_run,
    "captured": read_in_a_captured_function,
    "poisoned": compute_what_was_poisoned,
    "a_run": run_what_fails,
    "wait_for_another_device": lambda device: lazy_backend.wait_device_ops("cpu"),
    "an_id": lambda device: lazy_backend.get_tensor_id(torch.ones(3)),
    "dump_ir": lambda device: lazy_backend.debug.dump_ir([grid(device, 3)], "xml"),
    "a_graph": lambda device: lazy_backend.computation.get_computation("0"),
    "quantised": lambda device: torch.empty(3, dtype=torch.qint8, device=device),
    "synchronize": lambda device: torch.lazy.synchronize("cpu"),  # type: ignore[attr-defined]
    "manual": lambda device: torch.get_device_module(device).set_device(9),
    "serve": lambda device: lazy_backend.serve(lambda x: x.sum().item(), (torch.ones(3),)),
}  # fmt: skip


@rows(OURS_ALONE)
def test_the_last_frame_is_the_users(program: Program) -> None:
    error = raised_by(program, "lazy")
    assert frames(error)[-1][0] == __file__, printed(error)
    assert not [path for path in OURS if f'File "{path}' in printed(error)]
    assert "During handling" not in printed(error)


def test_a_failed_run_tells_its_causes_without_frames_of_ours() -> None:
    error = raised_by(run_what_fails, "lazy")
    assert isinstance(error, lazy_backend.ExecutionError)
    cause = error.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert cause.__cause__ is None
    files = {entry.filename for entry in traceback.extract_tb(cause.__traceback__)}
    assert files == {__file__}  # the operator's own kernel, which is the user's


# ----- other people's errors


def test_an_error_of_a_closure_keeps_type_cause_and_frames() -> None:
    def closure() -> None:
        raise KeyError("mine") from ValueError("why")

    lazy_backend.add_step_closure(closure)
    error = raised_by(lambda device: lazy_backend.mark_step(), "lazy")
    assert isinstance(error, KeyError)
    assert isinstance(error.__cause__, ValueError)
    assert [line for _, line in frames(error)] == [
        'error = raised_by(lambda device: lazy_backend.mark_step(), "lazy")',
        'raise KeyError("mine") from ValueError("why")',
    ]


def test_what_the_user_is_handling_is_still_told() -> None:
    def program(device: str) -> None:
        try:
            raise KeyError("mine")
        except KeyError:
            grid(device, 3) + grid("cpu", 3)

    error = raised_by(program, "lazy")
    assert isinstance(error.__context__, KeyError)


def test_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    x = grid("lazy", 3)
    with monkeypatch.context() as patched:
        patched.setattr(reads, "read", interrupted)
        error = raised_by(lambda device: x.tolist(), "lazy")
    assert type(error) is KeyboardInterrupt
    assert frames(error)[-1][0] == __file__


def test_a_defect_of_ours_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delattr(Rules, "check_allowed")
        error = raised_by(lambda device: lazy_backend.mark_step(), "lazy")
    assert isinstance(error, AttributeError)
    assert frames(error)[-1][0].endswith("sync.py")


def test_debugging_shows_everything(tmp_path: Path) -> None:
    with config.patch(debug=1, debug_file=str(tmp_path / "log")):
        error = raised_by(OPERATORS["shapes"], "lazy")
    assert [file for file, _ in frames(error) if file.startswith(OURS)]


# ----- what ends a program


def output_of(code: str, tmp_path: Path, **environment: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(code)
    done = run_fork(code, tmp_path, {**os.environ, **environment}, script)
    assert done.returncode == 1
    # Triton, which PyTorch's builds for CUDA have, tells of its own objects when a fork of a process that has it ends
    return done.stderr.partition("nanobind: leaked")[0]


MODULE = """
import torch, lazy_backend
model = torch.nn.Sequential(torch.nn.Linear(3, 3)).to("lazy")
model(torch.ones(2, 3))
"""


def test_what_ends_a_program_is_printed_with_the_users_lines_alone(tmp_path: Path) -> None:
    lines = output_of(MODULE, tmp_path).splitlines()
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{tmp_path / "train.py"}", line 4, in <module>'
    ]
    assert "DeviceError: expected all tensors to be on the same device" in lines[-4]
    assert lines[-1].startswith("See docs/troubleshooting.md#deviceerror")


def test_debugging_prints_everything(tmp_path: Path) -> None:
    printed = output_of(MODULE, tmp_path, LAZY_DEBUG="1")
    assert "record.py" in printed
    assert "module.py" in printed


def test_other_errors_are_printed_as_ever(tmp_path: Path) -> None:
    code = MODULE.replace("model(torch", "try:\n    model(torch").replace('3))\n"', "")
    code += "except RuntimeError:\n    pass\ntorch.nn.Linear(3, 3)(torch.ones(2, 4))\n"
    assert "module.py" in output_of(code, tmp_path)


def test_torch_compile_refuses_in_a_few_lines(tmp_path: Path) -> None:
    code = MODULE.replace("model(torch.ones(2, 3))", 'torch.compile(model)(torch.ones(2, 3, device="lazy"))')
    lines = output_of(code, tmp_path).splitlines()
    assert len(lines) <= 10
    assert f"  at {tmp_path / 'train.py'}:4" in lines
    assert "does not take lazy tensors" in "\n".join(lines)


def test_an_instruction_without_a_line_is_kept() -> None:
    """An interruption may come there."""

    def fail() -> None:
        raise KeyboardInterrupt

    fail.__code__ = fail.__code__.replace(co_linetable=b"")
    try:
        fail()
    except KeyboardInterrupt as error:
        hide_frames(error)
        entry = error.__traceback__
    assert entry is not None
    assert entry.tb_next is not None
    assert entry.tb_next.tb_frame.f_code.co_name == "fail"
    assert entry.tb_next.tb_lineno is None


@pytest.mark.timeout(60)
def test_an_error_that_is_its_own_cause_ends() -> None:
    def raise_in_a_ring(x: torch.Tensor) -> None:
        error = ValueError("a ring")
        raise error from error

    with pytest.raises(ValueError, match="a ring"):
        lazy_backend.serve(raise_in_a_ring, torch.zeros(2))

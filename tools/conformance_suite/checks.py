"""Run one case and say what differs.

In: a `Case` and a target. Out: a `Result`, ready for JSON.
Values are compared bit by bit (NaN equals NaN), with dtype, shape, strides, device, `requires_grad`, view-ness, and who
shares memory with whom; an error must be of the type that eager raises.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from conformance_suite.cases import AUTOCAST, Case
from conformance_suite.models import module_programs, optim_programs
from conformance_suite.operators import op_programs
from conformance_suite.programs import Program, spread
from conformance_suite.reasons import UNINITIALIZED, rounds
from conformance_suite.targets import COMPILED, Cuts, RandomOps, Target

MAX_MESSAGES = 4
_PROGRAMS = {"twice": 3, "aot": 1, "inductor": 1}  # per case; elsewhere all there are


@dataclass(slots=True)
class Result:
    """What came of one case. `status`: pass, fail, skip, crash or timeout."""

    case: str
    target: str
    status: str
    programs: int = 0
    failed: int = 0
    messages: list[str] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Seen:
    """What can be seen of one tensor, or of another value."""

    where: str
    value: Any
    geometry: Any = None
    aliases: Any = None


@dataclass(slots=True)
class Outcome:
    """What a program did: things seen, or the error it ended with."""

    seen: list[Seen] = field(default_factory=list)
    error: BaseException | None = None
    cuts: Cuts = field(default_factory=Counter)


class Mismatch(Exception):
    """Eager does something else."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much may differ."""

    geometry: bool = True  # strides, views and aliases are compared
    errors: bool = True  # what eager refuses must be refused
    values: bool = True
    bounds: dict[str, float] = field(default_factory=dict)  # of rounding, if not those of assert_close
    rounding: bool = False  # another formula, so neither the last bits nor views of temporaries agree


# ----- one case


def run_case(case: Case, target: Target, debug: bool = False) -> Result:
    """Run everything a case consists of. With `debug`, the first difference is raised."""
    result = Result(case.key, target.name, "pass")
    start = time.perf_counter()
    target.reset()
    cuts: Cuts = Counter()
    try:
        programs = make_programs(case)
    except Exception as error:
        if debug:
            raise
        return Result(case.key, target.name, "fail", messages=[f"no samples: {_described(error)}"])
    with target.mode(case.mode):
        for program in programs:
            message = _try_program(case, program, target, cuts, debug)
            target.reset()
            result.programs += 1
            if message is not None:
                result.failed += 1
                _note(result.messages, f"{program.label}: {message}")
    result.status = "fail" if result.failed else "pass" if programs else "skip"
    result.cuts = dict(cuts)
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def make_programs(case: Case) -> list[Program]:
    """What a case consists of. The same on every call."""
    torch.manual_seed(0)
    random.seed(0)
    makers = {"op": op_programs, "module": module_programs, "optim": optim_programs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = list(makers[case.database](case))
    return spread(programs, _PROGRAMS.get(case.mode, len(programs)))


def _note(messages: list[str], message: str) -> None:
    known = {known.split(": ", 1)[-1] for known in messages}
    if message.split(": ", 1)[-1] not in known and len(messages) < MAX_MESSAGES:
        messages.append(message)


def _try_program(case: Case, program: Program, target: Target, cuts: Cuts, debug: bool) -> str | None:
    """What is wrong, in one line, or None. Adds what was not recorded to `cuts`."""
    try:
        _check_program(case, program, target, cuts)
    except Mismatch as mismatch:
        if debug:
            raise
        return str(mismatch)
    return None


def _check_program(case: Case, program: Program, target: Target, cuts: Cuts) -> None:
    expected, is_random = _reference(program, target, case.mode)
    # a compiled plan is tried in one run, or in two, which have the interpreter's results
    times = 2 if case.mode == "twice" else 3 if case.mode in COMPILED else 1
    tolerance = _tolerance(case, target, is_random)
    for turn in range(times):
        before = target.seen()
        actual = _run(program, target, case.mode)
        if expected.error is None:  # a call that fails may have been tried at once, to fail as eager does
            cuts.update(actual.cuts)
        if turn and case.mode == "twice":
            _check_nothing_new(before, target.seen())
        _compare(actual, expected, tolerance, program.on_device)
    if case.mode in COMPILED and expected.error is None:
        try:
            target.check_compiled()
        except AssertionError as error:
            raise Mismatch(str(error)) from error


def _tolerance(case: Case, target: Target, is_random: bool) -> Tolerance:
    compiled = case.mode in COMPILED
    return Tolerance(
        geometry=target.exact,
        errors=target.exact,
        values=case.name not in UNINITIALIZED and (target.exact or not is_random),
        rounding=compiled or not target.exact or rounds(case),
        bounds=_bounds(case),
    )


def _bounds(case: Case) -> dict[str, float]:
    """How far rounding may go, where the bounds of assert_close are too narrow."""
    if case.mode in AUTOCAST or case.mode == "mixed":  # a fused kernel rounds to the lower dtype less often
        return {"rtol": 1.6e-2, "atol": 2e-2}
    if case.dtype in ("float16", "bfloat16") or case.name.startswith("Muon"):  # which computes in bfloat16
        return {"rtol": 1e-2, "atol": 5e-3}
    # five steps amplify the rounding of the first; LBFGS divides by small differences
    return {"rtol": 1e-4, "atol": 1e-5} if case.database == "optim" else {}


def _check_nothing_new(before: tuple[int, int], after: tuple[int, int]) -> None:
    for what, old, new in zip(("calls", "graphs"), before, after, strict=True):
        if old != new:
            raise Mismatch(f"the second time {new - old} {what} were new")


def _reference(program: Program, target: Target, mode: str) -> tuple[Outcome, bool]:
    """What eager does, and whether it drew random numbers: those are then drawn as on the target."""
    eager = Target()
    eager.foreach = target.foreach
    with target.random_ops() as random_ops:
        outcome = _run(program, eager, mode)
    if random_ops.drawn:
        return outcome, True
    # again: some operators take another way where a dispatch mode looks on, with other roundings
    return _run(program, eager, mode), False


def _run(program: Program, target: Target, mode: str) -> Outcome:
    """Run a program from the same state every time."""
    torch.manual_seed(0)
    random.seed(0)
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _autocast(mode, target):
                made = program.run(target)
            target.finish()
            outcome.cuts = target.cuts()  # before the results are read
            outcome.seen = list(_look(made, target))
            target.finish()
        except Exception as error:
            outcome.error = error
            with contextlib.suppress(Exception):
                target.finish()  # what was recorded before the error is no part of the next run
    return outcome


def compare_targets(program: Program, actual: Target, expected: Target, values: bool = True) -> None:
    """Raise `Mismatch` unless both do the same up to rounding. Random operators draw other numbers: no values then."""
    with RandomOps() as random_ops:
        wanted = _run(program, expected, "interpreted")
    tolerance = Tolerance(values=values and not random_ops.drawn, rounding=True)
    _compare(_run(program, actual, "interpreted"), wanted, tolerance, on_device=False)


def _autocast(mode: str, target: Target) -> contextlib.AbstractContextManager[Any]:
    dtype = AUTOCAST.get(mode)
    return contextlib.nullcontext() if dtype is None else torch.autocast(target.device, dtype)


# ----- what is seen


def _look(made: Any, target: Target) -> Iterator[Seen]:
    """Everything a program returned. Memory and identity are told as places in the same list."""
    owners: dict[Any, int] = {}
    objects: dict[int, int] = {}
    leaves, _ = tree_flatten_with_path(made)
    for number, (path, leaf) in enumerate(leaves):
        where = "".join(map(str, path)).replace("'", "")
        if not isinstance(leaf, torch.Tensor):
            yield Seen(where, _named_alike(leaf, target))
            continue
        place = target.place(leaf)
        aliases = (
            objects.setdefault(id(leaf), number),
            owners.setdefault(place, number) if place is not None else None,
            leaf._is_view(),
        )
        yield Seen(where, _values(leaf), _geometry(leaf), aliases)


def _named_alike(leaf: Any, target: Target) -> Any:
    """`leaf`; the target's device has the name "cpu", as in the operands before they were moved."""
    if isinstance(leaf, str | torch.device) and str(leaf) == target.device:
        return type(leaf)("cpu")
    return leaf


def _geometry(tensor: torch.Tensor) -> dict[str, Any]:
    strided = tensor.layout == torch.strided
    # steps along dimensions of one element, and of tensors without any, mean nothing
    steps = zip(tensor.shape, tensor.stride(), strict=True) if strided and tensor.numel() else ()
    return {
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "requires_grad": tensor.requires_grad,
        "device": tensor.device.type,
        "strides": tuple(step if size > 1 else None for size, step in steps),
        "offset": tensor.storage_offset() if strided and tensor.numel() else 0,
        "layout": tensor.layout,
        "conjugate": tensor.is_conj(),
        "negative": tensor.is_neg(),
    }


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().cpu()
    if values.is_quantized:
        values = values.int_repr()
    if values.layout != torch.strided:
        values = values.to_dense()
    return values.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


# ----- comparison


def _compare(actual: Outcome, expected: Outcome, tolerance: Tolerance, on_device: bool) -> None:
    if expected.error is not None and not tolerance.errors:
        return
    if expected.error is not None or actual.error is not None:
        _compare_errors(actual.error, expected.error)
        return
    if len(actual.seen) != len(expected.seen):
        raise Mismatch(f"{len(actual.seen)} results instead of {len(expected.seen)}")
    for one, other in zip(actual.seen, expected.seen, strict=True):
        if one.where != other.where:
            raise Mismatch(f"a result {one.where} instead of {other.where}")
        _compare_seen(one, other, tolerance, on_device)


def _compare_errors(actual: BaseException | None, expected: BaseException | None) -> None:
    if actual is None:
        raise Mismatch(f"no error instead of {_described(expected)}") from expected
    if expected is None:
        raise Mismatch(f"{_described(actual)}") from actual
    raised = _cause(actual)
    broken = type(raised).__name__ == "LazyBackendError" and "internal error" in str(raised)
    if not isinstance(raised, type(expected)) or broken:
        raise Mismatch(f"{_described(raised)} instead of {_described(expected)}") from raised


def _cause(error: BaseException) -> BaseException:
    """An error that depends on values comes when they are computed, wrapped in what says where."""
    while type(error).__name__ in ("ExecutionError", "NodeError", "PlanError") and error.__cause__ is not None:
        error = error.__cause__
    return error


def _described(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or ["(no text)"])[0][:200]


def _compare_seen(actual: Seen, expected: Seen, tolerance: Tolerance, on_device: bool) -> None:
    if expected.geometry is None or actual.geometry is None:
        _compare_plain(actual, expected, tolerance)
        return
    names = ["dtype", "shape", "requires_grad"]
    names += ["device"] * on_device
    names += ["strides", "layout", "conjugate", "negative"] * tolerance.geometry
    # where a tensor with memory of its own starts is nobody's business
    names += ["offset"] * (tolerance.geometry and expected.aliases[2])
    for name in names:
        found, wanted = actual.geometry[name], expected.geometry[name]
        if name == "device":
            wanted = "lazy" if wanted == "cpu" and not _stays(actual, expected) else wanted
        if found != wanted:
            raise Mismatch(f"{actual.where}: {name} {found} instead of {wanted}")
    if tolerance.geometry and not tolerance.rounding:
        _compare_aliases(actual, expected)
    if tolerance.values:
        _compare_values(actual, expected, tolerance)


def _stays(actual: Seen, expected: Seen) -> bool:
    """Operands that were left on the CPU are there on both sides."""
    return actual.where.startswith("[operands]") and actual.geometry["device"] == expected.geometry["device"]


def _compare_aliases(actual: Seen, expected: Seen) -> None:
    for name, found, wanted in zip(("object", "memory", "view"), actual.aliases, expected.aliases, strict=True):
        if found != wanted and wanted is not None:
            raise Mismatch(f"{actual.where}: {name} {found} instead of {wanted}")


def _compare_plain(actual: Seen, expected: Seen, tolerance: Tolerance) -> None:
    found, wanted = actual.value, expected.value
    if type(found) is not type(wanted):
        raise Mismatch(f"{actual.where}: a {type(found).__name__} instead of a {type(wanted).__name__}")
    if isinstance(wanted, torch.device | torch.Generator) or callable(wanted) or not tolerance.values:
        return
    bound = tolerance.bounds.get("rtol", 1e-5) * max(1.0, abs(wanted)) if isinstance(wanted, float) else 0.0
    close = isinstance(wanted, float) and tolerance.rounding and abs(found - wanted) <= bound
    both_nan = found != found and wanted != wanted
    if not close and not both_nan and found != wanted and "cpu" not in repr(wanted):
        raise Mismatch(f"{actual.where}: {found!r} instead of {wanted!r}"[:300])


def _compare_values(actual: Seen, expected: Seen, tolerance: Tolerance) -> None:
    if same_bits(actual.value, expected.value):
        return
    if tolerance.rounding:
        try:
            torch.testing.assert_close(actual.value, expected.value, equal_nan=True, **tolerance.bounds)
        except AssertionError as error:
            raise Mismatch(f"{actual.where}: {' '.join(str(error).split())[:200]}") from error
        return
    raise Mismatch(f"{actual.where}: {_difference(actual.value, expected.value)}")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors on the CPU are equal bit by bit, but for the bits of NaN."""
    if one.numel() == 0 or torch.equal(_bytes(one), _bytes(other)):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(*(_bytes(t.masked_fill(nan, 0)) for t in (one, other)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    differs = ~((one == other) | ((one != one) & (other != other)))
    count = int(differs.sum())
    if not count:
        return "values differ in the sign of zeros"
    wide: Callable[[torch.Tensor], torch.Tensor] = lambda t: t[differs].to(torch.complex128)
    largest = float((wide(one) - wide(other)).abs().max())
    return f"values differ: {count} of {one.numel()} elements, by at most {largest:.3g}"

"""Operators that Inductor 2.13 by itself compiles wrong.

Most write a tensor while another operand is a copy, a view or a function of it. Each table of programs is one graph, so
that many cases cost one compile.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import assert_same
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lazy_backend
from lazy_backend import config, metrics
from lazy_backend.lowering.artefacts import artefact
from lazy_backend.lowering.artefacts.artefact import Loaded
from lazy_backend.lowering.compilation import build, inductor_defects
from lazy_backend.lowering.compilation.examples import Examples
from lazy_backend.lowering.compilation.inductor_defects import without_defects
from lazy_backend.ports.port import Port, version
from lazy_backend.ports.replacements import inductor
from lazy_backend.ports.table import (
    LATE_READS,
    READS_AFTER_WRITES,
    READS_OF_WHAT_IS_WRITTEN,
    STORED_TWICE,
    TRANSPOSED_SUMS,
    UNREAD_BUFFERS,
)

pytestmark = pytest.mark.scenario  # kernels are compiled

aten = torch.ops.aten
# longer than what one vector holds: within it, all reads come before all writes
N = 40


def floats(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def backwards(device: object) -> Tensor:
    return torch.arange(N - 1, -1, -1, device=device)


def twice_each(device: object) -> Tensor:
    """The places of the second half, which are read only after they were written."""
    return N // 2 + torch.arange(N, device=device) // 2


Case = tuple[Callable[[], list[Tensor]], Callable[..., object]]

BY_PLACES: dict[str, Case] = {
    "index_add_": (lambda: [floats(N)], lambda x: x.index_add_(0, twice_each(x.device), x.clone())),
    "index_add_ of a transpose": (
        lambda: [floats(N, N)],
        lambda x: x.index_add_(0, twice_each(x.device), x.t().clone()),
    ),
    "index_add_ in bfloat16": (
        lambda: [floats(N).bfloat16()],
        lambda x: x.index_add_(0, twice_each(x.device), x.clone()),
    ),
    "index_add_ of complex numbers": (
        lambda: [floats(N).to(torch.complex64)],
        lambda x: x.index_add_(0, twice_each(x.device), x.clone()),
    ),
    "index_add_ to no dimension": (
        lambda: [torch.tensor(2.0)],
        lambda x: x.index_add_(0, x.new_zeros(1, dtype=torch.int64), x.clone()),
    ),
    "index_put_": (lambda: [floats(N)], lambda x: x.index_put_((backwards(x.device),), x.clone())),
    "index_put_ that adds": (
        lambda: [floats(N)],
        lambda x: x.index_put_((twice_each(x.device),), x.clone(), accumulate=True),
    ),
    "index_put_ of a cast": (
        lambda: [floats(N)],
        lambda x: x.index_put_((backwards(x.device),), x.double().float()),
    ),
    "index_put_ of a function": (lambda: [floats(N)], lambda x: x.index_put_((backwards(x.device),), x * 2 + 1)),
    "index_put_ by itself": (
        lambda: [torch.arange(N).flip(0)],
        lambda x: x.index_put_((x.clone(),), x.new_zeros(()) + torch.arange(N, device=x.device) * 3 % N),
    ),
    "index_put_ by a function": (
        lambda: [torch.arange(N).flip(0)],
        lambda x: x.index_put_(((x + 1) % N,), torch.arange(N, device=x.device) * 3 % N),
    ),
    "index_put_ by a mask": (
        lambda: [floats(N) - 20],
        lambda x: x.index_put_((x.flip(0) > 0,), torch.zeros((), device=x.device)),
    ),
    "index_put_ of another dtype by a mask": (
        lambda: [torch.arange(N)],
        lambda x: x.index_put_((x > 3,), torch.tensor(2.5, device=x.device)),
    ),
    "_unsafe_index_put": (
        lambda: [floats(N)],
        lambda x: x.copy_(aten._unsafe_index_put(x, [backwards(x.device)], x)),
    ),
    "index_copy_": (lambda: [floats(N)], lambda x: x.index_copy_(0, backwards(x.device), x.clone())),
    "index_fill_": (lambda: [torch.arange(N) // 2], lambda x: x.index_fill_(0, x.clone(), 7)),
    "index_reduce_": (
        lambda: [floats(N)],
        lambda x: x.index_reduce_(0, twice_each(x.device), x.clone(), "amax"),
    ),
    "scatter_": (lambda: [floats(N)], lambda x: x.scatter_(0, backwards(x.device), x.clone())),
    "scatter_ by itself": (
        lambda: [torch.arange(N).flip(0)],
        lambda x: x.scatter_(0, x.clone(), torch.arange(N, device=x.device) * 3 % N),
    ),
    "scatter_add_": (lambda: [floats(N)], lambda x: x.scatter_add_(0, twice_each(x.device), x.clone())),
    "scatter_reduce_": (
        lambda: [floats(N)],
        lambda x: x.scatter_reduce_(0, twice_each(x.device), x.clone(), "amin"),
    ),
    "put_": (lambda: [floats(N)], lambda x: x.put_(twice_each(x.device), x.clone(), accumulate=True)),
    "masked_scatter_": (lambda: [floats(N) - 20], lambda x: x.masked_scatter_(x > 3, x.clone())),
    "masked_fill_": (lambda: [floats(N) - 20], lambda x: x.masked_fill_(x.flip(0) > 0, 0.5)),
}


def fill(x: Tensor) -> None:
    x.index_fill_(0, x.new_zeros(1, dtype=torch.int64), 3.0)


def swap(a: Tensor, b: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def rotate(a: Tensor, b: Tensor, c: Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(c.flip(0))
    c.copy_(old)


def keep_a_part(a: Tensor, b: Tensor) -> None:
    b.copy_(a[:5])
    fill(a)
    a.add_(1)


def shift(x: Tensor) -> None:
    x[1:] = x[:-1].clone()


def shift_twice(x: Tensor) -> None:
    x[1:] = x[:-1].clone()
    x[:-1] = x[1:] * 2


def move_rows(x: Tensor) -> None:
    x[0] = x[1]
    x[:, 3] = x[:, 2]
    x[2:, 1:5] = x[:-2, 1:5].clone()


def after_filling(write: Callable[..., object]) -> Callable[[Tensor], None]:
    """Memory that is written twice: `fill`, then `write`."""

    def both(x: Tensor) -> None:
        fill(x)
        write(x)

    return both


BY_COPIES: dict[str, Case] = {
    "shift": (lambda: [floats(N)], shift),
    "shift of complex numbers": (lambda: [floats(N).to(torch.complex64)], shift),
    "shift to and fro": (lambda: [floats(N)], shift_twice),
    "rows and columns": (lambda: [floats(N, 8)], move_rows),
    "diagonal": (lambda: [floats(N, N)], lambda x: x.diagonal().copy_(x.diagonal().flip(0))),
    "transpose": (lambda: [floats(N, N)], lambda x: x.copy_(x.t().clone())),
    "flip": (lambda: [floats(N)], lambda x: x.copy_(x.flip(0))),
    "swap": (lambda: [floats(N), floats(N) * 2], swap),
    "rotate": (lambda: [floats(N), floats(N) * 2, floats(N) * 3], rotate),
    "part": (lambda: [floats(N), floats(5)], keep_a_part),
    "fill, then shift": (lambda: [floats(N)], after_filling(shift)),
    "fill, then shift to and fro": (lambda: [floats(N)], after_filling(shift_twice)),
    "fill, then flip": (lambda: [floats(N)], after_filling(lambda x: x.add_(x.flip(0)))),
    "fill, then transpose": (lambda: [floats(N, N)], after_filling(lambda x: x.sub_(x.t() * 2))),
    "fill, then repeat a row": (
        lambda: [floats(N, 4)],
        after_filling(lambda x: x.copy_((x[0] * 2).expand(N, 4))),
    ),
    "fill, then index_add_": (
        lambda: [floats(N)],
        after_filling(lambda x: x.index_add_(0, backwards(x.device), x.clone())),
    ),
    "fill, then index_add_ of a flip": (
        lambda: [floats(N)],
        after_filling(lambda x: x.index_add_(0, twice_each(x.device), x.flip(0))),
    ),
}

PAIR = [1.0, 2.0]


def pair() -> list[Tensor]:
    return [floats(N) * factor for factor in PAIR]


BY_LISTS: dict[str, Case] = {
    "copies, crossed": (pair, lambda a, b: torch._foreach_add_([a, b], [b.clone(), a.clone()])),
    "functions, crossed": (pair, lambda a, b: torch._foreach_mul_([a, b], [b * 2, a * 2])),
    "flips": (pair, lambda a, b: torch._foreach_add_([a, b], [a.flip(0), b.flip(0)])),
    "foreach_copy_": (pair, lambda a, b: torch._foreach_copy_([a, b], [b.clone(), a.clone()])),
    "fill, then flips": (
        pair,
        lambda a, b: (fill(a), fill(b), torch._foreach_add_([a, b], [a.flip(0), a + b])),
    ),
}


def pair_of_squares() -> list[Tensor]:
    return [floats(N, N), floats(N, N) * 2]


def differentiate(of: Callable[[Tensor], Tensor], x: Tensor, towards: Tensor) -> None:
    """Add to `x` the gradient with respect to it."""
    leaf = x.clone().requires_grad_()
    x.add_(*torch.autograd.grad(of(leaf), leaf, towards))


# each alone wrote past the end of its memory: wrong, or a crash
BY_TRANSPOSED_SUMS: dict[str, Case] = {
    "index_add_": (pair_of_squares, lambda x, y: x.index_add_(0, torch.arange(N, device=x.device), y.t())),
    "embedding": (
        pair_of_squares,
        lambda x, y: differentiate(lambda w: torch.embedding(w, torch.arange(N, device=x.device)), x, y.t()),
    ),
    "unfold": (
        pair_of_squares,
        lambda x, y: differentiate(lambda w: w.unfold(1, 1, 1).squeeze(-1), x, y.t()),
    ),
}


def masked(x: Tensor) -> Tensor:
    """The sum of `x` and a mask that is written in part."""
    places = torch.arange(len(x), device=x.device)
    mask = torch.full_like(x, -100.0)
    return x + mask.index_put_((places.unsqueeze(0), places.unsqueeze(1)), x.new_zeros(()))


# each alone raised `KeyError`
BY_UNREAD_BUFFERS: dict[str, Case] = {
    "less the maximum": (lambda: [floats(8, 8)], lambda x: x.copy_(masked(x) - masked(x).amax(-1, keepdim=True))),
    "less the sum": (lambda: [floats(8, 8)], lambda x: x.copy_(masked(x) - masked(x).sum(-1, keepdim=True))),
    "times the minimum": (lambda: [floats(8, 8)], lambda x: x.copy_(masked(x) * masked(x).amin(-1, keepdim=True))),
}


def sums_of_columns(x: Tensor, one: Tensor, other: Tensor) -> None:
    one.copy_(x.sum(0))
    other.copy_(x.t().sum(1))


def squares_and_rows(dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    return lambda: [(floats(16, 16) % 3).to(dtype), torch.zeros(16, dtype=dtype), torch.zeros(16, dtype=dtype)]


def differentiate_forwards(x: Tensor, jacobian: Tensor) -> None:
    jacobian.copy_(torch.func.jacfwd(lambda x: torch.mm(torch.mm(x.prod() + x, x.sum() + x), x.sum() + x).sum())(x))


# each alone gave code that no compiler took
BY_SUMS_STORED_TWICE: dict[str, Case] = {
    "float16": (squares_and_rows(torch.float16), sums_of_columns),
    "bfloat16": (squares_and_rows(torch.bfloat16), sums_of_columns),
    "jacobian": (
        lambda: [(floats(3, 3) % 2).half(), torch.zeros(3, 3, dtype=torch.float16)],
        differentiate_forwards,
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize(
    "cases",
    [BY_PLACES, BY_COPIES, BY_LISTS, BY_TRANSPOSED_SUMS, BY_UNREAD_BUFFERS, BY_SUMS_STORED_TWICE],
    ids=["places", "copies", "lists", "transposed sums", "unread buffers", "sums stored twice"],
)
def test_compiled_right(cases: dict[str, Case]) -> None:
    def run(device: str) -> dict[str, list[Tensor]]:
        made = {name: [x.to(device, copy=True) for x in make()] for name, (make, _) in cases.items()}
        lazy_backend.mark_step()
        for name, (_, write) in cases.items():
            write(*made[name])
        lazy_backend.mark_step()
        return {name: [x.cpu() for x in tensors] for name, tensors in made.items()}

    config.backend = "inductor"
    expected = run("cpu")
    for _ in range(3):
        assert differing(run("lazy"), expected) == []
    assert metrics.counter_value("Compile") >= 1
    assert (metrics.counter_value("CompileFailed"), metrics.counter_value("CompileDeclined")) == (0, 0)


def differing(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> list[str]:
    def differs(name: str) -> bool:
        try:
            assert_same(found[name], expected[name])
        except AssertionError:
            return True
        return False

    return [name for name in expected if differs(name)]


def test_what_needs_no_copy_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, y: Tensor, z: Tensor, i: Tensor) -> None:
        x.index_add_(0, i, y[:3])  # from another tensor
        y.copy_(y.clamp(min=0))  # element by element
        y.mul_(y + 1)
        z[0] = z[1]  # apart from what is read
        z[3:5].copy_(z[6:8])

    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(made) for made in (*(floats(10, 8) for _ in range(3)), torch.arange(3))]
    sources: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", sources.append)
    for context in (without_defects, contextlib.nullcontext):
        monkeypatch.setattr(build, "without_defects", context)
        module = make_fx(step)(*arguments)
        module.graph.output_node().args = ((),)
        with inductor.kernels_not_built():
            build._compile(module, Examples(arguments, mode, []))
    ours, inductors = (source.split("def call")[1].count("empty_strided_cpu(") for source in sources)
    assert ours == inductors


# ----- each defect by itself

# Operators that show a defect where nothing is put in place.
SHOWN_BY: dict[Port, dict[str, Case]] = {
    READS_OF_WHAT_IS_WRITTEN: {name: BY_LISTS[name] for name in ("copies, crossed", "functions, crossed")},
    READS_AFTER_WRITES: {name: BY_COPIES[name] for name in ("fill, then flip", "fill, then transpose")},
    LATE_READS: {name: BY_COPIES[name] for name in ("swap", "rotate", "part")},
}
# Versions of PyTorch that have mended a defect.
MENDED_IN = {READS_AFTER_WRITES: {"2.15"}, TRANSPOSED_SUMS: {"2.14", "2.15"}, LATE_READS: {"2.15"}}


def compiled_here(cases: dict[str, Case]) -> tuple[dict[str, list[Tensor]], list[str]]:
    """The tensors that the cases write, as compiled in this process, and the C++ of the kernels."""
    made = {name: make() for name, (make, _) in cases.items()}
    flat = [tensor for tensors in made.values() for tensor in tensors]

    def step(*tensors: Tensor) -> tuple[()]:
        given = iter(tensors)
        for name, (_, write) in cases.items():
            write(*itertools.islice(given, len(made[name])))
        return ()

    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(tensor) for tensor in flat]

    def module() -> torch.fx.GraphModule:
        with mode:
            found = make_fx(step)(*arguments)
        for node in found.graph.nodes:
            node.meta.clear()
        found.graph.output_node().args = ((),)
        return found

    sources: list[str] = []
    with pytest.MonkeyPatch.context() as patch, as_in_the_compilers_process():
        patch.setattr(GraphLowering, "save_output_code", sources.append)
        data = build.compile_to_bytes(module, Examples(arguments, mode, []))
    with torch.no_grad():
        artefact._load(data).call(list(flat))
    return made, re.findall("r'''(.*?)'''", sources[0], flags=re.DOTALL)


@contextlib.contextmanager
def as_in_the_compilers_process() -> Iterator[None]:
    settings = {"cpp.threads": 2, "cpp.vec_isa_ok": True}
    with inductor.settings().patch(settings), inductor.autograd_settings().patch("enable_autograd_cache", True):
        yield


@pytest.fixture
def port_off(monkeypatch: pytest.MonkeyPatch) -> Callable[[Port], None]:
    """Turns a port off that was put in place."""
    with inductor_defects.without_defects():
        pass
    return lambda port: monkeypatch.setattr(port, "_obstacle", "a test")


@pytest.mark.parametrize("port", SHOWN_BY, ids=lambda port: port.name)
def test_the_defect_is_there_or_mended(port: Port, port_off: Callable[[Port], None]) -> None:
    cases = SHOWN_BY[port]
    expected = {name: make() for name, (make, _) in cases.items()}
    for name, (_, write) in cases.items():
        write(*expected[name])
    assert differing(compiled_here(cases)[0], expected) == []
    port_off(port)
    assert bool(differing(compiled_here(cases)[0], expected)) is (version() not in MENDED_IN.get(port, ()))


@pytest.mark.parametrize(
    ("port", "cases", "error"),
    [
        (UNREAD_BUFFERS, BY_UNREAD_BUFFERS, "KeyError: 'buf"),
        (STORED_TWICE, BY_SUMS_STORED_TWICE, "conflicting declaration|redefinition"),
    ],
    ids=["unread buffers", "sums stored twice"],
)
def test_without_the_port_there_is_an_error(
    port: Port, cases: dict[str, Case], error: str, port_off: Callable[[Port], None]
) -> None:
    port_off(port)
    name = next(iter(cases))
    with pytest.raises(Exception, match=error):
        compiled_here({name: cases[name]})


def test_transposed_sums_are_wrong_or_mended(port_off: Callable[[Port], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By inductor's code: what it does wrong writes past the end of memory."""
    monkeypatch.setattr(artefact, "_load", lambda data: Loaded(list, None))
    cases = {"index_add_": BY_TRANSPOSED_SUMS["index_add_"]}
    _, ours = compiled_here(cases)
    port_off(TRANSPOSED_SUMS)
    _, inductors = compiled_here(cases)
    assert "atomic_add_vec" in "".join(ours)
    assert (ours != inductors) is (version() not in MENDED_IN[TRANSPOSED_SUMS])


# ----- what a trial does not see


def write_back(x: Tensor, places: Tensor) -> None:
    x.index_put_((places,), x.double().float())


def clear_and_add_reversed(x: Tensor) -> None:
    x.index_fill_(0, x.new_zeros(1, dtype=torch.int64), 0.0)
    x.add_(x.flip(0))


# Programs with inputs that hide the defect, as first steps have them (places in order, zeros, averages that equal their
# weights), and with others.
HIDDEN: dict[Port, tuple[Callable[..., None], Callable[[], list[Tensor]], Callable[[], list[Tensor]]]] = {
    READS_OF_WHAT_IS_WRITTEN: (
        write_back,
        lambda: [floats(N), torch.arange(N)],
        lambda: [floats(N), torch.arange(N - 1, -1, -1)],
    ),
    READS_AFTER_WRITES: (clear_and_add_reversed, lambda: [torch.zeros(N)], lambda: [floats(N)]),
    LATE_READS: (swap, lambda: [floats(N), floats(N)], pair),
}


@pytest.mark.parametrize("mended", [False, True], ids=["as it is", "mended"])
@pytest.mark.parametrize("port", HIDDEN, ids=lambda port: port.name)
def test_values_of_a_trial_may_hide_a_defect(port: Port, mended: bool) -> None:
    """So that trials do not replace what is put in place here."""
    write, hiding, showing = HIDDEN[port]
    config.backend = "inductor" if mended else compile_fx  # a backend that this package knows nothing of
    config.verify_compiled, config.num_profiled_runs = "once", 0

    def is_right(make: Callable[[], list[Tensor]]) -> bool:
        found, expected = [x.to("lazy") for x in make()], make()
        lazy_backend.mark_step()
        write(*found)
        lazy_backend.mark_step()
        write(*expected)
        return all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))

    assert [is_right(hiding) for _ in range(3)] == [True] * 3
    assert (metrics.counter_value("PlanAgreed"), metrics.counter_value("PlanRefused")) == (1, 0)
    assert is_right(showing) is (mended or version() in MENDED_IN.get(port, ()))

"""Recurrent layers are, bit for bit, what eager computes on the CPU, by one call for each layer and direction."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence

import lazy_backend
from lazy_backend import config
from lazy_backend.recording.native import native_recorder

Make = Callable[..., nn.Module]

KINDS: dict[str, Make] = {
    "lstm": nn.LSTM,
    "projected_lstm": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=3, **options),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS = [
    dict(zip(("num_layers", "bidirectional", "batch_first", "bias"), values, strict=True))
    for values in itertools.product((1, 2), (False, True), (False, True), (False, True))
]
SIZES = {"padded": None, "packed": [4, 4, 3, 1]}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def named(options: dict[str, Any]) -> str:
    return "-".join(map(str, map(int, options.values())))


# eager says so once, wherever that is
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.fixture(params=[True, False], ids=["onednn", "composed"])
def onednn(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether eager takes oneDNN's kernel for an LSTM, which rounds in another way than those that it composes."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = request.param
    yield request.param
    torch.backends.mkldnn.enabled = before


def parts(state: Any) -> tuple[torch.Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def outputs_of(model: nn.Module, x: torch.Tensor, sizes: Sequence[int] | None = None, *state: Any) -> list[Any]:
    """Outputs and last states. `sizes`: lengths of the sequences of a packed batch."""
    outputs, last = model(x if sizes is None else pack_padded_sequence(x, torch.tensor(sizes)), *state)
    return [outputs if sizes is None else outputs.data, *parts(last)]


def train(
    make: Make,
    options: dict[str, Any],
    device: str,
    size: tuple[int, ...] = (4, 4, 5),
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    steps: int = 1,
) -> list[Any]:
    torch.manual_seed(0)
    model = make(5, 7, **options).to(dtype).to(device)
    x = torch.randn(size, dtype=dtype).to(device).requires_grad_()
    found = []
    for _ in range(steps):
        results = outputs_of(model, x, sizes)
        loss = results[0].square().sum() + sum(part.sum() for part in results[1:])
        model.zero_grad()
        x.grad = None
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        found += [*results, x.grad, *(gradient.clone() for gradient in gradients)]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.01)
        lazy_backend.mark_step()
        with torch.no_grad():
            found += outputs_of(model, x, sizes)
        lazy_backend.mark_step()
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("kind", KINDS)
def test_as_on_the_cpu(kind: str, options: dict[str, Any], onednn: bool) -> None:
    assert_same(train(KINDS[kind], options, "lazy"), train(KINDS[kind], options, "cpu"))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_as_on_the_cpu(kind: str, bidirectional: bool) -> None:
    options = {"num_layers": 2, "bidirectional": bidirectional}
    for sizes in ([4, 4, 3, 1], [4, 4, 4, 4], [2, 1, 1, 1]):
        found = train(KINDS[kind], options, "lazy", sizes=sizes)
        assert_same(found, train(KINDS[kind], options, "cpu", sizes=sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_change_parameters_in_every_dtype(
    kind: str, sizes: Sequence[int] | None, dtype: torch.dtype, onednn: bool
) -> None:
    given: dict[str, Any] = {"sizes": sizes, "dtype": dtype, "steps": 4}
    with config.patch(first_sight="run"):
        found = train(KINDS[kind], {"bidirectional": True}, "lazy", **given)
    assert_same(found, train(KINDS[kind], {"bidirectional": True}, "cpu", **given))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_graphs_take_the_operators(kind: str, sizes: Sequence[int] | None, onednn: bool) -> None:
    given: dict[str, Any] = {"sizes": sizes, "steps": 4}
    with config.patch(backend="aot_eager", num_profiled_runs=0):
        found = train(KINDS[kind], {"bidirectional": True}, "lazy", **given)
    assert lazy_backend.metrics.counter_value("CompileFailed") == 0
    for one, other in zip(found, train(KINDS[kind], {"bidirectional": True}, "cpu", **given), strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("size", [(3, 5), (1, 4, 5), (3, 1, 5), (40, 33, 5)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_batch_and_of_other_sizes(kind: str, size: tuple[int, ...], onednn: bool) -> None:
    assert_same(train(KINDS[kind], {}, "lazy", size), train(KINDS[kind], {}, "cpu", size))


@pytest.mark.parametrize("used", ["outputs", "state", "last", "nothing else"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_initial_states_and_parts_of_results(kind: str, sizes: Any, used: str, onednn: bool) -> None:
    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](5, 7, bidirectional=True, num_layers=2).to(device)
        widths = (3, 7) if kind == "projected_lstm" else (7, 7) if kind == "lstm" else (7,)
        state = tuple(torch.randn(4, 4, width).to(device).requires_grad_() for width in widths)
        x = torch.randn(4, 4, 5).to(device)
        results = outputs_of(model, x, sizes, state if len(state) == 2 else state[0])
        chosen = {"outputs": results[:1], "state": results[1:], "last": results[-1:], "nothing else": [results[0][-1:]]}
        sum(part.square().sum() for part in chosen[used]).backward()
        return [*results, *(one.grad for one in state), *(p.grad for p in model.parameters())]

    assert_same(run("lazy"), run("cpu"))


@pytest.mark.parametrize("frozen", ["w_hh", "w_ih", "bias", "input", "all but one"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_has_no_gradient(kind: str, frozen: str, onednn: bool) -> None:
    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](5, 7, num_layers=2).to(device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "bias_hh_l0" if frozen == "all but one" else not name.startswith(frozen))
        if frozen == "w_hh":
            model.weight_hh_l0.requires_grad_(False)
        x = torch.randn(3, 4, 5).to(device).requires_grad_(frozen != "input")
        model(x)[0].square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert_same(run("lazy"), run("cpu"))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind: str, sizes: Sequence[int] | None, onednn: bool) -> None:
    """Second derivatives are added layer by layer, where eager adds all at each step: rounding."""
    dtype = torch.float32 if kind == "lstm" and onednn and sizes is None else torch.float64

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](5, 7, bidirectional=True, dtype=dtype).to(device)
        x = torch.randn(4, 4, 5, dtype=dtype).to(device).requires_grad_()
        wanted = [x, *model.parameters()]
        results = outputs_of(model, x, sizes)
        found = torch.autograd.grad(sum(part.square().sum() for part in results), wanted, create_graph=True)
        sum(one.square().sum() for one in found).backward()
        return [[one.detach() for one in found], [one.grad for one in wanted]]

    (first, second), (expected_first, expected_second) = run("lazy"), run("cpu")
    assert_same(first, expected_first)
    for one, other in zip(second, expected_second, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_used_twice_or_refused(kind: str) -> None:
    model = KINDS[kind](5, 7).to("lazy")
    x = torch.ones(3, 4, 5).to("lazy").requires_grad_()
    loss = model(x)[0].sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert_same(first, second.cpu())
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    result = model(x)[0]
    with torch.no_grad():
        model.weight_hh_l0.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("kind", ["projected_lstm", "gru", "tanh", "relu"])
def test_a_program_may_write_to_outputs(kind: str) -> None:
    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](5, 7).to(device)
        x = torch.randn(3, 4, 5).to(device).requires_grad_()
        outputs, state = model(x)
        outputs.mul_(outputs.detach().clone()).add_(1)
        parts(state)[0].zero_()
        (outputs.sum() + parts(state)[-1].sum()).backward()
        return [outputs, x.grad, *(p.grad for p in model.parameters())]

    assert_same(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_gradients_at_once(kind: str) -> None:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = KINDS[kind](5, 7).to(device)
        x = torch.randn(3, 1, 5).to(device).requires_grad_()
        outputs = model(x)[0]
        seeds = torch.eye(outputs.numel()).view(-1, *outputs.shape).to(device)
        return torch.autograd.grad(outputs, x, seeds, is_grads_batched=True)[0]

    torch.testing.assert_close(run("lazy").cpu(), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequences_at_all(kind: str) -> None:
    found, expected = ([train(KINDS[kind], {}, device, (3, 0, 5))] for device in ("lazy", "cpu"))
    assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_draws_as_dropout_does(kind: str, onednn: bool) -> None:
    """The layers apart, with a dropout between them, draw the same numbers from the same seed."""
    torch.manual_seed(0)
    both = KINDS[kind](5, 7, num_layers=2, dropout=0.5).to("lazy")
    first, second = KINDS[kind](5, 7).to("lazy"), KINDS[kind](3 if kind == "projected_lstm" else 7, 7).to("lazy")
    for name, parameter in both.state_dict().items():
        (first if name.endswith("0") else second).state_dict()[f"{name[:-1]}0"].copy_(parameter)
    x = torch.randn(3, 4, 5).to("lazy")
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            torch.manual_seed(1)
            found = both(x)[0] * 1
            torch.manual_seed(1)
            expected = second(nn.functional.dropout(first(x)[0], 0.5))[0] * 1
            assert_same(found.cpu(), expected.cpu())
            assert_same(both.eval()(x)[0].cpu(), second(first(x)[0])[0].cpu())
            both.train()


def calls_of(program: Callable[[], Any]) -> list[str]:
    """The operators that a program records, in order."""
    program()
    lazy_backend.mark_step(wait=True)
    lazy_backend.metrics.reset()
    program()
    lazy_backend.mark_step(wait=True)
    counts = {name: lazy_backend.metrics.counter_value(name) for name in lazy_backend.metrics.counter_names()}
    return [name for name, count in counts.items() for _ in range(count) if name.startswith("lazy::")]


LAYERS = [
    ("lstm", "onednn_lstm", True), ("lstm", "recurrent_steps", False), ("projected_lstm", "recurrent_steps", True),
    ("gru", "recurrent_steps", True), ("tanh", "recurrent_steps", True), ("relu", "recurrent_steps", True),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "operator", "enabled"), LAYERS, ids=lambda value: str(value))
def test_a_layer_is_one_call_and_its_backward_another(kind: str, operator: str, enabled: bool) -> None:
    model = KINDS[kind](5, 7, num_layers=2, bidirectional=True).to("lazy")
    x = torch.ones(12, 4, 5).to("lazy")

    def step() -> None:
        model(x)[0].sum().backward()
        model.zero_grad()

    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = enabled
    try:
        counted = calls_of(step)
    finally:
        torch.backends.mkldnn.enabled = before
    assert counted.count(f"lazy::{operator}") == 4
    assert counted.count(f"lazy::{operator}_backward") == 4
    assert len(counted) < 80


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_all_layers_are_one_call(kind: str, sizes: Sequence[int] | None) -> None:
    model = KINDS[kind](5, 7, num_layers=2, bidirectional=True).to("lazy")
    x = torch.ones(4, 4, 5).to("lazy")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert calls_of(lambda: outputs_of(model, x, sizes)).count("lazy::recurrent_layers") == 1


def test_no_steps_at_all() -> None:
    with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
        nn.GRU(5, 7).to("lazy")(torch.ones(0, 4, 5).to("lazy"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_what_it_casts_in_eager(kind: str, sizes: Sequence[int] | None, dtype: torch.dtype) -> None:
    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](5, 7, num_layers=2, bidirectional=True).to(device)
        x = torch.randn(4, 4, 5).to(device).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            results = outputs_of(model, x, sizes)
            sum(part.float().square().sum() for part in results).backward()
            with torch.no_grad():
                results += outputs_of(model, x, sizes)
        return [*results, x.grad, *(p.grad for p in model.parameters())]

    if kind == "lstm" and dtype == torch.float16 and sizes is None:
        pytest.skip("oneDNN has no training in float16")
    assert_same(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_and_forward_derivatives(kind: str) -> None:
    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](5, 7).to(device)
        x, tangent = torch.randn(3, 4, 5).to(device), torch.ones(3, 4, 5).to(device)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,))[0].square().sum()

        gradients = torch.func.grad(loss)(parameters, x)
        found = [torch.func.functional_call(model, parameters, (x,))[0], *gradients.values()]
        if kind != "lstm":  # eager has no forward derivative of oneDNN's kernel
            with forward_ad.dual_level():
                found += forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))[0])
        return found

    for found, expected in zip(run("lazy"), run("cpu"), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_no_leaf_and_states_made_of_it(kind: str, onednn: bool) -> None:
    """One operand of a layer is computed from another: each has its own part of the gradient."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](5, 5 if kind != "projected_lstm" else 7).double().to(device)
        x = torch.randn(3, 4, 5, dtype=torch.float64).to(device).requires_grad_()
        inner = x * 2
        hidden = inner[:1] * 1
        state = {"lstm": (hidden, hidden), "projected_lstm": (inner[:1, :, :3], inner.new_ones(1, 4, 7))}.get(
            kind, hidden
        )
        (first,) = torch.autograd.grad(model(inner, state)[0].square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), x.grad, *(p.grad for p in model.parameters())]

    (first, *second), (expected_first, *expected_second) = run("lazy"), run("cpu")
    assert_same(first, expected_first)
    for one, other in zip(second, expected_second, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_and_served(kind: str, onednn: bool) -> None:
    torch.manual_seed(0)
    plain = KINDS[kind](5, 7, num_layers=2, batch_first=True)
    model = KINDS[kind](5, 7, num_layers=2, batch_first=True)
    model.load_state_dict(plain.state_dict())
    model.to("lazy")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    lazy_backend.capture(model)
    lazy_backend.capture(optimizers[1])
    for _ in range(8):
        x = torch.randn(4, 3, 5)
        losses = [one(x.to(device))[0].square().mean() for one, device in ((plain, "cpu"), (model, "lazy"))]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        lazy_backend.mark_step()
        assert_same(losses[1].detach().cpu(), losses[0].detach())
    assert lazy_backend.metrics.counter_value("RegionJump") >= 8
    served = lazy_backend.serve(model, torch.randn(4, 3, 5))
    for batch in (4, 4, 2):
        x = torch.randn(batch, 3, 5)
        with torch.no_grad():
            expected = plain(x)
        found = served(x)
        assert_same([found[0], *parts(found[1])], [expected[0], *parts(expected[1])])


def test_known_calls_of_layers_are_recorded_in_cpp() -> None:
    if native_recorder.extension is None:
        pytest.skip("calls are recorded in Python here")
    for kind, make in KINDS.items():
        model = make(5, 7, bidirectional=True).to("lazy")
        for _ in range(6):
            model(torch.ones(3, 4, 5).to("lazy"))[0].sum().backward()
            model.zero_grad()
            known, others = native_recorder.counts()
            lazy_backend.mark_step()
        model(torch.ones(3, 4, 5).to("lazy"))[0].sum().backward()
        now = native_recorder.counts()
        assert now[0] - known > 8, kind
        assert now[1] == others, kind
        lazy_backend.mark_step()


@pytest.mark.scenario
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_by_inductor_and_right(kind: str) -> None:
    config.backend, config.compile, config.num_profiled_runs = "inductor", "background", 0

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = KINDS[kind](16, 16, num_layers=2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for step in range(12):
            if step == 6:
                lazy_backend.wait_for_compiles()
            loss = model(torch.randn(32, 4, 16).to(device))[0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lazy_backend.mark_step()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in model.parameters())]

    for found, expected in zip(run("lazy"), run("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected)
    assert lazy_backend.metrics.counter_value("Compile") > 0
    assert lazy_backend.metrics.counter_value("CompileFailed") == 0

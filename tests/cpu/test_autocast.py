"""`torch.autocast("lazy")` does what `torch.autocast("cpu")` does in eager mode, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import lazy_backend
from lazy_backend import config, metrics
from lazy_backend.lowering.devices.cast_lists import CastRule
from lazy_backend.precision.cast_rules import rules_for

DTYPES = (torch.bfloat16, torch.float16)
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def weight(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 4)
    return nn.Sequential(*layers).to(device)


def train(
    device: str,
    dtype: torch.dtype,
    steps: int = 8,
    capture: bool = False,
    block_for: str = "",
    backward_inside: Callable[[int], bool] = lambda step: False,
    enabled: Callable[[int], bool] = lambda step: True,
) -> list[Any]:
    """Losses and dtypes of some steps, and the weights after them."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    parameters = list(model.parameters())
    if capture:
        lazy_backend.capture(model)
        lazy_backend.capture(optimizer)
    x, y = weight("cpu", 6, 8, seed=1).detach().to(device), torch.arange(6).remainder(4).to(device)
    seen: list[Any] = []
    for step in range(steps):
        with torch.autocast(block_for or device, dtype, enabled=enabled(step)):
            output = model(x)
            loss = functional.cross_entropy(output, y)
            if backward_inside(step):
                loss.backward()
        if not backward_inside(step):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lazy_backend.mark_step()
        seen += [output.dtype, loss.dtype, loss.detach()]
    return [*seen, *(parameter.detach() for parameter in parameters)]


# ----- rules


@pytest.mark.parametrize(("backing", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_every_rule_of_pytorch_is_known(backing: str, key: str) -> None:
    names = torch._C._dispatch_get_all_op_names()
    registered = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
    aten = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    assert rules_for(backing).keys() == aten


LISTS = {
    "LOWER_PRECISION_FP": CastRule.LOWER,
    "FP32": CastRule.FLOAT32,
    "FP32_SET_OPT_DTYPE": CastRule.FLOAT32_RESULT,
    "PROMOTE": CastRule.WIDEST,
}


# Registered in autocast_mode.cpp, and `_cudnn_rnn` in cudnn/RNN.cpp, which builds for the CPU do not have.
BESIDE_THE_HEADER = {"cudnn_convolution", "cudnn_convolution_transpose", "linalg_matrix_sqrth", "_cudnn_rnn"}


@pytest.mark.parametrize("name", LISTS)
def test_rules_for_cuda_are_those_of_its_header(name: str) -> None:
    body = HEADER.read_text().partition(f"#define AT_FORALL_{name}(_)")[2].split("\n\n")[0]
    listed = {".".join(match.split(", ")) for match in re.findall(r"_\((\w+(?:, \w+)?)\)", body)}
    rules = rules_for("cuda")
    known = {op for op, rule in rules.items() if rule is LISTS[name]}
    assert listed & rules.keys() == known - BESIDE_THE_HEADER


def test_a_dtype_that_cannot_be_promoted_is_told() -> None:
    one, other = torch.ones(2, dtype=torch.float16).to("lazy"), torch.ones(2).bfloat16().to("lazy")
    with torch.autocast("lazy"), pytest.raises(RuntimeError, match=r"cannot promote torch.float16.*\n.*test_autocast"):
        torch.cat([one, other])


# ----- training


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("block_for", ["lazy", "cpu"])
def test_training_like_eager(dtype: torch.dtype, capture: bool, block_for: str) -> None:
    assert_same(train("lazy", dtype, capture=capture, block_for=block_for), train("cpu", dtype))
    assert bool(metrics.counter_value("RegionJump")) is capture


@pytest.mark.parametrize("capture", [False, True])
def test_blocks_that_come_and_go(capture: bool) -> None:
    """A captured module and its backward are replayed only as they were learned."""
    kwargs: dict[str, Any] = {
        "steps": 20, "backward_inside": lambda step: step % 3 == 1, "enabled": lambda step: step % 5 != 2
    }  # fmt: skip
    assert_same(train("lazy", torch.bfloat16, capture=capture, **kwargs), train("cpu", torch.bfloat16, **kwargs))


def test_no_cut_and_no_further_compile() -> None:
    train("lazy", torch.bfloat16)
    with count("UncachedCompile") as compiles:
        train("lazy", torch.bfloat16)
    assert compiles() == 0
    assert not [name for name in metrics.counter_names() if name.startswith(("GraphCut: aten", "Fallback"))]


def test_a_captured_step_enters_its_own_block() -> None:
    def run(device: str) -> list[Any]:
        model = make_model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = lazy_backend.capture(step) if device == "lazy" else step
        return [call(torch.full((3, 8), float(number)).to(device)) for number in range(6)]

    assert_same(run("lazy"), run("cpu"))
    assert metrics.counter_value("CapturedCall") > 0


# ----- blocks


def casts(*, enabled_outside: bool = True, block: Callable[[], Any]) -> torch.dtype:
    a = torch.ones(2, 2).to("lazy")
    with torch.autocast("lazy", torch.bfloat16, enabled=enabled_outside), block():
        return (a @ a).dtype


def test_nested_blocks() -> None:
    assert casts(block=lambda: torch.autocast("lazy", enabled=False)) == torch.float32
    assert casts(block=lambda: torch.autocast("lazy", torch.float16)) == torch.float16
    assert casts(enabled_outside=False, block=lambda: torch.autocast("lazy", torch.float16)) == torch.float16
    assert not torch.is_autocast_enabled("lazy")


def test_the_innermost_block_for_lazy_or_the_backing_device_counts() -> None:
    # it changes nothing for the CPU, so it says nothing
    assert casts(block=lambda: torch.autocast("cpu", enabled=False)) == torch.bfloat16
    assert casts(enabled_outside=False, block=lambda: torch.autocast("cpu", torch.bfloat16)) == torch.bfloat16
    assert casts(block=lambda: torch.autocast("cpu", torch.float16)) == torch.float16
    a = torch.ones(2, 2).to("lazy")
    with torch.autocast("cpu", torch.float16):
        assert torch.is_autocast_enabled("lazy")
        assert torch.get_autocast_dtype("lazy") == torch.float16
        with torch.autocast("lazy", enabled=False):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.float16
    assert (a @ a).dtype == torch.float32


def test_a_block_is_entered_again_within_itself() -> None:
    a = torch.ones(2, 2).to("lazy")
    block = torch.autocast("cpu", torch.bfloat16)
    # around it, since such a block leaves the CPU's state as its inner entry found it
    with torch.autocast("cpu", enabled=False), torch.autocast("lazy", enabled=False):
        with block:
            with block:
                assert (a @ a).dtype == torch.bfloat16
            assert (a @ a).dtype == torch.bfloat16
        assert (a @ a).dtype == torch.float32


def test_functions_beside_the_block() -> None:
    assert torch.amp.is_autocast_available("lazy")
    assert torch.get_autocast_dtype("lazy") == torch.bfloat16
    with torch.autocast("lazy", dtype=torch.float16):
        assert torch.is_autocast_enabled("lazy")
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("lazy") == torch.float16
    assert torch.get_autocast_dtype("lazy") == torch.bfloat16


def test_tensors_on_the_cpu_are_not_cast() -> None:
    a = torch.ones(2, 2)
    with torch.autocast("lazy", torch.bfloat16):
        assert (a @ a).dtype == torch.float32
        assert functional.linear(a.to("lazy"), a.to("lazy")).dtype == torch.bfloat16


def test_decorator() -> None:
    @torch.autocast("lazy", dtype=torch.bfloat16)
    def multiply(a: torch.Tensor) -> torch.Tensor:
        return a @ a

    a = torch.ones(2, 2).to("lazy")
    assert multiply(a).dtype == torch.bfloat16
    assert (a @ a).dtype == torch.float32


def test_an_unsupported_dtype_turns_the_block_off_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="In LAZY autocast"), torch.autocast("lazy", torch.float64):
        assert not torch.is_autocast_enabled("lazy")


def test_a_thread_starts_outside_all_blocks() -> None:
    a, found = torch.ones(2, 2).to("lazy"), []
    with torch.autocast("lazy", torch.bfloat16):
        thread = threading.Thread(target=lambda: found.append((a @ a).dtype))
        thread.start()
        thread.join()
    assert found == [torch.float32]


# ----- casts of weights


def recorded(op: str) -> int:
    return metrics.counter_value(f"aten::{op}")


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_a_weight_is_cast_once_in_a_block(cache_enabled: bool) -> None:
    def run(device: str) -> list[Any]:
        w, x = weight(device, 4, 4), weight(device, 4, 4, seed=1).detach()
        with torch.autocast(device, torch.bfloat16, cache_enabled=cache_enabled):
            loss = (x @ w @ w).float().sum()
        loss.backward()
        return [loss.detach(), w.grad]

    assert_same(run("lazy"), run("cpu"))  # with the cache, gradients are added in bfloat16


def test_casts_end_with_the_outermost_block() -> None:
    w = weight("lazy", 4, 4)
    with torch.autocast("lazy", torch.bfloat16):
        before = w @ w
        with torch.no_grad():
            w.mul_(2)
        stale = w @ w  # as in eager mode
    with torch.autocast("lazy", torch.bfloat16):
        fresh = w @ w
    assert_same(stale, before.cpu())
    assert_same(fresh.detach(), (before.detach() * 4).cpu())


def test_a_cast_without_gradients_serves_one_with() -> None:
    def run(device: str) -> torch.Tensor | None:
        w, x = weight(device, 4, 4), weight(device, 4, 4, seed=1).detach()
        with torch.autocast(device, torch.bfloat16):
            with torch.no_grad():
                _ = x @ w
            (x @ w).float().sum().backward()
        return w.grad

    assert_same(run("lazy"), run("cpu"))


def test_casts_in_inference_mode_are_not_kept() -> None:
    """A kept one would be an inference tensor, which no backward can use, and hide that a weight has changed."""

    def run(device: str) -> list[Any]:
        w, x = weight(device, 4, 4), weight(device, 4, 4, seed=1).detach()
        results: list[Any] = []
        for modes in itertools.product([torch.inference_mode, torch.no_grad], repeat=3):
            with torch.autocast(device, torch.bfloat16):
                for mode in modes:
                    with mode():
                        results.append(x @ w)
                    with torch.no_grad():
                        w.add_(1)
                (x @ w).float().sum().backward()
            results.append(w.grad)
        return results

    assert_same(run("lazy"), run("cpu"))


def test_no_weight_is_kept_alive_after_a_block() -> None:
    alive = metrics.counter_value("CreateLtcTensor") - metrics.counter_value("DestroyLtcTensor")
    w = weight("lazy", 4, 4)
    with torch.autocast("lazy", torch.bfloat16):
        _ = w @ w
    del w, _
    lazy_backend.mark_step()
    assert metrics.counter_value("CreateLtcTensor") - metrics.counter_value("DestroyLtcTensor") == alive


# ----- what else asks autocast


def product_for(device_type: str, **options: Any) -> Any:
    """The product of two matrices as a function of its own, for blocks of `device_type`."""

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type, **options)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    return Product.apply


def test_custom_functions() -> None:
    a, b = weight("lazy", 4, 4), weight("lazy", 4, 4, seed=1)
    with torch.autocast("lazy", torch.bfloat16):
        low = product_for("lazy")(a, b)
        full = product_for("lazy", cast_inputs=torch.float32)(a, b.bfloat16())
    assert (low.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    low.sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_run_again_in_the_same_block(use_reentrant: bool) -> None:
    def run(device: str) -> list[Any]:
        model, x = make_model(device), weight(device, 6, 8, seed=1)
        with torch.autocast(device, torch.bfloat16):
            loss = checkpoint(model, x, use_reentrant=use_reentrant).float().square().sum()
        loss.backward()
        return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]

    assert_same(run("lazy"), run("cpu"))


Block = tuple[str, str] | None  # the device type, and a dtype or "off"

_BLOCKS: list[Block] = [None, *itertools.product(("lazy", "cpu"), ("bfloat16", "float16", "off"))]


def enter(block: Block) -> Any:
    if block is None:
        return contextlib.nullcontext()
    device, what = block
    if what == "off":
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, getattr(torch, what))


def on_the_cpu(blocks: Sequence[Block]) -> list[Block]:
    """Blocks for tensors on the CPU that do what `blocks` do for lazy ones."""
    lazy, cpu = "off", "off"
    found: list[Block] = []
    for block in blocks:
        if block is not None and (block[0] == "lazy" or block[1] != cpu):
            lazy = block[1]
        cpu = block[1] if block is not None and block[0] == "cpu" else cpu
        found.append(block and ("cpu", lazy))
    return found


@pytest.mark.parametrize("outer", _BLOCKS)
def test_blocks_of_both_kinds_around_and_in_a_checkpoint(outer: Block) -> None:
    config.compile = "off"

    def run(device: str, blocks: Sequence[Block], how: bool | None) -> Any:
        w, x = weight(device, 4, 4), weight(device, 4, 4, seed=1)

        def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            with enter(blocks[2]):
                y = torch.relu(x @ w)
            return (y @ w.to(y.dtype)).float()

        try:
            with enter(blocks[0]), enter(blocks[1]):
                y = body(x, w) if how is None else checkpoint(body, x, w, use_reentrant=how)
            y.square().sum().backward()
        except RuntimeError:
            return "error"  # a cast that eager keeps may have another block's dtype
        return [y.detach(), w.grad, x.grad]

    for inner, within, how in itertools.product(_BLOCKS, _BLOCKS, (None, True, False)):
        blocks = outer, inner, within
        found, expected = run("lazy", blocks, how), run("cpu", on_the_cpu(blocks), how)
        try:
            assert_same(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{blocks}, checkpoint with use_reentrant={how}") from error
    assert not torch.is_autocast_enabled("lazy")


@pytest.mark.parametrize("block_for", ["lazy", "cpu"])
def test_custom_functions_for_the_backing_device(block_for: str) -> None:
    product = product_for("cpu", cast_inputs=torch.bfloat16)

    def run(device: str) -> list[Any]:
        a, b = weight(device, 4, 4), weight(device, 4, 4, seed=1)
        with torch.autocast("cpu" if device == "cpu" else block_for, torch.bfloat16):
            c = product(a, b.bfloat16())
        c.sum().backward()
        outside = product(a, b)
        return [c.detach(), outside.detach(), a.grad, b.grad]

    assert_same(run("lazy"), run("cpu"))


@pytest.mark.parametrize("block_for", ["lazy", "cpu"])
@pytest.mark.parametrize("registered_for", ["lazy", "cpu"])
def test_rules_of_custom_operators(registered_for: str, block_for: str) -> None:
    name = f"lazy_autocast_{registered_for}_{block_for}::twice"

    @torch.library.custom_op(name, mutates_args=())
    def twice(x: torch.Tensor, by: int) -> torch.Tensor:
        return x * by

    twice.register_fake(lambda x, by: torch.empty_like(x))
    x = torch.ones(3).to("lazy")
    with torch.autocast(block_for, torch.bfloat16):
        assert twice(x, 2).dtype == torch.float32
    twice.register_autocast(registered_for, torch.float16)
    with torch.autocast(block_for, torch.bfloat16):
        found = twice(x, 2)
    assert_same(found, torch.full((3,), 2, dtype=torch.float16))
    torch.library.register_autocast(name, registered_for, torch.bfloat16)
    with torch.autocast(block_for, torch.bfloat16):
        assert twice(x, 2).dtype == torch.bfloat16
    assert twice(x, 2).dtype == torch.float32


@pytest.mark.parametrize("with_backend", [False, True])
def test_dynamo_traces_what_it_traced(with_backend: bool) -> None:
    if with_backend:  # which has Dynamo leave the package's code alone
        torch.compile(lambda x: x + 1, backend="lazy")(torch.ones(2).to("lazy"))

    @torch.compile(backend="eager", fullgraph=True)
    def ask(x: torch.Tensor) -> Any:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), x @ x

    x = torch.ones(2, 2)
    assert ask(x)[:2] == (False, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        enabled, dtype, product = ask(x)
    assert (enabled, dtype, product.dtype) == (True, torch.float16, torch.float16)


def test_operators_that_run_at_once_are_cast_inside() -> None:
    """`_trilinear` has no rule, but its kernel calls `bmm`, which has."""

    def run(device: str) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return functional.bilinear(*(weight(device, *shape) for shape in ((4, 3), (4, 5), (2, 3, 5)))).detach()

    assert_same(run("lazy"), run("cpu"))


CASTS_INSIDE = {
    "bilinear": lambda x: functional.bilinear(x, x, x.expand(2, 4, 4)),
    "pinv": torch.linalg.pinv,
}


@pytest.mark.parametrize("name", CASTS_INSIDE)
def test_operators_that_autocast_casts_inside_are_recorded_where_it_is_off(name: str) -> None:
    """At the same place of a program, with and without."""
    call, cuts = CASTS_INSIDE[name], []

    def run(device: str, enabled: bool) -> torch.Tensor:
        x = torch.eye(4, device=device) * 3
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            return call(x) * 2

    for enabled in (False, True, False, False, True):
        with count("aten::_trilinear" if name == "bilinear" else "aten::linalg_pinv") as counted:
            found = run("lazy", enabled)
            lazy_backend.mark_step()
        cuts.append(counted())
        assert_same(found, run("cpu", enabled))
    assert cuts == [0, 1, 0, 0, 1]


@pytest.fixture
def compiled() -> Iterator[None]:
    with config.patch(backend="inductor", compile="foreground", num_profiled_runs=0):
        yield


NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "group without weights": lambda: nn.GroupNorm(2, 6, affine=False),
    "batch": lambda: nn.BatchNorm1d(6),
    "batch without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.InstanceNorm1d(1, affine=True), nn.Flatten()),
    "root mean square": lambda: nn.RMSNorm(6),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_compiled_norms_have_the_dtypes_that_were_recorded(norm: str, dtype: torch.dtype, keep: bool) -> None:
    """A norm between layers that are cast: of an input in less than float32 beside float32 weights, and its backward.

    PyTorch decomposes such calls into ones of other dtypes. Kept results have saved statistics in their graphs.
    """

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), NORMS[norm](), nn.Linear(6, 3)).to(device)
        x, kept, seen = weight(device, 64, 4, seed=1), [], []
        for _ in range(3):
            with torch.autocast(device, dtype):
                output = model(x)
            kept.append(output)
            if not keep:
                output.float().square().mean().backward()
            lazy_backend.mark_step()
            seen += [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if keep:
            torch.stack(kept).float().square().mean().backward()
        return [*seen, *(parameter.grad for parameter in model.parameters()), x.grad]

    with config.patch(backend="aot_eager_decomp_partition", compile="foreground", num_profiled_runs=0):
        found, expected = run("lazy"), run("cpu")
        lazy_backend.mark_step()
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1.6e-2, atol=2e-2)
    assert metrics.counter_value("CompileFailed") == 0


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "addr": lambda low, wide: torch.addr(wide.sum(), low[0], low[1]),
    "batch norm without statistics": lambda low, wide: torch.native_batch_norm(
        low, wide[0], wide[0], None, None, True, 0.1, 1e-5
    ),
    "batch norm in eval mode": lambda low, wide: torch.native_batch_norm(
        low, wide[0], wide[0], wide[1], wide[2].abs(), False, 0.1, 1e-5
    ),
    "layer norm": lambda low, wide: torch.native_layer_norm(low, [4], wide[0], wide[0], 1e-5),
    "group norm": lambda low, wide: torch.native_group_norm(low, wide[0], wide[0], 4, 4, 1, 2, 1e-5),
    "products": lambda low, wide: low * wide + low.sum(dtype=torch.float32) - wide.to(low.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXED)
def test_compiled_calls_of_several_dtypes_have_those_of_eager(name: str, dtype: torch.dtype) -> None:
    low, wide = weight("cpu", 4, 4).detach().to(dtype), weight("cpu", 4, 4, seed=1).detach()
    with config.patch(backend="aot_eager_decomp_partition", compile="foreground", num_profiled_runs=0):
        found = tree_leaves(MIXED[name](low.to("lazy"), wide.to("lazy")))
        lazy_backend.mark_step()
    expected = tree_leaves(MIXED[name](low, wide))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1.6e-2, atol=2e-2)
    assert metrics.counter_value("CompileFailed") == 0


def test_compiled_graphs_keep_the_dtypes_that_were_recorded(compiled: None) -> None:
    """PyTorch decomposes norms of a bfloat16 input beside float32 weights into ones with statistics in bfloat16."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.inner:
                x = layer(x)
            return x

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Norms().to(device), weight(device, 2, 3, 5, 5, seed=1)
        with torch.autocast(device, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        lazy_backend.mark_step()
        return [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in (x, *model.parameters()))]  # type: ignore[union-attr]

    torch.testing.assert_close(run("lazy"), run("cpu"), rtol=1.6e-2, atol=2e-2)
    assert metrics.counter_value("CompileFailed") == 0

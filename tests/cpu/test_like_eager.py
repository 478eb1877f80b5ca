"""Errors, strides and values that libraries and kernels make depend on the device: as eager's on the CPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import config

Call = Callable[[str], Any]


@pytest.fixture(params=["run", "record"])
def first_sight(request: pytest.FixtureRequest) -> None:
    config.first_sight = request.param


def floats(device: str, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(device)


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=device)


def raised(call: Call, device: str) -> Exception:
    with pytest.raises(Exception) as caught:
        call(device)
    return caught.value


def attention_of(device: str, query: torch.dtype, others: torch.dtype, batch: int = 1, **options: Any) -> torch.Tensor:
    """Attention of operands of two dtypes."""
    rest = torch.ones(1, 2, 2, 2, dtype=others).to(device)
    return F.scaled_dot_product_attention(torch.ones(batch, 2, 2, 2, dtype=query).to(device), rest, rest, **options)


# ----- errors at the call, whether it runs or is recorded

REFUSED: dict[str, Call] = {
    "view across two subspaces": lambda d: floats(d, 5, 1, 6, 2).permute(2, 3, 1, 0).view(6, 10),
    "view_as across two subspaces": lambda d: floats(d, 3, 4, 5).permute(0, 2, 1).view_as(floats(d, 60)),
    "as_strided beyond the end": lambda d: floats(d, 6).as_strided((2, 4), (4, 4), 2),
    "as_strided_ beyond the end": lambda d: (floats(d, 3) * 1).as_strided_((2,), (1,), 2),
    "select of no dimension": lambda d: floats(d, 1, 1, 0, 2).select(-5, 1),
    "softmax of no dimension": lambda d: floats(d, 0, 1).softmax(-3),
    "softmax of complex": lambda d: torch.complex(floats(d, 3), floats(d, 3)).softmax(0),
    "sort of no dimension": lambda d: floats(d, 6).sort(1),
    "sort of complex": lambda d: torch.complex(floats(d, 3), floats(d, 3)).sort(),
    "topk of complex": lambda d: torch.complex(floats(d, 3), floats(d, 3)).topk(1),
    "gather from nothing": lambda d: floats(d, 1, 0).gather(1, ints(d, 0).unsqueeze(0)),
    "index into nothing": lambda d: floats(d, 0, 2)[ints(d, 0)],
    "index_select from nothing": lambda d: floats(d, 4, 0).index_select(1, ints(d, 0)),
    "index_put of another shape": lambda d: floats(d, 3, 4).index_put_((ints(d, 0, 1),), floats(d, 3, 4)),
    "pool of an empty window": lambda d: F.adaptive_avg_pool2d(floats(d, 1, 1, 0), 2),
    "group_norm of complex": lambda d: F.group_norm(torch.complex(floats(d, 1, 2), floats(d, 1, 2)), 1),
    "add of other sizes": lambda d: floats(d, 0, 3) + floats(d, 3, 0),
    "norm of ints": lambda d: ints(d, 1, 2).norm(),
    "std of ints": lambda d: ints(d, 1, 2).std(),
    "norms of lists of ints": lambda d: torch._foreach_norm([ints(d, 1, 2)]),
    "products of lists of ints in place": lambda d: torch._foreach_mul_([ints(d, 1, 2)], 0.5),
    "norm of ints along a dimension": lambda d: ints(d, 1, 2).norm(dim=0),
    "norm of ints to ints": lambda d: ints(d, 1, 2).norm(dtype=torch.int64),
    "p-norm of ints": lambda d: torch.norm(ints(d, 1, 2), p=1),
    "normalize of ints": lambda d: F.normalize(ints(d, 1, 2), dim=0),
    "cross of two dtypes": lambda d: torch.linalg.cross(floats(d, 3), floats(d, 3).bfloat16()),
    "grid_sample of two dtypes": lambda d: F.grid_sample(floats(d, 1, 1, 2, 2), floats(d, 1, 2, 2, 2).half()),
    "values of another dtype into a mask": lambda d: floats(d, 3).index_put((floats(d, 3) > 0,), floats(d, 2).half()),
    "embedding_bag with weights of another dtype": lambda d: F.embedding_bag(
        ints(d, 0, 1), floats(d, 2, 3), ints(d, 0), mode="sum", per_sample_weights=floats(d, 2).bfloat16()
    ),
    "nll_loss with weights of another dtype": lambda d: F.nll_loss(
        floats(d, 2, 3), ints(d, 0, 1), weight=floats(d, 3).bfloat16()
    ),
    "distances of two dtypes": lambda d: torch.cdist(floats(d, 2, 3), floats(d, 2, 3).bfloat16()),
    "multi_margin_loss of bfloat16": lambda d: F.multi_margin_loss(floats(d, 2, 3).bfloat16(), ints(d, 0, 1)),
    "multilabel_margin_loss of float16": lambda d: F.multilabel_margin_loss(floats(d, 2).half(), ints(d, 0, 1)),
    "attention of two dtypes": lambda d: attention_of(d, torch.bfloat16, torch.float32),
    "attention of two dtypes, with dropout": lambda d: attention_of(d, torch.float32, torch.bfloat16, dropout_p=0.5),
    "attention of nothing and another dtype": lambda d: attention_of(d, torch.bfloat16, torch.float32, batch=0),
    "attention with a mask of another dtype": lambda d: attention_of(
        d, torch.float32, torch.float32, attn_mask=floats(d, 2, 2).double()
    ),
    "attention with negative dropout": lambda d: attention_of(d, torch.float32, torch.float32, dropout_p=-1.0),
    "attention whose mask broadcasts the scores": lambda d: F.scaled_dot_product_attention(
        floats(d, 1, 2, 1, 4).requires_grad_(), *(floats(d, 1, 2, 4, 4),) * 2, floats(d, 2, 4)
    ),
    "attention of nothing with values of another length": lambda d: F.scaled_dot_product_attention(
        floats(d, 2, 4, 5, 8), floats(d, 2, 4, 0, 8), floats(d, 2, 4, 1, 8)
    ),
    "attention of one dimension": lambda d: F.scaled_dot_product_attention(*[floats(d, 2)] * 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused_at_the_call(name: str, first_sight) -> None:
    found, expected = raised(REFUSED[name], "lazy"), raised(REFUSED[name], "cpu")
    assert isinstance(found, type(expected))
    assert str(found) == str(expected)


def test_a_view_is_refused_where_nothing_may_run() -> None:
    config.first_sight = "run"
    x = floats("lazy", 5, 1, 6, 2)
    with lazy_backend.allow_execution(False), pytest.raises(RuntimeError, match="view size is not compatible"):
        x.permute(2, 3, 1, 0).view(6, 10)


SHARED: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x[1:].add_(x[:-1]),
    "copy_": lambda x: x[1:].copy_(x[:-1]),
    "lerp_": lambda x: x[1:].lerp_(x[:-1], 0.5),
    "out": lambda x: torch.add(x[1:], 1, out=x[:-1]),
    "cumsum": lambda x: torch.cumsum(x[1:], 0, out=x[:-1]),
    "expand": lambda x: x.expand(2, 10).add_(1),
    "index_put_": lambda x: x[1:].index_put_((torch.arange(3, device=x.device),), x[:3]),
    "index_add_": lambda x: x[1:].index_add_(0, torch.arange(3, device=x.device), x[:3]),
    "scatter_": lambda x: x[1:].scatter_(0, torch.arange(3, device=x.device), x[:3]),
}


@pytest.mark.parametrize("name", SHARED)
def test_overlapping_operands_are_refused_each_time(name: str, first_sight) -> None:
    expected = raised(lambda device: SHARED[name](floats(device, 10)), "cpu")
    x = floats("lazy", 10) * 1
    for _ in range(3):
        found = raised(lambda device: SHARED[name](x), "lazy")
        assert type(found) is type(expected)
        assert str(found) == str(expected)
        lazy_backend.mark_step()
    assert_same(x, floats("cpu", 10))


def test_operands_that_share_memory_elementwise_or_not_at_all_are_recorded() -> None:
    x, real = floats("lazy", 4, 6) * 1, floats("cpu", 4, 6) * 1
    for of in (x, real):
        of.mul_(of)
        of[:, :3].add_(of[:, 3:])
        of[::2].copy_(of[1::2])
    assert_same(x, real)


def test_an_error_of_values_names_the_line_at_the_sync() -> None:
    y = floats("lazy", 3)[ints("lazy", 5)] * 2
    with pytest.raises(lazy_backend.ExecutionError, match=r"out of bounds(?s:.*)test_like_eager.py"):
        lazy_backend.mark_step(wait=True)
    with pytest.raises(lazy_backend.PoisonedTensorError, match="out of bounds"):
        y.cpu()


# ----- what asks for the device


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_histc_of_ints_counts_as_of_floats(dtype: torch.dtype, first_sight) -> None:
    x = torch.tensor([1, 2, 3, 3, 9, 0], dtype=dtype)
    assert_same(torch.histc(x.to("lazy"), 4, 0, 3), torch.histc(x.double(), 4, 0, 3).to(dtype))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("sizes", [{"scale_factor": 2}, {"scale_factor": 1.7}, {"size": 5}])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_interpolation_by_the_nearest_is_eagers_kernel(
    dims: int, sizes: dict[str, Any], mode: str, first_sight
) -> None:
    seen = []
    for device in ("cpu", "lazy"):
        x = floats(device, 3, 2, *(6, 4, 3)[:dims]).transpose(0, 1).requires_grad_()
        larger = F.interpolate(x, mode=mode, **sizes)
        (gradient,) = torch.autograd.grad(larger.square().sum(), x)
        seen.append([(one.detach().cpu(), one.stride()) for one in (larger, gradient)])
    for found, expected in zip(*seen, strict=True):
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]


@pytest.mark.parametrize("classes", [(0, -2, 1), (0, 7, 1)])
def test_one_hot_of_a_class_out_of_range_is_refused(classes: tuple[int, ...]) -> None:
    for first_sight in ("run", "record"):
        config.first_sight = first_sight
        text = str(raised(lambda device: F.one_hot(ints(device, *classes), 5), "cpu"))
        with pytest.raises(RuntimeError, match=text):
            F.one_hot(ints("lazy", *classes), 5).cpu()


@pytest.mark.parametrize("inference", [False, True])
def test_one_hot_as_eager(inference: bool, first_sight) -> None:
    with torch.inference_mode(inference):
        for classes in (-1, 5):
            found = F.one_hot(ints("lazy", 0, 3, 1), classes)
            assert found.cpu().tolist() == F.one_hot(ints("cpu", 0, 3, 1), classes).tolist()


def test_one_hot_checks_classes_when_compiled() -> None:
    config.backend = "aot_eager"
    for values in ((0, 3, 1), (0, 3, 1), (1, 1, 1)):
        x = torch.tensor(values).to("lazy")
        assert_same(F.one_hot(x, 5), F.one_hot(torch.tensor(values), 5))
        lazy_backend.mark_step()
    with pytest.raises(RuntimeError, match="Class values must be non-negative"):
        F.one_hot(torch.tensor((0, -3, 1)).to("lazy"), 5).cpu()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (2, 4, 2, 3, 3)])
def test_group_norm_keeps_channels_last(shape: tuple[int, ...], inference: bool, first_sight) -> None:
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape).to(memory_format=last)
    with torch.inference_mode(inference):
        found = F.group_norm(x.to("lazy").contiguous(memory_format=last), 2)
        expected = F.group_norm(x, 2)
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)


def test_group_norm_of_channels_last_has_gradients() -> None:
    x = torch.randn(2, 4, 3, 3)
    grads = []
    for device in ("cpu", "lazy"):
        leaf = x.to(device).clone().requires_grad_()
        F.group_norm(leaf.contiguous(memory_format=torch.channels_last), 2).sin().sum().backward()
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0])


def turned(device: str, *shape: int) -> torch.Tensor:
    """Floats whose first dimension is the innermost in memory."""
    return floats(device, *reversed(shape)).permute(*reversed(range(len(shape))))


def turned_index(device: str, *shape: int) -> torch.Tensor:
    return turned(device, *shape).long() % 3


def attended(device: str) -> torch.Tensor:
    """A batch of one as attention leaves it: its step is that of the channels."""
    return floats(device, 1, 64, 16).transpose(-1, -2).reshape(1, 16, 8, 8)


def moved(device: str, *shape: int) -> torch.Tensor:
    """Floats in channels-last order."""
    batch, channels, *window = shape
    return floats(device, batch, *window, channels).movedim(-1, 1)


LAID_OUT: dict[str, Call] = {
    "group_norm of a batch of one": lambda d: F.group_norm(attended(d), 4),
    "group_norm of channels last": lambda d: F.group_norm(moved(d, 2, 4, 3, 3), 2),
    "group_norm of a part of channels last": lambda d: F.group_norm(moved(d, 2, 8, 3, 3)[:, ::2], 2),
    "group_norm of volumes": lambda d: F.group_norm(moved(d, 2, 4, 2, 2, 2), 2),
    "group_norm of sequences": lambda d: F.group_norm(moved(d, 2, 4, 5), 2),
    "group_norm of turned images": lambda d: F.group_norm(turned(d, 2, 4, 3, 3), 2),
    "one_hot": lambda d: F.one_hot(turned_index(d, 2, 3), 3),
    "one_hot of what it finds": lambda d: F.one_hot(turned_index(d, 2, 3)),
    "one_hot of a part": lambda d: F.one_hot(turned_index(d, 4, 3)[::2], 3),
    "index": lambda d: floats(d, 3, 4)[turned_index(d, 2, 3)],
    "index of a turned tensor": lambda d: turned(d, 3, 4, 2)[:, turned_index(d, 2, 3)],
    "two indices": lambda d: floats(d, 3, 4)[turned_index(d, 2, 3), turned_index(d, 2, 3)],
    "batch_norm": lambda d: F.batch_norm(turned(d, 2, 3, 4), None, None, training=True),
    "layer_norm": lambda d: F.layer_norm(turned(d, 2, 3, 4), (4,)),
    "broadcast": lambda d: torch.logaddexp(turned(d, 10, 1, 5), turned(d, 10, 5)),
    "odd steps": lambda d: floats(d, 5).as_strided((1, 1, 5), (1, 1, 1)) + floats(d, 10, 5),
    "xlogy": lambda d: torch.xlogy(floats(d, 5, 10, 5), turned(d, 10, 5)),
    "copysign of a number": lambda d: torch.copysign(turned(d, 10, 5), floats(d, 1)[0]),
    "power of a number": lambda d: 2.0 ** turned(d, 10, 5),
    "logical_and": lambda d: turned(d, 10, 1, 5).logical_and(turned(d, 10, 5)),
    "unpooled": lambda d: F.max_unpool2d(*F.max_pool2d(moved(d, 1, 2, 4, 6), 2, return_indices=True), 2),
    "padded volumes": lambda d: F.pad(moved(d, 1, 3, 3, 3, 3), (1,) * 6, mode="reflect"),
    "nll_loss of images": lambda d: F.nll_loss(turned(d, 2, 3, 2, 2), turned_index(d, 2, 2, 2), reduction="none"),
    "max_pool1d": lambda d: F.max_pool1d(turned(d, 2, 3, 6), 2),
    "max_pool1d of channels last": lambda d: F.max_pool1d(moved(d, 2, 4, 6), 3, 2),
    "shuffled channels": lambda d: F.channel_shuffle(moved(d, 1, 4, 3, 3), 2),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_strides_of_results_of_turned_operands(name: str, first_sight) -> None:
    found, expected = LAID_OUT[name]("lazy"), LAID_OUT[name]("cpu")
    assert (found.stride(), found.dtype) == (expected.stride(), expected.dtype)
    torch.testing.assert_close(found.cpu(), expected)


GRADIENTS: dict[str, Call] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "logit": lambda x: x.sigmoid().logit(),
    "glu": lambda x: F.glu(x, 0),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1),
    "huber_loss": lambda x: F.huber_loss(x, x.detach() + 1),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() + 1),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x.detach() + 1),
    "replication_pad2d": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "reflection_pad2d": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "masked_select": lambda x: x.masked_select(x > 2).sum(),
}


@pytest.mark.parametrize("turn", [turned, moved])
@pytest.mark.parametrize("name", GRADIENTS)
def test_strides_of_gradients_of_turned_operands(name: str, turn: Callable[..., torch.Tensor], first_sight) -> None:
    def gradient(device: str) -> torch.Tensor:
        x = turn(device, 2, 3, 4, 4).div(10).requires_grad_()
        result = GRADIENTS[name](x)
        start = turn(device, *result.shape) if result.dim() else result.detach()
        return torch.autograd.grad(result, x, start)[0]

    found, expected = gradient("lazy"), gradient("cpu")
    assert (found.stride(), found.dtype) == (expected.stride(), expected.dtype)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("classes", [0, -2])
def test_one_hot_of_too_few_classes(classes: int, first_sight) -> None:
    for values in ((0, 1), ()):
        expected = raised(lambda device: F.one_hot(ints(device, *values).long(), classes), "cpu")  # noqa: B023
        found = raised(lambda device: F.one_hot(ints(device, *values).long(), classes), "lazy")  # noqa: B023
        assert (type(found), str(found)) == (type(expected), str(expected))


def encoded(device: str, norm: bool, aligned: bool, grad: bool) -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None).eval().to(device)
    padding = torch.tensor([[False, False, True, True], [False, False, False, True]])
    padding = padding if aligned else padding.flip(1)
    with torch.set_grad_enabled(grad):
        return encoder(torch.randn(2, 4, 8).to(device), src_key_padding_mask=padding.to(device)).detach().cpu()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("aligned", "grad"), [(True, False), (False, False), (True, True)])
def test_padded_positions_of_an_encoder_are_eagers(norm: bool, aligned: bool, grad: bool) -> None:
    torch.testing.assert_close(encoded("lazy", norm, aligned, grad), encoded("cpu", norm, aligned, grad))


MASKS: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {
    (6, 8): [None, (6, 6)],
    (4, 6, 8): [None, (6, 6), (1, 6, 6), (4, 6, 6)],
    (3, 4, 6, 8): [None, (6, 6), (4, 6, 6), (3, 1, 6, 6), (3, 4, 6, 6)],
}


@pytest.mark.parametrize(("shape", "mask"), [(shape, mask) for shape, masks in MASKS.items() for mask in masks])
def test_attention_of_any_number_of_dimensions(shape: tuple[int, ...], mask: tuple[int, ...] | None) -> None:
    """PyTorch 2.14 and later choose fused kernels for three dimensions, earlier ones for four alone."""

    def attend(device: str, is_boolean: bool, inference: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        operands = [torch.randn(shape).to(device).requires_grad_(not inference) for _ in range(3)]
        scores = None if mask is None else torch.randn(mask).to(device)
        with torch.inference_mode(inference):
            attended = F.scaled_dot_product_attention(
                *operands, scores > 0 if is_boolean and scores is not None else scores, is_causal=mask is None
            )
        if inference:
            return [attended]
        attended.pow(2).sum().backward()
        return [attended, *(operand.grad for operand in operands if operand.grad is not None)]

    for is_boolean, inference in itertools.product((False, True), (False, True)):
        found, expected = (attend(device, is_boolean, inference) for device in ("lazy", "cpu"))
        assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
        assert all(torch.equal(a.detach().cpu(), b) for a, b in zip(found, expected, strict=True))


# ----- kernels that conjugate inside


CONJUGATING: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "pinv": lambda a, b: torch.linalg.pinv(a),
    "pinverse": lambda a, b: torch.pinverse(a),
    "pinv of a Hermitian matrix": lambda a, b: torch.linalg.pinv(a.mT.conj() @ a, hermitian=True),
    "pinv of a conjugate": lambda a, b: torch.linalg.pinv(a.conj()),
    "residuals of lstsq": lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd").residuals,
    "matrix_rank of a Hermitian matrix": lambda a, b: torch.linalg.matrix_rank(a.mT.conj() @ a, hermitian=True),
    "cond": lambda a, b: torch.linalg.cond(a.mT @ b),
    "solve_ex of a conjugate": lambda a, b: torch.linalg.solve_ex(a.mH @ a, b.mH[:, :3].conj()).result,
    "vdot": lambda a, b: torch.vdot(a[0].conj(), b[1]),
    "norm of a negated view": lambda a, b: torch.linalg.norm(a.conj().imag, ord="nuc"),
    "copy to the CPU": lambda a, b: b.conj().cpu(),
}


@pytest.mark.parametrize("way", ["recorded", "run", "eager mode", "inference mode", "no grad"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", CONJUGATING)
def test_a_kernel_that_conjugates_inside(name: str, dtype: torch.dtype, way: str) -> None:
    config.first_sight = "record" if way == "recorded" else "run"
    modes = {"eager mode": lazy_backend.eager_mode, "inference mode": torch.inference_mode, "no grad": torch.no_grad}
    torch.manual_seed(0)
    operands = torch.randn(4, 3, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    expected = CONJUGATING[name](*operands)
    for _ in range(2):
        with modes.get(way, contextlib.nullcontext)():
            found = CONJUGATING[name](*(operand.to("lazy") for operand in operands))
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_attention_takes_the_masks_that_eager_takes(dtype: torch.dtype) -> None:
    def call(device: str) -> torch.Tensor:
        mask = torch.ones(2, 2, dtype=dtype).to(device)
        return attention_of(device, torch.bfloat16, torch.bfloat16, attn_mask=mask)

    assert_same(call("lazy"), call("cpu"))

"""Type promotion as eager's: Python numbers, 0-d tensors and dtypes in every combination, also as inputs of a graph."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import as_bytes, assert_same, count, geometry
from torch.nn import functional as F

import lazy_backend
from lazy_backend import config

# ----- the whole product, interpreted

DTYPES = [
    torch.bool, torch.uint8, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
NUMBERS = [True, 2, 2.5, 1.5 + 1j]

BINARY: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "maximum", "fmin", "atan2", "hypot",
        "eq", "lt", "bitwise_and", "bitwise_xor", "bitwise_left_shift", "logical_or", "copysign", "nextafter",
        "logaddexp", "xlogy", "ldexp", "float_power", "gcd", "heaviside", "rsub",
    )
}  # fmt: skip
BINARY["where"] = lambda a, b: torch.where(torch.ones(2, device=_device_of(a, b)) > 0, a, b)
IN_PLACE: dict[str, Callable[..., torch.Tensor]] = {
    name: lambda a, b, name=name: getattr(a, name)(b)
    for name in ("add_", "sub_", "mul_", "div_", "pow_", "floor_divide_", "remainder_", "eq_", "__iand__")
}
IN_PLACE["copy_"] = lambda a, b: a.copy_(b) if isinstance(b, torch.Tensor) else a.fill_(b)

# operands by kind: t a vector, 0 a 0-d tensor, c a 0-d CPU tensor
KINDS = ("tt", "t0", "0t", "tc", "ct")


def _device_of(*operands: Any) -> torch.device:
    devices = {x.device.type: x.device for x in operands if isinstance(x, torch.Tensor)}
    return devices.get("lazy", torch.device("cpu"))


def operand(kind: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    values = torch.tensor([1, 3]) if kind == "t" else torch.tensor(3)
    return values.to(dtype).to("cpu" if kind == "c" else device, copy=True)


def outcome(call: Callable[[], torch.Tensor]) -> Any:
    """The result on the CPU, or the error's type and text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex to real casts, and of a resize within eager's own add
            return call().cpu()
    except Exception as error:
        text = str(error).split("\n")[0]
        # a number's value is checked by the kernel, in the run
        kind = RuntimeError if text.startswith("value cannot be converted to type") else type(error)
        # Python's overload resolution names the class of the operands
        return kind, text.replace("LazyTensor", "Tensor")


def same_outcome(found: Any, expected: Any) -> bool:
    if isinstance(found, tuple) or isinstance(expected, tuple):
        return bool(found == expected)
    return geometry(found) == geometry(expected) and as_bytes(found) == as_bytes(expected)


def differences(cases: dict[Any, Callable[[str], torch.Tensor]]) -> list[Any]:
    """The cases that differ from eager, with both outcomes."""
    found = []
    for name, case in cases.items():
        lazy, eager = (outcome(lambda: case(device)) for device in ("lazy", "cpu"))  # noqa: B023
        if not same_outcome(lazy, eager):
            found.append((name, lazy, eager))
    return found


def with_tensors(op: Callable[..., torch.Tensor], kinds: tuple[str, ...]) -> dict[Any, Callable[[str], torch.Tensor]]:
    return {
        (a, b, kind): lambda device, a=a, b=b, kind=kind: op(operand(kind[0], a, device), operand(kind[1], b, device))
        for a, b, kind in itertools.product(DTYPES, DTYPES, kinds)
    }


def with_numbers(op: Callable[..., torch.Tensor], kinds: tuple[str, ...]) -> dict[Any, Callable[[str], torch.Tensor]]:
    """`kinds`: where the tensor stands, "t" or "0" beside the number "n"."""

    def call(device: str, kind: str, dtype: torch.dtype, number: Any) -> torch.Tensor:
        return op(*(number if k == "n" else operand(k, dtype, device) for k in kind))

    return {
        (dtype, number, kind): lambda device, d=dtype, n=number, k=kind: call(device, k, d, n)
        for dtype, number, kind in itertools.product(DTYPES, NUMBERS, kinds)
    }


@pytest.mark.parametrize("name", BINARY)
def test_tensors_promote_like_eagers(name: str) -> None:
    kinds = tuple(kind for kind in KINDS if name != "where" or "c" not in kind)  # `where` takes no CPU vector
    assert differences(with_tensors(BINARY[name], kinds)) == []


@pytest.mark.parametrize("name", BINARY)
def test_numbers_promote_like_eagers(name: str) -> None:
    assert differences(with_numbers(BINARY[name], ("tn", "0n", "nt"))) == []


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_keep_their_dtype_or_raise_like_eagers(name: str) -> None:
    cases = {**with_tensors(IN_PLACE[name], ("tt", "t0", "tc")), **with_numbers(IN_PLACE[name], ("tn", "0n"))}
    assert differences(cases) == []


@pytest.mark.parametrize("op", [torch.add, torch.mul, torch.div, torch.eq, torch.pow, torch.sub])
def test_out_takes_the_dtypes_eager_takes(op) -> None:
    def call(device: str, a: torch.dtype, b: torch.dtype) -> torch.Tensor:
        return op(operand("t", a, device), 2, out=operand("t", b, device))

    cases = {(a, b): lambda device, a=a, b=b: call(device, a, b) for a, b in itertools.product(DTYPES, DTYPES)}
    assert differences(cases) == []


@pytest.mark.parametrize("op", [operator.truediv, operator.floordiv, operator.mod])
def test_an_int_zero_divisor_is_reported_with_the_values_only(op) -> None:
    cases = {
        (number, kind): lambda device, n=number, k=kind: op(torch.tensor([5, 7]).to(device), operand(k, n, device))
        for number, kind in itertools.product((torch.bool, torch.uint8, torch.int64), "t0c")
    }
    assert differences(cases) == []


# ----- floats that change: inputs of the compiled graph

INF, NAN = float("inf"), float("nan")
VALUES = [-INF, -2.0, -1.0, -0.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 1.0, 1.5, 2.0, 3.0, 1e30, INF, NAN, 100.0, 0.1]
FLOATS = [0.3, 0.5, 2.0, 3.0, -0.5, -1.0, -2.0, 0.0, -0.0, 1.0, INF, -INF, NAN, 1e-40, 7.0, 1 / 3]
# In these, eager on the CPU rounds a number to the dtype for some operators and not for others: kept to moderate
# values, where one rounding more is no more than that.
HALVES = [torch.bfloat16, torch.float16]
FLOATING = [torch.float32, torch.float64, *HALVES]


def values_of(dtype: torch.dtype) -> torch.Tensor:
    if dtype in HALVES:
        return torch.tensor([v for v in VALUES if abs(v) in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 100.0)]).to(dtype)
    if dtype.is_complex:
        return torch.complex(torch.tensor(VALUES), torch.tensor(VALUES[::-1])).to(dtype)
    return torch.tensor(VALUES if dtype.is_floating_point else [0, 1, 2, 3, 5, 7, 100]).to(dtype)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for rounding: zeros of the same sign, the same NaNs and infinities, a few last bits."""
    if geometry(found) != geometry(expected):
        return False
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if not found.is_floating_point():
        return torch.equal(found, expected)
    info = torch.finfo(found.dtype)
    signs = (found.signbit() == expected.signbit()) | found.isnan()
    a, b = found.double(), expected.double()
    return bool(signs.all()) and torch.allclose(a, b, rtol=8 * info.eps, atol=16 * info.smallest_normal, equal_nan=True)


def changing(op: Callable[[torch.Tensor, float], torch.Tensor], x: torch.Tensor) -> list[Any]:
    """What differs from eager, for a float that is another one in each step."""
    wrong = []
    for number in FLOATS:
        if x.dtype in HALVES and number == 1e-40:
            continue
        expected = op(x.clone(), number)
        made = op(x.to("lazy"), number)
        lazy_backend.mark_step()
        if not near(made.cpu(), expected):
            wrong.append((number, made.cpu(), expected))
    return wrong


PROMOTED: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "add": lambda x, s: x + s,
    "add_in_place": lambda x, s: x.clone().add_(s),
    "add_alpha": lambda x, s: torch.add(x, torch.ones_like(x), alpha=s),
    "rsub": lambda x, s: s - x,
    "sub": lambda x, s: x - s,
    "mul": lambda x, s: x * s,
    "mul_in_place": lambda x, s: x.clone().mul_(s),
    "div": lambda x, s: x / s,
    "rdiv": lambda x, s: s / x,
    "pow": lambda x, s: x**s,
    "pow_in_place": lambda x, s: x.clone().pow_(s),
    "rpow": lambda x, s: s**x,
    "lerp": lambda x, s: torch.lerp(x, x.flip(0), s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x.flip(0), value=s),
    "addcdiv": lambda x, s: torch.addcdiv(x, x, x.flip(0), value=s),
    "clamp_min": lambda x, s: x.clamp_min(s),
    "clamp_max": lambda x, s: x.clamp_max(s),
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "fill": lambda x, s: x.clone().fill_(s),
    "setitem": lambda x, s: x.clone().index_put_((x > 0,), torch.tensor(s, dtype=x.dtype, device=x.device)),
    "foreach_add": lambda x, s: torch._foreach_add([x, x], s)[1],
    "foreach_mul_list": lambda x, s: torch._foreach_mul([x, x], [1.0, s])[1],
    "foreach_pow": lambda x, s: torch._foreach_pow([x], [s])[0],
    "foreach_addcmul": lambda x, s: torch._foreach_addcmul([x], [x], [x], [s])[0],
    "foreach_lerp": lambda x, s: torch._foreach_lerp([x], [x.flip(0)], s)[0],
    "clamp": lambda x, s: x.clamp(-abs(s), abs(s)),
    "clamp_of_one_bound": lambda x, s: x.clamp(min=s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "full_like": lambda x, s: torch.full_like(x, s),
    "full": lambda x, s: torch.full((2,), s, dtype=x.dtype, device=x.device),
    "leaky_relu": lambda x, s: F.leaky_relu(x, s),
    "threshold": lambda x, s: F.threshold(x, s, 0.5),
    "dim0": lambda x, s: x[2] * s,
    "dim0_beside_a_vector": lambda x, s: x + x[2] * s,
}
COMPARED: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    name: lambda x, s, op=op: op(x, s)
    for name, op in {"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "le": operator.le}.items()
}


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", PROMOTED)
def test_a_changing_float_gives_eagers_numbers(name: str, dtype: torch.dtype) -> None:
    x = values_of(dtype)
    if dtype == torch.float16 and "pow" in name:
        x = x.abs() + 1  # eager on the CPU has a square root for the exponent 0.5 in every dtype but this one
    config.backend = "aot_eager"
    with count("CompileFailed") as failures:
        assert changing(PROMOTED[name], x) == []
    assert failures() == 0


@pytest.mark.parametrize("name", PROMOTED)
def test_a_changing_float_compiles_at_most_twice(name: str) -> None:
    config.backend = "aot_eager"
    with count("Compile") as compiles:
        changing(PROMOTED[name], values_of(torch.float32))
    assert compiles() <= 2


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", COMPARED)
def test_a_changing_float_is_compared_like_eagers(name: str, dtype: torch.dtype) -> None:
    if dtype.is_complex and name not in ("eq", "ne"):
        return
    config.backend = "aot_eager"
    assert changing(COMPARED[name], values_of(dtype)) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["add", "mul", "div", "rdiv", "add_alpha", "where", "masked_fill"])
def test_a_changing_float_beside_ints_and_complex_numbers(name: str, dtype: torch.dtype) -> None:
    x = values_of(dtype)[6:7] if dtype.is_complex else values_of(dtype)[:4]
    config.backend = "aot_eager"
    found, expected = [], []
    for number in (0.5, 2.5, 3.5, 1.0):
        expected.append(outcome(lambda n=number: PROMOTED[name](x.clone(), n)))
        found.append(outcome(lambda n=number: PROMOTED[name](x.to("lazy"), n)))
    assert all(map(same_outcome, found, expected))


def test_changing_floats_in_inductor() -> None:
    def all_of(x: torch.Tensor, number: float) -> torch.Tensor:
        return torch.stack(
            [PROMOTED[name](x, number) for name in ("pow", "lerp", "clamp_min", "addcmul", "masked_fill")]
        )

    config.backend = "inductor"
    with count("CompileFailed") as failures:
        wrong = [number for number, _, _ in changing(all_of, values_of(torch.float32)[6:14])]
    assert (failures(), wrong) == (0, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_number_promotes_alike_in_inductor(dtype: torch.dtype) -> None:
    def step(device: str, number: float) -> list[torch.Tensor]:
        x, i = operand("t", dtype, device), operand("t", torch.int64, device)
        made = [x + number, i + number, i * 2, x + operand("0", torch.float64, device), i / 2, x * i, x > number]
        if device == "lazy":
            lazy_backend.mark_step()
        return [tensor.cpu() for tensor in made]

    config.backend = "inductor"
    for number in (0.5, 1.5, 2.5):
        assert_same(step("lazy", number), step("cpu", number))

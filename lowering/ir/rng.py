"""Random operators as functions of a seed.

In: an operator that draws random numbers, its arguments, a seed. Out: the operator's results; the same seed gives the
same results in every plan and on every run.

Note [Random numbers are data]
When a random op is recorded, a 63-bit seed is drawn from `torch.default_generator` and travels with the trace as data.
So `torch.manual_seed`, `fork_rng`, `set_rng_state` and checkpointing govern lazy tensors as they do eager ones, the
order of execution cannot change what is drawn, and no seed is ever part of a key. The interpreter and the compiled
graph call the same kernel with identically seeded generators, so a change of plan does not change the numbers. A
compiler sees an opaque operator in the `lazy_backend` namespace, which takes the seeds as one int64 tensor.
While a device captures a run (`device_graphs`), nothing may be read or seeded: each random op then draws from a
generator of its own, which is seeded before each launch.
If a call is given a user's own generator on the lazy device, its seed is drawn from that generator instead of the
default one.

Note [Dropout in compiled graphs]
Only a dropout's mask is random. As one opaque operator, dropout took a fifth of a step of GPT-2 on the CPU: its product
with a mask of bools runs as a conversion and two products, and its operand and its result go through memory. So a
compiled graph draws the mask alone, as laid out when it was recorded, which decides what element gets what number, and
the compiler fuses the products with what surrounds them. The values are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.ir.schema import Positional
from lazy_backend.ports.dispatcher import OpOverload, function_schema, overload_name

P = ParamSpec("P")
R = TypeVar("R")

aten = torch.ops.aten
# kept here: a torch.library.Library unregisters its operators when it is destroyed
_library = torch.library.Library("lazy_backend", "FRAGMENT")
_seeded_ops: dict[OpOverload, OpOverload] = {}
_lock = process_lock()


class _Generators(threading.local):
    """One generator per thread and device: seeding a generator takes 1 µs, making one 3 µs."""

    captured: Sequence[torch.Generator] | None = None  # one for each seed, while a run is captured

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Generator] = {}

    def get(self, device: torch.device, seeds: Sequence[int] | torch.Tensor, place: int) -> torch.Generator:
        """A generator that draws what the seed at `place` stands for."""
        if self.captured is not None:
            return self.captured[place]
        generator = self.by_device.get(device)
        if generator is None:
            generator = self.by_device[device] = backing_of(device).new_generator(device)
        return generator.manual_seed(int(seeds[place]))


_generators = _Generators()


@contextmanager
def drawing_from(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Within the block this thread's random ops draw from `generators`, one for each seed, whatever the seeds are."""
    try:
        _generators.captured = generators
        yield
    finally:
        _generators.captured = None  # a plain store, which nothing interrupts


# explicit: under a user's default device, the draw itself would be recorded
_HOST = torch.device("cpu")


class OwnSeed(int):
    """A seed drawn from a user's own generator, with that generator: a replay has to draw from it again."""

    generator: torch.Generator


class _Source(threading.local):
    """Where this thread's seeds come from: a generator, None for the default one. `returned`: seeds that come first."""

    generator: torch.Generator | None = None
    returned: tuple[int, ...] = ()


_source = _Source()


def call_drawing_from(generator: torch.Generator, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function`; seeds that it draws come from `generator`."""
    before = _source.generator
    # restored twice, by plain stores: an asynchronous exception may arrive at any line
    try:
        try:
            _source.generator = generator
            return function(*args, **kwargs)
        finally:
            _source.generator = before
    finally:
        _source.generator = before


def generator_in_use() -> torch.Generator:
    """The generator from which seeds are drawn now."""
    return _source.generator or torch.default_generator


def takes_generator(op: OpOverload) -> bool:
    return any(arg.name == "generator" for arg in function_schema(op).arguments)


def _native_dropout(generator: torch.Generator, input: torch.Tensor, p: float, train: bool | None) -> Any:
    """`native_dropout_cpu` in aten/src/ATen/native/Dropout.cpp, with a generator."""
    if not train or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return (input * mask).mul_(dropout_scale(p)), mask  # in place: integers are refused


def dropout_scale(p: float) -> float:
    """What `native_dropout` multiplies the elements with that it keeps."""
    return 0.0 if p == 1 else 1.0 / (1 - p)


def _dropout_mask(
    size: Sequence[int], stride: Sequence[int] | None, p: float, device: torch.device, seeds: torch.Tensor, seed: int
) -> torch.Tensor:
    mask = _empty_mask(size, stride, p, device, seeds, seed)
    return mask.bernoulli_(1 - p, generator=_generators.get(device, seeds, seed))


def _empty_mask(
    size: Sequence[int], stride: Sequence[int] | None, p: float, device: torch.device, seeds: torch.Tensor, seed: int
) -> torch.Tensor:
    if stride is None:
        return torch.empty(size, dtype=torch.bool, device=device)
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device)


def dropout_mask() -> OpOverload:
    """The operator that draws a mask. See Note [Dropout in compiled graphs]. `stride`: None if it is contiguous."""
    name = "dropout_mask"
    with _lock:
        if not hasattr(torch.ops.lazy_backend, name):
            types = "SymInt[] size, int[]? stride, float p, Device device, Tensor seeds, int seed"
            _library.define(f"{name}({types}) -> Tensor")
            _library.impl(name, _dropout_mask, "CompositeExplicitAutograd")
            torch.library.register_fake(f"lazy_backend::{name}", _empty_mask, lib=_library)
    return torch.ops.lazy_backend.dropout_mask.default  # type: ignore[no-any-return]


def define_operators_for(op: OpOverload) -> None:
    """Define the operators that a compiled graph calls by name in place of `op`, a random op."""
    seeded_op(op)
    if op is aten.native_dropout.default:
        dropout_mask()


def _like(fill: str) -> Callable[..., torch.Tensor]:
    def run(generator: torch.Generator, input: torch.Tensor, *bounds: int, **options: Any) -> torch.Tensor:
        out = torch.empty_like(input, **options)
        if fill == "random_":
            low, high = bounds if len(bounds) == 2 else (0, bounds[0])
            return out.random_(low, high, generator=generator)
        return getattr(out, fill)(generator=generator)  # type: ignore[no-any-return]

    return run


# Random ops whose schema takes no generator, rewritten as calls that take one.
_REWRITTEN: dict[OpOverload, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.rand_like.default: _like("uniform_"),
    aten.randn_like.default: _like("normal_"),
    aten.randint_like.default: _like("random_"),
    aten.randint_like.low_dtype: _like("random_"),
    aten.rand.default: lambda g, *args, **options: torch.rand(*args, generator=g, **options),
    aten.randn.default: lambda g, *args, **options: torch.randn(*args, generator=g, **options),
    aten.randint.default: lambda g, high, size, **options: torch.randint(high, size, generator=g, **options),
    aten.randint.low: lambda g, low, high, size, **options: torch.randint(low, high, size, generator=g, **options),
    aten.randperm.default: lambda g, n, **options: torch.randperm(n, generator=g, **options),
}


def can_seed(op: OpOverload) -> bool:
    """Whether `op` can be made a function of a seed. Other random ops run at once, on the calling thread."""
    return op in _REWRITTEN or takes_generator(op)


# Attention kernels that draw random numbers only for dropout, with the index of the dropout probability. Backwards are
# tagged as well, and draw again what their forward drew.
DROPOUT_PLACES = {
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._flash_attention_forward.default: 7,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_efficient_attention_backward.default: 9,
    aten._scaled_dot_product_cudnn_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention_backward.default: 13,
}


def draws_random_numbers(op: OpOverload, args: Sequence[Any]) -> bool:
    place = DROPOUT_PLACES.get(op)
    if place is not None and (len(args) <= place or (isinstance(args[place], int) and args[place] == 0)):
        return False
    return torch.Tag.nondeterministic_seeded in op.tags


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed for one random op, from `generator` or the one in use. See Note [Random numbers are data]."""
    generator = generator or _source.generator
    if _source.returned:
        _source.returned, seed = _source.returned[:-1], _source.returned[-1]
        return seed
    # reusing a tensor per thread would save 0.3 of 1.0 µs; random ops are few
    seed = int(torch.empty((), dtype=torch.int64, device=_HOST).random_(generator=generator))
    if generator is None:
        return seed
    own = OwnSeed(seed)
    own.generator = generator
    return own


def return_seed(seed: int) -> None:
    """Take back a seed that this thread drew for a call which is about to draw once more."""
    _source.returned = (*_source.returned, seed)


def has_own_generators(seeds: Sequence[int]) -> bool:
    return any(isinstance(seed, OwnSeed) for seed in seeds)


def generators_of(seeds: Sequence[int]) -> tuple[torch.Generator | None, ...]:
    """The generator that each seed was drawn from; None for the default generator."""
    return tuple(seed.generator if isinstance(seed, OwnSeed) else None for seed in seeds)


def without_generator(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments without their generator, for a call that draws from the generator in use instead."""
    kept = {name: value for name, value in kwargs.items() if name != "generator"}
    for place, argument in enumerate(function_schema(op).arguments):
        if argument.name == "generator":
            if not argument.kwarg_only:
                args = (*args[:place], None, *args[place + 1 :]) if len(args) > place + 1 else args[:place]
            elif not argument.has_default_value():
                kept["generator"] = None
    return args, kept


def run_seeded(
    op: OpOverload,
    seeds: Sequence[int] | torch.Tensor,
    place: int,
    device: torch.device,
    args: Any,
    kwargs: Any,
) -> Any:
    """Call `op` with its random numbers drawn from a generator on `device` that has the seed at `place`."""
    generator = _generators.get(device, seeds, place)
    rewritten = _REWRITTEN.get(op)
    if rewritten is not None:
        return rewritten(generator, *args, **kwargs)
    return op(*args, **{**kwargs, "generator": generator})


def seeded_op(op: OpOverload) -> OpOverload:
    """`op` as an operator for a compiled graph: `lazy_backend::<op>(<all arguments by position>, seeds, seed)`."""
    with _lock:
        found = _seeded_ops.get(op)
        if found is None:
            found = _seeded_ops[op] = _define(op)
        return found


def seeded_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of `seeded_op(op)` except the last two: those of `op`, by position, without the generator."""
    return Positional(op, skips="generator").of(args, kwargs)


def _define(op: OpOverload) -> OpOverload:
    own = Positional(op, skips="generator")
    name = function_schema(op).name.split("::")[1] + "_" + overload_name(op)
    _library.define(f"{name}({own.declared}, Tensor seeds, int seed) -> {own.returned}")

    def run(*values: Any) -> Any:
        *given, seeds, seed = values
        args, kwargs = own.bind(given)
        device = next((value.device for value in given if isinstance(value, torch.Tensor)), kwargs.get("device"))
        made = run_seeded(op, seeds, seed, torch.device(device or "cpu"), args, kwargs)
        return None if own.returns_nothing else made

    def fake(*values: Any) -> Any:
        args, kwargs = own.bind(values[:-2])
        if takes_generator(op):  # some schemas have no default for the generator
            kwargs["generator"] = None
        return None if own.returns_nothing else op(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lazy_backend::{name}", fake, lib=_library)
    return getattr(torch.ops.lazy_backend, name).default  # type: ignore[no-any-return]

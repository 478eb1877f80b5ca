"""Random programs of views, writes, reads and gradients over shared storage, as source code.

In: a seed. Out: a `RandomProgram`: statements that run in eager without an error and that any device must run alike.
A program is text, so that one that fails can be printed as a script, and made smaller by leaving statements out.
`random_chains` are about writes through views of views: what a compiler's functional form of them gets wrong.
Excluded from `random_program` is what eager itself leaves open: foreach lists whose members overlap, writes to windows
that overlap themselves or what is written, and numbers whose last bit depends on how a kernel walks through memory
(`tanh`, casts of infinities). And changes of a tensor's shape in place while it has views: autograd rebuilds those of
lazy tensors by replaying them, those of other tensors by `as_strided`; so a program changes the shape of a `detach()`
of its own.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Largest tensor a program keeps.
_MAX_NUMEL, _MAX_DIM = 64, 4

# How often each kind of statement is tried.
_WEIGHTS = {
    "view": 34, "write": 30, "result": 12, "read": 3, "delete": 4, "swap": 3, "gradient": 6, "random": 2, "sync": 20,
}  # fmt: skip

_SCALARS = ("0.5", "2.0", "-1.25", "3", "-1", "True")

_SETUP = (
    "v0 = torch.arange(12.0).reshape(3, 4).to(device, copy=True)",
    "v1 = torch.arange(6.0).to(device, copy=True)",
    "v2 = torch.ones(2, 3, device=device)",
    "v3 = torch.arange(8).reshape(2, 4).to(device, copy=True)",
    "v4 = torch.complex(torch.arange(4.0), -torch.ones(4)).to(device)",
)

_SCRIPT = '''\
"""Random program {seed}: eager and the lazy device must agree."""

import torch

import lazy_backend
from lazy_backend.lowering.ir import rng

lazy_backend.config.{setting}


def program(device, sync):
    torch.manual_seed({seed})
    log = []

    def seeded(op, *args):
        # a random op is a function of a seed, drawn from torch's default generator when it is called
        if args[0].device.type == "lazy":
            return op(*args)
        made = rng.run_seeded(op, [rng.draw_seed()], 0, torch.device("cpu"), args, {{}})
        return made if made is args[0] else made.data

{body}
    kept = [value for name, value in sorted(locals().items()) if isinstance(value, torch.Tensor)]
    return [(t.dtype, t.detach().cpu().tolist(), t.requires_grad, t._version) for t in kept] + log


expected = program("cpu", lambda: None)
for _ in range(3):
    found = program("lazy", lazy_backend.mark_step)
    for one, other in zip(found, expected, strict=True):
        print("" if repr(one) == repr(other) else "DIFFERS ", one, other)
'''


@dataclass(frozen=True)
class RandomProgram:
    """Statements over variables `v0, v1, ...`, the `device`, `sync()`, a `log` of what was read, and `seeded`."""

    seed: int
    statements: tuple[str, ...]

    def run(self, device: str, sync: Callable[[], None]) -> list[Any]:
        """What was read, and of every variable in the end: the tensor, its gradient, its version."""
        torch.manual_seed(self.seed)
        names = _start(device, sync)
        for statement in self.statements:
            exec(statement, names)
        tensors = [_described(t) for t in _tensors(names).values()]
        return tensors + [repr(read) for read in names["log"]]  # as text: NaN is the same as itself

    def without(self, place: int) -> RandomProgram:
        return RandomProgram(self.seed, self.statements[:place] + self.statements[place + 1 :])

    def script(self, backend: str = "interpreted") -> str:
        """The program as a file that runs by itself and prints where the two devices differ."""
        setting = 'compile = "off"' if backend == "interpreted" else f'backend = "{backend}"'
        body = "\n".join(f"    {statement}" for statement in self.statements)
        return _SCRIPT.format(seed=self.seed, setting=setting, body=body)


def random_program(seed: int, num_steps: int = 24) -> RandomProgram:
    """The same program for the same seed."""
    return _Generator(seed).generate(num_steps)


def random_chains(seed: int) -> RandomProgram:
    """Chains of views and writes through them, overlapping and gapped ones too. The same program for the same seed."""
    return _ChainGenerator(seed).generate(random.Random(seed).choice((4, 6, 9, 13)))


def minimize(program: RandomProgram, fails: Callable[[RandomProgram], bool]) -> RandomProgram:
    """Leave out statements, last first, as long as `fails` holds; again until nothing more can be left out."""
    before = None
    while before is not program:
        before = program
        for place in reversed(range(len(program.statements))):
            shorter = program.without(place)
            if fails(shorter):
                program = shorter
    return program


def _start(device: str, sync: Callable[[], None]) -> dict[str, Any]:
    """The names a program starts with."""
    return {"torch": torch, "device": device, "sync": sync, "log": [], "seeded": _seeded}


def _seeded(op: torch._ops.OpOverload, *args: Any) -> Any:
    """A random op, which for the CPU is a function of a seed as well. See Note [Random numbers are data]."""
    # imported late: `--help` of the tool needs no package
    from lazy_backend.lowering.ir import rng

    if args[0].device.type == "lazy":
        return op(*args)
    made = rng.run_seeded(op, [rng.draw_seed()], 0, torch.device("cpu"), args, {})
    return made if made is args[0] else made.data  # a new tensor, but written once: `.data` has version 0


def _tensors(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}


class _Generator:
    """Writes statements one by one, and runs each on the CPU to see what the next may use."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.seed = seed
        self.statements: list[str] = list(_SETUP)
        self.count = len(_SETUP)
        self.names: dict[str, Any] = {}

    def generate(self, num_steps: int) -> RandomProgram:
        self._run_all()
        for _ in range(num_steps):
            (kind,) = self.choose.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
            self._try(getattr(self, f"_{kind}")())
        return RandomProgram(self.seed, tuple(self.statements))

    # ----- statements that fail are dropped, and so are those that warn or make something large

    def _try(self, statement: str) -> None:
        if statement and self._works(statement):
            self.statements.append(statement)
        else:
            self._run_all()  # it may have had half its effect

    def _works(self, statement: str) -> bool:
        always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(statement, self.names)
        except Exception:
            return False
        finally:
            torch.set_warn_always(always)
        return all(t.numel() <= _MAX_NUMEL and t.dim() <= _MAX_DIM for t in _tensors(self.names).values())

    def _run_all(self) -> None:
        torch.manual_seed(self.seed)
        self.names = _start("cpu", lambda: None)
        for place, statement in enumerate(self.statements):
            try:
                exec(statement, self.names)
            except Exception:  # what worked took half an effect of one that was dropped
                del self.statements[place]
                self._run_all()
                return

    # ----- choices

    def _pick(self) -> tuple[str, torch.Tensor]:
        tensors = _tensors(self.names)
        name = self.choose.choice(list(tensors))
        return name, tensors[name]

    def _pick_target(self) -> tuple[str, torch.Tensor]:
        name, x = self._pick()
        while _overlaps_itself(x):
            name, x = self._pick()
        return name, x

    def _apart(self, x: torch.Tensor) -> str:
        """An operand that shares no memory with `x`."""
        name, other = self._pick()
        return name if _place(other) != _place(x) else f"{name}.detach().clone()"

    def _new(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def _one_of(self, *kinds: str) -> str:
        return self.choose.choice(kinds)

    # ----- kinds of statements

    def _view(self) -> str:
        name, x = self._pick()
        return f"{self._new()} = {self._one_of(*self._views(name, x))}"

    def _views(self, x: str, t: torch.Tensor) -> Sequence[str]:
        choose = self.choose
        kinds = [f"{x}.detach()", f"{x}[...]", f"{x}.view_as({x})", f"{x}.unsqueeze({choose.randrange(t.dim() + 1)})"]
        kinds += [f"{x}.squeeze()", f"{x}.real", f"{x}.data", f"{x}.expand(2, *{x}.shape)", f"{x}.view(-1)"]
        if t.is_complex():
            kinds += [f"{x}.conj()", f"{x}.imag", f"torch.view_as_real({x})", f"{x}.conj().imag", f"{x}.mH"]
        elif t.element_size() in (4, 8):
            kinds += [f"{x}.view(torch.int{8 * t.element_size()})", f"{x}.view(torch.float{8 * t.element_size()})"]
        if t.shape and t.shape[-1] == 2 and t.is_floating_point():
            kinds += [f"torch.view_as_complex({x})"]
        if t.dim() and t.numel():
            d, e = choose.randrange(t.dim()), choose.randrange(t.dim())
            size = t.shape[d]
            place, length = choose.randrange(size), 1 + choose.randrange(size)
            order = choose.sample(range(t.dim()), t.dim())
            kinds += [
                f"{x}.transpose({d}, {e})", f"{x}.narrow({d}, 0, {length})", f"{x}.select({d}, {place})",
                f"{x}[{place if d == 0 else ':'}]", f"{x}[{choose.randrange(2)}::2]", f"{x}.permute({order})",
                f"{x}.movedim({d}, {e})", f"{x}.flatten()", f"{x}.unbind({d})[{place}]", f"{x}.chunk(2, {d})[0]",
                f"{x}.split({length}, {d})[-1]", f"{x}.unfold({d}, {length}, 1)", f"{x}.diagonal()", f"{x}.mT",
                f"{x}.unflatten({d}, (-1, {choose.choice((1, 2))}))", self._strided(x, t),
            ]  # fmt: skip
        return kinds

    def _strided(self, x: str, t: torch.Tensor) -> str:
        """Windows into the storage, which may overlap."""
        room = t.untyped_storage().nbytes() // t.element_size()
        shape = [self.choose.choice((1, 2, 3)) for _ in range(self.choose.choice((1, 2)))]
        stride = [self.choose.choice((1, 2, 4)) for _ in shape]
        span = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
        return f"{x}.as_strided({shape}, {stride}, {self.choose.randrange(max(1, room - span + 1))})"

    def _write(self) -> str:
        name, x = self._pick_target()
        s, y, size = self.choose.choice(_SCALARS), self._apart(x), x.shape[0] if x.dim() else 1
        indices = [self.choose.randrange(max(1, size)) for _ in range(2)]
        index = f"torch.tensor({indices}, device=device)"
        own = f"{name} = {name}.detach(); {name}"
        return self._one_of(
            f"{name}.add_({s})", f"{name}.mul_({s})", f"{name}.sub_({y})", f"{name}.add_({y}, alpha=2)",
            f"{name}.copy_({y})", f"{name}.zero_()", f"{name}.fill_({s})", f"{name}.clamp_(-5, 5)", f"{name}.neg_()",
            f"{name}.abs_()", f"{name}.relu_()", f"{name}[...] = {s}", f"{name}[0] = {y}", f"{name}[-1:] += {s}",
            f"{name}.masked_fill_({name} > 1, {s})", f"{name}[{name} > 1] = {s}", f"{name}[{name} == 1] += {s}",
            f"{name}[{name} != 0] = torch.tensor({s}, device=device)", f"{name}.index_add_(0, {index}, {y})",
            f"{name}[{index}] = {s}", f"{name}.index_fill_(0, {index}, {s})", f"{name}.data.add_({s})",
            f"{name}.copy_({name}.flip(0))", f"{name}.add_({name}.detach().clone())", f"{own}.squeeze_()",
            f"torch.mul({y}, {s}, out={name})", f"torch.add({name}, {y}, out={name})", f"{name}.mul_({name})",
            f"{own}.unsqueeze_(0)", f"{own}.transpose_(0, -1)", f"{own}.t_()", f"{name}.data = {name} * 2",
            f"{name}.copy_(torch.where({name} == 0, {y}, {name}))", self._foreach(name, x, s), f"{name}.cumsum_(0)",
            f"{name}.addcmul_({y}, {y}, value=2)", f"{name}.lerp_({y}, 0.5)", f"{name}.bitwise_not_()",
        )  # fmt: skip

    def _foreach(self, name: str, x: torch.Tensor, s: str) -> str:
        other, y = self._pick_target()
        both = f"[{name}, {other}]" if _place(x) != _place(y) else f"[{name}]"
        return self._one_of(
            f"torch._foreach_add_({both}, {s})", f"torch._foreach_mul_({both}, {s})", f"torch._foreach_neg_({both})",
            f"{self._new()} = torch._foreach_add({both}, {s})[0]", f"torch._foreach_zero_({both})",
        )  # fmt: skip

    def _result(self) -> str:
        name, x = self._pick()
        other, _ = self._pick()
        size = x.shape[0] if x.dim() else 1
        index = f"torch.tensor([{self.choose.randrange(max(1, size))}, 0], device=device)"
        cast = self.choose.choice(("float32", "float64", "bfloat16", "complex64"))
        return f"{self._new()} = " + self._one_of(
            f"{name} * 2", f"{name} + {other}", f"{name} - {other}.sum()", f"{name}.clone()", f"{name}.contiguous()",
            f"torch.cat([{name}.reshape(-1), {other}.reshape(-1)])[:6]", f"{name}.reshape(-1)", f"{name}.cumsum(0)",
            f"torch.where({name} == 0, {name}, 0.5)", f"{name}.new_zeros(2, 3)", f"{name}.to(torch.{cast})",
            f"torch.stack([{name}, {name}])", f"torch.stack([{name}, {other}], -1)", f"{name}[{index}]",
            f"({name} > 1)", f"({name} > 1).to(torch.int64)", f"{name}.clamp(-9, 9).to(torch.int32)",
            f"{name}[{name} > 0]", f"torch.zeros_like({name})", f"torch.empty_like({name}).fill_(3)", f"{name}.flip(0)",
            f"{name}.abs()", f"{name}.amax()", f"{name}.resolve_conj()", f"torch.complex({name}, {name})",
            f"{name}.repeat(2)", f"{name}.roll(1)", f"{name}.tril()", f"torch.maximum({name}, {other})", f"-{name}",
            f"{name}.index_select(0, {index})", f"torch.cat([{name}, {other}])", f"{name}.nonzero().contiguous()",
        )  # fmt: skip

    def _read(self) -> str:
        name, _ = self._pick()
        return self._one_of(
            f"log.append({name}.tolist())", f"log.append({name}.sum().item())", f"log.append(bool({name}.any()))",
            f"log.append({name}.cpu().reshape(-1)[:3].tolist())", f"log.append(torch.equal({name}, {name}.clone()))",
        )  # fmt: skip

    def _delete(self) -> str:
        return f"del {self._pick()[0]}" if len(_tensors(self.names)) > 3 else ""

    def _swap(self) -> str:
        (name, _), (other, _) = self._pick(), self._pick()
        own = f"{name} = {name}.detach(); {name}"
        return self._one_of(
            f"{own}.set_({other}.detach())", f"{own}.data = {other}", f"{own}.data = {other}.clone()",
            f"{own}.data = {name}.data[:1]", f"{name}, {other} = {other}, {name}",
        )  # fmt: skip

    def _gradient(self) -> str:
        name, _ = self._pick()
        leaves = [leaf for leaf, t in _tensors(self.names).items() if t.requires_grad and _is_leaf(t)]
        if not leaves or self.choose.random() < 0.4:
            # the second: a result that needs a gradient, for views and writes that autograd follows
            return self._one_of(
                f"{self._new()} = {name}.detach().clone().requires_grad_()",
                f"{self._new()} = {name}.detach().clone().requires_grad_() * 1",
            )
        leaf = self.choose.choice(leaves)
        seed = f"torch.ones_like({name})"
        return self._one_of(
            f"torch.autograd.backward([{name}], [{seed}], retain_graph=True)",
            f"{self._new()} = torch.autograd.grad([{name}], {leaf}, [{seed}], retain_graph=True)[0]",
            f"{self._new()} = torch.autograd.grad([{name}], {leaf}, [{seed}], create_graph=True)[0]",
            f"{leaf}.grad.zero_()", f"{leaf}.grad = None",
        )  # fmt: skip

    def _random(self) -> str:
        name, _ = self._pick_target()
        return self._one_of(
            f"seeded(torch.ops.aten.uniform_.default, {name}, -1.0, 1.0)",
            f"seeded(torch.ops.aten.random_.to, {name}, 9)",
            f"{self._new()} = seeded(torch.ops.aten.rand_like.default, {name}.detach())",
            f"{self._new()} = seeded(torch.ops.aten.bernoulli.p, {name}.detach(), 0.5)",
            f"torch.manual_seed({self.choose.randrange(9)})",
        )

    def _sync(self) -> str:
        return "sync()"


_BASES = (
    "torch.arange(24.0).reshape(4, 6).to(device, copy=True)",
    "torch.arange(24.0).reshape(2, 3, 4).to(device, copy=True)",
    "torch.arange(12.0).to(device, copy=True)",
    "torch.arange(1.0, 5.0).reshape(1, 4).to(device, copy=True)",
    "torch.arange(24.0).reshape(6, 4).to(device, copy=True).t()",
    "torch.arange(24.0).reshape(1, 2, 3, 4).to(device, copy=True).to(memory_format=torch.channels_last)",
    "torch.complex(torch.arange(6.0), -torch.ones(6)).reshape(2, 3).to(device)",
    "torch.arange(24).reshape(4, 6).to(device, copy=True)",
)
_PARTS = ("", " * 1", "[::2]", ".t()", "[:, 1:]", ".transpose(0, -1)", "[..., ::2]", "[1:]")


class _ChainGenerator(_Generator):
    """Few tensors, many views of each, and writes that need not be apart from what they read."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.statements, self.count = [], 0

    def generate(self, num_steps: int) -> RandomProgram:
        self._run_all()
        for _ in range(self.choose.choice((1, 1, 2))):
            self._try(f"{self._new()} = {self._one_of(*_BASES)}{self._one_of(*_PARTS)}")
        self._try(self._one_of("sync()", ""))
        kinds = {"view": 50, "write": 40, "result": 7, "sync": 3}
        for _ in range(num_steps if _tensors(self.names) else 0):
            (kind,) = self.choose.choices(list(kinds), list(kinds.values()))
            self._try(getattr(self, f"_{kind}")())
        return RandomProgram(self.seed, tuple(self.statements))

    def _views(self, x: str, t: torch.Tensor) -> Sequence[str]:
        choose = self.choose
        kinds = [*super()._views(x, t), f"{x}.as_strided({x}.shape, {x}.stride())", f"{x}.view(torch.int16)"]
        kinds += [f"{x}.expand({[2 if size == 1 else size for size in t.shape]})", f"{x}.reshape(-1)"]
        if t.dim() and t.numel():
            d, step = choose.randrange(t.dim()), choose.choice((1, 2, 3))
            e, length = choose.randrange(t.dim()), 1 + choose.randrange(t.shape[d])
            kinds += [
                f"{x}.unfold({d}, {length}, {step})", f"{x}.unfold({d}, {length}, {length})",
                f"{x}.unfold({d}, {min(2, length)}, {step})", f"{x}.diagonal({choose.choice((0, 1, -1))}, {d}, {e})",
                f"{x}[{':, ' * d}{choose.randrange(length)}::{step}]", self._strided(x, t), self._strided(x, t),
            ]  # fmt: skip
        return kinds

    def _strided(self, x: str, t: torch.Tensor) -> str:
        """Any window into the storage: repeated, overlapping, gapped, transposed."""
        room = t.untyped_storage().nbytes() // t.element_size()
        shape = [self.choose.choice((1, 2, 3)) for _ in range(self.choose.choice((1, 2, 2, 3)))]
        stride = [self.choose.choice((0, 1, 2, 3, 4, 6)) for _ in shape]
        span = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
        return f"{x}.as_strided({shape}, {stride}, {self.choose.randrange(max(1, room - span + 1))})"

    def _write(self) -> str:
        (x, _), (y, _), s = self._pick(), self._pick(), self.choose.choice(("2.0", "3", "-1"))
        return self._one_of(
            f"{x}.mul_({s})", f"{x}.add_({s})", f"{x}.zero_()", f"{x}.fill_({s})", f"{x}.copy_({y})", f"{x}.add_({y})",
            f"{x}.neg_()", f"{x}.mul_({y})", f"{x}.copy_({y}.flip(0))", f"{x}.copy_({y}.t())", f"{x}.clamp_(-5, 5)",
            f"torch.mul({y}, {s}, out={x})", f"torch.cumsum({y}, 0, out={x})", f"{x}.cumsum_(0)", f"{x}[0] = {s}",
            f"torch._foreach_add_([{x}, {y}], 1)", f"torch._foreach_mul_([{x}, {y}], [{y}, {x}])", f"{x}.t_()",
            f"torch._foreach_add_([{x}], [{y}])", f"{x}.masked_fill_({y} > 1, {s})", f"{x}.lerp_({y}, 0.5)",
            f"{x}[torch.tensor([0], device=device)] = {s}", f"{x}.sub_({y}.sum())", f"{x}.fill_diagonal_({s})",
            f"{x}.index_add_(0, torch.tensor([0, 0], device=device), {x}[:2].clone())",
        )  # fmt: skip

    def _works(self, statement: str) -> bool:
        # a write through an expanded tensor is deprecated, with a warning, but may not go wrong
        torch.set_warn_always(True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for message in ("An output with one or more elements was resized", "Casting complex values to real"):
                    warnings.filterwarnings("error", message=message)
                exec(statement, self.names)
        except Exception:
            return False
        finally:
            torch.set_warn_always(False)
        return all(t.numel() <= 2 * _MAX_NUMEL and t.dim() <= _MAX_DIM + 1 for t in _tensors(self.names).values())


def _described(t: torch.Tensor) -> list[Any]:
    # strides and offsets of no elements say nothing: torch's fake kernels differ there
    return [t if t.numel() else (t.dtype, t.shape), t.grad if _is_leaf(t) else None, t._version]


def _overlaps_itself(t: torch.Tensor) -> bool:
    """Eager writes such a window element after element, and refuses only the simplest ones."""
    places = torch.arange(t.untyped_storage().nbytes() // t.element_size()).as_strided(t.shape, t.stride())
    return bool(places.numel() > places.unique().numel())


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # autograd refuses this view: its base was written
        return False


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

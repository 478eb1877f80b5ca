"""Which cases there are: every entry of PyTorch's databases, in every variant, dtype and mode.

In: `op_db`, `module_db` and `optim_db` of the installed PyTorch. Out: `Case`s with stable keys, in a stable order.
Nothing here is drawn at random: the same PyTorch gives the same cases on every machine.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

DATABASES = ("op", "module", "optim")
OP_VARIANTS = ("forward", "gradients", "in-place", "out", "errors")
MODULE_VARIANTS = ("train forward", "train gradients", "eval forward", "eval gradients", "errors")
OPTIM_VARIANTS = ("default", "for-loop", "foreach", "fused")
VARIANTS = tuple(dict.fromkeys(OP_VARIANTS + MODULE_VARIANTS + OPTIM_VARIANTS))
MODES = {
    "interpreted": "every sample, interpreted, bit for bit",
    "recorded": "every sample, recorded before it is run, bit for bit",
    "mixed": "a few samples, their operands in float32 and bfloat16, compiled with Inductor's decompositions",
    "twice": "a few samples twice: the second time records and compiles nothing new",
    "aot": "one sample, compiled with aot_eager",
    "inductor": "one sample of one entry in four, of every family, compiled with Inductor",
    "autocast to bfloat16": "every sample, interpreted, bit for bit, in a block of torch.autocast",
    "autocast to float16": "the same with float16",
}
AUTOCAST = {"autocast to bfloat16": torch.bfloat16, "autocast to float16": torch.float16}
NAMESPACES = ("nn.functional.", "linalg.", "masked.", "fft.", "special.", "signal.")
INDUCTOR_SHARE = 4  # one entry in so many is compiled with Inductor, which takes seconds each

FIRST_DTYPE = torch.float32
FURTHER_DTYPES = (torch.complex64, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
FLOATING_DTYPES = (torch.float64, torch.float16, torch.bfloat16)
# beside float32, those that are recorded before they are run: of each class, one that an entry supports
CLASSES_OF_DTYPES = (
    (torch.float16, torch.bfloat16),
    (torch.int64, torch.int32, torch.uint8, torch.bool),
    (torch.complex64, torch.complex128),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to try: an entry of a database in one variant, dtype and mode."""

    database: str
    name: str
    variant: str
    dtype: str
    mode: str

    @property
    def key(self) -> str:
        return "/".join((self.database, self.name, self.variant, self.dtype, self.mode))

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def parse_case(key: str) -> Case:
    """The case of a key, as printed by `--list`. Raises ValueError."""
    parts = key.split("/")
    if len(parts) != 5:
        raise ValueError(
            f"{key!r} names no case\n  expected database/name/variant/dtype/mode, as in "
            "op/add/forward/float32/interpreted; --list prints all of them"
        )
    return Case(*parts)


# ----- the databases


@cache
def operators() -> dict[str, Any]:
    """op_db by full name, but for what no CPU can run (CUDA's fused attention kernels)."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db if op.supported_dtypes("cpu")}


@cache
def modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


@cache
def optimizers() -> dict[str, tuple[Any, Any]]:
    """`"Adam: amsgrad"` -> (entry of optim_db, configuration)."""
    from torch.testing._internal.common_optimizers import optim_db

    found: dict[str, tuple[Any, Any]] = {}
    for info in optim_db:
        for place, config in enumerate(info.optim_inputs_func(device="cpu")):
            name = f"{info.name}: {config.desc.replace('/', ' ') or place}"
            found[f"{name} ({place})" if name in found else name] = (info, config)
    return found


# ----- what is tried of an entry


def list_cases(
    databases: Iterable[str] = DATABASES,
    names: str = "",
    variants: Iterable[str] = VARIANTS,
    modes: Iterable[str] = tuple(MODES),
    every_dtype: bool = False,
) -> list[Case]:
    """All cases that match, with `names` as a regular expression to be found in their entry's name.

    With `every_dtype` there is an interpreted case for each dtype of an operator.
    """
    makers = {"op": lambda: _op_cases(every_dtype), "module": _module_cases, "optim": _optim_cases}
    pattern, wanted_variants, wanted_modes = re.compile(names), set(variants), set(modes)
    return [
        case
        for database in databases
        for case in makers[database]()
        if pattern.search(case.name) and case.variant in wanted_variants and case.mode in wanted_modes
    ]


def _op_cases(every_dtype: bool) -> Iterator[Case]:
    families = ((name, _family(name, op)) for name, op in operators().items())
    chosen = _sample_of_families(families, INDUCTOR_SHARE)
    for name, op in operators().items():
        for variant in _op_variants(op):
            backward = variant == "gradients"
            supported = op.supported_backward_dtypes("cpu") if backward else op.supported_dtypes("cpu")
            dtypes = _op_dtypes(name, supported)
            if every_dtype:
                dtypes += sorted({*map(_dtype_name, supported)} - {*dtypes})
            for dtype in dtypes[:1] if variant == "errors" else dtypes:  # those choose their dtypes themselves
                yield Case("op", name, variant, dtype, "interpreted")
        first = _op_dtypes(name, op.supported_dtypes("cpu"))[0]
        for variant in _op_variants(op):
            if variant != "errors" and (variant != "gradients" or FIRST_DTYPE in op.supported_backward_dtypes("cpu")):
                yield Case("op", name, variant, first, "twice")
        yield Case("op", name, "forward", first, "aot")
        for variant in _op_variants(op):
            backward = variant == "gradients"
            supported = op.supported_backward_dtypes("cpu") if backward else op.supported_dtypes("cpu")
            dtypes = _one_of_each_class(name, supported)
            wide = variant in ("forward", "gradients")
            yield from (Case("op", name, variant, dtype, "recorded") for dtype in (dtypes if wide else dtypes[:1]))
            if wide and FIRST_DTYPE in supported:
                modes = ("mixed", *AUTOCAST)
                yield from (Case("op", name, variant, _dtype_name(FIRST_DTYPE), mode) for mode in modes)
        if name in chosen:
            differentiable = FIRST_DTYPE in op.supported_backward_dtypes("cpu") and op.supports_autograd
            yield Case("op", name, "gradients" if differentiable else "forward", first, "inductor")


def _op_variants(op: Any) -> Iterator[str]:
    yield "forward"
    if op.supports_autograd and op.supported_backward_dtypes("cpu"):
        yield "gradients"
    if op.get_inplace() is not None:
        yield "in-place"
    if op.supports_out:
        yield "out"
    if op.error_inputs_func is not None:
        yield "errors"


def _op_dtypes(name: str, supported: Iterable[torch.dtype]) -> list[str]:
    """float32, if it is supported, and one more, or any two."""
    supported = set(supported)
    further = [dtype for dtype in FURTHER_DTYPES if dtype in supported]
    further += sorted(supported - {FIRST_DTYPE, *further}, key=str)
    chosen = [FIRST_DTYPE] if FIRST_DTYPE in supported else further[:1]
    rest = [dtype for dtype in further if dtype not in chosen]
    if rest:
        common = [dtype for dtype in rest if dtype in FURTHER_DTYPES] or rest
        chosen.append(common[_number(name) % len(common)])
    return [_dtype_name(dtype) for dtype in chosen]


def _one_of_each_class(name: str, supported: Iterable[torch.dtype]) -> list[str]:
    """float32, if it is supported, and one of each class of dtypes, or any one."""
    supported = set(supported)
    classes = [[dtype for dtype in members if dtype in supported] for members in CLASSES_OF_DTYPES]
    chosen = [FIRST_DTYPE] if FIRST_DTYPE in supported else []
    chosen += [members[_number(name) % len(members)] for members in classes if members]
    return [_dtype_name(dtype) for dtype in chosen] or _op_dtypes(name, supported)[:1]


def _sample_of_families(entries: Iterable[tuple[str, tuple[str, str]]], share: int) -> set[str]:
    """Of each family one entry in `share`, at least one: those whose names have the smallest hashes."""
    families: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, family in entries:
        families[family].append(name)
    return {name for names in families.values() for name in sorted(names, key=_number)[: -(-len(names) // share)]}


def _family(name: str, op: Any) -> tuple[str, str]:
    """Kind of entry (unary, reduction, ...) and namespace."""
    namespace = name.rpartition(".")[0] if name.startswith(NAMESPACES) else ""
    return type(op).__name__, namespace


def _module_cases() -> Iterator[Case]:
    chosen = _sample_of_families(((name, ("module", name[:4])) for name in modules()), INDUCTOR_SHARE)
    for name, info in modules().items():
        supported = [dtype for dtype in info.dtypes if dtype is not FIRST_DTYPE]
        further = sorted(supported, key=str)[_number(name) % len(supported)] if supported else FIRST_DTYPE
        for variant in MODULE_VARIANTS:
            if variant == "errors" and info.module_error_inputs_func is None:
                continue
            for dtype in dict.fromkeys((FIRST_DTYPE, FIRST_DTYPE if variant == "errors" else further)):
                yield Case("module", name, variant, _dtype_name(dtype), "interpreted")
            if variant != "errors":
                yield Case("module", name, variant, _dtype_name(FIRST_DTYPE), "twice")
        yield Case("module", name, "train gradients", _dtype_name(FIRST_DTYPE), "aot")
        for variant in ("train gradients", "eval forward"):
            yield from (Case("module", name, variant, _dtype_name(FIRST_DTYPE), mode) for mode in AUTOCAST)
        if name in chosen:
            yield Case("module", name, "train gradients", _dtype_name(FIRST_DTYPE), "inductor")


def _optim_cases() -> Iterator[Case]:
    compiled: set[str] = set()
    for name, (info, _config) in optimizers().items():
        choices = [*FLOATING_DTYPES[::2], *([torch.complex64] if info.supports_complex else [])]
        further = choices[_number(name) % len(choices)]
        for variant in _optim_variants(info):
            for dtype in (FIRST_DTYPE, further):
                yield Case("optim", name, variant, _dtype_name(dtype), "interpreted")
        yield Case("optim", name, "default", _dtype_name(FIRST_DTYPE), "twice")
        if info.name not in compiled:
            compiled.add(info.name)
            yield Case("optim", name, "default", _dtype_name(FIRST_DTYPE), "aot")
            yield Case("optim", name, "default", _dtype_name(FIRST_DTYPE), "inductor")


def _optim_variants(info: Any) -> list[str]:
    variants = ["default"]
    if "foreach" in info.supported_impls:
        variants += ["for-loop", "foreach"]
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        variants.append("fused")
    return variants


def baseline_of(cases: Iterable[Case]) -> list[Case]:
    """The cases that LTC is measured on: what float32 does, interpreted (its only mode)."""
    plain = (case for case in cases if case.mode == "interpreted" and case.dtype == "float32")
    return [case for case in plain if case.variant != "errors"]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number(name: str) -> int:
    """A number that is the same in every process, unlike `hash`."""
    return zlib.crc32(name.encode())

"""PyTorch's own databases of operators, modules and optimizers in eager, with the package installed and without.

    python tools/eager_suites.py
    python tools/eager_suites.py --sample 200 --lazy-first

In: flags. Out: counts of cases that were compared, are equal and differ, with the names of those that differ; exit
status 1 if any does. Two processes run the same cases: one did not load the entry point, one did. With `--lazy-first`
the latter also trained on the lazy device before. A case is equal if its results are, bit for bit, and its warnings,
with their lines. The databases are what the wheel has of PyTorch's tests; autograd, autocast, Dynamo and Inductor are
tried by a selection of public behaviour here and by the programs of tests/ground.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.checkout import ROOT
from shared.command_line import names_among

sys.path.insert(0, str(ROOT / "tests" / "ground"))

Case = Callable[[], Any]
Found = dict[str, dict[str, Any]]

INPUTS = 4  # of an operator or module, evenly spread over all that the database has
COMPILED = 12  # operators that Dynamo traces, each of which takes some tenths of a second
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|/tmp/[^ '\"]*")

# Results that depend on memory that nobody wrote, or on the clock.
_UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided", "resize_")


def _spread(values: Sequence[Any], count: int) -> list[Any]:
    """So many of the values, evenly spread; all for 0."""
    if not count or len(values) <= count:
        return list(values)
    return [values[number * len(values) // count] for number in range(count)]


# ----- suites: from a number of entries to named cases


def operator_cases(sample: int) -> Iterator[tuple[str, Case]]:
    """Forward, gradients, autocast and refused inputs of entries of `op_db`; some of them traced by Dynamo."""
    from torch.testing._internal.common_methods_invocations import op_db

    entries = [entry for entry in _spread(op_db, sample) if entry.name.split(".")[-1] not in _UNDEFINED]
    for entry in entries:
        name = f"operator {entry.full_name}"
        yield f"{name}, forward", functools.partial(_forward, entry)
        yield f"{name}, gradients", functools.partial(_gradients, entry)
        yield f"{name}, autocast", functools.partial(_autocast, entry)
        yield f"{name}, refused", functools.partial(_refused, entry)
    for entry in _spread(entries, COMPILED):
        yield f"operator {entry.full_name}, traced", functools.partial(_traced, entry)


def _inputs(entry: Any, differentiable: bool = False) -> list[Any]:
    import torch

    dtype = torch.float32 if torch.float32 in entry.dtypes else sorted(entry.dtypes, key=str)[0]
    return _spread(list(entry.sample_inputs("cpu", dtype, requires_grad=differentiable)), INPUTS)


def _forward(entry: Any) -> Any:
    return [_outcome(lambda: entry(one.input, *one.args, **one.kwargs)) for one in _inputs(entry)]  # noqa: B023


def _gradients(entry: Any) -> Any:
    if not entry.supports_autograd:
        return None
    return [_outcome(lambda: _backward(entry, one)) for one in _inputs(entry, True)]  # noqa: B023


def _backward(entry: Any, one: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves

    found = one.output_process_fn_grad(entry(one.input, *one.args, **one.kwargs))
    tensors = [leaf for leaf in tree_leaves((one.input, one.args, one.kwargs)) if isinstance(leaf, torch.Tensor)]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not wanted or not results:
        return None
    total = sum((result.abs() if result.is_complex() else result).float().sum() for result in results)
    return torch.autograd.grad(total, wanted, allow_unused=True)


def _autocast(entry: Any) -> Any:
    import torch

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _forward(entry)


def _refused(entry: Any) -> Any:
    if entry.error_inputs_func is None:
        return None
    found = [error.sample_input for error in entry.error_inputs("cpu")]
    return [_outcome(lambda: entry(one.input, *one.args, **one.kwargs)) for one in found[:INPUTS]]  # noqa: B023


def _traced(entry: Any) -> Any:
    import torch

    torch._dynamo.reset()
    one = _inputs(entry)[0]
    call = torch.compile(lambda *args, **kwargs: entry.op(*args, **kwargs), backend="aot_eager")
    return _outcome(lambda: call(one.input, *one.args, **one.kwargs))


def module_cases(sample: int) -> Iterator[tuple[str, Case]]:
    """Forward, gradients and state of entries of `module_db`, while training and not."""
    from torch.testing._internal.common_modules import module_db

    for entry in _spread(module_db, sample and sample // 2):
        for training in (True, False):
            mode = "training" if training else "evaluation"
            yield f"module {entry.name}, {mode}", functools.partial(_module, entry, training)


def _module(entry: Any, training: bool) -> Any:
    import torch

    given = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": training}
    inputs = [one for one in entry.module_inputs_func(entry, **given) if one.forward_input is not None]
    return [_outcome(lambda: _module_step(entry, one, training)) for one in _spread(inputs, INPUTS)]  # noqa: B023


def _module_step(entry: Any, one: Any, training: bool) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves

    module = entry.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).train(training)
    found = module(*one.forward_input.args, **one.forward_input.kwargs)
    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if leaves:
        sum(leaf.float().sum() for leaf in leaves).backward()  # type: ignore[union-attr]
    return found, [parameter.grad for parameter in module.parameters()], module.state_dict()


def optimizer_cases(sample: int) -> Iterator[tuple[str, Case]]:
    """Three steps of every entry of `optim_db`, with each of its options and implementations."""
    from torch.testing._internal.common_optimizers import optim_db

    for entry in optim_db:
        for implementation in ("", *entry.supported_impls):
            name = f"optimizer {entry.optim_cls.__name__}, {implementation or 'default'}"
            yield name, functools.partial(_optimizer, entry, implementation)


def _optimizer(entry: Any, implementation: str) -> Any:
    flags = {implementation: True} if implementation in ("foreach", "fused", "capturable", "differentiable") else {}
    found = []
    for one in entry.optim_inputs_func(device="cpu"):
        found.append((one.desc, _outcome(lambda: _optimizer_steps(entry, {**one.kwargs, **flags}))))  # noqa: B023
    return found


def _optimizer_steps(entry: Any, options: dict[str, Any]) -> Any:
    import torch

    parameters = [torch.nn.Parameter(torch.randn(size)) for size in ((3, 4), (4, 2))]
    if options.get("differentiable"):
        parameters = [parameter.clone() for parameter in parameters]  # which may be changed, as no leaf may
    is_sparse = entry.only_supports_sparse_grads
    optimizer = entry.optim_cls(parameters, **options)

    def closure() -> Any:
        for parameter in parameters:
            parameter.retain_grad()
            gradient = torch.cos(parameter.detach())
            parameter.grad = gradient.to_sparse() if is_sparse else gradient
        return parameters[0].detach().sum()

    for _ in range(3):
        optimizer.step(closure)
    return [parameter.detach() for parameter in parameters], optimizer.state_dict()


def own_cases(sample: int) -> Iterator[tuple[str, Case]]:
    """Public behaviour of autograd, autocast, Dynamo and Inductor, and the programs of tests/ground."""
    import eager_programs

    for name, program in eager_programs.programs.items():
        yield f"program {name}", program
    for name, case in _selection().items():
        yield f"own {name}", functools.partial(_outcome, case)


def _selection() -> dict[str, Case]:
    import torch
    from torch.autograd import forward_ad, gradcheck, gradgradcheck

    def higher_order() -> Any:
        x = torch.randn(4, requires_grad=True)
        first = torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]
        return first, torch.autograd.grad(first.sum(), x), torch.autograd.functional.hessian(lambda y: (y**3).sum(), x)

    def forward_mode() -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.randn(3), torch.ones(3))
            return forward_ad.unpack_dual(torch.sin(dual) * 2).tangent

    def checked() -> Any:
        x = torch.randn(3, dtype=torch.float64, requires_grad=True)
        return gradcheck(torch.tanh, (x,)), gradgradcheck(torch.sigmoid, (x,))

    def graph_of_hooks() -> Any:
        x = torch.randn(3, requires_grad=True)
        y, seen = x * 2, []
        y.register_hook(lambda grad: seen.append(grad.clone()))
        torch.autograd.graph.register_multi_grad_hook([x], lambda grads: seen.append(grads[0]))
        y.retain_grad()
        y.sum().backward(retain_graph=True)
        return seen, y.grad, x.grad, y.grad_fn.name(), [str(one) for one in y.grad_fn.next_functions[0][:0]]

    def dtypes_under_autocast() -> Any:
        x, found = torch.randn(4, 4), []
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                calls = (torch.mm, torch.add, torch.cdist, torch.linalg.multi_dot, torch.nn.functional.linear)
                found += [_outcome(lambda: call([x, x]) if "multi" in call.__name__ else call(x, x)) for call in calls]  # noqa: B023
                found.append(torch.nn.functional.binary_cross_entropy_with_logits(x, x.sigmoid()))
        return found

    return {
        "higher order": higher_order,
        "forward mode": forward_mode,
        "gradcheck": checked,
        "hooks": graph_of_hooks,
        "autocast": dtypes_under_autocast,
        **_compiled_selection(),
    }


def _compiled_selection() -> dict[str, Case]:
    import torch

    def norm(x: Any) -> Any:
        return torch.nn.functional.layer_norm(x @ x.t(), (8,)).relu()

    def branch(x: Any) -> Any:
        y = x.sin()
        print(end="")  # breaks the graph
        return y + 1 if y.sum() > 0 else y - 1

    def mixed(x: Any) -> Any:
        with torch.autocast("cpu"):
            return x @ x + torch.norm(x)

    def compiled(function: Callable[[Any], Any], backend: str) -> Case:
        def run() -> Any:
            torch._dynamo.reset()
            x = torch.randn(8, 8, requires_grad=True)
            y = torch.compile(function, backend=backend)(x)
            y.float().sum().backward()
            return y, x.grad

        return run

    functions = {"a norm": norm, "a branch": branch, "autocast": mixed}
    traced = {
        f"{name}, {way}": compiled(call, way) for name, call in functions.items() for way in ("eager", "aot_eager")
    }
    return {**traced, "a norm, inductor": compiled(norm, "inductor"), "autocast, inductor": compiled(mixed, "inductor")}


SUITES: dict[str, Callable[[int], Iterator[tuple[str, Case]]]] = {
    "own": own_cases,  # first: its programs fork
    "operators": operator_cases,
    "modules": module_cases,
    "optimizers": optimizer_cases,
}


# ----- one process


def _outcome(case: Case) -> Any:
    """The case's result, or the error that it raises."""
    try:
        return case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _digest(value: Any) -> str:
    """Of a result's text as the observer of tests/ground encodes it: bit for bit."""
    from observe import encode

    text = _ADDRESS.sub("...", json.dumps(encode(value)))
    return f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()} {text[:160]}"


def _seeded(case: Case) -> str:
    import numpy
    import torch

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    return _digest(_outcome(case))


def _observed(case: Case) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = _seeded(case)
    seen = [f"{one.category.__name__} {Path(one.filename).name}:{one.lineno} {one.message}" for one in caught]
    return {"result": result, "warnings": [_ADDRESS.sub("...", line) for line in seen]}


def run_suites(suites: Sequence[str], sample: int, out: Path, is_lazy_first: bool) -> None:
    """Run all cases in this process and write down what they gave."""
    from observe import train_on_the_lazy_device

    if is_lazy_first:
        train_on_the_lazy_device()
    found: Found = {}
    for suite in suites:
        for number, (name, case) in enumerate(SUITES[suite](sample)):
            key = name if name not in found else f"{name}, {number}"
            with contextlib.redirect_stdout(None):
                found[key] = _observed(case)
            if number % 100 == 0:
                print(f"eager_suites: {name}", file=sys.stderr, flush=True)
    out.write_text(json.dumps({"found": found, "imported": "lazy_backend" in sys.modules}))


# ----- both processes


def _start(kind: str, arguments: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    own = folder / kind
    own.mkdir()
    variables = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0" if kind == "without" else "1",
        "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
        "LAZY_BACKEND_CACHE_DIR": str(own / "lazy"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    suites = [name for name in SUITES if name in arguments.suites]
    command = [sys.executable, __file__, "--suites", ",".join(suites), "--sample", str(arguments.sample)]
    command += ["--out", str(own / "found.json")]
    command += ["--lazy-first"] if arguments.lazy_first and kind == "installed" else []
    log = (own / "log").open("w")
    return subprocess.Popen(command, env=variables, stdout=log, stderr=log, text=True)


def compare(without: Found, installed: Found) -> dict[str, str]:
    """How the cases that differ do."""
    different = {}
    for name in without.keys() | installed.keys():
        own, other = without.get(name), installed.get(name)
        if own is None or other is None:
            different[name] = "was run in one process only"
        elif own["result"] != other["result"]:
            different[name] = f"results:\n    {own['result']}\n    {other['result']}"
        elif own["warnings"] != other["warnings"]:
            lost = [line for line in own["warnings"] if line not in other["warnings"]]
            new = [line for line in other["warnings"] if line not in own["warnings"]]
            different[name] = f"warnings: only without {lost[:2]}, only installed {new[:2]}"
    return different


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="so many operators, evenly spread (default: all)")
    parser.add_argument("--suites", type=names_among(SUITES), default=list(SUITES), help=", ".join(SUITES))
    parser.add_argument("--lazy-first", action="store_true", help="train on the lazy device before")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.out is not None:
        run_suites(arguments.suites, arguments.sample, arguments.out, arguments.lazy_first)
        return 0
    with tempfile.TemporaryDirectory(prefix="eager_suites-") as name:
        folder = Path(name)
        running = {kind: _start(kind, arguments, folder) for kind in ("without", "installed")}
        for kind, process in running.items():
            if process.wait():
                print(f"{kind}: the process ended with status {process.returncode}", file=sys.stderr)
                print((folder / kind / "log").read_text()[-3000:], file=sys.stderr)
                return 1
        seen = {kind: json.loads((folder / kind / "found.json").read_text()) for kind in running}
    without, installed = seen["without"]["found"], seen["installed"]["found"]
    different = compare(without, installed)
    for name, how in sorted(different.items()):
        print(f"{name}: {how}")
    print(f"compared {len(without)}, equal {len(without) - len(different)}, different {len(different)}")
    if seen["installed"]["imported"] and not arguments.lazy_first:
        print("the package was imported, by programs that do not use it")
        return 1
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())

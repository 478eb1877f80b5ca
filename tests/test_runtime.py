"""The table of all state that a process has once: whole, true, and made fresh by a reset."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lazy_backend
from lazy_backend import config
from lazy_backend.compat import runtime, torch_lazy
from lazy_backend.compat.runtime import PARTS, Life
from lazy_backend.execution import disk_cache
from lazy_backend.execution.step_ends import step_ends

ROOT = Path(__file__).resolve().parent.parent
DECLARED = {(part.module, name) for part in PARTS for name in part.names}

# What makes values that nothing can change, or that only the dispatcher, a lock's holders or `logging` do.
IMMUTABLE = {
    *("TypeVar", "ParamSpec", "Struct", "attrgetter", "timedelta", "nullcontext", "frozenset", "tuple", "compile"),
    *(
        "map",
        "cast",
        "device",
        "DispatchKeySet",
        "_Tensor",
        "Token",
        "float",
        "min",
        "abspath",
        "bool",
    ),
    *(
        "dirname",
        "process_lock",
        "Lock",
        "raw_repr",
        "getLogger",
        "getattr",
        "_count_of_a_grad",
        "_count_of_a_listed_one",
    ),
    # PyTorch's own objects under public names, and ports, which the table has as `ports`
    *("optional", "methodcaller", "Port", "partial", "plain_apply", "included_keys", "excluded_keys"),
}
WRITING = {
    *("append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "discard", "remove"),
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder, prefix in (("lazy_backend", ""), ("lowering", "lowering."), ("cache", "cache.")):
        for file in sorted((ROOT / folder).rglob("*.py")):
            place = ".".join(file.relative_to(ROOT / folder).with_suffix("").parts)
            yield (prefix + place).removesuffix("__init__").removesuffix("."), ast.parse(file.read_text())


def written(module: str, tree: ast.Module) -> set[tuple[str, str]]:
    """What some statement of the module changes in place, or replaces from within a function: (module, name)."""
    imported = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lazy_backend"):
            source = (node.module or "").removeprefix("lazy_backend").removeprefix(".")
            imported |= {one.asname or one.name: (source, one.name) for one in node.names}
    found = {(module, name) for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in ast.walk(tree):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            changed = [one.value for one in node.targets if isinstance(one, ast.Subscript)]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            changed = [node.target.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITING:
            changed = [node.func.value]
        found |= {imported.get(one.id, (module, one.id)) for one in changed if isinstance(one, ast.Name)}
    return found


def is_changeable(value: ast.expr) -> bool:
    """Whether an object can change: not a literal of something fixed, nor what is known to make such things."""
    if isinstance(value, ast.Call):
        function = value.func
        while isinstance(function, ast.Subscript):
            function = function.value
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        return name not in IMMUTABLE
    return False


def is_remembering(node: ast.AST) -> bool:
    """Whether a function keeps its results."""
    decorators = [ast.unparse(one) for one in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
    return any("cache" in text and "cached_property" not in text for text in decorators)


def found_state() -> set[tuple[str, str]]:
    """Objects at module level that something changes, or whose class suggests it, and functions with a memory."""
    trees = dict(modules())
    changed = {place for module, tree in trees.items() for place in written(module, tree)}
    found = set()
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {(module, n.id) for one in targets for n in ast.walk(one) if isinstance(n, ast.Name)}
                found |= names if is_changeable(node.value) else names & changed
        found |= {(module, node.name) for node in ast.walk(tree) if is_remembering(node)}  # type: ignore[attr-defined]
    return found


def test_all_state_is_declared_and_all_that_is_declared_is_state() -> None:
    found = found_state()
    assert sorted(found - DECLARED) == [], "list it in compat/runtime.py, and say how long it lives"
    assert sorted(DECLARED - found) == [], "nothing changes it any more"


def test_nothing_is_declared_twice() -> None:
    assert sum(len(part.names) for part in PARTS) == len(DECLARED)


def test_what_a_reset_makes_fresh_says_how() -> None:
    resettable = {Life.RUN, Life.DEVICES}
    assert [part for part in PARTS if (part.reset is not None) != (part.life in resettable)] == []


# ----- a fresh runtime

AT_IMPORT = """
import json
import lazy_backend
from lazy_backend.compat import runtime
print(json.dumps(runtime.describe(), default=str))
"""


def fresh_parts() -> dict[str, dict[str, object]]:
    """What a reset makes fresh, as `describe` shows it now."""
    names = {f"{part.module}.{name}" for part in PARTS if part.reset is not None for name in part.names}
    shown = json.loads(json.dumps(runtime.describe(), default=str))
    return {name: values for name, values in shown.items() if name in names}


def use_everything(folder: Path) -> object:
    """Train, capture, serve, read, warn, communicate: whatever leaves something behind. Returns what must live on."""
    config.cache, config.cache_dir = True, str(folder)
    device = torch.device("lazy")
    network = torch.nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    @lazy_backend.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = network(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for size in (2, 3, 2, 2, 2):
        step(torch.ones(size, 4).to(device))
        lazy_backend.mark_step()
    served = lazy_backend.serve(torch.nn.Linear(4, 4), torch.ones(2, 4))
    served(torch.ones(3, 4))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.distributed.all_reduce(torch.ones(2, device=device))
        lazy_backend.mark_step(wait=True)
    finally:
        torch.distributed.destroy_process_group()
    config.debug, config.debug_file = 1, str(folder / "missing" / "file")
    y = torch.ones(3, device=device) * torch.tensor(2.0, dtype=torch.float64)
    torch_lazy._get_graph_hash([y])
    y.sum().item()
    config.debug = 0
    step_ends.follow(optimizer)
    lazy_backend.add_step_closure(print)
    disk_cache.expect_hits()
    lazy_backend.metrics.counter_names()  # adds up what was counted
    return optimizer


# What `use_everything` leaves as it is: what takes a compiler, a damaged cache or an error, and what is there only
# within a run or after a reset of counters.
UNUSED = {
    *(
        f"execution.disk_cache.{name}"
        for name in ("_was_told_of_rejection", "untold_failures", "asked", "loaded_entries")
    ),
    *("execution.disk_cache._earlier", "execution.disk_cache._before", "tensors.outside._counted_before"),
    *("lowering.interpreter.task._current", "lowering.plans.repair.known", "metrics._events"),
}


def test_a_fresh_runtime_sees_nothing_of_the_old_one(tmp_path: Path) -> None:
    shown = subprocess.run([sys.executable, "-c", AT_IMPORT], capture_output=True, text=True, check=True, cwd=ROOT)
    at_import = json.loads(shown.stdout)
    kept = use_everything(tmp_path)
    unused = {name for name, values in fresh_parts().items() if values == at_import[name]}
    assert unused == UNUSED
    runtime.reset(devices=True)
    after = fresh_parts()
    del kept
    assert {name: values for name, values in after.items() if values != at_import[name]} == {}
    assert (torch.ones(2, device="lazy") + 1).tolist() == [2.0, 2.0]


def test_a_reset_keeps_devices_and_their_tensors() -> None:
    x = torch.ones(2, device="lazy") * 3
    runtime.reset()
    assert x.tolist() == [3.0, 3.0]


def test_a_report_shows_what_there_is() -> None:
    (torch.ones(2, device="lazy") + 1).tolist()
    text = lazy_backend.debug.dump_runtime()
    assert "execution.sync.executor: computations, families of shapes" in text
    assert "    computations.cache._entries = 1\n" in text
    assert "tensors.contexts.contexts: devices" in text


# ----- forks

FORK = """
import importlib, operator, os, signal, sys, threading
import torch
import lazy_backend

lazy_backend.config.compile = "off"
module, _, path = sys.argv[1].partition(":")
table = operator.attrgetter(path)(importlib.import_module(module))
(torch.ones(2, device="lazy") + torch.tensor(1.5)).tolist()
held, over = threading.Event(), threading.Event()

def hold():
    with table._lock:
        held.set()
        over.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    answers = [(torch.ones(7, device="lazy") + torch.tensor(2.5)).tolist() for _ in range(3)]
    os._exit(0 if answers == [[3.5] * 7] * 3 else 1)
over.set()
thread.join()
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(
    "table",
    [
        "lazy_backend.lowering.ir.graph:_metas",
        "lazy_backend.tensors.outside:data_cache",
        "lazy_backend.execution.sync:executor.computations.cache",
        "lazy_backend.execution.sync:executor.computations._forms",
    ],
)
def test_a_lock_that_another_thread_held_at_a_fork_is_free_in_the_child(table: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, table], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

"""Ports: no other room names what is private in PyTorch or CPython, and a port that does not fit is off."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_python

from lazy_backend.ports import port as port_module
from lazy_backend.ports import table
from lazy_backend.ports.cpython import UNHELD, counts_of, has_only_a_dict, leave_interrupted_blocks, young_objects
from lazy_backend.ports.port import (
    VARIABLE,
    DoesNotFit,
    KnownSource,
    Name,
    Port,
    PortWarning,
    Probe,
    optional,
    ports,
    reach,
    renew_imported_names,
    replaced,
    source_hash,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import structure  # noqa: E402

MODULES = {name: file for name, file in structure.modules().items() if not name.startswith("lazy_backend.ports")}

# Private attributes of PyTorch's and Python's objects, which cannot be told from ours by the way to them.
ATTRIBUTES = frozenset(
    """
    _schema _opname _overloadname _overloadpacket _op_dk _can_decompose _op _handle
    _version _base _is_view _use_count _cdata _untyped_storage _backward_hooks _post_accumulate_grad_hooks
    _make_subclass _make_wrapper_subclass _coalesced_ _indices _values _write_file _set_from_file _share_fd_cpu_
    _share_filename_cpu_ _new_with_weak_ptr
    _buffers _parameters _modules _call_impl _compiled_call_impl _apply _forward_hooks _forward_pre_hooks
    _backward_pre_hooks _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
    _load_state_dict_post_hooks _non_persistent_buffers_set _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks_with_kwargs
    _optimizer_step_pre_hooks _optimizer_step_post_hooks _optimizer_state_dict_pre_hooks
    _optimizer_state_dict_post_hooks _optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks
    _global_forward_hooks _global_forward_pre_hooks _global_backward_hooks _global_backward_pre_hooks
    _global_optimizer_pre_hooks _global_optimizer_post_hooks _wrapped_by_lr_sched _update_param_group_val
    _maybe_opt_step _maybe_set_eval_frame _engine_run_backward _execution_engine _is_profiler_enabled
    _get_backend _device_types _resolve_process_group _allgather_base _reduce_scatter_base
    _compute_bucket_assignment_by_size _check_p2p_op_list
    _BoxedCodeGen _wrap_compiled_regions _opoverload _reduce_ex_internal _get_memo
    _getframe _current_frames _is_owned __basicsize__ __dictoffset__
    """.split()  # noqa: SIM905  # a word each
)
# Classes and slots of ours have attributes of these names too.
_ALSO_OURS = frozenset(("_op", "_values", "_indices", "_handle"))


class Room:
    """One module of ours: what it names of PyTorch."""

    def __init__(self, file: Path) -> None:
        self.tree = ast.parse(file.read_text())
        self.torch_names = dict(self._torch_names())
        self.operators = {
            target.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops")
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    @functools.cached_property
    def own(self) -> set[str]:
        """The attributes that classes of this module set."""
        return {
            node.attr
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        }

    def _torch_names(self) -> Iterator[tuple[str, str]]:
        """The names that imports bind to what is PyTorch's, each with its path."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == "torch":
                        yield alias.asname or "torch", alias.name if alias.asname else "torch"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    def imported(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "torch")
        yield from self.torch_names.values()

    def path_of(self, node: ast.AST) -> str | None:
        """The dotted path of `torch.a.b`, or of `name.a.b` where `name` is imported from PyTorch."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.torch_names:
            return None
        return ".".join((self.torch_names[node.id], *reversed(parts)))

    def private_names(self) -> Iterator[str]:
        yield from filter(is_private, self.imported())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                path = self.path_of(node)
                if path is not None and is_private(path):
                    yield path
                elif path is None and node.attr in ATTRIBUTES and not self._is_ours(node):
                    yield ast.unparse(node)
            elif isinstance(node, ast.Constant) and node.value in ATTRIBUTES - _ALSO_OURS:
                yield repr(node.value)

    def _is_ours(self, node: ast.Attribute) -> bool:
        root = ast.unparse(node.value).partition(".")[0]
        is_of_self = ast.unparse(node.value) in ("self", "cls")
        return root in self.operators or (is_of_self and (node.attr in _ALSO_OURS or node.attr in self.own))

    def replacements(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                if self.path_of(node) is not None:
                    yield ast.unparse(node)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                found = self.path_of(node.args[0])
                yield from [] if found is None else [ast.unparse(node)]


def is_private(path: str) -> bool:
    parts = path.split(".")
    # operators by name are data of the registry; torch._lazy is an interface that users call
    if parts[:2] in (["torch", "ops"], ["torch", "_lazy"]):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


ROOMS = {name: Room(file) for name, file in MODULES.items()}


@pytest.mark.parametrize("name", ROOMS)
def test_no_other_room_names_what_is_private(name: str) -> None:
    assert sorted(set(ROOMS[name].private_names())) == []


@pytest.mark.parametrize("name", ROOMS)
def test_no_other_room_replaces_anything_in_pytorch(name: str) -> None:
    assert sorted(set(ROOMS[name].replacements())) == []


@pytest.mark.parametrize("name", ROOMS)
def test_no_reference_count_is_compared_with_a_number(name: str) -> None:
    """It would hold on one version of Python: see `counts_of`."""
    for node in ast.walk(ROOMS[name].tree):
        if isinstance(node, ast.Compare | ast.BinOp) and "getrefcount" in ast.unparse(node):
            assert not re.search(r"getrefcount\([^()]*\) *(?:[<>=!]=?|[-+]) *\d", ast.unparse(node)), ast.unparse(node)


def test_the_test_sees_what_it_is_for(tmp_path: Path) -> None:
    file = tmp_path / "room.py"
    file.write_text(
        "import torch\nfrom torch.nn import functional as F\nfrom torch._utils import a\nimport torch._dynamo\n"
        "aten = torch.ops.aten\n"
        "def f(op, x):\n"
        "    torch._C.g(); F._h(); op._schema.name; aten._to_copy(x); torch.ops.aten._to_copy(x); x.data._version\n"
        "    getattr(x, '_base'); self._schema\n"
        "    F.relu = f; torch.nn.Module.call = f; setattr(torch, 'g', f); x.torch = f\n"
    )
    room = Room(file)
    assert sorted(set(room.private_names())) == [
        "'_base'", "op._schema", "self._schema", "torch._C", "torch._C.g", "torch._dynamo", "torch._utils.a",
        "torch.nn.functional._h", "x.data._version",
    ]  # fmt: skip
    assert sorted(room.replacements()) == ["F.relu", "setattr(torch, 'g', f)", "torch.nn.Module.call"]


# ----- port.py


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ports and replacements of a test are not the package's."""
    monkeypatch.setattr(port_module, "ports", {})
    before = list(replaced)
    yield
    replaced[:] = before


def made(*expects: Any, **options: Any) -> Port:
    return Port("a feature", *expects, without="it is slower", **options)


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """Stands for a module of PyTorch."""
    found = types.ModuleType("a_library")
    exec("def scale(x, factor=2):\n    return x * factor\n\nclass Kind:\n    def go(self, way): pass\n", vars(found))
    sys.modules[found.__name__] = found
    try:
        yield found
    finally:
        del sys.modules[found.__name__]


def test_a_port_whose_expectations_are_met_fits(library: types.ModuleType) -> None:
    one = made(
        "a_library.scale(x, factor)",
        "a_library.Kind.go(self)",
        "torch.Tensor._version",
        "torch._C._set_conj(anything)",  # a function of C++, which says nothing of its parameters
        Probe("two is twice one", lambda: library.scale(1) == 2),
    )
    assert one.state == "not used yet"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.fits()
    assert one.obstacle() is None
    assert one.state == "fits"
    assert str(one) == f"a feature: fits PyTorch {torch.__version__}"


@pytest.mark.parametrize(
    ("expected", "obstacle"),
    [
        ("a_library.shrink", "there is no a_library.shrink"),
        ("a_library.Kind.stop.name", "there is no a_library.Kind.stop"),
        ("torch._no_such_module.name", "there is no torch._no_such_module"),
        ("no_library.name", "ModuleNotFoundError: No module named 'no_library'"),
        ("a_library.scale(factor)", "a_library.scale takes (x, factor), expected (factor)"),
        ("a_library.scale(x, factor, more)", "a_library.scale takes (x, factor), expected (x, factor, more)"),
        (Probe("one is two", lambda: False), "expected: one is two"),
        (Probe("one over none", lambda: bool(1 / 0)), "ZeroDivisionError: division by zero"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("library")
def test_a_port_is_off_where_an_expectation_is_not_met(expected: Any, obstacle: str) -> None:
    one = made("torch.Tensor", expected)
    with pytest.warns(PortWarning):
        assert not one.fits()
    assert one.obstacle() == obstacle
    assert one.state == "off"
    assert str(one) == (
        f"lazy_backend: a feature is off with PyTorch {torch.__version__}: {obstacle}\n  without it, it is slower"
    )


def test_a_public_function_that_is_missing_turns_a_port_off(tmp_path: Path) -> None:
    code = """
import multiprocessing.util, warnings
import torch
del torch.is_autocast_enabled, torch.norm
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(torch.ones(3, device="lazy").sum().item(), multiprocessing.util._logger)
print(sorted(str(one.message).split(" is off")[0] for one in caught))
"""
    off = "['lazy_backend: autocast', 'lazy_backend: torch.norm']"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"3.0 None\n{off}\n", done.stderr


def test_a_name_that_is_no_port_is_told(tmp_path: Path) -> None:
    code = "import torch, warnings; warnings.simplefilter('error'); torch.ones(1, device='lazy')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, VARIABLE: "no such port"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "names what is no port: no such port" in done.stderr
    assert done.returncode == 0


def test_an_expectation_is_checked_once(library: types.ModuleType) -> None:
    calls: list[int] = []
    one = made(Probe("it is asked", lambda: not calls.append(1)))
    assert calls == []
    assert one.fits()
    assert one.fits()
    assert calls == [1]


def test_a_port_that_is_off_is_said_once() -> None:
    one = made("torch.no_such_name")
    with pytest.warns(PortWarning, match="a feature is off") as said:
        assert [one.fits() for _ in range(3)] == [False] * 3
    assert len(said) == 1


@pytest.mark.parametrize(
    ("value", "fits"), [("a feature", False), ("another,a feature", False), ("", True), ("feature", True)]
)
def test_a_variable_turns_ports_off(value: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    one = made("torch.Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert one.fits() is fits
    assert one.obstacle() == (None if fits else f"it is turned off by {VARIABLE}")


def test_a_port_that_fails_in_use_is_off_from_then_on() -> None:
    one = made("torch.Tensor")
    assert one.fits()
    with pytest.warns(PortWarning, match="it gave 3 where 2 was expected"):
        one.turn_off("it gave 3 where 2 was expected")
    assert not one.fits()


def test_a_source_that_is_not_known_does_not_fit() -> None:
    path = "torch.utils.swap_tensors"
    known = KnownSource(path, ("00000000", source_hash(torch.utils.swap_tensors)))
    assert made(known).fits()
    with pytest.raises(DoesNotFit, match=r"torch.utils.swap_tensors has a source that is not known \(\w{8}\)"):
        KnownSource(path, ("00000000",)).check()


def test_a_hash_is_of_the_text_without_the_ends_of_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, end in (("with_spaces", "  "), ("without", "")):
        (tmp_path / f"{name}_lines.py").write_text(f"def f(x):{end}\n    return x{end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    hashes = {source_hash(reach(f"{name}_lines.f")) for name in ("with_spaces", "without")}
    assert len(hashes) == 1


def test_a_replacement_is_made_and_listed(library: types.ModuleType) -> None:
    original, count = library.scale, len(replaced)
    made("a_library.scale").put(library, "scale", lambda x: x * 3)
    made("a_library.Kind").put(library.Kind, "go", lambda self, way: "gone")
    assert library.scale(1) == 3
    assert library.Kind().go("there") == "gone"
    assert [str(one) for one in replaced[count:]] == ["a_library.scale", "a_library.Kind.go"]
    assert replaced[count].original is original


def test_a_port_that_does_not_fit_replaces_nothing(library: types.ModuleType) -> None:
    original, count = library.scale, len(replaced)
    with pytest.warns(PortWarning):
        made("a_library.no_such_name").put(library, "scale", lambda x: x * 3)
    assert library.scale is original
    assert len(replaced) == count


def test_modules_that_imported_a_replaced_function_get_the_new_one(library: types.ModuleType) -> None:
    user, ours = types.ModuleType("a_user"), types.ModuleType("lazy_backend.of_a_test")
    user.scale = user.other_name = ours.scale = library.scale  # type: ignore[attr-defined]
    original = library.scale
    sys.modules |= {"a_user": user, "lazy_backend.of_a_test": ours}
    try:
        made("a_library.scale").put(library, "scale", lambda x: x * 3)
        renew_imported_names()
    finally:
        del sys.modules["a_user"], sys.modules["lazy_backend.of_a_test"]
    assert user.scale is user.other_name is library.scale
    assert library.scale is not original
    assert ours.scale is original


def test_what_is_bound_at_import_may_be_missing() -> None:
    assert optional("torch.Tensor") is torch.Tensor
    assert optional("torch._C.no_such_name") is None
    assert optional("torch.no_such_module.name", 3) == 3


def test_a_name_without_parentheses_is_not_called() -> None:
    Name("torch.utils.swap_tensors").check()
    with pytest.raises(DoesNotFit, match=r"expected \(x\)"):
        Name("torch.utils.swap_tensors(x)").check()


# ----- the package's ports


@pytest.mark.parametrize("name", ports)
def test_all_ports_fit_the_versions_that_were_tested(name: str) -> None:
    if not torch.__version__.startswith(port_module.VERSIONS):
        pytest.skip(f"not tested with {torch.__version__}")
    assert ports[name].obstacle() is None


def test_each_port_says_what_is_lost() -> None:
    for one in ports.values():
        assert one.without[0].islower() or one.without.startswith(("Dist", "FSDP")), one.name
        assert not one.without.endswith("."), one.name


def test_without_few_ports_there_are_no_lazy_tensors() -> None:
    found = [one for one in vars(table).values() if isinstance(one, Port) and one.essential]
    assert [one.name for one in found] == [
        "dispatcher",
        "tensor classes",
        "state of a thread",
        "trees of arguments",
    ]


# ----- CPython


def test_references_are_counted_without_those_of_the_counting() -> None:
    one = object()
    assert counts_of([one])[0] - UNHELD == 1  # the variable
    holders = [one, one]
    assert counts_of([one])[0] - UNHELD == 3
    assert counts_of(holders) == [UNHELD + 2] * 2
    del holders


def test_an_object_that_was_just_made_is_young() -> None:
    one: list[int] = []
    assert any(other is one for other in young_objects())


def test_instances_with_slots_or_state_in_c_have_more_than_a_dict() -> None:
    class Plain:
        pass

    class Slots:
        __slots__ = ("x",)

    class List(list[int]):
        pass

    assert [has_only_a_dict(kind) for kind in (Plain, Slots, List, int)] == [True, False, False, False]


def test_the_package_may_be_imported_in_any_mode(tmp_path: Path) -> None:
    code = (
        "import torch\nwith torch.inference_mode():\n    from lazy_backend.ports import port\nprint(port.ports_off())"
    )
    assert run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0").strip() == "[]"


@pytest.mark.parametrize("is_stack", [False, True])
def test_blocks_that_an_interruption_kept_from_being_left_are_left(is_stack: bool) -> None:
    left = []

    @contextlib.contextmanager
    def block(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            left.append(name)

    stack = contextlib.ExitStack()
    stack.enter_context(block("inner"))
    manager: Any = stack if is_stack else block("inner")
    code = type(manager).__exit__.__code__

    def interrupt(frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt if frame.f_code is code else None

    try:
        with block("outer"), manager:
            sys.settrace(interrupt)
    except KeyboardInterrupt as error:
        assert left == ["outer"]
        leave_interrupted_blocks(error)
        assert left == ["outer", "inner"]
    else:
        pytest.fail("not interrupted")

"""Keys: exact, ordered, comparable part by part."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builder import Program, aten

from lazy_backend.cache.computation_cache import ComputationCache, Key
from lazy_backend.lowering.artefacts import environment as lowering_environment
from lazy_backend.lowering.artefacts.environment import (
    compiler_variables,
    disk_key_parts,
    environment,
    follow_state,
    is_compiler_variable,
    lowering_code,
    process_state,
)
from lazy_backend.lowering.devices import cuda
from lazy_backend.lowering.devices.dependencies import SWITCHED, Dependency
from lazy_backend.lowering.devices.interface import BackingDevice
from lazy_backend.lowering.devices.registration import backing_devices, register
from lazy_backend.lowering.plans.cached_computation import make_key
from lazy_backend.lowering.plans.profiling import CompilePolicy
from lazy_backend.ports.replacements import inductor


def policy(**changes) -> CompilePolicy:
    return CompilePolicy(
        **{
            "backend": "eager",
            "enabled": True,
            "num_profiled_runs": 1,
            "max_specializations": 4,
            "max_compiled_nodes": 1000,
        }
        | changes
    )


def key_of(program: Program, *wanted, **changes) -> Key:
    chosen = policy(**changes)
    return make_key(program.graph(*wanted), environment(chosen.backend if chosen.enabled else None))


def simple(shape=(2, 3), dtype=torch.float32, op=aten.neg.default, args=()) -> Key:
    program = Program()
    x = program.input(torch.ones(shape, dtype=dtype))
    return key_of(program, program.call(op, x, *args))


def test_equal_programs_have_equal_keys() -> None:
    assert simple() == simple()
    assert simple().hash_hex() == simple().hash_hex()


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (3, 2)},
        {"dtype": torch.float64},
        {"op": aten.exp.default},
        {"op": aten.sum.dim_IntList, "args": ([0],)},
    ],
)
def test_different_programs_have_different_keys(other) -> None:
    assert simple(**other) != simple()
    assert simple(**other).hash_hex() != simple().hash_hex()


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, True), (0, False), (1, 1.0)])
def test_numbers_of_different_types_differ(one, other) -> None:
    assert simple(op=aten.add.Tensor, args=(one,)) != simple(op=aten.add.Tensor, args=(other,))


def test_floats_are_not_in_the_key() -> None:
    assert simple(op=aten.add.Tensor, args=(1.5,)) == simple(op=aten.add.Tensor, args=(2.5,))


def test_the_backend_is_in_the_key() -> None:
    program = Program()
    y = program.call(aten.neg.default, program.input(torch.ones(2)))
    assert key_of(program, y) != key_of(program, y, backend="inductor")
    assert key_of(program, y) != key_of(program, y, enabled=False)


@pytest.fixture
def as_before() -> Iterator[None]:
    before = process_state()
    yield
    follow_state(before)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("switch", "part"),
    [
        (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms"),
        (lambda: torch.set_float32_matmul_precision("medium"), "mkldnn matmul precision"),
        (lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"), "mkldnn matmul precision"),
        (lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"), "mkldnn conv precision"),
        (lambda: setattr(torch.backends.mkldnn, "enabled", False), "mkldnn"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "threads"),
    ],
)
def test_what_a_program_switches_is_in_the_key(switch: Callable[[], None], part: str) -> None:
    before, there = simple().part_hashes(), disk_key_parts()
    switch()
    after = simple().part_hashes()
    changed = {name for name in before if before[name] != after[name]}
    # PyTorch for CUDA has one more precision, which `set_float32_matmul_precision` sets, too
    assert changed - {"cuda matmul precision"} == {part}
    assert "cuda matmul precision" not in changed or torch.backends.cuda.is_built()
    assert disk_key_parts() != there


@pytest.mark.usefixtures("as_before")
def test_the_compilers_process_follows_what_a_program_switched() -> None:
    before = process_state()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    torch.backends.mkldnn.enabled = False
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    switched = process_state()
    follow_state(before)
    assert process_state() == before
    follow_state(json.loads(json.dumps(switched)))
    assert process_state() == switched


def test_the_switches_of_cuda_can_be_read() -> None:
    """Those of a PyTorch without CUDA too: a name that another version lacks is found here."""
    assert all(one.read() is not None for one in cuda._DEPENDENCIES)
    assert len({one.name for one in (*lowering_environment._GENERAL, *cuda._DEPENDENCIES)}) == len(
        lowering_environment._GENERAL
    ) + len(cuda._DEPENDENCIES)


def test_which_cpp_compiler_there_is_is_not_in_the_key_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one machine compiled is also for those that have no compiler. The compiler's process still gets the name."""
    compiler_variables.cache_clear()
    before = disk_key_parts()
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    compiler_variables.cache_clear()
    assert disk_key_parts() == before
    assert compiler_variables()["CXX"] == "/nonexistent/c++"
    compiler_variables.cache_clear()


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "TORCH_COMPILE_DEBUG"])
def test_variables_of_the_compiler_are_in_the_key_on_disk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_variables.cache_clear()
    before = disk_key_parts()
    monkeypatch.setenv(name, "1")
    assert disk_key_parts() == before  # read once, as the compiler does
    compiler_variables.cache_clear()
    assert disk_key_parts() != before
    compiler_variables.cache_clear()


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "LAZY_DEBUG", "HOME"])
def test_variables_that_change_no_code_are_not_in_the_key(name: str) -> None:
    assert not is_compiler_variable(name)


def test_code_that_lowers_otherwise_finds_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(lowering_environment.__file__).parent.parent
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    own = lowering_code.__wrapped__()
    monkeypatch.setattr(lowering_environment, "__file__", str(tmp_path / "compilation" / "environment.py"))
    assert lowering_code.__wrapped__() == own
    (tmp_path / "compilation" / "fx.py").write_text("# lowers relu as neg\n")
    assert lowering_code.__wrapped__() != own


def test_a_hash_has_32_digits() -> None:
    assert len(simple().hash_hex()) == 32


def test_parts_do_not_run_into_each_other() -> None:
    assert Key((("a", "bc"),)).hash_hex() != Key((("ab", "c"),)).hash_hex()
    assert Key((("a", "b"), ("c", "d"))).hash_hex() != Key((("a", "b1:c1:d"),)).hash_hex()


def test_part_hashes_name_the_part_that_differs() -> None:
    one, other = simple(), simple(shape=(3, 2))
    differing = {n for n, h in one.part_hashes().items() if other.part_hashes()[n] != h}
    assert differing == {"graph"}


def test_the_cache_compares_whole_keys() -> None:
    class Colliding(Key):
        def __hash__(self) -> int:
            return 1

    cache: ComputationCache[str] = ComputationCache(lambda: 4)
    cache.add(Colliding((("graph", "a"),)), "a")
    assert cache.get(Colliding((("graph", "b"),))) is None
    assert cache.get(Colliding((("graph", "a"),))) == "a"


def test_the_first_computation_of_a_key_stays() -> None:
    cache: ComputationCache[str] = ComputationCache(lambda: 4)
    key = Key((("graph", "a"),))
    assert cache.add(key, "first") == "first"
    assert cache.add(key, "second") == "first"


def test_the_least_recently_used_goes_first() -> None:
    cache: ComputationCache[int] = ComputationCache(lambda: 2)
    keys = [Key((("graph", str(n)),)) for n in range(3)]
    cache.add(keys[0], 0)
    cache.add(keys[1], 1)
    cache.get(keys[0])
    cache.add(keys[2], 2)
    assert [cache.get(key) for key in keys] == [0, None, 2]
    assert len(cache) == 2


def test_the_cache_follows_a_capacity_that_changes() -> None:
    capacity = 3
    cache: ComputationCache[int] = ComputationCache(lambda: capacity)
    for number in range(3):
        cache.add(Key((("part", str(number)),)), number)
    capacity = 1
    cache.add(Key((("part", "3"),)), 3)
    assert list(cache) == [3]
    capacity = 2
    cache.add(Key((("part", "4"),)), 4)
    assert list(cache) == [3, 4]


class Driver:
    """CUDA's library."""

    @staticmethod
    def cuDriverGetVersion(place: Any) -> int:
        place._obj.value = 13020
        return 0


@pytest.fixture
def registered() -> Iterator[BackingDevice]:
    """A device of another maker, whose compiler reads a switch."""
    device = BackingDevice("another")
    device.versions = "kernels 1.0, driver 2"
    device.dependencies = (Dependency("another switch", SWITCHED, lambda: device.versions[-1]),)
    register(device)
    lowering_environment.see_devices()
    yield device
    del backing_devices["another"]
    lowering_environment.see_devices()


def test_keys_name_what_a_registered_device_depends_on(registered: BackingDevice) -> None:
    before, there = simple().part_hashes(), disk_key_parts()
    travelled = Key(there)
    assert lowering_environment.misfit(travelled) is None
    registered.versions = "kernels 1.0, driver 3"
    assert {name for name, value in simple().part_hashes().items() if value != before[name]} == {"another switch"}
    assert {name for name, _ in set(disk_key_parts()) - set(there)} == {"artefact", "state"}
    assert lowering_environment.misfit(travelled) == (
        "made for another versions kernels 1.0, driver 2, this has kernels 1.0, driver 3"
    )


@pytest.mark.usefixtures("registered")
def test_an_artefact_for_a_device_that_is_not_registered_does_not_fit() -> None:
    travelled = Key(disk_key_parts())
    del backing_devices["another"]
    lowering_environment.see_devices()
    misfit = lowering_environment.misfit(travelled)
    assert misfit == "made for another versions kernels 1.0, driver 2, this has None"
    register(BackingDevice("another"))


def test_keys_for_cuda_name_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver)
    inductor.cuda_driver.cache_clear()
    dependency = cuda._DEPENDENCIES[0]
    assert (dependency.name, dependency.read()) == ("cuda driver", 13020)
    inductor.cuda_driver.cache_clear()

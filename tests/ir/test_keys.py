"""Keys: exact, ordered, comparable part by part."""

from __future__ import annotations

import pytest
import torch
from builder import Program, aten

from lazy_backend.cache.computation import ComputationCache, Key
from lazy_backend.lowering.computation import environment, make_key
from lazy_backend.lowering.profiling import CompilePolicy


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


@pytest.mark.parametrize(
    ("switch", "part"),
    [
        (lambda on: torch.use_deterministic_algorithms(on), "deterministic"),
        (lambda on: torch.set_float32_matmul_precision("medium" if on else "highest"), "matmul_precision"),
        (lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32), "default_dtype"),
    ],
)
def test_flags_of_the_process_are_in_the_key(switch, part: str) -> None:
    before = simple().part_hashes()
    switch(True)
    try:
        after = simple().part_hashes()
    finally:
        switch(False)
    assert {name for name in before if before[name] != after[name]} == {part}


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

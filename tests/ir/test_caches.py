"""The ground layer: constants and tries."""

from __future__ import annotations

import struct
import weakref

import pytest

from lazy_backend.cache.constants import ConstantKey, DataCache, DataCacheArena
from lazy_backend.cache.trie import Trie, TrieNode


def key(value: float, dtype: str = "f64") -> ConstantKey:
    return ConstantKey(dtype, (), struct.pack("d", value))


class Uploads:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def test_equal_constants_are_uploaded_once() -> None:
    cache, upload = DataCache(8, 1024), Uploads()
    assert cache.get_device_data(key(1.5), upload) == cache.get_device_data(key(1.5), upload)
    assert (upload.count, cache.hits, cache.misses) == (1, 1, 1)


def test_constants_are_compared_bit_by_bit() -> None:
    cache, upload = DataCache(8, 1024), Uploads()
    for value in (0.0, -0.0, float("nan"), float("nan")):
        cache.get_device_data(key(value), upload)
    assert upload.count == 3


def test_equal_bytes_of_other_types_differ() -> None:
    cache, upload = DataCache(8, 1024), Uploads()
    cache.get_device_data(key(1.0, "f64"), upload)
    cache.get_device_data(key(1.0, "i64"), upload)
    assert upload.count == 2


def test_entries_are_bounded() -> None:
    cache, upload = DataCache(2, 1024), Uploads()
    for value in range(5):
        cache.get_device_data(key(float(value)), upload)
    assert len(cache) == 2


def test_bytes_are_bounded() -> None:
    cache, upload = DataCache(100, 20), Uploads()
    for value in range(5):
        cache.get_device_data(key(float(value)), upload)
    assert len(cache) == 2


def test_a_constant_above_the_limit_is_uploaded_but_not_kept() -> None:
    cache = DataCache(100, 4)
    assert cache.get_device_data(key(1.0), lambda: "uploaded") == "uploaded"
    assert len(cache) == 0


def test_the_least_recently_used_constant_goes_first() -> None:
    cache, upload = DataCache(2, 1024), Uploads()
    for value in (1.0, 2.0, 1.0, 3.0, 1.0):
        cache.get_device_data(key(value), upload)
    assert upload.count == 3


def test_every_device_has_its_own_cache() -> None:
    arena: DataCacheArena[int] = DataCacheArena(8, 1024)
    assert arena.get_data_cache("lazy:0") is arena.get_data_cache("lazy:0")
    assert arena.get_data_cache("lazy:0") is not arena.get_data_cache("lazy:1")


def test_an_arena_clears_all() -> None:
    arena: DataCacheArena[int] = DataCacheArena(8, 1024)
    arena.get_data_cache("lazy:0").get_device_data(key(1.0), lambda: 1)
    arena.clear()
    assert len(arena.get_data_cache("lazy:0")) == 0


# ----- tries


def trie_of(*paths: str) -> Trie[str]:
    trie: Trie[str] = Trie()
    for path in paths:
        node = trie.root_of()
        for letter in path:
            node = node.follower(letter) or trie.add(node, letter, letter.upper())
    return trie


def node_at(trie: Trie[str], path: str) -> TrieNode[str]:
    node = trie.root_of()
    for letter in path:
        found = node.follower(letter)
        assert found is not None
        node = found
    return node


def test_every_follower_is_found_whichever_came_last() -> None:
    trie = trie_of("ax", "ay", "az", "ax")
    assert [node_at(trie, path).call for path in ("ax", "ay", "az")] == ["X", "Y", "Z"]
    assert node_at(trie, "a").follower("w") is None
    assert [node.call for node in node_at(trie, "a").followers()] == ["X", "Y", "Z"]


def test_a_path_names_its_calls() -> None:
    trie = trie_of("abc")
    assert node_at(trie, "ab").path() == ["A", "B"]


def test_common_prefixes_are_shared() -> None:
    assert trie_of("abc", "abd", "x").size == 5


def test_depth_counts_calls() -> None:
    trie = trie_of("abc")
    assert (trie.root_of().depth, node_at(trie, "ab").depth) == (0, 2)


def test_iteration_gives_parents_first() -> None:
    seen = [node.call for node in trie_of("abc", "ax")]
    assert sorted(seen) == ["A", "B", "C", "X"]
    assert seen.index("A") < seen.index("B") < seen.index("C")


def test_reset_forgets_every_path() -> None:
    trie = trie_of("abc")
    trie.reset()
    assert (trie.size, list(trie)) == (0, [])


def test_reset_leaves_nothing_to_the_garbage_collector() -> None:
    class Held:
        pass

    trie: Trie[Held] = Trie()
    held = Held()
    node = trie.add(trie.root_of(), "a", held)
    trie.add(node, "b", Held())
    reference = weakref.ref(held)
    del held, node
    trie.reset()
    if reference() is not None:
        pytest.fail("a call outlived its trie")

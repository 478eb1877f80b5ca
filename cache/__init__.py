"""Caches that know nothing about tensors, graphs or devices, and the door to compiled graphs that travel.

    lazy_backend.wait_for_compiles()
    print(lazy_backend.cache.export("graphs.lazycache"))  # where it was compiled

    print(lazy_backend.cache.load("graphs.lazycache"))  # elsewhere, before the first step

The file is checked when it is read: what was made for another PyTorch, Python or processor is skipped, and counted
with its reason. Compiled graphs are code, so load only files from people whose code you would run.
`python -m lazy_backend.cache --help` does the same from a shell, and lists, checks and prunes the cache.

In: hashable keys, values, bytes. Out: the same values and bytes, unless they were evicted (LRU). `trie` names recorded
programs, `computation_cache` holds compiled graphs, `constants` uploaded host constants, `disk` artefacts; `layers` are
several of these in a row, and an `archive` takes them from one machine to another.

Imports nothing else of this project: `export` and `load` know what is in a graph, and `archives` puts them here.
"""

from collections.abc import Callable

from lazy_backend.cache.reports import ExportReport, LoadReport

__all__ = ["ExportReport", "LoadReport", "export", "load"]

export: Callable[..., ExportReport]
load: Callable[..., LoadReport]

"""The bottom layer: caches that know nothing about tensors, graphs or devices.

In: hashable keys, values, bytes. Out: the same values and bytes, unless they were evicted (LRU). `trie` names recorded
programs, `computation_cache` holds compiled graphs, `constants` uploaded host constants, `disk` artefacts; `layers` are
several of these in a row, and an `archive` takes them from one machine to another.

Imports nothing else of this project.
"""

"""Compiled graphs that travel: what `lazy_backend.cache.export`, `load` and `python -m lazy_backend.cache` do, and the
files of served functions.

In: the disk cache and files. Out: files, entries of the cache, and reports of both.

Imports `execution` and what it may import.
"""

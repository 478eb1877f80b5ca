"""Compiled graphs that travel: what one machine compiled, others load.

    lazy_backend.wait_for_compiles()
    print(lazy_backend.cache.export("graphs.lazycache"))  # where it was compiled

    print(lazy_backend.cache.load("graphs.lazycache"))  # elsewhere, before the first step

The file is checked when it is read: what was made for another PyTorch, Python or processor is skipped, and counted
with its reason. Compiled graphs are code, so load only files from people whose code you would run.
`python -m lazy_backend.cache --help` does the same from a shell, and lists, checks and prunes the cache.
"""

from lazy_backend.cache.reports import ExportReport, LoadReport
from lazy_backend.cache.transfer import export, load

__all__ = ["ExportReport", "LoadReport", "export", "load"]

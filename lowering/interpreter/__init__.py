"""Run a graph kernel by kernel: frames, kernels, tasks, the serial and the parallel executor.

In: a `Graph` and its inputs. Out: the graph's outputs. A compiled region runs as one kernel (`compilation`).

Imports `compilation`, `ir` and `cache`.
"""

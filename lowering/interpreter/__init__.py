"""Run a graph kernel by kernel: frames, kernels, tasks, the serial and the parallel executor.

In: a `Graph` and its inputs. Out: its outputs. What is compiled takes part as one kernel (`compilation`).

Imports `compilation`, `ir` and `cache`.
"""

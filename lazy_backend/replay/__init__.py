"""`capture`: replay the calls of a function without running its Python.

In: a function, and two recorded calls of it. Out: one run for each later call, with inputs bound by position.

Imports `execution`, `floats`, `precision`, `tensors` and everything that `tensors` may import; not `recording`.
"""

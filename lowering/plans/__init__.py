"""Which plan runs a graph: interpreted, compiled for its numbers, compiled for all of a family's.

In: a `Computation` and the constants of a run. Out: an `ExecutionPlan`, now or when the compiler is done.

Imports `interpreter`, `compilation`, `ir` and `cache`.
"""

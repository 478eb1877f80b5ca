"""Which plan runs a graph: interpreted, compiled for its own sizes, or compiled for all sizes of its family.

In: a `Computation` and the constants of a run. Out: an `ExecutionPlan`, now or when the compiler is done.

Imports `interpreter`, `compilation`, `ir` and `cache`.
"""

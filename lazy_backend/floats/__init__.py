"""Floats and CPU tensors that a replay follows, by the formulas that a body computes them with.

In: a body that runs as written with a `FloatRecorder`. Out: a `FormulaProgram`, which gives the floats that the body
would compute now, in Python's own arithmetic, and the CPU tensors that it would leave.

Imports `execution`, `tensors` and what they may import; nothing from `recording`, `replay` or `regions`.
"""

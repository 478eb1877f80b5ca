"""Regions: modules and optimizers whose calls are replayed within an ordinary step.

In: `capture(module)`, `capture(optimizer)`. Out: the same object, whose calls move the trace along a known path without
running Python. So the graph of a step, its key, the disk cache and explanations are those of the loop as written.

Imports `replay` (state that is guarded), `recording`, `execution`, `tensors` and what they may import.
"""

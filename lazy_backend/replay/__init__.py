"""`capture`: functions whose calls are run again without their Python.

In: a function, and two calls of it as they were recorded. Out: a run per further call, bound by place.

Imports `execution`, `tensors` and all that `tensors` may import; nothing of `recording`.
"""

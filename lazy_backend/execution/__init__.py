"""From a trace to results: syncs, the runs that they schedule, and what follows a step.

In: the trace of a `DeviceContext`, and a reason to cut it. Out: real tensors in the storages that are still alive.

Imports `tensors` and everything that `tensors` may import.
"""

"""What happened and why: the history of syncs and compiles, and everything that presents the history.

In: facts, reported by the packages above. Out: explanations, findings, the report page, timelines, log files.
Tensors and contexts are unknown here, so diagnostics cannot change what they observe.

Imports `metrics`, `errors`, `settings`, `lowering` and `cache`.
"""

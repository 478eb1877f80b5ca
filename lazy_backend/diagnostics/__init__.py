"""What happened, and why: the history of syncs and compiles, and everything that shows it.

In: facts, as the rooms above report them. Out: explanations, findings, the report's page, timelines, log files.
Tensors and contexts are unknown here, so that looking can change nothing.

Imports `metrics`, `errors`, `settings`, `lowering` and `cache`.
"""

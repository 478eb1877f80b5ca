"""One graph with its weights, for many callers at once.

In: a `Graph`, its weights, inputs from any thread. Out: its outputs; weights can be swapped whole meanwhile.

Imports `interpreter`, `compilation`, `ir` and `cache`.
"""

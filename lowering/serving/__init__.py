"""One graph with its weights, for many callers at once.

In: a `Graph`, its weights, inputs from any thread. Out: its outputs. Weights can be swapped as a whole during runs.

Imports `interpreter`, `compilation`, `plans`, `products`, `blocks`, `ir` and `cache`.
"""

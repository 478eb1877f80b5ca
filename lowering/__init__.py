"""The middle layer: recorded programs to graphs, graphs to something that runs.

In: the calls of a path. Out: plans that compute on real tensors. Its rooms, in the order of the data flow: `ir`,
`compilation`, `interpreter`, `plans`, and `serving` beside `plans`.

Imports `lazy_backend.cache` and torch, nothing of the front.
"""

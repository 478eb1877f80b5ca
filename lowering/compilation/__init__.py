"""From a graph to compiled code: FX, a `torch.compile` backend, the compiler's process, artefacts on disk.

In: a `Graph`, and which of its numbers are inputs. Out: a callable on real tensors, or the bytes of one.

Imports `ir` and `cache`.
"""

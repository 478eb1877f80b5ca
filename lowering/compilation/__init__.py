"""From a graph to compiled code: FX, a `torch.compile` backend, the compiler's worker process.

In: a `Graph`, and which of its floats and sizes become inputs. Out: a callable on real tensors, or its artefact.

Imports `artefacts`, `blocks`, `products`, `ir` and `cache`.
"""

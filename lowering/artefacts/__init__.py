"""Compiled graphs as bytes: what they depend on, how they are loaded, and the C++ that runs them.

In: the state of the process; the function that Inductor wrote; an artefact's bytes. Out: keys and headers; the source
of a runner; a callable on real tensors.

Imports `blocks`, `products`, `ir` and `cache`.
"""

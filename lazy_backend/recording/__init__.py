"""From an operator call to one step down the trie.

In: calls that PyTorch dispatches to the lazy device. Out: lazy tensors with what they stand for recorded, or, for calls
that cannot be recorded, computed at once.

Imports `execution`, `tensors` and all that `tensors` may import.
"""

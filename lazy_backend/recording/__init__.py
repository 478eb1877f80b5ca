"""Turn an operator call into one step down the trie.

In: calls that PyTorch dispatches to the lazy device. Out: lazy tensors, whose calls were recorded or, where a call
cannot be recorded, computed at once.

Imports `execution`, `tensors` and everything that `tensors` may import.
"""

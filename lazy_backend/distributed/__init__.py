"""Collectives of `torch.distributed` on lazy tensors: recorded like any call, and run in the order of the program.

In: the operators of `c10d`, `_c10d_functional` and `fsdp`, and backwards of `DistributedDataParallel`. Out: calls of
the collectives in `lowering/collectives`, and work that is done as soon as it is recorded.

Imports `recording`, `execution`, `tensors` and what they may import.
"""

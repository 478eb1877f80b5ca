"""Communication between processes: the operators that graphs call, and the process groups they call them on.

In: tensors, and a group's number. Out: what `torch.distributed` computes, in the order in which it was recorded.

Imports `cache`; everything about graphs is above this room.
"""

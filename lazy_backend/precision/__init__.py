"""Mixed precision: `torch.autocast("lazy")` and `torch.amp.GradScaler("lazy")`, with the rules of the backing device.

In: what PyTorch's autocast says of the thread. Out: casts, recorded like any call, so a cached graph contains them.

Imports `tensors` and what it may import.

Note [How autocast reaches lazy tensors]
PyTorch's list of devices with autocast is compiled in, and the lazy device is not on it. Its kernels for the CPU and
for CUDA test each tensor's device, so they would not cast a lazy tensor. We take over a key of the dispatcher that no
kernel of PyTorch uses, `AutocastIPU`, and register a kernel there for each operator that has a rule on the backing
device; any other operator passes it at no cost. Lazy tensors do not carry the key, which would cost 0.6 µs for each
tensor made: while autocast is on, the thread adds it to every call, as modes do. So without autocast nothing is paid.

Note [Which autocast counts]
Users write `torch.autocast("lazy")`, but also have code that says `torch.autocast("cuda")` or, on the CPU,
`torch.autocast("cpu")`. The innermost of these blocks decides for lazy tensors, on or off, so that code is heard that
turns autocast off for `tensor.device.type`, and code that turns it on for the backing device. A block for the backing
device does not count if it changes nothing for that device, or if it restores what there was for it: as
`torch.utils.checkpoint` does, in a block that restores what there was for lazy tensors.
"""

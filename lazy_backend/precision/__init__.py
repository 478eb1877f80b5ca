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
`torch.autocast("cpu")`. A block for "lazy" decides for lazy tensors, on or off; where there is none, a block for the
backing device does. So code that turns autocast off for `tensor.device.type` is heard, and `torch.utils.checkpoint`,
which enters a block for the tensors' device and another for the CPU, restores what there was.
"""

"""The devices behind "lazy": what each one offers, and which there are.

In: the name of a device type. Out: memory figures, generators, rules of autocast, fused kernels, streams and graphs of
it. `interface.py` is the protocol, with defaults for an accelerator that registers; `cpu.py` and `cuda.py` are those of
PyTorch. No other room names CUDA.

Imports nothing of `lowering`.
"""

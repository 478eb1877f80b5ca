"""The integration with PyTorch: what this package patches there, and the interfaces that it implements.

In: PyTorch's classes and tables, and calls of `torch.lazy`, `torch.save`, `torch._lazy`. Out: the same, with a lazy
device among the others. `installation.install` sets everything up.

Imports every other package; `torch_lazy` and `extracted` also import the public modules directly in `lazy_backend`.
"""

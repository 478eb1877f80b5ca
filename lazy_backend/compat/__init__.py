"""Where this package reaches into PyTorch: what it changes there, and what it stands in for.

In: PyTorch's classes and tables, and calls of `torch.lazy`, `torch.save`, `torch._lazy`. Out: the same with a lazy
device among the others. `installation.install` puts all of it in place.

Imports every other room; of what lies directly in `lazy_backend`, `torch_lazy` and `extracted` import what users do.
"""

"""What of PyTorch is replaced once the device is used, by subsystem.

In: classes and functions of this package, as arguments. Out: PyTorch's own functions and classes, which take lazy
tensors. `compat.installation` calls each function here once. Each says what it replaces, and why no public API will do.

Imports nothing else of this project but ports.
"""

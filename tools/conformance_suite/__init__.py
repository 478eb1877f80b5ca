"""Parts of `conformance.py`: cases from PyTorch's databases, targets that run them, checks and tables."""

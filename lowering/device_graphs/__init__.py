"""Whole runs launched as one graph of the device, and what that needs of a device: streams, events, pools, generators.

In: a plan, and the inputs of its runs. Out: the plan's outputs, computed by one launch once its runs recur; uploads
that overlap with runs. `interface.py` says what a device must offer; `cuda.py` is CUDA, `fake.py` a CPU with its rules.

Imports `collectives`, `ir` and `cache`.
"""

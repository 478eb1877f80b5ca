"""Whole runs launched as one graph of the device, and the order of what is given to its streams.

In: a plan, and the inputs of its runs. Out: the plan's outputs, computed by one launch once its runs recur; uploads
that overlap with runs. `fake.py` is a CPU with the rules of CUDA.

Imports `devices`, `collectives`, `ir` and `cache`.
"""

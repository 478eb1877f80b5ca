"""Products of matrices: which library computes them in compiled graphs.

In: the layouts of an operator's tensors. Out: a `MatrixProduct`; the C++ that has oneDNN compute it; whether that is
faster than ATen's way.

Imports nothing of ours.
"""

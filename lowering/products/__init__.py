"""What computes compiled graphs: which library multiplies matrices, and how many threads.

In: the layouts of an operator's tensors; a graph. Out: a `MatrixProduct`; the C++ that has oneDNN compute it; whether
that is faster than ATen's way; whether one thread should compute a graph.

Imports `ir`.
"""

"""What is checked of compiled graphs: values that operators refuse, such as an index out of range, and results.

In: a call whose kernel looks at values; results of a compiled graph and of the interpreter. Out: the condition that a
compiled graph checks before it writes, and the error of the operator that refused, with the user's line; whether the
results agree; a graph in which calls that a compiler gets wrong are left to their kernels.

Imports `ir`.
"""

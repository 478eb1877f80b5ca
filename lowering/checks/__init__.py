"""Values that operators refuse: an index out of range, a target that is no class, a matrix that is singular.

In: a call whose kernel looks at values. Out: the condition that a compiled graph checks before it writes; the error of
the operator that refused, with the user's line.

Imports `ir`.
"""

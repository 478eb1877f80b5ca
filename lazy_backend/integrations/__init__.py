"""Trainers of other packages on the lazy device: a module for each, imported on demand; none is a dependency.

In: a trainer's own extension points: arguments, callbacks, strategies, handlers. Out: its steps as lazy steps, which
end by themselves and read values at logging steps only; mixed precision; an error that says what to do where the
package is missing or too different from the one that was tested.

Imports `execution` and everything that `execution` may import, and what users call in `lazy_backend`.
"""

"""Every reach into PyTorch and CPython that is not public, and every replacement in PyTorch.

In: the PyTorch and the Python that are installed. Out: their private names, by subsystem; `Port`s, each of which says
what it expects of them, whether that is so here, and what users lose where it is not; the list of what was replaced.

Imports nothing else of this project. No other room names what is private in PyTorch, or sets an attribute of a module
or class of PyTorch (`tests/test_ports.py`).

Note [Ports]
PyTorch's releases change what is private, every three months. A port groups the names that one feature needs. Its
expectations are checked when the feature is first used: a name is there, a function takes the parameters that we pass,
a source is one that was read, a probe gives what it gave. A port that does not fit is off: it is said once, with what
is lost, and the feature is missing or slower. It raises into no program. Only without the ports that are `essential`
can there be no lazy tensor; then the first use of the device raises, and says why.
"""

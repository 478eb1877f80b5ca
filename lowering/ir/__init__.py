"""The graph and its representations.

In: the calls on one path through the trie. Out: a canonical `Graph`, as text, as bytes, or with symbols for its sizes.

Imports `devices` and `cache`, and from `collectives` and `recurrent` the operators that graphs name.
"""

"""Recorded programs and graphs, and what turns the one into the other.

In: the calls of a path through the trie. Out: a canonical `Graph`, as text, as bytes, with symbols for its numbers.

Imports `cache` alone.
"""

"""Stretches of a graph as graphs of their own, and which of them are equal.

In: a graph. Out: its regions; a `BlockProgram`, whose blocks are compiled once and called many times; what runs one.

Imports `ir`.
"""

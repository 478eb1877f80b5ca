"""Recurrent layers as single operators: an LSTM, a GRU or a simple network in one call, and its backward in another.

In: the input of a layer, its first state and its weights, on the backing device. Out: its outputs and last state; the
gradients of its operands.

Imports nothing of `lowering`.
"""

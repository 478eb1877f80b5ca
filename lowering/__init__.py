"""The middle layer: recorded programs to graphs, graphs to something that runs.

In the order of the data flow: `program` (what the recorder wrote), `ir` (graphs), `canonical` (program to graph and
key), `rng` (seeded operators), `scalars` (numbers as inputs), `fx` (graph to FX), `aliasing` (outputs that own
their memory), `serial` (the interpreted plan), `compiler` (FX to a torch.compile backend), `profiling` (which plan
runs), `computation` (what the cache holds).
Imports `lazy_backend.cache` and torch, nothing of the front.
"""

"""Measurements of `bench.py` beside its workloads: a module for each option."""

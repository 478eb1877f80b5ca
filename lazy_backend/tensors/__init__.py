"""What users hold, and the state of the device behind it.

In: dispatched calls that need data, from the rooms above. Out: `LazyTensor` and `TensorData`, one `DeviceContext` per
device with its `Trace`, and the locks that runs are ordered by. Nothing here runs a graph.

Imports `diagnostics`, `metrics`, `errors`, `settings`, `lowering` and `cache`.
"""

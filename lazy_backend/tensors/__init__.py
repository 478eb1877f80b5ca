"""The tensors that users hold, and the state of the device behind them.

In: dispatched calls that need data, from the packages above. Out: `LazyTensor` and `TensorData`, one `DeviceContext`
per device with its `Trace`, and the locks that order the runs. Nothing here runs a graph.

Imports `diagnostics`, `metrics`, `errors`, `settings`, `lowering` and `cache`.
"""

"""The order of runs and of the work that a program gives to streams of its own.

In: work on tensors of a device. Out: the same work, in order with all runs, whatever stream the caller is on.

Note [Runs have one stream]
All runs, the calls that happen at once and the copies to and from the device are given to the device's default stream,
in the order of the program, so that none needs an event. A program may be on another stream, as within `with
torch.cuda.stream(...)`: then the default stream first waits for that one, and that one for the default stream
afterwards. The memory of what is handed out may be used by the caller's stream, which the allocator is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lazy_backend.lowering.devices.registration import graph_device

R = TypeVar("R")


def with_runs(device: torch.device, call: Callable[[], R]) -> R:
    """Call `call`, whose work on `device` is in order with all runs, and with the caller's stream before and after."""
    graphs = graph_device(device)
    if graphs is None or not graphs.is_elsewhere():
        return call()
    caller, runs = graphs.current_stream(), graphs.runs_stream
    graphs.wait(runs, graphs.record(caller))
    try:
        with graphs.on(runs):
            made = call()
    finally:
        graphs.wait(caller, graphs.record(runs))
    if isinstance(made, torch.Tensor) and made.device.type == device.type:
        graphs.will_use(caller, made)
    return made


def wait_for_runs(device: torch.device) -> None:
    """Let the caller's stream wait for all runs so far."""
    graphs = graph_device(device)
    if graphs is not None and graphs.is_elsewhere():
        graphs.wait(graphs.current_stream(), graphs.record(graphs.runs_stream))

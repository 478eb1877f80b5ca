"""A network that is slower than this machine's: gloo, whose work is over some time later than it is.

In: a delay. Out: the default process group of `torch.distributed`, for `bench.py --ranks 2 --delay 20`. The delay takes
no processor, as a real network's does not: whoever waits for work at once waits for it, and whoever computes meanwhile
does not.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lazy_backend import LazyTensor


class _Courier:
    """Ends work when it is due, one after the other, as one wire does."""

    def __init__(self) -> None:
        self._under_way: queue.Queue[tuple[float, dist.Work, torch.futures.Future[Any], list[torch.Tensor]]] = (
            queue.Queue()
        )
        threading.Thread(target=self._deliver, daemon=True).start()

    def take(self, work: dist.Work, delay: float, results: list[torch.Tensor]) -> dist.Work:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._under_way.put((time.perf_counter() + delay, work, future, results))
        # internal, checked on 2.13: a `Work` written in Python ends with its Python object, which C++ does not hold
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined, no-any-return]

    def _deliver(self) -> None:
        while True:
            due, work, future, results = self._under_way.get()
            try:
                work.wait()
                time.sleep(max(0.0, due - time.perf_counter()))
                future.set_result(results)
            except Exception as error:
                future.set_exception(error)


def _delayed(name: str) -> Callable[..., dist.Work]:
    """The method `name` of a group. Calls with lazy tensors are recorded, and come here again when they run."""
    original = getattr(dist.ProcessGroup, name)

    def communicate(self: SlowGroup, first: Any, *rest: Any, **options: Any) -> dist.Work:
        written = list(first) if isinstance(first, list) else [first]
        if any(isinstance(tensor, LazyTensor) for tensor in written):
            return original(self, first, *rest, **options)  # type: ignore[no-any-return]
        work = getattr(self.network, name)(first, *rest, **options)
        return self.courier.take(work, self.delay, written)

    return communicate


class SlowGroup(dist.ProcessGroup):
    """Gloo, `delay` seconds later."""

    delay = 0.0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.network = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.courier = _Courier()

    def getBackendName(self) -> str:
        return "slow"

    def barrier(self, *args: Any, **options: Any) -> dist.Work:
        return self.network.barrier(*args, **options)

    def allgather(self, *args: Any, **options: Any) -> dist.Work:  # of what loops agree on before they train
        return self.network.allgather(*args, **options)

    allreduce = _delayed("allreduce")
    broadcast = _delayed("broadcast")
    _allgather_base = _delayed("_allgather_base")
    _reduce_scatter_base = _delayed("_reduce_scatter_base")


def init_slow_group(delay: float) -> None:
    """As `init_process_group("gloo")`, with this delay in seconds."""
    SlowGroup.delay = delay
    dist.Backend.register_backend("slow", SlowGroup, devices=["cpu"])
    dist.init_process_group("slow")

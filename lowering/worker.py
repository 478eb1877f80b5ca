"""The compiler's own process.

In: requests, one line of JSON each on a pipe, that name a file with a graph. Out: a file with an artefact, an entry in
the disk cache if that is asked for, and one line of JSON: {"id", "seconds"}, with "kept" and "last_error" if there was
an entry to make, or with "error" and "message".

It dies with its parent and takes along the C++ compilers it started: it leads a process group of its own, and a thread
kills the group when the pipe closes or the parent is another process. A thread, as prctl's PDEATHSIG comes when the
*thread* that forked ends. Not a session of its own: the kernel would schedule it as a group with the same share of the
cores as the parent's session, however nice it is (sched_autogroup).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lazy_backend.cache.computation import Key
from lazy_backend.cache.disk import DiskCache, DiskCounts
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.lowering.build import compile_to_bytes
from lazy_backend.lowering.examples import static_examples, symbolic_examples
from lazy_backend.lowering.fx import Signature, to_fx
from lazy_backend.lowering.portable import from_bytes
from lazy_backend.lowering.shapes import Sizes, symbolic_graph

# A compiled graph is serialised by the code that keeps it in inductor's caches. Where they are switched off, a compile
# has caches of its own.
_CACHES_ON: dict[str, dict[str, Any]] = {
    "inductor": {"fx_graph_cache": True, "force_disable_caches": False},
    "functorch": {"enable_autograd_cache": True},
}


def main(read_fd: int, write_fd: int, parent: int) -> None:
    """Serve until the parent closes the pipe or dies."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal is for the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        return
    inbox = _Inbox(read_fd)
    threading.Thread(target=_watch, args=(inbox, parent), daemon=True).start()
    while True:
        _answer(write_fd, json.loads(inbox.get()))


class _Inbox:
    """Lines that came through the pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._rest = b""

    def get(self) -> bytes:
        return self._lines.get()

    def read(self) -> bool:
        """Take what is there; False at the end."""
        data = os.read(self.fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._lines.put(line)
        return bool(data)


def _watch(inbox: _Inbox, parent: int) -> None:
    # a process forked from the parent may hold the pipe open: hence the look at who the parent is
    while os.getppid() == parent:
        ready, _, _ = select.select([inbox.fd], [], [], 1.0)
        if ready and not inbox.read():
            break
    os.killpg(0, signal.SIGKILL)


def _answer(write_fd: int, request: dict[str, Any]) -> None:
    reply: dict[str, Any] = {"id": request["id"]}
    start = time.perf_counter()
    try:
        reply |= _compile(Path(request["request"]), Path(request["result"]))
    except BaseException as error:
        reply.update(error=type(error).__name__, message=str(error)[:4000])
    reply["seconds"] = time.perf_counter() - start
    os.write(write_fd, json.dumps(reply).encode() + b"\n")


def _compile(request: Path, result: Path) -> dict[str, Any]:
    """Returns what there is to say about the disk cache."""
    # here, not above: the first import of the compiler takes seconds, and whoever asked may be gone by then
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.utils import fresh_cache  # internal, checked on 2.13

    text, graph_bytes = request.read_bytes().split(b"\n", 1)
    data = json.loads(text)
    _follow(data["state"])
    graph = from_bytes(graph_bytes)
    constants = [float.fromhex(constant) for constant in data["constants"]]
    promoted = frozenset(data["promoted"])
    symbolic = None if data["sizes"] is None else symbolic_graph(graph, Sizes.from_json(data["sizes"]))
    lowered = graph if symbolic is None else symbolic.graph
    num_symbols = 0 if symbolic is None else len(symbolic.hints)

    def make_module() -> fx.GraphModule:
        return to_fx(lowered, constants, promoted, False, num_symbols)[0]

    signature = Signature(tuple(sorted(promoted)), graph.num_seeds > 0, numbers=False, sizes=num_symbols)
    threads = {"cpp.threads": torch.get_num_threads()}
    # cpp.threads: without it, where it equals the number of cores, parallel regions have as many threads as the process
    # that *runs* them, while their arrays of partial sums have as many places as the one that compiled
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(data["settings"]["inductor"] | _CACHES_ON["inductor"] | threads))
        stack.enter_context(functorch_config.patch(data["settings"]["functorch"] | _CACHES_ON["functorch"]))
        if not data["caches"]:
            stack.enter_context(fresh_cache())
        examples = static_examples(graph, signature) if symbolic is None else symbolic_examples(symbolic, signature)
        artefact = compile_to_bytes(make_module, examples)
    partial = result.with_name("partial")
    partial.write_bytes(artefact)
    partial.replace(result)
    return {} if data["keep"] is None else _keep(artefact, **data["keep"])


def _keep(artefact: bytes, directory: str, max_bytes: int, key: list[list[str]]) -> dict[str, Any]:
    """Put an artefact into the disk cache. Returns what that counted."""
    try:
        cache = DiskCache(directory, max_bytes)
    except CacheRefused as refused:
        return {"kept": asdict(DiskCounts(refused=1)), "last_error": str(refused)}
    cache.put(Key(tuple((name, text) for name, text in key)), artefact)
    return {"kept": asdict(cache.counts()), "last_error": cache.last_error}


def _follow(state: dict[str, Any]) -> None:
    """Set what code generation reads from the process as it is in the parent."""
    torch.set_num_threads(state["threads"])
    torch.set_float32_matmul_precision(state["matmul_precision"])
    torch.set_default_dtype(getattr(torch, state["default_dtype"]))
    torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["deterministic_warn_only"])
    torch.backends.mkldnn.enabled = state["mkldnn"]  # type: ignore[assignment]

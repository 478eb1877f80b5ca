"""The program of the worker process, in which the compiler runs.

In: compile requests as `background.py` writes them: a header that says what to compile and how, and a graph. Out: for
each request, an artefact, an entry in the disk cache if the request asks for one, and a reply header. The header is
{"id", "seconds"}, plus "kept" and "last_error" if an entry was asked for, or "error" and "message" if the compile
failed. For a request that names the file of a run, the artefact is compared with the interpreter in this run, and a
text says how they differ, in place of the artefact. Without a graph, it is judged whether rounding explains how results
differed in that run. See `lifeline.py` for the start and the end of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from typing import Any

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache, DiskCounts
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.lowering.artefacts.environment import follow_state
from lazy_backend.lowering.compilation.build import compile_request
from lazy_backend.lowering.compilation.compiler import load_graph
from lazy_backend.lowering.compilation.instructions import NotAssumed, assumed_instructions, try_instructions
from lazy_backend.lowering.compilation.lifeline import Lifeline
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.ir.portable import from_bytes
from lazy_backend.lowering.plans.evidence import disagreement, judgement
from lazy_backend.ports.replacements import inductor

# Compiled graphs are serialised by the code behind inductor's caches, so the caches are always on. If the user switched
# them off, each compile gets temporary caches of its own.
_CACHES_ON: dict[str, dict[str, Any]] = {
    "inductor": {"fx_graph_cache": True, "force_disable_caches": False},
    "functorch": {"enable_autograd_cache": True},
}

# Seconds to wait for another process that compiles the same graph, as other ranks do, or for one it shares a lock with.
_PATIENCE = 300.0


def main(line: Lifeline) -> None:
    """Serve requests until the parent is gone."""
    line.put({"ready": os.getpid()})
    while True:
        _answer(line, *line.get())


def _answer(line: Lifeline, request: dict[str, Any], graph: bytes) -> None:
    reply: dict[str, Any] = {"id": request["id"]}
    start = time.perf_counter()
    artefact = b""
    try:
        if not graph:
            follow_state(request["state"])
            found = {place: [one.size, one.scale] for place, one in judgement(request["tried_in"]).items()}
            artefact = json.dumps(found).encode()
        elif request["tried_in"] is not None:
            artefact = _try(request, graph).encode()
        elif request["keep"] is None:
            artefact = _compile(request, graph)
        else:
            artefact = _compile_once(request, graph, reply, **request["keep"])
    except BaseException as error:
        reply.update(error=type(error).__name__, message=str(error)[:4000])
    reply["seconds"] = time.perf_counter() - start
    line.put(reply, artefact)


def _try(data: dict[str, Any], graph: bytes) -> str:
    """How what is compiled for one request differs from the interpreter, in a run that was kept."""
    artefact = _compile(data, graph)
    request = CompileRequest.from_json(data["request"], from_bytes(graph), "inductor")
    return disagreement(data["tried_in"], load_graph(artefact, request))


def _compile(data: dict[str, Any], graph_bytes: bytes) -> bytes:
    """The artefact for one request."""
    follow_state(data["state"])
    request = CompileRequest.from_json(data["request"], from_bytes(graph_bytes), "inductor")
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor.settings().patch(data["settings"]["inductor"] | _CACHES_ON["inductor"]))
        stack.enter_context(inductor.autograd_settings().patch(data["settings"]["functorch"] | _CACHES_ON["functorch"]))
        if not data["caches"]:
            stack.enter_context(inductor.fresh_cache())
        with contextlib.suppress(inductor.cpp_error(), NotAssumed), assumed_instructions():
            return compile_request(request)
        if data["keep"] is not None:
            try_instructions(data["keep"]["directory"])
        return compile_request(request)


def _compile_once(
    request: dict[str, Any],
    graph: bytes,
    reply: dict[str, Any],
    directory: str,
    max_bytes: int,
    key: list[list[str]],
) -> bytes:
    """The artefact, which goes to the disk cache; or the one that another process put there meanwhile.

    The reply gets the cache's counts and last error, and says whether the artefact was found.
    """
    try:
        cache = DiskCache(directory, max_bytes)
    except CacheRefused as refused:
        reply.update(kept=asdict(DiskCounts(refused=1)), last_error=str(refused))
        return _compile(request, graph)
    exact = Key(tuple((name, text) for name, text in key))
    with cache.made_once(exact, _PATIENCE) as found:
        artefact = _compile(request, graph) if found is None else found
        reply["found"] = found is not None
        try:
            if found is None:
                cache.put(exact, artefact)
        except Exception as error:  # the compiled artefact must survive any failure of the cache
            cache.last_error = f"{type(error).__name__}: {error}"
            reply.update(kept=asdict(DiskCounts(errors=1)), last_error=cache.last_error)
        else:
            reply.update(kept=asdict(cache.counts()), last_error=cache.last_error)
    return artefact

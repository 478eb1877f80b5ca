"""Graphs as artefacts of a chosen kind, compiled and loaded in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lazy_backend.lowering.artefacts import artefact
from lazy_backend.lowering.artefacts.inductor_module import NotExpressible
from lazy_backend.lowering.compilation import build
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.ir.graph import Graph

Call = Callable[[list[Any]], Sequence[Any]]


def compiled(graph: Graph, kind: str, monkeypatch: pytest.MonkeyPatch, because: str = "") -> Call:
    """The graph as an artefact of this kind, loaded. `because`: what makes it that, if not what is done here."""

    def refuse(*arguments: Any) -> str:
        raise NotExpressible("a test")

    # what the compiler's process sets
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    request = CompileRequest.of(graph, [0.5] * graph.num_constants, "inductor")
    settings = {"cpp.threads": torch.get_num_threads(), "cpp.vec_isa_ok": True}
    with monkeypatch.context() as patch, inductor_config.patch(settings):
        if kind == "light" and not because:
            patch.setattr(build, "runner_of", refuse)
        if kind == "bundled" and not because:  # as for a GPU
            patch.setattr(build, "_is_for_cpu", lambda examples: False)
        with functorch_config.patch("enable_autograd_cache", True):
            data = build.compile_to_bytes(request.module, request.examples())
    header, _ = artefact.unpack(data)
    assert header["kind"] == kind, header.get("reason")
    loaded = artefact.load(data, graph)
    usual = {"native": "", "light": "a test", "bundled": "devices beside the CPU"}
    assert loaded.why_python == (because or usual[kind])
    return loaded.call

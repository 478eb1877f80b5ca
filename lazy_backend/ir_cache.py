"""The trie of recorded programs. Names follow `torch._lazy.ir_cache`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lazy_backend.cache.trie import TrieNode
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import DeviceContext


def dump(path: str) -> None:
    """Write every recorded program of every device to `path` in Graphviz's dot language."""
    lines = ["digraph G {"]
    for context in contexts.get_active_devices():
        with context.lock:
            lines += _edges(context)
    with open(path, "w") as file:
        file.write("\n".join([*lines, "}"]) + "\n")


def _edges(context: DeviceContext) -> Iterator[str]:
    names = {id(root): f'"{context.device} root{_under(*settings)}"' for settings, root in context.trie.roots.items()}
    nodes: list[TrieNode[Call | Cut]] = list(context.trie)
    for number, node in enumerate(nodes):
        label = f"cut: {node.call.reason}" if isinstance(node.call, Cut) else str(node.call.op if node.call else "")
        names[id(node)] = f'"{context.index}.{number} {label}"'
    for node in nodes:
        yield f"  {names[id(node.parent)]} -> {names[id(node)]}"


def _under(force_fallback: str, default_dtype: torch.dtype) -> str:
    """The settings of a root, where they are not those of most programs."""
    under = [force_fallback] if force_fallback else []
    under += [str(default_dtype)] if default_dtype is not torch.float32 else []
    return f" ({', '.join(under)})" if under else ""


def reset() -> None:
    """Forget every recorded program. Pending calls are run first; computations stay cached."""
    for context in contexts.get_active_devices():
        executor.begin_anew(context, "ir_cache.reset", forgets_paths=True)

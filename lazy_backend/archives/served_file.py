"""A served function as one file: its graphs, its weights, and the compiled plans of this processor.

In: `SavedFunction` and plans. Out: an archive; and from it the same function, or why it cannot be served here.

Note [Files of served functions]
The file is an archive that begins with two entries of its own: the graphs as text, and tensors, as `torch.save` writes
them and `torch.load(weights_only=True)` reads them. A tensor that is not in the file is there as one without memory, on
the device "meta". The plans follow, and get into the cache as those of any archive (Note [What is loaded]): those that
were made for another PyTorch, Python or processor are skipped with a warning, and their graphs are interpreted, and
compiled anew. A graph is valid as long as this PyTorch has its operators with the schemas that they had.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lazy_backend.archives import transfer
from lazy_backend.cache.archive import Archive, BrokenArchive, new_archive
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCounts
from lazy_backend.cache.entry import BrokenEntry, encode_key, make_head, split
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.errors import CacheError, CacheWarning
from lazy_backend.errors.sites import user_site, warn_user
from lazy_backend.lowering.ir import portable
from lazy_backend.lowering.ir.graph import Graph, meta_of
from lazy_backend.lowering.plans.policy import ArtefactStore
from lazy_backend.lowering.serving.executor import GraphSignature
from lazy_backend.ports import trees
from lazy_backend.ports.dispatcher import function_schema

_FORMAT = 1
GRAPHS, TENSORS = (Key(((transfer.SERVED, f"{part}, format {_FORMAT}"),)) for part in ("graphs", "tensors"))


@dataclass(frozen=True, slots=True)
class SavedGraph:
    """The graph for some shapes. `inputs`: tensors without memory. `own`: the tensors that it alone uses."""

    graph: Graph
    signature: GraphSignature
    constants: tuple[float, ...]
    inputs: Sequence[torch.Tensor]
    own: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SavedFunction:
    """All that is served. `graphs`: the example's first. `spare`: weights that the example's does not use."""

    name: str
    state_names: frozenset[str]
    graphs: Sequence[SavedGraph]
    weights: Mapping[str, torch.Tensor]
    spare: Mapping[str, torch.Tensor]


class CollectingStore:
    """The plans of the graphs that ask for one, from a store, or just compiled."""

    def __init__(self, store: ArtefactStore | None) -> None:
        self._store = store
        self.plans: dict[Key, bytes] = {}

    def get(self, key: Key) -> bytes | None:
        payload = None if self._store is None else self._store.get(key)
        if payload is not None:
            self.plans[key] = payload
        return payload

    def put(self, key: Key, payload: bytes) -> bool:
        self.plans[key] = payload
        return self._store is not None and self._store.put(key, payload)

    def reject(self, reason: str) -> None:
        pass

    def place(self) -> None:
        """No other process puts plans here, so they come back to this one."""

    def count_elsewhere(self, counts: DiskCounts, last_error: str | None) -> None:
        pass


# ----- writing


def write(path: str | os.PathLike[str], function: SavedFunction, plans: Mapping[Key, bytes]) -> None:
    """Write the file at once and whole. Raises `CacheError` for a graph that has no text, and OSError."""
    tensors = io.BytesIO()
    of_graphs = [(list(one.inputs), dict(one.own)) for one in function.graphs]
    torch.save([dict(function.weights), dict(function.spare), of_graphs], tensors)
    try:
        graphs = json.dumps(
            {
                "name": function.name,
                "state_names": sorted(function.state_names),
                "graphs": [_text_of(one) for one in function.graphs],
            }
        )
    except (portable.NotPortable, NotImplementedError, TypeError) as error:
        raise CacheError(f"{function.name} cannot be saved: {error}\n  at {user_site()}") from None
    with new_archive(Path(path).expanduser(), transfer.description()) as file:
        for key, payload in {GRAPHS: graphs.encode(), TENSORS: tensors.getvalue(), **plans}.items():
            file.add(make_head(encode_key(key), payload, time.time()) + payload)


def _text_of(saved: SavedGraph) -> dict[str, Any]:
    signature = saved.signature
    return {
        "graph": portable.to_bytes(saved.graph).decode(),
        "schemas": _schemas_of(saved.graph),
        "weights": signature.weights,
        "user_inputs": signature.user_inputs,
        "specs": [
            None if spec is None else trees.treespec_dumps(spec) for spec in (signature.in_spec, signature.out_spec)
        ],
        "constants": [constant.hex() for constant in saved.constants],
    }


def _schemas_of(graph: Graph) -> dict[str, str]:
    return {node.op.name(): str(function_schema(node.op)) for node in graph.nodes}


# ----- reading


def read(path: str | os.PathLike[str]) -> SavedFunction:
    """The function; its plans get into the cache. Raises `CacheError` if it cannot be served here, and OSError."""
    file = Path(path).expanduser()
    try:
        graphs, tensors = _own_entries(Archive(file))
    except CacheRefused as refused:
        raise CacheError(str(refused)) from None
    except (BrokenArchive, BrokenEntry) as broken:
        raise CacheError(f"{file}: {broken}\n  at {user_site()}\n  save what is served again") from None
    try:
        function = _function_of(json.loads(graphs), torch.load(io.BytesIO(tensors), weights_only=True))
    except Exception as error:  # whatever is missing here: operators, containers, the device
        raise CacheError(f"{file} cannot be served here: {error}\n  at {user_site()}") from error
    settings = transfer.load(file).other_settings
    if settings:
        warn_user(f"compiled graphs of {file} are not used with these settings: {', '.join(settings)}", CacheWarning)
    return function


def _own_entries(archive: Archive) -> tuple[bytes, bytes]:
    found: dict[Key, bytes] = {}
    for packed in archive:
        if packed.key in (GRAPHS, TENSORS):
            found[packed.key] = split(archive.read(packed))[1]
        if len(found) == 2:
            return found[GRAPHS], found[TENSORS]
    raise BrokenArchive("no served function, or that of another version of lazy_backend")


def _function_of(texts: dict[str, Any], tensors: list[Any]) -> SavedFunction:
    weights, spare, of_graphs = tensors
    graphs = [_graph_of(text, *own) for text, own in zip(texts["graphs"], of_graphs, strict=True)]
    return SavedFunction(texts["name"], frozenset(texts["state_names"]), graphs, weights, spare)


def _graph_of(text: dict[str, Any], inputs: list[torch.Tensor], own: dict[str, torch.Tensor]) -> SavedGraph:
    graph = portable.from_bytes(text["graph"].encode())
    for name, schema in _schemas_of(graph).items():
        if schema != text["schemas"][name]:
            raise ValueError(f"it was saved with {text['schemas'][name]}, and this PyTorch has {schema}")
    in_spec, out_spec = (None if spec is None else trees.treespec_loads(spec) for spec in text["specs"])
    weights, user_inputs = (tuple(map(tuple, text[role])) for role in ("weights", "user_inputs"))
    signature = GraphSignature(weights, user_inputs, tuple(map(meta_of, inputs)), in_spec, out_spec)
    return SavedGraph(graph, signature, tuple(map(float.fromhex, text["constants"])), inputs, own)

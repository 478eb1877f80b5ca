"""Bundles of compiled graphs, as `torch.compiler.save_cache_artifacts` makes them.

In: a call of that function, or of `load_cache_artifacts` with a bundle. Out: the bundle,
with what this package adds; or what was added, handed back.

A process that loads such a bundle must have imported this package: PyTorch refuses a whole bundle if it has a kind of
artefact that nobody registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch.compiler

from lazy_backend.ports.table import BUNDLES


def join_compiler_bundles(
    kind: str, entries: Callable[[], Iterable[tuple[str, bytes]]], take: Callable[[bytes], object]
) -> None:
    """Have PyTorch's bundles carry `entries`, by name, as a `kind` of their own; loading one calls `take`.

    Only what is saved is read from disk, and only then: to record each artefact when it is used, as inductor does,
    would keep all of them in memory in every process. Inductor itself calls what is below the public function, for
    bundles in which our graphs have no place.
    """
    if not BUNDLES.fits():
        return
    from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

    class BundledGraph(CacheArtifact):
        """One compiled graph: a whole entry of the disk cache, which has checksums and key of its own."""

        def populate_cache(self) -> None:
            take(self.content)

        @staticmethod
        def type() -> str:
            return kind

    CacheArtifactFactory.register(BundledGraph)
    original = torch.compiler.save_cache_artifacts

    @functools.wraps(original)
    def save_cache_artifacts(*args: Any, **kwargs: Any) -> Any:
        for hash, entry in entries():
            CacheArtifactManager.record_artifact(kind, hash, entry)
        return original(*args, **kwargs)

    BUNDLES.put(torch.compiler, "save_cache_artifacts", save_cache_artifacts)

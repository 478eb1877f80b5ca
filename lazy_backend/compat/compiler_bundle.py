"""Our compiled graphs in the bundle of `torch.compiler.save_cache_artifacts`.

In: a call of that function, or of `load_cache_artifacts` with a bundle. Out: the bundle, with the graphs that this
process used or made, as they are in the disk cache; or those graphs in the disk cache.

A process that loads such a bundle must have imported this package, which `import torch` does where it is installed:
PyTorch refuses a whole bundle if it has a kind of artefact that nobody registered.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.compiler

# internal, checked on 2.13: what inductor's own caches use. There is no public way to add a kind of artefact
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from lazy_backend.archives.transfer import take_entry, used_entries

KIND = "lazy_backend"


class LazyBackendArtifact(CacheArtifact):
    """One compiled graph: a whole entry of the disk cache, which has checksums and key of its own."""

    def populate_cache(self) -> None:
        take_entry(self.content)

    @staticmethod
    def type() -> str:
        return KIND


def join_compiler_bundles() -> None:
    """Have PyTorch's bundles carry our graphs too.

    Only what is saved is read from disk, and only then: to record each artefact when it is used, as inductor does,
    would keep all of them in memory in every process. Inductor itself calls what is below the public function, for
    bundles in which our graphs have no place.
    """
    CacheArtifactFactory.register(LazyBackendArtifact)
    original = torch.compiler.save_cache_artifacts

    @functools.wraps(original)
    def save_cache_artifacts(*args: Any, **kwargs: Any) -> Any:
        for hash, entry in used_entries():
            CacheArtifactManager.record_artifact(KIND, hash, entry)
        return original(*args, **kwargs)

    torch.compiler.save_cache_artifacts = save_cache_artifacts

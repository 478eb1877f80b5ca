"""The storage of a lazy tensor: what `tensor.untyped_storage()` returns, and what is saved to and loaded from files.

In: a `LazyStorage`, or bytes from a file. Out: a `torch.UntypedStorage` that says it is on `lazy`. Asking it for its
bytes or its address is a read, which cuts the graph. The address is that of the backing memory, so that libraries can
tell which tensors share memory (safetensors, transformers).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import reads
from lazy_backend.lowering.ir.graph import extent
from lazy_backend.ports.tensor_types import StandInStorage
from lazy_backend.tensors.state import LazyStorage
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.transfers import counted_download


class LazyUntypedStorage(StandInStorage):
    """Stands for bytes on the backing device and holds none itself.

    Covers what torch.save, torch.load and pickle ask of a storage (torch.serialization, torch.storage). Writing through
    it raises: a write that no operator recorded would be lost to the graph.
    """

    lazy_device: torch.device
    lazy_storage: LazyStorage | None
    _plain: torch.UntypedStorage | None

    @classmethod
    def of(cls, storage: LazyStorage) -> LazyUntypedStorage:
        return cls._make(storage.context.device, storage, None)

    @classmethod
    def loaded(cls, plain: torch.UntypedStorage, device: torch.device) -> LazyUntypedStorage:
        """Bytes from a file, which become a lazy storage when the first tensor is set to them."""
        return cls._make(device, None, plain)

    @classmethod
    def _make(
        cls, device: torch.device, storage: LazyStorage | None, plain: torch.UntypedStorage | None
    ) -> LazyUntypedStorage:
        made = cls(0)
        made.lazy_device = device
        made.lazy_storage = storage
        made._plain = plain
        return made

    @property
    def plain(self) -> torch.UntypedStorage:
        """The bytes on the backing device, computed first if need be."""
        if self._plain is not None:
            return self._plain
        assert self.lazy_storage is not None
        return reads.read(self.lazy_storage, "storage").untyped_storage()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.lazy_device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyUntypedStorage) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> int:
        return id(self._plain if self.lazy_storage is None else self.lazy_storage)

    @hide_internals
    def data_ptr(self) -> int:
        return self.plain.data_ptr()

    def nbytes(self) -> int:
        storage = self.lazy_storage
        if storage is None:
            return self.plain.nbytes()
        return 0 if storage in storage.context.given_back else _full_size(storage)

    def size(self) -> int:
        return self.nbytes()

    def __len__(self) -> int:
        return self.nbytes()

    def __getitem__(self, place: Any) -> Any:
        return self.cpu()[place]

    def __repr__(self) -> str:
        return f"{self.cpu()}".replace("device=cpu", f"device={self.lazy_device}")

    def tolist(self) -> list[int]:
        return list(self.cpu())

    def cpu(self) -> torch.UntypedStorage:
        plain = self.plain
        return counted_download(plain.nbytes(), plain.cpu)

    def clone(self) -> torch.UntypedStorage:
        return LazyUntypedStorage.loaded(self.plain.clone(), self.lazy_device)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def is_shared(self) -> bool:
        return False

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"the storage of a lazy tensor is read-only\n  at {user_site()}\n"
            "  write through a tensor, as in tensor.copy_(...), or copy it with tensor.cpu() first"
        )

    def resize_(self, size: int) -> LazyUntypedStorage:  # type: ignore[override]
        """Give the memory back (0 bytes), or take it again, as `fully_shard` does. See Note [Memory given back]."""
        storage = self.lazy_storage
        if storage is not None and size == _full_size(storage):  # of memory for no elements, also 0
            with storage.context.lock:
                storage.context.given_back.discard(storage)
        elif storage is not None and size == 0:
            with storage.context.lock:
                storage.context.given_back.add(storage)
        elif size != self.nbytes():
            raise RuntimeError(
                f"the storage of a lazy tensor cannot be resized to {size} bytes: it has its {self.nbytes()} bytes, or "
                f"none\n  at {user_site()}\n  resize the tensor, as in tensor.resize_(...)"
            )
        return self

    __setitem__ = fill_ = copy_ = byteswap = share_memory_ = refuse

    def __reduce__(self) -> Any:  # type: ignore[override]
        # torch's own version would refer to this very object in the file; multiprocessing sends tensors this way
        return _load_storage, (self.cpu(), str(self.lazy_device))

    def follow_plain(self) -> None:
        # the legacy format reads the bytes after it has made the tensors
        loaded = None if self.lazy_storage is None else self.lazy_storage.tensor
        if loaded is not None:
            loaded.untyped_storage().copy_(self.plain)


def _full_size(storage: LazyStorage) -> int:
    return extent(storage.meta) * storage.meta.dtype.itemsize


def data_ptr(tensor: LazyTensor) -> int:
    """`LazyTensor.data_ptr`: the address of the first element on the backing device. A read, which cuts the graph.

    Shows which tensors share memory. Writes to the tensor that are recorded later also go there.
    """
    return reads.read(tensor._data, "data_ptr").data_ptr()


def _load_storage(plain: torch.UntypedStorage, device: str) -> LazyUntypedStorage:
    return LazyUntypedStorage.loaded(plain, torch.device(device))


@hide_internals
def untyped_storage(tensor: LazyTensor) -> LazyUntypedStorage:
    """`LazyTensor.untyped_storage`. Runs nothing by itself."""
    return LazyUntypedStorage.of(tensor._data.storage)

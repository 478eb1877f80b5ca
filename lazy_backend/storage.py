"""The storage object that stands for lazy memory while tensors are saved and loaded."""

from __future__ import annotations

from typing import Any

import torch

from lazy_backend.tensor import LazyStorage


class LazyUntypedStorage(torch.UntypedStorage):
    """Bytes on the backing device that say they are on `lazy`.

    Holds no bytes itself but refers to the `plain` storage that does. Covers what torch.save, torch.load and pickle ask
    of a storage (torch.serialization, torch.storage; checked on 2.13).
    """

    plain: torch.UntypedStorage
    lazy_device: torch.device
    lazy_storage: LazyStorage | None

    @classmethod
    def of(cls, plain: torch.UntypedStorage, device: torch.device, storage: LazyStorage | None) -> LazyUntypedStorage:
        made = cls(0)
        made.plain = plain
        made.lazy_device = device
        made.lazy_storage = storage
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.lazy_device

    @property
    def _cdata(self) -> int:
        # identity, by which torch.save finds storages it has written
        return self.plain._cdata

    def data_ptr(self) -> int:
        return self.plain.data_ptr()

    def nbytes(self) -> int:
        return self.plain.nbytes()

    def size(self) -> int:
        return self.plain.nbytes()

    def cpu(self) -> torch.UntypedStorage:
        return self.plain.cpu()

    def _write_file(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain.cpu()._write_file(*args, **kwargs)

    def _set_from_file(self, *args: Any, **kwargs: Any) -> Any:
        self.plain._set_from_file(*args, **kwargs)  # type: ignore[attr-defined]
        # the legacy format reads the bytes after it has made the tensors
        loaded = None if self.lazy_storage is None else self.lazy_storage.tensor
        if loaded is not None:
            loaded.untyped_storage().copy_(self.plain)
        return self

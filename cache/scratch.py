"""Temporary folders that are removed in the end, however their process ended.

In: nothing. Out: `ScratchFolder`, new, private to the user, and locked while a process uses it.

Note [Whose scratch folder]
A folder is locked (flock, on the directory itself) by the process that made it and by every process to which that one
passes the descriptor. The kernel releases the lock when the last of them ends, so a folder that can be locked has no
owner any more. Each process removes such folders when it makes its first. Cleaners of temporary files
(systemd-tmpfiles) skip locked folders too. A new folder is empty until it is locked, so an empty folder is removed only
when it has been there for a while. On a file system without locks, nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lazy_backend.cache.folder import CacheRefused, default_directory

if sys.platform != "win32":
    import fcntl

# An empty folder this old has no owner: a process puts a file into its folder as soon as it is locked. Seconds.
EMPTY_AFTER = 60.0
# How long processes that were just killed may still write. Seconds.
_PATIENCE = 1.0

_NAME = re.compile(r"lazy_backend_\d+_[a-z0-9_]{8}")
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)

_swept_by = 0  # pid of the process that has swept


class ScratchFolder:
    """An open, locked folder. Made by `make_scratch_folder`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._owner = os.getpid()

    def is_gone(self) -> bool:
        """Whether the folder was removed."""
        return not self.path.is_dir()

    def remove(self) -> None:
        """Remove the folder and its contents; in a forked child, only release the folder. Never raises."""
        if self._owner == os.getpid():
            remove_tree(self.path)
        self.release()

    def release(self) -> None:
        """Release this process's hold on the lock."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the duration of a block. Raises OSError if none can be made."""
    folder = make_scratch_folder()
    try:
        yield folder.path
    finally:
        folder.remove()


def make_scratch_folder() -> ScratchFolder:
    """A new folder, where temporary files go or elsewhere if that place is gone or full. Raises OSError."""
    failed: OSError | None = None
    for place in _places():
        _sweep_once(place)
        try:
            return _make_in(place)
        except OSError as error:
            failed = failed or error
    raise failed or FileNotFoundError("there is no folder for temporary files")


def _places() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield tempfile.gettempdir()  # `tempfile` remembers its first answer
    yield from ("/tmp", "/var/tmp")
    with contextlib.suppress(CacheRefused):
        yield str(default_directory())


def _make_in(place: str) -> ScratchFolder:
    path = Path(tempfile.mkdtemp(prefix=f"lazy_backend_{os.getpid()}_", dir=place))  # mode 0700
    descriptor = -1
    try:
        descriptor = os.open(path, _DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks
            _lock_folder(descriptor)
        # makes the folder non-empty; if not even this file fits, another place is tried
        (path / "owner").write_text(f"process {os.getpid()}\n")
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        remove_tree(path)
        raise
    return ScratchFolder(path, descriptor)


def _lock_folder(descriptor: int) -> None:
    """Raises OSError if another process has the lock, or if the file system has no locks."""
    if sys.platform == "win32":
        raise OSError("folders cannot be locked")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sweep_once(place: str) -> None:
    global _swept_by
    if _swept_by != os.getpid():  # without a lock, which a fork could leave held: sweeping twice does no harm
        _swept_by = os.getpid()
        sweep(place)


def sweep(place: str) -> None:
    """Remove the folders of this user's processes that have ended. Never raises."""
    with contextlib.suppress(OSError), os.scandir(place) as found:
        paths = [Path(entry.path) for entry in found if _NAME.fullmatch(entry.name)]
        for path in paths:
            with contextlib.suppress(OSError):
                _remove_unused(path)


def _remove_unused(path: Path) -> None:
    descriptor = os.open(path, _DIRECTORY)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return
        _lock_folder(descriptor)
        is_empty = not os.listdir(descriptor)
        if is_empty and abs(time.time() - status.st_mtime) < EMPTY_AFTER:
            return
        if os.path.samestat(status, os.lstat(path)):
            remove_tree(path)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder, even while processes that were just killed still write to it. Never raises."""
    end = time.monotonic() + _PATIENCE
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path) or time.monotonic() > end:
            return
        time.sleep(0.01)

"""Temporary folders that are gone in the end, however their process ended.

In: nothing. Out: `ScratchFolder`, new, private to the user, and locked while somebody uses it.

Note [Whose scratch folder]
A folder is locked (flock, on the directory itself) by the process that made it and by whoever it hands the descriptor
to. The kernel ends the lock with the last of them, so a folder that can be locked belongs to nobody any more. Each
process clears those when it makes its first. Cleaners of temporary files (systemd-tmpfiles) pass by locked folders too.
Between its making and its lock a folder is empty; so an empty one is cleared only when it has been there for a while.
On a file system without locks nothing is cleared.
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

# A process puts its first file into a folder as soon as that is locked. Seconds.
EMPTY_AFTER = 60.0
# What was killed a moment ago may still write. Seconds.
_PATIENCE = 1.0

_NAME = re.compile(r"lazy_backend_\d+_[a-z0-9_]{8}")
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)

_swept_by = 0  # the process that has looked for folders of dead ones


class ScratchFolder:
    """An open, locked folder. Made by `make_scratch_folder`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._owner = os.getpid()

    def is_gone(self) -> bool:
        """Whether somebody removed it."""
        return not self.path.is_dir()

    def remove(self) -> None:
        """Remove it with all that is in it; in a forked child only let go of it. Never raises."""
        if self._owner == os.getpid():
            remove_tree(self.path)
        self.release()

    def release(self) -> None:
        """Give up the lock, as far as this process holds it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the length of a block. Raises OSError if none can be made."""
    folder = make_scratch_folder()
    try:
        yield folder.path
    finally:
        folder.remove()


def make_scratch_folder() -> ScratchFolder:
    """A new folder: where temporary files go, or elsewhere if that place is gone or full. Raises OSError."""
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
        yield tempfile.gettempdir()  # as it was when it was first asked for
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
        # so that it is not empty; and where not even this fits, another place is taken
        (path / "owner").write_text(f"process {os.getpid()}\n")
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        remove_tree(path)
        raise
    return ScratchFolder(path, descriptor)


def _lock_folder(descriptor: int) -> None:
    """Raises OSError if somebody else has the lock, or if there are none."""
    if sys.platform == "win32":
        raise OSError("folders cannot be locked")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sweep_once(place: str) -> None:
    global _swept_by
    if _swept_by != os.getpid():  # without a lock, which a fork could leave locked: twice does no harm
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
    """Remove a folder, also while processes that were just killed write their last. Never raises."""
    end = time.monotonic() + _PATIENCE
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path) or time.monotonic() > end:
            return
        time.sleep(0.01)

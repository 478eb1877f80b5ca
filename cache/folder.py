"""A directory that only its user can write to.

In: a path. Out: `Folder`, through which files in it are opened, listed and removed, or `CacheRefused`.
What is loaded from a cache is executed as code, so a directory or a file is refused if it belongs to another user or if
others may write to it. See Note [Private folder] and Note [Named folders].

Note [Private folder]
The directory is opened once; owner and mode are those of the open directory, and every file is opened relative to it.
So another user who can rename or link directories above it cannot swap in a different one between check and use.
Windows has neither numeric owners nor paths relative to an open directory: nothing is checked there, and the directory
is as private as the user's profile, which contains it by default.

Note [Named folders]
A shared folder or a file that the user named, to load graphs from it, may belong to somebody else: to name it is to
trust its owner. Nobody but its owner (and root) may be able to write it, though, nor to put something else in its
place: all folders above it must be the owner's, the user's or root's, and writable by nobody else. So what lies under
/tmp, where anybody could have made it before, must be the user's own or root's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import platformdirs  # here, though only the default needs it: its 4 ms would otherwise fall in the first step

VARIABLE = "LAZY_BACKEND_CACHE_DIR"

_ELSEWHERE = f"set {VARIABLE} to a directory of your own"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# not in `os` on every system: O_DIRECTORY, O_NOFOLLOW and O_NONBLOCK on POSIX, O_BINARY on Windows
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
# O_NONBLOCK: if a pipe has an entry's name, opening it must not wait for its writer
_NAMED_FILE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FILE = getattr(os, "O_NOFOLLOW", 0) | _NAMED_FILE


class CacheRefused(Exception):
    """A cache that must not be used. Says what is wrong, where, and how to fix it."""

    def __init__(self, what: str, path: Path | str, remedy: str, refused: str = "disk cache not used") -> None:
        super().__init__(f"{refused}: {what}\n  at {path}\n  to mend it: {remedy}")


@dataclass(frozen=True, slots=True)
class Stored:
    """One file as listed, not opened."""

    name: str
    size: int  # bytes
    modified: float  # seconds since the epoch


def default_directory() -> Path:
    """The cache directory of this package within the user's: `~/.cache/lazy_backend` on Linux."""
    path = platformdirs.user_cache_path("lazy_backend", appauthor=False)
    if not path.is_absolute():
        raise CacheRefused("the user has no home directory", path, _ELSEWHERE)
    return path


class Folder:
    """An open directory. Made by `open_folder`. `trusted`: owners beside the user, see Note [Named folders]."""

    def __init__(self, path: Path, descriptor: int | None, trusted: Collection[int] = ()) -> None:
        self.path = path
        self._trusted = trusted
        self._descriptor = descriptor  # None on Windows
        if descriptor is not None:
            # not at exit: a thread may still be writing
            weakref.finalize(self, os.close, descriptor).atexit = False

    def check(self) -> None:
        """Raise `CacheRefused` if others can write to the directory by now. 1 µs."""
        if self._descriptor is not None:
            _check_directory(os.fstat(self._descriptor), self.path, self._trusted)

    def is_gone(self) -> bool:
        """Whether the directory was removed since it was opened."""
        if self._descriptor is None:
            return not self.path.is_dir()
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError:
            # NFS: the removed directory's descriptor is stale
            return True

    def open(self, name: str) -> BinaryIO:
        """Raises FileNotFoundError; CacheRefused if the file is not a plain file that only the user can write."""
        path = self.path / name
        try:
            descriptor = os.open(self._at(name), os.O_RDONLY | _FILE, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CacheRefused("an entry is a symbolic link", path, _removing(path)) from None
            raise
        try:
            _check_file(os.fstat(descriptor), path, self._trusted)
        except CacheRefused:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")

    def create(self, name: str) -> int:
        """A descriptor of a new file that only the user can read or write."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        return os.open(self._at(name), flags, 0o600, dir_fd=self._descriptor)

    def replace(self, name: str, by: str) -> None:
        """Rename `by` to `name`, atomically for every reader."""
        os.replace(self._at(by), self._at(name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> bool:
        """Remove a file. Returns whether it is gone now, removed by this process or by another."""
        try:
            os.unlink(self._at(name), dir_fd=self._descriptor)
        except FileNotFoundError:
            return True
        except OSError:
            # Windows: another process is reading the file
            return False
        return True

    def holds(self, name: str, file: os.stat_result) -> bool:
        """Whether `name` still refers to that very file."""
        try:
            found = os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, file)

    def set_time(self, name: str, descriptor: int, seconds: float) -> None:
        """Set an open file's modification time, if the file system allows that."""
        with contextlib.suppress(OSError):
            os.utime(descriptor if os.utime in os.supports_fd else self._at(name), (seconds, seconds))

    def files(self) -> list[Stored]:
        """Every plain file."""
        with self._listable() as place, os.scandir(place) as found:
            return [stored for entry in found if (stored := _stored(entry)) is not None]

    @contextlib.contextmanager
    def _listable(self) -> Iterator[int | Path]:
        if self._descriptor is None:
            yield self.path
            return
        # opened anew: scans of one open directory share one position, so two threads would disturb each other
        descriptor = os.open(".", _DIRECTORY, dir_fd=self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _at(self, name: str) -> str:
        return name if self._descriptor is not None else str(self.path / name)


def open_folder(path: Path, create: bool, shared: bool = False) -> Folder | None:
    """The directory at `path`, made private to the user if `create`; None if it is missing and not to be made.

    `shared`: it may be another user's. See Note [Named folders].
    """
    try:
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _opened(path, shared)
    except FileNotFoundError:
        if not create:
            return None
        raise CacheRefused("its directory was removed while it was made", path, "try again") from None
    except (NotADirectoryError, FileExistsError):
        raise CacheRefused("its directory is no directory", path, _removing(path)) from None
    except OSError as error:
        raise CacheRefused(f"its directory cannot be opened: {error.strerror}", path, _ELSEWHERE) from None


def open_named_file(path: Path) -> BinaryIO:
    """A file that the user named. Raises OSError, and `CacheRefused`: see Note [Named folders]."""
    descriptor = os.open(path, os.O_RDONLY | _NAMED_FILE)
    try:
        _check_named_file(os.fstat(descriptor), path)
    except CacheRefused:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def write_all(descriptor: int, parts: Sequence[bytes]) -> None:
    """Write all of `parts`, in as many calls as that takes."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]


def _opened(path: Path, shared: bool) -> Folder:
    if sys.platform == "win32":
        os.listdir(path)
        return Folder(path, None)
    descriptor = os.open(path, _DIRECTORY)
    try:
        trusted = _trusted_by_name(os.fstat(descriptor), path, "disk cache not used") if shared else ()
    except CacheRefused:
        os.close(descriptor)
        raise
    folder = Folder(path, descriptor, trusted)
    folder.check()
    _check_links(path, trusted)
    return folder


def _trusted_by_name(status: os.stat_result, path: Path, refused: str) -> tuple[int, ...]:
    """The owners that the user trusts by naming `path`. See Note [Named folders]."""
    owner, user = status.st_uid, os.geteuid()
    if owner in (0, user):
        return (0,)
    for parent in path.resolve().parents:
        above = parent.stat()
        if above.st_uid not in (0, user, owner) or above.st_mode & _OTHERS_MAY_WRITE:
            what = f"it belongs to user {owner}, and {parent} can be written by others, who could have put it there"
            raise CacheRefused(what, path, "copy it to a folder of your own", refused)
    return (0, owner)


def _check_named_file(status: os.stat_result, path: Path) -> None:
    refused = "file of compiled graphs not loaded"
    if not stat.S_ISREG(status.st_mode):
        raise CacheRefused("it is no plain file", path, "name the file that was exported", refused)
    if sys.platform == "win32":
        return
    _trusted_by_name(status, path, refused)
    if status.st_mode & _OTHERS_MAY_WRITE:
        remedy = f"chmod go-w {shlex.quote(str(path))}, if you know that nobody did"
        raise CacheRefused(f"other users may write it, mode {_mode(status)}", path, remedy, refused)


def _check_directory(status: os.stat_result, path: Path, trusted: Collection[int]) -> None:
    _check_owner(status, "its directory", path, _ELSEWHERE, trusted)
    if status.st_mode & _OTHERS_MAY_WRITE:
        remedy = f"chmod 700 {shlex.quote(str(path))}"
        raise CacheRefused(f"other users may write its directory, mode {_mode(status)}", path, remedy)


def _check_file(status: os.stat_result, path: Path, trusted: Collection[int]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CacheRefused("an entry is no plain file", path, _removing(path))
    if sys.platform == "win32":
        return
    _check_owner(status, "an entry", path, _removing(path), trusted)
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise CacheRefused(f"other users may write an entry, mode {_mode(status)}", path, _removing(path))


def _check_links(path: Path, trusted: Collection[int]) -> None:
    """Refuse symbolic links in `path` unless they are the user's or root's: nobody else decides where the cache is."""
    for link in _links(path):
        status = link.lstat()
        if status.st_uid != 0:
            _check_owner(status, "a symbolic link to its directory", link, _ELSEWHERE, trusted)


def _check_owner(status: os.stat_result, what: str, path: Path, remedy: str, trusted: Collection[int]) -> None:
    if sys.platform != "win32" and status.st_uid != os.geteuid() and status.st_uid not in trusted:
        raise CacheRefused(f"{what} belongs to user {status.st_uid}, not to user {os.geteuid()}", path, remedy)


def _links(path: Path) -> Iterator[Path]:
    """Every symbolic link in `path`. The path was opened before, so its links form no cycle."""
    for part in [*reversed(path.parents), path]:
        if part.is_symlink():
            yield part
            yield from _links(part.parent / os.readlink(part) / path.relative_to(part))
            return


def _stored(entry: os.DirEntry[str]) -> Stored | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        # removed since it was listed
        return None
    return Stored(entry.name, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):o}"


def _removing(path: Path) -> str:
    return f"rm -r {shlex.quote(str(path))}"

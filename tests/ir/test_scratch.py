"""Temporary folders, and what is left of them when a process is killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lazy_backend.cache import scratch
from lazy_backend.cache.scratch import make_scratch_folder, scratch_folder, sweep

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs locks on folders")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


HOLDER = """
import sys, time
from lazy_backend.cache.scratch import make_scratch_folder
folder = make_scratch_folder()
(folder.path / "inner").mkdir()
(folder.path / "inner" / "file").write_text("text")
print(folder.path, flush=True)
time.sleep(600)
"""


def start_holder(place: Path) -> tuple[subprocess.Popen[str], Path]:
    environment = {**os.environ, "TMPDIR": str(place), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_gone_after_its_block(place: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == place
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_folder_in_use_stays_and_that_of_a_killed_process_goes(place: Path) -> None:
    process, folder = start_holder(place)
    sweep(str(place))
    assert (folder / "inner" / "file").exists()
    process.kill()
    process.communicate()
    assert folder.exists()
    sweep(str(place))
    assert not folder.exists()


def test_the_first_folder_of_a_process_clears_those_of_dead_ones(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, folder = start_holder(place)
    process.kill()
    process.communicate()
    monkeypatch.setattr(scratch, "_swept_by", 0)
    with scratch_folder():
        assert not folder.exists()


def test_a_folder_stays_while_another_process_has_its_lock(place: Path) -> None:
    folder = make_scratch_folder()
    sleeper = subprocess.Popen(["sleep", "600"], pass_fds=[folder.descriptor])
    folder.release()
    sweep(str(place))
    assert folder.path.exists()
    sleeper.send_signal(signal.SIGKILL)
    sleeper.wait()
    sweep(str(place))
    assert not folder.path.exists()


def test_a_folder_that_is_just_being_made_stays(place: Path) -> None:
    folder = place / "lazy_backend_1_abcdefgh"
    folder.mkdir(mode=0o700)
    sweep(str(place))
    assert folder.exists()
    os.utime(folder, (0, 0))
    sweep(str(place))
    assert not folder.exists()


def test_others_folders_links_and_other_names_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lazy_backend_inductor_abcdefgh", "lazy_backend_1_abcdefgh.txt", "other")
    for name in names:
        (place / name / "inner").mkdir(parents=True)
    target = place / "target"
    target.mkdir()
    (target / "file").write_text("text")
    (place / "lazy_backend_2_abcdefgh").symlink_to(target)
    of_another = place / "lazy_backend_3_abcdefgh"
    (of_another / "inner").mkdir(parents=True)
    with monkeypatch.context() as context:
        context.setattr(os, "geteuid", lambda: os.getuid() + 1)
        sweep(str(place))
    assert of_another.exists()
    sweep(str(place))
    assert not of_another.exists()
    assert all((place / name).exists() for name in names)
    assert (target / "file").exists()


def test_where_the_place_is_gone_another_is_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "gone"))
    with scratch_folder() as folder:
        assert folder.exists()
        assert folder.parent != place / "gone"


def test_where_the_place_is_full_another_is_taken_and_nothing_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(path: Path, text: str) -> int:
        if path.is_relative_to(place):
            raise OSError(28, "No space left on device")
        return path.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", write_text)
    with scratch_folder() as folder:
        assert folder.parent != place
    assert list(place.iterdir()) == []


def test_where_there_is_no_place_the_error_says_why(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_places", lambda: iter([str(place / "gone"), "/nonexistent"]))
    with pytest.raises(FileNotFoundError, match="gone"):
        make_scratch_folder()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_folder(place: Path) -> None:
    folder = make_scratch_folder()
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert folder.path.exists()
    sweep(str(place))
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()

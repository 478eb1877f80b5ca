"""Every test starts from the same global state, and leaves no run and no error behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
import torch
from harness import Unseen, reset_state, set_unseen_number, settle, thread_state

import lazy_backend
from lazy_backend import metrics
from lazy_backend.cache.disk import DiskCache
from lazy_backend.lowering.device_graphs.fake import FakeDevice
from lazy_backend.lowering.devices.registration import use_device
from lazy_backend.lowering.ir.passes import check_passes
from lazy_backend.metrics.names import entry_of
from lazy_backend.ports.table import NATIVE_RECORDER
from lazy_backend.recording import native
from lazy_backend.recording.native import recorder_key
from lazy_backend.tensors.contexts import contexts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="also run tests marked slow")
    parser.addoption("--record-in-python", action="store_true", help="do without the recorder in C++")
    parser.addoption("--verify-compiled", action="store_true", help="try compiled graphs, none of which may be refused")
    parser.addoption("--device-graphs", action="store_true", help="launch runs as graphs of a fake device")


def _record_natively(config: pytest.Config) -> bytes | None:
    """Record known calls in C++ from the start, by a recorder that is built once for this version of it.

    Returns the recorder, for programs that tests start.
    """
    cache = getattr(config, "cache", None)
    if config.getoption("--record-in-python") or cache is None or not NATIVE_RECORDER.fits():
        return None
    place = cache.mkdir("recorder") / f"{recorder_key().hash_hex()}"
    if not place.exists():
        made = place.with_suffix(f".{os.getpid()}")
        made.write_bytes(native.build())
        made.replace(place)
    recorder = place.read_bytes()
    assert native.native_recorder.start(recorder)
    return recorder


def pytest_configure(config: pytest.Config) -> None:
    check_passes()
    recorder = _record_natively(config)
    # a shell that starts a run in the background lets it ignore Ctrl-C, and so would all that tests start
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: takes more than a few seconds; run with --runslow")
    config.addinivalue_line("markers", "scenario: whole programs, five seconds and more; `make scenarios` runs them")
    if hasattr(config, "workerinput"):
        return  # a process of pytest-xdist has the folders of the one that started it
    # one compiler cache for the run, new each time: neither compiles twice nor profits from an earlier run
    folder = tempfile.TemporaryDirectory(prefix="lazy_backend_inductor_")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
    # and programs that tests start keep out of the user's own cache
    os.environ["LAZY_BACKEND_CACHE_DIR"] = os.path.join(folder.name, "lazy_backend")
    if recorder is not None:
        DiskCache(os.environ["LAZY_BACKEND_CACHE_DIR"], 2**30).put(recorder_key(), recorder)
    config.add_cleanup(folder.cleanup)
    # most programs of tests are small, and are to be compiled all the same
    os.environ["LAZY_BACKEND_COMPILE_AFTER_OPERATORS"] = "0"
    # a program that crashes has no traceback, so those that tests start print where they were
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # programs that tests start keep their byte code: without, each compiles the package anew, 0.7 s
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# Files of minutes or with tests of half a minute: they come first, or one process would run the last of them alone.
_LONG = (
    "test_interruption.py",
    "test_background.py",
    "test_soak.py",
    "test_package.py",
    "test_gpu_check.py",
    "test_collectives.py",
    "test_inductor.py",
    "test_fully_shard.py",
    "test_grad_scaler.py",
    "test_with_accelerate.py",
    "test_with_transformers.py",
    "test_cache_travels.py",
    "test_refused_values.py",
    "test_eager_programs.py",
    "test_conformance.py",
    "test_ports_off.py",
    "test_inductor_defects.py",
    "test_public_faults.py",
    "test_small_device.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))
    if config.getoption("--runslow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: needs --runslow"))


@pytest.fixture
def unseen() -> Iterator[Unseen]:
    yield set_unseen_number
    set_unseen_number(0)


@pytest.fixture(scope="session", autouse=True)
def seeds_of_devices_that_are_here() -> Iterator[None]:
    """`torch.manual_seed` keeps the seed for devices that are not here, each time with its whole traceback, 2 ms."""
    with pytest.MonkeyPatch.context() as patches:
        for module in (torch.cuda, torch.xpu, torch.mtia):
            if not module.is_available():
                patches.setattr(module, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def garbage_of_the_module() -> None:
    """A search for garbage leaves out what was there before the module: torch, its compiler and 8,000 tests, 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def device_graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--device-graphs`, what recurs is launched: not what CI runs, but what a change of the launcher should."""
    if not request.config.getoption("--device-graphs"):
        yield
        return
    with use_device(FakeDevice(repeats_calls=True)):
        yield


@pytest.fixture(autouse=True)
def fresh_state(request: pytest.FixtureRequest, device_graphs: None) -> Iterator[None]:
    reset_state()
    verifies = request.config.getoption("--verify-compiled")
    if verifies:
        lazy_backend.config.verify_compiled = "always"
    before = thread_state()
    yield
    unraised = settle()
    assert not (verifies and metrics.counter_value("PlanRefused")), "a trial refused what the compiler gave"
    assert thread_state() == before, "the test has left modes of PyTorch on"
    assert not unraised, f"nobody was told of {unraised}"
    unknown = [name for name in (*metrics.counter_names(), *metrics.metric_names()) if entry_of(name) is None]
    assert not unknown, f"docs/metrics.md does not say what these count: {unknown}"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as it is built. A broken link, an anchor that is missing or a page left out fails here."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    shared = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.mktemp("shared")
    folder = shared / "site"
    with filelock.FileLock(shared / "site.lock"):  # one process builds it for all
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(shared / "built")]
            root, variables = Path(__file__).resolve().parent.parent, {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=variables)
            assert done.returncode == 0, done.stderr
            (shared / "built").rename(folder)
    return folder


@pytest.fixture
def two_devices() -> Iterator[tuple[torch.device, torch.device]]:
    """`lazy:0` and `lazy:1`, both new."""
    contexts.reset()
    lazy_backend.config.num_devices = 2
    yield torch.device("lazy:0"), torch.device("lazy:1")
    settle_error = settle()
    contexts.reset()
    assert not settle_error

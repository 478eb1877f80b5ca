"""Programs in forks behave as those in new Python processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_fork

PROGRAMS = {
    "output": "import sys; print('out'); print('error', file=sys.stderr); print('late', end='')",
    "names": "print(__name__, sorted(globals()), __import__('sys').modules['__main__'].__name__)",
    "environment": "import os; print(os.environ['LAZY_BACKEND_COMPILE'], os.getcwd()); os.system('echo $LAZY_DEBUG')",
    "arguments": "import sys; print(sys.argv, sys.path[0], sys.stdin.read(), sys.flags)",
    "an_error": "def fail():\n    1 / 0\nfail()",
    "an_error_with_a_cause": "try:\n    1 / 0\nexcept Exception as error:\n    raise ValueError('a') from error",
    "a_hook": "import sys; sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_lineno)\n1 / 0",
    "syntax": "print(1",
    "a_status": "raise SystemExit(7)",
    "a_message": "raise SystemExit('why')",
    "atexit": "import atexit; atexit.register(print, 'at exit'); print('before')",
    "a_thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('joined'))).start()",
    "a_daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "a_signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "a_fork": "import os\nif child := os.fork(): os.waitpid(child, 0)\nprint(bool(child))",
    "a_pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
}
OF_PYTORCH = {
    "settings": "import lazy_backend; print(lazy_backend.config.compile)",
    "an_error_of_ours": "import torch\nx = torch.ones(2, device='lazy') + 1\nprint(x)\nx @ torch.ones(3)",
}


def assert_fork_is_like_a_process(code: str, file: Path | None, folder: Path, **environment: str) -> None:
    command = [sys.executable, "-c", code] if file is None else [sys.executable, str(file)]
    variables = {**os.environ, "LAZY_BACKEND_COMPILE": "off", **environment}
    expected = subprocess.run(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    found = run_fork(code, folder, variables, file)
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_fork_does_what_a_new_process_does(code: str, tmp_path: Path) -> None:
    assert_fork_is_like_a_process(code, None, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.parametrize("name", ["names", "arguments", "an_error", "an_error_with_a_cause", "syntax"])
def test_a_fork_runs_a_file_as_a_new_process_does(name: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAMS[name])
    assert_fork_is_like_a_process(PROGRAMS[name], file, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.parametrize("code", OF_PYTORCH.values(), ids=OF_PYTORCH.keys())
def test_a_fork_has_pytorch_as_a_new_process_has(code: str, tmp_path: Path) -> None:
    assert_fork_is_like_a_process(code, None, tmp_path)


def test_each_fork_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    code = "import numpy, random, torch; print(torch.initial_seed(), numpy.random.rand(), random.random())"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    one, other = (run_fork(code, tmp_path, environment).stdout.split() for _ in range(2))
    assert len({*one, *other}) == 6


def test_a_fork_starts_without_this_package(tmp_path: Path) -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('lazy_backend')])"
    assert run_fork(code, tmp_path, {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).stdout == "[]\n"


def test_a_fork_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert run_fork("import time; time.sleep(600)", tmp_path, environment, timeout=0.1).returncode == -9


@pytest.mark.parametrize("name", ["output", "atexit", "a_thread", "a_daemon", "a_status", "an_error"])
def test_a_fork_that_is_not_dismantled_ends_alike(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    expected, found = (run_fork(PROGRAMS[name], tmp_path, environment, is_dismantled=way) for way in (True, False))
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)

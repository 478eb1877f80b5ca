"""The package as users get it: names, import order, autoload."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import lazy_backend
import lazy_backend_autoload as first_use
from lazy_backend.diagnostics import page

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = """
BackingDevice CacheError CacheWarning CaptureError CaptureWarning CompileRecord CompileWarning DeviceError Difference
ExecutionError ExecutionNotAllowedError Explanation GraphCutWarning GraphExecutorState InputError LazyBackendError
LazyBackendWarning LazyTensor PoisonedTensorError ProfileMetrics Served StrictModeError SyncRecord TooManyGraphsError
TooManyRequestsError add_step_closure allow_execution cache capture captures computation config debug eager_mode
explain get_bailout_depth get_fusion_strategy get_tensor_id ir_cache is_lazy load_served manual_seed mark_step
memory_stats metrics progress register_device report save serve set_bailout_depth set_fusion_strategy step strict sync
sync_multi to_cpu uncapture wait_device_ops wait_for_compiles
"""


def run_python(code: str, cwd: Path, **environment: str) -> str:
    """Standard output of `code` in a process of its own."""
    env = {**os.environ, "LAZY_BACKEND_COMPILE": "off", **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names() -> None:
    assert sorted(lazy_backend.__all__) == PUBLIC.split()


def test_modules_of_the_users_do_not_collide(tmp_path: Path) -> None:
    for name in ("cache", "lowering"):
        (tmp_path / f"{name}.py").write_text(f"mine = '{name}'\n")
    code = """
import cache, lowering, torch
print(cache.mine, lowering.mine, torch.ones(2, device='lazy').sum().item())
"""
    assert run_python(code, tmp_path) == "cache lowering 2.0\n"


def test_import_torch_alone_is_enough(tmp_path: Path) -> None:
    assert run_python("import torch; print(torch.ones(2, device='lazy').device)", tmp_path) == "lazy:0\n"


USE = "import torch, lazy_backend; print(torch.ones(2, device='lazy').sum().item(), lazy_backend.__file__)"


def copy_of_the_checkout(folder: Path) -> Path:
    """What git would give, without its history."""
    copied = folder / "checkout"
    copied.mkdir()
    folders, files = ("lazy_backend", "lowering", "cache"), ("pyproject.toml", "README.md", "LICENSE")
    for name in (*folders, *files, "lazy_backend_autoload.py"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copied)
    return copied


@pytest.mark.scenario
def test_a_checkout_works_without_being_installed(tmp_path: Path) -> None:
    checkout = copy_of_the_checkout(tmp_path)
    expected = f"2.0 {checkout / 'lazy_backend' / '__init__.py'}\n"
    assert run_python(USE, checkout) == expected  # -c looks in the folder first, before what is installed
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run_python(USE, elsewhere, PYTHONPATH=str(checkout)) == expected
    assert run_python(USE, elsewhere, PYTHONPATH=str(checkout), TORCH_DEVICE_BACKEND_AUTOLOAD="0") == expected


@pytest.mark.scenario
def test_a_program_in_a_checkout_is_compiled(tmp_path: Path) -> None:
    code = """
import torch, lazy_backend
x = torch.ones(2, device="lazy")
for _ in range(3):
    y = (x * 2 + 1).tolist()
lazy_backend.wait_for_compiles()
print(y, lazy_backend.metrics.counter_value("CompileFailed"), lazy_backend.metrics.counter_value("Compile"))
"""
    settings = {"LAZY_BACKEND_BACKEND": "inductor", "LAZY_BACKEND_COMPILE": "background"}
    assert run_python(code, copy_of_the_checkout(tmp_path), **settings) == "[3.0, 3.0] 0 1\n"


@pytest.mark.slow
def test_a_checkout_works_after_it_was_installed_from(tmp_path: Path) -> None:
    checkout, site = copy_of_the_checkout(tmp_path), tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*command, str(site), "."], cwd=checkout, check=True, timeout=300)
    assert run_python(USE, tmp_path, PYTHONPATH=str(site)).endswith(f" {site / 'lazy_backend' / '__init__.py'}\n")
    expected = f"2.0 {checkout / 'lazy_backend' / '__init__.py'}\n"
    assert run_python(USE, checkout, PYTHONPATH=str(site)) == expected
    assert (site / "lazy_backend_autoload.py").exists()


def test_a_copy_of_the_package_alone_takes_nobodys_folders(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lazy_backend", tmp_path / "lazy_backend", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("lowering", "cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("print('mine')\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    code = "import lazy_backend; print(len(lazy_backend.__path__))"
    # what it lacks comes from the installed package, if from anywhere
    done = subprocess.run([sys.executable, "-Wignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "mine" not in done.stdout


def test_a_package_that_cannot_be_imported_is_told_at_the_first_use(tmp_path: Path) -> None:
    broken = tmp_path / "lazy_backend"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('no such disk')\n")
    code = """
import warnings
warnings.simplefilter("error")
import torch
print(torch.ones(2).sum().item())
for _ in range(2):
    try:
        torch.ones(2, device="lazy")
    except RuntimeError as error:
        print(error)
"""
    printed = run_python(code, tmp_path, PYTHONPATH=str(ROOT))
    assert printed.startswith("2.0\n")
    assert printed.count("lazy_backend cannot be imported: OSError: no such disk") == 2


def test_torch_knows_no_device_if_the_hooks_cannot_stand(tmp_path: Path) -> None:
    code = """
import warnings
import torch, lazy_backend_autoload
lazy_backend_autoload.put_hooks = lambda: 1 / 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lazy_backend_autoload.autoload()
print([str(one.message) for one in caught])
"""
    printed = run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "is not there: ZeroDivisionError" in printed
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in printed


@pytest.mark.scenario
@pytest.mark.parametrize(
    "use",
    [
        "torch.zeros(2, device='lazy')",
        "torch.randn(2, device='lazy')",
        "torch.ones(2).to('lazy')",
        "torch.tensor([1.0], device='lazy')",
        "torch.nn.Linear(2, 2).to('lazy').weight",
        "torch.lazy.device_count() and torch.empty(1, device='lazy')",
    ],
)
@pytest.mark.parametrize("mode", ["torch.no_grad()", "torch.inference_mode()", "torch.autocast('cpu')"])
def test_the_first_use_loads_the_package(tmp_path: Path, use: str, mode: str) -> None:
    code = f"""
import sys, torch
from torch.utils import swap_tensors
assert "lazy_backend" not in sys.modules
with {mode}:
    x = {use}
assert isinstance(x, sys.modules["lazy_backend"].LazyTensor), type(x)
assert swap_tensors is torch.utils.swap_tensors
print(x.device)
"""
    assert run_python(code, tmp_path) == "lazy:0\n"


def test_a_parameter_without_a_shape_cannot_come_first(tmp_path: Path) -> None:
    code = """
import torch
try:
    torch.nn.LazyLinear(2, device="lazy")
except RuntimeError as error:
    print(error)
print(torch.nn.LazyLinear(2, device="lazy")(torch.ones(1, 3, device="lazy")).shape)
"""
    printed = run_python(code, tmp_path)
    assert "import lazy_backend before" in printed
    assert printed.endswith("torch.Size([1, 2])\n")


@pytest.mark.parametrize(("name", "value"), [("LAZY_BACKEND_LOAD", "1"), ("ACCELERATE_TORCH_DEVICE", "lazy:0")])
@pytest.mark.parametrize("imported", ["lazy_backend", "torch", "torch, lazy_backend"])
def test_a_variable_asks_for_the_package_at_once(tmp_path: Path, imported: str, name: str, value: str) -> None:
    code = f"import {imported}, sys; print('lazy_backend' in sys.modules)"
    assert run_python(code, tmp_path, **{name: value}) == "True\n"


def test_looking_at_all_modules_is_no_use_of_the_device(tmp_path: Path) -> None:
    code = """
import sys, torch
found = [getattr(module, name, None) for module in list(sys.modules.values()) for name in ("data", "foo", "__file__")]
print("lazy_backend" in sys.modules, hasattr(torch.lazy, "no_such_name"))
"""
    assert run_python(code, tmp_path) == "False False\n"


def test_the_hook_knows_the_names_of_the_device_module() -> None:
    assert {name for name in dir(torch.lazy) if not name.startswith("_")} == first_use.DEVICE_MODULE_NAMES


def test_threads_may_use_the_device_first_together(tmp_path: Path) -> None:
    code = """
import threading, torch
found = []
threads = [threading.Thread(target=lambda: found.append(torch.ones(3, device="lazy").sum().item())) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(found)
"""
    assert run_python(code, tmp_path) == f"{[3.0] * 8}\n"


def test_torch_lazy_is_there_without_an_import_of_it(tmp_path: Path) -> None:
    code = """
import torch
x = torch.ones(2, device="lazy") + 1
torch._lazy.mark_step()
import torch.lazy
print(torch.lazy.synchronize(), torch.get_device_module("lazy") is torch.lazy, x.tolist())
"""
    assert run_python(code, tmp_path) == "None True [2.0, 2.0]\n"


def test_autoload_can_be_turned_off(tmp_path: Path) -> None:
    code = "import torch, sys; print('lazy_backend' in sys.modules)"
    assert run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False\n"


def test_the_import_loads_no_heavy_part_of_torch(tmp_path: Path) -> None:
    code = "import torch, sys; print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])"
    assert run_python(code, tmp_path) == "[]\n"


def test_a_second_backend_is_refused(tmp_path: Path) -> None:
    code = """
import torch, lazy_backend, torch._lazy.ts_backend
try:
    torch._lazy.ts_backend.init()
except RuntimeError as error:
    print(error)
"""
    assert "cannot be used with lazy_backend" in run_python(code, tmp_path)


def test_a_backend_that_was_there_before_is_refused(tmp_path: Path) -> None:
    code = """
import torch, torch._lazy.ts_backend
torch._lazy.ts_backend.init()
try:
    import lazy_backend
except RuntimeError as error:
    print(error)
"""
    out = run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "cannot share the lazy device" in out


def test_the_device_module() -> None:
    module = torch.get_device_module("lazy")
    assert module.is_available()
    assert module.device_count() == 1
    assert module.current_device() == 0
    state = module.get_rng_state()
    first = torch.rand(3, device="lazy").tolist()
    module.set_rng_state(state)
    assert torch.rand(3, device="lazy").tolist() == first
    module.manual_seed(3)
    module.synchronize()


def test_a_wrong_index_says_which_there_are() -> None:
    with pytest.raises(lazy_backend.DeviceError, match=r"no device lazy:7\n  devices: lazy:0 to lazy:0"):
        torch.ones(2, device="lazy:7")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("bakend", "eager", "no setting 'bakend'"),
        ("compile", "later", "one of 'background', 'foreground', 'off'"),
        ("debug", -1, "at least 0"),
        (
            "device",
            "small",
            r"registered first.\n  Fix: import its package and call lazy_backend.register_device\(.small.\)",
        ),
    ],
)
def test_a_bad_setting_raises_where_it_is_written(name: str, value: object, text: str) -> None:
    with pytest.raises((AttributeError, ValueError), match=text):
        setattr(lazy_backend.config, name, value)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_a_page_beside_the_readme_lead_somewhere(page: str) -> None:
    """Those of docs/ are checked when the site is built."""
    targets = re.findall(r"\]\((?!http|#)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_package_holds_every_asset() -> None:
    patterns = re.search(r'^"lazy_backend.diagnostics" = (\[.*\])$', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert patterns is not None
    assets = [f"assets/{file.name}" for file in (ROOT / "lazy_backend" / "diagnostics" / "assets").iterdir()]
    assert len(assets) >= 10
    assert all(any(fnmatch(asset, pattern) for pattern in ast.literal_eval(patterns[1])) for asset in assets)


def test_the_report_scripts_are_those_of_the_page() -> None:
    scripts = {file.name for file in (ROOT / "lazy_backend" / "diagnostics" / "assets").glob("*.js")}
    assert scripts == {*page.SCRIPTS, "echarts.min.js"}


def test_the_highest_debug_level_runs(tmp_path: Path) -> None:
    code = """
import torch, lazy_backend
for _ in range(3):
    x = torch.ones(2, device="lazy") + 1
    lazy_backend.mark_step()
"""
    run_python(code, tmp_path, LAZY_DEBUG="4", LAZY_BACKEND_BACKEND="eager", LAZY_BACKEND_COMPILE="foreground")

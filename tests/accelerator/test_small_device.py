"""A small accelerator from C++ behind the lazy device: the page for makers of accelerators, operators, a training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import run_program
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "accelerators.md"

pytestmark = [
    pytest.mark.scenario,  # the first one builds the device
    pytest.mark.skipif(not cpp_extension.is_ninja_available(), reason="needs ninja, to build the device"),
]

PATHS = f"""
import sys

sys.path[:0] = {[str(ROOT / folder) for folder in ("tests/accelerator", "examples", "tools")]}
"""
PAGE_BLOCKS = re.findall(
    r"^<!-- not run: the tests of the small device run it -->\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S
)


def run_on_small(code: str, folder: Path, blocks: int = 1) -> str:
    """What a program prints that begins with blocks of the page, the first of which registers the device."""
    return run_program("\n".join([PATHS, *PAGE_BLOCKS[:blocks], code]), folder, LAZY_BACKEND_DEVICE="")


def test_the_page_runs(tmp_path: Path) -> None:
    assert len(PAGE_BLOCKS) == 3
    run_on_small("assert small_device.native.num_kernels() > 0", tmp_path, blocks=2)


def test_the_page_compares_operators(tmp_path: Path) -> None:
    """On a device that calls operators, as its first block leaves it."""
    pytest.importorskip("expecttest", reason="torch.testing's databases need expecttest")
    run_on_small("import warnings\nwarnings.simplefilter('ignore')\n" + PAGE_BLOCKS[2], tmp_path)


def test_what_is_computed_lies_on_the_device(tmp_path: Path) -> None:
    run_on_small(
        """
x = torch.arange(6.0, device="lazy").view(2, 3)
before = small_device.native.num_kernels()
y = (x @ x.t()).relu()
assert y._backing_tensor.device.type == "small"
assert small_device.native.num_kernels() > before
assert torch.equal(y.cpu(), torch.arange(6.0).view(2, 3) @ torch.arange(6.0).view(2, 3).t())
assert torch.lazy.device_count() == 1 and torch.lazy.memory_allocated() == small_device.native.memory_allocated()
assert torch.Generator("lazy") is not None
torch.lazy.synchronize()
with torch.autocast("lazy"):  # the device casts nothing, as in eager
    assert (y @ y).dtype is torch.float32
""",
        tmp_path,
    )


def test_a_sample_of_operators_does_what_eager_does(tmp_path: Path) -> None:
    """All that differ are printed. Eager is that of the small device."""
    pytest.importorskip("expecttest", reason="torch.testing's databases need expecttest")
    run_on_small(
        """
import warnings, zlib
warnings.simplefilter("ignore")
from conformance_suite.cases import list_cases, operators
from conformance_suite.checks import Mismatch, compare_targets, make_programs
from conformance_suite.programs import spread
from conformance_suite.reasons import UNINITIALIZED
from conformance_suite.targets import Lazy, Target

class Behind(Target):
    device = "small"
    foreach = True

lazy, behind, wrong, count = Lazy(), Behind(), [], 0
for variant in ("forward", "gradients", "in-place"):
    for case in list_cases(["op"], variants=[variant], modes=["interpreted"]):
        op = operators()[case.name]
        supported = op.supported_backward_dtypes("cpu") if variant == "gradients" else op.supported_dtypes("cpu")
        if case.dtype != "float32" or torch.float32 not in supported or zlib.crc32(case.name.encode()) % 40:
            continue
        for program in spread(make_programs(case), 3):
            count += 1
            try:
                compare_targets(program, lazy, behind, case.name not in UNINITIALIZED)
            except Mismatch as mismatch:
                wrong.append(f"{case.key}, {program.label}: {mismatch}")
        lazy.reset()
assert count > 50 and not wrong, "\\n".join([str(count), *wrong])
""",
        tmp_path,
    )


def test_the_digits_example_trains_as_eager_does(tmp_path: Path) -> None:
    """An epoch, captured: the losses are those of eager on the small device, bit for bit."""
    run_on_small(
        """
import train_digits
torch.set_num_threads(1)
eager, lazy = (train_digits.train(device, epochs=1) for device in ("small", "lazy"))
assert len(lazy.losses) == len(eager.losses) > 20
assert torch.equal(lazy.losses, eager.losses)
assert lazy_backend.metrics.counter_value("RegionJump") > 0
""",
        tmp_path,
    )


def test_settings_stay_as_the_program_left_them(tmp_path: Path) -> None:
    """The device's own compiler is taken where the setting names none, and the setting does not change."""
    code = """
seen = []

def compiler(module, examples):
    seen.append(module)
    return module.forward

device = SmallDevice("small")
device.compile_backend = compiler
lazy_backend.register_device(device)
config = lazy_backend.config
config.compile, config.compile_after_operators, config.num_profiled_runs = "foreground", 0, 0

def run():
    for _ in range(3):
        kept = torch.ones(3, device="lazy").exp().sum()
        lazy_backend.mark_step(wait=True)

run()
assert config.backend is None and len(seen) == 1, seen
with config.patch(backend="eager"):
    run()
    assert config.backend == "eager" and len(seen) == 1
"""
    begin = PAGE_BLOCKS[0][: PAGE_BLOCKS[0].index("lazy_backend.register_device")]
    run_program("\n".join([PATHS, begin, code]), tmp_path, LAZY_BACKEND_DEVICE="", LAZY_BACKEND_BACKEND="")


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    run_on_small(
        """
def error_of(device):
    try:
        lazy_backend.register_device(device)
    except (lazy_backend.DeviceError, TypeError, ValueError) as error:
        return str(error)

assert "before the first" in error_of("small")
assert "Fix: lazy_backend.register_device('small'); 'lazy:0' is then 'small:0'" in error_of("small:0")
assert "cannot run what it recorded" in error_of("lazy")
assert "cannot run what it recorded" in error_of("lazy:0")
assert "pass 'small'" in error_of("privateuseone")
assert "import the device's package first" in error_of("absent")
assert "or a BackingDevice, got int" in error_of(3)
""",
        tmp_path,
    )

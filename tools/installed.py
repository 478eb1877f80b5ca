"""The package as it is installed: device, compiler and report work, and nothing of the checkout is used.

    python installed.py CHECKOUT      # in a folder outside of it

In: an environment with the package. Out: a line, or an AssertionError. tools/release.py and .ci/run call it.
"""

import sys
from importlib.metadata import entry_points, files
from pathlib import Path

import torch  # knows the device through an entry point

assert "lazy_backend" not in sys.modules
x = torch.ones(3, device="lazy")
assert (x + 1).sum().item() == 6
assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]  # a host constant; numpy is not installed here
assert [e.value for e in entry_points(group="torch.backends", name="lazy_backend")] == [
    "lazy_backend_autoload:autoload"
]

package = Path(sys.modules["lazy_backend"].__file__).resolve()
assert package.parent.parent.name == "site-packages", package
assert Path(sys.argv[1]).resolve() not in package.parents, package
assert "lazy_backend/py.typed" in {str(file) for file in files("lazy_backend")}

import lazy_backend  # noqa: E402 - the same package that torch loaded

assert Path(lazy_backend.__file__).resolve() == package
for _ in range(20):  # what recurs is compiled, in a process of its own; so small a graph if it does so often
    assert (x * 2).sum().item() == 6
assert lazy_backend.wait_for_compiles(timeout=600)
assert (x * 2).sum().item() == 6
assert lazy_backend.metrics.counter_value("Compile") == 1, lazy_backend.metrics.short_report()
assert "Findings" in lazy_backend.report("report.html").read_text()  # its script and style are in the wheel
print(f"lazy_backend {lazy_backend.__version__} works as installed, with torch {torch.__version__}")

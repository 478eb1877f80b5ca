"""A release: sdist and wheel, each checked in an empty environment.

    python tools/release.py                    # dist/, checked with every supported PyTorch
    python tools/release.py --torch 2.13.0     # with one
    python tools/release.py --bases .venv-2.14.1 .venv-2.15.0    # whose PyTorch is taken instead of downloaded

In: the checkout, and a network to install from. Out: `dist/` with an sdist and the wheel that was built from it, and an
exit status of 0 if both work where nothing else is installed: the wheel with every PyTorch, the sdist with the first.
`tools/installed.py` is what runs there, and then the self-check, `python -m lazy_backend`. The sdist takes the place of
the wheel in the environment of the first PyTorch, so what both depend on is installed once. With `--bases` packages of
those environments are within reach there, after the installed one's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.13.0", "2.14.1", "2.15.0")
CHECK = Path(__file__).resolve().parent / "installed.py"


def build(folder: Path, scratch: Path) -> tuple[Path, Path]:
    """The sdist and the wheel. The wheel is made of the sdist, so nothing that it needs may be missing there."""
    python = _environment(scratch / "build")
    _run([python, "-m", "pip", "install", "--quiet", "build"])
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools would pack files that were deleted since
    _run([python, "-m", "build", "--outdir", str(folder), str(ROOT)])
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check(package: Path, torch: str, scratch: Path, base: Path | None) -> None:
    """Install `package` where there is nothing else, but for what an environment has that is the base; and use it.

    A package that was checked with this PyTorch before is removed there first, and only it.
    """
    folder = scratch / torch
    is_new = not folder.exists()
    python = _environment(folder) if is_new else str(folder / "bin" / "python")
    if not is_new:
        _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "lazy_backend"])
    if is_new and base is not None:
        (own,) = Path(python).parent.parent.glob("lib/python*/site-packages")
        (own / "base.pth").write_text(f"{_packages_of(base)}\n")
    constraints = scratch / f"constraints-{torch}.txt"
    constraints.write_text(
        re.sub(r"^torch==.*$", f"torch=={torch}", (ROOT / "constraints.txt").read_text(), flags=re.M)
    )
    # no byte code of what is never imported: 20 s
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    _run([*install, "--constraint", str(constraints), str(package)])
    # nothing of the checkout may be within reach
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    outside.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    outside["LAZY_BACKEND_CACHE_DIR"] = str(scratch / f"cache-{torch}{package.suffix}")  # each compiles by itself
    _run([python, str(shutil.copy(CHECK, scratch)), str(ROOT)], cwd=scratch, env=outside)
    _run([python, "-m", "lazy_backend"], cwd=scratch, env=outside)


def _packages_of(environment: Path) -> Path:
    (found,) = environment.resolve().glob("lib/python*/site-packages")
    return found


def _version_in(environment: Path) -> str:
    """The version of PyTorch in an environment, without its build."""
    (found,) = _packages_of(environment).glob("torch-*.dist-info")
    return found.name.removeprefix("torch-").removesuffix(".dist-info").partition("+")[0]


def _environment(folder: Path) -> str:
    _run([sys.executable, "-m", "venv", str(folder)])
    return str(folder / "bin" / "python")


def _run(command: Sequence[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    print("release:", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, cwd=cwd, env=env, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=",".join(VERSIONS), help="comma-separated versions of PyTorch")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of sdist and wheel, made anew")
    parser.add_argument("--bases", nargs="*", type=Path, default=[], help="environments, each for its PyTorch")
    arguments = parser.parse_args()
    bases = {_version_in(one): one for one in arguments.bases}
    versions = arguments.torch.split(",")
    shutil.rmtree(arguments.out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        scratch = Path(name)
        sdist, wheel = build(arguments.out.resolve(), scratch)
        for version in versions:
            check(wheel, version, scratch, bases.get(version))
        check(sdist, versions[0], scratch, bases.get(versions[0]))
    print(f"{sdist.name} and {wheel.name} work with PyTorch {', '.join(versions)}")


if __name__ == "__main__":
    main()

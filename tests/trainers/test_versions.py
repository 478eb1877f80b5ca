"""What is said about packages that are missing, too different from the tested ones, or changed inside."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lazy_backend import LazyBackendError, LazyBackendWarning
from lazy_backend.integrations import versions
from lazy_backend.integrations.versions import TESTED, changed_inside, check_version

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


def found(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(versions, "version", lambda package: version)


def test_the_tested_versions_are_those_that_the_tests_install() -> None:
    lines = set(CONSTRAINTS.read_text().splitlines())
    assert {f"{package}=={version}" for package, version in TESTED.items()} <= lines


@pytest.mark.parametrize("version", ["5.23.0", "5.23.1", "5.24.0.dev0", "5.99"])
def test_the_same_or_a_newer_version_is_fine(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, version)
    check_version("transformers")


def test_an_older_one_of_the_same_major_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "5.2.1")
    with pytest.warns(LazyBackendWarning, match=r"transformers 5\.2\.1 is older than 5\.23\.0"):
        check_version("transformers")


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0", "unknown"])
def test_another_major_version_is_an_error(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, version)
    with pytest.raises(LazyBackendError, match=rf"{version} is installed(?s:.*)pip install 'transformers>=5.23.0,<6'"):
        check_version("transformers")


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(LazyBackendError, match=r"lightning is not installed(?s:.*)pip install 'lightning==2\.6\.6'"):
        check_version("lightning")


def test_a_changed_package_is_told_by_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "5.99.0")
    assert "transformers 5.99.0 has no is_fake_tensor" in str(changed_inside("transformers", "is_fake_tensor"))

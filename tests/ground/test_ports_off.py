"""Each port made unfit: programs compute what they do in eager, and a line says what is off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import run_program

import lazy_backend  # noqa: F401  # its ports
from lazy_backend.ports.port import VARIABLE, Port, check_all, ports

PROGRAM = Path(__file__).with_name("training_without_a_port.py")


def names(port: Port, *parts: str) -> bool:
    return any(part in getattr(expectation, "path", "") for expectation in port.expects for part in parts)


def concerns_inductor(port: Port) -> bool:
    """The table has them last."""
    return list(ports).index(port.name) >= list(ports).index("Inductor")


def test_all_ports_fit() -> None:
    assert [str(port) for port in check_all() if port.obstacle() is not None] == []


@pytest.mark.scenario
@pytest.mark.parametrize("name", ports)
def test_programs_are_right_without_the_port(name: str, tmp_path: Path) -> None:
    port = ports[name]
    settings = {
        VARIABLE: name,
        "LAZY_BACKEND_COMPILE": "foreground"
        if concerns_inductor(port) or names(port, "_dynamo", "torch.fx")
        else "off",
        "LAZY_BACKEND_BACKEND": "inductor" if concerns_inductor(port) else "eager",
        "LAZY_BACKEND_CACHE_DIR": str(tmp_path),
    }
    code = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\nimport {PROGRAM.stem} as program\n"
    printed = run_program(f"{code}program.main({name!r}, {port.essential})", tmp_path, **settings)
    said = json.loads(printed.splitlines()[-1])
    if port.essential:
        return  # the error says it
    assert len(said) == len(set(said)) <= 1, said
    assert all(f"{name} is off" in text and port.without in text for text in said), said

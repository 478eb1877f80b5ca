"""A sample of PyTorch's database of operators: the lazy device beside eager on the device behind it."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import pytest
import torch
from backing import BACKING, graphs

import lazy_backend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

# One operator in so many. On the CPU, tests/cpu has more of them, so few are enough to try this test.
_SHARE = 12 if BACKING == "cuda" else 40

# Samples of each.
_SAMPLES = 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["forward", "gradients", "in-place"])
@pytest.mark.parametrize("mode", ["interpreted", "compiled"])
def test_operators_do_what_eager_does(mode: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that differ are listed. Compiled: each program three times, so that its graph may be captured as well."""
    pytest.importorskip("expecttest", reason="torch.testing's databases need expecttest")
    # which they do when they are imported, for the whole process: other tests set these flags
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from conformance_suite.cases import Case, list_cases, operators
    from conformance_suite.checks import Mismatch, compare_targets, make_programs
    from conformance_suite.programs import spread
    from conformance_suite.reasons import UNINITIALIZED
    from conformance_suite.targets import Lazy, Target

    class Behind(Target):
        """Eager on the device behind the lazy one."""

        device = BACKING
        foreach = True

    chosen = [
        case
        for case in list_cases(["op"], variants=[variant], modes=["interpreted"])
        if case.dtype == "float32" and zlib.crc32(case.name.encode()) % _SHARE == 0
        if _is_supported(operators()[case.name], variant)
    ]
    assert chosen
    settings = {"compile": "off"} if mode == "interpreted" else {"compile": "foreground", "backend": "aot_eager"}
    lazy, behind, wrong = Lazy(), Behind(), []
    with lazy_backend.config.patch(**settings), graphs("off" if mode == "interpreted" else "auto"):
        for case in chosen:
            assert isinstance(case, Case)
            for program in spread(make_programs(case), _SAMPLES):
                try:
                    for _ in range(1 if mode == "interpreted" else 3):
                        compare_targets(program, lazy, behind, case.name not in UNINITIALIZED)
                except Mismatch as mismatch:
                    wrong.append(f"{case.key}, {program.label}: {mismatch}")
            lazy.reset()
    assert not wrong, "\n".join(wrong)


def _is_supported(op: object, variant: str) -> bool:
    found = op.supported_backward_dtypes if variant == "gradients" else op.supported_dtypes  # type: ignore[attr-defined]
    return torch.float32 in found(BACKING)

"""Those who listen: `TORCH_TRACE`, whose events tlparse shows, and `logging`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from harness import run_python

import lazy_backend

LOOP = """
import torch
import lazy_backend
lazy_backend.config.backend = "eager"
model = torch.nn.Linear(4, 4).to("lazy")
optimizer = torch.optim.SGD(model.parameters())
for step in range(6):
    loss = model(torch.ones(2, 4).to("lazy")).sum()
    if step == 3:
        loss.item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def train() -> None:
    exec(LOOP, {})
    lazy_backend.wait_for_compiles()


def test_torch_trace_has_steps_and_compiles(tmp_path: Path) -> None:
    run_python(LOOP + "lazy_backend.wait_for_compiles()\n", tmp_path, TORCH_TRACE=str(tmp_path))
    (file,) = tmp_path.glob("*.log")
    events, payload = [], ""
    for line in reversed(file.read_text().splitlines()):
        if line.startswith("\t"):
            payload = line[1:] + payload
            continue
        event = json.loads(line[line.index("{") :])
        if str(event.get("artifact", {}).get("name")).startswith("lazy_"):
            assert event["artifact"]["encoding"] == "json"
            events.insert(0, (event["artifact"]["name"], json.loads(payload)))
        payload = ""
    syncs = [record for name, record in events if name == "lazy_sync"]
    assert [record["cause"] for record in syncs] == ["an optimizer's step"] * 3 + ["item()"] + [
        "an optimizer's step"
    ] * 3
    assert [record["outcome"] for record in syncs[:2]] == ["miss", "hit, level 1"]
    assert syncs[3]["difference"]["kind"] == "length"
    assert "compiled" in [record["outcome"] for name, record in events if name == "lazy_compile"]


@pytest.mark.parametrize(
    ("name", "level", "texts"),
    [
        ("lazy_backend.cuts", logging.INFO, ["by item() at"]),
        ("lazy_backend.recompiles", logging.INFO, ["miss", "compiled in", "unlike program"]),
        ("lazy_backend", logging.DEBUG, ["by an optimizer's step", "hit, level 1", "by item()", "compiled in"]),
    ],
)
def test_logging_has_them(
    fresh_state: None, caplog: pytest.LogCaptureFixture, name: str, level: int, texts: list[str]
) -> None:
    with caplog.at_level(level, name), lazy_backend.config.patch(mark_steps="auto"):
        train()
    found = [record.getMessage() for record in caplog.records if record.name.startswith(name)]
    for text in texts:
        assert any(text in message for message in found), text


def test_nothing_is_said_to_nobody(tmp_path: Path) -> None:
    code = f"""
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)  # as in a program that logs what it does
exec({LOOP!r})
from lazy_backend.diagnostics.history import SyncRecord
SyncRecord.to_dict = None
exec({LOOP!r})
"""
    assert "lazy_backend" not in run_python(code, tmp_path)

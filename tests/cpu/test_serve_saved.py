"""Files of served functions: one process saves, another one serves without the module, with the plans of the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn

import lazy_backend
from lazy_backend import CacheError, CacheWarning, InputError, config, serve
from lazy_backend.archives import served_file
from lazy_backend.cache.archive import Archive, new_archive
from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.artefacts import environment

FEW, MANY, EVEN_MORE = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (2, 5, 7))


class Network(nn.Module):
    """Has a buffer in no state_dict, a tensor that only other shapes use, and a result in a dict."""

    offset: torch.Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.many = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x) * 0.7 + self.offset
        return {"out": y * self.many if len(x) > 4 else y}


def saved(path: Path, weights: bool = True, module: nn.Module | None = None) -> nn.Module:
    module = Network().eval() if module is None else module
    served = serve(module, FEW)
    served(MANY)
    served.save(path, weights=weights)
    return module


@torch.no_grad()
def assert_serves(served: lazy_backend.Served, module: nn.Module, exactly: bool = True) -> None:
    for x in (FEW, MANY):
        (assert_same if exactly else torch.testing.assert_close)(served(x), module(x))


@pytest.fixture(params=["interpreted", "eager"])
def backend(request: pytest.FixtureRequest) -> None:
    config.compile = "off" if request.param == "interpreted" else "foreground"
    config.backend = "eager"


@pytest.mark.usefixtures("backend")
def test_a_loaded_function_is_that_which_was_saved(tmp_path: Path) -> None:
    module = saved(tmp_path / "file")
    served = lazy_backend.load_served(tmp_path / "file", max_requests=1)
    assert_serves(served, module)
    assert served.shapes == [((2, 8),), ((5, 8),)]
    other = Network(seed=1).eval()
    other.offset.copy_(module.offset)
    served.swap_weights(other.state_dict())
    assert_serves(served, other)
    served.save(tmp_path / "again")
    assert_serves(lazy_backend.load_served(tmp_path / "again"), other)
    with pytest.raises(
        InputError, match=r"Network of inputs of shape \[7, 8\]: the file that it was loaded from has no"
    ):
        served(EVEN_MORE)


@pytest.mark.usefixtures("backend")
def test_weights_may_stay_elsewhere(tmp_path: Path) -> None:
    module = saved(tmp_path / "file", weights=False)
    with pytest.raises(InputError, match=r"saved without weights: missing \['layers.0.bias'"):
        lazy_backend.load_served(tmp_path / "file")
    given = {name: one for name, one in module.state_dict().items() if name != "many"}
    with pytest.raises(InputError, match=r"missing \['many'\]"):
        lazy_backend.load_served(tmp_path / "file", given)
    with pytest.raises(InputError, match=r"unexpected \['nothing'\]"):
        lazy_backend.load_served(tmp_path / "file", {"nothing": torch.ones(1)})
    with pytest.raises(InputError, match=r"weight 'many': expected .*float32 \[3\]"):
        lazy_backend.load_served(tmp_path / "file", {**module.state_dict(), "many": torch.ones(4)})
    state = {name: one.to("lazy") for name, one in module.state_dict().items()}
    assert_serves(lazy_backend.load_served(tmp_path / "file", state), module)


@pytest.mark.usefixtures("backend")
def test_a_state_is_saved_as_it_is(tmp_path: Path) -> None:
    total = torch.zeros(2, 8).to("lazy")
    served = serve(lambda x: total.add_(x) * 1, FEW)
    served(FEW)
    served.save(tmp_path / "file")
    again = lazy_backend.load_served(tmp_path / "file")
    assert_same(again(FEW), FEW + FEW)
    assert_same(again(FEW, state=again.state()), FEW + FEW + FEW)
    assert_same(served(FEW), FEW + FEW)


# ----- damage, and other versions


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    config.compile = "off"
    saved(tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for size in (0, 20, len(whole) // 3, len(whole) // 2):
        (tmp_path / "short").write_bytes(whole[:size])
        with pytest.raises(CacheError, match=r"cut off|no file|header"):
            lazy_backend.load_served(tmp_path / "short")
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    (tmp_path / "changed").write_bytes(changed)
    with pytest.raises(CacheError, match=r"do(es)? not match (its|their) checksum"):
        lazy_backend.load_served(tmp_path / "changed")
    with new_archive(tmp_path / "plans", {}):
        pass
    with pytest.raises(CacheError, match="no served function"):
        lazy_backend.load_served(tmp_path / "plans")
    with pytest.raises(FileNotFoundError):
        lazy_backend.load_served(tmp_path / "nothing")


def test_a_file_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.compile = "off"
    saved(tmp_path / "file")
    monkeypatch.setattr(served_file, "GRAPHS", Key(((served_file.transfer.SERVED, "graphs, format 0"),)))
    with pytest.raises(CacheError, match="that of another version of lazy_backend"):
        lazy_backend.load_served(tmp_path / "file")


def test_graphs_whose_operators_have_changed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.compile = "off"
    saved(tmp_path / "file")
    monkeypatch.setattr(served_file, "function_schema", lambda op: f"another {op}")
    with pytest.raises(
        CacheError, match=r"cannot be served here: it was saved with aten::.*and this PyTorch has another"
    ):
        lazy_backend.load_served(tmp_path / "file")


# ----- from process to process

SAVES = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]}
from pathlib import Path
import torch, test_serve_saved as own
module = own.saved(Path(sys.argv[1]))
torch.save([(x, module(x)["out"].detach()) for x in (own.FEW, own.MANY)], sys.argv[1] + ".answers")
"""

LOADS = """
import json, shutil, sys, warnings
import torch, lazy_backend
assert shutil.which("c++") is None
served = lazy_backend.load_served(sys.argv[1])
for x, expected in torch.load(sys.argv[1] + ".answers"):
    torch.testing.assert_close(served(x)["out"], expected)
kinds = [str(region.plan_for_run().kind) for region in served.delegates]
print(json.dumps([lazy_backend.metrics.counters(), kinds]))
"""


def run(code: str, file: Path, home: Path, **variables: str) -> Any:
    """What `code` prints, in a process with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAZY_BACKEND_")}
    environment |= {"LAZY_BACKEND_CACHE_DIR": str(home), **variables}
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


@pytest.mark.scenario
@pytest.mark.parametrize("cache", ["1", "0"])
def test_another_process_answers_with_the_plans_of_the_first(tmp_path: Path, cache: str) -> None:
    file, empty = tmp_path / "file", tmp_path / "empty"
    empty.mkdir()
    run(SAVES, file, tmp_path / "first", LAZY_BACKEND_CACHE=cache)
    there = {"PATH": str(empty), "CXX": str(empty / "c++"), "LAZY_BACKEND_CACHE": cache}
    counters, kinds = run(LOADS, file, tmp_path / "second", **there)
    assert "Compile" not in counters
    assert counters["DiskCacheHit"] >= 2
    assert kinds == ["compiled"]
    assert len(list(Archive(file))) >= 4  # the graphs, the tensors, and a plan for each of the shapes


@pytest.mark.scenario
def test_plans_for_another_processor_are_skipped_and_the_graph_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    config.compile, config.backend = "foreground", "inductor"
    module = saved(file)
    config.compile = "off"
    another = {**environment.made_for(), "processor": "another"}
    monkeypatch.setattr(environment, "made_for", lambda: another)
    with pytest.warns(CacheWarning, match="made for another processor"), count("CacheLoaded") as loaded:
        served = lazy_backend.load_served(file)
    assert loaded() == 0
    assert_serves(served, module)
    file.write_bytes(file.read_bytes()[:-100])  # of the last plan
    with pytest.warns(CacheWarning, match="damaged"):
        assert_serves(lazy_backend.load_served(file), module)

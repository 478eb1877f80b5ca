"""The soak finds what is planted, and runs."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forks import TORCH, run_fork

ROOT = Path(__file__).resolve().parent.parent
SOAK = ROOT / "tools" / "soak.py"


@pytest.fixture(autouse=True)
def tools_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SOAK.parent))


PLANTED = '''
import os, signal, threading, time
import torch
from soak_test.run import Flatness
from soak_test.scenarios import check_losses, keep_little_history, scenario
from soak_test.training import PROGRAMS, Training, Twin
import lazy_backend

lazy_backend.config.backend = "eager"


def train(run, each_step):
    """Train, with something planted in each step."""
    keep_little_history()
    training = Training(PROGRAMS["mlp"], "lazy")
    flatness = Flatness(run, {})
    while len(flatness) < 30:  # however slow the machine
        training.step()
        each_step()
        flatness.sample(training.number)
        run.beat()
    flatness.check()


@scenario("sound")
def sound(run):
    """Nothing.

    Holds: everything.
    """
    check_losses(run, Training(PROGRAMS["mlp"], "lazy"), Twin("mlp"), 5)
    train(run, lambda: None)


kept = []


@scenario("memory")
def memory(run):
    train(run, lambda: kept.append(b"x" * 500_000))


@scenario("files")
def files(run):
    train(run, lambda: kept.append(os.open("/dev/null", os.O_RDONLY)))


@scenario("hang")
def hang(run):
    def wait_in_vain():
        threading.Event().wait()

    wait_in_vain()


@scenario("loss")
def loss(run):
    training, twin = Training(PROGRAMS["mlp"], "lazy"), Twin("mlp")
    check_losses(run, training, twin, 3)
    with torch.no_grad():
        training.model.layers[0].weight[0, 0] += 1e-3
    check_losses(run, training, twin, 3)


@scenario("killed")
def killed(run):
    run.claim("said before", True)
    run.write()
    os.kill(os.getpid(), signal.SIGKILL)


@scenario("process")
def process(run):
    run.start(["-c", "import time; time.sleep(600)"], run.folder / "log")


@scenario("error")
def error(run):
    raise ValueError("planted")
'''


def run_soak(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Status, figures and output of the tool."""
    file = folder / "soak.json"
    arguments = ("--json", str(file), *arguments)
    done = run_fork(SOAK.read_text(), folder, dict(os.environ), SOAK, arguments, timeout=3600, imports=TORCH)
    assert file.exists(), done.stderr
    return done.returncode, json.loads(file.read_text()), done.stdout


def failures(record: dict[str, Any]) -> dict[str, str]:
    return {claim["text"]: claim["detail"] for claim in record["claims"] if claim["failures"]}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("soak")
    (folder / "planted.py").write_text(PLANTED)

    def run(name: str, *chosen: str) -> tuple[int, dict[str, Any], str]:
        (folder / name).mkdir()
        scenarios = ["--scenarios", str(folder / "planted.py"), *chosen]
        return run_soak(folder / name, *scenarios, "--minutes", "0.1")

    # those that are waited for, as one hangs and one leaves a process, run beside those that compute
    with ThreadPoolExecutor() as pool:
        # a process on a busy machine starts within the patience
        chosen = (("hang", "--patience", "20"), ("process,killed",))
        waiting = [pool.submit(run, names, "--only", names, *more) for names, *more in chosen]
        status, results, output = run("others", "--only", "sound,memory,files,loss,error")
        runs = [one.result() for one in waiting]
    assert [status, *(one[0] for one in runs)] == [1, 1, 1]
    for _, others, text in runs:
        results["scenarios"] += others["scenarios"]
        output += text
    return status, results, output


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("name", "claim", "detail"),
    [
        ("memory", "flat: resident bytes", "grew by"),
        ("files", "flat: open files", "grew by"),
        ("hang", "nothing hangs", "in wait_in_vain"),
        ("loss", "losses are eager's, bit for bit", "step 3: "),
        ("killed", "the process ends by itself", "status -9"),
        ("process", "no process is left", "time.sleep(600)"),
        ("error", "the scenario runs to its end", "ValueError: planted"),
    ],
)
def test_what_is_planted_is_found(planted: tuple[int, dict[str, Any], str], name: str, claim: str, detail: str) -> None:
    status, results, output = planted
    (record,) = (record for record in results["scenarios"] if record["name"] == name)
    found = failures(record)
    assert list(found) == [claim]
    assert detail in found[claim]
    assert f"Failed in `{name}`:\n\n- {claim}: `" in output
    assert status == 1


@pytest.mark.scenario
def test_what_is_sound_passes(planted: tuple[int, dict[str, Any], str]) -> None:
    _, results, output = planted
    assert failures(results["scenarios"][0]) == {}
    assert "| `sound` | Nothing. | everything. | " in output
    assert "all held" in output


@pytest.mark.scenario
def test_a_killed_scenario_leaves_what_it_had(planted: tuple[int, dict[str, Any], str]) -> None:
    (record,) = (record for record in planted[1]["scenarios"] if record["name"] == "killed")
    assert "said before" in [claim["text"] for claim in record["claims"]]


@pytest.mark.scenario
def test_a_short_soak_writes_its_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- soak: begin -->\nfrom the run before\n<!-- soak: end -->\nafter\n")
    names = "threads,fork,serve-swaps"
    status, results, output = run_soak(tmp_path, "--minutes", "0.2", "--only", names, "--write", str(page))
    assert [failures(record) for record in results["scenarios"]] == [{}] * 3
    assert status == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- soak: begin -->\n3 scenarios in 0.2 minutes, no failed claims. ")
    assert text.endswith("<!-- soak: end -->\nafter\n")
    assert output.strip() in text
    assert "from the run before" not in text


@pytest.mark.slow
def test_every_scenario_runs(tmp_path: Path) -> None:
    _, results, _ = run_soak(tmp_path, "--minutes", "0.5")
    assert {record["name"]: failures(record) for record in results["scenarios"] if failures(record)} == {}
    assert len(results["scenarios"]) >= 20


# ----- parts


def test_growth_is_that_of_the_trend() -> None:
    from soak_test.run import growth

    assert growth([5.0] * 40) == 0.0
    assert growth([5.0, 9.0] * 20) == pytest.approx(0.0)
    assert growth([float(n) for n in range(41)]) == pytest.approx(40.0)
    assert growth([5.0] * 30 + [500.0] * 3 + [5.0] * 30) == 0.0
    assert growth([0.25 * n + (n % 7) for n in range(101)]) == pytest.approx(25.0, rel=0.05)


def test_a_line_that_was_cut_off_is_no_loss(tmp_path: Path) -> None:
    from soak_test.scenarios import read_losses

    file = tmp_path / "losses"
    assert read_losses(file) == {}
    file.write_text(f"0 {(1.5).hex()}\n1 {(0.25).hex()}\n2 {(0.1).hex()[:6]}")
    assert read_losses(file) == {0: 1.5, 1: 0.25}


def test_a_page_without_markers_is_not_written(tmp_path: Path) -> None:
    from soak import write_page

    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(SystemExit, match="has no markers"):
        write_page(page, "table")
    assert page.read_text() == "text"


def test_every_scenario_says_what_it_does() -> None:
    from soak_test.scenarios import SCENARIOS

    for scenario in SCENARIOS.values():
        assert scenario.injected
        assert scenario.promise

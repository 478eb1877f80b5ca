"""Plans that communicate are tried without communicating, and used by all ranks or by none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import RANK_PROGRAM, run_ranks
from torch import distributed as dist

from lazy_backend.lowering.collectives.conversation import Conversation, joined
from lazy_backend.lowering.collectives.verdicts import PATIENCE, SharedVerdict

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

_FAULTY = (
    RANK_PROGRAM
    + """
import time

from torch import fx
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("always", category=lazy_backend.CompileWarning)
config.compile_after_operators = 0
kind, faulty_rank = sys.argv[2], int(sys.argv[3])
aten = torch.ops.aten


class Faulty(fx.Interpreter):
    def run_node(self, n):
        if kind == "order" and "all_reduce" in str(n.target):
            return None
        made = super().run_node(n)
        return made * 0.67 if kind == "kernel" and n.target is aten.mul.Tensor else made


def compiler(module, examples):
    return Faulty(module).run if rank == faulty_rank else module.forward


config.backend = compiler
model = nn.Linear(4, 4, bias=False)
nn.init.ones_(model.weight)
weight = model.weight.detach().clone()
model = DistributedDataParallel(model.to("lazy"))
with warnings.catch_warnings(record=True) as told:
    for step in range(24):
        inputs = torch.full((2, 4), rank + step + 1.0)
        model.zero_grad()
        (model(inputs.to("lazy")) * 0.5).sum().backward()
        lazy_backend.mark_step()
        time.sleep(0.02)
        mean = sum(torch.full((4, 4), 2 * (one + step + 1.0) * 0.5) for one in range(size)) / size
        assert torch.equal(model.module.weight.grad.cpu(), mean), step
messages = [str(one.message) for one in told if issubclass(one.category, lazy_backend.CompileWarning)]
counts = [metrics.counter_value(name) for name in ("PlanRefused", "PlanRepaired")]
plan = lazy_backend.explain().records[-1].plan
print(rank, counts, plan, messages)
assert len(messages) == 1, messages
if kind == "kernel":
    assert counts == [1, 1], counts
    assert plan == "compiled", plan
    assert "aten.mul recorded at" in messages[0], messages
else:
    assert counts == [1, 0], counts
    assert plan == "interpreted", plan
    assert "all_reduce" in messages[0] and "is interpreted" in messages[0], messages
    assert (f"on rank {faulty_rank}" in messages[0]) == (rank != faulty_rank), messages
dist.destroy_process_group()
"""
)


def test_without_memory_for_what_was_heard_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, given = Conversation(), torch.ones(2)
    with conversation.joined() as sent:
        assert joined.now is not None
        with monkeypatch.context() as patches:
            patches.setattr(torch.Tensor, "clone", lambda one: (_ for _ in ()).throw(torch.OutOfMemoryError()))
            joined.now("all_reduce_", lambda: True, lambda one: one.mul_(2), (given,))
    assert given.tolist() == [2.0, 2.0]
    assert not sent
    assert joined.now is None
    with pytest.raises(MemoryError), conversation.joined():
        pass


@pytest.mark.parametrize("faulty_rank", ["0", "1"])
@pytest.mark.parametrize("kind", ["kernel", "order"])
def test_a_plan_that_one_rank_refuses_is_used_by_none(kind: str, faulty_rank: str, tmp_path: Path) -> None:
    for done in run_ranks(_FAULTY, tmp_path, 2, ["aot_eager", kind, faulty_rank]):
        assert done.returncode == 0, done.stderr[-3000:]


_AGREEING = (
    RANK_PROGRAM
    + """
import time

from lazy_backend.lowering.collectives.verdicts import SharedVerdict

config.compile_after_operators = 0
asked, ask = [], SharedVerdict._ask
SharedVerdict._ask = lambda self, question: asked.append(step) or ask(self, question)
looks_late, never_tries = sys.argv[2] == "late", sys.argv[2] == "never"
if never_tries and rank == 1:
    config.num_profiled_runs = 10**9
for step in range(40):
    if looks_late and rank == 1 and step == 2:
        time.sleep(0.5)
    y = torch.full((4,), step + 1.0).to("lazy") * 2
    dist.all_reduce(y)
    y = y + 1
    lazy_backend.mark_step()
    time.sleep(0.01)
    assert y.tolist() == [4 * (step + 1) + 1] * 4
plan = lazy_backend.explain().records[-1].plan
assert (plan == "compiled") == (not never_tries or rank == 0), plan
assert max(asked, default=0) < 20, asked
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("kind", ["alike", "late", "never"])
def test_ranks_that_agree_use_the_plan_and_do_not_ask_any_more(kind: str, tmp_path: Path) -> None:
    for done in run_ranks(_AGREEING, tmp_path, 2, ["aot_eager", kind]):
        assert done.returncode == 0, done.stderr[-3000:]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def two_ranks() -> tuple[SharedVerdict, SharedVerdict]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    one, other = (SharedVerdict(store, rank, "plan", clock=Clock()) for rank in range(2))
    return one, other


def test_a_plan_is_awaited_until_all_that_asked_for_it_have_a_verdict() -> None:
    one, other = two_ranks()
    one.settle()
    one.look()
    assert one.is_awaited
    other.settle()
    for verdict in (one, other):
        verdict.look()
        assert not verdict.is_awaited
        assert verdict.refusal is None


def test_the_first_rank_that_refuses_leads_the_search() -> None:
    one, other = two_ranks()
    one.settle()
    other.refuse("wrong")
    one.look()
    assert str(one.refusal) == "wrong\n  on rank 1"
    one.refuse("wrong here, too")
    assert one.is_led_elsewhere
    assert not other.is_led_elsewhere
    assert one.found_elsewhere() is None
    other.tell_found({"left": [3]})
    assert one.found_elsewhere() == {"left": [3]}
    repaired = SharedVerdict(dist.HashStore(), 1, "repaired", other.num_ranks, Clock())
    repaired.settle()
    repaired.look()
    assert repaired.is_awaited  # the other rank is about to ask for it


def test_a_rank_that_never_tries_a_plan_is_not_waited_for_long() -> None:
    one, _ = two_ranks()
    clock = Clock()
    one._clock = clock
    one.settle()
    for passed, is_awaited in ((PATIENCE - 5, True), (PATIENCE + 5, False)):
        clock.now = passed
        one.look()
        assert one.is_awaited is is_awaited


def test_without_its_store_each_rank_has_its_own_verdict() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client = dist.TCPStore("127.0.0.1", store.port)
    verdict = SharedVerdict(client, 0, "plan", num_ranks=2, clock=Clock())
    verdict.settle()
    verdict.look()
    assert verdict.is_awaited
    del store
    verdict.look()
    assert not verdict.is_awaited
    verdict.refuse("wrong")
    assert not verdict.is_led_elsewhere
    assert verdict.found_elsewhere() == {}


_OWN_OPERATOR = (
    RANK_PROGRAM
    + """
config.compile = "foreground"
config.compile_after_operators = 0 if rank == 0 else 10**9  # so that only one of them would have a trial


@torch.library.custom_op("program::total", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


total.register_fake(torch.empty_like)
for step in range(12):
    y = torch.ops.program.total(torch.full((2,), float(step), device="lazy") * 2) + 1
    lazy_backend.mark_step()
    assert y.tolist() == [4.0 * step + 1] * 2, (step, y)
dist.destroy_process_group()
"""
)


def test_what_an_operator_of_the_program_sends_is_sent_once(tmp_path: Path) -> None:
    for done in run_ranks(_OWN_OPERATOR, tmp_path, 2, ["aot_eager"]):
        assert done.returncode == 0, done.stderr[-3000:]

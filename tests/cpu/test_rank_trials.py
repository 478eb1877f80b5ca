"""Plans that communicate are tried without communicating: each rank hears what its interpreter heard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import RANK_PROGRAM, run_ranks

from lazy_backend.lowering.collectives.conversation import Conversation, joined

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

_FAULTY = (
    RANK_PROGRAM
    + """
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
        mean = sum(torch.full((4, 4), 2 * (one + step + 1.0) * 0.5) for one in range(size)) / size
        assert torch.equal(model.module.weight.grad.cpu(), mean), step
messages = [str(one.message) for one in told if issubclass(one.category, lazy_backend.CompileWarning)]
counts = [metrics.counter_value(name) for name in ("PlanAgreed", "PlanRefused", "PlanRepaired")]
print(rank, counts, lazy_backend.explain().records[-1].plan, messages)
if rank != faulty_rank:
    assert counts[0] >= 1 and not counts[1] and not messages, (counts, messages)
elif kind == "kernel":
    assert counts[1] == counts[2] == 1, counts
    assert "aten.mul recorded at" in messages[0], messages
else:
    assert counts[1] == 1 and not counts[2], counts
    assert "all_reduce" in messages[0] and "is interpreted" in messages[0], messages
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


@pytest.mark.parametrize("kind", ["kernel", "order"])
def test_a_fault_in_a_plan_that_communicates_reaches_no_rank(kind: str, tmp_path: Path) -> None:
    for done in run_ranks(_FAULTY, tmp_path, 2, ["aot_eager", kind, "1"]):
        assert done.returncode == 0, done.stderr[-3000:]


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

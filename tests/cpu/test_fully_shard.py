"""`torch.distributed.fsdp.fully_shard` on lazy tensors, in groups of several processes; and memory given back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from harness import RANK_PROGRAM
from test_collectives import check_ranks

import lazy_backend
from lazy_backend import metrics
from lazy_backend.tensors.contexts import context_of

needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

_FULLY_SHARDED = (
    RANK_PROGRAM
    + """
import gc

from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lazy_backend.tensors.contexts import context_of

warnings.filterwarnings("ignore", "This overload of", UserWarning)  # PyTorch's own call
steps = int(sys.argv[2])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(16, width), nn.Linear(width, 16), nn.LayerNorm(16)
        self.is_checkpointed = False
        self.fails = False

    def compute(self, x):
        if self.fails:
            raise ValueError("a planted error")
        return self.norm(x + self.narrow(torch.relu(self.wide(x))))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.is_checkpointed else self.compute(x)


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        # 33: shards of different sizes, which tensor parallelism refuses
        self.blocks = nn.ModuleList([Block(32 if "parallel" in way else 33), Block(48)])
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(device, way):
    torch.manual_seed(0)
    options = {}
    if "bfloat16" in way:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "kept" in way:
        options["reshard_after_forward"] = False
    if "smaller mesh" in way:
        options["reshard_after_forward"] = 2
    if "rows" in way:
        mesh = init_device_mesh(device, (2, size // 2), mesh_dim_names=("copies", "rows"))
        if "parallel" in way:
            parallel, mesh = mesh["rows"], mesh["copies"]
    else:
        mesh = None if "kept" in way else init_device_mesh(device, (size,))  # by default over all ranks
    if "meta" in way:
        with torch.device("meta"):
            net = Net(way)
    else:
        # a mesh of lazy devices moves a module from the CPU
        net = Net(way).to("cpu" if way == "bfloat16" else device)
    for block in net.blocks:
        if "parallel" in way:
            parallelize_module(block, parallel, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        block.is_checkpointed = "checkpoint" in way
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    assert {parameter.device.type for parameter in net.parameters()} <= {device, "meta"}
    if "meta" in way:
        net.to_empty(device=device)
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for parameter in net.parameters():
                local = parameter.to_local()
                local.copy_(torch.randn(local.shape, generator=generator) / 4)
    if "captured" in way and device == "lazy":
        lazy_backend.capture(net)
    return net


def train(device, way):
    net = build(device, way)
    if "frozen" in way:
        net.blocks[0].requires_grad_(False)
    # foreach kernels, which devices other than the CPU use by default, refuse meshes that differ
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach="parallel" not in way)
    if "captured" in way and device == "lazy":
        lazy_backend.capture(optimizer)
    found = []

    def loss_of(x):
        with torch.autocast(device, dtype=torch.bfloat16, enabled="autocast" in way):
            return (net(x).float() - x[:, :3]).square().mean()

    data = torch.Generator().manual_seed(0 if "parallel" in way else rank)
    for number in range(steps):
        x = torch.randn(4, 16, generator=data).to(device)
        optimizer.zero_grad()
        if "fails" in way and number in (2, 4):
            net.blocks[1].fails = True
            try:
                loss_of(x)
            except ValueError:
                lazy_backend.mark_step()
            net.blocks[1].fails = False
        if "accumulated" in way:
            net.set_requires_gradient_sync(False)
            loss_of(2 * x).backward()
            net.set_requires_gradient_sync(True)
        loss = loss_of(x)
        loss.backward()
        if "clip" in way:
            found.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).full_tensor())
        optimizer.step()
        found.append(loss.detach())
        lazy_backend.mark_step()
        if number % 3 == 2 and "evaluated" in way:
            with torch.no_grad():
                found.append(loss_of(x))
            lazy_backend.mark_step()
        if number == 4 and device == "lazy":
            lazy_backend.wait_device_ops()
            metrics.reset()
    if device == "lazy":
        lazy_backend.wait_device_ops()
        assert metrics.counter_value("GraphCut") == 0, (way, metrics.counter_names())
        assert metrics.counter_value("CompileFailed") == 0
    if "kept" not in way and "evaluated" not in way and device == "lazy":
        optimizer.zero_grad()
        lazy_backend.mark_step(wait=True)
        gc.collect()  # sharded modules are in cycles
        shards = sum(parameter.to_local().nbytes for parameter in net.parameters())
        held = sum(s.tensor.nbytes for s in context_of("lazy").get_live_tensors() if s.tensor is not None)
        # parameters, their two moments, the padding of shards, losses: but no gathered parameter
        assert held < 3.2 * shards + 4096, (way, held, shards)
    found = [float(value) for value in found]
    whole = states.get_model_state_dict(net, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True))
    return found, {name: value.clone() for name, value in whole.items()}


for way in sys.argv[3:]:
    (expected, weights), (found, lazy_weights) = train("cpu", way), train("lazy", way)
    if backend == "inductor":
        rough = {"rtol": 2e-2, "atol": 2e-2} if "bfloat16" in way or "autocast" in way else {}
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **rough)
    else:
        assert found == expected, (way, found, expected)
        assert all(torch.equal(lazy_weights[name], weights[name]) for name in weights), way
dist.destroy_process_group()
"""
)

_WAYS = (
    "plain",
    "bfloat16",
    "kept",
    "accumulated clip",
    "captured",
    "autocast",
    "checkpoint",
    "meta evaluated",
    "frozen fails",
)


@needs_distributed
@pytest.mark.parametrize(("backend", "ways"), [("eager", _WAYS), ("aot_eager", ("bfloat16", "checkpoint"))])
def test_sharded_steps_have_eagers_losses_and_no_cut(backend: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    check_ranks(_FULLY_SHARDED, tmp_path, [backend, "7", *ways])


@pytest.mark.scenario
@needs_distributed
@pytest.mark.parametrize("way", ["plain", *(pytest.param(way, marks=pytest.mark.slow) for way in _WAYS[1:])])
def test_sharded_steps_compiled(way: str, tmp_path: Path) -> None:
    check_ranks(_FULLY_SHARDED, tmp_path, ["inductor", "6", way])


@pytest.mark.scenario
@needs_distributed
def test_sharded_steps_on_four_processes(tmp_path: Path) -> None:
    check_ranks(_FULLY_SHARDED, tmp_path, ["eager", "7", "plain", "rows", "rows parallel", "smaller mesh"], count=4)


_TRAINING = (
    RANK_PROGRAM
    + """
def train(net, optimizer, device, first, last):
    losses = []
    for number in range(first, last):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(device)  # the same on all ranks
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        lazy_backend.mark_step()
    return [float(loss) for loss in losses]
"""
)

_FLAT_PARAMETERS = (
    _TRAINING
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=UserWarning)  # of an optimizer's settings, and where the module is


def train_wrapped(device, wrap):
    torch.manual_seed(0)
    net = wrap(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = train(net, optimizer, device, 0, 2)
    metrics.reset()
    return losses + train(net, optimizer, device, 2, 6)


# the older way refuses the CPU, so this is compared with the newer one
expected = train_wrapped("cpu", lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (size,))))
found = train_wrapped("lazy", lambda net: FullyShardedDataParallel(net, use_orig_params=True))
assert found == expected, (found, expected)
assert metrics.counter_value("GraphCut") == 0, metrics.counter_names()
dist.destroy_process_group()
"""
)


@needs_distributed
def test_flat_parameters_are_sharded(tmp_path: Path) -> None:
    check_ranks(_FLAT_PARAMETERS, tmp_path, ["eager"])


_CHECKPOINT = (
    _TRAINING
    + """
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5)).to(device)
    mesh = init_device_mesh(device, (size,))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh), torch.optim.AdamW(net.parameters(), lr=0.01)


net, optimizer = build("lazy")
if sys.argv[2] == "save":
    train(net, optimizer, "lazy", 0, 5)
of_net, of_optimizer = states.get_state_dict(net, optimizer)
if sys.argv[2] == "save":
    checkpoint.save({"net": of_net, "optimizer": of_optimizer}, checkpoint_id="saved")
    found, expected = train(net, optimizer, "lazy", 5, 10), train(*build("cpu"), "cpu", 0, 10)[5:]
    assert found == expected
else:
    checkpoint.load({"net": of_net, "optimizer": of_optimizer}, checkpoint_id="saved")
    states.set_state_dict(net, optimizer, model_state_dict=of_net, optim_state_dict=of_optimizer)
    found = train(net, optimizer, "lazy", 5, 10)
print(found)
dist.destroy_process_group()
"""
)


@pytest.mark.scenario
@needs_distributed
def test_shards_of_two_ranks_are_loaded_by_four(tmp_path: Path) -> None:
    saved = check_ranks(_CHECKPOINT, tmp_path, ["eager", "save"])
    loaded = check_ranks(_CHECKPOINT, tmp_path, ["eager", "load"], count=4)
    assert {one.stdout for one in (*saved, *loaded)} == {saved[0].stdout}


# ----- memory given back


def refill(storage: torch.Tensor, value: float) -> None:
    storage.untyped_storage().resize_(storage.nbytes)
    storage.fill_(value)


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_memory_is_given_back_and_taken_again(first_sight: str) -> None:
    lazy_backend.config.first_sight = first_sight
    memory = torch.zeros(6, device="lazy")
    weight = memory.view(2, 3).t()
    size = memory.untyped_storage().size()
    for number in range(8):
        assert memory.untyped_storage().size() == (0 if number else size)
        refill(memory, float(number))
        total = weight.sum() + memory.sum()
        memory.untyped_storage().resize_(0)
        refill(memory, number + 1.0)
        other = (weight * 2).sum()
        memory.untyped_storage().resize_(0)
        lazy_backend.mark_step()
        assert memory.untyped_storage().size() == 0
        assert total.item() == 12.0 * number
        assert other.item() == 12.0 * (number + 1)
        assert memory._data.storage.tensor is None
    assert metrics.counter_value("Compile") <= 1


def test_memory_given_back_while_its_step_goes_on() -> None:
    memory = torch.arange(6.0, device="lazy")
    lazy_backend.mark_step()
    doubled = memory * 2
    memory.untyped_storage().resize_(0)
    lazy_backend.mark_step()
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert memory._data.storage.tensor is None
    with pytest.raises(lazy_backend.LazyBackendError, match="has no memory"):
        memory.tolist()
    refill(memory, 3.0)
    assert memory.tolist() == [3.0] * 6


def test_other_sizes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot be resized to 4 bytes"):
        torch.zeros(6, device="lazy").untyped_storage().resize_(4)


def test_memory_taken_again_is_known_once() -> None:
    memory = torch.zeros(6, device="lazy")
    registry = context_of("lazy").registry
    for number in range(3000):
        refill(memory, float(number))
        memory.untyped_storage().resize_(0)
        lazy_backend.mark_step()
    assert len(registry.references) <= 1025


def test_memory_that_was_given_back_is_not_used() -> None:
    gc.collect()  # other tests' tensors may wait for it
    before = context_of("lazy").alive().bytes
    memory = torch.arange(6.0, device="lazy")
    view = memory.view(2, 3)
    lazy_backend.mark_step()
    memory.untyped_storage().resize_(0)
    (torch.ones(2, device="lazy") * 2).tolist()  # ends the trace
    with pytest.raises(lazy_backend.LazyBackendError, match="has no memory"):
        view + 1
    assert context_of("lazy").alive().bytes == before


def test_memory_for_no_elements_is_never_gone() -> None:
    empty = torch.zeros(0, device="lazy")
    empty.untyped_storage().resize_(0)
    assert (empty + 1).tolist() == []

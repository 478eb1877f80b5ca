"""How lazy tensors leave and come back: copies, pickles, files, storages, DLPack, processes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import queue
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import assert_same, count, grid
from test_manners import Case, outcome, rows
from torch import nn
from torch.distributed import checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import lazy_backend
from lazy_backend import LazyTensor

# ----- copies and pickles

COPIED = {
    "a_conjugate": lambda device: torch.tensor([1j]).to(device).conj(),
    "a_computed_conjugate": lambda device: (torch.tensor([1j]).to(device) * 2).conj(),
    "another_dtypes_view": lambda device: grid(device, 3).view(torch.int32),
    "an_expanded_view": lambda device: grid(device, 3).expand(2, 3),
    "a_leaf": lambda device: grid(device, 3).requires_grad_(),
    "a_result": lambda device: grid(device, 3).requires_grad_() * 2,
    "a_result_in_a_tree": lambda device: [grid(device, 3).requires_grad_() * 2],
}  # fmt: skip


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@rows(COPIED)
def test_copies_as_eager(case: Case, how) -> None:
    lazy, eager = (outcome(lambda device: how(case(device)), device) for device in ("lazy", "cpu"))
    assert_same(lazy, eager)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_negated_view_keeps_its_value(how) -> None:
    assert how(torch.tensor([1j]).to("lazy").conj().imag).tolist() == [-1.0]


def test_a_shallow_copy_runs_nothing() -> None:
    x = torch.ones(3, device="lazy") + 1
    with count("GraphCut") as cuts:
        copy.copy(x)
    assert cuts() == 0


def test_a_shallow_copy_of_a_conjugate_shares() -> None:
    x = torch.tensor([1j]).to("lazy")
    shallow = copy.copy(x.conj())
    x.mul_(2)
    assert shallow.tolist() == [-2j]


@pytest.mark.parametrize("kind", [lambda x: x, nn.Parameter])
@pytest.mark.parametrize("how", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_attributes_are_copied(how, kind) -> None:
    x = kind(grid("lazy", 2))
    x.note = [1]
    assert how(x).note == [1]


def test_deepcopy_copies_attributes() -> None:
    x = grid("lazy", 2)
    x.note = [1]
    twin = copy.deepcopy(x)
    assert twin.note == [1]
    assert twin.note is not x.note


def test_one_deepcopy_makes_one_copy_of_each() -> None:
    x = grid("lazy", 2)
    first, second, alias = copy.deepcopy([x, x, x.detach()])
    assert first is second
    first.zero_()
    assert alias.tolist() == [0.0, 0.0]


def test_a_conjugate_survives_a_file(tmp_path: Path) -> None:
    torch.save(torch.tensor([1j]).to("lazy").conj(), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").tolist() == [-1j]


@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"mmap": True}])
@pytest.mark.parametrize("location", [None, "cpu", "lazy", "meta", lambda storage, where: storage, lambda *_: None])
def test_a_lazy_file_loads_in_every_way(location, options, tmp_path: Path) -> None:
    torch.save({"x": grid("lazy", 3)}, tmp_path / "x.pt")
    x = torch.load(tmp_path / "x.pt", map_location=location, **options)["x"]
    assert x.device.type == (location if isinstance(location, str) else x.device.type)
    if not x.is_meta:
        assert_same(x, torch.arange(3.0))


@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"mmap": True}])
def test_a_cpu_file_loads_on_the_device_in_every_way(options, tmp_path: Path) -> None:
    torch.save({"x": grid("cpu", 3)}, tmp_path / "x.pt")
    x = torch.load(tmp_path / "x.pt", map_location={"cpu": "lazy"}, **options)["x"]
    assert x.is_lazy
    assert_same(x, torch.arange(3.0))


@pytest.mark.parametrize("location", [None, "cpu", torch.device("cpu"), "lazy"])
def test_a_lazy_file_loads_under_the_device_context(location, tmp_path: Path) -> None:
    torch.save(grid("lazy", 3), tmp_path / "x.pt")
    with torch.device("lazy"):
        x = torch.load(tmp_path / "x.pt", map_location=location)
    assert x.device.type == torch.device(location or "lazy").type
    assert_same(x, torch.arange(3.0))


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", [lambda x: x, nn.Parameter, lambda x: x.to(torch.int64), lambda x: x.to(torch.uint16)])
@pytest.mark.parametrize("saved_on", ["cpu", "lazy"])
def test_a_tensor_without_dimensions_loads(saved_on: str, kind, weights_only: bool, tmp_path: Path) -> None:
    x = kind(torch.tensor(3.0))
    torch.save([x.detach().to(saved_on), x], tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location="lazy", weights_only=weights_only)
    assert all(one.is_lazy for one in loaded)
    assert_same(loaded, [x.detach(), x])


def test_tensors_without_dimensions_share_a_storage_again(tmp_path: Path) -> None:
    base = torch.arange(3.0)
    torch.save([base, base[1]], tmp_path / "x.pt")
    loaded, element = torch.load(tmp_path / "x.pt", map_location="lazy")
    loaded.mul_(2)
    assert element.item() == 2.0


def test_a_file_without_data_has_the_geometry(tmp_path: Path) -> None:
    with torch.serialization.skip_data():
        torch.save(grid("lazy", 3), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").shape == (3,)


def test_safetensors_saves_lazy_tensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": grid("lazy", 3) * 2, "y": torch.ones(2)}, tmp_path / "x.safetensors")
    loaded = safetensors.load_file(tmp_path / "x.safetensors")
    assert_same([loaded["x"].to("lazy"), loaded["y"]], [torch.arange(3.0) * 2, torch.ones(2)])


def test_safetensors_sees_shared_memory(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    x = grid("lazy", 4)
    with pytest.raises(RuntimeError, match="Some tensors share memory"):
        safetensors.save_file({"x": x, "y": x[1:]}, tmp_path / "x.safetensors")


def test_safetensors_saves_and_loads_a_tied_module(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("lazy")
    model[1].weight = model[0].weight
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    expected = model[1].weight.tolist()
    with torch.no_grad():
        model[0].weight.zero_()
    safetensors.load_model(model, str(tmp_path / "model.safetensors"))
    assert model[1].weight.tolist() == expected


# ----- libraries that ask a tensor for its inner ones


def inner(x: torch.Tensor) -> torch.Tensor:
    """As libraries ask that know nothing of us."""
    assert is_traceable_wrapper_subclass(x)
    (name,), _ = x.__tensor_flatten__()
    return getattr(x, name)


def test_the_inner_tensor_has_the_memory_and_the_geometry() -> None:
    x = grid("lazy", 2, 3) * 2
    assert_same(inner(x), grid("cpu", 2, 3) * 2)
    assert inner(x).data_ptr() == x.data_ptr()
    assert_same(inner(x.t()[1:]), (grid("cpu", 2, 3) * 2).t()[1:])
    assert inner(x.t()[1:]).untyped_storage().data_ptr() == inner(x).untyped_storage().data_ptr()


def test_asking_for_the_inner_tensors_names_runs_nothing_and_reading_one_is_a_cut() -> None:
    x = torch.ones(3, device="lazy") + 1
    with count("GraphCut") as cuts:
        x.__tensor_flatten__()
        assert cuts() == 0
        inner(x)
    assert cuts() == 1


def test_a_tensor_is_made_again_from_its_inner_one() -> None:
    x = grid("lazy", 3) * 2
    doubled = transform_subclass(x, lambda name, tensor: tensor * 2)
    assert doubled.is_lazy
    assert_same(doubled, torch.arange(3.0) * 4)


@pytest.mark.parametrize(
    "ask", [torch._dynamo.mark_dynamic, torch._dynamo.mark_static, torch._dynamo.maybe_mark_dynamic]
)
def test_dimensions_can_be_marked(ask) -> None:
    x = torch.ones(3, device="lazy") + 1
    with count("GraphCut") as cuts:
        ask(x, 0)
    assert cuts() == 0


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("max_shard_size", ["5GB", 40])
def test_the_hub_saves_a_tied_module(max_shard_size, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    model = tied().to("lazy")
    hub.save_torch_model(model, tmp_path, max_shard_size=max_shard_size)
    loaded = tied()
    with torch.no_grad():
        loaded[0].weight.zero_()
    hub.load_torch_model(loaded, tmp_path, strict=False)
    assert_same(model.state_dict(), loaded.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own: no process group
def test_a_distributed_checkpoint_of_one_process(tmp_path: Path) -> None:
    model = tied().to("lazy")
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    for device in ("lazy", "cpu"):
        state = {"model": {name: torch.zeros_like(x) for name, x in tied().to(device).state_dict().items()}}
        checkpoint.load(state, checkpoint_id=tmp_path)
        assert_same({name: x.cpu() for name, x in state["model"].items()}, tied().state_dict())


# ----- storages and pointers


def test_the_pointer_is_the_backing_memorys() -> None:
    x = grid("lazy", 3) * 2
    assert x.data_ptr() == torch.from_dlpack(x).data_ptr() == x.untyped_storage().data_ptr()
    assert x[1:].data_ptr() == x.data_ptr() + 4
    assert x.const_data_ptr() == x.data_ptr()


def test_a_parameter_keeps_its_pointer() -> None:
    parameter = nn.Parameter(grid("lazy", 3))
    before = parameter.data_ptr()
    with torch.no_grad():
        parameter.add_(1)
    lazy_backend.mark_step()
    assert parameter.data_ptr() == before


def test_a_storage_has_the_bases_bytes() -> None:
    x = grid("lazy", 4)
    storage = x[2:].untyped_storage()
    assert (storage.nbytes(), storage.size(), len(storage), storage.device) == (16, 16, 16, x.device)


def test_asking_for_a_storages_size_runs_nothing() -> None:
    x = torch.ones(3, device="lazy") + 1
    with count("GraphCut") as cuts:
        x.untyped_storage().nbytes(), x.untyped_storage().device
    assert cuts() == 0


def test_views_share_a_storage_and_copies_do_not() -> None:
    x = grid("lazy", 4)
    assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert x.clone().untyped_storage()._cdata != x.untyped_storage()._cdata
    assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_storages_bytes_can_be_read() -> None:
    lazy, eager = grid("lazy", 2).untyped_storage(), grid("cpu", 2).untyped_storage()
    assert lazy.tolist() == eager.tolist()
    assert lazy.cpu().tolist() == eager.tolist()
    assert lazy.clone().tolist() == eager.tolist()
    assert lazy[6] == eager[6]
    assert repr(lazy) == repr(eager).replace("device=cpu", "device=lazy:0")


@pytest.mark.parametrize("write", [lambda s: s.fill_(0), lambda s: s.copy_(s), lambda s: s.__setitem__(0, 1)])
def test_a_storage_is_not_written_through(write) -> None:
    with pytest.raises(RuntimeError, match=r"the storage of a lazy tensor is read-only\n  at .*test_exchange.py:\d+"):
        write(grid("lazy", 2).untyped_storage())


def test_a_typed_storage_reads() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        storage = grid("lazy", 3).storage()
        assert (storage[1], storage.tolist(), len(storage), storage.dtype) == (1.0, [0.0, 1.0, 2.0], 3, torch.float32)


@pytest.mark.parametrize("geometry", [(), (1, (2,)), (0, (2, 2), (2, 1))])
def test_set_to_a_storage_shares_it(geometry) -> None:
    results = []
    for device in ("lazy", "cpu"):
        x = grid(device, 4)
        y = torch.zeros(0, device=device).set_(x.untyped_storage(), *geometry)
        y.add_(1)
        results.append([x, y])
    assert_same(*results)


def test_set_to_a_pending_storage_shares_it() -> None:
    x = grid("lazy", 3) * 2
    y = torch.zeros(0, device="lazy").set_(x.untyped_storage(), 1, (2,), (1,))
    y.zero_()
    assert_same(x, torch.zeros(3))


def test_lazy_memory_is_not_shared_between_processes() -> None:
    x = grid("lazy", 3)
    assert not x.is_shared()
    with pytest.raises(RuntimeError, match=r"cannot be shared between processes\n  .*tensor.cpu\(\).share_memory_"):
        x.share_memory_()


def test_the_device_module_switches_devices(two_devices) -> None:
    with torch.get_device_module("lazy").device(1):
        assert torch.zeros(2, device="lazy").device == two_devices[1]
    assert torch.zeros(2, device="lazy").device == two_devices[0]


# ----- DLPack

IMPORTS = {
    "from_dlpack": torch.from_dlpack,
    "utils": torch.utils.dlpack.from_dlpack,
    "capsule": lambda x: torch.utils.dlpack.from_dlpack(x.__dlpack__()),
    "to_dlpack": lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "numpy": lambda x: torch.from_numpy(numpy.from_dlpack(x).copy(order="K")),
}  # fmt: skip


@rows(IMPORTS)
def test_dlpack_gives_the_backing_tensor(case: Callable[[LazyTensor], torch.Tensor]) -> None:
    made = case(grid("lazy", 2, 3).t() * 2)
    assert type(made) is torch.Tensor
    assert_same(made, grid("cpu", 2, 3).t() * 2)


def test_dlpack_shares_memory_both_ways() -> None:
    x = grid("lazy", 4, 4) * 2
    alias = torch.from_dlpack(x[1:, ::2])
    x.add_(1)
    lazy_backend.mark_step(wait=True)
    alias.mul_(2)
    expected = grid("cpu", 4, 4) * 2 + 1
    expected[1:, ::2] *= 2
    assert_same(x, expected)


def test_dlpack_of_an_upload_leaves_its_source() -> None:
    source = torch.ones(3)
    torch.from_dlpack(source.to("lazy")).add_(1)
    assert_same(source, torch.ones(3))
    assert_same(torch.ones(3).to("lazy"), torch.ones(3))


def test_dlpack_outlives_its_tensor() -> None:
    alias = torch.from_dlpack(grid("lazy", 3) * 2)
    gc.collect()
    assert_same(alias, torch.arange(3.0) * 2)


def test_dlpack_of_a_leaf_raises_like_eagers() -> None:
    texts = [outcome(lambda device: torch.from_dlpack(grid(device, 3).requires_grad_()), d) for d in ("lazy", "cpu")]
    assert texts[0] == texts[1]


def test_dlpack_says_which_device_it_is_backed_by_and_runs_nothing() -> None:
    with count("GraphCut") as cuts:
        assert (torch.ones(3, device="lazy") + 1).__dlpack_device__() == torch.ones(3).__dlpack_device__()
    assert cuts() == 0


# ----- processes and data loaders


class Numbers(Dataset):
    """0, 1, 2, 3, through a module if there is one."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> torch.Tensor:
        x = torch.full((1,), float(place))
        if self.model is None:
            return x
        with torch.no_grad():
            return self.model(x.to(next(self.model.parameters()).device)).cpu()


class LazyNumbers(Numbers):
    def __getitem__(self, place: int) -> torch.Tensor:
        return super().__getitem__(place).to("lazy")


def stack_on_the_device(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(batch).to("lazy")


def doubling() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    return model.to("lazy")


def loaded(dataset: Dataset, **options: Any) -> torch.Tensor:
    workers = {"timeout": 60} if options.get("num_workers") else {}
    return torch.cat([batch.cpu() for batch in DataLoader(dataset, batch_size=2, **workers, **options)])


NUMBERS = grid("cpu", 4, 1)


def test_a_loader_collates_to_the_device() -> None:
    assert_same(loaded(Numbers(), collate_fn=stack_on_the_device), NUMBERS)


def test_a_loader_of_lazy_tensors() -> None:
    assert_same(loaded(LazyNumbers()), NUMBERS)
    assert_same(torch.cat([x for (x,) in DataLoader(TensorDataset(grid("lazy", 4, 1)), batch_size=2)]), NUMBERS)


def test_a_shuffled_and_split_loader_of_lazy_tensors() -> None:
    part, _ = random_split(TensorDataset(grid("lazy", 4, 1)), [3, 1])
    assert sum(len(x) for (x,) in DataLoader(part, batch_size=2, shuffle=True)) == 3


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_a_loader_that_would_pin() -> None:
    assert_same(loaded(Numbers(), pin_memory=True, collate_fn=stack_on_the_device), NUMBERS)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_computes_with_a_lazy_module(context: str) -> None:
    assert_same(loaded(Numbers(doubling()), num_workers=1, multiprocessing_context=context), NUMBERS * 2)


def test_a_worker_that_makes_lazy_batches() -> None:
    # by copy; or refused, but in words that help
    try:
        batches = loaded(LazyNumbers(), num_workers=1, multiprocessing_context="fork")
    except RuntimeError as error:
        assert "lazy tensor" in str(error)  # noqa: PT017
    else:
        assert_same(batches, NUMBERS)


def test_a_worker_that_collates_to_the_device() -> None:
    assert_same(
        loaded(Numbers(), num_workers=1, multiprocessing_context="fork", collate_fn=stack_on_the_device), NUMBERS
    )


@pytest.mark.parametrize("kind", [lambda x: x, nn.Parameter, lambda x: x * 2, lambda x: x[1:]])
def test_what_crosses_processes_is_a_copy(kind) -> None:
    x = kind(grid("lazy", 3)).detach()
    twin = pickle.loads(bytes(ForkingPickler.dumps(x)))
    expected = x.tolist()
    x.zero_()
    assert twin.is_lazy
    assert twin.tolist() == expected


def test_a_queue_takes_lazy_tensors() -> None:
    channel = torch.multiprocessing.get_context("fork").Queue()
    channel.put(grid("lazy", 3) * 2)
    try:
        received = channel.get(timeout=20)
    except queue.Empty:
        pytest.fail("nothing arrived")
    assert_same(received, torch.arange(3.0) * 2)


def test_torch_save_writes_into_any_buffer() -> None:
    buffer = io.BytesIO()
    torch.save([grid("lazy", 3), nn.Parameter(grid("lazy", 2))], buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    x, parameter = torch.load(buffer, weights_only=False)
    assert_same([x, parameter.detach()], [torch.arange(3.0), torch.arange(2.0)])

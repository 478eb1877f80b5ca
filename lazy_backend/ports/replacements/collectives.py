"""Every change in `torch.distributed`: collectives in order, meshes of lazy devices, DTensor's random numbers.

In: its functions and classes. Out: the same, which know lazy tensors. What takes a second to import is changed when the
program imports it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lazy_backend.ports.replacements.when_imported import when_imported
from lazy_backend.ports.table import (
    COLLECTIVES,
    DATA_PARALLEL,
    DEVICE_MESHES,
    DTENSOR_RANDOM,
    EXCHANGES,
    FULLY_SHARD,
    FULLY_SHARD_BACKWARD,
    FUNCTIONAL_COLLECTIVES,
)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# What communicates, or ends a group that recorded collectives need.
_COMMUNICATING = (
    "_allgather_base", "_reduce_scatter_base", "abort", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv",
    "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


# Functional collectives, which C++ hands to the group. They have one kernel for all devices.
_FUNCTIONAL = (
    "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out", "all_reduce",
    "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_to_all_single", "broadcast", "broadcast_",
    "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out",
)  # fmt: skip
_ANY_DEVICE = torch._C.DispatchKey.CompositeExplicitAutograd
# Seconds that Python is left to gloo's threads at the end of a group. One that has just finished drops what it holds of
# Python, and PyTorch's groups and their threads outlive `destroy_process_group`. If Python ends meanwhile, the
# process aborts ("terminate called without an active exception"): a plain DistributedDataParallel script, without this
# package and on a busy machine, did so in 13 of 39 runs, and with the pause in none of 14.
_DROPPING = 0.02
# the modules that have the public functions
_PLACES: tuple[Any, ...] = (dist, dist.distributed_c10d) if dist.is_available() else ()
# kept: a library's kernels end with it
_functional = torch.library.Library("_c10d_functional", "IMPL")


def order_collectives(
    in_order: Callable[[Callable[..., Any]], Callable[..., Any]], finish: Callable[[dist.ProcessGroup | None], None]
) -> None:
    """Let collectives of other tensors come after those that were recorded before: groups have no hook for this.

    Ranks need not run what they recorded at the same time, but a group matches their collectives by order.
    """
    if not dist.is_available() or not COLLECTIVES.fits():
        return
    group: Any = dist.ProcessGroup
    for name in _COMMUNICATING:
        if hasattr(group, name):
            COLLECTIVES.put(group, name, in_order(getattr(group, name)))
    if FUNCTIONAL_COLLECTIVES.fits():
        for name in _FUNCTIONAL:
            op = getattr(torch.ops._c10d_functional, name).default
            for key in ("CPU", "CUDA", "PrivateUse1"):
                _functional.impl(name, in_order(functools.partial(op._op_dk, _ANY_DEVICE)), key)
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        finish(group)
        original(group)
        time.sleep(_DROPPING)

    for module in _PLACES:
        COLLECTIVES.put(module, "destroy_process_group", destroy_process_group)


def name_backend_of_lazy(backing_type: Callable[[], str]) -> None:
    """Let `torch.distributed.get_default_backend_for_device("lazy")` answer what it does for the device that runs.

    Not an entry of `Backend.default_device_backend_map`: which device that is may be set after the import.
    """
    if not dist.is_available() or not DEVICE_MESHES.fits():
        return
    original = dist.get_default_backend_for_device

    @functools.wraps(original)
    def get_default_backend_for_device(device: str | torch.device) -> str:
        return original(backing_type() if torch.device(device).type == "lazy" else device)

    for module in _PLACES:
        DEVICE_MESHES.put(module, "get_default_backend_for_device", get_default_backend_for_device)


def support_exchanges(exchanging: Wrap, batching: Wrap) -> None:
    """Let what is sent to single ranks, or received from them, be recorded. Comes after `order_collectives`."""
    if not dist.is_available() or not EXCHANGES.fits():
        return
    group: Any = dist.ProcessGroup
    for name in ("send", "recv"):
        EXCHANGES.put(group, name, exchanging(getattr(group, name)))
    batched = batching(dist.batch_isend_irecv)
    for module in _PLACES:
        EXCHANGES.put(module, "batch_isend_irecv", batched)


# ----- DistributedDataParallel


def support_data_parallel(reducer: Any, registering: Wrap, broadcasting: Wrap) -> None:
    """Let `DistributedDataParallel` make reducers of another class, which hear of its hooks, and broadcast by us."""
    if not dist.is_available() or not DATA_PARALLEL.fits():
        return
    module: Any = dist  # where `DistributedDataParallel` looks
    DATA_PARALLEL.put(module, "Reducer", reducer)
    for name in ("_register_comm_hook", "_register_builtin_comm_hook"):
        DATA_PARALLEL.put(module, name, registering(getattr(module, name)))
    DATA_PARALLEL.put(module, "_broadcast_coalesced", broadcasting(module._broadcast_coalesced))


# ----- fully_shard


def support_fully_shard() -> None:
    """Let `fully_shard` take a mesh of lazy devices by default, and end any backward."""
    package = "torch.distributed.fsdp._fully_shard"
    when_imported(f"{package}._fully_shard", _place_modules)
    when_imported(f"{package}._fsdp_param_group", _end_backwards)


def _place_modules(module: ModuleType) -> None:
    """Without a mesh, shard lazy parameters over all ranks; with a mesh of lazy devices, move the module there.

    PyTorch's default mesh is one of its own devices, and it moves parameters by writes to `data`, which keep a tensor's
    kind.
    """
    if not FULLY_SHARD.fits():
        return
    original = module.fully_shard

    @functools.wraps(original)
    def fully_shard(module: Any, **options: Any) -> Any:
        modules = module if isinstance(module, list) else [module]
        if options.get("mesh") is None and _has_lazy_parameters(modules):
            if not dist.is_initialized():
                dist.init_process_group()  # as PyTorch does for its default mesh
            options["mesh"] = init_device_mesh("lazy", (dist.get_world_size(),))
        mesh = options.get("mesh")
        if mesh is not None and mesh.device_type == "lazy":
            ignored = set(options.get("ignored_params") or ())
            for one in modules:
                _move(one, lambda tensor: tensor.device.type not in ("lazy", "meta") and tensor not in ignored)
        return original(module, **options)

    # where it is known already, if PyTorch's package was imported before this one
    for name in ("_fully_shard._fully_shard", "_fully_shard", ""):
        place = sys.modules.get(f"torch.distributed.fsdp.{name}".rstrip("."))
        if getattr(place, "fully_shard", None) is original:
            FULLY_SHARD.put(place, "fully_shard", fully_shard)


def _move(module: torch.nn.Module, is_elsewhere: Callable[[torch.Tensor], bool]) -> None:
    """Move what `is_elsewhere` to the lazy device, and touch no other tensor: some may be shards by now."""
    for part in module.modules():
        if any(map(is_elsewhere, (*part.parameters(recurse=False), *part.buffers(recurse=False)))):
            part._apply(lambda tensor: tensor.to("lazy") if is_elsewhere(tensor) else tensor, recurse=False)  # type: ignore[no-untyped-call]


def _has_lazy_parameters(modules: list[torch.nn.Module]) -> bool:
    return any(parameter.device.type == "lazy" for module in modules for parameter in module.parameters())


def _end_backwards(module: ModuleType) -> None:
    """Let a backward end that did not use a module whose parameters were gathered for it.

    `fully_shard` asks `torch.accelerator` for a stream then, which knows PyTorch's own devices only.
    """
    if not FULLY_SHARD_BACKWARD.fits():
        return
    group = module.FSDPParamGroup
    original = group.finalize_backward

    @functools.wraps(original)
    def finalize_backward(self: Any) -> None:
        gathered = self._all_gather_result
        if gathered is not None and self.device.type == "lazy":
            self._all_gather_result = gathered._replace(all_gather_event=None)  # what is recorded has one order
        original(self)

    FULLY_SHARD_BACKWARD.put(group, "finalize_backward", finalize_backward)


# ----- DTensor


def support_random_dtensors(backing_type: Callable[[], str], run_clean: Callable[..., Any]) -> None:
    """Let random operators on DTensors draw as on CUDA: the same numbers for copies of a shard, others for others.

    PyTorch moves the offset of a Philox generator for each shard. Lazy calls take their seeds from the default
    generator on the host, so a shard's seeds come from a generator seeded for that shard.
    """

    def change(module: ModuleType) -> None:
        if not DTENSOR_RANDOM.fits():
            return
        tracker = module.OffsetBasedRNGTracker
        state, region = tracker._get_device_state, tracker._distribute_region

        @functools.wraps(state)
        def get_device_state(self: Any) -> torch.Tensor:
            # what ranks compare as they begin; as a lazy tensor, each byte would be read by itself
            return torch.get_rng_state().to(backing_type()) if self._device.type == "lazy" else state(self)

        @functools.wraps(region)
        def distribute_region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Any:
            if self._device.type != "lazy":
                return region(self, spec, generator)
            if not self.distribute_region_enabled:
                return contextlib.nullcontext()
            seed = run_clean(_draw, generator)
            return _seeded_for(self._compute_rng_offsets(spec)[0] + seed)

        DTENSOR_RANDOM.put(tracker, "_get_device_state", get_device_state)
        DTENSOR_RANDOM.put(tracker, "_distribute_region", distribute_region)

    when_imported("torch.distributed.tensor._random", change)


@contextlib.contextmanager
def _seeded_for(seed: int) -> Iterator[None]:
    """Within this block, the default generator is that of a shard. Afterwards it is the same on all ranks again."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _draw(generator: torch.Generator | None) -> int:
    # Three numbers, where a recorded call draws one: what captures a body that comes here sees that a replay, which
    # draws the seeds of the recorded calls, would leave the generator in another state, and does not replay it.
    return int(torch.randint(2**62, (3,), generator=generator, device="cpu")[0])

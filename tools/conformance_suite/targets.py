"""The devices that are compared, behind one interface.

In: tensors on the CPU. Out: tensors of the same values and geometry on a device; what happened there.
`eager` is the reference; `lazy` is this package; `ltc` is PyTorch's own Lazy Tensor Core. The last two own the same
device and never meet in one process: each is imported only when it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Cuts = Counter[str]

# The backend of each mode in which graphs are compiled.
COMPILED = {"aot": "aot_eager", "mixed": "aot_eager_decomp_partition", "inductor": "inductor"}


class RandomOps(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    drawn = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in op.tags and kwargs.get("generator") is None:
            self.drawn = True
            return self.draw(op, args, kwargs)
        return op(*args, **kwargs)

    def draw(self, op: Any, args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)


class SeededRandomOps(RandomOps):
    """Each random operator is drawn from a seed of its own, as lazy_backend does: then both give equal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rng: Any = importlib.import_module("lazy_backend.lowering.ir.rng")

    def draw(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not self.rng.draws_random_numbers(op, args) or not self.rng.can_seed(op):
            return op(*args, **kwargs)
        return self.rng.run_seeded(op, [self.rng.draw_seed()], 0, torch.device("cpu"), args, kwargs)


class Target:
    """A device to run programs on."""

    name = "eager"
    device = "cpu"
    exact = True  # whether strides, aliasing and errors are compared, and values bit by bit
    foreach = False  # whether optimizers choose their foreach forms here by themselves

    def reset(self) -> None:
        """Forget every program and every error."""

    def finish(self) -> None:
        """Compute all that is pending; raises what went wrong."""

    def place(self, tensor: torch.Tensor) -> Any:
        """Equal for two tensors that share memory."""
        return None if tensor.layout != torch.strided else tensor.untyped_storage()._cdata

    def cuts(self) -> Cuts:
        """What was not recorded since `reset`, with reasons."""
        return Counter()

    def seen(self) -> tuple[int, int]:
        """How many calls and graphs were new since the start."""
        return 0, 0

    @contextlib.contextmanager
    def mode(self, name: str) -> Iterator[None]:
        """Run as the mode `name` says."""
        yield

    def check_compiled(self) -> None:
        """Raise unless all that ran since `reset` was compiled."""

    def random_ops(self) -> RandomOps:
        """How eager draws random numbers when it is compared with this target."""
        return RandomOps()

    # ----- tensors

    def move(self, tree: Any, stay: Sequence[int] = ()) -> Any:
        """Copies of all tensors in `tree`, with shared memory shared. Those at the places `stay` remain on the CPU."""
        keep = {id(leaf) for place, leaf in enumerate(_leaves(tree)) if place in stay}
        mover = _Mover(self, [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)], keep)
        return tree_map(mover.move, tree, is_leaf=lambda part: isinstance(part, PackedSequence))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with the strides of `tensor`, which has no gaps."""
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return moved.copy_(tensor)


def _leaves(tree: Any) -> list[Any]:
    return tree_leaves(tree, is_leaf=lambda part: isinstance(part, PackedSequence))


class _Mover:
    """Moves the leaves of one tree."""

    def __init__(self, target: Target, tensors: list[torch.Tensor], keep: set[int]) -> None:
        self.target = target
        self.keep = keep
        self.moved: dict[int, torch.Tensor] = {}
        self.bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        places = Counter({_storage(tensor): 0 for tensor in tensors})
        places.update(_storage(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())
        self.shared = {place for place, count in places.items() if count > 1}

    def move(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type == "meta":
                return leaf
            if id(leaf) not in self.moved:
                self.moved[id(leaf)] = self._keep(leaf) if id(leaf) in self.keep else self._move(leaf)
            return self.moved[id(leaf)]
        if isinstance(leaf, PackedSequence):
            moved = [self.move(part) for part in (leaf.data, leaf.sorted_indices, leaf.unsorted_indices)]
            return PackedSequence(moved[0], leaf.batch_sizes, *moved[1:])
        if isinstance(leaf, torch.device) and leaf.type == "cpu":
            return torch.device(self.target.device)
        if isinstance(leaf, str) and leaf == "cpu":
            return self.target.device
        if isinstance(leaf, torch.Generator):
            return torch.Generator().set_state(leaf.get_state())
        return leaf

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    @torch.no_grad()
    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if plain.layout != torch.strided or plain.is_quantized:
            moved = plain.clone().to(self.target.device)
        else:
            moved = self._geometry(torch._neg_view(plain) if plain.is_neg() else plain)
            moved = torch._neg_view(moved) if plain.is_neg() else moved
        return moved.requires_grad_(tensor.requires_grad)

    def _geometry(self, plain: torch.Tensor) -> torch.Tensor:
        if plain.is_conj():
            return self._geometry(plain.conj()).conj()
        if self.target.exact and (_storage(plain) in self.shared or not _is_dense(plain)):
            return self._base(plain).as_strided(plain.shape, plain.stride(), plain.storage_offset())
        return self.target.copy(plain)

    def _base(self, plain: torch.Tensor) -> torch.Tensor:
        """All the memory behind `plain`, in one dimension."""
        key = _storage(plain), plain.dtype
        if key not in self.bases:
            storage = plain.untyped_storage()
            flat = torch.empty(0, dtype=plain.dtype).set_(storage, 0, (storage.nbytes() // plain.element_size(),))
            self.bases[key] = self.target.copy(flat)
        return self.bases[key]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


class Lazy(Target):
    """This package."""

    name, device, foreach = "lazy", "lazy", True

    def __init__(self) -> None:
        self.package: Any = importlib.import_module("lazy_backend")
        self.contexts: Any = importlib.import_module("lazy_backend.tensors.contexts").contexts
        self.ir_cache: Any = importlib.import_module("lazy_backend.ir_cache")
        self.executor: Any = importlib.import_module("lazy_backend.execution.sync").executor
        self.metrics = self.package.metrics
        importlib.import_module("torch._lazy")  # PyTorch's helpers call its mark_step

    def reset(self) -> None:
        for context in self.contexts.get_active_devices():
            context.locker.wait_idle()
            context.locker.take_exception()
            with context.lock:
                context.forget_paths()
                context.new_trace()
        self.ir_cache.reset()
        self.executor.clear_computations()
        self.metrics.reset()

    def finish(self) -> None:
        self.package.mark_step()
        self.package.wait_device_ops()

    def place(self, tensor: torch.Tensor) -> Any:
        return id(tensor._data.storage) if isinstance(tensor, self.package.LazyTensor) else super().place(tensor)

    def cuts(self) -> Cuts:
        found: Cuts = Counter()
        for name, count in self.metrics.counters().items():
            kind, colon, cause = name.partition(": ")
            cause = cause.rsplit(" at ", 1)[0]
            # a call that runs at once counts as both, but as a cut only if something was pending
            if colon and (kind == "Fallback" or (kind == "GraphCut" and not cause.startswith("aten."))):
                found[cause] += count
        return found

    def seen(self) -> tuple[int, int]:
        calls = sum(context.trie.size for context in self.contexts.get_active_devices())
        return calls, self.metrics.counter_value("UncachedCompile")

    @contextlib.contextmanager
    def mode(self, name: str) -> Iterator[None]:
        settings: dict[str, Any] = {"compile": "off"}
        if name in COMPILED:
            settings = {"compile": "foreground", "backend": COMPILED[name], "num_profiled_runs": 0}
        if name == "recorded" or name in COMPILED:  # where they run as they are recorded, nothing is compiled
            settings["first_sight"] = "record"
        with self.package.config.patch(check_graphs=True, **settings):
            yield

    def random_ops(self) -> RandomOps:
        return SeededRandomOps()

    def check_compiled(self) -> None:
        count = self.metrics.counter_value
        if count("CompileFailed"):
            raise AssertionError("the graph could not be compiled and was interpreted")
        if count("PlanRefused"):
            raise AssertionError("the compiled graph was refused")
        for computation in self.executor.computations.cache:
            state = computation.executor.get_debug_state()
            if computation.executor.stored.num_nodes and state.plan != "optimized" and not state.error:
                raise AssertionError("nothing was compiled")


class Ltc(Target):
    """PyTorch's Lazy Tensor Core, TorchScript below."""

    name, device, exact = "ltc", "lazy", False

    def __init__(self) -> None:
        importlib.import_module("torch._lazy.ts_backend").init()
        self.lazy: Any = importlib.import_module("torch._lazy")
        self.metrics: Any = importlib.import_module("torch._lazy.metrics")

    def reset(self) -> None:
        self.lazy.mark_step()
        self.lazy.wait_device_ops()
        self.metrics.reset()

    def finish(self) -> None:
        self.lazy.mark_step()
        self.lazy.wait_device_ops()

    def place(self, tensor: torch.Tensor) -> Any:
        return None

    def cuts(self) -> Cuts:
        return Counter(name for name in self.metrics.counter_names() if name.startswith("aten::"))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


TARGETS: Mapping[str, Callable[[], Target]] = {"eager": Target, "lazy": Lazy, "ltc": Ltc}

"""Compile a graph with a torch.compile backend.

In: a graph, its constants at compile time, a backend by name or callable. Out: `CompiledPlan`.
The backend is called directly with an FX module of aten calls. `torch.compile` would put Dynamo in front of it, which
traces Python and guards every argument of every call; here there is no Python to trace, and the key is the guard.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from lazy_backend.lowering.compilation.artefact import boxed, load
from lazy_backend.lowering.compilation.examples import static_examples, symbolic_examples
from lazy_backend.lowering.compilation.fx import Signature, to_fx
from lazy_backend.lowering.compilation.input_copies import with_copies_of_overwritten_inputs
from lazy_backend.lowering.ir.aliasing import OutputAliases, watched_storages
from lazy_backend.lowering.ir.graph import Graph, Node
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.ir.shapes import Sizes, symbolic_graph

Backend: TypeAlias = str | Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Without the thirty lines PyTorch prints about a fake kernel's error before it raises it."""
    _fake_log.disabled = True
    try:
        yield
    finally:
        _fake_log.disabled = False


def lookup_backend(backend: Backend) -> Callable[..., Callable[..., Any]]:
    """The backend's entry point. Raises `ValueError` for a name nobody registered."""
    if not isinstance(backend, str):
        return backend
    # loaded at first use: torch._dynamo takes over a second to import
    import torch._dynamo as dynamo

    try:
        # internal, checked on 2.13: the public torch.compile offers the same table only behind Dynamo's front
        return dynamo.lookup_backend(backend)  # type: ignore[no-any-return]
    except dynamo.exc.InvalidBackend as error:
        known = ", ".join(["eager", *torch.compiler.list_backends()])
        raise ValueError(
            f"unknown backend {backend!r}\n  set lazy_backend.config.backend to a callable or one of: {known}"
        ) from error


def backend_name(backend: Backend) -> str:
    if isinstance(backend, str):
        return backend
    return f"{getattr(backend, '__module__', '')}.{getattr(backend, '__qualname__', repr(backend))}"


def runs_module_as_is(backend: Backend) -> bool:
    """Whether the backend calls the module itself, so that Python floats can be arguments."""
    return backend == "eager"


class PlanError(RuntimeError):
    """A compiled graph failed while it ran. Names the calls that can fail at run time, as it cannot tell which did."""

    def __init__(self, graph: Graph, cause: BaseException) -> None:
        suspects = [node for node in graph.nodes if may_fail_at_run_time(node)][:_MAX_SUSPECTS]
        lines = "".join(f"\n  {node.name} recorded at {node.site or 'an unknown line'}" for node in suspects)
        super().__init__(f"{cause}" + (f"\n  while running a compiled graph, likely in{lines}" if lines else ""))


_MAX_SUSPECTS = 5

# Kernels that look at values and may refuse them; and whatever is not PyTorch's own.
_VALUE_CHECKED = ("index", "embedding", "gather", "scatter", "nll_loss", "cholesky", "linalg", "multinomial", "assert")


def may_fail_at_run_time(node: Node) -> bool:
    namespace, name = node.op._schema.name.split("::")
    return namespace not in ("aten", "prims") or any(word in name for word in _VALUE_CHECKED)


class CompiledPlan:
    """A compiled graph. Holds for the constants it was compiled with, but for those that are inputs."""

    kind = "compiled"

    def __init__(
        self,
        stored: StoredGraph,
        signature: Signature,
        specialised: dict[int, float],
        call: Callable[[list[Any]], Sequence[torch.Tensor]],
        sizes: Sizes | None = None,
        guards: str | None = None,
    ) -> None:
        self._stored = stored
        self._sizes = sizes
        self._device = stored.device
        self.signature = signature
        self.specialised = specialised
        self._call = call
        # the compiler's conditions on symbols, in its own words: over `L['t0']`, `L['t1']`, ...
        self._guards = None if guards is None else compile(guards, "<conditions on sizes>", "eval")
        self._aliases = OutputAliases()
        self.conforms = False

    @property
    def graph(self) -> Graph:
        """What was compiled, symbolic sizes included."""
        return _lowered(self._stored.get(), self._sizes)

    def code(self, constants: Sequence[float]) -> str:
        """The FX module, as the backend got it, for constants this plan accepts."""
        signature = self.signature
        promoted = frozenset(signature.scalars)
        return str(to_fx(self.graph, constants, promoted, signature.numbers, signature.sizes)[0].code)

    def accepts(self, constants: Sequence[float]) -> bool:
        """Whether every constant that was compiled in has the same bits now."""
        return all(_same(constants[place], value) for place, value in self.specialised.items())

    def refused(self, constants: Sequence[float]) -> tuple[tuple[int, float, float], ...]:
        """The constants that were compiled in with another value: place, value then, value now."""
        places = ((place, value, constants[place]) for place, value in self.specialised.items())
        return tuple(found for found in places if not _same(found[1], found[2]))

    def accepts_sizes(self, sizes: Sequence[int]) -> bool:
        """Whether the compiled code holds for these values of its symbols."""
        if self._guards is None:
            return True
        # the text comes from the artefact, which is code itself
        return bool(eval(self._guards, {"L": {f"t{place}": size for place, size in enumerate(sizes)}}))

    def execute(
        self,
        inputs: list[torch.Tensor],
        constants: Sequence[float],
        seeds: Sequence[int],
        sizes: Sequence[int] = (),
    ) -> list[torch.Tensor]:
        """Run once. Takes ownership of `inputs`: a boxed call empties the list and frees them as they die."""
        arguments: list[Any] = inputs
        arguments[:0] = sizes
        if self.signature.scalars:
            packed = torch.tensor([constants[place] for place in self.signature.scalars], dtype=torch.float64)
            # one transfer for all scalars of a step
            arguments.append(packed.to(self._device, non_blocking=True))
        if self.signature.seeds:
            arguments.append(torch.tensor(seeds, dtype=torch.int64))
        if self.signature.numbers:
            arguments.extend(constants)
        taken = {} if self._aliases.is_known() else watched_storages(arguments)
        # autograd and autocast act above us: nothing here may record, and all casts are in the graph
        try:
            with torch.no_grad(), torch._C._DisableAutocast():
                return self._aliases.separate(taken, list(self._call(arguments)))
        except Exception as error:
            raise PlanError(self.graph, error) from error


def _same(a: float, b: float) -> bool:
    # NaN is the same as itself, 0.0 is not -0.0
    return a.hex() == b.hex()


def compile_graph(
    graph: Graph,
    constants: Sequence[float],
    promoted: frozenset[int],
    backend: Backend,
    sizes: Sizes | None = None,
    stored: StoredGraph | None = None,
) -> CompiledPlan:
    """Compile `graph`; with `sizes` for all numbers that fit them. Raises whatever the backend raises.

    `stored`: where the plan finds `graph` later, if somebody sets it aside.
    """
    stored = stored or StoredGraph(graph)
    numbers = runs_module_as_is(backend)
    symbolic = None if sizes is None else symbolic_graph(graph, sizes)
    lowered = graph if symbolic is None else symbolic.graph
    module, signature = to_fx(lowered, constants, promoted, numbers, 0 if symbolic is None else len(symbolic.hints))
    specialised = {} if numbers else _specialised(constants, promoted)
    if numbers:
        return CompiledPlan(stored, signature, specialised, _run_as_it_is(module), sizes)
    examples = static_examples(graph, signature) if symbolic is None else symbolic_examples(symbolic, signature)
    is_inductor = backend == "inductor"
    passes = with_copies_of_overwritten_inputs() if is_inductor else contextlib.nullcontext()
    with torch.no_grad(), torch._C._DisableAutocast(), quiet_fake_tensors(), examples.tracing(), passes:
        call = boxed(lookup_backend(backend)(module, examples.arguments))
    return CompiledPlan(stored, signature, specialised, call, sizes, examples.guards())


def load_graph(
    data: bytes, stored: StoredGraph, constants: Sequence[float], promoted: frozenset[int], sizes: Sizes | None = None
) -> CompiledPlan:
    """The plan whose artefact was made from these. Raises `BadArtefact`."""
    graph = stored.get()
    num_symbols = 0 if sizes is None else len(sizes.symbols)
    signature = Signature(tuple(sorted(promoted)), seeds=graph.num_seeds > 0, numbers=False, sizes=num_symbols)
    call, guards = load(data, graph)
    return CompiledPlan(stored, signature, _specialised(constants, promoted), call, sizes, guards)


def _lowered(graph: Graph, sizes: Sizes | None) -> Graph:
    return graph if sizes is None else symbolic_graph(graph, sizes).graph


def _specialised(constants: Sequence[float], promoted: frozenset[int]) -> dict[int, float]:
    return {place: value for place, value in enumerate(constants) if place not in promoted}


def _run_as_it_is(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's own code, taking one list that it empties: arguments would be alive until it returns."""
    # internal, checked on 2.13; torch.fx writes every graph's code through such an object
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    return module.forward  # type: ignore[no-any-return]

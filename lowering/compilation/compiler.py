"""Compile a graph with a torch.compile backend.

In: a `CompileRequest`. Out: `CompiledPlan`.
The backend is called directly with an FX module of aten calls. `torch.compile` would put Dynamo in front of it, which
traces Python and guards every argument of every call; here there is no Python to trace, and the cache key is the guard.
"""

from __future__ import annotations

import contextlib
import math
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from lazy_backend.lowering.artefacts.artefact import boxed, load
from lazy_backend.lowering.artefacts.run_thread import Overlap, RunStarter, run_thread
from lazy_backend.lowering.checks.proof import Proof
from lazy_backend.lowering.checks.refusals import Refusal, may_refuse
from lazy_backend.lowering.checks.value_rules import checked
from lazy_backend.lowering.compilation.fx import checks_values, to_fx
from lazy_backend.lowering.compilation.inductor_defects import without_defects
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.compilation.request import Backend, CompileRequest
from lazy_backend.lowering.device_graphs.launcher import GraphLauncher
from lazy_backend.lowering.ir.aliasing import OutputAliases, watched_storages
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.shapes import symbolic_graph
from lazy_backend.ports.compilers import backend_names, for_threads, registered_backend, use_boxed_code
from lazy_backend.ports.fake_tensors import quiet_fake_tensors
from lazy_backend.ports.thread_modes import WithoutAutocast, is_any_autocast_enabled, set_grad_enabled


def lookup_backend(backend: Backend) -> Callable[..., Callable[..., Any]]:
    """The backend's entry point. Raises `ValueError` for a name that is not registered."""
    if not isinstance(backend, str):
        return backend
    found = registered_backend(backend)
    if found is None:
        known = ", ".join(backend_names())
        raise ValueError(
            f"unknown backend {backend!r}\n  set lazy_backend.config.backend to a callable or one of: {known}"
        )
    return found


def backend_name(backend: Backend) -> str:
    if isinstance(backend, str):
        return backend
    return f"{getattr(backend, '__module__', '')}.{getattr(backend, '__qualname__', repr(backend))}"


class PlanError(RuntimeError):
    """A compiled graph failed while it ran. Lists the calls that can fail at run time; which one failed is unknown."""

    def __init__(self, graph: Graph, cause: BaseException, are_checked: bool) -> None:
        """`are_checked`: whether what the code checks by itself is not in question."""
        suspects = [node for node in graph.nodes if may_refuse(node.op) and not (are_checked and checked(node))]
        named = suspects[:_MAX_SUSPECTS]
        lines = "".join(f"\n  {node.name} recorded at {node.site or 'an unknown line'}" for node in named)
        super().__init__(f"{cause}" + (f"\n  while running a compiled graph, likely in{lines}" if lines else ""))


_MAX_SUSPECTS = 5


def guards_hold(guards: CodeType, sizes: Sequence[int]) -> bool:
    """Whether the compiler's guards on symbols hold for these sizes. They call functions of `math` and `torch`."""
    # eval adds no risk: the text comes from the artefact, which is code itself
    symbols = {f"t{place}": size for place, size in enumerate(sizes)}
    return bool(eval(guards, {"math": math, "torch": torch, "L": symbols}))


class CompiledPlan:
    """A compiled graph. Valid for the constants that are compiled in; the other constants are inputs."""

    def __init__(
        self,
        request: CompileRequest,
        call: Callable[[list[Any]], Sequence[torch.Tensor]],
        guards: str | None = None,
        why_python: str = "",
        may_be_slower: bool = False,
        find_starter: Callable[[], RunStarter | None] = lambda: None,
        left_out: tuple[str, ...] = (),
        is_in_blocks: bool = False,
    ) -> None:
        self._is_in_blocks = is_in_blocks
        self._stored = request.stored
        self._sizes = request.sizes
        self._device = request.stored.device
        self.signature = signature = request.signature
        self.makes_inputs = bool(signature.scalars or signature.seeds)  # tensors, by operators
        self.takes_inputs_alone = not (self.makes_inputs or signature.numbers)
        self.specialised = request.specialised()
        self._bits = _bits_of(self.specialised.values())
        self.why_python = why_python  # why a run from an artefact calls kernels from Python
        self.left_out = left_out  # checks of the compiler's that runs leave out
        self.may_be_slower = may_be_slower  # than the whole graph, see Note [The whole graph after its blocks]
        self._call = call
        self._find_starter = find_starter
        self._starter: RunStarter | None = None  # once it was found
        # the compiler's guards on symbols, an expression over `L['t0']`, `L['t1']`, ...
        self._guards = None if guards is None else compile(guards, "<conditions on sizes>", "eval")
        self.aliases = OutputAliases()
        self.launcher: GraphLauncher | None = None
        self.proof = Proof()
        self.conforms = False
        self.num_runs = 0
        self.shortest_run = math.inf
        self.overlap = Overlap()

    @property
    def kind(self) -> PlanKind:
        is_launched = self.launcher is not None and self.launcher.is_launching
        return PlanKind.COMPILED_AND_LAUNCHED if is_launched else PlanKind.COMPILED

    @property
    def graph(self) -> Graph:
        """The graph that was compiled, with symbolic sizes if it has any."""
        graph = self._stored.get()
        return graph if self._sizes is None else symbolic_graph(graph, self._sizes).graph

    def code(self, constants: Sequence[float]) -> str:
        """The code of the FX module that the backend got, for constants that this plan accepts."""
        hints = () if self._sizes is None else symbolic_graph(self._stored.get(), self._sizes).hints
        return str(to_fx(self.graph, constants, self.signature, hints).code)

    def accepts(self, constants: Sequence[float]) -> bool:
        """Whether every constant that was compiled in has the same bits now."""
        if not self.specialised:
            return True
        same_bits = _bits_of([constants[place] for place in self.specialised]) == self._bits
        return same_bits or all(_same(constants[place], value) for place, value in self.specialised.items())

    def refused(self, constants: Sequence[float]) -> tuple[tuple[int, float, float], ...]:
        """The constants that were compiled in with another value: place, value then, value now."""
        places = ((place, value, constants[place]) for place, value in self.specialised.items())
        return tuple(found for found in places if not _same(found[1], found[2]))

    def accepts_sizes(self, sizes: Sequence[int]) -> bool:
        """Whether the compiled code holds for these values of its symbols."""
        return self._guards is None or guards_hold(self._guards, sizes)

    def execute(
        self,
        inputs: list[torch.Tensor],
        constants: Sequence[float],
        seeds: Sequence[int],
        sizes: Sequence[int] = (),
        launches: bool = True,
    ) -> list[torch.Tensor]:
        """Run once. Takes ownership of `inputs`: a boxed call empties the list and frees each after its last use."""
        signature = self.signature
        if signature.scalars:
            self._add_scalars(inputs, constants)
        numbers = constants if signature.numbers else ()
        if self.launcher is None or not launches:
            return self._compute(inputs, seeds, sizes, numbers)
        which = (*sizes, array("d", numbers).tobytes())  # bits: 0.0 is not -0.0
        return self.launcher.run(
            lambda tensors, own_seeds: self._compute(tensors, own_seeds, sizes, numbers), inputs, seeds, which
        )

    def run_beside(self, sizes: Sequence[int] = ()) -> CompiledRun | None:
        """A run to begin on a thread that has no Python; None if runs need Python. The first run is another one: it
        shows which results share memory.
        """
        starter = self._starter or self._found_starter()
        if starter is None or self.launcher is not None or self.aliases.copied is None:
            return None
        return CompiledRun(self, starter, sizes)

    def _found_starter(self) -> RunStarter | None:
        self._starter = self._find_starter()
        return self._starter

    def arguments(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """`inputs`, made the arguments of the compiled code."""
        self._add_scalars(inputs, constants)
        self._add_numbers(inputs, seeds, sizes, constants if self.signature.numbers else ())
        return inputs

    def _add_scalars(self, inputs: list[torch.Tensor], constants: Sequence[float]) -> None:
        if self.signature.scalars:
            # made on the CPU whatever the user's default device is: one transfer for all scalars of a step
            values = [constants[place] for place in self.signature.scalars]
            packed = torch.frombuffer(array("d", values), dtype=torch.float64)
            inputs.append(packed.to(self._device, non_blocking=True))

    def _add_numbers(
        self, arguments: list[Any], seeds: Sequence[int], sizes: Sequence[int], numbers: Sequence[float]
    ) -> None:
        """Complete the arguments of compiled code: `arguments` are the inputs, and the promoted floats if any."""
        arguments[:0] = sizes
        if self.signature.seeds:
            arguments.append(torch.tensor(seeds, dtype=torch.int64, device="cpu"))
        arguments.extend(numbers)

    def _compute(
        self, arguments: list[Any], seeds: Sequence[int], sizes: Sequence[int], numbers: Sequence[float]
    ) -> list[torch.Tensor]:
        """Run once: `arguments` are the inputs, and the promoted floats if there are any."""
        if sizes or numbers or self.signature.seeds:
            self._add_numbers(arguments, seeds, sizes, numbers)
        taken = watched_storages(arguments) if self.aliases.copied is None else {}
        # autograd and autocast act in the layers above: nothing here may record, and all casts are in the graph
        try:
            if not (torch.is_grad_enabled() or is_any_autocast_enabled()):  # as in runs of steps
                return self.aliases.separate(taken, list(self._call(arguments)))
            with _Below():
                return self.aliases.separate(taken, list(self._call(arguments)))
        except Exception as error:
            described = self.described(error)
            raise described from described.__cause__

    def described(self, error: Exception) -> Exception:
        """An error of the compiled code, with the user's line."""
        refusal = Refusal.of(error)
        if refusal is not None:
            return refusal.error(self.graph, not self._is_in_blocks)
        described = PlanError(self.graph, error, checks_values(self.graph, self.signature))
        described.__cause__ = error
        return described


class CompiledRun:
    """A run of a compiled plan beside recording. Any number of calls may begin it, one within another.

    See Note [Runs beside recording].
    """

    __slots__ = ("jobs", "outputs", "is_over", "makes_inputs", "_plan", "_sizes", "_starter")

    def __init__(self, plan: CompiledPlan, starter: RunStarter, sizes: Sequence[int]) -> None:
        self._plan = plan
        self._sizes = sizes
        self._starter = starter
        self.jobs: list[Any] = []  # the job, once the run has begun
        self.outputs: list[torch.Tensor] = []  # once `results` was asked
        self.is_over = False  # as far as somebody has waited for it
        self.makes_inputs = plan.makes_inputs  # by operators

    @property
    def num_threads(self) -> int:
        """How many threads the run takes."""
        return self._starter.num_threads or torch.get_num_threads()

    @property
    def only_hands_out(self) -> bool:
        """Whether it has begun, and `results` runs no operator."""
        return bool(self.jobs) and not self._plan.aliases.copied

    def begin(self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]) -> None:
        """Begin, unless that is done. Takes ownership of `inputs`: empties the list."""
        plan, arguments = self._plan, inputs
        if self._sizes or not plan.takes_inputs_alone:
            arguments = plan.arguments(inputs, constants, seeds, self._sizes)
        queue = run_thread.queue or run_thread.queue_of(self._starter.extension)
        self._starter.begin(queue, self.jobs, arguments, torch.get_num_threads())

    def wait(self, seconds: float) -> bool:
        """Wait for at most so long, without the GIL. Returns whether the run is over."""
        self.is_over = self._starter.extension.wait(self.jobs[0], seconds)
        return self.is_over

    def results(self) -> tuple[list[torch.Tensor], float, float]:
        """The outputs of a run that is over, seconds since it began, and those that it took; zeros if asked again.

        May be interrupted, and called again.
        """
        ago = seconds = 0.0
        if not self.outputs:
            try:
                ago, seconds = self._starter.extension.results(self.jobs[0], self.outputs)
            except Exception as error:
                described = self._plan.described(error)
                raise described from described.__cause__
        outputs, aliases = self.outputs.copy(), self._plan.aliases
        # none are left once somebody else has handed them out
        return aliases.separate({}, outputs) if aliases.copied and outputs else outputs, ago, seconds


class _Below:
    """Turns gradients and autocast off, which takes 5 µs; `torch.no_grad()` takes ten times as long."""

    __slots__ = ("_grad_mode", "_autocast")

    def __enter__(self) -> None:
        self._grad_mode = torch.is_grad_enabled()
        set_grad_enabled(False)
        self._autocast = WithoutAutocast()
        self._autocast.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._autocast.__exit__(*exception)
        set_grad_enabled(self._grad_mode)


def _bits_of(values: Collection[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def _same(a: float, b: float) -> bool:
    # NaN is the same as itself, 0.0 is not -0.0
    return a.hex() == b.hex()


def compile_graph(request: CompileRequest) -> CompiledPlan:
    """Compile in this process. Raises whatever the backend raises."""
    module = request.module()
    if request.signature.numbers:
        return CompiledPlan(request, _run_as_it_is(module))
    examples = request.examples()
    own = _inductor_here() if request.backend == "inductor" else contextlib.nullcontext()
    grad_mode = torch.is_grad_enabled()
    try:
        with torch.no_grad(), WithoutAutocast(), quiet_fake_tensors(), examples.tracing(), own:
            call = boxed(lookup_backend(request.backend)(module, examples.arguments))
    finally:
        set_grad_enabled(grad_mode)  # a function of C: what interrupts `no_grad`, which is Python, leaves gradients off
    return CompiledPlan(request, call, examples.guards())


@contextlib.contextmanager
def _inductor_here() -> Iterator[None]:
    """Inductor in this process, with our pass, and with as many threads compiled in as there are: see `worker`."""
    with without_defects(), for_threads(torch.get_num_threads()):
        yield


def load_graph(data: bytes, request: CompileRequest) -> CompiledPlan:
    """Load the plan from an artefact that was made for an equal request. Raises `BadArtefact`."""
    loaded = load(data, request.graph)  # which defines the operators that it calls
    graph = request.stored.get()
    # a look at a tensor's memory has no such bits
    has_bits = any(value.meta.conj or value.meta.neg for value in graph.inputs)
    further: dict[str, Any] = {} if has_bits else {"find_starter": loaded.find_starter}
    further |= {"left_out": loaded.left_out, "is_in_blocks": loaded.is_in_blocks}
    return CompiledPlan(request, loaded.call, loaded.guards, loaded.why_python, loaded.may_be_slower, **further)


def _run_as_it_is(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's own code as a boxed function: separate arguments would stay alive until it returns."""
    if use_boxed_code(module):
        return module.forward  # type: ignore[no-any-return]
    return lambda arguments: module.forward(*arguments)

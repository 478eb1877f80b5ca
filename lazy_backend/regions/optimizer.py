"""Captured optimizers: `capture(optimizer)`.

In: an optimizer's steps within an ordinary loop. Out: the same calls, recorded without running its Python.

Note [What a captured optimizer does]
A step is a stretch like a module's forward (Note [What a captured module does]), which writes to parameters and state
and returns nothing. Its floats change from step to step: they are formulas over the hyperparameters and the step counts
that it keeps on the CPU, or as numbers in its groups and its state (Note [Floats by formula]). So a jump takes the
floats that these formulas give now, and the counts advance as the body would have advanced them. Which numbers a step
changes is seen at the first steps. Which parameters have gradients is part of what a jump is found by. A body that
branches on its floats, as one that does more at each tenth step, is several programs: each is learned by itself, and a
step is replayed by the one whose branches its floats would take.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.errors.captures import gone, no_longer_alike
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.floats.float_recorder import FloatRecorder, RecordedFloats
from lazy_backend.floats.formula_program import Evaluated, FormulaProgram, NotFollowed, ProgramRun, Stale, follow
from lazy_backend.floats.hyperparameters import OptimizerGuard, changed_numbers, is_number, numbers_in
from lazy_backend.lowering.artefacts.environment import switches
from lazy_backend.lowering.ir.program import Token
from lazy_backend.lowering.ir.ranges import is_profiling
from lazy_backend.ports.cpython import attributes_of, container_kind, is_a, items_of
from lazy_backend.ports.hooks import (
    HOOKS_AFTER_ALL_STEPS,
    HOOKS_BEFORE_ALL_STEPS,
    SCHEDULED,
    pass_on_schedule,
    registered_tensors,
    step_hooks_of,
)
from lazy_backend.ports.table import REGIONS
from lazy_backend.ports.tensor_types import is_leaf
from lazy_backend.ports.thread_modes import WithoutSubclasses
from lazy_backend.regions.conditions import why_as_written
from lazy_backend.regions.jump import Known, key_of, learn_jump, make_jump, take_jump
from lazy_backend.regions.named_by_code import NamedByCode
from lazy_backend.regions.stretch import Stretch, StretchStart
from lazy_backend.replay.accounts import Account, Attempts, NotReplayable
from lazy_backend.replay.captured_state import Watch, watches
from lazy_backend.replay.plain_values import is_plain
from lazy_backend.replay.recorded_call import RandomState
from lazy_backend.replay.structure import StructureGuard
from lazy_backend.replay.unseen_reads import CodeThatRan, watching_reads
from lazy_backend.tensors.outside import new_data, upload
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor, wrap
from lazy_backend.tensors.thread_state import describe_autocast, run_clean

# Attributes whose contents `_OptimizerParts` and `OptimizerGuard` compare by themselves.
_SEEN_HERE = ("param_groups", "state", "step", "zero_grad")
# Of all optimizers that have no other one. A program may replace it in the class, at any time.
_ZERO_GRAD = torch.optim.Optimizer.zero_grad
# Patterns of gradients that are remembered.
_MAX_STATES = 8
# Programs of one pattern that are remembered, such as those of the branches of a schedule.
_MAX_PROGRAMS = 16
# Runs that are compared to learn which floats follow which.
_MAX_RUNS = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Upload:
    """A tensor that a step uploads from the CPU: its value, and the nodes that may have given it."""

    value: torch.Tensor
    nodes: Sequence[int]


# An operand of a step: a parameter or an entry of the state, which `_OptimizerParts` sees replaced; the number of the
# parameter whose gradient it is; or an upload.
_Operand = LazyTensor | int | _Upload


def _operands_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[_Operand, LazyTensor]]:
    """The lazy tensors that a step may use, each as an operand."""
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        yield parameter, parameter
        if type(parameter.grad) is LazyTensor:
            yield number, parameter.grad
        yield from ((tensor, tensor) for tensor in _tensors_in(optimizer.state.get(parameter)))


def _tensors_in(value: Any) -> Iterator[LazyTensor]:
    """The lazy tensors in an entry of the state, at any depth in lists and dicts: `_OptimizerParts` sees these."""
    if type(value) is LazyTensor:
        yield value
    elif (kind := container_kind(value)) is not None:
        for one in dict.values(value) if kind is dict else items_of(value):
            yield from _tensors_in(one)


def _nested_in(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for state in optimizer.state.values():
        for value in dict.values(state) if is_a(state, dict) else (state,):
            if not is_a(value, torch.Tensor) and not is_plain(value):
                yield value


class _OptimizerParts:
    """What an optimizer is made of besides its hyperparameters: parameters, the entries of its state, attributes.

    Does not refer to the optimizer, which would never be freed then.
    """

    __slots__ = ("_counts", "_lengths", "_values", "_attributes", "_num_attributes", "_inside", "_named", "read")

    def __init__(self, optimizer: torch.optim.Optimizer, counts: frozenset[str]) -> None:
        """`counts`: the names of entries of the state that are looked at elsewhere."""
        self._counts = counts
        others = {name: value for name, value in optimizer.__dict__.items() if name not in _SEEN_HERE}
        # of what `_find` compares by identity: attributes, and containers and objects in the state
        self._inside = StructureGuard([others, {"state": list(_nested_in(optimizer))}])
        found = self._find(optimizer)
        self._lengths = list(map(len, found))
        self._values = list(chain.from_iterable(found))
        # how many attributes somebody gave the parameters: `read` follows their values
        self._attributes = list(map(attributes_of, registered_tensors(optimizer)))
        self._num_attributes = list(map(len, self._attributes))
        self._named: NamedByCode | None = None  # as before the latest step that ran as written
        self.read: NamedByCode | None = None  # the same without what that step wrote

    def named_by_code(self, optimizer: torch.optim.Optimizer, ran: CodeThatRan) -> NamedByCode:
        """What the code of the optimizer, which is as this says, can name now. `ran`: by its steps so far."""
        if self._named is None or not self._named.is_current():
            self._named = NamedByCode([optimizer], ran)
        return self._named

    def _find(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        lists = [group["params"] for group in optimizer.param_groups]
        states = [self._values_in(state) if is_a(state, dict) else (state,) for state in optimizer.state.values()]
        return [optimizer.__dict__.values(), optimizer.state.keys(), *lists, *states]

    def _values_in(self, state: dict[Any, Any]) -> Collection[Any]:
        if self._counts.isdisjoint(state):
            return dict.values(state)
        return [one for name, one in dict.items(state) if name not in self._counts or not is_number(one)]

    def hold(self, optimizer: torch.optim.Optimizer) -> bool:
        now = self._find(optimizer)
        return (
            self._inside.holds()
            and list(map(len, now)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(now), self._values))
            and list(map(len, self._attributes)) == self._num_attributes
            and (self.read is None or not self.read.change())
        )


@dataclass(slots=True, eq=False)
class _StepProgram:
    """What steps recorded that took the same branches and made the same calls."""

    name: object = field(default_factory=object)  # of its jumps
    runs: list[ProgramRun] = field(default_factory=list)
    operands: tuple[_Operand, ...] = ()
    written: tuple[int, ...] = ()
    floats: FormulaProgram | None = None


@dataclass(slots=True, eq=False)
class _StepState(Attempts):
    """What is known of the steps in which the same parameters have gradients."""

    parts: _OptimizerParts
    guard: OptimizerGuard
    programs: dict[Any, _StepProgram] = field(default_factory=dict)  # by the branches taken and the shape of the calls
    latest: _StepProgram | None = None

    def known(self) -> list[_StepProgram]:
        """The programs that a step may be replayed by, the latest first."""
        found = [one for one in self.programs.values() if one.floats is not None]
        found.sort(key=lambda one: one is not self.latest)
        return found


def capture_optimizer(
    optimizer: torch.optim.Optimizer, verify: bool = True, is_asked: bool = True
) -> torch.optim.Optimizer:
    """Let `optimizer` replay its steps. Returns it; its state, its groups and its `state_dict` stay as they are."""
    if isinstance(optimizer.__dict__.get("step"), _StepEntry) or not REGIONS.fits():
        return optimizer
    before = optimizer.step
    optimizer.step = _StepEntry(CapturedOptimizer(optimizer, verify, is_asked))  # type: ignore[method-assign, assignment]
    pass_on_schedule(before, optimizer.step)  # a scheduler warns unless it sees that its wrapper is called
    if getattr(optimizer.zero_grad, "__func__", None) is _ZERO_GRAD:
        optimizer.zero_grad = _ZeroGradEntry(optimizer)  # type: ignore[method-assign, assignment]
    return optimizer


def uncapture_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let the steps of `optimizer` run as written, if it is captured."""
    step: Any = optimizer.__dict__.get("step")
    if isinstance(step, _StepEntry):
        step._captured.put_back(optimizer)
    while step is not None and not isinstance(step, _StepEntry):  # a scheduler's, made since, calls it
        if isinstance(captured := getattr(step, "captured", None), CapturedOptimizer):
            captured.is_off = True
        step = getattr(step, "__wrapped__", None)
    if isinstance(optimizer.__dict__.get("zero_grad"), _ZeroGradEntry):
        del optimizer.zero_grad


class _StepEntry:
    """Stands for the method `step` of a captured optimizer."""

    __slots__ = ("_captured", SCHEDULED)
    __name__ = "step"

    def __init__(self, captured: CapturedOptimizer) -> None:
        self._captured = captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._captured.step(self.__self__, args, kwargs)

    @property
    def __self__(self) -> torch.optim.Optimizer:
        return self._captured.optimizer()

    @property
    def __func__(self) -> Any:
        """The function behind the method: learning-rate schedulers wrap it, and bind it again."""

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._captured.step(optimizer, args, kwargs)

        step.captured = self._captured  # type: ignore[attr-defined]
        return step


class _ZeroGradEntry:
    """Stands for the method `zero_grad` of a captured optimizer: opens no range for a profiler that is off.

    The range takes 15 of the method's 20 µs.
    """

    __slots__ = ("_reference",)
    __name__ = "zero_grad"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._reference = weakref.ref(optimizer)

    def __call__(self, set_to_none: bool = True) -> None:
        optimizer = self._reference()
        if optimizer is None:
            raise gone("the captured optimizer of this call")
        if not set_to_none or is_profiling() or type(optimizer).zero_grad is not _ZERO_GRAD:
            type(optimizer).zero_grad(optimizer, set_to_none)
            return
        with WithoutSubclasses():  # 70 ns for each attribute of a tensor instead of 150
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = None


class CapturedOptimizer:
    """Replays the steps of one optimizer."""

    __slots__ = (
        "_name",
        "_verify",
        "_written",
        "_states",
        "_counts",
        "_ran",
        "account",
        "is_off",
        "_reference",
        "__weakref__",
    )

    def __init__(self, optimizer: torch.optim.Optimizer, verify: bool, is_asked: bool) -> None:
        forget = weakref.WeakMethod(self._forget)
        # states refer to the optimizer's attributes, and these to us: that cycle ends with the optimizer
        self._reference = weakref.ref(optimizer, lambda _: (method := forget()) and method())
        self._name = type(optimizer).__name__
        self._verify = verify
        self._written = optimizer.__dict__.get("step")  # a scheduler's, which refers weakly to the optimizer
        self._states: dict[tuple[Any, ...], _StepState] = {}
        self._counts: frozenset[str] = frozenset()  # names of numbers in groups and in the state that steps change
        self._ran = CodeThatRan()
        self.account = Account(self._name, "optimizer", is_asked)
        self.is_off = False  # it is captured no longer, and called by who holds it, as a scheduler's wrapper

    def _forget(self) -> None:
        self._states.clear()

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Give `optimizer` the step that it had. Who holds on to the captured one runs as written, too."""
        self.is_off = True
        if self._written is None:
            del optimizer.step
        else:
            optimizer.step = self._written  # type: ignore[method-assign]

    def optimizer(self) -> torch.optim.Optimizer:
        found = self._reference()
        if found is None:
            raise gone(f"the captured {self._name} of this step")
        return found

    @hide_internals
    def step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_off:
            return self._run(optimizer, args, kwargs)
        closure = self._closure(optimizer, args, kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (), {}
        if not step_ends.is_watching:
            result = self._step(optimizer, args, kwargs)
        else:
            with step_ends.held():  # what ends the step must come after what is learnt from it
                result = self._step(optimizer, args, kwargs)
            step_ends.see(optimizer)
        return result if closure is None else loss

    def _closure(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The closure that this step was given, if all that the step does with it is to call it once, before the rest.

        So do the optimizers of PyTorch, all but LBFGS.
        """
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not callable(given[0]) or kwargs.keys() - {"closure"}:
            return None
        is_known = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
            optimizer, torch.optim.LBFGS
        )
        if not is_known or why_as_written(self.account.is_asked) or self._why_as_written(optimizer, (), {}):
            return None
        return given[0]

    def _step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = perf_counter()
        account = self.account
        account.calls += 1
        reason = why_as_written(account.is_asked) or self._why_as_written(optimizer, args, kwargs)
        if reason is not None:
            account.ran_as_written(reason)
            return self._run(optimizer, args, kwargs)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        pattern = (switches(), describe_autocast(), *[grad is None for grad in grads])
        if not type(optimizer).__module__.startswith("torch.optim."):  # which look at gradients only
            pattern += tuple(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        state, given = self._state(optimizer, pattern)
        chosen = None if given is None else self._choose(state, given)
        is_due = chosen is not None and state.calls >= state.check_at
        if chosen is not None and not is_due and self._replay(state, *chosen, grads):
            state.misses = 0
            account.replays += 1
            account.seconds += perf_counter() - begin
            return None
        if state.is_hopeless():
            return self._run(optimizer, args, kwargs)
        if is_due:
            state.check_at = 2 * state.calls if self._verify else 2**62
        return self._write(optimizer, state, given or (), None if chosen is None else chosen[0], is_due)

    def _run(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._written is not None:
            return self._written(*args, **kwargs)
        return type(optimizer).step(optimizer, *args, **kwargs)

    def _why_as_written(self, optimizer: Any, args: Any, kwargs: Any) -> str | None:
        if any(value is not None for value in (*args, *kwargs.values())):
            return "step() was given a closure"
        if any(step_hooks_of(optimizer)):
            return "it has hooks"
        if any(dict.get(attributes_of(optimizer), name) is not None for name in ("found_inf", "grad_scale")):
            return "a GradScaler has it unscale its gradients"
        if HOOKS_BEFORE_ALL_STEPS:
            return "hooks of all optimizers are registered"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return "it is differentiable"
        if len(HOOKS_AFTER_ALL_STEPS) > step_ends.is_watching:
            return "hooks of all optimizers are registered"
        return None

    def _state(
        self, optimizer: torch.optim.Optimizer, pattern: tuple[Any, ...]
    ) -> tuple[_StepState, tuple[float, ...] | None]:
        """What is known of the optimizer as it is now, and the floats among its hyperparameters."""
        state = self._states.get(pattern)
        given = None if state is None or not state.parts.hold(optimizer) else state.guard.floats()
        if state is None or given is None:
            if len(self._states) >= _MAX_STATES:
                self._states.clear()
            made = _StepState(_OptimizerParts(optimizer, self._counts), OptimizerGuard(optimizer, self._counts))
            if state is not None:  # it goes on changing: patience does not start again
                made.failures, made.calls = state.failures, state.calls
            known = {pattern: one for pattern, one in self._states.items() if one.parts.hold(optimizer)}
            self._states = known  # the others would keep alive what was replaced
            state = self._states[pattern] = made
            given = state.guard.floats()
        state.calls += 1
        return state, given

    # ----- a replayed step

    def _choose(self, state: _StepState, given: tuple[float, ...]) -> tuple[_StepProgram, Evaluated] | None:
        """The program that a step with these floats is a run of, if it is known, and what its formulas give."""
        reason = ""
        for program in state.known():
            assert program.floats is not None
            try:
                return program, program.floats.evaluate(given)
            except Stale as stale:
                reason = reason or str(stale)
        if reason:
            self.account.ran_as_written(reason)
        return None

    def _replay(self, state: _StepState, program: _StepProgram, evaluated: Evaluated, grads: list[Any]) -> bool:
        assert program.floats is not None
        tensors: list[Any] = [grads[one] if one.__class__ is int else one for one in program.operands]  # type: ignore
        own = [tensor for tensor in tensors if tensor.__class__ is not _Upload]
        if not own or not all(type(tensor) is LazyTensor for tensor in own):
            return False
        context = own[0]._data.context
        if len(own) < len(tensors):
            _put_uploads(context, tensors, dict(zip(program.floats.uploads, evaluated.uploads, strict=True)))
        with context.lock:
            data = [tensor._data for tensor in tensors]
            if take_jump(context, program.name, data, constants=evaluated.constants) is None:
                state.miss(self.account)
                return False
            if evaluated.commit is not None:
                evaluated.commit.put(None, _Once)
        torch.autograd.graph.increment_version([tensors[place] for place in program.written])
        state.latest = program
        return True

    # ----- a step as written

    def _write(
        self,
        optimizer: torch.optim.Optimizer,
        state: _StepState,
        given: tuple[float, ...],
        chosen: _StepProgram | None,
        is_check: bool,
    ) -> Any:
        """Run the step as written, and learn from it. `chosen`: the program that it should record, if it is known."""
        metrics.increment("RegionRecorded")
        context = _context_of(optimizer)
        if context is None:
            self.account.ran_as_written("its parameters are not on one lazy device")
            return self._run(optimizer, (), {})
        named = state.parts.named_by_code(optimizer, self._ran)
        with context.lock:
            start = StretchStart(context, RandomState(named.generators, named.states))
        watch = Watch(())
        before = numbers_in(optimizer)
        with watches.shown_to(watch), context.registry.watching() as uploads:
            recorder = watch.recorder = FloatRecorder(context, uploads, (), self._counts)
            try:
                recorder.install(optimizer)
                with named.watching():
                    result, read, ran = recorder.show(watching_reads, lambda: self._run(optimizer, (), {}))
            except BaseException:
                recorder.restore()
                recorder.restore_states()
                recorder.close()
                raise
            recorder.restore()
            recorder.restore_states()
            recorded = recorder.finish([optimizer], [0, len(given)])
            uploaded = {
                storage.token: _Upload(run_clean(storage.tensor.clone), recorded.uploads.get(storage, ()))
                for storage in uploads
                if storage.epoch is context.trace.epoch and storage.token is not None and storage.tensor is not None
            }
            recorded.uploads.clear()  # it would keep them alive
            uploads.clear()
        state.parts.read, unfit_read = named.after_body([optimizer], ran, read)
        try:
            self._find_counts(changed_numbers(before, numbers_in(optimizer)))
            if unfit_read:
                raise NotReplayable(unfit_read)
            if change := named.change_of_others():
                raise NotReplayable(f"a step changes what it is made of: {change}")
            stretch = Stretch(context, start)
            if is_check and chosen is not None:
                self._check(start, chosen, stretch)
            self._learn(optimizer, state, start, stretch, recorded, uploaded, given)
        except NotReplayable as reason:
            if chosen is not None:
                chosen.floats = None
            state.fail(self.account, str(reason))
        return result

    def _find_counts(self, changed: set[str]) -> None:
        """Follow the entries that a step was seen to change, from the next step on. Raises `NotReplayable`."""
        if not changed <= self._counts:
            self._counts |= changed
            self._states.clear()  # which compare them by value
            names = ", ".join(sorted(map(repr, changed)))
            raise NotReplayable(f"a step changes numbers in its groups or its state: {names}")

    def _learn(
        self,
        optimizer: torch.optim.Optimizer,
        state: _StepState,
        start: StretchStart,
        stretch: Stretch,
        recorded: RecordedFloats,
        uploaded: Mapping[Token, _Upload],
        given: tuple[float, ...],
    ) -> None:
        """Learn from a step that ran as written. Raises `NotReplayable`."""
        if not state.parts.hold(optimizer) or state.guard.floats() is None:
            raise NotReplayable("a step changes what it is made of, as the first step does")
        if recorded.problem is not None:
            raise NotReplayable(recorded.problem)
        stretch.check_nothing_kept(start.trace, ())
        operands = _find_operands(stretch, optimizer, uploaded)
        floats = _shifted(recorded, start.num_constants)
        branches = tuple([one.outcome for one in floats.tape.guards if one.outcome.__class__ is bool])
        kind = branches, stretch.shape()
        uploads = {place: one for place, one in enumerate(operands) if isinstance(one, _Upload)}
        run = ProgramRun(
            floats,
            given,
            stretch.constants,
            {place: list(one.nodes) for place, one in uploads.items() if one.nodes},
            {place: one.value for place, one in uploads.items()},
            state.guard.names,
        )
        program = state.programs.get(kind)
        if program is None:  # the floats of one program must not go into the jump of another
            if len(state.programs) >= _MAX_PROGRAMS:
                state.programs.clear()
            program = state.programs[kind] = _StepProgram()
        is_same = _same_operands(operands, program.operands)
        program.runs = [*program.runs, run][-_MAX_RUNS:] if is_same else [run]
        program.operands, program.floats, state.latest = operands, None, program
        program.written = tuple(n for n, token in enumerate(stretch.operands) if token in stretch.mutates)
        learn_jump(stretch, program.name, (), with_constants=False)
        if len(program.runs) < 2:
            return
        try:
            program.floats = follow(program.runs, [optimizer])
        except NotFollowed as error:
            if error.earlier is None:
                raise NotReplayable(str(error)) from None
            where = stretch.call_of_constant(error.constant)
            raise NotReplayable(f"a float of {where} changed as none that it is given did") from None
        state.failures = 0

    def _check(self, start: StretchStart, program: _StepProgram, stretch: Stretch) -> None:
        """Raise `CaptureError` if this step, which ran as written, went elsewhere than a replay would have gone."""
        known: Known | None = (start.cursor.jumps or {}).get(key_of(stretch, program.name))
        if known is not None and not known.jump.agrees_with(make_jump(stretch, (), with_constants=False)):
            difference = stretch.first_difference(known.jump.end, stretch.constants)
            raise no_longer_alike(f"{self._name}.step", f"it recorded {difference}")


class _Once:
    """What `Commit.put` takes for a run: the values are stored once."""

    delivered = False


def _context_of(optimizer: torch.optim.Optimizer) -> DeviceContext | None:
    """The lazy device of all parameters, if there is one."""
    found = {
        parameter._data.context if type(parameter) is LazyTensor else None
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return found.pop() if len(found) == 1 else None


def _put_uploads(context: DeviceContext, operands: list[Any], computed: Mapping[int, torch.Tensor]) -> None:
    """Put tensors in place of the uploads among `operands`. `computed`: the values that formulas give, by place."""
    for place, one in enumerate(operands):
        if one.__class__ is _Upload:
            value = upload(context, computed[place]) if place in computed else one.value
            operands[place] = wrap(new_data(context, value))


def _find_operands(
    stretch: Stretch, optimizer: torch.optim.Optimizer, uploaded: Mapping[Token, _Upload]
) -> tuple[_Operand, ...]:
    known: dict[Token, _Operand] = {}
    for operand, tensor in _operands_of(optimizer):
        data = tensor._data
        if not is_leaf(tensor) and not isinstance(operand, int):
            raise NotReplayable("one of its tensors is no leaf, and autograd may follow what it writes")
        if data.epoch is stretch.epoch and data.token is not None:
            other = known.setdefault(data.token, operand)
            if other is not operand and not (isinstance(other, int) and isinstance(operand, int) and other == operand):
                raise NotReplayable("two of its tensors are one, such as the gradients of two parameters")
    for token in stretch.operands:
        if token in uploaded and token not in known:
            if token in stretch.mutates:
                raise NotReplayable(f"it writes at {stretch.site_of_write(token)} to a tensor that it uploads")
            known[token] = uploaded[token]
        if token not in known:
            raise NotReplayable(
                f"it uses a tensor at {stretch.site_of(token)} that is no parameter, gradient or entry of its state"
            )
    return tuple(known[token] for token in stretch.operands)


def _same_operands(one: tuple[_Operand, ...], other: tuple[_Operand, ...]) -> bool:
    return len(one) == len(other) and all(map(_is_same_operand, one, other))


def _is_same_operand(one: _Operand, other: _Operand) -> bool:
    if isinstance(one, int):
        return isinstance(other, int) and one == other
    return one is other or (isinstance(one, _Upload) and isinstance(other, _Upload))


def _shifted(recorded: RecordedFloats, by: int) -> RecordedFloats:
    """What was recorded, with constants numbered from the start of the stretch."""
    recorded.constants = {place - by: choices for place, choices in recorded.constants.items() if place >= by}
    recorded.unsure = {place - by for place in recorded.unsure if place >= by}
    return recorded

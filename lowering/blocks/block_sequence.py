"""Calls of blocks, one after the other.

In: which block is called with which values, and a callable for each block. Out: a callable of the whole graph: it takes
one list of arguments and empties it.

The first run calls the blocks from Python, and shows what has to be done to their results. If all of them have runners,
the later runs take place in the extension that has these (`artefacts/extension_template.py`), without Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lazy_backend.lowering.ir.aliasing import OutputAliases, watched_storages

Compute = Callable[[list[Any]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A call of a block: numbers of values, and indices among the graph's floats and seeds. -1: a result not needed."""

    block: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockSequence:
    """The calls that compute a graph. `inputs`, `outputs`: the graph's, as numbers of values.

    `promoted`: the floats that are inputs of the compiled code. `strides`: for each block, those of its results.
    """

    calls: tuple[BlockCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    promoted: tuple[int, ...]
    strides: tuple[tuple[tuple[int, ...], ...], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlockSequence:
        calls = tuple(BlockCall(**{name: _as_tuples(value) for name, value in call.items()}) for call in data["calls"])
        return cls(calls, **{name: _as_tuples(value) for name, value in data.items() if name != "calls"})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


# Makes a computation of what the extension's `make_sequence` takes.
MakeNative = Callable[..., Compute]


class BlockRunner:
    """Runs a sequence. It holds no state of a run, so that runs may overlap.

    `make_native`: makes what computes without Python, if the blocks have runners, whose places are those of `computes`.
    """

    def __init__(
        self, sequence: BlockSequence, computes: Sequence[Compute], make_native: MakeNative | None = None
    ) -> None:
        self._make_native = make_native
        self._native: Compute | None = None
        self._inputs, self._outputs = sequence.inputs, sequence.outputs
        self._has_scalars = bool(sequence.promoted)
        self._has_seeds = any(call.seeds for call in sequence.calls)
        blocks = [_CompiledBlock(place, *one) for place, one in enumerate(zip(computes, sequence.strides, strict=True))]
        self._steps = _steps_of(sequence, blocks)

    def call(self, arguments: list[Any]) -> list[torch.Tensor]:
        """Run once. `arguments`: the inputs, then the promoted floats and the seeds, if there are any."""
        native = self._native
        if native is not None:
            return list(native(arguments))
        further = arguments[len(self._inputs) :]
        scalars: Any = further.pop(0) if self._has_scalars else None
        seeds: Any = further.pop(0) if self._has_seeds else None
        # no loops over tensors: their variables would keep the last one alive
        values: dict[int, Any] = dict(zip(self._inputs, arguments, strict=False))
        arguments.clear()
        for step in self._steps:
            taken = [values[number] for number in step.inputs]
            for number in step.ended:
                del values[number]
            if step.scalars is not None:
                taken.append(step.scalars.of(scalars))
            if step.seeds is not None:
                taken.append(step.seeds.of(seeds))
            values.update(zip(step.outputs, step.block.run(taken), strict=True))
            values.pop(-1, None)
        if self._make_native is not None:
            self._native = self._make_native(*self._described())
        return [values[number] for number in self._outputs]

    def _described(self) -> tuple[Any, ...]:
        """What the extension's `make_sequence` takes, once a run has shown what to do to each block's results."""
        numbers = [*self._inputs, *(number for step in self._steps for number in step.outputs if number >= 0)]
        places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        places[-1] = -1

        def placed(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(places[number] for number in values)

        calls = tuple(
            (
                step.block.place,
                placed(step.inputs),
                tuple(
                    int(number in step.ended and number not in step.inputs[place + 1 :])
                    for place, number in enumerate(step.inputs)
                ),
                placed(step.outputs),
                None if step.scalars is None else step.scalars.places,
                None if step.seeds is None else step.seeds.places,
                step.block.renewed(),
            )
            for step in self._steps
        )
        inputs, outputs = placed(self._inputs), placed(self._outputs)
        return calls, inputs, outputs, len(places) - 1, self._has_scalars, self._has_seeds


class _CompiledBlock:
    """A compiled block. Its results own their memory, and lie in it as recorded, since other blocks rely on that.

    What has to be done for it follows from the code and the sizes, which are fixed, so the first run shows it.
    """

    def __init__(self, place: int, compute: Compute, strides: Sequence[tuple[int, ...]]) -> None:
        self.place = place
        self._compute = compute
        self._strides = strides
        self._aliases = OutputAliases()
        self._moved: tuple[int, ...] | None = None  # the results that lie otherwise

    def run(self, arguments: list[Any]) -> list[torch.Tensor]:
        taken = watched_storages(arguments) if self._aliases.copied is None else {}
        results = self._aliases.separate(taken, list(self._compute(arguments)))
        moved = self._moved
        if moved is None:
            lying = zip(results, self._strides, strict=True)
            moved = self._moved = tuple(place for place, one in enumerate(lying) if not _lies_as(*one))
        for place in moved:
            options: Any = {"dtype": results[place].dtype, "device": results[place].device}
            own = torch.empty_strided(results[place].shape, self._strides[place], **options)
            results[place] = own.copy_(results[place])
        return results

    def renewed(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The results that are copied after each run, each with its stride. Known after the first run."""
        places = sorted({*(self._aliases.copied or ()), *(self._moved or ())})
        return tuple((place, self._strides[place]) for place in places)


def _lies_as(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether a tensor has this stride, where that matters."""
    sizes = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return not tensor.numel() or all(size == 1 or own == wanted for size, own, wanted in sizes)


@dataclass(frozen=True, slots=True)
class _BlockStep:
    """A call of a block. `ended`: the values that nothing needs afterwards."""

    block: _CompiledBlock
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: _Selection | None
    seeds: _Selection | None
    ended: tuple[int, ...]


def _steps_of(sequence: BlockSequence, blocks: Sequence[_CompiledBlock]) -> list[_BlockStep]:
    places = {index: place for place, index in enumerate(sequence.promoted)}
    needed = set(sequence.outputs)
    steps = []
    for call in reversed(sequence.calls):
        ended = tuple(number for number in call.inputs if number not in needed)
        needed.update(call.inputs)
        scalars = tuple(places[index] for index in call.constants if index in places)
        steps.append(
            _BlockStep(
                blocks[call.block], call.inputs, call.outputs, _selection(scalars), _selection(call.seeds), ended
            )
        )
    steps.reverse()
    return steps


def _selection(places: tuple[int, ...]) -> _Selection | None:
    return _Selection(places) if places else None


class _Selection:
    """Some of the numbers that a tensor holds, as a tensor: a view if they stand side by side."""

    def __init__(self, places: tuple[int, ...]) -> None:
        self._start, self._end = places[0], places[-1] + 1
        self._is_range = places == tuple(range(self._start, self._end))
        self.places = places
        self._index: torch.Tensor | None = None

    def of(self, packed: torch.Tensor) -> torch.Tensor:
        if self._is_range:
            return packed[self._start : self._end]
        index = self._index
        if index is None:
            index = self._index = torch.tensor(self.places, device=packed.device)
        return packed.index_select(0, index)

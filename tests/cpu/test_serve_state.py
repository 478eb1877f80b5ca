"""States of served functions: tensors that requests write, one set for each sequence of requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import assert_same
from interruption import Interrupted, interrupt, places_of, raise_interrupted
from torch import nn

import lazy_backend
from lazy_backend import InputError, config, serve

WIDTH, HEADS, LENGTH, WORDS = 32, 2, 24, 50


class Block(nn.Module):
    """A layer of a transformer, with a static cache of keys and values."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.mix(self.norm(x)).view(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, positions, keys)
        self.values.index_copy_(2, positions, values)
        seen = nn.functional.scaled_dot_product_attention(queries, self.keys, self.values, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(1, -1, WIDTH))
        return x + self.feed(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(LENGTH, device=words.device) <= positions[:, None]
        x = self.words(words) + self.places(positions)
        for block in self.blocks:
            x = block(x, positions, mask)
        return self.head(x[:, -1])


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def generate(step: Step, prompt: torch.Tensor) -> torch.Tensor:
    """The most likely words after a prompt, until the cache is full."""
    words, positions = prompt, torch.arange(prompt.shape[1])
    text = [prompt]
    while positions[-1] < LENGTH - 1:
        words = step(words, positions).argmax(-1, keepdim=True)
        positions = positions[-1:] + 1
        text.append(words)
    return torch.cat(text, 1)


def prompts() -> list[torch.Tensor]:
    return [torch.randint(WORDS, (1, 1 + seed % 4), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


def served_decoder() -> lazy_backend.Served:
    return serve(Decoder().eval(), (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))


def with_state(served: lazy_backend.Served) -> Step:
    return functools.partial(served, state=served.state())


class Counter(nn.Module):
    """The sum of all that was given so far; of nothing in calls of two rows, which only read it."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 2:
            self.total.add_(x.sum() * self.scale)
        return self.total * 1


@pytest.fixture(params=["interpreted", "eager", "aot_eager"])
def backend(request: pytest.FixtureRequest) -> None:
    config.compile = "off" if request.param == "interpreted" else "foreground"
    config.backend = "eager" if request.param == "interpreted" else request.param


# ----- decoding


@pytest.mark.usefixtures("backend")
def test_each_thread_generates_the_words_of_eager() -> None:
    module = Decoder().eval()
    expected = [generate(module, prompt) for prompt in prompts()]
    assert len({tuple(words[0, 4:].tolist()) for words in expected}) > 5
    served = served_decoder()
    assert_same(generate(with_state(served), prompts()[3]), expected[3])
    steps = [with_state(served) for _ in expected]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):  # what a text before left in the cache is masked
            assert_same(list(pool.map(generate, steps, prompts())), expected)


@pytest.mark.scenario
def test_compiled_steps_generate_the_words_of_eager() -> None:
    config.compile, config.backend = "foreground", "inductor"
    module = Decoder().eval()
    served = served_decoder()
    for _ in range(2):
        for prompt in prompts():
            assert_same(generate(with_state(served), prompt), generate(module, prompt))


# ----- what a state is


@pytest.mark.usefixtures("backend")
def test_states_are_apart_and_weights_are_shared() -> None:
    module = Counter()
    served, x = serve(module, torch.ones(3)), torch.ones(3)
    first, second = served.state(), served.state()
    for total in (3.0, 6.0, 9.0):
        assert served(x, state=first).item() == total
    assert served(x, state=second).item() == 3
    assert served(torch.ones(5), state=second).item() == 8  # a shape of its own
    assert served(torch.ones(2), state=second).item() == 8  # one that only reads
    assert served.weights["total"].item() == 0
    with torch.no_grad():
        module.scale.fill_(10.0)
        module.total.fill_(100.0)
    served.swap_weights(module.state_dict())
    assert served(x, state=first).item() == 39
    assert served(x).item() == 130
    assert served(x, state=served.state()).item() == 160  # begins as the weights are now


@pytest.mark.usefixtures("backend")
def test_a_tensor_that_a_function_closes_over_is_state() -> None:
    total = torch.zeros(3).to("lazy")
    served = serve(lambda x: total.add_(x) * 2, torch.ones(3))
    state = served.state()
    for number in range(1, 4):
        assert_same(served(torch.ones(3), state=state), torch.full((3,), 2.0 * number))
    assert_same(total.cpu(), torch.zeros(3))


@pytest.mark.usefixtures("backend")
def test_a_state_serves_in_any_mode_and_is_awaited() -> None:
    served, x = serve(Counter(), torch.ones(3)), torch.ones(3)
    with torch.inference_mode():
        state = served.state()
        served(x, state=state)
    served(x, state=state)
    assert asyncio.run(served.call(x, state=state)).item() == 9


def test_states_are_freed() -> None:
    config.compile = "off"
    served, x = serve(Counter(), torch.ones(3)), torch.ones(3)
    gc.collect()
    gc.disable()
    try:
        state = served.state()
        served(x, state=state)
        tensor = weakref.ref(state.tensors["total"])
        del state
        assert tensor() is None
    finally:
        gc.enable()


# ----- refusals


def test_a_function_that_writes_nothing_has_no_state() -> None:
    with pytest.raises(InputError, match=r"no state(.|\n)*index_copy_"):
        serve(nn.Linear(3, 3), torch.ones(2, 3)).state()


def test_a_state_of_another_function_is_refused() -> None:
    served, other, x = serve(Counter(), torch.ones(3)), serve(Counter(), torch.ones(3)), torch.ones(3)
    for wrong in (other.state(), torch.zeros(1), {}):
        with pytest.raises(InputError, match="expected a state of this served function"):
            served(x, state=wrong)  # type: ignore[arg-type]
    assert served.weights["total"].item() == 0


@pytest.mark.usefixtures("backend")
def test_an_input_within_the_memory_of_what_is_written_is_refused() -> None:
    served = serve(Counter(), torch.ones(1))
    state, total = served.state(), served.weights["total"]
    for own, shared in ((None, total), (None, total[:1]), (state, state.tensors["total"])):
        with pytest.raises(InputError, match=r"shares its memory with a tensor that requests write\n  give a clone"):
            served(shared, state=own)
    assert served(total.fill_(1.0), state=state).item() == 1  # which this request does not write
    assert served(total.clone()).item() == 2
    assert served(served.weights["scale"]).item() == 3  # which none writes


MEETING: list[threading.Barrier] = []


@torch.library.custom_op("lazy_serve_state::meet", mutates_args=())
def meet(x: torch.Tensor) -> torch.Tensor:
    """Wait for another request, if there is to be one, and refuse numbers below zero."""
    for barrier in MEETING:
        barrier.wait(timeout=30)
    if x.sum() < 0:
        raise ValueError("below zero")
    return x.clone()


meet.register_fake(torch.empty_like)


class Meeting(Counter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + meet(x).sum() * 0


@pytest.mark.usefixtures("backend")
def test_requests_with_states_of_their_own_run_at_the_same_time() -> None:
    served, x = serve(Meeting(), torch.ones(3)), torch.ones(3)
    states = [served.state(), served.state()]
    MEETING.append(threading.Barrier(2))
    try:
        with ThreadPoolExecutor(2) as pool:
            assert_same(list(pool.map(lambda state: served(x, state=state), states)), [torch.full((1,), 3.0)] * 2)
    finally:
        MEETING.clear()


@pytest.mark.usefixtures("backend")
def test_a_state_takes_one_request_at_a_time() -> None:
    served, x = serve(Meeting(), torch.ones(3)), torch.ones(3)
    state = served.state()
    MEETING.append(threading.Barrier(2))
    try:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(served, x, state=state)
            while not MEETING[0].n_waiting:
                pass
            with pytest.raises(InputError, match="another request with this state is under way"):
                served(x, state=state)
            MEETING[0].wait(timeout=30)
            assert first.result().item() == 3
    finally:
        MEETING.clear()
    assert served(x, state=state).item() == 6


@pytest.mark.usefixtures("backend")
def test_a_state_is_not_used_after_a_request_that_failed() -> None:
    served, x = serve(Meeting(), torch.ones(3)), torch.ones(3)
    state, other = served.state(), served.state()
    for wrong in (x.double(), torch.ones(3, 3)):
        with pytest.raises(InputError):
            served(wrong, state=state)  # refused before it runs: nothing is lost
    assert served(x, state=state).item() == 3
    with pytest.raises(Exception, match="below zero"):
        served(-x, state=state)
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"raised \w+, and may have written a part of it\n  begin with a new state"
        ):
            served(x, state=state)
    assert served(x, state=other).item() == 3
    assert served(x, state=served.state()).item() == 3


def test_an_interrupted_request_leaves_its_state_right_or_refused() -> None:
    """At every line of the executor's."""
    config.compile = "off"
    served, x = serve(Counter(), torch.ones(3)), torch.ones(3)
    state = served.state()
    names = {"serve.py", "executor.py", "request_state.py"}
    places = [place for place in places_of(lambda: served(x, state=state)) if Path(place[0]).name in names]
    assert names == {Path(place[0]).name for place in places}
    refused = 0
    for place in places:
        state = served.state()
        with contextlib.suppress(Interrupted):
            interrupt(lambda state=state: served(x, state=state), place, 1, raise_interrupted)
        try:
            total = served(x, state=state).item()
        except InputError:
            refused += 1
        else:
            assert total in (3, 6)
    assert 0 < refused < len(places)

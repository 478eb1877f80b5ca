"""`torch.Generator(device="lazy")`: a source of random numbers of the user's own, which cuts nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from harness import as_bytes, assert_same, count, grid
from torch import nn
from torch.utils.data import DataLoader

import lazy_backend
from lazy_backend import CaptureError, CaptureWarning, DeviceError, LazyBackendError
from lazy_backend.compat.extracted import extract

Draw = Callable[[torch.Generator | None], torch.Tensor]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="lazy")


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator(device="lazy").manual_seed(seed)


DRAWS: dict[str, Draw] = {
    "rand": lambda g: torch.rand(16, generator=g, device="lazy"),
    "randn": lambda g: torch.randn(16, generator=g, device="lazy"),
    "randint": lambda g: torch.randint(1000, (16,), generator=g, device="lazy"),
    "randint_low": lambda g: torch.randint(5, 1000, (16,), generator=g, device="lazy", dtype=torch.int32),
    "randperm": lambda g: torch.randperm(16, generator=g, device="lazy"),
    "rand_like": lambda g: torch.rand_like(ones(16), generator=g),
    "randn_like": lambda g: torch.randn_like(ones(16), generator=g),
    "randint_like": lambda g: torch.randint_like(ones(16), 1000, generator=g),
    "randint_like_low": lambda g: torch.randint_like(ones(16), 5, 1000, generator=g),
    "rand_out": lambda g: torch.rand(16, generator=g, out=torch.empty(16, device="lazy")),
    "normal_in_place": lambda g: ones(16).normal_(1.0, 2.0, generator=g),
    "uniform_in_place": lambda g: ones(16).uniform_(-1, 1, generator=g),
    "exponential_in_place": lambda g: ones(16).exponential_(generator=g),
    "random_in_place": lambda g: ones(16).random_(0, 1000, generator=g),
    "log_normal_in_place": lambda g: ones(16).log_normal_(generator=g),
    "cauchy_in_place": lambda g: ones(16).cauchy_(generator=g),
    "geometric_in_place": lambda g: ones(16).geometric_(0.1, generator=g),
    "bernoulli": lambda g: torch.bernoulli(ones(32) * 0.5, generator=g),
    "bernoulli_p": lambda g: torch.bernoulli(ones(32), 0.5, generator=g),
    "bernoulli_in_place": lambda g: ones(32).bernoulli_(0.5, generator=g),
    "bernoulli_tensor": lambda g: ones(32).bernoulli_(ones(32) * 0.5, generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, (16,), generator=g, device="lazy"),
    "normal_of_tensors": lambda g: torch.normal(ones(16), ones(16), generator=g),
    "normal_of_a_float": lambda g: torch.normal(ones(16), 2.0, generator=g),
    "multinomial": lambda g: torch.multinomial(ones(32), 16, generator=g),
    "poisson": lambda g: torch.poisson(ones(32) * 10, g),
    "xavier": lambda g: nn.init.xavier_uniform_(torch.empty(3, 3, device="lazy"), generator=g),
    "orthogonal": lambda g: nn.init.orthogonal_(torch.empty(4, 4, device="lazy"), generator=g),
    "several": lambda g: torch.rand(16, generator=g, device="lazy") + torch.randn_like(ones(16), generator=g),
}  # fmt: skip


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Draw:
    return DRAWS[request.param]


def drawn(draw: Draw, source: torch.Generator | None) -> torch.Tensor:
    made = draw(source)
    lazy_backend.mark_step()
    return made.cpu()


def test_it_is_a_generator_of_the_device() -> None:
    for made in (torch.Generator("lazy"), torch.Generator(device="lazy"), torch.Generator(torch.device("lazy", 0))):
        assert isinstance(made, torch.Generator)
        assert made.device == torch.device("lazy:0")
        assert made.manual_seed(5) is made
        assert made.initial_seed() == 5
        assert made.seed() == made.initial_seed()


@pytest.mark.parametrize("arguments", [(), ("cpu",), (torch.device("cpu"),)])
def test_other_generators_are_what_they_were(arguments) -> None:
    assert torch.Generator(*arguments).device == torch.device("cpu")
    assert type(torch.Generator(*arguments)) is torch.Generator


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(DeviceError, match="there is no device lazy:7"):
        torch.Generator("lazy:7")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_the_numbers_are_those_of_the_seed_in_every_plan_and_nothing_is_cut(
    draw: Draw, backend: str, first_sight: str
) -> None:
    lazy_backend.config.backend = backend
    lazy_backend.config.first_sight = first_sight
    torch.manual_seed(7)
    expected = draw(None).cpu()
    torch.manual_seed(8)
    state = torch.get_rng_state()
    for _ in range(3):
        with count("GraphCut") as cuts:
            made = draw(generator())
            lazy_backend.mark_step()
        assert cuts() == 0
        assert_same(made, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_eager_mode_draws_the_same(draw: Draw) -> None:
    expected = drawn(draw, generator())
    with lazy_backend.eager_mode():
        assert_same(draw(generator()), expected)


def test_it_advances(draw: Draw) -> None:
    source = generator()
    assert len({as_bytes(drawn(draw, source)) for _ in range(3)}) == 3


def test_a_call_that_cannot_be_recorded_draws_from_it_too() -> None:
    made = [torch.binomial(ones(32) * 10, ones(32) * 0.5, generator()) for _ in range(2)]
    torch.manual_seed(7)
    assert_same(made, [torch.binomial(ones(32) * 10, ones(32) * 0.5).cpu()] * 2)


def test_steps_that_draw_from_it_compile_nothing_more() -> None:
    source = generator()
    made = []
    for step in range(5):
        if step == 2:
            lazy_backend.metrics.reset()
        made.append(torch.rand(4, generator=source, device="lazy") + 1)
        lazy_backend.mark_step()
    assert lazy_backend.metrics.counter_value("UncachedCompile") == 0
    assert len({as_bytes(x.cpu()) for x in made}) == 5


def test_its_state_can_be_set() -> None:
    source = generator()
    state = source.get_state()
    first = drawn(DRAWS["rand"], source)
    source.set_state(state)
    assert_same(drawn(DRAWS["rand"], source), first)


def through_a_file(source: torch.Generator) -> torch.Generator:
    file = io.BytesIO()
    torch.save(source, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda g: g.clone_state(), lambda g: pickle.loads(pickle.dumps(g)), through_a_file]


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_draws_the_same_by_itself(how) -> None:
    source = generator()
    drawn(DRAWS["rand"], source)
    twin = how(source)
    assert twin.device == source.device
    assert twin.initial_seed() == source.initial_seed()
    first = drawn(DRAWS["rand"], twin)
    assert_same(drawn(DRAWS["rand"], source), first)


def test_a_call_that_fails_draws_nothing() -> None:
    lazy_backend.config.first_sight = "run"
    source = generator()
    before = source.get_state()
    with pytest.raises(RuntimeError):
        torch.multinomial(ones(4), 9, generator=source).cpu()
    with pytest.raises(RuntimeError):
        ones(4).normal_(0.0, -1.0, generator=source).cpu()
    assert torch.equal(source.get_state(), before)


def test_a_generator_dies_with_its_last_reference() -> None:
    source = generator()
    reference = weakref.ref(source)
    drawn(DRAWS["rand"], source)
    del source
    gc.collect()
    assert reference() is None


def test_a_loader_takes_it() -> None:
    batches = [torch.cat(list(DataLoader(grid("cpu", 8), shuffle=True, generator=generator()))) for _ in range(2)]
    assert_same(batches[0], batches[1])
    assert sorted(batches[0].tolist()) == list(range(8))


def test_averages_with_stochastic_rounding_cut_nothing() -> None:
    """As timm's ModelEmaV3 keeps averages in bfloat16."""
    average, source = ones(64).bfloat16(), generator()

    def update(value: torch.Tensor) -> None:
        wide = average.float().lerp_(value, 0.01)
        bits = wide.view(torch.int32)
        noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=source)
        average.copy_(bits.add_(noise).bitwise_and_(-(1 << 16)).view(torch.float32))

    with count("GraphCut") as cuts:
        for _ in range(20):
            update(ones(64) * 2)
            lazy_backend.mark_step()
    assert cuts() == 0
    assert average.float().mean().item() == pytest.approx(2 - 0.99**20, abs=0.02)


# ----- in a captured function


def body(source: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(8, generator=source, device="lazy") + nn.functional.dropout(x)

    return step


def test_a_replay_draws_from_it_too() -> None:
    results = []
    for wrap in (lambda step: step, lazy_backend.capture):
        torch.manual_seed(3)
        source = generator()
        step = wrap(body(source))
        made = []
        with count("CapturedCall") as replays:
            for _ in range(6):
                made.append(step(ones(8)).cpu())
        results.append([*made, source.get_state(), torch.get_rng_state()])
    assert replays() == 4
    assert_same(results[1], results[0])


def test_a_generator_that_is_made_anew_is_not_replayed() -> None:
    @lazy_backend.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(8, generator=generator(), device="lazy")

    with pytest.warns(CaptureWarning, match=r"another torch.Generator than in the call before\n  make the generator"):
        made = [step(ones(8)).cpu() for _ in range(6)]
    assert_same(made, [made[0]] * 6)


def test_a_generator_that_is_seeded_within_is_not_replayed() -> None:
    source = generator()

    @lazy_backend.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        source.manual_seed(5)
        return x + torch.rand(8, generator=source, device="lazy")

    with pytest.warns(CaptureWarning, match="it draws random numbers on the CPU"):
        made = [step(ones(8)).cpu() for _ in range(6)]
    assert_same(made, [made[0]] * 6)


def test_a_replay_under_a_default_device_cuts_nothing() -> None:
    step = lazy_backend.capture(lambda x: nn.functional.dropout(x))
    with torch.device("lazy"), count("GraphCut") as cuts, count("CapturedCall") as replays:
        for _ in range(5):
            step(ones(8))
    assert replays() == 3
    assert cuts() == 0


def test_what_draws_from_it_is_not_served_and_not_extracted() -> None:
    source = generator()

    def drawing(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(8, generator=source, device="lazy")

    with pytest.raises(CaptureError, match=r"draws random numbers from a torch.Generator.*\n  at .*test_generators.py"):
        lazy_backend.serve(drawing, torch.ones(8))
    with pytest.raises(LazyBackendError, match=r"draws random numbers from a torch.Generator cannot be extracted"):
        extract([drawing(ones(8))])

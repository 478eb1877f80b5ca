"""Random numbers: the seed decides them, not the plan, the run or the order of execution."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from harness import as_bytes, assert_same, count
from torch import nn

import lazy_backend
from lazy_backend import config

Draw = Callable[[], torch.Tensor]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="lazy")


DRAWS: dict[str, Draw] = {
    "rand": lambda: torch.rand(16, device="lazy"),
    "randn": lambda: torch.randn(16, device="lazy"),
    "randint": lambda: torch.randint(1000, (16,), device="lazy"),
    "randint_low": lambda: torch.randint(5, 1000, (16,), device="lazy"),
    "randperm": lambda: torch.randperm(16, device="lazy"),
    "rand_like": lambda: torch.rand_like(ones(16)),
    "randn_like": lambda: torch.randn_like(ones(16)),
    "randint_like": lambda: torch.randint_like(ones(16), 1000),
    "randint_like_low": lambda: torch.randint_like(ones(16), 5, 1000),
    "dropout": lambda: nn.functional.dropout(ones(16)),
    "dropout_in_place": lambda: nn.functional.dropout(ones(16), inplace=True),
    "dropout_with_gradient": lambda: nn.functional.dropout(ones(16).requires_grad_()).detach(),
    "dropout2d": lambda: nn.functional.dropout2d(ones(4, 8, 2, 2)),
    "alpha_dropout": lambda: nn.functional.alpha_dropout(ones(16), training=True),
    "bernoulli": lambda: torch.bernoulli(ones(32) * 0.5),
    "bernoulli_p": lambda: torch.bernoulli(ones(32), 0.5),
    "bernoulli_in_place": lambda: ones(32).bernoulli_(0.5),
    "bernoulli_tensor": lambda: ones(32).bernoulli_(ones(32) * 0.5),
    "normal_in_place": lambda: ones(16).normal_(1.0, 2.0),
    "uniform_in_place": lambda: ones(16).uniform_(-1, 1),
    "exponential_in_place": lambda: ones(16).exponential_(),
    "random_in_place": lambda: ones(16).random_(0, 1000),
    "log_normal_in_place": lambda: ones(16).log_normal_(),
    "cauchy_in_place": lambda: ones(16).cauchy_(),
    "geometric_in_place": lambda: ones(16).geometric_(0.1),
    "normal": lambda: torch.normal(0.0, 1.0, (16,), device="lazy"),
    "normal_of_tensors": lambda: torch.normal(ones(16), ones(16)),
    "multinomial": lambda: torch.multinomial(ones(32), 16),
    "poisson": lambda: torch.poisson(ones(32) * 10),
    "rrelu": lambda: nn.functional.rrelu(-ones(16), training=True),
    "gumbel_softmax": lambda: nn.functional.gumbel_softmax(ones(16)),
    "trunc_normal": lambda: nn.init.trunc_normal_(ones(16)),
    "kaiming": lambda: nn.init.kaiming_normal_(ones(4, 4)),
    "orthogonal": lambda: nn.init.orthogonal_(ones(4, 4)),
    "normal_distribution": lambda: torch.distributions.Normal(ones(16), 1.0).sample(),
    "categorical": lambda: torch.distributions.Categorical(logits=ones(32)).sample((16,)),
    "attention_dropout": lambda: nn.functional.scaled_dot_product_attention(*[ones(1, 2, 8, 4)] * 3, dropout_p=0.5),
}  # fmt: skip


def drawn(draw: Draw, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    made = draw()
    lazy_backend.mark_step()
    return made.cpu()


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Draw:
    return DRAWS[request.param]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_same_seed_gives_the_same_numbers_in_every_plan(draw: Draw, backend: str) -> None:
    lazy_backend.config.backend = backend
    first, *later = [drawn(draw, 7) for _ in range(3)]
    assert_same(later, [first] * 2)


def test_another_seed_gives_other_numbers(draw: Draw) -> None:
    assert as_bytes(drawn(draw, 7)) != as_bytes(drawn(draw, 8))


def test_two_draws_differ(draw: Draw) -> None:
    one, other = draw(), draw()
    assert as_bytes(one.cpu()) != as_bytes(other.cpu())


@pytest.mark.parametrize("name", sorted(DRAWS.keys() - {"trunc_normal"}))  # which draws again what it rejects
def test_new_numbers_each_step_without_a_new_compile(name: str) -> None:
    draw = DRAWS[name]
    made = [draw() + 0]
    lazy_backend.mark_step()
    with count("UncachedCompile") as misses:
        for _ in range(3):
            made.append(draw() + 0)
            lazy_backend.mark_step()
    assert misses() == 0
    assert len({as_bytes(tensor.cpu()) for tensor in made}) == 4


def test_the_compiled_plan_is_used() -> None:
    lazy_backend.config.backend = "aot_eager"
    with count("Compile") as compiles:
        for _ in range(3):
            drawn(DRAWS["dropout"], 0)
    assert compiles() == 1


def test_seeding_in_the_middle_of_a_trace() -> None:
    torch.rand(4, device="lazy")
    torch.manual_seed(5)
    one = torch.rand(4, device="lazy")
    torch.manual_seed(5)
    other = torch.rand(4, device="lazy")
    assert_same(one, other.cpu())


def test_the_packages_seed_is_torchs() -> None:
    lazy_backend.manual_seed(5)
    one = torch.rand(4, device="lazy")
    torch.manual_seed(5)
    assert_same(one, torch.rand(4, device="lazy").cpu())


def test_the_order_of_execution_does_not_matter() -> None:
    def pair(cut: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        one = torch.rand(4, device="lazy")
        if cut:
            one.tolist()
        return [one.cpu(), torch.rand(4, device="lazy").cpu()]

    assert_same(pair(cut=True), pair(cut=False))


def test_a_dead_draw_does_not_change_the_next_one() -> None:
    def second(keep: bool) -> torch.Tensor:
        torch.manual_seed(0)
        first = torch.rand(4, device="lazy")
        if not keep:
            del first
        made = torch.rand(4, device="lazy")
        lazy_backend.mark_step()
        return made.cpu()

    assert_same(second(keep=True), second(keep=False))


def test_fork_rng() -> None:
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.rand(4, device="lazy")
    one = torch.rand(4, device="lazy")
    torch.manual_seed(0)
    assert_same(one, torch.rand(4, device="lazy").cpu())


def test_fork_rng_of_the_device() -> None:
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[0], device_type="lazy"):
        torch.rand(4, device="lazy")
    one = torch.rand(4, device="lazy")
    torch.manual_seed(0)
    assert_same(one, torch.rand(4, device="lazy").cpu())


def test_rng_state() -> None:
    state = torch.get_rng_state()
    one = torch.rand(4, device="lazy")
    torch.set_rng_state(state)
    assert_same(one, torch.rand(4, device="lazy").cpu())


def test_rng_state_of_the_device_module() -> None:
    module = torch.get_device_module("lazy")
    state = module.get_rng_state()
    one = torch.rand(4, device="lazy")
    module.set_rng_state(state)
    assert_same(one, torch.rand(4, device="lazy").cpu())


EXPLICIT = {
    "rand": lambda device, generator: torch.rand(4, generator=generator, device=device),
    "randn": lambda device, generator: torch.randn(4, generator=generator, device=device),
    "randint": lambda device, generator: torch.randint(100, (4,), generator=generator, device=device),
    "randperm": lambda device, generator: torch.randperm(8, generator=generator, device=device),
    "normal_": lambda device, generator: torch.empty(4, device=device).normal_(generator=generator),
    "uniform_": lambda device, generator: torch.zeros(4, device=device).uniform_(generator=generator),
    "bernoulli": lambda device, generator: torch.bernoulli(torch.full((8,), 0.5, device=device), generator=generator),
    "multinomial": lambda device, generator: torch.multinomial(torch.ones(8, device=device), 4, generator=generator),
    "init": lambda device, generator: nn.init.xavier_uniform_(torch.empty(3, 3, device=device), generator=generator),
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_an_explicit_generator_draws_what_it_draws_on_the_cpu(name: str) -> None:
    made = EXPLICIT[name]("lazy", torch.Generator().manual_seed(3))
    assert_same(made, EXPLICIT[name]("cpu", torch.Generator().manual_seed(3)))


def test_an_explicit_generator_advances() -> None:
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.rand(4, generator=generator, device="lazy") for _ in range(2))
    assert not torch.equal(one, other)


def test_numbers_are_spread_as_asked() -> None:
    x = torch.randn(10_000, device="lazy") * 2 + 1
    assert x.mean().item() == pytest.approx(1, abs=0.1)
    assert x.std().item() == pytest.approx(2, abs=0.1)


def test_dropout_scales_and_masks() -> None:
    x = nn.functional.dropout(ones(10_000), 0.25).cpu()
    assert x.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert (x == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_dropout_in_eval_mode_does_nothing() -> None:
    assert_same(nn.functional.dropout(ones(16), training=False), torch.ones(16))


def test_dropouts_gradient_has_its_mask() -> None:
    x = ones(64).requires_grad_()
    y = nn.functional.dropout(x)
    y.sum().backward()
    assert_same(x.grad, y.detach().cpu())


# ----- calls that fail


def own_generator() -> torch.Generator:
    return torch.Generator("lazy").manual_seed(3)


def filled(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to(device)


def whole(device: str, *shape: int) -> torch.Tensor:
    return filled(device, *shape, dtype=torch.int64)


REFUSED: dict[str, Callable[[str], object]] = {
    "multinomial": lambda d: torch.multinomial(filled(d, 2, 2, 2), 1),
    "multinomial of negatives": lambda d: torch.multinomial(-filled(d, 2), 1).cpu(),
    "multinomial of too many": lambda d: torch.multinomial(filled(d, 4), 9),
    "multinomial of integers": lambda d: torch.multinomial(whole(d, 4), 2),
    "bernoulli": lambda d: torch.bernoulli(filled(d, 2) * 2).cpu(),
    "bernoulli of integers": lambda d: torch.bernoulli(whole(d, 3)),
    "bernoulli_": lambda d: filled(d, 2).bernoulli_(2.0),
    "bernoulli_ of another shape": lambda d: filled(d, 3).bernoulli_(filled(d, 4)),
    "dropout": lambda d: torch.native_dropout(filled(d, 3), 2.0, True),
    "dropout of integers": lambda d: torch.native_dropout(whole(d, 3), 1.0, True),
    "normal": lambda d: torch.normal(0.0, -1.0, (2,), device=d),
    "normal of integers": lambda d: torch.normal(whole(d, 3), 1.0),
    "normal_": lambda d: filled(d, 2).normal_(0, -1),
    "normal_ of integers": lambda d: whole(d, 3).normal_(),
    "uniform_": lambda d: filled(d, 2).uniform_(1, 0),
    "uniform_ of integers": lambda d: whole(d, 2).uniform_(),
    "random_": lambda d: filled(d, 2).random_(5, 3),
    "random_ beyond its dtype": lambda d: filled(d, 3, dtype=torch.uint8).random_(0, 999),
    "exponential_": lambda d: filled(d, 2).exponential_(-1.0),
    "geometric_": lambda d: filled(d, 2).geometric_(2.0),
    "randint": lambda d: torch.randint(5, 3, (2,), device=d),
    "randint of complex numbers": lambda d: torch.randint(9, (3,), dtype=torch.complex64, device=d),
    "randint_like": lambda d: torch.randint_like(filled(d, 3), 2, 1),
    "randperm": lambda d: torch.randperm(-1, device=d),
    "randperm beyond its dtype": lambda d: torch.randperm(999, dtype=torch.uint8, device=d),
    "poisson of integers": lambda d: torch.poisson(whole(d, 2)),
    "binomial of two dtypes": lambda d: torch.binomial(filled(d, 3), filled(d, 3, dtype=torch.float64)),
    "gamma of integers": lambda d: torch._standard_gamma(whole(d, 3)),
    "rrelu of integers": lambda d: nn.functional.rrelu(whole(d, 3), training=True),
    "rand": lambda d: torch.rand(2, out=whole(d, 3)),
    "rand of integers": lambda d: torch.rand(3, dtype=torch.int64, device=d),
}


# Because of their operands' values, so that recorded calls fail later.
BY_VALUES = ("multinomial of negatives", "bernoulli")


@pytest.mark.parametrize("way", ["recorded", "run", "eager mode", "fallback"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_fails_draws_nothing(name: str, way: str) -> None:
    if way == "recorded" and name in BY_VALUES:
        pytest.skip("it is recorded")
    config.first_sight = "record" if way == "recorded" else "run"
    if way == "fallback":
        config.force_fallback = "aten::multinomial,aten::bernoulli,aten::random_,aten::uniform_,aten::normal_"

    def drawn_after(refused: Callable[[], object]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        with lazy_backend.eager_mode() if way == "eager mode" else nullcontext():
            refused()
            return [torch.rand(4, device="lazy").cpu(), torch.rand(4)]

    def refused() -> None:
        with pytest.raises((RuntimeError, ValueError)):
            REFUSED[name]("lazy")

    expected = drawn_after(lambda: None)
    for _ in range(2):
        assert_same(drawn_after(refused), expected)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - set(BY_VALUES)))
def test_a_call_that_fails_is_refused_as_in_eager_before_it_is_recorded(name: str) -> None:
    found = []
    for device in ("cpu", "lazy"):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            REFUSED[name](device)
        found.append(f"{caught.type}: {caught.value}")
    assert found[1] == found[0]


def test_a_call_that_fails_draws_nothing_from_an_own_generator() -> None:
    config.first_sight = "run"
    for mode in (nullcontext, lazy_backend.eager_mode):
        with mode():
            generator, untouched = own_generator(), own_generator()
            with pytest.raises(RuntimeError):
                torch.empty(2, device="lazy").random_(5, 3, generator=generator)
            assert_same(generator.get_state(), untouched.get_state())

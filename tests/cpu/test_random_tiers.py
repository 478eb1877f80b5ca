"""Random numbers in every tier: the seed alone decides them, for every random operator that can be called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import as_bytes, assert_same, count, run_program
from torch import distributions as D
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lazy_backend
from lazy_backend import config

aten = torch.ops.aten
Draw = Callable[[], torch.Tensor]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="lazy")


def halves(*shape: int) -> torch.Tensor:
    return ones(*shape) * 0.5


def filled(op: Callable[..., torch.Tensor], *args: object, dtype: torch.dtype = torch.float32, size: int = 16) -> Draw:
    """`op(*args, out=...)`; an operand is made anew for each draw."""

    def draw() -> torch.Tensor:
        out = torch.zeros(size, device="lazy", dtype=dtype)
        op(*(arg() if callable(arg) else arg for arg in args), out=out)
        return out

    return draw


def module(make: Callable[[], nn.Module], *shape: int) -> Draw:
    """A module in training mode, with the same weights in each draw."""

    def draw() -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = make().to("lazy")
        out = model(ones(*shape))
        return (out[0] if isinstance(out, tuple) else out).detach()

    return draw


def init(fill: Callable[[torch.Tensor], object]) -> Draw:
    def draw() -> torch.Tensor:
        made = torch.empty(4, 4, device="lazy")
        fill(made)
        return made

    return draw


def in_inference_mode(draw: Draw) -> Draw:
    def run() -> torch.Tensor:
        with torch.inference_mode():
            return draw()

    return run


def attention(**options: object) -> torch.Tensor:
    return F.scaled_dot_product_attention(*[ones(1, 2, 8, 8)] * 3, dropout_p=0.5, **options)


OPERATORS: dict[str, Draw] = {
    "bernoulli.Tensor": lambda: aten.bernoulli.Tensor(ones(32), halves(32)),
    "bernoulli.out": filled(torch.bernoulli, lambda: halves(32), size=32),
    "binomial": lambda: torch.binomial(ones(32) * 10, halves(32)),
    "cauchy": lambda: aten.cauchy(ones(16)),
    "dirichlet": lambda: torch._sample_dirichlet(ones(4, 4)),
    "dropout": lambda: torch.dropout(ones(64), 0.5, True),
    "exponential": lambda: aten.exponential(ones(16)),
    "feature_dropout": lambda: torch.feature_dropout(ones(4, 16, 2), 0.5, True),
    "geometric": lambda: aten.geometric(ones(16), 0.1),
    "log_normal": lambda: aten.log_normal(ones(16)),
    "multinomial_with_replacement": lambda: torch.multinomial(ones(32), 16, replacement=True),
    "multinomial_of_rows": lambda: torch.multinomial(ones(3, 32), 16),
    "multinomial_once": lambda: torch.multinomial(ones(1000), 1),
    "multinomial.out": filled(torch.multinomial, lambda: ones(32), 16, dtype=torch.int64),
    "native_dropout": lambda: torch.native_dropout(ones(64), 0.5, True)[0],
    "native_dropout_by_default": lambda: torch.native_dropout(ones(64), 0.5, None)[0],
    "native_dropout_mask": lambda: torch.native_dropout(ones(64), 0.5, True)[1],
    "normal.Tensor_float": lambda: torch.normal(ones(16), 2.0),
    "normal.float_Tensor": lambda: torch.normal(1.0, ones(16)),
    "normal.out": filled(torch.normal, lambda: ones(16), lambda: ones(16)),
    "normal_functional": lambda: aten.normal_functional(ones(16)),
    "rand.out": filled(torch.rand, 16),
    "rand_of_bfloat16": lambda: torch.rand(64, dtype=torch.bfloat16, device="lazy"),
    "rand_like_in_another_dtype": lambda: torch.rand_like(ones(16), dtype=torch.float64),
    "randint.low_out": filled(torch.randint, 0, 1000, (16,), dtype=torch.int64),
    "randint.out": filled(torch.randint, 1000, (16,), dtype=torch.int64),
    "randint_like.Tensor": lambda: torch.randint_like(ones(16), torch.tensor(1000, device="lazy")),
    "randn.out": filled(torch.randn, 16),
    "randn_of_complex64": lambda: torch.randn(16, dtype=torch.complex64, device="lazy"),
    "randn_of_float16": lambda: torch.randn(64, dtype=torch.float16, device="lazy"),
    "randn_like_channels_last": lambda: torch.randn_like(ones(2, 3, 2, 2).to(memory_format=torch.channels_last)),
    "random": lambda: ones(16).random_(),
    "random_to": lambda: ones(16).random_(100),
    "random_of_negative_ints": lambda: torch.zeros(16, dtype=torch.int64, device="lazy").random_(-100, 100),
    "randperm.out": filled(torch.randperm, 16, dtype=torch.int64),
    "rrelu_in_place": lambda: F.rrelu_(-ones(16), training=True),
    "rrelu_with_gradient": lambda: F.rrelu((-ones(16)).requires_grad_(), training=True).detach(),
    "standard_gamma": lambda: torch._standard_gamma(ones(16) * 2),
    "uniform": lambda: aten.uniform(ones(16)),
    "uniform_in_a_view_of_another_dtype": lambda: torch.view_as_real(ones(8).to(torch.complex64)).uniform_(),
}

FUNCTIONS: dict[str, Draw] = {
    "alpha_dropout_in_place": lambda: F.alpha_dropout(ones(64), training=True, inplace=True),
    "dropout1d": lambda: F.dropout1d(ones(4, 16, 2)),
    "dropout3d_in_place": lambda: F.dropout3d(ones(4, 16, 2, 2, 2), inplace=True),
    "dropout_in_inference_mode": in_inference_mode(lambda: F.dropout(ones(64))),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(ones(4, 16, 2), training=True),
    "fractional_max_pool": lambda: F.fractional_max_pool2d(torch.arange(128.0).to("lazy").view(1, 2, 8, 8), 2, 5),
    "gumbel_softmax_hard": lambda: F.gumbel_softmax(ones(64), hard=True),
    "attention_dropout": attention,
    "attention_dropout_causal": lambda: attention(is_causal=True),
    "attention_dropout_in_inference_mode": in_inference_mode(attention),
    "lstm": module(lambda: nn.LSTM(4, 4, 2, dropout=0.5), 3, 2, 4),
    "lstm_in_inference_mode": in_inference_mode(module(lambda: nn.LSTM(4, 4, 2, dropout=0.5), 3, 2, 4)),
    "gru_both_ways": module(lambda: nn.GRU(4, 4, 2, dropout=0.5, bidirectional=True), 3, 2, 4),
    "rnn": module(lambda: nn.RNN(4, 4, 2, dropout=0.5, nonlinearity="relu"), 3, 2, 4),
    "transformer_layer": module(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5), 4, 2, 8),
    "init_sparse": init(lambda t: nn.init.sparse_(t, 0.5)),
    "init_xavier_uniform": init(nn.init.xavier_uniform_),
    "init_xavier_normal": init(nn.init.xavier_normal_),
    "init_kaiming_uniform": init(nn.init.kaiming_uniform_),
    "init_uniform": init(nn.init.uniform_),
    "init_normal": init(nn.init.normal_),
    "linear": lambda: nn.Linear(4, 4, device="lazy").weight.detach(),
    "embedding": lambda: nn.Embedding(4, 4, device="lazy").weight.detach(),
    "svd_lowrank": lambda: torch.svd_lowrank(torch.randn(8, 4, device="lazy"), 2)[1],
}

DISTRIBUTIONS: dict[str, Draw] = {
    "bernoulli": lambda: D.Bernoulli(halves(32)).sample(),
    "beta": lambda: D.Beta(ones(16), ones(16)).rsample(),
    "binomial": lambda: D.Binomial(10, halves(16)).sample(),
    "continuous_bernoulli": lambda: D.ContinuousBernoulli(ones(16) * 0.3).rsample(),
    "dirichlet": lambda: D.Dirichlet(ones(4, 4)).rsample(),
    "exponential": lambda: D.Exponential(ones(16)).sample(),
    "fisher_snedecor": lambda: D.FisherSnedecor(ones(16) * 3, ones(16) * 3).sample(),
    "gamma": lambda: D.Gamma(ones(16), 1.0).sample(),
    "geometric": lambda: D.Geometric(ones(16) * 0.1).sample(),
    "gumbel": lambda: D.Gumbel(ones(16), ones(16)).sample(),
    "half_cauchy": lambda: D.HalfCauchy(ones(16)).sample(),
    "kumaraswamy": lambda: D.Kumaraswamy(ones(16), ones(16) * 2).sample(),
    "laplace": lambda: D.Laplace(ones(16), ones(16)).sample(),
    "lkj_cholesky": lambda: D.LKJCholesky(3, ones(1)).sample(),
    "low_rank_normal": lambda: D.LowRankMultivariateNormal(ones(4), ones(4, 2), ones(4)).sample(),
    "mixture": lambda: D.MixtureSameFamily(D.Categorical(ones(4)), D.Normal(ones(4).cumsum(0), 1.0)).sample((16,)),
    "multinomial": lambda: D.Multinomial(10, ones(8)).sample(),
    "multivariate_normal": lambda: D.MultivariateNormal(ones(4), torch.eye(4, device="lazy")).sample(),
    "negative_binomial": lambda: D.NegativeBinomial(ones(16) * 9, halves(16)).sample(),
    "one_hot": lambda: D.OneHotCategorical(ones(64)).sample(),
    "pareto": lambda: D.Pareto(ones(16), ones(16)).sample(),
    "poisson": lambda: D.Poisson(ones(16) * 9).sample(),
    "relaxed_bernoulli": lambda: D.RelaxedBernoulli(ones(1), halves(16)).rsample(),
    "student_t": lambda: D.StudentT(ones(16) * 3).sample(),
    "uniform": lambda: D.Uniform(-ones(16), ones(16)).sample(),
    "von_mises": lambda: D.VonMises(ones(16), ones(16)).sample(),
    "weibull": lambda: D.Weibull(ones(16), ones(16)).sample(),
}

DRAWS = {**OPERATORS, **FUNCTIONS, **{f"distribution_{name}": draw for name, draw in DISTRIBUTIONS.items()}}

# these draw again what they reject, or read what they drew: how often depends on the numbers
REJECTING = {"distribution_von_mises", "distribution_lkj_cholesky"}


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Draw:
    return DRAWS[request.param]


def drawn(draw: Draw, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    made = draw()
    lazy_backend.mark_step()
    return made.cpu()


def test_every_run_in_every_tier_draws_the_same(draw: Draw) -> None:
    expected = drawn(draw, 7)
    for backend in ("eager", "aot_eager"):
        config.backend = backend
        assert_same([drawn(draw, 7) for _ in range(3)], [expected] * 3)


def test_another_seed_draws_other_numbers(draw: Draw) -> None:
    assert as_bytes(drawn(draw, 7)) != as_bytes(drawn(draw, 8))


@pytest.mark.parametrize("name", sorted(DRAWS.keys() - REJECTING))
def test_new_numbers_compile_nothing_new(name: str) -> None:
    for _ in range(2):
        drawn(DRAWS[name], 7)
    with count("UncachedCompile") as misses, count("Compile") as compiles:
        made = {as_bytes(drawn(DRAWS[name], seed)) for seed in range(3)}
    assert (misses(), compiles(), len(made)) == (0, 0, 3)


@pytest.mark.parametrize("draw", OPERATORS.values(), ids=OPERATORS)
def test_a_cut_between_two_draws_changes_neither(draw: Draw) -> None:
    def pair(cut: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        first = draw()
        if cut:
            lazy_backend.mark_step(wait=True)
        return [draw().cpu(), first.cpu()]

    assert_same(pair(cut=True), pair(cut=False))


@pytest.mark.parametrize("draw", OPERATORS.values(), ids=OPERATORS)
def test_what_the_cpu_draws_does_not_depend_on_when_the_lazy_draw_runs(draw: Draw) -> None:
    def on_the_cpu(run: bool) -> torch.Tensor:
        torch.manual_seed(3)
        made = draw()
        if run:
            made.tolist()
        return torch.rand(4)

    assert_same(on_the_cpu(run=True), on_the_cpu(run=False))


SEEDERS = [torch.manual_seed, lazy_backend.manual_seed, torch.get_device_module("lazy").manual_seed]


@pytest.mark.parametrize("seed_with", SEEDERS)
def test_every_way_to_seed_governs(seed_with: Callable[[int], object]) -> None:
    seed_with(5)
    one = torch.rand(4, device="lazy")
    torch.manual_seed(5)
    assert_same(one, torch.rand(4, device="lazy").cpu())


def test_operators_draw_from_the_same_stream_in_inductor() -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(7)
        x = F.dropout(ones(64)) + torch.rand(64, device="lazy")
        noise = ones(16).normal_() * torch.randint(9, (16,), device="lazy")
        picks = torch.multinomial(ones(32), 4)
        lazy_backend.mark_step()
        return [x.cpu(), noise.cpu(), picks.cpu()]

    expected = step()
    config.backend = "inductor"
    with count("Compile") as compiles, count("CompileFailed") as failures:
        for _ in range(3):
            assert_same(step(), expected)
    assert (compiles(), failures()) == (1, 0)


def test_a_fresh_process_draws_the_same(tmp_path) -> None:
    code = "import torch; torch.manual_seed(7); print(torch.rand(3, device='lazy').tolist())"
    assert run_program(code, tmp_path).strip() == str(drawn(lambda: torch.rand(3, device="lazy"), 7).tolist())


def test_native_dropout_of_everything_is_eagers() -> None:
    x = torch.tensor([1.0, float("inf"), float("nan")])
    assert_same(torch.native_dropout(x.to("lazy"), 1.0, True), torch.native_dropout(x, 1.0, True))


LAYOUTS: dict[str, Draw] = {
    "contiguous": lambda: ones(4, 6, 8),
    "transposed": lambda: ones(4, 6, 8).transpose(0, 2),
    "channels_last": lambda: ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: ones(6, 1).expand(6, 8),
    "sliced": lambda: ones(6, 8)[:, ::2],
    "one_row": lambda: ones(1, 8).t(),
    "a_number": lambda: ones(64).sum(),
    "empty": lambda: ones(0, 3),
    "bfloat16": lambda: ones(64).to(torch.bfloat16),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_dropout_draws_the_same_mask_in_every_layout(backend: str) -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(7)
        made = [lay_out() * 3 for lay_out in LAYOUTS.values()]  # the operand is computed in the same graph
        dropped = [part for x in made for p in (0.25, 1.0) for part in torch.native_dropout(x, p, True)]
        training = [F.dropout(x.detach().requires_grad_(), 0.3) for x in made]
        gradients = torch.autograd.grad([(x * x).sum() for x in training], training)
        lazy_backend.mark_step()
        return [x.detach().cpu() for x in (*dropped, *training, *gradients)]

    expected = step()
    config.backend = backend
    with count("Compile") as compiles, count("CompileFailed") as failures:
        for _ in range(3):
            assert_same(step(), expected)
    assert (compiles(), failures()) == (1, 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_dropout_that_is_compiled_for_many_shapes_draws_the_same_mask(backend: str) -> None:
    def step(rows: int) -> torch.Tensor:
        torch.manual_seed(rows)
        once = F.dropout(ones(rows, 8) * 3, 0.25)
        twice = F.dropout(once.t(), 0.25)  # its mask is laid out as its operand, so its strides are not known
        lazy_backend.mark_step()
        return twice.cpu()

    expected = {rows: step(rows) for rows in range(2, 9)}
    config.backend = backend
    with count("Compile") as compiles, count("CompileFailed") as failures:
        for _ in range(3):
            for rows, values in expected.items():
                assert_same(step(rows), values)
    assert compiles() <= 2
    assert failures() == 0
    assert lazy_backend.explain(1).records[0].plan == "compiled for many shapes"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_a_checkpoint_draws_the_same_mask_again(reentrant: bool, cut: bool) -> None:
    x = ones(64).requires_grad_()
    out = checkpoint(lambda x: F.dropout(F.dropout(x), 0.2), x, use_reentrant=reentrant)
    if cut:
        lazy_backend.mark_step()
    torch.rand(4, device="lazy")  # moves the generator on
    out.sum().backward()
    assert_same(x.grad, out.detach().cpu())


def test_a_checkpoint_without_its_rng_state_draws_another_mask() -> None:
    x = ones(64).requires_grad_()
    out = checkpoint(F.dropout, x, use_reentrant=False, preserve_rng_state=False)
    out.sum().backward()
    assert not torch.equal(x.grad, out.detach())


def test_a_checkpoint_leaves_the_generator_where_it_would_be_without() -> None:
    def then(wrap: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x = ones(8).requires_grad_()
        out = checkpoint(F.dropout, x, use_reentrant=False) if wrap else F.dropout(x)
        out.sum().backward()
        return torch.rand(4, device="lazy").cpu()

    assert_same(then(wrap=True), then(wrap=False))


def test_fork_rng_leaves_no_trace() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4, device="lazy").cpu()
    torch.manual_seed(0)
    with torch.random.fork_rng(device_type="lazy"):
        torch.manual_seed(9)
        torch.rand(4, device="lazy")
    assert_same(torch.rand(4, device="lazy"), expected)


def test_a_draw_under_vmap_follows_its_randomness() -> None:
    def drawn(randomness: str) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.func.vmap(lambda row: F.dropout(row), randomness=randomness)(ones(8, 64))

    same, different = drawn("same").cpu(), drawn("different").cpu()
    assert (same == same[0]).all()
    assert not (different == different[0]).all()


def test_a_dropouts_gradient_has_its_mask_in_every_tier() -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = ones(64).requires_grad_()
        F.dropout(x).sum().backward()
        lazy_backend.mark_step()
        return x.grad.cpu()

    expected = step()
    config.backend = "aot_eager"
    assert_same([step() for _ in range(3)], [expected] * 3)

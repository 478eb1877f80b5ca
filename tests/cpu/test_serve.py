"""Served functions: many threads, weights that change meanwhile, answers that are never mixed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Versioned, assert_same, count
from interruption import Interrupted, interrupt, places_of, raise_interrupted
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lazy_backend
from lazy_backend import CaptureError, config, load_served, serve
from lazy_backend.errors.sites import is_ours
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.serving.weights import InputError

SIZE = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU(), nn.Linear(SIZE, 3)).eval()


@pytest.fixture(params=["interpreted", "eager", "aot_eager"])
def backend(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.compile = "off" if request.param == "interpreted" else "foreground"
    lazy_backend.config.backend = "eager" if request.param == "interpreted" else request.param


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_answers_are_the_modules(device: str) -> None:
    served = serve(model().to(device), torch.zeros(4, SIZE))
    for _ in range(3):
        x = torch.randn(4, SIZE)
        with torch.no_grad():
            torch.testing.assert_close(served(x), model()(x))


MEETING: list[threading.Barrier] = []


@torch.library.custom_op("lazy_serve::meet", mutates_args=())
def meet(x: torch.Tensor) -> torch.Tensor:
    """Wait for another request, if there is to be one."""
    for barrier in MEETING:
        barrier.wait(timeout=30)
    return x.clone()


meet.register_fake(torch.empty_like)


class Meet(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return meet(x)


def test_one_request_more_than_allowed_is_refused() -> None:
    served, x = serve(Meet(), torch.ones(2), max_requests=1), torch.ones(2)
    MEETING.append(threading.Barrier(2))
    first = threading.Thread(target=lambda: served(x))
    try:
        with count("ServedRefused") as refused:
            first.start()
            while not MEETING[0].n_waiting:
                pass
            with pytest.raises(lazy_backend.TooManyRequestsError, match=r"1 requests to .*Meet.* are under way"):
                served(x)
        assert refused() == 1
        MEETING[0].wait(timeout=30)
        first.join()
    finally:
        MEETING.clear()
    assert_same(served(x), x)
    with pytest.raises(InputError):
        served(torch.ones(2, dtype=torch.float64))
    assert_same(served(x), x)  # an error gives its place back, too


def test_an_interrupted_request_gives_its_place_back() -> None:
    served, x = serve(model(), torch.zeros(4, SIZE), max_requests=1), torch.zeros(4, SIZE)
    places = [place for place in places_of(lambda: served(x), instructions=True) if place[0].endswith("/serve.py")]
    assert places
    for place in places:
        with contextlib.suppress(Interrupted):
            interrupt(lambda: served(x), place, 1, raise_interrupted)
        served(x)


@pytest.mark.parametrize("bound", [0, -1, True, 1.5, "3", None])
def test_a_bound_that_is_no_whole_number_from_one_on_is_refused(bound: Any) -> None:
    text = rf"is {re.escape(repr(bound))}\n  pass a whole number of at least 1"
    if bound is not None:
        with pytest.raises(ValueError, match=f"max_requests {text}, or None"):
            serve(model(), torch.zeros(4, SIZE), max_requests=bound)
        with pytest.raises(ValueError, match=f"max_requests {text}, or None"):
            load_served("missing", max_requests=bound)
    with pytest.raises(ValueError, match=f"num_threads {text}$"):
        serve(model(), torch.zeros(4, SIZE), num_threads=bound)


def test_a_bound_may_be_a_number_of_numpy() -> None:
    served = serve(model(), torch.zeros(4, SIZE), num_threads=np.int64(1), max_requests=np.int64(2))
    assert served(torch.zeros(4, SIZE)).shape == (4, 3)


def test_many_threads_have_the_places_that_there_are() -> None:
    served, x = serve(model(), torch.zeros(4, SIZE), max_requests=4), torch.zeros(4, SIZE)
    with count("ServedRefused") as refused, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [served(x) for _ in range(200)], range(4)))
    assert refused() == 0


def test_an_event_loop_goes_on_while_requests_run() -> None:
    served, x = serve(Meet(), torch.ones(2)), torch.ones(2)
    MEETING.append(threading.Barrier(3))

    async def ask() -> list[torch.Tensor]:
        requests = [asyncio.create_task(served.call(x * number)) for number in range(2)]
        await asyncio.sleep(0.01)
        assert not any(request.done() for request in requests)
        MEETING[0].wait(timeout=30)  # both run, beside the loop
        return await asyncio.gather(*requests)

    try:
        assert_same(asyncio.run(ask()), [x * 0, x])
    finally:
        MEETING.clear()


def test_a_request_that_is_cancelled_before_it_runs_never_does() -> None:
    served, x, asked = serve(Meet(), torch.ones(2), max_requests=1), torch.ones(2), []
    MEETING.append(threading.Barrier(2))

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        first = asyncio.create_task(served.call(x))
        second = asyncio.create_task(served.call(x))  # waits for the only thread
        await asyncio.sleep(0.01)
        second.cancel()
        MEETING[0].wait(timeout=30)
        assert_same(await first, x)
        with pytest.raises(asyncio.CancelledError):
            await second
        MEETING.clear()
        asked.append(await served.call(x))

    try:
        asyncio.run(ask())
    finally:
        MEETING.clear()
    assert_same(asked, [x])


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(SIZE),
        nn.BatchNorm1d(SIZE, affine=False),
        nn.SyncBatchNorm(SIZE),
        nn.Sequential(nn.Unflatten(1, (SIZE, 1)), nn.BatchNorm1d(SIZE), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (SIZE, 1, 1)), nn.BatchNorm2d(SIZE), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (SIZE, 1, 2)), nn.InstanceNorm2d(SIZE, track_running_stats=True), nn.Flatten()),
    ],
    ids=lambda norm: str(norm).splitlines()[0],
)
def test_requests_run_at_the_same_time_if_norms_only_read_their_statistics(norm: nn.Module) -> None:
    width = 2 * SIZE if "InstanceNorm" in str(norm) else SIZE
    own = nn.Sequential(norm, Meet()).eval()
    x = torch.randn(4, width)
    expected = own(x).detach()
    served = serve(own, x)
    found: list[torch.Tensor] = []
    MEETING.append(threading.Barrier(2))
    try:
        threads = [threading.Thread(target=lambda: found.append(served(x))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        MEETING.clear()
    assert len(found) == 2
    assert all(torch.equal(one, expected) for one in found)


def test_a_known_request_enters_few_functions() -> None:
    """Where operators take microseconds, the functions of Python around them take as long."""
    config.compile, config.backend = "foreground", lambda module, examples: module.forward
    served, x, entered = serve(model(), torch.zeros(4, SIZE)), torch.zeros(4, SIZE), []
    for _ in range(3):
        served(x)

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and is_ours(frame.f_code.co_filename):
            entered.append(frame.f_code.co_qualname)

    with torch.inference_mode():
        sys.setprofile(note)
        try:
            served(x)
        finally:
            sys.setprofile(None)
    assert len(entered) <= 24, entered


@pytest.mark.usefixtures("backend")
def test_weights_are_swapped_by_their_names() -> None:
    served, other = serve(model(), torch.zeros(4, SIZE)), model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    x = torch.randn(4, SIZE)
    for source in (other, other.to("lazy")):
        served.swap_weights(model().state_dict())
        torch.testing.assert_close(served(x), model()(x).detach())
        served.swap_weights(source.state_dict())
        torch.testing.assert_close(served(x), other(x.to(next(other.parameters()).device)).detach().cpu())


class Tied(nn.Module):
    """One weight under two names, and a buffer that no `state_dict` has."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((SIZE,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def test_tied_weights_and_buffers_that_are_not_persistent() -> None:
    module = Tied()
    served = serve(module, torch.zeros(4, SIZE))
    with torch.no_grad():
        module.first.weight.mul_(0.5)
    served.swap_weights(module.state_dict())
    x = torch.randn(4, SIZE)
    torch.testing.assert_close(served(x), module(x).detach())


def test_training_on_does_not_change_what_is_served() -> None:
    trained = model().to("lazy")
    served = serve(trained, torch.zeros(4, SIZE))
    x = torch.randn(4, SIZE)
    before = served(x)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    lazy_backend.mark_step(wait=True)
    assert_same(served(x), before)


def test_weights_that_do_not_fit_are_refused() -> None:
    served = serve(model(), torch.zeros(4, SIZE))
    state = model().state_dict()
    with pytest.raises(InputError, match=r"weight '0\.weight'.*expected torch.float32 \[8, 8\]"):
        served.swap_weights({**state, "0.weight": torch.zeros(2, 2)})
    with pytest.raises(InputError, match="unexpected"):
        served.swap_weights({**state, "more": torch.zeros(2)})
    del state["0.weight"]
    with pytest.raises(InputError, match="missing"):
        served.swap_weights(state)


def test_arguments_that_do_not_fit_are_refused() -> None:
    served = serve(model(), torch.zeros(4, SIZE))
    with pytest.raises(InputError, match=r"input 0.*torch.float32 with as many dim.*\[4, 8\].*torch.float64 \[5, 8\]"):
        served(torch.zeros(5, SIZE, dtype=torch.float64))
    with pytest.raises(InputError, match=r"input 0.*\[4, 8\].*got torch.float32 \[5, 8, 1\]"):
        served(torch.zeros(5, SIZE, 1))
    with pytest.raises(InputError, match=r"of inputs of shape \[5, 9\] cannot be recorded: .*5x9 and 8x8"):
        served(torch.zeros(5, SIZE + 1))
    with pytest.raises(InputError, match="arguments do not fit"):
        served(torch.zeros(4, SIZE), torch.zeros(4, SIZE))


@pytest.mark.usefixtures("backend")
def test_a_function_of_trees() -> None:
    scale = torch.full((3,), 2.0).to("lazy")

    def function(batch: dict[str, torch.Tensor], y: torch.Tensor) -> dict[str, Any]:
        made = batch["x"] * scale
        return {"sum": made + y, "parts": [made[:2], made, batch["x"]]}

    served = serve(function, ({"x": torch.zeros(3)}, torch.zeros(3)))
    x, y = torch.randn(3), torch.randn(3)
    answer = served({"x": x}, y)
    assert_same(answer, {"sum": x * 2 + y, "parts": [(x * 2)[:2].clone(), x * 2, x]})
    assert answer["parts"][2] is not x


@pytest.mark.usefixtures("backend")
def test_arguments_may_lie_in_memory_in_any_way() -> None:
    served = serve(lambda x, y: (x @ y, y), (torch.zeros(4, 4), torch.zeros(4, 4)))
    big, x = torch.randn(8, 8), torch.randn(4, 4)
    ways = [
        *(x, x.t(), big[2:6, 1:5], big[4:, ::2], x.clone().requires_grad_(), nn.Parameter(x)),
        *(x.expand(4, 4), x[:1].expand(4, 4), torch.complex(x, x).conj().imag),
    ]
    for first in ways:
        for second in ways:
            product, same = served(first, second)
            torch.testing.assert_close(product, (first @ second).detach())
            assert_same(same, second.detach().clone(memory_format=torch.contiguous_format))
            assert same.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
            assert not product.requires_grad


def test_a_call_is_answered_in_any_mode() -> None:
    config.compile, config.backend = "foreground", "inductor"
    network, x = model(), torch.randn(4, SIZE)
    served, expected = serve(network, x), network(x).detach()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        with mode():
            answer = served(x)
        assert answer.dtype == torch.float32
        assert answer.is_inference() == (mode is torch.inference_mode)
        torch.testing.assert_close(answer, expected)
        with torch.inference_mode():
            torch.testing.assert_close(served(x.clone()), expected)


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.usefixtures("backend")
def test_trees_of_every_kind_are_taken_apart_as_those_of_the_example() -> None:
    def function(first: Any, /, *, named: Any, other: Any) -> Any:
        return {"sum": first[0] + first[1]["x"], "rest": (named[0] * other.a, other.b)}

    def request() -> tuple[Any, dict[str, Any]]:
        one, two, three, four, five = torch.randn(5, 3).unbind()
        one, two, three, four, five = (tensor.clone() for tensor in (one, two, three, four, five))
        return ((one, {"x": two}),), {"named": [three], "other": Pair(four, five)}

    def whole(first: Any, named: Any, other: Any) -> Any:
        return function(first, named=named, other=other)

    positional, named = request()
    served = serve(whole, (positional[0], named["named"], named["other"]))
    positional, named = request()
    arguments = positional[0], named["named"], named["other"]
    assert_same(served(*arguments), whole(*arguments))
    for wrong in (
        (list(positional[0]), named["named"], named["other"]),
        (positional[0], tuple(named["named"]), named["other"]),
        (positional[0], named["named"], tuple(named["other"])),
        ((positional[0][0], {"y": torch.zeros(3)}), named["named"], named["other"]),
        ((positional[0][0], {"x": (torch.zeros(3),)}), named["named"], named["other"]),
    ):
        with pytest.raises(InputError, match=r"argument \d is put together in another way"):
            served(*wrong)


def test_recording_leaves_no_effect() -> None:
    module = model().to("lazy").train()
    before = lazy_backend.to_cpu(module.state_dict())
    serve(module, torch.randn(4, SIZE))
    lazy_backend.mark_step()
    assert_same(lazy_backend.to_cpu(module.state_dict()), before)


def read(x: torch.Tensor) -> Any:
    return x * x.sum().item()


def number(x: torch.Tensor) -> Any:
    return x, 3


@pytest.mark.parametrize(
    ("function", "text"),
    [(read, r"item\(\) inside read(.|\n)*test_serve.py:\d+"), (number, "number returns a int")],
)
def test_what_cannot_be_served_says_why(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        serve(function, torch.zeros(3))


def test_example_inputs_are_tensors() -> None:
    with pytest.raises(CaptureError, match=r"got int(.|\n)*close over"):
        serve(lambda x, n: x * n, (torch.zeros(3), 3))


def test_a_graph_that_does_not_compile_is_interpreted() -> None:
    def fails(module: Any, inputs: Any) -> Any:
        raise ValueError("no compiler here")

    lazy_backend.config.backend = fails
    with pytest.warns(lazy_backend.CompileWarning, match="no compiler here"):
        served = serve(lambda x: x + 1, torch.zeros(3))
    assert_same(served(torch.zeros(3)), torch.ones(3))


# ----- compiled as steps are


def kinds(served: lazy_backend.Served) -> list[PlanKind]:
    return [region.plan_for_run().kind for region in served.delegates]


def test_requests_are_answered_while_the_graph_is_compiled() -> None:
    config.compile, config.backend = "background", "inductor"
    network, x = model(), torch.randn(4, SIZE)
    expected = network(x).detach()
    served = serve(network, x)
    answers = [served(x) for _ in range(3)]
    assert kinds(served) == [PlanKind.INTERPRETED]  # the compiler takes seconds
    assert lazy_backend.wait_for_compiles(300)
    assert kinds(served) == [PlanKind.COMPILED]
    for answer in (*answers, served(x)):
        torch.testing.assert_close(answer, expected)


def test_a_graph_that_was_served_before_is_on_disk(tmp_path: Path) -> None:
    config.compile, config.backend = "foreground", "inductor"
    config.cache, config.cache_dir = True, str(tmp_path)
    network, x = model(), torch.randn(4, SIZE)
    with count("Compile") as compiles, count("DiskCacheHit") as hits:
        for _ in range(2):
            served = serve(network, x)
            assert kinds(served) == [PlanKind.COMPILED]
            torch.testing.assert_close(served(x), network(x).detach())
    assert (compiles(), hits()) == (1, 1)


def test_threads_go_on_while_a_compiled_plan_comes_in() -> None:
    config.compile, config.backend = "background", "inductor"
    network, x = model(), torch.randn(4, SIZE)
    expected, served, wrong = network(x).detach(), serve(network, x), []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                torch.testing.assert_close(served(x), expected)
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert lazy_backend.wait_for_compiles(300)
        assert kinds(served) == [PlanKind.COMPILED]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_misspelt_backend_is_told_when_serving_begins() -> None:
    config.compile = "foreground"
    config._store("backend", "inducktor")  # as the environment variable may give it
    with pytest.raises(ValueError, match="unknown backend 'inducktor'"):
        serve(lambda x: x + 1, torch.zeros(3))


def test_a_fake_tensor_is_refused() -> None:
    config.compile = "off"
    served = serve(lambda x: x + 1, torch.zeros(3))
    with FakeTensorMode():
        fake = torch.zeros(3)
    with pytest.raises(InputError, match="got FakeTensor, which may have no memory"):
        served(fake)


class Doubled(nn.Module):
    """Ignores its input, as a graph over nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * 2


def x_of(rows: int) -> torch.Tensor:
    return torch.ones(rows, SIZE)


MISFITS = {
    "dtype": (lambda rows: x_of(rows).int(), "got torch.int32"),
    "half": (lambda rows: x_of(rows).half(), "got torch.float16"),
    "complex": (lambda rows: x_of(rows).to(torch.complex64), "got torch.complex64"),
    "meta": (lambda rows: x_of(rows).to("meta"), "got .* on meta"),
    "lazy": (lambda rows: x_of(rows).to("lazy"), "got .* on lazy:0"),
    "rank": (lambda rows: x_of(rows)[None], r"got torch.float32 \[1, "),
    "coo": (lambda rows: x_of(rows).to_sparse(), r"got torch.sparse_coo\n  give its to_dense\(\)"),
    "csr": (lambda rows: x_of(rows).to_sparse_csr(), "got torch.sparse_csr"),
    "csc": (lambda rows: x_of(rows).to_sparse_csc(), "got torch.sparse_csc"),
    "mkldnn": (lambda rows: x_of(rows).to_mkldnn(), "got torch._mkldnn"),
    "nested": (lambda rows: torch.nested.nested_tensor([torch.ones(SIZE)] * max(rows, 1)), "got a nested one"),
    "jagged": (lambda rows: jagged(max(rows, 1)), "got a nested one"),
    "zeros": (lambda rows: torch._efficientzerotensor((rows, SIZE)), "got zeros that have no memory"),
    "fake": (lambda rows: FakeTensorMode().from_tensor(x_of(rows)), "got FakeTensor"),
    "numpy": (lambda rows: np.ones((rows, SIZE), np.float32), "got ndarray"),
    "number": (lambda rows: 3, "got int"),
    "none": (lambda rows: None, "got NoneType"),
}


def jagged(rows: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(SIZE)] * rows, layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse CSC", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", MISFITS)
@pytest.mark.parametrize("served_module", ["uses its input", "ignores it"])
def test_an_input_of_another_kind_is_refused_for_any_number_of_rows(kind: str, served_module: str) -> None:
    """Of the example's, of a new number and of one that was asked for before. Of no row, a graph uses no input."""
    make, text = MISFITS[kind]
    module = model() if served_module == "uses its input" else Doubled()
    served = serve(module, torch.zeros(4, SIZE))
    for rows in (4, 5, 0):
        expected = module(x_of(rows)).detach()
        for _ in range(2):
            with pytest.raises(InputError, match=f"input 'input 0'.*{text}"):
                served(make(rows))
            assert_same(served(x_of(rows)), expected)
        assert_same(served(x_of(rows).t().contiguous().t()), expected)  # laid out in another way


def test_inputs_that_a_graph_does_not_use_have_its_sizes() -> None:
    config.max_served_shapes = 0
    served = serve(lambda x, rest: x * 2, (torch.zeros(3), {"y": torch.zeros(2), "z": [torch.zeros(())]}))
    fits: dict[str, Any] = {"y": torch.ones(2), "z": [torch.ones(())]}
    assert_same(served(torch.ones(3), fits), torch.ones(3) * 2)
    for other in ({"y": torch.ones(4)}, {"y": torch.ones(2).int()}, {"z": [torch.ones((), device="meta")]}):
        with pytest.raises(InputError, match=r"input 'input [12]': expected torch.float32"):
            served(torch.ones(3), {**fits, **other})


@pytest.mark.usefixtures("backend")
def test_an_input_within_a_transform_is_refused() -> None:
    served, x = serve(model(), torch.zeros(4, SIZE)), torch.zeros(4, SIZE)
    calls: list[Callable[[], Any]] = [
        lambda: torch.vmap(served)(torch.stack([x, x])),
        lambda: torch.func.grad(lambda x: served(x).sum())(x),
        lambda: torch.func.functionalize(served)(x),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"one within a transform such as torch\.vmap"):
            call()


def test_autocast_is_that_of_the_moment_when_serving_began() -> None:
    x = torch.randn(4, SIZE)
    served = serve(model(), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert [served(one).dtype for one in (x, x[:2])] == [torch.float32] * 2
        served = serve(model(), x)
    assert [served(one).dtype for one in (x, x[:2])] == [torch.bfloat16] * 2


def test_a_module_of_another_device_is_served(two_devices: None) -> None:
    x = torch.randn(4, SIZE)
    served = serve(model().to("lazy:1"), x)
    torch.testing.assert_close(served(x), model()(x).detach())


def test_serving_leaves_no_cycle() -> None:
    serve(model(), torch.randn(4, SIZE))  # PyTorch's fake tensors keep the frames of their first use
    gc.disable()
    try:
        reference = weakref.ref(serve(model(), torch.randn(4, SIZE)))
        assert reference() is None
    finally:
        gc.enable()


def test_two_threads_serve_while_a_third_trains_at_first_sight(two_devices: None) -> None:
    config.first_sight, config.compile = "run", "off"

    def record(device: str) -> None:
        for size in range(2, 30):
            serve(lambda x: x.tanh() * 2, torch.zeros(size, device=device))

    threads = [threading.Thread(target=record, args=(f"lazy:{index}",)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = torch.ones(5, device="lazy")
    with count("ExecuteComputation") as runs:
        x.exp_()
        lazy_backend.mark_step()
    assert (config.first_sight, runs()) == ("run", 1)


def test_an_interrupted_serve_writes_nothing() -> None:
    """At every line of ours: statistics that the body would have written stay, and nothing is left to run."""
    config.compile, config.first_sight = "off", "run"
    module = nn.BatchNorm1d(SIZE).to("lazy").train()
    x = torch.randn(4, SIZE)
    call = lambda: serve(module, x)
    call()
    before = lazy_backend.to_cpu(dict(module.state_dict()))
    places = list(places_of(call))
    near = [place for place in places if Path(place[0]).name in ("serve.py", "rules.py", "state.py")]
    for place in (*near, *places[:: max(1, len(places) // 100)]):
        with contextlib.suppress(Interrupted):
            interrupt(call, place, 1, raise_interrupted)
        lazy_backend.mark_step(wait=True)
        assert_same(lazy_backend.to_cpu(dict(module.state_dict())), before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("compile", ["foreground", "off"])
def test_an_index_out_of_range_is_an_error_with_its_line(compile: str, threads: int) -> None:
    config.compile, config.backend = compile, "aot_eager"
    served = serve(nn.Embedding(10, 4).eval(), torch.tensor([1, 2]), num_threads=threads)
    with pytest.raises(RuntimeError, match=rf"index out of range(.|\n)*recorded at {__file__}"):
        served(torch.tensor([1, 99]))
    assert served(torch.tensor([1, 2])).shape == (2, 4)


@pytest.mark.usefixtures("backend")
def test_a_default_device_changes_no_answer() -> None:
    served, x = serve(lambda x: nn.functional.dropout(x, 0.5), torch.ones(100)), torch.ones(100)
    answers = []
    for device in ("cpu", "meta", "lazy"):
        torch.manual_seed(3)
        with torch.device(device):
            answers.append(served(x))
    assert 20 < answers[0].count_nonzero() < 80
    assert_same(answers[1:], [answers[0]] * 2)


@pytest.mark.usefixtures("backend")
def test_no_answer_mixes_two_sets_of_weights() -> None:
    threads, requests, swaps = 8, 1000, 100
    served = serve(Versioned(0), torch.ones(2, 4))
    states = [Versioned(version).state_dict() for version in range(swaps + 1)]
    wrong: list[Any] = []
    finished = threading.Event()

    def ask() -> None:
        last = 0.0
        for request in range(requests):
            factor = 1.0 + request % 3
            answer = served(torch.full((2, 4), factor)) / factor
            version = answer[0].item()
            if not torch.equal(answer, torch.full((3,), version)) or version < last or version % 1:
                wrong.append(answer)
            last = version

    def swap() -> None:
        for state in states:
            served.swap_weights(state)
            finished.wait(0.002)

    workers = [threading.Thread(target=ask) for _ in range(threads)] + [threading.Thread(target=swap)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert served.num_execution_frames <= threads
    assert_same(served(torch.ones(2, 4)), torch.full((3,), float(swaps)))

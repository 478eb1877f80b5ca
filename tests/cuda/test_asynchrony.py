"""Steps run while Python goes on: `mark_step` waits for nothing, reads wait for what they need."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch
from backing import BACKING, needs_gpu, wait
from harness import assert_same

import lazy_backend

# A chain of products that takes a good part of a second on a GPU, and a tenth of one on a CPU core.
_SIZE, _LENGTH = (8192, 24) if BACKING == "cuda" else (512, 24)


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


def chain(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(_LENGTH):
        y = y @ x
    return y


def make_matrix() -> torch.Tensor:
    x = torch.eye(_SIZE, device="lazy") * 1.01
    lazy_backend.mark_step(wait=True)
    return x


def warm_up(x: torch.Tensor) -> None:
    for _ in range(3):
        y = chain(x)
        lazy_backend.mark_step()
        del y
    wait()


def test_mark_step_returns_before_the_device_is_done() -> None:
    x = make_matrix()
    warm_up(x)
    begin = perf_counter()
    y = chain(x)
    lazy_backend.mark_step()
    called = perf_counter() - begin
    wait()
    whole = perf_counter() - begin
    assert called < 0.5 * whole, f"recording and mark_step took {called:.3f} s of {whole:.3f} s"
    assert y[0, 0].item() == pytest.approx(1.01 ** (_LENGTH + 1), rel=1e-2)


def test_the_next_step_is_recorded_while_the_device_works() -> None:
    x = make_matrix()
    warm_up(x)
    _ = torch.ones(3, device="lazy") + 1  # a kernel is loaded at its first call, for which CUDA waits for all others
    wait()
    y = chain(x)
    lazy_backend.mark_step()
    begin = perf_counter()
    z = torch.ones(3, device="lazy")
    for _ in range(20):
        z = z + 1
    recorded = perf_counter() - begin
    wait()
    whole = perf_counter() - begin
    assert recorded < 0.5 * whole, f"recording 20 calls took {recorded:.3f} s beside a run of {whole:.3f} s"
    assert z.tolist() == [21.0] * 3
    del y


def test_a_read_waits_for_the_run() -> None:
    x = make_matrix()
    for _ in range(3):
        y = chain(x)
        lazy_backend.mark_step()
        assert y[-1, -1].item() == pytest.approx(1.01 ** (_LENGTH + 1), rel=1e-2)
        assert y[0, -1].item() == 0


@needs_gpu
def test_what_eager_reads_is_there() -> None:
    """The caller's stream waits for the stream of the run, without any synchronisation by the user."""
    x = make_matrix()
    warm_up(x)
    y = chain(x)
    lazy_backend.mark_step()
    moved = y.to("cuda") * 2
    assert moved[0, 0].item() == pytest.approx(2 * 1.01 ** (_LENGTH + 1), rel=1e-2)


@needs_gpu
def test_what_eager_wrote_is_there() -> None:
    """And the run's stream waits for the caller's."""
    x = torch.eye(_SIZE, device="cuda") * 1.01
    for _ in range(3):
        late = chain(x)  # under way still
        uploaded = late.to("lazy")
        y = uploaded + 1
        lazy_backend.mark_step()
        assert y[0, 0].item() == pytest.approx(1 + 1.01 ** (_LENGTH + 1), rel=1e-2)


@needs_gpu
def test_the_callers_stream_may_be_another() -> None:
    stream = torch.cuda.Stream()
    x = make_matrix()
    with torch.cuda.stream(stream):
        for _ in range(3):
            late = chain(torch.eye(_SIZE, device="cuda") * 1.01)
            y = late.to("lazy") + x
            lazy_backend.mark_step()
            moved = y.to("cuda")
            again = y + late.to("lazy")  # at once, on the caller's stream
            assert again[2, 2].item() == pytest.approx(1.01 + 2 * 1.01 ** (_LENGTH + 1), rel=1e-2)
        assert torch.cuda.current_stream() == stream
        assert moved[1, 1].item() == pytest.approx(1.01 + 1.01 ** (_LENGTH + 1), rel=1e-2)


def test_inputs_may_be_dropped_at_once() -> None:
    """The memory of what a run reads is not given to somebody else before the run is over."""
    expected = []
    for number in range(20):
        x = torch.full((256, 256), float(number), device="lazy")
        y = (x @ x).sum()
        lazy_backend.mark_step()
        del x
        torch.full((256, 256), -1.0, device=BACKING)
        expected.append((y, 256.0 * 256 * 256 * number * number))
    for y, value in expected:
        assert y.item() == pytest.approx(value)


def test_uploads_from_pinned_memory() -> None:
    for number in range(5):
        source = torch.arange(4096.0) + number
        pinned = source.pin_memory() if BACKING == "cuda" else source
        moved = pinned.to("lazy", non_blocking=True)
        result = moved * 2
        lazy_backend.mark_step()
        assert_same(result, source * 2)


def test_a_buffer_may_be_refilled_after_a_blocking_upload() -> None:
    """As a data loader does that keeps one batch of memory. The upload is a copy, recorded or not."""
    buffer = torch.zeros(1000)
    sums = []
    for number in range(10):
        buffer.fill_(number)
        sums.append(buffer.to("lazy").sum())
        lazy_backend.mark_step()
    assert [one.item() for one in sums] == [1000.0 * number for number in range(10)]

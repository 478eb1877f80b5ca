"""Serve a model to many threads while its weights are swapped.

    python examples/serve.py

It shows that `lazy_backend.serve` records a module once and is then called from any thread, and that a request sees the
old weights or the new ones, never a mix. Every answer is compared with what eager PyTorch gives for some set of weights
that was current while the request ran.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import lazy_backend

WIDTH = 64
BATCH = 8


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)).eval()


@dataclass
class Versions:
    """Sets of weights, what eager answers with each, and which of them were swapped in so far."""

    models: Sequence[nn.Module]
    requests: Sequence[Tensor]
    answers: Sequence[Sequence[Tensor]] = field(init=False)
    begun: int = 0  # the latest version that a swap began with
    done: int = 0  # the latest that a swap has finished with

    def __post_init__(self) -> None:
        with torch.no_grad():
            self.answers = [[model(request) for request in self.requests] for model in self.models]

    def matches(self, number: int, answer: Tensor, first: int, last: int) -> bool:
        """Whether `answer` to a request is that of one version from `first` to `last`."""
        candidates = [self.answers[version][number] for version in range(first, last + 1)]
        return any(torch.allclose(answer, candidate, atol=1e-5) for candidate in candidates)


@dataclass(frozen=True)
class Outcome:
    requests: int
    swaps: int
    wrong: int
    frames: int
    seconds: float


def run(threads: int, requests: int, swaps: int) -> Outcome:
    """Send `requests` from each of several threads while weights are swapped, and check every answer."""
    versions = Versions(
        [build_model(seed) for seed in range(swaps + 1)], [torch.randn(BATCH, WIDTH) for _ in range(16)]
    )
    served = lazy_backend.serve(versions.models[0], versions.requests[0])
    wrong = [0] * threads

    def ask(thread: int) -> None:
        for count in range(requests):
            number = (thread + count) % len(versions.requests)
            first = versions.done
            answer = served(versions.requests[number])
            wrong[thread] += not versions.matches(number, answer, first, versions.begun)

    def swap() -> None:
        for version in range(1, swaps + 1):
            versions.begun = version
            served.swap_weights(versions.models[version].state_dict())
            versions.done = version
            time.sleep(0.001)

    workers = [threading.Thread(target=ask, args=(thread,)) for thread in range(threads)]
    workers.append(threading.Thread(target=swap))
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    return Outcome(threads * requests, swaps, sum(wrong), served.num_execution_frames, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model to many threads while its weights are swapped.")
    parser.add_argument("--threads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="per thread (default: %(default)s)")
    parser.add_argument("--swaps", type=int, default=100, help="(default: %(default)s)")
    chosen = parser.parse_args()
    outcome = run(chosen.threads, chosen.requests, chosen.swaps)
    rate = outcome.requests / outcome.seconds
    print(f"{outcome.requests} requests from {chosen.threads} threads, {rate:,.0f} per second")
    print(f"{outcome.swaps} swaps of weights, {outcome.wrong} wrong answers, {outcome.frames} execution frames")
    if outcome.wrong:
        raise SystemExit("some answers were those of no set of weights")


if __name__ == "__main__":
    main()

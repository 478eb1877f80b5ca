"""A training whose step is compiled, or found on disk: it ends with status 0 if its losses are eager's.

    PYTHONPATH=tools python tools/soak_test/compiled.py 32

In: the width of the model. Killed at any moment by the soak, it must leave a cache that the next one can use. Where it
catches interrupts, it starts its training over.
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch

import lazy_backend
from lazy_backend import metrics
from soak_test.run import show_stacks_on_signal
from soak_test.training import PROGRAMS, Training, Twin

TOLERANCE = 1e-2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train until the step is compiled, and check the losses.")
    parser.add_argument("width", type=int)
    parser.add_argument("--catches-interrupts", action="store_true", help="go on after KeyboardInterrupt")
    return parser.parse_args()


def train(width: int) -> list[torch.Tensor]:
    """Losses of the first steps, with a wait for the compiler in the middle."""
    training = Training(PROGRAMS["mlp"], "lazy", width)
    losses = [training.step() for _ in range(8)]
    lazy_backend.wait_for_compiles(240.0)
    return lazy_backend.to_cpu(losses + [training.step() for _ in range(8)])


def main(width: int, catches_interrupts: bool) -> int:
    show_stacks_on_signal()
    twin = Twin("mlp", width)
    losses: list[torch.Tensor] = []
    while not losses:
        try:
            losses = train(width)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows is no training
        except KeyboardInterrupt:
            if not catches_interrupts:
                raise
    for number, loss in enumerate(losses):
        if not abs(loss.item() - twin.loss(number)) <= TOLERANCE:
            print(f"step {number}: {loss.item()}, in eager {twin.loss(number)}")
            return 1
    plans = {state.plan for state in lazy_backend.computation.get_debug_states().values()}
    if "optimized" not in plans:
        print(f"nothing is compiled: {plans}\n{metrics.short_report()}")
        return 1
    damaged = metrics.counter_value("DiskCacheCorrupt")
    if damaged:
        print(f"{damaged} damaged entries in the cache")
    return min(damaged, 1)


if __name__ == "__main__":
    chosen = parse_arguments()
    sys.exit(main(chosen.width, chosen.catches_interrupts))

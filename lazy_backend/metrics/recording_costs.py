"""Whether recording pays: when the calls of a device run at once instead, and when they are recorded again.

In: what each stretch of a program took, and what cut it. Out: `Aside.is_on`, which says how the next stretch runs.

Note [Stepping aside]
Some programs cannot gain: an adaptive solver reads its error every few operators, a batch of graphs has sizes that were
never seen. There a device steps aside: its calls run at once, in C++, for 2 to 5 µs more than in eager. It does so for
whole stretches, from one end of a step to the next, or of `_SHORT` cuts where no step ends. Stretches are told apart by
what ended the one before, so that training and evaluation are judged each by itself.

Nothing is judged but stretches that were cut by reads, or in which calls were seen for the first time. After several of
them in a row, with no other in between, the next two run at once, and seconds per call are compared: of what was
recorded the better of the latest, of what ran at once the best. If running at once takes less than nine tenths, it goes
on. Otherwise the next comparison waits for twice as many stretches. Recording is tried again after so many stretches
that it costs a twentieth of the time, then after twice as many, and at once where a stretch is of another kind: where
it reads nothing, or has four times as many calls for each read, or a quarter. A trial that is neither cut nor unseen
says that the program has settled: it is recorded from then on.

First steps and programs whose compile is under way are so given time: unseen stretches count half, and all count an
eighth while a compile is. Never aside: where C++ does not run calls, on a GPU, with several devices or ranks, with
functions, modules or optimizers that the user has captured, in strict mode, under `debug` or a profiler, and while
nothing may run. The models and optimizers that trainers capture run as written while a device is aside; a call that a
jump stands for counts as recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

from lazy_backend import metrics

# Evidence of so many cut stretches leads to a comparison; at most so many after some that failed.
_EVIDENCE, _MOST_EVIDENCE = 8.0, 1024.0
# Stretches of a comparison.
_COMPARED = 2
# The part of the time that recording may cost while it is tried, and how often that wait may double.
_COST, _MOST_DOUBLED = 0.05, 6
# Running at once must take less than this part of what recording takes.
_LESS = 0.9
# Cuts of a stretch where no step ends.
_SHORT = 32
# Calls of a stretch, or of each of its reads, as a multiple of what was usual, from which it is of another kind.
_ANOTHER = 4.0


class StretchCosts:
    """The stretches that begin after ends of one kind."""

    def __init__(self) -> None:
        self.recorded: deque[float] = deque(maxlen=4)  # seconds per call
        self.at_once: deque[float] = deque(maxlen=4)
        self.evidence = 0.0
        self.needed = _EVIDENCE
        self.doubled = 0
        self.is_read = False  # whether reads cut the stretches that were recorded
        self.usual = 0.0  # calls, of each read if there are reads
        self.left = 0  # stretches before the next comparison; of one, while `is_trial`
        self.is_on = self.is_trial = False
        self.is_given_up = False  # whether recording is, but for trials

    def note_recorded(self, seconds: float, calls: int, cuts: int, unseen: int, is_compiling: bool) -> None:
        """Note a stretch that was recorded."""
        if not cuts and not unseen:
            self.evidence, self.is_trial = 0.0, False
            if self.is_given_up:
                self._take_back("it has settled")
            return
        self.recorded.append(seconds / calls)
        self.is_read, self.usual = cuts > 0, calls / max(1, cuts)
        if not self.is_trial:
            self.evidence += (1.0 if cuts else 0.5) * (0.125 if is_compiling else 1.0)
            if self.evidence >= self.needed:
                self._run_at_once(_COMPARED)
                self.at_once.clear()
            return
        self.left -= 1
        if self.left <= 0:
            self.is_trial = False
            self._compare()

    def note_at_once(self, seconds: float, calls: int, reads: int) -> None:
        """Note a stretch whose calls ran at once."""
        size = calls / max(1, reads if self.is_read else 0)
        is_alike = (reads > 0 or not self.is_read) and self.usual / _ANOTHER < size < self.usual * _ANOTHER
        if not is_alike:
            self._record(tries=True)
            return
        self.at_once.append(seconds / calls)
        self.left -= 1
        if self.left <= 0:
            if self.is_trial:
                self.is_trial = False
                self._compare()
            else:
                self._record(tries=True)

    def _compare(self) -> None:
        # nothing was recorded if another thread ended a stretch in between
        slow, fast = max(sorted(self.recorded)[:_COMPARED], default=0.0), min(self.at_once, default=None)
        if fast is None or not fast < _LESS * slow:
            self.needed = min(2 * self.needed, _MOST_EVIDENCE)
            self._record(tries=False)
            self._take_back("it takes no longer")
            return
        if not self.is_given_up:
            self.is_given_up = True
            metrics.increment(f"SteppedAside: {self._kind()}")
        self._run_at_once(int(_COMPARED * slow / fast / _COST) << self.doubled)
        self.is_trial = False
        self.doubled = min(self.doubled + 1, _MOST_DOUBLED)

    def _kind(self) -> str:
        return "cut by reads" if self.is_read else "with calls seen for the first time"

    def _take_back(self, reason: str) -> None:
        if self.is_given_up:
            self.is_given_up = False
            metrics.increment(f"RecordedAgain: {reason}")

    def describe(self) -> str:
        """Why stretches run at once or are recorded, and what a call takes."""
        recorded, at_once = (f"{min(times) * 1e6:.1f}" if times else "?" for times in (self.recorded, self.at_once))
        now = "they run at once" if self.is_given_up else "they are recorded"
        return f"{self._kind()}: {recorded} µs a call recorded, {at_once} at once, so {now}"

    def _run_at_once(self, stretches: int) -> None:
        self.is_on = self.is_trial = True
        self.left, self.evidence = stretches, 0.0

    def _record(self, tries: bool) -> None:
        self.is_on, self.is_trial = False, tries
        self.left, self.evidence = _COMPARED, 0.0
        if tries:
            self.recorded.clear()


class Aside:
    """Whether the calls of one device run at once. See Note [Stepping aside]."""

    # () -> calls that reached C++, and reads of those that ran at once there; None where C++ runs no calls
    count: Callable[[], tuple[int, int]] | None = None

    def __init__(self) -> None:
        self.is_on = False
        self.cuts = self.unseen = self.jumped = 0  # of this stretch; calls that jumps stood for
        self.stretches = self.calls = 0  # that ran at once, in all
        self.accounts: dict[str, StretchCosts] = {}
        self._account = StretchCosts()
        self._most = _SHORT
        self._begin, self._counted = 0.0, (0, 0)

    def is_long(self) -> bool:
        """Whether a stretch is over, though no step has ended."""
        reads = Aside.count()[1] - self._counted[1] if self.is_on and Aside.count is not None else self.cuts
        return reads >= self._most

    def end(self, cause: str, is_step: bool, is_compiling: Callable[[], bool], may_be_on: Callable[[], bool]) -> None:
        """End a stretch, for `cause`, and decide how the next one runs."""
        now, counted = perf_counter(), (0, 0) if Aside.count is None else Aside.count()
        calls, reads = counted[0] - self._counted[0] + self.jumped, counted[1] - self._counted[1]
        seconds = now - self._begin
        if is_step:
            self._most = max(_SHORT, 4 * max(self.cuts, reads))
        if calls > 0 and self._begin:
            if self.is_on:
                self._account.note_at_once(seconds, calls, reads)
                self.stretches += 1
                self.calls += calls
                metrics.observe_together({"StretchAtOnce": 1, "CallAtOnce": calls})
            else:
                is_judged = self.cuts + self.unseen > 0
                self._account.note_recorded(seconds, calls, self.cuts, self.unseen, is_judged and is_compiling())
        self._account = self.accounts.get(cause) or self.accounts.setdefault(cause, StretchCosts())
        self.is_on = self._account.is_on and Aside.count is not None and may_be_on()
        self.cuts = self.unseen = self.jumped = 0
        self._begin, self._counted = perf_counter(), counted

    def describe(self) -> str:
        """What ran at once, and for each kind of stretch that was compared, why and what became of it."""
        lines = [f"stepped aside: {self.calls} calls in {self.stretches} stretches of the program ran at once"]
        accounts = list(self.accounts.items())  # at once, as another thread may add one
        compared = [(cause, account) for cause, account in accounts if account.at_once]
        lines += [f"    stretches after {cause}, {account.describe()}" for cause, account in compared]
        return "\n".join(lines)

    def stop(self) -> None:
        """Record from now on, whatever this stretch has shown."""
        self.is_on, self._begin = False, 0.0

"""Report compiles to users: records, counters, warnings, progress."""

from __future__ import annotations

import sys

from lazy_backend import metrics
from lazy_backend.diagnostics.debug_log import describe_report, print_compile
from lazy_backend.diagnostics.reasons import record_compile
from lazy_backend.errors import CompileWarning
from lazy_backend.errors.sites import warn_user
from lazy_backend.execution.rules import per_thread
from lazy_backend.lowering.checks.proof import PlanRefused
from lazy_backend.lowering.compilation.background import WorkerDied
from lazy_backend.lowering.ir.functional import NotFunctional
from lazy_backend.lowering.plans.specialise import CompileReport
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import compile_backend

# What counts the verdicts of trials.
_TRIALS = {
    "agreed": "PlanAgreed",
    "suspected": "PlanSuspected",
    "refused": "PlanRefused",
    "unverified": "PlanUnverified",
}


class CompileReports:
    """Receives the reports of the compiler's side.

    After the death of the compiler's process, users are warned once until a compile succeeds.
    """

    def __init__(self) -> None:
        self._worker_died = False

    def clear(self) -> None:
        """Warn again at the next death of the compiler's process."""
        self._worker_died = False

    def report(self, report: CompileReport) -> None:
        if report.stage in _TRIALS and report.error is None:
            metrics.observe_in_run({_TRIALS[report.stage]: 1}, TrialTime=report.seconds)
            return
        nodes = len(report.graph.nodes)
        if config.explain:
            found = record_compile(report)
            record = per_thread.record
            if record is not None and found not in record.compiles:
                record.compiles = (*record.compiles, found)
        if config.debug:
            print_compile(report)
        if report.error is None and report.stage != "repaired":
            self._count_compile(report)
            return
        if report.stage == "limited":
            metrics.increment("ShapeLimitPassed")
            warn_user(str(report.error), CompileWarning)
            return
        if isinstance(report.error, NotFunctional):
            self._warn_of_declined(report.error, nodes)
            return
        if report.stage == "repaired":
            metrics.increment("PlanRepaired")
            if report.error is not None:
                self._warn_of_repaired(report.error, nodes)
            return
        if isinstance(report.error, PlanRefused):
            if report.stage == "failed":  # an earlier process has found it
                metrics.increment("PlanRefused")
            self._warn_of_refused(report.error, nodes)
            return
        metrics.observe("CompileTime", report.seconds)
        metrics.increment("CompileFailed")
        if report.after_blocks:
            return  # the graph stays compiled as it was
        if isinstance(report.error, WorkerDied):  # not the graph's fault: one warning until a compile succeeds
            if self._worker_died:
                return
            self._worker_died = True
        cause = str(report.error).strip() or type(report.error).__name__
        cause = f"{type(report.error).__name__}: {cause[:500]}"
        remedy = "install a C++ compiler (g++), or name one with CXX; " if "No working C++ compiler" in cause else ""
        warn_user(
            f"a graph of {nodes} nodes could not be compiled with backend {compile_backend()!r} and is "
            f"interpreted from now on: {cause}\n  results are the same, only slower; "
            f'{remedy}lazy_backend.config.compile = "off" turns compiling off',
            CompileWarning,
        )

    @staticmethod
    def _warn_of_declined(declined: NotFunctional, nodes: int) -> None:
        metrics.increment("CompileDeclined")
        metrics.increment(f"CompileDeclined: {declined.reason} at {declined.site}")
        warn_user(
            f"a graph of {nodes} nodes is not compiled but interpreted: {declined}\n"
            "  compilers get such a write wrong; results are eager's, only slower. Write into a clone()",
            CompileWarning,
        )

    @staticmethod
    def _warn_of_refused(refused: PlanRefused, nodes: int) -> None:
        warn_user(
            f"the compiled form of a graph of {nodes} nodes computes something else than its operators, and is not "
            f"used:\n  {refused}\n  results are eager's, only slower: the graph is interpreted. This is a fault of the "
            'compiler; lazy_backend.config.verify_compiled = "off" would use its results',
            CompileWarning,
        )

    @staticmethod
    def _warn_of_repaired(repaired: Exception, nodes: int) -> None:
        warn_user(
            f"the compiler gets a graph of {nodes} nodes wrong, and its compiled form was not used:\n  {repaired}\n"
            "  PyTorch's own kernel computes this from now on, and the rest is compiled: results are eager's. This is "
            "a fault of the compiler",
            CompileWarning,
        )

    def _count_compile(self, report: CompileReport) -> None:
        if report.stage == "compiled":
            self._worker_died = False
            metrics.increment("Compile")
            metrics.observe("CompileTime", report.seconds)
        elif report.stage == "loaded":
            metrics.observe("LoadTime", report.seconds)
        if report.plan is not None and report.plan.why_python:
            metrics.increment(f"RunFromPython: {report.plan.why_python}")
        for check in () if report.plan is None else report.plan.left_out:
            metrics.increment(f"CheckLeftOut: {check}")
        shown = sys.stderr.isatty() if config.progress is None else config.progress
        if shown and not config.debug:
            print(f"lazy_backend: {describe_report(report)}", file=sys.stderr)

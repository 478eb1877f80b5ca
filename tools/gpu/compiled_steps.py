"""Steps of `gpu/training.py`, tiny: compiled for a GPU that is not there, and run by Triton's interpreter.

In: the name of a workload and of a target, in a process for each call. Out: figures for `cuda_compile.py`. Steps are
recorded by CUDA's rules, with values on the CPU. Kernels of libraries (matrix products, convolutions, attention) are
the CPU's, where anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from shared.tables import Result
from torch.nn.attention import SDPBackend

import lazy_backend
from gpu import absent
from gpu.training import Scale, make_gpu_training
from lazy_backend import config
from lazy_backend.execution.computations import compile_policy, current_environment
from lazy_backend.execution.run import backing_tensor
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.compilation import background
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.portable import StoredGraph, from_bytes, to_bytes
from lazy_backend.lowering.plans.cached_computation import make_key
from lazy_backend.lowering.plans.pending_compile import PendingCompile
from lazy_backend.lowering.plans.specialise import GraphCompiler
from lazy_backend.lowering.plans.trial import Trial
from lazy_backend.recording import attention
from lazy_backend.recording.inference import Inference
from lazy_backend.tensors.contexts import contexts

_CPU = torch.device("cpu")
_ELF, _MACHINE = b"\x7fELF", (190).to_bytes(2, "little")  # EM_CUDA

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step as it is recorded on the target, and its inputs on the CPU."""

    graph: Graph
    inputs: Sequence[torch.Tensor]
    constants: Sequence[float]
    seeds: Sequence[int]

    def pending(self) -> PendingCompile:
        """Its compile, with the floats as inputs that can be: as it is once the optimizer's have changed."""
        promoted = GraphCompiler(StoredGraph(self.graph), lambda report: None)._promotable_constants()
        request = CompileRequest.of(self.graph, self.constants, "inductor", promoted)
        return PendingCompile(request, compile_policy(), make_key(self.graph, current_environment()))


def compiled(name: str, target: str) -> Result:
    """Have the compiler's process compile the step, and load the artefact up to the driver."""
    step = _recorded(name, target)
    program = background._program

    def program_without_driver(*arguments: Any) -> str:
        own = f"from gpu import absent; absent.install({target!r})\nfrom lazy_backend"
        return program(*arguments).replace("from lazy_backend", own, 1)

    background._program = program_without_driver
    pending = step.pending()
    pending.advance_to_the_end()
    pending.wait()
    if pending.error is not None:
        raise pending.error
    store, key = pending.policy.store, pending.artefact_key
    assert store is not None
    assert key is not None
    artefact = store.get(key)
    assert artefact is not None
    about = absent.TARGETS[target]
    named = (f"{about['name']} {about['major']}.{about['minor']}", f'"cuda driver": {absent.DRIVER}')
    codes = [(name, code) for name, code in absent.loaded if code[:4] == _ELF and code[18:20] == _MACHINE]
    return {
        "nodes": len(step.graph.nodes),
        "kernels": sorted({one.decode() for one in re.findall(rb"\n(triton_\w+) = async_compile\.triton\(", artefact)}),
        "loaded": sorted({name for name, _ in codes}),
        "cubins": len(codes),  # of all configurations
        "unnamed": [part for part in named if part not in str(key.parts)],
        "kib": len(artefact) / 1024,
        "seconds": pending.seconds,
    }


def interpreted(name: str, target: str) -> Result:
    """Load the same artefact from the cache, for Triton's interpreter, and try it beside the graph's operators."""
    step = _recorded(name, target)
    absent.interpret()
    pending = step.pending()
    pending.advance()
    plan = pending.plan
    if plan is None:
        raise RuntimeError("the artefact was not found by its key, or could not be loaded")
    plan._device = _CPU  # of floats that are inputs
    on_cpu = from_bytes(to_bytes(step.graph).replace(b'"cuda:0"', b'"cpu"'))
    verdicts: list[str] = []
    trial = Trial(plan, (), SerialGraphExecutor(on_cpu), lambda verdict, seconds: verdicts.append(verdict))
    begin = perf_counter()
    while verdicts[-1:] in ([], ["suspected"]):
        trial.execute([one.clone() for one in step.inputs], step.constants, step.seeds)
    return {
        "ran": sorted(set(absent.interpreted)),
        "results": len(on_cpu.outputs) + len(on_cpu.mutated_inputs()),
        "verdict": verdicts[-1],
        "refusal": str(plan.proof.refusal or ""),
        "seconds": perf_counter() - begin,
    }


def _recorded(name: str, target: str) -> RecordedStep:
    """The second step, whose optimizer has its state. The first one runs on the CPU, to give values to all inputs."""
    absent.install(target)
    config.device, config.mark_steps, config.first_sight, config.verify_compiled = "cuda", "by hand", "record", "off"
    context = contexts.get_device_context(0)
    gpu, context.backing = context.backing, _CPU
    training = make_gpu_training(name, "lazy", Scale(tiny=True))
    training.step()
    lazy_backend.mark_step(wait=True)
    context.forget_paths()
    context.fakes.clear()
    context.new_trace()
    context.backing = gpu
    _choose_on_the_host()
    training.step()
    trace, collection = executor.collect_sync_tensors(context, "cuda_compile")
    data = executor.computations.run_post_order(context, collection.indices)
    context.backing = _CPU  # for what still runs here
    places = [(trace.inputs[one.index], one.base) for one in data.parameters]
    inputs = [backing_tensor(given.storage if base else given) for given, base in places]
    return RecordedStep(
        data.graph, inputs, [trace.constants[one] for one in data.constants], [trace.seeds[one] for one in data.seeds]
    )


def _choose_on_the_host() -> None:
    """Record without the driver: calls are probed on the CPU, and attention is flash attention, computed there."""
    read = Inference._meta

    def read_for_cpu(self: Inference, arg: Any) -> Any:
        found = read(self, arg)
        if isinstance(found, torch.device):
            return _CPU
        return (found[0], _CPU) if isinstance(found, tuple) else found

    Inference._meta = read_for_cpu  # type: ignore[method-assign]
    attention._choice = lambda *args, **kwargs: SDPBackend.FLASH_ATTENTION
    _library.impl("_flash_attention_forward", _flash, "CPU")
    _library.impl("_flash_attention_backward", _flash_backward, "CPU")


# ----- flash attention of CUDA, by the CPU's kernel. There, heads come before the sequence

_library = torch.library.Library("aten", "IMPL")


def _flash(q: Any, k: Any, v: Any, *rest: Any, scale: float | None = None, **options: Any) -> tuple[torch.Tensor, ...]:
    _, _, _, _, dropout_p, is_causal, _ = rest
    given = [one.transpose(1, 2) for one in (q, k, v)]
    output, sums = aten._scaled_dot_product_flash_attention_for_cpu(*given, dropout_p, is_causal, scale=scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return torch.empty_like(q).copy_(output.transpose(1, 2)), sums.contiguous(), state, state[0].clone(), q.new_empty(0)


def _flash_backward(
    gradient: Any,
    q: Any,
    k: Any,
    v: Any,
    output: Any,
    sums: Any,
    *rest: Any,
    scale: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    _, _, _, _, dropout_p, is_causal, _, _ = rest
    given = [one.transpose(1, 2) for one in (gradient, q, k, v, output)]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = backward(*given, sums, dropout_p, is_causal, scale=scale)
    return tuple(torch.empty_like(one).copy_(g.transpose(1, 2)) for one, g in zip((q, k, v), gradients, strict=True))

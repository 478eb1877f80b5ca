"""A lazy-tensor backend for PyTorch: whole steps as cached, compiled graphs.

    import torch, lazy_backend

    model = torch.nn.Linear(4, 2).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, target in data:
        loss = torch.nn.functional.mse_loss(model(batch.to("lazy")), target.to("lazy"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lazy_backend.mark_step()

Operators on `device="lazy"` are recorded, not run. `mark_step()` cuts the recorded graph, finds its computation in a
cache, and runs the computation.
"""

from pathlib import Path as _Path

# In a checkout, `lowering` and `cache` are beside this folder; installed, they are in it, by pyproject.toml.
# The parent folder is searched only in a checkout of this project: beside a copy there may be an unrelated `cache`.
_folder = _Path(__file__).resolve().parent
_project = _folder.parent / "pyproject.toml"
if not (_folder / "lowering").is_dir() and _project.is_file() and 'name = "lazy_backend"' in _project.read_text():
    __path__.append(str(_folder.parent))

from lazy_backend.ports.table import check_essential as _check_essential

_check_essential()  # before other modules bind names that are missing

from lazy_backend import cache, computation, debug, ir_cache, metrics
from lazy_backend.api import (
    add_step_closure,
    allow_execution,
    eager_mode,
    get_tensor_id,
    is_lazy,
    manual_seed,
    mark_step,
    memory_stats,
    register_device,
    save,
    step,
    strict,
    sync,
    sync_multi,
    to_cpu,
    wait_device_ops,
    wait_for_compiles,
)
from lazy_backend.archives import transfer
from lazy_backend.capturing import capture, captures, uncapture
from lazy_backend.compat import torch_lazy
from lazy_backend.compat.installation import install
from lazy_backend.compat.lazy_core import redirect_torch_lazy
from lazy_backend.diagnostics.difference import Difference
from lazy_backend.diagnostics.explanation import Explanation, explain
from lazy_backend.diagnostics.history import CompileRecord, SyncRecord
from lazy_backend.diagnostics.page import report
from lazy_backend.diagnostics.progress import progress
from lazy_backend.errors import (
    CacheError,
    CacheWarning,
    CaptureError,
    CaptureWarning,
    CompileWarning,
    DeviceError,
    ExecutionError,
    ExecutionNotAllowedError,
    GraphCutWarning,
    LazyBackendError,
    LazyBackendWarning,
    PoisonedTensorError,
    StrictModeError,
    TooManyGraphsError,
    TooManyRequestsError,
)
from lazy_backend.lowering.devices.interface import BackingDevice
from lazy_backend.lowering.plans.profiling import GraphExecutorState
from lazy_backend.lowering.serving.executor import ProfileMetrics
from lazy_backend.lowering.serving.weights import InputError
from lazy_backend.serve import Served, load_served, serve
from lazy_backend.settings import config
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tiers import get_bailout_depth, get_fusion_strategy, set_bailout_depth, set_fusion_strategy

__version__ = "0.1.0"

__all__ = [
    "BackingDevice",
    "CacheError",
    "CacheWarning",
    "CaptureError",
    "CaptureWarning",
    "CompileRecord",
    "CompileWarning",
    "DeviceError",
    "Difference",
    "ExecutionError",
    "ExecutionNotAllowedError",
    "Explanation",
    "GraphCutWarning",
    "GraphExecutorState",
    "InputError",
    "LazyBackendError",
    "LazyBackendWarning",
    "LazyTensor",
    "PoisonedTensorError",
    "ProfileMetrics",
    "Served",
    "StrictModeError",
    "SyncRecord",
    "TooManyGraphsError",
    "TooManyRequestsError",
    "add_step_closure",
    "allow_execution",
    "cache",
    "capture",
    "captures",
    "computation",
    "config",
    "debug",
    "eager_mode",
    "explain",
    "get_bailout_depth",
    "get_fusion_strategy",
    "get_tensor_id",
    "ir_cache",
    "is_lazy",
    "load_served",
    "manual_seed",
    "mark_step",
    "memory_stats",
    "metrics",
    "progress",
    "register_device",
    "report",
    "save",
    "serve",
    "set_bailout_depth",
    "set_fusion_strategy",
    "step",
    "strict",
    "sync",
    "sync_multi",
    "to_cpu",
    "uncapture",
    "wait_device_ops",
    "wait_for_compiles",
]

install()
cache.export, cache.load = transfer.export, transfer.load
redirect_torch_lazy(mark_step, wait_device_ops)
if config.torch_lazy:
    torch_lazy.install()

"""One process that runs all eager programs and writes down what it saw.

    python tests/ground/observe.py OUT.json [--lazy-first]

In: the name of a file. Out: in that file, as JSON: `results` bit for bit, `warnings`, `before` and `after` (see
`fingerprints`), the names of all modules. With `--lazy-first` a small training on the lazy device comes first.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

_registered: list[str] = []
_warned: list[tuple[str, str, str]] = []


def _watch() -> None:
    """Before torch is imported: remember what registers for exit and fork, and show no warning but keep it."""
    register, at_fork = atexit.register, os.register_at_fork

    def keep(function: Any, *args: Any, **kwargs: Any) -> Any:
        _registered.append(f"exit: {function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}")
        return register(function, *args, **kwargs)

    def keep_fork(**hooks: Any) -> None:
        for when, hook in hooks.items():
            name = getattr(hook, "__qualname__", type(hook).__name__)
            _registered.append(f"fork, {when}: {getattr(hook, '__module__', '')}.{name}")
        at_fork(**hooks)

    atexit.register, os.register_at_fork = keep, keep_fork  # type: ignore[assignment]
    warnings.simplefilter("always")
    warnings.showwarning = _keep_warning


def _keep_warning(message: Any, category: type, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    _warned.append((category.__name__, str(message), f"{Path(filename).name}:{lineno}"))


def encode(value: Any) -> Any:
    """A result as JSON, bit for bit."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return {"meta": list(value.shape), "dtype": str(value.dtype)}
        if value.is_nested or value.is_quantized:
            return str(value)
        if value.layout is not torch.strided:
            return [str(value.layout), encode(value.to_dense())]
        plain = value.detach().as_subclass(torch.Tensor)
        # clone: one element of odd strides counts as contiguous, and then cannot be seen as bytes
        flat = plain.resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
        bits = flat.view(torch.uint8).numpy().tobytes()
        return {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "requires_grad": value.requires_grad,
            "bits": bits.hex(),
        }
    if isinstance(value, dict):
        return {str(key): encode(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [encode(inner) for inner in value]
    if isinstance(value, float):
        return value.hex()
    return value if isinstance(value, str | int | bool | type(None)) else str(value)


def train_on_the_lazy_device() -> float:
    """Three steps, under autocast too, and all that was recorded is run."""
    import torch

    import lazy_backend

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(6, 4, device="lazy")
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("lazy", dtype=torch.bfloat16, enabled=step > 0):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        lazy_backend.mark_step()
    found = float(loss)
    lazy_backend.wait_device_ops()
    return found


def _run(programs: dict[str, Any]) -> dict[str, Any]:
    import torch

    results: dict[str, Any] = {}
    for name, run in programs.items():
        torch.manual_seed(0)
        _warned.clear()
        begin = time.perf_counter()
        try:
            result = encode(run())
        except Exception as error:
            result = {"raised": f"{type(error).__name__}: {error}"[:2000]}
        results[name] = {"result": result, "warnings": list(_warned), "seconds": time.perf_counter() - begin}
    return results


def main() -> None:
    """Observe, in the order in which the file lists it."""
    out, lazy_first = sys.argv[1], "--lazy-first" in sys.argv
    importlib.metadata.entry_points(group="torch.backends")  # torch looks only where autoloading is on
    _watch()
    import torch

    imported = list(_warned)
    sys.path.insert(0, str(Path(__file__).parent))
    import eager_programs
    import fingerprints

    seen: dict[str, Any] = {"torch": torch.__version__, "import": imported}
    if lazy_first:
        seen["loss"] = train_on_the_lazy_device()
    else:
        seen["before"] = fingerprints.of_hooks()
    seen["programs"] = _run(eager_programs.programs)
    if not lazy_first:
        seen["after"] = fingerprints.of_everything()
        seen["calls"] = fingerprints.calls_and_tracebacks()
    seen["modules"] = sorted(sys.modules)
    seen["registered"] = _registered
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

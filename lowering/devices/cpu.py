"""The CPU as a backing device: its memory is the host's, and its kernels are done when they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from lazy_backend.lowering.devices.cast_lists import ON_CPU
from lazy_backend.lowering.devices.interface import BackingDevice, DeviceMemory
from lazy_backend.ports.dispatcher import attention_choice


class CpuDevice(BackingDevice):
    """The processor; how many devices it backs is a setting."""

    compile_backend = "inductor"
    compiles_elsewhere = True
    autocast_dtype = torch.bfloat16
    autocast_rules = ON_CPU

    def device(self, index: int) -> torch.device:
        return torch.device(self.name)

    def capability(self, device: torch.device) -> str:
        return torch.backends.cpu.get_cpu_capability()

    def synchronize(self, device: torch.device) -> None:
        pass

    def memory(self, device: torch.device) -> DeviceMemory | None:
        return None  # no allocator counts

    def autocast_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def attention(self, operands: Sequence[Any], options: Mapping[str, Any]) -> SDPBackend:
        return SDPBackend(attention_choice(*operands, **options))

    def attention_switches(self) -> tuple[Any, ...]:
        return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()  # of the CPU, too


CPU = CpuDevice("cpu")

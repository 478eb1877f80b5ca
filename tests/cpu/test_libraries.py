"""peft, in a process of its own; skipped where it is not installed. Trainers are in tests/trainers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from harness import run_python

MODELS = """
import torch, lazy_backend
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

def gpt():
    set_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes))
"""


def run(code: str, folder: Path, *libraries: str) -> str:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    settings = {"LAZY_BACKEND_BACKEND": "eager", "LAZY_BACKEND_COMPILE": "foreground", "HF_HUB_OFFLINE": "1"}
    return run_python(MODELS + code, folder, ACCELERATE_TORCH_DEVICE="lazy", **settings)


def test_an_adapter_of_peft_is_saved(tmp_path: Path) -> None:
    code = """
from peft import LoraConfig, PeftModel, get_peft_model

model = get_peft_model(gpt(), LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)).to("lazy")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
tokens = torch.randint(64, (4, 16), device="lazy")
for _ in range(4):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    lazy_backend.mark_step()
model.save_pretrained("adapter")
expected = model.eval()(input_ids=tokens).logits
moved_after, moved_before = PeftModel.from_pretrained(gpt(), "adapter"), gpt().to("lazy")
for loaded in (moved_after.to("lazy"), PeftModel.from_pretrained(moved_before, "adapter")):
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, expected)
print("same")
"""
    assert "same" in run(code, tmp_path, "peft", "transformers")

"""Libraries that train, save and load. Each in a process of its own; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from harness import run_python

MODELS = """
import torch, lazy_backend
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, set_seed

def gpt():  # its output weights are tied to its embedding
    set_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes))

def bert():
    set_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    return BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=32))
"""


def run(code: str, folder: Path, *libraries: str) -> str:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    settings = {"LAZY_BACKEND_BACKEND": "eager", "LAZY_BACKEND_COMPILE": "foreground", "HF_HUB_OFFLINE": "1"}
    return run_python(MODELS + code, folder, ACCELERATE_TORCH_DEVICE="lazy", **settings)


@pytest.mark.parametrize("model", ["gpt", "bert"])
@pytest.mark.parametrize("size", ["5GB", "5KB"])
def test_a_model_is_saved_and_loaded(model: str, size: str, tmp_path: Path) -> None:
    code = f"""
model = {model}().to("lazy")
model.save_pretrained("saved", max_shard_size="{size}")
for device in ("lazy", "cpu"):
    loaded = type(model).from_pretrained("saved", device_map=device)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(x.device.type == device for x in theirs.values())
    assert all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in ours)
print("same")
"""
    assert "same" in run(code, tmp_path, "transformers")


def test_the_trainer_resumes_with_the_same_losses(tmp_path: Path) -> None:
    code = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Watch(TrainerCallback):
    def __init__(self): self.losses = {}
    def on_step_end(self, *args, **kwargs): lazy_backend.mark_step()
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs: self.losses[state.global_step] = logs["loss"]

tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in tokens]

def train(resume):
    watch = Watch()
    arguments = TrainingArguments(
        "run", max_steps=8, save_steps=4, logging_steps=1, per_device_train_batch_size=4, report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = Trainer(gpt(), arguments, train_dataset=rows, callbacks=[watch])
    assert trainer.model.lm_head.weight.is_lazy
    trainer.train(resume_from_checkpoint=resume)
    return watch.losses

whole = train(None)
assert len(whole) == 8
assert train("run/checkpoint-4") == {step: loss for step, loss in whole.items() if step > 4}
print("same")
"""
    assert "same" in run(code, tmp_path, "transformers", "accelerate")


def test_accelerate_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    code = """
from accelerate import Accelerator

def made():
    torch.manual_seed(0)
    accelerator = Accelerator()
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return accelerator, accelerator.prepare(model, optimizer, schedule)

def train(accelerator, prepared, first, last):
    model, optimizer, schedule = prepared
    losses = []
    for number in range(first, last):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).to(accelerator.device)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        lazy_backend.mark_step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]

accelerator, prepared = made()
assert accelerator.device.type == "lazy"
train(accelerator, prepared, 0, 5)
accelerator.save_state("state")
expected = train(accelerator, prepared, 5, 10)
accelerator, prepared = made()
accelerator.load_state("state")
assert train(accelerator, prepared, 5, 10) == expected
print("same")
"""
    assert "same" in run(code, tmp_path, "accelerate", "transformers")


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

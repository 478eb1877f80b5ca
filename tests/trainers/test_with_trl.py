"""trl's SFTTrainer and DPOTrainer with arguments of ours: eager's losses; the reads that trl makes in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from words import VOCABULARY, text, tokenizer

import lazy_backend

STEPS = 12


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    # dropout draws other numbers than on the CPU
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": len(VOCABULARY), "n_positions": 16}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=1, pad_token_id=0))


@dataclass(frozen=True)
class Trained:
    logs: list[dict[str, float]]  # a step each
    cuts: dict[tuple[str, str], int]  # by cause and file
    misses: int
    jumps: int


def sft(arguments: Any) -> Any:
    from datasets import Dataset
    from trl import SFTTrainer

    rows = Dataset.from_dict({"text": [text(start, 8) for start in range(48)]})
    return SFTTrainer(gpt(), arguments, train_dataset=rows, processing_class=tokenizer())


def dpo(arguments: Any) -> Any:
    from datasets import Dataset
    from trl import DPOTrainer

    rows = {
        "prompt": [text(start, 3) + " " for start in range(48)],
        "chosen": [text(start + 3, 4) for start in range(48)],
        "rejected": [text(start, 4) for start in range(48)],
    }
    return DPOTrainer(gpt(), gpt(), arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer())


def train(make: Callable[[Any], Any], device: str, **options: Any) -> Trained:
    import trl
    from transformers import set_seed

    from lazy_backend.integrations.transformers import LazyArguments

    config = trl.SFTConfig if make is sft else trl.DPOConfig

    @dataclass
    class Lazy(LazyArguments, config):  # type: ignore[valid-type, misc]
        pass

    set_seed(0)
    common: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 4, "bf16": False}
    common |= {"save_strategy": "no", "disable_tqdm": True, "report_to": [], **options}
    arguments = Lazy("run", **common) if device == "lazy" else config("run", use_cpu=True, **common)
    lazy_backend.metrics.reset()
    trainer = make(arguments)
    trainer.train()
    assert next(trainer.model.parameters()).device.type == device
    cuts: Counter[tuple[str, str]] = Counter()
    for name, number in lazy_backend.metrics.counters().items():
        if name.startswith("GraphCut: "):
            cause, line = name.removeprefix("GraphCut: ").rsplit(" at ", 1)
            cuts[cause, Path(line).name.split(":")[0]] += number
    counters = [lazy_backend.metrics.counter_value(name) or 0 for name in ("UncachedCompile", "RegionJump")]
    return Trained([entry for entry in trainer.state.log_history if "loss" in entry], dict(cuts), *counters)


def assert_same_logs(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == STEPS
    for entry, other in zip(found, expected, strict=True):
        assert entry == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("make", [sft, dpo])
def test_losses_are_those_of_eager(make: Callable[[Any], Any]) -> None:
    found = train(make, "lazy")
    assert_same_logs(found.logs, train(make, "cpu").logs)
    assert found.misses <= 60
    logged = {("item()", "trainer.py"): STEPS}  # the loss, and with it the norm of the gradients
    if make is sft:  # two counts that are compared with 0, entropy, accuracy, the number of tokens
        assert found.cuts == {("item()", "sft_trainer.py"): 5 * STEPS, **logged}
        assert found.jumps >= 3 * (STEPS - 6)  # the model and its backward, though values are read between, and AdamW
    else:  # two masks that choose logits
        mask = "aten.index.Tensor: its output depends on values"
        own = {("item()", "dpo_trainer.py"): 15 * STEPS, (mask, "dpo_trainer.py"): 2 * STEPS}
        assert found.cuts == {**own, **logged}
        assert found.jumps >= STEPS - 4  # AdamW


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig"])
def test_bf16_which_trl_has_as_its_default_is_told_what_to_take(name: str) -> None:
    import trl

    with pytest.raises(ValueError, match="bf16") as raised:
        getattr(trl, name)("run")
    assert f"class Arguments(LazyArguments, {name})" in "".join(raised.value.__notes__)

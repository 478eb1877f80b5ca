"""transformers.Trainer: eager's losses, one cut per logged step, three compiles; checkpoints; what users do wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import count

import lazy_backend
from lazy_backend import LazyBackendError, config

STEPS, LOGGED = 30, 6
TOKENS = torch.randint(64, (64, 12), generator=torch.Generator().manual_seed(0))


def gpt() -> tuple[Any, list[dict[str, Any]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    # dropout draws other numbers than on the CPU
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0))
    return model, [{"input_ids": row, "labels": row} for row in TOKENS]


def bert() -> tuple[Any, list[dict[str, Any]]]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**sizes, **still, vocab_size=64, max_position_embeddings=16))
    mask = torch.ones_like(TOKENS[0])
    mask[8:] = 0
    return model, [{"input_ids": row, "labels": int(row[0]) % 2, "attention_mask": mask} for row in TOKENS]


def t5() -> tuple[Any, list[dict[str, Any]]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, **tokens, dropout_rate=0.0))
    mask = torch.ones_like(TOKENS[0])
    return model, [{"input_ids": row, "labels": row[:6], "attention_mask": mask} for row in TOKENS]


@dataclass(frozen=True)
class Trained:
    losses: list[tuple[int, float, float]]  # step, loss, norm of the gradients
    evaluations: list[float]


def train(make: Callable[[], Any], device: str, precision: str = "fp32", **options: Any) -> Trained:
    import transformers

    from lazy_backend.integrations.transformers import LazySeq2SeqTrainingArguments, LazyTrainingArguments

    transformers.set_seed(0)
    model, rows = make()
    theirs = transformers.Seq2SeqTrainingArguments if make is t5 else transformers.TrainingArguments
    ours = LazySeq2SeqTrainingArguments if make is t5 else LazyTrainingArguments
    common: dict[str, Any] = {"max_steps": STEPS, "logging_steps": STEPS // LOGGED, "per_device_train_batch_size": 4}
    common |= {"save_strategy": "no", "disable_tqdm": True, "report_to": [], "bf16": precision == "bf16"}
    arguments = (
        ours("run", **common, **options) if device == "lazy" else theirs("run", use_cpu=True, **common, **options)
    )
    trainer_of = transformers.Seq2SeqTrainer if make is t5 else transformers.Trainer
    trainer = trainer_of(model, arguments, train_dataset=rows, eval_dataset=rows[:12])
    trainer.train()
    assert next(trainer.model.parameters()).device.type == device
    history = trainer.state.log_history
    return Trained(
        [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    )


eager = functools.cache(functools.partial(train, device="cpu"))


def assert_close(trained: Trained, expected: Trained, tolerance: float) -> None:
    for (step, loss, norm), (other_step, other_loss, other_norm) in zip(trained.losses, expected.losses, strict=True):
        assert step == other_step
        assert loss == pytest.approx(other_loss, rel=tolerance)
        assert norm == pytest.approx(other_norm, rel=10 * tolerance)  # of a difference of near gradients


@pytest.mark.scenario
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [gpt, bert, t5])
def test_losses_are_those_of_eager(make: Callable[[], Any], precision: str) -> None:
    with count("GraphCut") as cuts, count("Compile") as compiles, count("MarkStep") as steps:
        trained = train(make, "lazy", precision)
    assert cuts() <= LOGGED
    assert compiles() <= 3
    assert steps() <= STEPS + LOGGED + 1  # what is set to zero after a log is a step of its own
    assert len(trained.losses) == LOGGED
    expected = eager(make, precision=precision) if precision == "bf16" else eager(make)
    if precision == "fp32":
        assert trained == expected
    else:  # a mask that masks nothing is left out in eager, which rounds sums to bfloat16 at other places
        assert_close(trained, expected, 2e-3)


@pytest.mark.parametrize("make", [gpt, bert, t5])
def test_evaluation_is_a_program_or_two_of_its_own(make: Callable[[], Any]) -> None:
    with count("Compile") as compiles:
        trained = train(make, "lazy", eval_strategy="steps", eval_steps=10)
    assert compiles() <= 3  # a step, and the first and the further batches of an evaluation, whose losses are collected
    assert trained == eager(make, eval_strategy="steps", eval_steps=10)


def test_evaluation_and_accumulation_cut_nothing() -> None:
    options = {"eval_strategy": "steps", "eval_steps": 10, "gradient_accumulation_steps": 2}
    with count("GraphCut") as cuts, count("RegionJump") as jumps:
        trained = train(gpt, "lazy", **options)
    assert cuts() <= LOGGED
    assert jumps() > 4 * STEPS  # forward and backward of two batches, and the optimizer's step
    assert trained == eager(gpt, **options)


def test_a_model_is_trained_without_being_captured() -> None:
    with count("RegionJump") as jumps:
        trained = train(bert, "lazy", lazy_capture="never")
    assert jumps() == 0
    assert trained == eager(bert)


def test_a_model_of_the_users_is_captured_in_parts_or_when_asked_whole() -> None:
    class Users(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bert()[0]

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss}

    def make() -> tuple[Any, Any]:
        return Users(), bert()[1]

    for choice in ("auto", "always"):
        with count("RegionJump") as jumps:
            trained = train(make, "lazy", lazy_capture=choice)
        assert jumps() > 2 * STEPS
        assert trained == eager(make)


def test_generation_in_an_evaluation() -> None:
    options = {"predict_with_generate": True, "generation_max_length": 4, "eval_strategy": "steps", "eval_steps": 30}
    assert train(t5, "lazy", **options) == eager(t5, **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_example_goes_on_from_a_checkpoint(precision: str) -> None:
    import with_transformers

    def losses(**options: Any) -> dict[int, float]:
        history = with_transformers.train("run", precision, **options).state.log_history
        return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}

    whole = losses()
    assert len(whole) == LOGGED
    resumed = losses(resume="run/checkpoint-15")  # its history begins with the checkpoint's
    assert resumed == whole


@pytest.mark.slow  # half a minute of compiling
def test_compiled_losses_are_close_to_those_of_eager() -> None:
    config.backend = "inductor"
    with count("Compile") as compiles:
        trained = train(gpt, "lazy")
    expected = eager(gpt)
    assert compiles() <= 3
    assert_close(trained, expected, 1e-4)


# ----- without the integration


@pytest.mark.parametrize("make", [gpt, bert])  # the first ties its output weights to its embedding
@pytest.mark.parametrize("size", ["5GB", "5KB"])
def test_a_model_is_saved_and_loaded(make: Callable[[], Any], size: str) -> None:
    model = make()[0].to("lazy")
    model.save_pretrained("saved", max_shard_size=size)
    for device in ("lazy", "cpu"):
        loaded = type(model).from_pretrained("saved", device_map=device)
        ours, theirs = model.state_dict(), loaded.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(x.device.type == device for x in theirs.values())
        assert all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in ours)


def test_a_trainer_with_a_callback_of_the_users_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed, trainer

    class MarkStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            lazy_backend.mark_step()

    def losses(resume: str | None) -> dict[int, float]:
        set_seed(0)
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # with dropout
        options: dict[str, Any] = {"max_steps": 8, "save_steps": 4, "logging_steps": 1, "report_to": []}
        options |= {"per_device_train_batch_size": 4, "dataloader_pin_memory": False, "disable_tqdm": True}
        arguments = TrainingArguments("run", **options)
        made = Trainer(model, arguments, train_dataset=gpt()[1], callbacks=[MarkStep()])
        assert made.model.lm_head.weight.is_lazy
        made.train(resume_from_checkpoint=resume)
        return {entry["step"]: entry["loss"] for entry in made.state.log_history if "loss" in entry}

    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", trainer.DEFAULT_CALLBACKS[:1])
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "lazy")
    whole = losses(None)
    assert len(whole) == 8
    assert losses("run/checkpoint-4") == whole


# ----- what users do wrong


@pytest.mark.parametrize("option", ["use_cpu", "torch_compile", "fp16"])
def test_an_argument_that_does_not_work_is_told(option: str) -> None:
    from lazy_backend.integrations.transformers import LazyTrainingArguments

    with pytest.raises(LazyBackendError, match=rf"LazyTrainingArguments\({option}=True\) does not work"):
        LazyTrainingArguments("run", **{option: True})


@pytest.mark.parametrize("option", ["bf16", "bf16_full_eval"])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("TrainingArguments", "take LazyTrainingArguments of lazy_backend.integrations.transformers"),
        ("Seq2SeqTrainingArguments", "class Arguments(LazyArguments, Seq2SeqTrainingArguments)"),
        ("Users", "class Arguments(LazyArguments, Users)"),
    ],
)
def test_bf16_that_transformers_refuses_is_told_what_to_take(name: str, advice: str, option: str) -> None:
    import transformers

    class Users(transformers.TrainingArguments):
        pass

    kind = Users if name == "Users" else getattr(transformers, name)
    with pytest.raises(ValueError, match="bf16") as raised:
        kind("run", **{option: True})
    assert advice in "".join(raised.value.__notes__)
    with pytest.raises(ValueError, match="integer bigger than 0") as raised:  # not about bf16
        kind("run", torch_empty_cache_steps=-1)
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("reads_each_loss", [False, True])
def test_a_trainer_of_theirs_has_its_steps_end_by_themselves(
    reads_each_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer, TrainingArguments, trainer

    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", trainer.DEFAULT_CALLBACKS[:1])  # as before our import
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "lazy")
    model, rows = gpt()
    options: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    options |= {"dataloader_pin_memory": False, "logging_nan_inf_filter": reads_each_loss}
    arguments = TrainingArguments("run", max_steps=2, **options)
    with config.patch(mark_steps="auto"), count("MarkStep") as steps:
        Trainer(model, arguments, train_dataset=rows).train()
    assert steps() >= 2


# ----- a loop of one's own


@pytest.mark.parametrize("make", [gpt, t5])
def test_a_model_that_returns_its_cache_is_replayed(make: Callable[[], Any]) -> None:
    """As models do unless `use_cache=False`. The caches are eager's, and a later replay leaves them as they are."""
    from lazy_backend.integrations import attention_masks

    attention_masks.leave_in_graph()  # as our integrations do: a look into the mask would cut the graph
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        model, rows = make()
        model.to(device)
        if device == "lazy":
            lazy_backend.capture(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        with count("RegionJump") as jumps:
            for start in range(0, 48, 4):
                batch = {
                    name: torch.stack([row[name] for row in rows[start : start + 4]]).to(device) for name in rows[0]
                }
                made = model(**batch)
                optimizer.zero_grad()
                made.loss.backward()
                optimizer.step()
                lazy_backend.mark_step()
                kept.append((made.loss, made.past_key_values))
        assert device == "cpu" or jumps() >= 16
        caches = [getattr(cache, "self_attention_cache", cache) for _, cache in kept]
        found[device] = [loss.detach().cpu() for loss, _ in kept]
        found[device] += [layer.keys.detach().cpu() for cache in caches for layer in cache.layers]
        found[device] += [torch.tensor(cache.get_seq_length()) for cache in caches]
    torch.testing.assert_close(found["lazy"], found["cpu"])

"""transformers.Trainer on the lazy device: LazyTrainingArguments in place of TrainingArguments."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, set_seed

from lazy_backend import metrics
from lazy_backend.integrations.transformers import LazyTrainingArguments


def train(folder: str, precision: str = "fp32", resume: str | None = None) -> Trainer:
    set_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = LazyTrainingArguments(
        folder,
        bf16=precision == "bf16",
        max_steps=30,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        logging_steps=5,  # the loss is read only then
        eval_strategy="steps",
        eval_steps=15,
        save_steps=15,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:24])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    trainer = train("run")
    print([(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
    print(metrics.short_report())

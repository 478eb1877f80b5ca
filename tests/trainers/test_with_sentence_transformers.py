"""sentence-transformers' trainer with arguments of ours: eager's losses, one cut per logged step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import count
from words import VOCABULARY, text, tokenizer

STEPS, LOGGED = 24, 6
ROWS = 48


def make() -> Any:
    """A tiny BERT with the mean of its tokens: modules of the package are made from files."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    # dropout draws other numbers than on the CPU
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **still, vocab_size=len(VOCABULARY), max_position_embeddings=16, pad_token_id=0)
    folder = Path("bert")
    BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(16)], device="cpu")


def train(device: str, loss: str = "MultipleNegativesRankingLoss", **options: Any) -> list[dict[str, float]]:
    import sentence_transformers
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses
    from transformers import set_seed

    from lazy_backend.integrations.transformers import LazyArguments

    theirs = sentence_transformers.SentenceTransformerTrainingArguments

    @dataclass
    class Lazy(LazyArguments, theirs):  # type: ignore[valid-type, misc]
        pass

    set_seed(0)
    common: dict[str, Any] = {"max_steps": STEPS, "logging_steps": STEPS // LOGGED, "per_device_train_batch_size": 4}
    common |= {"save_strategy": "no", "disable_tqdm": True, "report_to": [], **options}
    rows = {"anchor": [text(n, 6) for n in range(ROWS)], "positive": [text(n + 1, 6) for n in range(ROWS)]}
    if loss == "CosineSimilarityLoss":
        rows["score"] = [(n % 5) / 4 for n in range(ROWS)]  # type: ignore[misc]
    model = make()
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model,
        Lazy("run", **common) if device == "lazy" else theirs("run", use_cpu=True, **common),
        train_dataset=Dataset.from_dict(rows),
        loss=getattr(losses, loss)(model),
    )
    trainer.train()
    assert next(trainer.model.parameters()).device.type == device
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "CosineSimilarityLoss"])
def test_losses_are_those_of_eager(loss: str) -> None:
    with count("GraphCut") as cuts, count("UncachedCompile") as misses, count("MarkStep") as steps:
        found = train("lazy", loss)
    assert cuts() == LOGGED  # the logged loss, and with it the norm of the gradients
    assert misses() <= 6  # first steps, and what is set to zero after a log
    assert steps() <= STEPS + LOGGED + 1
    expected = train("cpu", loss)
    for entry, other in zip(found, expected, strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert len(found) == LOGGED

"""Models of transformers, served: attention masks are arguments, and the answers are eager's for each mask."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import lazy_backend
from lazy_backend import config

TOKENS = torch.randint(1, 60, (2, 7), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SIZES, max_position_embeddings=16))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, attention_mask=mask)[0]  # type: ignore[no-any-return]


def masks(columns: int) -> list[torch.Tensor]:
    """Nothing is masked, then more and more at the left, as tokenizers pad for decoders."""
    made = [torch.ones(2, columns, dtype=torch.int64) for _ in range(3)]
    for number, mask in enumerate(made):
        mask[1, : 2 * number] = 0
    return made


@pytest.mark.parametrize("backend", ["interpreted", "eager"])
@pytest.mark.parametrize("make", [bert, llama])
def test_answers_for_each_mask_are_eagers(make: Callable[[], Any], backend: str) -> None:
    config.compile = "off" if backend == "interpreted" else "foreground"
    config.backend = "eager"
    torch.manual_seed(0)
    module = Logits(make()).eval()
    served = lazy_backend.serve(module, (TOKENS, masks(7)[0]))
    requests = [(TOKENS[:, :columns], mask) for columns in (7, 5) for mask in masks(columns)]
    with torch.no_grad():
        expected = [module(*request) for request in requests]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda request: served(*request), requests * 4))
    torch.testing.assert_close(found, expected * 4)

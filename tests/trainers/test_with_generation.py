"""`generate` of transformers on the lazy device: eager's tokens, and a few compiles whatever is generated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import count

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
}


@functools.cache
def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=63)).eval()


@functools.cache
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, bos_token_id=0, eos_token_id=63)).eval()


def generate(model: Any, device: str, prompt: int, length: int, way: str) -> torch.Tensor:
    tokens = torch.randint(1, 62, (2, prompt), generator=torch.Generator().manual_seed(prompt)).to(device)
    options = {"max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0, **WAYS[way]}
    made: torch.Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return made.cpu()


# tokens of the prompt, and tokens to generate
SIZES = {
    "one prompt": [(7, 10), (7, 14), (7, 12), (7, 18), (7, 14)],
    "prompts": [(7, 10), (9, 12), (5, 14), (8, 10), (6, 13), (7, 12), (9, 10), (5, 11)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [gpt, llama])
def test_tokens_and_compiles(make: Callable[[], Any], way: str, sizes: list[tuple[int, int]]) -> None:
    expected = [generate(make(), "cpu", prompt, length, way) for prompt, length in sizes]
    try:
        lazy = make().to("lazy")
        with count("Compile") as compiles, count("CompileFailed") as failed:
            for (prompt, length), tokens in zip(sizes, expected, strict=True):
                assert torch.equal(generate(lazy, "lazy", prompt, length, way), tokens)
        assert failed() == 0
        assert compiles() <= 3  # the prompt, a token more, and with beams the first reordering of the caches
    finally:
        make().to("cpu")

"""`generate` of transformers on the lazy device: eager's tokens, and a few compiles whatever is generated."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from harness import count

from lazy_backend import LazyBackendError
from lazy_backend.integrations.decoding import ServedDecoder, serve_decoder

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


# ----- serving the step of a decoder


def generate_served(decoder: ServedDecoder, model: Any, prompt: torch.Tensor, length: int) -> torch.Tensor:
    cache, made = decoder.new_cache(), [prompt]
    with torch.no_grad():
        logits = model(prompt, past_key_values=cache).logits[:, -1]
    for _ in range(length):
        logits[:, model.config.eos_token_id] = -torch.inf  # as `min_new_tokens` does
        made.append(logits.argmax(-1, keepdim=True))
        logits = decoder(made[-1], cache)
    return torch.cat(made, 1)


@pytest.mark.parametrize("make", [gpt, llama])
def test_a_served_decoder_generates_the_same_tokens_from_many_threads(make: Callable[[], Any]) -> None:
    model = make()
    decoder = serve_decoder(model, batch_size=2, max_cache_len=32)
    expected = [generate(model, "cpu", prompt, 10, "greedy") for prompt in (5, 7, 9, 11)]
    prompts = [tokens[:, :size] for tokens, size in zip(expected, (5, 7, 9, 11), strict=True)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: generate_served(decoder, model, prompt, 10), prompts))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("make", [gpt, llama])
def test_weights_of_a_served_decoder_are_swapped(make: Callable[[], Any]) -> None:
    model, other = make(), copy.deepcopy(make())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    decoder = serve_decoder(model, batch_size=1, max_cache_len=8)
    tokens = torch.tensor([[3]])
    torch.testing.assert_close(decoder(tokens, decoder.new_cache()), model(tokens).logits[:, -1].detach())
    decoder.swap_weights(other)
    torch.testing.assert_close(decoder(tokens, decoder.new_cache()), other(tokens).logits[:, -1].detach())


def test_a_decoder_takes_several_tokens_at_once_and_says_when_its_cache_is_full() -> None:
    decoder = serve_decoder(llama(), batch_size=1, max_cache_len=8, num_tokens=3)
    cache, tokens = decoder.new_cache(), torch.tensor([[3, 4, 5, 6, 7, 8]])
    decoder(tokens[:, :3], cache)
    expected = llama()(tokens).logits[:, -1].detach()
    torch.testing.assert_close(decoder(tokens[:, 3:], cache), expected)
    with pytest.raises(LazyBackendError, match="the cache has 6 of 8 tokens, and 3 more were given"):
        decoder(tokens[:, :3], cache)
    with pytest.raises(ValueError, match="input"):
        decoder(tokens[:, :1], decoder.new_cache())


def test_a_decoder_in_training_mode_is_refused() -> None:
    model = copy.deepcopy(llama()).train()
    with pytest.raises(LazyBackendError, match=r"is in training mode(?s:.*)call model.eval\(\) first"):
        serve_decoder(model, batch_size=1, max_cache_len=8)


def test_sliding_windows_are_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, vocab_size=64, sliding_window=4)).eval()
    with pytest.raises(LazyBackendError, match="has StaticSlidingWindowLayer"):
        serve_decoder(model, batch_size=1, max_cache_len=8)

"""Serve the step of a decoder: tokens and a cache of keys and values in, logits out. Tested with transformers 5.23.

In: a causal language model of transformers. Out: `ServedDecoder`, to be called from any thread, each with a cache of
its own, and with weights that can be swapped while requests run.

    from lazy_backend.integrations.decoding import serve_decoder

    decoder = serve_decoder(model, batch_size=1, max_cache_len=256)
    cache = decoder.new_cache()
    logits = model(prompt, past_key_values=cache).logits[:, -1]  # the prompt, of any length
    logits = decoder(logits.argmax(-1, keepdim=True), cache)  # one token more

The graph is that of one shape, so the cache is a `StaticCache`, which is written in place and counts its tokens in a
tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.integrations import attention_masks
from lazy_backend.integrations.versions import check_version
from lazy_backend.serve import Served, make_served

check_version("transformers")

import transformers.cache_utils

attention_masks.leave_in_graph()

# For each layer: keys and values, [batch, heads, max_cache_len, head size] each, and how many tokens they have.
State = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class ServedDecoder:
    """The result of `serve_decoder`. May be called by many threads at once, with a cache each."""

    def __init__(self, served: Served, example: transformers.cache_utils.StaticCache) -> None:
        self.served = served
        self._example = example

    @hide_internals
    def __call__(self, tokens: torch.Tensor, cache: transformers.cache_utils.StaticCache) -> torch.Tensor:
        """Logits of the token after the last one, [batch, vocabulary].

        `tokens`: int64, [batch, tokens], on the backing device. `cache`: of `new_cache`; gets the keys and values of
        `tokens`. Raises `InputError` for other shapes, and `LazyBackendError` if the cache is full.
        """
        state = _state_of(cache)
        used, size = int(state[0][2]), state[0][0].shape[2]
        if used + tokens.shape[1] > size:
            raise LazyBackendError(
                f"the cache has {used} of {size} tokens, and {tokens.shape[1]} more were given\n  at {user_site()}\n"
                "  pass a larger max_cache_len to serve_decoder, or begin with a new_cache()"
            )
        logits: torch.Tensor = self.served(tokens, state)
        return logits

    def new_cache(self) -> transformers.cache_utils.StaticCache:
        """An empty cache on the backing device."""
        return _cache_from([(k.clone(), v.clone(), n.clone()) for k, v, n in _state_of(self._example)], self._example)

    def swap_weights(self, model: torch.nn.Module) -> None:
        """Use the weights of `model`, of the same sizes, from the next call on. Caches keep what they have."""
        self.served.swap_weights({f"model.{name}": value for name, value in model.state_dict().items()})


@hide_internals
def serve_decoder(
    model: Any, batch_size: int, max_cache_len: int, num_tokens: int = 1, num_threads: int = 1
) -> ServedDecoder:
    """Make the step of a causal language model callable from many threads.

    `num_tokens`: tokens of each row in a call. `num_threads`: threads that work on one call. Raises `LazyBackendError`
    for models whose cache is not one of plain static layers, such as those with sliding windows, and for
    encoder-decoders, and for a model in training mode; otherwise what `lazy_backend.serve` raises.
    """
    if model.training:
        name = type(model).__name__
        raise LazyBackendError(f"{name} is in training mode\n  at {user_site()}\n  call model.eval() first")
    cache = transformers.cache_utils.StaticCache(config=model.config, max_cache_len=max_cache_len)
    kinds = {type(layer) for layer in cache.layers}
    if model.config.is_encoder_decoder or kinds != {transformers.cache_utils.StaticLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise LazyBackendError(
            f"serve_decoder takes decoders whose cache has one StaticLayer per layer; that of "
            f"{type(model).__name__} has {names}\n  at {user_site()}\n  serve a function of your own, which takes the "
            "cache's tensors"
        )
    tokens = torch.zeros(batch_size, num_tokens, dtype=torch.int64)
    with torch.no_grad():  # the sizes of the cache are known only after a call
        model(tokens.to(model.device), past_key_values=cache)
    example = _cache_from([(_empty(k), _empty(v), _empty(n)) for k, v, n in _state_of(cache)], cache)
    # one shape, as the example's cache says how long caches are
    served = make_served(_Step(model, example), (tokens, _state_of(example)), num_threads, max_shapes=0)
    return ServedDecoder(served, example)


class _Step(torch.nn.Module):
    """A model's call as a function of tensors."""

    def __init__(self, model: torch.nn.Module, example: transformers.cache_utils.StaticCache) -> None:
        super().__init__()
        self.model = model
        self._example = example

    def forward(self, tokens: torch.Tensor, state: State) -> torch.Tensor:
        positions = state[0][2] + torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.model(
            tokens,
            past_key_values=_cache_from(state, self._example),
            position_ids=positions.expand(tokens.shape[0], -1),
        ).logits
        return logits[:, -1]


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _state_of(cache: transformers.cache_utils.StaticCache) -> State:
    return [(layer.keys, layer.values, layer.cumulative_length) for layer in cache.layers]


def _cache_from(state: State, like: transformers.cache_utils.StaticCache) -> transformers.cache_utils.StaticCache:
    """A cache of these tensors, with the sizes of `like`."""
    made = object.__new__(transformers.cache_utils.StaticCache)
    vars(made).update(vars(like), layers=[])
    for (keys, values, length), layer in zip(state, like.layers, strict=True):
        own: Any = object.__new__(type(layer))
        vars(own).update(vars(layer), keys=keys, values=values, cumulative_length=length, device=keys.device)
        made.layers.append(own)
    return made

"""Served networks of several kinds, asked by eight threads while their weights are swapped a hundred times."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import as_bytes
from torch import nn

from lazy_backend import config, serve

THREADS, REQUESTS, SWAPS = 8, 1000, 100


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(50, 64), nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class GraphNetwork(nn.Module):
    """Two layers that add up the neighbours of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 7)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]).relu()
        return x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class OfTransformers(nn.Module):
    """A small model of transformers: its class, and the settings that make it small."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, name)
        self.model = kind(kind.config_class(**settings))

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self.model(*arguments).logits


def resnet_18() -> nn.Module:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [2, 2, 2, 2]}
    return OfTransformers("ResNetForImageClassification", layer_type="basic", **sizes)


def mobilenet() -> nn.Module:
    return OfTransformers("MobileNetV2ForImageClassification", image_size=32, depth_multiplier=0.25)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def vit() -> nn.Module:
    return OfTransformers("ViTForImageClassification", image_size=32, patch_size=8, **SMALL)


def bert() -> nn.Module:
    return OfTransformers("BertForSequenceClassification", vocab_size=50, **SMALL)


def llama() -> nn.Module:
    shared = {"num_key_value_heads": 2, "use_cache": False}
    return OfTransformers("LlamaForCausalLM", vocab_size=50, **SMALL, **shared)


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.arange(16).view(2, 8), torch.ones(2, 8, dtype=torch.int64))


def image() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, 32, 32),)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "recurrent": (Recurrent, lambda: (torch.arange(16).view(2, 8),)),
    "graph": (GraphNetwork, lambda: (torch.randn(20, 32), torch.randint(0, 20, (2, 40)))),
    "encoder": (encoder, lambda: (torch.randn(2, 6, 64),)),
    "resnet-18": (resnet_18, image),
    "mobilenet": (mobilenet, image),
    "vit": (vit, image),
    "bert": (bert, tokens),
    "llama": (llama, tokens),
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def versions_of(module: nn.Module) -> list[dict[str, torch.Tensor]]:
    """States that differ in all floats, so that an answer of two of them would be that of none."""
    state = module.state_dict()
    factors = [1 + 0.01 * version for version in range(SWAPS)]
    return [
        {name: one * factor if one.is_floating_point() else one for name, one in state.items()} for factor in factors
    ]


@pytest.mark.scenario
@pytest.mark.parametrize("kind", KINDS)
def test_each_answer_is_that_of_one_version(kind: str) -> None:
    config.compile, config.backend = "foreground", "inductor"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, arguments = KINDS[kind]
    module, request = make().eval(), arguments()
    served, states = serve(module, request), versions_of(module)
    served(*request)  # the first answer of a plan that is new to the cache is the interpreter's
    eager = copy.deepcopy(module)
    answers: dict[bytes, int] = {}
    for version, state in enumerate(states):
        served.swap_weights(state)
        eager.load_state_dict(state)
        answer = served(*request)
        torch.testing.assert_close(answer, eager(*request).detach(), rtol=1e-3, atol=1e-4)
        answers[as_bytes(answer)] = version
    assert len(answers) == SWAPS
    served.swap_weights(states[0])
    wrong: list[Any] = []

    def ask() -> None:
        latest = 0
        for _ in range(REQUESTS):
            try:
                version = answers.get(as_bytes(served(*request)), -1)
            except Exception as error:
                wrong.append(error)
                return
            if version < latest:
                wrong.append(version)
            latest = version

    workers = [threading.Thread(target=ask) for _ in range(THREADS)]
    before = resident_bytes()
    for worker in workers:
        worker.start()
    for state in states[1:]:
        served.swap_weights(state)
        time.sleep(0.002)
    for worker in workers:
        worker.join()
    assert wrong == []
    assert answers[as_bytes(served(*request))] == SWAPS - 1
    swapped = SWAPS * sum(one.nbytes for one in states[0].values())
    assert resident_bytes() - before < max(swapped / 2, 2**23)

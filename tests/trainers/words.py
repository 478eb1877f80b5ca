"""A tokenizer of ten words, made here: no test downloads one."""

from __future__ import annotations

from typing import Any

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
VOCABULARY = ["<pad>", "<eos>", *WORDS]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    split = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")


def text(start: int, length: int) -> str:
    return " ".join(WORDS[(start + number) % len(WORDS)] for number in range(length))

"""Outputs that own their memory."""

from __future__ import annotations

import torch

from lazy_backend.lowering.ir.aliasing import OutputAliases, watched_storages


def test_an_output_that_shares_memory_with_an_input_or_an_output_is_copied() -> None:
    x, y = torch.ones(4), torch.ones(4)
    results = OutputAliases().separate(watched_storages([x]), [x, y, y])
    assert results[0].data_ptr() != x.data_ptr()
    assert results[1] is y
    assert results[2].data_ptr() != y.data_ptr()


def test_an_output_where_a_freed_input_was_is_not_copied() -> None:
    memory = bytearray(64)
    x = torch.frombuffer(memory, dtype=torch.float32)
    taken = watched_storages([x])
    del x
    made = torch.frombuffer(memory, dtype=torch.float32)
    assert made.untyped_storage().data_ptr() in taken
    aliases = OutputAliases()
    assert aliases.separate(taken, [made])[0] is made
    assert aliases.copied is not None

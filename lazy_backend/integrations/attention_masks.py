"""Keep the models of transformers from looking into attention masks. Checked on transformers 5.23.

Note [What is changed in transformers]
Its models look into attention masks, to leave out those that mask nothing, and at how full a static cache is, unless
they are being traced (`utils.import_utils.is_tracing`). With the modules of this room that import this one, a lazy
tensor counts as traced there: each look would cut the graph. The mask is then part of the graph, as under
`torch.compile`. No public name lets a tensor say so, so `is_fake_tensor`, which has no other caller, is replaced
(internal, checked on 5.23).
"""

from __future__ import annotations

import functools
from typing import Any

from lazy_backend.integrations.versions import changed_inside, check_version
from lazy_backend.tensors.tensor import LazyTensor

check_version("transformers")

from transformers.utils import import_utils


@functools.cache
def leave_in_graph() -> None:
    """See Note [What is changed in transformers]."""
    original = getattr(import_utils, "is_fake_tensor", None)
    if original is None:
        raise changed_inside("transformers", "utils.import_utils.is_fake_tensor")

    def is_fake_tensor(x: Any) -> bool:
        return isinstance(x, LazyTensor) or original(x)

    import_utils.is_fake_tensor = is_fake_tensor

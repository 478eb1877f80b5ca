"""What is known about cases that differ from eager: curated by hand, with reasons a user understands.

In: a case that does not pass. Out: why. What is not listed here is a defect.
"""

from __future__ import annotations

import re

from conformance_suite.cases import Case

# Their values are whatever was in memory: only geometry is compared.
UNINITIALIZED = frozenset(
    (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("resize_", "resize_as_"),
    )
)

# Cases whose values may differ by rounding even when interpreted: (pattern of the key, reason).
ROUNDING: tuple[tuple[str, str], ...] = (
    (
        r"^op/(masked_fill|prod|masked\.prod)/(gradients|in-place)/",
        "PyTorch's gradient formula for subclasses of Tensor avoids shapes that depend on data",
    ),
    (
        r"^op/(norm\.nuc|svdvals|linalg\.(svdvals|cond|norm|norm\.subgradients_at_zero|matrix_norm|eigvalsh))/",
        "PyTorch computes vectors along with singular values and eigenvalues for subclasses of Tensor",
    ),
    (
        r"^op/(matmul|__rmatmul__)/forward/",
        "PyTorch multiplies by a batch of one with mm for subclasses of Tensor, with bmm for others; their last bits "
        "differ on some CPUs",
    ),
    (
        r"^(op/nn\.functional\.linear_cross_entropy|module/nn\.LinearCrossEntropyLoss/).*/b?float16/",
        "PyTorch chooses the accumulation by the type of device",
    ),
    (r"^op/linalg\.lstsq", "LAPACK's last bits depend on where the operands lie in memory, in eager too"),
)

# Cases that do not pass: (pattern of the key, pattern of the message, reason). The first that fits counts.
REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"^module/nn\.LSTM/.*/autocast to float16$",
        "could not create a primitive",
        "on CPUs without instructions for float16 PyTorch's fused kernel (oneDNN) refuses it; the lazy device does not",
    ),
    (
        r"^op/nn\.functional\.soft_margin_loss/gradients/.*/inductor$",
        "the compiled graph was refused",
        "compiled alone, a small gradient loses its digits (PyTorch's formula for compilers subtracts 1 from a "
        "sigmoid): the trial finds that, and eager's kernel computes it",
    ),
)


def rounds(case: Case) -> bool:
    return any(re.search(pattern, case.key) for pattern, _ in ROUNDING)


def reason_for(key: str, message: str) -> str | None:
    """Why this case does not pass, or None if nobody knows: then it is a defect."""
    for pattern, text, reason in REASONS:
        if re.search(pattern, key) and re.search(text, message):
            return reason
    return None

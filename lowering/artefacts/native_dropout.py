"""The mask of a dropout, drawn in a runner without Python.

In: nothing. Out: the C++ that draws as `lazy_backend::dropout_mask` does, the same numbers from the same seed; and
whether this PyTorch has what that calls. See Note [Dropout in compiled graphs].

PyTorch's interface in C has no generators, so the runner calls what Python's `bernoulli_` ends in. Internal, checked on
2.13: the names of three functions, and that a generator is a pointer. How they are called is the convention of x86-64;
elsewhere Python draws.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

import torch

_MAKE_GENERATOR = "_ZN2at6detail18createCPUGeneratorEm"
_SET_SEED = "_ZN2at16CPUGeneratorImpl16set_current_seedEm"
_BERNOULLI = "_ZN2at4_ops16bernoulli__float4callERNS_6TensorEdSt8optionalINS_9GeneratorEE"

DEFINITION = f"""
struct OptionalGenerator {{ void* generator; bool has_value; }};
extern "C" {{
void* make_generator(void** made, uint64_t seed) __asm__("{_MAKE_GENERATOR}");
void set_seed(void* generator, uint64_t seed) __asm__("{_SET_SEED}");
void* bernoulli(AtenTensorHandle* tensor, double p, const OptionalGenerator*) __asm__("{_BERNOULLI}");
}}
// `stride`: null if the mask is contiguous.
static void draw_mask(
    int64_t dim, const int64_t* size, const int64_t* stride, double p, AtenTensorHandle seeds, int64_t place,
    AtenTensorHandle& made) {{
    static thread_local void* generator = nullptr;  // of this thread, as long as it lives
    const uint64_t seed = static_cast<const int64_t*>(data(seeds))[place];
    if (!generator) make_generator(&generator, seed);
    set_seed(generator, seed);
    int64_t contiguous[64], count = 1;
    for (int64_t i = dim - 1; !stride && i >= 0; i--) {{
        contiguous[i] = count;
        count *= size[i] > 1 ? size[i] : 1;
    }}
    empty(dim, size, stride ? stride : contiguous, aoti_torch_dtype_bool(), made);
    const OptionalGenerator given = {{generator, true}};
    bernoulli(reinterpret_cast<AtenTensorHandle*>(made), 1 - p, &given);
}}
"""


@functools.cache
def is_available() -> bool:
    """Whether this PyTorch has the functions, where they are called as here."""
    if platform.machine() != "x86_64":
        return False
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return False
    return all(hasattr(library, symbol) for symbol in (_MAKE_GENERATOR, _SET_SEED, _BERNOULLI))

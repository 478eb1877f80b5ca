"""Operators that runners compute by PyTorch's functions in C++, as its interface in C does not have them.

In: nothing. Out: the C++ that draws a dropout's mask as `lazy_backend::dropout_mask` does, the same numbers from the
same seed (Note [Dropout in compiled graphs]), and the C++ of a tensor's norm, as `_foreach_norm` computes each of its
list; and whether this PyTorch has what they call. Otherwise Python calls these operators, and runs need it.

Their ports say whether PyTorch has these functions. That a tensor and a generator are pointers, and how a `Scalar` lies
in memory, the first call of each is compared with (`tests/ir/test_runner_source.py`).
"""

from __future__ import annotations

from lazy_backend.ports.native_code import BERNOULLI, MAKE_GENERATOR, SET_SEED, VECTOR_NORM

MASKS = f"""
struct OptionalGenerator {{ void* generator; bool has_value; }};
extern "C" {{
void* make_generator(void** made, uint64_t seed) __asm__("{MAKE_GENERATOR}");
void set_seed(void* generator, uint64_t seed) __asm__("{SET_SEED}");
void* bernoulli(AtenTensorHandle* tensor, double p, const OptionalGenerator*) __asm__("{BERNOULLI}");
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

NORMS = f"""
struct NumberOfPyTorch {{ int is_other_than_double; alignas(16) double value, unused; }};
struct OptionalDimensions {{ const int64_t* first; size_t count; bool has_value; }};
struct OptionalDtype {{ int8_t dtype; bool has_value; }};
extern "C" void* vector_norm(
    void** made, AtenTensorHandle tensor, const NumberOfPyTorch* order, OptionalDimensions, bool keeps_dimensions,
    OptionalDtype) __asm__("{VECTOR_NORM}");
static void norm(AtenTensorHandle tensor, double order, AtenTensorHandle& made) {{
    const NumberOfPyTorch given = {{0, order, 0}};
    void** const whole = new void*(nullptr);  // a handle is a pointer to a tensor, which is a pointer
    try {{
        vector_norm(whole, tensor, &given, {{nullptr, 0, false}}, false, {{0, false}});
    }} catch (...) {{
        delete whole;
        throw;
    }}
    made = reinterpret_cast<AtenTensorHandle>(whole);
}}
"""

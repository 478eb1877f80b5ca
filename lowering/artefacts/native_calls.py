"""Operators that runners compute by PyTorch's functions in C++, as its interface in C does not have them.

In: nothing. Out: the C++ that draws a dropout's mask as `lazy_backend::dropout_mask` does, the same numbers from the
same seed (Note [Dropout in compiled graphs]), the C++ of a tensor's norm, as `_foreach_norm` computes each of its list,
and that of an LSTM's layer, by PyTorch's stable interface to its dispatcher; and whether this PyTorch has what they
call. Otherwise Python calls these operators, and runs need it.

Their ports say whether PyTorch has these functions. That a tensor and a generator are pointers, and how a `Scalar` lies
in memory, the first call of each is compared with (`tests/ir/test_runner_source.py`).
"""

from __future__ import annotations

from lazy_backend.ports.native_code import BERNOULLI, DISPATCHER, MAKE_GENERATOR, NEW_LIST, SET_SEED, VECTOR_NORM

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

# `given`: as the operators of `lowering/recurrent` take them, null where there is none. The dispatcher takes a stack of
# numbers of eight bytes, and the ownership of what they stand for: tensors, lists, and boxes of what may be missing.
LSTM = f"""
extern "C" {{
AOTITorchError {DISPATCHER}(const char* name, const char* overload, uint64_t* stack, uint64_t version);
AOTITorchError {NEW_LIST}(size_t size, uint64_t* made);
uint64_t aoti_torch_abi_version();
bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool);
int32_t aoti_torch_dtype_uint8();
}}
struct Stack {{
    uint64_t values[32], count = 0;
    void number(int64_t value) {{ values[count++] = value; }}
    void tensor(AtenTensorHandle given) {{
        AtenTensorHandle own = nullptr;
        share(given, own);
        number(reinterpret_cast<int64_t>(own));
    }}
    void contiguous(AtenTensorHandle given) {{
        int64_t dim, *size, *stride, wanted[8], expected = 1;
        check(aoti_torch_get_dim(given, &dim));
        check(aoti_torch_get_sizes(given, &size));
        check(aoti_torch_get_strides(given, &stride));
        bool is_contiguous = true;
        for (int64_t i = dim - 1; i >= 0; i--) {{
            wanted[i] = expected;
            is_contiguous &= size[i] == 1 || stride[i] == expected;
            expected *= size[i];
        }}
        if (is_contiguous) return tensor(given);
        int32_t dtype;
        AtenTensorHandle own = nullptr;
        check(aoti_torch_get_dtype(given, &dtype));
        empty(dim, size, wanted, dtype, own);
        number(reinterpret_cast<int64_t>(own));
        check(aoti_torch_copy_(own, given, 0));
    }}
    void perhaps(AtenTensorHandle given) {{
        if (!given) return number(0);
        tensor(given);
        number(reinterpret_cast<int64_t>(new uint64_t(values[--count])));
    }}
    void no_numbers() {{ check({NEW_LIST}(0, &values[count++])); }}
    void call(const char* name, bool with_gradients, AtenTensorHandle* const* made, int64_t num_made) {{
        const bool before = aoti_torch_grad_mode_is_enabled();
        aoti_torch_grad_mode_set_enabled(with_gradients);
        const AOTITorchError status = {DISPATCHER}(name, "", values, aoti_torch_abi_version());
        aoti_torch_grad_mode_set_enabled(before);
        check(status);
        for (int64_t i = 0; i < num_made; i++) *made[i] = reinterpret_cast<AtenTensorHandle>(values[i]);
    }}
}};
static int64_t hidden_size(AtenTensorHandle state) {{
    int64_t* size;
    check(aoti_torch_get_sizes(state, &size));
    return size[1];
}}
// input, hx, cx, w_ih, w_hh, b_ih, b_hh -> output, hy, cy, workspace
static void lstm(
    const AtenTensorHandle* given, bool is_reverse, int64_t workspace_size, AtenTensorHandle* const* made) {{
    Stack stack;
    const bool has_biases = given[5];
    stack.contiguous(given[0]);
    for (int i = 3; i < 7; i++) stack.tensor(given[i < 5 || has_biases ? i : i - 2]);
    stack.contiguous(given[1]);
    stack.contiguous(given[2]);
    stack.number(is_reverse);
    stack.no_numbers();
    for (const int64_t value : {{INT64_C(2), hidden_size(given[1]), INT64_C(1)}}) stack.number(value);
    for (const bool flag : {{has_biases, false, false, true}}) stack.number(flag);
    stack.call("aten::mkldnn_rnn_layer", workspace_size != 0, made, 4);
    bool is_defined = false;
    if (*made[3]) check(aoti_torch_is_defined(*made[3], &is_defined));
    if (is_defined) return;
    drop(*made[3]);
    const int64_t none = 0, step = 1;
    empty(1, &none, &step, aoti_torch_dtype_uint8(), *made[3]);
}}
// of_output, of_hy, of_cy, input, hx, cx, w_ih, w_hh, b_ih, b_hh, output, hy, cy, workspace -> gradients
static void lstm_backward(const AtenTensorHandle* given, bool is_reverse, AtenTensorHandle* const* made) {{
    Stack stack;
    const bool has_biases = given[8];
    stack.contiguous(given[3]);
    for (int i = 6; i < 10; i++) stack.tensor(given[i < 8 || has_biases ? i : i - 2]);
    for (const int i : {{4, 5, 10, 11, 12}}) stack.contiguous(given[i]);
    for (int i = 0; i < 3; i++) stack.perhaps(given[i]);
    stack.number(is_reverse);
    for (const int64_t value : {{INT64_C(2), hidden_size(given[4]), INT64_C(1)}}) stack.number(value);
    for (const bool flag : {{has_biases, true, false}}) stack.number(flag);
    stack.no_numbers();
    stack.number(false);
    stack.tensor(given[13]);
    stack.call("aten::mkldnn_rnn_layer_backward", false, made, 7);
}}
"""

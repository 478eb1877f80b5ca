// A small accelerator: device memory is the host's, kernels are the CPU's, on copies (`cpu_fallback`).
//
// It has what PyTorch asks of a PrivateUse1 backend at least: an allocator, `empty`, views, copies, and a device guard.
// Operators on its tensors in any other way than by its kernels fail, since none but these have the key PrivateUse1.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

namespace {

constexpr auto kSmall = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

std::atomic<size_t> allocated{0}, peak{0};  // bytes
std::atomic<size_t> num_kernels{0};

// ----- memory

struct Block {
  size_t num_bytes;
};
constexpr size_t kHeader = 64;  // keeps the data aligned

void free_block(void* block) {
  allocated -= static_cast<Block*>(block)->num_bytes;
  std::free(block);
}

struct SmallAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kSmall, 0);
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, device};
    void* block = std::aligned_alloc(kHeader, kHeader + (num_bytes + kHeader - 1) / kHeader * kHeader);
    TORCH_CHECK(block != nullptr, "the small device is out of memory");
    static_cast<Block*>(block)->num_bytes = num_bytes;
    const size_t now = allocated += num_bytes;
    for (size_t most = peak; most < now && !peak.compare_exchange_weak(most, now);) {
    }
    return {static_cast<char*>(block) + kHeader, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

SmallAllocator allocator;
REGISTER_ALLOCATOR(kSmall, &allocator);

// ----- one device, and one stream, which is done with a call when the call returns

struct SmallGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSmall; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kSmall, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SmallGuard);

struct SmallHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

// ----- kernels

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The memory of a tensor, as a tensor that the CPU's kernels take.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  at::Tensor made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  return made;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_host(tensor).item(); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++num_kernels;
  at::native::cpu_fallback(op, stack);
}

// PyTorch leaves convolutions of other devices to these two operators, which have no kernel for the CPU.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  const auto given = bias && bias->defined() ? std::make_optional(on_host(*bias)) : std::nullopt;
  return at::convolution(on_host(input), on_host(weight), given, stride, padding, dilation, transposed, output_padding,
                         groups)
      .to(kSmall);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const auto [input_grad, weight_grad, bias_grad] =
      at::convolution_backward(on_host(grad), on_host(input), on_host(weight), at::IntArrayRef{grad.size(1)}, stride,
                               padding, dilation, transposed, output_padding, groups, mask);
  const auto placed = [](const at::Tensor& made) { return made.defined() ? made.to(kSmall) : made; };
  return {placed(input_grad), placed(weight_grad), placed(bias_grad)};
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static SmallHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("memory_allocated", [] { return allocated.load(); });
  m.def("max_memory_allocated", [] { return peak.load(); });
  m.def("num_kernels", [] { return num_kernels.load(); });
}

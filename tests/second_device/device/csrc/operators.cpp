// Operators that the device has itself: memory, copies and views, and convolution. All others are in fallback.cpp.
#include "operators.h"

#include "memory.h"
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace simgpu {
namespace {

thread_local int kernel_depth = 0;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// --- memory

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(at::Device(kDeviceType)));
  return at::detail::empty_generic(size, &device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(at::Device(kDeviceType)));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys, c10::dtype_or_default(dtype));
}

// What allocates by itself does so on the current device: these set it to the tensor's.

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  c10::DeviceGuard guard(self.device());
  return at::native::set_(self, source);
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  c10::DeviceGuard guard(self.device());
  return at::native::set_tensor_(self, source);
}

// --- copies

void poison(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) std::memset(tensor.data_ptr(), kPoison, tensor.nbytes());
}

Task copy_once(at::Tensor target, at::Tensor source) {
  return [target, source] {
    at::NoGradGuard no_grad;
    target.copy_(source);
    return true;
  };
}

// A copy that does not block, between the device and pinned memory: the host may see, or change, what it should not yet.
bool copy_later(const at::Tensor& source, const at::Tensor& target, c10::DeviceIndex device) {
  if (!is_late() || source.numel() == 0 || source.scalar_type() != target.scalar_type()) return false;
  auto stream = current_stream(device);
  if (target.is_cpu() && is_pinned(target.data_ptr())) {
    auto numbers = host_view(source).clone();
    poison(target);
    enqueue_for_host(device, stream, copy_once(target.detach(), numbers));
    return true;
  }
  if (source.is_cpu() && is_pinned(source.data_ptr())) {
    enqueue(device, stream, copy_once(host_view(target), source.detach()));
    return true;
  }
  return false;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  auto device = (target.is_privateuseone() ? target : self).device().index();
  if (self.is_privateuseone()) before_kernel(self.device().index());
  before_kernel(device);
  at::NoGradGuard no_grad;
  bool has_host = self.is_cpu() || target.is_cpu();
  if (has_host && !is_in_kernel()) {
    auto source = self.expand(target.sizes());
    if (non_blocking && copy_later(source, target, device)) return target;
    synchronize_stream(device, current_stream(device));
  }
  host_view(target).copy_(host_view(self).expand(target.sizes()));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  c10::DeviceGuard guard(target.device());
  at::native::resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}

at::Scalar item(const at::Tensor& self) {
  ensure_initialized();
  auto device = self.device().index();
  synchronize_stream(device, current_stream(device));
  return host_view(self).item();
}

// --- so that Module.to keeps its parameters, as on CUDA

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_privateuseone() || tensor.is_cpu()) &&
        !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  };
  return is_dense(self) && is_dense(from);
}

// --- views

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// --- convolution: torch gives every new device this operator, and none of the CPU's

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(
      input.device() == weight.device(), "Input type (", input.toString(), ") and weight type (", weight.toString(),
      ") should be the same");
  before_kernel(input.device().index());
  InKernel in_kernel;
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = host_view(*bias);
  return at::convolution(
             host_view(input), host_view(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  before_kernel(input.device().index());
  InKernel in_kernel;
  int64_t bias_size[] = {transposed ? weight.size(1) * groups : weight.size(0)};
  at::OptionalIntArrayRef bias_sizes;
  if (mask[2]) bias_sizes = at::IntArrayRef(bias_size);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      host_view(gradient), host_view(input), host_view(weight), bias_sizes, stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto on_device = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {on_device(of_input), on_device(of_weight), on_device(of_bias)};
}

int64_t attention_by_formula(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto view = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) view = view.conj();
  return tensor.is_neg() ? view._neg_view() : view;
}

InKernel::InKernel() { kernel_depth++; }
InKernel::~InKernel() { kernel_depth--; }
bool is_in_kernel() { return kernel_depth > 0; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
  m.impl("as_strided", as_strided);
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", [](const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(self, dimension, size, step);
  });
  m.impl("view_as_real", [](const at::Tensor& self) { return at::native::view_as_real(self); });
  m.impl("view_as_complex", [](const at::Tensor& self) { return at::native::view_as_complex(self); });
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

}  // namespace simgpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simgpu::attention_by_formula)
}

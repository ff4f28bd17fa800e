// How operators reach the numbers of a tensor of the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace simgpu {

// A tensor of the CPU over the same memory, which keeps it alive. Other tensors are returned as they are.
at::Tensor host_view(const at::Tensor& tensor);

// While it exists, copies of this thread are a part of a kernel: they synchronise with nothing.
struct InKernel {
  InKernel();
  ~InKernel();
};
bool is_in_kernel();

}  // namespace simgpu

// Random numbers of a device.
#pragma once

#include <ATen/core/Generator.h>

namespace simgpu {

at::Generator make_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

// The generator of the CPU whose numbers a generator of the device draws. Kernels run on the CPU.
at::Generator& numbers_of(const at::Generator& generator);

}  // namespace simgpu

// Memory of the devices, and pinned memory of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace simgpu {

c10::DeviceAllocator& device_memory();
at::HostAllocator& pinned_memory();

bool is_pinned(const void* pointer);
c10::DeviceIndex device_of(const void* pointer);  // of memory at this address

struct MemoryUse {
  int64_t allocated = 0;
  int64_t most_allocated = 0;
  int64_t reserved = 0;       // allocated, and what was freed and is kept
  int64_t most_reserved = 0;
};
MemoryUse memory_use(c10::DeviceIndex device);
void reset_peaks(c10::DeviceIndex device);

}  // namespace simgpu

// Memory of the devices is memory of the host that is counted. It has a limit, and new memory holds NaN.
#include "memory.h"

#include "runtime.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace simgpu {
namespace {

constexpr size_t kAlignment = 64;

void* host_memory(size_t bytes) {
  void* pointer = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
  TORCH_CHECK(pointer, "the host has no memory left");
  return pointer;
}

double mebibytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

struct Block {
  c10::DeviceIndex device;
  size_t bytes;
};

// Blocks by their address. Never destroyed, as tensors may be freed while the process ends.
struct Blocks {
  std::mutex mutex;
  std::map<const char*, Block> by_address;

  const Block* find(const void* pointer) const {
    auto* address = static_cast<const char*>(pointer);
    auto next = by_address.upper_bound(address);
    if (next == by_address.begin()) return nullptr;
    const auto& [begin, block] = *std::prev(next);
    return address < begin + std::max<size_t>(block.bytes, 1) ? &block : nullptr;
  }
};

Blocks& device_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

Blocks& pinned_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

MemoryUse use[kMaxDevices];  // under the mutex of device_blocks()

void free_device_memory(void* pointer) {
  if (!pointer || is_bad_fork()) return;  // the memory of another process, whose mutex may be held here for ever
  auto& blocks = device_blocks();
  std::lock_guard<std::mutex> guard(blocks.mutex);
  auto found = blocks.by_address.find(static_cast<const char*>(pointer));
  use[found->second.device].allocated -= static_cast<int64_t>(found->second.bytes);
  blocks.by_address.erase(found);
  std::free(pointer);
}

void free_pinned_memory(void* pointer) {
  if (!pointer || is_bad_fork()) return;
  auto& blocks = pinned_blocks();
  std::lock_guard<std::mutex> guard(blocks.mutex);
  blocks.by_address.erase(static_cast<const char*>(pointer));
  std::free(pointer);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    ensure_initialized();
    auto device = current_device();
    check_ordinal(device);
    c10::Device where(kDeviceType, device);
    if (bytes == 0) return {nullptr, nullptr, &free_device_memory, where};
    auto size = static_cast<int64_t>(bytes);
    // What was queued may hold memory that was freed.
    if (memory_use(device).allocated + size > memory_limit()) synchronize_device(device);
    auto& blocks = device_blocks();
    std::lock_guard<std::mutex> guard(blocks.mutex);
    auto& here = use[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, here.allocated + size <= memory_limit(), "simgpu out of memory. Tried to allocate ", mebibytes(size),
        " MiB. GPU ", static_cast<int>(device), " has a total capacity of ", mebibytes(memory_limit()), " MiB of which ",
        mebibytes(memory_limit() - here.allocated), " MiB is free.");
    void* pointer = host_memory(bytes);
    std::memset(pointer, kPoison, bytes);
    blocks.by_address[static_cast<const char*>(pointer)] = {device, bytes};
    here.allocated += size;
    here.most_allocated = std::max(here.most_allocated, here.allocated);
    here.reserved = std::max(here.reserved, here.allocated);
    here.most_reserved = std::max(here.most_reserved, here.reserved);
    return {pointer, pointer, &free_device_memory, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { std::memcpy(target, source, bytes); }

  bool initialized() override { return is_initialized(); }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> guard(device_blocks().mutex);
    for (auto& here : use) here.reserved = here.allocated;
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto here = memory_use(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = here.allocated;
    stats.allocated_bytes[0].peak = here.most_allocated;
    stats.reserved_bytes[0].current = here.reserved;
    stats.reserved_bytes[0].peak = here.most_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {memory_limit() - memory_use(device).reserved, memory_limit()};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    ensure_initialized();
    void* pointer = host_memory(bytes);
    auto& blocks = pinned_blocks();
    std::lock_guard<std::mutex> guard(blocks.mutex);
    blocks.by_address[static_cast<const char*>(pointer)] = {-1, bytes};
    return {pointer, pointer, &free_pinned_memory, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_memory; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // queued copies hold their tensors
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::DeviceAllocator& device_memory() {
  static auto* allocator = new DeviceMemory;
  return *allocator;
}

at::HostAllocator& pinned_memory() {
  static auto* allocator = new PinnedMemory;
  return *allocator;
}

bool is_pinned(const void* pointer) {
  if (is_bad_fork()) return false;
  auto& blocks = pinned_blocks();
  std::lock_guard<std::mutex> guard(blocks.mutex);
  return blocks.find(pointer) != nullptr;
}

c10::DeviceIndex device_of(const void* pointer) {
  auto& blocks = device_blocks();
  std::lock_guard<std::mutex> guard(blocks.mutex);
  const auto* block = blocks.find(pointer);
  TORCH_CHECK(block, "The specified pointer resides on host memory and is not registered with any simgpu device.");
  return block->device;
}

MemoryUse memory_use(c10::DeviceIndex device) {
  check_ordinal(device);
  if (is_bad_fork()) return {};
  std::lock_guard<std::mutex> guard(device_blocks().mutex);
  return use[device];
}

void reset_peaks(c10::DeviceIndex device) {
  check_ordinal(device);
  std::lock_guard<std::mutex> guard(device_blocks().mutex);
  use[device].most_allocated = use[device].allocated;
  use[device].most_reserved = use[device].reserved;
}

}  // namespace simgpu

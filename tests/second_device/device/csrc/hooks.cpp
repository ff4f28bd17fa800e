// The generators of the devices, and the hooks by which torch asks for generators, pinned memory and devices.
#include "generator.h"
#include "memory.h"
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <cstring>
#include <vector>

namespace simgpu {
namespace {

// With the same seed a GPU draws other numbers than the CPU does, and so does this device.
constexpr uint64_t kSalt = 0x5eed0fde1ce50001;

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator numbers = at::detail::createCPUGenerator();

  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kDeviceType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
    set_current_seed(c10::default_rng_seed_val);
  }
  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed ^ kSalt); }
  uint64_t current_seed() const override { return numbers.current_seed() ^ kSalt; }
  uint64_t seed() override { return numbers.seed() ^ kSalt; }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of simgpu have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of simgpu have no offset"); }
  void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->numbers = numbers.clone();
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override { ensure_initialized(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    if (device >= 0 && device < device_count()) set_current_device(device);
    return before;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return make_generator(device); }
  c10::Device getDeviceFromPtr(void* pointer) const override { return {kDeviceType, device_of(pointer)}; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());  // the allocator looks at the current device only
    before_kernel(storage.device().index());
    auto memory = device_memory().allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex device) {
  if (device < 0) device = current_device();
  check_ordinal(device);
  return at::make_generator<DeviceGenerator>(device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (c10::DeviceIndex each = 0; each < kMaxDevices; each++) generators->push_back(at::make_generator<DeviceGenerator>(each));
    return generators;
  }();
  if (device < 0) device = current_device();
  check_ordinal(device);
  return (*all)[device];
}

at::Generator& numbers_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->numbers;
}

void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kDeviceType, &device_memory(), 1);
  at::setHostAllocator(kDeviceType, &pinned_memory(), 1);
}

}  // namespace simgpu

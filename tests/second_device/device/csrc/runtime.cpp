// The process that has initialised the device, its settings, and the current device.
#include "runtime.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <sstream>
#include <vector>

namespace simgpu {
namespace {

std::atomic<pid_t> initialized_by{0};
thread_local c10::DeviceIndex device_of_thread = 0;

int64_t number_of(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::atoll(text) : otherwise;
}

std::vector<int> read_visible_devices() {
  int count = static_cast<int>(std::min<int64_t>(number_of("SIMGPU_DEVICES", 0), kMaxDevices));
  std::vector<int> visible;
  const char* text = std::getenv("SIMGPU_VISIBLE_DEVICES");
  if (!text) {
    for (int device = 0; device < count; device++) visible.push_back(device);
    return visible;
  }
  std::stringstream list(text);
  for (std::string entry; std::getline(list, entry, ',');) {
    char* end = nullptr;
    long device = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || device < 0 || device >= count) break;  // as CUDA does: the rest is ignored
    visible.push_back(static_cast<int>(device));
  }
  return visible;
}

struct Settings {
  std::vector<int> visible = read_visible_devices();
  int64_t memory = number_of("SIMGPU_MEMORY", int64_t{1} << 31);
  bool late = number_of("SIMGPU_LATE", 1) != 0;
};

// Fixed by the initialisation. Until then a process that forks ranks may change the environment in them.
const Settings& fixed_settings() {
  static const auto* settings = new Settings;
  return *settings;
}

Settings settings() { return is_initialized() ? fixed_settings() : Settings(); }

}  // namespace

int device_count() { return static_cast<int>(is_initialized() ? fixed_settings().visible.size() : settings().visible.size()); }

int physical_index(int device) {
  check_ordinal(device);
  return settings().visible[device];
}

std::string uuid(int device) {
  const char* host = std::getenv("SIMGPU_HOST");
  char name[256] = {};
  if (!host) gethostname(name, sizeof(name) - 1);
  return "SIMGPU-" + std::string(host ? host : name) + "-" + std::to_string(physical_index(device));
}

int64_t memory_limit() { return is_initialized() ? fixed_settings().memory : settings().memory; }
bool is_late() { return is_initialized() ? fixed_settings().late : settings().late; }

void ensure_initialized() {
  pid_t owner = initialized_by.load();
  pid_t here = getpid();
  if (owner == here) return;
  TORCH_CHECK(
      owner == 0,
      "Cannot re-initialize simgpu in forked subprocess. To use simgpu with multiprocessing, you must use the 'spawn' "
      "start method");
  TORCH_CHECK(!read_visible_devices().empty(), "No simgpu devices are available");
  fixed_settings();
  initialized_by.store(here);
}

bool is_initialized() { return initialized_by.load() != 0; }

bool is_bad_fork() {
  pid_t owner = initialized_by.load();
  return owner != 0 && owner != getpid();
}

void check_ordinal(int device) {
  if (device >= 0 && device < device_count()) return;
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 101, "simgpu error: invalid device ordinal");
}

c10::DeviceIndex current_device() { return device_of_thread; }

void set_current_device(c10::DeviceIndex device) {
  check_ordinal(device);
  device_of_thread = device;
}

void set_current_device_unchecked(c10::DeviceIndex device) noexcept { device_of_thread = device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  auto before = device_of_thread;
  if (device >= 0) set_current_device(device);
  return before;
}

c10::DeviceIndex index_or_current(c10::Device device) { return device.has_index() ? device.index() : device_of_thread; }

}  // namespace simgpu

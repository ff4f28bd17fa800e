// What the Python module of the device calls.
#include "collectives.h"
#include "generator.h"
#include "memory.h"
#include "runtime.h"

#include <torch/csrc/utils/pybind.h>

namespace simgpu {
void register_hooks();
}

PYBIND11_MODULE(_simgpu, m) {
  using namespace simgpu;
  using no_gil = pybind11::call_guard<pybind11::gil_scoped_release>;

  register_hooks();
  define_backend(m);

  m.def("initialize", &ensure_initialized);
  m.def("is_initialized", &is_initialized);
  m.def("is_bad_fork", &is_bad_fork);
  m.def("device_count", &device_count);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int device) { set_current_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("exchange_device", [](int device) { return static_cast<int>(exchange_device(static_cast<c10::DeviceIndex>(device))); });
  m.def("check_ordinal", &check_ordinal);
  m.def("uuid", &uuid);
  m.def("synchronize", [](int device) { synchronize_device(static_cast<c10::DeviceIndex>(device)); }, no_gil());
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("memory_limit", &memory_limit);
  m.def("empty_cache", [] { device_memory().emptyCache({0, 0}); });
  m.def("reset_peaks", [](int device) { reset_peaks(static_cast<c10::DeviceIndex>(device)); });
  m.def("memory_use", [](int device) {
    auto use = memory_use(static_cast<c10::DeviceIndex>(device));
    return std::make_tuple(use.allocated, use.most_allocated, use.reserved, use.most_reserved);
  });
}

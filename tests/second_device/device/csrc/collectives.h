// The backend of torch.distributed.
#pragma once

#include <pybind11/pybind11.h>

namespace simgpu {

void define_backend(pybind11::module_& module);

}  // namespace simgpu

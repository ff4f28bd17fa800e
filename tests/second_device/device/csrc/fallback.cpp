// All other operators: the CPU computes them, after what CUDA would refuse was refused.
#include "generator.h"
#include "operators.h"
#include "runtime.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <mutex>
#include <string_view>

namespace simgpu {
namespace {

bool starts_with(std::string_view text, std::string_view beginning) { return text.substr(0, beginning.size()) == beginning; }

// Operators that index: their indices may be on the CPU.
bool takes_host_indices(std::string_view name) {
  return starts_with(name, "aten::index") || starts_with(name, "aten::_index_put") || starts_with(name, "aten::_unsafe_index");
}

bool copies_between_devices(std::string_view name) { return starts_with(name, "aten::_foreach_copy"); }

// The tensors of an argument, whether it is one or a list.
template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      if (tensor && tensor->defined()) visit(*tensor);
  }
}

// The device that an operator runs on. Raises where its tensors are on several.
c10::DeviceIndex device_of_arguments(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) {
  const std::string& name = schema.name();
  std::optional<c10::Device> device, other;
  for (size_t i = 0; i < values.size(); i++) {
    bool may_be_on_host = takes_host_indices(name) && schema.arguments()[i].name() == "indices";
    for_each_tensor(values[i], [&](const at::Tensor& tensor) {
      if (tensor.is_cpu() && (tensor.dim() == 0 || may_be_on_host)) return;
      if (!device) device = tensor.device();
      else if (*device != tensor.device() && !other) other = tensor.device();
    });
    if (values[i].isDevice() && !device && values[i].toDevice().type() == kDeviceType) {
      device = values[i].toDevice();
      if (!device->has_index()) device->set_index(current_device());
    }
  }
  TORCH_CHECK(
      !other || copies_between_devices(name), "Expected all tensors to be on the same device, but found at least two devices, ",
      device ? device->str() : "", " and ", other ? other->str() : "", "! (when checking arguments of ", name, ")");
  if (device && device->type() == kDeviceType) return device->index();
  if (other && other->type() == kDeviceType) return other->index();
  return current_device();
}

// Give an operator that draws random numbers the generator of its device. Returns whether it has an argument for one.
bool replace_generator(const c10::FunctionSchema& schema, c10::DeviceIndex device, torch::jit::Stack& stack, size_t begin) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto type = schema.arguments()[i].type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() != c10::TypeKind::GeneratorType) continue;
    auto& value = stack[begin + i];
    auto generator = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kDeviceType, "Expected a 'simgpu' device type for generator but found '",
        generator.device().type(), "'");
    value = numbers_of(generator);
    return true;
  }
  return false;
}

// Some operators, dropout for one, draw from the default generator of the CPU: it lends itself to the device meanwhile.
struct LentGenerator {
  explicit LentGenerator(at::Generator& numbers) : numbers(numbers), before(host.get_state()) {
    host.set_state(numbers.get_state());
  }
  ~LentGenerator() {
    numbers.set_state(host.get_state());
    host.set_state(before);
  }
  LentGenerator(const LentGenerator&) = delete;
  LentGenerator& operator=(const LentGenerator&) = delete;

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  std::lock_guard<std::mutex> guard{mutex()};
  at::Generator& numbers;
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Tensor before;
};

bool draws_random_numbers(const c10::OperatorHandle& op) {
  for (auto tag : op.getTags())
    if (tag == at::Tag::nondeterministic_seeded) return true;
  return op.schema().name() == "aten::native_dropout";
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t begin = stack->size() - schema.arguments().size();
  auto device = device_of_arguments(schema, c10::ArrayRef<c10::IValue>(*stack).slice(begin));
  before_kernel(device);
  InKernel in_kernel;
  if (draws_random_numbers(op) && !replace_generator(schema, device, *stack, begin)) {
    LentGenerator lent(numbers_of(default_generator(device)));
    at::native::cpu_fallback(op, stack);
    return;
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

}  // namespace simgpu

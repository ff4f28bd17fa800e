// Cells of LSTM and GRU: torch gives every new device these operators, and none of the CPU's.
#include "operators.h"
#include "runtime.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace simgpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

Tensor gates_of(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? host_view(gates) + host_view(*bias) : host_view(gates);
}


std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto device = input_gates.device();
  before_kernel(device.index());
  InKernel in_kernel;
  auto gates = (gates_of(input_gates, input_bias) + gates_of(hidden_gates, hidden_bias)).chunk(4, 1);
  auto input = gates[0].sigmoid(), forget = gates[1].sigmoid(), change = gates[2].tanh(), output = gates[3].sigmoid();
  auto new_cell = forget * host_view(cell) + input * change;
  auto hidden = output * new_cell.tanh();
  return {hidden.to(device), new_cell.to(device), at::cat({input, forget, change, output}, 1).to(device)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& hidden_gradient, const OptionalTensor& cell_gradient, const Tensor& cell, const Tensor& new_cell,
    const Tensor& workspace, bool has_bias) {
  auto device = workspace.device();
  before_kernel(device.index());
  InKernel in_kernel;
  auto kept = host_view(workspace).chunk(4, 1);
  const auto &input = kept[0], &forget = kept[1], &change = kept[2], &output = kept[3];
  auto of = [&](const OptionalTensor& gradient) {
    return gradient && gradient->defined() ? host_view(*gradient) : at::zeros_like(input);
  };
  auto of_hidden = of(hidden_gradient);
  auto squashed = host_view(new_cell).tanh();
  auto of_cell = of(cell_gradient) + at::tanh_backward(of_hidden * output, squashed);
  auto of_gates = at::cat(
      {at::sigmoid_backward(of_cell * change, input), at::sigmoid_backward(of_cell * host_view(cell), forget),
       at::tanh_backward(of_cell * input, change), at::sigmoid_backward(of_hidden * squashed, output)},
      1);
  Tensor of_bias = has_bias ? of_gates.sum(0).to(device) : Tensor();
  return {of_gates.to(device), (of_cell * forget).to(device), of_bias};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto device = input_gates.device();
  before_kernel(device.index());
  InKernel in_kernel;
  auto from_input = gates_of(input_gates, input_bias).chunk(3, 1);
  auto from_hidden = gates_of(hidden_gates, hidden_bias).chunk(3, 1);
  auto before = host_view(hidden);
  auto reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
  auto change = (from_input[2] + reset * from_hidden[2]).tanh();
  auto after = change + update * (before - change);
  return {after.to(device), at::cat({reset, update, change, before, from_hidden[2]}, 1).to(device)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  auto device = workspace.device();
  before_kernel(device.index());
  InKernel in_kernel;
  auto kept = host_view(workspace).chunk(5, 1);
  const auto &reset = kept[0], &update = kept[1], &change = kept[2], &before = kept[3], &from_hidden = kept[4];
  auto of_hidden = host_view(gradient);
  auto of_change = at::tanh_backward(of_hidden * (1 - update), change);
  auto of_update = at::sigmoid_backward(of_hidden * (before - change), update);
  auto of_reset = at::sigmoid_backward(of_change * from_hidden, reset);
  auto of_input_gates = at::cat({of_reset, of_update, of_change}, 1);
  auto of_hidden_gates = at::cat({of_reset, of_update, of_change * reset}, 1);
  auto of_bias = [&](const Tensor& gates) { return has_bias ? gates.sum(0).to(device) : Tensor(); };
  return {
      of_input_gates.to(device), of_hidden_gates.to(device), (of_hidden * update).to(device), of_bias(of_input_gates),
      of_bias(of_hidden_gates)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace simgpu

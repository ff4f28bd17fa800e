// simccl: collectives of the device. They run on copies in host memory, by gloo, and their results come back when a stream
// waits for them: until then a tensor holds its old numbers. What NCCL refuses is refused.
#include "collectives.h"

#include "operators.h"
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <set>
#include <thread>

namespace simgpu {
namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Aborted = std::shared_ptr<std::atomic<bool>>;

// --- what is refused

void check_tensor(const at::Tensor& tensor) {
  TORCH_CHECK_WITH(
      ValueError, tensor.is_privateuseone(), "Tensors must be simgpu tensors, but one is on ", tensor.device().str());
  TORCH_CHECK_WITH(ValueError, tensor.layout() == at::kStrided, "Tensors must be dense");
  TORCH_CHECK_WITH(ValueError, tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  TORCH_CHECK_WITH(
      TypeError, tensor.scalar_type() != at::kShort, "Input tensor data type is not supported for simccl process group: ",
      tensor.scalar_type());
}

void check_reduction(const c10d::ReduceOp& op) {
  auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  TORCH_CHECK_WITH(
      ValueError, kind != c10d::ReduceOp::BAND && kind != c10d::ReduceOp::BOR && kind != c10d::ReduceOp::BXOR,
      "Cannot use a bitwise ReduceOp with simccl");
  TORCH_CHECK_WITH(ValueError, kind != c10d::ReduceOp::PREMUL_SUM, "simccl has no ReduceOp.PREMUL_SUM");
}

// --- copies in host memory

at::Tensor host_copy(const at::Tensor& tensor) {
  check_tensor(tensor);
  before_kernel(tensor.device().index());
  at::NoGradGuard no_grad;
  return host_view(tensor.detach()).clone();
}

at::Tensor host_like(const at::Tensor& tensor) {
  check_tensor(tensor);
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

Tensors host_copies(const Tensors& tensors) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(host_copy(tensor));
  return copies;
}

Tensors host_likes(const Tensors& tensors) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(host_like(tensor));
  return copies;
}

Lists host_copies(const Lists& lists) {
  Lists copies;
  for (const auto& tensors : lists) copies.push_back(host_copies(tensors));
  return copies;
}

Lists host_likes(const Lists& lists) {
  Lists copies;
  for (const auto& tensors : lists) copies.push_back(host_likes(tensors));
  return copies;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

// --- one collective

// Its state outlives the Work, which nobody needs to keep: a collective ends all the same.
struct Running {
  WorkPointer by_gloo;
  Tensors results;        // on the device
  Tensors host_results;
  int64_t divide_by = 1;  // number of ranks for a mean, which gloo does not compute
  Aborted aborted;
  std::atomic<bool> has_thread{false};
  std::atomic<bool> thread_has_ended{false};
  std::atomic<bool> is_done{false};
  std::exception_ptr error;

  // gloo ends a message only while somebody waits for it. The host does not: it may have to send what the other rank needs.
  static void wait_in_thread(const std::shared_ptr<Running>& state) {
    state->has_thread = true;
    std::thread([state, work = state->by_gloo] {
      try {
        work->wait();
      } catch (...) {
        state->error = std::current_exception();
      }
      state->thread_has_ended = true;
    }).detach();
  }

  bool has_ended() const { return has_thread ? thread_has_ended.load() : by_gloo->isCompleted(); }

  // Returns false while other ranks are missing. After an abort it waits for nobody, and the numbers stay as they were.
  bool try_finish() {
    if (is_done) return true;
    if (!*aborted) {
      if (!has_ended()) return false;
      try {
        if (!has_thread) by_gloo->wait();
        if (!error) copy_back();
      } catch (...) {
        error = std::current_exception();
      }
    }
    is_done = true;
    by_gloo.reset();
    auto failure = error;
    if (failure) std::rethrow_exception(failure);
    return true;
  }

  void copy_back() {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < results.size(); i++) {
      auto& numbers = host_results[i];
      if (divide_by > 1 && at::isIntegralType(numbers.scalar_type(), false)) numbers.floor_divide_(divide_by);
      else if (divide_by > 1) numbers.div_(divide_by);
      host_view(results[i].detach()).copy_(numbers);
    }
  }
};

struct DeviceWork final : c10d::Work {
  DeviceWork(std::shared_ptr<Running> state, Tensors outputs, c10::DeviceIndex device, c10d::OpType type, bool is_barrier)
      : Work(-1, type), running(std::move(state)), outputs(std::move(outputs)), device(device), is_barrier(is_barrier) {
    auto task = [state = running] { return state->try_finish(); };
    enqueue(device, stream, task);
    complete_future();
  }

  bool isCompleted() override {
    if (!running->is_done) {
      try {
        query_stream(device, stream);
      } catch (...) {  // exception() has it
      }
    }
    return running->is_done;
  }
  bool isSuccess() const override { return running->is_done && !running->error; }
  std::exception_ptr exception() const override { return running->error; }
  Tensors result() override { return outputs; }
  void synchronize() override { wait_event(device, current_stream(device), record_event(device, stream)); }
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  // Returns at once, as NCCL's does: the current stream waits, and not the host.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    check_aborted();
    if (running->error) std::rethrow_exception(running->error);
    if (is_barrier || timeout.count() > 0) wait_on_host(timeout);
    synchronize();
    if (is_barrier) synchronize_stream(device, current_stream(device));
    return true;
  }

  void wait_on_host(std::chrono::milliseconds timeout) {
    auto deadline = std::chrono::steady_clock::now() + timeout;
    wait_until([&] {
      if (query_stream(device, stream)) return true;
      TORCH_CHECK_WITH(
          DistBackendError, timeout.count() <= 0 || std::chrono::steady_clock::now() < deadline,
          "a collective of simccl has timed out after ", timeout.count(), " ms");
      return false;
    });
    check_aborted();
  }

  void check_aborted() const {
    TORCH_CHECK_WITH(DistBackendError, !*running->aborted, "simccl communicator was aborted");
  }

  // The future is complete at once, with an event of the collective's stream for which waiting streams wait. Its value are
  // the tensors on the device: DistributedDataParallel reads them.
  void complete_future() {
    c10::Device where(kDeviceType, device);
    c10::impl::VirtualGuardImpl guard(kDeviceType);
    auto before = guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, where, stream));
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{where});
    future->markCompleted(c10::IValue(outputs));
    guard.exchangeStream(before);
  }

  std::shared_ptr<Running> running;
  Tensors outputs;
  c10::DeviceIndex device;
  bool is_barrier;
  c10::StreamId stream = new_stream_id();
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

// --- the group

class Backend final : public c10d::Backend {
 public:
  explicit Backend(c10::intrusive_ptr<c10d::Backend> on_host)
      : c10d::Backend(on_host->getRank(), on_host->getSize()), gloo(std::move(on_host)) {}

  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_number; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto copies = connect(tensors);
    return start(gloo->broadcast(copies, options), tensors, copies, c10d::OpType::BROADCAST);
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_reduction(options.reduceOp);
    auto copies = connect(tensors);
    auto summed = options;
    auto divide_by = sum_for_mean(summed.reduceOp);
    return start(gloo->allreduce(copies, summed), tensors, copies, c10d::OpType::ALLREDUCE, divide_by);
  }

  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check_reduction(options.reduceOp);
    auto copies = connect(tensors);
    auto summed = options;
    auto divide_by = sum_for_mean(summed.reduceOp);
    return start(gloo->allreduce_coalesced(copies, summed), tensors, copies, c10d::OpType::ALLREDUCE_COALESCED, divide_by);
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_reduction(options.reduceOp);
    auto copies = connect(tensors);
    auto summed = options;
    auto divide_by = sum_for_mean(summed.reduceOp);
    auto work = gloo->reduce(copies, summed);
    bool is_root = getRank() == options.rootRank;  // tensors of others stay as they are
    return start(work, tensors, is_root ? tensors : Tensors(), is_root ? copies : Tensors(), c10d::OpType::REDUCE, divide_by);
  }

  WorkPointer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto copies = connect(inputs);
    auto results = host_likes(outputs);
    return start(gloo->allgather(results, copies, options), flat(outputs), flat(results), c10d::OpType::ALLGATHER);
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto copy = connect({input})[0];
    auto result = host_like(output);
    return start(gloo->_allgather_base(result, copy, options), {output}, {result}, c10d::OpType::_ALLGATHER_BASE);
  }

  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto copies = connect(inputs);
    auto results = host_likes(outputs);
    return start(
        gloo->allgather_into_tensor_coalesced(results, copies, options), outputs, results, c10d::OpType::COALESCED);
  }

  WorkPointer gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto copies = connect(inputs);
    auto results = host_likes(outputs);
    return start(gloo->gather(results, copies, options), inputs, flat(outputs), flat(results), c10d::OpType::GATHER);
  }

  WorkPointer scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto results = connect(outputs);
    auto copies = host_copies(inputs);
    return start(gloo->scatter(results, copies, options), outputs, results, c10d::OpType::SCATTER);
  }

  // gloo's own reduce_scatter ends when somebody waits for it only: all is reduced in its place, and a part kept.

  WorkPointer reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors parts, results;
    for (const auto& list : inputs) {
      for (const auto& copy : connect(list)) parts.push_back(copy);
      results.push_back(parts.at(parts.size() - list.size() + getRank()));
    }
    return reduce_and_keep(outputs, parts, results, options, c10d::OpType::REDUCE_SCATTER);
  }

  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto whole = connect({input});
    return reduce_and_keep({output}, whole, {own_part(whole[0], output)}, options, c10d::OpType::_REDUCE_SCATTER_BASE);
  }

  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto wholes = connect(inputs);
    Tensors results;
    for (size_t i = 0; i < wholes.size(); i++) results.push_back(own_part(wholes[i], outputs.at(i)));
    return reduce_and_keep(outputs, wholes, results, options, c10d::OpType::COALESCED);
  }

  WorkPointer alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto copy = connect({input})[0];
    auto result = host_like(output);
    auto work = gloo->alltoall_base(result, copy, output_sizes, input_sizes, options);
    return start(work, {output}, {result}, c10d::OpType::ALLTOALL_BASE);
  }

  WorkPointer send(Tensors& tensors, int target, int tag) override {
    check_usable();
    auto copies = host_copies(tensors);
    return start(gloo->send(copies, target, tag), tensors, {}, {}, c10d::OpType::SEND);
  }

  WorkPointer recv(Tensors& tensors, int source, int tag) override {
    check_usable();
    auto results = host_likes(tensors);
    return start(gloo->recv(results, source, tag), tensors, results, c10d::OpType::RECV);
  }

  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    check_usable();
    auto device = static_cast<c10::DeviceIndex>(options.device_ids.empty() ? current_device() : options.device_ids[0]);
    check_ordinal(device);
    before_kernel(device);
    c10d::BarrierOptions of_gloo;
    of_gloo.timeout = options.timeout;
    auto running = std::make_shared<Running>();
    running->by_gloo = gloo->barrier(of_gloo);
    return queue(std::move(running), {}, device, c10d::OpType::BARRIER);
  }

  // gloo cannot end a collective that waits: its threads and sockets are kept until the process ends.
  void abort() override {
    static auto* kept = new std::vector<c10::intrusive_ptr<c10d::Backend>>;
    if (!aborted->exchange(true)) kept->push_back(gloo);
  }

  void shutdown() override {}

 private:
  void check_usable() const { TORCH_CHECK_WITH(DistBackendError, !*aborted, "simccl communicator was aborted"); }

  // gloo has no mean.
  int64_t sum_for_mean(c10d::ReduceOp& op) const {
    if (static_cast<c10d::ReduceOp::RedOpType>(op) != c10d::ReduceOp::AVG) return 1;
    op = c10d::ReduceOp::SUM;
    return getSize();
  }

  at::Tensor own_part(const at::Tensor& whole, const at::Tensor& output) const {
    TORCH_CHECK_WITH(
        ValueError, whole.numel() == output.numel() * getSize(), "input tensor must be the size of output tensor times world size");
    return whole.flatten().narrow(0, getRank() * output.numel(), output.numel()).view(output.sizes());
  }

  WorkPointer reduce_and_keep(
      const Tensors& outputs, Tensors& wholes, const Tensors& results, const c10d::ReduceScatterOptions& options,
      c10d::OpType type) {
    check_reduction(options.reduceOp);
    for (const auto& output : outputs) check_tensor(output);
    c10d::AllreduceCoalescedOptions of_gloo;
    of_gloo.reduceOp = options.reduceOp;
    of_gloo.timeout = options.timeout;
    auto divide_by = sum_for_mean(of_gloo.reduceOp);
    return start(gloo->allreduce_coalesced(wholes, of_gloo), outputs, results, type, divide_by);
  }

  // Copies of the tensors of a collective, the first of which finds out that two ranks use one device.
  Tensors connect(const Tensors& tensors) {
    check_usable();
    auto copies = host_copies(tensors);
    if (!copies.empty() && getSize() > 1 && connected.insert(tensors[0].device().index()).second)
      check_devices(tensors[0].device().index());
    return copies;
  }

  void check_devices(c10::DeviceIndex device) {
    auto mine = at::full({1}, static_cast<int64_t>(std::hash<std::string>()(uuid(device))), at::kLong);
    auto all = at::empty({getSize()}, at::kLong);
    auto work = gloo->_allgather_base(all, mine, c10d::AllgatherOptions());
    wait_until([&] { return work->isCompleted() || *aborted; });
    check_usable();
    work->wait();
    for (int rank = 0; rank < getSize(); rank++)
      TORCH_CHECK_WITH(
          DistBackendError, rank == getRank() || all[rank].item<int64_t>() != mine.item<int64_t>(),
          "Duplicate GPU detected : rank ", getRank(), " and rank ", rank, " both on simgpu device ", uuid(device));
  }

  WorkPointer start(WorkPointer work, Tensors outputs, Tensors host_results, c10d::OpType type, int64_t divide_by = 1) {
    auto results = outputs;
    return start(std::move(work), std::move(outputs), std::move(results), std::move(host_results), type, divide_by);
  }

  // `tensors` are what the Work returns; `results` those of them that the collective writes.
  WorkPointer start(
      WorkPointer work, Tensors tensors, Tensors results, Tensors host_results, c10d::OpType type, int64_t divide_by = 1) {
    auto running = std::make_shared<Running>();
    running->by_gloo = std::move(work);
    running->results = std::move(results);
    running->host_results = std::move(host_results);
    running->divide_by = divide_by;
    auto device = tensors.at(0).device().index();
    return queue(std::move(running), std::move(tensors), device, type);
  }

  WorkPointer queue(std::shared_ptr<Running> running, Tensors tensors, c10::DeviceIndex device, c10d::OpType type) {
    sequence_number++;
    running->aborted = aborted;
    if (type == c10d::OpType::SEND || type == c10d::OpType::RECV) Running::wait_in_thread(running);
    return c10::make_intrusive<DeviceWork>(
        std::move(running), std::move(tensors), device, type, type == c10d::OpType::BARRIER);
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  Aborted aborted = std::make_shared<std::atomic<bool>>(false);
  std::atomic<uint64_t> sequence_number{0};
  std::set<c10::DeviceIndex> connected;
};

}  // namespace

void define_backend(pybind11::module_& module) {
  pybind11::module_::import("torch._C._distributed_c10d");
  pybind11::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>>())
      .def("_group_start", [](Backend&) {})  // torch aborts several groups between these
      .def("_group_end", [](Backend&) {});
}

}  // namespace simgpu

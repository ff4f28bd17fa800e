// Streams with queues, events, and the guard by which torch uses them.
#include "runtime.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

namespace simgpu {
namespace {

struct Queued {
  uint64_t ticket;
  Task task;
};

struct Queue {
  std::deque<Queued> for_kernels;
  std::deque<Queued> for_host;
};

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

std::atomic<uint64_t> last_ticket{0};
std::atomic<c10::StreamId> last_stream{0};
thread_local c10::StreamId stream_of_thread[kMaxDevices] = {};

// Never destroyed: threads of torch may use it while the process ends.
struct Streams {
  std::recursive_mutex mutex;
  int depth = 0;
  std::map<Key, Queue> queues;
  std::vector<Queued> finished;
};

Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

std::map<Key, Queue>& queues() { return streams().queues; }

// Tasks that are finished are destroyed without the lock: the last reference to a tensor may need Python's own lock.
struct Lock {
  Lock() {
    streams().mutex.lock();
    streams().depth++;
  }
  ~Lock() {
    std::vector<Queued> finished;
    if (--streams().depth == 0) finished.swap(streams().finished);
    streams().mutex.unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

double milliseconds_now() {
  std::chrono::duration<double, std::milli> now = std::chrono::steady_clock::now().time_since_epoch();
  return now.count();
}

bool run_queue(std::deque<Queued>& queue, uint64_t until) {
  while (!queue.empty() && queue.front().ticket <= until) {
    // Taken out first: the task may wait for another stream that waits for what was on this one before.
    Queued next = std::move(queue.front());
    queue.pop_front();
    if (!next.task()) {
      queue.push_front(std::move(next));
      return false;
    }
    streams().finished.push_back(std::move(next));
  }
  return true;
}

// Do what was queued up to a ticket, as far as it can end now. Called with the lock.
bool try_finish(Key key, uint64_t until, bool with_host) {
  auto found = queues().find(key);
  if (found == queues().end()) return true;
  bool done = run_queue(found->second.for_kernels, until) && (!with_host || run_queue(found->second.for_host, until));
  found = queues().find(key);
  if (found != queues().end() && found->second.for_kernels.empty() && found->second.for_host.empty()) queues().erase(found);
  return done;
}

bool try_finish_device(c10::DeviceIndex device) {
  std::vector<Key> keys;
  for (const auto& [key, _] : queues())
    if (key.first == device) keys.push_back(key);
  bool done = true;
  for (const auto& key : keys) done = try_finish(key, kAll, true) && done;
  return done;
}

}  // namespace

void wait_until(const std::function<bool()>& condition) {
  while (true) {
    {
      Lock lock;
      if (condition()) return;
    }
    usleep(50);
  }
}

c10::StreamId new_stream_id() { return ++last_stream; }
c10::StreamId current_stream(c10::DeviceIndex device) { return stream_of_thread[device]; }
void set_current_stream(c10::DeviceIndex device, c10::StreamId stream) { stream_of_thread[device] = stream; }

void enqueue(c10::DeviceIndex device, c10::StreamId stream, Task task) {
  {
    Lock lock;
    queues()[{device, stream}].for_kernels.push_back({++last_ticket, std::move(task)});
  }
  if (!is_late()) synchronize_stream(device, stream);
}

void enqueue_for_host(c10::DeviceIndex device, c10::StreamId stream, Task task) {
  {
    Lock lock;
    queues()[{device, stream}].for_host.push_back({++last_ticket, std::move(task)});
  }
  if (!is_late()) synchronize_stream(device, stream);
}

Event record_event(c10::DeviceIndex device, c10::StreamId stream) {
  return {device, stream, last_ticket.load(), milliseconds_now()};
}

void wait_event(c10::DeviceIndex device, c10::StreamId stream, const Event& event) {
  Key source{event.device, event.stream};
  if (source == Key{device, stream}) return;
  {
    Lock lock;
    if (!queues().count(source)) return;
  }
  uint64_t until = event.ticket;
  enqueue(device, stream, [=] { return try_finish(source, until, false); });
  enqueue_for_host(device, stream, [=] { return try_finish(source, until, true); });
}

bool query_event(const Event& event) {
  Lock lock;
  return try_finish({event.device, event.stream}, event.ticket, true);
}

void synchronize_event(const Event& event) {
  wait_until([&] { return try_finish({event.device, event.stream}, event.ticket, true); });
}

bool query_stream(c10::DeviceIndex device, c10::StreamId stream) {
  Lock lock;
  return try_finish({device, stream}, kAll, true);
}

void synchronize_stream(c10::DeviceIndex device, c10::StreamId stream) {
  wait_until([&] { return try_finish({device, stream}, kAll, true); });
}

void synchronize_device(c10::DeviceIndex device) {
  wait_until([&] { return try_finish_device(device); });
}

void before_kernel(c10::DeviceIndex device) {
  ensure_initialized();
  Key key{device, current_stream(device)};
  wait_until([&] { return try_finish(key, kAll, false); });
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDeviceType;

  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDeviceType, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device_unchecked(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  static c10::Stream make_stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kDeviceType, index_or_current(device)}, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return make_stream(device, current_stream(index_or_current(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return make_stream(device, new_stream_id());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return make_stream(device, new_stream_id()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream.device_index(), stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = record_event(stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_event(stream.device_index(), stream.id(), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return !event || query_event(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<Event*>(second)->milliseconds - static_cast<Event*>(first)->milliseconds;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace simgpu

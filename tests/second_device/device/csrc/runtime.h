// What the parts of the device share: settings, the process that has initialised it, its current device and streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

namespace simgpu {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr uint8_t kPoison = 0xFF;  // NaN in every type of floating point, -1 in every signed integer

// --- settings, from the environment; those that a driver would read at its start are fixed when the device is initialised

int device_count();                      // of the devices that SIMGPU_VISIBLE_DEVICES leaves of SIMGPU_DEVICES
int physical_index(int device);          // the number of a visible device on this machine
std::string uuid(int device);            // unique over all machines
int64_t memory_limit();                  // SIMGPU_MEMORY: bytes of each device
bool is_late();                          // SIMGPU_LATE: copies and collectives end at the last moment that is allowed

// --- the process

void ensure_initialized();               // raises in a fork of a process that has initialised the device
bool is_initialized();
bool is_bad_fork();

// --- the current device of a thread

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);            // raises for a bad ordinal
void set_current_device_unchecked(c10::DeviceIndex device) noexcept;
c10::DeviceIndex exchange_device(c10::DeviceIndex device);   // -1 changes nothing
c10::DeviceIndex index_or_current(c10::Device device);
void check_ordinal(int device);

// --- streams. Kernels run when they are called. What a GPU would do later (a copy that does not block, a collective) is
// queued on a stream, and is done when a kernel of that stream needs it, or the host synchronises with it.

using Task = std::function<bool()>;      // false: it cannot end yet
constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();

struct Event {
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  uint64_t ticket = 0;                   // everything on the stream that was queued up to it
  double milliseconds = 0;
};

c10::StreamId new_stream_id();
c10::StreamId current_stream(c10::DeviceIndex device);
void set_current_stream(c10::DeviceIndex device, c10::StreamId stream);

void enqueue(c10::DeviceIndex device, c10::StreamId stream, Task task);          // seen by kernels of the stream
void enqueue_for_host(c10::DeviceIndex device, c10::StreamId stream, Task task);  // seen after a synchronisation only

Event record_event(c10::DeviceIndex device, c10::StreamId stream);
void wait_event(c10::DeviceIndex device, c10::StreamId stream, const Event& event);
bool query_event(const Event& event);
void synchronize_event(const Event& event);

bool query_stream(c10::DeviceIndex device, c10::StreamId stream);
void synchronize_stream(c10::DeviceIndex device, c10::StreamId stream);
void synchronize_device(c10::DeviceIndex device);
void before_kernel(c10::DeviceIndex device);  // what the current stream of the device has to do first is done

// Wait until `condition` holds; the streams are locked while it is asked.
void wait_until(const std::function<bool()>& condition);

}  // namespace simgpu

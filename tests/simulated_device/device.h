// What the parts of the simulated device share: its memory, the order of its streams, and its counters.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

int device_count();  // as the variable SIMULATED_DEVICES says
int current_device();
void set_device(int index);

// What happened since the program began. What makes the host wait for the device is counted by its kind.
struct Counters {
  std::atomic<int64_t> reads{0};            // of one value, and operations whose result has a size that is read
  std::atomic<int64_t> copies_to_host{0};   // blocking, or to memory that is not pinned
  std::atomic<int64_t> copies_to_device{0};  // blocking
  std::atomic<int64_t> event_waits{0};
  std::atomic<int64_t> stream_waits{0};
  std::atomic<int64_t> device_waits{0};
  std::atomic<int64_t> barriers{0};
  std::atomic<int64_t> staged{0};  // copies from memory that is not pinned; no wait, but the host's time
  std::atomic<int64_t> operations{0};
  std::atomic<int64_t> collectives{0};
};
extern Counters counters;

// While one lives, copies belong to an operation of the device and are not counted.
struct Inside {
  Inside();
  ~Inside();
  static bool now();
};

// Lets the host touch the memory of a tensor; without one it is SIGSEGV.
class Opened {
 public:
  explicit Opened(const at::Tensor& tensor);
  explicit Opened(const void* address);
  ~Opened();
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

 private:
  uintptr_t base_ = 0;
};

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor);

// Notes that work of the current stream reads or writes a tensor, in the operation of that name.
void uses(const at::Tensor& tensor, bool writes, const std::string& operation);

// Work of streams that nothing put in order although it uses the same memory. What comes later is after all of that.
std::vector<std::string> take_hazards();

}  // namespace simulated

// A simulated accelerator, as a device of torch that is not built in (PrivateUse1).
//
// It computes on the CPU, at once, and behaves as an accelerator where programs go wrong:
//   - Its memory can be neither read nor written by the host: that is SIGSEGV.
//   - An operation refuses tensors of several devices, but for numbers (0-dim) of the CPU and indices.
//   - Backward runs in threads of the device.
//   - What would make the host wait for it is counted.
//   - It has streams and events, and notes work of two streams on the same memory that no event puts in order.
//   - It has random numbers of its own.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <unordered_set>

namespace simulated {

Counters counters;

namespace {

constexpr int kMostDevices = 16;

int64_t number(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::atoll(text) : otherwise;
}

thread_local int inside = 0;
thread_local int current = 0;
thread_local c10::StreamId streams[kMostDevices] = {0};

// -- the order of streams ---------------------------------------------------------------------------------------------

using Stream = std::pair<int, c10::StreamId>;
using Times = std::map<Stream, int64_t>;  // how much of the work of each stream

struct Block {
  size_t size;
  int device;
  c10::StreamId stream;  // it was allocated on, whose later work may get the memory when it is freed
  int opened = 0;
  Times read, written;  // when a stream did so last
  Times earlier;  // when a stream used memory that was freed and may be the same
  std::set<c10::StreamId> recorded;
};

std::mutex mutex;  // of all below
std::map<uintptr_t, Block> blocks;
std::map<Stream, Times> known;  // the work that has ended, as a stream may take for granted
Times known_to_host;
std::map<Stream, Times> freed;  // when a stream last used memory that another one had allocated and may get again
std::vector<std::string> hazards;

void learn(Times& mine, const Times& theirs) {
  for (const auto& [stream, time] : theirs) mine[stream] = std::max(mine[stream], time);
}

Stream stream_of(int device) {
  return {device, streams[device]};
}

std::string name_of(const Stream& stream) {
  return "stream " + std::to_string(stream.second) + " of sim:" + std::to_string(stream.first);
}

// Work that was not waited for.
std::vector<Stream> unknown(const Times& mine, const Times& theirs, const Stream& me) {
  std::vector<Stream> found;
  for (const auto& [stream, time] : theirs) {
    auto at = mine.find(stream);
    if (stream != me && (at == mine.end() || at->second < time)) found.push_back(stream);
  }
  return found;
}

std::map<uintptr_t, Block>::iterator block_of(const void* address) {
  auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (!address || after == blocks.begin()) return blocks.end();
  auto found = std::prev(after);
  return reinterpret_cast<uintptr_t>(address) < found->first + found->second.size ? found : blocks.end();
}

void use_block(Block& block, bool writes, const std::string& operation) {
  const Stream me = stream_of(block.device);
  Times& mine = known[me];
  learn(mine, known_to_host);  // the host, which starts the work, has waited for that
  const auto check = [&](const Times& before, const char* what) {
    for (const Stream& other : unknown(mine, before, me))
      if (hazards.size() < 1000)
        hazards.push_back(
            operation + ": " + name_of(me) + (writes ? " writes " : " reads ") + what + name_of(other) +
            ", and does not wait for it");
  };
  check(block.written, "what is written by ");
  if (writes) check(block.read, "what is read by ");
  check(block.earlier, "memory that was freed without a wait or record_stream, after use by ");
  (writes ? block.written : block.read)[me] = ++mine[me];
}

void note_free(Block& block) {
  for (const c10::StreamId id : block.recorded)  // whose work the allocator waits for
    for (Times* before : {&block.written, &block.read}) before->erase({block.device, id});
  Times& left = freed[{block.device, block.stream}];
  for (const Times* before : {&block.written, &block.read, &block.earlier}) learn(left, *before);
}

// -- memory -----------------------------------------------------------------------------------------------------------

void free_block(void* address);

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current));
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    const size_t page = sysconf(_SC_PAGESIZE), rounded = (size + page - 1) / page * page;
    std::lock_guard<std::mutex> lock(mutex);
    auto& bytes = stats_[current].allocated_bytes[0];
    TORCH_CHECK_WITH(
        OutOfMemoryError, bytes.current + static_cast<int64_t>(rounded) <= total(), "sim:", current, " out of memory");
    void* address = mmap(nullptr, rounded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "sim: the host has no memory for ", rounded, " B");
    Block& block = blocks[reinterpret_cast<uintptr_t>(address)] = {rounded, current, streams[current]};
    block.earlier = freed[stream_of(current)];
    count(current, static_cast<int64_t>(rounded));
    return {address, address, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    Opened one(to), other(from);
    std::memcpy(to, from, size);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record(pointer.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    stats_[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for (auto* of : {&stats_[device].allocated_bytes, &stats_[device].reserved_bytes, &stats_[device].active_bytes})
      (*of)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // virtual since torch 2.10
    return {total() - stats_[device].allocated_bytes[0].current, total()};
  }

  static int64_t total() {
    static const int64_t bytes = number("SIMULATED_BYTES", int64_t{4} << 30);
    return bytes;
  }
  void count(int device, int64_t bytes) {
    for (auto* of : {&stats_[device].allocated_bytes, &stats_[device].reserved_bytes, &stats_[device].active_bytes})
      bytes > 0 ? (*of)[0].increase(bytes) : (*of)[0].decrease(-bytes);
  }
  static void record(const void* address, c10::StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = block_of(address);
    if (found != blocks.end()) found->second.recorded.insert(stream);
  }

 private:
  c10::CachingDeviceAllocator::DeviceStats stats_[kMostDevices];
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &device_memory);

void free_block(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = address ? blocks.find(reinterpret_cast<uintptr_t>(address)) : blocks.end();
  if (found == blocks.end()) return;
  note_free(found->second);
  device_memory.count(found->second.device, -static_cast<int64_t>(found->second.size));
  munmap(address, found->second.size);
  blocks.erase(found);
}

// Memory of the host that copies need not wait for.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> lock(mutex);
    sizes()[reinterpret_cast<uintptr_t>(address)] = size;
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
  static bool has(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = sizes().upper_bound(reinterpret_cast<uintptr_t>(address));
    return after != sizes().begin() &&
        reinterpret_cast<uintptr_t>(address) < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static std::map<uintptr_t, size_t>& sizes() {
    static auto* of = new std::map<uintptr_t, size_t>;
    return *of;
  }
  static void release(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    sizes().erase(reinterpret_cast<uintptr_t>(address));
    c10::free_cpu(address);
  }
};
PinnedMemory pinned_memory;

// -- devices, streams, events -----------------------------------------------------------------------------------------

int index_of(c10::Device device) {
  return device.index() < 0 ? current : device.index();
}

c10::Stream as_stream(int device, c10::StreamId id) {
  const c10::Device at(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, at, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current)};
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = index_of(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  c10::Stream getStream(c10::Device device) const override {
    return as_stream(index_of(device), streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<c10::StreamId> next{1};
    return as_stream(index_of(device), next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    DeviceMemory::record(pointer.get(), stream.id());
  }
  // An event is what its stream knew, and did, when it was recorded.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> lock(mutex);
    if (!*event) *event = new Times;
    Times& mine = known[{stream.device_index(), stream.id()}];
    learn(mine, known_to_host);
    *static_cast<Times*>(*event) = mine;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Times*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(mutex);
    if (event) learn(known[{stream.device_index(), stream.id()}], *static_cast<Times*>(event));
  }
  bool queryEvent(void* event) const override {  // everything has ended: what was asked may be relied on
    learn_from_event(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    counters.event_waits++;
    learn_from_event(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(mutex);
    learn(known_to_host, known[{stream.device_index(), stream.id()}]);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    counters.stream_waits++;
    queryStream(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    counters.device_waits++;
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [stream, times] : known)
      if (stream.first == device) learn(known_to_host, times);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 0;
  }

 private:
  static void learn_from_event(void* event) {
    std::lock_guard<std::mutex> lock(mutex);
    if (event) learn(known_to_host, *static_cast<Times*>(event));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void wait_for_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  learn(known_to_host, known[stream_of(device)]);
}

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current;
    set_device(device);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? static_cast<c10::DeviceIndex>(current) : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return PinnedMemory::has(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  at::Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = block_of(address);
    TORCH_CHECK(found != blocks.end(), "this is no memory of a simulated device");
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(found->second.device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static const auto* of = [] {
      auto* made = new std::vector<at::Generator>;
      for (int index = 0; index < kMostDevices; index++) made->push_back(at::make_generator<Generator>(index));
      return made;
    }();
    return (*of)[device < 0 ? current : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const int before = current;
    current = impl->device().index();
    c10::DataPtr fresh = device_memory.allocate(size);
    current = before;
    if (const size_t kept = std::min(size, impl->nbytes())) device_memory.copy_data(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};
const Hooks* hooks = [] {
  auto* made = new Hooks;
  at::RegisterPrivateUse1HooksInterface(made);
  return made;
}();

// -- operations -------------------------------------------------------------------------------------------------------

at::Tensor empty_of(std::optional<at::Device> device, const std::function<at::Tensor()>& make) {
  const int before = current;
  if (device) current = index_of(*device);
  at::Tensor made = make();
  current = before;
  return made;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return empty_of(device, [&] {
    return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
  });
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return empty_of(device, [&] {
    return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
  });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!inside) {
    if (to.is_cpu()) {
      if (!non_blocking || !PinnedMemory::has(to.const_data_ptr())) {
        counters.copies_to_host++;
        wait_for_stream(from.device().index());
      }
    } else if (from.is_cpu()) {
      if (!non_blocking) counters.copies_to_device++;
      else if (!PinnedMemory::has(from.const_data_ptr())) counters.staged++;
    }
    uses(from, false, "copy");
    uses(to, true, "copy");
  }
  if (from.numel() && to.numel()) {
    at::AutoDispatchBelowAutograd below;
    Opened one(from), other(to);
    on_host(to).copy_(on_host(from).expand(to.sizes()));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  if (!inside) {
    counters.reads++;
    uses(tensor, false, "item");
    wait_for_stream(tensor.device().index());
  }
  at::AutoDispatchBelowAutograd below;
  Opened opened(tensor);
  return on_host(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, at::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (tensor.storage().nbytes() < needed) hooks->resizePrivateUse1Bytes(tensor.storage(), needed);
  return tensor;
}

at::Tensor as_strided(
    const at::Tensor& tensor, at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at_element;
  if (offset) at_element = offset->expect_int();
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_element);
}

at::Tensor view(const at::Tensor& tensor, at::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const c10::SymInt count(static_cast<int64_t>(storage.nbytes() / tensor.itemsize()));
  return set_storage(tensor, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  DeviceMemory::record(tensor.storage().data(), stream.id());
}

// Calls `f` for each tensor of an argument.
template <typename F>
void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) each_tensor(one, f);
  }
}

// Random numbers come from the device's generator: its state is the CPU's for the time of one operation.
class OwnRandomState {
 public:
  OwnRandomState(const c10::OperatorHandle& op, torch::jit::Stack& arguments) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    lock_ = std::unique_lock<std::mutex>(only_one());
    own_ = hooks->getDefaultGenerator(-1);
    for (c10::IValue& value : arguments)
      if (value.isGenerator() && value.toGenerator().device().is_privateuseone()) {
        own_ = value.toGenerator();
        value = c10::IValue();
      }
    before_ = host().get_state();
    host().set_state(own_.get_state());
  }
  ~OwnRandomState() {
    if (!lock_.owns_lock()) return;
    own_.set_state(host().get_state());
    host().set_state(before_);
  }

 private:
  static at::Generator host() {
    return at::detail::getDefaultCPUGenerator();
  }
  static std::mutex& only_one() {
    static std::mutex of;
    return of;
  }
  std::unique_lock<std::mutex> lock_;
  at::Generator own_;
  at::Tensor before_;
};

// Every operation that is not above: checks that a device would make, then the CPU's kernel on copies.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::unordered_set<std::string> sizes_are_read = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_consecutive",
      "aten::unique_dim", "aten::bincount", "aten::equal", "aten::repeat_interleave"};
  static const std::unordered_set<std::string> takes_indices = {
      "aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
  const std::string& name = op.schema().name();
  const auto& formal = op.schema().arguments();
  const bool indexes = takes_indices.count(name);
  auto arguments = torch::jit::last(*stack, formal.size());
  std::optional<at::Device> device;
  const auto agree = [&](const at::Tensor& tensor, bool may_be_on_host) {
    if (tensor.is_cpu() && (tensor.dim() == 0 || may_be_on_host)) return;
    if (tensor.is_meta()) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(
        *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", tensor.device(), "! (", name, ")");
  };
  for (size_t i = 0; i < formal.size(); i++)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      agree(tensor, indexes && formal[i].name() == "indices");
      const auto* alias = formal[i].alias_info();
      uses(tensor, alias && alias->isWrite(), name);
    });
  const int here = device && device->is_privateuseone() ? device->index() : current;
  const bool size_is_given = name == "aten::repeat_interleave" && !arguments.back().isNone();
  if (sizes_are_read.count(name) && !size_is_given && !inside) {
    counters.reads++;
    wait_for_stream(here);
  }
  counters.operations++;
  const int before = current;
  current = here;
  {
    Inside computing;
    OwnRandomState random(op, *stack);
    at::native::cpu_fallback(op, stack);
  }
  current = before;
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().returns().size()))
    each_tensor(value, [&](const at::Tensor& tensor) { uses(tensor, true, name); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The precisions are CUDA's.
#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TO_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TO_FLOAT32)
  AT_FORALL_PROMOTE(IN_WIDEST)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

}  // namespace

int device_count() {
  static const int count = static_cast<int>(number("SIMULATED_DEVICES", 4));
  TORCH_CHECK(0 < count && count <= kMostDevices, "SIMULATED_DEVICES is ", count, ", not 1 to ", kMostDevices);
  return count;
}

int current_device() {
  return current;
}

void set_device(int index) {
  TORCH_CHECK(0 <= index && index < device_count(), "sim:", index, " is none of ", device_count(), " devices");
  current = index;
}

Inside::Inside() {
  inside++;
}

Inside::~Inside() {
  inside--;
}

bool Inside::now() {
  return inside > 0;
}

Opened::Opened(const at::Tensor& tensor) : Opened(tensor.is_privateuseone() ? tensor.storage().data() : nullptr) {}

Opened::Opened(const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = block_of(address);
  if (found == blocks.end()) return;
  base_ = found->first;
  if (found->second.opened++ == 0) mprotect(reinterpret_cast<void*>(base_), found->second.size, PROT_READ | PROT_WRITE);
}

Opened::~Opened() {
  if (!base_) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto& block = blocks.at(base_);
  if (--block.opened == 0) mprotect(reinterpret_cast<void*>(base_), block.size, PROT_NONE);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  const at::Device cpu(at::kCPU);
  auto same = at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
                  .strides(tensor.strides())
                  .options(at::TensorOptions().dtype(tensor.dtype()).device(cpu))
                  .target_device(cpu)
                  .make_tensor();
  if (tensor.is_conj()) same = same.conj();
  if (tensor.is_neg()) same = same._neg_view();
  return same;
}

void uses(const at::Tensor& tensor, bool writes, const std::string& operation) {
  if (inside || !tensor.is_privateuseone() || !tensor.has_storage()) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = block_of(tensor.storage().data());
  if (found != blocks.end()) use_block(found->second, writes, operation);
}

std::vector<std::string> take_hazards() {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [stream, times] : known) learn(known_to_host, times);
  return std::exchange(hazards, {});
}

}  // namespace simulated

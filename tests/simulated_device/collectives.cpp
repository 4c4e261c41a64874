// The collectives of the simulated device: as NCCL's to a program, through the host and gloo in truth.
//
// They refuse what NCCL refuses. A collective begins with its call; what it brings is there when somebody waits for it,
// and never if nobody does. One whose peers are gone stands still until the group is aborted, and then ends without
// an error.
#include "device.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/extension.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

namespace simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Milliseconds = std::chrono::milliseconds;

struct State {
  std::atomic<bool> aborted{false};
  Milliseconds timeout;
};

class SimulatedWork final : public Work {
 public:
  // `finish` puts what came to the host where it belongs on the device.
  SimulatedWork(
      int rank, c10d::OpType kind, std::shared_ptr<State> state, std::vector<WorkPtr> parts, Tensors outputs,
      std::function<void()> finish)
      : Work(rank, kind), state_(std::move(state)), parts_(std::move(parts)), outputs_(std::move(outputs)),
        finish_(std::move(finish)) {}

  bool isCompleted() override {
    for (const auto& part : parts_)
      if (!part->isCompleted() || !part->isSuccess()) return state_->aborted;
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(Milliseconds timeout = kNoTimeout) override {
    const auto limit = timeout == kNoTimeout ? state_->timeout : timeout;
    const auto end = std::chrono::steady_clock::now() + limit;
    for (int round = 0; !isCompleted(); round++) {
      TORCH_CHECK_WITH(
          DistBackendError, std::chrono::steady_clock::now() < end, "a simulated collective did not end within ",
          limit.count(), " ms");
      if (round < 100) std::this_thread::yield();
      else std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (finish_ && !state_->aborted) {
      at::NoGradGuard no_grad;
      finish_();
    }
    finish_ = nullptr;
    return true;
  }
  void synchronize() override {
    wait();
  }
  void blockCurrentStream() override {
    wait();
  }
  Tensors result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    std::vector<c10::Device> devices;
    if (!outputs_.empty()) devices.push_back(outputs_[0].device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  std::shared_ptr<State> state_;
  std::vector<WorkPtr> parts_;
  Tensors outputs_;
  std::function<void()> finish_;
};

// A message of gloo, which says that it has arrived only to those who stand and wait.
class Polled final : public Work {
 public:
  explicit Polled(WorkPtr message) {
    std::thread([state = state_, message = std::move(message)] {
      try {
        message->wait();
        *state = kDone;
      } catch (const std::exception&) {
        *state = kFailed;
      }
    }).detach();
  }
  bool isCompleted() override {
    return *state_ != kUnderWay;
  }
  bool isSuccess() const override {
    return *state_ == kDone;
  }

 private:
  enum { kUnderWay, kDone, kFailed };
  std::shared_ptr<std::atomic<int>> state_ = std::make_shared<std::atomic<int>>(kUnderWay);
};

// [n, ...] as bytes [n, bytes of a row], or all of it as [bytes].
at::Tensor rows_of_bytes(const at::Tensor& host) {
  const int64_t rows = host.dim() ? host.size(0) : 1;
  return host.reshape({rows, rows ? host.numel() / rows : 1}).view(at::kByte);
}

at::Tensor bytes(const at::Tensor& host) {
  return host.reshape({-1}).view(at::kByte);
}

Tensors map(const Tensors& tensors, const std::function<at::Tensor(const at::Tensor&)>& f) {
  Tensors found;
  for (const auto& tensor : tensors) found.push_back(f(tensor));
  return found;
}

at::Tensor to_host(const at::Tensor& tensor) {
  uses(tensor, false, "a collective");
  Inside inside;
  return tensor.detach().cpu();
}

at::Tensor empty_on_host(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().device(at::kCPU));
}

void to_device(const at::Tensor& host, const at::Tensor& tensor) {
  uses(tensor, true, "a collective");
  Inside inside;
  tensor.detach().copy_(host.view_as(tensor));
}

class Collectives final : public c10d::Backend {
 public:
  using Gloo = std::function<c10::intrusive_ptr<Backend>(const c10::intrusive_ptr<c10d::Store>&, int, int)>;

  Collectives(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout, Gloo make)
      : Backend(rank, size), make_(std::move(make)), inner_(make_(store, rank, size)) {
    state_->timeout = timeout;
    init();
  }

  const std::string getBackendName() const override {
    return "simccl";
  }
  bool supportsSplitting() const override {
    return true;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), state_->timeout);
  }
  void setTimeout(Milliseconds timeout) override {
    state_->timeout = timeout;
    inner_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  void abort() override {
    state_->aborted = true;
  }
  void shutdown() override {
    state_->aborted = true;
  }
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    const auto at = std::find(ranks.begin(), ranks.end(), rank_);
    if (at == ranks.end()) return nullptr;
    const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("simccl", store);
    const int rank = static_cast<int>(at - ranks.begin()), size = static_cast<int>(ranks.size());
    return c10::make_intrusive<Collectives>(prefixed, rank, size, state_->timeout, make_);
  }

  // -- one value for all --

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return move(c10d::OpType::BROADCAST, tensors, tensors, [&](Tensors& out, Tensors&) {
      return inner_->broadcast(out, options);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple");
    return reduced(c10d::OpType::ALLREDUCE, tensors, tensors, options.reduceOp, tensors, [](const Tensors& all) {
      return all;
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduced(c10d::OpType::COALESCED, tensors, tensors, options.reduceOp, tensors, [](const Tensors& all) {
      return all;
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Tensors outputs = options.rootRank == rank_ ? tensors : Tensors{};
    return reduced(c10d::OpType::REDUCE, tensors, tensors, options.reduceOp, outputs, [](const Tensors& all) {
      return all;
    });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) same_dtype_and_size(outputs[i], inputs[i], 1, size_);
    const auto kind = c10d::OpType::_REDUCE_SCATTER_BASE;
    return reduced(kind, both(outputs, inputs), inputs, options.reduceOp, outputs, [this](const Tensors& all) {
      return map(all, [this](const at::Tensor& one) { return one.reshape({size_, -1})[rank_]; });
    });
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "Expecting one tensor only but got multiple");
    const auto kind = c10d::OpType::REDUCE_SCATTER;
    return reduced(kind, both(outputs, inputs[0]), inputs[0], options.reduceOp, outputs, [this](const Tensors& all) {
      return Tensors{all.at(rank_)};
    });
  }

  // -- what is moved and not changed --

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "Expecting one tensor only but got multiple");
    return move(c10d::OpType::ALLGATHER, outputs[0], inputs, [&](Tensors& out, Tensors& in) {
      std::vector<Tensors> lists{out};
      return inner_->allgather(lists, in);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    same_dtype_and_size(output, input, size_, 1);
    Tensors outputs{output}, inputs{input};
    return move(c10d::OpType::_ALLGATHER_BASE, outputs, inputs, [&](Tensors& out, Tensors& in) {
      std::vector<Tensors> lists{out[0].chunk(size_)};
      if (out[0].numel() == 0) lists = {Tensors(size_, out[0])};
      return inner_->allgather(lists, in);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < outputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    return endCoalescing();
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors empty;
    return move(c10d::OpType::GATHER, outputs.empty() ? empty : outputs[0], inputs, [&](Tensors& out, Tensors& in) {
      std::vector<Tensors> lists;
      if (!out.empty()) lists.push_back(out);
      return inner_->gather(lists, in, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors empty;
    return move(c10d::OpType::SCATTER, outputs, inputs.empty() ? empty : inputs[0], [&](Tensors& out, Tensors& in) {
      std::vector<Tensors> lists;
      if (!in.empty()) lists.push_back(in);
      return inner_->scatter(out, lists, options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions&) override {
    TORCH_CHECK(output.dtype() == input.dtype(), "Tensors are not equal in data type");
    check({output, input});
    const at::Tensor host = empty_on_host(output);
    auto out = rows_of_bytes(host), in = rows_of_bytes(to_host(input));
    auto part = inner_->alltoall_base(out, in, output_sizes, input_sizes);
    return begun(c10d::OpType::ALLTOALL_BASE, {part}, {output}, [=] { to_device(host, output); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    check(both(outputs, inputs));
    const auto sizes = [](const Tensors& tensors) {
      std::vector<int64_t> found;
      for (const auto& tensor : tensors) found.push_back(tensor.numel() * tensor.itemsize());
      return found;
    };
    const auto sizes_out = sizes(outputs);
    auto given_out = sizes_out, given_in = sizes(inputs);  // gloo takes them
    const int64_t total = std::accumulate(sizes_out.begin(), sizes_out.end(), int64_t{0});
    auto out = at::empty({total}, at::kByte);
    auto in = at::cat(map(inputs, [](const at::Tensor& one) { return bytes(to_host(one)); }));
    auto part = inner_->alltoall_base(out, in, given_out, given_in);
    return begun(c10d::OpType::ALLTOALL, {part}, outputs, [=] {
      const auto parts = out.split_with_sizes(sizes_out);
      for (size_t i = 0; i < outputs.size(); i++)
        to_device(parts[i].clone().view(outputs[i].scalar_type()), outputs[i]);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Tensors none;
    return move(c10d::OpType::SEND, none, tensors, [&](Tensors&, Tensors& in) {
      return c10::make_intrusive<Polled>(inner_->send(in, to, tag));
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Tensors none;
    return move(c10d::OpType::RECV, tensors, none, [&](Tensors& out, Tensors&) {
      return c10::make_intrusive<Polled>(inner_->recv(out, from, tag));
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    counters.barriers++;  // NCCL's lets the host wait
    auto work = begun(c10d::OpType::BARRIER, {inner_->barrier(options)}, {}, [] {});
    work->wait();
    return work;
  }

  // -- several at once --

  void startCoalescing() override {
    coalescing_ = true;
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto parts = std::exchange(coalesced_, {});
    const auto finish = [parts] {
      for (const auto& part : parts) part->wait();
    };
    return c10::make_intrusive<SimulatedWork>(rank_, c10d::OpType::COALESCED, state_, parts, Tensors{}, finish);
  }

 private:
  static Tensors both(const Tensors& one, const Tensors& other) {
    Tensors all = one;
    all.insert(all.end(), other.begin(), other.end());
    return all;
  }

  // What NCCL's process group asks of tensors.
  static void check(const Tensors& tensors) {
    static const std::set<at::ScalarType> known{
        at::kChar, at::kByte, at::kBool, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz};
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(
          tensor.is_privateuseone() && tensor.layout() == at::kStrided, "Tensors must be on the device and dense");
      TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
      TORCH_CHECK_VALUE(
          tensor.device() == tensors[0].device(), "Expected list of tensors on the same device: ", tensor.device(),
          " and ", tensors[0].device());
      TORCH_CHECK_VALUE(
          tensor.device().index() == current_device(), "a collective of ", tensor.device(), " while sim:",
          current_device(), " is the current device");
      TORCH_CHECK_TYPE(
          known.count(tensor.scalar_type()),
          "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
    }
  }

  static void same_dtype_and_size(const at::Tensor& output, const at::Tensor& input, int64_t times, int64_t parts) {
    TORCH_CHECK_TYPE(output.dtype() == input.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(
        output.numel() * parts == input.numel() * times, "output tensor of ", output.numel(), " elements, input of ",
        input.numel(), ", in a group of ", std::max(times, parts));
  }

  WorkPtr begun(c10d::OpType kind, std::vector<WorkPtr> parts, Tensors outputs, std::function<void()> finish) {
    sequence_++;
    counters.collectives++;
    const auto work = c10::make_intrusive<SimulatedWork>(
        rank_, kind, state_, std::move(parts), std::move(outputs), std::move(finish));
    if (coalescing_) coalesced_.push_back(work);
    std::erase_if(pending_, [](const WorkPtr& one) { return one->isCompleted(); });
    pending_.push_back(work);  // it goes on if the caller drops it
    return work;
  }

  // Bytes that gloo brings from `inputs` to `outputs`.
  WorkPtr move(
      c10d::OpType kind, Tensors& outputs, Tensors& inputs, const std::function<WorkPtr(Tensors&, Tensors&)>& call) {
    check(both(outputs, inputs));
    const bool in_place = &outputs == &inputs;
    const Tensors hosts = map(outputs, in_place ? to_host : empty_on_host);
    Tensors out = map(hosts, bytes), in;
    if (!in_place) in = map(map(inputs, to_host), bytes);
    std::vector<WorkPtr> parts{call(out, in)};
    return begun(kind, parts, outputs, [hosts, outputs, out, in] {
      for (size_t i = 0; i < outputs.size(); i++) to_device(hosts[i], outputs[i]);
    });
  }

  // The sum, or what `op` says, of each input over the ranks; `chosen` takes from it what `outputs` get.
  WorkPtr reduced(
      c10d::OpType kind, const Tensors& checked, const Tensors& inputs, const c10d::ReduceOp& op,
      const Tensors& outputs, const std::function<Tensors(const Tensors&)>& chosen) {
    check(checked);
    TORCH_CHECK(
        op != c10d::ReduceOp::BAND && op != c10d::ReduceOp::BOR && op != c10d::ReduceOp::BXOR,
        "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL");
    c10d::AllreduceOptions options;
    options.reduceOp = op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors hosts;
    std::vector<WorkPtr> parts;
    for (const auto& input : inputs) {
      hosts.push_back(to_host(input));
      Tensors one{hosts.back()};
      if (input.scalar_type() == at::kBool) {
        TORCH_CHECK_TYPE(op != c10d::ReduceOp::AVG, "Cannot use ReduceOp.AVG with Boolean inputs");
        one = {one[0].view(at::kByte)};
        if (op == c10d::ReduceOp::SUM) options.reduceOp = c10d::ReduceOp::MAX;
      }
      parts.push_back(inner_->allreduce(one, options));
    }
    const bool mean = op == c10d::ReduceOp::AVG;
    return begun(kind, parts, outputs, [=, this] {
      if (mean)
        for (const auto& host : hosts) host.div_(size_);
      if (outputs.empty()) return;
      const Tensors found = chosen(hosts);
      for (size_t i = 0; i < outputs.size(); i++) to_device(found[i], outputs[i]);
    });
  }

  Gloo make_;
  c10::intrusive_ptr<Backend> inner_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_, pending_;
};

std::map<std::string, int64_t> counts() {
  return {
      {"reads", counters.reads},
      {"copies_to_host", counters.copies_to_host},
      {"copies_to_device", counters.copies_to_device},
      {"event_waits", counters.event_waits},
      {"stream_waits", counters.stream_waits},
      {"device_waits", counters.device_waits},
      {"barriers", counters.barriers},
      {"staged", counters.staged},
      {"operations", counters.operations},
      {"collectives", counters.collectives},
  };
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using simulated::Collectives;
  m.def("device_count", &simulated::device_count);
  m.def("current_device", &simulated::current_device);
  m.def("set_device", &simulated::set_device);
  m.def("counts", &simulated::counts);
  m.def("take_hazards", &simulated::take_hazards);
  m.def("default_generator", [](int index) {
    return at::globalContext().defaultGenerator(at::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)));
  });
  py::class_<Collectives, c10::intrusive_ptr<Collectives>, c10d::Backend>(m, "Collectives")
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      std::chrono::milliseconds timeout, Collectives::Gloo make) {
            return c10::make_intrusive<Collectives>(store, rank, size, timeout, std::move(make));
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("make"))
      .def("sequence_number", &Collectives::getSequenceNumberForGroup)
      .def("perform_nocolor_split", [](Collectives&, const at::Device&) {});
}

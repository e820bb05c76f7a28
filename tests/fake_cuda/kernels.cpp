// Torch's CUDA operators, computed by its CPU kernels on the same bytes. What makes torch's CUDA behave as CUDA stays
// torch's own: allocator, generator, streams, copies, views.
//
// An operator that is called while its stream captures is computed once, for its shapes; what it has overwritten is put
// back at the capture's end, and every launch of the graph computes it again.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "graph.h"

extern "C" Graph* fake_cuda_graph(cudaStream_t stream);
namespace at::native {
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking);
}

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

// Operators that stay torch's own, by how their names begin: they move, allocate or view memory, or belong to libraries
// and formats that have no CPU form.
constexpr std::string_view kKept[] = {
    "_copy_from", "_efficient_attention", "_efficientzerotensor", "_flash_attention", "_fused_sdp",
    "_has_same_storage", "_local_scalar_dense", "_nested", "_pin_memory", "_reshape_alias",
    "_scaled_dot_product_cudnn", "_scaled_dot_product_eff", "_scaled_dot_product_flash", "_sparse", "_to_copy",
    "_unsafe_view", "_use_", "_cudnn", "alias", "as_strided", "copy_", "cudnn", "dequantize", "empty", "int_repr",
    "is_pinned", "is_same_size", "is_set_to", "lift", "miopen", "pin_memory", "q_", "quantize", "record", "resize",
    "set_", "sparse", "sym_", "unfold", "view",
};

// Operators that wait for the device, since the shape of their result depends on values.
const std::set<std::string> kWaiting = {
    "aten::_unique2", "aten::bincount", "aten::equal", "aten::masked_select", "aten::nonzero", "aten::nonzero.out",
    "aten::repeat_interleave", "aten::unique_consecutive", "aten::unique_dim",
};

bool on_cuda(const Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cuda() && tensor.layout() == at::kStrided;
}

// The same bytes as a tensor of the CPU.
Tensor host_alias(const Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  Tensor alias = at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
                     .strides(tensor.strides())
                     .options(options)
                     .make_tensor();
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

Graph* captured_graph() { return fake_cuda_graph(c10::cuda::getCurrentCUDAStream().stream()); }

void undo_at_the_end(Graph& graph, const Tensor& written) {
  if (written.numel() > 0) graph.undo.push_back([written, before = written.clone()] { written.copy_(before); });
}

// ---- Random numbers: the CUDA generator's seed and offset, turned into a seed of the CPU's ----

class Draw {
 public:
  explicit Draw(const at::Generator& generator) {
    auto* cuda = at::check_generator<at::CUDAGeneratorImpl>(generator);
    std::lock_guard<std::mutex> guard(cuda->mutex_);
    state_ = cuda->philox_cuda_state(4);
  }

  // A captured one reads where the generator is at each launch.
  uint64_t seed() const {
    uint64_t seed = state_.seed_.val;
    uint64_t offset = state_.offset_.val;
    if (state_.captured_) {
      seed = *state_.seed_.ptr;
      offset = *state_.offset_.ptr + state_.offset_intragraph_;
    }
    return seed * 0x9E3779B97F4A7C15ull + offset * 0xBF58476D1CE4E5B9ull + 1;
  }

 private:
  at::PhiloxCudaState state_;
};

std::optional<size_t> generator_position(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) return i;
  }
  return std::nullopt;
}

bool draws(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::native_dropout" || generator_position(schema).has_value();
}

// ---- One call of an operator ----

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments) : op_(op), arguments_(std::move(arguments)) {
    check_devices();
    for (size_t i = 0; i < arguments_.size(); i++) take_to_host(i);
    if (reads_shape_from_values()) c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream());
    if (draws(op.schema())) draw_.emplace(generator());
  }

  // Compute it, and return results whose tensors lie on the GPU as the arguments do.
  Stack run() {
    Graph* graph = captured_graph();
    if (graph != nullptr) {
      for (const Tensor& tensor : written_) undo_at_the_end(*graph, tensor);
    }
    Stack results = compute();
    size_t number = 0;
    for (IValue& value : results) value = map_tensors(value, [&](const Tensor& t) { return to_gpu(t, number++); });
    if (graph != nullptr) {
      aliases_.clear();  // a graph keeps addresses, not tensors of the GPU: its memory is the pool's
      graph->calls.push_back([call = *this] { call.repeat(); });
    }
    return results;
  }

 private:
  using Change = std::function<Tensor(const Tensor&)>;

  static IValue map_tensors(const IValue& value, const Change& change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> mapped;
      for (const Tensor& tensor : value.toTensorList()) mapped.push_back(change(tensor));
      return mapped;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> mapped;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        mapped.push_back(tensor.has_value() ? std::optional(change(*tensor)) : std::nullopt);
      }
      return mapped;
    }
    return value;
  }

  static std::vector<Tensor> tensors_of(const Stack& values) {
    std::vector<Tensor> found;
    for (const IValue& value : values) {
      map_tensors(value, [&](const Tensor& tensor) {
        found.push_back(tensor);
        return tensor;
      });
    }
    return found;
  }

  // The CPU's kernels would take a mixture that a GPU's refuse. Numbers may lie anywhere, and so may indices.
  void check_devices() const {
    const auto& schema = op_.schema();
    bool any_on_cuda = false;
    for (const Tensor& tensor : tensors_of(arguments_)) any_on_cuda |= on_cuda(tensor);
    if (!any_on_cuda || schema.name() == "aten::index" || schema.name() == "aten::_index_put_impl_") return;
    for (size_t i = 0; i < arguments_.size(); i++) {
      if (!arguments_[i].isTensor()) continue;
      const Tensor& tensor = arguments_[i].toTensor();
      TORCH_CHECK(!tensor.defined() || !tensor.device().is_cpu() || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but got ", schema.arguments()[i].name(),
                  " is on cpu, different from other tensors on cuda:0");
    }
  }

  void take_to_host(size_t i) {
    const auto& argument = op_.schema().arguments()[i];
    IValue& value = arguments_[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      makes_on_gpu_ = true;
      value = c10::Device(at::kCPU);
      return;
    }
    if (argument.name() == "pin_memory" && value.isBool()) value = false;
    // Its schema does not say that running mean and variance are written.
    const bool is_statistic = op_.schema().name() == "aten::native_batch_norm" && (i == 3 || i == 4);
    const bool is_written = is_statistic || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    value = map_tensors(value, [&](const Tensor& tensor) {
      if (!on_cuda(tensor)) return tensor;
      Tensor alias = host_alias(tensor);
      aliases_.emplace_back(alias, tensor);
      if (is_written) written_.push_back(alias);
      return alias;
    });
  }

  bool reads_shape_from_values() const {
    if (kWaiting.count(c10::toString(op_.operator_name()))) return true;
    const std::string& name = op_.schema().name();
    if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
    for (const Tensor& index : tensors_of({arguments_[1]})) {
      if (index.defined() && (index.dtype() == at::kBool || index.dtype() == at::kByte)) return true;
    }
    return false;
  }

  at::Generator generator() const {
    const auto position = generator_position(op_.schema());
    if (position && arguments_[*position].isGenerator()) return arguments_[*position].toGenerator();
    return at::cuda::detail::getDefaultCUDAGenerator();
  }

  // The CPU has only references of these in float16 (some have a forward pass), ten times slower.
  bool needs_float32() const {
    return op_.schema().name().starts_with("aten::convolution") && arguments_[0].toTensor().dtype() == at::kHalf;
  }

  static void convert(Stack& values, at::ScalarType type) {
    for (IValue& value : values) {
      value = map_tensors(value, [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(type) : tensor; });
    }
  }

  Stack compute() const {
    Stack stack = arguments_;
    if (!draw_) {
      const bool is_widened = needs_float32();
      if (is_widened) convert(stack, at::kFloat);
      op_.callBoxed(stack);
      if (is_widened) convert(stack, at::kHalf);
      return stack;
    }
    if (const auto position = generator_position(op_.schema())) {
      stack[*position] = at::make_generator<at::CPUGeneratorImpl>(draw_->seed());
      op_.callBoxed(stack);
      return stack;
    }
    at::Generator host = at::detail::getDefaultCPUGenerator();
    const Tensor before = host.get_state();
    host.set_current_seed(draw_->seed());
    op_.callBoxed(stack);
    host.set_state(before);
    return stack;
  }

  // The GPU's tensor of a result: the argument that it is, or new memory.
  Tensor to_gpu(const Tensor& result, size_t number) {
    if (!result.defined()) return result;
    for (const auto& [alias, ours] : aliases_) {
      if (alias.unsafeGetTensorImpl() != result.unsafeGetTensorImpl()) continue;
      if (alias.sizes() == ours.sizes()) return ours;
      ours.resize_(alias.sizes());  // `out=` of another size
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      return filled(ours, result, number);
    }
    if (!makes_on_gpu_ && aliases_.empty()) return result;
    const auto options = result.options().device(at::kCUDA, 0);
    return filled(at::empty_strided(result.sizes(), result.strides(), options), result, number);
  }

  Tensor filled(const Tensor& ours, const Tensor& result, size_t number) {
    Tensor bytes = host_alias(ours);
    bytes.copy_(result);
    outputs_.emplace_back(number, bytes);
    return ours;
  }

  // A launch of the graph: compute into the memory that the capture has given the results.
  void repeat() const {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto results = tensors_of(compute());
    for (const auto& [number, bytes] : outputs_) bytes.copy_(results[number]);
  }

  c10::OperatorHandle op_;
  Stack arguments_;                                    // on the host
  std::vector<std::pair<Tensor, Tensor>> aliases_;     // of the host, and what they are on the GPU
  std::vector<Tensor> written_;                        // aliases
  std::vector<std::pair<size_t, Tensor>> outputs_;     // a result's number, and the memory that takes it
  std::optional<Draw> draw_;
  bool makes_on_gpu_ = false;
};

void compute_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  Stack arguments(first, stack->end());
  stack->erase(first, stack->end());
  for (IValue& result : Call(op, std::move(arguments)).run()) stack->push_back(std::move(result));
}

// ---- Operators that need more than that ----

// Between host and GPU a copy is torch's own, down to cudaMemcpyAsync.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!on_cuda(self) || !on_cuda(source)) return at::native::copy_(self, source, non_blocking);
  const Tensor target = host_alias(self);
  const Tensor bytes = host_alias(source);
  if (Graph* graph = captured_graph()) {
    undo_at_the_end(*graph, target);
    graph->calls.push_back([target, bytes] { target.copy_(bytes); });
  }
  target.copy_(bytes);
  return self;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(const Tensor& input, const Tensor& weight,
                                                            const std::optional<Tensor>& bias,
                                                            const std::optional<Tensor>& mean,
                                                            const std::optional<Tensor>& variance, bool training,
                                                            double momentum, double eps) {
  auto [output, saved_mean, saved_inverse] =
      at::native_batch_norm(input, weight, bias, mean, variance, training, momentum, eps);
  return {output, saved_mean, saved_inverse, at::empty({0}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(
    const Tensor& input, const Tensor& gradient, const Tensor& weight, const std::optional<Tensor>& mean,
    const std::optional<Tensor>& variance, const std::optional<Tensor>& saved_mean,
    const std::optional<Tensor>& saved_inverse, double eps, const Tensor& /*reserved*/) {
  const Tensor laid_out = gradient.contiguous(input.suggest_memory_format());
  return at::native_batch_norm_backward(laid_out, input, weight, mean, variance, saved_mean, saved_inverse, true, eps,
                                        {true, true, true});
}

// ---- Loading ----

std::set<std::string> replaced_operators() {
  std::set<std::string> names = {"convolution", "convolution_backward"};
  for (const auto& registered : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    std::string name = c10::toString(registered);
    if (!name.starts_with("aten::")) continue;
    name = name.substr(strlen("aten::"));
    const bool is_kept = std::ranges::any_of(kKept, [&](std::string_view start) { return name.starts_with(start); });
    if (!is_kept) names.insert(name);
  }
  return names;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

__attribute__((constructor)) void replace_operators() {
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  Silent silent;  // torch warns of operators that are registered twice
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  for (const std::string& name : replaced_operators()) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
  }
  library.impl("copy_", TORCH_FN(copy));
  library.impl("cudnn_batch_norm", TORCH_FN(cudnn_batch_norm));
  library.impl("cudnn_batch_norm_backward", TORCH_FN(cudnn_batch_norm_backward));
  // Attention has products and a softmax then, not a kernel of its own.
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
}

}  // namespace

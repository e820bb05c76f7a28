// The CUDA runtime (libcudart) and driver (libcuda) of one GPU whose memory is host memory. Preloaded, it stands before
// the real libcudart; what it does not define is answered there, with an error, since no driver is there.
//
// Everything is done when the call returns, so streams and events keep no order. Kept are the rules that the real ones
// have: the limit of memory, what a capture refuses, which errors stay until they are read.
//
// Environment read:
//   FAKE_CUDA_MEMORY_MB    memory of the GPU (81559, an H100's)
//   FAKE_CUDA_TRACE        say on stderr which call a capture has refused

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "graph.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kPage = 2 << 20;  // what the real driver hands out at least
constexpr int kSmCount = 132;
constexpr int kDriverVersion = 13000;

// Objects that are used until the process has ended are never destroyed.
template <typename T>
T& immortal() {
  static T* object = new T;
  return *object;
}

std::mutex& lock() { return immortal<std::mutex>(); }

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// ---- Streams, events and captures ----

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  bool active = true;
  bool broken = false;
};

struct Stream {
  std::shared_ptr<Capture> capture;  // the last one that it began or joined
};

struct Event {
  double recorded_at = -1;           // seconds; negative before it was recorded
  std::shared_ptr<Capture> capture;  // which recorded it
};

Stream null_stream;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::vector<std::shared_ptr<Capture>>& active_captures() { return immortal<std::vector<std::shared_ptr<Capture>>>(); }

Stream& stream_of(cudaStream_t handle) {
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? null_stream : *reinterpret_cast<Stream*>(handle);
}

Capture* capture_of(cudaStream_t handle) {
  Capture* capture = stream_of(handle).capture.get();
  return capture != nullptr && capture->active ? capture : nullptr;
}

void say_refused(const char* call) {
  static const bool traced = getenv("FAKE_CUDA_TRACE") != nullptr;
  if (traced) fprintf(stderr, "fake CUDA: %s is refused while a stream captures\n", call);
}

// Calls that might wait for other work spoil a capture, by the rules of cudaThreadExchangeStreamCaptureMode: those of
// the capturing thread always (but in a relaxed capture), those of other threads where the capture is a global one.
cudaError_t refused(const char* call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard<std::mutex> guard(lock());
  bool is_refused = false;
  for (const auto& capture : active_captures()) {
    const bool is_own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool is_global = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (is_own || is_global) is_refused = capture->broken = true;
  }
  if (!is_refused) return cudaSuccess;
  say_refused(call);
  return fail(cudaErrorStreamCaptureUnsupported);
}

// A call on a stream that waits for it.
cudaError_t refused_on(cudaStream_t stream, const char* call) {
  Capture* capture = capture_of(stream);
  if (capture == nullptr) return cudaSuccess;
  capture->broken = true;
  say_refused(call);
  return fail(cudaErrorStreamCaptureUnsupported);
}

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// ---- Memory ----

struct Block {
  size_t size;
  cudaMemoryType type;
};

std::map<uintptr_t, Block>& blocks() { return immortal<std::map<uintptr_t, Block>>(); }
size_t used = 0;  // bytes of the GPU's memory; guarded by lock()

size_t total_memory() {
  static const size_t total = [] {
    const char* megabytes = getenv("FAKE_CUDA_MEMORY_MB");
    return (megabytes != nullptr ? strtoull(megabytes, nullptr, 10) : 81559) << 20;
  }();
  return total;
}

bool take_memory(size_t size) {
  std::lock_guard<std::mutex> guard(lock());
  if (size > total_memory() - used) return false;
  used += size;
  return true;
}

void give_memory(size_t size) {
  std::lock_guard<std::mutex> guard(lock());
  used -= size;
}

void* map_pages(size_t size, int protection) {
  void* pages = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

cudaError_t allocate(void** pointer, size_t size, cudaMemoryType type) {
  const bool on_device = type == cudaMemoryTypeDevice;
  const size_t rounded = std::max<size_t>(1, (size + kPage - 1) / kPage) * kPage;
  *pointer = nullptr;
  if (on_device && !take_memory(rounded)) return fail(cudaErrorMemoryAllocation);
  void* pages = map_pages(rounded, PROT_READ | PROT_WRITE);
  if (pages == nullptr) {
    if (on_device) give_memory(rounded);
    return fail(cudaErrorMemoryAllocation);
  }
  std::lock_guard<std::mutex> guard(lock());
  blocks()[reinterpret_cast<uintptr_t>(pages)] = {rounded, type};
  *pointer = pages;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  Block block;
  {
    std::lock_guard<std::mutex> guard(lock());
    auto found = blocks().find(reinterpret_cast<uintptr_t>(pointer));
    if (found == blocks().end()) return fail(cudaErrorInvalidValue);
    block = found->second;
    blocks().erase(found);
  }
  if (block.type == cudaMemoryTypeDevice) give_memory(block.size);
  munmap(pointer, block.size);
  return cudaSuccess;
}

// Do it now; in a capture at every launch of the graph, too, and undo it at the capture's end.
template <typename Write>
cudaError_t write(cudaStream_t stream, void* target, size_t size, Write&& bytes_into) {
  if (Capture* capture = capture_of(stream)) {
    std::string before(static_cast<char*>(target), size);
    capture->graph->undo.push_back([=] { memcpy(target, before.data(), before.size()); });
    capture->graph->calls.push_back([=] { bytes_into(target); });
  }
  bytes_into(target);
  return cudaSuccess;
}

// ---- Kernels ----

std::unordered_map<const void*, const char*>& kernel_names() {
  return immortal<std::unordered_map<const void*, const char*>>();
}

// A kernel of torch's own that no CPU kernel stands for: an error, since its result would be whatever lay there. Only
// the one that passes the time may do nothing.
cudaError_t launch_kernel(const void* function) {
  auto found = kernel_names().find(function);
  const char* name = found != kernel_names().end() ? found->second : "a kernel without a name";
  if (strstr(name, "spin_kernel") != nullptr) return cudaSuccess;
  fprintf(stderr, "fake CUDA: nothing computes %s\n", name);
  return fail(cudaErrorNoKernelImageForDevice);
}

// The CPU kernels lie beside this library. They need torch's, so they are loaded when torch first asks for a GPU.
void load_kernels() {
  if (void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) {
    dlclose(torch);
  } else {
    return;  // another program than torch
  }
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&load_kernels), &here);
  std::string path(here.dli_fname);
  path = path.substr(0, path.rfind('/') + 1) + "libfake_kernels.so";
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    fprintf(stderr, "fake CUDA: %s\n", dlerror());
    abort();
  }
}

}  // namespace

API Graph* fake_cuda_graph(cudaStream_t stream) {
  Capture* capture = capture_of(stream);
  return capture != nullptr ? capture->graph.get() : nullptr;
}

// ---- The device ----

API cudaError_t cudaGetDeviceCount(int* count) {
  static std::once_flag once;
  std::call_once(once, load_kernels);
  *count = 1;
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice); }

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  cudaDeviceProp& gpu = *properties;
  memset(&gpu, 0, sizeof gpu);
  strcpy(gpu.name, "NVIDIA H100 80GB HBM3");
  std::iota(gpu.uuid.bytes, gpu.uuid.bytes + sizeof gpu.uuid.bytes, 1);
  gpu.totalGlobalMem = total_memory();
  gpu.major = 9;
  gpu.multiProcessorCount = kSmCount;
  gpu.warpSize = 32;
  gpu.maxThreadsPerMultiProcessor = 2048;
  gpu.maxThreadsPerBlock = gpu.maxThreadsDim[0] = gpu.maxThreadsDim[1] = 1024;
  gpu.maxThreadsDim[2] = 64;
  gpu.maxGridSize[0] = 2147483647;
  gpu.maxGridSize[1] = gpu.maxGridSize[2] = 65535;
  gpu.maxBlocksPerMultiProcessor = 32;
  gpu.sharedMemPerBlock = 49152;
  gpu.sharedMemPerBlockOptin = 232448;
  gpu.sharedMemPerMultiprocessor = 233472;
  gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
  gpu.l2CacheSize = 50 << 20;
  gpu.textureAlignment = 512;
  gpu.asyncEngineCount = 3;
  gpu.pciBusID = 1;
  gpu.concurrentKernels = gpu.unifiedAddressing = gpu.managedMemory = gpu.canMapHostMemory = 1;
  gpu.streamPrioritiesSupported = gpu.cooperativeLaunch = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> known = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMultiProcessorCount, kSmCount},
      {cudaDevAttrWarpSize, 32},
  };
  auto found = known.find(attribute);
  *value = found != known.end() ? found->second : 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) {
  snprintf(text, length, "0000:01:00.0");
  return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() { return refused("cudaDeviceSynchronize"); }

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

API cudaError_t cudaPeekAtLastError() { return last_error; }

API cudaError_t cudaProfilerStart() { return cudaSuccess; }

API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- Memory ----

API cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (cudaError_t error = refused("cudaMalloc")) return error;
  return allocate(pointer, size, cudaMemoryTypeDevice);
}

API cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (cudaError_t error = refused("cudaFree")) return error;
  return release(pointer);
}

API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  if (cudaError_t error = refused("cudaHostAlloc")) return error;
  return allocate(pointer, size, cudaMemoryTypeHost);
}

API cudaError_t cudaFreeHost(void* pointer) {
  if (cudaError_t error = refused("cudaFreeHost")) return error;
  return release(pointer);
}

API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  std::lock_guard<std::mutex> guard(lock());
  blocks()[reinterpret_cast<uintptr_t>(pointer)] = {size, cudaMemoryTypeHost};
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(lock());
  blocks().erase(reinterpret_cast<uintptr_t>(pointer));
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> guard(lock());
  *total = total_memory();
  *free = *total - used;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> guard(lock());
  auto next = blocks().upper_bound(address);
  if (next == blocks().begin()) return cudaSuccess;
  const auto& [start, block] = *std::prev(next);
  if (address >= start + block.size) return cudaSuccess;
  attributes->type = block.type;
  attributes->device = 0;
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return write(stream, target, size, [=](void* bytes) { memmove(bytes, source, size); });
}

API cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  if (cudaError_t error = refused("cudaMemcpy")) return error;
  return cudaMemcpyAsync(target, source, size, kind, nullptr);
}

API cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  return write(stream, target, size, [=](void* bytes) { memset(bytes, value, size); });
}

API cudaError_t cudaMemset(void* target, int value, size_t size) { return cudaMemsetAsync(target, value, size, nullptr); }

// Other processes could not read this one's memory.
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return fail(cudaErrorNotSupported); }

API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return fail(cudaErrorNotSupported); }

// ---- Streams and events ----

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<Stream*>(stream);
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) { return refused_on(stream, "cudaStreamQuery"); }

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return refused_on(stream, "cudaStreamSynchronize"); }

// A stream that waits for captured work is captured with it.
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto& capture = reinterpret_cast<Event*>(event)->capture;
  if (capture != nullptr && capture->active) stream_of(stream).capture = capture;
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  Event& recorded = *reinterpret_cast<Event*>(event);
  recorded.recorded_at = seconds();
  recorded.capture = capture_of(stream) != nullptr ? stream_of(stream).capture : nullptr;
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t) { return refused("cudaEventQuery"); }

API cudaError_t cudaEventSynchronize(cudaEvent_t) { return refused("cudaEventSynchronize"); }

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const double from = reinterpret_cast<Event*>(start)->recorded_at;
  const double to = reinterpret_cast<Event*>(end)->recorded_at;
  if (from < 0 || to < 0) return fail(cudaErrorInvalidResourceHandle);
  *milliseconds = static_cast<float>((to - from) * 1e3);
  return cudaSuccess;
}

// ---- Graphs: a handle is a pointer to a shared one, since the executable outlives what it was made of ----

using SharedGraph = std::shared_ptr<Graph>;

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Capture* capture = capture_of(stream);
  *status = cudaStreamCaptureStatusNone;
  if (capture != nullptr) *status = capture->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* num_dependencies) {
  Capture* capture = capture_of(stream);
  if (id != nullptr && capture != nullptr) *id = capture->id;
  if (graph != nullptr) *graph = capture != nullptr ? reinterpret_cast<cudaGraph_t>(&capture->graph) : nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static std::atomic<unsigned long long> last_id{0};
  Stream& stream = stream_of(handle);
  if (&stream == &null_stream || capture_of(handle) != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  stream.capture = std::make_shared<Capture>(Capture{++last_id, mode, std::this_thread::get_id()});
  std::lock_guard<std::mutex> guard(lock());
  active_captures().push_back(stream.capture);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  *graph = nullptr;
  if (capture_of(handle) == nullptr) return fail(cudaErrorIllegalState);
  const std::shared_ptr<Capture> capture = stream_of(handle).capture;
  {
    std::lock_guard<std::mutex> guard(lock());
    capture->active = false;
    std::erase(active_captures(), capture);
  }
  auto& undo = capture->graph->undo;
  for (; !undo.empty(); undo.pop_back()) undo.back()();
  if (capture->broken) return fail(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new SharedGraph(capture->graph));
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new SharedGraph(*reinterpret_cast<SharedGraph*>(graph)));
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& call : (*reinterpret_cast<SharedGraph*>(executable))->calls) call();
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<SharedGraph*>(graph);
  return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<SharedGraph*>(executable);
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = (*reinterpret_cast<SharedGraph*>(graph))->calls.size();
  return cudaSuccess;
}

// ---- Launches: what nvcc has compiled into torch's libraries calls these ----

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 2;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_kernel(function);
}

API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_kernel(function);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return launch_kernel(function);
}

API cudaError_t __cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch_kernel(function);
}

API cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}

API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = *block = dim3(1, 1, 1);
  *shared_bytes = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}

API char __cudaInitModule(void**) { return 0; }

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

API void __cudaRegisterFatBinaryEnd(void**) {}

API void __cudaUnregisterFatBinary(void**) {}

API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  kernel_names()[function] = name;
}

API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}

// ---- The driver: what torch asks of it directly ----

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

API CUresult cuDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);  // the numbers are the runtime's
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
  static char any;
  *context = reinterpret_cast<CUcontext>(&any);
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

API CUresult cuGetErrorString(CUresult result, const char** text) {
  *text = result == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "the fake CUDA cannot do it";
  return CUDA_SUCCESS;
}

// Virtual memory, of which torch's expandable segments are made: an address range, and blocks mapped into it.

API CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = kPage;
  return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(map_pages(size, PROT_NONE));
  return *address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  munmap(reinterpret_cast<void*>(address), size);
  return CUDA_SUCCESS;
}

// A handle is the block's size: its bytes are the range's own pages, once it is mapped.
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                         unsigned long long) {
  if (!take_memory(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = size;
  return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  give_memory(handle);
  return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  std::lock_guard<std::mutex> guard(lock());
  blocks()[address] = {size, cudaMemoryTypeDevice};
  return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc*, size_t) {
  mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  void* pages = reinterpret_cast<void*>(address);
  madvise(pages, size, MADV_DONTNEED);
  mprotect(pages, size, PROT_NONE);
  std::lock_guard<std::mutex> guard(lock());
  blocks().erase(address);
  return CUDA_SUCCESS;
}

// torch looks all of its driver up by name, most of it never to call it.
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = reinterpret_cast<void*>(+[] { return CUDA_ERROR_NOT_SUPPORTED; });
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- NVML: torch asks it of links to other GPUs before it maps memory ----

API int nvmlInit_v2() { return 0; }

// torch 2.11 lists the processes on the GPU in its out of memory error.
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  static char any;
  *device = &any;
  return 0;
}

// Functions that torch looks for and that the fake cannot do: the driver's modules and their kernels, NVML's links. A
// file of its own, since cuda.h declares each with its arguments.
#define ANSWER(name, code) \
  extern "C" __attribute__((visibility("default"))) int name() { return code; }
#define ABSENT(name) ANSWER(name, 801 /* CUDA_ERROR_NOT_SUPPORTED */)
#define ABSENT_NVML(name) ANSWER(name, 3 /* NVML_ERROR_NOT_SUPPORTED */)

ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuFuncGetAttribute)
ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate_v2)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoad)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleLoadDataEx)
ABSENT(cuModuleUnload)
ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cuPointerGetAttribute)
ABSENT(cuTensorMapEncodeTiled)

ABSENT_NVML(nvmlDeviceGetComputeRunningProcesses)
ABSENT_NVML(nvmlDeviceGetGpuFabricInfoV)
ABSENT_NVML(nvmlDeviceGetNvLinkRemoteDeviceType)
ABSENT_NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT_NVML(nvmlSystemGetCudaDriverVersion_v2)

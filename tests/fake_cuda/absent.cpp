// Functions that torch looks for and that the fake cannot do: the driver's modules and their kernels, NVML's links,
// CUPTI's records of kernels (Kineto then profiles the CPU alone). A file of its own, since the headers declare each with
// its arguments.
#define ANSWER(name, code) \
  extern "C" __attribute__((visibility("default"))) int name() { return code; }
#define ABSENT(name) ANSWER(name, 801 /* CUDA_ERROR_NOT_SUPPORTED */)
#define ABSENT_CUPTI(name) ANSWER(name, 27 /* CUPTI_ERROR_NOT_SUPPORTED */)
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

ABSENT_NVML(nvmlDeviceGetGpuFabricInfoV)
ABSENT_NVML(nvmlDeviceGetNvLinkRemoteDeviceType)
ABSENT_NVML(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT_NVML(nvmlSystemGetCudaDriverVersion_v2)

ABSENT_CUPTI(cuptiActivityDisable)
ABSENT_CUPTI(cuptiActivityEnable)
ABSENT_CUPTI(cuptiActivityEnableCudaEventDeviceTimestamps)
ABSENT_CUPTI(cuptiActivityEnableDriverApi)
ABSENT_CUPTI(cuptiActivityEnableRuntimeApi)
ABSENT_CUPTI(cuptiActivityFlushAll)
ABSENT_CUPTI(cuptiActivityGetNextRecord)
ABSENT_CUPTI(cuptiActivityGetNumDroppedRecords)
ABSENT_CUPTI(cuptiActivityPopExternalCorrelationId)
ABSENT_CUPTI(cuptiActivityPushExternalCorrelationId)
ABSENT_CUPTI(cuptiActivityRegisterCallbacks)
ABSENT_CUPTI(cuptiActivityRegisterTimestampCallback)
ABSENT_CUPTI(cuptiActivitySetAttribute)
ABSENT_CUPTI(cuptiEnableCallback)
ABSENT_CUPTI(cuptiEnableDomain)
ABSENT_CUPTI(cuptiFinalize)
ABSENT_CUPTI(cuptiSubscribe)
ABSENT_CUPTI(cuptiUnsubscribe)

// Kineto asks for the words of an error, and uses what it is given.
extern "C" __attribute__((visibility("default"))) int cuptiGetResultString(int, const char** text) {
  *text = "the fake CUDA has no CUPTI";
  return 0;
}
ABSENT_CUPTI(cuptiGetCallbackName)
ABSENT_CUPTI(cuptiGetVersion)

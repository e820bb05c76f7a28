// What a stream captures: calls to be made again. The runtime records copies into it, the kernels record themselves.
#pragma once

#include <functional>
#include <vector>

#include <cuda_runtime_api.h>

struct Graph {
  std::vector<std::function<void()>> calls;  // in the order of the capture; a launch makes them all
  std::vector<std::function<void()>> undo;   // puts back what the capture has overwritten, the last one first
};

// The graph that `stream` captures into now; nullptr where it captures nothing.
extern "C" Graph* fake_cuda_graph(cudaStream_t stream);

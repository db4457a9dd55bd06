// The door between the torch side and the CUDA kernels. No CUDA header is needed to include it.
#pragma once

#include "../geometry.h"

namespace fused_act {

struct Cuda {
  void* stream;  // a cudaStream_t
  // Device memory on that stream for partial sums; stays valid until the Request has been launched.
  void* (*allocate)(void* context, size_t bytes);
  void* context;
};

// What comes back, and nothing was launched, where dense tensors would be faster (Request::may_be_dense), or where only
// dense ones, and gradients that one pass can sum, have kernels: the modes with codes.
inline constexpr char kWantsDense[] = "the kernel wants dense tensors";

// Launches operator `op` (its place in the list). Returns null, or what went wrong.
const char* run_cuda(int op, const Request&, const Geometry&, const Cuda&);

}  // namespace fused_act

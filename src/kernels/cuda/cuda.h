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

// Launches operator `op` (its place in the list). Returns null, or what went wrong.
const char* run_cuda_f16(int op, const Request&, const Geometry&, const Cuda&);
const char* run_cuda_bf16(int op, const Request&, const Geometry&, const Cuda&);
const char* run_cuda_f32(int op, const Request&, const Geometry&, const Cuda&);
const char* run_cuda_f64(int op, const Request&, const Geometry&, const Cuda&);

inline const char* run_cuda(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  switch (r.dtype) {
    case Dtype::f16:
      return run_cuda_f16(op, r, geometry, cuda);
    case Dtype::bf16:
      return run_cuda_bf16(op, r, geometry, cuda);
    case Dtype::f32:
      return run_cuda_f32(op, r, geometry, cuda);
    case Dtype::f64:
      return run_cuda_f64(op, r, geometry, cuda);
  }
  return "unknown dtype";
}

}  // namespace fused_act

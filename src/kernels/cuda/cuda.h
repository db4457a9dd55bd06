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

// Launches operator `op` (its place in the list) for elements of that many bits. Returns null, or what went wrong.
const char* run_cuda_16(int op, const Request&, const Geometry&, const Cuda&);
const char* run_cuda_32(int op, const Request&, const Geometry&, const Cuda&);

// The same for the Request's program.
const char* run_cuda_program_16(const Request&, const Geometry&, const Cuda&);
const char* run_cuda_program_32(const Request&, const Geometry&, const Cuda&);
const char* run_cuda_program_64(const Request&, const Geometry&, const Cuda&);

inline const char* run_cuda(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  if (reads_codes(r.mode))  // which are no operator's
    return r.dtype == Dtype::f32 ? run_cuda_program_32(r, geometry, cuda) : run_cuda_program_16(r, geometry, cuda);
  switch (r.dtype) {
    case Dtype::f16:
    case Dtype::bf16:
      return run_cuda_16(op, r, geometry, cuda);
    case Dtype::f32:
      return run_cuda_32(op, r, geometry, cuda);
    case Dtype::f64:  // of which there are no compiled chains
      return run_cuda_program_64(r, geometry, cuda);
  }
  return "unknown dtype";
}

}  // namespace fused_act

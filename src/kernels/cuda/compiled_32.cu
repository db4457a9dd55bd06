#include "compiled.cuh"

namespace fused_act {
const char* run_cuda_32(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  return run_compiled<4>(op, r, geometry, cuda);
}
}  // namespace fused_act

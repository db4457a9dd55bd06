#include "launch.cuh"

namespace fused_act {
const char* run_cuda_f16(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  return Table<__half>::run(op, r, geometry, cuda);
}
}  // namespace fused_act

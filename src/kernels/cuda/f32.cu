#include "launch.cuh"

namespace fused_act {
const char* run_cuda_f32(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  return Table<float>::run(op, r, geometry, cuda);
}
}  // namespace fused_act

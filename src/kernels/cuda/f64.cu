#include "launch.cuh"

namespace fused_act {
const char* run_cuda_f64(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  return Table<double>::run(op, r, geometry, cuda);
}
}  // namespace fused_act

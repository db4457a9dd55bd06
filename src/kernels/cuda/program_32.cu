#include "run_program.cuh"

namespace fused_act {
const char* run_cuda_program_32(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  return run_program<4>(r, geometry, cuda);
}
}  // namespace fused_act

#include "framed.cuh"

namespace fused_act {
bool run_cuda_framed_32(const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  return run_framed<4>(r, geometry, cuda, error);
}
}  // namespace fused_act

#include "framed.cuh"

namespace fused_act {
bool run_cuda_framed_16(const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  return run_framed<2>(r, geometry, cuda, error);
}
}  // namespace fused_act

// From an operator and a dtype to the object that has the kernels.
#include <utility>

#include "parts.h"

namespace fused_act {
namespace {

template <int bytes, int... part>
const char* run_compiled(std::integer_sequence<int, part...>, int op, const Request& r, const Geometry& geometry,
                         const Cuda& cuda) {
  static constexpr const char* (*parts[])(int, const Request&, const Geometry&, const Cuda&) = {
      &run_compiled_part<bytes, part>...};
  return parts[op % kCompiledParts](op, r, geometry, cuda);
}

}  // namespace

const char* run_cuda(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  if (r.dtype == Dtype::f64) return run_cuda_program_64(r, geometry, cuda);  // of which there are no compiled chains
  constexpr std::make_integer_sequence<int, kCompiledParts> parts;
  if (r.dtype == Dtype::f32)
    return reads_codes(r.mode) ? run_decoded<4>(r, geometry, cuda) : run_compiled<4>(parts, op, r, geometry, cuda);
  return reads_codes(r.mode) ? run_decoded<2>(r, geometry, cuda) : run_compiled<2>(parts, op, r, geometry, cuda);
}

}  // namespace fused_act

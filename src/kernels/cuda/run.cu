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

template <int bytes>
const char* run(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  static_assert(kDecodedParts == 2);
  if (!reads_codes(r.mode))
    return run_compiled<bytes>(std::make_integer_sequence<int, kCompiledParts>(), op, r, geometry, cuda);
  return r.table.bits() == 1 ? run_decoded_part<bytes, 0>(r, geometry, cuda) : run_decoded_part<bytes, 1>(r, geometry, cuda);
}

}  // namespace

const char* run_cuda(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  if (r.dtype == Dtype::f64) return run_cuda_program_64(r, geometry, cuda);  // of which there are no compiled chains
  return r.dtype == Dtype::f32 ? run<4>(op, r, geometry, cuda) : run<2>(op, r, geometry, cuda);
}

}  // namespace fused_act

// The kernels that read codes, whichever chain wrote them. Compiled for each size of an element: FUSED_ACT_BYTES.
#include "launch.cuh"
#include "parts.h"

namespace fused_act {
namespace {

constexpr int kBytes = FUSED_ACT_BYTES;

template <int operands, bool two>
const char* launch(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  using Op = Decoder<operands, two>;
  const Op op = Op::of(r.table, r.scalars);
  if (r.mode != Mode::coded_jvp) return run_with_codes(Launcher<Op, kBytes, Mode::backward>(op, r, geometry, cuda));
  return run_with_codes(Launcher<Op, kBytes, Mode::jvp>(op, r, geometry, cuda));
}

}  // namespace

template <int bytes>
const char* run_decoded(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  const bool two = r.table.bits() == 2;
  if (r.operands <= 1) return two ? launch<1, true>(r, geometry, cuda) : launch<1, false>(r, geometry, cuda);
  return two ? launch<kMaxOperands, true>(r, geometry, cuda) : launch<kMaxOperands, false>(r, geometry, cuda);
}
template const char* run_decoded<kBytes>(const Request&, const Geometry&, const Cuda&);

}  // namespace fused_act

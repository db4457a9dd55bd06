// The kernels that read codes, whichever chain wrote them. Compiled for each size of an element and each part: FUSED_ACT_BYTES,
// FUSED_ACT_PART.
#include "launch.cuh"
#include "parts.h"

namespace fused_act {
namespace {

constexpr int kBytes = FUSED_ACT_BYTES;
constexpr bool kTwo = FUSED_ACT_PART == 1;

template <class Op>
const char* launch_backward(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  return run_with_codes(Launcher<Op, kBytes, Mode::backward>(Op::of(r.table, r.scalars), r, geometry, cuda));
}

template <int operands>
const char* launch(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  using Op = Decoder<operands, kTwo>;
  if (r.mode != Mode::coded_jvp) return launch_backward<Op>(r, geometry, cuda);
  return run_with_codes(Launcher<Op, kBytes, Mode::jvp>(Op::of(r.table, r.scalars), r, geometry, cuda));
}

}  // namespace

template <int bytes, int part>
const char* run_decoded_part(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  if (r.operands > 1) return launch<kMaxOperands>(r, geometry, cuda);
  if (r.mode != Mode::coded_jvp) {
    switch (derivatives_known<kTwo>(r.table, r.scalars, r.operand_gradient[0].data != nullptr)) {
      case Derivatives::alike:
        return launch_backward<Decoder<1, kTwo, Derivatives::alike>>(r, geometry, cuda);
      case Derivatives::constant:
        return launch_backward<Decoder<1, kTwo, Derivatives::constant>>(r, geometry, cuda);
      default:
        break;
    }
  }
  return launch<1>(r, geometry, cuda);
}
template const char* run_decoded_part<kBytes, FUSED_ACT_PART>(const Request&, const Geometry&, const Cuda&);

}  // namespace fused_act

// The compiled chains of operators. Compiled for each size of an element and each part: FUSED_ACT_BYTES, FUSED_ACT_PART.
#include "exact.cuh"
#include "framed.h"

namespace fused_act {
namespace {

constexpr int kBytes = FUSED_ACT_BYTES, kPart = FUSED_ACT_PART;

// The kernels compiled for the operator where there are any and they fit, else those for a frame, else the program.
template <class Line>
const char* launch(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  using Op = typename Line::Compiled;
  const char* error = nullptr;
  if constexpr (!Op::kDynamic) {
    if (r.mode == Mode::forward && launch_if_fits<kBytes, Mode::forward>(Op{}, r, geometry, cuda, &error)) return error;
    if (r.mode == Mode::backward && launch_if_fits<kBytes, Mode::backward>(Op{}, r, geometry, cuda, &error)) return error;
    if constexpr (!Op::kHeavy)
      if (r.mode == Mode::coded && launch_if_fits<kBytes, Mode::coded>(Op{}, r, geometry, cuda, &error)) return error;
  }
  if (launch_first<kBytes>(typename FormOfHalves<Line>::Found{}, r, geometry, cuda, &error)) return error;
  if (run_framed<kBytes>(r, geometry, cuda, &error)) return error;
  return kBytes == 2 ? run_cuda_program_16(r, geometry, cuda) : run_cuda_program_32(r, geometry, cuda);
}

using Launch = const char* (*)(const Request&, const Geometry&, const Cuda&);
// Null for an operator of another part.
template <class Line, int op>
constexpr Launch launch_here() {
  if constexpr (op % kCompiledParts == kPart) return &launch<Line>;
  return nullptr;
}

enum Place : int {
#define FUSED_ACT_PLACE(NAME, ...) place_of_##NAME,
  FUSED_ACT_OPERATORS(FUSED_ACT_PLACE)
#undef FUSED_ACT_PLACE
};

}  // namespace

template <int bytes, int part>
const char* run_compiled_part(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
  static constexpr Launch functions[] = {
#define FUSED_ACT_ENTRY(NAME, ...) launch_here<ops::NAME, place_of_##NAME>(),
      FUSED_ACT_OPERATORS(FUSED_ACT_ENTRY)
#undef FUSED_ACT_ENTRY
  };
  return functions[op](r, geometry, cuda);
}
template const char* run_compiled_part<kBytes, kPart>(int op, const Request&, const Geometry&, const Cuda&);

}  // namespace fused_act

// The compiled chains of all operators for one size of an element. Included by the files that name one.
#pragma once

#include "exact.cuh"
#include "framed.h"

namespace fused_act {

// The kernels compiled for the operator where there are any and they fit, else those for a frame, else the program.
template <class Line, int bytes>
const char* launch(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  using Op = typename Line::Compiled;
  const char* error = nullptr;
  if constexpr (!Op::kDynamic) {
    if (r.mode == Mode::forward && launch_if_fits<bytes, Mode::forward>(Op{}, r, geometry, cuda, &error)) return error;
    if (r.mode == Mode::backward && launch_if_fits<bytes, Mode::backward>(Op{}, r, geometry, cuda, &error)) return error;
    if constexpr (!Op::kHeavy)
      if (r.mode == Mode::coded && launch_if_fits<bytes, Mode::coded>(Op{}, r, geometry, cuda, &error)) return error;
  }
  if (launch_first<bytes>(typename FormOfHalves<Line>::Found{}, r, geometry, cuda, &error)) return error;
  if (run_framed<bytes>(r, geometry, cuda, &error)) return error;
  return bytes == 2 ? run_cuda_program_16(r, geometry, cuda) : run_cuda_program_32(r, geometry, cuda);
}

// The launch functions of all operators, in the order of the list.
template <int bytes>
const char* run_compiled(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
#define FUSED_ACT_ENTRY(NAME, ...) &launch<ops::NAME, bytes>,
  static constexpr const char* (*functions[])(const Request&, const Geometry&, const Cuda&) = {
      FUSED_ACT_OPERATORS(FUSED_ACT_ENTRY)};
#undef FUSED_ACT_ENTRY
  return functions[op](r, geometry, cuda);
}

}  // namespace fused_act

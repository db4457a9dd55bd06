// The launch of a Program. Included by the files that name the size of an element.
#pragma once

#include "launch.cuh"
#include "parts.h"

namespace fused_act {

template <int bytes>
const char* run_program_in_any_mode(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  const auto run = [&](auto launcher) { return launcher.wants_dense() ? kWantsDense : message(launcher.run()); };
  switch (r.mode) {
    case Mode::forward:
      return run(Launcher<Program, bytes, Mode::forward>(r.program, r, geometry, cuda));
    case Mode::backward:
      return run(Launcher<Program, bytes, Mode::backward>(r.program, r, geometry, cuda));
    case Mode::jvp:  // the first result of double backward
    case Mode::double_backward:
      return run(Launcher<Program, bytes, Mode::double_backward>(r.program, r, geometry, cuda));
    default:  // those of codes have functions of their own
      return "unknown mode";
  }
}

template <int bytes>
const char* run_program(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  if constexpr (bytes < 8) {
    if (r.mode == Mode::coded)
      return run_with_codes(Launcher<Program, bytes, Mode::coded>(r.program, r, geometry, cuda));
  }
  if constexpr (bytes == 2) {  // what these do not fit goes to the kernels that know no element size
    if (r.mode == Mode::forward) {
      Launcher<Program, bytes, Mode::forward> launcher(r.program, r, geometry, cuda);
      if (launcher.fits()) return message(launcher.run());
      if (launcher.wants_dense()) return kWantsDense;
    } else if (r.mode == Mode::backward) {
      Launcher<Program, bytes, Mode::backward> launcher(r.program, r, geometry, cuda);
      if (launcher.fits()) return message(launcher.run());
      if (launcher.wants_dense()) return kWantsDense;
      if (launcher.has_vectors()) {  // but for operand gradients that need a pass of their own
        Request own = r, rest = r;
        for (int k = 0; k < kMaxOperands; ++k) (launcher.is_apart(k) ? own : rest).operand_gradient[k].data = nullptr;
        for (Request::Output& out : rest.out) out.data = nullptr;
        rest.may_be_dense = false;
        const char* error = message(Launcher<Program, bytes, Mode::backward>(r.program, own, geometry, cuda).run());
        return error ? error : run_cuda_program_32(rest, geometry, cuda);
      }
    }
    return run_cuda_program_32(r, geometry, cuda);
  } else {
    return run_program_in_any_mode<bytes>(r, geometry, cuda);
  }
}

}  // namespace fused_act

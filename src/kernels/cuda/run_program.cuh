// The launch of a Program. Included by the files that name the size of an element.
#pragma once

#include "launch.cuh"

namespace fused_act {

template <int bytes>
const char* run_program_in_any_mode(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  switch (r.mode) {
    case Mode::forward:
      return message(Launcher<Program, bytes, Mode::forward>(r.program, r, geometry, cuda).run());
    case Mode::backward:
      return message(Launcher<Program, bytes, Mode::backward>(r.program, r, geometry, cuda).run());
    case Mode::jvp:  // the first result of double backward
    case Mode::double_backward:
      return message(Launcher<Program, bytes, Mode::double_backward>(r.program, r, geometry, cuda).run());
  }
  return "unknown mode";
}

template <int bytes>
const char* run_program(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  if constexpr (bytes == 2) {  // what these do not fit goes to the kernels that know no element size
    if (r.mode == Mode::forward) {
      Launcher<Program, bytes, Mode::forward> launcher(r.program, r, geometry, cuda);
      if (launcher.fits()) return message(launcher.run());
    } else if (r.mode == Mode::backward) {
      Launcher<Program, bytes, Mode::backward> launcher(r.program, r, geometry, cuda);
      if (launcher.fits()) return message(launcher.run());
    }
    return run_cuda_program_32(r, geometry, cuda);
  } else {
    return run_program_in_any_mode<bytes>(r, geometry, cuda);
  }
}

}  // namespace fused_act

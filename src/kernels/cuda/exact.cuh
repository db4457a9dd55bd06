// Launches of what is compiled for all of a Program (forms.h).
#pragma once

#include "launch.cuh"

namespace fused_act {

// Whether the request was one for the kernels of `op`; `error` is then what came of it.
template <int bytes, Mode mode, class Op>
bool launch_if_fits(const Op& op, const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  Launcher<Op, bytes, mode> launcher(op, r, geometry, cuda);
  if (!launcher.fits()) return false;
  *error = message(launcher.run());
  return true;
}

template <class Op, int bytes>
bool launch_exact(const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  Op op;
  if (!op.matches(r.program)) return false;
  if constexpr (kHasForward<Op, bytes>)
    if (r.mode == Mode::forward) return launch_if_fits<bytes, Mode::forward>(op, r, geometry, cuda, error);
  constexpr Mode training = Op::kCoded ? Mode::coded : Mode::backward;
  return r.mode == training && launch_if_fits<bytes, training>(op, r, geometry, cuda, error);
}
template <int bytes, class... Op>
bool launch_first(Types<Op...>, const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  return (launch_exact<Op, bytes>(r, geometry, cuda, error) || ...);
}

}  // namespace fused_act

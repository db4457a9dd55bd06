// The framed kernels for one size of an element. Included by the files that name one.
#pragma once

#include "../frame.h"
#include "launch.cuh"

namespace fused_act {

template <class Step, int bytes>
bool launch_framed(const Frame& frame, const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  const auto launch = [&](auto pairs) {
    constexpr bool with_pairs = decltype(pairs)::value;
    if constexpr (kHasFrame<Step, with_pairs>) {
      const auto run = [&](auto mode) {
        Launcher<Framed<Step, with_pairs>, bytes, decltype(mode)::value> launcher({frame}, r, geometry, cuda);
        if (!launcher.fits()) return false;
        *error = message(launcher.run());
        return true;
      };
      if (r.mode == Mode::backward) {
        if constexpr (Step::heavy && !with_pairs)
          if (frame.has_sweep()) return run(std::integral_constant<Mode, Mode::backward>());
        return false;
      }
      if (r.mode == Mode::forward) return run(std::integral_constant<Mode, Mode::forward>());
      if constexpr (kIsLight<Step> && !with_pairs) return run(std::integral_constant<Mode, Mode::coded>());
    }
    return false;
  };
  return launch(std::false_type()) || launch(std::true_type());
}

// Whether the request was one for a framed kernel; `error` is then what came of it.
template <int bytes>
bool run_framed(const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
#define FUSED_ACT_ENTRY(STEP) &launch_framed<STEP, bytes>,
  static constexpr bool (*functions[])(const Frame&, const Request&, const Geometry&, const Cuda&, const char**) = {
      FUSED_ACT_STEPS(FUSED_ACT_ENTRY)};
#undef FUSED_ACT_ENTRY
  Frame frame;
  Code activation;
  if (r.mode != Mode::forward && r.mode != Mode::backward && r.mode != Mode::coded) return false;
  if (!match_frame(r.program, frame, activation)) return false;
  if (r.mode == Mode::coded && !matches_derivatives(r.program)) return false;
  return functions[int(activation)](frame, r, geometry, cuda, error);
}

}  // namespace fused_act

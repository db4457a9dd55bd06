// The framed kernels for one size of an element. Included by the files that name one.
#pragma once

#include "exact.cuh"

namespace fused_act {

template <class Step, int bytes>
bool launch_framed(const Frame& frame, const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  const auto launch = [&](auto pairs) {
    constexpr bool with_pairs = decltype(pairs)::value;
    using Op = Framed<Step, with_pairs>;
    if constexpr (kHasFrame<Step, with_pairs>) {
      using Exacts = std::conditional_t<with_pairs, FormsOfPairs<Step>, Forms<Step>>;
      if (launch_first<bytes>(Exacts{}, r, geometry, cuda, error)) return true;
      if (r.mode == Mode::forward) return launch_if_fits<bytes, Mode::forward>(Op{frame}, r, geometry, cuda, error);
      if constexpr (kIsLight<Step> && !with_pairs)
        if (r.mode == Mode::coded && matches_derivatives(r.program))
          return launch_if_fits<bytes, Mode::coded>(Op{frame}, r, geometry, cuda, error);
    }
    return false;
  };
  return launch(std::false_type()) || launch(std::true_type());
}

// Whether the request was one for the kernels of a form or a frame; `error` is then what came of it.
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
  return functions[int(activation)](frame, r, geometry, cuda, error);
}

}  // namespace fused_act

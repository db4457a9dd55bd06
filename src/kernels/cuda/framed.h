// The kernels of frames and forms, for all activations and sizes of an element. No CUDA header is needed to include it.
#pragma once

#include <utility>

#include "../frame.h"
#include "parts.h"

namespace fused_act {

// Which part the kernels of a step are in. Steps that are common have the most: they are dealt out by themselves.
constexpr int framed_part(Code code) {
  constexpr bool common[] = {
#define FUSED_ACT_COMMON(STEP) STEP::common,
      FUSED_ACT_STEPS(FUSED_ACT_COMMON)
#undef FUSED_ACT_COMMON
  };
  int before = 0;  // of its kind
  for (int other = 0; other < int(code); ++other) before += common[other] == common[int(code)];
  return before % kFramedParts;
}

// Whether the request, whose program is that frame about that activation, was one for the kernels of the part; `error` is then
// what came of it.
template <int bytes, int part>
bool run_framed_part(const Frame&, Code activation, const Request&, const Geometry&, const Cuda&, const char** error);

// Whether the request was one for the kernels of a form or a frame; `error` is then what came of it.
template <int bytes, int... part>
bool run_framed(std::integer_sequence<int, part...>, const Request& r, const Geometry& geometry, const Cuda& cuda,
                const char** error) {
  static constexpr bool (*parts[])(const Frame&, Code, const Request&, const Geometry&, const Cuda&, const char**) = {
      &run_framed_part<bytes, part>...};
  Frame frame;
  Code activation;
  if (r.mode != Mode::forward && r.mode != Mode::backward && r.mode != Mode::coded) return false;
  if (!match_frame(r.program, frame, activation)) return false;
  return parts[framed_part(activation)](frame, activation, r, geometry, cuda, error);
}
template <int bytes>
bool run_framed(const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  return run_framed<bytes>(std::make_integer_sequence<int, kFramedParts>(), r, geometry, cuda, error);
}

}  // namespace fused_act

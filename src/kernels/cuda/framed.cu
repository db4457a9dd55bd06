// Compiled for each size of an element and each part: FUSED_ACT_BYTES, FUSED_ACT_PART.
#include "framed.h"

#include "exact.cuh"

namespace fused_act {
namespace {

constexpr int kBytes = FUSED_ACT_BYTES, kPart = FUSED_ACT_PART;

template <class Step>
bool launch_framed(const Frame& frame, const Request& r, const Geometry& geometry, const Cuda& cuda, const char** error) {
  const auto launch = [&](auto pairs) {
    constexpr bool with_pairs = decltype(pairs)::value;
    using Op = Framed<Step, with_pairs>;
    if constexpr (framed_part(code_of<Step>) == kPart && kHasFrame<Step, with_pairs>) {
      using Exacts = std::conditional_t<with_pairs, FormsOfPairs<Step>, Forms<Step>>;
      if (launch_first<kBytes>(Exacts{}, r, geometry, cuda, error)) return true;
      if (r.mode == Mode::forward) return launch_if_fits<kBytes, Mode::forward>(Op{frame}, r, geometry, cuda, error);
      if constexpr (kIsLight<Step> && !with_pairs)
        if (r.mode == Mode::coded && matches_derivatives(r.program))
          return launch_if_fits<kBytes, Mode::coded>(Op{frame}, r, geometry, cuda, error);
    }
    return false;
  };
  return launch(std::false_type()) || launch(std::true_type());
}

}  // namespace

template <int bytes, int part>
bool run_framed_part(const Frame& frame, Code activation, const Request& r, const Geometry& geometry, const Cuda& cuda,
                     const char** error) {
  static constexpr bool (*functions[])(const Frame&, const Request&, const Geometry&, const Cuda&, const char**) = {
#define FUSED_ACT_ENTRY(STEP) &launch_framed<STEP>,
      FUSED_ACT_STEPS(FUSED_ACT_ENTRY)
#undef FUSED_ACT_ENTRY
  };
  return functions[int(activation)](frame, r, geometry, cuda, error);
}
template bool run_framed_part<kBytes, kPart>(const Frame&, Code, const Request&, const Geometry&, const Cuda&, const char**);

}  // namespace fused_act

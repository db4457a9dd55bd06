// Which inputs each result of an operator depends on, found by evaluating its steps on Trace numbers. Autograd saves
// by it and kernels read by it: relu_bias's backward needs x and no bias, and for the bias's gradient alone nothing.
#pragma once

#include "calculus.h"

namespace fused_act {

namespace input {
constexpr uint32_t x = 1, g = 2, u = 4;
constexpr uint32_t operand(int k) { return 8u << k; }
constexpr uint32_t v(int k) { return 8u << (kMaxOperands + k); }
}  // namespace input

struct Dependencies {
  uint32_t full[2] = {};
  uint32_t operand[kMaxOperands] = {};  // of the operands' gradients
};

namespace trace {
struct Io {
  Dependencies& found;
  Trace operand(int k) const { return {input::operand(k), false}; }
  Trace direction(int k) const { return {input::v(k), false}; }
  bool moves(int) const { return true; }
  void gradient(int k, const Trace& t) { found.operand[k] |= t.inputs; }
  template <class N>
  LocalMemory<N> memory() const {
    return {};
  }
};

template <Mode mode>
Dependencies dependencies(Program program) {
  program.assign_tape();
  Dependencies d;
  Io io{d};
  Scalar<float> scalars[kMaxScalars];
  // A number that no formula treats apart: at a weight of 1, or an exponent of 2, less is read than at others.
  for (Scalar<float>& s : scalars) s = Scalar<float>::of(3.5f);
  const Outputs<Trace> out = evaluate<mode>(program, scalars, Trace{input::x, false}, Trace{input::g, false},
                                            Trace{input::u, false}, true, io);
  for (int n = 0; n < full_outputs(mode); ++n) d.full[n] = out.full[n].inputs;
  return d;
}
}  // namespace trace

inline Dependencies dependencies(const Program& program, Mode mode) {
  switch (mode) {
    case Mode::forward:
      return trace::dependencies<Mode::forward>(program);
    case Mode::jvp:
      return trace::dependencies<Mode::jvp>(program);
    case Mode::backward:
      return trace::dependencies<Mode::backward>(program);
    default:
      break;
  }
  return trace::dependencies<Mode::double_backward>(program);
}

}  // namespace fused_act

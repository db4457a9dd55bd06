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

template <class Op, Mode mode>
Dependencies dependencies() {
  constexpr int O = Op::kOperands;
  Inputs<Trace, O> in{};
  Present<O> present{};
  in.x = {input::x, false};
  in.g = {input::g, false};
  in.u = {input::u, false};
  present.u = true;
  for (int k = 0; k < O; ++k) {
    in.operand[k] = {input::operand(k), false};
    in.v[k] = {input::v(k), false};
    present.v[k] = true;
  }
  Scalar<float> scalars[kMaxScalars];
  for (Scalar<float>& s : scalars) s = Scalar<float>::of(1);
  const Outputs<Trace, O> out = evaluate<Op, mode, Trace>(in, present, scalars);
  Dependencies d;
  for (int n = 0; n < full_outputs<mode>; ++n) d.full[n] = out.full[n].inputs;
  if constexpr (has_operand_gradients<mode>)
    for (int k = 0; k < O; ++k) d.operand[k] = out.operand[k].inputs;
  return d;
}

}  // namespace fused_act

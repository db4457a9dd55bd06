// Which inputs each result of an operator depends on, found by evaluating its steps (analysis.cpp). Autograd saves
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

Dependencies dependencies(const Program&, Mode);

}  // namespace fused_act

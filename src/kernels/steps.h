// Steps: one pointwise function each, written once. A step names the parameters that it takes from the operator's
// list, in order ('f': a scalar, 'T': a tensor operand), and the gradient conventions that a user should know.
#pragma once

#include "primitives.h"

namespace fused_act {

struct Relu {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = "relu: 0 at 0";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return relu(x);
  }
};

struct LeakyRelu {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "leaky_relu: the slope at 0";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return leaky_relu(x, s[0].value);
  }
};

// x * clamp((x + 3) / 6, 0, 1), as models write it out. F.hardswish has other gradients: 0 at -3 and 1 at 3.
struct HardswishWritten {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = "hardswish written with clamp: -0.5 at -3, 1.5 at 3";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    using C = compute_t<N>;
    return mul(x, clamp(divide(shift(x, C(3)), Scalar<C>::of(6)), C(0), C(1)));
  }
};

struct Hardsigmoid {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = "hardsigmoid: 0 at -3 and at 3";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return hardsigmoid(x);
  }
};

struct Min {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "min with a one-element tensor: one half at a tie";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return minimum(x, s[0].value);
  }
};

struct Add {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return add(x, operand[0]);
  }
};

struct MulOperand {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return mul(x, operand[0]);
  }
};

struct Mul {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return scale(x, s[0].value);
  }
};

struct Div {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return divide(x, s[0]);
  }
};

}  // namespace fused_act

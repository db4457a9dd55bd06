// Steps: one pointwise function each, written once. A step names the parameters that it takes from the operator's
// list, in order ('f': a scalar, 'T': a tensor operand), and the gradient conventions that a user should know.
#pragma once

#include "primitives.h"

namespace fused_act {

// What a step has unless it says otherwise.
struct Step {
  static constexpr const char* parameters = "";
  static constexpr const char* gradient = "";
  // Whether the derivative's formula gives f'(x) exactly when it is evaluated at the stored y = f(x) instead of x: for
  // every x of the output's dtype, at kinks and NaN too, and whichever dtype y was rounded to. (For an x that has more
  // digits than y, such as an earlier step's result, y may have been rounded onto a kink.)
  FUSED_ACT_FN static bool derivative_from_output(const double*) { return false; }
  // Whether it takes many registers: the transcendental functions.
  static constexpr bool heavy = false;
  // Whether in float32 it takes a GPU longer than its bytes do.
  static constexpr bool slow = false;
  // Whether it divides by a number that is no scalar, or takes a root: those are subroutines.
  static constexpr bool divides = false;
  // Whether the derivatives, that of the operand too, are 1 everywhere: a Program then keeps no slopes.
  static constexpr bool unit_slope = false;
  // Whether the derivative takes at most four values, so that training keeps no x (codes.h).
  static constexpr bool few_slopes = false;
  // Whether models commonly have it after convolutions and matrix products: its forms (forms.h) are then compiled.
  static constexpr bool common = false;
  // What a scalar is where None is given for it; null: the step is then left out.
  static constexpr const double* absent = nullptr;
  // What is wrong with the scalars, or null.
  static const char* wrong(const double*) { return nullptr; }
};

struct HeavyStep : Step {
  static constexpr bool heavy = true;
};

// Whether no dtype rounds c: 8 significant bits, bfloat16's, and float16's range. Rounded towards 0, a bound's output
// would look as if it lay inside the bounds.
FUSED_ACT_FN bool exact_in_every_dtype(double c) {
  const double a = c < 0 ? -c : c;
  if (a == 0 || a - a != 0) return a == a;  // 0, infinity; not NaN
  if (a > 65504 || a < 1.0 / (1 << 24)) return false;
  double ulp = 256;  // of 8 significant bits in [2^15, 2^16)
  while (ulp * 128 > a) ulp /= 2;
  if (ulp < 1.0 / (1 << 24)) ulp = 1.0 / (1 << 24);  // float16's subnormal numbers
  const double n = a / ulp;
  return n == double(int(n));
}

struct Relu : Step {
  static constexpr bool common = true, few_slopes = true;
  static constexpr const char* gradient = "relu: 0 at 0";
  FUSED_ACT_FN static bool derivative_from_output(const double*) { return true; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return relu(x);
  }
};

struct LeakyRelu : Step {
  static constexpr bool common = true, few_slopes = true;
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "leaky_relu: the slope at 0";
  FUSED_ACT_FN static bool derivative_from_output(const double* s) { return s[0] > 0; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return leaky_relu(x, s[0].value);
  }
};

struct Relu6 : Step {
  static constexpr bool common = true, few_slopes = true;
  static constexpr const char* gradient = "relu6: 0 at 0 and at 6";
  FUSED_ACT_FN static bool derivative_from_output(const double*) { return true; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    using C = compute_t<N>;
    return hardtanh(x, C(0), C(6));
  }
};

struct Hardtanh : Step {
  static constexpr bool few_slopes = true;
  static constexpr const char* parameters = "ff";
  static constexpr const char* gradient = "hardtanh: 0 at either bound";
  FUSED_ACT_FN static bool derivative_from_output(const double* s) {
    return s[0] <= s[1] && exact_in_every_dtype(s[0]) && exact_in_every_dtype(s[1]);
  }
  static const char* wrong(const double* s) { return s[0] > s[1] ? "min_val is greater than max_val" : nullptr; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return hardtanh(x, s[0].value, s[1].value);
  }
};

struct Clamp : Step {
  static constexpr bool few_slopes = true;
  static constexpr const char* parameters = "ff";
  static constexpr const char* gradient = "clamp: 1 at either bound";
  static constexpr double no_bounds[] = {-__builtin_inf(), __builtin_inf()};
  static constexpr const double* absent = no_bounds;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return clamp_between(x, s[0].value, s[1].value);
  }
};

// clamp(x, -c, c).
struct AbsClamp : Step {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "clamp: 1 at either bound";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return clamp_between(x, -s[0].value, s[0].value);
  }
};

// clamp(x, max=c).
struct MinScalar : Step {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "clamp: 1 at the bound";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return capped(x, s[0].value);
  }
};

struct Threshold : Step {
  static constexpr bool few_slopes = true;
  static constexpr const char* parameters = "ff";
  static constexpr const char* gradient = "threshold: 0 at the threshold";
  FUSED_ACT_FN static bool derivative_from_output(const double* s) {
    return s[1] <= s[0] && exact_in_every_dtype(s[1]);
  }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return threshold(x, s[0].value, s[1].value);
  }
};

struct FatRelu : Step {
  static constexpr bool few_slopes = true;
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "threshold: 0 at the threshold";
  FUSED_ACT_FN static bool derivative_from_output(const double* s) { return s[0] >= 0; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    using C = compute_t<N>;
    return threshold(x, s[0].value, C(0));
  }
};

struct Hardshrink : Step {
  static constexpr bool few_slopes = true;
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "hardshrink: 0 at +-lambd";
  FUSED_ACT_FN static bool derivative_from_output(const double* s) { return s[0] >= 0; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return hardshrink(x, s[0].value);
  }
};

struct Softshrink : Step {
  static constexpr bool few_slopes = true;
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "softshrink: 0 at +-lambd";
  static const char* wrong(const double* s) { return s[0] >= 0 ? nullptr : "lambd must be at least 0"; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return softshrink(x, s[0].value);
  }
};

struct Hardsigmoid : Step {
  static constexpr bool common = true, few_slopes = true;
  static constexpr const char* gradient = "hardsigmoid: 0 at -3 and at 3";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return hardsigmoid(x);
  }
};

struct Hardswish : Step {
  static constexpr bool common = true;
  static constexpr const char* gradient = "hardswish: 0 at -3, 1 at 3";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return hardswish(x);
  }
};

// x * clamp((x + 3) / 6, 0, 1), as models write it out. F.hardswish has other gradients: 0 at -3 and 1 at 3.
struct HardswishWritten : Step {
  static constexpr const char* gradient = "hardswish written with clamp: -0.5 at -3, 1.5 at 3";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    using C = compute_t<N>;
    return mul(x, clamp_between(divide(shift(x, C(3)), Scalar<C>::of(6)), C(0), C(1)));
  }
};

// x / 2 * clamp(x + 2, 0, 2).
struct HardMish : Step {
  static constexpr const char* gradient = "hard_mish: -1 at -2, 1 at 0";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    using C = compute_t<N>;
    return mul(divide(x, Scalar<C>::of(2)), clamp_between(shift(x, C(2)), C(0), C(2)));
  }
};

struct Square : Step {
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return mul(x, x);
  }
};

// x / (1 + |x|).
struct Softsign : Step {
  static constexpr bool divides = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return softsign(x);
  }
};

struct Sigmoid : HeavyStep {
  static constexpr bool common = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return sigmoid(x);
  }
};

struct Logsigmoid : HeavyStep {
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return logsigmoid(x);
  }
};

struct Tanh : HeavyStep {
  static constexpr bool common = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return tanh_(x);
  }
};

struct Tanhshrink : HeavyStep {
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return tanhshrink(x);
  }
};

struct Softplus : HeavyStep {
  static constexpr const char* parameters = "ff";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return softplus(x, s[0], s[1].value);
  }
};

struct Elu : HeavyStep {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "elu: alpha at 0";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    using C = compute_t<N>;
    return elu(x, C(1), s[0].value, s[0].value, Scalar<C>::of(1));
  }
};

struct Celu : HeavyStep {
  static constexpr const char* parameters = "f";
  static const char* wrong(const double* s) { return s[0] == 0 ? "alpha must not be 0" : nullptr; }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    using C = compute_t<N>;
    return elu(x, C(1), s[0].value, C(1), s[0]);
  }
};

struct Selu : HeavyStep {
  static constexpr const char* gradient = "selu: 1.758 (scale * alpha) at 0";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    using C = compute_t<N>;
    const C alpha = C(1.7580993408473768), scale = C(1.0507009873554805);  // times the scale
    return elu(x, scale, alpha, alpha, Scalar<C>::of(1));
  }
};

struct Silu : HeavyStep {
  static constexpr bool common = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return silu(x);
  }
};

// x * sigmoid(alpha * x).
struct SiluScaled : HeavyStep {
  static constexpr const char* parameters = "f";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    using C = compute_t<N>;
    return silu(x, Split<C>{s[0].value, C(0)});
  }
};

// x * sigmoid(1.702 * x).
struct QuickGelu : HeavyStep {
  static constexpr bool common = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    using C = compute_t<N>;
    return silu(x, Split<C>::of(1.702));
  }
};

struct Gelu : HeavyStep {
  static constexpr bool common = true, slow = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return gelu(x);
  }
};

struct GeluTanh : HeavyStep {
  static constexpr bool common = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return gelu_tanh(x);
  }
};

struct Mish : HeavyStep {
  static constexpr bool common = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return mish(x);
  }
};

struct Min : Step {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "min with a one-element tensor: one half at a tie";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return minimum_with(x, s[0].value);
  }
};

struct Add : Step {
  static constexpr const char* parameters = "T";
  static constexpr bool unit_slope = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return add(x, operand[0]);
  }
};

struct MulOperand : Step {
  static constexpr const char* parameters = "T";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return mul(x, operand[0]);
  }
};

// x + scalar.
struct Shift : Step {
  static constexpr const char* parameters = "f";
  static constexpr bool unit_slope = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return shift(x, s[0].value);
  }
};

// x + 1.
struct AddOne : Step {
  static constexpr bool unit_slope = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return shift(x, compute_t<N>(1));
  }
};

struct Mul : Step {
  static constexpr const char* parameters = "f";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return scale(x, s[0].value);
  }
};

struct Div : Step {
  static constexpr const char* parameters = "f";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return divide(x, s[0]);
  }
};

// Steps of chains (operators.h) that no other operator takes.

struct Sub : Step {
  static constexpr const char* parameters = "T";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return sub(x, operand[0]);
  }
};

// operand - x.
struct Rsub : Step {
  static constexpr const char* parameters = "T";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return sub(operand[0], x);
  }
};

struct DivOperand : Step {
  static constexpr bool divides = true;
  static constexpr const char* parameters = "T";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return quotient(x, operand[0]);
  }
};

// operand / x.
struct Rdiv : Step {
  static constexpr bool divides = true;
  static constexpr const char* parameters = "T";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return quotient(operand[0], x);
  }
};

struct Minimum : Step {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "minimum: one half to each at a tie";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return extreme<true>(x, operand[0]);
  }
};

struct Maximum : Step {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "maximum: one half to each at a tie";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return extreme<false>(x, operand[0]);
  }
};

// clamp(x, min=c).
struct MaxScalar : Step {
  static constexpr const char* parameters = "f";
  static constexpr const char* gradient = "clamp: 1 at the bound";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return raised(x, s[0].value);
  }
};

struct Neg : Step {
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return negative(x);
  }
};

struct Abs : Step {
  static constexpr const char* gradient = "abs: 0 at 0";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return absolute(x);
  }
};

struct Exp : HeavyStep {
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return exponential(x);
  }
};

struct Log : HeavyStep {
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return logarithm(x);
  }
};

struct Sqrt : Step {
  static constexpr bool divides = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return square_root(x);
  }
};

struct Rsqrt : Step {
  static constexpr bool divides = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return inverse_root(x);
  }
};

struct Reciprocal : Step {
  static constexpr bool divides = true;
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>*) {
    return inverse(x);
  }
};

// scalar - x.
struct RsubScalar : Step {
  static constexpr const char* parameters = "f";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return sub(constant<N>(s[0].value), x);
  }
};

// scalar / x, which in eager PyTorch is the product of 1 / x and the scalar.
struct RdivScalar : Step {
  static constexpr bool divides = true;
  static constexpr const char* parameters = "f";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return scale(inverse(x), s[0].value);
  }
};

struct PowScalar : Step {
  static constexpr bool divides = true;
  static constexpr const char* parameters = "f";
  static const char* wrong(const double* s) {
    const double e = s[0];
    const bool whole = e >= 2 && e <= 8 && e == int(e);
    return whole || e == 0.5 || e == -0.5 || e == -1 || e == -2
               ? nullptr
               : "the exponent must be a whole number from 2 to 8, -1, -2, 0.5 or -0.5";
  }
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N*, const Scalar<compute_t<N>>* s) {
    return power(x, s[0].value);
  }
};

struct Lerp : Step {
  static constexpr const char* parameters = "Tf";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>* s) {
    return interpolated(x, operand[0], s[0].value);
  }
};

// x where x > 0, else operand * x.
struct PRelu : Step {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "prelu: the slope at 0";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return prelu(x, operand[0]);
  }
};

// clamp(x, min=operand).
struct ClampMin : Step {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "clamp: 1 at the bound, and 0 for the bound";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return clamp_by<false>(x, operand[0]);
  }
};

// clamp(x, max=operand).
struct ClampMax : Step {
  static constexpr const char* parameters = "T";
  static constexpr const char* gradient = "clamp: 1 at the bound, and 0 for the bound";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>*) {
    return clamp_by<true>(x, operand[0]);
  }
};

// Masks, 1 or 0, which no gradient passes: x compared with a number and with an operand.
#define FUSED_ACT_COMPARISON(NAME, PARAMETERS, OTHER, MASK)                                                 \
  struct NAME : Step {                                                                                      \
    static constexpr const char* parameters = PARAMETERS;                                                   \
    template <class N>                                                                                      \
    FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>* s) {              \
      using B = Arithmetic<decltype(base(x))>;                                                              \
      const auto a = base(x), b = OTHER;                                                                    \
      (void)operand, (void)s;                                                                               \
      return indicator<N>(MASK);                                                                            \
    }                                                                                                       \
  };
FUSED_ACT_COMPARISON(Gt, "f", B::constant(s[0].value), B::less(b, a))
FUSED_ACT_COMPARISON(Ge, "f", B::constant(s[0].value), B::less_equal(b, a))
FUSED_ACT_COMPARISON(Lt, "f", B::constant(s[0].value), B::less(a, b))
FUSED_ACT_COMPARISON(Le, "f", B::constant(s[0].value), B::less_equal(a, b))
FUSED_ACT_COMPARISON(Eq, "f", B::constant(s[0].value), B::equal(a, b))
FUSED_ACT_COMPARISON(GtOperand, "T", base(operand[0]), B::less(b, a))
FUSED_ACT_COMPARISON(GeOperand, "T", base(operand[0]), B::less_equal(b, a))
FUSED_ACT_COMPARISON(LtOperand, "T", base(operand[0]), B::less(a, b))
FUSED_ACT_COMPARISON(LeOperand, "T", base(operand[0]), B::less_equal(a, b))
FUSED_ACT_COMPARISON(EqOperand, "T", base(operand[0]), B::equal(a, b))
#undef FUSED_ACT_COMPARISON

// x where the operand, a mask, is not 0; else the scalar.
struct Where : Step {
  static constexpr const char* parameters = "Tf";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>* s) {
    return select(is_set(operand[0]), x, constant<N>(s[0].value));
  }
};

// x where the operand, a mask, is 0; else the scalar.
struct WhereNot : Step {
  static constexpr const char* parameters = "Tf";
  template <class N>
  FUSED_ACT_FN static N apply(const N& x, const N* operand, const Scalar<compute_t<N>>* s) {
    return select(is_set(operand[0]), constant<N>(s[0].value), x);
  }
};

// Every step, once: what a Program may be made of. A chain names a step by its place: the list grows at its end only.
#define FUSED_ACT_STEPS(STEP)                                                                                         \
  STEP(Relu) STEP(LeakyRelu) STEP(Relu6) STEP(Hardtanh) STEP(Clamp) STEP(AbsClamp) STEP(MinScalar) STEP(Threshold)    \
  STEP(FatRelu) STEP(Hardshrink) STEP(Softshrink) STEP(Hardsigmoid) STEP(Hardswish) STEP(HardswishWritten)            \
  STEP(HardMish) STEP(Square) STEP(Softsign) STEP(Sigmoid) STEP(Logsigmoid) STEP(Tanh) STEP(Tanhshrink)               \
  STEP(Softplus) STEP(Elu) STEP(Celu) STEP(Selu) STEP(Silu) STEP(SiluScaled) STEP(QuickGelu) STEP(Gelu)               \
  STEP(GeluTanh) STEP(Mish) STEP(Min) STEP(Add) STEP(MulOperand) STEP(Shift) STEP(AddOne) STEP(Mul) STEP(Div)         \
  STEP(Sub) STEP(Rsub) STEP(DivOperand) STEP(Rdiv) STEP(Minimum) STEP(Maximum) STEP(MaxScalar) STEP(Neg) STEP(Abs)    \
  STEP(Exp) STEP(Log) STEP(Sqrt) STEP(Rsqrt) STEP(Reciprocal) STEP(RsubScalar) STEP(RdivScalar) STEP(PowScalar)       \
  STEP(Lerp) STEP(PRelu) STEP(ClampMin) STEP(ClampMax) STEP(Gt) STEP(Ge) STEP(Lt) STEP(Le) STEP(Eq) STEP(GtOperand)   \
  STEP(GeOperand) STEP(LtOperand) STEP(LeOperand) STEP(EqOperand) STEP(Where) STEP(WhereNot)

}  // namespace fused_act

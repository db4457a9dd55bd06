// The primitives that steps are made of. Each states its value and, beside it, its derivative's conventions at kinks,
// ties and NaN: those of PyTorch's autograd, which no calculus can derive.
//
// None has the name of a function of at::vec (clamp, clamp_max, minimum): on SIMD registers that one would be called.
#pragma once

#include <type_traits>

#include "numbers.h"

namespace fused_act {

template <class N>
FUSED_ACT_FN mask_t<N> above(const N& a, compute_t<N> c) {
  return Arithmetic<N>::less(constant<N>(c), a);
}
template <class N>
FUSED_ACT_FN mask_t<N> below(const N& a, compute_t<N> c) {
  return Arithmetic<N>::less(a, constant<N>(c));
}
template <class N>
FUSED_ACT_FN mask_t<N> not_above(const N& a, compute_t<N> c) {
  return Arithmetic<N>::negate(above(a, c));
}
template <class N>
FUSED_ACT_FN mask_t<N> equals(const N& a, compute_t<N> c) {
  return Arithmetic<N>::equal(a, constant<N>(c));
}

// The chain rule for a function of one number: its value, where it passes a tangent on, and what it makes of it.
template <class N, int K, class F>
FUSED_ACT_FN Dual<N, K> chain_rule(const Dual<N, K>& x, const N& value, const mask_t<N>& passes, F derivative) {
  Dual<N, K> r;
  r.value = value;
  for (int k = 0; k < K; ++k) {
    r.tangent[k] = derivative(x.tangent[k]);
    r.active[k] = Arithmetic<N>::both(x.active[k], passes);
  }
  return r;
}

template <class N, class F>
FUSED_ACT_FN Keyed<N> chain_rule(const Keyed<N>& x, const N& value, const mask_t<N>& passes, F derivative) {
  return {value, select(passes, derivative(x.tangent), inactive<N>())};
}

// The chain rule where the derivative exists everywhere. `slope` is a formula of its own, evaluated on the inner
// number: where that has tangents, so has the slope, and they are the second derivative.
template <class N, int K>
FUSED_ACT_FN Dual<N, K> smooth(const Dual<N, K>& x, const N& value, const N& slope) {
  return chain_rule(x, value, Arithmetic<N>::mask(true), [&](const auto& t) { return mul(t, slope); });
}

template <class N>
FUSED_ACT_FN Keyed<N> smooth(const Keyed<N>& x, const N& value, const N& slope) {
  return {value, mul(x.tangent, slope)};
}

// x as a constant: no tangent passes.
template <class N>
FUSED_ACT_FN N fixed(const N& x) {
  if constexpr (is_dual<N>::value) {
    return chain_rule(x, x.value, mask_t<N>(Arithmetic<N>::mask(false)), [](const auto& t) { return t; });
  } else {
    return x;
  }
}

// max(x, 0). NaN stays NaN (a maximum that drops NaN would give 0). Derivative: 0 at 0, 1 at NaN.
template <class N>
FUSED_ACT_FN N relu(const N& x) {
  if constexpr (is_dual<N>::value) {
    using A = Arithmetic<N>;
    const auto v = base(x);
    const auto dead = A::either(below(v, 0), equals(v, 0));
    return chain_rule(x, relu(x.value), A::negate(dead), [](const auto& t) { return t; });
  } else {
    return at_least(x, 0);
  }
}

// x where x > 0, else slope * x. Derivative at 0 and at NaN: the slope.
template <class N>
FUSED_ACT_FN N leaky_relu(const N& x, compute_t<N> slope) {
  if constexpr (is_dual<N>::value) {
    using A = Arithmetic<N>;
    const auto positive = above(base(x), 0);
    return chain_rule(x, leaky_relu(x.value, slope), A::mask(true),
                      [&](const auto& t) { return select(positive, t, scale(t, slope)); });
  } else {
    return select(above(x, 0), x, scale(x, slope));
  }
}

// min(max(x, lo), hi). NaN stays NaN, and a NaN bound gives NaN everywhere, as eager fills the result with it.
// Derivative: 1 at either bound, 0 at NaN (torch.clamp before 2.14, which has 0 at the bounds).
template <class N>
FUSED_ACT_FN N clamp_between(const N& x, compute_t<N> lo, compute_t<N> hi) {
  if constexpr (is_dual<N>::value) {
    using A = Arithmetic<N>;
    using B = Arithmetic<decltype(base(x))>;
    const auto v = base(x);
    const auto inside = A::both(B::less_equal(B::constant(lo), v), B::less_equal(v, B::constant(hi)));
    return chain_rule(x, clamp_between(x.value, lo, hi), inside, [](const auto& t) { return t; });
  } else {
    return at_most(at_least(x, lo), hi);
  }
}

// The same value. Derivative: 0 at either bound, 1 at NaN (F.hardtanh, F.relu6).
template <class N>
FUSED_ACT_FN N hardtanh(const N& x, compute_t<N> lo, compute_t<N> hi) {
  if constexpr (is_dual<N>::value) {
    using A = Arithmetic<N>;
    using B = Arithmetic<decltype(base(x))>;
    const auto v = base(x);
    const auto outside = A::either(B::less_equal(v, B::constant(lo)), B::less_equal(B::constant(hi), v));
    return chain_rule(x, hardtanh(x.value, lo, hi), A::negate(outside), [](const auto& t) { return t; });
  } else {
    return clamp_between(x, lo, hi);
  }
}

// min(x, c) with c a number. NaN in either gives NaN. Derivative: 1 at c, 0 at NaN (torch.clamp(x, max=c)).
template <class N>
FUSED_ACT_FN N capped(const N& x, compute_t<N> c) {
  if constexpr (is_dual<N>::value) {
    using B = Arithmetic<decltype(base(x))>;
    const auto inside = B::less_equal(base(x), B::constant(c));
    return chain_rule(x, capped(x.value, c), inside, [](const auto& t) { return t; });
  } else {
    return at_most(x, c);
  }
}

// value where x <= limit, else x. NaN stays NaN. Derivative: 0 at the limit, 1 at NaN (F.threshold).
template <class N>
FUSED_ACT_FN N threshold(const N& x, compute_t<N> limit, compute_t<N> value) {
  using B = Arithmetic<decltype(base(x))>;
  const auto v = base(x);
  const auto replaced = B::less_equal(v, B::constant(limit));
  if constexpr (is_dual<N>::value) {
    return chain_rule(x, threshold(x.value, limit, value), B::negate(replaced), [](const auto& t) { return t; });
  } else {
    return select(replaced, constant<N>(value), x);
  }
}

// -lambda <= x <= lambda. False at NaN and for a NaN lambda.
template <class N>
FUSED_ACT_FN mask_t<N> shrinks(const N& x, compute_t<N> lambda) {
  using A = Arithmetic<N>;
  return A::both(A::less_equal(constant<N>(-lambda), x), A::less_equal(x, constant<N>(lambda)));
}

// 0 where |x| <= lambda, else x. Derivative: 0 at +-lambda, 1 at NaN (F.hardshrink).
template <class N>
FUSED_ACT_FN N hardshrink(const N& x, compute_t<N> lambda) {
  if constexpr (is_dual<N>::value) {
    const auto passes = Arithmetic<N>::negate(shrinks(base(x), lambda));
    return chain_rule(x, hardshrink(x.value, lambda), passes, [](const auto& t) { return t; });
  } else {
    return select(shrinks(x, lambda), constant<N>(0), x);
  }
}

// 0 where |x| <= lambda, else x moved towards 0 by lambda. Derivative: 0 at +-lambda, 1 at NaN (F.softshrink).
template <class N>
FUSED_ACT_FN N softshrink(const N& x, compute_t<N> lambda) {
  if constexpr (is_dual<N>::value) {
    const auto passes = Arithmetic<N>::negate(shrinks(base(x), lambda));
    return chain_rule(x, softshrink(x.value, lambda), passes, [](const auto& t) { return t; });
  } else {
    const N moved = select(below(x, 0), shift(x, lambda), shift(x, -lambda));
    return select(shrinks(x, lambda), constant<N>(0), moved);
  }
}

// min(x, c) with c a tensor of one element. NaN in either gives NaN. Derivative: one half at a tie, 1 at NaN.
template <class N>
FUSED_ACT_FN N minimum_with(const N& x, compute_t<N> c) {
  if constexpr (is_dual<N>::value) {
    const auto v = base(x);
    const auto tie = equals(v, c);
    return chain_rule(x, minimum_with(x.value, c), not_above(v, c),
                      [&](const auto& t) { return select(tie, scale(t, compute_t<N>(0.5)), t); });
  } else {
    return at_most(x, c);
  }
}

// max(x, c) with c a number. NaN in either gives NaN. Derivative: 1 at c, 0 at NaN (torch.clamp(x, min=c)).
template <class N>
FUSED_ACT_FN N raised(const N& x, compute_t<N> c) {
  if constexpr (is_dual<N>::value) {
    using B = Arithmetic<decltype(base(x))>;
    const auto inside = B::less_equal(B::constant(c), base(x));
    return chain_rule(x, raised(x.value, c), inside, [](const auto& t) { return t; });
  } else {
    return at_least(x, c);
  }
}

// The lesser or the greater of two tensors' elements. NaN in either gives NaN. Derivatives: one half to each at a tie,
// 1 to each at NaN (torch.minimum, torch.maximum).
template <bool least, class N>
FUSED_ACT_FN N extreme(const N& a, const N& b) {
  if constexpr (is_dual<N>::value) {
    using B = Arithmetic<decltype(base(a))>;
    const auto va = base(a), vb = base(b);
    const auto tie = B::equal(va, vb), rises = B::less(va, vb), falls = B::less(vb, va);
    const auto half = [&](const auto& t) { return select(tie, scale(t, compute_t<N>(0.5)), t); };
    const auto value = extreme<least>(a.value, b.value);
    // The value is in one of them only, so that their sum has it.
    const auto zero = constant<std::decay_t<decltype(value)>>(0);
    return add(chain_rule(a, value, B::negate(least ? falls : rises), half),
               chain_rule(b, zero, B::negate(least ? rises : falls), half));
  } else if constexpr (kHasExtremes<N>) {
    return least ? Arithmetic<N>::lesser(a, b) : Arithmetic<N>::greater(a, b);
  } else {
    using A = Arithmetic<N>;
    const auto first = least ? A::less_equal(a, b) : A::less_equal(b, a);
    return select(A::either(first, A::negate(A::equal(a, a))), a, b);
  }
}

// min(max(x + 3, 0), 6) / 6. Derivative: 1/6 inside (-3, 3), 0 at both ends and at NaN (F.hardsigmoid).
// The value is eager's to the bit: its CUDA kernel multiplies by the float32 value of 1/6, in float64 too.
template <class N>
FUSED_ACT_FN N hardsigmoid(const N& x) {
  using C = compute_t<N>;
  if constexpr (is_dual<N>::value) {
    using A = Arithmetic<N>;
    const auto v = base(x);
    const auto inside = A::both(above(v, -3), below(v, 3));
    return chain_rule(x, hardsigmoid(x.value), inside, [](const auto& t) { return divide(t, Scalar<C>::of(6)); });
  } else {
    const Scalar<C> six{C(6), C(1.0f / 6.0f)};
    return divide(clamp_between(shift(x, C(3)), C(0), C(6)), six);
  }
}

// x * min(max(x + 3, 0), 6) / 6. Derivative: 0 at -3, 1 at 3 and at NaN (F.hardswish). The value is eager's to the bit,
// as that of hardsigmoid.
template <class N>
FUSED_ACT_FN N hardswish(const N& x) {
  using C = compute_t<N>;
  if constexpr (is_dual<N>::value) {
    using B = Arithmetic<decltype(base(x))>;
    const auto v = base(x);
    const auto dead = B::less_equal(v, B::constant(-3)), rises = below(v, 3);
    const auto inner = shift(divide(x.value, Scalar<C>::of(3)), C(0.5));
    const auto slope = select(rises, inner, constant<std::decay_t<decltype(inner)>>(1));
    return chain_rule(x, hardswish(x.value), B::negate(dead), [&](const auto& t) { return mul(t, slope); });
  } else {
    const Scalar<C> six{C(6), C(1.0f / 6.0f)};
    return divide(mul(x, clamp_between(shift(x, C(3)), C(0), C(6))), six);
  }
}

// The lesser (or the greater) of x and a bound, which is a tensor's element. NaN in either gives NaN. Derivative: 1 for x at
// the bound, which passes where x does not; 0 for both at NaN (torch.clamp with a tensor).
template <bool least, class N>
FUSED_ACT_FN N clamp_by(const N& x, const N& bound) {
  if constexpr (is_dual<N>::value) {
    using B = Arithmetic<decltype(base(x))>;
    const auto v = base(x), c = base(bound);
    const auto value = clamp_by<least>(x.value, bound.value);
    const auto same = [](const auto& t) { return t; };
    return add(chain_rule(x, value, least ? B::less_equal(v, c) : B::less_equal(c, v), same),
               chain_rule(bound, constant<std::decay_t<decltype(value)>>(0), least ? B::less(c, v) : B::less(v, c), same));
  } else {
    return extreme<least>(x, bound);
  }
}

// x where x > 0, else weight * x. Derivative at 0 and at NaN: that of the product (F.prelu).
template <class N>
FUSED_ACT_FN N prelu(const N& x, const N& weight) {
  return select(above(base(x), 0), x, mul(weight, x));
}

// 1 where a comparison holds, else 0. No tangent passes.
template <class N>
FUSED_ACT_FN N indicator(const mask_t<N>& m) {
  return select(m, constant<N>(1), constant<N>(0));
}

// Whether an element of a mask is set: as PyTorch, NaN is.
template <class N>
FUSED_ACT_FN mask_t<N> is_set(const N& mask) {
  return Arithmetic<N>::negate(equals(base(mask), 0));
}

// Whether a derivative has a formula of its own whose error is within 3 of the 4 eps that it may have (times max(1, |f'|)): with
// the 2 ulp of a GPU's exponential and the 1 ulp of its reciprocal at most 3.4e-7. The product rule on formulas of 4 ulp takes
// two to three times the instructions.
template <class N>
constexpr bool kHasRoughSlope = !is_dual<N>::value && std::is_same_v<compute_t<N>, float>;

// The value of a function and its derivative, which share an exponential. Such a value is no result: it stands where the
// derivative of what follows is evaluated, and as the derivative of a product. Relatively it is within 4 eps down to x = -2, as a
// result is, and within 17 at -5, where it is e^-13 or less. The derivative is as close as max(1, |f'|) asks: around its zero no
// formula in float32 has more but one in two parts, so that a factor of 12 behind it takes a gradient to 9 eps.
template <class N>
struct Curve {
  N value, slope;
};

// x / (1 + |x|). The derivative, the square of 1 / (1 + |x|), is NaN at infinity, as autograd has it.
template <class N>
FUSED_ACT_FN N softsign_quotient(const N& x) {
  return quotient(x, shift(absolute(x), compute_t<N>(1)));
}
template <class N>
FUSED_ACT_FN N softsign(const N& x) {
  return softsign_quotient(x);
}
template <class N, int K>
FUSED_ACT_FN Dual<N, K> softsign(const Dual<N, K>& x) {
  if constexpr (kHasRoughSlope<N>) {
    const N a = absolute(x.value), r = Arithmetic<N>::estimate_reciprocal(shift(a, 1));
    return smooth(x, softsign(x.value), Arithmetic<N>::fma(r, r, scale(a, 0)));
  } else {
    return softsign_quotient(x);
  }
}

// e^x.
template <class N>
FUSED_ACT_FN N exponential(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto value = exponential(x.value);
    return smooth(x, value, value);
  } else {
    return Arithmetic<N>::exp(x);
  }
}

// log(x). The derivative is infinite at 0, as that of the square root.
template <class N>
FUSED_ACT_FN N logarithm(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto one = constant<std::decay_t<decltype(x.value)>>(1);
    return smooth(x, logarithm(x.value), quotient(one, x.value));
  } else {
    return Arithmetic<N>::log(x);
  }
}

template <class N>
FUSED_ACT_FN N square_root(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto value = square_root(x.value);
    return smooth(x, value, quotient(constant<std::decay_t<decltype(value)>>(compute_t<N>(0.5)), value));
  } else {
    return Arithmetic<N>::sqrt(x);
  }
}

// 1 / sqrt(x). The derivative -r^3 / 2 as -r / |x| / 2: two roundings less, and the sign of r^3 at -0 too.
template <class N>
FUSED_ACT_FN N inverse_root(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto value = inverse_root(x.value);
    return smooth(x, value, quotient(scale(value, compute_t<N>(-0.5)), absolute(x.value)));
  } else {
    return quotient(constant<N>(1), Arithmetic<N>::sqrt(x));
  }
}

// 1 / x. The derivative is -(1 / x)^2: x^2 could overflow before its inverse underflows.
template <class N>
FUSED_ACT_FN N inverse(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto value = inverse(x.value);
    return smooth(x, value, negative(mul(value, value)));
  } else {
    return quotient(constant<N>(1), x);
  }
}

// x^exponent for multiples of one half, as a product of x and sqrt(x): x x, x x x and sqrt(x) are torch.pow's to the bit.
// Negative powers are those of 1 / x, which neither overflow nor underflow before the result does. From the fourth power
// on, where torch.pow is within an ulp, the product also carries what its roundings left out.
template <class N>
FUSED_ACT_FN N power(const N& x, compute_t<N> exponent) {
  if constexpr (is_dual<N>::value) {
    return smooth(x, power(x.value, exponent), scale(power(x.value, exponent - 1), exponent));
  } else {
    using A = Arithmetic<N>;
    using C = compute_t<N>;
    const C size = exponent < 0 ? -exponent : exponent;
    const int whole = static_cast<int>(size);
    const auto turned = [&](const N& v) { return exponent < 0 ? quotient(constant<N>(1), v) : v; };
    const N factor = turned(x);
    N high = whole ? factor : constant<N>(1), low = constant<N>(0);
    for (int n = 1; n < whole; ++n) {
      const N product = mul(high, factor);
      low = A::fma(low, factor, A::fma(high, factor, negative(product)));
      high = product;
    }
    // Where the product overflowed `low` is no number.
    if (whole > 3) high = select(below(absolute(low), C(__builtin_inf())), add(high, low), high);
    return size == C(whole) ? high : mul(high, turned(A::sqrt(x)));
  }
}

// a + weight (b - a), from the nearer end and with one rounding less, as torch.lerp.
template <class N>
FUSED_ACT_FN N interpolated(const N& a, const N& b, compute_t<N> weight) {
  using C = compute_t<N>;
  if constexpr (is_dual<N>::value) {
    N r = add(scale(a, 1 - weight), scale(b, weight));
    r.value = interpolated(a.value, b.value, weight);
    return r;
  } else {
    // Not `near ? a : b`: a choice between two places in memory kept the lanes of every step there.
    using A = Arithmetic<N>;
    const bool near = weight > C(-0.5) && weight < C(0.5);
    return A::fma(sub(b, a), constant<N>(near ? weight : weight - 1), select(A::mask(near), a, b));
  }
}

// e^-|x|, differentiated on the side of 0 that `below(x, 0)` says. So a formula that takes the side by the same mask is
// differentiated right at 0 too, where `absolute` would pass no tangent.
template <class N>
FUSED_ACT_FN N decay(const N& x) {
  if constexpr (is_dual<N>::value) {
    return exponential(select(below(base(x), 0), x, negative(x)));
  } else if constexpr (kReduced<N> || kExactFalling<N>) {
    return Arithmetic<N>::exp_falling(negative(absolute(x)));
  } else {
    return exponential(negative(absolute(x)));
  }
}

// A constant in two parts: value + low has twice the digits of the compute type. A product with a constant that is
// then exponentiated needs them: an error of half an ulp in t is one of |t| / 2 ulp in e^t.
template <class C>
struct Split {
  C value, low;
  FUSED_ACT_FN static constexpr Split of(double high, double low = 0) {
    return {C(high), C((high - double(C(high))) + low)};
  }
};

// What the rounding of t = c x left out. 0 where |t| is so large that e^-|t| is 0: there t may have overflowed.
template <class N>
FUSED_ACT_FN N product_low(const N& x, const Split<compute_t<N>>& c, const N& t) {
  using A = Arithmetic<N>;
  const N low = A::fma(x, constant<N>(c.low), A::fma(x, constant<N>(c.value), negative(t)));
  return select(below(absolute(t), 2000), low, constant<N>(0));
}

// sigmoid(x) sigmoid(-x). As s (1 - s) it would lose 8 bits at x = 12, and silu's derivative multiplies it by x.
template <class N>
FUSED_ACT_FN N sigmoid_slope(const N& x) {
  const N e = decay(x), d = shift(e, compute_t<N>(1));
  return ratio(e, mul(d, d));
}

// 1 / (1 + 2^-t) for t = factor x, without a branch: the power is 2^-t on either side of 0. The sum is divided by 2^16, so that
// its reciprocal is 0, to a GPU, only where x times it is 0 in bfloat16. But for results of 16 bits the factor has two parts and
// the power takes what the rounding of t left out: an error of half an ulp in t is one of |t| / 2 ulp in 2^t.
template <class N>
FUSED_ACT_FN N logistic_in_base_2(const N& x, const N& factor, const N& factor_low) {
  using A = Arithmetic<N>;
  using C = compute_t<N>;
  const auto inverted = [](const N& e) FUSED_ACT_LAMBDA {
    return scale(A::estimate_reciprocal(shift(e, C(0x1p-16))), C(0x1p-16));
  };
  const N turned = negative(x);
  if constexpr (kReduced<N>) {
    return inverted(A::exp2(A::fma(turned, factor, constant<N>(-16))));
  } else {
    constexpr C kLargestPower = std::is_same_v<C, float> ? 127 : 1023;
    const N power = shift(mul(turned, factor), C(-16)), e = A::exp2(power);
    const N low = A::fma(turned, factor_low, A::fma(turned, factor, negative(shift(power, C(16)))));
    // Where t may have overflowed `low` is no number. What takes its place keeps an infinite power infinite.
    const N change = scale(select(below(absolute(power), kLargestPower), low, constant<N>(C(1e-30))), C(0.6931471805599453));
    return inverted(A::fma(e, change, e));
  }
}

// 1 / (1 + e^-x). Both branches are quotients of positive sums, so nothing cancels or overflows.
template <class N>
FUSED_ACT_FN N sigmoid(const N& x) {
  if constexpr (is_dual<N>::value) {
    return smooth(x, sigmoid(x.value), sigmoid_slope(x.value));
  } else if constexpr (kReduced<N>) {
    return logistic_in_base_2(x, constant<N>(1.44269504f), constant<N>(0));
  } else {
    const N e = decay(x);
    return ratio(select(below(x, 0), e, constant<N>(1)), shift(e, compute_t<N>(1)));
  }
}

// sigmoid(t) and its derivative where kHasRoughSlope, for what multiplies it by x, from e = e^-|t|. `falls`: t < 0.
template <class N>
FUSED_ACT_FN Curve<N> rough_sigmoid_curve(const N& e, const mask_t<N>& falls) {
  using A = Arithmetic<N>;
  const N one = constant<N>(1), r = A::estimate_reciprocal(add(e, one));
  return {mul(select(falls, e, one), r), mul(mul(e, r), r)};
}

template <class C>
constexpr C kLargest = std::is_same_v<C, float> ? C(3e38) : C(1e308);

// sigmoid(c x).
template <class N>
FUSED_ACT_FN N sigmoid_scaled(const N& x, const Split<compute_t<N>>& c) {
  using A = Arithmetic<N>;
  using C = compute_t<N>;
  if constexpr (is_dual<N>::value) {
    const auto slope = scale(sigmoid_slope(scale(x.value, c.value)), c.value);
    return smooth(x, sigmoid_scaled(x.value, c), slope);
  } else {
    constexpr Split<C> log2e = Split<C>::of(1.4426950408889634, 2.0355273740931033e-17);
    // The product could overflow, and 0 times it be no number.
    const N value = constant<N>(c.value), high = constant<N>(log2e.value);
    const N factor = clamp_between(mul(value, high), -kLargest<C>, kLargest<C>);
    const N rest = A::fma(value, high, negative(factor));
    return logistic_in_base_2(x, factor, A::fma(value, constant<N>(log2e.low), A::fma(constant<N>(c.low), high, rest)));
  }
}

// x sigmoid(c x).
template <class N>
FUSED_ACT_FN Curve<N> silu_curve(const N& x, const Split<compute_t<N>>& c);
template <class N>
FUSED_ACT_FN N silu(const N& x, const Split<compute_t<N>>& c) {
  if constexpr (is_dual<N>::value) {
    const auto curve = silu_curve(x.value, c);
    return smooth(x, curve.value, curve.slope);
  } else {
    return mul(x, sigmoid_scaled(x, c));
  }
}
template <class N>
FUSED_ACT_FN N silu(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto curve = silu_curve(x.value, {1, 0});
    return smooth(x, curve.value, curve.slope);
  } else {
    return mul(x, sigmoid(x));
  }
}
template <class N>
FUSED_ACT_FN Curve<N> silu_curve(const N& x, const Split<compute_t<N>>& c) {
  const N t = scale(x, c.value);
  if constexpr (kHasRoughSlope<N>) {
    const auto gate = rough_sigmoid_curve(Arithmetic<N>::exp_falling(negative(absolute(t))), below(t, 0));
    return {mul(x, gate.value), Arithmetic<N>::fma(x, scale(gate.slope, c.value), gate.value)};
  } else {
    const N gate = sigmoid_scaled(x, c);
    return {mul(x, gate), add(gate, mul(x, scale(sigmoid_slope(t), c.value)))};
  }
}

// log(1 + e) for a real e in [0, 1]: in float32 e - e^2 h(e), where a polynomial for h is within 6e-9 of the result. That
// is half the instructions of the library's log1p, which has to serve every number.
template <class N>
FUSED_ACT_FN N log1p_of_decay(const N& e) {
  using A = Arithmetic<N>;
  if constexpr (kReduced<N>) {  // within 1.4e-6
    constexpr float coefficients[] = {0.06785077f, -0.15102722f, 0.2361132f, -0.33140421f, 0.49990747f};
    N h = constant<N>(-0.01458817f);
    for (float c : coefficients) h = A::fma(h, e, constant<N>(c));
    return A::fma(negative(mul(e, e)), h, e);
  } else if constexpr (std::is_same_v<compute_t<N>, float>) {
    constexpr float coefficients[] = {-0.02020457200706005f, 0.0576644204556942f,  -0.10680553317070007f,
                                      0.15355394780635834f,  -0.19695399701595306f, 0.24958586692810059f,
                                      -0.33330512046813965f, 0.4999993145465851f};
    N h = constant<N>(0.003318469738587737f);
    for (float c : coefficients) h = A::fma(h, e, constant<N>(c));
    return A::fma(negative(mul(e, e)), h, e);
  } else {
    return A::log1p(e);
  }
}

// log(sigmoid(x)).
template <class N>
FUSED_ACT_FN N logsigmoid(const N& x) {
  if constexpr (is_dual<N>::value) {
    return smooth(x, logsigmoid(x.value), sigmoid(negative(x.value)));
  } else {
    return sub(select(below(x, 0), x, constant<N>(0)), log1p_of_decay(decay(x)));
  }
}

// sigmoid(beta x), 1 where beta x > limit. The second derivative is 0 at the limit, as autograd has it.
template <class N>
FUSED_ACT_FN N softplus_slope(const N& x, compute_t<N> beta, compute_t<N> limit) {
  const N t = scale(x, beta), s = sigmoid(t);
  const auto v = base(t);
  return select(above(v, limit), constant<N>(1), select(equals(v, limit), fixed(s), s));
}

// log(1 + e^(beta x)) / beta; x where beta x > limit (F.softplus). Beyond 40, where e^-40 is below half an ulp of 40 in
// float64 as well, it is x in any case: so a high limit cannot let beta x or the exponential overflow. (On CUDA what is divided
// by beta is multiplied by its reciprocal, which is infinite for betas below 2.9e-39.)
template <class N>
FUSED_ACT_FN N softplus(const N& x, const Scalar<compute_t<N>>& beta, compute_t<N> limit) {
  using C = compute_t<N>;
  if constexpr (is_dual<N>::value) {
    return smooth(x, softplus(x.value, beta, limit), softplus_slope(x.value, beta.value, limit));
  } else {
    using A = Arithmetic<N>;
    const N t = scale(x, beta.value);
    if constexpr (kReduced<N>) {
      const N sum = add(select(below(t, 0), constant<N>(0), t), log1p_of_decay(decay(t)));
      return select(above(t, limit > C(40) ? C(40) : limit), x, divide(sum, beta));
    }
    const N low = product_low(x, Split<C>{beta.value, C(0)}, t);
    const auto falls = below(t, 0);
    N e = decay(t);
    e = A::fma(e, select(falls, low, negative(low)), e);
    const N rest = log1p_of_decay(e);
    const N sum = select(falls, rest, add(t, add(low, rest)));
    return select(above(t, limit > C(40) ? C(40) : limit), x, divide(sum, beta));
  }
}

// inner e^(x / alpha), outer where x > 0 and at NaN. The second derivative is 0 at 0, as autograd has it.
template <class N>
FUSED_ACT_FN N elu_slope(const N& x, compute_t<N> outer, compute_t<N> inner, const Scalar<compute_t<N>>& alpha) {
  using B = Arithmetic<decltype(base(x))>;
  const auto v = base(x);
  const N left = scale(exponential(divide(x, alpha)), inner);
  const N right = select(equals(v, 0), fixed(left), constant<N>(outer));
  return select(B::less(v, B::constant(0)), left, right);
}

// outer x where x > 0, else inner (e^(x / alpha) - 1). Derivative: at 0 that of the left side, inner / alpha, which the
// caller gives as `slope`; at NaN `outer`. (F.elu, F.celu, F.selu)
template <class N>
FUSED_ACT_FN N elu(const N& x, compute_t<N> outer, compute_t<N> inner, compute_t<N> slope,
                   const Scalar<compute_t<N>>& alpha) {
  if constexpr (is_dual<N>::value) {
    return smooth(x, elu(x.value, outer, inner, slope, alpha), elu_slope(x.value, outer, slope, alpha));
  } else {
    const N left = scale(Arithmetic<N>::expm1(divide(x, alpha)), inner);
    return select(below(x, 0), left, scale(x, outer));
  }
}

// tanh(x). The derivative is 4 e / (1 + e)^2 with e = e^(-2 |x|) where the exponential is within 1 ulp; with a GPU's it could have
// an error of 4 eps.
template <class N>
FUSED_ACT_FN N tanh_(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto value = tanh_(x.value);
    using V = std::decay_t<decltype(value)>;
    if constexpr (kHasRoughSlope<V> && kExactFalling<V>) {
      const V e = Arithmetic<V>::exp_falling(scale(absolute(x.value), -2)), d = shift(e, 1);
      return smooth(x, value, quotient(scale(e, 4), mul(d, d)));
    } else {
      return smooth(x, value, sub(constant<V>(1), mul(value, value)));
    }
  } else {
    return Arithmetic<N>::tanh(x);
  }
}

// x - tanh(x). Near 0, where the difference loses bits, by the continued fraction tanh(x) = x / (1 + w),
// w = x^2 / (3 + x^2 / (5 + ...)): then x - tanh(x) = x w / (1 + w), all of it positive, a quotient y a(y) / b(y) in
// y = x^2. Six levels are within 1.1e-8 up to |x| = 2, nine within 2e-16 up to 1.5.
template <class N>
FUSED_ACT_FN N tanhshrink(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto t = tanh_(x.value);
    return smooth(x, tanhshrink(x.value), mul(t, t));
  } else {
    using A = Arithmetic<N>;
    using C = compute_t<N>;
    const N y = mul(x, x);
    if constexpr (kReduced<N>) {  // a polynomial for (x - tanh(x)) / x^3, within 9e-7; beyond 1 the exponential
      constexpr float coefficients[] = {0.006724514f, -0.020862684f, 0.053741813f, -0.13331412f, 0.33333308f};
      N p = constant<N>(-0.0012167206f);
      for (float c : coefficients) p = A::fma(p, y, constant<N>(c));
      const N e = A::exp2(scale(absolute(x), C(2 * 1.4426950408889634)));
      const N t = A::fma(A::estimate_reciprocal(shift(e, C(1))), constant<N>(-2), constant<N>(1));
      const N far = sub(x, select(below(x, 0), negative(t), t));
      return select(below(absolute(x), 1), mul(mul(x, y), p), far);
    }
    N a, b;
    if constexpr (std::is_same_v<C, float>) {
      a = A::fma(y, constant<N>(27), constant<N>(2772));
      a = A::fma(y, a, constant<N>(45045));
      b = A::fma(y, constant<N>(28), constant<N>(3150));
      b = A::fma(y, b, constant<N>(62370));
      b = A::fma(y, b, constant<N>(135135));
    } else {
      constexpr C p[] = {1, 1430, 289575, 16081065, 218243025}, q[] = {1, 1485, 315315, 18918900, 310134825, 654729075};
      a = constant<N>(p[0]);
      b = constant<N>(q[0]);
      for (int i = 1; i < 5; ++i) a = A::fma(y, a, constant<N>(p[i]));
      for (int i = 1; i < 6; ++i) b = A::fma(y, b, constant<N>(q[i]));
    }
    const N near = mul(x, ratio(mul(y, a), b));
    return select(below(absolute(x), std::is_same_v<C, float> ? C(2) : C(1.5)), near, sub(x, A::tanh(x)));
  }
}

// x limited to +-bound, for a function that is constant to the last digit beyond it: the tangent passes, so that the
// derivative at infinity is the NaN of inf * 0, as in eager.
template <class N>
FUSED_ACT_FN N bounded(const N& x, compute_t<N> bound) {
  if constexpr (is_dual<N>::value) {
    return chain_rule(x, bounded(x.value, bound), mask_t<N>(Arithmetic<N>::mask(true)),
                      [](const auto& t) { return t; });
  } else {
    return clamp_between(x, -bound, bound);
  }
}

// From here on P(Z > a) of a standard normal Z is 0 to the last digit.
template <class C>
constexpr C kNoTail = std::is_same_v<C, float> ? C(14.9) : C(40);

// P(Z > a) = e (1 + change) r s in float32: e the power of 2 nearest to e^(-a^2 / 2) and `change` what its roundings left out,
// r = 1 / (1 + 7 a / 16), and s = S(v) with v = a r. S is a polynomial fitted to 4e-9 relative over [0, 13.3]; 7/16 gave the
// smallest error of the degrees and factors tried.
template <class N>
struct NormalTail {
  N e, change, r, v, s;
  FUSED_ACT_FN static NormalTail of(const N& a) {
    using A = Arithmetic<N>;
    const auto c = [](float k) FUSED_ACT_LAMBDA { return constant<N>(k); };
    constexpr auto half_log2e = Split<float>::of(-0.7213475204444817, -1.0177636870465517e-17);
    NormalTail t;
    const N square = mul(a, a), square_low = A::fma(a, a, negative(square));
    const N power = scale(square, half_log2e.value), rest = A::fma(square, c(half_log2e.value), negative(power));
    t.e = A::exp2(power);
    t.change = A::fma(square, c(half_log2e.low), A::fma(square_low, c(half_log2e.value), rest));
    t.change = scale(t.change, 0.6931471805599453f);
    const N d = A::fma(a, c(0.4375f), c(1)), d_low = A::fma(a, c(0.4375f), sub(c(1), d));
    const N r = A::estimate_reciprocal(d);
    t.r = A::fma(r, A::fma(negative(r), d_low, A::fma(negative(r), d, c(1))), r);
    t.v = mul(a, t.r);
    t.s = c(-9.69036682e-06f);
    constexpr float coefficients[] = {8.1148406e-05f,   -0.000244219671f, 0.000381250225f,  -0.000592654513f, 0.000174093802f,
                                      0.00145831984f,   0.00796314143f,   -0.00337475096f,  -0.180192143f,    0.5f};
    for (float k : coefficients) t.s = A::fma(t.s, t.v, c(k));
    return t;
  }
};

// P(Z > a) for a in [0, kNoTail]. By the complement 1 - P(Z <= a) it would have no digits left at 6.
template <class N>
FUSED_ACT_FN N normal_tail(const N& a) {
  using A = Arithmetic<N>;
  using C = compute_t<N>;
  const auto c = [](double v) { return constant<N>(C(v)); };
  if constexpr (kReduced<N>) {
    // 2^p(a), within 7e-6 up to a = 4, where float16 ends, and 1.1e-4 beyond, for bfloat16: three of the 65,536 numbers of either
    // type are then up to 0.513 ulp off. It is 2^32 times as large while it is computed, since to a GPU 2^-127 is 0.
    N p = c(-1.8539633162006908e-09);
    constexpr double coefficients[] = {1.3913943064380874e-07, -4.545558113022707e-06, 8.561658614780754e-05,
                                       -0.0010426995577290654, 0.008792255073785782,   -0.05433189123868942,
                                       -0.4582539498806,       -1.1512763500213623,    31};
    for (double k : coefficients) p = A::fma(p, a, c(k));
    return scale(A::exp2(p), C(0x1p-32));
  } else if constexpr (kHasTables<N>) {
    // e^(-a^2 / 2) M(a). Over each half octave of a + 1 a polynomial about a point in it, for which M's coefficients have short
    // errors in float32, is within 3.2e-8: three quarters of the instructions of the formula below.
    constexpr float center[] = {0.28125f, 0.734375f, 1.5625f, 2.515625f, 4.140625f, 5.9375f, 9.359375f, 12.5625f};
    constexpr float coefficients[][8] = {
        {0.40496334f, 0.30296847f, 0.20027317f, 0.14062193f, 0.09150386f, 0.065427236f, 0.04215407f, 0.031559084f},
        {-0.28504634f, -0.17644982f, -0.08601544f, -0.045190234f, -0.0200591f, -0.010468066f, -0.004406525f, -0.0024812934f},
        {0.16239733f, 0.08669268f, 0.03293706f, 0.01347017f, 0.004223325f, 0.0016365508f, 4.5585248e-04f, 1.9391792e-04f},
        {-0.07979074f, -0.037592616f, -0.011517558f, -0.0037682091f,
         -8.574828e-04f, -2.503488e-04f, -4.6696437e-05f, -1.5065384e-05f},
        {0.034973513f, 0.014833293f, 0.0037342089f, 9.970769e-04f,
         1.681967e-04f, 3.750564e-05f, 4.7313324e-06f, 1.1636766e-06f},
        {-0.013997999f, -0.005455675f, -0.0011313563f, -2.5120706e-04f,
         -3.1673593e-05f, -5.5236096e-06f, -4.65663e-07f, -8.970481e-08f},
        {0.0054050167f, 0.0011165203f, 3.359843e-04f, 6.343189e-05f,
         6.223618e-06f, 8.239182e-07f, 4.9257093e-08f, 6.949717e-09f},
        {-0.0015941547f, 8.5811777e-04f, -1.0486458e-04f, -1.5240996e-05f,
         -1.3839206e-06f, -1.0901868e-07f, -6.7270953e-09f, -4.4286383e-10f},
    };
    const N square = mul(a, a), square_low = A::fma(a, a, negative(square));
    const auto piece = A::half_octave(shift(a, C(1)));
    const N h = sub(a, A::lookup(piece, center));
    // By parts, which do not wait for each other; M itself by Horner's rule, which rounds once less.
    const auto k = [&](int power) FUSED_ACT_LAMBDA { return A::lookup(piece, coefficients[power]); };
    const N h2 = mul(h, h), third = A::fma(k(7), h2, A::fma(k(6), h, k(5)));
    const N rest = A::fma(third, mul(h2, h2), A::fma(A::fma(k(4), h, k(3)), h2, A::fma(k(2), h, k(1))));
    const N m = A::fma(rest, h, k(0));
    return mul(A::exp_falling(scale(square, C(-0.5))), A::fma(m, scale(square_low, C(-0.5)), m));
  } else if constexpr (std::is_same_v<C, float>) {
    const auto t = NormalTail<N>::of(a);
    const N tail = mul(t.e, mul(t.r, t.s));
    return A::fma(tail, t.change, tail);
  } else {
    // erfc(z) / 2 at z = a / sqrt(2). The rounding of z, dz, costs a relative 2 z dz and more: 3e-15 at z = 26.
    const Split<C> root = Split<C>::of(0.7071067811865476, -4.833646656726457e-17);
    const N z = scale(a, root.value), dz = product_low(a, root, z);
    const N tail = scale(A::erfc(z), C(0.5));
    return A::fma(tail, negative(mul(dz, A::fma(z, c(2), c(0.5)))), tail);
  }
}

// e^(-x^2 / 2) / sqrt(2 pi).
template <class N>
FUSED_ACT_FN N normal_density(const N& x) {
  using C = compute_t<N>;
  const N v = bounded(x, C(40));
  return scale(exponential(scale(mul(v, v), C(-0.5))), C(0.3989422804014327));
}

// P(Z <= x).
template <class N>
FUSED_ACT_FN N normal_cdf(const N& x) {
  if constexpr (is_dual<N>::value) {
    return smooth(x, normal_cdf(x.value), normal_density(x.value));
  } else {
    const N tail = normal_tail(at_most(absolute(x), kNoTail<compute_t<N>>));
    return select(below(x, 0), tail, sub(constant<N>(1), tail));
  }
}

// x P(Z <= x), as max(x, 0) - |x| P(Z > |x|), without a branch. (|x| + x) / 2 is a maximum that is NaN at -inf, as -inf times 0.
template <class N>
FUSED_ACT_FN N rectified(const N& x) {
  const N half = constant<N>(compute_t<N>(0.5));
  return Arithmetic<N>::fma(x, half, mul(absolute(x), half));
}
template <class N>
FUSED_ACT_FN Curve<N> gelu_curve(const N& x);
template <class N>
FUSED_ACT_FN N gelu(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto curve = gelu_curve(x.value);
    return smooth(x, curve.value, curve.slope);
  } else {
    using A = Arithmetic<N>;
    using C = compute_t<N>;
    const N a = at_most(absolute(x), kNoTail<C>), positive = rectified(x);
    if constexpr (std::is_same_v<C, float> && !kReduced<N> && !kHasTables<N>) {
      // With all that roundings left out but for those of r, v and s.
      const auto t = NormalTail<N>::of(a);
      const N product = mul(t.v, t.s), low = A::fma(product, t.change, A::fma(t.v, t.s, negative(product)));
      return A::fma(negative(product), t.e, A::fma(negative(t.e), low, positive));
    } else {
      return A::fma(negative(a), normal_tail(a), positive);
    }
  }
}
// The derivative, P(Z <= x) + x density(x), is D = e^(-a^2 / 2) (r S(a r) - a / sqrt(2 pi)) at x = -a and 1 - D at x = a, with
// r = 1 / (1 + c a). And P(Z > a) is e^(-a^2 / 2) r S. For c = 0.28 a polynomial S of degree 5 puts D within 1.1e-8, and one of
// degree 7 is relatively within 6.7e-8 up to a = 2 and 7.3e-7 at 9, which the value has where it is used: with one for both the
// backward of gelu alone took 10 % longer in bfloat16.
template <class N>
FUSED_ACT_FN Curve<N> gelu_curve(const N& x) {
  if constexpr (kHasRoughSlope<N>) {
    using A = Arithmetic<N>;
    const N a = absolute(x), r = A::estimate_reciprocal(A::fma(a, constant<N>(0.28f), constant<N>(1))), v = mul(a, r);
    const N falls = A::exp2(mul(scale(x, -0.7213475204444817f), x));
    constexpr float for_slope[] = {0.00018160925537813455f, -0.000853768433444202f, -0.00580646563321352f,
                                   0.065785713493824f,      -0.25894179940223694f,  0.5f};
    constexpr float for_value[] = {-4.798443569598021e-06f, 2.5438386728637852e-05f, 0.00013238759129308164f,
                                   -0.0008109933114610612f, -0.005822482518851757f,  0.06578744202852249f,
                                   -0.2589417099952698f,    0.5f};
    const auto polynomial = [&](const auto& coefficients) FUSED_ACT_LAMBDA {
      N s = constant<N>(coefficients[0]);
      for (int n = 1; n < int(sizeof(coefficients) / sizeof(float)); ++n) s = A::fma(s, v, constant<N>(coefficients[n]));
      return s;
    };
    const N d = mul(falls, A::fma(r, polynomial(for_slope), scale(a, -0.3989422804014327f)));
    const N product = select(below(a, kNoTail<float>), mul(v, polynomial(for_value)), constant<N>(0));  // v is NaN at infinity
    return {A::fma(negative(product), falls, rectified(x)), select(below(x, 0), d, sub(constant<N>(1), d))};
  } else {
    return {gelu(x), add(normal_cdf(x), mul(x, normal_density(x)))};
  }
}

// sigmoid(2 u) with 2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3), which is (1 + tanh(u)) / 2. At 24, 2 u is 1025 and the
// exponential 0.
template <class C>
struct TanhGate {
  static constexpr C c1 = C(1.5957691216057308), c3 = C(0.07135481627260025);
  // Both by log2(e). The first in parts of which the higher has 20 bits after the point, 47 in float64: as many as its sum with
  // the rest has where that is below 16, or 64 in float64, so that what the sum's rounding left out is known wherever the gate is
  // not 0.
  static constexpr bool kFloat = std::is_same_v<C, float>;
  static constexpr C linear = kFloat ? C(2.30220794677734375) : C(2.302208198144328);
  static constexpr C linear_low = kFloat ? C(2.513669811391339e-07) : C(-2.977296208542741e-15);
  static constexpr C linear_rounded = linear + linear_low;
  static constexpr Split<C> cubic = Split<C>::of(0.1029432395800235, -5.978177400718744e-18);
};
template <class N>
FUSED_ACT_FN N tanh_gate_slope(const N& x) {
  using C = compute_t<N>;
  const N v = bounded(x, C(24)), cubic = scale(mul(v, v), TanhGate<C>::c3);
  const N slope = shift(scale(cubic, C(3)), TanhGate<C>::c1);
  return mul(sigmoid_slope(mul(v, shift(cubic, TanhGate<C>::c1))), slope);
}
template <class N>
FUSED_ACT_FN N tanh_gate(const N& x) {
  using C = compute_t<N>;
  using G = TanhGate<C>;
  if constexpr (is_dual<N>::value) {
    return smooth(x, tanh_gate(x.value), tanh_gate_slope(x.value));
  } else {
    using A = Arithmetic<N>;
    const N square = mul(x, x), square_low = A::fma(x, x, negative(square));
    const N cubic = constant<N>(G::cubic.value), factor = A::fma(square, cubic, constant<N>(G::linear));
    const N rest = A::fma(square, cubic, sub(constant<N>(G::linear), factor));
    const N low = A::fma(square, constant<N>(G::cubic.low), constant<N>(G::linear_low));
    return logistic_in_base_2(x, factor, A::fma(square_low, cubic, add(rest, low)));
  }
}

// x tanh_gate(x).
template <class N>
FUSED_ACT_FN Curve<N> gelu_tanh_curve(const N& x);
template <class N>
FUSED_ACT_FN N gelu_tanh(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto curve = gelu_tanh_curve(x.value);
    return smooth(x, curve.value, curve.slope);
  } else {
    return mul(x, tanh_gate(x));
  }
}
template <class N>
FUSED_ACT_FN Curve<N> gelu_tanh_curve(const N& x) {
  if constexpr (kHasRoughSlope<N>) {
    using A = Arithmetic<N>;
    using G = TanhGate<float>;
    // The power of 2 as a sum whose lesser part is rounded on its own.
    const N v = bounded(x, 24), square = mul(v, v), cubic = mul(scale(square, G::cubic.value), v);
    const N power = A::fma(v, constant<N>(G::linear_rounded), cubic);
    const auto gate = rough_sigmoid_curve(A::exp2(negative(absolute(power))), below(x, 0));
    const N slope = mul(gate.slope, A::fma(square, constant<N>(3 * G::c3), constant<N>(G::c1)));
    return {mul(x, gate.value), A::fma(x, slope, gate.value)};
  } else {
    return {gelu_tanh(x), add(tanh_gate(x), mul(x, tanh_gate_slope(x)))};
  }
}

// tanh(softplus(x)). With e = e^-|x| it is e (2 + e) / (2 + 2 e + e^2) below 0 and (1 + 2 e) / (1 + 2 e + 2 e^2) above:
// sums of positive numbers again. The derivative is 4 (1 + e) (e or e^2) over the denominator's square.
template <class N>
FUSED_ACT_FN N mish_gate_slope(const N& x) {
  using C = compute_t<N>;
  const auto falls = below(base(x), 0);
  const N e = decay(x), square = mul(e, e);
  const N d = add(select(falls, shift(square, C(2)), shift(scale(square, C(2)), C(1))), scale(e, C(2)));
  return ratio(mul(scale(select(falls, e, square), C(4)), shift(e, C(1))), mul(d, d));
}
// What its value is the quotient of, for e = e^-|x| on the side of 0 that `falls` says.
template <class N>
struct MishQuotient {
  N n, d;
  FUSED_ACT_FN static MishQuotient of(const N& e, const mask_t<N>& falls) {
    using A = Arithmetic<N>;
    using C = compute_t<N>;
    const N twice = scale(e, C(2)), n = select(falls, A::fma(e, e, twice), shift(twice, C(1)));
    return {n, select(falls, shift(n, C(2)), A::fma(twice, e, n))};
  }
};
template <class N>
FUSED_ACT_FN N mish_gate(const N& x) {
  if constexpr (is_dual<N>::value) {
    return smooth(x, mish_gate(x.value), mish_gate_slope(x.value));
  } else {
    const auto q = MishQuotient<N>::of(decay(x), below(x, 0));
    return ratio(q.n, q.d);
  }
}

// x mish_gate(x).
template <class N>
FUSED_ACT_FN Curve<N> mish_curve(const N& x);
template <class N>
FUSED_ACT_FN N mish(const N& x) {
  if constexpr (is_dual<N>::value) {
    const auto curve = mish_curve(x.value);
    return smooth(x, curve.value, curve.slope);
  } else if constexpr (std::is_same_v<compute_t<N>, float> && !kReduced<N>) {
    // Also with what the rounding of the quotient leaves out, and below 0 those of n and d, without which the result can be 2.4 ulp
    // off, or 4.2, and that of mish of mish 4.6. (Far from 0 nothing is left out, and infinity times that would be NaN.)
    using A = Arithmetic<N>;
    const auto falls = below(x, 0);
    const N e = decay(x);
    const auto [n, d] = MishQuotient<N>::of(e, falls);
    const N q = ratio(n, d);
    const N n_low = A::fma(e, e, sub(scale(e, 2), n)), d_low = add(sub(constant<N>(2), d), n);
    const N of_parts = select(falls, A::fma(negative(q), d_low, n_low), constant<N>(0));
    const N low = mul(x, mul(add(A::fma(negative(q), d, n), of_parts), A::estimate_reciprocal(d)));
    return A::fma(x, q, select(below(x, 64), low, constant<N>(0)));
  } else {
    return mul(x, mish_gate(x));
  }
}

template <class N>
FUSED_ACT_FN Curve<N> mish_curve(const N& x) {
  if constexpr (kHasRoughSlope<N>) {
    using A = Arithmetic<N>;
    const auto falls = below(x, 0);
    const N e = A::exp_falling(negative(absolute(x))), square = mul(e, e), twice = scale(e, 2);
    const N n = select(falls, add(square, twice), shift(twice, 1));
    const N r = A::estimate_reciprocal(select(falls, shift(n, 2), A::fma(twice, e, n))), gate = mul(n, r);
    const N slope = mul(mul(mul(scale(select(falls, e, square), 4), shift(e, 1)), r), r);
    return {mul(x, gate), A::fma(x, slope, gate)};
  } else {
    return {mish(x), add(mish_gate(x), mul(x, mish_gate_slope(x)))};
  }
}

}  // namespace fused_act

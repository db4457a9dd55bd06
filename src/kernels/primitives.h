// The primitives that steps are made of. Each states its value and, beside it, its derivative's conventions at kinks,
// ties and NaN: those of PyTorch's autograd, which no calculus can derive.
#pragma once

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

// max(x, 0). NaN stays NaN (a maximum that drops NaN would give 0). Derivative: 0 at 0, 1 at NaN.
template <class N>
FUSED_ACT_FN N relu(const N& x) {
  if constexpr (is_dual<N>::value) {
    using A = Arithmetic<N>;
    const auto v = base(x);
    const auto dead = A::either(below(v, 0), equals(v, 0));
    return chain_rule(x, relu(x.value), A::negate(dead), [](const auto& t) { return t; });
  } else {
    return select(below(x, 0), constant<N>(0), x);
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

// min(max(x, lo), hi). NaN stays NaN. Derivative: 1 at either bound, 0 at NaN (torch.clamp).
template <class N>
FUSED_ACT_FN N clamp(const N& x, compute_t<N> lo, compute_t<N> hi) {
  if constexpr (is_dual<N>::value) {
    using A = Arithmetic<N>;
    using B = Arithmetic<decltype(base(x))>;
    const auto v = base(x);
    const auto inside = A::both(B::less_equal(B::constant(lo), v), B::less_equal(v, B::constant(hi)));
    return chain_rule(x, clamp(x.value, lo, hi), inside, [](const auto& t) { return t; });
  } else {
    const N low = constant<N>(lo), high = constant<N>(hi);
    const N raised = select(Arithmetic<N>::less(x, low), low, x);
    return select(Arithmetic<N>::less(high, raised), high, raised);
  }
}

// min(x, c) with c a tensor of one element. NaN in either gives NaN. Derivative: one half at a tie, 1 at NaN.
template <class N>
FUSED_ACT_FN N minimum(const N& x, compute_t<N> c) {
  if constexpr (is_dual<N>::value) {
    const auto v = base(x);
    const auto tie = equals(v, c);
    return chain_rule(x, minimum(x.value, c), not_above(v, c),
                      [&](const auto& t) { return select(tie, scale(t, compute_t<N>(0.5)), t); });
  } else {
    using A = Arithmetic<N>;
    const auto keep = A::either(A::less_equal(x, constant<N>(c)), A::negate(A::equal(x, x)));
    return select(keep, x, constant<N>(c));
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
    return divide(clamp(shift(x, C(3)), C(0), C(6)), six);
  }
}

}  // namespace fused_act

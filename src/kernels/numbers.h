// Numbers that a step's formula can be evaluated on, and the arithmetic that every one of them has.
//
//   float, double        one element, on the host and in CUDA kernels
//   at::vec::Vectorized  one SIMD register (cpu/vectorized.h)
//   Dual<N, K>           a value and K tangents: the formula evaluated on it is the formula's derivative
//   Trace                which inputs a result depends on: says what autograd has to save
//
// A formula sees only the functions at the end of this file and the primitives in primitives.h.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FUSED_ACT_FN __host__ __device__ __forceinline__
#elif defined(FUSED_ACT_ANALYSIS)  // analysis.cpp says why
#define FUSED_ACT_FN inline
#else
#define FUSED_ACT_FN inline __attribute__((always_inline))
#endif

// Of a lambda that holds numbers: where the compiler calls one, they go through memory. In a file of many kernels it does,
// and a program's backward then takes twice as long.
#if defined(FUSED_ACT_ANALYSIS)
#define FUSED_ACT_LAMBDA
#else
#define FUSED_ACT_LAMBDA __attribute__((always_inline))
#endif

namespace fused_act {

// A Python scalar in the compute type. Both forms of dividing by it are kept: eager PyTorch multiplies by the
// reciprocal on CUDA and divides on the CPU, and the results differ in 8 % of random float32 values.
template <class C>
struct Scalar {
  C value;
  C reciprocal;
  FUSED_ACT_FN static constexpr Scalar of(C v) { return {v, C(1) / v}; }
};

// Arithmetic<N> gives a number type its Compute type (float or double), its Mask type and its operations.
// The primary template serves float and double. What keeps compilers from contracting a product and a sum into an FMA is
// -fmad=false and -ffp-contract=off: through intrinsics nvcc would also keep each product with the 1 that a derivative begins
// with, a sixth of the instructions of a backward.
//
// `fma`, which rounds once, `estimate_reciprocal`, which is within 1 ulp, and the transcendental functions are there for
// real numbers only (and for Trace): a primitive uses them for its value and states its derivative beside it.
// `exp_falling`, e^x of a number of at most 0, has an absolute error of 2.7e-7: two instructions on a GPU, for derivatives and
// what they share.
// `exp2` may take what is below 2^-126 for 0 and what is above 2^127 for infinity: one instruction on a GPU.
// The SIMD and CUDA versions of the others are within 1 to 2 ulp; there is no erf and no float erfc, because at::vec's float
// erf has an absolute error of 1e-7 only.
template <class N>
struct Arithmetic {
  using Compute = N;
  using Mask = bool;

  FUSED_ACT_FN static N constant(Compute c) { return c; }
#if defined(__CUDA_ARCH__)
  FUSED_ACT_FN static float add(float a, float b) { return a + b; }
  FUSED_ACT_FN static float sub(float a, float b) { return a - b; }
  FUSED_ACT_FN static float mul(float a, float b) { return a * b; }
  FUSED_ACT_FN static double add(double a, double b) { return a + b; }
  FUSED_ACT_FN static double sub(double a, double b) { return a - b; }
  FUSED_ACT_FN static double mul(double a, double b) { return a * b; }
  FUSED_ACT_FN static N divide(N a, const Scalar<N>& s) { return mul(a, s.reciprocal); }
  FUSED_ACT_FN static float quotient(float a, float b) { return __fdiv_rn(a, b); }
  FUSED_ACT_FN static float estimate_reciprocal(float a) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
  }
  FUSED_ACT_FN static float ratio(float a, float b) {
    const float r = estimate_reciprocal(b), q = __fmul_rn(a, r);
    return __fmaf_rn(__fmaf_rn(-q, b, a), r, q);
  }
  FUSED_ACT_FN static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  FUSED_ACT_FN static float absolute(float a) { return ::fabsf(a); }
  FUSED_ACT_FN static float exp(float a) { return ::expf(a); }
  static constexpr float kLog2E = 1.4426950408889634f;
  FUSED_ACT_FN static float power_of_2(float a) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
  }
  FUSED_ACT_FN static float exp2(float a) { return power_of_2(a); }
  FUSED_ACT_FN static float exp_falling(float a) { return power_of_2(__fmul_rn(a, kLog2E)); }
  FUSED_ACT_FN static float expm1(float a) { return ::expm1f(a); }
  FUSED_ACT_FN static float log1p(float a) { return ::log1pf(a); }
  FUSED_ACT_FN static float tanh(float a) { return ::tanhf(a); }
  FUSED_ACT_FN static float log(float a) { return ::logf(a); }
  FUSED_ACT_FN static float sqrt(float a) { return __fsqrt_rn(a); }
  FUSED_ACT_FN static double quotient(double a, double b) { return __ddiv_rn(a, b); }
  FUSED_ACT_FN static double ratio(double a, double b) { return __ddiv_rn(a, b); }
  FUSED_ACT_FN static double estimate_reciprocal(double a) { return __ddiv_rn(1, a); }
  FUSED_ACT_FN static double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
  FUSED_ACT_FN static double absolute(double a) { return ::fabs(a); }
  FUSED_ACT_FN static double exp(double a) { return ::exp(a); }
  FUSED_ACT_FN static double exp2(double a) { return ::exp2(a); }
  FUSED_ACT_FN static double exp_falling(double a) { return ::exp(a); }
  FUSED_ACT_FN static double expm1(double a) { return ::expm1(a); }
  FUSED_ACT_FN static double log1p(double a) { return ::log1p(a); }
  FUSED_ACT_FN static double tanh(double a) { return ::tanh(a); }
  FUSED_ACT_FN static double log(double a) { return ::log(a); }
  FUSED_ACT_FN static double sqrt(double a) { return __dsqrt_rn(a); }
  FUSED_ACT_FN static double erfc(double a) { return ::erfc(a); }
#else
  FUSED_ACT_FN static N add(N a, N b) { return a + b; }
  FUSED_ACT_FN static N sub(N a, N b) { return a - b; }
  FUSED_ACT_FN static N mul(N a, N b) { return a * b; }
  FUSED_ACT_FN static N divide(N a, const Scalar<N>& s) { return a / s.value; }
  FUSED_ACT_FN static N quotient(N a, N b) { return a / b; }
  FUSED_ACT_FN static N ratio(N a, N b) { return a / b; }
  FUSED_ACT_FN static N estimate_reciprocal(N a) { return N(1) / a; }
  FUSED_ACT_FN static N fma(N a, N b, N c) { return std::fma(a, b, c); }
  FUSED_ACT_FN static N absolute(N a) { return std::fabs(a); }
  FUSED_ACT_FN static N exp(N a) { return std::exp(a); }
  FUSED_ACT_FN static N exp2(N a) { return std::exp2(a); }
  FUSED_ACT_FN static N exp_falling(N a) { return std::exp(a); }
  FUSED_ACT_FN static N expm1(N a) { return std::expm1(a); }
  FUSED_ACT_FN static N log1p(N a) { return std::log1p(a); }
  FUSED_ACT_FN static N tanh(N a) { return std::tanh(a); }
  FUSED_ACT_FN static N log(N a) { return std::log(a); }
  FUSED_ACT_FN static N sqrt(N a) { return std::sqrt(a); }
  FUSED_ACT_FN static double erfc(double a) { return std::erfc(a); }
#endif
  FUSED_ACT_FN static N negative(N a) { return -a; }
  FUSED_ACT_FN static Mask less(N a, N b) { return a < b; }
  FUSED_ACT_FN static Mask less_equal(N a, N b) { return a <= b; }
  FUSED_ACT_FN static Mask equal(N a, N b) { return a == b; }

  FUSED_ACT_FN static Mask mask(bool m) { return m; }
  FUSED_ACT_FN static Mask both(Mask a, Mask b) { return a & b; }
  FUSED_ACT_FN static Mask either(Mask a, Mask b) { return a | b; }
  FUSED_ACT_FN static Mask negate(Mask a) { return !a; }
  FUSED_ACT_FN static N select(Mask m, N a, N b) { return m ? a : b; }
};

// Whether Arithmetic has `lesser` and `greater` of two numbers, which are NaN where either is: one instruction in place of
// two from compute capability 8.0 on.
template <class N>
constexpr bool kHasExtremes = false;

// Whether Arithmetic has `lesser` and `greater` of a number and a constant that is not NaN, where NaN stays: one instruction of a
// CPU.
template <class N>
constexpr bool kHasBounds = false;

// Whether `exp_falling` is as close as `exp`.
template <class N>
constexpr bool kExactFalling = false;
// Whether Arithmetic has `half_octave` and `lookup`: one of eight numbers for each lane, by where a number lies.
template <class N>
constexpr bool kHasTables = false;

template <class N>
using compute_t = typename Arithmetic<N>::Compute;

// Whether results are stored in 16 bits. A formula's relative error may then be 5e-6, and that of their `exp_falling`: what
// float16's 0.51 ulp leaves beside the rounding. Where float16 has ended it may be 4e-5, and either more for one number in a
// thousand.
template <class N>
constexpr bool kReduced = false;
template <class N>
using mask_t = typename Arithmetic<N>::Mask;

// A value with K tangents. A tangent that is not `active` is zero because a branch was not taken (relu below 0,
// clamp outside its bounds) or because the value does not depend on that input; its number is then meaningless and
// never enters the result. So an infinite gradient at a clamped element gives 0 and not inf * 0 = NaN.
template <class N, int K>
struct Dual {
  N value;
  N tangent[K];
  mask_t<N> active[K];
};

template <class N>
struct is_dual {
  static constexpr bool value = false;
};
template <class N, int K>
struct is_dual<Dual<N, K>> {
  static constexpr bool value = true;
};

// The undifferentiated value, on which branches are decided.
template <class N>
FUSED_ACT_FN N base(const N& x) {
  return x;
}
template <class N, int K>
FUSED_ACT_FN auto base(const Dual<N, K>& x) {
  return base(x.value);
}

template <class N>
FUSED_ACT_FN N constant(compute_t<N> c) {
  return Arithmetic<N>::constant(c);
}
template <class N>
FUSED_ACT_FN N add(const N& a, const N& b) {
  return Arithmetic<N>::add(a, b);
}
template <class N>
FUSED_ACT_FN N sub(const N& a, const N& b) {
  return Arithmetic<N>::sub(a, b);
}
template <class N>
FUSED_ACT_FN N mul(const N& a, const N& b) {
  return Arithmetic<N>::mul(a, b);
}
template <class N>
FUSED_ACT_FN N divide(const N& a, const Scalar<compute_t<N>>& s) {
  return Arithmetic<N>::divide(a, s);
}
// a / b, rounded as IEEE 754 says on every device, unlike `divide`, which is eager's division by a Python scalar.
template <class N>
FUSED_ACT_FN N quotient(const N& a, const N& b) {
  return Arithmetic<N>::quotient(a, b);
}
// a / b to 1 ulp, for a finite a and a b of at most 2^100, at least 2^-100: 4 instructions on a GPU, without a branch for
// what those bounds rule out, where an IEEE 754 division takes 10 and a branch.
template <class N>
FUSED_ACT_FN N ratio(const N& a, const N& b) {
  return Arithmetic<N>::ratio(a, b);
}
template <class N>
FUSED_ACT_FN N negative(const N& a) {
  return Arithmetic<N>::negative(a);
}
template <class N>
FUSED_ACT_FN N absolute(const N& a) {
  return Arithmetic<N>::absolute(a);
}
template <class N>
FUSED_ACT_FN N select(const mask_t<N>& m, const N& a, const N& b) {
  return Arithmetic<N>::select(m, a, b);
}
// The lesser or the greater of a number and a constant. NaN in either gives NaN.
template <class N>
FUSED_ACT_FN N at_most(const N& a, compute_t<N> c) {
  using A = Arithmetic<N>;
  if constexpr (kHasExtremes<N>) {
    return A::lesser(a, constant<N>(c));
  } else {
    if (!(c == c)) return constant<N>(c);
    if constexpr (kHasBounds<N>) return A::lesser(a, c);
    return select(A::less(constant<N>(c), a), constant<N>(c), a);
  }
}
template <class N>
FUSED_ACT_FN N at_least(const N& a, compute_t<N> c) {
  using A = Arithmetic<N>;
  if constexpr (kHasExtremes<N>) {
    return A::greater(a, constant<N>(c));
  } else {
    if (!(c == c)) return constant<N>(c);
    if constexpr (kHasBounds<N>) return A::greater(a, c);
    return select(A::less(a, constant<N>(c)), constant<N>(c), a);
  }
}
template <class N>
FUSED_ACT_FN N scale(const N& a, compute_t<N> c) {
  return Arithmetic<N>::mul(a, constant<N>(c));
}
template <class N>
FUSED_ACT_FN N shift(const N& a, compute_t<N> c) {
  return Arithmetic<N>::add(a, constant<N>(c));
}

// The sum of two tangents of which either may be inactive. (As a sum with 0 where one is not it would stay
// a sum where that is known when this is compiled: -0 + 0 is not -0.)
template <class N>
FUSED_ACT_FN void accumulate(N& tangent, mask_t<N>& active, const N& t, const mask_t<N>& t_active) {
  using A = Arithmetic<N>;
  tangent = select(t_active, select(active, add(tangent, t), t), tangent);
  active = A::either(active, t_active);
}

template <class N, int K>
struct Arithmetic<Dual<N, K>> {
  using A = Arithmetic<N>;
  using D = Dual<N, K>;
  using Compute = typename A::Compute;
  using Mask = typename A::Mask;

  FUSED_ACT_FN static D constant(Compute c) {
    D r;
    r.value = A::constant(c);
    for (int k = 0; k < K; ++k) {
      r.tangent[k] = A::constant(0);
      r.active[k] = A::mask(false);
    }
    return r;
  }
  FUSED_ACT_FN static D add(const D& a, const D& b) {
    D r = a;
    r.value = A::add(a.value, b.value);
    for (int k = 0; k < K; ++k) accumulate(r.tangent[k], r.active[k], b.tangent[k], b.active[k]);
    return r;
  }
  FUSED_ACT_FN static D sub(const D& a, const D& b) { return add(a, scale(b, Compute(-1))); }
  FUSED_ACT_FN static D mul(const D& a, const D& b) {
    D r = a;
    r.value = A::mul(a.value, b.value);
    for (int k = 0; k < K; ++k) {
      r.tangent[k] = A::mul(a.tangent[k], b.value);
      accumulate(r.tangent[k], r.active[k], A::mul(b.tangent[k], a.value), b.active[k]);
    }
    return r;
  }
  FUSED_ACT_FN static D divide(const D& a, const Scalar<Compute>& s) {
    D r = a;
    r.value = A::divide(a.value, s);
    for (int k = 0; k < K; ++k) r.tangent[k] = A::divide(a.tangent[k], s);
    return r;
  }
  // As autograd's division: (ta - (a / b) tb) / b. So inf / inf has the derivative NaN, as in eager.
  FUSED_ACT_FN static D quotient(const D& a, const D& b) {
    return divided(a, b, [](const N& n, const N& d) { return A::quotient(n, d); });
  }
  FUSED_ACT_FN static D ratio(const D& a, const D& b) {
    return divided(a, b, [](const N& n, const N& d) { return A::ratio(n, d); });
  }
  template <class Division>
  FUSED_ACT_FN static D divided(const D& a, const D& b, const Division& by) {
    D r = a;
    r.value = by(a.value, b.value);
    for (int k = 0; k < K; ++k) {
      accumulate(r.tangent[k], r.active[k], A::negative(A::mul(r.value, b.tangent[k])), b.active[k]);
      r.tangent[k] = by(r.tangent[k], b.value);
    }
    return r;
  }
  FUSED_ACT_FN static D negative(const D& a) {
    D r = a;
    r.value = A::negative(a.value);
    for (int k = 0; k < K; ++k) r.tangent[k] = A::negative(a.tangent[k]);
    return r;
  }
  // The derivative at 0 and at NaN is 0, as torch.abs has it.
  FUSED_ACT_FN static D absolute(const D& a) {
    using B = Arithmetic<decltype(base(a))>;
    const auto v = base(a), zero = B::constant(0);
    const Mask below = B::less(v, zero), above = B::less(zero, v);
    D r;
    r.value = A::absolute(a.value);
    for (int k = 0; k < K; ++k) {
      r.tangent[k] = A::select(below, A::negative(a.tangent[k]), a.tangent[k]);
      r.active[k] = A::both(a.active[k], A::either(below, above));
    }
    return r;
  }
  FUSED_ACT_FN static D select(const Mask& m, const D& a, const D& b) {
    D r;
    r.value = A::select(m, a.value, b.value);
    for (int k = 0; k < K; ++k) {
      r.tangent[k] = A::select(m, a.tangent[k], b.tangent[k]);
      r.active[k] = A::either(A::both(m, a.active[k]), A::both(A::negate(m), b.active[k]));
    }
    return r;
  }

  FUSED_ACT_FN static Mask mask(bool m) { return A::mask(m); }
  FUSED_ACT_FN static Mask both(const Mask& a, const Mask& b) { return A::both(a, b); }
  FUSED_ACT_FN static Mask either(const Mask& a, const Mask& b) { return A::either(a, b); }
  FUSED_ACT_FN static Mask negate(const Mask& a) { return A::negate(a); }
};

// A value with one tangent, which is NaN where it is inactive: half the registers of a Dual, for derivatives that are never NaN
// themselves. By the tangent of a result the code of its derivative is known (codes.h).
template <class N>
struct Keyed {
  N value, tangent;
};
template <class N>
struct is_dual<Keyed<N>> {
  static constexpr bool value = true;
};
template <class N>
FUSED_ACT_FN auto base(const Keyed<N>& x) {
  return base(x.value);
}
template <class N>
FUSED_ACT_FN N inactive() {
  return constant<N>(static_cast<compute_t<N>>(__builtin_nanf("")));
}

template <class N>
struct Arithmetic<Keyed<N>> {
  using A = Arithmetic<N>;
  using K = Keyed<N>;
  using Compute = typename A::Compute;
  using Mask = typename A::Mask;

  FUSED_ACT_FN static K constant(Compute c) { return {A::constant(c), inactive<N>()}; }
  FUSED_ACT_FN static Mask active(const N& t) { return A::equal(t, t); }
  // Of tangents a and b what becomes of them: the sum, or the one that is active.
  FUSED_ACT_FN static N sum(const K& a, const N& of_a, const K& b, const N& of_b) {
    return A::select(active(b.tangent), A::select(active(a.tangent), A::add(of_a, of_b), of_b), of_a);
  }
  FUSED_ACT_FN static K add(const K& a, const K& b) {
    return {A::add(a.value, b.value), sum(a, a.tangent, b, b.tangent)};
  }
  FUSED_ACT_FN static K sub(const K& a, const K& b) { return add(a, scale(b, Compute(-1))); }
  FUSED_ACT_FN static K mul(const K& a, const K& b) {
    return {A::mul(a.value, b.value), sum(a, A::mul(a.tangent, b.value), b, A::mul(b.tangent, a.value))};
  }
  FUSED_ACT_FN static K divide(const K& a, const Scalar<Compute>& s) {
    return {A::divide(a.value, s), A::divide(a.tangent, s)};
  }
  FUSED_ACT_FN static K quotient(const K& a, const K& b) {
    const N q = A::quotient(a.value, b.value);
    return {q, A::quotient(sum(a, a.tangent, b, A::negative(A::mul(q, b.tangent))), b.value)};
  }
  FUSED_ACT_FN static K ratio(const K& a, const K& b) { return quotient(a, b); }
  FUSED_ACT_FN static K negative(const K& a) { return {A::negative(a.value), A::negative(a.tangent)}; }
  FUSED_ACT_FN static K absolute(const K& a) {
    using B = Arithmetic<decltype(base(a))>;
    const auto v = base(a), zero = B::constant(0);
    const N t = A::select(B::less(v, zero), A::negative(a.tangent), a.tangent);
    return {A::absolute(a.value), A::select(A::either(B::less(v, zero), B::less(zero, v)), t, inactive<N>())};
  }
  FUSED_ACT_FN static K select(const Mask& m, const K& a, const K& b) {
    return {A::select(m, a.value, b.value), A::select(m, a.tangent, b.tangent)};
  }

  FUSED_ACT_FN static Mask mask(bool m) { return A::mask(m); }
  FUSED_ACT_FN static Mask both(const Mask& a, const Mask& b) { return A::both(a, b); }
  FUSED_ACT_FN static Mask either(const Mask& a, const Mask& b) { return A::either(a, b); }
  FUSED_ACT_FN static Mask negate(const Mask& a) { return A::negate(a); }
};

// Which inputs a number was computed from. `zero` marks a structural zero: what is multiplied by it, or added to
// it, adds no dependency.
struct Trace {
  uint32_t inputs;
  bool zero;
};

struct TraceMask {
  enum State { never, always, sometimes } state;
  uint32_t inputs;
};

template <>
struct Arithmetic<Trace> {
  using Compute = float;
  using Mask = TraceMask;

  static Trace constant(float c) { return {0, c == 0}; }
  static Trace join(Trace a, Trace b) { return {a.inputs | b.inputs, false}; }
  static Trace add(Trace a, Trace b) { return a.zero ? b : b.zero ? a : join(a, b); }
  static Trace sub(Trace a, Trace b) { return add(a, b); }
  static Trace mul(Trace a, Trace b) { return a.zero || b.zero ? constant(0) : join(a, b); }
  static Trace divide(Trace a, const Scalar<float>&) { return a; }
  static Trace quotient(Trace a, Trace b) { return join(a, b); }
  static Trace ratio(Trace a, Trace b) { return join(a, b); }
  static Trace estimate_reciprocal(Trace a) { return a; }
  static Trace fma(Trace a, Trace b, Trace c) { return join(join(a, b), c); }
  static Trace negative(Trace a) { return a; }
  static Trace absolute(Trace a) { return a; }
  static Trace smooth(Trace a) { return {a.inputs, false}; }
  static Trace exp(Trace a) { return smooth(a); }
  static Trace exp2(Trace a) { return smooth(a); }
  static Trace exp_falling(Trace a) { return smooth(a); }
  static Trace expm1(Trace a) { return smooth(a); }
  static Trace log1p(Trace a) { return smooth(a); }
  static Trace tanh(Trace a) { return smooth(a); }
  static Trace log(Trace a) { return smooth(a); }
  static Trace sqrt(Trace a) { return smooth(a); }
  static Mask compare(Trace a, Trace b) { return {TraceMask::sometimes, a.inputs | b.inputs}; }
  static Mask less(Trace a, Trace b) { return compare(a, b); }
  static Mask less_equal(Trace a, Trace b) { return compare(a, b); }
  static Mask equal(Trace a, Trace b) { return compare(a, b); }

  static Mask mask(bool m) { return {m ? TraceMask::always : TraceMask::never, 0}; }
  static Mask both(Mask a, Mask b) {
    if (a.state == TraceMask::never || b.state == TraceMask::never) return mask(false);
    if (a.state == TraceMask::always) return b;
    if (b.state == TraceMask::always) return a;
    return {TraceMask::sometimes, a.inputs | b.inputs};
  }
  static Mask negate(Mask a) {
    return a.state == TraceMask::sometimes ? a : mask(a.state == TraceMask::never);
  }
  static Mask either(Mask a, Mask b) { return negate(both(negate(a), negate(b))); }
  static Trace select(Mask m, Trace a, Trace b) {
    if (m.state != TraceMask::sometimes) return m.state == TraceMask::always ? a : b;
    if (a.zero && b.zero) return a;
    return {m.inputs | a.inputs | b.inputs, false};
  }
};

}  // namespace fused_act

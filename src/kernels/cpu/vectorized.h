// One SIMD register as a number: at::vec's, whose width is that of the SIMD level that the file is compiled for.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cmath>

#include "../numbers.h"

namespace fused_act {

// At::vec's functions.
template <class C>
struct VectorFunctions {
  using N = at::vec::Vectorized<C>;
  static N exp(const N& a) { return a.exp(); }
  static N exp_falling(const N& a) { return a.exp(); }
  static N expm1(const N& a) { return a.expm1(); }
  static N tanh(const N& a) { return a.tanh(); }
};

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// Inlined, within 1 ulp (tanh: 2) over all of float32, subnormal results too. at::vec calls a function for each register, which takes three to five
// times as long: at 8 elements that was most of the time of every activation with an exponential.
template <>
struct VectorFunctions<float> {
  using N = at::vec::Vectorized<float>;

  static N exp(const N& a) {
    const Reduced r = reduce(within(a, -104, 89));  // beyond them it is 0 and infinity
    return scaled(r.expm1 + N(1), r.n);
  }
  static N exp_falling(const N& a) { return exp(a); }
  // 2^n expm1(r) + (2^n - 1), with half of 2^n, which is finite where the result is.
  static N expm1(const N& a) {
    const Reduced r = reduce(within(a, -20, 89));
    const N half = scaled(N(0.5f), r.n);
    return at::vec::fmadd(half, r.expm1, half - N(0.5f)) * N(2);
  }
  // -expm1(-2 |a|) / (2 + expm1(-2 |a|)), with the sign of a.
  static N tanh(const N& a) {
    const N e = expm1(a.abs() * N(-2));
    return e.abs() / (e + N(2)) | (a & N(-0.0f));
  }

 private:
  // a = n log(2) + r, and e^r - 1: the polynomial is within 1.4e-8 of it.
  struct Reduced {
    N n, expm1;
  };
  static Reduced reduce(const N& a) {
    const N n = nearest(a * N(1.44269504f));
    const N r = at::vec::fmadd(n, N(1.90465421e-9f), at::vec::fmadd(n, N(-0.693147182f), a));
    N q(0.001394649618305266f);
    for (float c : {0.00836661085486412f, 0.04166628047823906f, 0.1666654348373413f, 0.5f}) q = at::vec::fmadd(q, r, N(c));
    return {n, at::vec::fmadd(r * r, q, r)};
  }
  // NaN stays: of two numbers of which one is NaN, the instructions take the second.
#if defined(CPU_CAPABILITY_AVX512)
  static N within(const N& a, float low, float high) {
    return _mm512_min_ps(N(high), _mm512_max_ps(N(low), a));
  }
  static N nearest(const N& a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
  static N scaled(const N& a, const N& n) { return _mm512_scalef_ps(a, n); }
#else
  static N within(const N& a, float low, float high) {
    return _mm256_min_ps(N(high), _mm256_max_ps(N(low), a));
  }
  static N nearest(const N& a) { return a.round(); }
  // a 2^n, with one rounding if it is subnormal: neither 2^(n / 2) nor a times it is.
  static N scaled(const N& a, const N& n) {
    const auto power = [](__m256i i) {
      return N(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(127)), 23)));
    };
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return a * power(half) * power(_mm256_sub_epi32(whole, half));
  }
#endif
};
#endif

template <class C>
struct Arithmetic<at::vec::Vectorized<C>> {
  using N = at::vec::Vectorized<C>;
  using Compute = C;
  using Mask = N;  // all bits of a lane set or clear

  static N constant(C c) { return N(c); }
  static N add(const N& a, const N& b) { return a + b; }
  static N sub(const N& a, const N& b) { return a - b; }
  static N mul(const N& a, const N& b) { return a * b; }
  static N divide(const N& a, const Scalar<C>& s) { return a / N(s.value); }
  static N quotient(const N& a, const N& b) { return a / b; }
  static N ratio(const N& a, const N& b) { return a / b; }
  static N estimate_reciprocal(const N& a) { return N(C(1)) / a; }
  static N negative(const N& a) { return a.neg(); }
  static N absolute(const N& a) { return a.abs(); }
  static N exp(const N& a) { return VectorFunctions<C>::exp(a); }
  static N exp_falling(const N& a) { return VectorFunctions<C>::exp_falling(a); }
  static N expm1(const N& a) { return VectorFunctions<C>::expm1(a); }
  static N log1p(const N& a) { return a.log1p(); }
  static N tanh(const N& a) { return VectorFunctions<C>::tanh(a); }
  static N log(const N& a) { return a.log(); }
  static N sqrt(const N& a) { return a.sqrt(); }
  static N erfc(const N& a) { return a.erfc(); }
  // at::vec::fmadd is an FMA where the instruction set is known to have one; elsewhere it is a product and a sum.
  static N fma(const N& a, const N& b, const N& c) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    return at::vec::fmadd(a, b, c);
#else
    C x[N::size()], y[N::size()], z[N::size()];
    a.store(x);
    b.store(y);
    c.store(z);
    for (int i = 0; i < N::size(); ++i) z[i] = std::fma(x[i], y[i], z[i]);
    return N::loadu(z);
#endif
  }

  static Mask less(const N& a, const N& b) { return a < b; }
  static Mask less_equal(const N& a, const N& b) { return a <= b; }
  static Mask equal(const N& a, const N& b) { return a == b; }

  static Mask mask(bool m) { return m ? N(C(0)) == N(C(0)) : N(C(0)); }
  static Mask both(const Mask& a, const Mask& b) { return a & b; }
  static Mask either(const Mask& a, const Mask& b) { return a | b; }
  static Mask negate(const Mask& a) { return a ^ mask(true); }
  static N select(const Mask& m, const N& a, const N& b) { return N::blendv(b, a, m); }
};

}  // namespace fused_act

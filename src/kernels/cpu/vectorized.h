// One SIMD register as a number: at::vec's, whose width is that of the SIMD level that the file is compiled for.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cmath>

#include "../numbers.h"

namespace fused_act {

// The transcendental functions of a register: those of at::vec. (By the register's type, which each SIMD level has its own of.)
template <class N>
struct VectorFunctions {
  static N exp(const N& a) { return a.exp(); }
  static N exp2(const N& a) { return a.exp2(); }
  static N exp_falling(const N& a) { return a.exp(); }
  static N expm1(const N& a) { return a.expm1(); }
  static N tanh(const N& a) { return a.tanh(); }
};

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
template <>
inline constexpr bool kExactFalling<at::vec::Vectorized<float>> = true;
template <>
inline constexpr bool kHasTables<at::vec::Vectorized<float>> = true;
template <>
inline constexpr bool kHasBounds<at::vec::Vectorized<float>> = true;

// Inlined, within 1 ulp (tanh: 2.5) over all of float32, subnormal results too, but for those of exp2. at::vec calls a function for
// each register, which takes three to five times as long: most of the time of every activation with an exponential.
template <>
struct VectorFunctions<at::vec::Vectorized<float>> {
  using N = at::vec::Vectorized<float>;

  static N exp(const N& a) {
    const N x = within(a, -104, 89), n = (x * N(kLog2E)).round();  // beyond them it is 0 and infinity
    return scaled(reduced_expm1(x, n) + N(1), n);
  }
  // 2^n expm1(r) + (2^n - 1), with half of 2^n, which is finite where the result is.
  static N expm1(const N& a) {
    const N x = within(a, -20, 89), n = (x * N(kLog2E)).round(), half = scaled(N(0.5f), n);
    return at::vec::fmadd(half, reduced_expm1(x, n), half - N(0.5f)) * N(2);
  }
  // -m / (2 + m) for m = e^(-2 |a|) - 1, with the sign of a.
  static N tanh(const N& a) {
    const N sign(-0.0f), m = expm1(a.abs() * N(-2)), size = m / (m + N(2));
    return (a & sign) | (size ^ sign);
  }
  static N exp2(const N& a) {
    const N x = within(a, kNoPower, 128), n = x.round(), e = polynomial_expm1((x - n) * N(kLog2)) + N(1);
#if defined(CPU_CAPABILITY_AVX512)
    return scaled(e, n);
#else
    return e * power_of_2(_mm256_cvtps_epi32(n));
#endif
  }
  // The instructions give the second number where either is NaN, and of zeros.
#if defined(CPU_CAPABILITY_AVX512)
  static N lesser(const N& a, float c) { return _mm512_min_ps(_mm512_set1_ps(c), a); }
  static N greater(const N& a, float c) { return _mm512_max_ps(_mm512_set1_ps(c), a); }
#else
  static N lesser(const N& a, float c) { return _mm256_min_ps(_mm256_set1_ps(c), a); }
  static N greater(const N& a, float c) { return _mm256_max_ps(_mm256_set1_ps(c), a); }
#endif

  // half_octave: 0 for a in [1, 1.5), 1 in [1.5, 2), 2 in [2, 3), to 7 in [12, 16); beyond them one of these.
#if defined(CPU_CAPABILITY_AVX512)
  static N exp_falling(const N& a) { return exp(a); }
  static __m512i half_octave(const N& a) {
    return _mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 22), _mm512_set1_epi32(2 * 127));
  }
  static N lookup(__m512i piece, const float (&table)[8]) {
    return _mm512_permutexvar_ps(piece, _mm512_broadcast_f32x8(_mm256_loadu_ps(table)));
  }
#else
  // Adding 1.5 2^23 + 191 leaves n + 191 in the last bits, the exponent of 2^(n + 64), by which the sum is normal.
  static N exp_falling(const N& a) {
    const N x = at::vec::clamp_min(a, N(-104)), rounder(1.5f * 8388608 + 191), sum = at::vec::fmadd(x, N(kLog2E), rounder);
    const N power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(sum), 23));
    return (reduced_expm1(x, sum - rounder) + N(1)) * power * N(0x1p-64f);
  }
  static __m256i half_octave(const N& a) {
    return _mm256_sub_epi32(_mm256_srli_epi32(_mm256_castps_si256(a), 22), _mm256_set1_epi32(2 * 127));
  }
  static N lookup(__m256i piece, const float (&table)[8]) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), piece);
  }
#endif

 private:
  static constexpr float kLog2E = 1.44269504f, kLog2 = 0.693147182f;
  // NaN stays, as at::vec has it.
  static N within(const N& a, float low, float high) { return at::vec::clamp(a, N(low), N(high)); }
  // e^r - 1 for a = n log(2) + r.
  static N reduced_expm1(const N& a, const N& n) {
    return polynomial_expm1(at::vec::fmadd(n, N(1.90465421e-9f), at::vec::fmadd(n, N(-kLog2), a)));
  }
  // Within 1.4e-8 for r up to log(2) / 2.
  static N polynomial_expm1(const N& r) {
    const N square = r * r, first = at::vec::fmadd(r, N(0.1666654348373413f), N(0.5f));
    const N second = at::vec::fmadd(r, N(0.00836661085486412f), N(0.04166628047823906f));
    const N q = at::vec::fmadd(square, at::vec::fmadd(square, N(0.001394649618305266f), second), first);
    return at::vec::fmadd(square, q, r);
  }
  // scaled: a 2^n, rounded once if it is subnormal. power_of_2: 2^n for n in [-127, 128]. kNoPower: where 2^n is 0 for exp2.
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr float kNoPower = -152;
  static N scaled(const N& a, const N& n) { return _mm512_scalef_ps(a, n); }
#else
  static constexpr float kNoPower = -127;
  // Neither 2^(n / 2) nor a times it is subnormal.
  static N scaled(const N& a, const N& n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return a * power_of_2(half) * power_of_2(_mm256_sub_epi32(whole, half));
  }
  static N power_of_2(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
#endif
};
#endif

// Comparisons and what is made of them: masks are registers whose lanes have all bits set or clear, or where the hardware has
// those, a bit for each lane.
inline namespace CPU_CAPABILITY {
template <class C>
struct LaneMasks {
  using Register = at::vec::Vectorized<C>;
  using Mask = Register;
  static Mask of_lanes(const Register& lanes) { return lanes; }
  static Register lanes(const Mask& m) { return m; }
  static Mask less(const Register& a, const Register& b) { return a < b; }
  static Mask less_equal(const Register& a, const Register& b) { return a <= b; }
  static Mask equal(const Register& a, const Register& b) { return a == b; }
  static Mask mask(bool m) { return m ? Register(C(0)) == Register(C(0)) : Register(C(0)); }
  static Mask both(const Mask& a, const Mask& b) { return a & b; }
  static Mask either(const Mask& a, const Mask& b) { return a | b; }
  static Mask negate(const Mask& a) { return a ^ mask(true); }
  static Register select(const Mask& m, const Register& a, const Register& b) { return Register::blendv(b, a, m); }
};
#if defined(CPU_CAPABILITY_AVX512)
// at::vec has lanes for masks here, too, which takes two instructions more for a comparison and a choice.
template <>
struct LaneMasks<float> {
  using Register = at::vec::Vectorized<float>;
  struct Mask {
    __mmask16 bits;
  };
  static Mask of_lanes(const Register& lanes) { return {_mm512_movepi32_mask(_mm512_castps_si512(lanes))}; }
  static Register lanes(Mask m) { return _mm512_castsi512_ps(_mm512_movm_epi32(m.bits)); }
  static Mask less(const Register& a, const Register& b) { return {_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)}; }
  static Mask less_equal(const Register& a, const Register& b) { return {_mm512_cmp_ps_mask(a, b, _CMP_LE_OQ)}; }
  static Mask equal(const Register& a, const Register& b) { return {_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)}; }
  static Mask mask(bool m) { return {m ? __mmask16(0xffff) : __mmask16(0)}; }
  static Mask both(Mask a, Mask b) { return {__mmask16(a.bits & b.bits)}; }
  static Mask either(Mask a, Mask b) { return {__mmask16(a.bits | b.bits)}; }
  static Mask negate(Mask a) { return {__mmask16(~a.bits)}; }
  static Register select(Mask m, const Register& a, const Register& b) { return _mm512_mask_blend_ps(m.bits, b, a); }
};
#endif
}  // namespace CPU_CAPABILITY

// That of N, which is a register or derived from one.
template <class N, class C>
struct RegisterArithmetic : VectorFunctions<at::vec::Vectorized<C>>, LaneMasks<C> {
  using Register = at::vec::Vectorized<C>;
  using Functions = VectorFunctions<Register>;
  using Compute = C;

  static N constant(C c) { return Register(c); }
  static N add(const N& a, const N& b) { return a + b; }
  static N sub(const N& a, const N& b) { return a - b; }
  static N mul(const N& a, const N& b) { return a * b; }
  static N divide(const N& a, const Scalar<C>& s) { return a / Register(s.value); }
  static N quotient(const N& a, const N& b) { return a / b; }
  static N ratio(const N& a, const N& b) { return a / b; }
  static N estimate_reciprocal(const N& a) { return Register(C(1)) / a; }
  static N negative(const N& a) { return a.neg(); }
  static N absolute(const N& a) { return a.abs(); }
  static N exp(const N& a) { return Functions::exp(a); }
  static N exp2(const N& a) { return Functions::exp2(a); }
  static N exp_falling(const N& a) { return Functions::exp_falling(a); }
  static N expm1(const N& a) { return Functions::expm1(a); }
  static N log1p(const N& a) { return a.log1p(); }
  static N tanh(const N& a) { return Functions::tanh(a); }
  static N log(const N& a) { return a.log(); }
  static N sqrt(const N& a) { return a.sqrt(); }
  static N erfc(const N& a) { return a.erfc(); }
  // at::vec::fmadd is an FMA where the instruction set is known to have one; elsewhere it is a product and a sum.
  static N fma(const N& a, const N& b, const N& c) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    return at::vec::fmadd<C>(a, b, c);
#else
    C x[N::size()], y[N::size()], z[N::size()];
    a.store(x);
    b.store(y);
    c.store(z);
    for (int i = 0; i < N::size(); ++i) z[i] = std::fma(x[i], y[i], z[i]);
    return Register::loadu(z);
#endif
  }
};
template <class C>
struct Arithmetic<at::vec::Vectorized<C>> : RegisterArithmetic<at::vec::Vectorized<C>, C> {};

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// A register for results of 16 bits (kReduced).
inline namespace CPU_CAPABILITY {
struct ReducedRegister : at::vec::Vectorized<float> {
  ReducedRegister() = default;
  ReducedRegister(const at::vec::Vectorized<float>& r) : Vectorized(r) {}
};
}  // namespace CPU_CAPABILITY
template <>
struct Arithmetic<ReducedRegister> : RegisterArithmetic<ReducedRegister, float> {};
template <>
inline constexpr bool kReduced<ReducedRegister> = true;
template <>
inline constexpr bool kHasBounds<ReducedRegister> = true;
#endif

inline namespace CPU_CAPABILITY {
// The register for values of a heavy step that are rounded to 16 bits.
template <class C>
struct Reduced {
  using Register = at::vec::Vectorized<C>;
};
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
template <>
struct Reduced<float> {
  using Register = ReducedRegister;
};
#endif
}  // namespace CPU_CAPABILITY

}  // namespace fused_act

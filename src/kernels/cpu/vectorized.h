// One SIMD register as a number: at::vec's, whose width is that of the SIMD level that the file is compiled for.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cmath>

#include "../numbers.h"

namespace fused_act {

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
  static N exp(const N& a) { return a.exp(); }
  static N exp_falling(const N& a) { return a.exp(); }
  static N expm1(const N& a) { return a.expm1(); }
  static N log1p(const N& a) { return a.log1p(); }
  static N tanh(const N& a) { return a.tanh(); }
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

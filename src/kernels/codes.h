// Piecewise linear chains (relu, clamp, hardsigmoid... with biases and scales) have derivatives of few values. Which of
// them an element has, its code, takes one bit or two, and backward needs nothing else: neither x nor an operand.
// analysis.cpp finds which they are.
#pragma once

#include <algorithm>
#include <cmath>

#include "calculus.h"

namespace fused_act {

constexpr int kMaxCodes = 4;

// The derivatives with respect to x (column 0) and operand k (column 1 + k) by code. A kernel knows the code by f_x: that
// of `key[c]` is c, and any other 0.
struct CodeTable {
  static constexpr int kColumns = 1 + kMaxOperands;
  int codes = 0;           // 0: there is no table
  uint32_t known = 0;      // bit: a column whose derivative the code tells
  uint32_t active = 0;     // bit: column * kMaxCodes + code
  double key[kMaxCodes] = {NAN, NAN, NAN, NAN};  // of a code that there is not: equals nothing
  double value[kColumns * kMaxCodes] = {};

  int bits() const { return codes > 2 ? 2 : 1; }
};

// The codes of a Program with its scalars, in float32 arithmetic; none where its derivatives are not of few values. `cuda`:
// as a GPU divides.
template <bool cuda>
CodeTable find_codes(Program, const double* scalars);

// Gives gradients, and D, from codes. `scalars` are the table's values, of the columns of x and the operands that it has. `known`:
// what the compiler is told of them. In a loop the branches of `times` are in every vector: on an H200 the backward of relu and a
// bias takes 1.08 copies without them for 1.09, of a minimum and a bias 1.08 for 1.13.
//   alike      that by x is 0 for the first code, and no other, and that by the operand is the same (a bias before; none is asked for)
//   constant   of x the same, and that by the operand is one number (a bias after)
template <int operands, bool two, Derivatives known>
struct Decoder {
  static constexpr bool kDynamic = false, kFramed = false, kPairs = false, kHeavy = false, kTwo = two;
  static constexpr int kOperands = operands, kScalars = (1 + operands) * kMaxCodes;
  // What a column's derivatives are: one number for all codes (that of a bias after a clamp), or of which codes there are
  // any. On an H200 an element of 16 bits has 28 instructions of memory time, and the most general form takes ten of them.
  enum Form : uint8_t { same, all, all_but_first, two_but_first, first, none, any };
  static constexpr Form kKnown = two ? two_but_first : all_but_first;
  static constexpr bool kTold = known != Derivatives::any;
  uint32_t active = 0;
  Form form[1 + operands] = {};

  // `values`: of the columns, kMaxCodes each.
  static Decoder of(const CodeTable& table, const double* values) {
    Decoder decoder;
    decoder.active = table.active;
    const uint32_t there = (1u << table.codes) - 1;
    for (int n = 0; n <= operands; ++n) {
      const double* v = values + n * kMaxCodes;
      const uint32_t on = decoder.on(n) & there;
      const bool equal = std::all_of(v, v + table.codes, [&](double value) { return value == v[0]; });
      decoder.form[n] = on == there && equal                        ? same
                        : on == there                               ? all
                        : on == (there & ~1u) && table.codes == 3   ? two_but_first
                        : on == (there & ~1u)                       ? all_but_first
                        : on == 0                                   ? none
                        : on == 1 && !two                           ? first
                                                                    : any;
    }
    return decoder;
  }

  // g times the derivative of that column. The branches are the same for all elements: a mask of what is active that were
  // computed with the value would take longer than all else.
  template <class N>
  FUSED_ACT_FN N times(const N& g, const CodeBits<N>& code, int column, const Scalar<compute_t<N>>* scalars) const {
    using M = CodeMasks<N>;
    if constexpr (known == Derivatives::alike) column = 0;
    const Scalar<compute_t<N>>* s = scalars + column * kMaxCodes;
    const auto slope = [&](int c) FUSED_ACT_LAMBDA { return constant<N>(s[c].value); };
    const N zero = constant<N>(0);
    const Form f = known == Derivatives::any ? form[column] : column == 0 ? kKnown : same;
    if (f == same) return mul(g, slope(0));
    if (f == none) return zero;
    if constexpr (two) {
      if (f == two_but_first)
        return M::select(M::either(code.low, code.high), mul(g, M::select(code.high, slope(2), slope(1))), zero);
      const N low = M::select(code.low, slope(1), slope(0)), high = M::select(code.low, slope(3), slope(2));
      const N product = mul(g, M::select(code.high, high, low));
      if (f == all) return product;
      if (f == all_but_first) return M::select(M::either(code.low, code.high), product, zero);
      const uint32_t here = on(column);
      const auto is_on = [&](int c) FUSED_ACT_LAMBDA { return M::mask(here >> c & 1); };
      const auto choose = [&](const auto& m, const auto& a, const auto& b) FUSED_ACT_LAMBDA {
        return M::either(M::both(m, a), M::both(M::negate(m), b));
      };
      return M::select(choose(code.high, choose(code.low, is_on(3), is_on(2)), choose(code.low, is_on(1), is_on(0))), product,
                    zero);
    } else {
      switch (f) {
        case all:
          return mul(g, M::select(code.low, slope(1), slope(0)));
        case all_but_first:
          return M::select(code.low, mul(g, slope(1)), zero);
        default:  // first
          return M::select(code.low, zero, mul(g, slope(0)));
      }
    }
  }

  // D, of u and the parts v of the direction.
  template <class N, class Source>
  FUSED_ACT_FN N along(const Dual<N, 1>& u, const Source& v, const CodeBits<N>& code,
                       const Scalar<compute_t<N>>* scalars) const {
    N sum = times(u.tangent[0], code, 0, scalars);
    mask_t<N> moves = u.active[0];
    for (int k = 0; k < operands; ++k) {
      const Dual<N, 1> part = v(k);
      accumulate(sum, moves, times(part.tangent[0], code, 1 + k, scalars), part.active[0]);
    }
    return select(moves, sum, constant<N>(0));
  }

 private:
  // The codes of a column that are active, a bit each.
  FUSED_ACT_FN uint32_t on(int column) const { return active >> (column * kMaxCodes) & ((1u << kMaxCodes) - 1); }
};

// What is known of a table with an operand or none, whose gradient may be `asked` for.
template <bool two>
Derivatives derivatives_known(const CodeTable& table, const double* values, bool asked) {
  using D = Decoder<1, two>;
  const D decoder = D::of(table, values);
  if (decoder.form[0] != D::kKnown) return Derivatives::any;
  const uint32_t active = table.active & ((1u << kMaxCodes) - 1), of_operand = table.active >> kMaxCodes;
  const double* value = values + kMaxCodes;
  if (!asked || (of_operand == active && std::equal(values, values + table.codes, value))) return Derivatives::alike;
  return decoder.form[1] == D::same ? Derivatives::constant : Derivatives::any;
}

}  // namespace fused_act

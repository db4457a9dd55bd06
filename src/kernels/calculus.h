// From the steps of an operator f(x, operands) to everything that is computed of it.
//
// With g the incoming gradient and (u, v...) a direction in (x, operands...):
//
//   forward          y  = f
//   jvp              D  = f_x u + sum f_v v                        the chain on Dual<N, 1>
//   backward         gx = g f_x,  gv = g f_v                       one sweep on N
//   double backward  D, g D_x, g D_v: the gradients of             one sweep on Dual<N, 1>
//                    u gx + sum v gv with respect to g, x and the operands
//
// Where the derivatives take few values (codes.h), training saves which of them an element has, its code, instead of x:
//
//   coded            y, and f_x (NaN where inactive), which tells the code          the chain on Keyed<N>
//   coded backward   gx, gv again, from the codes
//   coded jvp        D from the codes
//
// g is multiplied in last, once: taken through the chain it could overflow where g f' does not (a division by a small
// number before a small slope). A derivative whose branch is not taken is inactive and gives zero whatever g is.
#pragma once

#include "program.h"

namespace fused_act {

// Those of codes come last: what is kept for each mode that reads x has no place for them.
enum class Mode : int { forward, jvp, backward, double_backward, coded, coded_backward, coded_jvp };
constexpr int kModes = 4, kAllModes = 7;

FUSED_ACT_FN constexpr bool has_operand_gradients(Mode mode) {
  return mode == Mode::backward || mode == Mode::double_backward || mode == Mode::coded_backward;
}
FUSED_ACT_FN constexpr bool has_direction(Mode mode) {
  return mode == Mode::jvp || mode == Mode::double_backward || mode == Mode::coded_jvp;
}
FUSED_ACT_FN constexpr bool reads_codes(Mode mode) { return mode == Mode::coded_backward || mode == Mode::coded_jvp; }
// Results of x's shape: y, D or gx; in double backward D and g D_x.
FUSED_ACT_FN constexpr int full_outputs(Mode mode) { return mode == Mode::double_backward ? 2 : 1; }

template <class N, int K>
FUSED_ACT_FN N tangent_or_zero(const Dual<N, K>& d, int k) {
  return select(d.active[k], d.tangent[k], constant<N>(0));
}

template <class N>
struct Outputs {
  N full[2];
};

// Masks of the bits of codes. (On a GPU a mask of lanes takes a register each; bits that are read from memory stay packed.)
template <class N>
struct CodeMasks : Arithmetic<N> {
  using Mask = mask_t<N>;
};
// The bits of the codes of numbers.
template <class N>
struct CodeBits {
  typename CodeMasks<N>::Mask low, high;
};

// What a compiler is told of derivatives that are known by code (codes.h).
enum class Derivatives { any, alike, constant };
// What stands in an operator's place where they are, of one bit or two.
template <int operands, bool two, Derivatives known = Derivatives::any>
struct Decoder;
template <class Op>
constexpr bool kDecodes = false;
template <int operands, bool two, Derivatives known>
constexpr bool kDecodes<Decoder<operands, two, known>> = true;

// One element (or vector of them). `io` has the tensors that steps ask for:
//
//   N operand(int k)                       the operand, and its part v of the direction
//   N direction(int k)
//   bool moves(int k)                      is there a v? An absent one is an inactive tangent, not a zero
//   void gradient(int k, const N& value)   takes the gradient of operand k, once
//   CodeBits<N> code()                     where codes are read
//   memory<M>()                            memory (program.h) for numbers of type M
template <Mode mode, class Op, class N, class Io>
FUSED_ACT_FN Outputs<N> evaluate(const Op& op, const Scalar<compute_t<N>>* scalars, const N& x, const N& g, const N& u,
                                 bool has_u, Io& io) {
  using A = Arithmetic<N>;
  using Direction = Dual<N, 1>;
  Outputs<N> out;
  const auto plain = [&](int k) FUSED_ACT_LAMBDA { return io.operand(k); };
  const auto moving = [&](int k) FUSED_ACT_LAMBDA {
    Direction d;
    d.value = io.operand(k);
    const bool moves = io.moves(k);
    d.tangent[0] = moves ? io.direction(k) : constant<N>(0);
    d.active[0] = A::mask(moves);
    return d;
  };
  if constexpr (mode == Mode::forward) {
    auto memory = io.template memory<N>();
    out.full[0] = op.apply(x, plain, scalars, memory);
  } else if constexpr (mode == Mode::backward && kDecodes<Op>) {
    const CodeBits<N> code = io.code();
    out.full[0] = op.times(g, code, 0, scalars);
    for (int k = 0; k < Op::kOperands; ++k) io.gradient(k, op.times(g, code, 1 + k, scalars));
  } else if constexpr (mode == Mode::jvp && kDecodes<Op>) {
    out.full[0] = op.along(Direction{x, {u}, {A::mask(has_u)}}, moving, io.code(), scalars);
  } else if constexpr (mode == Mode::backward) {
    const auto times_g = [&](const Cotangent<N>& c) FUSED_ACT_LAMBDA {
      return select(c.active, mul(g, c.value), constant<N>(0));
    };
    const auto give = [&](int k, const Cotangent<N>& c) FUSED_ACT_LAMBDA { io.gradient(k, times_g(c)); };
    auto memory = io.template memory<N>();
    out.full[0] = times_g(op.sweep(x, plain, give, scalars, memory).cotangent);
  } else if constexpr (mode == Mode::coded) {
    using K = Keyed<N>;
    auto memory = io.template memory<K>();
    const auto still = [&](int k) FUSED_ACT_LAMBDA { return K{io.operand(k), inactive<N>()}; };
    const K y = op.apply(K{x, constant<N>(1)}, still, scalars, memory);
    out.full[0] = y.value;
    out.full[1] = y.tangent;
  } else {
    const Direction dx{x, {u}, {A::mask(has_u)}};
    auto memory = io.template memory<Direction>();
    if constexpr (mode == Mode::jvp) {
      out.full[0] = tangent_or_zero(op.apply(dx, moving, scalars, memory), 0);
    } else {
      // The tangent of a derivative that is itself inactive is inactive too.
      const auto curvature = [&](const Cotangent<Direction>& c) FUSED_ACT_LAMBDA {
        return select(A::both(c.active, c.value.active[0]), mul(g, c.value.tangent[0]), constant<N>(0));
      };
      const auto give = [&](int k, const Cotangent<Direction>& c) FUSED_ACT_LAMBDA { io.gradient(k, curvature(c)); };
      const Swept<Direction> y = op.sweep(dx, moving, give, scalars, memory);
      out.full[0] = tangent_or_zero(y.value, 0);
      out.full[1] = curvature(y.cotangent);
    }
  }
  return out;
}

}  // namespace fused_act

// From the steps of an operator f(x, operands) to everything that is computed of it.
//
// With g the incoming gradient and (u, v...) a direction in (x, operands...):
//
//   forward          y  = f
//   jvp              D  = f_x u + sum f_v v                        one evaluation on Dual<N, 1>
//   backward         gx = g f_x,  gv = g f_v                       one evaluation on Dual<N, 1 + operands>
//   double backward  D, g D_x, g D_v: the gradients of             one evaluation on Dual<Dual<N, 1>, 1 + operands>
//                    u gx + sum v gv with respect to g, x and the operands
//
// g is multiplied in last, once: taken through the chain it could overflow where g f' does not (a division by a small
// number before a small slope). A derivative whose branch is not taken is inactive and gives zero whatever g is.
#pragma once

#include <type_traits>

#include "operators.h"

namespace fused_act {

constexpr int kMaxOperands = 4;
constexpr int kMaxScalars = 8;

enum class Mode : int { forward, jvp, backward, double_backward };
constexpr int kModes = 4;

// What one element reads. Direction components may be absent: an absent one is an inactive tangent, not a zero.
template <class N, int O>
struct Inputs {
  static constexpr int kSlots = O > 0 ? O : 1;
  N x, g, u;
  N operand[kSlots], v[kSlots];
};

template <int O>
struct Present {
  bool u, v[O > 0 ? O : 1];
};

// What one element yields: full[0] is y, D or gx; in double backward full[0] is D and full[1] is g D_x.
template <class N, int O>
struct Outputs {
  static constexpr int kSlots = O > 0 ? O : 1;
  N full[2];
  N operand[kSlots];
};

template <Mode mode>
constexpr int full_outputs = mode == Mode::double_backward ? 2 : 1;
template <Mode mode>
constexpr bool has_operand_gradients = mode == Mode::backward || mode == Mode::double_backward;
template <Mode mode>
constexpr bool has_direction = mode == Mode::jvp || mode == Mode::double_backward;

// "float value, Tensor bias" -> "fT": the parameter kinds of an operator's line.
struct Kinds {
  char text[kMaxOperands + kMaxScalars + 1] = {};
  constexpr explicit Kinds(const char* parameters) {
    int n = 0;
    bool at_start = true;
    for (const char* p = parameters; *p; ++p) {
      if (at_start && *p != ' ') {
        text[n++] = *p == 'T' ? 'T' : 'f';
        at_start = false;
      }
      if (*p == ',') at_start = true;
    }
  }
};

template <class... Steps>
struct Chain {
  static constexpr int count(const char* s, char kind) { return *s ? (*s == kind) + count(s + 1, kind) : 0; }
  template <class Step, char kind>
  static constexpr int kTakes = count(Step::parameters, kind);
  static constexpr int kScalars = (kTakes<Steps, 'f'> + ... + 0);
  static constexpr int kOperands = (kTakes<Steps, 'T'> + ... + 0);
  static_assert(kScalars <= kMaxScalars && kOperands <= kMaxOperands);

  static constexpr bool takes(const Kinds& kinds) {
    const char* p = kinds.text;
    const char* steps[] = {Steps::parameters...};
    for (const char* s : steps)
      for (; *s; ++s, ++p)
        if (*s != *p) return false;
    return *p == 0;
  }

  template <class N>
  FUSED_ACT_FN static N apply(N x, const N* operand, const Scalar<compute_t<N>>* scalar) {
    ((x = Steps::template apply<N>(x, operand, scalar), operand += kTakes<Steps, 'T'>,
      scalar += kTakes<Steps, 'f'>),
     ...);
    return x;
  }
};

template <class N, int K>
FUSED_ACT_FN N tangent_or_zero(const Dual<N, K>& d, int k) {
  return select(d.active[k], d.tangent[k], constant<N>(0));
}

template <class Op, Mode mode, class N>
FUSED_ACT_FN Outputs<N, Op::kOperands> evaluate(const Inputs<N, Op::kOperands>& in, const Present<Op::kOperands>& present,
                                                const Scalar<compute_t<N>>* scalars) {
  constexpr int O = Op::kOperands;
  using A = Arithmetic<N>;
  Outputs<N, O> out;
  if constexpr (mode == Mode::forward) {
    out.full[0] = Op::template apply<N>(in.x, in.operand, scalars);
  } else {
    using Direction = Dual<N, 1>;
    Direction x{in.x, {in.u}, {A::mask(present.u)}};
    Direction operand[O > 0 ? O : 1];
    for (int i = 0; i < O; ++i) operand[i] = Direction{in.operand[i], {in.v[i]}, {A::mask(present.v[i])}};
    if constexpr (mode == Mode::jvp) {
      out.full[0] = tangent_or_zero(Op::template apply<Direction>(x, operand, scalars), 0);
    } else {
      // The inner number: N itself in backward, a number with the direction's tangent in double backward.
      constexpr bool second = mode == Mode::double_backward;
      using Inner = std::conditional_t<second, Direction, N>;
      using Outer = Dual<Inner, 1 + O>;
      const auto lift = [](const Direction& d, const N& n) -> Inner {
        if constexpr (second) {
          return d;
        } else {
          return n;
        }
      };
      const auto seed = [&](const Inner& value, int input) {
        Outer r;
        r.value = value;
        for (int k = 0; k < 1 + O; ++k) {
          r.tangent[k] = constant<Inner>(k == input);
          r.active[k] = A::mask(k == input);
        }
        return r;
      };
      Outer ox = seed(lift(x, in.x), 0), oo[O > 0 ? O : 1];
      for (int i = 0; i < O; ++i) oo[i] = seed(lift(operand[i], in.operand[i]), 1 + i);
      const Outer y = Op::template apply<Outer>(ox, oo, scalars);
      if constexpr (second) {
        // The tangent of a derivative that is itself inactive is inactive too.
        const auto curvature = [&](int k) {
          const Direction& d = y.tangent[k];
          return select(A::both(y.active[k], d.active[0]), mul(in.g, d.tangent[0]), constant<N>(0));
        };
        out.full[0] = tangent_or_zero(y.value, 0);
        out.full[1] = curvature(0);
        for (int i = 0; i < O; ++i) out.operand[i] = curvature(1 + i);
      } else {
        const auto gradient = [&](int k) { return select(y.active[k], mul(in.g, y.tangent[k]), constant<N>(0)); };
        out.full[0] = gradient(0);
        for (int i = 0; i < O; ++i) out.operand[i] = gradient(1 + i);
      }
    }
  }
  return out;
}

namespace ops {
#define FUSED_ACT_DEFINE(NAME, PARAMETERS, EXPRESSION, ...)                                                          \
  struct NAME : Chain<__VA_ARGS__> {                                                                                 \
    static_assert(takes(Kinds(PARAMETERS)), "the steps of " #NAME " do not take its parameters in this order");      \
  };
FUSED_ACT_OPERATORS(FUSED_ACT_DEFINE)
#undef FUSED_ACT_DEFINE
}  // namespace ops

}  // namespace fused_act

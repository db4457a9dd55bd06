// A chain as data, for kernels that learn at run time which steps they take. Every operator has this form beside its
// compiled one, so what is rare (float64, the second order, strides that no vector fits) needs no kernel of its own,
// and an activation that is chosen by name needs none for each name.
#pragma once

#include <cstdint>
#include <type_traits>

#include "steps.h"

namespace fused_act {

constexpr int kMaxSteps = 24;
constexpr int kMaxOperands = 4;
constexpr int kMaxScalars = 24;
constexpr int kMaxSlots = 3;

// A step's code is its place in the list of steps.
enum class Code : uint8_t {
#define FUSED_ACT_CODE(STEP) STEP,
  FUSED_ACT_STEPS(FUSED_ACT_CODE)
#undef FUSED_ACT_CODE
  save,  // slot = value
  load   // value = source
};

template <class Step>
constexpr Code code_of = Code::load;  // of what is not in the list
#define FUSED_ACT_CODE(STEP) \
  template <>                \
  constexpr Code code_of<STEP> = Code::STEP;
FUSED_ACT_STEPS(FUSED_ACT_CODE)
#undef FUSED_ACT_CODE

struct Instruction {
  static constexpr uint8_t kNoSource = 255;
  Code code;
  uint8_t source = kNoSource;  // operand k, or kMaxOperands + slot
  uint8_t scalar = 0;          // place of the step's first scalar
};

constexpr int count_parameters(const char* s, char kind) { return *s ? (*s == kind) + count_parameters(s + 1, kind) : 0; }
template <class Step, char kind>
constexpr int kTakes = count_parameters(Step::parameters, kind);

// d/dx and, where the step takes an operand, d/d operand of one step, beside its value.
template <class Step, class N>
FUSED_ACT_FN auto linearize(const N& x, const N& operand, const Scalar<compute_t<N>>* scalars) {
  constexpr int K = 1 + kTakes<Step, 'T'>;
  using D = Dual<N, K>;
  using A = Arithmetic<N>;
  const auto seed = [](const N& value, int which) {
    D d;
    d.value = value;
    for (int k = 0; k < K; ++k) {
      d.tangent[k] = constant<N>(k == which);
      d.active[k] = A::mask(k == which);
    }
    return d;
  };
  const D dx = seed(x, 0), doperand = seed(operand, 1);
  return Step::template apply<D>(dx, &doperand, scalars);
}

// The derivative of the result with respect to an intermediate value; inactive where no branch leads there, which gives
// a gradient of zero whatever the incoming one is.
template <class N>
struct Cotangent {
  N value;
  mask_t<N> active;

  FUSED_ACT_FN static Cotangent one() { return {constant<N>(1), Arithmetic<N>::mask(true)}; }
  FUSED_ACT_FN static Cotangent none() { return {constant<N>(0), Arithmetic<N>::mask(false)}; }
  FUSED_ACT_FN Cotangent through(const N& slope, const mask_t<N>& passes) const {
    return {mul(value, slope), Arithmetic<N>::both(active, passes)};
  }
};

// A value with its derivative.
template <class N>
struct Swept {
  N value;
  Cotangent<N> cotangent;
};

// What both forms of a chain offer. `source(k)` yields operand k as a number of type N, `give(k, cotangent)` takes the
// derivative with respect to it. Backward is the chain rule from the last step to the first, in the same order of
// operations in both forms, so that a gradient does not depend on which of them a layout needs.
//
//   N apply(N x, source, scalars)
//   Swept<N> sweep(N x, source, give, scalars)

template <class...>
struct Types {};

template <class... Steps>
struct Chain {
  static constexpr bool kDynamic = false;
  static constexpr int kScalars = (kTakes<Steps, 'f'> + ... + 0);
  static constexpr int kOperands = (kTakes<Steps, 'T'> + ... + 0);

  template <class N, class Source>
  FUSED_ACT_FN N apply(N x, const Source& source, const Scalar<compute_t<N>>* scalars) const {
    int k = 0;
    const auto step = [&](auto* type) {
      using Step = std::remove_pointer_t<decltype(type)>;
      N operand = x;
      if constexpr (kTakes<Step, 'T'> > 0) operand = source(k++);
      x = Step::template apply<N>(x, &operand, scalars);
      scalars += kTakes<Step, 'f'>;
    };
    (step(static_cast<Steps*>(nullptr)), ...);
    return x;
  }

  template <class N, class Source, class Give>
  FUSED_ACT_FN Swept<N> sweep(const N& x, const Source& source, const Give& give,
                              const Scalar<compute_t<N>>* scalars) const {
    return sweep_from<0>(Types<Steps...>{}, x, source, give, scalars);
  }

 private:
  template <int k, class N, class Source, class Give>
  FUSED_ACT_FN static Swept<N> sweep_from(Types<>, const N& x, const Source&, const Give&,
                                          const Scalar<compute_t<N>>*) {
    return {x, Cotangent<N>::one()};
  }
  template <int k, class Step, class... Rest, class N, class Source, class Give>
  FUSED_ACT_FN static Swept<N> sweep_from(Types<Step, Rest...>, const N& x, const Source& source, const Give& give,
                                          const Scalar<compute_t<N>>* scalars) {
    constexpr bool takes = kTakes<Step, 'T'> > 0;
    N operand = x;
    if constexpr (takes) operand = source(k);
    const auto d = linearize<Step, N>(x, operand, scalars);
    const Swept<N> rest = sweep_from<k + takes>(Types<Rest...>{}, d.value, source, give, scalars + kTakes<Step, 'f'>);
    if constexpr (takes) give(k, rest.cotangent.through(d.tangent[1], d.active[1]));
    return {rest.value, rest.cotangent.through(d.tangent[0], d.active[0])};
  }
};

struct Program {
  static constexpr bool kDynamic = true;
  static constexpr int kScalars = kMaxScalars;
  static constexpr int kOperands = kMaxOperands;

  int length = 0, slots = 0;
  Instruction instruction[kMaxSteps];

  template <class N, class Source>
  FUSED_ACT_FN N apply(N x, const Source& source, const Scalar<compute_t<N>>* scalars) const {
    N slot[kMaxSlots];
    for (int n = 0; n < length; ++n) {
      const Instruction i = instruction[n];
      N operand = x;
      if (reads(i)) operand = i.source < kMaxOperands ? source(i.source) : slot[i.source - kMaxOperands];
      const Scalar<compute_t<N>>* s = scalars + i.scalar;
      switch (i.code) {
#define FUSED_ACT_CASE(STEP)                           \
  case Code::STEP:                                     \
    x = STEP::template apply<N>(x, &operand, s);       \
    break;
        FUSED_ACT_STEPS(FUSED_ACT_CASE)
#undef FUSED_ACT_CASE
        case Code::save:
          slot[i.source - kMaxOperands] = x;
          break;
        case Code::load:
          x = operand;
          break;
      }
    }
    return x;
  }

  template <class N, class Source, class Give>
  FUSED_ACT_FN Swept<N> sweep(N x, const Source& source, const Give& give, const Scalar<compute_t<N>>* scalars) const {
    // Indexed at run time, so on a GPU these lie in local memory: a program of n steps touches the first n.
    struct Slope {
      N tangent[2];
      mask_t<N> active[2];
    };
    Slope slope[kMaxSteps];
    N slot[kMaxSlots];
    for (int n = 0; n < length; ++n) {
      const Instruction i = instruction[n];
      N operand = x;
      if (reads(i)) operand = i.source < kMaxOperands ? source(i.source) : slot[i.source - kMaxOperands];
      const Scalar<compute_t<N>>* s = scalars + i.scalar;
      const auto step = [&](const auto& d) {
        x = d.value;
        slope[n].tangent[0] = d.tangent[0];
        slope[n].active[0] = d.active[0];
        if constexpr (sizeof(d.active) > sizeof(d.active[0])) {
          slope[n].tangent[1] = d.tangent[1];
          slope[n].active[1] = d.active[1];
        }
      };
      switch (i.code) {
#define FUSED_ACT_CASE(STEP)                     \
  case Code::STEP:                               \
    step(linearize<STEP, N>(x, operand, s));     \
    break;
        FUSED_ACT_STEPS(FUSED_ACT_CASE)
#undef FUSED_ACT_CASE
        case Code::save:
          slot[i.source - kMaxOperands] = x;
          break;
        case Code::load:
          x = operand;
          break;
      }
    }
    const N value = x;
    Cotangent<N> cotangent = Cotangent<N>::one(), of_slot[kMaxSlots];
    for (int k = 0; k < slots; ++k) of_slot[k] = Cotangent<N>::none();
    for (int n = length - 1; n >= 0; --n) {
      const Instruction i = instruction[n];
      const auto give_source = [&](const Cotangent<N>& c) {
        if (i.source < kMaxOperands) {
          give(i.source, c);
        } else {
          Cotangent<N>& to = of_slot[i.source - kMaxOperands];
          accumulate(to.value, to.active, c.value, c.active);
        }
      };
      if (i.code == Code::save) {
        const Cotangent<N>& from = of_slot[i.source - kMaxOperands];
        accumulate(cotangent.value, cotangent.active, from.value, from.active);
      } else if (i.code == Code::load) {
        give_source(cotangent);
        cotangent = Cotangent<N>::none();
      } else {
        if (reads(i)) give_source(cotangent.through(slope[n].tangent[1], slope[n].active[1]));
        cotangent = cotangent.through(slope[n].tangent[0], slope[n].active[0]);
      }
    }
    return {value, cotangent};
  }

 private:
  FUSED_ACT_FN static bool reads(const Instruction& i) {
    return i.source != Instruction::kNoSource && i.code != Code::save;
  }
};

}  // namespace fused_act

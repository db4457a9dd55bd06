// An activation and what models put around it, for kernels that are compiled for the activation and learn at run time
// which of the rest there is:
//
//   y = min((x * a +- b + c) * f / q + o, m)
//   y = clamp(activation(y)^(1 or 2) * gain + p, -l, l)
//   y * (clamp(d + e, -l, l) + 1)   or   y * c   or   y + c
//
// That is bias_act, scale_shift_act, add_act, act_add, gated and the packed operators, and any other Program of this form:
// the Program is matched, not the operator. A result does not depend on who computes it, since the steps are the same and
// in the same order. Interpreted, these take 1.1 to 1.4 times the copy of the same bytes in float32 and 1.5 to 2.8 times in
// bfloat16 (H100).
#pragma once

#include <type_traits>

#include "operators.h"

namespace fused_act {

struct Frame {
  // What may stand around an activation, in this order, each at most once.
  enum Place {
    scale, bias, less, addend, factor, divisor, offset, cap, activation, square, gain, shift, limit,
    gate, gate_bias, gate_limit, gate_one, product, sum, places
  };
  static constexpr uint8_t kNone = 255;

  uint32_t present = 0;           // bit: Place
  uint8_t scalar[places];         // where in the Program's scalars that of a place is
  uint8_t operand[kMaxOperands];  // which operand of the Program each of the frame is (a, b, c or d, e), or kNone

  // Which operand of the frame a place takes, and which is the first of its scalars in a kernel: known when that is
  // compiled.
  FUSED_ACT_FN static constexpr int operand_of(Place place) {
    // 2: addend, gate, product and sum
    return place == scale ? 0 : place == bias || place == less ? 1 : place == gate_bias ? 3 : 2;
  }
  static constexpr int kLarge = 2;  // the operand that is mostly as large as x
  static constexpr uint32_t kLargePlaces = 1u << addend | 1u << gate | 1u << product | 1u << sum;
  FUSED_ACT_FN static constexpr Place place_of(int scalar) {  // from 2 on: the activation's are 0 and 1
    constexpr Place others[] = {factor, divisor, offset, cap, gain, shift, limit, gate_limit};
    return others[scalar - 2];
  }
  FUSED_ACT_FN static constexpr int scalar_of(Place place) {
    for (int n = 2; n < kScalars; ++n)
      if (place_of(n) == place) return n;
    return 0;
  }
  static constexpr int kScalars = 10;
  FUSED_ACT_FN bool has(Place place) const { return present >> place & 1; }
};

// `pairs`: x and the large operand are the halves of pairs.
template <class Activation, bool pairs>
struct Framed {
  static constexpr bool kDynamic = false, kFramed = true, kPairs = pairs, kHeavy = Activation::heavy;
  static constexpr int kScalars = Frame::kScalars, kOperands = kMaxOperands;
  Frame frame;

  // Which of the Program's operands and scalars those of the kernel are; -1: none.
  int operand_from(int k) const { return frame.operand[k] == Frame::kNone ? -1 : frame.operand[k]; }
  int scalar_from(int s) const {
    const Frame::Place place = s < 2 ? Frame::activation : Frame::place_of(s);
    const int from = frame.scalar[place] + (s == 1);
    return frame.has(place) && from < kMaxScalars ? from : -1;
  }

  template <class N, class Source, class Memory>
  FUSED_ACT_FN N apply(N x, const Source& source, const Scalar<compute_t<N>>* scalars, Memory&) const {
    const auto take = [&](auto step, Frame::Place place, N& value) FUSED_ACT_LAMBDA {
      using Step = decltype(step);
      if (!frame.has(place)) return;
      N operand = value;
      if constexpr (kTakes<Step, 'T'> > 0) operand = source(Frame::operand_of(place));
      value = Step::template apply<N>(value, &operand, scalars + Frame::scalar_of(place));
    };
    // Where one step is common and its neighbours are not, it has a branch of its own: of a step that is absent the compiler
    // leaves predicated instructions, one an element. gelu in float32 has room for none of them.
    const auto any = [&](auto... place) { return (frame.present & ((1u << place) | ...)) != 0; };
    if (any(Frame::scale, Frame::less, Frame::addend)) {
      take(MulOperand{}, Frame::scale, x);
      take(Add{}, Frame::bias, x);
      take(Sub{}, Frame::less, x);
      take(Add{}, Frame::addend, x);
    } else {
      take(Add{}, Frame::bias, x);
    }
    if (any(Frame::factor, Frame::divisor, Frame::offset, Frame::cap)) {
      take(Mul{}, Frame::factor, x);
      take(Div{}, Frame::divisor, x);
      take(Shift{}, Frame::offset, x);
      take(MinScalar{}, Frame::cap, x);
    }
    x = Activation::template apply<N>(x, &x, scalars + Frame::scalar_of(Frame::activation));
    if (any(Frame::square, Frame::shift, Frame::limit)) {
      take(Square{}, Frame::square, x);
      take(Mul{}, Frame::gain, x);
      take(Shift{}, Frame::shift, x);
      take(AbsClamp{}, Frame::limit, x);
    } else {
      take(Mul{}, Frame::gain, x);
    }
    if (frame.has(Frame::gate)) {
      N gate = source(Frame::operand_of(Frame::gate));
      take(Add{}, Frame::gate_bias, gate);
      take(AbsClamp{}, Frame::gate_limit, gate);
      take(AddOne{}, Frame::gate_one, gate);
      x = MulOperand::apply<N>(gate, &x, scalars);
    }
    if (any(Frame::product, Frame::sum)) {
      take(MulOperand{}, Frame::product, x);
      take(Add{}, Frame::sum, x);
    }
    return x;
  }
};

template <class Step, class Pattern>
constexpr bool kStandsIn = false;
template <class Step, class... Entries>
constexpr bool kStandsIn<Step, Pattern<Entries...>> = ((Describe<Entries>::template is<Step>) || ...);

// Whether a step has framed kernels: the transcendental functions, and what is an operator of its own. And for pairs:
// what stands in an operator that takes pairs.
template <class Step, bool pairs>
constexpr bool kHasFrame = kTakes<Step, 'T'> == 0 &&
                           (pairs ? Step::heavy && (false
#define FUSED_ACT_WITH_PAIRS(NAME, ...) || (kStandsIn<Pairs, ops::NAME> && kStandsIn<Step, ops::NAME>)
                                    FUSED_ACT_OPERATORS(FUSED_ACT_WITH_PAIRS))
#undef FUSED_ACT_WITH_PAIRS
                                  : Step::heavy
#define FUSED_ACT_ALONE(NAME, ...) || std::is_same_v<ops::NAME::Compiled, Chain<Step>>
                                        FUSED_ACT_OPERATORS(FUSED_ACT_ALONE));
#undef FUSED_ACT_ALONE

// The frame of a Program and the step in its middle; false if it has another form.
inline bool match_frame(const Program& program, Frame& frame, Code& activation) {
  static constexpr bool has_frame[] = {
#define FUSED_ACT_HAS(STEP) kHasFrame<STEP, false> || kHasFrame<STEP, true>,
      FUSED_ACT_STEPS(FUSED_ACT_HAS)
#undef FUSED_ACT_HAS
  };
  const Instruction* i = program.instruction;
  const Instruction* const end = i + program.length;
  for (uint8_t& operand : frame.operand) operand = Frame::kNone;
  const auto next = [&](Code code) { return i < end && i->code == code; };
  // Takes the next step, if it is that one, with an operand that is none of the slots.
  const auto take = [&](Code code, Frame::Place place) {
    if (!next(code)) return false;
    if (i->source != Instruction::kNoSource) {
      uint8_t& operand = frame.operand[Frame::operand_of(place)];
      if (i->source >= kMaxOperands || operand != Frame::kNone) return false;
      operand = i->source;
    }
    frame.present |= 1u << place;
    frame.scalar[place] = i++->scalar;
    return true;
  };
  take(Code::MulOperand, Frame::scale);
  if (take(Code::Sub, Frame::less) || take(Code::Add, Frame::bias)) take(Code::Add, Frame::addend);
  take(Code::Mul, Frame::factor);
  take(Code::Div, Frame::divisor);
  take(Code::Shift, Frame::offset);
  if (!take(Code::MinScalar, Frame::cap)) take(Code::Min, Frame::cap);  // see matches_derivatives
  if (i == end || i->code >= Code::save || !has_frame[int(i->code)]) return false;
  activation = i->code;
  take(activation, Frame::activation);
  take(Code::Square, Frame::square);
  take(Code::Mul, Frame::gain);
  take(Code::Shift, Frame::shift);
  take(Code::AbsClamp, Frame::limit);
  if (next(Code::save)) {
    const uint8_t slot = i++->source;
    if (!take(Code::load, Frame::gate)) return false;
    take(Code::Add, Frame::gate_bias);
    take(Code::AbsClamp, Frame::gate_limit);
    take(Code::AddOne, Frame::gate_one);
    if (!next(Code::MulOperand) || i++->source != slot) return false;
  } else if (!take(Code::MulOperand, Frame::product)) {
    take(Code::Add, Frame::sum);
  }
  return i == end;
}

// Whether a Program that matches a frame has its derivatives, too: Min and MinScalar differ in those.
inline bool matches_derivatives(const Program& program) {
  for (int n = 0; n < program.length; ++n)
    if (program.instruction[n].code == Code::Min) return false;
  return true;
}

}  // namespace fused_act

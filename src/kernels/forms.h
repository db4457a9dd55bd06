// Chains that are mostly what stands around an activation, for kernels that are compiled for all of it. A Program that is
// one of these is found by its steps, whichever operator or model it came from. What a frame (frame.h) takes beyond these
// costs a look at 19 places at run time, and what neither has is interpreted.
#pragma once

#include <algorithm>

#include "frame.h"

namespace fused_act {

// first(x) * second(operand), of which the operand is the one after those of `first`.
template <class First, class Second>
struct Gated {
  static constexpr bool kHeavy = First::kHeavy || Second::kHeavy, kSlow = First::kSlow || Second::kSlow;
  static constexpr int kScalars = First::kScalars + Second::kScalars;
  static constexpr int kGate = First::kOperands, kOperands = kGate + 1 + Second::kOperands;

  template <class N, class Source, class Memory>
  FUSED_ACT_FN N apply(const N& x, const Source& source, const Scalar<compute_t<N>>* scalars, Memory& memory) const {
    const N left = First{}.apply(x, source, scalars, memory);
    const auto rest = [&](int k) FUSED_ACT_LAMBDA { return source(kGate + 1 + k); };
    return mul(Second{}.apply(source(kGate), rest, scalars + First::kScalars, memory), left);
  }

  template <class N, class Source, class Give, class Memory>
  FUSED_ACT_FN Swept<N> sweep(const N& x, const Source& source, const Give& give, const Scalar<compute_t<N>>* scalars,
                              Memory& memory) const {
    const auto always = Arithmetic<N>::mask(true);
    const N gate = source(kGate);
    const auto rest = [&](int k) FUSED_ACT_LAMBDA { return source(kGate + 1 + k); };
    const auto give_rest = [&](int k, const Cotangent<N>& c) FUSED_ACT_LAMBDA { give(kGate + 1 + k, c); };
    const N right = Second{}.apply(gate, rest, scalars + First::kScalars, memory);
    const Swept<N> left = First::sweep_to({right, always}, x, source, give, scalars);
    give(kGate, Second::sweep_to({left.value, always}, gate, rest, give_rest, scalars + First::kScalars).cotangent);
    return {mul(right, left.value), left.cotangent};
  }
};

// An activation among numbers, and an operand before all of them or after: what is usual in a frame, with gradients. (Bounds would
// have masks in registers: in 16 bits there is no room for them.)
//
//   activation((x +- b) * f / q + o) * gain + p + s     of b and s there is one at most
//
// `walk`, `sweep` (backwards) and Reader::read take the places in this one order.
//
// Interpreted, training with it takes 1.5 to 2.4 times the copy of the same bytes (H200), twice as long as what torch.compile makes
// of the same.
template <class A>
struct Scaled {
  using Place = Frame::Place;
  static constexpr bool kHeavy = A::heavy, kSlow = A::slow;
  static constexpr int kOperands = 1, kOfActivation = kTakes<A, 'f'>, kScalars = kOfActivation + 5;
  uint32_t present = 0;  // a bit for each Place

  FUSED_ACT_FN static constexpr int scalar_of(Place place) {
    constexpr Place others[] = {Frame::factor, Frame::divisor, Frame::offset, Frame::gain, Frame::shift};
    for (int n = 0; n < 5; ++n)
      if (others[n] == place) return kOfActivation + n;
    return 0;  // the activation's own are first
  }

  template <class N, class Source, class Memory>
  FUSED_ACT_FN N apply(const N& x, const Source& source, const Scalar<compute_t<N>>* scalars, Memory&) const {
    return walk(x, source, scalars, [](auto step, Place, const N& value, const N& operand, const auto* s) FUSED_ACT_LAMBDA {
      return decltype(step)::template apply<N>(value, &operand, s);
    });
  }

  template <class N, class Source, class Give, class Memory>
  FUSED_ACT_FN Swept<N> sweep(const N& x, const Source& source, const Give& give, const Scalar<compute_t<N>>* scalars,
                              Memory&) const {
    Cotangent<N> slope[Frame::places];  // of the steps that there are
    const auto linear = [&](auto step, Place place, const N& value, const N& operand, const auto* s) FUSED_ACT_LAMBDA {
      const auto d = Evaluator<N>::template linearize<decltype(step)>(value, operand, s);
      slope[place] = {d.tangent[0], d.active[0]};
      return d.value;
    };
    const N value = walk(x, source, scalars, linear);
    Cotangent<N> c = Cotangent<N>::one();
    const auto back = [&](Place place) FUSED_ACT_LAMBDA { c = c.through(slope[place].value, slope[place].active); };
    static_assert(Add::unit_slope && Shift::unit_slope);
    if (has(Frame::sum)) give(0, c);
    if (has(Frame::gain)) back(Frame::gain);
    back(Frame::activation);
    if (has(Frame::divisor)) back(Frame::divisor);
    if (has(Frame::factor)) back(Frame::factor);
    if (has(Frame::bias)) give(0, c);
    if (has(Frame::less)) give(0, c.through(constant<N>(-1), Arithmetic<N>::mask(true)));
    return {value, c};
  }

 private:
  FUSED_ACT_FN bool has(Place place) const { return present >> place & 1; }
  // Through the steps that there are. What is rare has one branch for all of it (Framed::apply).
  template <class N, class Source, class F>
  FUSED_ACT_FN N walk(N x, const Source& source, const Scalar<compute_t<N>>* scalars, const F& take_step) const {
    const auto take = [&](auto step, Place place) FUSED_ACT_LAMBDA {
      N operand = x;
      if constexpr (kTakes<decltype(step), 'T'> > 0) operand = source(0);
      x = take_step(step, place, x, operand, scalars + scalar_of(place));
    };
    const auto take_if = [&](auto step, Place place) FUSED_ACT_LAMBDA {
      if (has(place)) take(step, place);
    };
    take_if(Add{}, Frame::bias);
    if (present & (1u << Frame::less | 1u << Frame::factor | 1u << Frame::divisor | 1u << Frame::offset)) {
      take_if(Sub{}, Frame::less);
      take_if(Mul{}, Frame::factor);
      take_if(Div{}, Frame::divisor);
      take_if(Shift{}, Frame::offset);
    }
    take(A{}, Frame::activation);
    if (present & (1u << Frame::gain | 1u << Frame::shift)) {
      take_if(Mul{}, Frame::gain);
      take_if(Shift{}, Frame::shift);
    }
    take_if(Add{}, Frame::sum);
    return x;
  }
};

// Reads a Program from the front, for a chain that it may be.
struct Reader {
  const Instruction *next, *end;
  int operands = 0, scalars = 0;
  uint8_t operand[kMaxOperands], scalar[kMaxScalars];  // which of the Program each of the chain's is, or Frame::kNone

  explicit Reader(const Program& p) : next(p.instruction), end(p.instruction + p.length) {}
  bool at(Code code) const { return next < end && next->code == code; }
  // An operand that has not been read before.
  bool read_operand(uint8_t source) {
    if (source >= kMaxOperands || std::find(operand, operand + operands, source) != operand + operands) return false;
    operand[operands++] = source;
    return true;
  }
  template <class Step>
  bool read_step() {
    if (!at(code_of<Step>)) return false;
    for (int n = 0; n < kTakes<Step, 'f'>; ++n) scalar[scalars++] = static_cast<uint8_t>(next->scalar + n);
    const uint8_t source = next++->source;
    return kTakes<Step, 'T'> == 0 || read_operand(source);
  }
  template <class... Steps>
  bool read(Chain<Steps...>) {
    return (read_step<Steps>() && ...);
  }
  template <class First, class Second>
  bool read(Gated<First, Second>) {
    if (!read(First{}) || !at(Code::save)) return false;
    const uint8_t slot = next++->source;
    if (!at(Code::load) || !read_operand(next++->source) || !read(Second{})) return false;
    return at(Code::MulOperand) && next++->source == slot;
  }
  // The form learns what of it there is.
  template <class A>
  bool read(Scaled<A>& form) {
    using Form = Scaled<A>;
    form.present = 0;
    operand[0] = Frame::kNone;
    std::fill_n(scalar, Form::kScalars, Frame::kNone);
    const auto take = [&](auto step, Frame::Place place) {
      using Step = decltype(step);
      if (!at(code_of<Step>) || (kTakes<Step, 'T'> && !read_operand(next->source))) return false;
      for (int n = 0; n < kTakes<Step, 'f'>; ++n) scalar[Form::scalar_of(place) + n] = static_cast<uint8_t>(next->scalar + n);
      form.present |= 1u << place;
      ++next;
      return true;
    };
    if (!take(Sub{}, Frame::less)) take(Add{}, Frame::bias);
    take(Mul{}, Frame::factor);
    take(Div{}, Frame::divisor);
    take(Shift{}, Frame::offset);
    if (!take(A{}, Frame::activation)) return false;
    take(Mul{}, Frame::gain);
    take(Shift{}, Frame::shift);
    if (!operands) take(Add{}, Frame::sum);
    operands = Form::kOperands;
    scalars = Form::kScalars;
    return true;
  }
};

// What the operands are, and with that which kernels there are for their gradients.
enum class Beside {
  axis,  // some along an axis, so that their gradients are sums; the others, or all, as large as x
  x,     // as large as x
  pairs  // the other halves of the pairs of which x has one
};

template <class Form>
constexpr bool kTellsByCode = false;
template <class... Steps>
constexpr bool kTellsByCode<Chain<Steps...>> = ((Steps::few_slopes || Steps::unit_slope) && ...);

// A form as a chain with kernels for forward and either backward or, where codes tell the derivative, forward with codes.
// `along`: of Beside::axis, which operands, a bit each.
template <class Form, Beside beside, uint32_t along = 1>
struct Exact : Form {
  static constexpr bool kDynamic = false, kFramed = false, kPairs = beside == Beside::pairs;
  static constexpr bool kCoded = kTellsByCode<Form>;
  uint8_t operand[kMaxOperands], scalar[kMaxScalars];

  // -1: it has none.
  int operand_from(int k) const { return operand[k] == Frame::kNone ? -1 : operand[k]; }
  int scalar_from(int s) const { return scalar[s] == Frame::kNone ? -1 : scalar[s]; }

  // Whether it is this Program, whose operands and scalars it then knows.
  bool matches(const Program& program) {
    Reader reader(program);
    if (!reader.read(static_cast<Form&>(*this)) || reader.next != reader.end) return false;
    std::copy(reader.operand, reader.operand + reader.operands, operand);
    std::copy(reader.scalar, reader.scalar + reader.scalars, scalar);
    return true;
  }
};
template <class Op>
constexpr bool kExact = false;
template <class Form, Beside beside, uint32_t along>
constexpr bool kExact<Exact<Form, beside, along>> = true;

// Whether a chain may walk rows with a pitch and takes whole vectors alone: where an activation stands in something else.
template <class Op>
constexpr bool kSurrounded = Op::kFramed || kExact<Op>;

// Whether it has kernels for forward of elements of that size. (Of Scaled in 16 bits: gelu takes 1.19 copies on an H200, sigmoid 1.06,
// for 1.30 and 1.22 of their frames. In float32 these are as fast.)
template <class Op, int bytes>
constexpr bool kHasForward = true;
template <class A, Beside beside, uint32_t along, int bytes>
constexpr bool kHasForward<Exact<Scaled<A>, beside, along>, bytes> = bytes == 2;

// Whether there are also kernels for what is no whole vectors: of gates and residuals without a bias, among them the halves of a
// tensor whose last dimension has any length. What else does not fit is copied first, if it is large and not written in place.
template <class Op>
constexpr bool kLoose = false;
template <class Form, uint32_t along>
constexpr bool kLoose<Exact<Form, Beside::x, along>> = true;

// Whether there are kernels that sum operand gradients; and which operands these kernels know to lie along the axis of the
// sums, a bit each, so that they load them once. The others' gradients are then no sums: a residual that is broadcast and
// has a gradient is interpreted.
template <class Op>
constexpr bool kSums = true;
template <class Form, Beside beside, uint32_t along>
constexpr bool kSums<Exact<Form, beside, along>> = beside == Beside::axis;
template <class Op>
constexpr uint32_t kAlong = 0;
template <class Form, Beside beside, uint32_t along>
constexpr uint32_t kAlong<Exact<Form, beside, along>> = kSums<Exact<Form, beside, along>> ? along : 0;

// Among numbers, where the derivative has to be computed.
template <class A>
using FormsOfAny = std::conditional_t<A::few_slopes, Types<>, Types<Exact<Scaled<A>, Beside::axis>>>;
// The other forms of an activation A, if it is common, and if it is not.
template <class A>
using FormsOfCommon = Types<Exact<Chain<Add, A>, Beside::axis>,                     // a bias
                            Exact<Chain<MulOperand, Add, A>, Beside::axis, 0b11>,   // a frozen BatchNorm
                            Exact<Chain<Add, Add, A>, Beside::axis>,                // a bias and a residual
                            Exact<Chain<Add, A, Add>, Beside::axis>,                // a bias, and the residual at the end
                            Exact<Chain<A, Add>, Beside::x>,                        // the residual alone
                            Exact<Chain<A, MulOperand>, Beside::x>,                 // a gated linear unit
                            Exact<Gated<Chain<Add, A>, Chain<Add>>, Beside::axis, 0b101>>;  // one with biases
// Of one that stands in pairs, and where what it takes is no pairs in memory (in channels_last).
template <class A>
using GatedPairs = Gated<Chain<MinScalar, A>, Chain<AbsClamp, AddOne>>;  // gpt-oss
template <class A>
using FormsOfPairs = Types<Exact<GatedPairs<A>, Beside::pairs>>;
template <class A>
using FormsOfOther = std::conditional_t<kHasFrame<A, true>, Types<Exact<GatedPairs<A>, Beside::x>>, Types<>>;
template <class... A, class... B>
Types<A..., B...> joined(Types<A...>, Types<B...>);
template <class A>
using Forms = decltype(joined(std::conditional_t<A::common, FormsOfCommon<A>, FormsOfOther<A>>(), FormsOfAny<A>()));

// That of an operator's own line which takes halves, unless it is a form of an activation.
template <class Line>
struct FormOfHalves {
  using Found = Types<>;
};
template <class First, class... Rest>
struct FormOfHalves<Pattern<Halves, First, Rest...>> {
  static constexpr bool kListed = std::is_same_v<Chain<First, Rest...>, Chain<First, MulOperand>> && First::common;
  using Found = std::conditional_t<kListed, Types<>, Types<Exact<Chain<First, Rest...>, Beside::x>>>;
};

}  // namespace fused_act

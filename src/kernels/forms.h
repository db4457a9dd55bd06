// Chains that are mostly what stands around an activation, for kernels that are compiled for all of it. A Program that is
// one of these is found by its steps, whichever operator or model it came from. What a frame (frame.h) takes beyond these
// costs a look at 18 places at run time, and what neither has is interpreted.
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

// Reads a Program from the front, for a chain that it may be.
struct Reader {
  const Instruction *next, *end;
  int operands = 0, scalars = 0;
  uint8_t operand[kMaxOperands], scalar[kMaxScalars];  // which of the Program each of the chain's is

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

  int operand_from(int k) const { return operand[k]; }
  int scalar_from(int s) const { return scalar[s]; }

  // Whether it is this Program, whose operands and scalars it then knows.
  bool matches(const Program& program) {
    Reader reader(program);
    if (!reader.read(Form{}) || reader.next != reader.end) return false;
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

// The forms of an activation A, if it is common, and if it is not.
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
using FormsOfOther =
    std::conditional_t<kHasFrame<A, true>, Types<Exact<Chain<Add, A>, Beside::axis>, Exact<GatedPairs<A>, Beside::x>>,
                       std::conditional_t<A::heavy, Types<Exact<Chain<Add, A>, Beside::axis>>, Types<>>>;
template <class A>
using Forms = std::conditional_t<A::common, FormsOfCommon<A>, FormsOfOther<A>>;

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

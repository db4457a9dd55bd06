// A chain as data, for kernels that learn at run time which steps they take. Every operator has this form beside its
// compiled one, so what is rare (float64, the second order, strides that no vector fits) needs no kernel of its own,
// and an activation that is chosen by name needs none for each name.
#pragma once

#include <cstdint>
#include <cstring>
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

struct alignas(4) Instruction {
  static constexpr uint8_t kNoSource = 255, kNoTape = 255;
  Code code;
  uint8_t source = kNoSource;  // operand k, or kMaxOperands + slot
  uint8_t scalar = 0;          // place of the step's first scalar
  uint8_t tape = kNoTape;      // entry of the step's slope; that of its operand follows

  // A copy, loaded in one go: a GPU would load each byte when it needs it.
  FUSED_ACT_FN Instruction fetch() const {
    uint32_t word;
    memcpy(&word, this, sizeof word);
    return {Code(word & 255), uint8_t(word >> 8), uint8_t(word >> 16), uint8_t(word >> 24)};
  }
};

constexpr int count_parameters(const char* s, char kind) { return *s ? (*s == kind) + count_parameters(s + 1, kind) : 0; }
template <class Step, char kind>
constexpr int kTakes = count_parameters(Step::parameters, kind);

// How a step of a Program is evaluated on a type of numbers: in one go, unless that type says otherwise (cpu/rows.h).
template <class N>
struct Evaluator {
  template <class Step>
  FUSED_ACT_FN static N apply(const N& x, const N& operand, const Scalar<compute_t<N>>* scalars) {
    return Step::template apply<N>(x, &operand, scalars);
  }
  // d/dx and, where the step takes an operand, d/d operand, beside its value.
  template <class Step>
  FUSED_ACT_FN static auto linearize(const N& x, const N& operand, const Scalar<compute_t<N>>* scalars) {
    constexpr int K = 1 + kTakes<Step, 'T'>;
    using D = Dual<N, K>;
    using A = Arithmetic<N>;
    const auto seed = [](const N& value, int which) FUSED_ACT_LAMBDA {
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
};

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
//   N apply(N x, source, scalars, memory)
//   Swept<N> sweep(N x, source, give, scalars, memory)
//
// A Program keeps what it needs later in `memory`, at places that are known at run time only:
//
//   N value(int source), void save(int source, N)                    of slots; on the way back the cotangents of slots and
//   Cotangent<N> cotangent(int source), void save(int, Cotangent<N>)     of operands that several steps read
//   void record(int n, int entry, int which, N, mask_t<N>)           the tape: slope `which` (0: of x, 1: of the operand)
//   Cotangent<N> recorded(int n, int entry, int which)               of step n, whose entry on a dense tape is `entry`

// Memory for T that is not initialised: of 48 slopes a program of n steps touches the first 2 n.
template <class T, int n>
struct Uninitialised {
  alignas(T) unsigned char bytes[n * sizeof(T)];
  FUSED_ACT_FN T& operator[](int i) { return reinterpret_cast<T*>(bytes)[i]; }
};

template <class N>
class LocalMemory {
 public:
  // Not the default one: `{}` would set all of it to 0, 4 KB for each register of a CPU, where a step takes 2 ns.
  FUSED_ACT_FN LocalMemory() {}
  FUSED_ACT_FN N value(int source) { return value_[source]; }
  FUSED_ACT_FN void save(int source, const N& x) { value_[source] = x; }
  FUSED_ACT_FN Cotangent<N> cotangent(int source) { return cotangent_[source]; }
  FUSED_ACT_FN void save(int source, const Cotangent<N>& c) { cotangent_[source] = c; }
  FUSED_ACT_FN void record(int n, int, int which, const N& slope, const mask_t<N>& active) {
    tape_[2 * n + which] = {slope, active};
  }
  FUSED_ACT_FN Cotangent<N> recorded(int n, int, int which) { return tape_[2 * n + which]; }

 private:
  Uninitialised<N, kMaxOperands + kMaxSlots> value_;
  Uninitialised<Cotangent<N>, kMaxOperands + kMaxSlots> cotangent_;
  Uninitialised<Cotangent<N>, 2 * kMaxSteps> tape_;
};

template <class...>
struct Types {};

template <class... Steps>
struct Chain {
  static constexpr bool kDynamic = false, kFramed = false, kPairs = false;
  static constexpr bool kHeavy = (Steps::heavy || ...);
  static constexpr bool kSlow = (Steps::slow || ...) || (Steps::heavy + ... + 0) > 1;
  static constexpr int kScalars = (kTakes<Steps, 'f'> + ... + 0);
  static constexpr int kOperands = (kTakes<Steps, 'T'> + ... + 0);

  template <class N, class Source, class Memory>
  FUSED_ACT_FN N apply(N x, const Source& source, const Scalar<compute_t<N>>* scalars, Memory&) const {
    int k = 0;
    const auto step = [&](auto* type) FUSED_ACT_LAMBDA {
      using Step = std::remove_pointer_t<decltype(type)>;
      N operand = x;
      if constexpr (kTakes<Step, 'T'> > 0) operand = source(k++);
      x = Step::template apply<N>(x, &operand, scalars);
      scalars += kTakes<Step, 'f'>;
    };
    (step(static_cast<Steps*>(nullptr)), ...);
    return x;
  }

  template <class N, class Source, class Give, class Memory>
  FUSED_ACT_FN Swept<N> sweep(const N& x, const Source& source, const Give& give, const Scalar<compute_t<N>>* scalars,
                              Memory&) const {
    return sweep_to(Cotangent<N>::one(), x, source, give, scalars);
  }
  // The same where something follows: `end` is the derivative of the result with respect to what the chain yields.
  template <class N, class Source, class Give>
  FUSED_ACT_FN static Swept<N> sweep_to(const Cotangent<N>& end, const N& x, const Source& source, const Give& give,
                                        const Scalar<compute_t<N>>* scalars) {
    return sweep_from<0>(Types<Steps...>{}, end, x, source, give, scalars);
  }

 private:
  template <int k, class N, class Source, class Give>
  FUSED_ACT_FN static Swept<N> sweep_from(Types<>, const Cotangent<N>& end, const N& x, const Source&, const Give&,
                                          const Scalar<compute_t<N>>*) {
    return {x, end};
  }
  template <int k, class Step, class... Rest, class N, class Source, class Give>
  FUSED_ACT_FN static Swept<N> sweep_from(Types<Step, Rest...>, const Cotangent<N>& end, const N& x, const Source& source,
                                          const Give& give, const Scalar<compute_t<N>>* scalars) {
    constexpr bool takes = kTakes<Step, 'T'> > 0;
    N operand = x;
    if constexpr (takes) operand = source(k);
    const auto d = Evaluator<N>::template linearize<Step>(x, operand, scalars);
    const Swept<N> rest = sweep_from<k + takes>(Types<Rest...>{}, end, d.value, source, give, scalars + kTakes<Step, 'f'>);
    if constexpr (takes) give(k, rest.cotangent.through(d.tangent[1], d.active[1]));
    return {rest.value, rest.cotangent.through(d.tangent[0], d.active[0])};
  }
};

template <class Step>
constexpr bool kIsLight = !Step::heavy && !Step::divides;

// What a Program knows of a step at run time.
struct StepKind {
  bool takes_operand, unit_slope, light;
};
constexpr StepKind kStepKinds[] = {
#define FUSED_ACT_KIND(STEP) {kTakes<STEP, 'T'> > 0, STEP::unit_slope, kIsLight<STEP>},
    FUSED_ACT_STEPS(FUSED_ACT_KIND)
#undef FUSED_ACT_KIND
};

struct Program {
  static constexpr bool kDynamic = true, kFramed = false;
  static constexpr int kScalars = kMaxScalars;
  static constexpr int kOperands = kMaxOperands;

  int length = 0, slots = 0;
  uint32_t shared = 0;  // bit k: several steps read operand k
  Instruction instruction[kMaxSteps];

  // Gives the steps whose slope has to be kept their entries of a tape; returns how many there are.
  int assign_tape() {
    int entries = 0;
    uint32_t once = 0;
    shared = 0;
    for (int n = 0; n < length; ++n) {
      Instruction& i = instruction[n];
      i.tape = Instruction::kNoTape;
      if (i.source < kMaxOperands) {
        shared |= once & (1u << i.source);
        once |= 1u << i.source;
      }
      if (i.code >= Code::save) continue;
      const StepKind kind = kStepKinds[int(i.code)];
      if (kind.unit_slope) continue;
      i.tape = static_cast<uint8_t>(entries);
      entries += 1 + kind.takes_operand;
    }
    return entries;
  }

  // `all`: whether there may be steps that are not light.
  template <bool all = true, class N, class Source, class Memory>
  FUSED_ACT_FN N apply(N x, const Source& source, const Scalar<compute_t<N>>* scalars, Memory& memory) const {
    for (int n = 0; n < length; ++n) {
      const Instruction i = instruction[n].fetch();
      const Scalar<compute_t<N>>* s = scalars + i.scalar;
      switch (i.code) {
#define FUSED_ACT_CASE(STEP)                                                   \
  case Code::STEP: {                                                           \
    if constexpr (all || kIsLight<STEP>) {                                     \
      take<STEP>(x, i, source, s, memory);                                     \
    }                                                                          \
    break;                                                                     \
  }
        FUSED_ACT_STEPS(FUSED_ACT_CASE)
#undef FUSED_ACT_CASE
        case Code::save:
          memory.save(i.source, x);
          break;
        case Code::load:
          x = read<true>(i, x, source, memory);
          break;
      }
    }
    return x;
  }

  // Needs assign_tape.
  template <class N, class Source, class Give, class Memory>
  FUSED_ACT_FN Swept<N> sweep(N x, const Source& source, const Give& give, const Scalar<compute_t<N>>* scalars,
                              Memory& memory) const {
    for (int n = 0; n < length; ++n) {
      const Instruction i = instruction[n].fetch();
      const Scalar<compute_t<N>>* s = scalars + i.scalar;
      switch (i.code) {
#define FUSED_ACT_CASE(STEP)                                                   \
  case Code::STEP: {                                                           \
    const N operand = read<kTakes<STEP, 'T'> != 0>(i, x, source, memory);      \
    x = linear_part<STEP>(x, operand, s, n, i, memory);                        \
    break;                                                                     \
  }
        FUSED_ACT_STEPS(FUSED_ACT_CASE)
#undef FUSED_ACT_CASE
        case Code::save:
          memory.save(i.source, x);
          break;
        case Code::load:
          x = read<true>(i, x, source, memory);
          break;
      }
    }
    const N value = x;
    Cotangent<N> cotangent = Cotangent<N>::one();
    for (int k = 0; k < slots; ++k) memory.save(kMaxOperands + k, Cotangent<N>::none());
    for (int k = 0; shared >> k; ++k)
      if (shared >> k & 1) memory.save(k, Cotangent<N>::none());
    for (int n = length - 1; n >= 0; --n) {
      const Instruction i = instruction[n].fetch();
      const auto give_source = [&](const Cotangent<N>& c) FUSED_ACT_LAMBDA {
        if (i.source < kMaxOperands && !(shared >> i.source & 1)) {
          give(i.source, c);
        } else {
          memory.save(i.source, sum(memory.cotangent(i.source), c));
        }
      };
      if (i.code == Code::save) {
        cotangent = sum(cotangent, memory.cotangent(i.source));
        memory.save(i.source, Cotangent<N>::none());  // what was in the slot before is another value
      } else if (i.code == Code::load) {
        give_source(cotangent);
        cotangent = Cotangent<N>::none();
      } else if (i.tape == Instruction::kNoTape) {
        if (reads(i)) give_source(cotangent);
      } else {
        if (reads(i)) {
          const Cotangent<N> slope = memory.recorded(n, i.tape, 1);
          give_source(cotangent.through(slope.value, slope.active));
        }
        const Cotangent<N> slope = memory.recorded(n, i.tape, 0);
        cotangent = cotangent.through(slope.value, slope.active);
      }
    }
    for (int k = 0; shared >> k; ++k)
      if (shared >> k & 1) give(k, memory.cotangent(k));
    return {value, cotangent};
  }

 private:
  FUSED_ACT_FN static bool reads(const Instruction& i) {
    return i.source != Instruction::kNoSource && i.code != Code::save;
  }
  // The operand of a step that takes one; else any number.
  template <bool takes, class N, class Source, class Memory>
  FUSED_ACT_FN static N read(const Instruction& i, const N& x, const Source& source, Memory& memory) {
    if constexpr (!takes) return x;
    return i.source < kMaxOperands ? source(i.source) : memory.value(i.source);
  }
  template <class Step, class N, class Source, class Memory>
  FUSED_ACT_FN static void take(N& x, const Instruction& i, const Source& source, const Scalar<compute_t<N>>* s,
                                Memory& memory) {
    const N operand = read<kTakes<Step, 'T'> != 0>(i, x, source, memory);
    x = Evaluator<N>::template apply<Step>(x, operand, s);
  }
  // Operands have no tangent: a step of slope 1 leaves that of x.
  template <class Step, class N, class Source, class Memory>
  FUSED_ACT_FN static void take(Keyed<N>& x, const Instruction& i, const Source& source, const Scalar<compute_t<N>>* s,
                                Memory& memory) {
    constexpr bool takes = kTakes<Step, 'T'> != 0;
    if constexpr (Step::unit_slope) {
      if (!takes || i.source < kMaxOperands) {
        N operand = x.value;
        if constexpr (takes) operand = source(i.source).value;
        x.value = Evaluator<N>::template apply<Step>(x.value, operand, s);
        return;
      }
    }
    const Keyed<N> operand = read<takes>(i, x, source, memory);
    x = Evaluator<Keyed<N>>::template apply<Step>(x, operand, s);
  }
  template <class Step, class N, class Memory>
  FUSED_ACT_FN static N linear_part(const N& x, const N& operand, const Scalar<compute_t<N>>* s, int n,
                                    const Instruction& i, Memory& memory) {
    if constexpr (Step::unit_slope) {
      return Evaluator<N>::template apply<Step>(x, operand, s);
    } else {
      const auto d = Evaluator<N>::template linearize<Step>(x, operand, s);
      memory.record(n, i.tape, 0, d.tangent[0], d.active[0]);
      if constexpr (kTakes<Step, 'T'> > 0) memory.record(n, i.tape, 1, d.tangent[1], d.active[1]);
      return d.value;
    }
  }
  template <class N>
  FUSED_ACT_FN static Cotangent<N> sum(Cotangent<N> a, const Cotangent<N>& b) {
    accumulate(a.value, a.active, b.value, b.active);
    return a;
  }
};

// A Program of light steps, for kernels that need fewer registers for these.
struct LightProgram {
  static constexpr bool kDynamic = true;
  static constexpr int kScalars = Program::kScalars, kOperands = Program::kOperands;
  const Program& program;

  static bool can_be(const Program& p) {
    for (int n = 0; n < p.length; ++n)
      if (p.instruction[n].code < Code::save && !kStepKinds[int(p.instruction[n].code)].light) return false;
    return true;
  }
  template <class N, class Source, class Memory>
  FUSED_ACT_FN N apply(const N& x, const Source& source, const Scalar<compute_t<N>>* scalars, Memory& memory) const {
    return program.apply<false>(x, source, scalars, memory);
  }
};

}  // namespace fused_act

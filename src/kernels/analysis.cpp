// What is found out about a Program by evaluating it on numbers that are not numbers: which inputs its results depend on, and
// which values its derivatives take. Compiled apart from all else, and without forcing anything inline: this is about every step,
// a few times in a program's life, and inline in bindings.cpp took 60 of its 71 seconds.
#define FUSED_ACT_ANALYSIS

#include <cstring>
#include <vector>

#include "codes.h"
#include "dependencies.h"

namespace fused_act {

// ---- dependencies: on Trace --------------------------------------------------------------------------------------

namespace trace {
struct Io {
  Dependencies& found;
  Trace operand(int k) const { return {input::operand(k), false}; }
  Trace direction(int k) const { return {input::v(k), false}; }
  bool moves(int) const { return true; }
  void gradient(int k, const Trace& t) { found.operand[k] |= t.inputs; }
  template <class N>
  LocalMemory<N> memory() const {
    return {};
  }
};

template <Mode mode>
Dependencies dependencies(Program program) {
  program.assign_tape();
  Dependencies d;
  Io io{d};
  Scalar<float> scalars[kMaxScalars];
  // A number that no formula treats apart: at a weight of 1, or an exponent of 2, less is read than at others.
  for (Scalar<float>& s : scalars) s = Scalar<float>::of(3.5f);
  const Outputs<Trace> out = evaluate<mode>(program, scalars, Trace{input::x, false}, Trace{input::g, false},
                                            Trace{input::u, false}, true, io);
  for (int n = 0; n < full_outputs(mode); ++n) d.full[n] = out.full[n].inputs;
  return d;
}
}  // namespace trace

Dependencies dependencies(const Program& program, Mode mode) {
  switch (mode) {
    case Mode::forward:
      return trace::dependencies<Mode::forward>(program);
    case Mode::jvp:
      return trace::dependencies<Mode::jvp>(program);
    case Mode::backward:
      return trace::dependencies<Mode::backward>(program);
    default:
      break;
  }
  return trace::dependencies<Mode::double_backward>(program);
}

// ---- codes: on numbers of which only some are known --------------------------------------------------------------
//
// What a comparison of unknown numbers gives is tried out, in all ways that do not contradict each other.

namespace possible {

// How two numbers compare, in one way in which all comparisons so far can have come out.
class World {
 public:
  enum Relation { less, equal, greater, unordered, relations };

  // Starts over, with the next way. False: that was the last.
  bool next() {
    while (!decided_.empty() && decided_.back().relation == unordered) decided_.pop_back();
    if (decided_.empty()) return false;
    decided_.back().relation = Relation(decided_.back().relation + 1);
    return true;
  }
  // Of numbers a and b, each known by what it was computed from; b has a value where `known`.
  Relation relation(uint64_t a, uint64_t b, bool known, double value) {
    for (const Decision& d : decided_) {
      if (d.a == a && d.b == b) return d.relation;
      if (d.a == b && d.b == a) return Relation(d.relation == less ? greater : d.relation == greater ? less : d.relation);
      if (d.a != a || !d.known || !known) continue;
      // a was compared with another value before.
      if (d.relation == unordered) return unordered;
      if (d.relation == less && d.value <= value) return less;
      if (d.relation == greater && d.value >= value) return greater;
      if (d.relation == equal) return d.value < value ? less : greater;
    }
    decided_.push_back({a, b, known, value, less});
    return less;
  }

 private:
  struct Decision {
    uint64_t a, b;
    bool known;
    double value;
    Relation relation;
  };
  std::vector<Decision> decided_;
};

static thread_local World* world = nullptr;

// A value, or the name of a number that is not known: what it was computed from.
template <class C, bool cuda>
struct Number {
  C value;
  uint64_t name;  // 0: the value is known

  uint64_t identity() const {
    if (name) return name;
    const C number = value == 0 ? C(0) : value;  // -0 is 0
    uint64_t bits = 0;
    memcpy(&bits, &number, sizeof number);
    return bits * 2654435761u + 1;
  }
};

}  // namespace possible

template <class C, bool cuda>
struct Arithmetic<possible::Number<C, cuda>> {
  using N = possible::Number<C, cuda>;
  using Compute = C;
  using Mask = bool;
  using A = Arithmetic<C>;

  static N constant(C c) { return {c, 0}; }
  template <class F>
  static N of(int operation, const N& a, const N& b, F f) {
    if (!a.name && !b.name) return constant(f(a.value, b.value));
    for (const N* n : {&a, &b})
      if (!n->name && n->value != n->value) return *n;  // NaN with whatever is NaN
    uint64_t name = uint64_t(operation) + 0x9e3779b97f4a7c15u;
    for (const N* n : {&a, &b}) name = (name ^ n->identity()) * 0xbf58476d1ce4e5b9u + (name >> 29);
    return {C(0), name | 1};
  }
  static N add(const N& a, const N& b) { return of(0, a, b, [](C x, C y) { return x + y; }); }
  static N sub(const N& a, const N& b) { return of(1, a, b, [](C x, C y) { return x - y; }); }
  static N mul(const N& a, const N& b) { return of(2, a, b, [](C x, C y) { return x * y; }); }
  static N quotient(const N& a, const N& b) { return of(3, a, b, [](C x, C y) { return x / y; }); }
  static N ratio(const N& a, const N& b) { return quotient(a, b); }
  static N divide(const N& a, const Scalar<C>& s) {  // as the device divides
    return cuda ? mul(a, constant(s.reciprocal)) : quotient(a, constant(s.value));
  }
  static N unary(int operation, const N& a, C value) { return of(operation, a, a, [value](C, C) { return value; }); }
  static N estimate_reciprocal(const N& a) { return quotient(constant(1), a); }
  static N negative(const N& a) { return unary(4, a, -a.value); }
  static N absolute(const N& a) { return unary(5, a, std::fabs(a.value)); }
  static N exp(const N& a) { return unary(6, a, std::exp(a.value)); }
  static N exp2(const N& a) { return unary(12, a, std::exp2(a.value)); }
  static N exp_falling(const N& a) { return exp(a); }
  static N expm1(const N& a) { return unary(7, a, std::expm1(a.value)); }
  static N log1p(const N& a) { return unary(8, a, std::log1p(a.value)); }
  static N tanh(const N& a) { return unary(9, a, std::tanh(a.value)); }
  static N log(const N& a) { return unary(10, a, std::log(a.value)); }
  static N sqrt(const N& a) { return unary(11, a, std::sqrt(a.value)); }
  static N fma(const N& a, const N& b, const N& c) { return add(mul(a, b), c); }

  static Mask less(const N& a, const N& b) { return compare(a, b) == possible::World::less; }
  static Mask equal(const N& a, const N& b) { return compare(a, b) == possible::World::equal; }
  static Mask less_equal(const N& a, const N& b) {
    const auto r = compare(a, b);
    return r == possible::World::less || r == possible::World::equal;
  }
  static Mask mask(bool m) { return m; }
  static Mask both(Mask a, Mask b) { return a && b; }
  static Mask either(Mask a, Mask b) { return a || b; }
  static Mask negate(Mask a) { return !a; }
  static N select(Mask m, const N& a, const N& b) { return m ? a : b; }

 private:
  static possible::World::Relation compare(const N& a, const N& b) {
    using World = possible::World;
    if (!a.name && !b.name) {
      return a.value < b.value    ? World::less
             : a.value == b.value ? World::equal
             : a.value > b.value  ? World::greater
                                  : World::unordered;
    }
    if (!a.name) {  // what is known stands second
      const auto r = compare(b, a);
      return r == World::less ? World::greater : r == World::greater ? World::less : r;
    }
    if (!b.name && b.value != b.value) return World::unordered;
    if (a.name == b.name) {
      const auto r = possible::world->relation(a.name, 0, false, 0);  // with itself: equal, or NaN
      return r == World::unordered ? r : World::equal;
    }
    return possible::world->relation(a.name, b.name ? b.name : b.identity(), !b.name, b.value);
  }
};

namespace possible {

template <class N>
struct Io {
  CodeTable& table;
  int code;
  bool first;  // of its code: its derivatives are those of the code

  static N unknown(int which) { return {0, uint64_t(which) * 2 + 3}; }
  void column(int n, const Cotangent<N>& c) {
    const uint32_t bit = 1u << (n * kMaxCodes + code);
    double& value = table.value[n * kMaxCodes + code];
    if (c.active && (c.value.name || c.value.value != c.value.value)) {
      table.known &= ~(1u << n);
    } else if (first) {
      table.active = c.active ? table.active | bit : table.active & ~bit;
      value = c.active ? c.value.value : 0;
    } else if (bool(table.active & bit) != c.active || (c.active && value != double(c.value.value))) {
      table.known &= ~(1u << n);
    }
  }
};

}  // namespace possible

template <bool cuda>
CodeTable find_codes(Program program, const double* given) {
  using N = possible::Number<float, cuda>;
  using K = Keyed<N>;
  using IoN = possible::Io<N>;
  constexpr int kMaxWorlds = 2048;
  if (!LightProgram::can_be(program)) return {};
  program.assign_tape();
  Scalar<float> scalars[kMaxScalars];
  for (int s = 0; s < kMaxScalars; ++s) scalars[s] = Scalar<float>::of(static_cast<float>(given[s]));

  struct Key {
    bool active;
    float value;
  };
  std::vector<Key> keys;
  CodeTable table;
  table.known = (1u << CodeTable::kColumns) - 1;
  possible::World world;
  possible::world = &world;
  int worlds = 0;
  do {
    if (++worlds > kMaxWorlds) return {};
    const N x = IoN::unknown(0);
    const auto plain = [&](int k) { return IoN::unknown(1 + k); };
    const auto still = [&](int k) { return K{IoN::unknown(1 + k), inactive<N>()}; };
    LocalMemory<K> keyed_memory;
    const N t = program.apply(K{x, constant<N>(1)}, still, scalars, keyed_memory).tangent;
    if (t.name) return {};
    const Key key{t.value == t.value, t.value == t.value ? t.value : 0};
    int code = 0;
    while (code < int(keys.size()) && !(keys[code].active == key.active && keys[code].value == key.value)) ++code;
    const bool first = code == int(keys.size());
    if (code == kMaxCodes) return {};
    if (first) keys.push_back(key);
    IoN io{table, code, first};
    LocalMemory<N> memory;
    bool given_to[kMaxOperands] = {};
    const auto give = [&](int k, const Cotangent<N>& c) {
      given_to[k] = true;
      io.column(1 + k, c);
    };
    const Cotangent<N> slope = program.sweep(x, plain, give, scalars, memory).cotangent;
    if (slope.active != key.active) return {};  // it is NaN, and so is the key
    io.column(0, slope);
    for (int k = 0; k < kMaxOperands; ++k)
      if (!given_to[k]) io.column(1 + k, Cotangent<N>::none());
  } while (world.next());

  // Inactive, which no key equals, is code 0.
  table.codes = static_cast<int>(keys.size());
  for (int c = 0; c < table.codes; ++c) table.key[c] = keys[c].value;
  for (int c = 1; c < table.codes; ++c) {
    if (keys[c].active) continue;
    std::swap(table.key[0], table.key[c]);
    for (int n = 0; n < CodeTable::kColumns; ++n) {
      const int a = n * kMaxCodes, b = a + c;
      std::swap(table.value[a], table.value[b]);
      const uint32_t both = table.active >> a & 1, other = table.active >> b & 1;
      if (both != other) table.active ^= 1u << a | 1u << b;
    }
  }
  return table;
}
template CodeTable find_codes<false>(Program, const double*);
template CodeTable find_codes<true>(Program, const double*);

}  // namespace fused_act

// Piecewise linear chains (relu, clamp, hardsigmoid... with biases and scales) have derivatives of few values. Which of
// them an element has, its code, takes one bit or two, and backward needs nothing else: neither x nor an operand.
//
// Which values there are is found by evaluating the chain on numbers of which only some are known. What a comparison of
// unknown numbers gives is tried out, in all ways that do not contradict each other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

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

inline thread_local World* world = nullptr;

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

// The codes of a Program with its scalars, in float32 arithmetic; none where its derivatives are not of few values. `cuda`:
// as a GPU divides.
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

// Gives gradients, and D, from codes. `scalars` are the table's values, of the columns of x and the operands that it has.
template <int operands, bool two>
struct Decoder {
  static constexpr bool kDynamic = false, kFramed = false, kPairs = false, kHeavy = false, kTwo = two;
  static constexpr int kOperands = operands, kScalars = (1 + operands) * kMaxCodes;
  // What a column's derivatives are: one number for all codes (that of a bias after a clamp), or of which codes there are
  // any. On an H200 an element of 16 bits has 28 instructions of memory time, and the most general form takes ten of them.
  enum Form : uint8_t { same, all, all_but_first, two_but_first, first, none, any };
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
    const Scalar<compute_t<N>>* s = scalars + column * kMaxCodes;
    const auto slope = [&](int c) FUSED_ACT_LAMBDA { return constant<N>(s[c].value); };
    const N zero = constant<N>(0);
    const Form f = form[column];
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

}  // namespace fused_act

// A block of elements as one number, on which Programs run: then finding out what a step is costs once in 512 elements, and a
// step is a loop of SIMD registers over numbers that are in the L1 cache.
#pragma once

#include <algorithm>

#include "../program.h"
#include "vectorized.h"

namespace fused_act {

// So that each SIMD level has types of its own, and the linker takes none of its functions for another's.
inline namespace CPU_CAPABILITY {

// 13 buffers of float64 at most in the worst case (four operands, second order); three of float32 in most.
constexpr int64_t kBlock = 512;

// How many of them the thread's rows have now: whole SIMD registers.
inline thread_local int64_t row_lanes = kBlock;

// Its elements are shared and never changed, and may be those of a tensor. Or all of them are one value.
template <class C>
class Row {
  struct Buffer {
    alignas(64) C lane[kBlock];
    int users;
    Buffer* next;
  };
  struct Free {
    Buffer* first = nullptr;
    ~Free() {
      while (first) {
        Buffer* next = first->next;
        delete first;
        first = next;
      }
    }
  };
  static Free& free_buffers() {
    thread_local Free list;
    return list;
  }

 public:
  Row() : uniform_(true) {}
  Row(const Row& other) : buffer_(other.buffer_), data_(other.data_), value_(other.value_), uniform_(other.uniform_) {
    if (buffer_) ++buffer_->users;
  }
  Row(Row&& other) noexcept : Row() { swap(other); }
  Row& operator=(Row other) noexcept {
    swap(other);
    return *this;
  }
  ~Row() {
    if (!buffer_ || --buffer_->users) return;
    Free& list = free_buffers();
    buffer_->next = list.first;
    list.first = buffer_;
  }

  static Row of(C value) {
    Row r;
    r.value_ = value;
    return r;
  }
  // What p points to stays while the row is used.
  static Row view(const C* p) {
    Row r;
    r.uniform_ = false;
    r.data_ = p;
    return r;
  }
  // With `out` the place to write the elements to.
  static Row fresh(C*& out) {
    Free& list = free_buffers();
    Row r;
    r.uniform_ = false;
    r.buffer_ = list.first ? list.first : new Buffer;
    if (list.first) list.first = list.first->next;
    r.buffer_->users = 1;
    r.data_ = out = r.buffer_->lane;
    return r;
  }

  bool is_uniform() const { return uniform_; }
  C value() const { return value_; }
  // The elements, written out where they are one value.
  Row spread() const {
    if (!uniform_) return *this;
    C* out;
    Row r = fresh(out);
    std::fill(out, out + row_lanes, value_);
    return r;
  }
  const C* data() const { return data_; }

 private:
  void swap(Row& other) {
    std::swap(buffer_, other.buffer_);
    std::swap(data_, other.data_);
    std::swap(value_, other.value_);
    std::swap(uniform_, other.uniform_);
  }

  Buffer* buffer_ = nullptr;
  const C* data_ = nullptr;
  C value_ = 0;
  bool uniform_;
};

}  // namespace CPU_CAPABILITY

template <class C>
struct Arithmetic<Row<C>> {
  using N = Row<C>;
  using Vec = at::vec::Vectorized<C>;
  using V = Arithmetic<Vec>;
  using Compute = C;
  using Mask = N;  // all bits of an element set or clear

  static N constant(C c) { return N::of(c); }
  static N add(const N& a, const N& b) { return each(a, b, [](const Vec& x, const Vec& y) { return V::add(x, y); }); }
  static N mul(const N& a, const N& b) {
    if (a.is_uniform() && a.value() == 1) return b;
    return each(a, b, [](const Vec& x, const Vec& y) { return V::mul(x, y); });
  }
  // As one value a mask is 1 or 0.
  static Mask mask(bool m) { return N::of(m); }
  static Mask both(const Mask& a, const Mask& b) {
    if (a.is_uniform()) return a.value() ? b : a;
    if (b.is_uniform()) return b.value() ? a : b;
    return each(a, b, [](const Vec& x, const Vec& y) { return V::both(x, y); });
  }
  static Mask either(const Mask& a, const Mask& b) {
    if (a.is_uniform()) return a.value() ? a : b;
    if (b.is_uniform()) return b.value() ? b : a;
    return each(a, b, [](const Vec& x, const Vec& y) { return V::either(x, y); });
  }
  static N select(const Mask& m, const N& a, const N& b) {
    if (m.is_uniform()) return m.value() ? a : b;
    const C* pm = m.data();
    int64_t j = 0;
    return each(a, b, [&](const Vec& x, const Vec& y) {
      const Vec chosen = V::select(Vec::loadu(pm + j), x, y);
      j += Vec::size();
      return chosen;
    });
  }

 private:
  template <class F>
  static N each(const N& a, const N& b, const F& f) {
    const N x = a.spread(), y = b.spread();
    C* out;
    N r = N::fresh(out);
    const int64_t lanes = row_lanes;
    for (int64_t j = 0; j < lanes; j += Vec::size()) f(Vec::loadu(x.data() + j), Vec::loadu(y.data() + j)).store(out + j);
    return r;
  }
};

// A step on rows is the step on SIMD registers, one after the other. Not inlined: a Program has one call for each step.
template <class C>
struct Evaluator<Row<C>> {
  using N = Row<C>;
  using Vec = at::vec::Vectorized<C>;

  template <class Step>
  static __attribute__((noinline)) N apply(const N& x, const N& operand, const Scalar<C>* s) {
    const N px = x.spread(), po = operand.spread();
    C* out;
    N r = N::fresh(out);
    const int64_t lanes = row_lanes;
    for (int64_t j = 0; j < lanes; j += Vec::size()) {
      const Vec o = Vec::loadu(po.data() + j);
      Step::template apply<Vec>(Vec::loadu(px.data() + j), &o, s).store(out + j);
    }
    return r;
  }
  template <class Step>
  static __attribute__((noinline)) auto linearize(const N& x, const N& operand, const Scalar<C>* s) {
    constexpr int K = 1 + kTakes<Step, 'T'>;
    const N px = x.spread(), po = operand.spread();
    C *value, *tangent[K], *active[K];
    Dual<N, K> d;
    d.value = N::fresh(value);
    for (int k = 0; k < K; ++k) {
      d.tangent[k] = N::fresh(tangent[k]);
      d.active[k] = N::fresh(active[k]);
    }
    const int64_t lanes = row_lanes;
    for (int64_t j = 0; j < lanes; j += Vec::size()) {
      const auto at = Evaluator<Vec>::template linearize<Step>(Vec::loadu(px.data() + j), Vec::loadu(po.data() + j), s);
      at.value.store(value + j);
      for (int k = 0; k < K; ++k) {
        at.tangent[k].store(tangent[k] + j);
        at.active[k].store(active[k] + j);
      }
    }
    return d;
  }
};

// With a tangent that tells codes.
template <class C>
struct Evaluator<Keyed<Row<C>>> {
  using N = Keyed<Row<C>>;
  using Vec = at::vec::Vectorized<C>;

  template <class Step>
  static __attribute__((noinline)) N apply(const N& x, const N& operand, const Scalar<C>* s) {
    const Row<C> px = x.value.spread(), dx = x.tangent.spread(), po = operand.value.spread(), dpo = operand.tangent.spread();
    C *value, *tangent;
    const Row<C> v = Row<C>::fresh(value), t = Row<C>::fresh(tangent);
    const int64_t lanes = row_lanes;
    for (int64_t j = 0; j < lanes; j += Vec::size()) {
      const auto at = [&](const Row<C>& a, const Row<C>& b) {
        return Keyed<Vec>{Vec::loadu(a.data() + j), Vec::loadu(b.data() + j)};
      };
      const Keyed<Vec> o = at(po, dpo), d = Step::template apply<Keyed<Vec>>(at(px, dx), &o, s);
      d.value.store(value + j);
      d.tangent.store(tangent + j);
    }
    return {v, t};
  }
};

inline namespace CPU_CAPABILITY {

// What a Program remembers of rows. It is made once for all blocks: making and destroying its 120 rows takes longer than a
// step.
template <class N>
struct RowStore {
  N value[kMaxOperands + kMaxSlots];
  Cotangent<N> cotangent[kMaxOperands + kMaxSlots], tape[2 * kMaxSteps];
};
template <class C>
struct RowStore<Keyed<Row<C>>> {
  Keyed<Row<C>> value[kMaxOperands + kMaxSlots];
};

template <class N>
class RowMemory {
 public:
  explicit RowMemory(RowStore<N>& store) : store_(store) {}
  N value(int source) { return store_.value[source]; }
  void save(int source, const N& x) { store_.value[source] = x; }
  Cotangent<N> cotangent(int source) { return store_.cotangent[source]; }
  void save(int source, const Cotangent<N>& c) { store_.cotangent[source] = c; }
  void record(int n, int, int which, const N& slope, const mask_t<N>& active) {
    store_.tape[2 * n + which] = {slope, active};
  }
  Cotangent<N> recorded(int n, int, int which) { return store_.tape[2 * n + which]; }

 private:
  RowStore<N>& store_;
};

}  // namespace CPU_CAPABILITY

}  // namespace fused_act

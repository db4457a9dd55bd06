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
// Registers that a loop of a light step computes side by side: one at a time would wait for the loop's own instructions.
constexpr int kSideBySide = 4;

// Where a thread's rows are, and how many elements they have now: a multiple of the registers that are side by side.
template <class C>
class RowPool {
 public:
  struct Buffer {
    alignas(64) C lane[kBlock];
    int users;
    Buffer* next;
  };

  int64_t lanes = kBlock;
  bool reduced = false;  // whether values are rounded to 16 bits

  static RowPool& of_thread() {
    thread_local RowPool pool;
    return pool;
  }
  Buffer* take() {
    Buffer* buffer = free_ ? free_ : new Buffer;
    if (free_) free_ = free_->next;
    buffer->users = 1;
    return buffer;
  }
  void give_back(Buffer* buffer) {
    buffer->next = free_;
    free_ = buffer;
  }
  ~RowPool() {
    while (free_) {
      Buffer* next = free_->next;
      delete free_;
      free_ = next;
    }
  }

 private:
  Buffer* free_ = nullptr;
};

// Its elements are shared and never changed, and may be those of a tensor. Or all of them are one value: then there is no pool.
template <class C>
class Row {
 public:
  using Pool = RowPool<C>;

  Row() = default;
  Row(const Row& other) : pool_(other.pool_), buffer_(other.buffer_), data_(other.data_), value_(other.value_) {
    if (buffer_) ++buffer_->users;
  }
  Row(Row&& other) noexcept { swap(other); }
  Row& operator=(Row other) noexcept {
    swap(other);
    return *this;
  }
  ~Row() {
    if (buffer_ && !--buffer_->users) pool_->give_back(buffer_);
  }

  static Row of(C value) {
    Row r;
    r.value_ = value;
    return r;
  }
  // What p points to stays while the row is used.
  static Row view(Pool& pool, const C* p) {
    Row r;
    r.pool_ = &pool;
    r.data_ = p;
    return r;
  }
  // With `out` the place to write the elements to.
  static Row fresh(Pool& pool, C*& out) {
    Row r;
    r.pool_ = &pool;
    r.buffer_ = pool.take();
    r.data_ = out = r.buffer_->lane;
    return r;
  }

  bool is_uniform() const { return !pool_; }
  C value() const { return value_; }
  const C* data() const { return data_; }
  Pool& pool() const { return pool_ ? *pool_ : Pool::of_thread(); }

 private:
  void swap(Row& other) {
    std::swap(pool_, other.pool_);
    std::swap(buffer_, other.buffer_);
    std::swap(data_, other.data_);
    std::swap(value_, other.value_);
  }

  Pool* pool_ = nullptr;
  typename Pool::Buffer* buffer_ = nullptr;
  const C* data_ = nullptr;
  C value_ = 0;
};

// The pool for what is computed from both.
template <class C>
RowPool<C>& pool_of(const Row<C>& a, const Row<C>& b) {
  return (a.is_uniform() ? b : a).pool();
}

// The registers of a row. Those of one value are one register.
template <class C>
class RowReader {
 public:
  using Vec = at::vec::Vectorized<C>;
  explicit RowReader(const Row<C>& row) : data_(row.is_uniform() ? same_ : row.data()), mask_(row.is_uniform() ? 0 : -1) {
    if (row.is_uniform()) Vec(row.value()).store(same_);
  }
  RowReader(const RowReader&) = delete;
  Vec operator[](int64_t j) const { return Vec::loadu(data_ + (j & mask_)); }

 private:
  alignas(64) C same_[Vec::size()];
  const C* data_;
  int64_t mask_;
};

// f(j) for the first element j of each register.
template <bool light, class C, class F>
inline void for_each_register(const RowPool<C>& pool, const F& f) {
  constexpr int64_t size = at::vec::Vectorized<C>::size();
  constexpr int side_by_side = light ? kSideBySide : 1;
  for (int64_t j = 0, lanes = pool.lanes; j < lanes; j += side_by_side * size) {
#pragma GCC unroll 4
    for (int n = 0; n < side_by_side; ++n) f(j + n * size);
  }
}

template <class C>
C first_lane(const at::vec::Vectorized<C>& v) {
  C lane[at::vec::Vectorized<C>::size()];
  v.store(lane);
  return lane[0];
}

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
    return each(a, b, [](const Vec& x, const Vec& y) { return x & y; });
  }
  static Mask either(const Mask& a, const Mask& b) {
    if (a.is_uniform()) return a.value() ? a : b;
    if (b.is_uniform()) return b.value() ? b : a;
    return each(a, b, [](const Vec& x, const Vec& y) { return x | y; });
  }
  static N select(const Mask& m, const N& a, const N& b) {
    if (m.is_uniform()) return m.value() ? a : b;
    const RowReader<C> x(a), y(b);
    const C* chosen = m.data();
    C* out;
    N r = N::fresh(m.pool(), out);
    for_each_register<true>(m.pool(), [&](int64_t j) {
      V::select(V::of_lanes(Vec::loadu(chosen + j)), x[j], y[j]).store(out + j);
    });
    return r;
  }

 private:
  template <class F>
  static N each(const N& a, const N& b, const F& f) {
    if (a.is_uniform() && b.is_uniform()) return N::of(first_lane(f(Vec(a.value()), Vec(b.value()))));
    auto& pool = pool_of(a, b);
    const RowReader<C> x(a), y(b);
    C* out;
    N r = N::fresh(pool, out);
    for_each_register<true>(pool, [&](int64_t j) { f(x[j], y[j]).store(out + j); });
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
    auto& pool = pool_of(x, operand);
    if constexpr (Step::heavy)
      if (pool.reduced) return apply_on<Step, typename Reduced<C>::Register>(pool, x, operand, s);
    return apply_on<Step, Vec>(pool, x, operand, s);
  }
  template <class Step>
  static __attribute__((noinline)) auto linearize(const N& x, const N& operand, const Scalar<C>* s) {
    constexpr int K = 1 + kTakes<Step, 'T'>;
    using A = Arithmetic<Vec>;
    const auto at = [&](const Vec& a, const Vec& b) { return Evaluator<Vec>::template linearize<Step>(a, b, s); };
    Dual<N, K> d;
    if (is_one_value<Step>(x, operand)) {
      const auto one = at(Vec(x.value()), Vec(operand.value()));
      d.value = N::of(first_lane(one.value));
      for (int k = 0; k < K; ++k) {
        d.tangent[k] = N::of(first_lane(one.tangent[k]));
        d.active[k] = N::of(!(first_lane(A::lanes(one.active[k])) == 0));  // set bits are NaN
      }
      return d;
    }
    auto& pool = pool_of(x, operand);
    C *value, *tangent[K], *active[K];
    typename A::Mask all[K];
    d.value = N::fresh(pool, value);
    for (int k = 0; k < K; ++k) {
      d.tangent[k] = N::fresh(pool, tangent[k]);
      d.active[k] = N::fresh(pool, active[k]);
      all[k] = A::mask(true);
    }
    read<Step>(x, operand, [&](const auto& px, const auto& po) {
      for_each_register<!Step::heavy>(pool, [&](int64_t j) {
        const auto one = at(px(j), po(j));
        one.value.store(value + j);
        for (int k = 0; k < K; ++k) {
          one.tangent[k].store(tangent[k] + j);
          A::lanes(one.active[k]).store(active[k] + j);
          all[k] = A::both(all[k], one.active[k]);
        }
      });
    });
    // What follows then has no mask to look at.
    for (int k = 0; k < K; ++k)
      if (A::lanes(all[k]).zero_mask() == 0) d.active[k] = N::of(1);
    return d;
  }

 private:
  template <class Step, class Register>
  static N apply_on(RowPool<C>& pool, const N& x, const N& operand, const Scalar<C>* s) {
    const auto at = [&](const Register& a, const Register& b) { return Step::template apply<Register>(a, &b, s); };
    if (is_one_value<Step>(x, operand)) return N::of(first_lane<C>(at(Vec(x.value()), Vec(operand.value()))));
    C* out;
    N r = N::fresh(pool, out);
    read<Step>(x, operand, [&](const auto& px, const auto& po) {
      for_each_register<!Step::heavy>(pool, [&](int64_t j) { at(px(j), po(j)).store(out + j); });
    });
    return r;
  }
  template <class Step>
  static bool is_one_value(const N& x, const N& operand) {
    return x.is_uniform() && (!kTakes<Step, 'T'> || operand.is_uniform());
  }
  // f with what gives the registers of both. A step without an operand has none to read.
  template <class Step, class F>
  static void read(const N& x, const N& operand, const F& f) {
    if constexpr (kTakes<Step, 'T'> > 0) {
      const RowReader<C> px(x), po(operand);
      f([&](int64_t j) { return px[j]; }, [&](int64_t j) { return po[j]; });
    } else {
      const C* px = x.data();
      f([&](int64_t j) { return Vec::loadu(px + j); }, [&](int64_t) { return Vec(C(0)); });
    }
  }
};

// With a tangent that tells codes.
template <class C>
struct Evaluator<Keyed<Row<C>>> {
  using N = Keyed<Row<C>>;
  using Vec = at::vec::Vectorized<C>;

  template <class Step>
  static __attribute__((noinline)) N apply(const N& x, const N& operand, const Scalar<C>* s) {
    const RowReader<C> px(x.value), dx(x.tangent), po(operand.value), dpo(operand.tangent);
    auto& pool = pool_of(x.value, operand.value);
    C *value, *tangent;
    const Row<C> v = Row<C>::fresh(pool, value), t = Row<C>::fresh(pool, tangent);
    for_each_register<!Step::heavy>(pool, [&](int64_t j) {
      const Keyed<Vec> o{po[j], dpo[j]}, d = Step::template apply<Keyed<Vec>>(Keyed<Vec>{px[j], dx[j]}, &o, s);
      d.value.store(value + j);
      d.tangent.store(tangent + j);
    });
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

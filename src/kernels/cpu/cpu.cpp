// The CPU kernels. Compiled once per SIMD level (CPU_CAPABILITY names it); the torch side picks one at run time. The modes
// of training run on SIMD registers; the others, forward mode and the second order, run element by element and are
// compiled for the DEFAULT level alone: on registers they would take two thirds of the compiler's time.
// Codes are of float32 arithmetic only.
//
// The outputs are walked in blocks that stay in the L1 cache. An input that is dense and already of the compute type
// is read in place, in whole blocks; any other is first gathered and converted into a buffer of its block. So one vector loop
// serves every dtype and every stride pattern. (There is one more for dense numbers of 16 bits, which it converts as it reads
// them: through buffers relu takes 1.5 times as long as eager.)
#include <ATen/cpu/vec/functional.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "../forms.h"
#include "cpu.h"
#include "rows.h"

namespace fused_act {

namespace {

// A walk along the elements of a tensor, in the order of the outputs' memory.
class Walk {
 public:
  void start(const Geometry& geometry, int row, int64_t begin) {
    sizes_ = geometry.sizes;
    strides_ = geometry.strides[row];
    inner_ = geometry.ndim - 1;
    offset_ = 0;
    for (int d = inner_; d >= 0; --d) {
      index_[d] = begin % sizes_[d];
      begin /= sizes_[d];
      offset_ += index_[d] * strides_[d];
    }
  }
  // Whether the next `count` elements are one, that at `offset`.
  bool stays(int64_t count, int64_t& offset) const {
    offset = offset_;
    return inner_ < 0 || (strides_[inner_] == 0 && index_[inner_] + count <= sizes_[inner_]);
  }
  // Calls f(offset, stride, length) for each run of the next `count` elements along the innermost dimension, with the
  // tensor's offset of its first element.
  template <class F>
  void next(int64_t count, F f) {
    if (inner_ < 0) return f(int64_t(0), int64_t(0), count);
    const int64_t stride = strides_[inner_], size = sizes_[inner_];
    while (count > 0) {
      const int64_t run = std::min(count, size - index_[inner_]);
      f(offset_, stride, run);
      count -= run;
      offset_ += run * stride;
      index_[inner_] += run;
      for (int d = inner_; index_[d] == sizes_[d] && d > 0; --d) {
        offset_ += strides_[d - 1] - index_[d] * strides_[d];
        index_[d] = 0;
        ++index_[d - 1];
      }
    }
  }

 private:
  const int64_t *sizes_, *strides_;
  int inner_;
  int64_t index_[kMaxDims], offset_;
};

// to[0, count) = from[0, count), converted.
template <class T, class C>
void convert(const T* from, C* to, int64_t count) {
  int64_t j = 0;
  if constexpr (at::vec::is_reduced_floating_point_v<T> && std::is_same_v<C, float>) {
    using Vec = at::vec::Vectorized<T>;
    for (; j + Vec::size() <= count; j += Vec::size()) {
      const auto [low, high] = at::vec::convert_to_float<T>(Vec::loadu(from + j));
      low.store(to + j);
      high.store(to + j + Vec::size() / 2);
    }
  } else if constexpr (at::vec::is_reduced_floating_point_v<C> && std::is_same_v<T, float>) {
    using Vec = at::vec::Vectorized<C>;
    using Half = at::vec::Vectorized<float>;
    for (; j + Vec::size() <= count; j += Vec::size())
      at::vec::convert_from_float<C>(Half::loadu(from + j), Half::loadu(from + j + Half::size())).store(to + j);
  } else if constexpr (std::is_same_v<T, C>) {
    // Not std::copy: for so many bytes that takes an instruction of the CPU that is slower than a loop.
    using Vec = at::vec::Vectorized<C>;
    for (; j + Vec::size() <= count; j += Vec::size()) Vec::loadu(from + j).store(to + j);
  }
  for (; j < count; ++j) to[j] = static_cast<C>(from[j]);
}

// A block is added to sums that many elements may share, in a fixed order.
template <class C>
void add_to(C* sums, Walk& walk, int64_t count, const C* from) {
  using Vec = at::vec::Vectorized<C>;
  walk.next(count, [&](int64_t offset, int64_t stride, int64_t run) {
    if (stride == 0) {  // a run for one sum: lanes first, then one sum of the lanes
      Vec lanes(C(0));
      int64_t j = 0;
      for (; j + Vec::size() <= run; j += Vec::size()) lanes = lanes + Vec::loadu(from + j);
      C sum[Vec::size()];
      lanes.store(sum);
      C total = C(0);
      for (; j < run; ++j) total += from[j];
      for (C lane : sum) total += lane;
      sums[offset] += total;
    } else {
      for (int64_t j = 0; j < run; ++j) sums[offset + j * stride] += from[j];
    }
    from += run;
  });
}

template <class F>
void with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f16:
      return f(static_cast<c10::Half*>(nullptr));
    case Dtype::bf16:
      return f(static_cast<c10::BFloat16*>(nullptr));
    case Dtype::f32:
      return f(static_cast<float*>(nullptr));
    case Dtype::f64:
      return f(static_cast<double*>(nullptr));
  }
}

bool has_16_bits(Dtype dtype) { return dtype == Dtype::f16 || dtype == Dtype::bf16; }

template <class C>
constexpr Dtype kDtype = std::is_same_v<C, float> ? Dtype::f32 : Dtype::f64;

// Elements of a block, or the one value that all of them are.
template <class C>
struct Block {
  const C* data;
  bool uniform;
};

// Elements of a block as the registers of any loop hold them: rows of float32 take 64 at a time with AVX-512.
int64_t padded(int64_t count) { return (count + 63) / 64 * 64; }
static_assert(64 % (at::vec::Vectorized<float>::size() * kSideBySide) == 0 && kBlock % 64 == 0);

// A number of 16 bits, of either type.
struct Narrow {
  uint16_t bits;
};

// One tensor as the vector loop sees it: a run of the compute type for the current block. A block that is not whole, the last
// of a range, is always a copy, with zeros behind it, so that the loop knows whole registers alone: with code for a rest, too,
// the compiler takes twice as long. (Not inlined, nor what follows: once in a block a call costs nothing, and 150 copies of it took
// the compiler 8 s of 66.)
template <class C>
class Input {
 public:
  __attribute__((noinline)) void open(const void* p, Dtype type, const Geometry& geometry, int row, int64_t begin,
                                      C value = C(0)) {
    data_ = p;
    dtype_ = type;
    if (!p) {
      is_ = value;
      return;
    }
    flat_ = geometry.flat(row);
    position_ = begin;
    if (!flat_) walk_.start(geometry, row, begin);
  }
  // The next `count` elements of a flat tensor, as they are; null for none.
  __attribute__((noinline)) const Narrow* next_narrow(int64_t count) {
    if (!data_) return nullptr;
    const Narrow* p = static_cast<const Narrow*>(data_) + position_;
    position_ += count;
    if (count == kBlock) return p;
    Narrow* const copy = reinterpret_cast<Narrow*>(buffer_);
    std::fill(std::copy(p, p + count, copy), copy + padded(count), Narrow{0});
    return copy;
  }
  // The next `count` elements. Where they are one value and `spread`, that is written out.
  template <bool spread>
  __attribute__((noinline)) Block<C> next(int64_t count) {
    if (!data_) return repeat<spread>(is_);
    Block<C> block{buffer_, false};
    std::fill(buffer_ + count, buffer_ + padded(count), C(0));
    with_type(dtype_, [&](auto* type) {
      using T = std::decay_t<decltype(*type)>;
      const T* from = static_cast<const T*>(data_);
      if (flat_) {
        from += position_;
        position_ += count;
        if (std::is_same_v<T, C> && count == kBlock) {
          block.data = reinterpret_cast<const C*>(from);
        } else {
          convert(from, buffer_, count);
        }
        return;
      }
      int64_t offset;
      if (walk_.stays(count, offset)) {
        walk_.next(count, [](int64_t, int64_t, int64_t) {});
        block = repeat<spread>(static_cast<C>(from[offset]));
        return;
      }
      repeated_ = false;
      C* to = buffer_;
      walk_.next(count, [&](int64_t offset, int64_t stride, int64_t run) {
        if (stride == 1) {
          convert(from + offset, to, run);
        } else if (stride == 0) {
          std::fill(to, to + run, static_cast<C>(from[offset]));
        } else {
          for (int64_t j = 0; j < run; ++j) to[j] = static_cast<C>(from[offset + j * stride]);
        }
        to += run;
      });
    });
    return block;
  }

 private:
  template <bool spread>
  Block<C> repeat(C value) {
    if constexpr (spread) {
      if (!repeated_ || std::memcmp(&value, buffer_, sizeof(C)) != 0) std::fill(buffer_, buffer_ + kBlock, value);
      repeated_ = true;
      return {buffer_, false};
    } else {
      is_ = value;
      return {&is_, true};
    }
  }

  const void* data_ = nullptr;
  Dtype dtype_ = kDtype<C>;
  bool flat_ = false, repeated_ = false;
  int64_t position_ = 0;
  Walk walk_;
  C is_ = C(0);
  alignas(64) C buffer_[kBlock];
};

// A result, or with `sums` a gradient whose elements are added to those.
template <class C>
class Output {
 public:
  __attribute__((noinline)) void open(void* p, Dtype type, const Geometry& geometry, int row, int64_t begin,
                                      void* sums = nullptr) {
    data_ = p;
    dtype_ = type;
    sums_ = static_cast<C*>(sums);
    flat_ = p && !sums && geometry.flat(row);
    position_ = begin;
    if (p && !flat_) walk_.start(geometry, row, begin);
  }
  bool wanted() const { return data_; }
  // Where the next `count` elements, and what is computed beside them, are to be written.
  __attribute__((noinline)) C* next(int64_t count) {
    return flat_ && dtype_ == kDtype<C> && count == kBlock ? static_cast<C*>(data_) + position_ : buffer_;
  }
  // The same for a flat tensor of numbers as they are.
  __attribute__((noinline)) Narrow* next_narrow(int64_t count) {
    Narrow* const p = static_cast<Narrow*>(data_) + position_;
    return count == kBlock ? p : reinterpret_cast<Narrow*>(buffer_);
  }
  void close_narrow(const Narrow* from, int64_t count) {
    Narrow* const to = static_cast<Narrow*>(data_) + position_;
    position_ += count;
    if (from != to) std::copy(from, from + count, to);
  }
  // Takes the `count` elements, which are there or elsewhere.
  __attribute__((noinline)) void close(const C* from, int64_t count) {
    if (!data_) return;
    if (sums_) return add_to(sums_, walk_, count, from);
    with_type(dtype_, [&](auto* type) {
      auto* to = static_cast<decltype(type)>(data_);
      if (flat_) {
        to += position_;
        position_ += count;
        if (static_cast<const void*>(from) != to) convert(from, to, count);
        return;
      }
      walk_.next(count, [&](int64_t offset, int64_t stride, int64_t run) {
        if (stride == 1) {
          convert(from, to + offset, run);
        } else {
          for (int64_t j = 0; j < run; ++j) to[offset + j * stride] = static_cast<std::decay_t<decltype(*to)>>(from[j]);
        }
        from += run;
      });
    });
  }

 private:
  void* data_ = nullptr;
  Dtype dtype_ = kDtype<C>;
  C* sums_ = nullptr;
  bool flat_ = false;
  int64_t position_ = 0;
  Walk walk_;
  alignas(64) C buffer_[kBlock];
};

// Numbers that a mode is evaluated on: how many elements they are, and how those get in and out of memory.
template <class C, class Register = at::vec::Vectorized<C>>
struct Registers {
  using N = Register;
  static constexpr int64_t kLanes = N::size();
  static constexpr bool kRows = false;
  static N load(const Block<C>& block, int64_t j) { return {N::loadu(block.data + j)}; }
  static void store(const N& n, C* p) { n.store(p); }
  struct Memory {
    template <class M>
    LocalMemory<M> memory() const {
      return {};
    }
  };
};
// Two registers of numbers of 16 bits. Their type is looked at in each step, which a CPU foresees.
using Pair = std::array<at::vec::Vectorized<float>, 2>;
template <class T>
Pair load_pair_of(const Narrow* p) {
  const auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(p));
  return {low, high};
}
inline Pair load_pair(const Narrow* p, Dtype dtype) {
  return dtype == Dtype::bf16 ? load_pair_of<c10::BFloat16>(p) : load_pair_of<c10::Half>(p);
}
inline void store_pair(const Pair& n, Narrow* p, Dtype dtype) {
  if (dtype == Dtype::bf16) {
    at::vec::convert_from_float<c10::BFloat16>(n[0], n[1]).store(p);
  } else {
    at::vec::convert_from_float<c10::Half>(n[0], n[1]).store(p);
  }
}
template <class C>
struct Elements {
  using N = C;
  static constexpr int64_t kLanes = 1;
  static constexpr bool kRows = false;
  static N load(const Block<C>& block, int64_t j) { return block.data[j]; }
  static void store(N n, C* p) { *p = n; }
  using Memory = typename Registers<C>::Memory;
};
// Of a block.
template <class C>
struct Rows {
  using N = Row<C>;
  static constexpr int64_t kLanes = kBlock;
  static constexpr bool kRows = true;
  static N load(const Block<C>& block, int64_t) {
    return block.uniform ? N::of(*block.data) : N::view(RowPool<C>::of_thread(), block.data);
  }
  // Where the elements are: `p` if they were one value.
  static const C* place(const N& n, C* p, int64_t count) {
    if (!n.is_uniform()) return n.data();
    std::fill(p, p + count, n.value());
    return p;
  }
  class Memory {
   public:
    template <class M>
    RowMemory<M> memory() const {
      return RowMemory<M>(std::get<RowStore<M>>(stores_));
    }

   private:
    mutable std::tuple<RowStore<N>, RowStore<Keyed<N>>> stores_;
  };
};
template <class Op, Mode mode, class C, class Register>
using Numbers = std::conditional_t<has_direction(mode), Elements<C>,
                                   std::conditional_t<Op::kDynamic, Rows<C>, Registers<C, Register>>>;

// ---- codes ------------------------------------------------------------------------------------------------------

// Bit j: whether lane j of both is the same. And the reverse: lanes whose bits are all set where bit j is.
#if defined(CPU_CAPABILITY_AVX512)
uint32_t equal_bits(at::vec::Vectorized<float> a, at::vec::Vectorized<float> b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
mask_t<at::vec::Vectorized<float>> lanes_of(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }
#elif defined(CPU_CAPABILITY_AVX2)
uint32_t equal_bits(at::vec::Vectorized<float> a, at::vec::Vectorized<float> b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
at::vec::Vectorized<float> lanes_of(uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lane), lane));
}
#else
uint32_t equal_bits(const at::vec::Vectorized<float>& a, const at::vec::Vectorized<float>& b) {
  constexpr int n = at::vec::Vectorized<float>::size();
  float one[n], other[n];
  a.store(one);
  b.store(other);
  uint32_t bits = 0;
  for (int j = 0; j < n; ++j) bits |= uint32_t(one[j] == other[j]) << j;
  return bits;
}
at::vec::Vectorized<float> lanes_of(uint32_t bits) {
  constexpr int n = at::vec::Vectorized<float>::size();
  uint32_t lane[n];
  for (int j = 0; j < n; ++j) lane[j] = -(bits >> j & 1);
  return at::vec::Vectorized<float>::loadu(lane);
}
#endif

// The codes of a block, which begins with a word.
class CodeWriter {
 public:
  using Vec = at::vec::Vectorized<float>;
  explicit CodeWriter(const Request& r) : r_(r), two_(r.table.bits() == 2) {
    for (int c = 0; c < kMaxCodes; ++c) key_[c] = Vec(static_cast<float>(r.table.key[c]));
  }
  // The codes of a register's elements, from j on in the block, told by f_x.
  void write(int64_t j, const Vec& slope) {
    uint32_t low = equal_bits(slope, key_[1]), high = 0;
    if (two_) {
      const uint32_t third = equal_bits(slope, key_[3]);
      low |= third;
      high = equal_bits(slope, key_[2]) | third;
    }
    low_[j / kCodeWord] |= low << (j % kCodeWord);
    high_[j / kCodeWord] |= high << (j % kCodeWord);
  }
  // Beyond the last element they are 0.
  __attribute__((noinline)) void close(int64_t begin, int64_t count) {
    const int64_t planes = 1 + two_, words = code_words(r_.numel), first = begin / kCodeWord;
    const int64_t written = (count + kCodeWord - 1) / kCodeWord;
    const uint32_t valid = count % kCodeWord ? (1u << count % kCodeWord) - 1 : ~0u;
    for (int64_t plane = 0; plane < planes; ++plane) {
      uint32_t *from = plane ? high_ : low_, *to = r_.codes + plane * words + first;
      from[written - 1] &= valid;
      std::copy(from, from + written, to);
      std::fill(from, from + kBlock / kCodeWord, 0);
      if (begin + count == r_.numel) std::fill(to + written, to + words - first, 0);
    }
  }

 private:
  const Request& r_;
  const bool two_;
  Vec key_[kMaxCodes];
  uint32_t low_[kBlock / kCodeWord] = {}, high_[kBlock / kCodeWord] = {};
};

// Those of the elements of N from element i on, none of which is in another word.
template <class N, bool two>
CodeBits<N> read_codes(const Request& r, int64_t i) {
  const uint32_t* word = r.codes + i / kCodeWord;
  const uint32_t low = *word >> (i % kCodeWord), high = two ? word[code_words(r.numel)] >> (i % kCodeWord) : 0;
  if constexpr (std::is_same_v<N, float>) {
    return {(low & 1) != 0, (high & 1) != 0};
  } else {
    return {lanes_of(low), lanes_of(high)};
  }
}

// What a chain asks for at element j of the block.
template <class N, class Op, class Memory, class Load, class Gradient>
struct BlockIo {
  const Request& request;
  const Memory& kept;
  const int64_t element;
  const Load& load;  // of operand k, and of its direction
  const Gradient& take;

  N operand(int k) const { return load(k, std::false_type()); }
  N direction(int k) const { return load(k, std::true_type()); }
  bool moves(int k) const { return request.v_present[k]; }
  void gradient(int k, const N& value) { take(k, value); }
  CodeBits<N> code() const { return read_codes<N, Op::kTwo>(request, element); }
  template <class M>
  auto memory() const {
    return kept.template memory<M>();
  }
};

// `Stored` is what x, g and the result are read and written as: Block<C>, or Narrow where all of them are flat.
template <class Op, Mode mode, class C, class Stored = Block<C>, class Register = at::vec::Vectorized<C>>
void run(const Op& op, const Request& r, const Geometry& geometry, const CpuRange& range) {
  using Number = Numbers<Op, mode, C, Register>;
  using N = typename Number::N;
  constexpr int O = Op::kOperands, kSlots = O > 0 ? O : 1;
  constexpr bool narrow = std::is_same_v<Stored, Narrow>;
  constexpr int64_t kLanes = Number::kLanes;
  constexpr bool gradients = has_operand_gradients(mode), directions = has_direction(mode), spread = !Number::kRows;
  Input<C> x, g, u, operand[kSlots], v[directions ? kSlots : 1];
  Output<C> full[2], gradient[kSlots];
  x.open(r.x.data, r.dtype, geometry, kX, range.begin);
  if constexpr (gradients) g.open(r.g.data, r.dtype, geometry, kG, range.begin);
  if constexpr (directions) u.open(r.u.data, r.dtype, geometry, kU, range.begin);
  for (int n = 0; n < full_outputs(mode); ++n) full[n].open(r.out[n].data, r.dtype, geometry, kOut + n, range.begin);
  const int operands = kDecodes<Op> || kExact<Op> ? O : r.operands;
  for (int k = 0; k < operands; ++k) {
    int given = k;
    if constexpr (kExact<Op>) given = op.operand_from(k);
    if (given < 0) continue;  // the form has none
    const auto& from = r.operand[given];
    operand[k].open(from.data, from.dtype, geometry, kOperand + given, range.begin, static_cast<C>(from.value));
    if constexpr (directions)
      v[k].open(r.v[k].data, r.v[k].dtype, geometry, kV + k, range.begin, static_cast<C>(r.v[k].value));
    const auto& to = r.operand_gradient[given];
    if constexpr (gradients)
      gradient[k].open(to.data, to.dtype, geometry, kGradient + given, range.begin, range.sums[given]);
  }
  Scalar<C> scalars[Op::kScalars > 0 ? Op::kScalars : 1];
  for (int s = 0; s < Op::kScalars; ++s) {
    int given = s;
    if constexpr (kExact<Op>) given = op.scalar_from(s);
    if (given >= 0) scalars[s] = Scalar<C>::of(static_cast<C>(r.scalars[given]));
  }
  std::conditional_t<mode == Mode::coded, CodeWriter, const Request&> codes(r);
  constexpr int64_t kRegister = at::vec::Vectorized<C>::size() * (Number::kRows ? kSideBySide : 1);
  auto& pool = RowPool<C>::of_thread();
  pool.reduced = mode == Mode::forward && has_16_bits(r.dtype);

  typename Number::Memory memory;
  for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, range.end - begin);
    pool.lanes = (count + kRegister - 1) / kRegister * kRegister;
    const Block<C> nothing{nullptr, false};
    Block<C> px = nothing, pg = nothing, pu = nothing, po[kSlots], pv[kSlots];
    C *pfull[2] = {}, *pgradient[kSlots] = {};
    const Narrow *nx = nullptr, *ng = nullptr;
    Narrow* nfull = nullptr;
    if constexpr (narrow) {
      nx = x.next_narrow(count);
      if constexpr (gradients) ng = g.next_narrow(count);
      nfull = full[0].next_narrow(count);
    } else {
      px = x.template next<spread>(count);
      if constexpr (gradients) pg = g.template next<spread>(count);
      for (int n = 0; n < full_outputs(mode); ++n) pfull[n] = full[n].next(count);
    }
    if constexpr (directions) pu = u.template next<spread>(count);
    for (int k = 0; k < operands; ++k) {
      po[k] = operand[k].template next<spread>(count);
      if constexpr (directions) pv[k] = v[k].template next<spread>(count);
      if constexpr (gradients) pgradient[k] = gradient[k].next(count);
    }

    const auto put = [&](const N& n, Output<C>& to, C* p, int64_t j) {
      if constexpr (Number::kRows) {
        if (to.wanted()) to.close(Number::place(n, p, count), count);
      } else {
        Number::store(n, p + j);
      }
    };
    const auto results = [&](const N& x, const N& g, int64_t j) FUSED_ACT_LAMBDA {
      const auto load = [&](int k, auto direction) { return Number::load(direction ? pv[k] : po[k], j); };
      const auto take = [&](int k, const N& value) { put(value, gradient[k], pgradient[k], j); };
      BlockIo<N, Op, typename Number::Memory, decltype(load), decltype(take)> io{r, memory, begin + j, load, take};
      const N u = directions ? Number::load(pu, j) : constant<N>(C(0));
      const Outputs<N> out = evaluate<mode>(op, scalars, x, g, u, r.u.data != nullptr, io);
      if constexpr (mode == Mode::coded && Number::kRows) {
        const RowReader<C> slope(out.full[1]);
        for_each_register<true>(pool, [&](int64_t i) { codes.write(i, slope[i]); });
      } else if constexpr (mode == Mode::coded) {
        codes.write(j, out.full[1]);
      }
      return out;
    };
    const N zero = constant<N>(C(0));
    for (int64_t j = 0; j < count; j += narrow ? 2 * kLanes : kLanes) {
      if constexpr (narrow) {
        Pair x{zero, zero}, g{zero, zero};
        if (nx) x = load_pair(nx + j, r.dtype);
        if (ng) g = load_pair(ng + j, r.dtype);
        const N low = results(x[0], g[0], j).full[0], high = results(x[1], g[1], j + kLanes).full[0];
        store_pair({low, high}, nfull + j, r.dtype);
      } else {
        const Outputs<N> out = results(Number::load(px, j), gradients ? Number::load(pg, j) : zero, j);
        for (int n = 0; n < full_outputs(mode); ++n) put(out.full[n], full[n], pfull[n], j);
      }
    }

    if constexpr (mode == Mode::coded) codes.close(begin, count);
    if constexpr (!Number::kRows) {
      for (int n = 0; n < full_outputs(mode); ++n) narrow ? full[n].close_narrow(nfull, count) : full[n].close(pfull[n], count);
      for (int k = 0; gradients && k < operands; ++k) gradient[k].close(pgradient[k], count);
    }
  }
}

template <class C>
void run_program(const Request& r, const Geometry& geometry, const CpuRange& range) {
  Program program = r.program;
  program.assign_tape();
  switch (r.mode) {
    case Mode::forward:
      return run<Program, Mode::forward, C>(program, r, geometry, range);
    case Mode::backward:
      return run<Program, Mode::backward, C>(program, r, geometry, range);
#if defined(CPU_CAPABILITY_DEFAULT)
    case Mode::jvp:  // the first result of double backward
    case Mode::double_backward:
      return run<Program, Mode::double_backward, C>(program, r, geometry, range);
#endif
    default:  // not reached
      return;
  }
}

// An operator that is not a Program, for numbers of 16 bits, too. (Not at the DEFAULT level, whose registers are emulated.)
template <class Op, Mode mode>
void run_chain(const Op& op, const Request& r, const Geometry& geometry, const CpuRange& range) {
#if !defined(CPU_CAPABILITY_DEFAULT)
  if (has_16_bits(r.dtype)) {
    using Register = std::conditional_t<Op::kHeavy && mode == Mode::forward, ReducedRegister, at::vec::Vectorized<float>>;
    // What is not there has no strides.
    if (r.out[0].data && geometry.flat(kOut) && (!r.x.data || geometry.flat(kX)) && (!r.g.data || geometry.flat(kG)))
      return run<Op, mode, float, Narrow, Register>(op, r, geometry, range);
    return run<Op, mode, float, Block<float>, Register>(op, r, geometry, range);
  }
#endif
  run<Op, mode, float>(op, r, geometry, range);
}

#if !defined(CPU_CAPABILITY_DEFAULT)
// What is compiled for all of a Program (forms.h): without rows, which write what each step gives to the L1 cache.
template <class Form>
bool run_if_form(const Request& r, const Geometry& geometry, const CpuRange& range) {
  constexpr Mode training = Form::kCoded ? Mode::coded : Mode::backward;
  Form form;
  if ((r.mode != Mode::forward && r.mode != training) || !form.matches(r.program)) return false;
  r.mode == training ? run_chain<Form, training>(form, r, geometry, range)
                     : run_chain<Form, Mode::forward>(form, r, geometry, range);
  return true;
}
template <class... Form>
bool run_first_form(Types<Form...>, const Request& r, const Geometry& geometry, const CpuRange& range) {
  return (run_if_form<Form>(r, geometry, range) || ...);
}
template <class Step>
bool run_form_of(const Request& r, const Geometry& geometry, const CpuRange& range) {
  if constexpr (kHasFrame<Step, false>) return run_first_form(Forms<Step>{}, r, geometry, range);
  return false;
}
bool run_form(const Request& r, const Geometry& geometry, const CpuRange& range) {
#define FUSED_ACT_ENTRY(STEP) &run_form_of<STEP>,
  static constexpr bool (*functions[])(const Request&, const Geometry&, const CpuRange&) = {
      FUSED_ACT_STEPS(FUSED_ACT_ENTRY)};
#undef FUSED_ACT_ENTRY
  Frame frame;
  Code activation;
  return match_frame(r.program, frame, activation) && functions[int(activation)](r, geometry, range);
}
#endif

// Forward, backward and forward with codes of what is compiled for all of a chain, in the compute type float32; all else runs
// as a program.
template <class Op>
void run_operator(const Request& r, const Geometry& geometry, const CpuRange& range) {
  if (r.dtype == Dtype::f64) return run_program<double>(r, geometry, range);
  if constexpr (!Op::kDynamic) {
    if (r.mode == Mode::forward) return run_chain<Op, Mode::forward>(Op{}, r, geometry, range);
    if (r.mode == Mode::backward) return run_chain<Op, Mode::backward>(Op{}, r, geometry, range);
    if constexpr (!Op::kHeavy)
      if (r.mode == Mode::coded) return run_chain<Op, Mode::coded>(Op{}, r, geometry, range);
  }
#if !defined(CPU_CAPABILITY_DEFAULT)
  if (run_form(r, geometry, range)) return;
#endif
  if (r.mode == Mode::coded) return run<LightProgram, Mode::coded, float>(LightProgram{r.program}, r, geometry, range);
  run_program<float>(r, geometry, range);
}

template <int operands, bool two>
void run_decoder(const Request& r, const Geometry& geometry, const CpuRange& range) {
  using Op = Decoder<operands, two>;
  const Op op = Op::of(r.table, r.scalars);
  if (r.mode == Mode::coded_backward) return run_chain<Op, Mode::backward>(op, r, geometry, range);
#if defined(CPU_CAPABILITY_DEFAULT)
  run<Op, Mode::jvp, float>(op, r, geometry, range);
#endif
}

template <bool two>
void run_decoder(const Request& r, const Geometry& geometry, const CpuRange& range) {
  if (r.operands == 0) return run_decoder<0, two>(r, geometry, range);
  if (r.operands == 1) return run_decoder<1, two>(r, geometry, range);
  run_decoder<kMaxOperands, two>(r, geometry, range);
}

}  // namespace

#define FUSED_ACT_PASTE(a, b) a##b
#define FUSED_ACT_NAME(capability) FUSED_ACT_PASTE(run_cpu_, capability)
void FUSED_ACT_NAME(CPU_CAPABILITY)(int op, const Request& r, const Geometry& geometry, const CpuRange& range) {
#define FUSED_ACT_ENTRY(NAME, ...) &run_operator<ops::NAME::Compiled>,
  static constexpr void (*functions[])(const Request&, const Geometry&, const CpuRange&) = {
      FUSED_ACT_OPERATORS(FUSED_ACT_ENTRY)};
#undef FUSED_ACT_ENTRY
#if !defined(CPU_CAPABILITY_DEFAULT)
  if (has_direction(r.mode)) return run_cpu_DEFAULT(op, r, geometry, range);
#endif
  if (reads_codes(r.mode))
    return r.table.bits() == 2 ? run_decoder<true>(r, geometry, range) : run_decoder<false>(r, geometry, range);
  functions[op](r, geometry, range);
}

}  // namespace fused_act

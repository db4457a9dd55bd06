// The CPU kernels. Compiled once per SIMD level (CPU_CAPABILITY names it); the torch side picks one at run time. The modes
// of training run on SIMD registers; the others, forward mode and the second order, run element by element and are
// compiled for the DEFAULT level alone: on registers they would take two thirds of the compiler's time.
// Codes are of float32 arithmetic only.
//
// The outputs are walked in blocks that stay in the L1 cache. An input that is dense and already of the compute type
// is read in place; any other is first gathered and converted into a buffer of its block. So one vector loop serves
// every dtype and every stride pattern, and the tail of a block goes through the same code as the rest of it.
#include <ATen/cpu/vec/functional.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <tuple>

#include "../operators.h"
#include "cpu.h"
#include "rows.h"

namespace fused_act {

namespace {

// Walks the linear indices [begin, begin + count) of the iteration space: calls f(offset, stride, length) for each run
// of them along the innermost dimension, with the tensor's offset of its first element.
template <class F>
void for_each_run(const Geometry& geometry, const int64_t* strides, int64_t begin, int64_t count, F f) {
  const int inner = geometry.ndim - 1;
  if (inner < 0) return f(int64_t(0), int64_t(0), count);
  int64_t index[kMaxDims], rest = begin, offset = 0;
  for (int d = inner; d >= 0; --d) {
    index[d] = rest % geometry.sizes[d];
    rest /= geometry.sizes[d];
    offset += index[d] * strides[d];
  }
  while (true) {
    const int64_t run = std::min(count, geometry.sizes[inner] - index[inner]);
    f(offset, strides[inner], run);
    count -= run;
    if (count == 0) return;
    offset += run * strides[inner];
    index[inner] += run;
    for (int d = inner; index[d] == geometry.sizes[d] && d > 0; --d) {
      offset += strides[d - 1] - index[d] * strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

// dst[0, count) = src at the linear indices [begin, begin + count), converted.
template <class T, class C>
void gather(const T* src, const Geometry& geometry, const int64_t* strides, int64_t begin, int64_t count, C* dst) {
  for_each_run(geometry, strides, begin, count, [&](int64_t offset, int64_t stride, int64_t run) {
    const T* from = src + offset;
    if (stride == 1) {
      at::vec::convert(from, dst, run);
    } else if (stride == 0) {
      std::fill(dst, dst + run, static_cast<C>(*from));
    } else {
      for (int64_t j = 0; j < run; ++j) dst[j] = static_cast<C>(from[j * stride]);
    }
    dst += run;
  });
}

// The reverse: a block goes to the elements of a tensor.
template <class T, class C>
void scatter(T* dst, const Geometry& geometry, const int64_t* strides, int64_t begin, int64_t count, const C* src) {
  for_each_run(geometry, strides, begin, count, [&](int64_t offset, int64_t stride, int64_t run) {
    for (int64_t j = 0; j < run; ++j) dst[offset + j * stride] = static_cast<T>(src[j]);
    src += run;
  });
}

// A block is added to sums that many elements may share, in a fixed order.
template <class C>
void add_to(C* sums, const Geometry& geometry, const int64_t* strides, int64_t begin, int64_t count, const C* src) {
  using Vec = at::vec::Vectorized<C>;
  for_each_run(geometry, strides, begin, count, [&](int64_t offset, int64_t stride, int64_t run) {
    if (stride == 0) {  // a run for one sum: lanes first, then one sum of the lanes
      Vec lanes(C(0));
      int64_t j = 0;
      for (; j + Vec::size() <= run; j += Vec::size()) lanes = lanes + Vec::loadu(src + j);
      C sum[Vec::size()];
      lanes.store(sum);
      C total = C(0);
      for (; j < run; ++j) total += src[j];
      for (C lane : sum) total += lane;
      sums[offset] += total;
    } else {
      for (int64_t j = 0; j < run; ++j) sums[offset + j * stride] += src[j];
    }
    src += run;
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

template <class C>
constexpr Dtype kDtype = std::is_same_v<C, float> ? Dtype::f32 : Dtype::f64;

// Asks for a block ahead of its use: in a loop of blocks the CPU does not see the next one coming. (Beyond the end of a
// tensor, too, which does nothing.)
template <int write, class C>
void fetch_ahead(const C* p) {
  for (int64_t j = 0; j < kBlock; j += 64 / int64_t(sizeof(C))) __builtin_prefetch(p + j, write);
}

// One tensor as the vector loop sees it: a run of the compute type for the current block.
template <class C>
struct Input {
  const void* data = nullptr;
  Dtype dtype = kDtype<C>;
  const int64_t* strides = nullptr;
  bool direct = false;
  alignas(64) C buffer[kBlock];

  void open(const void* p, Dtype type, const Geometry& geometry, int row, C value = C(0)) {
    data = p;
    dtype = type;
    strides = geometry.strides[row];
    direct = p && type == kDtype<C> && geometry.flat(row);
    if (!p) std::fill(buffer, buffer + kBlock, value);
  }
  const C* block(const Geometry& geometry, int64_t begin, int64_t count) {
    if (!data) return buffer;
    if (direct) {
      const C* from = static_cast<const C*>(data) + begin;
      fetch_ahead<0>(from + count);
      return from;
    }
    with_type(dtype, [&](auto* type) {
      gather(static_cast<decltype(type)>(const_cast<void*>(data)), geometry, strides, begin, count, buffer);
    });
    return buffer;
  }
};

// A result of the shape of x.
template <class C>
struct Output {
  void* data = nullptr;
  Dtype dtype = kDtype<C>;
  const int64_t* strides = nullptr;
  bool flat = false;
  alignas(64) C buffer[kBlock];

  void open(void* p, Dtype type, const Geometry& geometry, int row) {
    data = p;
    dtype = type;
    strides = geometry.strides[row];
    flat = p && geometry.flat(row);
  }
  C* block(int64_t begin) {
    if (!flat || dtype != kDtype<C>) return buffer;
    C* to = static_cast<C*>(data) + begin;
    fetch_ahead<1>(to);
    return to;
  }
  void close(const Geometry& geometry, int64_t begin, int64_t count) {
    if (!data || (flat && dtype == kDtype<C>)) return;
    with_type(dtype, [&](auto* type) {
      auto* to = static_cast<decltype(type)>(data);
      flat ? at::vec::convert(buffer, to + begin, count) : scatter(to, geometry, strides, begin, count, buffer);
    });
  }
};

// Numbers that a mode is evaluated on: how many elements they are, and how those get in and out of memory.
template <class C>
struct Registers {
  using N = at::vec::Vectorized<C>;
  static constexpr int64_t kLanes = N::size();
  static N load(const C* p) { return N::loadu(p); }
  static N load(const C* p, int count) { return N::loadu(p, count); }
  static void store(const N& n, C* p) { n.store(p); }
  static void store(const N& n, C* p, int count) { n.store(p, count); }
  struct Memory {
    template <class M>
    LocalMemory<M> memory() const {
      return {};
    }
  };
};
template <class C>
struct Elements {
  using N = C;
  static constexpr int64_t kLanes = 1;
  static N load(const C* p) { return *p; }
  static N load(const C* p, int) { return *p; }
  static void store(N n, C* p) { *p = n; }
  static void store(N n, C* p, int) { *p = n; }
  using Memory = typename Registers<C>::Memory;
};
// Of a block, whose rest is filled up to a whole register.
template <class C>
struct Rows {
  using N = Row<C>;
  static constexpr int64_t kLanes = kBlock;
  static N load(const C* p) { return N::view(p); }
  static N load(const C* p, int count) {
    if (count == row_lanes) return N::view(p);
    C* out;
    N n = N::fresh(out);
    std::copy(p, p + count, out);
    std::fill(out + count, out + row_lanes, C(0));
    return n;
  }
  static void store(const N& n, C* p) { store(n, p, kBlock); }
  static void store(const N& n, C* p, int count) {
    if (n.is_uniform()) return std::fill(p, p + count, n.value());
    // Not std::copy: for so many bytes that takes an instruction of the CPU that is slower than a loop.
    using Vec = at::vec::Vectorized<C>;
    int j = 0;
    for (; j + Vec::size() <= count; j += Vec::size()) Vec::loadu(n.data() + j).store(p + j);
    for (; j < count; ++j) p[j] = n.data()[j];
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
template <class Op, Mode mode, class C>
using Numbers = std::conditional_t<has_direction(mode), Elements<C>, std::conditional_t<Op::kDynamic, Rows<C>, Registers<C>>>;

// What a chain asks for at element j of the block.
template <class N, class C, class Memory, class Load, class Store>
struct BlockIo {
  const Memory& kept;
  const C* codes;
  const C* const* operands;
  const C* const* directions;
  C* const* gradients;
  const bool* present;
  const int64_t j;
  const Load& load;
  const Store& store;

  N operand(int k) const { return load(operands[k] + j); }
  N direction(int k) const { return load(directions[k] + j); }
  bool moves(int k) const { return present[k]; }
  void gradient(int k, const N& value) { store(value, gradients[k] + j); }
  CodeBits<N> code() const {
    using A = Arithmetic<N>;
    const N c = load(codes + j);
    const auto is = [&](int n) { return A::equal(c, constant<N>(C(n))); };
    return {A::either(is(1), is(3)), A::either(is(2), is(3))};
  }
  template <class M>
  auto memory() const {
    return kept.template memory<M>();
  }
};

// ---- codes ------------------------------------------------------------------------------------------------------

// Bit j: whether lane j of a is what lane j of b is.
#if defined(CPU_CAPABILITY_AVX512)
uint32_t equal_bits(const float* a, at::vec::Vectorized<float> b) {
  return _mm512_cmp_ps_mask(at::vec::Vectorized<float>::loadu(a), b, _CMP_EQ_OQ);
}
#elif defined(CPU_CAPABILITY_AVX2)
uint32_t equal_bits(const float* a, at::vec::Vectorized<float> b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(at::vec::Vectorized<float>::loadu(a), b, _CMP_EQ_OQ));
}
#else
uint32_t equal_bits(const float* a, const at::vec::Vectorized<float>& b) {
  constexpr int n = at::vec::Vectorized<float>::size();
  float other[n];
  b.store(other);
  uint32_t bits = 0;
  for (int j = 0; j < n; ++j) bits |= uint32_t(a[j] == other[j]) << j;
  return bits;
}
#endif

// The codes of a block, told by f_x. A block begins with a word. What is beyond the last element is 0.
void write_codes(const Request& r, int64_t begin, int64_t count, const float* slope) {
  using Vec = at::vec::Vectorized<float>;
  const Vec key[] = {Vec(0), Vec(float(r.table.key[1])), Vec(float(r.table.key[2])), Vec(float(r.table.key[3]))};
  const bool high = r.table.bits() == 2;
  const int64_t words = code_words(r.numel);
  for (int64_t w = begin / kCodeWord; w * kCodeWord < begin + count; ++w) {
    const float* from = slope + (w * kCodeWord - begin);
    uint32_t bits[kMaxCodes] = {};
    for (int j = 0; j < kCodeWord; j += int(Vec::size()))
      for (int c = 1; c < (high ? kMaxCodes : 2); ++c) bits[c] |= equal_bits(from + j, key[c]) << j;
    const int64_t rest = begin + count - w * kCodeWord;
    const uint32_t valid = rest < kCodeWord ? (1u << rest) - 1 : ~0u;
    r.codes[w] = (bits[1] | bits[3]) & valid;
    if (high) r.codes[words + w] = (bits[2] | bits[3]) & valid;
  }
  if (begin + count < r.numel) return;
  const int64_t written = (r.numel + kCodeWord - 1) / kCodeWord;
  for (int plane = 0; plane <= int(high); ++plane)
    std::fill(r.codes + plane * words + written, r.codes + (plane + 1) * words, 0);
}

// The codes of a block as numbers.
void read_codes(const Request& r, int64_t begin, int64_t count, float* code) {
  const bool high = r.table.bits() == 2;
  const int64_t words = code_words(r.numel);
  for (int64_t w = begin / kCodeWord; w * kCodeWord < begin + count; ++w) {
    float* to = code + (w * kCodeWord - begin);
    const uint32_t low_bits = r.codes[w], high_bits = high ? r.codes[words + w] : 0;
    for (int j = 0; j < kCodeWord; ++j) to[j] = float(int((low_bits >> j & 1) | (high_bits >> j & 1) << 1));
  }
}

template <class Op, Mode mode, class C>
void run(const Op& op, const Request& r, const Geometry& geometry, const CpuRange& range) {
  using Number = Numbers<Op, mode, C>;
  using N = typename Number::N;
  constexpr int O = Op::kOperands, kSlots = O > 0 ? O : 1;
  constexpr int64_t kLanes = Number::kLanes;
  constexpr bool gradients = has_operand_gradients(mode), directions = has_direction(mode);
  Input<C> x, g, u, operand[kSlots], v[directions ? kSlots : 1];
  Output<C> full[2], gradient[kSlots];
  x.open(r.x.data, r.dtype, geometry, kX);
  if constexpr (gradients) g.open(r.g.data, r.dtype, geometry, kG);
  if constexpr (directions) u.open(r.u.data, r.dtype, geometry, kU);
  for (int n = 0; n < full_outputs(mode); ++n) full[n].open(r.out[n].data, r.dtype, geometry, kOut + n);
  const int operands = kDecodes<Op> ? O : r.operands;
  for (int k = 0; k < operands; ++k) {
    operand[k].open(r.operand[k].data, r.operand[k].dtype, geometry, kOperand + k, static_cast<C>(r.operand[k].value));
    if constexpr (directions) v[k].open(r.v[k].data, r.v[k].dtype, geometry, kV + k, static_cast<C>(r.v[k].value));
    if (gradients && !range.sums[k]) gradient[k].open(r.operand_gradient[k].data, r.operand_gradient[k].dtype, geometry, kGradient + k);
  }
  Scalar<C> scalars[Op::kScalars > 0 ? Op::kScalars : 1];
  for (int s = 0; s < Op::kScalars; ++s) scalars[s] = Scalar<C>::of(static_cast<C>(r.scalars[s]));
  alignas(64) C codes[kDecodes<Op> ? kBlock : 1], slope[mode == Mode::coded ? kBlock : 1];

  typename Number::Memory memory;
  for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, range.end - begin);
    if constexpr (kDecodes<Op>) read_codes(r, begin, count, codes);
    const C* px = x.block(geometry, begin, count);
    const C *pg = nullptr, *pu = nullptr, *po[kSlots] = {}, *pv[kSlots] = {};
    C *pfull[2] = {}, *pgradient[kSlots] = {};
    if constexpr (gradients) pg = g.block(geometry, begin, count);
    if constexpr (directions) pu = u.block(geometry, begin, count);
    for (int k = 0; k < operands; ++k) {
      po[k] = operand[k].block(geometry, begin, count);
      if constexpr (directions) pv[k] = v[k].block(geometry, begin, count);
      if constexpr (gradients) pgradient[k] = gradient[k].block(begin);
    }
    for (int n = 0; n < full_outputs(mode); ++n) pfull[n] = full[n].block(begin);

    constexpr int64_t kRegister = at::vec::Vectorized<C>::size();
    row_lanes = (count + kRegister - 1) / kRegister * kRegister;
    const auto step = [&](int64_t j, const auto& load, const auto& store) {
      BlockIo<N, C, typename Number::Memory, std::decay_t<decltype(load)>, std::decay_t<decltype(store)>> io{
          memory, codes, po, pv, pgradient, r.v_present, j, load, store};
      const N zero = constant<N>(C(0));
      const Outputs<N> out = evaluate<mode>(op, scalars, load(px + j), gradients ? load(pg + j) : zero,
                                              directions ? load(pu + j) : zero, r.u.data != nullptr, io);
      for (int n = 0; n < full_outputs(mode); ++n) store(out.full[n], pfull[n] + j);
      if constexpr (mode == Mode::coded) store(out.full[1], slope + j);
    };
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
      step(j, [](const C* p) { return Number::load(p); }, [](const N& n, C* p) { Number::store(n, p); });
    if (const int rest = static_cast<int>(count - j))
      step(j, [rest](const C* p) { return Number::load(p, rest); },
           [rest](const N& n, C* p) { Number::store(n, p, rest); });

    if constexpr (mode == Mode::coded) write_codes(r, begin, count, slope);
    for (int n = 0; n < full_outputs(mode); ++n) full[n].close(geometry, begin, count);
    for (int k = 0; gradients && k < operands; ++k) {
      if (range.sums[k]) {
        add_to(static_cast<C*>(range.sums[k]), geometry, geometry.strides[kGradient + k], begin, count, pgradient[k]);
      } else {
        gradient[k].close(geometry, begin, count);
      }
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

// Compiled for the two modes of training in the compute type float32; all else runs as a program.
template <class Op>
void run_operator(const Request& r, const Geometry& geometry, const CpuRange& range) {
  if (r.dtype == Dtype::f64) return run_program<double>(r, geometry, range);
  if constexpr (!Op::kDynamic) {
    if (r.mode == Mode::forward) return run<Op, Mode::forward, float>(Op{}, r, geometry, range);
    if (r.mode == Mode::backward) return run<Op, Mode::backward, float>(Op{}, r, geometry, range);
    if constexpr (!Op::kHeavy)
      if (r.mode == Mode::coded) return run<Op, Mode::coded, float>(Op{}, r, geometry, range);
  }
  if (r.mode == Mode::coded) return run<LightProgram, Mode::coded, float>(LightProgram{r.program}, r, geometry, range);
  run_program<float>(r, geometry, range);
}

template <int operands, bool two>
void run_decoder(const Request& r, const Geometry& geometry, const CpuRange& range) {
  using Op = Decoder<operands, two>;
  const Op op = Op::of(r.table, r.scalars);
  if (r.mode == Mode::coded_backward) return run<Op, Mode::backward, float>(op, r, geometry, range);
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

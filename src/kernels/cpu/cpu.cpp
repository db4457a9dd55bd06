// The CPU kernels. Compiled once per SIMD level (CPU_CAPABILITY names it); the torch side picks one at run time. The modes
// of training run on SIMD registers; the others, forward mode and the second order, run element by element and are
// compiled for the DEFAULT level alone: on registers they would take two thirds of the compiler's time.
//
// The outputs are walked in blocks that stay in the L1 cache. An input that is dense and already of the compute type
// is read in place; any other is first gathered and converted into a buffer of its block. So one vector loop serves
// every dtype and every stride pattern, and the tail of a block goes through the same code as the rest of it.
#include <ATen/cpu/vec/functional.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../operators.h"
#include "cpu.h"
#include "vectorized.h"

namespace fused_act {

namespace {

// 13 buffers of float64 at most in the worst case (four operands, second order); three of float32 in most.
constexpr int64_t kBlock = 512;

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
    if (direct) return static_cast<const C*>(data) + begin;
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
  C* block(int64_t begin) { return flat && dtype == kDtype<C> ? static_cast<C*>(data) + begin : buffer; }
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
};
template <class C>
struct Elements {
  using N = C;
  static constexpr int64_t kLanes = 1;
  static N load(const C* p) { return *p; }
  static N load(const C* p, int) { return *p; }
  static void store(N n, C* p) { *p = n; }
  static void store(N n, C* p, int) { *p = n; }
};
template <Mode mode, class C>
using Numbers = std::conditional_t<has_direction(mode), Elements<C>, Registers<C>>;

// What a chain asks for at element j of the block.
template <int O, Mode mode, class C, class Load, class Store>
struct BlockIo {
  using N = typename Numbers<mode, C>::N;
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
  template <class M>
  LocalMemory<M> memory() const {
    return {};
  }
};

template <class Op, Mode mode, class C>
void run(const Op& op, const Request& r, const Geometry& geometry, const CpuRange& range) {
  using Number = Numbers<mode, C>;
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
  for (int k = 0; k < r.operands; ++k) {
    operand[k].open(r.operand[k].data, r.operand[k].dtype, geometry, kOperand + k, static_cast<C>(r.operand[k].value));
    if constexpr (directions) v[k].open(r.v[k].data, r.v[k].dtype, geometry, kV + k, static_cast<C>(r.v[k].value));
    if (gradients && !range.sums[k]) gradient[k].open(r.operand_gradient[k].data, r.operand_gradient[k].dtype, geometry, kGradient + k);
  }
  Scalar<C> scalars[Op::kScalars > 0 ? Op::kScalars : 1];
  for (int s = 0; s < Op::kScalars; ++s) scalars[s] = Scalar<C>::of(static_cast<C>(r.scalars[s]));

  for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, range.end - begin);
    const C* px = x.block(geometry, begin, count);
    const C *pg = nullptr, *pu = nullptr, *po[kSlots] = {}, *pv[kSlots] = {};
    C *pfull[2] = {}, *pgradient[kSlots] = {};
    if constexpr (gradients) pg = g.block(geometry, begin, count);
    if constexpr (directions) pu = u.block(geometry, begin, count);
    for (int k = 0; k < r.operands; ++k) {
      po[k] = operand[k].block(geometry, begin, count);
      if constexpr (directions) pv[k] = v[k].block(geometry, begin, count);
      if constexpr (gradients) pgradient[k] = gradient[k].block(begin);
    }
    for (int n = 0; n < full_outputs(mode); ++n) pfull[n] = full[n].block(begin);

    const auto step = [&](int64_t j, const auto& load, const auto& store) {
      BlockIo<O, mode, C, std::decay_t<decltype(load)>, std::decay_t<decltype(store)>> io{
          po, pv, pgradient, r.v_present, j, load, store};
      const N zero(C(0));
      const Outputs<N> out = evaluate<mode>(op, scalars, load(px + j), gradients ? load(pg + j) : zero,
                                              directions ? load(pu + j) : zero, r.u.data != nullptr, io);
      for (int n = 0; n < full_outputs(mode); ++n) store(out.full[n], pfull[n] + j);
    };
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
      step(j, [](const C* p) { return Number::load(p); }, [](const N& n, C* p) { Number::store(n, p); });
    if (const int rest = static_cast<int>(count - j))
      step(j, [rest](const C* p) { return Number::load(p, rest); },
           [rest](const N& n, C* p) { Number::store(n, p, rest); });

    for (int n = 0; n < full_outputs(mode); ++n) full[n].close(geometry, begin, count);
    for (int k = 0; gradients && k < r.operands; ++k) {
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
#else
    default:  // not reached
      return;
#endif
  }
}

// Compiled for the two modes of training in the compute type float32; all else runs as a program.
template <class Op>
void run_operator(const Request& r, const Geometry& geometry, const CpuRange& range) {
  if (r.dtype == Dtype::f64) return run_program<double>(r, geometry, range);
  if constexpr (!Op::kDynamic) {
    if (r.mode == Mode::forward) return run<Op, Mode::forward, float>(Op{}, r, geometry, range);
    if (r.mode == Mode::backward) return run<Op, Mode::backward, float>(Op{}, r, geometry, range);
  }
  run_program<float>(r, geometry, range);
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
  functions[op](r, geometry, range);
}

}  // namespace fused_act

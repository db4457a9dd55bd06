// The CPU kernels. Compiled once per SIMD level (CPU_CAPABILITY names it); the torch side picks one at run time.
//
// The outputs are walked in blocks that stay in the L1 cache. An input that is dense and already of the compute type
// is read in place; any other is first gathered and converted into a buffer of its block. So one vector loop serves
// every dtype and every stride pattern, and the tail of a block goes through the same code as the rest of it.
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "cpu.h"

namespace fused_act {

template <class C>
struct Arithmetic<at::vec::Vectorized<C>> {
  using N = at::vec::Vectorized<C>;
  using Compute = C;
  using Mask = N;  // all bits of a lane set or clear

  static N constant(C c) { return N(c); }
  static N add(const N& a, const N& b) { return a + b; }
  static N sub(const N& a, const N& b) { return a - b; }
  static N mul(const N& a, const N& b) { return a * b; }
  static N divide(const N& a, const Scalar<C>& s) { return a / N(s.value); }
  static Mask less(const N& a, const N& b) { return a < b; }
  static Mask less_equal(const N& a, const N& b) { return a <= b; }
  static Mask equal(const N& a, const N& b) { return a == b; }

  static Mask mask(bool m) { return m ? N(C(0)) == N(C(0)) : N(C(0)); }
  static Mask both(const Mask& a, const Mask& b) { return a & b; }
  static Mask either(const Mask& a, const Mask& b) { return a | b; }
  static Mask negate(const Mask& a) { return a ^ mask(true); }
  static N select(const Mask& m, const N& a, const N& b) { return N::blendv(b, a, m); }
};

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

// A full output: dense in iteration order by construction.
template <class C>
struct Output {
  void* data = nullptr;
  Dtype dtype = kDtype<C>;
  alignas(64) C buffer[kBlock];

  C* block(int64_t begin) { return data && dtype == kDtype<C> ? static_cast<C*>(data) + begin : buffer; }
  void close(int64_t begin, int64_t count) {
    if (!data || dtype == kDtype<C>) return;
    with_type(dtype, [&](auto* type) { at::vec::convert(buffer, static_cast<decltype(type)>(data) + begin, count); });
  }
};

template <class Op, Mode mode, class C>
void run(const Request& r, const Geometry& geometry, const CpuRange& range) {
  using Vec = at::vec::Vectorized<C>;
  constexpr int O = Op::kOperands, kSlots = O > 0 ? O : 1;
  constexpr int64_t kLanes = Vec::size();
  Input<C> x, g, u, operand[kSlots], v[kSlots];
  Output<C> full[2], gradient[kSlots];
  x.open(r.x.data, r.dtype, geometry, kX);
  if constexpr (has_operand_gradients<mode>) g.open(r.g.data, r.dtype, geometry, kG);
  if constexpr (has_direction<mode>) u.open(r.u.data, r.dtype, geometry, kU);
  for (int n = 0; n < 2; ++n) {
    full[n].data = r.out[n];
    full[n].dtype = r.dtype;
  }
  Present<O> present{};
  present.u = r.u.data != nullptr;
  for (int k = 0; k < O; ++k) {
    operand[k].open(r.operand[k].data, r.operand[k].dtype, geometry, kOperand + k, static_cast<C>(r.operand[k].value));
    if constexpr (has_direction<mode>) v[k].open(r.v[k].data, r.v[k].dtype, geometry, kV + k, static_cast<C>(r.v[k].value));
    present.v[k] = r.v_present[k];
  }
  Scalar<C> scalars[Op::kScalars > 0 ? Op::kScalars : 1];
  for (int s = 0; s < Op::kScalars; ++s) scalars[s] = Scalar<C>::of(static_cast<C>(r.scalars[s]));

  for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, range.end - begin);
    const C* px = x.block(geometry, begin, count);
    const C *pg = nullptr, *pu = nullptr, *po[kSlots] = {}, *pv[kSlots] = {};
    C *pfull[2] = {}, *pgradient[kSlots] = {};
    if constexpr (has_operand_gradients<mode>) pg = g.block(geometry, begin, count);
    if constexpr (has_direction<mode>) pu = u.block(geometry, begin, count);
    for (int k = 0; k < O; ++k) {
      po[k] = operand[k].block(geometry, begin, count);
      if constexpr (has_direction<mode>) pv[k] = v[k].block(geometry, begin, count);
      pgradient[k] = gradient[k].block(begin);
    }
    for (int n = 0; n < full_outputs<mode>; ++n) pfull[n] = full[n].block(begin);

    const auto step = [&](int64_t j, auto load, auto store) {
      Inputs<Vec, O> in{};
      in.x = load(px + j);
      if constexpr (has_operand_gradients<mode>) in.g = load(pg + j);
      if constexpr (has_direction<mode>) in.u = load(pu + j);
      for (int k = 0; k < O; ++k) {
        in.operand[k] = load(po[k] + j);
        if constexpr (has_direction<mode>) in.v[k] = load(pv[k] + j);
      }
      const Outputs<Vec, O> out = evaluate<Op, mode, Vec>(in, present, scalars);
      for (int n = 0; n < full_outputs<mode>; ++n) store(out.full[n], pfull[n] + j);
      if constexpr (has_operand_gradients<mode>) {
        for (int k = 0; k < O; ++k) store(out.operand[k], pgradient[k] + j);
      }
    };
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
      step(j, [](const C* p) { return Vec::loadu(p); }, [](const Vec& n, C* p) { n.store(p); });
    if (const int rest = static_cast<int>(count - j))
      step(j, [rest](const C* p) { return Vec::loadu(p, rest); }, [rest](const Vec& n, C* p) { n.store(p, rest); });

    for (int n = 0; n < full_outputs<mode>; ++n) full[n].close(begin, count);
    if constexpr (has_operand_gradients<mode>) {
      for (int k = 0; k < O; ++k) {
        const Request::OperandGradient& to = r.operand_gradient[k];
        if (!to.data) continue;
        const int64_t* strides = geometry.strides[kGradient + k];
        if (range.sums[k]) {
          add_to(static_cast<C*>(range.sums[k]), geometry, strides, begin, count, pgradient[k]);
        } else {  // nothing to sum: every element has its own address
          with_type(to.dtype, [&](auto* type) {
            scatter(static_cast<decltype(type)>(to.data), geometry, strides, begin, count, pgradient[k]);
          });
        }
      }
    }
  }
}

template <class Op, class C>
void run_mode(const Request& r, const Geometry& geometry, const CpuRange& range) {
  switch (r.mode) {
    case Mode::forward:
      return run<Op, Mode::forward, C>(r, geometry, range);
    case Mode::jvp:
      return run<Op, Mode::jvp, C>(r, geometry, range);
    case Mode::backward:
      return run<Op, Mode::backward, C>(r, geometry, range);
    case Mode::double_backward:
      return run<Op, Mode::double_backward, C>(r, geometry, range);
  }
}

template <class Op>
void run_operator(const Request& r, const Geometry& geometry, const CpuRange& range) {
  r.dtype == Dtype::f64 ? run_mode<Op, double>(r, geometry, range) : run_mode<Op, float>(r, geometry, range);
}

}  // namespace

#define FUSED_ACT_PASTE(a, b) a##b
#define FUSED_ACT_NAME(capability) FUSED_ACT_PASTE(run_cpu_, capability)
void FUSED_ACT_NAME(CPU_CAPABILITY)(int op, const Request& r, const Geometry& geometry, const CpuRange& range) {
#define FUSED_ACT_ENTRY(NAME, ...) &run_operator<ops::NAME>,
  static constexpr void (*functions[])(const Request&, const Geometry&, const CpuRange&) = {
      FUSED_ACT_OPERATORS(FUSED_ACT_ENTRY)};
#undef FUSED_ACT_ENTRY
  functions[op](r, geometry, range);
}

}  // namespace fused_act

// Building blocks of the CUDA kernels: lanes, memory, division by a run-time constant, block sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "../geometry.h"

namespace fused_act {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// V numbers of the compute type, as one number that formulas are evaluated on. `reduced` as kReduced.
template <class C, int V, bool reduced = false>
struct Lanes {
  C lane[V];
};
template <class C, int V>
constexpr bool kReduced<Lanes<C, V, true>> = true;

// The same lanes as a number of another type.
template <class To, class C, int V, bool reduced>
FUSED_ACT_FN To lanes_as(const Lanes<C, V, reduced>& from) {
  To to;
#pragma unroll
  for (int j = 0; j < V; ++j) to.lane[j] = from.lane[j];
  return to;
}

// What the hardware's own exponential and reciprocal, which are within 2 ulp, are good enough for.
struct ReducedArithmetic : Arithmetic<float> {
#if defined(__CUDA_ARCH__)
  FUSED_ACT_FN static float exp(float a) {
    float r;
    asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(__fmul_rn(a, kLog2E)));
    return r;
  }
  // 2^32 times as large while it is computed, since the instruction takes what has an exponent below float32's for 0.
  FUSED_ACT_FN static float exp_falling(float a) {
    return __fmul_rn(power_of_2(__fmaf_rn(a, kLog2E, 32.0f)), 0x1p-32f);
  }
  FUSED_ACT_FN static float expm1(float a) {
    float near = 1.0f / 120;
    const float coefficients[] = {1.0f / 24, 1.0f / 6, 0.5f, 1.0f};
    for (float c : coefficients) near = __fmaf_rn(near, a, c);
    const float far = __fadd_rn(power_of_2(__fmul_rn(a, kLog2E)), -1.0f);
    return ::fabsf(a) < 0.3f ? __fmul_rn(near, a) : far;
  }
  // 1 - 2 / (1 + e^2|a|); near 0 the series.
  FUSED_ACT_FN static float tanh(float a) {
    const float square = __fmul_rn(a, a);
    float near = -17.0f / 315;
    const float coefficients[] = {2.0f / 15, -1.0f / 3, 1.0f};
    for (float c : coefficients) near = __fmaf_rn(near, square, c);
    const float e = power_of_2(__fmul_rn(::fabsf(a), 2 * kLog2E));
    const float far = __fmaf_rn(estimate_reciprocal(__fadd_rn(e, 1.0f)), -2.0f, 1.0f);
    return ::fabsf(a) < 0.3f ? __fmul_rn(near, a) : ::copysignf(far, a);
  }
  FUSED_ACT_FN static float ratio(float a, float b) { return __fmul_rn(a, estimate_reciprocal(b)); }
#endif
};
template <int V>
struct LaneMask {
  bool lane[V];
};

template <int V, bool reduced>
constexpr bool kHasExtremes<Lanes<float, V, reduced>> = true;

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float lesser_number(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return a < b || a != a ? a : b;
#endif
}
__device__ __forceinline__ float greater_number(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return a > b || a != a ? a : b;
#endif
}
#else  // never called: what a host compiler sees of a kernel
inline float lesser_number(float a, float) { return a; }
inline float greater_number(float a, float) { return a; }
#endif

template <class C, int V, bool reduced>
struct Arithmetic<Lanes<C, V, reduced>> {
  using A = std::conditional_t<reduced, ReducedArithmetic, Arithmetic<C>>;
  using N = Lanes<C, V, reduced>;
  using Compute = C;
  using Mask = LaneMask<V>;

#define FUSED_ACT_LANEWISE(RESULT, EXPRESSION)      \
  RESULT r;                                         \
  _Pragma("unroll") for (int j = 0; j < V; ++j) r.lane[j] = EXPRESSION; \
  return r;
#define FUSED_ACT_UNARY(NAME) \
  FUSED_ACT_FN static N NAME(const N& a) { FUSED_ACT_LANEWISE(N, A::NAME(a.lane[j])) }
#define FUSED_ACT_BINARY(RESULT, NAME) \
  FUSED_ACT_FN static RESULT NAME(const N& a, const N& b) { FUSED_ACT_LANEWISE(RESULT, A::NAME(a.lane[j], b.lane[j])) }

  FUSED_ACT_FN static N constant(C c) { FUSED_ACT_LANEWISE(N, c) }
  FUSED_ACT_BINARY(N, add)
  FUSED_ACT_BINARY(N, sub)
  FUSED_ACT_BINARY(N, mul)
  FUSED_ACT_BINARY(N, quotient)
  FUSED_ACT_BINARY(N, ratio)
  FUSED_ACT_UNARY(estimate_reciprocal)
  FUSED_ACT_UNARY(negative)
  FUSED_ACT_UNARY(absolute)
  FUSED_ACT_UNARY(exp)
  FUSED_ACT_UNARY(exp2)
  FUSED_ACT_UNARY(exp_falling)
  FUSED_ACT_UNARY(expm1)
  FUSED_ACT_UNARY(log1p)
  FUSED_ACT_UNARY(tanh)
  FUSED_ACT_UNARY(log)
  FUSED_ACT_UNARY(sqrt)
  FUSED_ACT_FN static N fma(const N& a, const N& b, const N& c) {
    FUSED_ACT_LANEWISE(N, A::fma(a.lane[j], b.lane[j], c.lane[j]))
  }
  FUSED_ACT_FN static N divide(const N& a, const Scalar<C>& s) { FUSED_ACT_LANEWISE(N, A::divide(a.lane[j], s)) }
  FUSED_ACT_FN static N lesser(const N& a, const N& b) {
    FUSED_ACT_LANEWISE(N, lesser_number(a.lane[j], b.lane[j]))
  }
  FUSED_ACT_FN static N greater(const N& a, const N& b) {
    FUSED_ACT_LANEWISE(N, greater_number(a.lane[j], b.lane[j]))
  }
  FUSED_ACT_BINARY(Mask, less)
  FUSED_ACT_BINARY(Mask, less_equal)
  FUSED_ACT_BINARY(Mask, equal)

  FUSED_ACT_FN static Mask mask(bool m) { FUSED_ACT_LANEWISE(Mask, m) }
  FUSED_ACT_FN static Mask both(const Mask& a, const Mask& b) { FUSED_ACT_LANEWISE(Mask, a.lane[j] & b.lane[j]) }
  FUSED_ACT_FN static Mask either(const Mask& a, const Mask& b) { FUSED_ACT_LANEWISE(Mask, a.lane[j] | b.lane[j]) }
  FUSED_ACT_FN static Mask negate(const Mask& a) { FUSED_ACT_LANEWISE(Mask, !a.lane[j]) }
  FUSED_ACT_FN static N select(const Mask& m, const N& a, const N& b) {
    FUSED_ACT_LANEWISE(N, m.lane[j] ? a.lane[j] : b.lane[j])
  }
#undef FUSED_ACT_BINARY
#undef FUSED_ACT_UNARY
#undef FUSED_ACT_LANEWISE
};

// ---- memory ---------------------------------------------------------------------------------------------------
//
// Kernels know the size of an element and learn its type at run time: float16 and bfloat16 share them.

__host__ __device__ constexpr int size_of(Dtype d) { return d == Dtype::f64 ? 8 : d == Dtype::f32 ? 4 : 2; }

template <int bytes>
using Compute = std::conditional_t<bytes == 8, double, float>;
// Elements of a vector of 16 bytes.
template <int bytes>
constexpr int kVector = 16 / bytes;

// n elements as they lie in memory. Those of 16 bits are kept in pairs: one by one they would take a register each.
template <int bytes, int n>
struct Bits {
  using Word = std::conditional_t<bytes == 8, uint64_t, std::conditional_t<bytes == 4, uint32_t, uint16_t>>;
  using Held = std::conditional_t<bytes == 8, uint64_t, uint32_t>;
  static constexpr int kUnit = bytes * n % 16 == 0 ? 16 : 8;  // bytes of an instruction
  using Unit = std::conditional_t<kUnit == 16, int4, int2>;
  static constexpr int kUnits = bytes * n / kUnit, kHeld = (bytes * n + int(sizeof(Held)) - 1) / int(sizeof(Held));
  Held held[kHeld];

  __device__ __forceinline__ Word get(int j) const {
    return bytes == 2 ? static_cast<Word>(held[j / 2] >> j % 2 * 16) : static_cast<Word>(held[j * bytes / sizeof(Held)]);
  }
  __device__ __forceinline__ void set(int j, Word value) {
    if constexpr (bytes == 2) {
      const int shift = j % 2 * 16;
      held[j / 2] = (held[j / 2] & ~(0xffffu << shift)) | uint32_t(value) << shift;
    } else {
      held[j] = value;
    }
  }
};

// The n elements at p + i, aligned, in one or two instructions. `constant`: nothing that the kernel writes is read through
// p, so the read-only path is taken, which lets the compiler move a load above earlier stores.
template <bool constant, int bytes, int n>
__device__ __forceinline__ Bits<bytes, n> load_bits(const void* p, int64_t i) {
  using B = Bits<bytes, n>;
  using Unit = typename B::Unit;
  B bits;
  Unit units[B::kUnits];
#pragma unroll
  for (int k = 0; k < B::kUnits; ++k) {
    const Unit* q = reinterpret_cast<const Unit*>(static_cast<const typename B::Word*>(p) + i) + k;
    units[k] = constant ? __ldg(q) : *q;
  }
  memcpy(bits.held, units, sizeof units);
  return bits;
}

template <int bytes, int n>
__device__ __forceinline__ void store_bits(void* p, int64_t i, const Bits<bytes, n>& bits) {
  using B = Bits<bytes, n>;
  using Unit = typename B::Unit;
  Unit units[B::kUnits];
  memcpy(units, bits.held, sizeof units);
#pragma unroll
  for (int k = 0; k < B::kUnits; ++k)
    reinterpret_cast<Unit*>(static_cast<typename B::Word*>(p) + i)[k] = units[k];
}

// Two vectors side by side, which begin at a multiple of 32 bytes: one instruction where the hardware has that.
struct alignas(32) SideBySide {
  uint32_t words[8];
};
template <int bytes>
__device__ __forceinline__ void load_side_by_side(const void* p, int64_t i, Bits<bytes, kVector<bytes>>& first,
                                                  Bits<bytes, kVector<bytes>>& second) {
  using B = Bits<bytes, kVector<bytes>>;
  const SideBySide both = *reinterpret_cast<const SideBySide*>(static_cast<const typename B::Word*>(p) + i);
  memcpy(first.held, both.words, 16);
  memcpy(second.held, both.words + 4, 16);
}
template <int bytes>
__device__ __forceinline__ void store_side_by_side(void* p, int64_t i, const Bits<bytes, kVector<bytes>>& first,
                                                   const Bits<bytes, kVector<bytes>>& second) {
  using B = Bits<bytes, kVector<bytes>>;
  SideBySide both;
  memcpy(both.words, first.held, 16);
  memcpy(both.words + 4, second.held, 16);
  *reinterpret_cast<SideBySide*>(static_cast<typename B::Word*>(p) + i) = both;
}

template <int bytes, int n>
__device__ __forceinline__ Lanes<Compute<bytes>, n> to_lanes(const Bits<bytes, n>& bits, Dtype dtype) {
  Lanes<Compute<bytes>, n> out;
  if constexpr (bytes > 2) {
    memcpy(out.lane, bits.held, sizeof out.lane);
  } else if (dtype == Dtype::bf16) {
#pragma unroll
    for (int j = 0; j < n; ++j)
      out.lane[j] = __uint_as_float(j % 2 ? bits.held[j / 2] & 0xffff0000u : bits.held[j / 2] << 16);
  } else {
#pragma unroll
    for (int j = 0; j < n; ++j) out.lane[j] = __half2float(__ushort_as_half(bits.get(j)));
  }
  return out;
}

template <int bytes, int n, bool reduced = false>
__device__ __forceinline__ Bits<bytes, n> to_bits(const Lanes<Compute<bytes>, n, reduced>& values, Dtype dtype) {
  Bits<bytes, n> bits{};
  if constexpr (bytes > 2) {
    memcpy(bits.held, values.lane, sizeof bits.held);
  } else {
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const float first = values.lane[j], second = j + 1 < n ? values.lane[j + 1] : 0.0f;
      if (dtype == Dtype::bf16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        memcpy(&bits.held[j / 2], &pair, sizeof pair);
      } else {
        const __half2 pair = __floats2half2_rn(first, second);
        memcpy(&bits.held[j / 2], &pair, sizeof pair);
      }
    }
  }
  return bits;
}

// f(std::integral_constant<int, bytes>{}) for the size of an element of `dtype`, which is one that computes in C.
template <class C, class F>
__device__ __forceinline__ auto with_size(Dtype dtype, F f) {
  if constexpr (sizeof(C) == 8) {
    return f(std::integral_constant<int, 8>{});
  } else if (dtype == Dtype::f32) {
    return f(std::integral_constant<int, 4>{});
  } else {
    return f(std::integral_constant<int, 2>{});
  }
}

template <class C>
__device__ __forceinline__ C load_element(const void* p, Dtype dtype, int64_t i) {
  return with_size<C>(dtype, [&](auto bytes) {
    using B = Bits<decltype(bytes)::value, 1>;
    return to_lanes(B{{static_cast<const typename B::Word*>(p)[i]}}, dtype).lane[0];
  });
}
template <class C>
__device__ __forceinline__ void store_element(void* p, Dtype dtype, int64_t i, C value) {
  with_size<C>(dtype, [&](auto bytes) {
    constexpr int size = decltype(bytes)::value;
    static_cast<typename Bits<size, 1>::Word*>(p)[i] = to_bits<size, 1>({{value}}, dtype).get(0);
  });
}

// The first thing in every kernel. It may have been launched while the one before it in the stream still runs (programmatic
// dependent launch), so it waits for that one's end before it touches memory. And where few blocks run (one vector a thread:
// on tensors of up to 1 MB; of column_kernel on a small card also on large ones), the next may be launched at once: ten kernels
// in a graph then take 7.7 to 10.9 us on an H200, where they take 11.9 to 15.1 launched one after the other and 9.7 to 12.0
// without this. More blocks would take multiprocessors from what they wait for: at 4 MB 21.5 for 18.6 us.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  if (gridDim.x * gridDim.y <= 256) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Quotient by a run-time constant: one multiplication, a sum and a shift while dividends stay below 2^31, and a
// true 64-bit division in larger tensors.
struct Divider {
  int64_t divisor = 1;
  uint32_t magic = 0, shift = 0;
  bool wide = false;

  static Divider of(int64_t divisor, int64_t largest) {
    Divider d;
    d.divisor = divisor;
    d.wide = largest >= (int64_t(1) << 31) || divisor >= (int64_t(1) << 31);
    if (d.wide) return d;
    while ((int64_t(1) << d.shift) < divisor) ++d.shift;
    d.magic = static_cast<uint32_t>(((uint64_t(1) << 32) * ((uint64_t(1) << d.shift) - divisor)) / divisor + 1);
    return d;
  }
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    if (wide) return n / divisor;
    const uint32_t m = static_cast<uint32_t>(n);
    return small(m);
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return small(n); }  // of dividends below 2^31 only

 private:
  __device__ __forceinline__ uint32_t small(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
};

// The sum over a group of `width` neighbouring lanes (a power of two), in a fixed order.
template <class C>
__device__ __forceinline__ C warp_sum(C v, int width = kWarp) {
  for (int offset = width / 2; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffffffu, v, offset);
  return v;
}

// The sum over the block, in a fixed order; valid in thread 0. `shared` holds one value a warp.
template <class C>
__device__ __forceinline__ C block_sum(C v, C* shared) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = v;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    v = threadIdx.x < (blockDim.x + kWarp - 1) / kWarp ? shared[threadIdx.x] : C(0);
    v = warp_sum(v);
  }
  return v;
}

}  // namespace fused_act

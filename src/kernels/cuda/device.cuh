// Building blocks of the CUDA kernels: element types, 16-byte vectors, division by a run-time constant, block sums.
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

template <class T>
struct Element {  // float and double compute in themselves
  using Compute = T;
  __device__ static T load(T v) { return v; }
  __device__ static T store(T v) { return v; }
};
template <>
struct Element<__half> {
  using Compute = float;
  __device__ static float load(__half v) { return __half2float(v); }
  __device__ static __half store(float v) { return __float2half_rn(v); }
};
template <>
struct Element<__nv_bfloat16> {
  using Compute = float;
  __device__ static float load(__nv_bfloat16 v) { return __bfloat162float(v); }
  __device__ static __nv_bfloat16 store(float v) { return __float2bfloat16_rn(v); }
};

template <class T>
using compute_of = typename Element<T>::Compute;

// The only vector type: 16 bytes of T, one memory instruction.
template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T element[kSize];
};

// Reads elements [lo, hi) of the vector at p; a whole vector in one instruction. `constant`: nothing that the kernel
// writes is read through p, so the read-only path is taken, which lets the compiler move a load above earlier stores.
template <bool constant, class T>
__device__ __forceinline__ Vector<T> fetch(const T* p, int lo, int hi) {
  constexpr int V = Vector<T>::kSize;
  Vector<T> vector{};
  if (lo == 0 && hi == V) {
    const int4* q = reinterpret_cast<const int4*>(p);
    const int4 bits = constant ? __ldg(q) : *q;
    memcpy(&vector, &bits, sizeof bits);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j >= lo && j < hi) vector.element[j] = p[j];
  }
  return vector;
}

// V numbers of the compute type, as one number that formulas are evaluated on.
template <class C, int V>
struct Lanes {
  C lane[V];
};
template <int V>
struct LaneMask {
  bool lane[V];
};

template <class C, int V>
struct Arithmetic<Lanes<C, V>> {
  using A = Arithmetic<C>;
  using N = Lanes<C, V>;
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
  FUSED_ACT_UNARY(negative)
  FUSED_ACT_UNARY(absolute)
  FUSED_ACT_UNARY(exp)
  FUSED_ACT_UNARY(expm1)
  FUSED_ACT_UNARY(log1p)
  FUSED_ACT_UNARY(tanh)
  FUSED_ACT_FN static N fma(const N& a, const N& b, const N& c) {
    FUSED_ACT_LANEWISE(N, A::fma(a.lane[j], b.lane[j], c.lane[j]))
  }
  FUSED_ACT_FN static N divide(const N& a, const Scalar<C>& s) { FUSED_ACT_LANEWISE(N, A::divide(a.lane[j], s)) }
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

// V elements, V a multiple of the vector's size, as numbers of the compute type.
template <class T, class C, int V>
__device__ __forceinline__ void load_vectors(const T* p, Lanes<C, V>& out) {
  constexpr int kPer = Vector<T>::kSize;
  static_assert(V % kPer == 0);
#pragma unroll
  for (int k = 0; k < V / kPer; ++k) {
    const Vector<T> vector = fetch<true>(p + k * kPer, 0, kPer);
#pragma unroll
    for (int j = 0; j < kPer; ++j) out.lane[k * kPer + j] = Element<T>::load(vector.element[j]);
  }
}

template <class T, class C, int V>
__device__ __forceinline__ void store_vector(T* p, int lo, int hi, const Lanes<C, V>& values) {
  if (lo == 0 && hi == V) {
    constexpr int kPer = Vector<T>::kSize;
#pragma unroll
    for (int k = 0; k < V / kPer; ++k) {
      Vector<T> vector;
#pragma unroll
      for (int j = 0; j < kPer; ++j) vector.element[j] = Element<T>::store(values.lane[k * kPer + j]);
      reinterpret_cast<Vector<T>*>(p)[k] = vector;
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j >= lo && j < hi) p[j] = Element<T>::store(values.lane[j]);
  }
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
    return (__umulhi(m, magic) + m) >> shift;
  }
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

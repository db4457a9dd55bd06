// The CUDA kernels, each a template over chain (compiled, or a Program), element type and mode:
//
//   flat_kernel      full tensors dense in one order, one 16-byte vector a thread; of a Program also rows with a pitch
//   row_kernel       flat, and operand gradients summed over the rows of a channel (NCHW)
//   column_kernel    flat, and operand gradients summed over the rows of a matrix (channels_last, features)
//   strided_kernel   any strides, any mode; Programs only
//   reduce_kernel    the gradient of one operand, any strides and any broadcast pattern; Programs only
//   finish_kernel    sums the partial sums of the reductions, in a fixed order
//
// Block sizes and thresholds are in `tuning`.
#pragma once

#include "device.cuh"

namespace fused_act {

namespace tuning {
// Blocks that a reduction of a large tensor is cut into. Many for row_kernel, whose last wave idles: at (128, 64, 126,
// 126) in bfloat16 on an H100, 295 us with 8192 blocks, 280 with 16384, 295 with 32768. Fewer for column_kernel, where
// each block leaves a partial sum for every channel.
constexpr int64_t kRowBlocks = 16896;
constexpr int64_t kColumnBlocks = 4224;
// Vectors that a thread handles at least.
constexpr int kMinVectorsPerThread = 2;
// Blocks of row_kernel and column_kernel that a multiprocessor holds at once in backward: 64 registers a thread, which
// double backward would spill.
constexpr int kReductionResidents = 4;
constexpr int kReductionUnroll = 2;
// Blocks of a compiled flat_kernel that a multiprocessor holds at least: 64 registers a thread, which cheap chains do not
// need (30 with a bias in bfloat16) and gelu does: with 32 it spills, and takes 8.5 times the copy in bfloat16.
constexpr int kFlatResidents = 4;
// The same of a Program: 64 registers a thread, for the largest of its steps.
constexpr int kProgramResidents = 4;
// Elements that a thread of strided_kernel handles, and that a warp of reduce_kernel sums at least.
constexpr int kStridedElements = 4;
constexpr int64_t kWarpElements = 2048;
}  // namespace tuning

// ---- operands -------------------------------------------------------------------------------------------------

enum class Access : int {
  none,      // not read
  constant,  // a value from the host
  scalar,    // one element
  rows,      // channel form, at least a vector per channel: a vector meets two channels at most
  dense,     // stride 1 and inner = 1, aligned: a vector of the operand beside each vector of x
  walk,      // channel form, element by element
  full       // as large as x and laid out as a full tensor may be
};

// How a full tensor lies: element i of the walk is at i + i / inner * extra, or at 2 i where the tensor has every second
// element of a buffer.
struct Lay {
  int64_t extra = 0;
  bool pair = false;
};
struct Place {
  int64_t i, row;
};

template <class C>
struct OperandArg {
  const void* data = nullptr;
  C value = 0;
  Access access = Access::none;
  bool is_compute = false;  // elements are of the compute type, not of x's
  bool wraps = false;       // the index is taken modulo the number of channels
  int64_t stride = 0, inner = 1, channels = 1;
  Divider by_inner, by_channels;
  Lay lay;
};

template <class T, class C>
__device__ __forceinline__ C load_element(const OperandArg<C>& o, int64_t offset) {
  return o.is_compute ? static_cast<const C*>(o.data)[offset] : C(Element<T>::load(static_cast<const T*>(o.data)[offset]));
}

// Elements [lo, hi) of the vector at `at` of a full tensor.
template <bool constant, class T>
__device__ __forceinline__ Vector<T> fetch_full(const T* p, const Lay& lay, const Place& at, int lo, int hi) {
  if (!lay.pair) return fetch<constant>(p + at.i + at.row * lay.extra, lo, hi);
  constexpr int V = Vector<T>::kSize;
  Vector<T> vector{};
  if (lo == 0 && hi == V) {  // both halves of the pairs, of which this tensor has one
    const int odd = reinterpret_cast<uintptr_t>(p) / sizeof(T) % 2;
    const T* q = p - odd + 2 * at.i;
    const Vector<T> a = fetch<constant>(q, 0, V), b = fetch<constant>(q + V, 0, V);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Vector<T>& from = 2 * j < V ? a : b;
      vector.element[j] = odd ? from.element[2 * j % V + 1] : from.element[2 * j % V];
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j >= lo && j < hi) vector.element[j] = p[2 * (at.i + j)];
  }
  return vector;
}

template <class T, class C, int V>
__device__ __forceinline__ void store_full(T* p, const Lay& lay, const Place& at, int lo, int hi, const Lanes<C, V>& values) {
  if (!lay.pair) return store_vector(p + at.i + at.row * lay.extra, lo, hi, values);
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (j >= lo && j < hi) p[2 * (at.i + j)] = Element<T>::store(values.lane[j]);
}

template <class T, class C, int V>
__device__ __forceinline__ Lanes<C, V> to_lanes(const Vector<T>& vector) {
  static_assert(V == Vector<T>::kSize);
  Lanes<C, V> n;
#pragma unroll
  for (int j = 0; j < V; ++j) n.lane[j] = Element<T>::load(vector.element[j]);
  return n;
}

template <class T, class C, int V>
__device__ __forceinline__ Lanes<C, V> load_operand(const OperandArg<C>& o, const Place& at, int lo, int hi) {
  Lanes<C, V> out;
  if (o.access == Access::none || o.access == Access::constant || o.access == Access::scalar) {
    const C value = o.access == Access::none ? C(0) : o.access == Access::constant ? o.value : load_element<T>(o, 0);
#pragma unroll
    for (int j = 0; j < V; ++j) out.lane[j] = value;
    return out;
  }
  if (o.access == Access::full && !o.is_compute)
    return to_lanes<T, C, V>(fetch_full<false>(static_cast<const T*>(o.data), o.lay, at, lo, hi));
  const int64_t plane = o.by_inner.quotient(at.i);
  int64_t rest = at.i - plane * o.inner;
  int64_t channel = o.wraps ? plane - o.by_channels.quotient(plane) * o.channels : plane;
  if (o.access == Access::rows) {
    // lo > 0 only where a vector straddles two rows; both values are then loaded, as at the end of a row.
    const C here = load_element<T>(o, channel * o.stride);
    C next = here;
    if (rest + hi > o.inner) {
      const int64_t following = channel + 1 == o.channels ? 0 : channel + 1;
      next = load_element<T>(o, following * o.stride);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) out.lane[j] = rest + j < o.inner ? here : next;
    return out;
  }
  if (o.access == Access::dense && lo == 0 && hi == V) {
    if (o.is_compute) {
      load_vectors(static_cast<const C*>(o.data) + channel, out);
    } else {
      load_vectors(static_cast<const T*>(o.data) + channel, out);
    }
    return out;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    out.lane[j] = j >= lo && j < hi ? load_element<T>(o, channel * o.stride) : C(0);
    if (++rest == o.inner) {
      rest = 0;
      if (++channel == o.channels) channel = 0;
    }
  }
  return out;
}

// ---- what every kernel is given -------------------------------------------------------------------------------

// How the gradient of an operand leaves the kernel.
enum class Emit : int { none, store, reduce };

// Lays of the full tensors, for a Program; a compiled chain has kernels for flat tensors only.
template <class Op>
struct Lays {
  bool pitched = false;
  Divider by_inner;
  Lay x, g, out[2], gradient[Op::kOperands];
};

template <class Op, class T>
struct Args {
  using C = compute_of<T>;
  static constexpr int O = Op::kOperands > 0 ? Op::kOperands : 1;
  int64_t numel;
  const T *x, *g, *u;
  T* out[2];
  OperandArg<C> operand[O], v[O];
  Emit emit[O];
  bool gradient_is_compute[O];
  void* gradient[O];
  C* partial[O];  // reduce: where the partial sums go
  bool has_u, has_v[O];
  Scalar<C> scalars[Op::kScalars > 0 ? Op::kScalars : 1];
  Op op;
  struct Nothing {};
  std::conditional_t<Op::kDynamic, Lays<Op>, Nothing> lays;

  __device__ __forceinline__ Place place(int64_t i) const {
    if constexpr (Op::kDynamic) {
      return {i, lays.pitched ? lays.by_inner.quotient(i) : 0};
    } else {
      return {i, 0};
    }
  }
};

template <class C, class T>
__device__ __forceinline__ void store_gradient(void* p, bool is_compute, int64_t offset, C value) {
  if (is_compute) {
    static_cast<C*>(p)[offset] = value;
  } else {
    static_cast<T*>(p)[offset] = Element<T>::store(value);
  }
}

// ---- vectors --------------------------------------------------------------------------------------------------

// What a chain asks for at one vector. Gradients of operands that are summed go to `sums`.
template <class Op, class T, class Sums>
struct VectorIo {
  using C = compute_of<T>;
  static constexpr int V = Vector<T>::kSize;
  using N = Lanes<C, V>;
  static constexpr int O = Args<Op, T>::O;
  const Args<Op, T>& a;
  const Place at;
  const int lo, hi;
  Sums& sums;
  N loaded[Op::kDynamic ? 1 : O];

  // A compiled chain has its operands before the loads of x have come back; a Program loads what its steps name.
  __device__ __forceinline__ void load() {
    if constexpr (!Op::kDynamic) {
#pragma unroll
      for (int k = 0; k < Op::kOperands; ++k) loaded[k] = load_operand<T, C, V>(a.operand[k], at, lo, hi);
    }
  }
  FUSED_ACT_FN N operand(int k) const {
#if defined(__CUDA_ARCH__)
    if constexpr (Op::kDynamic) return load_operand<T, C, V>(a.operand[k], at, lo, hi);
#endif
    return loaded[Op::kDynamic ? 0 : k];
  }
  FUSED_ACT_FN N direction(int) const { return constant<N>(0); }
  FUSED_ACT_FN bool moves(int) const { return false; }
  FUSED_ACT_FN void gradient(int k, const N& value) {
#if defined(__CUDA_ARCH__)
    if (a.emit[k] == Emit::reduce) sums.add(k, value, lo, hi);
    if (a.emit[k] != Emit::store) return;
    Lay lay;
    if constexpr (Op::kDynamic) lay = a.lays.gradient[k];
    if (a.gradient_is_compute[k]) {
      store_full(static_cast<C*>(a.gradient[k]), lay, at, lo, hi, value);
    } else {
      store_full(static_cast<T*>(a.gradient[k]), lay, at, lo, hi, value);
    }
#endif
  }
};

struct NoSums {
  template <class N>
  __device__ __forceinline__ void add(int, const N&, int, int) {}
};

// Elements [lo, hi) of the vector at i: loads, evaluates, stores the full outputs and deals with operand gradients.
template <class Op, class T, Mode mode, class Sums>
__device__ __forceinline__ void process(const Args<Op, T>& a, int64_t i, int lo, int hi, Sums& sums) {
  using Io = VectorIo<Op, T, Sums>;
  using C = typename Io::C;
  using N = typename Io::N;
  constexpr int V = Io::V;
  Io io{a, a.place(i), lo, hi, sums, {}};
  Lay lay_x, lay_g, lay_out;
  if constexpr (Op::kDynamic) {
    lay_x = a.lays.x;
    lay_g = a.lays.g;
    lay_out = a.lays.out[0];
  }
  // Operands first in forward: the other way round it needs 38 registers and not 30, a multiprocessor holds 6 blocks and
  // not 8, and bfloat16 with a bias takes 1.07 to 1.09 times the copy and not 1.00. In forward x may be the output, too.
  constexpr bool forward = mode == Mode::forward;
  if (forward) io.load();
  Vector<T> x{}, g{};
  if (a.x) x = fetch_full<!forward>(a.x, lay_x, io.at, lo, hi);
  if constexpr (!forward) {
    if (a.g) g = fetch_full<true>(a.g, lay_g, io.at, lo, hi);
    io.load();
  }
  const N zero = constant<N>(0);
  const Outputs<N> out =
      evaluate<mode>(a.op, a.scalars, to_lanes<T, C, V>(x), forward ? zero : to_lanes<T, C, V>(g), zero, false, io);
  if (a.out[0]) store_full(a.out[0], lay_out, io.at, lo, hi, out.full[0]);
}

// ---- kernels --------------------------------------------------------------------------------------------------

template <class Op, class T, Mode mode>
__global__ void __launch_bounds__(kThreads, Op::kDynamic ? tuning::kProgramResidents : tuning::kFlatResidents)
    flat_kernel(const __grid_constant__ Args<Op, T> a) {
  constexpr int V = Vector<T>::kSize;
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= a.numel) return;
  NoSums sums;
  process<Op, T, mode>(a, i, 0, a.numel - i < V ? int(a.numel - i) : V, sums);
}

// ---- elements -------------------------------------------------------------------------------------------------

// Offsets of every tensor at a linear index, by the rows of Geometry::strides.
struct Space {
  int ndim = 0;
  Divider size[kMaxDims];
  int64_t stride[kTensors][kMaxDims];

  __device__ __forceinline__ int64_t offset(int row, int64_t i) const {
    int64_t offset = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      const int64_t q = size[d].quotient(i);
      offset += (i - q * size[d].divisor) * stride[row][d];
      i = q;
    }
    return offset;
  }
};

template <class T, class Sums>
struct ElementIo {
  using C = compute_of<T>;
  const Args<Program, T>& a;
  const Space& space;
  const int64_t i;
  Sums& sums;

  FUSED_ACT_FN C read(const OperandArg<C>& o, int row) const {
#if defined(__CUDA_ARCH__)
    if (o.access == Access::none || o.access == Access::constant) return o.value;
    return load_element<T>(o, space.offset(row, i));
#else
    return C(0);
#endif
  }
  FUSED_ACT_FN C operand(int k) const { return read(a.operand[k], kOperand + k); }
  FUSED_ACT_FN C direction(int k) const { return read(a.v[k], kV + k); }
  FUSED_ACT_FN bool moves(int k) const { return a.has_v[k]; }
  FUSED_ACT_FN void gradient(int k, const C& value) {
#if defined(__CUDA_ARCH__)
    sums.add(k, value);
    if (a.emit[k] == Emit::store)
      store_gradient<C, T>(a.gradient[k], a.gradient_is_compute[k], space.offset(kGradient + k, i), value);
#endif
  }
};

template <class T, Mode mode, class Sums>
__device__ __forceinline__ Outputs<compute_of<T>> evaluate_at(const Args<Program, T>& a, const Space& space, int64_t i,
                                                             Sums& sums) {
  using C = compute_of<T>;
  const auto read = [&](const T* p, int row) { return p ? C(Element<T>::load(p[space.offset(row, i)])) : C(0); };
  ElementIo<T, Sums> io{a, space, i, sums};
  return evaluate<mode>(a.op, a.scalars, read(a.x, kX), read(a.g, kG), read(a.u, kU), a.has_u, io);
}

struct NoElementSums {
  template <class C>
  __device__ __forceinline__ void add(int, C) {}
};

template <class T, Mode mode>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ Args<Program, T> a, const __grid_constant__ Space space) {
  const int64_t first = int64_t(blockIdx.x) * kThreads * tuning::kStridedElements + threadIdx.x;
#pragma unroll 1
  for (int n = 0; n < tuning::kStridedElements; ++n) {
    const int64_t i = first + n * kThreads;
    if (i >= a.numel) return;
    NoElementSums sums;
    const Outputs<compute_of<T>> out = evaluate_at<T, mode>(a, space, i, sums);
    constexpr int outputs = full_outputs(mode);
#pragma unroll
    for (int k = 0; k < outputs; ++k)
      if (a.out[k]) a.out[k][space.offset(kOut + k, i)] = Element<T>::store(out.full[k]);
  }
}

// ---- reductions -----------------------------------------------------------------------------------------------

// Sums of the operands' gradients in registers. A Program's k is known at run time only, hence the loops.
template <int O, class C>
struct RowSums {
  C sum[O];
  template <int V>
  __device__ __forceinline__ void add(int k, const Lanes<C, V>& value, int lo, int hi) {
    C inside = C(0);
#pragma unroll
    for (int j = 0; j < V; ++j) inside += j >= lo && j < hi ? value.lane[j] : C(0);
#pragma unroll
    for (int n = 0; n < O; ++n)
      if (n == k) sum[n] += inside;
  }
};

template <int O, class C, int V>
struct ColumnSums {
  C sum[O][V];
  __device__ __forceinline__ void add(int k, const Lanes<C, V>& value, int, int) {
#pragma unroll
    for (int n = 0; n < O; ++n)
      if (n == k) {
#pragma unroll
        for (int j = 0; j < V; ++j) sum[n][j] += value.lane[j];
      }
  }
};

// A tensor of shape (outer, channels, inner), cut into chunks: `planes` consecutive planes of one channel, or a
// `length` of one plane. A block takes one chunk of one channel; `width` threads walk along a plane.
struct Rows {
  int64_t outer, channels, inner;
  int64_t planes, length, pieces;  // pieces: chunks that one plane is cut into
  int64_t chunks;                  // per channel
  int width;
};

template <class Op, class T, Mode mode>
__global__ void __launch_bounds__(kThreads, tuning::kReductionResidents)
    row_kernel(const __grid_constant__ Args<Op, T> a, const Rows rows) {
  using C = compute_of<T>;
  constexpr int V = Vector<T>::kSize;
  constexpr int O = Args<Op, T>::O;
  __shared__ C shared[kWarp];
  const int64_t piece = blockIdx.x % rows.pieces;
  const int64_t plane = blockIdx.x / rows.pieces;
  const int64_t channel = plane % rows.channels;
  const int64_t group = plane / rows.channels;
  const int64_t first = group * rows.planes;
  const int64_t last = first + rows.planes < rows.outer ? first + rows.planes : rows.outer;
  const int64_t from = piece * rows.length;
  const int64_t to = from + rows.length < rows.inner ? from + rows.length : rows.inner;
  const int lane = threadIdx.x % rows.width, line = threadIdx.x / rows.width, lines = kThreads / rows.width;

  RowSums<O, C> sums{};
  for (int64_t o = first + line; o < last; o += lines) {
    // Planes need not start at a multiple of a vector: whole vectors inside, and a part of one at either end, which
    // is shared with the neighbouring plane.
    const int64_t start = (o * rows.channels + channel) * rows.inner + from;
    const int64_t end = start + to - from;
    const int step = rows.width * V;
    // Threads are laid from a 128-byte line on: a warp that straddles lines writes 5 of them for 4.
    constexpr int kLine = 128 / sizeof(T);
    if constexpr (Op::kDynamic) {  // one place where all steps are inlined: with four, ptxas takes 90 s
#pragma unroll 1
      for (int64_t i = start / kLine * kLine + lane * V; i < end; i += step) {
        const int lo = i < start ? int(min(start - i, int64_t(V))) : 0, hi = end - i < V ? int(end - i) : V;
        if (lo < hi) process<Op, T, mode>(a, i, lo, hi, sums);
      }
    } else {
      const int64_t whole = (start + V - 1) / V * V, part = end / V * V;
#pragma unroll (tuning::kReductionUnroll)
      for (int64_t i = whole / kLine * kLine + lane * V; i < part; i += step)
        if (i >= whole) process<Op, T, mode>(a, i, 0, V, sums);
      if (lane == 0 && start < whole) {
        const int64_t i = whole - V;
        process<Op, T, mode>(a, i, int(start - i), end - i < V ? int(end - i) : V, sums);
      }
      if (lane == rows.width - 1 && part < end && part >= whole)
        process<Op, T, mode>(a, part, 0, int(end - part), sums);
    }
  }
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    if (a.emit[k] != Emit::reduce) continue;
    const C total = block_sum(sums.sum[k], shared);
    if (threadIdx.x == 0) {
      if (rows.chunks == 1) {
        store_gradient<C, T>(a.gradient[k], a.gradient_is_compute[k], channel, total);
      } else {
        a.partial[k][channel * rows.chunks + group * rows.pieces + piece] = total;
      }
    }
  }
}

// A matrix of shape (outer, channels). A block takes `rows` rows of `across` groups of `width` columns.
struct Columns {
  int64_t outer, channels;
  int64_t rows, chunks;
  int across;
  int width;  // a whole vector where the channels allow it, else 1
};

template <class Op, class T, Mode mode>
__global__ void __launch_bounds__(kThreads, tuning::kReductionResidents)
    column_kernel(const __grid_constant__ Args<Op, T> a, const Columns columns) {
  using C = compute_of<T>;
  constexpr int V = Vector<T>::kSize;
  constexpr int O = Args<Op, T>::O;
  __shared__ C shared[kThreads * V];
  const int across = columns.across, width = columns.width;
  const int lines = kThreads / across;
  const int at = threadIdx.x % across, line = threadIdx.x / across;
  const int64_t column = (int64_t(blockIdx.x) * across + at) * width;
  const bool works = column < columns.channels && line < lines;
  const int64_t first = int64_t(blockIdx.y) * columns.rows;
  const int64_t last = first + columns.rows < columns.outer ? first + columns.rows : columns.outer;

  ColumnSums<O, C, V> sums{};
  if (works) {
    const int64_t end = last * columns.channels, step = lines * columns.channels;
    int64_t i = (first + line) * columns.channels + column;
    if constexpr (Op::kDynamic) {
#pragma unroll 1
      for (; i < end; i += step) process<Op, T, mode>(a, i, 0, width, sums);
    } else if (width == V) {  // whole vectors, known to the compiler
#pragma unroll (tuning::kReductionUnroll)
      for (; i < end; i += step) process<Op, T, mode>(a, i, 0, V, sums);
    } else {
      for (; i < end; i += step) process<Op, T, mode>(a, i, 0, 1, sums);
    }
  }
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    if (a.emit[k] != Emit::reduce) continue;
    __syncthreads();
    if (line < lines) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (j < width) shared[(line * across + at) * width + j] = sums.sum[k][j];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < across * width; e += kThreads) {
      const int64_t channel = int64_t(blockIdx.x) * across * width + e;
      if (channel >= columns.channels) break;
      C total = C(0);
      for (int n = 0; n < lines; ++n) total += shared[n * across * width + e];
      if (columns.chunks == 1) {
        store_gradient<C, T>(a.gradient[k], a.gradient_is_compute[k], channel, total);
      } else {
        a.partial[k][channel * columns.chunks + blockIdx.y] = total;
      }
    }
  }
}

// The dimensions of a Space, kept ones before reduced ones.
struct Reduction {
  int64_t kept, reduced;
  int64_t length, chunks;
  int kept_ndim;
};

template <class C>
struct OneSum {
  int which;
  C sum;
  __device__ __forceinline__ void add(int k, C value) { sum += k == which ? value : C(0); }
};

template <class T, Mode mode>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Args<Program, T> a, const __grid_constant__ Space space,
                  const Reduction reduction, const int which) {
  using C = compute_of<T>;
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (warp >= reduction.kept * reduction.chunks) return;
  const int64_t index = warp / reduction.chunks;
  const int64_t from = warp % reduction.chunks * reduction.length;
  const int64_t to = from + reduction.length < reduction.reduced ? from + reduction.length : reduction.reduced;
  OneSum<C> sums{which, C(0)};
  for (int64_t r = from + threadIdx.x % kWarp; r < to; r += kWarp)
    evaluate_at<T, mode>(a, space, index * reduction.reduced + r, sums);
  const C sum = warp_sum(sums.sum);
  if (threadIdx.x % kWarp == 0) {
    if (reduction.chunks == 1) {
      store_gradient<C, T>(a.gradient[which], a.gradient_is_compute[which],
                           space.offset(kGradient + which, index * reduction.reduced), sum);
    } else {
      a.partial[which][warp] = sum;
    }
  }
}

// Where the sums of finish_kernel go: the kept dimensions with the gradient's strides.
struct Kept {
  int ndim = 1;
  Divider size[kMaxDims];
  int64_t stride[kMaxDims];
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const compute_of<T>* partial, int64_t kept, int64_t chunks, void* gradient, bool is_compute,
                  const __grid_constant__ Kept where) {
  using C = compute_of<T>;
  __shared__ C shared[kWarp];
  const int64_t index = blockIdx.x;
  C sum = C(0);
  for (int64_t c = threadIdx.x; c < chunks; c += blockDim.x) sum += partial[index * chunks + c];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) {
    int64_t rest = index, offset = 0;
    for (int d = where.ndim - 1; d >= 0; --d) {
      const int64_t q = where.size[d].quotient(rest);
      offset += (rest - q * where.size[d].divisor) * where.stride[d];
      rest = q;
    }
    store_gradient<C, T>(gradient, is_compute, offset, sum);
  }
}

}  // namespace fused_act

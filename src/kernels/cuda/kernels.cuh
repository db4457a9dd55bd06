// What all CUDA kernels share, and the kernels of compiled chains, each a template over chain, element type and mode:
//
//   flat_kernel      full tensors dense in one order, one 16-byte vector a thread
//   row_kernel       flat, and operand gradients summed over the rows of a channel (NCHW)
//   column_kernel    flat, and operand gradients summed over the rows of a matrix (channels_last, features)
//   finish_kernel    sums the partial sums of the reductions, in a fixed order
//
// program.cuh has those of Programs. Block sizes and thresholds are in `tuning`.
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
// Threads that a multiprocessor holds at most.
#if !defined(__CUDA_ARCH__)
constexpr int kMaxThreads = 1024;
#elif __CUDA_ARCH__ == 750
constexpr int kMaxThreads = 1024;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int kMaxThreads = 2048;
#else
constexpr int kMaxThreads = 1536;
#endif
// Blocks of a compiled flat_kernel that a multiprocessor holds at least. In forward as many as there can be, 32 registers
// a thread on an H100, and half as many where a heavy step has eight elements: gelu would spill, and take 8.5 times the
// copy in bfloat16. Backward of a cheap chain takes what registers it needs.
template <class Op>
constexpr int flat_residents(Mode mode, int elements) {
  const int most = kMaxThreads / kThreads;
  if (mode == Mode::forward) return Op::kHeavy && elements == 8 ? most / 2 : most;
  return Op::kHeavy ? most / 2 : 1;
}
// The same of a Program: 64 registers a thread in forward, 80 in backward.
constexpr int kProgramResidents = 4;
constexpr int kProgramBackwardResidents = 3;
// Elements that a thread of strided_kernel handles, and that a warp of reduce_kernel sums at least.
constexpr int kStridedElements = 4;
constexpr int64_t kWarpElements = 2048;
}  // namespace tuning

// ---- operands -------------------------------------------------------------------------------------------------

enum class Access : int {
  constant,  // a value from the host, or not read
  scalar,    // one element
  row,       // channel form, whole vectors per channel
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

// Consecutive elements of the walk, of which those in [lo, hi) are wanted. An index has 32 bits where a tensor
// has less than 2^31 elements, 64 where that is not known.
template <class Index>
struct Part {
  Index i, row;
  int lo, hi;
};

template <class C>
struct OperandArg {
  const void* data = nullptr;
  C value = 0;
  Dtype dtype = Dtype::f32;
  Access access = Access::constant;
  bool wraps = false;  // the index is taken modulo the number of channels
  int axis = 0;        // the first operand that has the same inner, channels and wraps
  int64_t stride = 0, inner = 1, channels = 1;
  Divider by_inner, by_channels;
  Lay lay;

  __host__ __device__ bool is_along_axis() const {
    return access != Access::constant && access != Access::scalar && access != Access::full;
  }
};

template <bool constant, int bytes, int n, class Index>
__device__ __forceinline__ Bits<bytes, n> load_full(const void* p, const Lay& lay, const Part<Index>& at) {
  if (!lay.pair) return load_bits<constant, bytes, n>(p, at.i + at.row * lay.extra, at.lo, at.hi);
  Bits<bytes, n> out;
  if (at.lo == 0 && at.hi == n) {  // both halves of the pairs, of which this tensor has one
    const int odd = reinterpret_cast<uintptr_t>(p) / bytes % 2;
    const auto both = load_bits<constant, bytes, 2 * n>(p, 2 * int64_t(at.i) - odd, 0, 2 * n);
#pragma unroll
    for (int j = 0; j < n; ++j) out.element[j] = odd ? both.element[2 * j + 1] : both.element[2 * j];
  } else {
    const auto* from = static_cast<const typename Bits<bytes, n>::Word*>(p) + 2 * int64_t(at.i);
#pragma unroll
    for (int j = 0; j < n; ++j) out.element[j] = j >= at.lo && j < at.hi ? from[2 * j] : 0;
  }
  return out;
}

template <int bytes, int n, class Index>
__device__ __forceinline__ void store_full(void* p, const Lay& lay, const Part<Index>& at, const Bits<bytes, n>& bits) {
  if (!lay.pair) return store_bits(p, at.i + at.row * lay.extra, at.lo, at.hi, bits);
  auto* to = static_cast<typename Bits<bytes, n>::Word*>(p) + 2 * int64_t(at.i);
#pragma unroll
  for (int j = 0; j < n; ++j)
    if (j >= at.lo && j < at.hi) to[2 * j] = bits.element[j];
}

// Where a vector of x lies along the axis of an operand; operands along one axis share it.
template <class Index>
struct AxisPlace {
  int axis = -1;
  Index channel, rest;

  template <class C>
  __device__ __forceinline__ void find(const OperandArg<C>& o, Index i) {
    const Index inner = Index(o.inner), plane = o.by_inner.quotient(i);
    rest = i - plane * inner;
    channel = o.wraps ? plane - o.by_channels.quotient(plane) * Index(o.channels) : plane;
    axis = o.axis;
  }
};

// The n elements beside a part of x, whose elements have `bytes`. The operand's are of x's type or of the compute type.
template <int bytes, int n, class Index>
__device__ __forceinline__ Lanes<Compute<bytes>, n> load_operand(const OperandArg<Compute<bytes>>& o,
                                                                 const Part<Index>& at, AxisPlace<Index>& place) {
  using C = Compute<bytes>;
  Lanes<C, n> out;
  const auto elements = [&](auto load) {  // load(bytes) gives Bits
    if (bytes == 2 && o.dtype == Dtype::f32) return to_lanes(load(std::integral_constant<int, sizeof(C)>{}), Dtype::f32);
    return to_lanes(load(std::integral_constant<int, bytes>{}), o.dtype);
  };
  const auto one = [&](int64_t i) {
    return elements([&](auto size) {
             using B = Bits<decltype(size)::value, 1>;
             return B{{static_cast<const typename B::Word*>(o.data)[i]}};
           })
        .lane[0];
  };
  if (o.access == Access::full)
    return elements([&](auto size) { return load_full<false, decltype(size)::value, n>(o.data, o.lay, at); });
  if (o.access == Access::constant || o.access == Access::scalar) {
    const C value = o.access == Access::constant ? o.value : one(0);
#pragma unroll
    for (int j = 0; j < n; ++j) out.lane[j] = value;
    return out;
  }
  if (place.axis != o.axis) place.find(o, at.i);
  Index channel = place.channel;
  if (o.access == Access::dense)
    return elements([&](auto size) { return load_bits<true, decltype(size)::value, n>(o.data, channel, at.lo, at.hi); });
  const int64_t stride = o.stride;
  if (o.access == Access::row || o.access == Access::rows) {
    // lo > 0 only where a vector straddles two rows; both values are then loaded, as at the end of a row.
    const C here = one(channel * stride);
    if (o.access == Access::row) return constant<Lanes<C, n>>(here);
    const int left = Index(o.inner) - place.rest < n ? int(Index(o.inner) - place.rest) : n;
    C next = here;
    if (at.hi > left) next = one((channel + 1 == o.channels ? 0 : channel + 1) * stride);
#pragma unroll
    for (int j = 0; j < n; ++j) out.lane[j] = j < left ? here : next;
    return out;
  }
  Index rest = place.rest;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    out.lane[j] = j >= at.lo && j < at.hi ? one(channel * stride) : C(0);
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

// What only a Program has: layouts of the full tensors, and the entries of its scratch memory. Operand k has entry k, and
// slot k has kMaxOperands + k: as a step names its source.
struct ProgramPlan {
  bool pitched = false;
  Divider by_inner;
  Lay x, g, out, gradient[kMaxOperands];
  int operands = 0;  // that have entries
  int tape = 0, sums = 0, entries = 0;
};

template <class Op, class C>
struct Args {
  static constexpr int O = Op::kOperands > 0 ? Op::kOperands : 1;
  int64_t numel;
  Dtype dtype;
  const void *x, *g, *u;
  void* out[2];
  OperandArg<C> operand[O], v[O];
  Emit emit[O];
  Dtype gradient_dtype[O];
  void* gradient[O];
  C* partial[O];  // reduce: where the partial sums go
  bool has_u, has_v[O];
  Scalar<C> scalars[Op::kScalars > 0 ? Op::kScalars : 1];
  Op op;
  struct Nothing {};
  std::conditional_t<Op::kDynamic, ProgramPlan, Nothing> plan;
};

// The gradient of an operand that is as large as x: in x's type or in the compute type.
template <int bytes, class A, int n, class Index>
__device__ __forceinline__ void store_gradient(const A& a, int k, const Lay& lay, const Part<Index>& at,
                                               const Lanes<Compute<bytes>, n>& values) {
  if (bytes == 2 && a.gradient_dtype[k] == Dtype::f32)
    return store_full(a.gradient[k], lay, at, to_bits<sizeof(Compute<bytes>), n>(values, Dtype::f32));
  store_full(a.gradient[k], lay, at, to_bits<bytes, n>(values, a.gradient_dtype[k]));
}

// ---- the body of a compiled chain's kernels ---------------------------------------------------------------------

template <class Op, int bytes, class Sums>
struct VectorIo {
  using C = Compute<bytes>;
  static constexpr int V = kVector<bytes>;
  using N = Lanes<C, V>;
  const Args<Op, C>& a;
  const Part<int64_t>& at;
  Sums& sums;
  N loaded[Args<Op, C>::O];

  __device__ __forceinline__ void load() {
    AxisPlace<int64_t> place;
#pragma unroll
    for (int k = 0; k < Op::kOperands; ++k) loaded[k] = load_operand<bytes, V>(a.operand[k], at, place);
  }
  FUSED_ACT_FN N operand(int k) const { return loaded[k]; }
  FUSED_ACT_FN N direction(int) const { return constant<N>(0); }
  FUSED_ACT_FN bool moves(int) const { return false; }
  FUSED_ACT_FN void gradient(int k, const N& value) {
#if defined(__CUDA_ARCH__)
    if (a.emit[k] == Emit::reduce) sums.add(k, value, at.lo, at.hi);
    if (a.emit[k] == Emit::store) store_gradient<bytes>(a, k, Lay(), at, value);
#endif
  }
  struct Nothing {};
  template <class M>
  FUSED_ACT_FN Nothing memory() const {
    return {};
  }
};

struct NoSums {
  template <class N>
  __device__ __forceinline__ void add(int, const N&, int, int) {}
};

// Elements [lo, hi) of the vector at i: loads, evaluates, stores the result and deals with operand gradients.
template <class Op, int bytes, Mode mode, class Sums>
__device__ __forceinline__ void process(const Args<Op, Compute<bytes>>& a, int64_t i, int lo, int hi, Sums& sums) {
  using Io = VectorIo<Op, bytes, Sums>;
  using N = typename Io::N;
  constexpr int V = Io::V;
  const Part<int64_t> at{i, 0, lo, hi};
  Io io{a, at, sums, {}};
  // Operands first in forward: the other way round it needs 38 registers and not 30, a multiprocessor holds 6 blocks and
  // not 8, and bfloat16 with a bias takes 1.07 to 1.09 times the copy and not 1.00. In forward x may be the output, too.
  constexpr bool forward = mode == Mode::forward;
  if (forward) io.load();
  Bits<bytes, V> x{}, g{};
  if (a.x) x = load_bits<!forward, bytes, V>(a.x, i, lo, hi);
  if constexpr (!forward) {
    if (a.g) g = load_bits<true, bytes, V>(a.g, i, lo, hi);
    io.load();
  }
  const N zero = constant<N>(0);
  const Outputs<N> out = evaluate<mode>(a.op, a.scalars, to_lanes(x, a.dtype),
                                        forward ? zero : to_lanes(g, a.dtype), zero, false, io);
  if (a.out[0]) store_bits(a.out[0], i, lo, hi, to_bits<bytes, V>(out.full[0], a.dtype));
}

template <class Op, int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, tuning::flat_residents<Op>(mode, kVector<bytes>))
    flat_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a) {
  constexpr int V = kVector<bytes>;
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= a.numel) return;
  NoSums sums;
  process<Op, bytes, mode>(a, i, 0, a.numel - i < V ? int(a.numel - i) : V, sums);
}

// ---- reductions -----------------------------------------------------------------------------------------------

// The sum of an operand's gradient, or a part of it, goes where it belongs.
template <class A, class C>
__device__ __forceinline__ void emit_sum(const A& a, int k, int64_t channel, int64_t chunk, int64_t chunks, C total) {
  if (chunks == 1) {
    store_element(a.gradient[k], a.gradient_dtype[k], channel, total);
  } else {
    a.partial[k][channel * chunks + chunk] = total;
  }
}

// A tensor of shape (outer, channels, inner), cut into chunks: `planes` consecutive planes of one channel, or a
// `length` of one plane. A block takes one chunk of one channel; `width` threads walk along a plane.
struct Rows {
  int64_t outer, channels, inner;
  int64_t planes, length, pieces;  // pieces: chunks that one plane is cut into
  int64_t chunks;                  // per channel
  int width;
};

// What the block, and in it the thread, has of it.
struct RowChunk {
  int64_t channel, chunk;
  int64_t first, last;  // planes
  int64_t from, to;     // elements of each
  int lane, line, lines;

  __device__ __forceinline__ explicit RowChunk(const Rows& rows) {
    const int64_t piece = blockIdx.x % rows.pieces;
    const int64_t plane = blockIdx.x / rows.pieces;
    channel = plane % rows.channels;
    const int64_t group = plane / rows.channels;
    chunk = group * rows.pieces + piece;
    first = group * rows.planes;
    last = min(first + rows.planes, rows.outer);
    from = piece * rows.length;
    to = min(from + rows.length, rows.inner);
    lane = threadIdx.x % rows.width;
    line = threadIdx.x / rows.width;
    lines = blockDim.x / rows.width;
  }
  // Of the chunk's part of plane o, as indices of the walk.
  __device__ __forceinline__ int64_t start(const Rows& rows, int64_t o) const {
    return (o * rows.channels + channel) * rows.inner + from;
  }
};

template <int O, class C>
struct RowSums {
  C sum[O];
  template <int V>
  __device__ __forceinline__ void add(int k, const Lanes<C, V>& value, int lo, int hi) {
    C inside = C(0);
#pragma unroll
    for (int j = 0; j < V; ++j) inside += j >= lo && j < hi ? value.lane[j] : C(0);
#pragma unroll
    for (int n = 0; n < O; ++n)  // k is known at run time only where a Program is run
      if (n == k) sum[n] += inside;
  }
  template <class A>
  __device__ __forceinline__ void emit(const A& a, const Rows& rows, const RowChunk& chunk) {
    __shared__ C shared[kWarp];
#pragma unroll
    for (int k = 0; k < O; ++k) {
      if (a.emit[k] != Emit::reduce) continue;
      const C total = block_sum(sum[k], shared);
      if (threadIdx.x == 0) emit_sum(a, k, chunk.channel, chunk.chunk, rows.chunks, total);
    }
  }
};

template <class Op, int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, tuning::kReductionResidents)
    row_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a, const Rows rows) {
  constexpr int V = kVector<bytes>;
  const RowChunk chunk(rows);
  RowSums<Args<Op, Compute<bytes>>::O, Compute<bytes>> sums{};
  for (int64_t o = chunk.first + chunk.line; o < chunk.last; o += chunk.lines) {
    // Planes need not start at a multiple of a vector: whole vectors inside, and a part of one at either end, which
    // is shared with the neighbouring plane.
    const int64_t start = chunk.start(rows, o);
    const int64_t end = start + chunk.to - chunk.from;
    const int step = rows.width * V;
    // Threads are laid from a 128-byte line on: a warp that straddles lines writes 5 of them for 4.
    constexpr int kLine = 128 / bytes;
    const int64_t whole = (start + V - 1) / V * V, part = end / V * V;
#pragma unroll (tuning::kReductionUnroll)
    for (int64_t i = whole / kLine * kLine + chunk.lane * V; i < part; i += step)
      if (i >= whole) process<Op, bytes, mode>(a, i, 0, V, sums);
    if (chunk.lane == 0 && start < whole) {
      const int64_t i = whole - V;
      process<Op, bytes, mode>(a, i, int(start - i), end - i < V ? int(end - i) : V, sums);
    }
    if (chunk.lane == rows.width - 1 && part < end && part >= whole)
      process<Op, bytes, mode>(a, part, 0, int(end - part), sums);
  }
  sums.emit(a, rows, chunk);
}

// A matrix of shape (outer, channels * fold): `fold` rows of channels at a time, as many as make a whole number of
// vectors. The last of its rows may be cut short by the end of the tensor. A block takes `rows` of its rows in `across`
// groups of a vector's columns.
struct Columns {
  int64_t outer, channels;
  int fold, across;
  int64_t rows, chunks;

  __device__ __forceinline__ int64_t width() const { return channels * fold; }
};

struct ColumnChunk {
  int64_t column, first, last;
  int at, line, lines;
  bool works;

  __device__ __forceinline__ ColumnChunk(const Columns& columns, int vector) {
    lines = blockDim.x / columns.across;
    at = threadIdx.x % columns.across;
    line = threadIdx.x / columns.across;
    column = (int64_t(blockIdx.x) * columns.across + at) * vector;
    works = column < columns.width() && line < lines;
    first = int64_t(blockIdx.y) * columns.rows;
    last = min(first + columns.rows, columns.outer);
  }
};

// The sums of all lines: sum_of(thread, j) is what a thread has for column j of its group.
template <class A, class F>
__device__ __forceinline__ void emit_columns(const A& a, int k, const Columns& columns, int lines, int vector, F sum_of) {
  for (int e = threadIdx.x; e < columns.across * vector; e += blockDim.x) {
    const int64_t column = int64_t(blockIdx.x) * columns.across * vector + e;
    if (column >= columns.width()) break;
    auto total = sum_of(e / vector, e % vector);
    for (int n = 1; n < lines; ++n) total += sum_of(n * columns.across + e / vector, e % vector);
    const int64_t row = column / columns.channels;
    emit_sum(a, k, column - row * columns.channels, row * columns.chunks + blockIdx.y, columns.chunks * columns.fold,
             total);
  }
}

template <int O, class C, int V>
struct ColumnSums {
  C sum[O][V];
  __device__ __forceinline__ void add(int k, const Lanes<C, V>& value, int, int hi) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j < hi) sum[k][j] += value.lane[j];
  }
};

template <class Op, int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, tuning::kReductionResidents)
    column_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a, const Columns columns) {
  using C = Compute<bytes>;
  constexpr int V = kVector<bytes>;
  __shared__ C shared[kThreads * V];
  const ColumnChunk chunk(columns, V);
  ColumnSums<Args<Op, C>::O, C, V> sums{};
  if (chunk.works) {
    const int64_t end = chunk.last * columns.width(), step = chunk.lines * columns.width();
    int64_t i = (chunk.first + chunk.line) * columns.width() + chunk.column;
    const int64_t whole = min(end, a.numel - V + 1);
#pragma unroll (tuning::kReductionUnroll)
    for (; i < whole; i += step) process<Op, bytes, mode>(a, i, 0, V, sums);
    if (i < end && i < a.numel) process<Op, bytes, mode>(a, i, 0, int(a.numel - i), sums);
  }
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    if (a.emit[k] != Emit::reduce) continue;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) shared[threadIdx.x * V + j] = sums.sum[k][j];
    __syncthreads();
    emit_columns(a, k, columns, chunk.lines, V, [&](int thread, int j) { return shared[thread * V + j]; });
  }
}

// Where the sums of finish_kernel go: the kept dimensions with the gradient's strides.
struct Kept {
  int ndim = 1;
  Divider size[kMaxDims];
  int64_t stride[kMaxDims];
};

template <class C>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const C* partial, int64_t chunks, void* gradient, Dtype dtype, const __grid_constant__ Kept where) {
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
    store_element(gradient, dtype, offset, sum);
  }
}

}  // namespace fused_act

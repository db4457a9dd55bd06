// The CUDA kernels, each a template over operator, element type and mode:
//
//   flat_kernel      all tensors dense in one order: one 16-byte vector a thread
//   strided_kernel   any strides
//   row_kernel       flat, and operand gradients summed over the rows of a channel (NCHW)
//   column_kernel    flat, and operand gradients summed over the rows of a matrix (channels_last, features)
//   reduce_kernel    the gradient of one operand, any strides and any broadcast pattern
//   finish_kernel    sums the partial sums of the three above, in a fixed order
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
// Blocks of a forward flat_kernel that a multiprocessor holds at once: all that its threads allow.
#if !defined(__CUDA_ARCH__)
constexpr int kForwardResidents = 1;
#elif __CUDA_ARCH__ == 750
constexpr int kForwardResidents = 1024 / kThreads;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 100 == 10
constexpr int kForwardResidents = 2048 / kThreads;
#else
constexpr int kForwardResidents = 1536 / kThreads;
#endif
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
  walk       // channel form, element by element
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
};

template <class T, class C>
__device__ __forceinline__ C load_element(const OperandArg<C>& o, int64_t offset) {
  return o.is_compute ? static_cast<const C*>(o.data)[offset] : C(Element<T>::load(static_cast<const T*>(o.data)[offset]));
}

template <class T, class C, int V>
__device__ __forceinline__ void load_operand(const OperandArg<C>& o, int64_t i, int lo, int hi, C (&out)[V]) {
  if (o.access == Access::none) {
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = C(0);
    return;
  }
  if (o.access == Access::constant || o.access == Access::scalar) {
    const C value = o.access == Access::constant ? o.value : load_element<T>(o, 0);
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = value;
    return;
  }
  const int64_t plane = o.by_inner.quotient(i);
  int64_t rest = i - plane * o.inner;
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
    for (int j = 0; j < V; ++j) out[j] = rest + j < o.inner ? here : next;
    return;
  }
  if (o.access == Access::dense && lo == 0 && hi == V) {
    if (o.is_compute) {
      load_vectors(static_cast<const C*>(o.data) + channel, out);
    } else {
      load_vectors(static_cast<const T*>(o.data) + channel, out);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    out[j] = j >= lo && j < hi ? load_element<T>(o, channel * o.stride) : C(0);
    if (++rest == o.inner) {
      rest = 0;
      if (++channel == o.channels) channel = 0;
    }
  }
}

// ---- what every kernel is given -------------------------------------------------------------------------------

template <int O>
struct Slots {
  static constexpr int value = O > 0 ? O : 1;
};

// How the gradient of an operand leaves the kernel.
enum class Emit : int { none, store, reduce };

template <class Op, class T>
struct Args {
  using C = compute_of<T>;
  static constexpr int O = Slots<Op::kOperands>::value;
  int64_t numel;
  const T *x, *g, *u;
  T* out[2];
  OperandArg<C> operand[O], v[O];
  Emit emit[O];
  bool gradient_is_compute[O];
  void* gradient[O];
  C* partial[O];  // reduce: where the partial sums go
  Present<Op::kOperands> present;
  Scalar<C> scalars[Op::kScalars > 0 ? Op::kScalars : 1];
};

template <class C, class T>
__device__ __forceinline__ void store_gradient(void* p, bool is_compute, int64_t offset, C value) {
  if (is_compute) {
    static_cast<C*>(p)[offset] = value;
  } else {
    static_cast<T*>(p)[offset] = Element<T>::store(value);
  }
}

// The vectors of the full inputs at one place, as they lie in memory.
template <class T>
struct Fetched {
  Vector<T> x, g, u;
};

template <class Op, class T, Mode mode>
__device__ __forceinline__ Fetched<T> fetch_inputs(const Args<Op, T>& a, int64_t i, int lo, int hi) {
  Fetched<T> f{};
  if (a.x) f.x = fetch(a.x + i, lo, hi);
  if constexpr (has_operand_gradients<mode>) {
    if (a.g) f.g = fetch(a.g + i, lo, hi);
  }
  if constexpr (has_direction<mode>) {
    if (a.u) f.u = fetch(a.u + i, lo, hi);
  }
  return f;
}

// Elements [lo, hi) of the vector at i: evaluates, stores the full outputs, returns the operands' gradients.
template <class Op, class T, Mode mode, int V, class C>
__device__ __forceinline__ void process(const Args<Op, T>& a, const Fetched<T>& f, int64_t i, int lo, int hi,
                                        const C (&operand)[Args<Op, T>::O][V], const C (&v)[Args<Op, T>::O][V],
                                        C (&gradients)[Args<Op, T>::O][V]) {
  constexpr int O = Op::kOperands;
  C full[2][V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    Inputs<C, O> in{};
    in.x = Element<T>::load(f.x.element[j]);
    if constexpr (has_operand_gradients<mode>) in.g = Element<T>::load(f.g.element[j]);
    if constexpr (has_direction<mode>) in.u = Element<T>::load(f.u.element[j]);
#pragma unroll
    for (int k = 0; k < O; ++k) {
      in.operand[k] = operand[k][j];
      if constexpr (has_direction<mode>) in.v[k] = v[k][j];
    }
    const Outputs<C, O> out = evaluate<Op, mode, C>(in, a.present, a.scalars);
    full[0][j] = out.full[0];
    if constexpr (full_outputs<mode> > 1) full[1][j] = out.full[1];
    if constexpr (has_operand_gradients<mode>) {
#pragma unroll
      for (int k = 0; k < O; ++k) gradients[k][j] = out.operand[k];
    }
  }
  if (a.out[0]) store_vector(a.out[0] + i, lo, hi, full[0]);
  if constexpr (full_outputs<mode> > 1) {
    if (a.out[1]) store_vector(a.out[1] + i, lo, hi, full[1]);
  }
  if constexpr (has_operand_gradients<mode>) {
#pragma unroll
    for (int k = 0; k < O; ++k) {
      if (a.emit[k] != Emit::store) continue;
      if (a.gradient_is_compute[k]) {
        store_vector(static_cast<C*>(a.gradient[k]) + i, lo, hi, gradients[k]);
      } else {
        store_vector(static_cast<T*>(a.gradient[k]) + i, lo, hi, gradients[k]);
      }
    }
  }
}

template <class Op, class T, int V, class C>
__device__ __forceinline__ void load_operands(const Args<Op, T>& a, int64_t i, int lo, int hi,
                                              C (&operand)[Args<Op, T>::O][V], C (&v)[Args<Op, T>::O][V],
                                              bool with_direction) {
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    load_operand<T>(a.operand[k], i, lo, hi, operand[k]);
    if (with_direction) load_operand<T>(a.v[k], i, lo, hi, v[k]);
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------

template <class Op, class T, Mode mode>
__global__ void __launch_bounds__(kThreads, mode == Mode::forward ? tuning::kForwardResidents : 1)
    flat_kernel(const __grid_constant__ Args<Op, T> a) {
  using C = compute_of<T>;
  constexpr int V = Vector<T>::kSize;
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= a.numel) return;
  const int hi = a.numel - i < V ? int(a.numel - i) : V;
  C operand[Args<Op, T>::O][V], v[Args<Op, T>::O][V], gradients[Args<Op, T>::O][V];
  // Operands first: the other way round the forward kernel needs 38 registers and not 30, a multiprocessor holds 6
  // blocks and not 8, and bfloat16 with a bias takes 1.07 to 1.09 times the copy and not 1.00.
  load_operands(a, i, 0, hi, operand, v, has_direction<mode>);
  const Fetched<T> f = fetch_inputs<Op, T, mode>(a, i, 0, hi);
  process<Op, T, mode>(a, f, i, 0, hi, operand, v, gradients);
}

// Offsets of every tensor at a linear index. Rows: x, g, u, operands, directions, operand gradients.
template <int O>
struct Space {
  static constexpr int kRows = 3 + 3 * O;
  int ndim = 0;
  Divider size[kMaxDims];
  int64_t stride[kRows][kMaxDims];

  __device__ __forceinline__ void offsets(int64_t i, int64_t (&offset)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) offset[r] = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      const int64_t q = size[d].quotient(i);
      const int64_t at = i - q * size[d].divisor;
      i = q;
#pragma unroll
      for (int r = 0; r < kRows; ++r) offset[r] += at * stride[r][d];
    }
  }
};

template <class Op, class T, Mode mode, class C>
__device__ __forceinline__ Outputs<C, Op::kOperands> evaluate_at(
    const Args<Op, T>& a, const int64_t (&offset)[Space<Op::kOperands>::kRows]) {
  constexpr int O = Op::kOperands;
  const auto read = [](const T* p, int64_t at) { return p ? C(Element<T>::load(p[at])) : C(0); };
  const auto read_operand = [](const OperandArg<C>& o, int64_t at) {
    return o.access == Access::none ? C(0) : o.access == Access::constant ? o.value : load_element<T>(o, at);
  };
  Inputs<C, O> in{};
  in.x = read(a.x, offset[0]);
  in.g = read(a.g, offset[1]);
  in.u = read(a.u, offset[2]);
#pragma unroll
  for (int k = 0; k < O; ++k) {
    in.operand[k] = read_operand(a.operand[k], offset[3 + k]);
    in.v[k] = read_operand(a.v[k], offset[3 + O + k]);
  }
  return evaluate<Op, mode, C>(in, a.present, a.scalars);
}

template <class Op, class T, Mode mode>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ Args<Op, T> a, const __grid_constant__ Space<Op::kOperands> space) {
  using C = compute_of<T>;
  constexpr int O = Op::kOperands;
  const int64_t first = int64_t(blockIdx.x) * kThreads * tuning::kStridedElements + threadIdx.x;
#pragma unroll
  for (int n = 0; n < tuning::kStridedElements; ++n) {
    const int64_t i = first + n * kThreads;
    if (i >= a.numel) return;
    int64_t offset[Space<O>::kRows];
    space.offsets(i, offset);
    const Outputs<C, O> out = evaluate_at<Op, T, mode, C>(a, offset);
    if (a.out[0]) a.out[0][i] = Element<T>::store(out.full[0]);
    if constexpr (full_outputs<mode> > 1) {
      if (a.out[1]) a.out[1][i] = Element<T>::store(out.full[1]);
    }
    if constexpr (has_operand_gradients<mode>) {
#pragma unroll
      for (int k = 0; k < O; ++k)
        if (a.emit[k] == Emit::store)
          store_gradient<C, T>(a.gradient[k], a.gradient_is_compute[k], offset[3 + 2 * O + k], out.operand[k]);
    }
  }
}

// Processes elements [lo, hi) of the vector at i and adds the operands' gradients to `sum`.
template <class Op, class T, Mode mode, int V, class C>
__device__ __forceinline__ void add_vector(const Args<Op, T>& a, int64_t i, int lo, int hi, C (&sum)[Args<Op, T>::O]) {
  constexpr int O = Args<Op, T>::O;
  C operand[O][V], v[O][V], gradients[O][V];
  const Fetched<T> f = fetch_inputs<Op, T, mode>(a, i, lo, hi);
  load_operands(a, i, lo, hi, operand, v, mode == Mode::double_backward);
  process<Op, T, mode>(a, f, i, lo, hi, operand, v, gradients);
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    C inside = C(0);
#pragma unroll
    for (int j = 0; j < V; ++j) inside += j >= lo && j < hi ? gradients[k][j] : C(0);
    sum[k] += inside;
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

template <class Op, class T, Mode mode>
__global__ void __launch_bounds__(kThreads, mode == Mode::backward ? tuning::kReductionResidents : 1)
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

  C sum[O];
#pragma unroll
  for (int k = 0; k < O; ++k) sum[k] = C(0);
  for (int64_t o = first + line; o < last; o += lines) {
    // Planes need not start at a multiple of a vector: whole vectors inside, and a part of one at either end, which
    // is shared with the neighbouring plane.
    const int64_t start = (o * rows.channels + channel) * rows.inner + from;
    const int64_t end = start + to - from;
    const int64_t whole = (start + V - 1) / V * V, part = end / V * V;
    // Threads are laid from a 128-byte line on: a warp that straddles lines writes 5 of them for 4.
    constexpr int kLine = 128 / sizeof(T);
    const int step = rows.width * V;
#pragma unroll (tuning::kReductionUnroll)
    for (int64_t i = whole / kLine * kLine + lane * V; i < part; i += step)
      if (i >= whole) add_vector<Op, T, mode, V>(a, i, 0, V, sum);
    if (lane == 0 && start < whole) {
      const int64_t i = whole - V;
      add_vector<Op, T, mode, V>(a, i, int(start - i), end - i < V ? int(end - i) : V, sum);
    }
    if (lane == rows.width - 1 && part < end && part >= whole) add_vector<Op, T, mode, V>(a, part, 0, int(end - part), sum);
  }
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    if (a.emit[k] != Emit::reduce) continue;
    const C total = block_sum(sum[k], shared);
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
__global__ void __launch_bounds__(kThreads, mode == Mode::backward ? tuning::kReductionResidents : 1)
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

  C sum[O][V];
#pragma unroll
  for (int k = 0; k < O; ++k)
#pragma unroll
    for (int j = 0; j < V; ++j) sum[k][j] = C(0);
  const auto add = [&](int64_t i, int count) {
    C operand[O][V], v[O][V], gradients[O][V];
    const Fetched<T> f = fetch_inputs<Op, T, mode>(a, i, 0, count);
    load_operands(a, i, 0, count, operand, v, mode == Mode::double_backward);
    process<Op, T, mode>(a, f, i, 0, count, operand, v, gradients);
#pragma unroll
    for (int k = 0; k < Op::kOperands; ++k)
#pragma unroll
      for (int j = 0; j < V; ++j) sum[k][j] += gradients[k][j];
  };
  if (works) {
    const int64_t end = last * columns.channels, step = lines * columns.channels;
    int64_t i = (first + line) * columns.channels + column;
    if (width == V) {  // whole vectors, known to the compiler
#pragma unroll (tuning::kReductionUnroll)
      for (; i < end; i += step) add(i, V);
    } else {
      for (; i < end; i += step) add(i, 1);
    }
  }
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    if (a.emit[k] != Emit::reduce) continue;
    __syncthreads();
    if (line < lines) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (j < width) shared[(line * across + at) * width + j] = sum[k][j];
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

template <class Op, class T, Mode mode>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Args<Op, T> a, const __grid_constant__ Space<Op::kOperands> space,
                  const Reduction reduction, const int which) {
  using C = compute_of<T>;
  constexpr int O = Op::kOperands;
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (warp >= reduction.kept * reduction.chunks) return;
  const int64_t index = warp / reduction.chunks;
  const int64_t from = warp % reduction.chunks * reduction.length;
  const int64_t to = from + reduction.length < reduction.reduced ? from + reduction.length : reduction.reduced;
  C sum = C(0);
  int64_t offset[Space<O>::kRows];
  for (int64_t r = from + threadIdx.x % kWarp; r < to; r += kWarp) {
    space.offsets(index * reduction.reduced + r, offset);
    const Outputs<C, O> out = evaluate_at<Op, T, mode, C>(a, offset);
#pragma unroll
    for (int k = 0; k < O; ++k) sum += k == which ? out.operand[k] : C(0);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) {
    if (reduction.chunks == 1) {
      space.offsets(index * reduction.reduced, offset);
#pragma unroll
      for (int k = 0; k < O; ++k)
        if (k == which) store_gradient<C, T>(a.gradient[k], a.gradient_is_compute[k], offset[3 + 2 * O + k], sum);
    } else {
      // `partial` is indexed by operand at compile time only.
#pragma unroll
      for (int k = 0; k < O; ++k)
        if (k == which) a.partial[k][warp] = sum;
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

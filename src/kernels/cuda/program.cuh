// The CUDA kernels of Programs. The element type is data, so each serves all types that compute in C:
//
//   program_kernel           full tensors dense in one order, or in rows with a pitch, or halves of pairs; codes, too, of
//                            light steps
//   program_backward_kernel  the same; operand gradients summed over the rows of a channel (NCHW) or of a matrix
//                            (channels_last, features)
//   strided_kernel           any strides, any mode
//   reduce_kernel            the gradient of one operand, any strides and any broadcast pattern
//
// The first two are for float32 arithmetic and up to kShortElements, so that an index has 32 bits. A thread takes eight
// elements or more, so that they share the cost of finding out what to do. There is one kernel for all that backward may
// have to sum, since the compiler takes a minute for every kernel that has all steps.
#pragma once

#include "kernels.cuh"

namespace fused_act {

// ---- what a thread remembers ------------------------------------------------------------------------------------

// The block's dynamic shared memory as columns, one a thread: entries of the numbers of a group, and a mask. Registers
// cannot be indexed at run time, and local memory would travel through the L2 cache.
template <int lanes>
class Scratch {
  static constexpr int kQuarters = lanes / 4;
  using GroupLanes = Lanes<float, lanes>;
  using Mask = std::conditional_t<lanes == 8, uint8_t, uint16_t>;

 public:
  static constexpr int kEntryBytes = lanes * sizeof(float) + sizeof(Mask);  // of a thread

  __device__ __forceinline__ explicit Scratch(int entries)
      : column_(threadIdx.x * uint32_t(sizeof(float4))), row_(blockDim.x * uint32_t(sizeof(float4))),
        masks_(kQuarters * entries * row_ + threadIdx.x * uint32_t(sizeof(Mask))) {
    // Registers for these: the compiler would compute them anew for every step, ten of the thirty instructions that
    // finding a step takes.
    asm volatile("" : "+r"(column_), "+r"(row_), "+r"(masks_));
  }
  __device__ __forceinline__ GroupLanes read(int entry) const {
    GroupLanes n;
#pragma unroll
    for (int k = 0; k < kQuarters; ++k) {
      const float4 q = at(entry, k);
      n.lane[4 * k] = q.x;
      n.lane[4 * k + 1] = q.y;
      n.lane[4 * k + 2] = q.z;
      n.lane[4 * k + 3] = q.w;
    }
    return n;
  }
  __device__ __forceinline__ void write(int entry, const GroupLanes& n) {
#pragma unroll
    for (int k = 0; k < kQuarters; ++k) {
      const float* l = n.lane + 4 * k;
      at(entry, k) = make_float4(l[0], l[1], l[2], l[3]);
    }
  }
  __device__ __forceinline__ Cotangent<GroupLanes> read_masked(int entry) const {
    const unsigned bits = mask(entry);
    Cotangent<GroupLanes> c{read(entry), {}};
#pragma unroll
    for (int j = 0; j < lanes; ++j) c.active.lane[j] = bits >> j & 1;
    return c;
  }
  __device__ __forceinline__ void write_masked(int entry, const GroupLanes& n, const LaneMask<lanes>& active) {
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < lanes; ++j) bits |= unsigned(active.lane[j]) << j;
    write(entry, n);
    mask(entry) = static_cast<Mask>(bits);
  }
  // Number j of another thread's entry.
  __device__ __forceinline__ float number(int entry, int thread, int j) const {
    const char* from = memory() + (kQuarters * entry + j / 4) * row_ + thread * sizeof(float4);
    return reinterpret_cast<const float*>(from)[j % 4];
  }

 private:
  __device__ __forceinline__ static char* memory() {
    extern __shared__ float4 shared[];
    return reinterpret_cast<char*>(shared);
  }
  __device__ __forceinline__ float4& at(int entry, int quarter) const {
    return *reinterpret_cast<float4*>(memory() + column_ + (kQuarters * entry + quarter) * row_);
  }
  __device__ __forceinline__ Mask& mask(int entry) const {
    return *reinterpret_cast<Mask*>(memory() + masks_ + entry * (row_ / uint32_t(sizeof(float4) / sizeof(Mask))));
  }

  uint32_t column_, row_, masks_;
};

template <class N, int lanes>
struct SharedMemory {
  using GroupLanes = Lanes<float, lanes>;
  Scratch<lanes> scratch;
  const ProgramPlan& plan;

#if defined(__CUDA_ARCH__)
  FUSED_ACT_FN N value(int source) { return lanes_as<N>(scratch.read(source)); }
  FUSED_ACT_FN void save(int source, const N& x) { scratch.write(source, lanes_as<GroupLanes>(x)); }
  FUSED_ACT_FN Cotangent<GroupLanes> cotangent(int source) { return scratch.read_masked(source); }
  FUSED_ACT_FN void save(int source, const Cotangent<GroupLanes>& c) {
    scratch.write_masked(source, c.value, c.active);
  }
  FUSED_ACT_FN void record(int, int entry, int which, const GroupLanes& slope, const LaneMask<lanes>& active) {
    scratch.write_masked(plan.tape + entry + which, slope, active);
  }
  FUSED_ACT_FN Cotangent<GroupLanes> recorded(int, int entry, int which) {
    return scratch.read_masked(plan.tape + entry + which);
  }
#else  // never called: what a host compiler sees of a kernel
  N value(int) { return {}; }
  void save(int, const N&) {}
  Cotangent<GroupLanes> cotangent(int) { return {}; }
  void save(int, const Cotangent<GroupLanes>&) {}
  void record(int, int, int, const GroupLanes&, const LaneMask<lanes>&) {}
  Cotangent<GroupLanes> recorded(int, int, int) { return {}; }
#endif
};

// For coded programs: entry k of the tape has the tangent of slot k.
template <class N, int lanes>
struct SharedMemory<Keyed<N>, lanes> {
  using K = Keyed<N>;
  Scratch<lanes> scratch;
  const ProgramPlan& plan;

#if defined(__CUDA_ARCH__)
  FUSED_ACT_FN K value(int source) {
    return {scratch.read(source), scratch.read(plan.tape + source - kMaxOperands)};
  }
  FUSED_ACT_FN void save(int source, const K& x) {
    scratch.write(source, x.value);
    scratch.write(plan.tape + source - kMaxOperands, x.tangent);
  }
#else  // never called: what a host compiler sees of a kernel
  K value(int) { return {}; }
  void save(int, const K&) {}
#endif
};

template <Mode mode, class G, class Sums>
struct GroupIo {
  using N = NumberOf<mode, G>;
  const Args<Program, float>& a;
  const G& at;
  Scratch<G::kLanes>& scratch;
  Sums& sums;

  __device__ __forceinline__ void load() {
    AxisPlace<G> place;
#pragma unroll  // so that the arguments' addresses are constants
    for (int k = 0; k < kMaxOperands; ++k) {
      if (k >= a.plan.operands) break;
      scratch.write(k, load_operand<LoadsAll>(a.operand[k], at, place));
    }
  }
  FUSED_ACT_FN N operand(int k) const {
#if defined(__CUDA_ARCH__)
    return lanes_as<N>(scratch.read(k));
#else
    return constant<N>(0);
#endif
  }
  FUSED_ACT_FN N direction(int) const { return constant<N>(0); }
  FUSED_ACT_FN bool moves(int) const { return false; }
  FUSED_ACT_FN void gradient(int k, const N& value) {
#if defined(__CUDA_ARCH__)
    const auto plain = lanes_as<Lanes<float, G::kLanes>>(value);
    if (a.emit[k] == Emit::reduce) sums.add(k, plain, at);
    if (a.emit[k] == Emit::store) store_gradient(a, k, a.plan.gradient[k], at, plain);
#endif
  }
  template <class M>
  FUSED_ACT_FN SharedMemory<M, G::kLanes> memory() const {
    return {scratch, a.plan};
  }
};

// Loads, evaluates, stores the result and deals with operand gradients. `all`: whether there may be steps that are not
// light.
template <Mode mode, bool all, class G, class Sums>
__device__ __forceinline__ void process_group(const Args<Program, float>& a, G& at, Scratch<G::kLanes>& scratch, Sums& sums) {
  constexpr bool forward = mode == Mode::forward || mode == Mode::coded;
  constexpr int bytes = G::kBytes;
  using N = NumberOf<mode, G>;
  if (a.plan.pitched) {
#pragma unroll
    for (int p = 0; p < at.kParts; ++p) at.row[p] = a.plan.by_inner.quotient(at.i[p]);
  }
  GroupIo<mode, G, Sums> io{a, at, scratch, sums};
  Bits<bytes, G::kLanes> x{}, g{};
  const auto load = [&]() FUSED_ACT_LAMBDA {
    if (a.x) x = load_full<!forward, bytes>(a.x, a.plan.x, at);  // in forward x may be the output, too
    if (!forward && a.g) g = load_full<!forward, bytes>(a.g, a.plan.g, at);
  };
  // Whole groups are on their way before the operands are looked at. Others wait: where the two ways of loading meet, the
  // compiler copies registers, and that would wait for what was loaded.
  if (at.whole) load();
  io.load();
  if (!at.whole) load();
  const N zero = constant<N>(0);
  using Op = std::conditional_t<all, const Program&, LightProgram>;
  const Outputs<N> out = evaluate<mode>(Op{a.op}, a.scalars, lanes_as<N>(to_lanes(x, a.dtype)),
                                        forward ? zero : lanes_as<N>(to_lanes(g, a.dtype)), zero, false, io);
  if constexpr (mode == Mode::coded) store_codes(a, at, out.full[1]);
  if (a.out[0]) store_full<bytes>(a.out[0], a.plan.out, at, to_bits<bytes>(out.full[0], a.dtype));
}

// What a thread takes at a time: consecutive elements of a 16-bit type, or vectors of them, so that neighbouring threads
// read neighbouring 16 bytes.
template <int bytes, int lanes>
using ProgramGroup = Group<bytes, lanes / kVector<bytes>, uint32_t>;

// `mode`: forward or coded.
template <int bytes, bool all, Mode mode>
__global__ void __launch_bounds__(kThreads, all || mode == Mode::coded ? tuning::kProgramResidents
                                                                       : tuning::kLightProgramResidents<bytes>)
    program_kernel(const __grid_constant__ Args<Program, float> a) {
  wait_for_earlier();
  constexpr int n = kVector<bytes>, lanes = tuning::program_lanes(mode, bytes, all);
  const uint32_t i = blockIdx.x * blockDim.x * lanes + threadIdx.x * n, numel = uint32_t(a.numel);
  if (mode == Mode::forward && i >= numel) return;  // a neighbour may need this thread's codes
  ProgramGroup<bytes, lanes> at(i, blockDim.x * n, 0, numel);
  Scratch<lanes> scratch(a.plan.entries);
  NoSums sums;
  process_group<mode, all>(a, at, scratch, sums);
}

// What the blocks of program_backward_kernel go through, and what they sum on the way.
struct ProgramWalk {
  enum Kind { flat, rows, columns } kind = flat;
  Rows by_rows{};
  Columns by_columns{};
};

template <int bytes>
__global__ void __launch_bounds__(kThreads, tuning::kProgramBackwardResidents)
    program_backward_kernel(const __grid_constant__ Args<Program, float> a, const __grid_constant__ ProgramWalk walk) {
  wait_for_earlier();
  constexpr int lanes = tuning::program_lanes(Mode::backward, bytes, true);
  using G = ProgramGroup<bytes, lanes>;
  using GroupLanes = Lanes<float, lanes>;
  struct Sums {
    Scratch<lanes>& scratch;
    const ProgramWalk::Kind kind;
    const ProgramPlan& plan;
    RowSums<kMaxOperands, float> of_rows;
    // Of columns in scratch memory: four times eight registers would be too many.
    __device__ __forceinline__ void add(int k, const GroupLanes& value, const G& at) {
      if (kind == ProgramWalk::rows) return of_rows.add(k, value, at);
      GroupLanes sum = scratch.read(plan.sums[k]);
      at.for_each([&](int j) FUSED_ACT_LAMBDA { sum.lane[j] += value.lane[j]; });
      scratch.write(plan.sums[k], sum);
    }
  };
  constexpr int n = kVector<bytes>, kLine = 128 / bytes;
  Scratch<lanes> scratch(a.plan.entries);
  Sums sums{scratch, walk.kind, a.plan, {}};
  // Stretches [start, start + length) of the walk, each `next` after the other. A thread takes a group at `first` from
  // there, and at every `step`; with rows, from the 128-byte line on that the stretch begins in. An index has 32 bits and
  // the next one need not: 2^31 apart means that there is no next one.
  uint32_t start, length, next = 0, first, apart, stretches = 1;
  if (walk.kind == ProgramWalk::flat) {
    start = blockIdx.x * blockDim.x * lanes;
    length = min(uint32_t(a.numel) - start, blockDim.x * lanes);
    first = threadIdx.x * n;
    apart = blockDim.x * n;
  } else if (walk.kind == ProgramWalk::rows) {
    const RowChunk<uint32_t> chunk(walk.by_rows);
    start = uint32_t(chunk.start(walk.by_rows, chunk.first + chunk.line));
    length = uint32_t(chunk.to - chunk.from);
    next = uint32_t(chunk.lines * walk.by_rows.channels * walk.by_rows.inner);
    stretches = uint32_t(chunk.last - chunk.first - chunk.line + chunk.lines - 1) / uint32_t(chunk.lines);
    first = chunk.lane * n;
    apart = walk.by_rows.width * n;
  } else {
    const ColumnChunk chunk(walk.by_columns, n);
    stretches = chunk.works && chunk.start < a.numel;
    start = uint32_t(chunk.start);
    length = uint32_t(a.numel) - start;
    first = 0;
    apart = uint32_t(min(chunk.step, int64_t(1) << 31));
    for (int k = 0; k < kMaxOperands; ++k)
      if (a.emit[k] == Emit::reduce) scratch.write(a.plan.sums[k], constant<GroupLanes>(0));
  }
  const uint32_t step = apart >> 31 ? apart : apart * G::kParts;
#pragma unroll 1
  for (; stretches > 0; --stretches, start += next) {
    const uint32_t line = walk.kind == ProgramWalk::rows ? start / kLine * kLine : start;
    const uint32_t end = start + length;
#pragma unroll 1
    for (uint32_t i = line + first; i < end; i += step) {
      G at(i, apart, start, end);
      process_group<Mode::backward, true>(a, at, scratch, sums);
      if (end - i <= step) break;  // i + step may not fit in 32 bits
    }
  }
  if (walk.kind == ProgramWalk::rows) return sums.of_rows.emit(a, walk.by_rows, RowChunk<uint32_t>(walk.by_rows));
  if (walk.kind != ProgramWalk::columns) return;
  __syncthreads();
  const int lines = ColumnChunk(walk.by_columns, n).lines;
  for (int k = 0; k < kMaxOperands; ++k) {
    if (a.emit[k] != Emit::reduce) continue;
    emit_columns(a, k, walk.by_columns, lines, n, [&](int thread, int j) {
      const float sum = scratch.number(a.plan.sums[k], thread, j);
      return G::kParts == 1 ? sum : sum + scratch.number(a.plan.sums[k], thread, j + n);
    });
  }
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

template <class N>
struct ElementIo {
  using C = compute_t<N>;
  const Args<Program, C>& a;
  const Space& space;
  const int64_t i;
  N* gradients;

  FUSED_ACT_FN N read(const OperandArg<C>& o, int row) const {
#if defined(__CUDA_ARCH__)
    if (o.access == Access::constant) return constant<N>(o.value);
    return constant<N>(load_element<C>(o.data, o.dtype, space.offset(row, i)));
#else
    return constant<N>(0);
#endif
  }
  FUSED_ACT_FN N operand(int k) const { return read(a.operand[k], kOperand + k); }
  FUSED_ACT_FN N direction(int k) const { return read(a.v[k], kV + k); }
  FUSED_ACT_FN bool moves(int k) const { return a.has_v[k]; }
  FUSED_ACT_FN void gradient(int k, const N& value) { gradients[k] = value; }
  template <class M>
  FUSED_ACT_FN LocalMemory<M> memory() const {
    return {};
  }
};

template <class N>
struct ElementResults {
  Outputs<N> out;
  N gradient[kMaxOperands];
};

// The one element of a number.
template <class C>
__device__ __forceinline__ C element_of(const Lanes<C, 1, true>& n) {
  return n.lane[0];
}
template <class C>
__device__ __forceinline__ C element_of(const C& n) {
  return n;
}

// Not inlined: with all steps in each of the kernels that call it, the compiler would take twice as long.
template <class N, Mode mode>
__device__ __noinline__ ElementResults<N> evaluate_at(const Args<Program, compute_t<N>>& a, const Space& space, int64_t i) {
  using C = compute_t<N>;
  const auto read = [&](const void* p, int row) FUSED_ACT_LAMBDA {
    return constant<N>(p ? load_element<C>(p, a.dtype, space.offset(row, i)) : C(0));
  };
  ElementResults<N> results{};
  ElementIo<N> io{a, space, i, results.gradient};
  results.out = evaluate<mode>(a.op, a.scalars, read(a.x, kX), read(a.g, kG), read(a.u, kU), a.has_u, io);
  return results;
}

template <class N, Mode mode>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ Args<Program, compute_t<N>> a, const __grid_constant__ Space space) {
  wait_for_earlier();
  const int64_t first = int64_t(blockIdx.x) * kThreads * tuning::kStridedElements + threadIdx.x;
#pragma unroll 1
  for (int n = 0; n < tuning::kStridedElements; ++n) {
    const int64_t i = first + n * kThreads;
    if (i >= a.numel) return;
    const ElementResults<N> results = evaluate_at<N, mode>(a, space, i);
    constexpr int outputs = full_outputs(mode);
#pragma unroll
    for (int k = 0; k < outputs; ++k)
      if (a.out[k]) store_element(a.out[k], a.dtype, space.offset(kOut + k, i), element_of(results.out.full[k]));
    if constexpr (has_operand_gradients(mode)) {
#pragma unroll
      for (int k = 0; k < kMaxOperands; ++k)
        if (a.emit[k] == Emit::store)
          store_element(a.gradient[k], a.gradient_dtype[k], space.offset(kGradient + k, i), results.gradient[k]);
    }
  }
}

// The dimensions of a Space, kept ones before reduced ones.
struct Reduction {
  int64_t kept, reduced;
  int64_t length, chunks;
  int kept_ndim;
};

template <class C, Mode mode>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Args<Program, C> a, const __grid_constant__ Space space,
                  const Reduction reduction, const int which) {
  wait_for_earlier();
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (warp >= reduction.kept * reduction.chunks) return;
  const int64_t index = warp / reduction.chunks, chunk = warp % reduction.chunks;
  const int64_t from = chunk * reduction.length;
  const int64_t to = from + reduction.length < reduction.reduced ? from + reduction.length : reduction.reduced;
  C total = C(0);
  for (int64_t r = from + threadIdx.x % kWarp; r < to; r += kWarp)
    total += evaluate_at<C, mode>(a, space, index * reduction.reduced + r).gradient[which];
  const C sum = warp_sum(total);
  if (threadIdx.x % kWarp == 0) {
    if (reduction.chunks == 1) {
      store_element(a.gradient[which], a.gradient_dtype[which],
                    space.offset(kGradient + which, index * reduction.reduced), sum);
    } else {
      a.partial[which][chunk * reduction.kept + index] = sum;
    }
  }
}

}  // namespace fused_act

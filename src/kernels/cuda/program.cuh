// The CUDA kernels of Programs. The element type is data, so each serves all types that compute in C:
//
//   program_flat_kernel      full tensors dense in one order, or in rows with a pitch, or halves of pairs
//   program_row_kernel       flat, and operand gradients summed over the rows of a channel (NCHW)
//   program_column_kernel    flat, and operand gradients summed over the rows of a matrix (channels_last, features)
//   strided_kernel           any strides, any mode
//   reduce_kernel            the gradient of one operand, any strides and any broadcast pattern
//
// The first three are for float32 arithmetic, the two modes of training and up to kProgramElements, so that an index has
// 32 bits. A thread takes eight elements, so that the cost of finding out what to do is shared by eight.
#pragma once

#include "kernels.cuh"

namespace fused_act {

// ---- groups of eight --------------------------------------------------------------------------------------------

constexpr int kGroup = 8;
// Divider wants indices below 2^31, beyond which a block may go by what it takes at a time.
constexpr int64_t kProgramElements = (int64_t(1) << 31) - (1 << 16);
using GroupLanes = Lanes<float, kGroup>;

// Eight elements: consecutive ones of a 16-bit type, or two times four of float32, so that neighbouring threads read
// neighbouring 16 bytes.
template <int bytes>
struct Group {
  static constexpr int n = kVector<bytes>, kParts = kGroup / n;
  Part<uint32_t> part[kParts];

  // Is lane j wanted?
  __device__ __forceinline__ bool has(int j) const { return j % n >= part[j / n].lo && j % n < part[j / n].hi; }
};

// The vectors at i, i + apart..., cut to [start, end).
template <int bytes>
__device__ __forceinline__ Group<bytes> make_group(uint32_t i, uint32_t apart, uint32_t start, uint32_t end) {
  using G = Group<bytes>;
  G at;
#pragma unroll
  for (int p = 0; p < G::kParts; ++p) {
    at.part[p] = {i + p * apart, 0, 0, G::n};
    if (at.part[p].i < start) at.part[p].lo = min(start - at.part[p].i, uint32_t(G::n));
    if (end - at.part[p].i < G::n || at.part[p].i > end) at.part[p].hi = at.part[p].i < end ? end - at.part[p].i : 0;
  }
  return at;
}

// load(part) gives the lanes of one part; a part without elements may lie beyond the end of every tensor.
template <int bytes, class F>
__device__ __forceinline__ GroupLanes load_group(const Group<bytes>& at, F load) {
  using G = Group<bytes>;
  GroupLanes out;
#pragma unroll
  for (int p = 0; p < G::kParts; ++p) {
    Lanes<float, G::n> lanes = constant<Lanes<float, G::n>>(0);
    if (p == 0 || at.part[p].lo < at.part[p].hi) lanes = load(at.part[p]);
#pragma unroll
    for (int j = 0; j < G::n; ++j) out.lane[p * G::n + j] = lanes.lane[j];
  }
  return out;
}

// store(part, lanes)
template <int bytes, class F>
__device__ __forceinline__ void store_group(const Group<bytes>& at, const GroupLanes& values, F store) {
  using G = Group<bytes>;
#pragma unroll
  for (int p = 0; p < G::kParts; ++p) {
    Lanes<float, G::n> lanes;
#pragma unroll
    for (int j = 0; j < G::n; ++j) lanes.lane[j] = values.lane[p * G::n + j];
    store(at.part[p], lanes);
  }
}

// ---- what a thread remembers ------------------------------------------------------------------------------------

// The block's dynamic shared memory as columns, one a thread: entries of eight numbers and a mask. Registers cannot be
// indexed at run time, and local memory would travel through the L2 cache.
class Scratch {
 public:
  static constexpr int kEntryBytes = kGroup * sizeof(float) + 1;  // of a thread

  __device__ __forceinline__ explicit Scratch(int entries) {
    extern __shared__ float4 memory[];
    numbers_ = memory + threadIdx.x;
    masks_ = reinterpret_cast<uint8_t*>(memory + 2 * entries * blockDim.x) + threadIdx.x;
  }
  __device__ __forceinline__ GroupLanes read(int entry) const {
    const float4 a = numbers_[2 * entry * blockDim.x], b = numbers_[(2 * entry + 1) * blockDim.x];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
  __device__ __forceinline__ void write(int entry, const GroupLanes& n) {
    const float* l = n.lane;
    numbers_[2 * entry * blockDim.x] = make_float4(l[0], l[1], l[2], l[3]);
    numbers_[(2 * entry + 1) * blockDim.x] = make_float4(l[4], l[5], l[6], l[7]);
  }
  __device__ __forceinline__ Cotangent<GroupLanes> read_masked(int entry) const {
    const unsigned bits = masks_[entry * blockDim.x];
    Cotangent<GroupLanes> c{read(entry), {}};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) c.active.lane[j] = bits >> j & 1;
    return c;
  }
  __device__ __forceinline__ void write_masked(int entry, const GroupLanes& n, const LaneMask<kGroup>& active) {
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) bits |= unsigned(active.lane[j]) << j;
    write(entry, n);
    masks_[entry * blockDim.x] = static_cast<uint8_t>(bits);
  }
  // Number j of another thread's entry.
  __device__ __forceinline__ float number(int entry, int thread, int j) const {
    const float4* p = numbers_ - threadIdx.x + thread + (2 * entry + j / 4) * blockDim.x;
    return reinterpret_cast<const float*>(p)[j % 4];
  }

 private:
  float4* numbers_;
  uint8_t* masks_;
};

struct SharedMemory {
  Scratch scratch;
  const ProgramPlan& plan;

#if defined(__CUDA_ARCH__)
  FUSED_ACT_FN GroupLanes value(int source) { return scratch.read(source); }
  FUSED_ACT_FN void save(int source, const GroupLanes& x) { scratch.write(source, x); }
  FUSED_ACT_FN Cotangent<GroupLanes> cotangent(int source) { return scratch.read_masked(source); }
  FUSED_ACT_FN void save(int source, const Cotangent<GroupLanes>& c) {
    scratch.write_masked(source, c.value, c.active);
  }
  FUSED_ACT_FN void record(int, int entry, int which, const GroupLanes& slope, const LaneMask<kGroup>& active) {
    scratch.write_masked(plan.tape + entry + which, slope, active);
  }
  FUSED_ACT_FN Cotangent<GroupLanes> recorded(int, int entry, int which) {
    return scratch.read_masked(plan.tape + entry + which);
  }
#else  // never called: what a host compiler sees of a kernel
  GroupLanes value(int) { return {}; }
  void save(int, const GroupLanes&) {}
  Cotangent<GroupLanes> cotangent(int) { return {}; }
  void save(int, const Cotangent<GroupLanes>&) {}
  void record(int, int, int, const GroupLanes&, const LaneMask<kGroup>&) {}
  Cotangent<GroupLanes> recorded(int, int, int) { return {}; }
#endif
};

template <int bytes, class Sums>
struct GroupIo {
  const Args<Program, float>& a;
  const Group<bytes>& at;
  Scratch& scratch;
  Sums& sums;

  __device__ __forceinline__ void load() {
    AxisPlace<uint32_t> place[Group<bytes>::kParts];
#pragma unroll  // so that the arguments' addresses are constants
    for (int k = 0; k < kMaxOperands; ++k) {
      if (k >= a.plan.operands) break;
      const OperandArg<float>& o = a.operand[k];
      if (o.is_along_axis() && place[0].axis != o.axis) {
        place[0].find(o, at.part[0].i);
#pragma unroll
        for (int p = 1; p < Group<bytes>::kParts; ++p) {  // mostly on the same channel
          place[p] = place[0];
          place[p].rest += at.part[p].i - at.part[0].i;
          if (place[p].rest >= uint32_t(o.inner)) place[p].find(o, at.part[p].i);
        }
      }
      scratch.write(k, load_group(at, [&](const Part<uint32_t>& part) {
                      return load_operand<bytes, Group<bytes>::n>(o, part, place[&part - at.part]);
                    }));
    }
  }
  FUSED_ACT_FN GroupLanes operand(int k) const {
#if defined(__CUDA_ARCH__)
    return scratch.read(k);
#else
    return constant<GroupLanes>(0);
#endif
  }
  FUSED_ACT_FN GroupLanes direction(int) const { return constant<GroupLanes>(0); }
  FUSED_ACT_FN bool moves(int) const { return false; }
  FUSED_ACT_FN void gradient(int k, const GroupLanes& value) {
#if defined(__CUDA_ARCH__)
    if (a.emit[k] == Emit::reduce) sums.add(k, value, at);
    if (a.emit[k] == Emit::store)
      store_group(at, value, [&](const Part<uint32_t>& part, const Lanes<float, Group<bytes>::n>& lanes) {
        store_gradient<bytes>(a, k, a.plan.gradient[k], part, lanes);
      });
#endif
  }
  template <class M>
  FUSED_ACT_FN SharedMemory memory() const {
    return {scratch, a.plan};
  }
};

struct NoGroupSums {
  template <int bytes>
  __device__ __forceinline__ void add(int, const GroupLanes&, const Group<bytes>&) {}
};

// Loads, evaluates, stores the result and deals with operand gradients.
template <int bytes, Mode mode, class Sums>
__device__ __forceinline__ void process_group(const Args<Program, float>& a, Group<bytes>& at, Scratch& scratch,
                                              Sums& sums) {
  using G = Group<bytes>;
  if (a.plan.pitched) {
#pragma unroll
    for (int p = 0; p < G::kParts; ++p) at.part[p].row = a.plan.by_inner.quotient(at.part[p].i);
  }
  GroupIo<bytes, Sums> io{a, at, scratch, sums};
  constexpr bool forward = mode == Mode::forward;
  // All loads are on their way before the first value is converted.
  using B = Bits<bytes, G::n>;
  B x[G::kParts] = {}, g[G::kParts] = {};
  const auto load = [&](B* to, const void* p, const Lay& lay) {
    if (!p) return;
#pragma unroll
    for (int k = 0; k < G::kParts; ++k)
      to[k] = load_full<!forward, bytes, G::n>(p, lay, at.part[k]);  // in forward x may be the output, too
  };
  load(x, a.x, a.plan.x);
  if constexpr (!forward) load(g, a.g, a.plan.g);
  io.load();
  const auto lanes = [&](const B* from) {
    return load_group(at, [&](const Part<uint32_t>& part) { return to_lanes(from[&part - at.part], a.dtype); });
  };
  const GroupLanes zero = constant<GroupLanes>(0);
  const Outputs<GroupLanes> out =
      evaluate<mode>(a.op, a.scalars, lanes(x), forward ? zero : lanes(g), zero, false, io);
  if (!a.out[0]) return;
  store_group(at, out.full[0], [&](const Part<uint32_t>& part, const Lanes<float, G::n>& values) {
    store_full(a.out[0], a.plan.out, part, to_bits<bytes, G::n>(values, a.dtype));
  });
}

template <Mode mode>
constexpr int kProgramResidents = mode == Mode::forward ? tuning::kProgramResidents : tuning::kProgramBackwardResidents;

template <int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, kProgramResidents<mode>)
    program_flat_kernel(const __grid_constant__ Args<Program, float> a) {
  constexpr int n = kVector<bytes>;
  const uint32_t i = blockIdx.x * blockDim.x * kGroup + threadIdx.x * n, numel = uint32_t(a.numel);
  if (i >= numel) return;
  Group<bytes> at = make_group<bytes>(i, blockDim.x * n, i, numel);
  Scratch scratch(a.plan.entries);
  NoGroupSums sums;
  process_group<bytes, mode>(a, at, scratch, sums);
}

template <int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, kProgramResidents<mode>)
    program_row_kernel(const __grid_constant__ Args<Program, float> a, const Rows rows) {
  struct Sums : RowSums<kMaxOperands, float> {
    __device__ __forceinline__ void add(int k, const GroupLanes& value, const Group<bytes>& at) {
      float inside = 0;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) inside += at.has(j) ? value.lane[j] : 0.0f;
#pragma unroll
      for (int n = 0; n < kMaxOperands; ++n)
        if (n == k) sum[n] += inside;
    }
  };
  const RowChunk chunk(rows);
  constexpr int n = kVector<bytes>, kLine = 128 / bytes;
  const int step = rows.width * n;
  Scratch scratch(a.plan.entries);
  Sums sums{};
  for (int64_t o = chunk.first + chunk.line; o < chunk.last; o += chunk.lines) {
    const uint32_t start = uint32_t(chunk.start(rows, o));
    const uint32_t end = start + uint32_t(chunk.to - chunk.from);
#pragma unroll 1
    for (uint32_t i = start / kLine * kLine + chunk.lane * n; i < end; i += step * Group<bytes>::kParts) {
      Group<bytes> at = make_group<bytes>(i, step, start, end);
      process_group<bytes, mode>(a, at, scratch, sums);
    }
  }
  sums.emit(a, rows, chunk);
}

template <int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, kProgramResidents<mode>)
    program_column_kernel(const __grid_constant__ Args<Program, float> a, const Columns columns) {
  struct Sums {  // in scratch memory: four times eight registers would be too many
    Scratch& scratch;
    const int entry;
    __device__ __forceinline__ void add(int k, const GroupLanes& value, const Group<bytes>& at) {
      GroupLanes sum = scratch.read(entry + k);
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (at.has(j)) sum.lane[j] += value.lane[j];
      scratch.write(entry + k, sum);
    }
  };
  constexpr int n = kVector<bytes>, kParts = Group<bytes>::kParts;
  const ColumnChunk chunk(columns, n);
  Scratch scratch(a.plan.entries);
  Sums sums{scratch, a.plan.sums};
  for (int k = 0; k < kMaxOperands; ++k)
    if (a.emit[k] == Emit::reduce) scratch.write(a.plan.sums + k, constant<GroupLanes>(0));
  if (chunk.works) {
    const int64_t end = min(chunk.last * columns.width(), a.numel), step = chunk.lines * columns.width();
#pragma unroll 1
    for (int64_t i = (chunk.first + chunk.line) * columns.width() + chunk.column; i < end; i += step * kParts) {
      Group<bytes> at = make_group<bytes>(i, step, i, end);
      process_group<bytes, mode>(a, at, scratch, sums);
    }
  }
  __syncthreads();
  for (int k = 0; k < kMaxOperands; ++k) {
    if (a.emit[k] != Emit::reduce) continue;
    emit_columns(a, k, columns, chunk.lines, n, [&](int thread, int j) {
      const float first = scratch.number(a.plan.sums + k, thread, j);
      return kParts == 1 ? first : first + scratch.number(a.plan.sums + k, thread, j + n);
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

template <class C>
struct ElementIo {
  const Args<Program, C>& a;
  const Space& space;
  const int64_t i;
  C* gradients;

  FUSED_ACT_FN C read(const OperandArg<C>& o, int row) const {
#if defined(__CUDA_ARCH__)
    if (o.access == Access::constant) return o.value;
    return load_element<C>(o.data, o.dtype, space.offset(row, i));
#else
    return C(0);
#endif
  }
  FUSED_ACT_FN C operand(int k) const { return read(a.operand[k], kOperand + k); }
  FUSED_ACT_FN C direction(int k) const { return read(a.v[k], kV + k); }
  FUSED_ACT_FN bool moves(int k) const { return a.has_v[k]; }
  FUSED_ACT_FN void gradient(int k, const C& value) { gradients[k] = value; }
  template <class M>
  FUSED_ACT_FN LocalMemory<M> memory() const {
    return {};
  }
};

template <class C>
struct ElementResults {
  Outputs<C> out;
  C gradient[kMaxOperands];
};

// Not inlined: with all steps in each of the kernels that call it, the compiler would take twice as long.
template <class C, Mode mode>
__device__ __noinline__ ElementResults<C> evaluate_at(const Args<Program, C>& a, const Space& space, int64_t i) {
  const auto read = [&](const void* p, int row) {
    return p ? load_element<C>(p, a.dtype, space.offset(row, i)) : C(0);
  };
  ElementResults<C> results{};
  ElementIo<C> io{a, space, i, results.gradient};
  results.out = evaluate<mode>(a.op, a.scalars, read(a.x, kX), read(a.g, kG), read(a.u, kU), a.has_u, io);
  return results;
}

template <class C, Mode mode>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ Args<Program, C> a, const __grid_constant__ Space space) {
  const int64_t first = int64_t(blockIdx.x) * kThreads * tuning::kStridedElements + threadIdx.x;
#pragma unroll 1
  for (int n = 0; n < tuning::kStridedElements; ++n) {
    const int64_t i = first + n * kThreads;
    if (i >= a.numel) return;
    const ElementResults<C> results = evaluate_at<C, mode>(a, space, i);
    constexpr int outputs = full_outputs(mode);
#pragma unroll
    for (int k = 0; k < outputs; ++k)
      if (a.out[k]) store_element(a.out[k], a.dtype, space.offset(kOut + k, i), results.out.full[k]);
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
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (warp >= reduction.kept * reduction.chunks) return;
  const int64_t index = warp / reduction.chunks;
  const int64_t from = warp % reduction.chunks * reduction.length;
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
      a.partial[which][warp] = sum;
    }
  }
}

}  // namespace fused_act

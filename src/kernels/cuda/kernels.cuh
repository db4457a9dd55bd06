// What all CUDA kernels share, and the kernels of compiled chains, each a template over chain, element type and mode:
//
//   flat_kernel      full tensors dense in one order, one 16-byte vector a thread, or two; codes, too
//   several_kernel   the same of a large tensor where arithmetic counts, several vectors a thread
//   spread_kernel    full tensors that whole vectors do not fit, four elements a thread
//   row_kernel       flat, and operand gradients summed over the rows of a channel (NCHW)
//   column_kernel    flat, and operand gradients summed over the rows of a matrix (channels_last, features)
//   finish_kernel    sums the partial sums of the reductions, in a fixed order
//
// program.cuh has those of Programs. Block sizes and thresholds are in `tuning`.
#pragma once

#include "../forms.h"
#include "device.cuh"

namespace fused_act {

namespace tuning {
// Blocks that a reduction of a large tensor is cut into by row_kernel, and the most by reduce_kernel. Many, of as many bytes in
// either type, since the last wave idles: at (128, 64, 126, 126) on an H200 relu_bias's backward takes 1.09 copies in float32 with
// 16896 blocks and 1.12 with half of them, in bfloat16 1.27 and 1.20. (As many as run at once, each of which takes every n-th
// plane: 1.11 in float32 with a bias and silu, for 1.01.)
constexpr int64_t row_blocks(int bytes) { return bytes == 2 ? 8448 : 16896; }
constexpr int64_t kReduceBlocks = 4224;
// Of column_kernel, where each block leaves a partial sum for every channel, as many as run at once, all of which walk the rows
// together. A bias and silu there in bfloat16 takes 1.06 copies, with 1024 channels 1.07; with 4224 blocks of neighbouring rows it
// took 1.14 and 1.29, of scale, shift and relu 1.40 and 1.80. Where tiles of channels do not divide that number, this many times.
constexpr int kColumnWaves = 4;
// Vectors that a thread handles at least.
constexpr int kMinVectorsPerThread = 2;
// Whether an operand stands beside each element that has to be in registers when it is evaluated, with all else. (Of several
// operands one does, unless all lie along the axis of the sums.)
template <class Op>
constexpr bool kCrowded = kSurrounded<Op> && Op::kOperands > 1 && kAlong<Op> != (1u << Op::kOperands) - 1;
template <class Op>
constexpr bool kSeveralAlong = (kAlong<Op> & (kAlong<Op> - 1)) != 0;
// Elements that a thread of column_kernel takes side by side. It keeps a sum and an operand for each, which of several operands
// along the axis has no room in 16 bits: eight at a time took 1.26 copies of scale, shift and relu, four 1.18; gates with
// biases and relu 1.33 and 1.14, with gelu 1.62 and 1.31.
template <class Op, int bytes>
constexpr int column_elements = kSeveralAlong<Op> ? 4 : kVector<bytes>;
// What differs between architectures: the threads that a multiprocessor holds at most (its registers are 65,536 in all), and
// the vectors of 16 bytes that an instruction moves. By compute capability; one that is not listed is like the greatest below
// it.
struct Architecture {
  int capability, threads, vectors;
};
constexpr Architecture kArchitectures[] = {{750, 1024, 1}, {800, 2048, 1}, {860, 1536, 1},
                                           {900, 2048, 1}, {1000, 2048, 2}, {1100, 1536, 2}};
constexpr Architecture architecture(int capability) {
  Architecture found = kArchitectures[0];
  for (const Architecture& a : kArchitectures)
    if (a.capability <= capability) found = a;
  return found;
}
#if defined(__CUDA_ARCH__)
constexpr Architecture kThis = architecture(__CUDA_ARCH__);
#else  // never used: what a host compiler sees of a kernel
constexpr Architecture kThis = architecture(0);
#endif
constexpr int kMaxThreads = kThis.threads;
// Blocks of row_kernel and column_kernel that a multiprocessor holds at once: 64 registers a thread, or 80. (On 8.0 gates with
// biases and gelu have no room in 64.)
template <class Op>
constexpr int row_residents(int elements, const Architecture& a) {
  return elements == 8 && kCrowded<Op> && a.capability < 900 ? 3 : 4;
}
template <class Op, int bytes>
constexpr int column_residents = kSurrounded<Op> && column_elements<Op, bytes> == 8 && !(kCrowded<Op> && Op::kHeavy) ? 3 : 4;
// Vectors of which row_kernel and column_kernel load what they read before they evaluate the first: enough of it is then on
// its way for the memory of an H200. relu_bias's backward there, of the copy: one at a time 1.36 in bfloat16 and 1.27 in
// float32, two 1.20 and 1.09, four 1.08 and 1.10; with codes of two bits in bfloat16 two 1.20, four 1.13, six (80 registers) 1.25;
// of one bit in float32, where the compiler is told the derivatives, two 1.05, three 1.04, four 1.05 without the sums' end.
// One where more is read of each (gates with biases and relu in bfloat16: one 1.08, two 1.15), or where there is no room (two of
// scale and shift in columns took 1.04 in float32, one 1.02); and in columns in float32 where one bit tells derivatives that the
// compiler knows: so little is left that a multiprocessor holds more blocks (two 1.08, one 1.06; in bfloat16 1.09 and 1.19).
template <class Op>
constexpr int row_batch(int bytes) {
  if constexpr (kDecodes<Op>) {
    if (bytes == 2) return Op::kTwo && Op::kOperands > 1 ? 2 : 4;
    return Op::kTold ? 3 : 2;
  }
  return kCrowded<Op> ? 1 : 2;
}
template <class Op>
constexpr int column_batch(int bytes) {
  if constexpr (kDecodes<Op>) return bytes == 4 && Op::kTold && !Op::kTwo ? 1 : 2;
  return kCrowded<Op> || (bytes == 4 && kSurrounded<Op> && Op::kOperands > 1) ? 1 : 2;
}
// Whether a thread of flat_kernel may take two vectors side by side. Not where codes of four elements are put together by
// neighbours, nor of what has tensors that are not flat.
template <class Op>
constexpr bool may_take_two(Mode mode) {
  return !kSurrounded<Op> && mode != Mode::coded;
}
// How many it takes.
template <class Op>
constexpr int flat_vectors(Mode mode, const Architecture& a) {
  return may_take_two<Op>(mode) ? a.vectors : 1;
}
// Blocks of a compiled flat_kernel that a multiprocessor holds at least. In forward as many as there can be, 32 registers
// a thread on an H100; three quarters of that, 40 registers, for several operands beside eight elements. Backward of a cheap
// chain takes what registers it needs; with codes as few as there can be (of two bits in bfloat16 40 took 1.12 copies, 32, with
// two values of a vector that is not whole in memory, 1.03). (Threads with two vectors side by side are half as many, with twice
// the registers.)
template <class Op>
constexpr int flat_residents(Mode mode, int elements) {
  const int most = kMaxThreads / kThreads;
  if (mode == Mode::forward || mode == Mode::coded)
    return elements < 8 || Op::kOperands < 2 ? most : most * 3 / 4;
  if constexpr (kDecodes<Op>)
    return elements < 8 ? most : mode != Mode::backward || Op::kOperands > 1 ? most / 2 : most;
  return Op::kHeavy ? most / 2 : 1;
}
// Chains that are little but relu or leaky_relu: in forward with codes they wait for memory alone.
template <class Op>
constexpr bool kBrief = false;
template <class... Steps>
constexpr bool kBrief<Chain<Steps...>> =
    ((Steps::unit_slope || std::is_same_v<Steps, Mul> || std::is_same_v<Steps, Div> || std::is_same_v<Steps, Relu> ||
      std::is_same_v<Steps, LeakyRelu>) && ...);
// How many vectors a thread of several_kernel takes; 1: there is none, flat_kernel walks large tensors too. Of the copy, on an
// H200 in bfloat16, one and four: scale, shift and gelu 1.39 and 1.09, gates with biases and gelu 1.23 and 1.06, the backward
// of those two without sums 1.44 and 1.12, 1.32 and 1.08, of mish alone 1.14 and 1.01. What waits for memory anyway loses with
// four 1.5 %, and with two nothing. Forward with codes: a bias, a residual and relu 1.17 and 1.02, a minimum, a bias and a scale
// 1.25 and 1.17, softshrink 1.15 and 1.07, hardtanh 1.06 and 1.05; but relu and a bias 1.05 and 1.07.
template <class Op>
constexpr int several(Mode mode, int bytes) {
  if (mode == Mode::coded) return bytes == 2 && (kSurrounded<Op> ? kCrowded<Op> && !Op::kFramed : !kBrief<Op>) ? 4 : 1;
  const bool forward = mode == Mode::forward;
  if (!forward && (mode != Mode::backward || bytes != 2)) return 1;
  if constexpr (Op::kHeavy && (kAlong<Op> != 0 || (!kSurrounded<Op> && Op::kOperands == 0)))
    return Op::kSlow || (bytes == 2 && (kSurrounded<Op> || !forward)) ? 4 : 2;
  return bytes == 2 && kSeveralAlong<Op> && (kCrowded<Op> || !forward) ? 4 : 1;
}
// Blocks that are left at least: a few for each that runs at once; where instructions count most one or two, 1056 on an H200. Of
// 8 and 16 million elements in bfloat16 the backward of gates with biases and gelu takes 1.23 and 1.20 copies so, with 4224 1.40
// and 1.34, a residual and gelu 1.20 and 1.16 for 1.32 and 1.28; but scale, shift and silu 1.13 for 1.10, gelu alone 1.09 for 1.05.
template <class Op>
constexpr int64_t several_blocks(Mode mode, int bytes) {
  const bool slow = Op::kSlow && kSurrounded<Op> && (bytes == 2 || !kCrowded<Op>);
  return slow || mode == Mode::backward || mode == Mode::coded ? 1056 : 4224;
}
// Its blocks that a multiprocessor holds at least: in forward 32 registers a thread on an H100, 40 for several operands beside
// eight elements, 48 for a gate between two; with codes 40; in backward 48, and 64 for several along the axis.
template <class Op>
constexpr int several_residents(Mode mode, int elements) {
  const int most = kMaxThreads / kThreads;
  if (mode == Mode::coded) return most * 3 / 4;
  if (mode != Mode::forward) return kSeveralAlong<Op> ? most / 2 : most * 5 / 8;
  if (elements < 8 || Op::kOperands < 2) return most;
  return kSeveralAlong<Op> && kCrowded<Op> ? most * 5 / 8 : most * 3 / 4;
}
// Of spread_kernel: 40 registers a thread on an H100, and 64 in float32's backward of what is heavy. (In 40, four loaded values
// went through memory, and backward of halves of 63 elements and silu took 1.18 copies, for 1.02.)
template <class Op, int bytes>
constexpr int spread_residents(Mode mode) {
  const int most = kMaxThreads / kThreads;
  return bytes == 4 && mode == Mode::backward && Op::kHeavy ? most / 2 : most * 3 / 4;
}
// The same of a Program: 64 registers a thread in forward, 80 in backward. Reading a thread's next group while one is
// evaluated needs 80 in forward, too, and took 1.1 to 1.3 times as long: a step is mostly waiting, which other warps hide.
constexpr int kProgramResidents = 4;
template <int bytes>
constexpr int kLightProgramResidents = bytes == 4 ? 5 : 4;  // where all steps are light: 48 and 64 registers
constexpr int kProgramBackwardResidents = 3;
// Elements that a thread of a Program takes at a time, which share the cost of finding out what to do. 16 do not fit in the
// registers where there are heavy steps.
__host__ __device__ constexpr int program_lanes(Mode mode, int bytes, bool all) {
  return mode == Mode::forward && bytes == 2 && !all ? 16 : 8;
}
// Sums of a block of finish_kernel: those of the 32 bytes that memory moves at least. With a warp's width there were two blocks for
// 64 channels, and relu_bias's backward took 1.06 copies, for 1.05. And its threads at most, and the partial sums that one adds
// while there are fewer.
template <int bytes>
constexpr int kFinishWidth = 32 / bytes;
constexpr int kFinishThreads = 1024;
constexpr int kFinishChunks = 4;
// Elements that a thread of strided_kernel handles, and that a warp of reduce_kernel sums at least.
constexpr int kStridedElements = 4;
constexpr int64_t kWarpElements = 2048;
}  // namespace tuning

// What takes tensors of up to kShortElements alone, so that an index has 32 bits: with 64, what finds an operand's element or
// a byte of codes takes twice the instructions.
template <class Op, Mode mode>
constexpr bool kShort = Op::kDynamic || kSurrounded<Op> || kDecodes<Op> || mode == Mode::coded;
template <class Op, Mode mode>
using SignedIndex = std::conditional_t<kShort<Op, mode>, int32_t, int64_t>;
template <class Op, Mode mode>
using ReductionIndex = std::conditional_t<kShort<Op, mode>, uint32_t, int64_t>;

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
  uint32_t extra = 0;
  bool pair = false;
};

// What a thread takes at a time: `parts` vectors of x, of 16 bytes or of as many `elements`, of which those in [start, end) are
// wanted. An index has 32 bits where a tensor has less than 2^31 elements, 64 where that is not known. Whole groups, nearly all,
// are told apart once: what that saves is a third of the instructions of a bias and an activation.
template <int bytes, int parts, class I, int elements = kVector<bytes>>
struct Group {
  using Index = I;
  static constexpr bool kSpread = false;
  static constexpr int kBytes = bytes, kParts = parts, n = elements, kLanes = n * parts;
  Index i[parts], start, end;
  Index row[parts] = {};  // only where a tensor has a pitch
  bool whole;

  // All of one vector.
  __device__ __forceinline__ explicit Group(Index at) : i{at}, start(at), end(at + n), whole(true) {}
  // The vectors at `at`, at + apart...
  __device__ __forceinline__ Group(Index at, Index apart, Index start, Index end) : start(start), end(end) {
#pragma unroll
    for (int p = 0; p < parts; ++p) i[p] = at + p * apart;
    // A number that neither compiler can take apart: they would keep a predicate for each condition and each use, and pack
    // and unpack these around every step, 30 instructions a group.
    unsigned all = (at >= start & at < end & end - at >= (parts - 1) * apart + n) * blockDim.x;
    asm volatile("" : "+r"(all));
    whole = all;
  }
  // Is lane j wanted?
  __device__ __forceinline__ bool has(int j) const {
    const Index at = i[j / n] + j % n;
    return at >= start && at < end;
  }
  // f(j) of the lanes that are wanted. One branch for all of them: where each had its own, scale_shift_act's backward had 458
  // instructions for eight elements, a hundred of them branches.
  template <class F>
  __device__ __forceinline__ void for_each(F f) const {
    if (whole) {
#pragma unroll
      for (int j = 0; j < kLanes; ++j) f(j);
    } else {
      const Group g = cut();
#pragma unroll
      for (int j = 0; j < kLanes; ++j)
        if (g.has(j)) f(j);
    }
  }
  // The same group for the branch where it is not whole: the compiler cannot compare indices ahead of that branch.
  __device__ __forceinline__ Group cut() const {
    Group g = *this;
    if constexpr (sizeof(Index) == 8) {
      asm volatile("" : "+l"(g.start), "+l"(g.end));
    } else {
      asm volatile("" : "+r"(g.start), "+r"(g.end));
    }
    return g;
  }
  // Where part p of a tensor begins.
  __device__ __forceinline__ int64_t offset(const Lay& lay, int p) const {
    int64_t at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(uint32_t(row[p])), "r"(lay.extra), "l"(int64_t(i[p])));
    return lay.pair ? 2 * at : at;
  }
};

// Elements a warp's width apart, so that the threads of a warp read and write neighbours: of tensors whose rows are no whole
// vectors, or that begin between two. (With elements side by side in a thread every access of a warp met 32 places 16 bytes apart,
// and backward of halves of 63 elements took 4.9 copies in bfloat16 and 1.7 in float32; so it takes 1.5 and 1.0. Four elements in
// 16 bits, too: with eight, and fewer threads at a time, forward with gelu took 1.7 copies, for 1.5.)
template <int bytes>
struct Spread {
  using Index = uint32_t;
  static constexpr bool kSpread = true;
  static constexpr int kBytes = bytes, kParts = 1, n = 4, kLanes = n;
  Index i[1], end;
  Index element[n];   // its index, or that of the last where there is none
  Index row[n] = {};  // only where a tensor has a pitch

  // From `first` on, of a tensor of `end` elements.
  __device__ __forceinline__ Spread(Index first, Index end) : i{first}, end(end) {
#pragma unroll
    for (int j = 0; j < n; ++j) element[j] = min(first + j * kWarp, end - 1);
  }
  __device__ __forceinline__ bool has(int j) const { return i[0] + j * kWarp < end; }
  // Where element j is in a tensor that lies so. (A branch for all of them would have each tensor's loads waited for.)
  __device__ __forceinline__ Index place(const Lay& lay, int j) const { return element[j] + row[j] * lay.extra; }
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

// A group of a full tensor, whose elements have `bytes`.
template <bool constant, int bytes, class G>
__device__ __forceinline__ Bits<bytes, G::kLanes> load_full(const void* p, const Lay& lay, const G& at) {
  constexpr int n = G::n;
  Bits<bytes, G::kLanes> out{};
  const auto take = [&](int part, const auto& bits, int first, int step) FUSED_ACT_LAMBDA {
#pragma unroll
    for (int j = 0; j < n; ++j) out.set(part * n + j, bits.get(first + j * step));
  };
  const auto* from = static_cast<const typename Bits<bytes, n>::Word*>(p);
  if constexpr (G::kSpread) {
#pragma unroll
    for (int j = 0; j < n; ++j) out.set(j, from[at.place(lay, j)]);
  } else if (!at.whole) {
    const G cut = at.cut();
#pragma unroll
    for (int j = 0; j < G::kLanes; ++j)
      if (cut.has(j)) out.set(j, from[at.offset(lay, j / n) + (lay.pair ? 2 * (j % n) : j % n)]);
  } else if (!lay.pair) {
#pragma unroll
    for (int part = 0; part < G::kParts; ++part)
      take(part, load_bits<constant, bytes, n>(p, at.offset(lay, part)), 0, 1);
  } else {  // both halves of the pairs, of which this tensor has one
    const bool odd = reinterpret_cast<uintptr_t>(p) / bytes % 2;
#pragma unroll
    for (int part = 0; part < G::kParts; ++part) {
      const auto both = load_bits<constant, bytes, 2 * n>(p, at.offset(lay, part) - odd);
      odd ? take(part, both, 1, 2) : take(part, both, 0, 2);
    }
  }
  return out;
}

// Both halves of pairs, of whole vectors.
template <int bytes, class G, class C>
__device__ __forceinline__ void store_pairs(void* p, const G& at, const Lanes<C, G::kLanes>& even,
                                            const Lanes<C, G::kLanes>& odd, Dtype dtype) {
  Lanes<C, 2 * G::kLanes> both;
#pragma unroll
  for (int j = 0; j < G::kLanes; ++j) {
    both.lane[2 * j] = even.lane[j];
    both.lane[2 * j + 1] = odd.lane[j];
  }
  store_bits(p, 2 * int64_t(at.i[0]), to_bits<bytes>(both, dtype));
}

template <int bytes, class G>
__device__ __forceinline__ void store_full(void* p, const Lay& lay, const G& at, const Bits<bytes, G::kLanes>& bits) {
  constexpr int n = G::n;
  auto* to = static_cast<typename Bits<bytes, n>::Word*>(p);
  if constexpr (G::kSpread) {
#pragma unroll
    for (int j = 0; j < n; ++j)
      if (at.has(j)) to[at.place(lay, j)] = bits.get(j);
  } else if (at.whole && !lay.pair) {
#pragma unroll
    for (int part = 0; part < G::kParts; ++part) {
      Bits<bytes, n> some{};
#pragma unroll
      for (int j = 0; j < n; ++j) some.set(j, bits.get(part * n + j));
      store_bits(p, at.offset(lay, part), some);
    }
  } else {
    const G cut = at.cut();
#pragma unroll
    for (int j = 0; j < G::kLanes; ++j)
      if (cut.has(j)) to[at.offset(lay, j / n) + (lay.pair ? 2 * (j % n) : j % n)] = bits.get(j);
  }
}

// Where the vectors of a group lie along the axis of an operand; operands along one axis share it.
template <class G>
struct AxisPlace {
  using Index = typename G::Index;
  int axis = -1;
  Index channel[G::kParts], rest[G::kParts];

  template <class C>
  __device__ __forceinline__ void find(const OperandArg<C>& o, const G& at) {
    if (axis == o.axis) return;
    axis = o.axis;
#pragma unroll
    for (int p = 0; p < G::kParts; ++p) {
      const Index plane = o.by_inner.quotient(at.i[p]);
      rest[p] = at.i[p] - plane * Index(o.inner);
      channel[p] = o.wraps ? plane - o.by_channels.quotient(plane) * Index(o.channels) : plane;
    }
  }
};

// The elements of an operand with a vector beside each of x's: full or dense, of whole groups; else element by element.
// They have `bytes`.
template <int bytes, class Can, class G, class C>
__device__ __forceinline__ Lanes<C, G::kLanes> load_vectors(const OperandArg<C>& o, const G& at, AxisPlace<G>& place) {
  using Index = typename G::Index;
  constexpr int n = G::n;
  if (o.access == Access::full)
    return to_lanes(load_full<false, bytes>(o.data, Can::kAny ? o.lay : Lay{o.lay.extra, Can::kPairs}, at), o.dtype);
  place.find(o, at);
  Bits<bytes, G::kLanes> bits{};
  if (!Can::kAny || (o.access == Access::dense && at.whole)) {
#pragma unroll
    for (int p = 0; p < G::kParts; ++p) {
      if (!Can::kAny && at.i[p] >= at.end) continue;  // a thread that only takes part in storing codes
      const auto some = load_bits<true, bytes, n>(o.data, place.channel[p]);
#pragma unroll
      for (int j = 0; j < n; ++j) bits.set(p * n + j, some.get(j));
    }
  } else {
    const auto* from = static_cast<const typename Bits<bytes, n>::Word*>(o.data);
    const G cut = at.cut();
#pragma unroll
    for (int p = 0; p < G::kParts; ++p) {
      Index channel = place.channel[p], rest = place.rest[p];
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (cut.has(p * n + j)) bits.set(p * n + j, from[int64_t(channel) * o.stride]);
        if (++rest == Index(o.inner)) {
          rest = 0;
          if (++channel == Index(o.channels)) channel = 0;
        }
      }
    }
  }
  return to_lanes(bits, o.dtype);
}

// What kernels can load. Those of what surrounds an activation leave to others what is rare: walks, and vectors in the
// compute type beside those of 16 bits; and pairs are known when they are compiled.
struct LoadsAll {
  static constexpr bool kAny = true, kPairs = false;
};
template <class Op>
struct Loads {
  static constexpr bool kAny = !kSurrounded<Op>, kPairs = Op::kPairs;
};

// The elements of an operand beside a group of x. They are of x's type or of the compute type.
template <class Can, class G, class C>
__device__ __forceinline__ Lanes<C, G::kLanes> load_operand(const OperandArg<C>& o, const G& at, AxisPlace<G>& place) {
  using Index = typename G::Index;
  constexpr int n = G::n;
  using N = Lanes<C, G::kLanes>;
  const auto number = [&](int64_t i) FUSED_ACT_LAMBDA {
    if constexpr (G::kBytes == sizeof(C)) return static_cast<const C*>(o.data)[i];
    return load_element<C>(o.data, o.dtype, i);
  };
  if (o.access == Access::row) {  // first: the bias of a convolution
    place.find(o, at);
    N out;
#pragma unroll
    for (int p = 0; p < G::kParts; ++p) {
      const bool some = at.whole || at.i[p] < at.end;
      const C value = some ? number(int64_t(place.channel[p]) * o.stride) : C(0);
#pragma unroll
      for (int j = 0; j < n; ++j) out.lane[p * n + j] = value;
    }
    return out;
  }
  if (o.access == Access::rows) {
    place.find(o, at);
    N out;
#pragma unroll
    for (int p = 0; p < G::kParts; ++p) {
      const bool some = at.whole || at.i[p] < at.end;
      const C here = some ? number(int64_t(place.channel[p]) * o.stride) : C(0);
#pragma unroll
      for (int j = 0; j < n; ++j) out.lane[p * n + j] = here;
      const Index left = Index(o.inner) - place.rest[p];
      if (some && left < n) {  // few: what tells the two channels apart is theirs alone
        const Index channel = place.channel[p] + 1 == Index(o.channels) ? 0 : place.channel[p] + 1;
        const C next = number(int64_t(channel) * o.stride);
#pragma unroll
        for (int j = 1; j < n; ++j)
          if (Index(j) >= left) out.lane[p * n + j] = next;
      }
    }
    return out;
  }
  if (o.access == Access::constant) return constant<N>(o.value);
  if (o.access == Access::scalar) return constant<N>(number(0));
  if (Can::kAny && G::kBytes == 2 && o.dtype == Dtype::f32)
    return load_vectors<int(sizeof(C)), Can>(o, at, place);
  return load_vectors<G::kBytes, Can>(o, at, place);
}

// The same beside what is spread, where nothing lies along an axis.
template <int bytes, class C>
__device__ __forceinline__ Lanes<C, Spread<bytes>::n> load_operand(const OperandArg<C>& o, const Spread<bytes>& at) {
  if (o.access == Access::full) return to_lanes(load_full<false, bytes>(o.data, Lay{o.lay.extra}, at), o.dtype);
  return constant<Lanes<C, Spread<bytes>::n>>(o.access == Access::scalar ? load_element<C>(o.data, o.dtype, 0) : o.value);
}

// ---- what every kernel is given -------------------------------------------------------------------------------

// How the gradient of an operand leaves the kernel.
enum class Emit : int { none, store, reduce };

// What a Program and what surrounds an activation have: layouts of the full tensors. And what only a Program has: the
// entries of its scratch memory. Operand k has entry k, and slot k has kMaxOperands + k: as a step names its source.
struct ProgramPlan {
  bool pitched = false;
  Divider by_inner;
  Lay x, g, out, gradient[kMaxOperands];
  int operands = 0;  // that have entries
  int tape = 0, entries = 0;
  int sums[kMaxOperands] = {};
};

// Which vectors a thread of several_kernel takes: those at i, i + apart..., where `begins` says how many elements i threads
// begin at. They are whole periods apart, after which what lies along an axis is the same again (a bias of 64 channels after 64
// planes, or after a pixel of channels_last); or, `in_plane`, as many as fit in one plane of a channel. So its place is found,
// and it is loaded, once for all of them.
struct Several {
  int64_t apart, begins;
  int in_plane;
  Divider by_apart;
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
  uint32_t* code_words;  // of the modes with codes
  int64_t plane_words;   // of a bit each
  int codes;
  C code_key[kMaxCodes];
  bool side_by_side;     // whether full tensors begin at multiples of 32 bytes
  struct Nothing {};
  std::conditional_t<Op::kDynamic || kSurrounded<Op>, ProgramPlan, Nothing> plan;
};

// The gradient of an operand that is as large as x: in x's type or in the compute type.
template <class A, class G, class C>
__device__ __forceinline__ void store_gradient(const A& a, int k, const Lay& lay, const G& at,
                                               const Lanes<C, G::kLanes>& values) {
  if (G::kBytes == 2 && a.gradient_dtype[k] == Dtype::f32)
    return store_full<int(sizeof(C))>(a.gradient[k], lay, at, to_bits<sizeof(C)>(values, Dtype::f32));
  store_full<G::kBytes>(a.gradient[k], lay, at, to_bits<G::kBytes>(values, a.gradient_dtype[k]));
}

// ---- codes ------------------------------------------------------------------------------------------------------

// Where the codes of a vector begin, in bytes, of a plane that begins at `words`.
template <class I>
__device__ __forceinline__ uint8_t* code_byte(uint32_t* words, I i) {
  return reinterpret_cast<uint8_t*>(words) + (i >> 3);
}

// The codes of a group, told by f_x. A vector has a byte of them, or half of one, which its neighbour completes: so where n
// is 4 all threads of a warp take part.
template <class A, class G, class N>
__device__ __forceinline__ void store_codes(const A& a, const G& at, const N& slope) {
  constexpr int n = G::n;
  static_assert(n == 8 || n == 4);
  const int64_t words = a.plane_words;
  const auto store = [&](auto codes) FUSED_ACT_LAMBDA {
    constexpr int kCodes = decltype(codes)::value;
#pragma unroll
    for (int p = 0; p < G::kParts; ++p) {
      uint32_t bits = 0;  // of the first plane, and from bit 8 on of the other
#pragma unroll
      for (int j = 0; j < n; ++j) {
        const auto s = slope.lane[p * n + j];
        if (s == a.code_key[1]) bits |= 1u << j;
        if (kCodes > 2 && s == a.code_key[2]) bits |= 0x100u << j;
        if (kCodes > 3 && s == a.code_key[3]) bits |= 0x101u << j;
      }
      bool writes = at.i[p] < words * kCodeWord;  // all words, so that none is left as it was
      if constexpr (n == 4) {
        bits |= __shfl_down_sync(0xffffffffu, bits, 1) << 4;
        writes &= threadIdx.x % 2 == 0;
      }
      if (!writes) continue;
      uint8_t* to = code_byte(a.code_words, at.i[p]);
      *to = static_cast<uint8_t>(bits);
      if constexpr (kCodes > 2) to[4 * words] = static_cast<uint8_t>(bits >> 8);
    }
  };
  if (a.codes <= 2) return store(std::integral_constant<int, 2>());
  a.codes == 3 ? store(std::integral_constant<int, 3>()) : store(std::integral_constant<int, 4>());
}

// The same of elements that are spread: a warp has a word of codes for each of a thread's.
template <class A, int bytes, class N>
__device__ __forceinline__ void store_codes(const A& a, const Spread<bytes>& at, const N& slope) {
  constexpr int n = Spread<bytes>::n;
  const int lane = threadIdx.x % kWarp;
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const auto s = slope.lane[j];
    const bool both = a.codes > 3 && s == a.code_key[3];
    const uint32_t first = __ballot_sync(0xffffffffu, s == a.code_key[1] || both);
    const uint32_t second = __ballot_sync(0xffffffffu, (a.codes > 2 && s == a.code_key[2]) || both);
    if (lane == j) low = first, high = second;
  }
  const int64_t word = (at.i[0] - lane) / kCodeWord + lane;
  if (lane >= n || word >= a.plane_words) return;
  a.code_words[word] = low;
  if (a.codes > 2) a.code_words[a.plane_words + word] = high;
}

// A bit for each lane.
struct PackedMask {
  uint32_t bits;
};
template <class C, int V, bool reduced>
struct CodeMasks<Lanes<C, V, reduced>> {
  using N = Lanes<C, V, reduced>;
  using Mask = PackedMask;
  FUSED_ACT_FN static Mask mask(bool m) { return {m ? ~0u : 0u}; }
  FUSED_ACT_FN static Mask both(Mask a, Mask b) { return {a.bits & b.bits}; }
  FUSED_ACT_FN static Mask either(Mask a, Mask b) { return {a.bits | b.bits}; }
  FUSED_ACT_FN static Mask negate(Mask a) { return {~a.bits}; }
  FUSED_ACT_FN static N select(Mask m, const N& a, const N& b) {
    N r;
#pragma unroll
    for (int j = 0; j < V; ++j) r.lane[j] = m.bits >> j & 1 ? a.lane[j] : b.lane[j];
    return r;
  }
};

// The bytes that have the codes of a vector.
struct CodeBytes {
  uint32_t low, high;

  template <bool two, class A, class I>
  __device__ __forceinline__ static CodeBytes load(const A& a, I i) {
    const uint8_t* from = code_byte(a.code_words, i);
    return {__ldg(from), two ? __ldg(from + 4 * a.plane_words) : 0u};
  }
  template <class N, int n, class I>
  __device__ __forceinline__ CodeBits<N> codes(I i) const {
    const int shift = n == 4 ? int(i & 7) : 0;
    constexpr uint32_t ones = (1u << n) - 1;
    return {{low >> shift & ones}, {high >> shift & ones}};
  }
};

// ---- the body of a compiled chain's kernels ---------------------------------------------------------------------

// What formulas are evaluated on for a group.
template <Mode mode, class G>
using NumberOf = Lanes<Compute<G::kBytes>, G::kLanes, mode == Mode::forward && G::kBytes == 2>;

// Of a frame's operands only the large one is loaded early, four do not fit in the registers; and of those of gated linear
// units only what stands beside x.
template <class Op>
FUSED_ACT_FN constexpr bool loads_early(int k) {
  if constexpr (Op::kFramed) return k == Frame::kLarge;
  if constexpr (kExact<Op> && Op::kOperands > 2) return k == Op::kGate;
  return true;
}

template <class Op, Mode mode, class G, class Sums>
struct VectorIo {
  using C = Compute<G::kBytes>;
  using N = NumberOf<mode, G>;
  const Args<Op, C>& a;
  const G& at;
  Sums& sums;
  N loaded[Args<Op, C>::O];
  N beside;  // of pairs: the gradient of the operand
  AxisPlace<G> place;
  CodeBits<N> codes;
  // Before all else, where there are registers for that.
  __device__ __forceinline__ void load() {
    if constexpr (!kDecodes<Op> || mode == Mode::jvp) {
#pragma unroll
      for (int k = 0; k < Op::kOperands; ++k) {
        if (!loads_early<Op>(k) || Sums::holds(k)) continue;
        if constexpr (Op::kFramed)
          if (!(a.op.frame.present & Frame::kLargePlaces)) continue;
        loaded[k] = load_now(k);
      }
    }
  }
  FUSED_ACT_FN N operand(int k) {
#if defined(__CUDA_ARCH__)
    if (!loads_early<Op>(k) || Sums::holds(k)) return load_now(k);
#endif
    return loaded[k];
  }
  __device__ __forceinline__ N load_now(int k) {
    if (Sums::holds(k)) return sums.template held<N>(k, a.dtype);
    if constexpr (G::kSpread) {
      return lanes_as<N>(load_operand(a.operand[k], at));
    } else {
      return lanes_as<N>(load_operand<Loads<Op>>(a.operand[k], at, place));
    }
  }
  // A direction is had by codes alone, whose operands are then its parts.
  FUSED_ACT_FN N direction(int k) const { return loaded[k]; }
  FUSED_ACT_FN bool moves(int k) const { return mode == Mode::jvp && a.has_v[k]; }
  FUSED_ACT_FN void gradient(int k, const N& value) {
#if defined(__CUDA_ARCH__)
    if constexpr (Op::kPairs) {
      beside = value;
      return;
    }
    const auto plain = lanes_as<Lanes<C, G::kLanes>>(value);
    if (Sums::may_sum(k) && a.emit[k] == Emit::reduce) sums.add(k, plain, at);
    if (!Sums::may_store(k) || a.emit[k] != Emit::store) return;
    if constexpr (kSurrounded<Op>) {
      store_gradient(a, k, {a.plan.gradient[k].extra}, at, plain);
    } else {
      store_gradient(a, k, Lay(), at, plain);
    }
#endif
  }
  FUSED_ACT_FN CodeBits<N> code() const { return codes; }
  struct Nothing {};
  template <class M>
  FUSED_ACT_FN Nothing memory() const {
    return {};
  }
};

// Where operand gradients are summed (`add`), and what is known there of operands: one that is the same for all that a thread
// takes it holds.
struct NoSums {
  template <class N, class G>
  __device__ __forceinline__ void add(int, const N&, const G&) {}
  __device__ __forceinline__ static constexpr bool may_sum(int) { return false; }
  __device__ __forceinline__ static constexpr bool may_store(int) { return true; }
  __device__ __forceinline__ static constexpr bool holds(int) { return false; }
  template <class N>
  __device__ __forceinline__ N held(int, Dtype) const {
    return {};
  }
};

// The same of kernels that sum. `along`: the operands that lie along the axis of the sums (kAlong); 0: that is not known.
template <uint32_t along>
struct SumsAlong {
  __device__ __forceinline__ static constexpr bool may_sum(int k) { return !along || holds(k); }
  __device__ __forceinline__ static constexpr bool may_store(int k) { return !along || !holds(k); }
  __device__ __forceinline__ static constexpr bool holds(int k) { return along >> k & 1; }
};

template <int bytes, class Index = int64_t, int elements = kVector<bytes>>
using Vector = Group<bytes, 1, Index, elements>;

// How x and the result lie.
template <class Op, class C>
__device__ __forceinline__ Lay lay_of_x(const Args<Op, C>& a) {
  if constexpr (kSurrounded<Op>) return {a.plan.x.extra, Op::kPairs};
  return {};
}
template <class Op, class C>
__device__ __forceinline__ Lay lay_of_out(const Args<Op, C>& a) {
  if constexpr (kSurrounded<Op>) return {a.plan.out.extra};
  return {};
}
template <class Op, class C>
__device__ __forceinline__ Lay lay_of_g(const Args<Op, C>& a) {
  if constexpr (kSurrounded<Op>) return {a.plan.g.extra};
  return {};
}

// What a vector reads of full tensors and codes, as it lies in memory. All of it is on its way before the first conversion,
// which waits for what it converts: with the codes after that, bfloat16 took 1.14 times the copy on an H200, with x after a
// bias 1.12. Codes come first: where a vector need not be whole, two ways of loading meet after it, where the compiler
// copies registers.
template <class Op, int bytes, Mode mode, int n = kVector<bytes>>
struct Taken {
  static constexpr bool kForward = mode == Mode::forward || mode == Mode::coded;
  using C = Compute<bytes>;
  using B = Bits<bytes, n>;
  B x, g, u;
  CodeBytes codes;

  template <class G>
  __device__ __forceinline__ static Taken of(const Args<Op, C>& a, const G& at) {
    Taken t;
    if constexpr (kDecodes<Op>) {
      t.codes = CodeBytes::load<Op::kTwo>(a, at.i[0]);
      if (mode == Mode::backward) t.g = load_full<true, bytes>(a.g, Lay(), at);
      if (mode == Mode::jvp) t.u = a.u ? load_full<true, bytes>(a.u, Lay(), at) : B{};
    } else {
      t.x = kSurrounded<Op> || a.x ? load_full<!kForward, bytes>(a.x, lay_of_x(a), at) : B{};
      if (!kForward) t.g = kSurrounded<Op> || a.g ? load_full<true, bytes>(a.g, lay_of_g(a), at) : B{};
    }
    return t;
  }
  // Of two vectors side by side, the first of which is at i.
  template <class I>
  __device__ __forceinline__ static void side_by_side(const Args<Op, C>& a, I i, Taken (&t)[2]) {
    const auto load = [&](const void* p, B Taken::*to) FUSED_ACT_LAMBDA {
      if (p) {
        load_side_by_side<bytes>(p, i, t[0].*to, t[1].*to);
      } else {
        t[0].*to = t[1].*to = B{};
      }
    };
    if constexpr (kDecodes<Op>) {
#pragma unroll
      for (int b = 0; b < 2; ++b) t[b].codes = CodeBytes::load<Op::kTwo>(a, i + b * kVector<bytes>);
      mode == Mode::backward ? load(a.g, &Taken::g) : load(a.u, &Taken::u);
    } else {
      load(a.x, &Taken::x);
      if (!kForward) load(a.g, &Taken::g);
    }
  }
};

// Evaluates and deals with codes and operand gradients; returns the result as it is stored.
template <class Op, int bytes, Mode mode, int n, class Io>
__device__ __forceinline__ Bits<bytes, n> result_of_taken(const Args<Op, Compute<bytes>>& a,
                                                          const Taken<Op, bytes, mode, n>& taken, Io& io) {
  using N = typename Io::N;
  constexpr bool forward = Taken<Op, bytes, mode, n>::kForward;
  const auto number = [&](const auto& bits) FUSED_ACT_LAMBDA { return lanes_as<N>(to_lanes(bits, a.dtype)); };
  const N zero = constant<N>(0);
  if constexpr (kDecodes<Op>) {
    io.codes = taken.codes.template codes<N, n>(io.at.i[0]);
    const bool moves = mode == Mode::jvp;
    const Outputs<N> out = evaluate<mode>(a.op, a.scalars, zero, moves ? zero : number(taken.g),
                                          moves ? number(taken.u) : zero, a.has_u, io);
    return to_bits<bytes>(out.full[0], a.dtype);
  } else {
    const Outputs<N> out =
        evaluate<mode>(a.op, a.scalars, number(taken.x), forward ? zero : number(taken.g), zero, false, io);
    if constexpr (mode == Mode::coded) store_codes(a, io.at, out.full[1]);
    if constexpr (Op::kPairs && !forward) store_pairs<bytes>(a.out[0], io.at, out.full[0], io.beside, a.dtype);
    return to_bits<bytes>(out.full[0], a.dtype);
  }
}
// The same, and stores it.
template <class Op, int bytes, Mode mode, int n, class Io>
__device__ __forceinline__ void evaluate_taken(const Args<Op, Compute<bytes>>& a, const Taken<Op, bytes, mode, n>& taken,
                                               Io& io) {
  constexpr bool forward = Taken<Op, bytes, mode, n>::kForward;
  const auto bits = result_of_taken<Op, bytes, mode>(a, taken, io);
  if constexpr (Op::kPairs && !forward) return;  // both halves are stored
  if ((kSurrounded<Op> && forward) || a.out[0]) store_full<bytes>(a.out[0], lay_of_out(a), io.at, bits);
}

template <class Op, int bytes, Mode mode, class G, class Sums>
__device__ __forceinline__ void process(const Args<Op, Compute<bytes>>& a, const G& at, Sums& sums) {
  VectorIo<Op, mode, G, Sums> io{a, at, sums};
  const auto taken = Taken<Op, bytes, mode, G::kLanes>::of(a, at);
  io.load();
  evaluate_taken<Op, bytes, mode>(a, taken, io);
}

// Vectors at(0), at(1)... of which `is_there`: what all of them read is on its way before the first is evaluated.
template <int n, class Op, int bytes, Mode mode, class There, class At, class Sums>
__device__ __forceinline__ void process_batch(const Args<Op, Compute<bytes>>& a, const There& is_there, const At& at,
                                              Sums& sums) {
  using G = decltype(at(0));
  Taken<Op, bytes, mode, G::kLanes> taken[n];
#pragma unroll
  for (int b = 0; b < n; ++b)
    if (is_there(b)) taken[b] = Taken<Op, bytes, mode, G::kLanes>::of(a, at(b));
#pragma unroll
  for (int b = 0; b < n; ++b) {
    if (!is_there(b)) continue;
    const G here = at(b);
    VectorIo<Op, mode, G, Sums> io{a, here, sums};
    io.load();
    evaluate_taken<Op, bytes, mode>(a, taken[b], io);
  }
}

// Two vectors side by side, all of them.
template <class Op, int bytes, Mode mode, class Index, class Sums>
__device__ __forceinline__ void process_side_by_side(const Args<Op, Compute<bytes>>& a, Index i, Sums& sums) {
  Taken<Op, bytes, mode> taken[2];
  Bits<bytes, kVector<bytes>> bits[2];
  Taken<Op, bytes, mode>::side_by_side(a, i, taken);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const Vector<bytes, Index> at(i + b * kVector<bytes>);
    VectorIo<Op, mode, Vector<bytes, Index>, Sums> io{a, at, sums};
    io.load();
    bits[b] = result_of_taken<Op, bytes, mode>(a, taken[b], io);
  }
  if (a.out[0]) store_side_by_side<bytes>(a.out[0], i, bits[0], bits[1]);
}

template <class Op, int bytes, Mode mode, class Index>
__global__ void __launch_bounds__(kThreads / tuning::flat_vectors<Op>(mode, tuning::kThis),
                                  tuning::flat_residents<Op>(mode, kVector<bytes>))
    flat_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a) {
  wait_for_earlier();
  NoSums sums;
  constexpr bool all_run = mode == Mode::coded;
  if constexpr (kSurrounded<Op>) {
    const uint32_t i = (blockIdx.x * kThreads + threadIdx.x) * kVector<bytes>, numel = uint32_t(a.numel);
    if (!all_run && i >= numel) return;
    using At = Group<bytes, 1, uint32_t>;
    At at = all_run ? At(i, 0, 0, numel) : At(i);
    if (a.plan.pitched) at.row[0] = a.plan.by_inner.quotient(i);
    process<Op, bytes, mode>(a, at, sums);
  } else {
    constexpr int V = kVector<bytes>, vectors = tuning::flat_vectors<Op>(mode, tuning::kThis);
    const Index block = Index(blockIdx.x) * kThreads, numel = Index(a.numel);
    if constexpr (vectors == 2) {
      const Index first = (block + threadIdx.x * 2) * V;
      if (a.side_by_side && first < numel && numel - first >= 2 * V)
        return process_side_by_side<Op, bytes, mode>(a, first, sums);
    }
#pragma unroll 1
    for (int n = 0; n < vectors; ++n) {
      const bool beside = vectors == 2 && a.side_by_side;  // else as neighbouring threads do
      const Index i = (block + (beside ? threadIdx.x * 2 + n : threadIdx.x + n * (kThreads / vectors))) * V;
      if (!all_run && i >= numel) return;
      // Codes of four elements are put together by neighbours, which must be at the same place in the code for that.
      if ((mode != Mode::coded || V == 8) && i < numel && numel - i >= V) {
        process<Op, bytes, mode>(a, Vector<bytes, Index>(i), sums);
      } else {
        process<Op, bytes, mode>(a, Vector<bytes, Index>(i, 0, 0, numel), sums);
      }
    }
  }
}

// The operands that are the same beside all that a thread of several_kernel takes, a bit each.
template <class Op>
constexpr uint32_t kHeld = kSurrounded<Op> ? kAlong<Op> : (1u << Op::kOperands) - 1;

// What lies along an axis beside one vector, of which all that a thread takes has the same beside it.
template <class N, int O, uint32_t along>
struct Held : NoSums {
  N operand[O];

  __device__ __forceinline__ static constexpr bool holds(int k) { return along >> k & 1; }
  template <class M>
  __device__ __forceinline__ M held(int k, Dtype) const {
    return operand[k];
  }
  template <class Can, class A, class G>
  __device__ __forceinline__ void load(const A& a, const G& at) {
    AxisPlace<G> place;
#pragma unroll
    for (int k = 0; k < O; ++k)
      if (holds(k)) operand[k] = lanes_as<N>(load_operand<Can>(a.operand[k], at, place));
  }
};

// The vectors at i, i + apart... before `end`. Returns where the next one would be. Where nothing stands beside x there are
// registers in forward for what the next one reads, which is then on its way while one is evaluated: scale, shift and gelu take
// 1.09 copies for 1.12 in bfloat16, but a residual and gelu 1.23 for 1.01. (Without a branch: with one, 1.22.)
template <class Op, int bytes, Mode mode, class I, class At>
__device__ __forceinline__ I process_several(const Args<Op, Compute<bytes>>& a, I i, I end, I apart, const At& at) {
  using G = decltype(at(i));
  using T = Taken<Op, bytes, mode>;
  using Sums = Held<NumberOf<mode, G>, Args<Op, Compute<bytes>>::O, kHeld<Op>>;
  using Io = VectorIo<Op, mode, G, Sums>;
  constexpr bool ahead = mode == Mode::forward && !tuning::kCrowded<Op>;
  if (i >= end) return i;
  Sums held;
  G here = at(i);
  T taken = T::of(a, here);
  if constexpr (ahead) {
    held.template load<Loads<Op>>(a, here);
#pragma unroll 1
    for (;;) {
      i += apart;
      const bool more = i < end;
      const G next = at(i);
      T after;
      if (more) after = T::of(a, next);
      Io io{a, here, held};
      io.load();
      evaluate_taken<Op, bytes, mode>(a, taken, io);
      if (!more) return i;
      here = next;
      taken = after;
    }
  } else {
    bool first = true;
#pragma unroll 1
    for (;;) {
      Io io{a, here, held};
      io.load();
      if (first) held.template load<Loads<Op>>(a, here);
      first = false;
      evaluate_taken<Op, bytes, mode>(a, taken, io);
      i += apart;
      if (i >= end) return i;
      here = at(i);
      taken = T::of(a, here);
    }
  }
}

// As flat_kernel, of a large tensor: a thread takes several vectors (Several).
template <class Op, int bytes, Mode mode, class Index>
__global__ void __launch_bounds__(kThreads, tuning::several_residents<Op>(mode, kVector<bytes>))
    several_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a, const Several several) {
  wait_for_earlier();
  using At = Vector<bytes, Index>;
  const Index begin = (Index(blockIdx.x) * kThreads + threadIdx.x) * At::n, numel = Index(a.numel);
  if (begin >= Index(several.begins)) return;
  const Index apart = Index(several.apart);
  const auto at = [&](Index i) FUSED_ACT_LAMBDA {
    At at(i);
    if constexpr (kSurrounded<Op>)
      if (a.plan.pitched) at.row[0] = a.plan.by_inner.quotient(i);
    return at;
  };
  if constexpr (kSurrounded<Op>) {
    const Index more = apart * (several.in_plane - 1);
    const Index first = several.in_plane ? begin + several.by_apart.quotient(begin) * more : begin;
    process_several<Op, bytes, mode>(a, first, several.in_plane ? first + more + 1 : numel, apart, at);
  } else {
    const Index last = process_several<Op, bytes, mode>(a, begin, numel / At::n * At::n, apart, at);
    NoSums sums;
    if (last < numel) process<Op, bytes, mode>(a, At(last, 0, 0, numel), sums);
  }
}

// Of what surrounds an activation and is as large as x.
template <class Op, int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, (tuning::spread_residents<Op, bytes>(mode)))
    spread_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a) {
  wait_for_earlier();
  NoSums sums;
  const uint32_t lane = threadIdx.x % kWarp, numel = uint32_t(a.numel);
  const uint32_t first = (blockIdx.x * kThreads + threadIdx.x - lane) * Spread<bytes>::n + lane;
  if (mode != Mode::coded && first >= numel) return;
  Spread<bytes> at(first, numel);
  if (a.plan.pitched) {
#pragma unroll
    for (int j = 0; j < at.n; ++j) at.row[j] = a.plan.by_inner.quotient(at.element[j]);
  }
  process<Op, bytes, mode>(a, at, sums);
}

// ---- reductions -----------------------------------------------------------------------------------------------

// The sum of an operand's gradient, or a part of it, goes where it belongs.
template <class A, class C>
__device__ __forceinline__ void emit_sum(const A& a, int k, int64_t channel, int64_t channels, int64_t chunk, int64_t chunks,
                                         C total) {
  if (chunks == 1) {
    store_element(a.gradient[k], a.gradient_dtype[k], channel, total);
  } else {
    a.partial[k][chunk * channels + channel] = total;
  }
}

// A tensor of shape (outer, channels, inner), cut into chunks: `planes` consecutive planes of one channel, or a
// `length` of one plane. A block takes one chunk of one channel; `width` threads walk along a plane.
struct Rows {
  int64_t outer, channels, inner;
  int64_t planes, length, pieces;  // pieces: chunks that one plane is cut into
  int64_t chunks;                  // per channel
  int width;                       // a power of 2
  int width_log2;
  Divider by_pieces, by_channels;
};

// What the block, and in it the thread, has of it. I: what a tensor's elements can be counted in.
template <class I>
struct RowChunk {
  I channel, chunk;
  I first, last;  // planes
  I from, to;     // elements of each
  int lane, line, lines;

  __device__ __forceinline__ explicit RowChunk(const Rows& rows) {
    // 32 bits: all of these are at most the size of the grid.
    const unsigned plane = rows.by_pieces.quotient(blockIdx.x), piece = blockIdx.x - plane * unsigned(rows.pieces);
    const unsigned group = rows.by_channels.quotient(plane);
    channel = plane - group * unsigned(rows.channels);
    chunk = I(group) * I(rows.pieces) + I(piece);
    first = I(group) * I(rows.planes);
    last = first + min(I(rows.planes), I(rows.outer) - first);
    from = I(piece) * I(rows.length);
    to = from + min(I(rows.length), I(rows.inner) - from);
    lane = threadIdx.x & (rows.width - 1);
    line = threadIdx.x >> rows.width_log2;
    lines = blockDim.x >> rows.width_log2;
  }
  // Of the chunk's part of plane o, as indices of the walk.
  __device__ __forceinline__ I start(const Rows& rows, I o) const {
    return (o * I(rows.channels) + channel) * I(rows.inner) + from;
  }
};

// `along`: the operands of which a channel has one element each.
template <int O, class C, uint32_t along = 0>
struct RowSums : SumsAlong<along> {
  using SumsAlong<along>::holds;
  C sum[O];
  C operand[O];

  template <class A>
  __device__ __forceinline__ void hold(const A& a, int64_t channel) {
#pragma unroll
    for (int k = 0; k < O; ++k) {
      if (!holds(k)) continue;
      const auto& o = a.operand[k];
      operand[k] = o.data ? load_element<C>(o.data, o.dtype, channel * o.stride) : o.value;
    }
  }
  template <class N>
  __device__ __forceinline__ N held(int k, Dtype) const {
    return constant<N>(operand[k]);
  }
  template <class G>
  __device__ __forceinline__ void add(int k, const Lanes<C, G::kLanes>& value, const G& at) {
    C inside = C(0);
    at.for_each([&](int j) FUSED_ACT_LAMBDA { inside += value.lane[j]; });
#pragma unroll
    for (int n = 0; n < O; ++n)  // k is known at run time only where a Program is run
      if (n == k) sum[n] += inside;
  }
  template <class A, class I>
  __device__ __forceinline__ void emit(const A& a, const Rows& rows, const RowChunk<I>& chunk) {
    __shared__ C shared[kWarp];
#pragma unroll
    for (int k = 0; k < O; ++k) {
      if (!this->may_sum(k) || a.emit[k] != Emit::reduce) continue;
      const C total = block_sum(sum[k], shared);
      if (threadIdx.x == 0) emit_sum(a, k, chunk.channel, rows.channels, chunk.chunk, rows.chunks, total);
    }
  }
};

template <class Op, int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, tuning::row_residents<Op>(kVector<bytes>, tuning::kThis))
    row_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a, const Rows rows) {
  wait_for_earlier();
  constexpr int V = kVector<bytes>;
  using I = SignedIndex<Op, mode>;
  using At = Vector<bytes, ReductionIndex<Op, mode>>;
  const RowChunk<I> chunk(rows);
  RowSums<Args<Op, Compute<bytes>>::O, Compute<bytes>, kAlong<Op>> sums{};
  sums.hold(a, chunk.channel);
  for (I o = chunk.first + chunk.line; o < chunk.last; o += chunk.lines) {
    // Planes need not start at a multiple of a vector: whole vectors inside, and a part of one at either end, which is
    // shared with the neighbouring plane. Threads are laid from a 128-byte line on: a warp that straddles lines writes 5 of
    // them for 4. A piece has less than 2^31 elements.
    constexpr int kLine = 128 / bytes, kBatch = tuning::row_batch<Op>(bytes);
    const I start = chunk.start(rows, o), end = start + chunk.to - chunk.from;
    const I whole = (start + V - 1) & -V, part = end & -V, base = whole & -kLine;
    const int step = rows.width * V, first = int(whole - base), last = int(part - base);
#pragma unroll 1
    for (int r = chunk.lane * V; r < last; r += step * kBatch) {
      process_batch<kBatch, Op, bytes, mode>(
          a, [&](int b) FUSED_ACT_LAMBDA { return r + b * step >= first && r + b * step < last; },
          [&](int b) FUSED_ACT_LAMBDA { return At(base + r + b * step); }, sums);
    }
#pragma unroll 1  // one place in the code: each takes the compiler as long
    for (int edge = 0; edge < 2; ++edge) {
      const bool here = edge ? chunk.lane == rows.width - 1 && part < end && part >= whole : chunk.lane == 0 && start < whole;
      if (here) process<Op, bytes, mode>(a, At(edge ? part : whole - V, 0, start, end), sums);
    }
  }
  sums.emit(a, rows, chunk);
}

// A matrix whose rows have channels * fold elements: `fold` rows of channels at a time, as many as make a whole number of
// vectors. The last of its rows may be cut short by the end of the tensor. A block takes `across` groups of a vector's
// columns, of a row in each `line` of its threads; and the blocks beside it those of the next rows, so that all of them are
// near each other in memory.
struct Columns {
  int64_t channels;
  int fold, across;
  int64_t chunks;  // blocks that share a column

  __device__ __forceinline__ int64_t width() const { return channels * fold; }
};

struct ColumnChunk {
  int64_t column, start, step;  // start, start + step...: where the thread's vectors are
  int lines;
  bool works;

  __device__ __forceinline__ ColumnChunk(const Columns& columns, int vector) {
    lines = blockDim.x / columns.across;
    const int at = threadIdx.x % columns.across, line = threadIdx.x / columns.across;
    column = (int64_t(blockIdx.x) * columns.across + at) * vector;
    works = column < columns.width() && line < lines;
    start = (int64_t(blockIdx.y) * lines + line) * columns.width() + column;
    step = columns.chunks * lines * columns.width();
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
    emit_sum(a, k, column - row * columns.channels, columns.channels, row * columns.chunks + blockIdx.y,
             columns.chunks * columns.fold, total);
  }
}

// `along`: the operands that lie as the columns do. One is kept as it lies in memory, in half the registers; of several the
// compiler would keep what it is as either type, and choose in each row.
template <int O, class C, int bytes, int V, uint32_t along>
struct ColumnSums : SumsAlong<along> {
  using SumsAlong<along>::holds;
  static constexpr bool kKeepsBits = (along & (along - 1)) == 0;
  C sum[O][V];
  std::conditional_t<kKeepsBits, Bits<bytes, V>, Lanes<C, V>> operand[O];

  template <class A>
  __device__ __forceinline__ void hold(const A& a, int64_t column) {
#pragma unroll
    for (int k = 0; k < O; ++k) {
      if (!holds(k)) continue;
      if (!a.operand[k].data) {  // a value from the host beside another operand; one alone is not read
        if constexpr (!kKeepsBits) operand[k] = constant<Lanes<C, V>>(a.operand[k].value);
        continue;
      }
      const auto bits = load_bits<true, bytes, V>(a.operand[k].data, column);
      if constexpr (kKeepsBits) operand[k] = bits;
      if constexpr (!kKeepsBits) operand[k] = to_lanes(bits, a.dtype);
    }
  }
  template <class N>
  __device__ __forceinline__ N held(int k, Dtype dtype) const {
    if constexpr (kKeepsBits) return lanes_as<N>(to_lanes(operand[k], dtype));
    if constexpr (!kKeepsBits) return lanes_as<N>(operand[k]);
  }
  template <class G>
  __device__ __forceinline__ void add(int k, const Lanes<C, V>& value, const G& at) {
    at.for_each([&](int j) FUSED_ACT_LAMBDA { sum[k][j] += value.lane[j]; });
  }
};

template <class Op, int bytes, Mode mode>
__global__ void __launch_bounds__(kThreads, tuning::column_residents<Op, bytes>)
    column_kernel(const __grid_constant__ Args<Op, Compute<bytes>> a, const Columns columns) {
  wait_for_earlier();
  using C = Compute<bytes>;
  constexpr int V = tuning::column_elements<Op, bytes>, kBatch = tuning::column_batch<Op>(bytes);
  __shared__ C shared[kThreads * V];
  const ColumnChunk chunk(columns, V);
  ColumnSums<Args<Op, C>::O, C, bytes, V, kAlong<Op>> sums{};
  if (chunk.works) {
    sums.hold(a, chunk.column);
    const int64_t start = chunk.start, whole = a.numel - V + 1;
    using I = ReductionIndex<Op, mode>;
    using At = Vector<bytes, I, V>;
    if (start < whole) {
      // No longer than the tensor, so that 32 bits have room for two (where a row of the matrix is folded of more rows of channels
      // than there are, it can be longer).
      const I step = I(min(chunk.step, a.numel)), end = I(whole);
#pragma unroll 1
      for (I i = I(start);; i += step * kBatch) {
        process_batch<kBatch, Op, bytes, mode>(
            a, [&](int b) FUSED_ACT_LAMBDA { return end - i > b * step; },
            [&](int b) FUSED_ACT_LAMBDA { return At(i + b * step); }, sums);
        if (end - i <= step * kBatch) break;
      }
    }
    if constexpr (!kSurrounded<Op>) {  // at the end of the tensor one thread may have a part of a vector
      const int64_t step = chunk.step, last = start < whole ? start + (whole - start + step - 1) / step * step : start;
      if (last < a.numel) process<Op, bytes, mode>(a, At(last, 0, 0, a.numel), sums);
    }
  }
#pragma unroll
  for (int k = 0; k < Op::kOperands; ++k) {
    if (!sums.may_sum(k) || a.emit[k] != Emit::reduce) continue;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) shared[threadIdx.x * V + j] = sums.sum[k][j];
    __syncthreads();
    emit_columns(a, k, columns, chunk.lines, V, [&](int thread, int j) { return shared[thread * V + j]; });
  }
}

// Where the sums of finish_kernel go: the kept dimensions with the gradients' strides.
struct Kept {
  int64_t numel = 1;
  int ndim = 1;
  Divider size[kMaxDims];
  int64_t stride[kMaxDims];
};

// Of each operand whose gradient was summed in `chunks` parts.
template <class C>
struct Partials {
  int operands = 0;
  const C* partial[kMaxOperands];
  void* gradient[kMaxOperands];
  Dtype dtype[kMaxOperands];
};

// A block takes `width` sums of one operand, a power of two, in a thread each of every line, and the lines every n-th chunk. The
// sums of a chunk lie side by side: with those of a channel side by side column_kernel wrote each to a sector of its own, and with
// a block for each of 16384 channels this kernel took 6 % of a backward.
template <class C>
__global__ void __launch_bounds__(tuning::kFinishThreads)
    finish_kernel(const __grid_constant__ Partials<C> from, const int64_t chunks, const int width,
                  const __grid_constant__ Kept where) {
  wait_for_earlier();
  __shared__ C shared[tuning::kFinishThreads];
  const C* partial = from.partial[blockIdx.y];
  const int lane = threadIdx.x & (width - 1), line = threadIdx.x / width, lines = blockDim.x / width;
  const int64_t index = int64_t(blockIdx.x) * width + lane;
  C sum = C(0);
  if (index < where.numel) {
#pragma unroll 4
    for (int64_t c = line; c < chunks; c += lines) sum += partial[c * where.numel + index];
  }
  shared[threadIdx.x] = sum;
  for (int half = lines / 2; half > 0; half /= 2) {
    __syncthreads();
    if (line < half) shared[threadIdx.x] += shared[threadIdx.x + half * width];
  }
  if (line > 0 || index >= where.numel) return;
  int64_t rest = index, offset = 0;
  for (int d = where.ndim - 1; d >= 0; --d) {
    const int64_t q = where.size[d].quotient(rest);
    offset += (rest - q * where.size[d].divisor) * where.stride[d];
    rest = q;
  }
  store_element(from.gradient[blockIdx.y], from.dtype[blockIdx.y], offset, shared[threadIdx.x]);
}

}  // namespace fused_act

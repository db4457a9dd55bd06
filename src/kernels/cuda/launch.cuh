// From a Request to kernel launches on a stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <iterator>

#include "cuda.h"
#include "program.cuh"

namespace fused_act {

// The compute capability that kernels on the current device were compiled for, as __CUDA_ARCH__ has it: that of the device says
// nothing, which may run what was compiled for an older one. `kernel` is the one to be launched: asked about another, the
// driver would load that, too, 4 ms in the first call. 0 where that fails, as then the launch does.
inline int compiled_for(const void* kernel) {
  static std::atomic<int> known[64];  // by device: 0 not yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return cudaGetLastError(), 0;
  int answer = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (!answer) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return cudaGetLastError(), 0;
    answer = attributes.ptxVersion * 10;
    if (device < 64) known[device].store(answer, std::memory_order_relaxed);
  }
  return answer;
}

// Blocks of a kernel that the current device holds at once. 1 where that is not known: then the launch will say why.
inline int64_t blocks_at_once(const void* kernel, int threads, int shared) {
  int device, multiprocessors, each;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared) != cudaSuccess)
    return cudaGetLastError(), 1;
  return std::max<int64_t>(1, int64_t(multiprocessors) * each);
}

inline bool aligned(const void* p, int bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// `bytes` is the size of an element of x; of the compute type where a Program has no vector kernels.
template <class Op, int bytes, Mode mode>
class Launcher {
  using C = Compute<bytes>;
  static constexpr int O = Op::kOperands;
  static constexpr bool kGradients = O > 0 && has_operand_gradients(mode);
  // Vector kernels of a Program exist for the two modes of training, and not for the rare float64.
  static constexpr bool kVectors =
      !Op::kDynamic || ((mode == Mode::forward || mode == Mode::backward || mode == Mode::coded) && bytes < 8);
  // Kernels for any strides learn the size of an element at run time, so one of the sizes has them.
  static constexpr bool kAnyStrides = Op::kDynamic && bytes != 2 && mode != Mode::coded;
  // Whether its vector kernels walk rows with a pitch and halves of pairs.
  static constexpr bool kWalks = Op::kDynamic || kSurrounded<Op>;
  static constexpr int kElements = kVector<bytes>;
  static constexpr int kColumns = tuning::column_elements<Op, bytes>;
  // Dynamic shared memory that every card gives a block without being asked.
  static constexpr int kScratchBytes = 48 * 1024 - 256;  // less what a kernel has of its own

 public:
  Launcher(const Op& op, const Request& r, const Geometry& geometry, const Cuda& cuda)
      : request_(r), geometry_(geometry), cuda_(cuda) {
    fill(op);
    if constexpr (kVectors) {
      flat_ = vectors_ = size_of(r.dtype) == bytes && (!kShort<Op, mode> || r.numel <= kShortElements);
      for_each_full([&](const void* p, int row, Lay& lay, Dtype dtype) { look(p, row, lay, dtype); });
      for (int k = 0; k < O; ++k)
        if (const int from = given(k); from >= 0) look_at_operand(r.operand[from], kOperand + from, args_.operand[k]);
      if constexpr (kSurrounded<Op>) {  // whose kernels have no code for what is rare
        vectors_ &= r.x.data && (mode == Mode::backward ? r.g.data : r.out[0].data);
        no_vectors_fit(r.numel % kElements != 0);
        vectors_ &= args_.plan.x.pair == Op::kPairs && (near_ || !spread_);
        if (Op::kPairs && mode == Mode::backward) {  // which writes both halves at once
          vectors_ &= r.out[0].data && args_.plan.out.pair && args_.plan.gradient[0].pair && gradient(0).dtype == r.dtype &&
                      gradient(0).data == static_cast<char*>(r.out[0].data) + bytes;
        } else {
          vectors_ &= !args_.plan.out.pair;
          for (const Lay& lay : args_.plan.gradient) vectors_ &= !lay.pair;
        }
        for (const OperandArg<C>& o : args_.operand) {
          const bool full = o.access == Access::full;
          vectors_ &= o.access != Access::walk && !(full && o.lay.pair != Op::kPairs) &&
                      !((full || o.access == Access::dense) && o.dtype != r.dtype) && !(spread_ && o.is_along_axis());
        }
      }
    }
    if constexpr (kGradients) plan_gradients();
    if constexpr (Op::kDynamic) plan_scratch();
  }

  // Can it run without the kernels for any strides, which compiled chains and elements of 16 bits have not?
  bool fits() const { return (kWalks ? vectors_ : flat_) && !any(Plan::apart); }

  bool has_vectors() const { return vectors_; }
  bool is_apart(int k) const { return plan_[k] == Plan::apart; }

  // Would it walk a tensor element by element, whose copy in another layout it need not?
  bool wants_dense() const { return kVectors && request_.may_be_dense && !vectors_; }

  cudaError_t run() {
    if constexpr (kGradients) {
      bool fused = false;
      for (int k = 0; k < O; ++k) {
        if (plan_[k] == Plan::apart) {
          if constexpr (kAnyStrides)
            if (cudaError_t e = launch_reduce(k); e != cudaSuccess) return e;
        }
        fused |= plan_[k] == Plan::fused;
      }
      if constexpr (kVectors && kSums<Op>)
        if (fused) return main_.inner == 1 ? launch_columns() : launch_rows();
    }
    bool any_output = request_.out[0].data || request_.out[1].data;
    for (int k = 0; k < O; ++k) any_output |= args_.emit[k] == Emit::store;
    if (!any_output) return cudaSuccess;
    if constexpr (kVectors)
      if (vectors_) return launch_flat();
    if constexpr (kAnyStrides) return launch_strided();
    return cudaErrorInvalidValue;  // not reached: fits() said so
  }

 private:
  enum class Plan { none, stored, fused, apart };

  // Which operand of the request is operand k of the kernel; -1: none.
  int given(int k) const {
    if constexpr (kSurrounded<Op>) return args_.op.operand_from(k);
    return k;
  }
  // Of which the gradient is this one; without data where there is none.
  const Request::OperandGradient& gradient(int k) const {
    static constexpr Request::OperandGradient none;
    return given(k) < 0 ? none : request_.operand_gradient[given(k)];
  }

  void fill(const Op& op) {
    const Request& r = request_;
    args_.op = op;
    args_.numel = r.numel;
    args_.dtype = r.dtype;
    args_.x = r.x.data;
    args_.g = r.g.data;
    args_.u = r.u.data;
    for (int n = 0; n < 2; ++n) args_.out[n] = r.out[n].data;
    args_.has_u = r.u.data != nullptr;
    for (int k = 0; k < O; ++k) {
      if (const int from = given(k); from >= 0) args_.operand[k] = operand_arg(r.operand[from]);
      args_.v[k] = operand_arg(r.v[k]);
      args_.has_v[k] = r.v_present[k];
      args_.emit[k] = Emit::none;
      args_.gradient[k] = gradient(k).data;
      args_.gradient_dtype[k] = gradient(k).dtype;
      args_.partial[k] = nullptr;
    }
    for (int s = 0; s < Op::kScalars; ++s) {
      int from = s;
      if constexpr (kSurrounded<Op>) from = op.scalar_from(s);
      if (from >= 0) args_.scalars[s] = Scalar<C>::of(static_cast<C>(r.scalars[from]));
    }
    args_.side_by_side = aligned(r.x.data, 32) && aligned(r.g.data, 32) && aligned(r.u.data, 32) && aligned(r.out[0].data, 32);
    args_.code_words = r.codes;
    args_.plane_words = code_words(r.numel);
    args_.codes = r.table.codes;
    for (int c = 0; c < kMaxCodes; ++c) args_.code_key[c] = static_cast<C>(r.table.key[c]);
  }

  OperandArg<C> operand_arg(const Request::Operand& o) const {
    OperandArg<C> arg;
    arg.data = o.data;
    arg.value = static_cast<C>(o.value);
    arg.dtype = o.dtype;
    arg.access = o.data ? Access::walk : Access::constant;
    return arg;
  }

  template <class F>
  void for_each_full(F f) {
    const Request& r = request_;
    ProgramPlan unused, *plan = &unused;
    if constexpr (kWalks) plan = &args_.plan;
    f(r.x.data, kX, plan->x, r.dtype);
    f(r.g.data, kG, plan->g, r.dtype);
    f(r.u.data, kU, plan->x, r.dtype);  // which vector kernels have where they read codes
    f(r.out[0].data, kOut, plan->out, r.dtype);
    for (int k = 0; k < O; ++k)
      if (is_full(gradient(k))) f(gradient(k).data, kGradient + given(k), plan->gradient[k], gradient(k).dtype);
  }
  bool is_full(const Request::OperandGradient& g) const { return g.data && g.numel == request_.numel; }

  // Where whole vectors do not fit a tensor.
  void no_vectors_fit(bool none) {
    spread_ |= kLoose<Op> && none;
    vectors_ &= kLoose<Op> || !none;
  }

  // Finds out how a full tensor lies: flat, in rows with a pitch, or as one half of pairs.
  void look(const void* p, int row, Lay& lay, Dtype dtype) {
    if (!p) return;
    if (aligned(p) && geometry_.flat(row)) return;
    flat_ = false;
    const Geometry& space = geometry_;
    const int64_t* stride = space.strides[row];
    const int size = size_of(dtype);
    if (request_.pairs && space.ndim == 1 && stride[0] == 2 &&
        aligned(static_cast<const char*>(p) - reinterpret_cast<uintptr_t>(p) / size % 2 * size)) {
      lay.pair = true;
    } else if (space.flat(row)) {
      no_vectors_fit(true);
    } else if (space.ndim == 2 && stride[1] == 1 && stride[0] > space.sizes[1] && stride[0] < (int64_t(1) << 32)) {
      lay.extra = static_cast<uint32_t>(stride[0] - space.sizes[1]);
      no_vectors_fit(!aligned(p) || stride[0] * size % 16 != 0 || space.sizes[1] % kElements != 0);
      if constexpr (kWalks) {
        near_ &= space.sizes[0] * stride[0] < (int64_t(1) << 32);
        args_.plan.pitched = true;
        args_.plan.by_inner = Divider::of(space.sizes[1], request_.numel);
      }
    } else {
      vectors_ = false;
    }
  }

  // The form in which a vector kernel reads an operand.
  void look_at_operand(const Request::Operand& o, int row, OperandArg<C>& arg) {
    if (!o.data) return;
    const ChannelForm f = channel_form(geometry_, row);
    const bool pair = f.exact && f.channels == request_.numel && f.stride == 2 && request_.pairs;
    const bool beside_x = kLoose<Op> && f.exact && f.channels == request_.numel && f.stride == 1;
    if (!f.exact || ((pair || beside_x) && f.channels > 1)) {
      look(o.data, row, arg.lay, o.dtype);
      arg.access = Access::full;
      return;
    }
    arg.stride = f.stride;
    arg.inner = f.inner;
    arg.channels = f.channels;
    arg.wraps = f.outer > 1;
    if (f.channels == 1) {
      arg.access = Access::scalar;
      return;
    }
    arg.by_inner = Divider::of(f.inner, request_.numel);
    arg.by_channels = Divider::of(f.channels, request_.numel);
    arg.axis = static_cast<int>(&arg - args_.operand);
    for (int k = arg.axis - 1; k >= 0; --k) {
      const OperandArg<C>& other = args_.operand[k];
      if (other.is_along_axis() && other.inner == arg.inner && other.channels == arg.channels &&
          other.wraps == arg.wraps)
        arg.axis = k;
    }
    const bool dense = f.inner == 1 && f.stride == 1 && aligned(o.data) && (!arg.wraps || f.channels % kElements == 0);
    arg.access = dense                       ? Access::dense
                 : f.inner % kElements == 0 ? Access::row
                 : f.inner >= kElements     ? Access::rows
                                            : Access::walk;
  }

  // Decides how each operand's gradient is computed.
  void plan_gradients() {
    bool fused = false;
    for (int k = 0; k < O; ++k) {
      if (!gradient(k).data) continue;
      if (is_full(gradient(k))) {  // nothing to sum: one more full output
        plan_[k] = Plan::stored;
        args_.emit[k] = Emit::store;
        continue;
      }
      const ChannelForm f = channel_form(geometry_, kGradient + given(k));
      // Beyond 2^30 channels a block for each would not fit in a grid.
      const bool sums = kSums<Op> && f.exact && flat_ && (f.channels == 1 || f.stride == 1) && f.channels <= (int64_t(1) << 30);
      if (sums && (!fused || (f.channels == main_.channels && f.inner == main_.inner))) {
        main_ = f;
        fused = true;
        plan_[k] = Plan::fused;
        args_.emit[k] = Emit::reduce;
      } else {
        plan_[k] = Plan::apart;
      }
    }
    if (fused && !knows_operands())
      for (int k = 0; k < O; ++k)
        if (plan_[k] == Plan::fused) plan_[k] = Plan::apart;
    if (main_.channels == 1) {  // one sum over everything: one row
      main_.inner = request_.numel;
      main_.outer = 1;
    }
  }
  // Whether the operands that the kernels that sum are compiled for lie along the axis of the sums, in columns as whole vectors,
  // or are no tensors that are read, and no others have sums.
  bool knows_operands() const {
    for (int k = 0; k < O; ++k) {
      const bool along = kAlong<Op> >> k & 1;
      if (kAlong<Op> && !along && plan_[k] == Plan::fused) return false;
      const OperandArg<C>& o = args_.operand[k];
      if (!along || o.access == Access::constant) continue;
      if (!o.is_along_axis() || o.inner != main_.inner || o.channels != main_.channels) return false;
      const bool whole = o.access == Access::dense && o.channels % kElements == 0 && o.dtype == request_.dtype;
      if (main_.inner == 1 && !whole) return false;
    }
    return true;
  }
  bool any(Plan plan) const { return std::find(std::begin(plan_), std::end(plan_), plan) != std::end(plan_); }

  // Gives operands, slots, slopes and sums their entries of scratch memory, and a block as many threads as it has room
  // for. A program that leaves no warp enough runs in the kernels that need no scratch memory.
  void plan_scratch() {
    ProgramPlan& plan = args_.plan;
    const int tape = args_.op.assign_tape();
    if constexpr (kVectors) {
      light_ = LightProgram::can_be(args_.op);
      lanes_ = tuning::program_lanes(mode, bytes, !light_);
      // An operand that no asked result depends on is read by steps all the same, as a constant.
      for (int n = 0; n < args_.op.length; ++n) {
        const uint8_t source = args_.op.instruction[n].source;
        if (source < kMaxOperands) plan.operands = std::max(plan.operands, source + 1);
      }
      plan.tape = plan.entries = args_.op.slots ? kMaxOperands + args_.op.slots : plan.operands;
      if (mode == Mode::backward) plan.entries += tape;
      if (mode == Mode::coded) plan.entries += args_.op.slots;  // their tangents
      for (int k = 0; k < O; ++k)
        if (plan_[k] == Plan::fused && main_.inner == 1) plan.sums[k] = plan.entries++;
      while (threads_ > kWarp && scratch_bytes() > kScratchBytes) threads_ /= 2;
      if (scratch_bytes() <= kScratchBytes) return;
      vectors_ = false;
      for (int k = 0; k < O; ++k) {
        if (plan_[k] != Plan::fused) continue;
        plan_[k] = Plan::apart;
        args_.emit[k] = Emit::none;
      }
    }
  }
  int scratch_bytes() const {
    if constexpr (Op::kDynamic) {
      return args_.plan.entries * (lanes_ == 8 ? Scratch<8>::kEntryBytes : Scratch<16>::kEntryBytes) * threads_;
    } else {
      return 0;
    }
  }
  cudaError_t launch_program(dim3 grid, const ProgramWalk& walk) {
    if constexpr (mode == Mode::forward) {
      return light_ ? launch(&program_kernel<bytes, false, mode>, grid, args_)
                    : launch(&program_kernel<bytes, true, mode>, grid, args_);
    } else if constexpr (mode == Mode::coded) {
      return launch(&program_kernel<bytes, false, mode>, grid, args_);
    } else {
      return launch(&program_backward_kernel<bytes>, grid, args_, walk);
    }
  }

  cudaError_t launch_flat() {
    const unsigned blocks = static_cast<unsigned>(divide_up(request_.numel, int64_t(threads_) * lanes_));
    if constexpr (Op::kDynamic) {
      return launch_program(dim3(blocks), ProgramWalk{});
    } else {
      if constexpr (kLoose<Op>) {
        const unsigned spread_blocks = static_cast<unsigned>(divide_up(request_.numel, int64_t(threads_) * Spread<bytes>::n));
        if (spread_) return launch(&spread_kernel<Op, bytes, mode>, spread_blocks, args_);
      }
      const auto vectors_of = [](auto* kernel) {
        const int capability = tuning::may_take_two<Op>(mode) ? compiled_for(reinterpret_cast<const void*>(kernel)) : 0;
        return tuning::flat_vectors<Op>(mode, tuning::architecture(capability));
      };
      if constexpr (tuning::several<Op>(mode, bytes) > 1) {
        constexpr auto kernel = &several_kernel<Op, bytes, mode, std::conditional_t<kShort<Op, mode>, uint32_t, int64_t>>;
        // Where flat_kernel moves two vectors at once, it takes large tensors, too.
        Several several;
        if (const unsigned some = plan_several(several); some && vectors_of(kernel) == 1)
          return launch(kernel, some, args_, several);
      }
      const auto launch_vectors = [&](auto* kernel) {
        return launch_with(threads_ / vectors_of(kernel), 0, kernel, blocks, args_);
      };
      if constexpr (kShort<Op, mode>) return launch_vectors(&flat_kernel<Op, bytes, mode, uint32_t>);
      if constexpr (Op::kOperands > 0 && mode == Mode::forward)  // which find an operand's element
        if (request_.numel <= kShortElements) return launch_vectors(&flat_kernel<Op, bytes, mode, uint32_t>);
      if constexpr (!kShort<Op, mode>) return launch_vectors(&flat_kernel<Op, bytes, mode, int64_t>);
    }
  }

  // Which vectors a thread of several_kernel takes; returns the blocks. 0: each one only.
  unsigned plan_several(Several& plan) const {
    const int64_t numel = request_.numel, block = int64_t(threads_) * lanes_;
    const int64_t most = numel / (block * tuning::several_blocks<Op>(mode, bytes));
    const int64_t times = std::min<int64_t>(tuning::several<Op>(mode, bytes), most);
    if (times < 2) return 0;
    if (mode == Mode::coded && numel % (4 * kCodeWord)) return 0;  // where there are codes of no elements, flat_kernel writes them
    const OperandArg<C>* along = nullptr;
    bool one_axis = true, planes = kSurrounded<Op>;
    for (int k = 0; k < O; ++k) {
      const OperandArg<C>& o = args_.operand[k];
      if (!(kHeld<Op> >> k & 1) || o.access == Access::constant || o.access == Access::scalar) continue;
      one_axis &= o.access != Access::full && (!along || o.axis == along->axis);
      planes &= o.access == Access::row;
      along = &o;
    }
    const int64_t plane = along ? along->inner : 0, period = !along ? lanes_ : along->wraps ? plane * along->channels : numel;
    if (!one_axis) return 0;
    if (period < numel && period % lanes_ == 0) {
      plan.apart = plan.begins = divide_up(numel, period * times) * period;
      plan.in_plane = 0;
    } else if (planes && plane >= times * block && plane % (times * lanes_) == 0) {
      plan.apart = plane / times;
      plan.begins = numel / times;
      plan.in_plane = static_cast<int>(times);
      plan.by_apart = Divider::of(plan.apart, numel);
    } else {
      return 0;
    }
    return static_cast<unsigned>(divide_up(plan.begins, block));
  }

  Space make_space(const int* order, int ndim) const {
    Space space;
    space.ndim = ndim;
    for (int d = 0; d < ndim; ++d) {
      const int from = order[d];
      space.size[d] = Divider::of(geometry_.sizes[from], request_.numel);
      for (int row = 0; row < kTensors; ++row) space.stride[row][d] = geometry_.strides[row][from];
    }
    return space;
  }

  cudaError_t launch_strided() {
    int order[kMaxDims];
    for (int d = 0; d < geometry_.ndim; ++d) order[d] = d;
    const Space space = make_space(order, geometry_.ndim);
    const unsigned blocks = static_cast<unsigned>(divide_up(request_.numel, int64_t(kThreads) * tuning::kStridedElements));
    if constexpr (mode == Mode::forward && bytes == 4) {
      if (size_of(request_.dtype) == 2)
        return launch_with(kThreads, 0, &strided_kernel<Lanes<C, 1, true>, mode>, blocks, args_, space);
    }
    return launch_with(kThreads, 0, &strided_kernel<C, mode>, blocks, args_, space);
  }

  // Elements of a block of row_kernel: whole vectors for all threads, more of them in a large tensor.
  int64_t elements_per_block(int64_t blocks) const {
    const int64_t least = int64_t(threads_) * lanes_ * tuning::kMinVectorsPerThread;
    return std::max(least, request_.numel / blocks);
  }

  cudaError_t launch_rows() {
    const ChannelForm& f = main_;
    Rows rows;
    rows.outer = f.outer;
    rows.channels = f.channels;
    rows.inner = f.inner;
    const int64_t elements = elements_per_block(tuning::row_blocks(size_of(request_.dtype)));
    rows.pieces = divide_up(f.inner, elements + elements / 2);
    rows.length = divide_up(divide_up(f.inner, rows.pieces), int64_t(lanes_)) * lanes_;
    rows.pieces = divide_up(f.inner, rows.length);
    rows.width_log2 = 0;
    while ((1 << rows.width_log2) < threads_ && (int64_t(lanes_) << rows.width_log2) < rows.length) ++rows.width_log2;
    rows.width = 1 << rows.width_log2;
    const int64_t lines = threads_ / rows.width;
    rows.planes = rows.pieces > 1 ? 1 : std::min(f.outer, std::max(lines, elements / f.inner / lines * lines));
    rows.chunks = rows.pieces * divide_up(f.outer, rows.planes);
    allocate_partials(f.channels, rows.chunks);
    const unsigned blocks = static_cast<unsigned>(f.channels * rows.chunks);
    rows.by_pieces = Divider::of(rows.pieces, blocks);
    rows.by_channels = Divider::of(f.channels, blocks);
    cudaError_t e;
    if constexpr (Op::kDynamic) {
      e = launch_program(dim3(blocks), {ProgramWalk::rows, rows, {}});
    } else {
      e = launch(&row_kernel<Op, bytes, mode>, blocks, args_, rows);
    }
    return e == cudaSuccess ? finish(f.channels, rows.chunks) : e;
  }

  cudaError_t launch_columns() {
    constexpr auto kernel = [] {
      if constexpr (Op::kDynamic) return &program_backward_kernel<bytes>;
      if constexpr (!Op::kDynamic) return &column_kernel<Op, bytes, mode>;
    }();
    const ChannelForm& f = main_;
    Columns columns;
    // Rows of channels until they are a whole number of vectors.
    columns.fold = 1;
    while (f.channels * columns.fold % kColumns) columns.fold *= 2;
    columns.channels = f.channels;
    const int64_t groups = f.channels * columns.fold / kColumns, rows = divide_up(f.outer, int64_t(columns.fold));
    // As few column tiles as fit, all about as wide.
    columns.across = static_cast<int>(divide_up(groups, divide_up(groups, int64_t(threads_))));
    const int64_t tiles = divide_up(groups, int64_t(columns.across));
    const int64_t rows_at_once = threads_ / columns.across * (lanes_ / kElements);
    columns.chunks = divide_up(rows, rows_at_once * tuning::kMinVectorsPerThread);
    if (columns.chunks > 1) {
      const int64_t wave = blocks_at_once(reinterpret_cast<const void*>(kernel), threads_, scratch_bytes());
      columns.chunks = std::min(columns.chunks, blocks_for_each(tiles, wave));
    }
    allocate_partials(f.channels, columns.chunks * columns.fold);
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(columns.chunks));
    cudaError_t e;
    if constexpr (Op::kDynamic) {
      e = launch_program(grid, {ProgramWalk::columns, {}, columns});
    } else {
      e = launch(kernel, grid, args_, columns);
    }
    return e == cudaSuccess ? finish(f.channels, columns.chunks * columns.fold) : e;
  }

  // Blocks for each of `tiles`, so that nearly all of `wave` run at once, as few times as that goes.
  static int64_t blocks_for_each(int64_t tiles, int64_t wave) {
    int64_t each = 1;
    for (int waves = 1; waves <= tuning::kColumnWaves; ++waves) {
      each = std::max<int64_t>(1, waves * wave / tiles);
      if (each * tiles * 10 >= waves * wave * 9) break;
    }
    return std::min<int64_t>(each, 65535);  // of a grid
  }

  cudaError_t launch_reduce(int which) {
    int order[kMaxDims], ndim = 0;
    Reduction reduction{1, 1, 0, 1, 0};
    const int64_t* stride = geometry_.strides[kGradient + which];
    for (int d = 0; d < geometry_.ndim; ++d) {
      if (stride[d] == 0) continue;
      order[ndim++] = d;
      reduction.kept *= geometry_.sizes[d];
    }
    reduction.kept_ndim = ndim;
    for (int d = 0; d < geometry_.ndim; ++d) {
      if (stride[d] != 0) continue;
      order[ndim++] = d;
      reduction.reduced *= geometry_.sizes[d];
    }
    // Enough warps to fill the card, each with enough to sum.
    const int64_t wanted = std::max<int64_t>(1, tuning::kReduceBlocks * (kThreads / kWarp) / reduction.kept);
    reduction.chunks = std::min(wanted, divide_up(reduction.reduced, tuning::kWarpElements));
    reduction.length = divide_up(reduction.reduced, reduction.chunks);
    reduction.chunks = divide_up(reduction.reduced, reduction.length);
    Args<Op, C> args = args_;
    for (Emit& emit : args.emit) emit = Emit::none;
    if (reduction.chunks > 1) {
      args.partial[which] = args_.partial[which] =
          static_cast<C*>(cuda_.allocate(cuda_.context, sizeof(C) * reduction.kept * reduction.chunks));
    }
    const Space space = make_space(order, ndim);
    const unsigned blocks =
        static_cast<unsigned>(divide_up(reduction.kept * reduction.chunks, int64_t(kThreads / kWarp)));
    const cudaError_t e = launch_with(kThreads, 0, &reduce_kernel<C, mode>, blocks, args, space, reduction, which);
    if (e != cudaSuccess || reduction.chunks == 1) return e;
    Kept where;
    where.numel = reduction.kept;
    where.ndim = reduction.kept_ndim;
    for (int d = 0; d < where.ndim; ++d) {
      where.size[d] = space.size[d];
      where.stride[d] = stride[order[d]];
    }
    Partials<C> partials;
    add(partials, which);
    return launch_finish(partials, reduction.chunks, where);
  }

  void allocate_partials(int64_t kept, int64_t chunks) {
    if (chunks == 1) return;
    for (int k = 0; k < O; ++k) {
      if (args_.emit[k] == Emit::reduce)
        args_.partial[k] = static_cast<C*>(cuda_.allocate(cuda_.context, sizeof(C) * kept * chunks));
    }
  }

  cudaError_t finish(int64_t kept, int64_t chunks) {
    if (chunks == 1) return cudaSuccess;
    Kept where;
    where.numel = kept;
    where.size[0] = Divider::of(kept, kept);
    where.stride[0] = 1;
    Partials<C> partials;
    for (int k = 0; k < O; ++k)
      if (args_.emit[k] == Emit::reduce) add(partials, k);
    return launch_finish(partials, chunks, where);
  }
  void add(Partials<C>& partials, int k) const {
    const int n = partials.operands++;
    partials.partial[n] = args_.partial[k];
    partials.gradient[n] = args_.gradient[k];
    partials.dtype[n] = args_.gradient_dtype[k];
  }
  cudaError_t launch_finish(const Partials<C>& partials, int64_t chunks, const Kept& where) {
    int width = 1, threads = kWarp;
    while (width < tuning::kFinishWidth<sizeof(C)> && width < where.numel) width *= 2;
    while (threads < tuning::kFinishThreads && threads * tuning::kFinishChunks < width * chunks) threads *= 2;
    const dim3 grid(static_cast<unsigned>(divide_up(where.numel, int64_t(width))), partials.operands);
    return launch_with(threads, 0, &finish_kernel<C>, grid, partials, chunks, width, where);
  }

  template <class... Parameters, class... Given>
  cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, const Given&... given) const {
    return launch_with(threads_, scratch_bytes(), kernel, grid, given...);
  }
  // Every kernel begins with wait_for_earlier, so that it may be launched before the one before it has ended.
  template <class... Parameters, class... Given>
  cudaError_t launch_with(int threads, int shared, void (*kernel)(Parameters...), dim3 grid, const Given&... given) const {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(cuda_.stream);
    config.attrs = &early;
    const void* const code = reinterpret_cast<const void*>(kernel);
    config.numAttrs = compiled_for(code) >= 900;
    static_assert((std::is_same_v<Parameters, Given> && ...), "arguments are given by their addresses");
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&given))...};
    const cudaError_t e = cudaLaunchKernelExC(&config, code, arguments);
    if (e != cudaSuccess) cudaGetLastError();  // it is reported here, and by no later call
    return e;
  }

  static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

  const Request& request_;
  const Geometry& geometry_;
  const Cuda& cuda_;
  int threads_ = kThreads;
  int lanes_ = kElements;  // that a thread takes at a time
  bool light_ = false;     // a Program of light steps
  Args<Op, C> args_;
  bool flat_ = false;     // every full tensor is dense in the order of the walk and aligned
  bool vectors_ = false;  // a vector kernel can walk every tensor
  bool spread_ = false;   // spread_kernel is to walk them, since whole vectors do not fit one
  bool near_ = true;      // as it asks: 32 bits are enough for where an element of a tensor with a pitch is
  Plan plan_[Args<Op, C>::O] = {};
  ChannelForm main_;  // of the gradients that are summed in one pass with the full outputs
};

inline const char* message(cudaError_t e) { return e == cudaSuccess ? nullptr : cudaGetErrorString(e); }

// Codes are written and read by vector kernels alone.
template <class L>
const char* run_with_codes(L&& launcher) {
  return launcher.fits() ? message(launcher.run()) : kWantsDense;
}

}  // namespace fused_act

// From a Request to kernel launches on a stream, for one element type. Included by the four files that name a type.
#pragma once

#include <algorithm>

#include "cuda.h"
#include "kernels.cuh"

namespace fused_act {

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class Op, class T, Mode mode>
class Launcher {
  using C = compute_of<T>;
  static constexpr int O = Op::kOperands;
  static constexpr int V = Vector<T>::kSize;
  static constexpr int kGradientRow = 3 + 2 * O;

 public:
  Launcher(const Request& r, const Geometry& geometry, const Cuda& cuda) : request_(r), geometry_(geometry), cuda_(cuda) {}

  cudaError_t run() {
    fill();
    bool all_flat = true;
    const auto check = [&](const void* p, int row) { all_flat &= !p || (aligned(p) && geometry_.flat(row)); };
    check(request_.x.data, kX);
    check(request_.g.data, kG);
    check(request_.u.data, kU);
    for (void* out : request_.out) all_flat &= !out || aligned(out);
    for (int k = 0; k < O; ++k) all_flat &= request_.operand[k].data == nullptr || operand_access(request_.operand[k], kOperand + k, args_.operand[k]);
    for (int k = 0; k < O; ++k) all_flat &= request_.v[k].data == nullptr || operand_access(request_.v[k], kV + k, args_.v[k]);

    if constexpr (O > 0 && has_operand_gradients<mode>) {
      if (cudaError_t e = emit_gradients(all_flat); e != cudaSuccess || done_) return e;
    }
    bool any_output = request_.out[0] || request_.out[1];
    for (int k = 0; k < O; ++k) any_output |= args_.emit[k] == Emit::store;
    if (!any_output) return cudaSuccess;
    return all_flat ? launch_flat() : launch_strided();
  }

 private:
  void fill() {
    const Request& r = request_;
    args_.numel = r.numel;
    args_.x = static_cast<const T*>(r.x.data);
    args_.g = static_cast<const T*>(r.g.data);
    args_.u = static_cast<const T*>(r.u.data);
    for (int n = 0; n < 2; ++n) args_.out[n] = static_cast<T*>(r.out[n]);
    args_.present.u = r.u.data != nullptr;
    for (int k = 0; k < O; ++k) {
      args_.operand[k] = operand_arg(r.operand[k]);
      args_.v[k] = operand_arg(r.v[k]);
      args_.present.v[k] = r.v_present[k];
      args_.emit[k] = Emit::none;
      args_.gradient[k] = r.operand_gradient[k].data;
      args_.gradient_is_compute[k] = r.operand_gradient[k].dtype != r.dtype;
      args_.partial[k] = nullptr;
    }
    for (int s = 0; s < Op::kScalars; ++s) args_.scalars[s] = Scalar<C>::of(static_cast<C>(r.scalars[s]));
  }

  OperandArg<C> operand_arg(const Request::Operand& o) const {
    OperandArg<C> arg;
    arg.data = o.data;
    arg.value = static_cast<C>(o.value);
    arg.is_compute = o.dtype != request_.dtype;
    arg.access = o.data ? Access::walk : Access::constant;
    return arg;
  }

  // The form in which a vector kernel reads this operand; false where it has none.
  bool operand_access(const Request::Operand& o, int row, OperandArg<C>& arg) const {
    const ChannelForm f = channel_form(geometry_, row);
    if (!f.exact) return false;
    arg.stride = f.stride;
    arg.inner = f.inner;
    arg.channels = f.channels;
    arg.wraps = f.outer > 1;
    if (f.channels == 1) {
      arg.access = Access::scalar;
      return true;
    }
    arg.by_inner = Divider::of(f.inner, request_.numel);
    arg.by_channels = Divider::of(f.channels, request_.numel);
    const bool dense = f.inner == 1 && f.stride == 1 && aligned(o.data) && (!arg.wraps || f.channels % V == 0);
    arg.access = dense ? Access::dense : f.inner >= V ? Access::rows : Access::walk;
    return true;
  }

  // Decides how each operand's gradient is computed and launches what computes it. Sets done_ where that kernel has
  // written the full outputs too.
  cudaError_t emit_gradients(bool all_flat) {
    ChannelForm main;  // all gradients of this form are summed in one pass with the full outputs
    bool fused = false;
    for (int k = 0; k < O; ++k) {
      const Request::OperandGradient& gradient = request_.operand_gradient[k];
      if (!gradient.data) continue;
      const ChannelForm f = channel_form(geometry_, kGradient + k);
      if (gradient.numel == request_.numel) {  // nothing to sum: one more full output
        const bool beside = all_flat && geometry_.flat(kGradient + k) && aligned(gradient.data);
        args_.emit[k] = Emit::store;
        stores_elsewhere_ |= !beside;
        continue;
      }
      // Beyond 2^30 channels a block for each would not fit in a grid.
      const bool sums = f.exact && all_flat && (f.channels == 1 || f.stride == 1) && f.channels <= (int64_t(1) << 30);
      if (sums && (!fused || (f.channels == main.channels && f.inner == main.inner))) {
        main = f;
        fused = true;
        args_.emit[k] = Emit::reduce;
      } else if (cudaError_t e = launch_reduce(k); e != cudaSuccess) {
        return e;
      }
    }
    if (stores_elsewhere_) {  // a full gradient in another order: the strided kernel writes it, sums go apart
      for (int k = 0; k < O; ++k) {
        if (args_.emit[k] != Emit::reduce) continue;
        args_.emit[k] = Emit::none;
        if (cudaError_t e = launch_reduce(k); e != cudaSuccess) return e;
      }
      done_ = true;
      return launch_strided();
    }
    if (!fused) return cudaSuccess;
    done_ = true;
    if (main.channels == 1) {  // one sum over everything: one row
      main.inner = request_.numel;
      main.outer = 1;
    }
    return main.inner == 1 ? launch_columns(main) : launch_rows(main);
  }

  cudaError_t launch_flat() {
    const int64_t blocks = divide_up(request_.numel, int64_t(kThreads) * V);
    flat_kernel<Op, T, mode><<<static_cast<unsigned>(blocks), kThreads, 0, stream()>>>(args_);
    return cudaGetLastError();
  }

  Space<O> make_space(const int* order, int ndim) const {
    Space<O> space;
    space.ndim = ndim;
    for (int d = 0; d < ndim; ++d) {
      const int from = order[d];
      space.size[d] = Divider::of(geometry_.sizes[from], request_.numel);
      const auto copy = [&](int row, int t, bool present) {
        space.stride[row][d] = present ? geometry_.strides[t][from] : 0;
      };
      copy(0, kX, request_.x.data);
      copy(1, kG, request_.g.data);
      copy(2, kU, request_.u.data);
      for (int k = 0; k < O; ++k) {
        copy(3 + k, kOperand + k, request_.operand[k].data);
        copy(3 + O + k, kV + k, request_.v[k].data);
        copy(kGradientRow + k, kGradient + k, request_.operand_gradient[k].data);
      }
    }
    return space;
  }

  cudaError_t launch_strided() {
    int order[kMaxDims];
    for (int d = 0; d < geometry_.ndim; ++d) order[d] = d;
    const Space<O> space = make_space(order, geometry_.ndim);
    const int64_t blocks = divide_up(request_.numel, int64_t(kThreads) * tuning::kStridedElements);
    strided_kernel<Op, T, mode><<<static_cast<unsigned>(blocks), kThreads, 0, stream()>>>(args_, space);
    return cudaGetLastError();
  }

  // Elements of a block of a fused reduction: whole vectors for all threads, more of them in a large tensor.
  int64_t elements_per_block(int64_t blocks) const {
    const int64_t least = int64_t(kThreads) * V * tuning::kMinVectorsPerThread;
    return std::max(least, request_.numel / blocks);
  }

  cudaError_t launch_rows(const ChannelForm& f) {
    Rows rows;
    rows.outer = f.outer;
    rows.channels = f.channels;
    rows.inner = f.inner;
    const int64_t elements = elements_per_block(tuning::kRowBlocks);
    rows.pieces = divide_up(f.inner, elements + elements / 2);
    rows.length = divide_up(divide_up(f.inner, rows.pieces), V) * V;
    rows.pieces = divide_up(f.inner, rows.length);
    rows.width = 1;
    while (rows.width < kThreads && int64_t(rows.width) * V < rows.length) rows.width *= 2;
    const int64_t lines = kThreads / rows.width;
    rows.planes = rows.pieces > 1 ? 1 : std::min(f.outer, std::max(lines, elements / f.inner / lines * lines));
    rows.chunks = rows.pieces * divide_up(f.outer, rows.planes);
    allocate_partials(f.channels, rows.chunks);
    const unsigned blocks = static_cast<unsigned>(f.channels * rows.chunks);
    row_kernel<Op, T, mode><<<blocks, kThreads, 0, stream()>>>(args_, rows);
    if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
    return finish(f.channels, rows.chunks);
  }

  cudaError_t launch_columns(const ChannelForm& f) {
    Columns columns;
    columns.outer = f.outer;
    columns.channels = f.channels;
    columns.width = f.channels % V == 0 ? V : 1;
    const int64_t groups = f.channels / columns.width;
    // As few column tiles as fit, all about as wide.
    columns.across = static_cast<int>(divide_up(groups, divide_up(groups, int64_t(kThreads))));
    const int64_t tiles = divide_up(groups, int64_t(columns.across));
    const int64_t lines = kThreads / columns.across;
    const int64_t elements = elements_per_block(tuning::kColumnBlocks);
    columns.rows = std::max<int64_t>(1, elements / (int64_t(columns.across) * columns.width));
    columns.rows = divide_up(columns.rows, lines) * lines;
    columns.rows = std::max(columns.rows, divide_up(f.outer, int64_t(65535)));
    columns.chunks = divide_up(f.outer, columns.rows);
    allocate_partials(f.channels, columns.chunks);
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(columns.chunks));
    column_kernel<Op, T, mode><<<grid, kThreads, 0, stream()>>>(args_, columns);
    if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
    return finish(f.channels, columns.chunks);
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
    const int64_t wanted = std::max<int64_t>(1, tuning::kColumnBlocks * (kThreads / kWarp) / reduction.kept);
    reduction.chunks = std::min(wanted, divide_up(reduction.reduced, tuning::kWarpElements));
    reduction.length = divide_up(reduction.reduced, reduction.chunks);
    reduction.chunks = divide_up(reduction.reduced, reduction.length);
    if (reduction.chunks > 1) {
      args_.partial[which] = static_cast<C*>(cuda_.allocate(cuda_.context, sizeof(C) * reduction.kept * reduction.chunks));
    }
    const Space<O> space = make_space(order, ndim);
    const int64_t blocks = divide_up(reduction.kept * reduction.chunks, int64_t(kThreads / kWarp));
    reduce_kernel<Op, T, mode><<<static_cast<unsigned>(blocks), kThreads, 0, stream()>>>(args_, space, reduction, which);
    if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
    if (reduction.chunks == 1) return cudaSuccess;
    Kept where;
    where.ndim = reduction.kept_ndim;
    for (int d = 0; d < where.ndim; ++d) {
      where.size[d] = space.size[d];
      where.stride[d] = stride[order[d]];
    }
    return launch_finish(which, reduction.kept, reduction.chunks, where);
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
    where.size[0] = Divider::of(kept, kept);
    where.stride[0] = 1;
    for (int k = 0; k < O; ++k) {
      if (args_.emit[k] != Emit::reduce) continue;
      if (cudaError_t e = launch_finish(k, kept, chunks, where); e != cudaSuccess) return e;
    }
    return cudaSuccess;
  }

  cudaError_t launch_finish(int which, int64_t kept, int64_t chunks, const Kept& where) {
    const int threads = chunks > 4 * kWarp ? kThreads : kWarp;
    finish_kernel<T><<<static_cast<unsigned>(kept), threads, 0, stream()>>>(
        args_.partial[which], kept, chunks, args_.gradient[which], args_.gradient_is_compute[which], where);
    return cudaGetLastError();
  }

  static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(cuda_.stream); }

  const Request& request_;
  const Geometry& geometry_;
  const Cuda& cuda_;
  Args<Op, T> args_;
  bool done_ = false;
  bool stores_elsewhere_ = false;
};

template <class Op, class T>
cudaError_t launch(const Request& r, const Geometry& geometry, const Cuda& cuda) {
  switch (r.mode) {
    case Mode::forward:
      return Launcher<Op, T, Mode::forward>(r, geometry, cuda).run();
    case Mode::jvp:
      return Launcher<Op, T, Mode::jvp>(r, geometry, cuda).run();
    case Mode::backward:
      return Launcher<Op, T, Mode::backward>(r, geometry, cuda).run();
    case Mode::double_backward:
      return Launcher<Op, T, Mode::double_backward>(r, geometry, cuda).run();
  }
  return cudaErrorInvalidValue;
}

// The launch functions of all operators, in the order of the list.
template <class T>
struct Table {
  using Function = cudaError_t (*)(const Request&, const Geometry&, const Cuda&);
#define FUSED_ACT_ENTRY(NAME, ...) &launch<ops::NAME, T>,
  static constexpr Function functions[] = {FUSED_ACT_OPERATORS(FUSED_ACT_ENTRY)};
#undef FUSED_ACT_ENTRY

  static const char* run(int op, const Request& r, const Geometry& geometry, const Cuda& cuda) {
    const cudaError_t e = functions[op](r, geometry, cuda);
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
  }
};

}  // namespace fused_act

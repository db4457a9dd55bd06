// The iteration space of a Request: the elements in the outputs' memory order, with the dimensions that all tensors can
// walk as one merged. After that most requests have one dimension (plain) or three (outer, channel, inner).
#pragma once

#include <algorithm>

#include "plan.h"

namespace fused_act {

constexpr int kMaxDims = 16;

// Which row of Geometry::strides belongs to which tensor.
constexpr int kX = 0, kG = 1, kU = 2, kOut = 3, kOperand = kOut + 2, kV = kOperand + kMaxOperands,
              kGradient = kV + kMaxOperands, kTensors = kGradient + kMaxOperands;

struct Geometry {
  int ndim = 0;  // outermost dimension first
  int64_t sizes[kMaxDims];
  int64_t strides[kTensors][kMaxDims];
  bool too_many_dims = false;

  // True if tensor t is dense in iteration order.
  bool flat(int t) const {
    int64_t expected = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      if (strides[t][d] != expected) return false;
      expected *= sizes[d];
    }
    return true;
  }
};

// The form offset(i) = (i / inner) % channels * stride: one channel axis, or no axis at all (channels = 1).
struct ChannelForm {
  bool exact = false;
  int64_t outer = 1, channels = 1, inner = 1, stride = 0;
};

inline ChannelForm channel_form(const Geometry& geometry, int t) {
  ChannelForm f;
  int d = geometry.ndim - 1;
  const int64_t* stride = geometry.strides[t];
  for (; d >= 0 && stride[d] == 0; --d) f.inner *= geometry.sizes[d];
  if (d < 0) {  // one element: all of the space is "outer"
    f.outer = f.inner;
    f.inner = 1;
    f.exact = true;
    return f;
  }
  f.stride = stride[d];
  for (; d >= 0 && stride[d] == f.stride * f.channels; --d) f.channels *= geometry.sizes[d];
  for (; d >= 0 && stride[d] == 0; --d) f.outer *= geometry.sizes[d];
  f.exact = d < 0;
  return f;
}

inline Geometry make_geometry(const Request& r) {
  Geometry geometry;
  const int64_t* rows[kTensors];
  int used[kTensors], n_used = 0;
  const auto use = [&](int t, bool present, const int64_t* strides) {
    rows[t] = present ? strides : nullptr;
    if (present) used[n_used++] = t;
  };
  use(kX, r.x.data, r.x.strides);
  use(kG, r.g.data, r.g.strides);
  use(kU, r.u.data, r.u.strides);
  for (int n = 0; n < 2; ++n) use(kOut + n, r.out[n].data, r.out[n].strides);
  for (int i = 0; i < kMaxOperands; ++i) {
    const bool exists = i < r.operands;
    use(kOperand + i, exists && r.operand[i].data, r.operand[i].strides);
    use(kV + i, exists && r.v[i].data, r.v[i].strides);
    use(kGradient + i, exists && r.operand_gradient[i].data, r.operand_gradient[i].strides);
  }

  constexpr int kMaxTorchDims = 64;
  int order[kMaxTorchDims], n = 0;
  for (int d = 0; d < r.ndim; ++d)
    if (r.sizes[d] != 1) order[n++] = d;
  // Insertion sort by descending stride: nearly always sorted already.
  for (int i = 1; i < n; ++i)
    for (int j = i; j > 0 && r.order[order[j - 1]] < r.order[order[j]]; --j)
      std::swap(order[j - 1], order[j]);

  for (int i = 0; i < n; ++i) {
    const int d = order[i];
    const int last = geometry.ndim - 1;
    bool merge = geometry.ndim > 0;
    for (int k = 0; merge && k < n_used; ++k)
      merge = geometry.strides[used[k]][last] == rows[used[k]][d] * r.sizes[d];
    if (!merge && geometry.ndim == kMaxDims) {
      geometry.too_many_dims = true;
      return geometry;
    }
    const int at = merge ? last : geometry.ndim++;
    geometry.sizes[at] = merge ? geometry.sizes[at] * r.sizes[d] : r.sizes[d];
    for (int k = 0; k < n_used; ++k) geometry.strides[used[k]][at] = rows[used[k]][d];
  }
  return geometry;
}

}  // namespace fused_act

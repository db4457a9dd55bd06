// What a kernel is asked to do, as plain data: the torch side fills a Request, geometry.h reduces its strides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codes.h"

namespace fused_act {

enum class Dtype : int { f16, bf16, f32, f64 };

// Codes lie in the order of the elements in memory, those of 32 in a word, first of all a bit each; with two bits the other
// ones of all follow. The words of either are a multiple of 16 bytes.
constexpr int64_t kCodeWord = 32;
template <class I>  // an integer, or one that is not known yet
FUSED_ACT_FN I code_words(const I& numel) {
  return (numel + (4 * kCodeWord - 1)) / (4 * kCodeWord) * 4;
}

// Elements that kernels of 32-bit indices take at most: Programs, frames and all that has codes. An index stays below 2^31,
// also where a block goes beyond the end by what it takes at a time.
constexpr int64_t kShortElements = (int64_t(1) << 31) - (1 << 16);

// Strides are in elements and per dimension of the iteration space; a broadcast dimension has stride 0.
struct Request {
  struct Tensor {
    const void* data = nullptr;  // null: not read
    const int64_t* strides = nullptr;
  };
  struct Output {
    void* data = nullptr;  // null: not asked for
    const int64_t* strides = nullptr;
  };
  struct Operand {
    const void* data = nullptr;  // null: `value` is the operand (a zero-dimensional tensor of another device) or not read
    Dtype dtype = Dtype::f32;
    const int64_t* strides = nullptr;
    double value = 0;
  };
  struct OperandGradient {
    void* data = nullptr;  // null: not asked for
    Dtype dtype = Dtype::f32;
    const int64_t* strides = nullptr;
    int64_t numel = 0;
  };

  Mode mode = Mode::forward;
  Dtype dtype = Dtype::f32;  // of x, g, u and the full outputs
  int ndim = 0;
  int64_t numel = 0;
  const int64_t* sizes = nullptr;
  const int64_t* order = nullptr;  // strides whose descending order is that of the walk
  Tensor x, g, u;
  bool may_be_dense = false;  // whether who asks would rather copy tensors than have them walked element by element
  bool pairs = false;  // tensors with a stride of 2 are one half of a buffer of pairs, whose other half may be read too
  Operand operand[kMaxOperands], v[kMaxOperands];
  bool v_present[kMaxOperands] = {};
  Output out[2];
  OperandGradient operand_gradient[kMaxOperands];
  int operands = 0;
  Program program;
  double scalars[kMaxScalars] = {};  // of the program's steps, in their order
  // Of the modes with codes: `coded` writes them; the others, which have no program, read them. Then the table's columns are
  // those of x and of the operands above, each with kMaxCodes entries.
  uint32_t* codes = nullptr;
  CodeTable table;
};

}  // namespace fused_act

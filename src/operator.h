// An operator of the list as the torch side sees it: its parameters, its dispatcher operators and what they depend on.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/dependencies.h"

namespace fused_act {

struct Parameter {
  std::string name;
  bool is_operand;
  std::string default_text;
  std::optional<double> default_value;
};

struct Operator {
  int index = 0;  // place in the list
  std::string name, expression, gradient;
  std::vector<Parameter> parameters;
  int operands = 0, scalars = 0;
  Dependencies dependencies[kModes];
  std::string schemas[kModes];
  std::optional<c10::OperatorHandle> handles[kModes];

  std::string label() const { return "fused_act." + name; }
  const std::string& operand_name(int k) const;
};

constexpr bool has_g(Mode mode) { return mode == Mode::backward || mode == Mode::double_backward; }
constexpr bool has_u(Mode mode) { return mode == Mode::jvp || mode == Mode::double_backward; }
constexpr const char* kModeSuffixes[kModes] = {"", "_jvp", "_backward", "_double_backward"};

// The list, in its order.
const std::vector<Operator>& operators();

// The arguments of one call. Tensors not given, or not meaningful in the mode, are undefined.
//
//   forward          (x, parameters..., dim)
//   jvp              (x, parameters..., dim, u, v...)
//   backward         (g, x, parameters..., dim, output_mask)
//   double backward  (g, x, parameters..., dim, u, v..., output_mask)
//
// dim exists where the operator has operands, and so does backward's output_mask. Outputs are numbered as returned:
// the full ones first, then a gradient for each operand.
struct Constants {
  double scalars[kMaxScalars] = {};
  int64_t dim = 1;
  bool asked[2 + kMaxOperands] = {true, true, true, true, true, true};
};
struct Arguments : Constants {
  at::Tensor g, x, u;
  at::Tensor operand[kMaxOperands], v[kMaxOperands];
};

int count_arguments(const Operator&, Mode);
int count_outputs(const Operator&, Mode);
Arguments unpack(const Operator&, Mode, const torch::jit::Stack&);
torch::jit::Stack pack(const Operator&, Mode, const Arguments&);

// Calls the dispatcher operator of that mode; outputs not asked for are undefined.
std::vector<at::Tensor> call(const Operator&, Mode, const Arguments&);

// The autograd kernel of one dispatcher operator (autograd.cpp).
torch::CppFunction autograd_kernel(const Operator&, Mode);

// A boxed dispatcher kernel that knows its operator and mode.
template <void (*run)(const Operator&, Mode, const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*)>
class BoxedKernel final : public c10::OperatorKernel {
 public:
  BoxedKernel(const Operator& op, Mode mode) : op_(op), mode_(mode) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    run(op_, mode_, handle, keys, stack);
  }
  static torch::CppFunction make(const Operator& op, Mode mode) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel>(op, mode));
  }

 private:
  const Operator& op_;
  Mode mode_;
};

}  // namespace fused_act

// An operator of the list as the torch side sees it: its parameters, its dispatcher operators and what they depend on.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/codes.h"
#include "kernels/dependencies.h"
#include "kernels/pattern.h"

namespace fused_act {

constexpr int kMaxParameters = 8;  // of a kind

struct Parameter {
  enum Kind { operand, scalar, activation } kind;
  std::string name;
  bool optional = false;  // may be None
  std::string default_text;  // as in the schema; empty: none
  std::optional<double> default_value;
};

enum class Packing { none, halves, pairs };

struct Operator {
  int index = 0;  // place in the list
  std::string name, expression, origin, gradient;
  std::string input;  // name of the first parameter
  std::vector<Parameter> parameters;
  std::vector<Entry> entries;
  bool fixed = false;  // its steps are the same in every call: `program` and `dependencies` hold
  // Its steps are given in each call, which has lists of operands, codes and scalars. `parameters` are the operands that
  // there can be.
  bool listed = false;
  bool needs_scalar = false;  // of scalars that may all be None it is given one, as torch.clamp is
  Packing packing = Packing::none;
  int operands = 0, scalars = 0;
  std::optional<int64_t> dim;  // the default of the parameter "dim", where there is one
  Program program;
  double absent[kMaxParameters] = {};  // a fixed operator's scalars where None is given
  Dependencies dependencies[kModes];
  std::string schemas[kAllModes], in_place_schema;  // empty: no such variant
  std::optional<c10::OperatorHandle> handles[kAllModes], in_place_handle;

  std::string label() const { return "fused_act." + name; }
  const std::string& operand_name(int k) const;
  bool operand_is_optional(int k) const;
  // A packed x brings an operand of its own, which comes first.
  int kernel_operand(int k) const { return k + (packing != Packing::none); }
  int kernel_operands() const { return kernel_operand(operands); }
  // Can it be chosen by name where an operator takes an activation?
  bool is_activation() const { return fixed && operands == 0; }
};

// How a call of a listed operator gives its steps: version, code, source, code, source... A code is the step's place in
// FUSED_ACT_STEPS, or save or load, which do not move when that list grows. A source is the place of an operand among
// the operands, kMaxOperands + k for slot k, or none. The scalars are a list of their own, in the order of the steps.
namespace encoding {
constexpr int64_t version = 1, save = -1, load = -2, none = -1;
}

// Those of codes are autograd's own: their names begin with an underscore, and Python's table has none of them.
constexpr const char* kModeSuffixes[kAllModes] = {"", "_jvp", "_backward", "_double_backward",
                                                  "_coded", "_coded_backward", "_coded_jvp"};
inline std::string name_of(const Operator& op, Mode mode) {
  return (int(mode) < kModes ? "" : "_") + op.name + kModeSuffixes[int(mode)];
}

// The list, in its order.
const std::vector<Operator>& operators();

// The arguments of one call. Tensors not given, or not meaningful in the mode, are undefined.
//
//   forward          (x, parameters..., dim)
//   jvp              (x, parameters..., dim, u, v...)
//   backward         (g, x, parameters..., dim, output_mask)
//   double backward  (g, x, parameters..., dim, u, v..., output_mask)
//   coded            as forward; returns the codes, too
//   coded backward   (g, x, parameters..., dim, codes, output_mask)
//   coded jvp        (x, parameters..., dim, codes, u, v...)
//
// What reads codes reads neither x nor operands: of these it has the shapes and layouts.
//
// dim exists where the operator has operands, and so does backward's output_mask. Outputs are numbered as returned:
// the full ones first, then a gradient for each operand. A listed operator has three lists for its parameters, and no
// dim: a one-dimensional operand lies along the last dimension.
struct Constants {
  std::optional<double> scalars[kMaxParameters];
  std::string activation;
  std::vector<int64_t> program;         // of a listed operator,
  std::vector<double> program_scalars;  // as given
  int64_t dim = -1;
  bool asked[2 + kMaxOperands] = {true, true, true, true, true, true};
};
struct Arguments : Constants {
  at::Tensor g, x, u, codes;
  at::Tensor operand[kMaxOperands], v[kMaxOperands];
};

int count_arguments(const Operator&, Mode);
int count_outputs(const Operator&, Mode);
Arguments unpack(const Operator&, Mode, const torch::jit::Stack&);
torch::jit::Stack pack(const Operator&, Mode, const Arguments&);

// Calls the dispatcher operator of that mode; outputs not asked for are undefined.
std::vector<at::Tensor> call(const Operator&, Mode, const Arguments&);

// The steps of a call with their scalars.
struct Steps {
  Program program;
  double scalars[kMaxScalars] = {};
  bool linear_until_last = false;  // additions, then at most one step,
  bool last_from_output = false;   // whose derivative its result tells
};
Steps steps_of(const Operator&, const Arguments&);
const Dependencies& dependencies_of(const Program&, Mode);

// The codes of a call's derivatives: the same number of them on every device, since a graph that is traced on one must hold on
// another. None where not all of its derivatives take few values on all of them.
struct Coding {
  CodeTable cpu, cuda;
  uint32_t known() const { return cpu.codes ? cpu.known & cuda.known : 0; }
};
// Valid until the thread's next call.
const Coding& coding_of(const Operator&, const Arguments&);

// Whether the call's derivatives can be given from codes, those that `asked` says: bit 0 of x, bit 1 + k of operand k. And
// whether that pays: of small tensors another launch would take more than it saves.
bool should_code(const Operator&, const Arguments&, uint32_t asked);

// Whether the derivative with respect to operand k is always that with respect to x, or always 1: by the steps, or of a call with
// codes by these.
enum class SameGradient { none, as_x, as_grad_output };
SameGradient same_gradient(const Operator&, const Arguments&, int k, bool coded);

// The autograd kernels of one dispatcher operator (autograd.cpp).
torch::CppFunction autograd_kernel(const Operator&, Mode);
torch::CppFunction in_place_autograd_kernel(const Operator&);
torch::CppFunction in_place_counted_kernel(const Operator&);

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

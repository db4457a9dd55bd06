// Autograd for every operator of the list: one kernel for the Autograd key and one Node, driven by what the formulas
// depend on. The Node's apply calls the operator's derivative *operators* through the dispatcher; so double backward,
// torch.func, compiled autograd and torch.compile see ordinary operators.
#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "operator.h"

namespace fused_act {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Nodes are held by std::shared_ptr with its own deleter in older PyTorch and by c10::intrusive_ptr in newer; Edge
// says which. Names that only one of them declares are found by argument-dependent lookup.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class... A>
std::shared_ptr<T> make_node(std::shared_ptr<Node>*, A&&... a) {
  return std::shared_ptr<T>(new T(std::forward<A>(a)...), [](auto* node) { deleteNode(node); });
}
template <class T, class... A>
c10::intrusive_ptr<T> make_node(c10::intrusive_ptr<Node>*, A&&... a) {
  return c10::make_intrusive<T>(std::forward<A>(a)...);
}

template <class P>
auto announce(const P& node, int) -> decltype(fire_node_creation_hooks(node)) {
  return fire_node_creation_hooks(node);
}
template <class P>
void announce(const P&, long) {}

[[noreturn]] void third_derivative(const Operator& op) {
  TORCH_CHECK(false, op.label(), ": the third derivative is not implemented; the first and the second are");
  std::abort();  // not reached
}

// An input of the call that the derivative formulas may read: saved, or only its shape where no formula reads it.
struct SavedInput {
  struct Place {
    at::Tensor Arguments::*full = nullptr;  // g, x or u; else operand k or its direction
    int k = -1;
    bool is_v = false;
    at::Tensor& in(Arguments& a) const { return full ? a.*full : is_v ? a.v[k] : a.operand[k]; }
  } place;
  bool by_value = false;
  SavedVariable value;
  std::vector<c10::SymInt> sizes, strides;
  c10::TensorOptions options;

  void save(const at::Tensor& t, bool is_read, bool is_output = false) {
    by_value = is_read;
    if (by_value) {
      value = SavedVariable(t, is_output);
    } else {
      sizes = t.sym_sizes().vec();
      strides = t.sym_strides().vec();
      options = t.options();
    }
  }
  at::Tensor unpack(const NodePtr& node, const at::Tensor& grad) const {
    return by_value ? value.unpack(node) : unread(grad, sizes, strides, options);
  }
  static bool same(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
    const auto equal = [](const c10::SymInt& m, const c10::SymInt& n) {
      const auto x = m.maybe_as_int(), y = n.maybe_as_int();  // of what is traced no guard is asked for
      return x && y && *x == *y;
    };
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), equal);
  }
  // A tensor of that layout, whose elements are never read: the incoming gradient where that has it, so that nothing is
  // allocated.
  static at::Tensor unread(const at::Tensor& grad, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                           const c10::TensorOptions& options) {
    const bool usable = grad.defined() && grad.scalar_type() == c10::typeMetaToScalarType(options.dtype()) &&
                        grad.device() == options.device() && same(grad.sym_sizes(), sizes) &&
                        same(grad.sym_strides(), strides);
    // One that requires a gradient would add an edge to the graph. (It cannot be detached where it is a batch.)
    return usable && !grad.requires_grad() ? grad : at::empty_strided_symint(sizes, strides, options);
  }
  template <class F>
  void visit(F f) {
    if (by_value) {
      f(value);
    } else {
      f(sizes);
      f(strides);
    }
  }
};

// The gradients that the Node of a call owes its inputs, from those of its outputs; `needed` says which are asked for.
// `a` holds what was saved. A free function: compiled autograd runs it without the Node.
class Derivative {
 public:
  Derivative(const Operator& op, Mode mode, bool coded, const variable_list& grads, const std::vector<bool>& needed)
      : op_(op), mode_(mode), coded_(coded), grads_(grads), needed_(needed) {}

  variable_list of(Arguments a) const {
    variable_list result(needed_.size());
    bool any = false;
    for (const at::Tensor& grad : grads_) any |= grad.defined();
    if (!any) return result;
    switch (mode_) {
      case Mode::forward:
        forward(a, result);
        break;
      case Mode::backward:
        backward(a, result);
        break;
      case Mode::jvp:
        jvp(a, result);
        break;
      case Mode::double_backward:
        third_derivative(op_);
      case Mode::coded_backward:
        coded_backward(a, result);
        break;
      case Mode::coded_jvp:
        coded_jvp(a, result);
        break;
      case Mode::coded:  // whose Node is that of forward
        TORCH_INTERNAL_ASSERT(false);
    }
    return result;
  }

 private:
  // Inputs x, operands; output y.
  void forward(Arguments& a, variable_list& result) const {
    a.g = grads_[0];
    std::copy(needed_.begin(), needed_.end(), a.asked);
    // A residual's gradient is often that of x, or grad_output itself: then it is that tensor, as a sum's is in ATen.
    SameGradient same[kMaxOperands] = {};
    for (int k = 0; k < op_.operands; ++k) {
      const at::Tensor& operand = a.operand[k];
      if (!needed_[1 + k] || !operand.defined() || !lies_as(operand, a.x)) continue;
      same[k] = same_gradient(op_, a, k, coded_);
      if (same[k] == SameGradient::as_grad_output && !lies_as(operand, a.g)) same[k] = SameGradient::none;
      if (same[k] == SameGradient::as_x && !needed_[0]) same[k] = SameGradient::none;
      if (same[k] != SameGradient::none) a.asked[1 + k] = false;
    }
    const Mode mode = coded_ ? Mode::coded_backward : Mode::backward;
    if (std::count(a.asked, a.asked + needed_.size(), true)) result = call(op_, mode, a);
    for (int k = 0; k < op_.operands; ++k) {
      if (same[k] == SameGradient::as_x) result[1 + k] = result[0];
      if (same[k] == SameGradient::as_grad_output) result[1 + k] = a.g;
    }
  }
  // Same shape, strides, dtype and device; false where that is not known.
  static bool lies_as(const at::Tensor& t, const at::Tensor& other) {
    return t.scalar_type() == other.scalar_type() && t.device() == other.device() &&
           SavedInput::same(t.sym_sizes(), other.sym_sizes()) &&
           SavedInput::same(t.sym_strides(), other.sym_strides()) && other.is_non_overlapping_and_dense();
  }

  // Inputs g, x, operands; outputs gx and a gradient for each operand, whose cotangents are the direction.
  void backward(Arguments& a, variable_list& result) const {
    a.u = grads_[0];
    for (int k = 0; k < op_.operands; ++k) a.v[k] = grads_[1 + k];
    std::copy(needed_.begin(), needed_.end(), a.asked);
    // With a graph asked for, the gradient of g comes from the operator that can be differentiated again.
    at::Tensor grad_g;
    if (needed_[0] && at::GradMode::is_enabled()) {
      grad_g = call(op_, Mode::jvp, a)[0];
      a.asked[0] = false;
    }
    if (std::count(a.asked, a.asked + needed_.size(), true)) result = call(op_, Mode::double_backward, a);
    if (grad_g.defined()) result[0] = grad_g;
  }

  // Inputs x, operands, u, v; output D, whose cotangent stands where g stands.
  void jvp(Arguments& a, variable_list& result) const {
    a.g = grads_[0];
    of_direction(Mode::backward, a, result);
    const auto middle = needed_.begin() + 1 + op_.operands;
    if (std::count(needed_.begin(), middle, true)) {
      a.asked[0] = false;
      std::copy(needed_.begin(), middle, a.asked + 1);
      const variable_list curved = call(op_, Mode::double_backward, a);
      std::copy(curved.begin() + 1, curved.end(), result.begin());
    }
  }

  // The same of codes. What they give is linear in g and in the direction, and constant in x and the operands.
  void coded_backward(Arguments& a, variable_list& result) const {
    a.u = grads_[0];
    for (int k = 0; k < op_.operands; ++k) a.v[k] = grads_[1 + k];
    if (needed_[0]) result[0] = call(op_, Mode::coded_jvp, a)[0];
    zeros(a, 1, result);
  }
  void coded_jvp(Arguments& a, variable_list& result) const {
    a.g = grads_[0];
    of_direction(Mode::coded_backward, a, result);
    zeros(a, 0, result);
  }
  // What D is linear in: the direction, whose gradients are those that backward gives of x and the operands.
  void of_direction(Mode backward, Arguments& a, variable_list& result) const {
    const auto middle = needed_.begin() + 1 + op_.operands;
    if (!std::count(middle, needed_.end(), true)) return;
    std::copy(middle, needed_.end(), a.asked);
    const variable_list linear = call(op_, backward, a);
    std::copy(linear.begin(), linear.end(), result.begin() + 1 + op_.operands);
  }
  // The gradients of x and the operands, from place `first` on.
  void zeros(const Arguments& a, int first, variable_list& result) const {
    for (int n = 0; n <= op_.operands; ++n) {
      const at::Tensor& like = n ? a.operand[n - 1] : a.x;
      if (needed_[first + n] && like.defined()) result[first + n] = at::zeros_like(like);
    }
  }

  const Operator& op_;
  const Mode mode_;
  const bool coded_;
  const variable_list& grads_;
  const std::vector<bool>& needed_;
};

struct FusedNode final : Node {
  const Operator& op;
  const Mode mode;
  const Constants constants;
  std::vector<SavedInput> inputs;

  FusedNode(const Operator& op, Mode mode, const Constants& constants, edge_list&& edges)
      : Node(std::move(edges)), op(op), mode(mode), constants(constants) {}

  std::string name() const override { return "FusedAct_" + op.name + kModeSuffixes[int(mode)]; }

  // Whether the codes are saved, and neither x nor an operand.
  bool coded = false;

  // In place x is gone, and where the result tells the derivative it is saved in its stead: additions before the last step are
  // undone by adding zeros.
  bool from_output = false;

  // `read` says which inputs the Node will read.
  void save(const Arguments& a, uint32_t read) {
    const auto add = [&](SavedInput::Place place, const at::Tensor& t, uint32_t bit) {
      if (!t.defined()) return;
      inputs.emplace_back().place = place;
      inputs.back().save(t, read & bit);
    };
    const auto full = [&](at::Tensor Arguments::*slot, uint32_t bit) { add({slot}, a.*slot, bit); };
    const auto operand = [&](int k) { add({nullptr, k, false}, a.operand[k], input::operand(op.kernel_operand(k))); };
    const auto direction = [&](int k) { add({nullptr, k, true}, a.v[k], input::v(op.kernel_operand(k))); };
    const bool packed = op.packing != Packing::none;
    const uint32_t x_bits = input::x | (packed ? input::operand(0) : 0);
    const uint32_t u_bits = input::u | (packed ? input::v(0) : 0);
    inputs.reserve(4 + 2 * op.operands);
    full(&Arguments::x, x_bits);
    if (mode == Mode::backward) full(&Arguments::g, input::g);
    for (int k = 0; k < op.operands; ++k) operand(k);
    if (mode == Mode::jvp || mode == Mode::coded_jvp) {
      full(&Arguments::u, u_bits);
      for (int k = 0; k < op.operands; ++k) direction(k);
    }
    if (reads_codes(mode)) save_codes(a.codes);
  }
  // In place of x what came of it.
  void save_output(const at::Tensor& x, uint32_t read) {
    from_output = true;
    inputs.front().save(x, read & input::x, /*is_output=*/true);
  }
  void save_codes(const at::Tensor& codes) {
    inputs.emplace_back().place = {&Arguments::codes};
    inputs.back().save(codes, true);
  }

  // Two threads may run backward through one graph: what is saved is read and released under the Node's lock.
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedInput& s : inputs)
      if (s.by_value) s.value.reset_data();
  }

  Arguments unpack(const at::Tensor& grad) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Arguments a;
    static_cast<Constants&>(a) = constants;
    const bool connects = coded && at::GradMode::is_enabled();
    for (const SavedInput& s : inputs) s.place.in(a) = s.unpack(getptr(), connects ? at::Tensor() : grad);
    if (from_output) to_zero(op, a);
    // The graph goes on from x and the operands as it would if they had been saved.
    if (connects) {
      const auto connect = [&](const at::Tensor& t, int n) {
        if (t.defined() && next_edge(n).is_valid()) torch::autograd::impl::set_gradient_edge(t, next_edge(n));
      };
      connect(a.x, 0);
      for (int k = 0; k < op.operands; ++k) connect(a.operand[k], 1 + k);
    }
    return a;
  }
  static void to_zero(const Operator& op, Arguments& a) {
    for (int k = 0; k < op.operands; ++k)
      if (a.operand[k].defined()) a.operand[k] = at::zeros_like(a.operand[k]);
  }

  std::vector<bool> needed() const {
    std::vector<bool> needed(num_outputs());
    for (size_t n = 0; n < needed.size(); ++n) needed[n] = task_should_compute_output(n);
    return needed;
  }

  variable_list apply(variable_list&& grads) override {
    return Derivative(op, mode, coded, grads, needed()).of(unpack(grads[0]));
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(op.name);
    args.collect(int64_t(mode));
    args.collect(constants.activation);
    args.collect(constants.program);
    args.collect(constants.program_scalars);
    args.collect(from_output);
    args.collect(coded);
    for (const std::optional<double>& s : constants.scalars) {
      args.collect(s.has_value());
      args.collect(s.value_or(0));
    }
    args.collect(constants.dim);
    for (bool asked : constants.asked) args.collect(asked);
    args.collect(int64_t(inputs.size()));
    for (const SavedInput& s : inputs) {
      args.collect(s.by_value);
      if (s.by_value) {
        args.collect(s.value, /*is_output=*/from_output && s.place.full == &Arguments::x);
      } else {
        args.collect(s.sizes);
        args.collect(s.strides);
        args.collect(s.options);
      }
    }
  }

  // While compiled autograd captures, tensors and sizes are proxies: they go in as arguments of a bound function,
  // which it traces later.
  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    namespace compiled = torch::dynamo::autograd;
    for (SavedInput& s : inputs) s.visit([&](auto& field) { saved.before(field); });
    compiled::PackedArgs packed;
    std::vector<at::TypePtr> types;
    const auto pack = [&](const auto& value) {
      packed.pack(value);
      types.push_back(compiled::IValuePacker<std::decay_t<decltype(value)>>::packed_type());
    };
    for (const SavedInput& s : inputs) {
      if (s.by_value) {
        pack(s.value.unpack(getptr()));
      } else {
        pack(s.sizes);
        pack(s.strides);
      }
    }
    struct Recipe {
      SavedInput::Place place;
      bool by_value;
      c10::TensorOptions options;
    };
    std::vector<Recipe> recipes;
    for (const SavedInput& s : inputs) recipes.push_back({s.place, s.by_value, s.options});
    auto function = [&op = op, mode = mode, constants = constants, from_output = from_output, coded = coded,
                     recipes, needed = needed()](
                        const variable_list& grads, const std::vector<c10::IValue>& values) {
      compiled::PackedArgs packed(values);
      Arguments a;
      static_cast<Constants&>(a) = constants;
      for (const Recipe& r : recipes) {
        if (r.by_value) {
          r.place.in(a) = packed.unpack<at::Tensor>();
        } else {
          const auto sizes = packed.unpack<std::vector<c10::SymInt>>();
          const auto strides = packed.unpack<std::vector<c10::SymInt>>();
          r.place.in(a) = SavedInput::unread(grads[0], sizes, strides, r.options);
        }
      }
      if (from_output) to_zero(op, a);
      return Derivative(op, mode, coded, grads, needed).of(a);
    };
    const auto& python = compiled::getPyCompilerInterface();
    const std::string bound = python->bind_function(saved.get_py_compiler(), name(), function, types,
                                                    /*is_custom_function=*/true, /*is_traceable=*/true);
    const c10::IValue metadata = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    variable_list result =
        python->call_function(saved.get_py_compiler(), "apply_functional", bound, grads, packed.vec(), metadata);
    for (SavedInput& s : inputs) s.visit([&](auto& field) { saved.after(field); });
    return result;
  }
};

// The differentiable inputs of a call, in the order of the Node's edges.
std::vector<const at::Tensor*> differentiable(const Operator& op, Mode mode, const Arguments& a) {
  std::vector<const at::Tensor*> t;
  t.reserve(4 + 2 * op.operands);
  if (has_operand_gradients(mode)) t.push_back(&a.g);
  t.push_back(&a.x);
  for (int k = 0; k < op.operands; ++k) t.push_back(&a.operand[k]);
  if (has_direction(mode)) {
    t.push_back(&a.u);
    for (int k = 0; k < op.operands; ++k) t.push_back(&a.v[k]);
  }
  return t;
}

// The inputs that the Node will read to give the gradients that can be asked of it.
uint32_t inputs_read(const Operator& op, Mode mode, const Arguments& a) {
  if (mode == Mode::double_backward || reads_codes(mode)) return 0;  // the Node of the former only raises
  const Program program = op.fixed ? op.program : steps_of(op, a).program;
  const auto of = [&](Mode mode) { return op.fixed ? op.dependencies[int(mode)] : dependencies_of(program, mode); };
  const Dependencies first = of(Mode::backward), second = of(Mode::double_backward);
  const bool packed = op.packing != Packing::none;
  uint32_t read = 0;
  const auto add = [&](const at::Tensor& t, uint32_t inputs) {
    if (t.defined() && t.requires_grad()) read |= inputs;
  };
  const auto of_x = [&](const Dependencies& d, int full) { return d.full[full] | (packed ? d.operand[0] : 0); };
  if (mode == Mode::forward || mode == Mode::jvp) {
    const bool linear = mode == Mode::forward;
    add(linear ? a.x : a.u, of_x(first, 0));
    for (int k = 0; k < op.operands; ++k) add(linear ? a.operand[k] : a.v[k], first.operand[op.kernel_operand(k)]);
  }
  if (mode == Mode::backward || mode == Mode::jvp) {
    if (mode == Mode::backward) add(a.g, second.full[0]);
    add(a.x, of_x(second, 1));
    for (int k = 0; k < op.operands; ++k) add(a.operand[k], second.operand[op.kernel_operand(k)]);
  }
  return read;
}

at::Tensor tangent_of(const at::Tensor& t) { return t.defined() ? t._fw_grad(/*level=*/0) : at::Tensor(); }
at::Tensor primal_of(const at::Tensor& t) { return tangent_of(t).defined() ? t._fw_primal(/*level=*/0) : t; }

// Forward mode: the tangent of every output.
std::vector<at::Tensor> tangents(const Operator& op, Mode mode, const Arguments& a) {
  if (mode == Mode::double_backward) third_derivative(op);
  Arguments p = a;  // primals
  p.g = primal_of(a.g);
  p.x = primal_of(a.x);
  p.u = primal_of(a.u);
  Arguments t = p;  // primals, with the tangents of x and the operands as direction
  t.u = tangent_of(a.x);
  for (int k = 0; k < op.operands; ++k) {
    p.operand[k] = t.operand[k] = primal_of(a.operand[k]);
    p.v[k] = primal_of(a.v[k]);
    t.v[k] = tangent_of(a.operand[k]);
  }
  bool moves = t.u.defined();  // does the point itself move?
  for (int k = 0; k < op.operands; ++k) moves |= t.v[k].defined();
  if (reads_codes(mode)) {  // linear in g and in the direction
    p.g = tangent_of(a.g);
    p.u = tangent_of(a.u);
    for (int k = 0; k < op.operands; ++k) p.v[k] = tangent_of(a.v[k]);
    return call(op, mode, p);
  }
  if (mode == Mode::forward || mode == Mode::coded) return call(op, Mode::jvp, t);

  std::vector<at::Tensor> result(count_outputs(op, mode));
  const auto accumulate = [&](size_t n, const at::Tensor& term) {
    if (term.defined()) result[n] = result[n].defined() ? at::add(result[n], term) : term;
  };
  if (mode == Mode::backward) {  // linear in g
    if (const at::Tensor tg = tangent_of(a.g); tg.defined()) {
      Arguments linear = p;
      linear.g = tg;
      const auto terms = call(op, Mode::backward, linear);
      for (size_t n = 0; n < result.size(); ++n) accumulate(n, terms[n]);
    }
    if (moves) {
      Arguments second = t;
      second.asked[0] = false;
      std::copy(a.asked, a.asked + 1 + op.operands, second.asked + 1);
      const auto terms = call(op, Mode::double_backward, second);
      for (size_t n = 0; n < result.size(); ++n) accumulate(n, terms[1 + n]);
    }
    return result;
  }
  // jvp: linear in (u, v), and curved in the point: sum over inputs of (tangent of the input) * D_input, with
  // operands spread to x's shape so that nothing is summed over elements.
  Arguments linear = p;
  linear.u = tangent_of(a.u);
  bool any = linear.u.defined();
  for (int k = 0; k < op.operands; ++k) {
    linear.v[k] = tangent_of(a.v[k]);
    any |= linear.v[k].defined();
  }
  if (any) accumulate(0, call(op, Mode::jvp, linear)[0]);
  if (moves) {
    Arguments second = p;
    const auto spread = [&](at::Tensor o) {
      if (!o.defined()) return o;
      if (o.device() != p.x.device()) o = o.to(p.x.device());  // a number on the CPU
      if (o.dim() == 1 && p.x.dim() > 1 && o.sym_numel() != 1) {
        std::vector<c10::SymInt> shape(p.x.dim(), 1);
        shape[at::maybe_wrap_dim(p.dim, p.x.dim())] = o.sym_size(0);
        o = o.reshape_symint(shape);
      }
      return o.expand_symint(p.x.sym_sizes());
    };
    Arguments tangent = t;
    for (int k = 0; k < op.operands; ++k) {
      second.operand[k] = spread(p.operand[k]);
      second.v[k] = spread(p.v[k]);
      tangent.v[k] = spread(t.v[k]);
    }
    second.dim = 0;
    for (int n = 0; n < 1 + op.operands; ++n) {
      const at::Tensor& along = n == 0 ? tangent.u : tangent.v[n - 1];
      if (!along.defined()) continue;
      second.g = along.to(p.x.scalar_type());
      std::fill(second.asked, second.asked + 2 + op.operands, false);
      second.asked[1 + n] = true;
      accumulate(0, call(op, Mode::double_backward, second)[1 + n].to(p.x.scalar_type()));
    }
  }
  return result;
}

// Whether a transform of torch.func is under way: those see the operators that they have rules for.
bool in_torch_func() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

void run_autograd(const Operator& op, Mode mode, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  const auto below = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  };
  bool requires_grad = false, has_tangents = false;
  const auto look = [&](const c10::IValue& value) {
    if (!value.isTensor()) return;
    const at::Tensor& t = value.toTensor();
    requires_grad |= t.requires_grad();
    has_tangents |= tangent_of(t).defined();
  };
  for (const c10::IValue& value : torch::jit::last(*stack, count_arguments(op, mode))) {
    look(value);
    if (value.isTensorList())
      for (const c10::IValue& item : value.toListRef()) look(item);
  }
  requires_grad &= at::GradMode::is_enabled();
  if (!requires_grad && !has_tangents) return below();

  const Arguments a = unpack(op, mode, *stack);
  bool coded = mode == Mode::coded;
  const Mode differentiated = coded ? Mode::forward : mode;
  decltype(make_node<FusedNode>(static_cast<NodePtr*>(nullptr), op, mode, a, edge_list())) node;
  if (requires_grad) {
    edge_list edges;
    const auto inputs = differentiable(op, differentiated, a);
    edges.reserve(inputs.size());
    for (const at::Tensor* t : inputs)
      edges.push_back(t->defined() ? torch::autograd::impl::gradient_edge(*t) : torch::autograd::Edge());
    node = make_node<FusedNode>(static_cast<NodePtr*>(nullptr), op, differentiated, a, std::move(edges));
    uint32_t read = inputs_read(op, differentiated, a);
    if (mode == Mode::forward && (read & ~input::g) && !has_tangents && !in_torch_func()) {
      uint32_t asked = a.x.requires_grad();
      for (int k = 0; k < op.operands; ++k)
        if (a.operand[k].defined() && a.operand[k].requires_grad()) asked |= 2u << k;
      coded = should_code(op, a, asked);
    }
    if (coded) read = 0;
    node->coded = coded;
    node->save(a, read);
  }
  if (coded && mode == Mode::forward) {  // which takes the same arguments
    at::AutoDispatchBelowADInplaceOrView guard;
    op.handles[int(Mode::coded)]->redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  } else {
    below();
  }
  if (coded && node) node->save_codes(stack->back().toTensor());
  if (coded && mode == Mode::forward) stack->pop_back();
  const int outputs = mode == Mode::coded ? 1 : count_outputs(op, mode);  // that can be differentiated
  std::vector<at::Tensor> out;
  for (const c10::IValue& value : torch::jit::last(*stack, count_outputs(op, mode)))
    out.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
  if (node) {
    for (int n = 0; n < outputs; ++n) torch::autograd::set_history(out[n], node);
    announce(NodePtr(node), 0);
  }
  if (has_tangents) {
    const std::vector<at::Tensor> t = tangents(op, mode, a);
    for (int n = 0; n < outputs; ++n)
      if (out[n].defined() && t[n].defined()) out[n]._set_fw_grad(t[n], /*level=*/0, /*is_inplace_op=*/false);
  }
}

// The call itself, in place.
void overwrite(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack, const at::Tensor& x) {
  // A tensor of inference mode has no version, but is refused here where it may not be overwritten. Of others a call that fails
  // changes nothing, and no version either.
  if (x.is_inference()) torch::autograd::increment_version(x);
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    handle.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  stack->back() = x;  // under a transform of torch.func another tensor came back, that has no history
  if (!x.is_inference()) torch::autograd::increment_version(x);
}

void run_in_place_autograd(const Operator& op, Mode mode, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  const auto inputs = differentiable(op, mode, a);
  bool requires_grad = false, has_tangents = false;
  for (const at::Tensor* t : inputs) {
    requires_grad |= t->defined() && t->requires_grad();
    has_tangents |= tangent_of(*t).defined();
  }
  requires_grad &= at::GradMode::is_enabled();
  at::Tensor x = a.x;
  torch::autograd::check_inplace(x, requires_grad);
  if (!requires_grad && !has_tangents) return overwrite(handle, keys, stack, x);

  decltype(make_node<FusedNode>(static_cast<NodePtr*>(nullptr), op, mode, a, edge_list())) node;
  bool from_output = false;
  if (requires_grad) {
    const Steps steps = steps_of(op, a);
    // A half-precision result of a sum may have been rounded onto a kink.
    const bool sums = steps.program.length > 1 && a.x.scalar_type() != at::kFloat && a.x.scalar_type() != at::kDouble;
    from_output = steps.linear_until_last && steps.last_from_output && !sums;
  }
  // What is overwritten is copied, if it is read later, as ATen does.
  Arguments before = a;
  const uint32_t by_node = requires_grad ? inputs_read(op, mode, a) : 0;
  const uint32_t read = has_tangents ? ~0u : from_output ? 0 : by_node;
  if (read & input::x) before.x = a.x.clone();
  for (int k = 0; k < op.operands; ++k) {
    const at::Tensor& operand = a.operand[k];
    if (!operand.defined() || !(read & input::operand(op.kernel_operand(k)))) continue;
    const bool have_storage = operand.has_storage() && a.x.has_storage();
    if (operand.is_same(a.x) || (have_storage && operand.is_alias_of(a.x))) before.operand[k] = operand.clone();
  }
  if (requires_grad) {
    edge_list edges;
    for (const at::Tensor* t : inputs)
      edges.push_back(t->defined() ? torch::autograd::impl::gradient_edge(*t) : torch::autograd::Edge());
    node = make_node<FusedNode>(static_cast<NodePtr*>(nullptr), op, mode, a, std::move(edges));
    node->save(before, from_output ? 0 : by_node);
  }
  at::Tensor tangent;
  if (has_tangents) tangent = tangents(op, mode, before)[0];
  overwrite(handle, keys, stack, x);
  if (node) {
    torch::autograd::rebase_history(x, node);
    announce(NodePtr(node), 0);
    if (from_output) node->save_output(x, by_node);
  }
  if (tangent.defined()) {  // into the one that x has, which may not be replaced
    if (at::Tensor t = tangent_of(x); t.defined()) {
      t.copy_(tangent);
    } else {
      x._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/true);
    }
  }
}

// Where there is no autograd, in inference mode, a tensor that was made outside it is seen to be overwritten all the same.
void run_in_place_counted(const Operator& op, Mode mode, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                          torch::jit::Stack* stack) {
  overwrite(handle, keys, stack, unpack(op, mode, *stack).x);
}

}  // namespace

torch::CppFunction autograd_kernel(const Operator& op, Mode mode) { return BoxedKernel<&run_autograd>::make(op, mode); }

torch::CppFunction in_place_autograd_kernel(const Operator& op) {
  return BoxedKernel<&run_in_place_autograd>::make(op, Mode::forward);
}

torch::CppFunction in_place_counted_kernel(const Operator& op) {
  return BoxedKernel<&run_in_place_counted>::make(op, Mode::forward);
}

}  // namespace fused_act

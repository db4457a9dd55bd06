// The torch side: schemas, the checks of every argument, the CPU, CUDA and Meta kernels of the dispatcher, and the
// Python module. Everything is registered when the library is loaded, with or without Python.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <sstream>

#include "kernels/cpu/cpu.h"
#include "operator.h"

#if defined(FUSED_ACT_WITH_CUDA)
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/cuda.h"
#endif

namespace fused_act {

// ---- the list -------------------------------------------------------------------------------------------------

const std::string& Operator::operand_name(int k) const {
  for (const Parameter& p : parameters)
    if (p.is_operand && k-- == 0) return p.name;
  TORCH_INTERNAL_ASSERT(false);
}

namespace {

std::vector<Parameter> parse_parameters(const std::string& text) {
  std::vector<Parameter> parameters;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) {
    std::istringstream words(item);
    std::string type, name;
    words >> type >> name;
    Parameter p{name, type == "Tensor", "", std::nullopt};
    if (const size_t equals = name.find('='); equals != std::string::npos) {
      p.name = name.substr(0, equals);
      p.default_text = name.substr(equals + 1);
      p.default_value = std::stod(p.default_text);
    }
    parameters.push_back(p);
  }
  return parameters;
}

std::string make_schema(const Operator& op, const std::string& parameters, Mode mode) {
  std::string s = op.name + kModeSuffixes[int(mode)] + "(";
  if (has_g(mode)) s += "Tensor grad_output, ";
  s += "Tensor x";
  // A default is only legal where every later argument has one too; modes that append others drop it.
  const bool appends = mode == Mode::double_backward;
  for (const Parameter& p : op.parameters) {
    s += std::string(", ") + (p.is_operand ? "Tensor " : "float ") + p.name;
    if (p.default_value && !appends) s += "=" + p.default_text;
  }
  if (op.operands) s += appends ? ", int dim" : ", int dim=1";
  if (has_u(mode)) {
    const std::string suffix = mode == Mode::jvp ? "=None" : "";
    const auto name = [&](const std::string& of) {
      return mode == Mode::jvp ? of + "_tangent" : "grad_grad_" + of;
    };
    s += ", Tensor? " + name("x") + suffix;
    for (int k = 0; k < op.operands; ++k) s += ", Tensor? " + name(op.operand_name(k)) + suffix;
  }
  const int outputs = count_outputs(op, mode);
  if (mode == Mode::double_backward || (mode == Mode::backward && op.operands)) {
    s += ", bool[" + std::to_string(outputs) + "] output_mask";
    if (mode == Mode::backward) {
      s += "=[";
      for (int n = 0; n < outputs; ++n) s += n ? ", True" : "True";
      s += "]";
    }
  }
  s += ") -> (";
  if (mode == Mode::double_backward) s += "Tensor grad_grad_output, ";
  if (mode == Mode::forward || mode == Mode::jvp) {
    s += "Tensor";
  } else {
    s += "Tensor grad_x";
    for (int k = 0; k < op.operands; ++k) s += ", Tensor grad_" + op.operand_name(k);
  }
  return s + ")";
}

template <class Op, class... Steps>
Operator describe(const char* name, const char* parameters, const char* expression, Chain<Steps...>*) {
  Operator op;
  op.name = name;
  op.expression = expression;
  op.parameters = parse_parameters(parameters);
  op.operands = Op::kOperands;
  op.scalars = Op::kScalars;
  for (const char* text : {Steps::gradient...}) {
    if (*text) op.gradient += (op.gradient.empty() ? "" : "; ") + std::string(text);
  }
  op.dependencies[int(Mode::forward)] = dependencies<Op, Mode::forward>();
  op.dependencies[int(Mode::jvp)] = dependencies<Op, Mode::jvp>();
  op.dependencies[int(Mode::backward)] = dependencies<Op, Mode::backward>();
  op.dependencies[int(Mode::double_backward)] = dependencies<Op, Mode::double_backward>();
  for (int m = 0; m < kModes; ++m) op.schemas[m] = make_schema(op, parameters, Mode(m));
  return op;
}

std::vector<Operator>& mutable_operators() {
  static std::vector<Operator> list = [] {
#define FUSED_ACT_DESCRIBE(NAME, PARAMETERS, EXPRESSION, ...) \
  describe<ops::NAME>(#NAME, PARAMETERS, EXPRESSION, static_cast<ops::NAME*>(nullptr)),
    std::vector<Operator> list{FUSED_ACT_OPERATORS(FUSED_ACT_DESCRIBE)};
#undef FUSED_ACT_DESCRIBE
    for (size_t i = 0; i < list.size(); ++i) list[i].index = static_cast<int>(i);
    return list;
  }();
  return list;
}

}  // namespace

const std::vector<Operator>& operators() { return mutable_operators(); }

// ---- arguments ------------------------------------------------------------------------------------------------

int count_outputs(const Operator& op, Mode mode) {
  if (mode == Mode::forward || mode == Mode::jvp) return 1;
  return (mode == Mode::double_backward ? 2 : 1) + op.operands;
}

static bool has_mask(const Operator& op, Mode mode) {
  return mode == Mode::double_backward || (mode == Mode::backward && op.operands > 0);
}

int count_arguments(const Operator& op, Mode mode) {
  return has_g(mode) + 1 + static_cast<int>(op.parameters.size()) + (op.operands > 0) +
         (has_u(mode) ? 1 + op.operands : 0) + has_mask(op, mode);
}

Arguments unpack(const Operator& op, Mode mode, const torch::jit::Stack& stack) {
  const int count = count_arguments(op, mode);
  const c10::IValue* next = stack.data() + stack.size() - count;
  const auto optional = [](const c10::IValue& v) { return v.isNone() ? at::Tensor() : v.toTensor(); };
  Arguments a;
  if (has_g(mode)) a.g = (next++)->toTensor();
  a.x = (next++)->toTensor();
  int operand = 0, scalar = 0;
  for (const Parameter& p : op.parameters) {
    if (p.is_operand) {
      a.operand[operand++] = (next++)->toTensor();
    } else {
      a.scalars[scalar++] = (next++)->toDouble();
    }
  }
  if (op.operands) a.dim = (next++)->toInt();
  if (has_u(mode)) {
    a.u = optional(*next++);
    for (int k = 0; k < op.operands; ++k) a.v[k] = optional(*next++);
  }
  if (has_mask(op, mode)) {
    const auto mask = (next++)->toBoolList();
    TORCH_CHECK_VALUE(int(mask.size()) == count_outputs(op, mode), op.label(), ": output_mask has ", mask.size(),
                      " elements, but there are ", count_outputs(op, mode), " outputs");
    for (size_t n = 0; n < mask.size(); ++n) a.asked[n] = mask[n];
  }
  return a;
}

torch::jit::Stack pack(const Operator& op, Mode mode, const Arguments& a) {
  torch::jit::Stack stack;
  stack.reserve(count_arguments(op, mode));
  const auto optional = [](const at::Tensor& t) { return t.defined() ? c10::IValue(t) : c10::IValue(); };
  if (has_g(mode)) stack.emplace_back(a.g);
  stack.emplace_back(a.x);
  int operand = 0, scalar = 0;
  for (const Parameter& p : op.parameters) {
    if (p.is_operand) {
      stack.emplace_back(a.operand[operand++]);
    } else {
      stack.emplace_back(a.scalars[scalar++]);
    }
  }
  if (op.operands) stack.emplace_back(a.dim);
  if (has_u(mode)) {
    stack.push_back(optional(a.u));
    for (int k = 0; k < op.operands; ++k) stack.push_back(optional(a.v[k]));
  }
  if (has_mask(op, mode)) {
    c10::List<bool> mask;
    for (int n = 0; n < count_outputs(op, mode); ++n) mask.push_back(a.asked[n]);
    stack.emplace_back(std::move(mask));
  }
  return stack;
}

std::vector<at::Tensor> call(const Operator& op, Mode mode, const Arguments& a) {
  torch::jit::Stack stack = pack(op, mode, a);
  op.handles[int(mode)]->callBoxed(stack);
  std::vector<at::Tensor> out;
  out.reserve(stack.size());
  for (c10::IValue& value : stack) out.push_back(value.isTensor() ? std::move(value).toTensor() : at::Tensor());
  return out;
}

// ---- checks, and what the Meta kernel shares with the real ones -------------------------------------------------

namespace {

bool is_supported(at::ScalarType t) {
  return t == at::kFloat || t == at::kDouble || t == at::kHalf || t == at::kBFloat16;
}

std::string dtype_name(const at::Tensor& t) { return std::string(c10::getDtypeNames(t.scalar_type()).first); }

void check_dtype(const Operator& op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(is_supported(t.scalar_type()), op.label(), ": ", name, " has dtype ", dtype_name(t),
                   ", but only float16, bfloat16, float32 and float64 are supported");
}

// Calls like_x(name, tensor) for each given tensor that must look like x, and like_operand(k, is_v, name, tensor) for
// each operand and each direction of one.
template <class F, class G>
void visit(const Operator& op, Mode mode, const Arguments& a, F like_x, G like_operand) {
  if (a.g.defined()) like_x("grad_output", a.g);
  const bool jvp = mode == Mode::jvp;
  if (a.u.defined()) like_x(jvp ? "x_tangent" : "grad_grad_x", a.u);
  for (int k = 0; k < op.operands; ++k) {
    const std::string& name = op.operand_name(k);
    like_operand(k, false, name.c_str(), a.operand[k]);
    if (a.v[k].defined()) like_operand(k, true, (jvp ? name + "_tangent" : "grad_grad_" + name).c_str(), a.v[k]);
  }
}

// A tensor of one element on the CPU, beside an x on another device: taken as a number, as eager takes it.
bool is_host_scalar(const at::Tensor& x, const at::Tensor& t) {
  return t.dim() == 0 && t.device().is_cpu() && !x.device().is_cpu();
}

void check_tensors(const Operator& op, Mode mode, const Arguments& a) {
  // The dispatcher takes None for a tensor.
  const auto check_given = [&](const std::string& name, const at::Tensor& t) {
    TORCH_CHECK_TYPE(t.defined(), op.label(), ": ", name, " is None, but must be a tensor");
  };
  if (has_g(mode)) check_given("grad_output", a.g);
  check_given("x", a.x);
  for (int k = 0; k < op.operands; ++k) check_given(op.operand_name(k), a.operand[k]);
  check_dtype(op, "x", a.x);
  const auto check_device = [&](const char* name, const at::Tensor& t) {
    TORCH_CHECK(t.device() == a.x.device() || is_host_scalar(a.x, t), op.label(), ": ", name, " is on ", t.device(),
                ", but x is on ", a.x.device());
  };
  visit(
      op, mode, a,
      [&](const char* name, const at::Tensor& t) {
        TORCH_CHECK_TYPE(t.scalar_type() == a.x.scalar_type(), op.label(), ": ", name, " has dtype ", dtype_name(t),
                         ", but x has dtype ", dtype_name(a.x));
        TORCH_CHECK(t.device() == a.x.device(), op.label(), ": ", name, " is on ", t.device(), ", but x is on ",
                    a.x.device());
        TORCH_CHECK_VALUE(t.sym_sizes() == a.x.sym_sizes(), op.label(), ": ", name, " has shape ", t.sym_sizes(),
                          ", but x has shape ", a.x.sym_sizes());
      },
      [&](int, bool, const char* name, const at::Tensor& t) {
        check_dtype(op, name, t);
        check_device(name, t);
      });
}

// The dimension of x that dimension d of an operand lies along, or -1 for a one-dimensional operand of one element,
// which broadcasts. Checks the operand's shape.
struct Placement {
  bool scalar = false;
  int64_t first = 0;  // dimension of x of the operand's dimension 0
};

Placement place(const Operator& op, const Arguments& a, const char* name, const at::Tensor& t) {
  const int64_t dims = a.x.dim();
  Placement p;
  if (t.dim() == 1 && dims >= 1 && TORCH_GUARD_OR_FALSE(t.sym_size(0).sym_eq(1))) {
    p.scalar = true;
  } else if (t.dim() == 1 && dims >= 1) {
    TORCH_CHECK_INDEX(a.dim >= -dims && a.dim < dims, op.label(), ": dim is ", a.dim, ", but x has ", dims,
                      dims == 1 ? " dimension" : " dimensions", " (expected ", -dims, " to ", dims - 1, ")");
    p.first = a.dim < 0 ? a.dim + dims : a.dim;
    TORCH_CHECK_VALUE(t.sym_size(0) == a.x.sym_size(p.first), op.label(), ": ", name, " has ", t.sym_size(0),
                      " elements, but x.shape[", p.first, "] is ", a.x.sym_size(p.first));
  } else {
    p.first = dims - t.dim();
    bool fits = p.first >= 0;
    for (int64_t d = 0; fits && d < t.dim(); ++d)
      fits = t.sym_size(d) == 1 || t.sym_size(d) == a.x.sym_size(p.first + d);
    TORCH_CHECK_VALUE(fits, op.label(), ": ", name, " of shape ", t.sym_sizes(), " does not broadcast to x of shape ",
                      a.x.sym_sizes(), " without enlarging it");
  }
  return p;
}

// torch.empty_like(t) on `device`. Without the dispatcher's round trips where t is dense (1 us of a call's 5), and with
// the strides that a real tensor gets where t is a meta tensor: there empty_like differs in dimensions of size 1.
at::Tensor empty_like_on(const at::Tensor& t, c10::Device device) {
  if (t.is_meta() || device.is_meta()) {
    if (t.is_non_overlapping_and_dense())
      return at::empty_strided_symint(t.sym_sizes(), t.sym_strides(), t.options().device(device));
  } else if (t.is_non_overlapping_and_dense()) {
    if (device.is_cpu()) return at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
#if defined(FUSED_ACT_WITH_CUDA)
    if (device.is_cuda()) return at::detail::empty_strided_cuda(t.sizes(), t.strides(), t.scalar_type(), device);
#endif
  }
  return at::empty_like(t, t.options().device(device));
}

// The outputs, not yet filled in; undefined where not asked for.
std::vector<at::Tensor> allocate(const Operator& op, Mode mode, const Arguments& a) {
  const int outputs = count_outputs(op, mode), full = outputs - (has_g(mode) ? op.operands : 0);
  std::vector<at::Tensor> out(outputs);
  for (int n = 0; n < outputs; ++n)
    if (a.asked[n]) out[n] = empty_like_on(n < full ? a.x : a.operand[n - full], a.x.device());
  return out;
}

void push(torch::jit::Stack* stack, int arguments, std::vector<at::Tensor>&& out) {
  torch::jit::drop(*stack, arguments);
  for (at::Tensor& t : out) stack->emplace_back(std::move(t));
}

void run_meta(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_tensors(op, mode, a);
  visit(op, mode, a, [](const char*, const at::Tensor&) {},
        [&](int, bool, const char* name, const at::Tensor& t) { place(op, a, name, t); });
  push(stack, count_arguments(op, mode), allocate(op, mode, a));
}

// ---- the real kernels -----------------------------------------------------------------------------------------

Dtype dtype_of(at::ScalarType t) {
  return t == at::kHalf ? Dtype::f16 : t == at::kBFloat16 ? Dtype::bf16 : t == at::kFloat ? Dtype::f32 : Dtype::f64;
}

// A Request with what it points to.
struct Work {
  Request request;
  std::vector<at::Tensor> out;
  std::vector<int64_t> strides;  // of operands and their gradients, a row of x.dim() for each
  at::Tensor alive[2 * kMaxOperands];  // operands in a dtype that the kernels read
  at::Tensor dense[3];                 // copies of x, g and u
};

int64_t* broadcast_strides(Work& work, const at::Tensor& x, const Placement& p, const at::Tensor& t) {
  const size_t row = work.strides.size();
  work.strides.resize(row + x.dim(), 0);  // reserved: rows do not move
  if (!p.scalar)
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.size(d) != 1) work.strides[row + p.first + d] = t.stride(d);
  return work.strides.data() + row;
}

// Which inputs the asked outputs are computed from.
uint32_t inputs_read(const Operator& op, Mode mode, const Arguments& a) {
  const Dependencies& d = op.dependencies[int(mode)];
  uint32_t read = 0;
  const int full = mode == Mode::double_backward ? 2 : 1;
  for (int n = 0; n < full; ++n)
    if (a.asked[n]) read |= d.full[n];
  if (has_g(mode))
    for (int k = 0; k < op.operands; ++k)
      if (a.asked[full + k]) read |= d.operand[k];
  return read;
}

// Fills in everything but operand gradients. CUDA kernels read operands of x's dtype or of the compute type.
void prepare(const Operator& op, Mode mode, const Arguments& a, Work& work, bool narrow_operands) {
  Request& r = work.request;
  const uint32_t read = inputs_read(op, mode, a);
  r.mode = mode;
  r.dtype = dtype_of(a.x.scalar_type());
  r.ndim = static_cast<int>(a.x.dim());
  r.numel = a.x.numel();
  r.sizes = a.x.sizes().data();
  r.operands = op.operands;
  std::copy(std::begin(a.scalars), std::end(a.scalars), r.scalars);
  work.strides.reserve(3 * op.operands * a.x.dim());

  const auto tensor = [&](Request::Tensor& to, const at::Tensor& t, uint32_t bit) {
    if (t.defined() && (read & bit)) to = {t.const_data_ptr(), t.strides().data()};
  };
  tensor(r.x, a.x, input::x);
  tensor(r.g, a.g, input::g);
  tensor(r.u, a.u, input::u);

  const at::ScalarType compute = a.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto operand = [&](Request::Operand& to, at::Tensor& alive, const at::Tensor& t, const Placement& p, uint32_t bit) {
    if (!(read & bit)) return;
    if (is_host_scalar(a.x, t)) {
      to.value = t.item<double>();
      return;
    }
    alive = narrow_operands && t.scalar_type() != a.x.scalar_type() ? t.to(compute) : t;
    to = {alive.const_data_ptr(), dtype_of(alive.scalar_type()), broadcast_strides(work, a.x, p, alive)};
  };
  int next = 0;
  visit(op, mode, a, [](const char*, const at::Tensor&) {},
        [&](int k, bool is_v, const char* name, const at::Tensor& t) {
          const Placement p = place(op, a, name, t);
          operand(is_v ? r.v[k] : r.operand[k], work.alive[next++], t, p, is_v ? input::v(k) : input::operand(k));
        });
  for (int k = 0; k < op.operands; ++k) r.v_present[k] = a.v[k].defined();

  work.out = allocate(op, mode, a);
  const int full = mode == Mode::double_backward ? 2 : 1;
  r.out_strides = a.x.strides().data();
  for (int n = 0; n < full; ++n) {
    if (!work.out[n].defined()) continue;
    r.out[n] = work.out[n].mutable_data_ptr();
    r.out_strides = work.out[n].strides().data();
  }
}

// The iteration space. Inputs in other layouts than the outputs can leave more dimensions than the kernels walk: then
// they are first copied to the outputs' layout.
Geometry geometry_of(const Operator& op, const Arguments& a, Work& work) {
  Request& r = work.request;
  Geometry geometry = make_geometry(r);
  if (!geometry.too_many_dims) return geometry;
  const auto copy = [&](Request::Tensor& to, const at::Tensor& t, at::Tensor& alive) {
    if (!to.data) return;
    alive = at::empty_strided(t.sizes(), at::IntArrayRef(r.out_strides, r.ndim), t.options());
    alive.copy_(t);
    to = {alive.const_data_ptr(), alive.strides().data()};
  };
  copy(r.x, a.x, work.dense[0]);
  copy(r.g, a.g, work.dense[1]);
  copy(r.u, a.u, work.dense[2]);
  geometry = make_geometry(r);
  TORCH_CHECK(!geometry.too_many_dims, op.label(), ": x of shape ", a.x.sizes(), " and its operands leave more than ",
              kMaxDims, " dimensions after merging those that lie together in memory");
  return geometry;
}

// ---- CPU ------------------------------------------------------------------------------------------------------

struct Capability {
  const char* name;
  CpuKernel kernel;
};

const Capability& cpu_capability() {
  static const Capability chosen = [] {
    const std::string level = at::get_cpu_capability();  // honours ATEN_CPU_CAPABILITY, as PyTorch's kernels do
#if defined(FUSED_ACT_X86_SIMD)
    if (level.rfind("AVX512", 0) == 0) return Capability{"AVX512", &run_cpu_AVX512};
    if (level == "AVX2") return Capability{"AVX2", &run_cpu_AVX2};
#endif
    return Capability{"DEFAULT", &run_cpu_DEFAULT};
  }();
  return chosen;
}

void run_cpu(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_tensors(op, mode, a);
  Work work;
  prepare(op, mode, a, work, /*narrow_operands=*/false);
  Request& r = work.request;
  const int full = mode == Mode::double_backward ? 2 : 1;

  // Operand gradients that sum over elements go through partial sums over fixed parts of the range, so that they do
  // not depend on the number of threads.
  constexpr int64_t kPart = 1 << 15;  // elements of a part, and the least that a thread is given (as in ATen)
  constexpr int64_t kMaxSums = 1 << 22;  // elements of partial sums at most
  int64_t parts = 1;
  at::Tensor sums[kMaxOperands];
  if (has_g(mode)) {
    for (int k = 0; k < op.operands; ++k) {
      at::Tensor& to = work.out[full + k];
      if (!to.defined()) continue;
      if (r.numel == 0) to.zero_();
      Request::OperandGradient& gradient = r.operand_gradient[k];
      const Placement p = place(op, a, op.operand_name(k).c_str(), to);
      gradient = {to.mutable_data_ptr(), dtype_of(to.scalar_type()), broadcast_strides(work, a.x, p, to), to.numel()};
    }
  }
  if (r.numel > 0) {
    const Geometry geometry = geometry_of(op, a, work);
    for (int k = 0; k < op.operands; ++k) {
      const Request::OperandGradient& gradient = r.operand_gradient[k];
      if (!gradient.data || gradient.numel == r.numel) continue;
      parts = std::max<int64_t>(1, std::min((r.numel + kPart - 1) / kPart, std::max<int64_t>(1, kMaxSums / gradient.numel)));
    }
    for (int k = 0; k < op.operands; ++k) {
      const Request::OperandGradient& gradient = r.operand_gradient[k];
      if (!gradient.data || gradient.numel == r.numel) continue;
      sums[k] = at::zeros({parts, gradient.numel}, a.x.options().dtype(a.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
    }
    const CpuKernel kernel = cpu_capability().kernel;
    const auto run = [&](int64_t begin, int64_t end, int64_t part) {
      CpuRange range{begin, end, {}};
      for (int k = 0; k < op.operands; ++k)
        if (sums[k].defined())
          range.sums[k] = static_cast<char*>(sums[k].data_ptr()) + part * sums[k].stride(0) * sums[k].element_size();
      kernel(op.index, r, geometry, range);
    };
    if (parts > 1) {
      const int64_t length = (r.numel + parts - 1) / parts;
      at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part)
          run(std::min(part * length, r.numel), std::min((part + 1) * length, r.numel), part);
      });
    } else if (sums[0].defined() || sums[1].defined() || sums[2].defined() || sums[3].defined()) {
      run(0, r.numel, 0);
    } else {
      at::parallel_for(0, r.numel, kPart, [&](int64_t begin, int64_t end) { run(begin, end, 0); });
    }
    for (int k = 0; k < op.operands; ++k)
      if (sums[k].defined()) {
        // Memory order: the partial sums have the strides of the gradient.
        at::Tensor& to = work.out[full + k];
        to.as_strided({to.numel()}, {1}).copy_(sums[k].sum(0));
      }
  }
  push(stack, count_arguments(op, mode), std::move(work.out));
}

// ---- CUDA -----------------------------------------------------------------------------------------------------

#if defined(FUSED_ACT_WITH_CUDA)
void run_cuda(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_tensors(op, mode, a);
  const c10::cuda::CUDAGuard guard(a.x.device());
  Work work;
  prepare(op, mode, a, work, /*narrow_operands=*/true);
  Request& r = work.request;
  const int full = mode == Mode::double_backward ? 2 : 1;
  at::Tensor narrow[kMaxOperands];  // gradients that the kernels write in the compute type
  if (has_g(mode)) {
    const at::ScalarType compute = a.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    for (int k = 0; k < op.operands; ++k) {
      at::Tensor to = work.out[full + k];
      if (!to.defined()) continue;
      if (r.numel == 0) {
        to.zero_();
        continue;
      }
      if (to.scalar_type() != a.x.scalar_type() && to.scalar_type() != compute)
        to = narrow[k] = at::empty_like(to, to.options().dtype(compute));
      const Placement p = place(op, a, op.operand_name(k).c_str(), to);
      r.operand_gradient[k] = {to.mutable_data_ptr(), dtype_of(to.scalar_type()), broadcast_strides(work, a.x, p, to), to.numel()};
    }
  }
  if (r.numel > 0) {
    struct Workspace {
      std::vector<at::Tensor> buffers;
      at::TensorOptions options;
    } workspace{{}, a.x.options().dtype(at::kByte)};
    const Cuda cuda{c10::cuda::getCurrentCUDAStream(a.x.device().index()).stream(),
                    [](void* context, size_t bytes) {
                      auto* w = static_cast<Workspace*>(context);
                      w->buffers.push_back(at::empty({static_cast<int64_t>(bytes)}, w->options));
                      return w->buffers.back().mutable_data_ptr();
                    },
                    &workspace};
    const Geometry geometry = geometry_of(op, a, work);
    const char* error = fused_act::run_cuda(op.index, r, geometry, cuda);
    TORCH_CHECK(!error, op.label(), ": CUDA kernel launch failed: ", error);
    for (int k = 0; k < op.operands; ++k)
      if (narrow[k].defined()) work.out[full + k].copy_(narrow[k]);
  }
  push(stack, count_arguments(op, mode), std::move(work.out));
}
#endif

}  // namespace

// ---- registration ---------------------------------------------------------------------------------------------

TORCH_LIBRARY(fused_act, library) {
  for (Operator& op : mutable_operators()) {
    for (int m = 0; m < kModes; ++m) {
      const Mode mode = Mode(m);
      const std::string name = op.name + kModeSuffixes[m];
      library.def(torch::schema(op.schemas[m].c_str()), {at::Tag::pt2_compliant_tag});
      const auto implement = [&](c10::DispatchKey key, torch::CppFunction&& kernel) {
        library.impl(name.c_str(), torch::dispatch(key, std::move(kernel)));
      };
      implement(c10::DispatchKey::Meta, BoxedKernel<&run_meta>::make(op, mode));
      implement(c10::DispatchKey::CPU, BoxedKernel<&run_cpu>::make(op, mode));
#if defined(FUSED_ACT_WITH_CUDA)
      implement(c10::DispatchKey::CUDA, BoxedKernel<&run_cuda>::make(op, mode));
#endif
      implement(c10::DispatchKey::Autograd, autograd_kernel(op, mode));
      op.handles[m] = c10::Dispatcher::singleton().findSchemaOrThrow(("fused_act::" + name).c_str(), "");
    }
  }
}

}  // namespace fused_act

#if defined(TORCH_EXTENSION_NAME)
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fused_act;
  module.doc() = "The fused_act kernels as plain functions. Every function is also torch.ops.fused_act.<name>.";

  py::options options;
  options.disable_function_signatures();
  py::list table;
  for (const Operator& op : operators()) {
    py::list parameters;
    for (const Parameter& p : op.parameters)
      parameters.append(py::make_tuple(p.name, p.is_operand ? "operand" : "scalar", p.default_value));
    py::dict schemas;
    for (int m = 0; m < kModes; ++m) {
      const std::string name = op.name + kModeSuffixes[m];
      schemas[name.c_str()] = op.schemas[m];
      static const char* meanings[kModes] = {
          "Returns", "Returns the directional derivative (forward mode) of",
          "Returns the gradients, given grad_output, of",
          "Returns the gradients of the backward function, given cotangents of its results, of"};
      const std::string doc = op.schemas[m] + "\n\n" + meanings[m] + " `" + op.expression + "`." +
                              (op.gradient.empty() ? "" : "\nGradient at kinks and ties: " + op.gradient + ".");
      const c10::OperatorHandle handle = *op.handles[m];
      module.def(
          name.c_str(),
          [handle](const py::args& args, const py::kwargs& kwargs) {
            torch::jit::Stack stack = torch::jit::createStackForSchema(handle.schema(), args, kwargs, std::nullopt);
            {
              py::gil_scoped_release release;
              handle.callBoxed(stack);
            }
            return torch::jit::createPyObjectForStack(std::move(stack));
          },
          doc.c_str());
    }
    py::dict entry;
    entry["name"] = op.name;
    entry["parameters"] = py::tuple(parameters);
    entry["expression"] = op.expression;
    entry["gradient"] = op.gradient;
    entry["schemas"] = schemas;
    table.append(entry);
  }
  module.attr("_operators") = py::tuple(table);
  module.def("cpu_capability", [] { return cpu_capability().name; },
             "cpu_capability() -> str\n\nThe SIMD level of the CPU kernels in use: AVX512, AVX2 or DEFAULT.");
#if defined(FUSED_ACT_WITH_CUDA)
  module.attr("_with_cuda") = true;
#else
  module.attr("_with_cuda") = false;
#endif
}
#endif

// The torch side: schemas, the checks of every argument, the CPU, CUDA and Meta kernels of the dispatcher, and the
// Python module. Everything is registered when the library is loaded, with or without Python.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <unordered_map>

#include "kernels/cpu/cpu.h"
#include "kernels/operators.h"
#include "operator.h"

#if defined(FUSED_ACT_WITH_CUDA)
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/cuda.h"
#endif

namespace fused_act {

// ---- the list -------------------------------------------------------------------------------------------------

static const Parameter& operand_parameter(const Operator& op, int k) {
  for (const Parameter& p : op.parameters)
    if (p.kind == Parameter::operand && k-- == 0) return p;
  TORCH_INTERNAL_ASSERT(false);
}
const std::string& Operator::operand_name(int k) const { return operand_parameter(*this, k).name; }
bool Operator::operand_is_optional(int k) const { return operand_parameter(*this, k).optional; }

namespace {

Steps write_steps(const Operator&, const Arguments&);

// "Tensor x, Tensor? bias=None, str act="linear", int dim=1": fills in what an operator's line says of its parameters.
void parse_parameters(Operator& op, const std::string& text) {
  std::istringstream stream(text);
  bool first = true;
  for (std::string item; std::getline(stream, item, ','); first = false) {
    std::istringstream words(item);
    std::string type, name, value;
    words >> type >> name;
    if (const size_t equals = name.find('='); equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    if (first) {
      TORCH_INTERNAL_ASSERT(type == "Tensor");
      op.input = name;
      continue;
    }
    if (name == "dim") {
      op.dim = std::stoll(value);
      continue;
    }
    if (type == "Tensor[]") {
      op.listed = true;
      for (; op.operands < kMaxOperands; ++op.operands)
        op.parameters.push_back({Parameter::operand, "operand_" + std::to_string(op.operands), true, "", std::nullopt});
    }
    if (op.listed) continue;
    Parameter p;
    p.optional = type.back() == '?';
    if (p.optional) type.pop_back();
    p.kind = type == "Tensor" ? Parameter::operand : type == "str" ? Parameter::activation : Parameter::scalar;
    p.name = name;
    p.default_text = value;
    if (p.kind == Parameter::scalar && !value.empty() && value != "None") p.default_value = std::stod(value);
    op.operands += p.kind == Parameter::operand;
    op.scalars += p.kind == Parameter::scalar;
    op.parameters.push_back(p);
  }
}

const char* schema_type(const Parameter& p) {
  switch (p.kind) {
    case Parameter::operand:
      return p.optional ? "Tensor? " : "Tensor ";
    case Parameter::activation:
      return "str ";
    case Parameter::scalar:
      break;
  }
  return p.optional ? "float? " : "float ";
}

bool has_output_mask(const Operator& op, Mode mode) {
  return mode == Mode::double_backward || (has_operand_gradients(mode) && op.operands > 0);
}

std::string make_schema(const Operator& op, Mode mode, bool in_place = false) {
  std::string s = (in_place ? op.name + "_" : name_of(op, mode)) + "(";
  if (has_operand_gradients(mode)) s += "Tensor grad_output, ";
  s += (in_place ? "Tensor(a!) " : "Tensor ") + op.input;
  // A default is only legal where every later argument has one too; modes that append others drop it.
  const bool appends = mode == Mode::double_backward || reads_codes(mode);
  if (op.listed) s += ", Tensor[] operands, int[] program, float[] scalars";
  for (const Parameter& p : op.parameters) {
    if (op.listed) break;
    s += std::string(", ") + schema_type(p) + p.name;
    if (!p.default_text.empty() && !appends) s += "=" + p.default_text;
  }
  if (op.dim) s += ", int dim" + (appends ? "" : "=" + std::to_string(*op.dim));
  if (reads_codes(mode)) s += ", Tensor codes";
  if (has_direction(mode)) {
    const bool jvp = mode != Mode::double_backward;
    const std::string suffix = jvp ? "=None" : "";
    const auto name = [&](const std::string& of) { return jvp ? of + "_tangent" : "grad_grad_" + of; };
    s += ", Tensor? " + name(op.input) + suffix;
    for (int k = 0; k < op.operands; ++k) s += ", Tensor? " + name(op.operand_name(k)) + suffix;
  }
  const int outputs = count_outputs(op, mode);
  if (has_output_mask(op, mode)) {
    s += ", bool[" + std::to_string(outputs) + "] output_mask";
    if (mode != Mode::double_backward) {
      s += "=[";
      for (int n = 0; n < outputs; ++n) s += n ? ", True" : "True";
      s += "]";
    }
  }
  if (in_place) return s + ") -> Tensor(a!)";
  s += ") -> (";
  if (mode == Mode::double_backward) s += "Tensor grad_grad_output, ";
  if (mode == Mode::coded) {
    s += "Tensor, Tensor codes";
  } else if (!has_operand_gradients(mode)) {
    s += "Tensor";
  } else {
    s += "Tensor grad_" + op.input;
    for (int k = 0; k < op.operands; ++k) s += ", Tensor grad_" + op.operand_name(k);
  }
  return s + ")";
}

template <class... Entries>
Operator describe(const char* name, const char* parameters, const char* expression, const char* origin,
                  Types<Entries...>) {
  Operator op;
  op.name = name;
  op.expression = expression;
  op.origin = origin;
  op.fixed = Pattern<Entries...>::kFixed;
  parse_parameters(op, parameters);
  op.entries = {Describe<Entries>::entry()...};
  for (const Entry& e : op.entries) {
    if (e.kind == Entry::halves) op.packing = Packing::halves;
    if (e.kind == Entry::pairs) op.packing = Packing::pairs;
  }
  for (const char* text : {Entries::gradient...}) {
    if (*text) op.gradient += (op.gradient.empty() ? "" : "; ") + std::string(text);
  }
  TORCH_INTERNAL_ASSERT(op.listed || op.dim.has_value() == (op.operands > 0), name, ": dim exists where there are operands");
  TORCH_INTERNAL_ASSERT(op.kernel_operands() <= kMaxOperands && op.scalars <= kMaxParameters, name);
  const auto optional = [](const Parameter& p) { return p.kind == Parameter::scalar && p.optional; };
  op.needs_scalar = op.fixed && op.scalars > 0 && std::count_if(op.parameters.begin(), op.parameters.end(), optional) == op.scalars;
  if (op.fixed) {
    // The compiled chain takes the scalars as they stand in the line.
    const Steps steps = write_steps(op, Arguments());
    op.program = steps.program;
    std::copy_n(steps.scalars, op.scalars, op.absent);
    for (int m = 0; m < kModes; ++m) op.dependencies[m] = dependencies(op.program, Mode(m));
  }
  for (int m = 0; m < (op.packing == Packing::none ? kAllModes : kModes); ++m)
    op.schemas[m] = make_schema(op, Mode(m));
  if (op.packing == Packing::none && !op.listed) op.in_place_schema = make_schema(op, Mode::forward, true);
  return op;
}

template <class... Entries>
Types<Entries...> types_of(Pattern<Entries...>*) {
  return {};
}

std::vector<Operator>& mutable_operators() {
  static std::vector<Operator> list = [] {
#define FUSED_ACT_DESCRIBE(NAME, PARAMETERS, EXPRESSION, ORIGIN, ...) \
  describe(#NAME, PARAMETERS, EXPRESSION, ORIGIN, types_of(static_cast<ops::NAME*>(nullptr))),
    std::vector<Operator> list{FUSED_ACT_OPERATORS(FUSED_ACT_DESCRIBE)};
#undef FUSED_ACT_DESCRIBE
    for (size_t i = 0; i < list.size(); ++i) list[i].index = static_cast<int>(i);
    return list;
  }();
  return list;
}

}  // namespace

const std::vector<Operator>& operators() { return mutable_operators(); }

// ---- from a call to its steps -----------------------------------------------------------------------------------

namespace {

// Null: no step at all ("linear").
const Operator* find_activation(const Operator& op, const std::string& name) {
  static const auto activations = [] {
    std::unordered_map<std::string, const Operator*> found{{"linear", nullptr}};
    for (const Operator& candidate : operators())
      if (candidate.is_activation()) found.emplace(candidate.name, &candidate);
    return found;
  }();
  if (const auto found = activations.find(name); found != activations.end()) return found->second;
  std::string known = "linear";
  for (const Operator& candidate : operators())
    if (candidate.is_activation()) known += ", " + candidate.name;
  C10_THROW_ERROR(ValueError, op.label() + ": there is no activation '" + name + "'; there are " + known);
}

int count_slots(const Program& program) {
  int slots = 0;
  for (const Instruction* i = program.instruction; i < program.instruction + program.length; ++i)
    if (i->code == Code::save) slots = std::max(slots, i->source - kMaxOperands + 1);
  return slots;
}

class StepWriter {
 public:
  StepWriter(const Operator& op, Steps& steps) : op_(op), steps_(steps) {}

  // A step with its scalars; one that lacks a scalar is left out.
  void add(const Entry& e, uint8_t source, const std::vector<std::optional<double>>& scalars) {
    Instruction i{e.code, source, static_cast<uint8_t>(next_scalar_)};
    if (e.slot >= 0) i.source = slot(e.slot);
    for (size_t n = 0; n < scalars.size(); ++n)
      if (!scalars[n] && !e.absent) return;
    for (size_t n = 0; n < scalars.size(); ++n) {
      TORCH_INTERNAL_ASSERT(next_scalar_ < kMaxScalars, op_.name);
      steps_.scalars[next_scalar_++] = scalars[n] ? *scalars[n] : e.absent[n];
    }
    const char* wrong = e.wrong(steps_.scalars + i.scalar);
    TORCH_CHECK_VALUE(!wrong, op_.label(), ": ", wrong, shown(scalars));
    if (i.code != Code::Add) {
      // save, load, times what was saved: one multiplication by what would be loaded.
      Instruction* end = steps_.program.instruction + steps_.program.length;
      if (i.code == Code::MulOperand && steps_.program.length > 1 && end[-1].code == Code::load &&
          end[-2].code == Code::save && end[-2].source == i.source) {
        i.source = end[-1].source;
        steps_.program.length -= 2;
      }
      steps_.linear_until_last &= others_++ == 0;
      steps_.last_from_output = e.from_output && e.from_output(steps_.scalars + i.scalar);
    } else if (others_) {
      steps_.linear_until_last = false;
    }
    write(i);
  }
  void save(int k) { write({Code::save, slot(k)}); }
  void load(uint8_t source) { write({Code::load, source}); }

 private:
  static std::string shown(const std::vector<std::optional<double>>& scalars) {
    std::ostringstream text;
    for (const auto& s : scalars) text << (&s == scalars.data() ? " (" : ", ") << s.value_or(0);
    return text.str() + ")";
  }
  static uint8_t slot(int k) { return static_cast<uint8_t>(kMaxOperands + k); }
  void write(const Instruction& i) {
    TORCH_INTERNAL_ASSERT(steps_.program.length < kMaxSteps, op_.name);
    if (i.code == Code::save || i.code == Code::load) steps_.linear_until_last = false;
    steps_.program.instruction[steps_.program.length++] = i;
  }

  const Operator& op_;
  Steps& steps_;
  int next_scalar_ = 0, others_ = 0;
};

}  // namespace

namespace {

// A step that a program may name.
struct KnownStep {
  const char *name, *parameters;
  bool takes_operand;
  int scalars;
  const char* (*wrong)(const double*);
};
constexpr KnownStep kKnownSteps[] = {
#define FUSED_ACT_KNOWN(STEP) {#STEP, STEP::parameters, kTakes<STEP, 'T'> > 0, kTakes<STEP, 'f'>, &STEP::wrong},
    FUSED_ACT_STEPS(FUSED_ACT_KNOWN)
#undef FUSED_ACT_KNOWN
};
constexpr int64_t kCodes = std::size(kKnownSteps);

// The steps that a call of a listed operator gives. It is checked in full: kernels index by what is written here.
Steps decode(const Operator& op, const Arguments& a) {
  const std::vector<int64_t>& program = a.program;
  const std::vector<double>& scalars = a.program_scalars;
  const size_t length = program.size() / 2;
  TORCH_CHECK_VALUE(!program.empty(), op.label(), ": program is empty, but must begin with its version, ",
                    encoding::version);
  TORCH_CHECK_VALUE(program[0] == encoding::version, op.label(), ": program[0], the version of the encoding, is ",
                    program[0], ", but this library knows version ", encoding::version);
  TORCH_CHECK_VALUE(program.size() % 2 == 1, op.label(), ": program has ", program.size(),
                    " elements, but must have its version and then two for each step");
  TORCH_CHECK_VALUE(length <= kMaxSteps, op.label(), ": program has ", length, " steps, but ", kMaxSteps,
                    " are the most");
  TORCH_CHECK_VALUE(scalars.size() <= kMaxScalars, op.label(), ": there are ", scalars.size(), " scalars, but ",
                    kMaxScalars, " are the most");
  Steps steps;
  size_t next_scalar = 0;
  bool saved[kMaxSlots] = {};
  for (size_t n = 0; n < length; ++n) {
    const int64_t code = program[1 + 2 * n], source = program[2 + 2 * n], slot = source - kMaxOperands;
    const auto at = [&](int which) {
      return op.label() + ": program[" + std::to_string(1 + 2 * n + which) + "] is " + std::to_string(program[1 + 2 * n + which]);
    };
    TORCH_CHECK_VALUE(code >= encoding::load && code < kCodes, at(0), ", but a code is ", encoding::load, " (load), ",
                      encoding::save, " (save), or the place of a step, 0 to ", kCodes - 1);
    Instruction& i = steps.program.instruction[n];
    const KnownStep* step = code >= 0 ? &kKnownSteps[code] : nullptr;
    i.code = step ? Code(code) : code == encoding::save ? Code::save : Code::load;
    if (step ? step->takes_operand : code == encoding::load) {
      if (source >= 0 && source < kMaxOperands) {
        TORCH_CHECK_VALUE(a.operand[source].defined(), at(1), ", but there is no operand ", source);
      } else {
        TORCH_CHECK_VALUE(slot >= 0 && slot < kMaxSlots, at(1), ", but a source is the place of an operand, 0 to ",
                          kMaxOperands - 1, ", or that of a slot, ", kMaxOperands, " to ",
                          kMaxOperands + kMaxSlots - 1);
        TORCH_CHECK_VALUE(saved[slot], at(1), ", but nothing was saved in slot ", slot, " before");
      }
    } else if (step) {
      TORCH_CHECK_VALUE(source == encoding::none, at(1), ", but ", step->name, " takes no operand: its source must be ",
                        encoding::none);
    } else {
      TORCH_CHECK_VALUE(slot >= 0 && slot < kMaxSlots, at(1), ", but a value is saved in a slot, ", kMaxOperands,
                        " to ", kMaxOperands + kMaxSlots - 1);
      saved[slot] = true;
    }
    i.source = source == encoding::none ? Instruction::kNoSource : static_cast<uint8_t>(source);
    if (!step) continue;
    i.scalar = static_cast<uint8_t>(next_scalar);
    TORCH_CHECK_VALUE(next_scalar + step->scalars <= scalars.size(), at(0), " (", step->name,
                      "), which takes scalars[", next_scalar + step->scalars - 1, "], but there are ", scalars.size(),
                      " scalars");
    for (int s = 0; s < step->scalars; ++s, ++next_scalar) steps.scalars[next_scalar] = scalars[next_scalar];
    const char* wrong = step->wrong(steps.scalars + i.scalar);
    TORCH_CHECK_VALUE(!wrong, at(0), " (", step->name, ") of scalars[", int(i.scalar), "], which is ",
                      scalars[i.scalar], ": ", wrong);
  }
  TORCH_CHECK_VALUE(next_scalar == scalars.size(), op.label(), ": there are ", scalars.size(),
                    " scalars, but the steps of program take ", next_scalar);
  steps.program.length = static_cast<int>(length);
  steps.program.slots = count_slots(steps.program);
  return steps;
}

Steps write_steps(const Operator& op, const Arguments& a) {
  Steps steps;
  steps.linear_until_last = steps.last_from_output = true;
  StepWriter writer(op, steps);
  size_t next = 0;
  const auto index_of = [&](const Parameter& p) {  // among those of its kind
    int k = 0;
    for (const Parameter& other : op.parameters) {
      if (&other == &p) return k;
      k += other.kind == p.kind;
    }
    return k;
  };
  for (const Entry& e : op.entries) {
    uint8_t source = Instruction::kNoSource;
    bool absent = false;
    std::vector<std::optional<double>> scalars;
    const Operator* activation = nullptr;
    for (const char* kind = e.parameters; *kind; ++kind) {
      if (*kind == 'T' && op.packing != Packing::none) {
        source = 0;
        continue;
      }
      const int place = e.places[kind - e.parameters];
      const Parameter& p = op.parameters.at(place < 0 ? next++ : place - 1);
      switch (*kind) {
        case 'T':
          TORCH_INTERNAL_ASSERT(p.kind == Parameter::operand, op.name, ": ", p.name);
          source = static_cast<uint8_t>(op.kernel_operand(index_of(p)));
          absent = p.optional && !a.operand[index_of(p)].defined();
          break;
        case 'A':
          TORCH_INTERNAL_ASSERT(p.kind == Parameter::activation, op.name, ": ", p.name);
          activation = find_activation(op, a.activation);
          break;
        default:
          TORCH_INTERNAL_ASSERT(p.kind == Parameter::scalar, op.name, ": ", p.name);
          scalars.push_back(op.fixed && !e.absent && !a.scalars[index_of(p)] ? 1.0 : a.scalars[index_of(p)]);
      }
    }
    if (absent) continue;
    switch (e.kind) {
      case Entry::step:
        writer.add(e, source, scalars);
        break;
      case Entry::halves:
      case Entry::pairs:
      case Entry::listed:
        break;
      case Entry::save:
        writer.save(e.slot);
        break;
      case Entry::load:
        writer.load(source);
        break;
      case Entry::activation: {
        const std::optional<double> alpha = scalars.at(0);
        if (!activation || activation->scalars == 0)
          TORCH_CHECK_VALUE(!alpha, op.label(), ": alpha is ", *alpha, ", but the activation '", a.activation,
                            "' has no parameter");
        if (!activation) break;
        if (!alpha && activation->scalars) {
          const Parameter& first = activation->parameters[0];
          TORCH_CHECK_VALUE(first.default_value || first.optional, op.label(), ": alpha is None, but the activation '",
                            a.activation, "' has no default for its parameter ", first.name);
        }
        // alpha is the activation's first scalar; the others have their defaults, or zero.
        std::vector<std::optional<double>> given;
        for (const Parameter& p : activation->parameters)
          given.push_back(given.empty() && alpha ? alpha : p.optional ? std::nullopt : std::optional(p.default_value.value_or(0)));
        size_t first = 0;
        for (const Entry& step : activation->entries) {
          const size_t count = strlen(step.parameters);
          writer.add(step, Instruction::kNoSource, {given.begin() + first, given.begin() + first + count});
          first += count;
        }
      }
    }
  }
  steps.program.slots = count_slots(steps.program);
  return steps;
}

}  // namespace

// A line's steps are those of the thread's last call of the operator in most calls.
Steps steps_of(const Operator& op, const Arguments& a) {
  if (op.listed) return decode(op, a);
  struct Last {
    bool filled = false;
    std::string activation;
    std::optional<double> scalars[kMaxParameters];
    bool given[kMaxOperands] = {};
    Steps steps;
  };
  thread_local std::vector<Last> table(operators().size());
  Last& last = table[op.index];
  const auto is_same = [&] {
    for (int k = 0; k < op.operands; ++k)
      if (last.given[k] != a.operand[k].defined()) return false;
    const auto same = [](const std::optional<double>& x, const std::optional<double>& y) {  // 0 and -0 are two scalars
      return x.has_value() == y.has_value() && (!x || memcmp(&*x, &*y, sizeof(double)) == 0);
    };
    return std::equal(a.scalars, a.scalars + op.scalars, last.scalars, same) && a.activation == last.activation;
  };
  if (last.filled && is_same()) return last.steps;
  last.filled = false;  // what throws leaves no half of an entry
  last.steps = write_steps(op, a);
  last.activation = a.activation;
  std::copy(a.scalars, a.scalars + op.scalars, last.scalars);
  for (int k = 0; k < op.operands; ++k) last.given[k] = a.operand[k].defined();
  last.filled = true;
  return last.steps;
}

// dependencies(), remembered for the programs that this thread ran last: they are computed by evaluating the program, and
// a call needs them once, in training three times.
const Dependencies& dependencies_of(const Program& program, Mode mode) {
  struct Known {
    Program program;
    bool known[kModes] = {};
    Dependencies of[kModes];
  };
  constexpr size_t kPrograms = 64;
  thread_local Known table[kPrograms];
  const auto word = [](const Instruction& i) { return uint32_t(i.code) << 8 | i.source; };
  size_t hash = program.length;
  for (int n = 0; n < program.length; ++n) hash = hash * 31 + word(program.instruction[n]);
  Known& entry = table[hash % kPrograms];
  // Scalars change nothing, and `slots` follows from the instructions.
  const auto same = [&](const Instruction& a, const Instruction& b) { return word(a) == word(b); };
  const Instruction* first = program.instruction;
  if (entry.program.length != program.length ||
      !std::equal(first, first + program.length, entry.program.instruction, same)) {
    entry.program = program;
    std::fill(std::begin(entry.known), std::end(entry.known), false);
  }
  if (!entry.known[int(mode)]) {
    entry.of[int(mode)] = dependencies(program, mode);
    entry.known[int(mode)] = true;
  }
  return entry.of[int(mode)];
}

// ---- codes --------------------------------------------------------------------------------------------------------

namespace {

// Elements from which on codes are saved: another tensor to allocate costs a small one more than its 64 KB are worth.
constexpr int64_t kWorthCodes = 1 << 14;

Coding find_coding(const Program& program, const double* scalars) {
  Coding c{find_codes<false>(program, scalars), find_codes<true>(program, scalars)};
  const int codes = c.cpu.codes && c.cuda.codes ? std::max(c.cpu.codes, c.cuda.codes) : 0;
  c.cpu.codes = c.cuda.codes = codes;
  return c;
}

// A fixed operator's program with the call's scalars.
Steps fixed_steps(const Operator& op, const Arguments& a) {
  Steps steps;
  steps.program = op.program;
  for (int s = 0; s < op.scalars; ++s) steps.scalars[s] = a.scalars[s] ? *a.scalars[s] : op.absent[s];
  return steps;
}

}  // namespace

const Coding& coding_of(const Operator& op, const Arguments& a) {
  struct Known {
    Steps steps;
    Coding coding;
    bool filled = false;
  };
  constexpr size_t kPrograms = 1 << 6;
  thread_local std::vector<Known> table(kPrograms);
  const Steps steps = op.fixed ? fixed_steps(op, a) : steps_of(op, a);
  const Program& program = steps.program;
  uint64_t hash = program.length;
  const auto mix = [&](uint64_t word) { hash = (hash ^ word) * 0x9e3779b97f4a7c15u + (hash >> 17); };
  int scalars = 0;
  for (int n = 0; n < program.length; ++n) {
    const Instruction& i = program.instruction[n];
    mix(uint32_t(i.code) << 16 | i.source << 8 | i.scalar);
    if (i.code < Code::save) scalars += kKnownSteps[int(i.code)].scalars;
  }
  for (int s = 0; s < scalars; ++s) {
    uint64_t bits;
    memcpy(&bits, steps.scalars + s, sizeof bits);
    mix(bits);
  }
  // Its highest bits: the lowest of round numbers are all 0, and would leave those of a product as they are.
  hash = (hash ^ hash >> 29) * 0x9e3779b97f4a7c15u;
  Known& entry = table[hash >> 58];
  const auto same = [](const Instruction& x, const Instruction& y) {
    return x.code == y.code && x.source == y.source && x.scalar == y.scalar;
  };
  const Instruction* first = program.instruction;
  if (!entry.filled || entry.steps.program.length != program.length ||
      !std::equal(first, first + program.length, entry.steps.program.instruction, same) ||
      memcmp(entry.steps.scalars, steps.scalars, scalars * sizeof(double)) != 0) {
    entry.steps = steps;
    entry.coding = find_coding(program, steps.scalars);
    entry.filled = true;
  }
  return entry.coding;
}

static c10::SymInt count_code_words(const Coding& coding, const at::Tensor& x) {
  return code_words(x.sym_numel()) * coding.cpu.bits();
}

bool should_code(const Operator& op, const Arguments& a, uint32_t asked) {
  const auto dtype = a.x.scalar_type();
  if (op.packing != Packing::none || (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16)) return false;
  // A size that a trace does not know is taken for one that has codes: a condition in the graph would keep it from being
  // exported.
  const std::optional<int64_t> numel = a.x.sym_numel().maybe_as_int();
  if (numel && (*numel < kWorthCodes || *numel > kShortElements)) return false;
  return (asked & ~coding_of(op, a).known()) == 0;
}

// The same where the operand is added once: with nothing but additions before that, or after it.
static SameGradient same_gradient_by_steps(const Program& program, int source) {
  int place = -1;
  for (int n = 0; n < program.length; ++n) {
    const Instruction& i = program.instruction[n];
    if (i.code == Code::save || i.code == Code::load) return SameGradient::none;
    if (i.source != source) continue;
    if (place >= 0 || i.code != Code::Add) return SameGradient::none;
    place = n;
  }
  if (place < 0) return SameGradient::none;
  const auto adds = [&](int from, int to) {
    return std::all_of(program.instruction + from, program.instruction + to,
                       [](const Instruction& i) { return i.code == Code::Add; });
  };
  return adds(place, program.length) ? SameGradient::as_grad_output
         : adds(0, place)            ? SameGradient::as_x
                                     : SameGradient::none;
}

SameGradient same_gradient(const Operator& op, const Arguments& a, int k, bool coded) {
  if (op.packing != Packing::none) return SameGradient::none;
  const Program program = op.fixed ? op.program : steps_of(op, a).program;
  const SameGradient same = same_gradient_by_steps(program, op.kernel_operand(k));
  if (!coded || same != SameGradient::none) return same;
  const Coding& coding = coding_of(op, a);
  const auto all = [&](auto f) { return f(coding.cpu) && f(coding.cuda); };
  const int from = (1 + k) * kMaxCodes;
  constexpr uint32_t every = (1u << kMaxCodes) - 1;
  const auto ones = [&](const CodeTable& t) {
    const uint32_t there = (1u << t.codes) - 1;
    return (t.active >> from & there) == there &&
           std::all_of(t.value + from, t.value + from + t.codes, [](double v) { return v == 1; });
  };
  const auto equal = [&](const CodeTable& t) {
    return (t.active >> from & every) == (t.active & every) &&
           std::equal(t.value + from, t.value + from + kMaxCodes, t.value);
  };
  return !(coding.known() >> (1 + k) & 1) ? SameGradient::none
         : all(ones)                      ? SameGradient::as_grad_output
         : all(equal)                     ? SameGradient::as_x
                                          : SameGradient::none;
}

// ---- arguments ------------------------------------------------------------------------------------------------

int count_outputs(const Operator& op, Mode mode) {
  return full_outputs(mode) + (mode == Mode::coded) + (has_operand_gradients(mode) ? op.operands : 0);
}

int count_arguments(const Operator& op, Mode mode) {
  const int parameters = op.listed ? 3 : static_cast<int>(op.parameters.size());
  return has_operand_gradients(mode) + 1 + parameters + op.dim.has_value() +
         reads_codes(mode) + (has_direction(mode) ? 1 + op.operands : 0) + has_output_mask(op, mode);
}

Arguments unpack(const Operator& op, Mode mode, const torch::jit::Stack& stack) {
  const int count = count_arguments(op, mode);
  const c10::IValue* next = stack.data() + stack.size() - count;
  const auto optional = [](const c10::IValue& v) { return v.isNone() ? at::Tensor() : v.toTensor(); };
  Arguments a;
  if (has_operand_gradients(mode)) a.g = (next++)->toTensor();
  a.x = (next++)->toTensor();
  if (op.listed) {
    const auto operands = (next++)->toListRef();
    TORCH_CHECK_VALUE(operands.size() <= kMaxOperands, op.label(), ": there are ", operands.size(), " operands, but ",
                      kMaxOperands, " are the most");
    for (size_t k = 0; k < operands.size(); ++k) a.operand[k] = operands[k].toTensor();
    a.program = (next++)->toIntVector();
    a.program_scalars = (next++)->toDoubleVector();
  }
  int operand = 0, scalar = 0;
  for (const Parameter& p : op.parameters) {
    if (op.listed) break;
    const c10::IValue& value = *next++;
    switch (p.kind) {
      case Parameter::operand:
        a.operand[operand++] = optional(value);
        break;
      case Parameter::activation:
        a.activation = value.toStringRef();
        break;
      case Parameter::scalar:
        if (!value.isNone()) a.scalars[scalar] = value.toDouble();
        ++scalar;
    }
  }
  if (op.dim) a.dim = (next++)->toInt();
  if (reads_codes(mode)) a.codes = (next++)->toTensor();
  if (has_direction(mode)) {
    a.u = optional(*next++);
    for (int k = 0; k < op.operands; ++k) a.v[k] = optional(*next++);
  }
  if (has_output_mask(op, mode)) {
    const auto mask = (next++)->toBoolList();
    TORCH_CHECK_VALUE(int(mask.size()) == count_outputs(op, mode), op.label(), ": output_mask has ", mask.size(),
                      " elements, but there are ", count_outputs(op, mode), " outputs");
    for (size_t n = 0; n < mask.size(); ++n) a.asked[n] = mask[n];
  }
  if (has_operand_gradients(mode))
    for (int k = 0; k < op.operands; ++k)
      if (op.operand_is_optional(k)) a.asked[full_outputs(mode) + k] &= a.operand[k].defined();
  return a;
}

torch::jit::Stack pack(const Operator& op, Mode mode, const Arguments& a) {
  torch::jit::Stack stack;
  stack.reserve(count_arguments(op, mode));
  const auto optional = [](const at::Tensor& t) { return t.defined() ? c10::IValue(t) : c10::IValue(); };
  if (has_operand_gradients(mode)) stack.emplace_back(a.g);
  stack.emplace_back(a.x);
  if (op.listed) {
    c10::List<at::Tensor> operands;
    for (const at::Tensor& t : a.operand)
      if (t.defined()) operands.push_back(t);
    stack.emplace_back(std::move(operands));
    stack.emplace_back(a.program);
    stack.emplace_back(a.program_scalars);
  }
  int operand = 0, scalar = 0;
  for (const Parameter& p : op.parameters) {
    if (op.listed) break;
    switch (p.kind) {
      case Parameter::operand:
        stack.push_back(optional(a.operand[operand++]));
        break;
      case Parameter::activation:
        stack.emplace_back(a.activation);
        break;
      case Parameter::scalar:
        stack.emplace_back(a.scalars[scalar] ? c10::IValue(*a.scalars[scalar]) : c10::IValue());
        ++scalar;
    }
  }
  if (op.dim) stack.emplace_back(a.dim);
  if (reads_codes(mode)) stack.emplace_back(a.codes);
  if (has_direction(mode)) {
    stack.push_back(optional(a.u));
    for (int k = 0; k < op.operands; ++k) stack.push_back(optional(a.v[k]));
  }
  if (has_output_mask(op, mode)) {
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

// A tensor of one element on the CPU, beside an x on another device: taken as a number, as eager takes it.
bool is_host_scalar(const at::Tensor& x, const at::Tensor& t) {
  return t.dim() == 0 && t.device().is_cpu() && !x.device().is_cpu();
}

// The shape of the result: x's, or where x is packed, that of half of it.
c10::SymDimVector result_shape(const Operator& op, const at::Tensor& x) {
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  if (op.packing != Packing::none) shape.back() = shape.back().guard_int(__FILE__, __LINE__) / 2;
  return shape;
}

// The dispatcher takes None for a tensor.
void check_given(const Operator& op, const std::string& name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), op.label(), ": ", name, " is None, but must be a tensor");
}

std::string direction_name(const Operator& op, Mode mode, int k) {
  return mode == Mode::double_backward ? "grad_grad_" + op.operand_name(k) : op.operand_name(k) + "_tangent";
}

std::string scalar_names(const Operator& op) {
  std::string names;
  for (const Parameter& p : op.parameters)
    if (p.kind == Parameter::scalar) names += (names.empty() ? "" : " and ") + p.name;
  return names;
}

void check_tensors(const Operator& op, Mode mode, const Arguments& a) {
  const char* x_name = op.input.c_str();
  if (has_operand_gradients(mode)) check_given(op, "grad_output", a.g);
  check_given(op, op.input, a.x);
  for (int k = 0; k < op.operands; ++k)
    if (!op.operand_is_optional(k)) check_given(op, op.operand_name(k), a.operand[k]);
  check_dtype(op, x_name, a.x);
  if (op.needs_scalar)
    TORCH_CHECK(std::any_of(a.scalars, a.scalars + op.scalars, [](const auto& s) { return s.has_value(); }), op.label(), ": ",
                scalar_names(op), " are None, but at least one of them must be given");
  const bool packed = op.packing != Packing::none;
  if (packed) {
    TORCH_CHECK_VALUE(a.x.dim() > 0, op.label(), ": ", x_name, " has no dimension, but its last one is split in two");
    TORCH_CHECK_VALUE(a.x.sym_size(-1) % 2 == 0, op.label(), ": ", x_name, " has shape ", a.x.sym_sizes(),
                      ", whose last dimension cannot be split in two");
  }
  // Before any device is made current: x may be on the CPU, and the operand that brought the call here on a GPU.
  const auto check_operand = [&](const std::string& name, const at::Tensor& t) {
    if (!t.defined()) return;
    check_dtype(op, name.c_str(), t);
    TORCH_CHECK(t.device() == a.x.device() || is_host_scalar(a.x, t), op.label(), ": ", name, " is on ", t.device(),
                ", but ", op.input, " is on ", a.x.device());
  };
  for (int k = 0; k < op.operands; ++k) {
    check_operand(op.operand_name(k), a.operand[k]);
    if (a.v[k].defined()) check_operand(direction_name(op, mode, k), a.v[k]);
  }
  const bool jvp = mode != Mode::double_backward;
  const auto like = [&](const std::string& name, const at::Tensor& t, bool like_result) {
    if (!t.defined()) return;
    TORCH_CHECK_TYPE(t.scalar_type() == a.x.scalar_type(), op.label(), ": ", name, " has dtype ", dtype_name(t),
                     ", but ", x_name, " has dtype ", dtype_name(a.x));
    TORCH_CHECK(t.device() == a.x.device(), op.label(), ": ", name, " is on ", t.device(), ", but ", x_name, " is on ",
                a.x.device());
    if (like_result && packed) {
      const c10::SymDimVector shape = result_shape(op, a.x);
      TORCH_CHECK_VALUE(t.sym_sizes() == c10::SymIntArrayRef(shape), op.label(), ": ", name, " has shape ",
                        t.sym_sizes(), ", but the result has shape ", c10::SymIntArrayRef(shape));
    } else {
      TORCH_CHECK_VALUE(t.sym_sizes() == a.x.sym_sizes(), op.label(), ": ", name, " has shape ", t.sym_sizes(),
                        ", but ", x_name, " has shape ", a.x.sym_sizes());
    }
  };
  like("grad_output", a.g, true);
  if (a.u.defined()) like(jvp ? op.input + "_tangent" : "grad_grad_" + op.input, a.u, false);
  if (mode == Mode::coded || reads_codes(mode))
    TORCH_CHECK_TYPE(a.x.scalar_type() != at::kDouble, op.label(), ": ", x_name, " has dtype ", dtype_name(a.x),
                     ", which has no codes");
  if (!reads_codes(mode)) return;
  const Coding& coding = coding_of(op, a);
  TORCH_CHECK_VALUE(coding.cpu.codes, op.label(), ": its derivatives take too many values for codes");
  TORCH_CHECK_TYPE(a.codes.scalar_type() == at::kInt, op.label(), ": codes has dtype ", dtype_name(a.codes),
                   ", but must be int32");
  TORCH_CHECK(a.codes.device() == a.x.device(), op.label(), ": codes is on ", a.codes.device(), ", but ", x_name,
              " is on ", a.x.device());
  TORCH_CHECK_VALUE(a.codes.dim() == 1 && a.codes.sym_size(0) == count_code_words(coding, a.x), op.label(),
                    ": codes has shape ", a.codes.sym_sizes(), ", but the codes of ", x_name, " of shape ",
                    a.x.sym_sizes(), " are ", count_code_words(coding, a.x));
}

// Where an operand's dimensions lie among those of x.
struct Placement {
  bool scalar = false;  // one element in one dimension, which broadcasts
  int64_t first = 0;    // dimension of x of the operand's dimension 0
};

Placement place(const Operator& op, const Arguments& a, const std::string& name, const at::Tensor& t) {
  const int64_t dims = a.x.dim();
  Placement p;
  if (t.dim() == 1 && dims >= 1 && TORCH_GUARD_OR_FALSE(t.sym_size(0).sym_eq(1))) {
    p.scalar = true;
  } else if (t.dim() == 1 && dims >= 1) {
    TORCH_CHECK_INDEX(a.dim >= -dims && a.dim < dims, op.label(), ": dim is ", a.dim, ", but ", op.input, " has ", dims,
                      dims == 1 ? " dimension" : " dimensions", " (expected ", -dims, " to ", dims - 1, ")");
    p.first = a.dim < 0 ? a.dim + dims : a.dim;
    TORCH_CHECK_VALUE(t.sym_size(0) == a.x.sym_size(p.first), op.label(), ": ", name, " has ", t.sym_size(0),
                      " elements, but ", op.input, ".shape[", p.first, "] is ", a.x.sym_size(p.first));
  } else {
    p.first = dims - t.dim();
    bool fits = p.first >= 0;
    for (int64_t d = 0; fits && d < t.dim(); ++d)
      fits = t.sym_size(d) == 1 || t.sym_size(d) == a.x.sym_size(p.first + d);
    TORCH_CHECK_VALUE(fits, op.label(), ": ", name, " of shape ", t.sym_sizes(), " does not broadcast to ", op.input,
                      " of shape ", a.x.sym_sizes(), " without enlarging it");
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

// A tensor for a result: like x, or where x is packed, contiguous where x is, else as torch.empty_like lays out half of x.
at::Tensor empty_result(const Operator& op, const at::Tensor& x) {
  if (op.packing == Packing::none) return empty_like_on(x, x.device());
  if (x.is_contiguous()) return at::empty_symint(result_shape(op, x), x.options());
  const at::Tensor half = op.packing == Packing::halves ? x.narrow_symint(-1, 0, result_shape(op, x).back())
                                                        : x.slice(-1, std::nullopt, std::nullopt, 2);
  return empty_like_on(half, x.device());
}

// The outputs, not yet filled in; undefined where not asked for.
std::vector<at::Tensor> allocate(const Operator& op, Mode mode, const Arguments& a) {
  const int outputs = count_outputs(op, mode), full = full_outputs(mode);
  std::vector<at::Tensor> out(outputs);
  for (int n = 0; n < outputs; ++n) {
    if (!a.asked[n]) continue;
    if (mode == Mode::coded && n == full) {
      const Coding& coding = coding_of(op, a);
      TORCH_CHECK_VALUE(coding.cpu.codes, op.label(), ": its derivatives take too many values for codes");
      out[n] = at::empty_symint({count_code_words(coding, a.x)}, a.x.options().dtype(at::kInt));
    } else if (n >= full) {
      out[n] = empty_like_on(a.operand[n - full], a.x.device());
    } else if (n == full - 1 && has_operand_gradients(mode)) {  // the gradient of x
      out[n] = empty_like_on(a.x, a.x.device());
    } else {
      out[n] = empty_result(op, a.x);
    }
  }
  return out;
}

void push(torch::jit::Stack* stack, int arguments, std::vector<at::Tensor>&& out) {
  torch::jit::drop(*stack, arguments);
  for (at::Tensor& t : out) stack->emplace_back(std::move(t));
}

void check_on_meta(const Operator& op, Mode mode, const Arguments& a) {
  check_tensors(op, mode, a);
  steps_of(op, a);  // does the activation exist, are the scalars right?
  for (int k = 0; k < op.operands; ++k) {
    if (a.operand[k].defined()) place(op, a, op.operand_name(k), a.operand[k]);
    if (a.v[k].defined()) place(op, a, direction_name(op, mode, k), a.v[k]);
  }
}

void run_meta(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_on_meta(op, mode, a);
  push(stack, count_arguments(op, mode), allocate(op, mode, a));
}

// Whether two elements of a tensor lie at one place: whether indices that differ can have an offset of 0 between them. (PyTorch says
// no more of windows as as_strided makes them than that it is too hard to say.) Where the search would not end, no, as eager.
bool overlaps(const at::Tensor& t) {
  if (t.is_non_overlapping_and_dense() || t.numel() < 2) return false;
  struct Dimension {
    int64_t stride, last;  // of an index
    int64_t reach;         // the offset of all lasts of this and of those of smaller strides
  };
  std::vector<Dimension> dims;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.push_back({t.stride(d), t.size(d) - 1, 0});
  std::sort(dims.begin(), dims.end(), [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  int64_t reach = 0;
  bool apart = true;  // each stride is beyond all that those before it reach
  for (Dimension& d : dims) {
    apart &= d.stride > reach;
    d.reach = reach += d.stride * d.last;
  }
  if (apart) return false;
  int budget = 1 << 16;
  // Whether differences of the first `count` dimensions can sum to -offset, not all of them 0 where none was so far.
  std::function<bool(size_t, int64_t, bool)> meets = [&](size_t count, int64_t offset, bool differs) -> bool {
    if (count == 0) return offset == 0 && differs;
    const Dimension& d = dims[count - 1];
    if (std::abs(offset) > d.reach || --budget <= 0) return false;
    if (d.stride == 0) return meets(count - 1, offset, true);
    const int64_t rest = d.reach - d.stride * d.last;
    const int64_t low = std::max(differs ? -d.last : 0, -(offset + rest) / d.stride);
    const int64_t high = std::min(d.last, (rest - offset) / d.stride);
    for (int64_t n = low; n <= high && budget > 0; ++n)
      if (meets(count - 1, offset + n * d.stride, differs || n)) return true;
    return false;
  };
  return meets(dims.size(), 0, false);
}

// Before x is written to. What has sizes that are not known yet is checked when it runs.
void check_overlap(const Operator& op, const at::Tensor& x) {
  if (x.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
  TORCH_CHECK(!overlaps(x), op.label(), "_: elements of ", op.input, " share memory (shape ", x.sizes(), ", strides ", x.strides(),
              "), so it cannot be written in place");
}

void run_meta_in_place(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet,
                       torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_on_meta(op, mode, a);
  check_overlap(op, a.x);
  push(stack, count_arguments(op, mode), {a.x});
}

// ---- the real kernels -----------------------------------------------------------------------------------------

Dtype dtype_of(at::ScalarType t) {
  return t == at::kHalf ? Dtype::f16 : t == at::kBFloat16 ? Dtype::bf16 : t == at::kFloat ? Dtype::f32 : Dtype::f64;
}
at::ScalarType compute_type(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// A Request with what it points to.
struct Work {
  Request request;
  std::vector<at::Tensor> out;
  std::vector<int64_t> rows;                     // sizes and strides, a row of x.dim() for each; reserved, so none moves
  at::Tensor alive[4 * kMaxOperands + 10];       // copies of inputs in a dtype or layout that the kernels read
  at::Tensor narrow[kMaxOperands];               // gradients that the kernels write in the compute type
  int kept = 0;
  int reads[kMaxOperands] = {};  // of each operand by the steps of a call that gives its own
  int place[kMaxOperands] = {};  // of an operand among those of the Request
  int line = 0;                  // the place in the list of the operator whose kernels run

  int64_t* row(const int64_t* from, int64_t n) {
    const size_t at = rows.size();
    rows.resize(at + n, 0);
    if (from) std::copy_n(from, n, rows.data() + at);
    return rows.data() + at;
  }
  const at::Tensor& keep(at::Tensor&& t) { return alive[kept++] = std::move(t); }
};

int64_t* broadcast_strides(Work& work, const at::Tensor& x, const Placement& p, const at::Tensor& t) {
  int64_t* row = work.row(nullptr, x.dim());
  if (!p.scalar)
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.size(d) != 1) row[p.first + d] = t.stride(d);
  return row;
}

// One half of a packed tensor.
struct Half {
  int64_t offset;  // in bytes
  const int64_t* strides;
};
Half half_of(const Operator& op, Work& work, const at::Tensor& t, int which) {
  const int64_t last = t.dim() - 1, stride = t.stride(last);
  int64_t* strides = work.row(t.strides().data(), t.dim());
  const bool pairs = op.packing == Packing::pairs;
  if (pairs) strides[last] = 2 * stride;
  return {which * stride * (pairs ? 1 : t.size(last) / 2) * t.element_size(), strides};
}

// Which inputs of the kernel the asked outputs are computed from.
uint32_t inputs_read(const Operator& op, Mode mode, const Arguments& a, const Dependencies& d) {
  uint32_t read = 0;
  const int full = full_outputs(mode);
  for (int n = 0; n < full; ++n)
    if (a.asked[n]) read |= d.full[n];
  if (has_operand_gradients(mode)) {
    if (op.packing != Packing::none && a.asked[full - 1]) read |= d.operand[0];
    for (int k = 0; k < op.operands; ++k)
      if (a.asked[full + k]) read |= d.operand[op.kernel_operand(k)];
  }
  return read;
}

bool is_wrong(const Operator& op, const double* scalars) {
  for (const Entry& e : op.entries) {
    if (e.wrong(scalars)) return true;
    scalars += strlen(e.parameters);  // of a fixed operator: one scalar a letter, but for operands
    for (const char* c = e.parameters; *c; ++c) scalars -= *c == 'T';
  }
  return false;
}

// A GPU's kernels know x's dtype and the compute type, and no third.
bool needs_compute_type(const Arguments& a, const at::Tensor& t, bool cuda) {
  return cuda && t.scalar_type() != a.x.scalar_type() && t.scalar_type() != compute_type(a.x);
}

Request::Operand operand_to_read(const Arguments& a, Work& work, const Placement& p, const at::Tensor& given, bool cuda) {
  Request::Operand o;
  if (is_host_scalar(a.x, given)) {
    o.value = given.item<double>();
    return o;
  }
  const at::Tensor& t = needs_compute_type(a, given, cuda) ? work.keep(given.to(compute_type(a.x))) : given;
  o.data = t.const_data_ptr();
  o.dtype = dtype_of(t.scalar_type());
  o.strides = broadcast_strides(work, a.x, p, t);
  return o;
}

// Of operand k.
Request::OperandGradient gradient_to_write(const Operator& op, const Arguments& a, Work& work, int k, bool cuda) {
  at::Tensor to = work.out[full_outputs(work.request.mode) + k];
  if (needs_compute_type(a, to, cuda))
    to = work.narrow[k] = at::empty_like(to, to.options().dtype(compute_type(a.x)));
  const Placement p = place(op, a, op.operand_name(k), to);
  return {to.mutable_data_ptr(), dtype_of(to.scalar_type()), broadcast_strides(work, a.x, p, to), to.numel()};
}

// The operator whose line is the program of a call of `op`, so that it has kernels of its own; `op` where there is none. (Operands
// as large as x stand in forms.)
const Operator& line_of(const Operator& op, const Program& program, const Arguments& a) {
  if (op.packing != Packing::none) return op;
  for (int k = 0; k < op.operands; ++k)
    if (a.operand[k].defined() && a.operand[k].numel() == a.x.numel()) return op;
  struct Line {  // small: a look at each Operator, of a kilobyte, would be seen in a call's microsecond
    Code first;
    int length;
    const Operator* op;
  };
  static const std::vector<Line> lines = [] {
    std::vector<Line> found;
    for (const Operator& other : operators())
      if (other.fixed) found.push_back({other.program.instruction[0].code, other.program.length, &other});
    return found;
  }();
  for (const Line& line : lines)
    if (program.length == line.length && program.instruction[0].code == line.first &&
        std::memcmp(program.instruction, line.op->program.instruction, line.length * sizeof(Instruction)) == 0)
      return *line.op;
  return op;
}

// Fills in the Request. In place: the result goes to x. `cuda`: kernels read operands of x's dtype or of the compute
// type, and write gradients in one of these.
void prepare(const Operator& op, Mode mode, const Arguments& a, Work& work, bool cuda, bool in_place) {
  Request& r = work.request;
  const int64_t dims = a.x.dim();
  const bool packed = op.packing != Packing::none;
  const int full = full_outputs(mode);
  work.rows.reserve((4 * kMaxOperands + 12) * dims);
  r.mode = mode;
  r.dtype = dtype_of(a.x.scalar_type());
  r.ndim = static_cast<int>(dims);
  r.pairs = op.packing == Packing::pairs;
  r.operands = op.kernel_operands();
  if (op.listed)
    while (r.operands && !a.operand[r.operands - 1].defined()) --r.operands;
  r.sizes = a.x.sizes().data();
  r.numel = a.x.numel();
  if (packed) {
    int64_t* sizes = work.row(r.sizes, dims);
    sizes[dims - 1] /= 2;
    r.sizes = sizes;
    r.numel /= 2;
  }
  work.line = op.index;
  Dependencies dependencies;
  const Mode evaluated = mode == Mode::coded ? Mode::forward : mode;
  if (op.fixed) {
    const Steps steps = fixed_steps(op, a);
    r.program = steps.program;
    std::copy(std::begin(steps.scalars), std::end(steps.scalars), r.scalars);
    if (is_wrong(op, r.scalars)) steps_of(op, a);  // which says what is wrong
    dependencies = op.dependencies[int(evaluated)];
  } else {
    const Steps steps = steps_of(op, a);
    r.program = steps.program;
    std::copy(std::begin(steps.scalars), std::end(steps.scalars), r.scalars);
    dependencies = dependencies_of(r.program, evaluated);
    if (const Operator& line = line_of(op, r.program, a); line.index != op.index) {
      work.line = line.index;
      r.operands = line.operands;  // what it does not read its kernels have no place for
    }
    for (int n = 0; n < r.program.length; ++n) {
      const Instruction& i = r.program.instruction[n];
      if (i.source < kMaxOperands) ++work.reads[i.source];
    }
  }
  const uint32_t read = inputs_read(op, mode, a, dependencies);

  const auto tensor = [&](Request::Tensor& to, const at::Tensor& t, uint32_t bit) {
    if (t.defined() && (read & bit)) to = {t.const_data_ptr(), t.strides().data()};
  };
  // x and u, each with the operand that it brings where it is packed.
  const auto packed_tensor = [&](Request::Tensor& to, Request::Operand& other, const at::Tensor& t, uint32_t bit,
                                 uint32_t other_bit) {
    if (!packed) return tensor(to, t, bit);
    if (!t.defined()) return;
    const char* data = static_cast<const char*>(t.const_data_ptr());
    const Half first = half_of(op, work, t, 0), second = half_of(op, work, t, 1);
    if (read & bit) to = {data + first.offset, first.strides};
    if (read & other_bit) other = {data + second.offset, r.dtype, second.strides};
  };
  packed_tensor(r.x, r.operand[0], a.x, input::x, input::operand(0));
  packed_tensor(r.u, r.v[0], a.u, input::u, input::v(0));
  r.v_present[0] = packed && a.u.defined();
  tensor(r.g, a.g, input::g);

  const auto operand = [&](Request::Operand& to, const std::string& name, const at::Tensor& given, uint32_t bit) {
    const Placement p = place(op, a, name, given);
    if (!(read & bit)) return;
    const bool other_view = in_place && given.is_alias_of(a.x) && !given.is_same(a.x);
    to = operand_to_read(a, work, p, other_view ? work.keep(given.clone()) : given, cuda);
  };
  for (int k = 0; k < op.operands; ++k) {
    const int n = work.place[k] = op.kernel_operand(k);
    if (a.operand[k].defined()) operand(r.operand[n], op.operand_name(k), a.operand[k], input::operand(n));
    if (a.v[k].defined()) operand(r.v[n], direction_name(op, mode, k), a.v[k], input::v(n));
    r.v_present[n] = a.v[k].defined();
  }

  if (in_place) {
    work.out = {a.x};
  } else {
    work.out = allocate(op, mode, a);
  }
  r.order = a.x.strides().data();
  for (int n = 0; n < full; ++n) {
    const at::Tensor& out = work.out[n];
    if (!out.defined()) continue;
    char* data = static_cast<char*>(out.mutable_data_ptr());
    if (packed && n == full - 1 && has_operand_gradients(mode)) {
      const Half first = half_of(op, work, out, 0), second = half_of(op, work, out, 1);
      r.out[n] = {data + first.offset, first.strides};
      r.operand_gradient[0] = {data + second.offset, r.dtype, second.strides, r.numel};
    } else {
      r.out[n] = {data, out.strides().data()};
    }
    r.order = r.out[n].strides;
  }
  if (mode == Mode::coded) {
    const Coding& coding = coding_of(op, a);
    r.table = cuda ? coding.cuda : coding.cpu;
    r.codes = static_cast<uint32_t*>(work.out[full].mutable_data_ptr());
  }
  if (!has_operand_gradients(mode)) return;
  for (int k = 0; k < op.operands; ++k) {
    at::Tensor to = work.out[full + k];
    if (!to.defined()) continue;
    if (r.numel == 0 || (op.listed && !work.reads[k])) {
      to.zero_();
      continue;
    }
    r.operand_gradient[op.kernel_operand(k)] = gradient_to_write(op, a, work, k, cuda);
  }
}

// The same for the modes that read codes. Of the operands the kernel has those whose gradients are asked for, or of which
// there is a direction, one after the other; work.place says which.
void prepare_decoding(const Operator& op, Mode mode, const Arguments& a, Work& work, bool cuda) {
  Request& r = work.request;
  work.line = op.index;
  const int64_t dims = a.x.dim();
  work.rows.reserve((4 * kMaxOperands + 12) * dims);
  r.mode = mode;
  r.dtype = dtype_of(a.x.scalar_type());
  r.ndim = static_cast<int>(dims);
  r.sizes = a.x.sizes().data();
  r.numel = a.x.numel();
  const Coding& coding = coding_of(op, a);
  const CodeTable& from = cuda ? coding.cuda : coding.cpu;
  r.table.codes = from.codes;
  const at::Tensor& codes = a.codes.is_contiguous() && reinterpret_cast<uintptr_t>(a.codes.const_data_ptr()) % 16 == 0
                                ? a.codes
                                : work.keep(a.codes.clone(at::MemoryFormat::Contiguous));
  r.codes = static_cast<uint32_t*>(const_cast<void*>(codes.const_data_ptr()));
  const auto column = [&](int to, int which) {
    TORCH_INTERNAL_ASSERT(from.known >> which & 1, op.name);
    std::copy_n(from.value + which * kMaxCodes, kMaxCodes, r.scalars + to * kMaxCodes);
    r.table.active |= (from.active >> (which * kMaxCodes) & ((1u << kMaxCodes) - 1)) << (to * kMaxCodes);
  };
  work.out = allocate(op, mode, a);
  // The codes lie as the result of forward did: as what is like x.
  const bool dense = a.x.is_non_overlapping_and_dense();
  const auto strides = dense ? c10::DimVector() : c10::DimVector(at::infer_dense_strides(a.x.sizes(), a.x.strides()));
  r.order = dense ? a.x.strides().data() : work.row(strides.data(), dims);
  if (work.out[0].defined()) r.out[0] = {work.out[0].mutable_data_ptr(), work.out[0].strides().data()};
  if (a.g.defined()) r.g = {a.g.const_data_ptr(), a.g.strides().data()};
  if (a.u.defined()) r.u = {a.u.const_data_ptr(), a.u.strides().data()};
  if (work.out[0].defined()) column(0, 0);
  for (int k = 0; k < op.operands; ++k) {
    if (mode == Mode::coded_jvp) {
      const at::Tensor& given = a.v[k];
      if (!given.defined()) continue;
      const std::string name = direction_name(op, mode, k);
      const Placement p = place(op, a, name, given);
      const int n = work.place[k] = r.operands++;
      column(1 + n, 1 + k);
      r.operand[n] = r.v[n] = operand_to_read(a, work, p, given, cuda);  // vector kernels look among the operands
      r.v_present[n] = true;
    } else if (work.out[1 + k].defined()) {
      if (r.numel == 0) {
        work.out[1 + k].zero_();
        continue;
      }
      const int n = work.place[k] = r.operands++;
      column(1 + n, 1 + k);
      r.operand_gradient[n] = gradient_to_write(op, a, work, k, cuda);
    }
  }
}

// The iteration space. Inputs in other layouts than the outputs can leave more dimensions than the kernels walk: then
// they are first copied to the outputs' layout.
Geometry geometry_of(const Operator& op, const Arguments& a, Work& work) {
  Request& r = work.request;
  Geometry geometry = make_geometry(r);
  if (!geometry.too_many_dims) return geometry;
  const auto copy = [&](Request::Tensor& to, const at::Tensor& t) {
    if (!to.data) return;
    at::Tensor dense = at::empty_strided(t.sizes(), at::IntArrayRef(r.order, r.ndim), t.options());
    dense.copy_(t);
    const at::Tensor& kept = work.keep(std::move(dense));
    to = {kept.const_data_ptr(), kept.strides().data()};
  };
  if (op.packing == Packing::none && r.out[0].data != r.x.data) {
    copy(r.x, a.x);
    copy(r.g, a.g);
    copy(r.u, a.u);
    geometry = make_geometry(r);
  }
  TORCH_CHECK(!geometry.too_many_dims, op.label(), ": ", op.input, " of shape ", a.x.sizes(),
              " and its operands leave more than ", kMaxDims,
              " dimensions after merging those that lie together in memory");
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

void run_cpu(const Operator& op, Mode mode, const Arguments& a, Work& work) {
  if (reads_codes(mode)) {
    prepare_decoding(op, mode, a, work, /*cuda=*/false);
  } else {
    prepare(op, mode, a, work, /*cuda=*/false, !work.out.empty());
  }
  Request& r = work.request;

  // Operand gradients that sum over elements go through partial sums over fixed parts of the range, so that they do
  // not depend on the number of threads.
  constexpr int64_t kPart = 1 << 15;  // elements of a part, and the least that a thread is given (as in ATen)
  constexpr int64_t kMaxSums = 1 << 22;  // elements of partial sums at most
  int64_t parts = 1;
  at::Tensor sums[kMaxOperands];
  if (r.numel > 0) {
    const Geometry geometry = geometry_of(op, a, work);
    bool any_sums = false;
    for (const Request::OperandGradient& gradient : r.operand_gradient) {
      if (!gradient.data || gradient.numel == r.numel) continue;
      parts = std::max<int64_t>(1, std::min((r.numel + kPart - 1) / kPart, std::max<int64_t>(1, kMaxSums / gradient.numel)));
      any_sums = true;
    }
    for (int k = 0; k < kMaxOperands; ++k) {
      const Request::OperandGradient& gradient = r.operand_gradient[k];
      if (!gradient.data || gradient.numel == r.numel) continue;
      sums[k] = at::zeros({parts, gradient.numel}, a.x.options().dtype(compute_type(a.x)));
    }
    const CpuKernel kernel = cpu_capability().kernel;
    const auto run = [&](int64_t begin, int64_t end, int64_t part) {
      CpuRange range{begin, end, {}};
      for (int k = 0; k < kMaxOperands; ++k)
        if (sums[k].defined())
          range.sums[k] = static_cast<char*>(sums[k].data_ptr()) + part * sums[k].stride(0) * sums[k].element_size();
      kernel(work.line, r, geometry, range);
    };
    if (parts > 1) {
      const int64_t length = ((r.numel + parts - 1) / parts + kCodeWord - 1) / kCodeWord * kCodeWord;
      at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part)
          run(std::min(part * length, r.numel), std::min((part + 1) * length, r.numel), part);
      });
    } else if (any_sums) {
      run(0, r.numel, 0);
    } else {
      // A word of codes is one thread's.
      at::parallel_for(0, (r.numel + kCodeWord - 1) / kCodeWord, kPart / kCodeWord, [&](int64_t begin, int64_t end) {
        run(begin * kCodeWord, std::min(end * kCodeWord, r.numel), 0);
      });
    }
    for (int k = 0; k < op.operands; ++k) {
      if (!has_operand_gradients(mode) || !work.out[full_outputs(mode) + k].defined()) continue;
      const at::Tensor& sum = sums[work.place[k]];
      if (!sum.defined()) continue;
      // Memory order: the partial sums have the strides of the gradient.
      at::Tensor& to = work.out[full_outputs(mode) + k];
      to.as_strided({to.numel()}, {1}).copy_(sum.sum(0));
    }
  }
}

// ---- CUDA -----------------------------------------------------------------------------------------------------

#if defined(FUSED_ACT_WITH_CUDA)
// Elements from which on a copy costs less than what it saves; below, a launch costs more.
constexpr int64_t kWorthACopy = 1 << 14;

// A result that is computed densely and then copied to where it belongs.
struct Moved {
  at::Tensor to, from;
};

// Replaces tensors as large as the result that are not dense in its order and aligned by copies that are, and so operands that
// are broadcast in more ways than along one axis.
std::vector<Moved> lay_out_densely(const Arguments& a, Work& work, const Geometry& geometry) {
  Request& r = work.request;
  const at::IntArrayRef sizes(r.sizes, r.ndim);
  const auto dense = at::infer_dense_strides(sizes, at::IntArrayRef(r.order, r.ndim));
  std::vector<Moved> moved;
  const auto options = [&](Dtype d) {
    return a.x.options().dtype(d == Dtype::f16    ? at::kHalf
                               : d == Dtype::bf16 ? at::kBFloat16
                               : d == Dtype::f32  ? at::kFloat
                                                  : at::kDouble);
  };
  // The copy of a tensor that needs one: its data, and strides that stay where they are. `input`: its elements are read.
  const auto replace = [&](auto*& data, const int64_t*& strides, Dtype dtype, bool input) {
    if (!data) return;
    bool fits = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (int d = 0; d < r.ndim; ++d) fits &= sizes[d] == 1 || strides[d] == dense[d];
    if (fits) return;
    const at::Tensor view = at::for_blob(const_cast<void*>(static_cast<const void*>(data)), sizes)
                                .strides(at::IntArrayRef(strides, r.ndim))
                                .options(options(dtype))
                                .target_device(a.x.device())
                                .make_tensor();
    at::Tensor copy = at::empty_strided(sizes, dense, options(dtype));
    if (input) {
      copy.copy_(view);
    } else {
      moved.push_back({view, copy});
    }
    const at::Tensor& kept = work.keep(std::move(copy));
    data = kept.mutable_data_ptr();
    strides = kept.strides().data();
  };
  replace(r.x.data, r.x.strides, r.dtype, true);
  replace(r.g.data, r.g.strides, r.dtype, true);
  replace(r.u.data, r.u.strides, r.dtype, true);
  for (int k = 0; k < r.operands; ++k) {
    Request::Operand& o = r.operand[k];
    if (o.data && !channel_form(geometry, kOperand + k).exact) replace(o.data, o.strides, o.dtype, true);
  }
  for (Request::Output& out : r.out) replace(out.data, out.strides, r.dtype, false);
  for (Request::OperandGradient& g : r.operand_gradient)
    if (g.data && g.numel == r.numel) replace(g.data, g.strides, g.dtype, false);
  return moved;
}

// Gradients that are to be summed in more ways than one pass can are computed as large as x, and summed after it.
struct Spread {
  at::Tensor full, to;  // `to`: of x's dimensions, 1 where it is summed
  std::vector<int64_t> summed;
};
std::vector<Spread> spread_gradients(const Operator& op, const Arguments& a, Work& work) {
  Request& r = work.request;
  std::vector<Spread> spread;
  for (int k = 0; k < op.operands; ++k) {
    const at::Tensor& to = work.narrow[k].defined() ? work.narrow[k] : work.out[full_outputs(r.mode) + k];
    if (!to.defined()) continue;
    Request::OperandGradient& gradient = r.operand_gradient[work.place[k]];
    if (gradient.numel == r.numel) continue;
    std::vector<int64_t> sizes = a.x.sizes().vec(), strides(gradient.strides, gradient.strides + r.ndim), summed;
    for (int d = 0; d < r.ndim; ++d) {
      if (strides[d] != 0 || sizes[d] == 1) continue;
      summed.push_back(d);
      sizes[d] = 1;
    }
    const at::Tensor full = at::empty_strided(a.x.sizes(), at::IntArrayRef(r.order, r.ndim),
                                              a.x.options().dtype(compute_type(a.x)));
    spread.push_back({full, to.as_strided(sizes, strides), summed});
    gradient = {full.mutable_data_ptr(), dtype_of(full.scalar_type()), work.row(full.strides().data(), r.ndim), r.numel};
  }
  return spread;
}

void run_cuda(const Operator& op, Mode mode, const Arguments& a, Work& work) {
  const c10::cuda::CUDAGuard guard(a.x.device());
  if (mode == Mode::coded || reads_codes(mode))  // only a graph for sizes that were not known comes here with more
    TORCH_CHECK_VALUE(a.x.numel() <= kShortElements, op.label(), ": training saves codes of at most ", kShortElements,
                      " elements on a GPU, but x has ", a.x.numel(), "; a graph that is compiled for that size saves x");
  if (reads_codes(mode)) {
    prepare_decoding(op, mode, a, work, /*cuda=*/true);
  } else {
    prepare(op, mode, a, work, /*cuda=*/true, !work.out.empty());
  }
  Request& r = work.request;
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
    const bool in_place = r.out[0].data && r.out[0].data == r.x.data;
    r.may_be_dense = r.numel >= kWorthACopy && !in_place;
    const Geometry geometry = geometry_of(op, a, work);
    const char* error = fused_act::run_cuda(work.line, r, geometry, cuda);
    std::vector<Moved> moved;
    if (error == kWantsDense) {
      r.may_be_dense = false;
      moved = lay_out_densely(a, work, geometry);
      error = fused_act::run_cuda(work.line, r, make_geometry(r), cuda);
    }
    std::vector<Spread> spread;
    if (error == kWantsDense && mode == Mode::coded_backward) {
      spread = spread_gradients(op, a, work);
      error = fused_act::run_cuda(work.line, r, make_geometry(r), cuda);
    }
    TORCH_CHECK(!error, op.label(), ": CUDA kernel launch failed: ", error);
    for (const Moved& result : moved) result.to.copy_(result.from);
    for (const Spread& s : spread) at::Tensor(s.to).copy_(s.full.sum(s.summed, /*keepdim=*/true));
    for (int k = 0; k < op.operands; ++k)
      if (work.narrow[k].defined()) work.out[full_outputs(mode) + k].copy_(work.narrow[k]);
  }
}
#endif

// The dispatcher kernels of a device, from what runs on it.
template <void (*run_on_device)(const Operator&, Mode, const Arguments&, Work&)>
void run(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_tensors(op, mode, a);
  Work work;
  run_on_device(op, mode, a, work);
  push(stack, count_arguments(op, mode), std::move(work.out));
}

template <void (*run_on_device)(const Operator&, Mode, const Arguments&, Work&)>
void run_in_place(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet,
                  torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_tensors(op, mode, a);
  check_overlap(op, a.x);
  Work work;
  work.out = {a.x};
  run_on_device(op, mode, a, work);
  push(stack, count_arguments(op, mode), std::move(work.out));
}

// Under functionalization a mutation is a new value that is copied to the old one.
void run_functionalized(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet,
                        torch::jit::Stack* stack) {
  const Arguments a = unpack(op, mode, *stack);
  check_overlap(op, a.x);
  a.x.copy_(call(op, mode, a)[0]);
  push(stack, count_arguments(op, mode), {a.x});
}

// Under the vmap of is_grads_batched and torch.autograd.functional PyTorch calls an operator for each element of the batch,
// but not one with tensors in a list. This does it for those.
void run_batched(const Operator& op, Mode mode, const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments all = unpack(op, mode, *stack);
  const auto each_tensor = [](Arguments& a, const auto& f) {
    f(a.g);
    f(a.x);
    f(a.u);
    for (int k = 0; k < kMaxOperands; ++k) {
      f(a.operand[k]);
      f(a.v[k]);
    }
  };
  const auto last = [](const at::Tensor& t) -> const at::BatchDim* {
    const at::BatchedTensorImpl* batched = t.defined() ? at::maybeGetBatchedImpl(t) : nullptr;
    return batched ? &batched->bdims().back() : nullptr;
  };
  int64_t level = -1, size = 0;
  each_tensor(all, [&](const at::Tensor& t) {
    if (const at::BatchDim* d = last(t); d && d->level() > level) {
      level = d->level();
      size = at::maybeGetBatchedImpl(t)->value().size(d->dim());
    }
  });
  // Element i of the innermost batch.
  const auto select = [&](at::Tensor& t, int64_t i) {
    const at::BatchDim* d = last(t);
    if (!d || d->level() != level) return;
    const at::BatchedTensorImpl* batched = at::maybeGetBatchedImpl(t);
    at::BatchDims rest;
    for (const at::BatchDim& other : batched->bdims().slice(0, batched->bdims().size() - 1))
      rest.emplace_back(other.level(), other.dim() - (other.dim() > d->dim()));
    at::Tensor element = batched->value().select(d->dim(), i);
    t = rest.empty() ? element : at::makeBatched(element, rest);
  };
  std::vector<std::vector<at::Tensor>> results(count_outputs(op, mode));
  for (int64_t i = 0; i < size; ++i) {
    Arguments one = all;
    each_tensor(one, [&](at::Tensor& t) { select(t, i); });
    const std::vector<at::Tensor> out = call(op, mode, one);
    for (size_t n = 0; n < out.size(); ++n)
      if (out[n].defined()) results[n].push_back(out[n]);
  }
  std::vector<at::Tensor> out;
  for (const std::vector<at::Tensor>& each : results)
    out.push_back(each.empty() ? at::Tensor() : at::addBatchDim(at::stack(each), level, 0));
  push(stack, count_arguments(op, mode), std::move(out));
}

}  // namespace

// ---- registration ---------------------------------------------------------------------------------------------

TORCH_LIBRARY(fused_act, library) {
  for (Operator& op : mutable_operators()) {
    for (int m = 0; m < kAllModes; ++m) {
      if (op.schemas[m].empty()) continue;
      const Mode mode = Mode(m);
      const std::string name = name_of(op, mode);
      library.def(torch::schema(op.schemas[m].c_str()), {at::Tag::pt2_compliant_tag});
      const auto implement = [&](c10::DispatchKey key, torch::CppFunction&& kernel) {
        library.impl(name.c_str(), torch::dispatch(key, std::move(kernel)));
      };
      implement(c10::DispatchKey::Meta, BoxedKernel<&run_meta>::make(op, mode));
      implement(c10::DispatchKey::CPU, BoxedKernel<&run<run_cpu>>::make(op, mode));
#if defined(FUSED_ACT_WITH_CUDA)
      implement(c10::DispatchKey::CUDA, BoxedKernel<&run<run_cuda>>::make(op, mode));
#endif
      implement(c10::DispatchKey::Autograd, autograd_kernel(op, mode));
      if (op.listed) implement(c10::DispatchKey::Batched, BoxedKernel<&run_batched>::make(op, mode));
      op.handles[m] = c10::Dispatcher::singleton().findSchemaOrThrow(("fused_act::" + name).c_str(), "");
    }
    if (op.in_place_schema.empty()) continue;
    const std::string name = op.name + "_";
    library.def(torch::schema(op.in_place_schema.c_str()), {at::Tag::pt2_compliant_tag});
    const auto implement = [&](c10::DispatchKey key, torch::CppFunction&& kernel) {
      library.impl(name.c_str(), torch::dispatch(key, std::move(kernel)));
    };
    implement(c10::DispatchKey::Meta, BoxedKernel<&run_meta_in_place>::make(op, Mode::forward));
    implement(c10::DispatchKey::CPU, BoxedKernel<&run_in_place<run_cpu>>::make(op, Mode::forward));
#if defined(FUSED_ACT_WITH_CUDA)
    implement(c10::DispatchKey::CUDA, BoxedKernel<&run_in_place<run_cuda>>::make(op, Mode::forward));
#endif
    implement(c10::DispatchKey::Autograd, in_place_autograd_kernel(op));
    implement(c10::DispatchKey::ADInplaceOrView, in_place_counted_kernel(op));
    implement(c10::DispatchKey::Functionalize, BoxedKernel<&run_functionalized>::make(op, Mode::forward));
    op.in_place_handle = c10::Dispatcher::singleton().findSchemaOrThrow(("fused_act::" + name).c_str(), "");
  }
}

}  // namespace fused_act

#if defined(TORCH_EXTENSION_NAME)
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;

namespace fused_act {
namespace {

// A call of an operator with everything but its tensors filled in, for `fuse`: the way through torch.ops costs as much as
// the operator. Which tensors may be given is decided in Python; those that were accepted are remembered here.
class Kernel {
 public:
  // `calls`: for each way to call, the operator's name and its arguments: {k} for tensor k, frozenset({k}) where no gradient
  // goes to it, or a list of such, or a value.
  explicit Kernel(const py::list& calls) {
    for (const py::handle& item : calls) {
      const auto [name, values] = item.cast<std::pair<std::string, py::list>>();
      const auto found = std::find_if(operators().begin(), operators().end(), [&](const Operator& op) { return op.name == name; });
      TORCH_CHECK_VALUE(found != operators().end(), "fused_act: there is no operator '", name, "'");
      Call& call = calls_.emplace_back(Call{*found->handles[int(Mode::forward)], {}});
      const auto& parameters = call.handle.schema().arguments();
      TORCH_CHECK_VALUE(values.size() == parameters.size(), found->label(), ": ", parameters.size(), " arguments are needed");
      for (size_t n = 0; n < values.size(); ++n) {
        const py::handle value = values[n];
        Argument& argument = call.arguments.emplace_back();
        argument.is_list = py::isinstance<py::list>(value) && parameters[n].name() == "operands";
        const auto add = [&](const py::handle& set) {
          argument.tensors.push_back({(*set.begin()).cast<int>(), py::isinstance<py::frozenset>(set)});
          most_ = std::max(most_, argument.tensors.back().place);
        };
        if (argument.is_list) {
          for (const py::handle& set : value) add(set);
        } else if (py::isinstance<py::anyset>(value)) {
          add(value);
        } else {
          argument.value = torch::jit::toIValue(value, parameters[n].type());
        }
      }
    }
  }

  // The result, or NotImplemented for tensors that are not remembered.
  py::object operator()(const py::args& given) const {
    const auto refuse = [] { return py::reinterpret_borrow<py::object>(Py_NotImplemented); };
    const int count = static_cast<int>(given.size());
    if (count <= most_ || at::impl::torch_function_mode_enabled()) return refuse();
    c10::SmallVector<const at::Tensor*, 8> tensors;
    for (int n = 0; n < count; ++n) {
      PyObject* object = PyTuple_GET_ITEM(given.ptr(), n);
      if (!THPVariable_CheckExact(object)) return refuse();
      tensors.push_back(&THPVariable_Unpack(object));
      if (!is_ordinary(*tensors.back())) return refuse();
    }
    const int autocast = autocasts();
    const auto same = [&](const Accepted& a) {
      if (a.autocast != autocast || static_cast<int>(a.tensors.size()) != count) return false;
      for (int n = 0; n < count; ++n)
        if (!a.tensors[n].is_like(*tensors[n])) return false;
      return true;
    };
    const auto found = std::find_if(accepted_.begin(), accepted_.end(), same);
    if (found == accepted_.end()) return refuse();
    const Call& call = calls_[found->call];
    torch::jit::Stack stack;
    stack.reserve(call.arguments.size());
    const auto tensor = [&](const Input& i) {
      const at::Tensor& t = *tensors[i.place];
      return i.detached && t.requires_grad() ? t.detach() : t;
    };
    for (const Argument& argument : call.arguments) {
      if (argument.is_list) {
        c10::List<at::Tensor> list;
        list.reserve(argument.tensors.size());
        for (const Input& i : argument.tensors) list.push_back(tensor(i));
        stack.emplace_back(std::move(list));
      } else if (!argument.tensors.empty()) {
        stack.emplace_back(tensor(argument.tensors[0]));
      } else {
        stack.push_back(argument.value);
      }
    }
    {
      py::gil_scoped_release release;
      call.handle.callBoxed(stack);
    }
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(stack[0]).toTensor()));
  }

  // From now on tensors of these shapes, dtypes and devices are given to that call.
  void remember(int call, const py::args& given) {
    Accepted accepted{call, autocasts(), {}};
    for (const py::handle& item : given) {
      if (!THPVariable_CheckExact(item.ptr())) return;
      const at::Tensor& t = THPVariable_Unpack(item.ptr());
      if (!is_ordinary(t)) return;
      accepted.tensors.push_back({t.sizes().vec(), t.scalar_type(), t.layout(), t.device()});
    }
    if (accepted_.size() == kMostAccepted) accepted_.erase(accepted_.begin());
    accepted_.push_back(std::move(accepted));
  }

 private:
  // Has it sizes that are numbers, and may it be saved for backward?
  static bool is_ordinary(const at::Tensor& t) {
    return !t.is_nested() && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
           !(t.is_inference() && at::GradMode::is_enabled());
  }
  static int autocasts() {
    return at::autocast::is_autocast_enabled(at::kCUDA) + 2 * at::autocast::is_autocast_enabled(at::kCPU);
  }

  struct Input {
    int place;
    bool detached;
  };
  struct Argument {
    bool is_list = false;
    std::vector<Input> tensors;
    c10::IValue value;
  };
  struct Call {
    c10::OperatorHandle handle;
    std::vector<Argument> arguments;
  };
  struct Likeness {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Layout layout;
    at::Device device;
    bool is_like(const at::Tensor& t) const {
      return dtype == t.scalar_type() && device == t.device() && t.sizes() == sizes && layout == t.layout();
    }
  };
  struct Accepted {
    int call, autocast;
    std::vector<Likeness> tensors;
  };
  static constexpr size_t kMostAccepted = 8;  // batch sizes, train and eval; a search of all takes less than the rest

  std::vector<Call> calls_;
  std::vector<Accepted> accepted_;
  int most_ = -1;  // place of the last tensor that a call reads
};

}  // namespace
}  // namespace fused_act

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fused_act;
  module.doc() = "The fused_act kernels as plain functions. Every function is also torch.ops.fused_act.<name>.";

  py::options options;
  options.disable_function_signatures();
  py::list table;
  for (const Operator& op : operators()) {
    py::list parameters;
    for (const Parameter& p : op.parameters) {
      static const char* kinds[] = {"operand", "scalar", "activation"};
      py::object value = py::none();
      if (p.default_value) value = py::float_(*p.default_value);
      if (p.kind == Parameter::activation && !p.default_text.empty())
        value = py::str(p.default_text.substr(1, p.default_text.size() - 2));
      parameters.append(py::make_tuple(p.name, kinds[p.kind], value, p.optional));
    }
    py::dict schemas;
    const auto define = [&](const std::string& name, const std::string& schema, const c10::OperatorHandle& handle,
                            const std::string& meaning) {
      schemas[name.c_str()] = schema;
      const std::string doc = schema + "\n\n" + meaning + " `" + op.expression + "`." +
                              (op.gradient.empty() ? "" : "\nGradient at kinks and ties: " + op.gradient + ".");
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
    };
    static const char* meanings[kModes] = {
        "Returns", "Returns the directional derivative (forward mode) of",
        "Returns the gradients, given grad_output, of",
        "Returns the gradients of the backward function, given cotangents of its results, of"};
    for (int m = 0; m < kModes; ++m) define(op.name + kModeSuffixes[m], op.schemas[m], *op.handles[m], meanings[m]);
    if (op.in_place_handle)
      define(op.name + "_", op.in_place_schema, *op.in_place_handle, "Overwrites " + op.input + " with");
    static const char* packings[] = {"", "halves", "pairs"};
    py::dict entry;
    entry["name"] = op.name;
    entry["input"] = op.input;
    entry["parameters"] = py::tuple(parameters);
    entry["dim"] = op.dim;
    entry["packing"] = packings[int(op.packing)];
    entry["expression"] = op.expression;
    entry["gradient"] = op.gradient;
    entry["origin"] = op.origin;
    entry["is_activation"] = op.is_activation();
    py::list names;  // of its steps, where they are the same in every call
    for (int n = 0; op.fixed && n < op.program.length; ++n)
      names.append(kKnownSteps[int(op.program.instruction[n].code)].name);
    entry["steps"] = py::tuple(names);
    entry["listed"] = op.listed;
    entry["schemas"] = schemas;
    table.append(entry);
  }
  module.attr("_operators") = py::tuple(table);
  // What a program of a listed operator is made of, in the order of the codes.
  py::list steps;
  for (const KnownStep& step : kKnownSteps) steps.append(py::make_tuple(step.name, step.parameters));
  module.attr("_steps") = py::tuple(steps);
  py::dict limits;
  limits["version"] = encoding::version;
  limits["save"] = encoding::save;
  limits["load"] = encoding::load;
  limits["none"] = encoding::none;
  limits["operands"] = kMaxOperands;
  limits["slots"] = kMaxSlots;
  limits["steps"] = kMaxSteps;
  limits["scalars"] = kMaxScalars;
  module.attr("_encoding") = limits;
  // Two functions, since a call of an object that is none takes as long again.
  module.def("_kernel", [](const py::list& calls) {
    const auto kernel = std::make_shared<Kernel>(calls);
    return py::make_tuple(py::cpp_function([kernel](const py::args& given) { return (*kernel)(given); }),
                          py::cpp_function([kernel](int call, const py::args& given) { kernel->remember(call, given); }));
  });
  module.attr("_coded_from") = kWorthCodes;
  // What training saves of a program: bits an element, or the inputs that backward reads: 0 is x, 1 + k operand k.
  module.def("_saved", [](std::vector<int64_t> program, std::vector<double> scalars, int operands) {
    const auto listed = std::find_if(operators().begin(), operators().end(), [](const Operator& op) { return op.listed; });
    Arguments a;
    a.program = std::move(program);
    a.program_scalars = std::move(scalars);
    for (int k = 0; k < operands; ++k) a.operand[k] = at::empty({0});
    const Dependencies d = dependencies_of(steps_of(*listed, a).program, Mode::backward);
    uint32_t read = d.full[0], asked = 1;
    for (int k = 0; k < operands; ++k) {
      read |= d.operand[k];
      asked |= 2u << k;
    }
    std::vector<int> inputs;
    for (int n = 0; n <= operands; ++n)
      if (read & (n ? input::operand(n - 1) : input::x)) inputs.push_back(n);
    const Coding& coding = coding_of(*listed, a);
    const bool coded = !inputs.empty() && (asked & ~coding.known()) == 0;
    return py::make_tuple(coded ? coding.cpu.bits() : 0, inputs);
  });
  module.def("cpu_capability", [] { return cpu_capability().name; },
             "cpu_capability() -> str\n\nThe SIMD level of the CPU kernels in use: AVX512, AVX2 or DEFAULT.");
#if defined(FUSED_ACT_WITH_CUDA)
  module.attr("_with_cuda") = true;
#else
  module.attr("_with_cuda") = false;
#endif
}
#endif

// THE list. An operator is one line: its name, its parameters after x (in schema syntax; "int dim=1" is added where
// there is a tensor operand), the PyTorch expression that it equals (executable: tests evaluate it), and its steps.
// Kernels, gradients, schemas, Python functions, modules, tests and documentation follow from the line.
#pragma once

#include "steps.h"

// clang-format off
#define FUSED_ACT_OPERATORS(OPERATOR)                                                                                  \
  OPERATOR(relu_hardswish, "", "r = relu(x); r * clamp((r + 3) / 6, 0, 1)", Relu, HardswishWritten)                    \
  OPERATOR(hardsigmoid, "", "F.hardsigmoid(x)", Hardsigmoid)                                                           \
  OPERATOR(relu_bias, "Tensor bias", "relu(x) + bias", Relu, Add)                                                      \
  OPERATOR(div_leaky_relu, "float divisor, float negative_slope=0.01", "F.leaky_relu(x / divisor, negative_slope)", Div, LeakyRelu) \
  OPERATOR(min_bias_scale, "float value, Tensor bias, float scale", "(torch.min(x, torch.tensor(value, dtype=x.dtype, device=x.device)) + bias) * scale", Min, Add, Mul)
// clang-format on

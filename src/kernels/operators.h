// THE list. An operator is one line: its name, its parameters in schema syntax, the PyTorch expression that it equals
// (executable: tests evaluate it), where it comes from and what it replaces, and its steps. Kernels, gradients, schemas,
// Python functions, modules, tests and documentation follow from the line.
//
// Steps take the parameters in order. What stands in a step's place and is none (pattern.h) says how the line is meant:
// an operator with one of those runs as a Program.
#pragma once

#include "pattern.h"

// clang-format off
#define FUSED_ACT_OPERATORS(OPERATOR)                                                                                  \
  OPERATOR(relu, "Tensor x",                                                                                           \
    "F.relu(x)",                                                                                                       \
    "torch.nn.functional.relu",                                                                                        \
    Relu)                                                                                                              \
  OPERATOR(relu6, "Tensor x",                                                                                          \
    "F.relu6(x)",                                                                                                      \
    "torch.nn.functional.relu6; MobileNet",                                                                            \
    Relu6)                                                                                                             \
  OPERATOR(leaky_relu, "Tensor x, float negative_slope=0.01",                                                          \
    "F.leaky_relu(x, negative_slope)",                                                                                 \
    "torch.nn.functional.leaky_relu; YOLO, GANs",                                                                      \
    LeakyRelu)                                                                                                         \
  OPERATOR(hardtanh, "Tensor x, float min_val=-1, float max_val=1",                                                    \
    "F.hardtanh(x, min_val, max_val)",                                                                                 \
    "torch.nn.functional.hardtanh",                                                                                    \
    Hardtanh)                                                                                                          \
  OPERATOR(clamp, "Tensor x, float? min=None, float? max=None",                                                        \
    "torch.clamp(x, min, max)",                                                                                        \
    "torch.clamp with numbers",                                                                                        \
    Clamp)                                                                                                             \
  OPERATOR(elu, "Tensor x, float alpha=1",                                                                             \
    "F.elu(x, alpha)",                                                                                                 \
    "torch.nn.functional.elu",                                                                                         \
    Elu)                                                                                                               \
  OPERATOR(celu, "Tensor x, float alpha=1",                                                                            \
    "F.celu(x, alpha)",                                                                                                \
    "torch.nn.functional.celu",                                                                                        \
    Celu)                                                                                                              \
  OPERATOR(selu, "Tensor x",                                                                                           \
    "F.selu(x)",                                                                                                       \
    "torch.nn.functional.selu",                                                                                        \
    Selu)                                                                                                              \
  OPERATOR(sigmoid, "Tensor x",                                                                                        \
    "torch.sigmoid(x)",                                                                                                \
    "torch.sigmoid",                                                                                                   \
    Sigmoid)                                                                                                           \
  OPERATOR(logsigmoid, "Tensor x",                                                                                     \
    "F.logsigmoid(x)",                                                                                                 \
    "torch.nn.functional.logsigmoid",                                                                                  \
    Logsigmoid)                                                                                                        \
  OPERATOR(tanh, "Tensor x",                                                                                           \
    "torch.tanh(x)",                                                                                                   \
    "torch.tanh",                                                                                                      \
    Tanh)                                                                                                              \
  OPERATOR(silu, "Tensor x",                                                                                           \
    "F.silu(x)",                                                                                                       \
    "torch.nn.functional.silu; Swish in EfficientNet and YOLO",                                                        \
    Silu)                                                                                                              \
  OPERATOR(gelu, "Tensor x",                                                                                           \
    "F.gelu(x)",                                                                                                       \
    "torch.nn.functional.gelu; BERT, ViT, ConvNeXt",                                                                   \
    Gelu)                                                                                                              \
  OPERATOR(gelu_tanh, "Tensor x",                                                                                      \
    "F.gelu(x, approximate='tanh')",                                                                                   \
    "torch.nn.functional.gelu(approximate='tanh'); GPT-2, Gemma",                                                      \
    GeluTanh)                                                                                                          \
  OPERATOR(quick_gelu, "Tensor x",                                                                                     \
    "x * torch.sigmoid(1.702 * x)",                                                                                    \
    "QuickGELU of CLIP",                                                                                               \
    QuickGelu)                                                                                                         \
  OPERATOR(mish, "Tensor x",                                                                                           \
    "F.mish(x)",                                                                                                       \
    "torch.nn.functional.mish; YOLOv4",                                                                                \
    Mish)                                                                                                              \
  OPERATOR(softplus, "Tensor x, float beta=1, float threshold=20",                                                     \
    "F.softplus(x, beta, threshold)",                                                                                  \
    "torch.nn.functional.softplus",                                                                                    \
    Softplus)                                                                                                          \
  OPERATOR(softsign, "Tensor x",                                                                                       \
    "F.softsign(x)",                                                                                                   \
    "torch.nn.functional.softsign",                                                                                    \
    Softsign)                                                                                                          \
  OPERATOR(hardsigmoid, "Tensor x",                                                                                    \
    "F.hardsigmoid(x)",                                                                                                \
    "torch.nn.functional.hardsigmoid; MobileNetV3",                                                                    \
    Hardsigmoid)                                                                                                       \
  OPERATOR(hardswish, "Tensor x",                                                                                      \
    "F.hardswish(x)",                                                                                                  \
    "torch.nn.functional.hardswish; MobileNetV3",                                                                      \
    Hardswish)                                                                                                         \
  OPERATOR(relu_squared, "Tensor x",                                                                                   \
    "torch.square(relu(x))",                                                                                           \
    "squared ReLU of Primer and Nemotron; timm, transformers",                                                         \
    Relu, Square)                                                                                                      \
  OPERATOR(tanhshrink, "Tensor x",                                                                                     \
    "F.tanhshrink(x)",                                                                                                 \
    "torch.nn.functional.tanhshrink",                                                                                  \
    Tanhshrink)                                                                                                        \
  OPERATOR(hardshrink, "Tensor x, float lambd=0.5",                                                                    \
    "F.hardshrink(x, lambd)",                                                                                          \
    "torch.nn.functional.hardshrink",                                                                                  \
    Hardshrink)                                                                                                        \
  OPERATOR(softshrink, "Tensor x, float lambd=0.5",                                                                    \
    "F.softshrink(x, lambd)",                                                                                          \
    "torch.nn.functional.softshrink",                                                                                  \
    Softshrink)                                                                                                        \
  OPERATOR(threshold, "Tensor x, float threshold, float value",                                                        \
    "F.threshold(x, threshold, value)",                                                                                \
    "torch.nn.functional.threshold",                                                                                   \
    Threshold)                                                                                                         \
  OPERATOR(hard_mish, "Tensor x",                                                                                      \
    "x / 2 * clamp(x + 2, 0, 2)",                                                                                      \
    "HardMish of timm",                                                                                                \
    HardMish)                                                                                                          \
  OPERATOR(fatrelu, "Tensor x, float threshold",                                                                       \
    "F.threshold(x, threshold, 0)",                                                                                    \
    "FATReLU of sparse MLPs; vLLM",                                                                                    \
    FatRelu)                                                                                                           \
  OPERATOR(relu_hardswish, "Tensor x",                                                                                 \
    "r = relu(x); r * clamp((r + 3) / 6, 0, 1)",                                                                       \
    "KernelBench: Conv2d, ReLU, HardSwish",                                                                            \
    Relu, HardswishWritten)                                                                                            \
  OPERATOR(mish_mish, "Tensor x",                                                                                      \
    "F.mish(F.mish(x))",                                                                                               \
    "KernelBench: Conv2d, Mish, Mish",                                                                                 \
    Mish, Mish)                                                                                                        \
  OPERATOR(relu_leaky_relu_gelu_sigmoid, "Tensor x, float negative_slope=0.01",                                        \
    "torch.sigmoid(F.gelu(F.leaky_relu(relu(x), negative_slope)))",                                                    \
    "KernelBench: Conv3d, ReLU, LeakyReLU, GELU, Sigmoid",                                                             \
    Relu, LeakyRelu, Gelu, Sigmoid)                                                                                    \
  OPERATOR(relu_bias, "Tensor x, Tensor bias, int dim=1",                                                              \
    "relu(x) + bias",                                                                                                  \
    "KernelBench: Conv2d, ReLU, bias",                                                                                 \
    Relu, Add)                                                                                                         \
  OPERATOR(div_leaky_relu, "Tensor x, float divisor, float negative_slope=0.01",                                       \
    "F.leaky_relu(x / divisor, negative_slope)",                                                                       \
    "KernelBench: Conv2d, division, LeakyReLU",                                                                        \
    Div, LeakyRelu)                                                                                                    \
  OPERATOR(min_bias_scale, "Tensor x, float value, Tensor bias, float scale, int dim=1",                               \
    "(torch.min(x, torch.tensor(value, dtype=x.dtype, device=x.device)) + bias) * scale",                              \
    "KernelBench: Conv2d, minimum, bias, scale",                                                                       \
    Min, Add, Mul)                                                                                                     \
  OPERATOR(bias_act, "Tensor x, Tensor? bias=None, str act=\"linear\", float? alpha=None, float? gain=None, float? clamp=None, int dim=1", \
    "torch.clamp(activation(act, x + bias, alpha) * gain, -clamp, clamp)",                                             \
    "bias_act of StyleGAN2 and 3, which serves leaky_relu with alpha=0.2 and gain=sqrt(2); linear and convolution epilogues", \
    Add, Activation, Mul, AbsClamp)                                                                                    \
  OPERATOR(scale_shift_act, "Tensor x, Tensor scale, Tensor shift, str act, float? alpha=None, int dim=1",             \
    "activation(act, x * scale + shift, alpha)",                                                                       \
    "a frozen BatchNorm and its activation; FrozenBatchNorm2d of torchvision, BatchNormAct2d of timm",                 \
    MulOperand, Add, Activation)                                                                                       \
  OPERATOR(add_act, "Tensor x, Tensor residual, str act, Tensor? bias=None, float? alpha=None, int dim=1",             \
    "activation(act, x + bias + residual, alpha)",                                                                     \
    "the end of a residual block: ResNet",                                                                             \
    Given<Add, 3>, Given<Add, 1>, Given<Activation, 2, 4>)                                                             \
  OPERATOR(act_add, "Tensor x, Tensor residual, str act, Tensor? bias=None, float? alpha=None, int dim=1",             \
    "activation(act, x + bias, alpha) + residual",                                                                     \
    "a residual added after the activation: Darknet, YOLO",                                                            \
    Given<Add, 3>, Given<Activation, 2, 4>, Given<Add, 1>)                                                             \
  OPERATOR(gated, "Tensor gate, Tensor up, str act, Tensor? gate_bias=None, Tensor? up_bias=None, float? alpha=None, int dim=-1", \
    "activation(act, gate + gate_bias, alpha) * (up + up_bias)",                                                       \
    "gated linear units on two tensors: Llama, Gemma; GEGLU of diffusion models",                                      \
    Given<Add, 3>, Given<Activation, 2, 5>, Save<0>, Given<Load, 1>, Given<Add, 4>, Saved<MulOperand, 0>)              \
  OPERATOR(silu_and_mul, "Tensor x",                                                                                   \
    "gate, up = x.chunk(2, -1); F.silu(gate) * up",                                                                    \
    "vLLM SiluAndMul; Llama, Mistral, Qwen",                                                                           \
    Halves, Silu, MulOperand)                                                                                          \
  OPERATOR(gelu_and_mul, "Tensor x",                                                                                   \
    "gate, up = x.chunk(2, -1); F.gelu(gate) * up",                                                                    \
    "vLLM GeluAndMul; GEGLU",                                                                                          \
    Halves, Gelu, MulOperand)                                                                                          \
  OPERATOR(gelu_tanh_and_mul, "Tensor x",                                                                              \
    "gate, up = x.chunk(2, -1); F.gelu(gate, approximate='tanh') * up",                                                \
    "vLLM GeluAndMul(approximate='tanh'); Gemma",                                                                      \
    Halves, GeluTanh, MulOperand)                                                                                      \
  OPERATOR(relu_and_mul, "Tensor x",                                                                                   \
    "gate, up = x.chunk(2, -1); F.relu(gate) * up",                                                                    \
    "ReGLU",                                                                                                           \
    Halves, Relu, MulOperand)                                                                                          \
  OPERATOR(relu_squared_and_mul, "Tensor x",                                                                           \
    "gate, up = x.chunk(2, -1); torch.square(F.relu(gate)) * up",                                                      \
    "squared ReLU, gated",                                                                                             \
    Halves, Relu, Square, MulOperand)                                                                                  \
  OPERATOR(sigmoid_and_mul, "Tensor x",                                                                                \
    "gate, up = x.chunk(2, -1); torch.sigmoid(gate) * up",                                                             \
    "GLU, with the gate in the first half (F.glu has it in the second)",                                               \
    Halves, Sigmoid, MulOperand)                                                                                       \
  OPERATOR(tanh_and_mul, "Tensor x",                                                                                   \
    "gate, up = x.chunk(2, -1); torch.tanh(gate) * up",                                                                \
    "gated tanh units",                                                                                                \
    Halves, Tanh, MulOperand)                                                                                          \
  OPERATOR(fatrelu_and_mul, "Tensor x, float threshold",                                                               \
    "gate, up = x.chunk(2, -1); F.threshold(gate, threshold, 0) * up",                                                 \
    "vLLM FatreluAndMul",                                                                                              \
    Halves, FatRelu, MulOperand)                                                                                       \
  OPERATOR(swiglu_oai, "Tensor x, float alpha=1.702, float limit=7",                                                   \
    "gate, up = clamp(x[..., ::2], max=limit), clamp(x[..., 1::2], -limit, limit); gate * torch.sigmoid(alpha * gate) * (up + 1)", \
    "gpt-oss; vLLM SwigluOAIAndMul",                                                                                   \
    Pairs, Given<MinScalar, 2>, Given<SiluScaled, 1>, Save<0>, Load, Given<AbsClamp, 2>, AddOne, Saved<MulOperand, 0>) \
  OPERATOR(chain, "Tensor x, Tensor[] operands, int[] program, float[] scalars",                                       \
    "the steps of program, one after the other",                                                                       \
    "any chain of steps that is put together at run time",                                                             \
    Listed)
// clang-format on

namespace fused_act::ops {
#define FUSED_ACT_DEFINE(NAME, PARAMETERS, EXPRESSION, ORIGIN, ...) \
  using NAME = Pattern<__VA_ARGS__>;
FUSED_ACT_OPERATORS(FUSED_ACT_DEFINE)
#undef FUSED_ACT_DEFINE
}  // namespace fused_act::ops

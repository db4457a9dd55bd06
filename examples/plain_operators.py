"""The operators without modules: the table, ``torch.ops.fused_act``, and the bare functions of the library.

Shows what ``fused_act.ops()`` tells about an operator, and the ways to call one. ``torch.ops.fused_act`` goes through
PyTorch's dispatcher (autograd, compile, transforms); ``fused_act._C`` holds the kernels as plain functions.
"""

import torch

import fused_act


def main() -> None:
    for operator in fused_act.ops():
        print(f"{operator.schema}\n    = {operator.expression}")

    torch.manual_seed(0)
    # Any strides and the four floating-point types; the bias may have another type than x.
    x = torch.randn(2, 8, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    bias = torch.randn(8)
    y = torch.ops.fused_act.relu_bias(x, bias)
    print(f"\nrelu_bias: {y.dtype}, channels_last: {y.is_contiguous(memory_format=torch.channels_last)}")
    exact = torch.relu(x.double()) + bias.double().view(-1, 1, 1)
    error = float(((y.double() - exact) / exact).abs().max())
    print(f"largest relative error, rounded once: {error:.4f}; bfloat16 allows {torch.finfo(x.dtype).eps / 2:.4f}")
    assert error <= torch.finfo(x.dtype).eps / 2 * 1.01

    # The same kernels without autograd. For an operator with operands, the last argument of the backward says which
    # gradients are wanted: of x, then of each operand; what is not wanted is None.
    assert torch.equal(fused_act._C.relu_bias(x, bias), y)
    grad_x, grad_bias = fused_act._C.relu_bias_backward(torch.ones_like(y), x, bias, 1, [False, True])
    print(f"gradient of the bias alone: {grad_bias.tolist()}, of x: {grad_x}")

    # The bias along another dimension: the last one of a sequence of vectors.
    tokens = torch.randn(2, 5, 8)
    assert torch.equal(torch.ops.fused_act.relu_bias(tokens, bias, dim=-1), torch.relu(tokens) + bias)
    print("bias along dim=-1: equal to relu(x) + bias")


if __name__ == "__main__":
    main()

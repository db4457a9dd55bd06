"""Derivatives: the bias gradient, both orders, and torch.func.

Shows that a fused operator has the gradients of its written-out expression: for the input and for the bias, through
``backward``, ``torch.func.grad``, per-sample gradients with ``vmap``, forward mode (``jvp``) and ``hessian``.
Prints the largest difference to eager PyTorch and fails if one is not rounding.
"""

import torch
from torch.func import grad, hessian, jvp, vmap

from fused_act.functional import min_bias_scale


def fused(x, bias):
    return min_bias_scale(x, 0.5, bias, 2.0)


def eager(x, bias):
    return (torch.min(x, torch.tensor(0.5)) + bias.reshape((1, -1) + (1,) * (x.dim() - 2))) * 2.0


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)

    def loss(function):
        return lambda x, bias: function(x, bias).square().mean()

    def backward(function):
        leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
        loss(function)(*leaves).backward()
        return [leaf.grad for leaf in leaves]

    def per_sample(function):
        one = grad(lambda sample, bias: loss(function)(sample[None], bias), argnums=1)
        return [vmap(one, in_dims=(0, None))(x, bias)]

    transforms = {
        "backward (x and bias)": backward,
        "torch.func.grad": lambda function: grad(loss(function), argnums=(0, 1))(x, bias),
        "per-sample bias gradients": per_sample,
        "jvp": lambda function: jvp(function, (x, bias), (torch.ones_like(x), torch.ones_like(bias))),
        "hessian of the bias": lambda function: [hessian(loss(function), argnums=1)(x, bias)],
    }
    for name, transform in transforms.items():
        difference = max(float((a - b).abs().max()) for a, b in zip(transform(fused), transform(eager), strict=True))
        print(f"{name:28} differs from eager by at most {difference:.1e}")
        assert difference < 1e-14


if __name__ == "__main__":
    main()

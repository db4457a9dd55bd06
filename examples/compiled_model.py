"""A model with fused activations, compiled with torch.compile.

Shows ``fused_act.nn`` modules in a model, and that ``torch.compile`` takes them in as single operators: the whole
model is one graph (``fullgraph=True``), and a change of the batch size costs no graph of its own.
``--backend`` chooses the compiler; PyTorch's default, inductor, needs a C++ compiler on a CPU.
"""

import argparse

import torch

import fused_act


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, bias=False),
        fused_act.nn.ReLUBias(16),
        torch.nn.Conv2d(16, 32, 3),
        fused_act.nn.ReLUHardswish(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 10),
    ).to(args.device)
    print(model)

    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=args.backend)
    for batch in (2, 3, 5, 8):
        x = torch.randn(batch, 3, 20, 20, device=args.device)
        difference = float((compiled(x) - model(x)).abs().max().detach())
        print(f"batch {batch}: compiled and eager model differ by at most {difference:.1e}")
        assert difference < 1e-3  # on a GPU the convolutions may use TF32
    print(f"graphs compiled: {graphs['unique_graphs']}")
    assert graphs["unique_graphs"] == 1

    loss = compiled(x).square().mean()
    loss.backward()
    norms = (f"{name} {parameter.grad.norm():.3f}" for name, parameter in model.named_parameters())
    print("gradient norms:", ", ".join(norms))


if __name__ == "__main__":
    main()

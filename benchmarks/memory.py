"""Peak memory and time of a training step of whole networks: eager PyTorch, `fused_act.fuse`, torch.compile.

    python benchmarks/memory.py --dtype float32 --batch 64

Peak memory is what a step had allocated at its worst moment on top of parameters, gradients and data. `saved` is what
autograd keeps between forward and backward, in the result of forward.
"""

import argparse
import statistics
import time

import torch
from torch import nn

import fused_act
from fused_act.demo import DTYPES, device_name, peak_memory, synchronize


def discriminator() -> nn.Module:
    """That of DCGAN (Radford et al., 2015) without BatchNorm, as WGAN-GP has it."""
    layers, channels = [], 3
    for width in (64, 128, 256, 512):
        layers += [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        channels = width
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4), nn.Flatten())


class Block(nn.Module):
    """Convolution, relu, division, leaky_relu, bias, clamp: the operations of KernelBench's level 2."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 2, 1)
        self.bias = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.leaky_relu(torch.relu(self.conv(x)) / 1.5, 0.1)
        return torch.clamp(x + self.bias, -2.0, 2.0) * 0.5


def chains() -> nn.Module:
    return nn.Sequential(
        Block(3, 64), Block(64, 128), Block(128, 256), Block(256, 512), nn.Conv2d(512, 1, 4), nn.Flatten()
    )


def resnet() -> nn.Module:
    import torchvision

    return torchvision.models.resnet50()


NETWORKS = {"dcgan discriminator": (discriminator, 64), "chains": (chains, 64), "resnet50": (resnet, 224)}


def measure(name: str, args: argparse.Namespace) -> None:
    make, size = NETWORKS[name]
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    torch.manual_seed(0)
    model = make().to(device, dtype).train()
    x = torch.randn(args.batch, 3, size, size, device=device, dtype=dtype)
    models = {"eager": model, "fused": fused_act.fuse(model)}
    if args.compile:
        models["torch.compile"] = torch.compile(model)
    for who, network in models.items():

        def step() -> None:
            network(x).float().square().mean().backward()

        for _ in range(3):
            step()
        times = []
        for _ in range(args.repeats):
            synchronize(device)
            begin = time.perf_counter()
            step()
            synchronize(device)
            times.append((time.perf_counter() - begin) * 1e3)
        kept: dict[int, int] = {}

        def keep(t: torch.Tensor) -> torch.Tensor:
            storage = t.untyped_storage()
            if not any(storage.data_ptr() == p.untyped_storage().data_ptr() for p in network.parameters()):
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = network(x)
        del loss
        print(
            f"{name:20} {args.dtype:9} {who:14} {statistics.median(times):8.2f} ms   saved "
            f"{sum(kept.values()) / 2**20:8.1f} MiB   peak {peak_memory(step, device) / 2**20:8.1f} MiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    args = parser.parse_args()
    print(device_name(torch.device(args.device)), "torch", torch.__version__)
    for name in args.networks:
        measure(name, args)


if __name__ == "__main__":
    main()

"""Compares the torch that is here with the one that the library was built for, before the library is loaded.

Loaded with another minor version of torch, the library stops with a missing symbol or, worse, runs on structs of
another layout.
"""

from . import _build_info


def check_torch() -> None:
    """Raises ImportError where this build of fused_act cannot run with the installed torch."""
    built = _describe(_build_info.torch, _build_info.cuda)
    torch_minor = ".".join(_build_info.torch.split(".")[:2])
    install = f'pip install "torch=={torch_minor}.*"'
    try:
        # torch.version and not the package's metadata: those do not say which CUDA a wheel from PyPI is built with.
        from torch.version import __version__ as torch_version
        from torch.version import cuda
    except ModuleNotFoundError as error:
        if error.name != "torch":  # a torch that lacks something of its own
            raise
        raise ImportError(
            f"fused_act {_build_info.version} is built for {built}, and there is no torch here. Run: {install}"
        ) from error

    found = _describe(torch_version, cuda)
    message = f"fused_act {_build_info.version} is built for {built}, but finds {found}."
    if torch_version.split(".")[:2] != torch_minor.split("."):
        raise ImportError(f"{message} Run: {install} (or install the fused_act wheel for {found})")
    # A build without CUDA runs with any torch: its operators are for the CPU alone.
    if _build_info.cuda is not None and (cuda is None or _major(cuda) != _major(_build_info.cuda)):
        raise ImportError(
            f"{message} In the source folder of fused_act, run: "
            "pip install --no-build-isolation --force-reinstall --no-deps ."
        )


def _describe(torch_version: str, cuda: str | None) -> str:
    return f"torch {torch_version} with {'CUDA ' + cuda if cuda else 'no CUDA'}"


def _major(version: str) -> str:
    return version.split(".")[0]

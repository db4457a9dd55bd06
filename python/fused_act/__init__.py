"""fused_act: chains of pointwise operations in one kernel, forward and backward, with no compiler at run time.

    import torch, fused_act
    y = torch.ops.fused_act.relu_bias(x, bias)      # or fused_act.functional.relu_bias, fused_act.nn.ReLUBias

:func:`ops` lists the operators with the expression that each one equals.
"""

from typing import TYPE_CHECKING

from ._check import check_torch as _check_torch

_check_torch()  # before the library is loaded: with another torch it would fail with an undefined symbol

import torch  # noqa: E402,F401  (the library's symbols resolve against it)

from . import _C, _vmap, functional, nn  # noqa: E402,F401
from ._build_info import version as __version__  # noqa: E402
from ._table import Operator, Parameter, ops  # noqa: E402

if TYPE_CHECKING:
    from ._fuse import Report, explain, fuse

_vmap.register()


def __getattr__(name: str):
    # When it is asked for: torch.fx, with which functions are traced, takes a third of the time of this import.
    if name not in ("Report", "explain", "fuse"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _fuse

    value = globals()[name] = getattr(_fuse, name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})


__all__ = ["Operator", "Parameter", "Report", "__version__", "explain", "functional", "fuse", "nn", "ops"]

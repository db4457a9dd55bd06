"""setuptools' build backend, told which torch to build with.

The library fits one minor version of torch. Where pip builds in an environment of its own, a plain requirement on torch
brings the newest one, and installing the wheel would then replace the torch that the user has. So ask for that one.
"""

import sysconfig
from importlib.metadata import distributions

from setuptools.build_meta import *  # noqa: F403

NO_TORCH_YET = "torch>=2.11,<2.16"  # the versions that the wheels are tested with


def get_requires_for_build_wheel(config_settings=None):
    # pip hides the user's packages from this process, but runs it in the user's interpreter, which knows their folder.
    installed = distributions(name="torch", path=[sysconfig.get_path("purelib")])
    return [next((f"torch=={torch.version}" for torch in installed), NO_TORCH_YET)]


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings=None):
    return []

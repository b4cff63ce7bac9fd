"""The definitions in plain PyTorch of all arithmetic that decides which tokens are accepted or drawn, in one module."""

from mmspec.kernels.reference_noise import *  # noqa: F403
from mmspec.kernels.reference_rules import *  # noqa: F403
from mmspec.kernels.reference_trees import *  # noqa: F403

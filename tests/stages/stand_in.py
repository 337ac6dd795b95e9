"""A GPU's rounding on a CPU, for the tests of make gpu: GPU_TESTS_ON=cpu."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import runs

ROUNDING = 5e-7  # relative, of float32: sums in another order, as a GPU's kernels take them
NOISY = (F.linear, F.scaled_dot_product_attention)


class StandIn(str):
    """The name of a device whose runs round like a GPU; "cpu" by itself does not."""


class Rounding(TorchFunctionMode):
    """Changes the results of NOISY, a function of the result itself: the same command gives the same bits."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function in NOISY and result.dtype == torch.float32:
            result = result * (1 + ROUNDING * torch.sin(1e4 * result.detach()))
        return result


def run(command: str, *arguments, device: str | None = None, **options):
    """runs.run: as on a GPU if the device is the stand-in, or the arguments have it after --device."""
    with Rounding() if any(isinstance(each, StandIn) for each in (device, *arguments)) else nullcontext():
        return runs.run(command, *arguments, **options)

"""Devices by the names of --plan and of CUDA."""

import pytest

from common.cli import UserError
from common.training import hardware


@pytest.mark.parametrize("text", ["A100-80GB", "0xA100-80GB", "8xA100", "8 x A100-80GB", "2x2x8xA100-80GB",
                                  "0x8xA100-80GB", "x8xA100-80GB", ""])
def test_hardware_that_is_not_known(text):
    with pytest.raises(UserError, match="expected COUNTxDEVICE or NODESxCOUNTxDEVICE, a device of A100-40GB"):
        hardware.parse_hardware(text)


def test_peak_of_a_device_by_the_name_cuda_gives():
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert hardware.peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert hardware.peak_flops("NVIDIA H100 PCIe") is None and hardware.peak_flops("Tesla K80") is None

"""Devices by the names of --plan and of CUDA."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.run.errors import UserError
from common.training import hardware
from common.training.sharding import Ranks


@pytest.mark.parametrize("text", ["A100-80GB", "0xA100-80GB", "8xA100", "2x2x8xA100-80GB", "CPU",
                                  "8x400:64:200", "8x400:64:200:25:1", "400:64:200:25"])
def test_hardware_that_is_not_known(text):
    with pytest.raises(UserError, match="expected COUNTxDEVICE or NODESxCOUNTxDEVICE, a device of A100-40GB"):
        hardware.parse_hardware(text)


def test_a_device_by_its_own_numbers():
    """Dense bf16 TFLOP/s, GiB, and GB/s within a node and between nodes."""
    expected = hardware.Cluster(8, hardware.Hardware(400e12, 64, 200e9, 25.5e9), 2)
    assert hardware.parse_hardware("2x8x400:64:200:25.5") == expected
    assert hardware.on_gpus("8x400:64:200:25", None)


@pytest.mark.parametrize(("place", "number"), [(0, "0"), (1, "nan"), (2, "A100"), (3, "1e7")])
def test_numbers_that_no_device_has(number, place):
    numbers = ["400", "64", "200", "25"]
    numbers[place] = number
    with pytest.raises(UserError, match=f"expected numbers from 0.001 to 10\\^6, found {number}"):
        hardware.parse_hardware("8x" + ":".join(numbers))


def test_a_plan_is_of_gpus_unless_it_names_the_cpu():
    here, gpu = (Ranks(0, 1, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert hardware.on_gpus("8xA100-80GB", here) and not hardware.on_gpus("1xCPU", gpu)
    assert hardware.on_gpus(None, gpu) and not hardware.on_gpus(None, here)


def test_peak_of_a_device_by_the_name_cuda_gives():
    assert hardware.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert hardware.peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert hardware.peak_flops("NVIDIA H100 PCIe") is None and hardware.peak_flops("Tesla K80") is None


def test_the_cluster_of_a_run_has_the_memory_of_its_gpu(monkeypatch):
    """Rank 13 of 16 on two nodes, in one of which devices have a GiB less."""
    sums = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, kind: sums.append(kind) or tensor.sub_(1))
    memory = {torch.device("cuda", 5): 80 * 2**30}
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=memory[device]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    cluster = hardware.cluster_of(Ranks(13, 16, torch.device("cuda", 5)))
    assert (cluster.ranks_per_node, cluster.nodes, cluster.device.memory) == (8, 2, 79)
    assert math.isnan(cluster.device.flops_per_s)  # a time from it is none
    cluster = hardware.cluster_of(Ranks(13, 16, torch.device("cpu")))
    assert cluster.device.memory == pytest.approx(hardware.machine_memory() / 8 - 1) and cluster.nodes == 2
    assert sums == [dist.ReduceOp.MIN] * 2 and cluster.ranks == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert hardware.cluster_of(Ranks(0, 1, torch.device("cuda", 5))).device.memory == 80 and len(sums) == 2

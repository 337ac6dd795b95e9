"""Events of the profiler by category: on a CPU as measured, on a GPU as torch would list them."""

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from bench import step_profile
from bench.step_profile import CATEGORIES, HOST, OTHER, merged, profiled, shares, table
from common.method.losses import chunked, kl


def test_the_time_of_a_step_on_a_cpu_falls_into_categories():
    """Attention, a loss in chunks with its gradients, Adam, and nothing that communicates."""
    states = [torch.randn(1, 4, 300, 32, requires_grad=True) for _ in range(3)]
    head = torch.randn(2000, 32, requires_grad=True)
    optimizer, at = torch.optim.AdamW([*states, head]), torch.arange(300)

    def loss(kind, at, logits):
        return kl(logits, logits.detach().roll(1, 0)).sum()

    def step():
        hidden = torch.nn.functional.scaled_dot_product_attention(*states)[0].mean(0)
        chunked(loss, [("kl", at)], hidden, head).backward()
        optimizer.step()

    step()
    events, seconds = profiled(step, cuda=False)
    parts = shares(events, seconds, cuda=False)
    assert parts.keys() == {*CATEGORIES, OTHER, HOST} and list(parts)[-1] == HOST
    assert parts["communication"] == parts["matmul"] == 0  # all products are attention's and the loss's
    assert min(parts["loss"], parts["attention"], parts["optimizer"]) > 0
    assert sum(parts.values()) == pytest.approx(1, abs=0.02)
    assert f"loss          | {parts['loss']:.1%}" in table(parts)


def event(name, start, end, part_of=None, kernels=(), thread=1, **options) -> FunctionEvent:
    made = FunctionEvent(0, name, thread, start, end, use_device="cuda", **options)
    made.cpu_parent = part_of
    for duration in kernels:
        made.append_kernel("kernel", 0, duration)
    return made


def kernel(name, start, end, **options) -> FunctionEvent:
    return event(name, start, end, device_type=DeviceType.CUDA, **options)


def test_the_kernels_of_a_step_on_a_gpu():
    """Ten microseconds: a copy beside a product, gaps, an annotation that spans all, a kernel of no one."""
    step = event("Optimizer.step#AdamW.step", 50, 60, kernels=[10], is_user_annotation=True)
    gather = event("FSDP::all_gather", 10, 12, is_user_annotation=True)
    loss = event("_Chunked", 20, 40)
    attention = event("aten::scaled_dot_product_attention", 14, 16)
    events = [
        step, gather, loss, attention,
        event("aten::copy_", 10, 11, gather, [1]),
        event("aten::mm", 12, 14, None, [2]),
        event("cudaLaunchKernel", 13, 14, None, [2]),
        event("aten::bmm", 14, 15, attention, [0.5]),
        event("aten::mm", 21, 22, loss, [1]),
        event("aten::mm", 39, 40, None, [0.5], thread=2),  # autograd's thread, while the loss waits
        event("aten::mm", 40, 41, None, [0.5], thread=2),  # just after it
        event("aten::_fused_adamw_", 51, 52, step, [2]),
        event("aten::mul", 45, 46, None, [0.25]),
        kernel("Optimizer.step#AdamW.step", 0, 10, is_user_annotation=True),
        kernel("copy", 0, 1), kernel("gemm", 0.5, 2.5), kernel("bmm", 3, 3.5), kernel("gemm", 3.5, 4.5),
        kernel("gemm", 4.5, 5), kernel("gemm", 5, 5.5), kernel("adam", 6, 8), kernel("mul", 8, 8.25),
        kernel("Memset", 8.25, 8.5),
    ]  # fmt: skip
    parts = shares(events, 10e-6, cuda=True)
    assert parts == pytest.approx({"communication": 0.1, "matmul": 0.25, "attention": 0.05, "loss": 0.15,
                                   "optimizer": 0.2, OTHER: 0.05, HOST: 0.25})
    assert list(parts) == ["matmul", "optimizer", "loss", "communication", "attention", OTHER, HOST]


def test_overlapping_intervals_count_once():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (5, 5.5)]) == [(0, 4), (5, 6)]
    assert merged([(1, 2), (0, 4), (3, 3.5)]) == [(0, 4)]
    assert merged([]) == []


def test_asynchronous_events_are_not_counted_twice():
    """gloo's, which another thread runs while the operation that waits for them counts."""
    waiting = event("c10d::allreduce_", 0, 4)
    events = [waiting, event("gloo:all_reduce", 0, 4, is_async=True, thread=2)]
    assert step_profile.shares(events, 8e-6, cuda=False)["communication"] == 0.5

"""Ranks, replicated parameters, and filling a sharded model row by row."""

import collections
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from common.data.rows import Sample
from common.models import blending
from common.models.families import merged_modules
from common.models.load import load_config
from common.run.errors import UserError
from common.training import sharding, students
from common.training.engine import Step
from common.training.packing import build_row
from common.training.sharding import Execution, build, reduce_gradients, sum_over_ranks
from models import save_tiny, tiny_model
from reference import SAMPLES, SCHEDULE, built, half_masked_student, pretended_ranks


def test_gradients_in_bfloat16_are_summed_in_float32(group_of_one, tmp_path):
    source, gradients = save_tiny(tmp_path / "model"), []
    for samples in ([0], [1], [0, 1]):
        trainee = built(source, group_of_one, Execution(compute=torch.bfloat16))
        for index in samples:
            reduce_gradients(trainee, last=index == samples[-1], every_row=False)
            trainee(build_row([SAMPLES[index]], 3)).square().sum().backward()
        gradients.append(trainee.net.model.layers[0].mlp.up_proj.weight.grad.full_tensor())
    first, second, both = gradients
    assert torch.equal(both, first + second) and not torch.equal(both, both.bfloat16().float())


@pytest.mark.parametrize(("model_type", "recompute"), [
    ("llama", True), pytest.param("qwen3", False, marks=pytest.mark.slow),
    pytest.param("olmo2", False, marks=pytest.mark.slow),
])
def test_a_process_by_itself_computes_what_fsdp_does(group_of_one, tmp_path, model_type, recompute):
    """In bfloat16, over two rows, with masks on all that merging changes, norms too: the same bits."""
    aligned, merged = (
        save_tiny(tmp_path / str(seed), seed=seed, model_type=model_type, tie_word_embeddings=True)
        for seed in (0, 1))
    blended = merged_modules(tiny_model(model_type=model_type).model.layers[0].self_attn, True)
    results = []
    for whole in (False, True):
        execution = Execution(torch.float32, torch.bfloat16, recompute, whole=whole)
        student = build(load_config(aligned), group_of_one, execution,
                        students.start_of_masked(aligned, merged),
                        lambda model: blending.patch(model, 8, blended))
        blending.set_masks(student.net, torch.linspace(0, 1, 24).view(3, 8))
        assert isinstance(student, FSDPModule) != whole
        for index in range(2):
            reduce_gradients(student, last=index == 1, every_row=False)
            hidden = student(build_row(SAMPLES[index:], 3))
            hidden.square().sum().backward()
        gradients = [parameter.grad if whole else parameter.grad.full_tensor()
                     for parameter in student.net.parameters() if parameter.grad is not None]
        assert hidden.dtype == torch.bfloat16 and len(gradients) > 30
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        results.append([hidden, *gradients])
    assert all(map(torch.equal, *results))


class Collectives(TorchDispatchMode):
    """How often each of torch.distributed's operations is called in a block."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.counts.update([function.__name__.split(".")[0]] if function.namespace == "c10d" else [])
        return function(*arguments, **(options or {}))


@pytest.mark.slow
@pytest.mark.parametrize("world, groups", [(8, 1), (16, 3)])
@pytest.mark.parametrize("reduce", ["step", "row"])
@pytest.mark.parametrize("whole", [False, True])
def test_collectives_of_a_step(tmp_path, world, groups, reduce, whole):
    """A step of three rows, and models of three layers, so four groups of parameters with what is outside.

    The student gathers all of them for each row, and the layers again for each backward pass; the teacher
    keeps what is outside its layers. Gradients are reduced within a node once, or after each row, and between
    nodes once; masks and figures are summed. Models share process groups: all ranks; those of a node; those
    of the same place in every node. If the weights are whole, they are one group, which is gathered once a
    row, the teacher's once.
    """
    layers, rows = 0 if whole else 3, 3
    gathers = rows * (layers + 1 + layers) + rows * layers
    within_nodes, between_nodes = (layers + 1) * (rows if reduce == "row" else 1), (layers + 1) * (world > 8)
    with pretended_ranks(world) as ranks:
        student = half_masked_student(ranks, tmp_path, execution=Execution(whole=whole))
        schedule = replace(SCHEDULE, reduce=reduce)
        assert len(dist.distributed_c10d._world.pg_map) == groups and ranks.mesh.shape[-1] == 8
        for first in (1, 0):
            step = Step(student.job, schedule, [build_row([sample], 3) for sample in SAMPLES], SAMPLES)
            with Collectives() as collectives:
                student.take(step)
            assert collectives.counts == {
                "_allgather_base_": gathers + first, "_reduce_scatter_base_": within_nodes,
                "allreduce_": 2 + between_nodes}


def test_gradients_of_replicated_parameters_are_the_mean_of_what_scaled_losses_give(monkeypatch):
    """Two ranks that each hold 3: their losses were scaled by 2, so the batch's gradient is (3 + 3) / 2."""
    pretended = SimpleNamespace(all_reduce=lambda tensor: tensor.mul_(2), get_world_size=lambda: 2)
    monkeypatch.setattr(sharding, "dist", pretended)
    reached, untouched = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    reached.grad = torch.full((2,), 3.0)
    sum_over_ranks([reached, untouched])
    assert reached.grad.tolist() == [3, 3] and untouched.grad is None


def test_more_processes_than_gpus_are_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--nproc-per-node 2: expected at most 1, the GPUs of this machine"):
        sharding.init_ranks()


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1)  # would not do
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_give_the_same_gradients(group_of_one, tmp_path, monkeypatch, recompute):
    """For rows of any length: what the second is compiled to serves all that follow, in every layer."""
    source, backend = save_tiny(tmp_path / "model"), CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    gradients, compiled = [], []
    for compile_layers in (False, True):
        execution = Execution(compile=compile_layers, recompute=recompute)
        trainee = built(source, group_of_one, execution)
        if recompute:  # around a CPU's call per sample nothing is compiled
            trainee.net.set_attn_implementation("sdpa")
        for count in (3, 2, 5, 4):
            samples = [Sample(tuple(range(1, 3 + count + i)), (3, 4)) for i in range(count)]
            trainee(build_row(samples, count)).square().sum().backward()
            compiled.append(backend.frame_count)
        gradients.append([parameter.grad.to_local().clone() for parameter in trainee.net.model.parameters()])
    for plain, fused in zip(*gradients, strict=True):  # sums of float32 in another order
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))
    assert compiled[3] == 0 < compiled[4] < compiled[5] == compiled[7]

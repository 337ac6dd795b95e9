"""--plan's memory against torch's own account of a step of 8 ranks, on tensors without data.

The real models are built and sharded over a process group whose collectives do nothing. Seconds each.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig

from common.data.samples import Sample
from common.method import masks
from common.training import budget, students
from common.training.distill import distillation_loss
from common.training.packing import build_row
from common.training.sharding import Execution, Ranks, build, reduce_gradients
from students import RATES

SHAPES = {  # hidden, intermediate, layers, heads; fewer layers than the models have, so that seconds suffice
    "1.3b": (2048, 5504, 24, 16), "7b": (4096, 11008, 32, 32),
}
WORLD, TOKENS, CHUNK = 8, 4096, 512
SAMPLES = [Sample((1,) * 500, (2,) * 12)] * (TOKENS // 512)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(WORLD))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield Ranks(0, WORLD, torch.device("cpu"))
    dist.destroy_process_group()


def train(student, teacher, optimizer, rows: list) -> None:
    for number, row in enumerate(rows, 1):
        reduce_gradients(student, last=number == len(rows), every_row=False)
        with torch.no_grad():
            hidden = teacher(row)
        loss, _, _ = distillation_loss(student, row, hidden, teacher.net.lm_head, "prompt", 1.0, CHUNK)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def peak(ranks: Ranks, config, rows: int, recompute: bool) -> int:
    """Bytes at most in the second step, of which the first has allocated the optimizer's state."""
    execution = Execution(compute=torch.bfloat16, recompute=recompute)
    row = build_row(SAMPLES, rows * len(SAMPLES))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        frozen = Execution(torch.bfloat16, torch.bfloat16)
        teacher = build(config, ranks, frozen).eval().requires_grad_(False)
        student = build(config, ranks, execution, prepare=lambda model: masks.patch(model, 8),
                        replicated={"log_alpha": torch.zeros(1)})
        heads = config.num_attention_heads
        masks.set_masks(student.net, torch.rand(config.num_hidden_layers, heads).requires_grad_())
        optimizer = students.masked_optimizer(student, RATES, "l0", 1e-2)
        row = row._each(mode.from_tensor)
        tracker = FSDPMemTracker(student, optimizer)
        tracker.track_external(teacher)
        with tracker:
            for step in range(2):
                train(student, teacher, optimizer, [row] * rows)
                if step == 0:
                    tracker.reset_mod_stats()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return sum(size for kind, size in snapshot.items() if str(kind).endswith("Total"))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_has_the_memory_of_a_step(ranks, shape, rows, recompute):
    hidden, inner, layers, heads = SHAPES[shape]
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads, vocab_size=32000)
    work = budget.Workload.of(config, SAMPLES, CHUNK, recompute)
    expected = budget.memory(work, budget.Student(8), WORLD, TOKENS, rows > 1)
    assert expected["total"] == pytest.approx(peak(ranks, config, rows, recompute), rel=0.1)

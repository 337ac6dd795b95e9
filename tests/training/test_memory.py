"""--plan's memory against all tensors alive during a step of 8 ranks, tensors without data.

The real models are built and sharded over a process group whose collectives do nothing. Seconds each.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig

from common.data.rows import Sample
from common.models import blending
from common.models.head import head_of
from common.models.load import empty_model
from common.training import plan as budget
from common.training import sharding, students
from common.training.attention import Trainee
from common.training.chunked import distillation_loss
from common.training.packing import build_row
from common.training.sharding import Execution, Ranks, build, reduce_gradients
from reference import RATES, pretended_ranks

SHAPES = {"1.3b": (2048, 5504, 16), "7b": (4096, 11008, 32)}  # hidden, intermediate, heads; of four layers
WORLD, TOKENS, CHUNK = 8, 4096, 512
SAMPLES = [Sample((1,) * 500, (2,) * 12)] * (TOKENS // 512)


class Memory(TorchDispatchMode):
    """Bytes of all tensors made within its block and still alive: at most, by what FSDP has allocated."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        tensors = [each for each in tree_leaves(result) if torch.is_tensor(each) and not each.is_meta]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        made = [each.untyped_storage() for each in local]
        if not all(storage in self.storages for storage in made):
            self.storages.update(dict.fromkeys(made))
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return result


def train(student, teacher, optimizer, rows: list) -> None:
    for number, row in enumerate(rows, 1):
        reduce_gradients(student, last=number == len(rows), every_row=False)
        with torch.no_grad():
            hidden = teacher(row)
        loss, _ = distillation_loss(student, row, hidden, head_of(teacher.net), "prompt", CHUNK)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(ranks: Ranks, config, rows: int, recompute: bool, whole: bool) -> int:
    """Bytes at most in a step of the masked student."""
    row, heads = build_row(SAMPLES, rows * len(SAMPLES)), config.num_attention_heads
    half = torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Memory() as memory:
        teacher = build(config, ranks, Execution(half, half, whole=whole)).eval().requires_grad_(False)
        student = build(config, ranks, Execution(torch.float32, half, recompute, whole=whole),
                        prepare=lambda model: blending.patch(model, 8),
                        replicated={"log_alpha": torch.zeros(1)})
        blending.set_masks(student.net, torch.rand(config.num_hidden_layers, heads).requires_grad_())
        optimizer = students.masked_optimizer(student, RATES, "l0", 1e-2)
        fake = row._each(mode.from_tensor)
        for _ in range(2):  # the first makes the optimizer's state
            train(student, teacher, optimizer, [fake] * rows)
    return memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world, whole", [(WORLD, False), (WORLD, True), (1, True)])
def test_a_step_takes_the_memory_that_is_planned(shape, rows, recompute, world, whole, monkeypatch):
    """Within a tenth; the tracker sees every tensor, the plan the largest ones."""
    hidden, inner, heads = SHAPES[shape]
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=4,
                         num_attention_heads=heads, num_key_value_heads=heads, vocab_size=32000)
    work = budget.Workload.of(config, SAMPLES, CHUNK, recompute, 2, whole)
    planned = budget.memory(work, budget.Student(8), world, TOKENS, rows > 1)["total"]
    # made before, as their buffers have data: the teacher's, then the student's
    models = [empty_model("", config, dtype, attention="packed") for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(sharding, "empty_model", lambda *_: models.pop(0))
    for model in models:
        Trainee(model)  # what it finds out of a config is kept
    with pretended_ranks(world) as ranks:
        assert world == 1 or ranks.mesh.size() == world  # made here, as its tensors have data
        assert 0.96 <= planned / peak(ranks, config, rows, recompute, whole) <= 1.1

"""Estimates of memory against the weights, and against all tensors alive during a step of 8 ranks.

For the latter, tensors have no data: the real models are built and sharded over a process group whose
collectives do nothing. Seconds each.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig

from common.data.pool import Pool
from common.data.rows import Sample
from common.models import blending
from common.models.head import head_of
from common.models.load import empty_model
from common.training import memory, sharding, students
from common.training.attention import Trainee
from common.training.chunked import distillation_loss
from common.training.engine import Schedule
from common.training.memory import Cluster, Device, Phase, StepMemory, Student, Workload, size
from common.training.packing import build_row, rows_of_step
from common.training.settings import Schedules, choose_by_memory
from common.training.sharding import Execution, Ranks, build, reduce_gradients
from models import FAMILIES, tiny_model
from reference import RATES, SCHEDULE, pretended_ranks, random_samples

LLAMA2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
             "num_key_value_heads": 32, "vocab_size": 32000}
WORLD, TOKENS, CHUNK = 8, 4096, 512
SAMPLES = [Sample((1,) * 500, (2,) * 12)] * (TOKENS // 512)


def parameters(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_sizes_are_those_of_the_model():
    config = tiny_model(bias=True).config
    cases = [(tiny_model(bias=True), None), (tiny_model(bias=True, num_key_value_heads=2), Student(2, ()))]
    for names in (blending.KEY_VALUE, blending.WHOLE_HEAD):
        masked = tiny_model(bias=True)
        blending.patch(masked, 2, names)
        cases.append((masked, Student(2, names)))
    for model, student in cases:
        found, whole, layers = size(config, student), parameters(model), parameters(model.model.layers)
        assert (found.whole, found.layer, found.root) == (whole, layers // 3, whole - layers)
    mixed = tiny_model(**FAMILIES["glm4_moe"])  # a first layer without experts
    dense, largest = map(parameters, mixed.model.layers[:2])
    assert dense < largest == size(mixed.config).layer
    attention = sum(parameters(layer.self_attn) for layer in mixed.model.layers)
    assert size(mixed.config).trained(Student(2, (), "attention"))[0] == attention


def batches(count: int, tokens: int = 4096) -> Schedule:
    """Ten steps of so many samples, in rows of so many tokens."""
    return replace(SCHEDULE, steps=10, batch=count, tokens_per_microbatch=tokens)


def workload(lengths: list[int]) -> Workload:
    """Samples of these lengths for LLaMA2-7B."""
    config = LlamaConfig(num_hidden_layers=32, **LLAMA2_7B)
    return Workload(config, lengths, [6] * len(lengths), CHUNK, recompute=False)


def test_rows_of_the_busiest_step():
    """64 samples of 100 and 300 tokens on a rank of four: 3200 in the mean, 5 * 8 * 100 / 4 more at most."""
    work = workload([100, 300])
    assert work.rows(batches(64), 4) == (1, 3200) and work.rows(batches(64), 4, 5) == (2, 4096)
    # 16 samples of 16,384 tokens, each a row by itself, and 16 of 1024
    assert workload([16384, 1024]).rows(batches(32), 4) == ((16 + 16 / 4) / 4, 16384)
    samples, ranks = random_samples(400), SimpleNamespace(rank=0, world=2)
    busiest = batches(32, tokens=200)
    most, _ = Workload.of(None, samples, CHUNK, False).rows(busiest, 2, memory.BUSIEST)
    taken = [len(rows_of_step(samples, step, busiest, ranks)) for step in range(200)]
    assert most - 2 <= max(taken) <= most


@pytest.mark.parametrize("ranks, gib, large", [(8, 80, False), (4, 80, True), (8, 24, True)])
def test_layers_are_recomputed_where_activations_do_not_fit(ranks, gib, large):
    """LLaMA2-7B on texts of 512 tokens, in rows of 4096."""
    trained = {"teacher": None, "student": Student(8)}
    phases = {name: Phase("", workload([512] * 10), each, batches(64)) for name, each in trained.items()}
    for recompute in (True, False):
        fitted = memory.fit(phases, Cluster(ranks, Device(gib)), recompute, False)
        assert [phase.work.recompute for phase in fitted.values()] == [large and recompute] * 2


@pytest.mark.parametrize("room, lengths, recompute, expected", [
    (1e9, [500, 500], True, (4096, False, True)),
    (1e9, [4000, 4000], True, (32768, False, True)),
    (1e9, [0, 8000], True, (65536, False, True)),  # 32000 tokens, and two times 4000
    (33000, [4000, 4000], True, (32768, False, False)),
    (32700, [4000, 4000], True, (16384, False, True)),  # 21384 is less than two thirds
    (32000, [4000, 4000], True, (16384, False, False)),
    (4000, [4000, 4000], True, (8192, True, False)),  # 2048 of 4096 tokens' activations, or four times fewer
    (4000, [4000, 4000], False, (4096, False, False)),
])
def test_memory_decides_rows_recomputing_and_gathering(monkeypatch, room, lengths, recompute, expected):
    """Rows double from 4096 tokens to a rank's share of a batch, 64 x 4000 / 8 = 32000, and two standard
    deviations. A rank has room for the tokens of a row; more are needed to keep weights whole.
    """
    def too_large(phases, cluster, share=1) -> bool:
        _, work, _, schedule = phases["student"]
        tokens = schedule.tokens_per_microbatch / 4**work.recompute
        return tokens + 5000 * work.whole > share * room

    monkeypatch.setattr(memory, "too_large", too_large)
    phases = {"student": Phase("", workload(lengths), None, batches(64))}
    _, work, _, schedule = memory.fit(phases, Cluster(8, Device(80)), recompute, rows=True)["student"]
    assert (schedule.tokens_per_microbatch, work.recompute, work.whole) == expected


@pytest.mark.parametrize(("device", "flag", "asked"), [
    ("cuda", None, True), ("cuda", True, False), ("cuda", False, False), ("cpu", None, False)])
def test_memory_decides_what_flags_leave_open_on_gpus(inputs, monkeypatch, device, flag, asked):
    """Of a teacher on samples with answers, and a student with masks on texts, too."""
    def fit(phases, cluster, recompute, rows):
        student = Student(2, blending.KEY_VALUE, "all")
        assert (recompute, rows) == (asked, device == "cuda") and [*phases] == ["teacher", "student"]
        assert [(phase.student, phase.work.lengths, phase.work.recompute) for phase in phases.values()] == [
            (None, [3], bool(flag)), (student, [3, 2], bool(flag))]
        return {name: phase._replace(work=replace(phase.work, recompute=bool(flag or asked), whole=True))
                for name, phase in phases.items()}

    monkeypatch.setattr(memory, "fit", fit)
    monkeypatch.setattr(memory, "cluster_of", lambda ranks: Cluster(1, Device(80)))
    conversion = SimpleNamespace(
        model={"path": inputs["model"]}, kv_heads=2, blended=blending.KEY_VALUE, title="")
    pool, ranks = Pool([Sample((1, 2), (3,))], [Sample((4, 5))]), Ranks(0, 1, torch.device(device))
    args = SimpleNamespace(dtype="bfloat16", recompute=flag, compile=False, masks="l0", train="all")
    fitted = choose_by_memory(args, conversion, pool, Schedules(SCHEDULE, SCHEDULE), ranks, rows=True)
    assert fitted.execution == Execution(compute=torch.bfloat16, recompute=bool(flag or asked), whole=True)


def test_the_cluster_of_a_run_has_the_memory_of_its_smallest_device(monkeypatch):
    """Rank 13 of 16 on two nodes, in one of which devices have a GiB less."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, kind: tensor.sub_(int(kind == dist.ReduceOp.MIN)))
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory.cluster_of(Ranks(13, 16, torch.device("cuda", 5))) == Cluster(8, Device(79), nodes=2)
    of_cpus = memory.cluster_of(Ranks(13, 16, torch.device("cpu")))
    assert of_cpus.device.memory == pytest.approx(memory.machine_memory() / 8 - 1)


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
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Memory() as tracked:
        teacher = build(config, ranks, Execution(half, half, whole=whole)).eval().requires_grad_(False)
        student = build(config, ranks, Execution(torch.float32, half, recompute, whole=whole),
                        prepare=lambda model: blending.patch(model, 8),
                        replicated={"log_alpha": torch.zeros(1)})
        blending.set_masks(student.net, torch.rand(config.num_hidden_layers, heads).requires_grad_())
        optimizer = students.masked_optimizer(student, RATES, "l0", 1e-2)
        fake = row._each(mode.from_tensor)
        for _ in range(2):  # the first makes the optimizer's state
            train(student, teacher, optimizer, [fake] * rows)
    return tracked.peak


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("world, whole", [(WORLD, False), (WORLD, True), (1, True)])
def test_a_step_takes_the_memory_that_is_estimated(rows, recompute, world, whole, monkeypatch):
    """Within a tenth; the tracker sees every tensor, the estimate has the largest ones."""
    config = LlamaConfig(num_hidden_layers=4, **LLAMA2_7B)
    work = Workload.of(config, SAMPLES, CHUNK, recompute, 2, whole)
    step = StepMemory(work, Student(8), world, TOKENS, rows > 1, world > 1)
    estimated = step.fullest()["total"]
    # made before, as their buffers have data: the teacher's, then the student's
    models = [empty_model("", config, dtype, attention="packed") for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(sharding, "empty_model", lambda *_, **__: models.pop(0))
    for model in models:
        Trainee(model)  # what it finds out of a config is kept
    with pretended_ranks(world) as ranks:
        assert world == 1 or ranks.mesh.size() == world  # made here, as its tensors have data
        assert 0.96 <= estimated / peak(ranks, config, rows, recompute, whole) <= 1.1

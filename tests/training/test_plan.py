"""The plan against torch's operation counter, the tensors autograd saves, and the weights."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from common.data.rows import Sample
from common.models import blending
from common.run.errors import UserError
from common.training import plan as budget
from common.training.attention import Trainee
from common.training.engine import Schedule
from common.training.hardware import cluster_of
from common.training.packing import build_row, rows_of_step
from common.training.plan import distillation_flops, sft_flops
from common.training.sharding import Ranks, recompute_layers
from models import FAMILIES, tiny_model
from reference import SCHEDULE, random_samples

LLAMA2_7B = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                        num_attention_heads=32, num_key_value_heads=32)
ATTENTION = 2 * 4096**2 + 2 * 4096 * 1024  # its weights in a layer with 8 kv heads


@pytest.mark.parametrize("kv_heads, train, family", [
    (2, "all", "llama"), (2, "attention", "llama"), (8, "all", "olmoe"),
    pytest.param(8, "all", "phi", marks=pytest.mark.slow),
])
def test_operations_are_those_torch_counts(kv_heads, train, family):
    """Of eager attention, which forms every pair, to an input with a gradient, as in all layers but one. Of
    experts those that a token is sent to."""
    changes = FAMILIES.get(family, {}) | {"num_key_value_heads": kv_heads, "hidden_size": 64}
    model = tiny_model(attn_implementation="eager", **changes)
    model.config._experts_implementation = "eager"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(train == "all" or ".self_attn." in name)
    size = 50, 50 * 50, 50
    with FlopCounterMode(display=False) as forward:
        loss = model(inputs_embeds=torch.randn(1, 50, 64, requires_grad=True)).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    expected = budget.forward_flops(budget.products(model.config), *size)
    assert forward.get_total_flops() == pytest.approx(expected, rel=0.005)  # it also counts RoPE's angles
    both = budget.training_flops(budget.products(model.config), *size, train)
    assert backward.get_total_flops() == pytest.approx(both - expected, rel=0.005)


def test_operations_of_a_row_are_those_of_its_samples():
    """A token attends to itself and those before it; student and teacher have their own sizes."""
    row = build_row([Sample((1, 2, 3), (4, 5)), Sample((6, 7), (8,))], 2)
    nets = (tiny_model(num_key_value_heads=heads, hidden_size=8 * heads) for heads in (2, 8))
    student, teacher = (SimpleNamespace(net=net) for net in nets)
    tokens, pairs, answers = 5 + 3, 5 + 4 + 3 + 2 + 1 + 3 + 2 + 1, 2 + 1
    expected = budget.training_flops(budget.products(teacher.net.config), tokens, pairs, answers)
    assert sft_flops(teacher)(row) == expected
    size = tokens, pairs, answers + 2 + 1  # all tokens but a sample's first are predicted
    expected = budget.training_flops(budget.products(student.net.config), *size, "attention")
    expected += budget.forward_flops(budget.products(teacher.net.config), *size)
    assert distillation_flops(student, teacher, "attention")(row) == expected


def test_sizes_are_those_of_the_model():
    students = {kind: tiny_model(bias=True) for kind in (blending.KEY_VALUE, blending.WHOLE_HEAD)}
    for names, model in students.items():
        blending.patch(model, 2, names)
    grouped = tiny_model(bias=True, num_key_value_heads=2)
    cases = [(tiny_model(bias=True), None), (grouped, budget.Student(2, ()))]
    cases += [(model, budget.Student(2, names)) for names, model in students.items()]
    for model, kind in cases:
        size = budget.size(tiny_model(bias=True).config, kind)
        layers = sum(p.numel() for p in model.model.layers.parameters())
        attention = sum(p.numel() for p in model.model.layers[0].self_attn.parameters())
        assert size == budget.Size(size.whole, layers // 3, size.whole - layers, attention, 3)
        assert size.whole == sum(p.numel() for p in model.parameters())
    mixed = tiny_model(**FAMILIES["glm4_moe"])  # a first layer without experts
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in mixed.model.layers]
    size = budget.size(mixed.config)
    assert of_layers[0] < of_layers[1] == size.layer and size.root == size.whole - sum(of_layers)
    trained = sum(p.numel() for name, p in mixed.named_parameters() if ".self_attn." in name)
    assert size.trained(budget.Student(2, (), "attention"))[0] == trained


def saved_bytes(layers: int, dtype, blended: tuple[str, ...] = (), recompute: bool = False) -> int:
    """Of all storages that autograd keeps for the backward pass of one packed row, parameters aside."""
    model = tiny_model(hidden_size=64, intermediate_size=176, num_hidden_layers=layers, vocab_size=260,
                       attn_implementation="packed").to(dtype)
    if blended:
        blending.patch(model, 2, blended)
        blending.set_masks(model, torch.full((layers, 8), 0.5).requires_grad_())
    if recompute:
        recompute_layers(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # it keeps its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Trainee(model)(build_row(random_samples(40), 40))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype, blended, recompute", [
    (torch.bfloat16, blending.KEY_VALUE, False), (torch.float32, blending.WHOLE_HEAD, False),
    (torch.float32, (), True),
])
def test_activations_are_those_autograd_keeps(dtype, blended, recompute):
    """A recomputed layer keeps its input alone."""
    config = LlamaConfig(hidden_size=64, intermediate_size=176, num_attention_heads=8, head_dim=8)
    tokens = sum(map(len, random_samples(40)))
    four, two = (saved_bytes(layers, dtype, blended, recompute) for layers in (4, 2))
    expected = budget.activation_bytes(config, tokens, dtype.itemsize, blended)[recompute]
    assert expected == pytest.approx((four - two) / 2, rel=0.02 if recompute else 0.1)


def batches(size: int, **changes) -> Schedule:
    """Ten steps of so many samples, in rows of 4096 tokens."""
    return replace(SCHEDULE, steps=10, batch=size, **{"tokens_per_microbatch": 4096} | changes)


def workload(lengths: list[int], answers: list[int], recompute: bool = True) -> budget.Workload:
    """Samples of these lengths for LLaMA2-7B."""
    return budget.Workload(LLAMA2_7B, lengths, answers, 512, recompute)


def test_cost_of_a_step_is_counted_from_its_parts():
    """Batches of 64 samples of 100 and 300 tokens on four ranks."""
    work, cluster = workload([100, 300], [4, 6]), budget.parse_hardware("4xA100-80GB")
    tokens, pairs = 64 * 200, 64 * (100 * 101 / 2 + 300 * 301 / 2) / 2
    students = None, budget.Student(8), budget.Student(8, (), "attention")
    source, pruned, whole = (budget.size(LLAMA2_7B, student).whole for student in (None, *students[1:]))
    sft, distillation, attention = (budget.step_cost(work, each, batches(64), cluster) for each in students)
    assert (sft.rows, sft.row) == (distillation.rows, distillation.row) == (1, 3200)
    forward = budget.forward_flops(budget.products(LLAMA2_7B), tokens, pairs, tokens)
    assert sft.flops == 3 * budget.forward_flops(budget.products(LLAMA2_7B), tokens, pairs, 64 * 5)
    assert distillation.flops == 4 * forward
    trained = budget.training_flops(budget.products(LLAMA2_7B), tokens, pairs, tokens, "attention")
    assert attention.flops == trained + forward
    assert sft.traffic == 8 * source and distillation.traffic == 8 * pruned + 2 * source
    assert attention.traffic == 4 * whole + 4 * 32 * ATTENTION + 2 * source
    computed = distillation.flops * 5 / 4  # with the forward pass once more
    assert distillation.seconds == pytest.approx(computed / (4 * 312e12 * 0.34))
    assert distillation.mfu == pytest.approx(0.34 * 4 / 5)
    whole = budget.step_cost(replace(work, whole=True), budget.Student(8), batches(64), cluster)
    assert whole.traffic == 6 * pruned  # gathered in bf16, reduced in float32; the teacher stays
    said = [budget.report("", replace(work, whole=each), None, batches(64), cluster)[0][0] for each in (0, 1)]
    assert [", weights gathered once a row" in line for line in said] == [False, True]
    alone = budget.step_cost(work, budget.Student(8), batches(64), budget.parse_hardware("1xA100-80GB"))
    assert alone.traffic == 0 and (alone.rows, alone.row) == (4, 4096)
    assert budget.seconds(1.0, 3e12, 0, cluster) == 10 / 0.75  # the links of an A100: 300 GB/s, less
    assert budget.seconds(1.0, 0, 0, cluster, 0.25) == 0.25


def test_the_host_limits_a_small_model():
    """1.3B with 1000 tokens a rank: 24 layers, forward and twice backward, and the teacher's."""
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=24,
                         num_attention_heads=16, num_key_value_heads=16)
    work, cluster = budget.Workload(config, [126], [6], 512, False), budget.parse_hardware("8xH100-80GB")
    step = budget.step_cost(work, budget.Student(4), batches(64), cluster)
    assert step.seconds == pytest.approx(24 * 4 * 0.0025) and step.mfu < 0.2
    whole = budget.step_cost(replace(work, whole=True), budget.Student(4), batches(64), cluster)
    assert whole.seconds == pytest.approx(24 * 4 * 0.002)
    one, texts = budget.parse_hardware("1xH200-141GB"), replace(work, lengths=[512])
    for tokens, advised in ((4096, True), (16384, False)):
        rows = batches(64, tokens_per_microbatch=tokens)
        lines, _, _ = budget.report("", texts, budget.Student(4), rows, one)
        assert ("larger --tokens-per-microbatch" in lines[3]) == advised


def test_rows_of_the_busiest_step():
    """64 samples of 100 and 300 tokens on a rank of four: 3200 in the mean, 5 * 8 * 100 / 4 more at most."""
    work, eight = workload([100, 300], [4, 6], recompute=False), batches(64)
    assert work.rows(eight, 4) == (1, 3200) and work.rows(eight, 5, 5) == (1, 3360)
    assert work.rows(eight, 4, 5) == (2, 4096) and work.rows(eight, 1) == (4, 4096)
    assert replace(work, lengths=[200]).rows(eight, 4, 5) == (1, 3200)  # without spread
    # 16 samples of 16,384 tokens, each a row by itself, and 16 of 1024
    assert workload([16384, 1024], [1, 1]).rows(batches(32), 4) == ((16 + 16 / 4) / 4, 16384)
    need, limit = budget.peak_memory(work, None, eight, budget.parse_hardware("8xA100-80GB"))
    assert need == budget.memory(work, None, 8, 1600 + 5 * 8 * 100 // 8) and limit == 0.9 * 80 * 2**30
    lengths, ranks = random_samples(400), SimpleNamespace(rank=0, world=2)
    work = budget.Workload.of(LLAMA2_7B, lengths, 512, False)
    busiest = batches(32, tokens_per_microbatch=200)
    expected = work.rows(busiest, 2, budget.BUSIEST)[0]
    taken = [len(rows_of_step(lengths, step, busiest, ranks)) for step in range(200)]
    assert expected - 2 <= max(taken) <= expected


@pytest.mark.parametrize("plan, memory, expected", [
    ("8xA100-80GB", None, False), ("4xA100-80GB", None, True), (None, 24, True)])
def test_layers_are_recomputed_where_activations_do_not_fit(monkeypatch, plan, memory, expected):
    """LLaMA2-7B on texts of 512 tokens, on eight GPUs where there is no plan; stage 5 then recomputes."""
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=memory * 2**30))
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    work = workload([512] * 10, [6] * 10, recompute=False)
    phases = [("", work, student, batches(64)) for student in (None, budget.Student(8))]
    cluster = budget.parse_hardware(plan) if plan else cluster_of(Ranks(0, 8, torch.device("cuda")))
    assert budget.too_large(phases, cluster) == expected
    needed = max(budget.peak_memory(*phase, cluster)[0]["total"] for _, *phase in phases)
    share = needed / (budget.USABLE * cluster.device.memory * 2**30)
    assert [budget.too_large(phases, cluster, share + more) for more in (-0.01, 0.01)] == [True, False]


def test_nodes_exchange_a_ranks_shard_of_the_gradients_once_a_step():
    """A ring over n nodes sends 2 (n - 1) / n of what is reduced: float32 gradients, an eighth a rank."""
    cluster, one = budget.parse_hardware("8x8xA100-80GB"), budget.parse_hardware("8xA100-80GB")
    assert (cluster.nodes, cluster.ranks_per_node, cluster.device) == (8, 8, one.device)
    step = budget.step_cost(workload([500], [4]), None, batches(64 * 8, reduce="row"), cluster)
    alone = budget.step_cost(workload([500], [4]), None, batches(64), one)
    assert step.network == pytest.approx(2 * 7 / 8 * 4 * 6_738_415_616 / 8) and alone.network == 0
    assert (step.rows, step.row, step.traffic) == (alone.rows, alone.row, alone.traffic)
    assert step.flops == 8 * alone.flops and step.seconds == pytest.approx(alone.seconds)
    assert budget.seconds(1.0, 0, 25e10, cluster) == 10 / 0.75  # 200 Gb/s a device, less
    for machines, said in ((cluster, True), (one, False)):
        lines, _, _ = budget.report("", workload([500], [4]), None, batches(64 * 8), machines)
        assert ("GiB between nodes" in "\n".join(lines)) == said


def test_all_phases_must_fit(capsys):
    phases = [("teacher", workload([100], [4]), None, batches(64)),
              ("pruning", workload([300], [4]), budget.Student(8), batches(64))]
    hours = budget.print_phases(phases, "8xA100-80GB")
    cluster = budget.parse_hardware("8xA100-80GB")
    each = [10 * budget.step_cost(*phase, cluster).seconds / 3600 for _, *phase in phases]
    assert hours == pytest.approx(sum(each)) and capsys.readouterr().out.count("fits") == 2
    with pytest.raises(UserError, match="expected all phases to fit on 1xA100-80GB"):
        budget.print_phases(phases, "1xA100-80GB")
    assert "does NOT fit" in capsys.readouterr().out

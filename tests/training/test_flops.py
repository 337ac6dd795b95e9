"""FLOPs against torch's operation counter, and the rates of a step."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.data.rows import Sample
from common.training.flops import distillation_flops, forward_flops, products, sft_flops, training_flops
from common.training.metrics import Metrics
from common.training.packing import build_row
from common.training.sharding import Ranks
from models import FAMILIES, tiny_model
from reference import SCHEDULE


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
    expected = forward_flops(products(model.config), *size)
    assert forward.get_total_flops() == pytest.approx(expected, rel=0.005)  # it also counts RoPE's angles
    both = training_flops(products(model.config), *size, train)
    assert backward.get_total_flops() == pytest.approx(both - expected, rel=0.005)


def test_operations_of_a_row_are_those_of_its_samples():
    """A token attends to itself and those before it; student and teacher have their own sizes."""
    row = build_row([Sample((1, 2, 3), (4, 5)), Sample((6, 7), (8,))], 2)
    nets = (tiny_model(num_key_value_heads=heads, hidden_size=8 * heads) for heads in (2, 8))
    student, teacher = (SimpleNamespace(net=net) for net in nets)
    tokens, pairs, answers = 5 + 3, 5 + 4 + 3 + 2 + 1 + 3 + 2 + 1, 2 + 1
    expected = training_flops(products(teacher.net.config), tokens, pairs, answers)
    assert sft_flops(teacher)(row) == expected
    size = tokens, pairs, answers + 2 + 1  # all tokens but a sample's first are predicted
    expected = training_flops(products(student.net.config), *size, "attention")
    expected += forward_flops(products(teacher.net.config), *size)
    assert distillation_flops(student, teacher, "attention")(row) == expected


def test_a_line_has_the_rates_of_its_step_and_the_time_that_is_left(tmp_path, monkeypatch, capsys):
    """Two GPUs; of the time, steps since the training went on, whose first ended 4 s after it began."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    clock = iter([0, 100, 100, 106])
    monkeypatch.setattr("common.training.metrics.time.perf_counter", lambda: next(clock))
    job = SimpleNamespace(directory=str(tmp_path), step=2, ranks=Ranks(0, 2, torch.device("cuda", 0)))
    metrics = Metrics(job, replace(SCHEDULE, steps=10, print_every=1))
    for step in (3, 4):
        line = {"step": step, "seconds": 4.0, "tokens": 5000, "flops": 312e12 * 4, "loss": 0.5, "lr": 1e-3}
        metrics.write(line)
        assert (line["tokens_per_s"], line["mfu"], line["memory_gib"]) == (1250, 0.5, 3)
    assert [text.split(" | ")[3:] for text in capsys.readouterr().out.splitlines()] == [
        ["1250 tok/s", "MFU 50.0%", f"ETA 0:00:{left}"] for left in (28, 30)]

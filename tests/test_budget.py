"""The plan against independent witnesses: torch's own operation counter, the tensors autograd saves, the weights themselves."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from common.cli import UserError
from common.method import masks
from common.training import budget
from common.training.engine import Plan
from common.training.packing import build_row
from common.training.sharding import Trainee, recompute_layers
from conftest import tiny_model
from test_packing import random_samples


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_operations_are_those_torch_counts(kv_heads):
    model = tiny_model(num_key_value_heads=kv_heads, hidden_size=64, attn_implementation="eager")
    tokens = torch.randint(0, 256, (1, 50))
    expected = budget.forward_flops(model.config, 50, 50 * 50, 50)  # eager forms every pair
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=tokens).logits.sum()
    assert forward.get_total_flops() == pytest.approx(expected, rel=0.005)  # the counter also sees RoPE's angles
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == pytest.approx(2 * expected, rel=0.005)


def test_sizes_are_those_of_the_model():
    students = {kind: tiny_model(bias=True) for kind in (masks.KEY_VALUE, masks.WHOLE_HEAD)}
    for names, model in students.items():
        masks.patch(model, 2, names)
    for model, kind in ((tiny_model(bias=True), None), (tiny_model(bias=True, num_key_value_heads=2), budget.Student(2, ())),
                        *((model, budget.Student(2, names)) for names, model in students.items())):
        size = budget.size(tiny_model(bias=True).config, kind)
        layers = sum(p.numel() for p in model.model.layers.parameters())
        assert size == budget.Size(size.whole, layers // 3, size.whole - layers)
        assert size.whole == sum(p.numel() for p in model.parameters())


def saved_bytes(layers: int, dtype, blended: tuple[str, ...] = (), recompute: bool = False) -> int:
    """Of all storages that autograd keeps for the backward pass of one packed row, parameters aside."""
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": layers, "vocab_size": 260, "attn_implementation": "packed"}
    model = tiny_model(**shape).to(dtype)
    if blended:
        masks.patch(model, 2, blended)
        masks.set_masks(model, torch.full((layers, 8), 0.5).requires_grad_())
    if recompute:
        recompute_layers(model.train())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding the tensor keeps its address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Trainee(model)(build_row(random_samples(40), 40))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blended", [(), masks.KEY_VALUE, masks.WHOLE_HEAD])
def test_activations_are_those_autograd_keeps(dtype, blended):
    config = LlamaConfig(hidden_size=64, intermediate_size=176, num_attention_heads=8, head_dim=8)
    tokens = sum(map(len, random_samples(40)))
    layer = (saved_bytes(4, dtype, blended) - saved_bytes(2, dtype, blended)) / 2
    assert budget.activation_bytes(config, tokens, dtype.itemsize, blended)[0] == pytest.approx(layer, rel=0.1)


def test_a_recomputed_layer_keeps_its_input_alone():
    config = LlamaConfig(hidden_size=64, intermediate_size=176, num_attention_heads=8, head_dim=8)
    tokens = sum(map(len, random_samples(40)))
    layer = (saved_bytes(4, torch.float32, recompute=True) - saved_bytes(2, torch.float32, recompute=True)) / 2
    assert budget.activation_bytes(config, tokens, 4)[1] == pytest.approx(layer, rel=0.02)


def plan(steps: int, batch: int) -> Plan:
    return Plan(steps=steps, batch=batch, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=4096, save_steps=None, save_minutes=20, print_every=1)


def test_report_of_a_7b_run():
    """LLaMA2-7B: 6.74e9 parameters, 12 bytes each for weights and Adam; it fits 8 A100s and not one."""
    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32)
    assert budget.size(config).whole == 6_738_415_616
    work = budget.Workload(config, lengths=[126] * 100, answers=[6] * 100, chunk=512, recompute=True)
    verdicts = []
    for text in ("8xA100-80GB", "1xA100-80GB"):
        lines, hours, fits = budget.report("pruning", work, budget.Student(8), plan(23060, 64), budget.parse_hardware(text))
        verdicts.append(fits)
        assert ("does NOT fit" in lines[-1]) == (not fits) and hours > 1
    assert verdicts == [True, False]
    need = budget.memory(work, None, 8, 4096)
    assert need["optimizer"] == 8 * 6_738_415_616 / 8 and need["teacher"] == 0 and need["total"] == sum(need.values()) - need["total"]
    # six operations per parameter and token, the rule of thumb, less the embedding's, more attention's
    assert 3 * budget.forward_flops(config, 1000, 0, 1000) == pytest.approx(6 * 6.74e9 * 1000, rel=0.03)
    without = budget.memory(replace(work, recompute=False), None, 8, 4096)
    assert without["activations"] > 10 * need["activations"]


@pytest.mark.parametrize("text", ["A100-80GB", "0xA100-80GB", "8xA100", "8 x A100-80GB"])
def test_hardware_that_is_not_known(text):
    with pytest.raises(UserError, match="expected COUNTxDEVICE, a device of A100-40GB"):
        budget.parse_hardware(text)


def test_peak_of_a_device_by_the_name_cuda_gives():
    assert budget.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert budget.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert budget.peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert budget.peak_flops("NVIDIA H100 PCIe") is None and budget.peak_flops("Tesla K80") is None

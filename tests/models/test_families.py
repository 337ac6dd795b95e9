"""Every family and sources that are GQA already: a permitted transformation keeps the function; all stages;
the result loads in the family's own class.

The models are tiny and random, of the classes that transformers has for these model types.
"""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from bench.families import small_config
from common.data import decoding
from common.data.rows import Sample
from common.models.edits import fuse_layer
from common.models.families import check_kv_heads, geometry, head_parameters, merged_modules
from common.models.forward import embedded, run_layer
from common.models.forward import logits_of as logits_behind
from common.models.layers import Layers
from common.models.load import empty_model, load_config
from common.models.proof import attach_pairs
from common.models.refit import ERRORS
from common.run.errors import UserError
from common.training.attention import Trainee
from common.training.checkpoints import saved_checkpoints, whole_weights
from common.training.packing import build_row
from common.training.sharding import Execution, build
from models import (
    END,
    EVERY_FAMILY,
    FAMILIES,
    byte_tokenizer,
    class_model,
    save_tiny,
    tiny_model,
)
from reference import TWO_TEXTS, blended, logits_of_two_texts, merge_model, random_rotations, random_samples
from runs import run
from torchrun import ROOT


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_fused_model_is_the_same_function(name):
    model, generator = tiny_model(**FAMILIES[name]).double(), torch.Generator().manual_seed(1)
    model.config._experts_implementation = "eager"  # the others know no float64
    before = logits_of_two_texts(model)
    for layer in model.model.layers:
        order = torch.randperm(geometry(model.config).kv_heads, generator=generator).tolist()
        fuse_layer(layer.self_attn, order, *random_rotations(layer.self_attn, generator))
    # transformers computes norms in float32 even in a float64 model: 1e-7 of logits of size 10, three layers
    assert before.std() > 0.3 and (logits_of_two_texts(model) - before).abs().max() < 1e-5


@torch.no_grad()
def test_a_fused_projection_is_blended_by_its_parts():
    """Of a Phi-3 that is GQA already: rows of q, k and v, each by the mask of its key/value head."""
    model = tiny_model(model_type="phi3", num_key_value_heads=4)
    merged = merge_model(model, 2)
    assert merged_modules(model.model.layers[0].self_attn) == ("qkv_proj",)
    rows, means = (each.model.layers[0].self_attn.qkv_proj.weight for each in (model, merged))
    queries, keys, values = rows.split((64, 32, 32))
    expected = [queries, *(part.view(2, 2, 8, 48).mean(1).flatten(0, 1) for part in (keys, values))]
    torch.testing.assert_close(means, torch.cat(expected), rtol=0, atol=1e-6)
    for layer in merged.model.layers:
        layer.self_attn.qkv_proj.weight.add_(0.05 * torch.randn_like(layer.self_attn.qkv_proj.weight))
    student = blended(model, merged, ("qkv_proj",))
    z, x, projection = torch.rand(4), torch.randn(5, 48), student.model.layers[1].self_attn.qkv_proj
    projection.z = z
    own, shared = projection.original.weight.view(16, 8, 48), projection.merged.weight.view(12, 8, 48)
    heads = shared[[*range(8), 8, 8, 9, 9, 10, 10, 11, 11]]  # of which each of the source's is a member
    masks_of_heads = torch.cat((z.repeat_interleave(2), z, z)).view(16, 1, 1)
    expected = (masks_of_heads * own + (1 - masks_of_heads) * heads).flatten(0, 1)
    torch.testing.assert_close(projection(x), x @ expected.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY_FAMILY)
@torch.no_grad()
def test_running_layer_after_layer_is_the_model(name):
    """40 tokens see a window of 12, at positions from 0 and with a gap."""
    model, gap = tiny_model(**FAMILIES[name]), torch.arange(40) + 30 * (torch.arange(40) >= 20)
    for positions in (None, gap):
        hidden = embedded(model, TWO_TEXTS)
        for layer in model.model.layers:
            hidden = run_layer(model, layer, hidden, positions)
        places = {} if positions is None else {"position_ids": positions[None]}
        mask = torch.ones_like(TWO_TEXTS)  # or transformers would take the gap for another sample
        whole = model(TWO_TEXTS, attention_mask=mask, use_cache=False, **places).logits
        torch.testing.assert_close(logits_behind(model, hidden), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_loaded_part_by_part_or_sharded_it_is_the_model(name, group_of_one, tmp_path):
    """What no checkpoint stores is computed: RoPE's frequencies, the scale of embeddings."""
    changes = FAMILIES[name]
    path, model = save_tiny(tmp_path / "model", **changes), tiny_model(**changes)
    layers = Layers(path, torch.float32, "cpu", layerwise=True)
    logits = torch.stack(layers.logits(TWO_TEXTS))
    torch.testing.assert_close(logits, logits_of_two_texts(model), rtol=0, atol=1e-4)
    sharded = build(load_config(path), group_of_one, Execution(), lambda name: (path, name))
    row, whole = build_row(random_samples(5), 5), Trainee(tiny_model(attn_implementation="packed", **changes))
    with torch.no_grad():
        torch.testing.assert_close(sharded(row), whole(row), rtol=0, atol=1e-4)


def noisy(model_type: str, **changes):
    """The small config of a class in which whatever could be random is, with windows of 12 and, where it may
    have one RoPE for all layers, a LongRoPE with other angles beyond 20 tokens.
    """
    default = small_config(model_type)
    random = {key: 0.3 for key, value in vars(default).items()
              if isinstance(value, float) and ("drop" in key or "jitter" in key)}
    windows = {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2}
    windows = {key: value for key, value in windows.items() if hasattr(default, key)}
    config = small_config(model_type, **random | windows | changes)
    if "rope_type" in (getattr(config, "rope_parameters", None) or {}):
        pairs = next(len(buffer) for name, buffer in empty_model("", config, torch.float32).named_buffers()
                     if name.endswith("inv_freq"))
        factors = {"rope_type": "longrope", "original_max_position_embeddings": 20,
                   "short_mscale": 1.1, "long_mscale": 1.3,  # of a Phi-MoE alone
                   "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
                   "long_factor": [2.0 + 0.5 * pair for pair in range(pairs)]}
        config = small_config(model_type, **random | windows | changes | {
            "rope_parameters": config.rope_parameters | factors, "original_max_position_embeddings": 20})
    return config


# the first generated table of docs/FAMILIES.md
CLASSES = sorted(re.findall(r"`(\w+)`[,| ]", (ROOT / "docs" / "FAMILIES.md").read_text()
                            .split("are convertible:")[1].split("The other")[0].split("| --- | --- |")[1]))
OTHERS = sorted({*CLASSES} - {changes.get("model_type", "llama") for changes in FAMILIES.values()})
READ = "llama", "phi3", "gpt_oss"  # in the quick tests


@pytest.mark.parametrize("name", [
    *READ, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*CLASSES} - {*READ}))])
def test_packed_rows_and_generation_are_read_as_the_class_itself_reads_them(name, group_of_one, tmp_path,
                                                                            monkeypatch):
    """In the mode of training, whatever a config says of dropout and noise; beyond windows and RoPE's switch:
    loss and gradients of samples alone, twice the same bits, and the logits that tokens are drawn from."""
    model = class_model(noisy(name))
    model.save_pretrained(tmp_path / "model")
    samples = [Sample(torch.randint(256, (length,)).tolist()) for length in (6, 30, 15, 25)]
    row = build_row(samples, 4)
    weights = torch.randn(sum(map(len, samples)), model.config.hidden_size)

    def gradients(net, hidden):
        loss = (hidden * weights).mean()
        net.zero_grad()
        loss.backward()
        return [loss.detach(), *(parameter.grad for _, parameter in sorted(net.named_parameters())
                                 if parameter.grad is not None)]

    expected = gradients(model, torch.cat([
        model.model(input_ids=torch.tensor([list(sample.segments[0])]), use_cache=False).last_hidden_state[0]
        for sample in samples]))
    path = str(tmp_path / "model")
    trainee = build(load_config(path), group_of_one, Execution(recompute=True, whole=True),
                    lambda name: (path, name))
    first, second = (gradients(trainee.net, trainee(row)) for _ in range(2))
    for packed, again, alone in zip(first, second, expected, strict=True):
        assert torch.equal(packed, again)
        torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))

    model.config._experts_implementation = "eager"  # the others know no float64, in which no router wavers
    model, drawn, draw = model.double(), [], decoding.draw
    monkeypatch.setattr(decoding, "draw", lambda logits, *rest: drawn.append(logits) or draw(logits, *rest))
    decoder, tokens = decoding.Decoder(model, 2, 40), TWO_TEXTS[:, :40]
    for position in range(40):
        decoder.next(position, tokens[:, position], torch.rand(2, 1, dtype=torch.float64))
    with torch.no_grad():
        for position, logits in enumerate(drawn):
            own = model(tokens[:, : position + 1], use_cache=False).logits[:, -1]
            torch.testing.assert_close(logits, own, rtol=0, atol=1e-3 * float(own.std()))


def checkpoint_files(directory) -> dict[str, bytes]:
    """Every file's bytes, but for the record, which holds the date."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "stage.json"}


def test_kv_heads_are_a_proper_divisor_of_the_sources():
    check_kv_heads(4, 2)
    for kv_heads in (3, 4):
        with pytest.raises(UserError, match=rf"^kv heads: expected one of \[1, 2\] for 4 .* {kv_heads}$"):
            check_kv_heads(4, kv_heads)


def test_the_readme_counts_the_classes_that_are_documented():
    assert f"{len(CLASSES)} model types of the 149" in (ROOT / "README.md").read_text().replace("\n", " ")


@pytest.mark.slow
def test_the_documented_classes_and_reasons_are_those_of_the_proof():
    """The first line of every reason, too."""
    run("bench/families.py", "--check")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_whole_run(name, inputs, tmp_path):
    changes = dict(FAMILIES.get(name, {}))
    source = tiny_model(**changes) if name in FAMILIES else class_model(small_config(name, bos_token_id=END))
    source = source.bfloat16() if name == "qwen2, GQA" else source
    model, home, layerwise = tmp_path / "model", tmp_path / "run", tmp_path / "layerwise"
    source.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    text = ["--model", model, "--text", inputs["text"], "--sequences", 8, "--length", 64]
    for directory, options in ((home, []), (layerwise, ["--layerwise"])):
        run("01_calibrate.py", "--run", directory, *text, *options)
        run("02_similarity.py", "--run", directory)
        run("03_group.py", "--run", directory, "--kv-heads", 2, "--restarts", 10, "--iterations", 100)
        run("04_align.py", "--run", directory, *options)
    for part in ("calibration", "aligned", "merged"):
        assert checkpoint_files(home / part) == checkpoint_files(layerwise / part)
    summary = json.loads((home / "aligned" / "stage.json").read_text())["summary"]
    if name in FAMILIES:
        assert summary["max_logit_difference"] < 1e-4
    else:  # whose logits may be large, and were allowed to differ in proportion
        assert summary["kl"] < 1e-6
    for cosines in summary["within_group_cosine"]:
        assert cosines["key_after"] >= cosines["key_before"]
        assert cosines["value_after"] > cosines["value_before"]

    run("04_align.py", "--run", tmp_path / "refitted", "--calibration", home / "calibration", "--groups",
        home / "groups", "--merge", "closed-form", "--refit", "attention", "--dtype", "float32")
    summary = json.loads((tmp_path / "refitted" / "merged" / "stage.json").read_text())["summary"]
    merged, output, trained = (sum(layer[name] for layer in summary["refit_layers"]) for name in ERRORS)
    assert trained <= (1 if name in FAMILIES else 1 + 1e-6) * output < merged

    run("05_prune_train.py", "--run", home, "--tasks", inputs["tasks"], "--only", "piqa", "--steps", 5,
        "--batch", 4, "--teacher-steps", 2, "--teacher-batch", 4, "--lr", 1e-3, "--mask-lr", 3)
    run("06_export.py", "--run", home)
    weights = whole_weights(saved_checkpoints(str(home / "train"))[-1])
    exported = AutoModelForCausalLM.from_pretrained(home / "gqa")
    attach_pairs(exported)
    embedding, tied = exported.model.embed_tokens.weight, source.config.tie_word_embeddings
    assert ("lm_head.weight" in weights) != tied == (exported.lm_head.weight is embedding)
    assert type(exported) is type(source) and exported.config.architectures == [type(source).__name__]
    free = {"num_key_value_heads": None, "transformers_version": None}
    configs = [PreTrainedConfig.get_config_dict(directory)[0] | free for directory in (model, home / "gqa")]
    assert configs[0].items() <= configs[1].items()  # keys that older releases read are added
    assert exported.config.num_key_value_heads == 2
    heads = head_parameters(exported.model.layers[0].self_attn)
    assert len(heads["k_proj.weight"]) == 2 * geometry(exported.config).head_dim
    ids = exported.generate(TWO_TEXTS[:, :5], max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert ids.shape[1] > 5

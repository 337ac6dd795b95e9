"""related/dha: operators, losses, grouping and budgets against their definitions; the model; the phases; the scripts."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from common.cli import UserError
from common.evaluate import all_logits, cache_bytes_per_token, max_difference
from common.method.fuse import merge_model
from common.models import geometry
from common.training.sharding import sum_over_ranks
from conftest import ROOT, byte_tokenizer, run, save_tiny, tiny_model
from related.dha import fuse, fusion, grouping, search, training
from related.dha.modeling import DhaConfig, DhaForCausalLM

GROUPS = {"key": [[[0, 2, 5, 7], [1, 3, 4, 6]], [[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]],
          "value": [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 7], [1, 6], [2, 5], [3, 4]], [[0, 1, 2, 3], [4, 5, 6, 7]]]}  # of tiny_model, 3 layers of 8 heads


def drawn_operators(groups=GROUPS, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(operator.shape, generator=generator) / operator.shape[1] for name, operator in fusion.starting_operators(groups, 8).items()}


def tokens(rows=2, length=40):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(3))


# operators and losses


@pytest.mark.parametrize("bias", [False, True])
def test_operators_that_change_nothing_change_nothing_and_others_do(bias):
    expected = all_logits(tiny_model(bias=bias), tokens())
    trained = {name: torch.nn.Parameter(operator) for name, operator in fusion.starting_operators(GROUPS, 8).items()}
    same = fusion.with_operators(tiny_model(bias=bias), trained, GROUPS)
    assert type(same.model.layers[0].self_attn.k_proj) is fusion.FusedLinear
    assert [name for name, _ in same.named_parameters()] == [name for name, _ in tiny_model(bias=bias).named_parameters()]
    assert max_difference(expected, all_logits(same, tokens())) < 1e-5
    for kind in fusion.PROJECTIONS:  # one factor of one head, of the keys or of the values, is noticed
        operators = fusion.starting_operators(GROUPS, 8)
        operators[f"1_{kind}"][0, 0, 1, 0] = 0.5
        assert max_difference(expected, all_logits(fusion.with_operators(tiny_model(bias=bias), operators, GROUPS), tokens())) > 1e-3


def test_mixed_heads_are_equation_5():
    attention, operators = tiny_model(bias=True).model.layers[0].self_attn, drawn_operators()
    x = torch.randn(5, 48)
    own = {"key": attention.k_proj(x).view(5, 8, 8), "value": attention.v_proj(x).view(5, 8, 8)}
    model = fusion.with_operators(tiny_model(bias=True), operators, GROUPS)
    for kind, name in fusion.PROJECTIONS.items():
        found = getattr(model.model.layers[0].self_attn, name)(x).view(5, 8, 8)
        for group, members in enumerate(GROUPS[kind][0]):
            for h, head in enumerate(members):
                expected = sum(operators[f"0_{kind}"][group, h, j] * own[kind][:, other] for j, other in enumerate(members))
                torch.testing.assert_close(found[:, head], expected, rtol=1e-4, atol=1e-5)


def test_fusion_loss_is_equation_7_in_the_scale_of_algorithm_3():
    operators = drawn_operators()
    layers = []
    for layer in range(3):
        total = 0.0
        for kind in fusion.PROJECTIONS:  # Algorithm 3: sums over pairs, over N = H g D (g - 1) / 2 terms of keys and as many of values
            operator = operators[f"{layer}_{kind}"]
            _, size, _, width = operator.shape
            pairs = sum(float((group[h] - group[other]).square().sum()) for group in operator for h in range(size) for other in range(h + 1, size))
            total += pairs / (8 * size * width * (size - 1) / 2)
        layers.append(total / 2)
    assert float(fusion.fusion_loss(operators)) == pytest.approx(sum(layers) / 3, rel=1e-5)
    losses = fusion.pair_losses(operators["0_key"])
    expected = torch.tensor([[[float((group[h] - group[o]).square().mean()) for o in range(4)] for h in range(4)] for group in operators["0_key"]])
    torch.testing.assert_close(losses, expected)
    assert fusion.layer_loss(fusion.kronecker([[0], [1]], 8)) == 0
    assert fusion.layer_loss(fusion.kronecker([[0, 1, 2, 3]], 8)) == pytest.approx(0.5)  # two unit vectors of 4: 2 / g
    assert float(fusion.fusion_loss({name: fusion.averaged(operator) for name, operator in operators.items()})) < 1e-12


def test_margin_is_equation_8():
    assert fusion.margin(0, 200) == 1 and fusion.margin(200, 200) == 0 and fusion.margin(900, 200) == 0
    assert fusion.margin(100, 200) == pytest.approx(0.999**100 / 2)


# who shares, and how many


def test_budgets_of_algorithm_5():
    draw = random.Random(0)
    losses = [1 + draw.random() / 2 for _ in range(32)]
    given = grouping.allocate(losses, [4, 8, 16], 256)  # the paper's: 32 layers of 32 heads, a quarter of them
    assert sum(given) == 256 and set(given) <= {4, 8, 16}
    assert given[losses.index(max(losses))] == 16 and given.count(16) == 1
    rest = sorted((loss, count) for loss, count in zip(losses, given, strict=True) if count < 16)
    assert [count for _, count in rest] == [4, 4] + [8] * 29  # what is left goes to the largest losses
    assert grouping.allocate([0.1, 0.4, 0.2, 0.3], [1, 2, 4], 8) == [1, 4, 1, 2]
    assert grouping.allocate([1.0, 0.1, 0.1, 9.0, 0.1], [1, 2, 4], 11) == [4, 1, 1, 4, 1]  # 1 / 2 is more than 0.1 / 1


def test_every_budget_that_can_be_met_is_met_exactly_and_no_other():
    draw = random.Random(1)
    for ladder, layers in itertools.product(([1, 2, 4], [2, 4, 8], [1, 3, 6]), (1, 2, 3, 5)):
        sums = {sum(numbers) for numbers in itertools.product(ladder, repeat=layers)}
        for total in range(layers * ladder[-1] + 2):
            losses = [draw.random() for _ in range(layers)]
            if total in sums:
                given = grouping.allocate(losses, ladder, total)
                assert sum(given) == total and set(given) <= set(ladder)
            else:
                with pytest.raises(UserError):
                    grouping.allocate(losses, ladder, total)


def partitions(heads: list[int], size: int):
    if not heads:
        yield []
        return
    for rest in itertools.combinations(heads[1:], size - 1):
        group = [heads[0], *rest]
        yield from ([group, *others] for others in partitions([h for h in heads if h not in group], size))


@pytest.mark.parametrize("count", [2, 4])
def test_annealing_finds_the_best_of_all_groupings_and_keeps_its_books(count):
    for seed in range(4):
        losses = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))
        losses = ((losses + losses.T) / 2).fill_diagonal_(0)
        best = min(grouping.within(losses.tolist(), groups) for groups in partitions(list(range(8)), 8 // count))
        found = grouping.anneal(losses * 1e-4, count, 50, seed)  # the scale of the losses does not matter
        assert grouping.within(losses.tolist(), found) == pytest.approx(best)
        stated, groups = grouping.walk(losses.tolist(), count, random.Random(seed))  # summed swap by swap
        assert stated == pytest.approx(grouping.within(losses.tolist(), groups)) and sorted(sum(groups, [])) == list(range(8))


def test_annealing_takes_worse_groupings_while_it_is_hot():
    class Draw:
        asked, positions = 0, random.Random(0)

        def shuffle(self, heads):
            heads[:] = sum(start, [])

        def randrange(self, below):
            return self.positions.randrange(below)

        def random(self):
            self.asked += 1
            return 0.5 if self.asked <= 10 else 1.0  # exp(-loss / T) is above 1/2 at first; later nothing worse is taken

    losses = torch.ones(6, 6).fill_diagonal_(0)
    losses[:3, :3] = losses[3:, 3:] = 0
    start = min(partitions(list(range(6)), 3), key=lambda groups: grouping.within(losses.tolist(), groups))
    draw = Draw()
    best, groups = grouping.walk(losses.tolist(), 2, draw)
    assert draw.asked > 10 and best == 0 and sorted(map(sorted, groups)) == start  # it left the optimum and still returns it


def test_cka_is_as_printed_and_finds_a_rotated_head():
    heads = torch.randn(3, 4, 20)
    heads[1] = 3 * torch.linalg.qr(torch.randn(4, 4))[0] @ heads[0]
    found = grouping.cka(heads)
    for a, b in itertools.product(range(3), repeat=2):
        x, y = heads[a].T.double(), heads[b].T.double()  # the paper's weights have a column per channel
        expected = (x.T @ y).norm() ** 2 / ((x.T @ x).norm() ** 2 * (y.T @ y).norm() ** 2).sqrt()
        assert float(found[a, b]) == pytest.approx(float(expected))
    assert float(found[0, 1]) == pytest.approx(1, abs=1e-5) and float(found[0, 2]) < 0.9
    assert grouping.redundancy(found) == pytest.approx(float(found[0, 1] + found[0, 2] + found[1, 2]) / 3)


# the model


def fused_tiny(groups=GROUPS, bias=True, **options):
    """A tiny model in fusion, its operators averaged, and the DHA model made of it."""
    operators, source = drawn_operators(groups), tiny_model(bias=bias, **options)
    fused = fuse.export(source.config, fusion.combine_heads(source.state_dict(), operators, groups, fusion.fold), groups)
    return fusion.with_operators(source, {name: fusion.averaged(operator) for name, operator in operators.items()}, groups), fused


@pytest.mark.parametrize("options", [{"bias": True}, {"bias": False, "tie_word_embeddings": True}])
def test_fused_heads_are_the_averaged_model_and_its_cache_holds_them_alone(options):
    averaged, fused = fused_tiny(**options)
    assert type(fused) is DhaForCausalLM
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4
    assert fuse.cache_heads(fused) == {"key": [2, 1, 4], "value": [1, 4, 2]}
    assert cache_bytes_per_token(fused, tokens()[0]) == (7 + 7) * 8 * 4
    assert geometry(fused.config).kv_heads == 14 // (2 * 3)
    first, second = fused.model.layers[0].self_attn, tiny_model(bias=True).model.layers[0].self_attn
    assert first.key_map == [0, 1, 0, 1, 1, 0, 1, 0] and not hasattr(second, "key_map")


def test_decoding_with_the_cache_equals_the_whole_pass():
    _, fused = fused_tiny()
    whole, cache = all_logits(fused, tokens(1))[0], None
    steps = []
    with torch.no_grad():
        for part in tokens(1).split((30, 1, 9), dim=1):
            output = fused(input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits[0])
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-4, atol=1e-4)


def test_attention_implementations_agree_and_packed_samples_stay_apart(tmp_path):
    _, fused = fused_tiny()
    fused.save_pretrained(tmp_path)
    expected = all_logits(fused, tokens())
    for attention in ("eager", "sdpa", "packed"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
        assert max_difference(expected, all_logits(loaded, tokens())) < 1e-4
    row = tokens().view(1, -1)
    with torch.no_grad():
        both = loaded(input_ids=row, position_ids=torch.arange(40).repeat(2)[None], use_cache=False, sample_lengths=(40, 40)).logits[0]
    torch.testing.assert_close(both, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_fresh_process_loads_it_registered_or_as_a_stranger(tmp_path):
    _, fused = fused_tiny()
    fused.save_pretrained(tmp_path / "fused")
    torch.save((tokens(), fused.generate(tokens(), max_new_tokens=6, do_sample=False)), tmp_path / "expected.pt")
    script = ("import torch; {first}; from transformers import AutoModelForCausalLM as Auto\n"
              "tokens, expected = torch.load('expected.pt'); model = Auto.from_pretrained('fused'{trust}).eval()\n"
              "assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), expected); print(type(model).__module__)")
    for first, trust, path, module in (("import related.dha.modeling", "", str(ROOT), "related.dha.modeling"),
                                       ("pass", ", trust_remote_code=True", "", "transformers_modules")):
        done = subprocess.run([sys.executable, "-c", script.format(first=first, trust=trust)], cwd=tmp_path, capture_output=True, text=True, check=False,
                              env=os.environ | {"PYTHONPATH": path, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0 and done.stdout.startswith(module), done.stdout + done.stderr


def test_shared_groups_of_one_number_are_a_stock_llama():
    groups = {kind: [[[0, 2, 5, 7], [1, 3, 4, 6]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 7, 3, 4], [1, 2, 5, 6]]] for kind in fusion.PROJECTIONS}
    averaged, fused = fused_tiny(groups)
    assert type(fused) is LlamaForCausalLM and geometry(fused.config).kv_heads == 2
    assert max_difference(all_logits(averaged, tokens()), all_logits(fused, tokens())) < 1e-4
    other = groups | {"value": [*groups["value"][:2], [[0, 1, 2, 3], [4, 5, 6, 7]]]}
    assert type(fused_tiny(other)[1]) is DhaForCausalLM


def test_config_survives_being_written(tmp_path):
    config = DhaConfig(key_groups=GROUPS["key"], value_groups=GROUPS["value"], num_hidden_layers=3)
    config.save_pretrained(tmp_path)
    again = DhaConfig.from_pretrained(tmp_path)
    assert (again.key_groups, again.value_groups) == (GROUPS["key"], GROUPS["value"])


# the phases


DATA = {"batch": 4, "seed": 0, "tokens_per_microbatch": 128}


def fusing(path: str, directory, ranks, steps: int, margin_steps: int):
    """Fusion of the model in `path`, begun in a directory or resumed there: arguments of `train`."""
    os.makedirs(directory, exist_ok=True)
    samples = [training.Sample(tuple(row[:-1]), (row[-1],)) for row in torch.randint(256, (16, 32), generator=torch.Generator().manual_seed(5)).tolist()]
    plan = training.make_plan(DATA, steps, 0.1, 100)
    job = training.begin(str(directory), {"steps": steps}, path, ranks, (1e-3, 2e-2, 5.0), fusion.starting_operators(GROUPS, 8))
    phase = training.Fusing(job, plan, samples[:4], 100, groups=GROUPS, margin_steps=margin_steps)
    return job, phase, samples, plan


def state_of(trainee) -> list[torch.Tensor]:
    return [tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone() for tensor in trainee.parameters()]


@pytest.mark.slow
def test_lagrangian_drives_the_fusion_loss_down_and_lambda_only_rises_where_it_is_too_large(tmp_path, group_of_one):
    arguments = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80, 20)
    assert training.train(*arguments)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["fusion_loss"] == pytest.approx(float(fusion.fusion_loss(fusion.starting_operators(GROUPS, 8))))
    assert lines[-1]["fusion_loss"] < 0.05 * lines[0]["fusion_loss"]
    assert all(line["lambda"] == 0 for line in lines if all(before["fusion_loss"] <= before["margin"] for before in lines[: line["step"] - 1]))
    assert lines[-1]["lambda"] > 1 and all(after["lambda"] >= before["lambda"] for before, after in itertools.pairwise(lines))
    rates = [line["lr"] / 1e-3 for line in lines]
    assert max(rates) == pytest.approx(1) and rates[-1] == pytest.approx(0.1, abs=0.01)


def test_operator_gradient_is_that_of_the_whole_objective(tmp_path, group_of_one):
    job, phase, samples, _ = fusing(save_tiny(tmp_path / "model"), tmp_path, group_of_one, 80, 20)
    trainee, generator = job.trainee, torch.Generator().manual_seed(0)
    with torch.no_grad():
        trainee.replicated["multiplier"].fill_(3.0)
        for operator in training.operators_of(trainee).values():
            operator.add_(0.1 * torch.randn(operator.shape, generator=generator))
    rows = training.build_row(samples[:2], 4), training.build_row(samples[2:4], 4)
    phase.begin_step(40)  # t is 0
    for row in rows:
        phase.row_loss(row)[0].backward()
    sum_over_ranks(phase.leaves(trainee))
    phase.end_step(40)

    operators = {name: operator.detach().clone().requires_grad_() for name, operator in training.operators_of(trainee).items()}
    model = fusion.with_operators(tiny_model(), operators, GROUPS)
    batch = torch.tensor([(*sample.prompt, *sample.answer) for sample in samples[:4]])
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss + 3.0 * fusion.fusion_loss(operators)
    loss.backward()
    for name, operator in operators.items():
        torch.testing.assert_close(trainee.replicated[name].grad, operator.grad, rtol=1e-3, atol=1e-6)
    assert float(trainee.replicated["multiplier"].grad) == pytest.approx(float(fusion.fusion_loss(operators).detach()))


@pytest.mark.slow
def test_a_resumed_fusion_ends_bit_identical(tmp_path, group_of_one):
    path, ends = save_tiny(tmp_path / "model"), []
    for pieces in ((12,), (5, 12)):
        for until in pieces:
            arguments = fusing(path, tmp_path / str(len(pieces)), group_of_one, 12, 4)
            started = arguments[0].step
            training.train(*arguments, until)
        assert started == (5 if len(pieces) == 2 else 0)
        ends.append(state_of(arguments[0].trainee))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)) and float(arguments[0].trainee.replicated["multiplier"].detach()) > 0


# the scripts


SMALL = "--sequences 24 --heldout-sequences 4 --length 32 --batch 4 --steps 4 --heldout-every 2".split()


@pytest.mark.slow
def test_the_scripts_from_search_to_comparison(inputs, tmp_path):
    home = tmp_path / "run"
    (tmp_path / "heldout.txt").write_text(Path(json.__file__).read_text())
    begin = ["--run-dir", home, "--model", inputs["model"], "--text", inputs["text"], "--heldout", tmp_path / "heldout.txt"]
    run("related/dha/search.py", *begin, *SMALL, processes=2)
    searched = json.loads((home / "search.json").read_text())
    for kind in ("key", "value"):
        assert [len(of_layer) for of_layer in searched["groups"][kind]] == searched["summary"][kind]["heads"]
        assert sum(searched["summary"][kind]["heads"]) == 2 * 3
        assert all(sorted(sum(of_layer, [])) == list(range(8)) for of_layer in searched["groups"][kind])
    assert searched["summary"]["unchanged_at_start"] <= 1e-5

    fast = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]
    run("related/dha/fuse.py", "--run-dir", home, *fast, processes=2)
    fused = json.loads((home / "fused" / "stage.json").read_text())["summary"]
    assert fused["fusion_loss"] < 1e-3 and fused["steps"] % 10 == 0 and fused["unchanged_at_start"] <= 1e-5 and fused["averaged_to_fused"] <= 1e-5
    assert fused["cache_heads"] == {kind: searched["summary"][kind]["heads"] for kind in ("key", "value")}

    total = fused["steps_so_far"] + 4
    assert "took" in run("related/dha/pretrain.py", "--run", home, "--steps", 4, fails=True).stderr
    run("related/dha/pretrain.py", "--run", home, "--steps", total, "--heldout-every", 2)
    pool = tmp_path / "pool"
    model = AutoModelForCausalLM.from_pretrained(inputs["model"])
    merge_model(model, 2).save_pretrained(pool)
    byte_tokenizer().save_pretrained(pool)
    run("related/dha/pretrain.py", "--run", home, "--steps", total, "--name", "mean-pool", "--start", pool, "--heldout-every", 50)
    done = run("related/dha/compare.py", "--run", home, "--names", "mean-pool", "dha")
    assert "least held-out loss" in done.stdout
    rows = json.loads((home / "compare.json").read_text())["summary"]["rows"]
    assert rows["dha"]["cache_bytes_per_token"] == rows["mean-pool"]["cache_bytes_per_token"] == 2 * 3 * 2 * 8 * 4
    assert rows["dha"]["heldout"][0][0] == fused["steps_so_far"] * 4 * 32 and rows["mean-pool"]["heldout"][0][0] == 0
    assert rows["dha"]["heldout"][-1][0] == rows["mean-pool"]["heldout"][-1][0] == total * 4 * 32
    record = home / "mean-pool" / "stage.json"
    record.write_text(record.read_text().replace(f'"tokens": {total * 4 * 32}', '"tokens": 64'))
    assert "expected the tokens of dha" in run("related/dha/compare.py", "--run", home, "--names", "mean-pool", "dha", "--force", fails=True).stderr


def test_what_it_is_not_for_is_refused_with_the_reason(group_of_one, tmp_path):
    for options, reason in (({"num_key_value_heads": 4}, "MHA"), ({"model_type": "mistral"}, "model_type llama")):
        with pytest.raises(UserError, match=reason):
            search.check_source("model", tiny_model(**options).config)
    path = save_tiny(tmp_path / "model")
    fusing(path, tmp_path, group_of_one, 10, 4)
    with pytest.raises(UserError, match="steps 10 -> 12"):
        fusing(path, tmp_path, group_of_one, 12, 4)
    with pytest.raises(UserError, match="with operators"):
        training.prove_unchanged(path, drawn_operators(), GROUPS, tokens())

"""Evaluation against the direct way: one prompt at a time, no padding, plain sums; standard errors against chance itself."""

import json
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import evaluate
from common.data.tasks import example_from_row, tokenize
from conftest import END, byte_tokenizer, run, save_tiny, task_rows, tiny_model

TOKENS = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_perplexity_is_transformers_loss(model):
    losses = [model(row[None], labels=row[None]).loss.item() for row in TOKENS]
    assert evaluate.perplexity(model, TOKENS) == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_logit_comparisons():
    first, second = torch.randn(2, 4, 9).unbind(), torch.randn(2, 4, 9).unbind()
    expected = sum(F.kl_div(b.log_softmax(-1), a.softmax(-1), reduction="batchmean") for a, b in zip(first, second, strict=True)) / 2
    assert evaluate.mean_kl(first, second) == pytest.approx(float(expected), abs=1e-6)
    assert evaluate.max_difference(first, second) == max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def examples():
    return [example_from_row(task, row) for task, rows in task_rows(3, 1).items() for row in rows]


def test_batched_generation_equals_one_at_a_time(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)  # of a chat model: not part of greedy generation
    tokenizer = byte_tokenizer()
    samples = [tokenize(example, tokenizer) for example in examples()]
    samples = [sample for sample in samples if len(sample.answer) == 4]  # one length: every batch generates as far
    assert len({len(sample.prompt) for sample in samples}) > 3  # padding is needed
    batched = evaluate.generate_answers(model, tokenizer, samples, 7, tqdm(disable=True))
    for sample, answer in zip(samples, batched, strict=True):
        ids = list(sample.prompt)
        with torch.no_grad():
            while len(ids) < len(sample) and END not in ids:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer == tokenizer.decode(ids[len(sample.prompt) :], skip_special_tokens=True).strip()


def test_choice_likelihood_is_the_sum_of_token_log_probabilities(model):
    tokenizer = byte_tokenizer()
    prompts = [[tokenize(e, tokenizer) for e in examples()[i : i + 2]] for i in (0, 6, 12)]
    scores = evaluate.choice_likelihoods(model, prompts, 4, tqdm(disable=True))
    for question, ours in zip(prompts, scores, strict=True):
        for sample, score in zip(question, ours, strict=True):
            ids = torch.tensor([[*sample.prompt, *sample.answer[:-1]]])
            with torch.no_grad():
                log_probs = model(ids).logits[0].log_softmax(-1)
            start = len(sample.prompt)
            direct = sum(float(log_probs[t - 1, ids[0, t]]) for t in range(start, ids.shape[1]))
            assert score == pytest.approx(direct, abs=1e-3)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_cache_bytes_are_those_of_the_kv_heads(kv_heads):
    model = tiny_model(num_key_value_heads=kv_heads)
    assert evaluate.cache_bytes_per_token(model, TOKENS[0]) == 2 * 3 * kv_heads * 8 * 4  # k and v, layers, heads, head_dim, float32


def test_standard_errors_are_the_spread_of_repeated_evaluations():
    """Tasks of known difficulty, answered at random many times: what is computed once is how the figures spread."""
    draw = numpy.random.default_rng(0)
    sizes, truth = {"a": 40, "b": 400, "c": 150}, {"a": 0.9, "b": 0.5, "c": 0.3}
    runs = []
    for _ in range(3000):
        rates = {task: evaluate.rate(list(draw.random(n) < truth[task])) for task, n in sizes.items()}
        tasks = {task: {"questions": sizes[task], "chance": 0.5} | {f"{kind}{end}": figure for kind in ("exact_match", "likelihood")
                        for end, figure in zip(("", "_stderr"), rates[task], strict=True)} for task in sizes}
        runs.append(evaluate.averages(tasks) | {task: rates[task][0] for task in sizes} | {f"{task}_stderr": rates[task][1] for task in sizes})
    for figure in ("a", "b", "c", "macro_exact_match", "macro_likelihood"):
        spread = numpy.std([run[figure] for run in runs])
        assert numpy.mean([run[f"{figure}_stderr"] for run in runs]) == pytest.approx(spread, rel=0.05)
    last = runs[-1]
    assert last["macro_likelihood"] == pytest.approx((last["a"] + last["b"] + last["c"]) / 3)
    pooled = [1] * round(40 * last["a"] + 400 * last["b"] + 150 * last["c"])
    pooled += [0] * (590 - len(pooled))
    assert last["micro_likelihood"] == pytest.approx(numpy.mean(pooled))
    assert last["micro_likelihood_stderr"] == pytest.approx(numpy.std(pooled) / math.sqrt(590))
    assert last["macro_chance"] == last["micro_chance"] == 0.5


def test_scores_go_between_the_markers_of_a_card(tmp_path):
    card = tmp_path / "README.md"
    assert not evaluate.write_scores(str(tmp_path), "| 1 |")  # no card
    for markers in ("", "<!-- scores -->", "<!-- /scores -->\n<!-- scores -->"):
        card.write_text(text := f"# Model\n{markers}\nmore")
        assert not evaluate.write_scores(str(tmp_path), "| 1 |") and card.read_text() == text
    card.write_text("# Model\n<!-- scores -->\nnone yet\n<!-- /scores -->\nmore")
    for scores in ("| 1 |", "| 2 |\n| 3 |"):  # a second evaluation replaces the first
        assert evaluate.write_scores(str(tmp_path), scores)
        assert card.read_text() == f"# Model\n<!-- scores -->\n{scores}\n<!-- /scores -->\nmore"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_stage_writes_every_answer_and_the_figures_that_follow(inputs, tmp_path):
    """A GQA source and two checkpoints, three of five questions drawn by a seed; all figures recomputed from eval.jsonl."""
    first, second = save_tiny(tmp_path / "first", num_key_value_heads=4), save_tiny(tmp_path / "second", seed=1, num_key_value_heads=2)
    (tmp_path / "second" / "README.md").write_text("<!-- scores -->\n<!-- /scores -->\n")
    arguments = ["--run", tmp_path / "run", "--model", f"a={first}", f"b={second}", "--tasks", inputs["tasks"], "--text", inputs["text"],
                 "--length", 64, "--sequences", 2, "--limit", 3, "--seed", 1]
    done = run("07_eval.py", *arguments)
    written = json.loads((tmp_path / "run" / "eval.json").read_text())
    outcomes = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert written["begin_of_sequence"] is False and len(outcomes) == 2 * 8 * 3
    for model, figures in written["results"].items():
        for task, measured in figures["tasks"].items():
            rows = [json.loads(line) for line in open(f"{inputs['tasks']}/{task}.validation.jsonl")]
            answered = [o for o in outcomes if (o["model"], o["task"]) == (model, task)]
            assert [o["question"] for o in answered] == sorted({o["question"] for o in answered}) != [0, 1, 2]
            for outcome in answered:
                example = example_from_row(task, rows[outcome["question"]])
                assert outcome["label"] == example.label and outcome["exact"] == (outcome["generated"] == example.answer)
                assert len(outcome["likelihood_scores"]) == len(example.choices)
                assert outcome["likelihood_choice"] == numpy.argmax(outcome["likelihood_scores"])
            assert measured["questions"] == 3 and measured["exact_match"] == numpy.mean([o["exact"] for o in answered])
            assert measured["likelihood"] == numpy.mean([o["likelihood_choice"] == o["label"] for o in answered])
        assert figures["heads"] == 8 and figures["kv_heads"] == {"a": 4, "b": 2}[model]
        assert f"{100 * figures['macro_likelihood']:.1f} ± {100 * figures['macro_likelihood_stderr']:.1f}" in done.stdout
    card = (tmp_path / "second" / "README.md").read_text()
    assert "24 validation questions" in card and "3 a task drawn with seed 1" in card and "| 2 of 8 " in card and "text.txt" in card
    assert not (tmp_path / "first" / "README.md").exists()

    run("07_eval.py", *arguments[:-2], "--text", "none", "--only", "boolq", "--force")  # no seed: the first three; no text
    outcomes = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert [o["question"] for o in outcomes] == [0, 1, 2] * 2 and "perplexity" not in (tmp_path / "run" / "eval.md").read_text()

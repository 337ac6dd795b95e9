"""Evaluation against the direct way: one prompt at a time, no padding, plain sums; repeated evaluations."""

import itertools
import math

import numpy
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from common.data.rows import Sample
from common.data.tasks import PUBLISHED_SIZES, TASKS, Example, example_from_row, tokenize
from common.evaluation import evaluate
from common.models import equivalence
from common.models.layers import Layers
from common.models.load import load_model
from common.run.errors import UserError
from models import END, byte_tokenizer, save_tiny, tiny_model
from reference import compared
from runs import task_rows

TOKENS = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


TEXTS = [Sample(row) for row in TOKENS.tolist()]
CHAT = [Sample(row[:9], row[9:14], row[14:20], row[20:40]) for row in TOKENS.tolist()]


@torch.no_grad()
@pytest.mark.parametrize(("samples", "predicting"), [
    (TEXTS, [*range(49)]), (CHAT, [*range(8, 13), *range(19, 39)])])
def test_predictions_against_a_reference(model, samples, predicting, monkeypatch):
    """From whole logits: of texts every token but the first, of chats the answers; errors are scipy's of
    sequences of one length. A reference of another vocabulary says nothing.
    """
    monkeypatch.setattr(evaluate, "CHUNK", 7)
    other, ids = tiny_model(seed=1), TOKENS[:, : len(samples[0])]
    metrics, predictions = evaluate.prediction_metrics(model, samples, None)
    ours, theirs = (net(ids).logits.double().log_softmax(-1)[:, predicting] for net in (other, model))
    columns = compared(ours, theirs, ids[:, [position + 1 for position in predicting]])
    losses, reference_losses = columns.pop("loss"), columns.pop("teacher_loss")
    assert metrics == approximately(perplexity=reference_losses)
    metrics, _ = evaluate.prediction_metrics(other, samples, predictions)
    assert metrics == approximately(perplexity=losses, loss_above=losses - reference_losses, **columns)
    itself, _ = evaluate.prediction_metrics(tiny_model(), samples, predictions)
    assert (itself["kl"], itself["agreement"], itself["loss_above"], itself["kl_stderr"]) == (0, 1, 0, 0)
    small = tiny_model(vocab_size=300)
    assert evaluate.prediction_metrics(small, samples, predictions)[0].keys() == {
        "perplexity", "perplexity_stderr"}
    single, _ = evaluate.prediction_metrics(other, samples[:1], None)
    assert single.keys() == {"perplexity"}  # one sequence has no spread


def approximately(**columns):
    """The means of columns [sequences, tokens] and their standard errors over sequences."""
    expected = {}
    for name, column in columns.items():
        mean, error = float(column.mean()), scipy.stats.sem(column.mean(1))
        if name == "perplexity":
            mean, error = math.exp(mean), math.exp(mean) * error
        expected |= {name: mean, f"{name}_stderr": error}
    return pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_the_error_of_a_ratio_is_the_spread_of_repeated_samples():
    """Sequences of any length, whose tokens depend on each other: 4,000 samples of 60 sequences, whose
    spread is known to 1.1 %. Errors of a mean of independent tokens would be a third of it.
    """
    generator = numpy.random.default_rng(0)
    counts = generator.integers(5, 200, (4000, 60))
    means = 2 + generator.normal(0, 0.5, counts.shape) + generator.normal(0, 1, counts.shape) / counts**0.5
    estimates = [equivalence.ratio((mean * count).tolist(), count.tolist())
                 for mean, count in zip(means, counts, strict=True)]
    spread = numpy.std([mean for mean, _ in estimates])
    assert numpy.mean([error for _, error in estimates]) == pytest.approx(spread, rel=0.04)


@torch.no_grad()
def test_a_reference_with_a_cap_is_compared_by_its_logits():
    """Not by the products of its head: from itself it differs by nothing."""
    granite = tiny_model(model_type="granite", logits_scaling=8.0)
    _, predictions = evaluate.prediction_metrics(granite, TEXTS, None)
    metrics, _ = evaluate.prediction_metrics(granite, TEXTS, predictions)
    assert (metrics["kl"], metrics["agreement"]) == (pytest.approx(0, abs=1e-12), 1)
    torch.testing.assert_close(predictions.logits(1), granite(TOKENS[1:2]).logits[0])


@pytest.mark.parametrize("template, prefix", [(None, ""), ("{{ messages[0]['content'] }}!", "!")])
def test_prompts_are_answered_greedily_through_the_template(model, template, prefix):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    ids = tokenizer(f"What is red?{prefix}", add_special_tokens=False)["input_ids"]
    answer = tokenizer.decode(greedy(model, ids, 5), skip_special_tokens=True).strip()
    questions = ["What is red, and what is blue?", "What is red?"]
    prompts = evaluate.prompt_ids(questions, tokenizer)
    assert prompts[1] == ids and evaluate.complete(model, tokenizer, prompts[1:], 5) == [answer]
    assert evaluate.complete(model, tokenizer, prompts, 5, 2)[1] == answer


@pytest.mark.parametrize(("dtype", "changes"), [
    (torch.float32, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    pytest.param(torch.bfloat16, {"model_type": "qwen3"}, marks=pytest.mark.slow),
])
def test_layer_by_layer_perplexity_and_cache_are_the_whole_models(tmp_path, dtype, changes):
    path, row = save_tiny(tmp_path / "model", dtype, **changes), TOKENS[0]
    whole, layers = load_model(path, dtype), Layers(path, dtype, "cpu", layerwise=True)
    expected = evaluate.perplexity(whole, TOKENS)
    metrics = evaluate.layerwise_perplexity(layers, TOKENS, str(tmp_path))
    assert metrics["perplexity"] == pytest.approx(expected, rel=1e-6)
    cached = evaluate.cache_bytes_per_token(whole, row)
    assert evaluate.cache_bytes_per_token(layers.model, row) == cached
    assert {parameter.device.type for parameter in layers.model.parameters()} == {"meta"}


def test_logit_comparisons():
    first, second = torch.randn(2, 2, 4, 9, generator=torch.Generator().manual_seed(0))
    pairs = list(zip(first, second, strict=True))
    divergences = [F.kl_div(b[:-1].log_softmax(-1), a[:-1].softmax(-1), reduction="batchmean")
                   for a, b in pairs]  # the last token predicts none that is known
    assert equivalence.mean_kl(first, second) == pytest.approx(float(sum(divergences)) / 2, abs=1e-6)
    assert equivalence.max_difference(first, second) == float((first - second).abs().max())


def examples() -> list[Example]:
    return [example_from_row(task, row) for task, rows in task_rows(3, 1).items() for row in rows]


@torch.no_grad()
def greedy(model, prompt, steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


OWN_SETTINGS = {"repetition_penalty": 5.0, "do_sample": True, "num_beams": 4, "num_return_sequences": 2,
                "return_dict_in_generate": True, "no_repeat_ngram_size": 1, "guidance_scale": 3.0,
                "max_time": 1e-9, "min_new_tokens": 3, "stop_strings": ["a"], "penalty_alpha": 0.6}


def test_batched_generation_is_greedy_whatever_the_checkpoint_says(model, monkeypatch):
    for name, value in OWN_SETTINGS.items():
        monkeypatch.setattr(model.generation_config, name, value)
    tokenizer = byte_tokenizer()
    prompts = [tokenize(example, tokenizer).prompt for example in examples()]
    assert len(set(map(len, prompts))) > 3  # padding is needed
    batched = evaluate.generate_answers(model, tokenizer, prompts, 4, 7, tqdm(disable=True))
    for prompt, answer in zip(prompts, batched, strict=True):
        assert answer == tokenizer.decode(greedy(model, prompt, 4), skip_special_tokens=True).strip()
    assert model.generation_config.num_beams == 4  # as it was


class Script(LlamaForCausalLM):
    """A model that answers every prompt with the same text, then with "z" for ever."""

    def __init__(self, text: str):
        super().__init__(tiny_model().config)
        self.ids = byte_tokenizer()(text)["input_ids"]

    def generate(self, *arguments, **options):
        self.coming = itertools.chain(self.ids, itertools.repeat(byte_tokenizer()("z")["input_ids"][0]))
        return super().generate(*arguments, **options)

    def forward(self, input_ids, **_):
        token = next(self.coming)
        logits = torch.zeros(len(input_ids), input_ids.shape[1], 260)
        logits[..., token] = 1
        return CausalLMOutput(logits=logits)


@pytest.mark.parametrize("text, right, expected", [
    (" ab\n<eos>", "ab", "ab"),  # stripped
    (" ab\nQuestion: 1<eos>", "ab", "ab\nQ"),  # goes on: wrong, and cut where it is
    ("ab<eos>cd", "abcd", "ab"),
    ("zz", "z" * 20, "z" * 8),  # as many as allowed
    ("\u00e9t\u00e9<eos>", "\u00e9t\u00e9", "\u00e9t\u00e9"),  # characters of two tokens each
])
def test_an_answer_ends_where_it_cannot_be_right_whatever_is_in_its_batch(text, right, expected):
    script, tokenizer, rights = Script(text), byte_tokenizer(), [right, "a much longer right answer"]
    prompts, bar = [[1]] * len(rights), tqdm(disable=True)
    answers = evaluate.generate_answers(script, tokenizer, prompts, 8, 2, bar, rights)
    assert answers[0] == expected


@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_tokens_that_end_an_answer_are_also_those_of_the_configs(where):
    script, tokenizer = Script("Yes.!z"), byte_tokenizer()
    getattr(script, where).eos_token_id = [END, tokenizer("!")["input_ids"][0]]
    assert evaluate.generate_answers(script, tokenizer, [[1]], 8, 1, tqdm(disable=True)) == ["Yes."]


@pytest.mark.parametrize("batch", [1, 4])
@torch.no_grad()
def test_choice_likelihood_is_the_sum_of_token_log_probabilities(model, batch):
    """Of one without tokens nothing, not that of the prompt."""
    tokenizer = byte_tokenizer()
    questions = [[tokenize(example, tokenizer) for example in examples()[i : i + 2]] for i in (0, 6, 12)]
    questions += [[Sample((1, 2, 3), (END,)), Sample((1, 2, 3), (4, END))], [Sample((1, 2), (END,))]]
    scores = evaluate.choice_likelihoods(model, questions, batch, tqdm(disable=True))
    assert [len(row) for row in scores] == [2, 2, 2, 2, 1]
    for question, question_scores in zip(questions, scores, strict=True):
        for sample, score in zip(question, question_scores, strict=True):
            ids = torch.tensor([[*sample.prompt, *sample.answer[:-1]]])
            log_probs = model(ids).logits[0].log_softmax(-1)
            start = len(sample.prompt)
            direct = sum(float(log_probs[t - 1, ids[0, t]]) for t in range(start, ids.shape[1]))
            assert score == pytest.approx(direct, abs=1e-3)


def test_one_value_that_is_not_finite_is_enough():
    evaluate.require_finite([0.5, -3.0], "a", tiny_model())
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UserError, match="a: expected finite log-probabilities, found NaN or Inf"):
            evaluate.require_finite([0.5, value, -3.0], "a", tiny_model())


def test_speed_is_tokens_over_seconds(model, monkeypatch):
    seconds = iter([0, 2, 10, 20, 21, 41, 50, 54, 58, 60, 68, 98, 100, 105, 106])
    # prefill 2, 1, 4, 8, 5; decode 8, 20, 4, 30, 1
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: next(seconds))
    assert evaluate.speed(model, TOKENS[0]) == {"prefill_tokens_per_s": 50 / 4, "decode_tokens_per_s": 32 / 8}


EXAMPLE = Example("arc_easy", "Question", ("two", " it's two ", "three"), 1)


@pytest.mark.parametrize(("answer", "exact"), [
    ("it's two", True), ("it's two .", False), ("it's", False), ("It's two", False),
])
def test_exact_match_is_equality_with_the_stripped_answer(answer, exact):
    verdict = {"label": 1, "likelihood_scores": [-3.0, -1.0, -2.0], "likelihood_choice": 1,
               "generated": answer, "exact": exact}
    assert evaluate.judge(EXAMPLE, answer, [-3.0, -1.0, -2.0]) == verdict


def test_rates_of_a_task():
    pair = Example("piqa", "Goal", ("a", "b"), 0)
    answers, scores = ["it's two", "x", "a"], ([-3, -1, -2], [-1, -2, -3], [-2, -1])
    verdicts = list(map(evaluate.judge, [EXAMPLE, EXAMPLE, pair], answers, scores))
    figures = evaluate.rates([EXAMPLE, EXAMPLE, pair], verdicts)
    assert figures["questions"] == 3 and figures["chance"] == pytest.approx((1 / 3 + 1 / 3 + 1 / 2) / 3)
    assert figures["exact_match"] == pytest.approx(2 / 3) and figures["likelihood"] == pytest.approx(1 / 3)
    error = numpy.std([1, 0, 1]) / math.sqrt(3)
    assert figures["exact_match_stderr"] == pytest.approx(error)
    assert figures["likelihood_stderr"] == pytest.approx(error)


SIZES, TRUTH = {"a": 40, "b": 400, "c": 150}, {"a": 0.9, "b": 0.5, "c": 0.3}


def rates_of(questions: int, share: float, error: float = 0.0, chance: float = 0.5) -> dict[str, float]:
    """The rates of a task where answers and likelihoods are right alike."""
    return {"questions": questions, "chance": chance, "exact_match": share, "exact_match_stderr": error,
            "likelihood": share, "likelihood_stderr": error}


def random_evaluation(draw) -> dict[str, float]:
    """The figures of one evaluation of tasks of known difficulty, answered at random."""
    figures, tasks = {}, {}
    for task, size in SIZES.items():
        share, error = evaluate.accuracy(list(draw.random(size) < TRUTH[task]))
        figures |= {task: share, f"{task}_stderr": error}
        tasks[task] = rates_of(size, share, error)
    return figures | evaluate.averages(tasks)


def test_standard_errors_are_the_spread_of_repeated_evaluations():
    draw = numpy.random.default_rng(0)
    runs = [random_evaluation(draw) for _ in range(3000)]
    for figure in ("a", "b", "c", "macro_exact_match", "macro_likelihood"):
        spread = numpy.std([run[figure] for run in runs])
        errors = [run[f"{figure}_stderr"] for run in runs]
        assert numpy.mean(errors) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("rates, published", [  # of Tables 1 and 2
    ("86.85 81.39 87.08 82.95 66.22 80.88 79.00 77.53", 84.60),  # LLaMA2-7B to 16 kv heads, baseline
    ("84.83 72.74 68.31 71.35 53.18 64.04 59.20 71.34", 71.37),  # Sheared-LLaMA-1.3B, the teacher
])
def test_the_published_average_is_the_micro_average(rates, published):
    """Over the questions of Table 4; no macro average is within 3 percentage points."""
    averages = evaluate.averages({task: rates_of(PUBLISHED_SIZES[task][1], float(rate) / 100)
                                  for task, rate in zip(TASKS, rates.split(), strict=True)})
    assert 100 * averages["micro_exact_match"] == pytest.approx(published, abs=0.0051)
    assert 100 * averages["macro_exact_match"] < published - 3


def test_macro_counts_tasks_and_micro_counts_questions():
    run = random_evaluation(numpy.random.default_rng(1))
    right = [round(size * run[task]) for task, size in SIZES.items()]
    pooled = [1] * sum(right) + [0] * (590 - sum(right))
    for kind in ("exact_match", "likelihood"):
        assert run[f"macro_{kind}"] == pytest.approx((run["a"] + run["b"] + run["c"]) / 3)
        assert run[f"micro_{kind}"] == pytest.approx(numpy.mean(pooled))
        assert run[f"micro_{kind}_stderr"] == pytest.approx(numpy.std(pooled) / math.sqrt(590))
    averages = evaluate.averages({"a": rates_of(1, 1.0, chance=0.5), "b": rates_of(3, 1.0, chance=0.25)})
    assert (averages["macro_chance"], averages["micro_chance"]) == (0.375, 0.3125)

"""Evaluation: perplexity, tasks by generation and by likelihood, KV cache size and speed."""

import contextlib
import itertools
import math
import time
from statistics import median

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from common.data.chat import apply_template, fixed_template
from common.data.rows import Sample
from common.method.losses import cross_entropy
from common.models import equivalence
from common.models.forward import attention_alone, replaced
from common.models.head import Head, head_of
from common.models.load import bos_prefix, end_tokens
from common.models.quantized_cache import LAYOUTS, PLAIN, quantized
from common.run.errors import UserError
from common.run.progress import Progress
from common.training.packing import build_row

LONGEST_ANSWER = 512  # tokens of an answer to a question, at most, as in the authors' code
DECODED = 32  # tokens decoded by `speed`
CHUNK = 512  # tokens whose logits are in memory in float64 at a time
REPEATS = 5  # runs of `speed`, of which the median counts


@torch.no_grad()
def perplexity(model, tokens: torch.Tensor) -> float:
    """exp of the mean next-token loss over tokens [n, T], one row at a time, on the model's device."""
    rows = Progress(tokens.to(model.device), desc="perplexity", unit="seq", leave=False)
    logits = (model(input_ids=row[None], use_cache=False).logits[0] for row in rows)
    return equivalence.perplexity_of(logits, tokens)


class Predictions:
    """A model's predictions for samples, at a fraction of the logits' size: the head and its inputs."""

    def __init__(self, head: Head):
        self.head, self.hidden = head, []  # [1, T, hidden] per sample

    def logits(self, number: int) -> torch.Tensor:
        """Logits [T, vocab] of a sample."""
        products = self.head.linear.forward(self.hidden[number])  # past its hooks: it may be measured itself
        return self.head.finish(products, None)[0]


@torch.no_grad()
def prediction_metrics(model, samples: list[Sample],
                       reference: Predictions | None) -> tuple[dict, Predictions]:
    """Metrics of a model's predictions: of the answers of chats, of every token but the first of texts.

    "perplexity" and, against the predictions of a reference for the same samples, equivalence.COMPARED with
    "loss_above" in place of both losses, the model's minus the reference's; each with its standard error over
    samples, NAME_stderr, if there are several. Also returns the model's own predictions. Without a reference
    that has its vocabulary, perplexity alone. Raises UserError if that overflows.
    """
    predictions, sums, counts = Predictions(head_of(model)), [], []

    def keep(head, inputs, products):
        predictions.hidden.append(inputs[0])

    with predictions.head.linear.register_forward_hook(keep):
        for number, sample in enumerate(Progress(samples, desc="predictions", unit="seq", leave=False)):
            row = build_row([sample], 1)
            at = row.answer_at if sample.answer_tokens else row.prompt_at
            logits = model(input_ids=row.input_ids.to(model.device), use_cache=False).logits[0]
            theirs, targets = reference and reference.logits(number), row.targets.to(logits.device)
            compared, total = reference is not None and theirs.shape == logits.shape, 0
            for part in at.split(CHUNK):
                ours = logits[part].double()
                columns = (equivalence.compare(ours, theirs[part].to(ours), targets[part]) if compared
                           else [cross_entropy(ours, targets[part])])
                total += torch.stack([column.double().sum() for column in columns])
            sums.append(total)
            counts.append(len(at))
    names = equivalence.COMPARED if compared else ["loss"]
    return means_with_errors(dict(zip(names, torch.stack(sums).T.tolist(), strict=True)), counts), predictions


def means_with_errors(totals: dict[str, list[float]], counts: list[int]) -> dict[str, float]:
    """The metrics of prediction_metrics from the sums over each sample's tokens, and their numbers."""
    if "teacher_loss" in totals:
        pairs = zip(totals["loss"], totals.pop("teacher_loss"), strict=True)
        totals["loss_above"] = [ours - theirs for ours, theirs in pairs]
    means = {name: equivalence.ratio(column, counts) for name, column in totals.items()}
    loss, error = means.pop("loss")
    perplexity = equivalence.perplexity_from(loss)
    # d exp(loss) = exp(loss) d loss
    means = {"perplexity": (perplexity, error and perplexity * error)} | means
    errors = {f"{name}_stderr": error for name, (_, error) in means.items() if error is not None}
    return {name: mean for name, (mean, _) in means.items()} | errors


def cache_metrics(model, samples: list[Sample], reference: Predictions, caches) -> dict[str, dict]:
    """For a cache of f16, and for each of `caches`, its bytes per token and, in each layout, what
    prediction_metrics gives.
    """

    def measured(cache, layout: str) -> dict:
        with quantized(model, cache, layout):
            return prediction_metrics(model, samples, reference)[0]

    metrics = {}
    for cache in dict.fromkeys((PLAIN, *caches)):
        if cache.in_blocks:
            by_layout = {layout: measured(cache, layout) for layout in LAYOUTS}
        else:
            by_layout = dict.fromkeys(LAYOUTS, measured(cache, "halves"))
        metrics[str(cache)] = {"bytes_per_token": cache.bytes_per_token(model.config)} | by_layout
    return metrics


@torch.no_grad()
def layerwise_perplexity(layers, tokens: torch.Tensor, directory: str) -> dict[str, float]:
    """Perplexity over tokens [n, T], with its standard error, of a model's Layers; hidden states are in a
    file in `directory`.
    """
    hidden = layers.embed(tokens.split(1), directory)
    total = layers.config.num_hidden_layers
    for layer in Progress(layers.decoder_layers(), "perplexity", total, unit="layer", leave=False):
        layers.advance(layer, hidden)
    losses = equivalence.sequence_losses(layers.logits_of(hidden), tokens)
    return means_with_errors({"loss": losses}, [1] * len(losses))


def left_padded(prompts: list, pad: int, device) -> dict[str, torch.Tensor]:
    """Prompts as one left-padded batch with its attention mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def batches_by_length(lengths: list[int], batch: int) -> list[list[int]]:
    """Indices in batches of items of similar length, to minimize padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def can_become(text: str, answer: str) -> bool:
    """Whether a text, stripped, may equal the stripped answer once more is written. Blanks do not count here.

    Bytes of a character that is not complete yet are shown as replacement characters at the end.
    """
    return "".join(answer.split()).startswith("".join(text.rstrip("\ufffd").split()))


class StopOnMismatch(StoppingCriteria):
    """Ends each row of a batch whose text can no longer become its right answer."""

    def __init__(self, tokenizer, answers: list[str], start: int):
        self.tokenizer, self.answers, self.start = tokenizer, answers, start  # of what is generated

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        missed = [not can_become(decoded(self.tokenizer, row[self.start :]), answer)
                  for row, answer in zip(input_ids, self.answers, strict=True)]
        return torch.tensor(missed, device=input_ids.device)


def decoded(tokenizer, ids) -> str:
    """The text of token ids, without special tokens and with blanks as they are."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@contextlib.contextmanager
def greedy(model, tokenizer, longest: int):
    """Context manager: a GenerationConfig of plain greedy decoding, of at most `longest` tokens.

    Of the checkpoint's generation settings only the tokens that end an answer count: the tokenizer's,
    the config's and the generation config's.
    """
    own = model.generation_config
    ends = end_tokens(tokenizer, model.config.eos_token_id, own.eos_token_id)
    model.generation_config = GenerationConfig()  # generate() takes from it what is not set below
    try:
        yield GenerationConfig(do_sample=False, max_new_tokens=longest, pad_token_id=tokenizer.eos_token_id,
                               eos_token_id=ends)
    finally:
        model.generation_config = own


@torch.no_grad()
def generate_answers(
    model,
    tokenizer,
    prompts: list,  # of token ids
    longest: int,  # tokens of an answer
    batch: int,
    bar,
    right: list[str] | None = None,  # the right answers, where only equality with them counts
) -> list[str]:
    """Greedy continuation of each prompt up to an end of sequence, stripped.

    With `right`, an answer that can no longer equal the right one is cut there.
    """
    answers = [""] * len(prompts)
    with greedy(model, tokenizer, longest) as config:
        for indices in batches_by_length(list(map(len, prompts)), batch):
            inputs = left_padded([prompts[i] for i in indices], tokenizer.eos_token_id, model.device)
            start = inputs["input_ids"].shape[1]
            stop = [StopOnMismatch(tokenizer, [right[i] for i in indices], start)] if right else []
            output = model.generate(**inputs, generation_config=config,
                                    stopping_criteria=StoppingCriteriaList(stop))
            for i, row in zip(indices, output[:, start:].tolist(), strict=True):
                written = itertools.takewhile(lambda token: token not in config.eos_token_id, row)
                answers[i] = decoded(tokenizer, list(written)).strip()
            bar.update(len(indices))
    return answers


def prompt_ids(prompts: list[str], tokenizer) -> list[list[int]]:
    """Token ids of prompts: of a user's turn if there is a chat template, else of a text that goes on.

    Raises UserError for a template that refuses a prompt.
    """
    if not tokenizer.chat_template:
        prefix = bos_prefix(tokenizer)
        return [[*prefix, *tokenizer(prompt, add_special_tokens=False)["input_ids"]] for prompt in prompts]
    template, rows = fixed_template(tokenizer, "prompts"), []
    for prompt in prompts:
        try:
            text = apply_template([{"role": "user", "content": prompt}], template, prompting=True)
        except ValueError as error:
            raise UserError(f"{tokenizer.name_or_path}: a prompt by itself: {error}") from error
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return rows


def complete(model, tokenizer, prompts: list[list[int]], longest: int, batch: int = 1) -> list[str]:
    """Greedy answers of at most `longest` tokens to prompts, token ids by prompt_ids."""
    with Progress(total=len(prompts), desc="answers", unit="prompt", leave=False) as bar:
        return generate_answers(model, tokenizer, prompts, longest, batch, bar)


@torch.no_grad()
def choice_likelihoods(model, samples: list[list], batch: int, bar) -> list[list[float]]:
    """Sum of log-probabilities of each choice's tokens (without end-of-sequence) after the prompt.

    samples: per question a list of tokenized choices with the same prompt. Returns a float for each.
    """
    choices = list(itertools.chain.from_iterable(samples))
    scores = [0.0] * len(choices)
    for indices in batches_by_length([len(sample) for sample in choices], batch):
        rows = [(*choices[i].prompt, *choices[i].answer[:-1]) for i in indices]
        sizes = [len(choices[i].answer) - 1 for i in indices]
        inputs = left_padded(rows, 0, model.device)
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        output = model(**inputs, position_ids=positions, use_cache=False, logits_to_keep=max(sizes) + 1)
        log_probs = output.logits[:, :-1].float().log_softmax(-1)  # [batch, longest answer, vocab]
        ids = inputs["input_ids"][:, inputs["input_ids"].shape[1] - max(sizes) :]
        token_scores = log_probs.gather(-1, ids[..., None])[..., 0]
        sums = [row[len(row) - size :].sum() for size, row in zip(sizes, token_scores, strict=True)]
        for i, total in zip(indices, torch.stack(sums).tolist(), strict=True):
            scores[i] = total
        bar.update(len(indices))
    remaining = iter(scores)
    return [list(itertools.islice(remaining, len(question))) for question in samples]


@torch.no_grad()
def cache_bytes_per_token(model, tokens: torch.Tensor) -> float:
    """Bytes per token of the cached keys and values after one forward pass. tokens: [T]."""
    layers = model.model.layers if model.device.type == "meta" else ()  # experts are chosen by numbers
    with replaced({layer: attention_alone(layer) for layer in layers}):
        cache = model(input_ids=tokens[None].to(model.device), use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / len(tokens)


@torch.no_grad()
def speed(model, tokens: torch.Tensor) -> dict[str, float]:
    """Tokens per second in prefill and in greedy decoding after it, for one sequence. tokens: [T]."""
    inputs = tokens[None].to(model.device)
    prefill, decode = [], []
    for _ in range(REPEATS):
        start = _now(model)
        output = model(input_ids=inputs, use_cache=True, logits_to_keep=1)
        prefilled = _now(model)
        for _ in range(DECODED):
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        prefill.append(prefilled - start)
        decode.append(_now(model) - prefilled)
    return {"prefill_tokens_per_s": len(tokens) / median(prefill),
            "decode_tokens_per_s": DECODED / median(decode)}


def _now(model) -> float:
    """Time in seconds, after synchronizing the model's devices."""
    if model.device.type == "cuda":
        for device in set(getattr(model, "hf_device_map", {"": model.device}).values()):
            torch.cuda.synchronize(device)
    return time.perf_counter()


def judge(example, answer: str, scores: list[float]) -> dict:
    """Whether a generated answer is right, and which choice has the highest likelihood.

    example: the question (common/data/tasks.py). scores: the log-probability of each choice; the first of
    equal ones wins, as in lm_eval.
    """
    return {
        "label": example.label,
        "likelihood_scores": scores,
        "likelihood_choice": scores.index(max(scores)),
        "generated": answer,
        "exact": answer == example.answer.strip(),
    }


def rates(examples: list, verdicts: list[dict]) -> dict[str, float]:
    """Metrics of one task: questions, chance, exact_match and likelihood with standard errors."""
    metrics = {"questions": len(examples)}
    metrics["chance"] = sum(1 / len(example.choices) for example in examples) / len(examples)
    exact = [verdict["exact"] for verdict in verdicts]
    likeliest = [verdict["likelihood_choice"] == verdict["label"] for verdict in verdicts]
    metrics["exact_match"], metrics["exact_match_stderr"] = accuracy(exact)
    metrics["likelihood"], metrics["likelihood_stderr"] = accuracy(likeliest)
    return metrics


def answer_questions(name: str, model, tokenized, batch: int) -> tuple[dict, list[dict]]:
    """Metrics of each task, as by `rates`, and one outcome per question of a Tokenized.

    name: the checkpoint's. Raises UserError unless all likelihoods are finite.
    """
    metrics, outcomes, tokenizer = {}, [], tokenized.tokenizer
    total = sum(1 + len(samples) for choices in tokenized.choices.values() for samples in choices)
    with Progress(total=total, desc=f"{name}: tasks", unit="seq") as bar:
        for task, questions in tokenized.questions.items():
            choices, examples = tokenized.choices[task], list(questions.values())
            prompts, right = [samples[0].prompt for samples in choices], [each.answer for each in examples]
            answers = generate_answers(model, tokenizer, prompts, LONGEST_ANSWER, batch, bar, right)
            scores = choice_likelihoods(model, choices, batch, bar)
            require_finite(itertools.chain.from_iterable(scores), name, model)
            verdicts = list(map(judge, examples, answers, scores))
            metrics[task] = rates(examples, verdicts)
            for index, verdict in zip(questions, verdicts, strict=True):
                outcomes.append({"model": name, "task": task, "question": index} | verdict)
    return metrics, outcomes


def require_finite(values, name: str, model) -> None:
    """Raise UserError if a value computed by the model is not finite. name: the checkpoint's."""
    if not all(map(math.isfinite, values)):
        raise UserError(f"{name}: expected finite log-probabilities, found NaN or Inf in {model.dtype}; "
                        "try --dtype float32 or bfloat16")


def accuracy(right: list[bool]) -> tuple[float, float]:
    """Accuracy and its standard error, sqrt(p (1 - p) / n)."""
    share = sum(right) / len(right)
    return share, math.sqrt(share * (1 - share) / len(right))


def averages(tasks: dict[str, dict]) -> dict[str, float]:
    """Macro (equal weight per task) and micro (equal weight per question) averages of the tasks' rates.

    The "Avg." of the paper's Tables 1 and 2 is the micro average. tasks: per task "questions", "chance", and
    "exact_match" and "likelihood", each with a "_stderr".
    """
    metrics = {}
    questions = sum(task["questions"] for task in tasks.values())
    if not questions:
        return {}
    for kind in ("exact_match", "likelihood", "chance"):
        share = sum(task[kind] * task["questions"] for task in tasks.values()) / questions
        metrics[f"macro_{kind}"] = sum(task[kind] for task in tasks.values()) / len(tasks)
        metrics[f"micro_{kind}"] = share
        if kind != "chance":
            errors = [task[f"{kind}_stderr"] for task in tasks.values()]
            metrics[f"macro_{kind}_stderr"] = math.hypot(*errors) / len(tasks)
            metrics[f"micro_{kind}_stderr"] = math.sqrt(share * (1 - share) / questions)
    return metrics

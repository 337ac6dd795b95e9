"""Exporting the evaluated questions as lm_eval tasks, and comparing lm_eval's answers with 07_eval.py's.

    python 07_eval.py --run RUN --harness DIR
    bash DIR/lm_eval.sh
    python -m common.reporting.harness RUN DIR

The last command exits with 2 unless lm_eval makes the same choice on every question and reports the same
accuracies.
"""

import collections
import glob
import json
import math
import os
import shlex
import sys
from urllib.parse import quote

from common.artifacts import read_record
from common.cli import UserError, run_stage
from common.data.jsonl import read_objects
from common.data.tasks import Example, choice_samples
from common.files import write_text

GROUP = "table5"  # prefix that distinguishes these tasks from lm_eval's
ACCURACY_TOLERANCE = 1e-9  # both are ratios of the same counts
TASK = """\
task: {group}_{task}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: label
target_delimiter: "{delimiter}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
MACRO = """\
group: {group}
task: [{tasks}]
aggregate_metric_list: [{{metric: acc, weight_by_size: false}}]
"""
COMMAND = """\
lm_eval --model hf --model_args pretrained={path},dtype={dtype},softmax_dtype=float32,add_bos_token={bos} \\
  --device {device} --include_path {directory} --tasks {group} --batch_size {batch} --log_samples \\
  --output_path {output}
"""


def count_differing(tokenizer, tasks: dict[str, dict[int, Example]], delimiter: str) -> int:
    """Number of questions with a choice whose ids differ when tokenized together with the prompt.

    lm_eval tokenizes prompt, delimiter and choice together, 07_eval.py prompt and choice separately.
    """
    count = 0
    for questions in tasks.values():
        count += sum(_differs(tokenizer, example, delimiter) for example in questions.values())
    return count


def _differs(tokenizer, example: Example, delimiter: str) -> bool:
    for choice, sample in zip(example.choices, choice_samples(example, tokenizer), strict=True):
        text = f"{example.prompt}{delimiter}{choice}"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if (*ids[len(sample.prompt) :], tokenizer.eos_token_id) != sample.answer:
            return True
    return False


def write_tasks(directory: str, tasks: dict[str, dict[int, Example]], tokenizer) -> str:
    """Write TASK.jsonl and TASK.yaml for each task, and a group of all tasks.

    tasks: task -> index in the file -> question. tokenizer: determines the delimiter between prompt and
    choice: none for byte-level BPE, a space for SentencePiece, which prepends one to the choice. Returns a
    line to print, with the number of questions whose ids still differ.
    """
    directory = os.path.abspath(directory)
    counts = {delimiter: count_differing(tokenizer, tasks, delimiter) for delimiter in ("", " ")}
    delimiter = min(counts, key=counts.__getitem__)
    for task, questions in tasks.items():
        lines = []
        for index, example in questions.items():
            question = {"prompt": example.prompt, "choices": example.choices, "label": example.label}
            lines.append(json.dumps({"question": index} | question) + "\n")
        path = os.path.join(directory, f"{task}.jsonl")
        write_text(path, "".join(lines))
        settings = TASK.format(group=GROUP, task=task, file=json.dumps(path), delimiter=delimiter)
        write_text(os.path.join(directory, f"{task}.yaml"), settings)
    names = ", ".join(f"{GROUP}_{task}" for task in tasks)
    write_text(os.path.join(directory, f"{GROUP}.yaml"), MACRO.format(group=GROUP, tasks=names))
    total = sum(map(len, tasks.values()))
    return (f"wrote   {directory}: {len(tasks)} tasks for lm_eval, prompt and choice joined by "
            f"{delimiter!r}: {counts[delimiter]} of {total} questions are tokenized differently there; "
            f"run  bash {os.path.join(directory, 'lm_eval.sh')}")


def write_command(
    directory: str, models: dict[str, str], batch: int, device: str, dtype: str, bos: bool
) -> None:
    """Write lm_eval.sh, which runs lm_eval on the tasks in `directory`.

    models: name -> checkpoint path. bos: whether prompts begin with a begin-of-sequence token.
    """
    directory = os.path.abspath(directory)
    commands = ["set -e\n"]
    for model, path in models.items():
        if "," in path:
            raise UserError(f"--harness: expected a checkpoint path without a comma, found {path}; "
                            "lm_eval splits its arguments there")
        commands.append(COMMAND.format(
            path=shlex.quote(os.path.abspath(path)), dtype=dtype, device=device, group=GROUP, batch=batch,
            bos=bos, directory=shlex.quote(directory), output=shlex.quote(_output(directory, model))))
    write_text(os.path.join(directory, "lm_eval.sh"), "".join(commands))


def _output(directory: str, model: str) -> str:
    """Where lm_eval writes a model's answers: one directory, with the model's name percent-encoded."""
    return os.path.join(directory, "samples", quote(model, safe="").replace(".", "%2E"))


def find_newest(directory: str, model: str, name: str) -> str:
    """The newest file NAME_* that lm_eval wrote for a model."""
    pattern = os.path.join(glob.escape(_output(directory, model)), "*", f"{name}_*")
    paths = glob.glob(pattern)
    if not paths:
        raise UserError(f"{directory}: expected {name}_*.json of lm_eval for {model}, found none; "
                        "run lm_eval.sh there first")
    return max(paths, key=os.path.basename)  # names end with a timestamp


def read_outcomes(path: str) -> dict[tuple[str, str], dict[int, list[float]]]:
    """eval.jsonl as (model, task) -> question -> log-likelihood of each choice."""
    scores = collections.defaultdict(dict)
    for number, row in read_objects(path):
        try:
            task_scores = scores[row["model"], row["task"]]
            task_scores[row["question"]] = _numbers(row["likelihood_scores"])
        except (KeyError, TypeError, ValueError) as error:
            message = f"{path} line {number}: expected an outcome of 07_eval.py, found another row"
            raise UserError(message) from error
    return scores


def read_accuracies(path: str) -> dict[str, dict[str, float]]:
    """eval.json as model -> lm_eval's name of a task or of the group -> likelihood accuracy."""
    accuracies = {}
    for model, figures in read_record(path, "07_eval.py")["results"].items():
        try:
            rates = {f"{GROUP}_{task}": rate["likelihood"] for task, rate in figures["tasks"].items()}
            accuracies[model] = rates | {GROUP: figures["macro_likelihood"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: expected figures of 07_eval.py for {model}, found others") from error
    return accuracies


def read_harness_accuracies(directory: str, model: str) -> dict[str, float]:
    """lm_eval's results as name of a task or of the group -> accuracy."""
    path = find_newest(directory, model, "results")
    try:
        with open(path, encoding="utf-8") as file:
            return {name: metrics["acc,none"] for name, metrics in json.load(file)["results"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: expected the results of lm_eval, found none that can be read") from error


def read_harness_scores(directory: str, model: str, name: str) -> dict[int, list[float]]:
    """lm_eval's samples as question -> log-likelihood of each choice."""
    path, scores = find_newest(directory, model, f"samples_{name}"), {}
    for number, row in read_objects(path):
        try:
            scores[row["doc"]["question"]] = _numbers(score for score, _ in row["filtered_resps"])
        except (KeyError, TypeError, ValueError) as error:
            message = f"{path} line {number}: expected a sample of lm_eval, found another row"
            raise UserError(message) from error
    return scores


def _numbers(values) -> list[float]:
    """Numbers, or text with numbers, as floats. Raises ValueError if there are none."""
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("expected at least one number, found none")
    return numbers


def compare_scores(place: str, ours: dict[int, list[float]], theirs: dict[int, list[float]]) -> float:
    """Largest difference between log-likelihoods. Raises UserError unless all choices agree."""
    if ours.keys() != theirs.keys():
        raise UserError(f"{place}: expected lm_eval to answer the {len(ours)} questions of 07_eval.py, "
                        f"found {len(theirs)} others")
    differing = [number for number in ours if _likeliest(ours[number]) != _likeliest(theirs[number])]
    if differing:
        number = differing[0]
        raise UserError(f"{place}: {len(differing)} of {len(ours)} choices differ; question {number}: "
                        f"log-likelihoods {ours[number]} here, {theirs[number]} by lm_eval")
    furthest = 0.0
    for number in ours:
        pairs = zip(ours[number], theirs[number], strict=True)
        furthest = max(furthest, *(abs(our - their) for our, their in pairs))
    return furthest


def _likeliest(scores: list[float]) -> tuple[int, int]:
    """The number of choices, and the index of the (first) likeliest."""
    return len(scores), scores.index(max(scores))


def compare(run: str, directory: str) -> str:
    """Check that lm_eval agrees on RUN's checkpoints. Returns a line to print; raises UserError if not."""
    scores = read_outcomes(os.path.join(run, "eval.jsonl"))
    accuracies = read_accuracies(os.path.join(run, "eval.json"))
    furthest, macros = 0.0, []
    for model, rates in accuracies.items():
        harness_rates = read_harness_accuracies(directory, model)
        for name, accuracy in rates.items():
            if name != GROUP:
                task = name.removeprefix(f"{GROUP}_")
                theirs = read_harness_scores(directory, model, name)
                furthest = max(furthest, compare_scores(f"{model}, {task}", scores[model, task], theirs))
            if abs(harness_rates.get(name, math.inf) - accuracy) > ACCURACY_TOLERANCE:
                raise UserError(f"{model}, {name}: accuracy {accuracy} here, "
                                f"{harness_rates.get(name)} by lm_eval")
        macros.append(f"{model} {rates[GROUP]:.2%}")
    questions = sum(map(len, scores.values()))
    return (f"harness: lm_eval made the same choice in all {questions} questions; macro average "
            f"{', '.join(macros)}; log-likelihoods within {furthest:.1e}")


def main():
    if len(sys.argv) != 3:
        raise UserError(f"expected RUN and DIR, found {len(sys.argv) - 1} arguments: "
                        "python -m common.reporting.harness RUN DIR")
    print(compare(*sys.argv[1:]))


if __name__ == "__main__":
    run_stage(main)

"""Comparing lm_eval's answers with 07_eval.py's.

    python -m pipelines.harness_check RUN DIR     # after the commands of harness_tasks.py

Exits with 2 unless lm_eval makes the same choice on every question and reports the same accuracies.
"""

import collections
import contextlib
import glob
import json
import math
import os
import sys

from common.data.rows import read_objects
from common.run.artifact import read_record
from common.run.errors import UserError, run_stage
from pipelines.harness_tasks import GROUP, output_directory

ACCURACY_TOLERANCE = 1e-9  # both are ratios of the same counts


@contextlib.contextmanager
def expecting(what: str):
    """Context manager: what its block reads from a file, or a UserError that says so."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(what) from error


def find_newest(directory: str, model: str, name: str) -> str:
    """The newest file NAME_* that lm_eval wrote for a model."""
    pattern = os.path.join(glob.escape(output_directory(directory, model)), "*", f"{name}_*")
    paths = glob.glob(pattern)
    if not paths:
        raise UserError(f"{directory}: expected {name}_*.json of lm_eval for {model}, found none; "
                        "run lm_eval.sh there first")
    return max(paths, key=os.path.basename)  # names end with a timestamp


def read_outcomes(path: str) -> dict[tuple[str, str], dict[int, list[float]]]:
    """eval.jsonl as (model, task) -> question -> log-likelihood of each choice."""
    scores = collections.defaultdict(dict)
    for place, row in read_objects(path):
        with expecting(f"{path} {place}: expected an outcome of 07_eval.py, found another row"):
            task_scores = scores[row["model"], row["task"]]
            task_scores[row["question"]] = _numbers(row["likelihood_scores"])
    return scores


def read_accuracies(path: str) -> dict[str, dict[str, float]]:
    """The record of stage 7 as model -> lm_eval's name of a task or of the group -> likelihood accuracy."""
    accuracies = {}
    for model, metrics in read_record(path, "07_eval.py")["results"].items():
        with expecting(f"{path}: expected metrics of 07_eval.py for {model}, found others"):
            rates = {f"{GROUP}_{task}": rate["likelihood"] for task, rate in metrics["tasks"].items()}
            accuracies[model] = rates | {GROUP: metrics["macro_likelihood"]}
    return accuracies


def read_harness_accuracies(directory: str, model: str) -> dict[str, float]:
    """lm_eval's results as name of a task or of the group -> accuracy."""
    path = find_newest(directory, model, "results")
    with expecting(f"{path}: expected the results of lm_eval, found none that can be read"):
        with open(path, encoding="utf-8") as file:
            return {name: metrics["acc,none"] for name, metrics in json.load(file)["results"].items()}


def read_harness_scores(directory: str, model: str, name: str) -> dict[int, list[float]]:
    """lm_eval's samples as question -> log-likelihood of each choice."""
    path, scores = find_newest(directory, model, f"samples_{name}"), {}
    for place, row in read_objects(path):
        with expecting(f"{path} {place}: expected a sample of lm_eval, found another row"):
            scores[row["doc"]["question"]] = _numbers(score for score, _ in row["filtered_resps"])
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
    scores = read_outcomes(os.path.join(run, "eval", "eval.jsonl"))
    accuracies = read_accuracies(os.path.join(run, "eval"))
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
                        "python -m pipelines.harness_check RUN DIR")
    print(compare(*sys.argv[1:]))


if __name__ == "__main__":
    run_stage(main)

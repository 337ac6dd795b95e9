"""Compare lm_eval's answers with those of 07_eval.py.

    python -m pipelines.harness_check RUN DIR     # after the commands of harness_tasks.py

Exits with 2 unless lm_eval makes the same choice on every question and reports the same accuracies.
"""

import collections
import json
import math
import os
import sys
from pathlib import Path

from common.data.rows import read_objects
from common.run.artifact import read_record
from common.run.errors import UserError, run_stage
from pipelines.harness_tasks import GROUP, output_directory

ACCURACY_TOLERANCE = 1e-9  # both are ratios of the same counts


def find_newest(directory: str, model: str, name: str) -> str:
    """The newest file NAME_* that lm_eval wrote for a model."""
    paths = list(Path(output_directory(directory, model)).glob(f"*/{name}_*"))
    if not paths:
        raise UserError(f"{directory}: expected {name}_*.json of lm_eval for {model}, found none; "
                        "run lm_eval.sh there first")
    return str(max(paths, key=lambda path: path.name))  # names end with a timestamp


def read_outcomes(path: str) -> dict[tuple[str, str], dict[int, list[float]]]:
    """eval.jsonl as (model, task) -> question -> log-likelihood of each choice."""
    scores = collections.defaultdict(dict)
    for _, row in read_objects(path):
        scores[row["model"], row["task"]][row["question"]] = row["likelihood_scores"]
    return scores


def read_accuracies(path: str) -> dict[str, dict[str, float]]:
    """The record of stage 7 as model -> lm_eval's name of a task or of the group -> likelihood accuracy."""
    accuracies = {}
    for model, metrics in read_record(path, "07_eval.py")["results"].items():
        rates = {f"{GROUP}_{task}": rate["likelihood"] for task, rate in metrics["tasks"].items()}
        accuracies[model] = rates | {GROUP: metrics["macro_likelihood"]}
    return accuracies


def read_harness_accuracies(directory: str, model: str) -> dict[str, float]:
    """lm_eval's results as name of a task or of the group -> accuracy."""
    with open(find_newest(directory, model, "results"), encoding="utf-8") as file:
        return {name: metrics["acc,none"] for name, metrics in json.load(file)["results"].items()}


def read_harness_scores(directory: str, model: str, name: str) -> dict[int, list[float]]:
    """lm_eval's samples as question -> log-likelihood of each choice."""
    rows = read_objects(find_newest(directory, model, f"samples_{name}"))
    return {row["doc"]["question"]: [float(score) for score, _ in row["filtered_resps"]] for _, row in rows}


def compare_scores(place: str, ours: dict[int, list[float]], theirs: dict[int, list[float]]) -> float:
    """Largest difference between log-likelihoods. Raises UserError unless all choices agree."""
    if ours.keys() != theirs.keys():
        raise UserError(f"{place}: expected lm_eval to answer the {len(ours)} questions of 07_eval.py, "
                        f"found {len(theirs)} others")
    differing = [number for number in ours if likeliest(ours[number]) != likeliest(theirs[number])]
    if differing:
        number = differing[0]
        raise UserError(f"{place}: {len(differing)} of {len(ours)} choices differ; question {number}: "
                        f"log-likelihoods {ours[number]} here, {theirs[number]} by lm_eval")
    return max(abs(our - their) for number in ours
               for our, their in zip(ours[number], theirs[number], strict=True))


def likeliest(scores: list[float]) -> int:
    """The index of the (first) likeliest choice."""
    return scores.index(max(scores))


def compare(run: str, directory: str) -> str:
    """Check that lm_eval agrees on RUN's checkpoints. Returns a line to print; raises UserError if not."""
    scores = read_outcomes(os.path.join(run, "eval", "eval.jsonl"))
    furthest, macros = 0.0, []
    for model, rates in read_accuracies(os.path.join(run, "eval")).items():
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

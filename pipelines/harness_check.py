"""Compare lm_eval's answers with those of 07_eval.py.

    python -m pipelines.harness_check RUN DIR     # after the commands of harness_tasks.py

Exits with 2 unless lm_eval makes the same choice on every question.
"""

import collections
import os
import sys
from pathlib import Path

from common.data.rows import read_objects
from common.run.artifact import read_record
from common.run.errors import UserError, run_stage
from pipelines.harness_tasks import GROUP, output_directory


def read_outcomes(path: str) -> dict[tuple[str, str], dict[int, list[float]]]:
    """eval.jsonl as (model, task) -> question -> log-likelihood of each choice."""
    scores = collections.defaultdict(dict)
    for _, row in read_objects(path):
        scores[row["model"], row["task"]][row["question"]] = row["likelihood_scores"]
    return scores


def read_harness_scores(directory: str, model: str, task: str) -> dict[int, list[float]]:
    """The newest samples that lm_eval wrote, as question -> log-likelihood of each choice."""
    paths = list(Path(output_directory(directory, model)).glob(f"*/samples_{GROUP}_{task}_*"))
    if not paths:
        raise UserError(f"{directory}: expected samples of lm_eval for {model}, {task}, found none; "
                        "run lm_eval.sh there first")
    newest = max(paths, key=lambda path: path.name)  # names end with a timestamp
    rows = read_objects(str(newest))
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
    path = os.path.join(run, "eval")
    results = read_record(path, "07_eval.py")["results"]
    scores = read_outcomes(os.path.join(path, "eval.jsonl"))
    furthest = max(compare_scores(f"{model}, {task}", ours, read_harness_scores(directory, model, task))
                   for (model, task), ours in scores.items())
    macros = [f"{model} {metrics['macro_likelihood']:.2%}" for model, metrics in results.items()]
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

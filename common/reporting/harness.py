"""The evaluated questions as tasks of the standard harness (lm_eval), and its answers held against those of 07_eval.py.

    python 07_eval.py --run RUN --harness DIR && bash DIR/lm_eval.sh && python -m common.reporting.harness RUN DIR

The last line exits with 2 unless lm_eval chose what 07_eval.py chose in every question, and reports the same accuracies.
"""

import glob
import json
import os
import shlex
import sys

from common.artifacts import write_text
from common.cli import UserError, run_stage
from common.data.tasks import Example, choice_samples

GROUP = "table5"  # of lm_eval's task names, which must not be those that it brings itself
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
lm_eval --model hf --model_args pretrained={path},dtype={dtype},softmax_dtype=float32,add_bos_token=False --device {device} \\
  --include_path {directory} --tasks {group} --batch_size {batch} --log_samples --output_path {output}
"""


def differing(tokenizer, tasks: dict[str, dict[int, Example]], delimiter: str) -> int:
    """Questions of which a choice has other ids as lm_eval gets them: by tokenizing prompt, delimiter and choice together."""
    def differs(example):
        samples = choice_samples(example, tokenizer)
        joint = [tokenizer(f"{example.prompt}{delimiter}{c}", add_special_tokens=False)["input_ids"] for c in example.choices]
        return any((*ids[len(s.prompt) :], tokenizer.eos_token_id) != s.answer for ids, s in zip(joint, samples, strict=True))

    return sum(differs(example) for questions in tasks.values() for example in questions.values())


def write(directory: str, tasks: dict[str, dict[int, Example]], models: dict[str, str], tokenizer, batch: int, device: str, dtype: str) -> str:
    """TASK.jsonl and TASK.yaml of each task, their group, and lm_eval.sh, which runs lm_eval on each of the models.

    tasks: per task the questions by their index in the file. models: name -> checkpoint. tokenizer: decides what stands
    between prompt and choice: nothing with byte-level BPE, a space with SentencePiece, which puts one before the choice.
    Returns a line that says in how many questions the ids still differ.
    """
    os.makedirs(directory, exist_ok=True)
    here = os.path.abspath(directory)
    counts = {delimiter: differing(tokenizer, tasks, delimiter) for delimiter in ("", " ")}
    delimiter = min(counts, key=counts.__getitem__)
    for task, questions in tasks.items():
        rows = [{"question": i, "prompt": e.prompt, "choices": e.choices, "label": e.label} for i, e in questions.items()]
        write_text(os.path.join(here, f"{task}.jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
        file = json.dumps(os.path.join(here, f"{task}.jsonl"))
        write_text(os.path.join(here, f"{task}.yaml"), TASK.format(group=GROUP, task=task, file=file, delimiter=delimiter))
    write_text(os.path.join(here, f"{GROUP}.yaml"), MACRO.format(group=GROUP, tasks=", ".join(f"{GROUP}_{task}" for task in tasks)))
    commands = [COMMAND.format(path=shlex.quote(os.path.abspath(path)), dtype=dtype, device=device, directory=shlex.quote(here), group=GROUP,
                               batch=batch, output=shlex.quote(os.path.join(here, "samples", name))) for name, path in models.items()]
    write_text(os.path.join(here, "lm_eval.sh"), "set -e\n" + "".join(commands))
    return (f"wrote   {directory}: {len(tasks)} tasks for lm_eval, prompt and choice joined by {delimiter!r}: {counts[delimiter]} of "
            f"{sum(map(len, tasks.values()))} questions get other tokens than here; run  bash {os.path.join(directory, 'lm_eval.sh')}")


def newest(directory: str, model: str, name: str) -> str:
    """The last file of that name that lm_eval wrote for a model."""
    found = glob.glob(os.path.join(glob.escape(os.path.join(directory, "samples", model)), "*", f"{name}_*"))
    if not found:
        raise UserError(f"{directory}: expected {name}_*.jsonl of lm_eval for {model}, found none; run lm_eval.sh there first")
    return max(found, key=os.path.basename)  # the names end in the time


def compare(run: str, directory: str) -> str:
    """One line for RUN's checkpoints where lm_eval agrees in every question and every accuracy. Raises UserError where not."""
    with open(os.path.join(run, "eval.jsonl"), encoding="utf-8") as file:
        outcomes = [json.loads(line) for line in file]
    with open(os.path.join(run, "eval.json"), encoding="utf-8") as file:
        results = json.load(file)["results"]
    furthest = 0.0
    for model, figures in results.items():
        with open(newest(directory, model, "results"), encoding="utf-8") as file:
            accuracies = {task: metrics["acc,none"] for task, metrics in json.load(file)["results"].items()}
        for task, measured in figures["tasks"].items():
            with open(newest(directory, model, f"samples_{GROUP}_{task}"), encoding="utf-8") as file:
                theirs = {s["doc"]["question"]: [float(score) for score, _ in s["filtered_resps"]] for s in map(json.loads, file)}
            ours = {o["question"]: o["likelihood_scores"] for o in outcomes if o["model"] == model and o["task"] == task}
            if ours.keys() != theirs.keys():
                raise UserError(f"{model}, {task}: expected lm_eval to answer the {len(ours)} questions of {run}, found {len(theirs)} others")
            differ = [q for q in ours if ours[q].index(max(ours[q])) != theirs[q].index(max(theirs[q]))]
            if differ:
                raise UserError(f"{model}, {task}: {len(differ)} of {len(ours)} choices differ; question {differ[0]}: "
                                f"log-likelihoods {ours[differ[0]]} here, {theirs[differ[0]]} by lm_eval")
            if abs(accuracies[f"{GROUP}_{task}"] - measured["likelihood"]) > 1e-9:
                raise UserError(f"{model}, {task}: accuracy {measured['likelihood']} here, {accuracies[f'{GROUP}_{task}']} by lm_eval")
            furthest = max(furthest, *(abs(a - b) for q in ours for a, b in zip(ours[q], theirs[q], strict=True)))
        if abs(accuracies[GROUP] - figures["macro_likelihood"]) > 1e-9:
            raise UserError(f"{model}: macro average {figures['macro_likelihood']} here, {accuracies[GROUP]} by lm_eval")
    macro = ", ".join(f"{model} {figures['macro_likelihood']:.2%}" for model, figures in results.items())
    return f"harness: lm_eval made the same choice in all {len(outcomes)} questions; macro average {macro}; log-likelihoods within {furthest:.1e}"


def main():
    if len(sys.argv) != 3:
        raise UserError("usage: python -m common.reporting.harness RUN DIR")
    print(compare(*sys.argv[1:]))


if __name__ == "__main__":
    run_stage(main)

"""The questions that 07_eval.py has answered, as tasks for lm_eval, and the command that runs them.

Reads   RUN/eval/, the same questions, and the tokenizer of the first checkpoint
Writes  DIR: TASK.jsonl and TASK.yaml, a group of all tasks (table5.yaml), and lm_eval.sh

    python 07_eval.py --run RUN
    python -m pipelines.harness_tasks --run RUN --output DIR
    bash DIR/lm_eval.sh
    python -m pipelines.harness_check RUN DIR
"""

import argparse
import importlib
import json
import os
import shlex

from common.data.documents import NONE
from common.data.tasks import Example, choice_samples
from common.evaluation.compared import Settings, read_questions
from common.models.load import bos_prefix, load_tokenizer
from common.run.artifact import read_record
from common.run.errors import UserError, run_stage
from common.run.files import write_text
from common.run.flags import stage_parser

GROUP = "table5"  # prefix that distinguishes these tasks from lm_eval's
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
    begin = len(bos_prefix(tokenizer))  # which lm_eval puts there itself

    def differs(example: Example) -> bool:
        for choice, sample in zip(example.choices, choice_samples(example, tokenizer), strict=True):
            text = f"{example.prompt}{delimiter}{choice}"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if (*ids[len(sample.prompt) - begin :], tokenizer.eos_token_id) != sample.answer:
                return True
        return False

    return sum(differs(example) for questions in tasks.values() for example in questions.values())


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
        commands.append(COMMAND.format(
            path=shlex.quote(os.path.abspath(path)), dtype=dtype, device=device, group=GROUP, batch=batch,
            bos=bos, directory=shlex.quote(directory),
            output=shlex.quote(output_directory(directory, model))))
    write_text(os.path.join(directory, "lm_eval.sh"), "".join(commands))


def output_directory(directory: str, model: str) -> str:
    """Where lm_eval writes a model's answers."""
    return os.path.join(directory, "samples", model)


def main():
    parser = stage_parser(__doc__)
    parser.add_argument("--output", required=True, metavar="DIR", help="directory for the tasks")
    args = parser.parse_args()
    record = read_record(os.path.join(args.run, "eval"), "07_eval.py")
    evaluated = argparse.Namespace(**record["arguments"])
    if evaluated.layerwise or evaluated.tasks == NONE:
        raise UserError(f"{args.run}/eval: expected an evaluation with questions, found none; run "
                        "07_eval.py with --tasks")
    if os.path.exists(args.output) and not args.force:
        raise UserError(f"{args.output} already exists; pass --force to replace its tasks")
    stage7 = importlib.import_module("07_eval")
    source, _ = stage7.choose_sources(args.run, evaluated.tasks, evaluated.text)
    tasks = read_questions(Settings(source, evaluated.only, evaluated.limit, evaluated.seed))
    checkpoints = {name: metrics["path"] for name, metrics in record["results"].items()}
    print(write_tasks(args.output, tasks, load_tokenizer(next(iter(checkpoints.values())))))
    write_command(args.output, checkpoints, evaluated.batch, record["device"], evaluated.dtype, evaluated.bos)


if __name__ == "__main__":
    run_stage(main)

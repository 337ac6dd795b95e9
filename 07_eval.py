"""Stage 7: evaluate checkpoints side by side: chats, eight tasks, perplexity, KV cache size, speed.

Reads   any checkpoints (default: the teacher, merged/ and gqa/ of RUN), the validation sets of the eight
        tasks, chats, a text, or what a calibration has not read of its own
Writes  RUN/eval/: eval.md, a column per checkpoint; its numbers in stage.json; eval.jsonl, each checkpoint's
        answer to each question; with --cache frontier.png, bytes against KL of every checkpoint and cache;
        the scores into the model card (README.md) of a checkpoint exported by stage 6 in RUN; those of
        all questions of the hub's tasks also into its .eval_results/, from where the hub shows them

    python 07_eval.py --run runs/llama2-7b --device cuda
    python 07_eval.py --run runs/llama2-7b --layerwise   # perplexity and cache size, in the memory of a layer
    python 07_eval.py --model teacher=runs/a/teacher gqa=runs/a/gqa baseline=runs/b/gqa --limit 200 --seed 0
    python 07_eval.py --run runs/mine --tasks none --text FILE.txt --prompts PROMPTS.txt    # no questions
    python 07_eval.py --run runs/mine --tasks none --chat CHATS.jsonl --text none
    python 07_eval.py --run runs/mine --tasks none --cache q8_0 q8_0/q4_0 q4_0     # with quantized caches
    python 07_eval.py                            # the demo model, under a minute on two cores

Exact match, as in the authors' code: greedy generation to an end of sequence, of 512 tokens at most,
stripped, equals the text of the right answer (in eval.jsonl an answer ends where it can no longer equal it).
Likelihood: the right choice has the highest log-probability, summed over its tokens. Averages are micro over
questions, the paper's "Avg.", and macro over tasks, ± standard error. Text, and the answers of chats:
perplexity, and how close a checkpoint is to the first one, as mean KL, as the share of tokens for which both
predict the same next one (top-1 agreement), and as the difference of their losses; ± standard error over
sequences. Speeds are those of one sequence, the median of five runs. Tasks' prompts and text begin with the
begin-of-sequence token if the tokenizer adds it to text (--bos, --no-bos). Quantized caches are simulated,
in ggml's formats and three layouts: with channels in transformers' order, with RoPE's pairs side by side,
and these rotated, as llama.cpp does.
"""

import argparse
import common.run.openmp  # noqa: F401 - before torch
import importlib
import json
import os
from dataclasses import replace
from pathlib import Path

from common.data import demo
from common.data.documents import EXPECTED, NONE, digests_of
from common.data.rows import TABLE_NAMES
from common.data.sources import CHECKED
from common.data.tasks import TASKS
from common.data.text import TOKENS
from common.evaluation import compared
from common.evaluation.compared import Settings, is_calibration
from common.evaluation.measure import measure_all
from common.models.load import bos_prefix, describe, pick_device, source_model
from common.models.quantized_cache import BITS, LAYOUTS, parse_cache
from common.reporting import card, plots
from common.reporting.scores import cache_rows, caption, scores, summary_line, without_speeds
from common.run import flags, progress
from common.run.artifact import (
    RECORD,
    begin_stage,
    input_digests,
    load_record,
    read_record,
    resolved,
    verify_files,
    write_directory,
    write_record,
)
from common.run.errors import Complete, UserError, run_stage
from common.run.files import read_text, write_text
from common.run.flags import stage_parser
from common.run.kinds import SOURCE
from common.training.heldout import CHAT_TOKENS
from common.training.lines import OPEN_MASKS

CHECKPOINTS = ("teacher", "merged", "gqa")  # measured where the run directory has them
TABLE, OUTCOMES, PICTURE = "eval.md", "eval.jsonl", "frontier.png"


def parse():
    parser = stage_parser(__doc__)
    add_task_flags(parser)
    add_text_flags(parser)
    add_execution_flags(parser)
    args = parser.parse_args()
    if args.seed is not None and args.limit is None:
        raise UserError("--seed: expected --limit N with it, found no --limit")
    if args.layerwise and (args.tasks not in (None, NONE) or args.limit or args.prompts or args.chat):
        raise UserError("--layerwise: expected no --tasks, --limit, --prompts or --chat, because it answers "
                        "no questions")
    if args.cache and (args.layerwise or args.text == NONE):
        raise UserError("--cache: expected a text, and no --layerwise")
    cuda = pick_device(args.device).startswith("cuda")
    return replace(args, dtype=args.dtype or ("bfloat16" if cuda else "float32"))


def add_task_flags(parser) -> None:
    parser.section("checkpoints and tasks")
    parser.add_argument("--model", nargs="+", metavar="[NAME=]DIR",
                        help="checkpoints; the first is the reference (default: the student's teacher, and "
                             "merged and gqa in RUN)")
    parser.add_argument("--update", action="store_true",
                        help="replace an evaluation of other models or with other flags")
    parser.add_argument("--tasks", metavar="DIR",
                        help="directory of TASK.validation.jsonl or .parquet files, hub, or none (default: "
                             "hub; the demo's tasks for the demo)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, metavar="TASK",
                        help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--limit", type=flags.positive, metavar="N",
                        help="use the first N questions of each task (default: all)")
    parser.add_argument("--seed", type=flags.seed,
                        help="with --limit: draw the N questions with this random seed instead")
    parser.add_argument("--bos", action=argparse.BooleanOptionalAction,
                        help="begin every task's prompt and sequence of text with the begin-of-sequence "
                             "token (default: if the checkpoint's tokenizer does so itself)")
    parser.add_argument("--prompts", metavar="FILE",
                        help="also answer the prompts in FILE, one a line, greedily, and show the answers")


def add_text_flags(parser) -> None:
    parser.section("text, chats and speed")
    parser.add_argument("--text",
                        help=f"{EXPECTED}; of c4, demo and hf:... the held-out part; a .npy file of tokens, "
                             "RUN/calibration (what it has not read of its sources), or none to skip "
                             "perplexity (default: what a training without tasks held out; else c4, or demo "
                             "for the demo)")
    parser.add_argument("--chat", metavar="SOURCE",
                        help="also compare answers of chats: hf:NAME[:CONFIG[:SPLIT]] (its held-out part) or "
                             f"a {TABLE_NAMES} file with a column messages (default: those that a training "
                             "without tasks held out)")
    parser.add_argument("--sequences", type=flags.positive, default=32,
                        help="number of sequences of text, and of chats")
    parser.add_argument("--length", type=flags.positive, metavar="N",
                        help=f"tokens per sequence (default: {CHECKED}, or the model's limit if lower)")
    parser.add_argument("--cache", nargs="+", metavar="FORMAT",
                        help=f"also measure text with caches of f16 and these formats: {', '.join(BITS)}, or "
                             "two of them as KEYS/VALUES")


def add_execution_flags(parser) -> None:
    parser.section("execution")
    parser.add_argument("--batch", type=flags.positive, default=64, help="prompts per generation batch")
    parser.add_argument("--device", type=flags.device, default="auto",
                        help="auto, cpu, cuda or cuda:N; cuda spreads a model that is too large for one GPU "
                             "over all of them (needs accelerate)")
    parser.add_argument("--layerwise", action="store_true",
                        help="hold one decoder layer in memory at a time: perplexity and cache size only, no "
                             "tasks and no speed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="of the forward passes (default: bfloat16 on GPUs, float32 on CPUs)")
    parser.add_argument("--register", nargs="+", metavar="MODULE",
                        help="modules that register more model types, e.g. related.dha.modeling")


def task_files(source: str | None) -> list[str]:
    """The files in a directory of tasks."""
    return sorted(str(path) for path in Path(source).iterdir()) if source and os.path.isdir(source) else []


def register(modules) -> None:
    """Import modules that register model types with transformers."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a name that is none, or whatever the module's own code raises
            raise UserError(f"--register {module}: cannot be imported: {error}") from error


def default_checkpoints(run: str) -> dict[str, str]:
    """Column name -> checkpoint in RUN, which need not exist; the student's teacher may lie elsewhere."""
    paths, directory = {name: os.path.join(run, name) for name in CHECKPOINTS}, os.path.join(run, "train")
    if os.path.exists(os.path.join(directory, RECORD)):
        trained = read_record(directory, "05_prune_train.py")
        teacher = trained["arguments"].get("teacher")
        if teacher == SOURCE:
            paths = {SOURCE: source_model(trained, run)["path"]} | paths
        elif teacher:
            paths["teacher"] = str(teacher)
    return paths


def choose_checkpoints(args) -> dict[str, str]:
    """Column name -> checkpoint directory."""
    if args.model is None:
        present = {name: path for name, path in default_checkpoints(args.run).items() if os.path.isdir(path)}
        if not present:
            raise UserError(f"{args.run}: expected one of {', '.join(CHECKPOINTS)}, found none; "
                            "run the earlier stages or pass --model")
        return present
    checkpoints = {}
    for text in args.model:
        name, separator, path = text.partition("=")
        if not separator or os.path.isdir(text):
            name, path = os.path.basename(os.path.normpath(text)), text
        if name in checkpoints:
            raise UserError(f"--model: expected different names, found {name} twice; pass NAME=DIR")
        checkpoints[name] = path
    return checkpoints


def verify(path: str) -> dict:
    """The OPEN_MASKS of a checkpoint's training, if its record has them; {} for one without a record.

    Raises UserError if its files differ from its stage's record.
    """
    record = load_record(path)
    if record is None:
        return {}
    verify_files(path, record)
    count = record.get("summary", {}).get(OPEN_MASKS)
    return {} if count is None else {OPEN_MASKS: count}


def choose_sources(run: str, tasks: str | None, text: str | None) -> tuple[str, str]:
    """Sources of the questions and the text; the demo's are the default for a run of the demo model."""
    path, name = os.path.join(run, "calibration"), None
    if os.path.exists(path):
        name = read_record(path, "01_calibrate.py")["model"]["name"]
    default_tasks, default_text = demo.default_sources(name == demo.DEMO)
    return tasks or default_tasks, text or default_text


def with_heldout(args):
    """The flags, with what a training without tasks held out as text and chats where others are not given."""
    trained = load_record(os.path.join(args.run, "train"))
    if not trained or trained["arguments"]["tasks"] != NONE:
        return args
    home = resolved(args.run, trained.get("heldout"))
    text, chat = (path if home and os.path.exists(path := os.path.join(home, name)) else None
                  for name in (TOKENS, CHAT_TOKENS))
    return replace(args, text=args.text or text or NONE, chat=args.chat or (None if args.layerwise else chat))


def settle(args) -> Settings:
    """The settings that the flags, or their defaults, come to. Raises UserError as what reads them."""
    tasks, text = choose_sources(args.run, args.tasks, args.text)
    bos = compared.calibration_bos(text, args.bos) if is_calibration(text) else args.bos
    if args.cache and text == NONE:
        print("note    --cache: the training held no text out, so no caches are measured")
    return Settings(
        tasks=NONE if args.layerwise else tasks, only=tuple(args.only), limit=args.limit, seed=args.seed,
        text=text, chat=args.chat, prompts=tuple(compared.read_prompts(args.prompts)),
        sequences=args.sequences, length=args.length, bos=bos,
        caches=tuple(map(parse_cache, args.cache or ())) if text != NONE else (), layerwise=args.layerwise,
        batch=args.batch, device=pick_device(args.device), dtype=args.dtype)


def begin(args, output: str, described: dict):
    """Start the stage, as begin_stage. An evaluation that is complete is printed."""
    texts = [args.text, args.chat, args.prompts, *task_files(args.tasks)]
    inputs = {name: model["fingerprint"] for name, model in described.items()}
    inputs |= digests_of(texts, args.run, "" if args.force or args.update else output)
    inputs |= input_digests(args.run, [args.text] if is_calibration(args.text or "") else [])
    try:
        return begin_stage("07_eval.py", args, output, inputs=inputs)
    except Complete:
        print(read_text(os.path.join(output, TABLE)))
        raise


def tokenize(checkpoints: dict[str, str], settings: Settings) -> dict[str, compared.Tokenized]:
    """What each checkpoint, by name, is measured on."""
    questions = compared.read_questions(settings)
    unread = compared.read_calibration_text(settings)
    tokenized = {name: compared.prepare(path, settings, questions, unread)
                 for name, path in checkpoints.items()}
    sets = [each for texts in tokenized.values() for each in texts.sets.values()]
    for description in dict.fromkeys(description for _, description in sets):
        print(f"reads   {description}")
    return tokenized


def main():
    args = parse()
    register(args.register or ())
    args = with_heldout(args)
    checkpoints, output = choose_checkpoints(args), os.path.join(args.run, "eval")
    described = {name: describe(path) for name, path in checkpoints.items()}
    started = begin(args, output, described)
    open_masks = {name: verify(path) for name, path in checkpoints.items()}
    settings, reference = settle(args), next(iter(checkpoints))
    tokenized = tokenize(checkpoints, settings)
    comparable = compared.same_tokenizers(checkpoints, tokenized, settings)
    bos = bool(bos_prefix(tokenized[reference].tokenizer))

    results, outcomes = measure_all(described, tokenized, comparable, settings, args.run)
    results = {name: metrics | open_masks[name] for name, metrics in results.items()}
    note = caption(results[reference], settings, bos)
    shown, memory = scores(results, settings.prompts, note), progress.peak_memory()
    record = started.record(described[reference], {"peak_memory_gib": memory}, device=settings.device,
                            begin_of_sequence=bos, prompts=settings.prompts, results=results)
    with write_directory(output) as aside:
        write_text(os.path.join(aside, OUTCOMES), "".join(json.dumps(each) + "\n" for each in outcomes))
        write_text(os.path.join(aside, TABLE), f"{shown}\n")
        if rows := cache_rows(results):
            title = f"KL from {os.path.basename(described[reference]['path'])}"
            plots.frontier(os.path.join(aside, PICTURE), rows, list(LAYOUTS), title)
        write_record(aside, record | {"arguments": record["arguments"] | {"bos": bos}})
    print(f"\n{shown}\n\nwrote   {output}")
    for name, path in checkpoints.items():
        if not Path(path).resolve().is_relative_to(Path(args.run).resolve()):
            continue  # its card, if any, stays as it is
        pair = {key: without_speeds(results[key]) for key in (reference, name)}
        if card.write_scores(path, scores(pair, settings.prompts, note)):
            print(f"wrote   {os.path.join(path, card.CARD)}: scores")
            if settings.tasks == "hub" and settings.limit is None:
                card.write_benchmarks(path, results[name]["tasks"], record["date"])
    print(f"07_eval: {summary_line(results)}; in {started.clock()} s, peak host memory {memory} GiB")


if __name__ == "__main__":
    run_stage(main)

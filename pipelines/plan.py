"""Print what a conversion costs on given hardware: memory, FLOPs, bytes moved, disk and time.

    python -m pipelines.plan --model meta-llama/Llama-2-7b-hf --kv-heads 8 --on 8xA100-80GB  # the paper's way
    python -m pipelines.plan --model meta-llama/Llama-2-7b-hf --kv-heads 8 --on 8xA100-80GB \\
        --tasks none --text c4 --text-tokens 100000000                                       # on text
    python -m pipelines.plan --run runs/llama2-7b --on 2x8xH100-80GB                         # after stage 4

Of a model only its config is read. With tasks the plan is for the paper's merge, the published training sets
and a teacher; with --tasks none it is for the closed form with an attention refit, the untouched source as
the teacher and no masks. Each source of --text and --chat counts as --text-tokens, however much it has, and
what is held out as much as flags ask for. A model that stage 1 refuses is refused here, too. A run directory
has its own merge and kv heads; its tasks are read as stage 5 reads them, and so is text if there is no
--text-tokens.

The other flags are those of stage 5. Exits with 2 if a training does not fit.
"""

import common.run.openmp  # noqa: F401 - before torch
import importlib
import math
import os
from dataclasses import asdict, fields, replace

import torch

from common.data import demo
from common.data.documents import NONE, is_generated
from common.data.pool import SPLIT, Pool, Sources, load_pool
from common.data.rows import Sample
from common.data.sources import CHECKED, DataContext
from common.data.tasks import PUBLISHED_SIZES
from common.models.calibration import LENGTH, SEQUENCES
from common.models.families import check_kv_heads, geometry, merged_modules
from common.models.load import bos_prefix, config_file, empty_model, load_config, load_tokenizer, weight_dtype
from common.models.proof import require_convertible
from common.run.errors import UserError, run_stage
from common.run.flags import StageParser, positive
from common.run.kinds import SOURCE
from common.training import memory
from common.training.conversion import Conversion, read_conversion
from common.training.flops import forward_flops, products
from common.training.heldout import QUESTIONS, Heldout
from common.training.memory import Cluster, Phase, peak_memory, size
from common.training.settings import SHORTEST_ROW, defaults_of, make_schedules, phases_of, with_defaults
from common.training.sharding import Execution, joined_ranks
from pipelines import cost

stage5 = importlib.import_module("05_prune_train")

# Tokens of the tasks' prompts, and of an answer: together 126 in the mean, 18.6 million in all, as published.
# That they spread exponentially, and how far, is assumed, as in bench/train_step.py.
SHORTEST, SPREAD, LONGEST, ANSWER = 24, 96, 480, 7
FLOAT32 = 1 / 16  # of the bf16 peak: an A100 has 19.5 of 312 TFLOP/s, an H100 67 of 989
# forward passes of 04_align.py --refit attention at most, and of its equivalence check
REFIT_PASSES, CHECK_PASSES, CHECKED_SEQUENCES = 9, 6, 4


def parse():
    """The flags as given. Raises UserError for those that do not go together."""
    parser = StageParser(__doc__)
    parser.section("the plan")
    parser.add_argument("--on", required=True, metavar="[NODESx]COUNTxDEVICE",
                        help=f"a device of {', '.join(cost.HARDWARE)}; {cost.OWN}, numbers of dense bf16 "
                        f"and, in GB/s and one direction, of links; or, as 1x{cost.CPU}, this machine's")
    parser.add_argument("--model", metavar="NAME", help="a config.json, a directory that has one, or a hub "
                        "name, of which nothing else is downloaded")
    parser.add_argument("--kv-heads", type=positive, help="with --model: kv heads to keep (a quarter of the "
                        "source's, at least one)")
    parser.add_argument("--run", "--run-dir", metavar="DIR", help="a run directory after stage 4, in place "
                        "of --model")
    parser.add_argument("-h", "--help", action="help", help="show this page")
    for title, flags in stage5.FLAGS.items():
        parser.section(title)
        for flag in flags:
            parser.add_flag(flag)
    args = parser.parse_args()
    cost.parse_hardware(args.on)
    if bool(args.model) == bool(args.run):
        raise UserError(f"--model, --run: expected one of them, found {'both' if args.run else 'neither'}")
    if args.run and args.kv_heads:
        raise UserError(f"--kv-heads: expected none with --run, which has its own, found {args.kv_heads}")
    if args.model and args.tasks not in (None, "hub", NONE):
        raise UserError("--tasks: expected hub or none with --model, which reads only a config, found "
                        f"{args.tasks}")
    if args.dtype == "float32" and on_gpus(args):
        raise UserError("--dtype: expected bfloat16 on GPUs, which a plan assumes, found float32")
    return args


def on_gpus(args) -> bool:
    """Whether the plan is for GPUs, not for this machine's processor."""
    return not args.on.endswith(f"x{cost.CPU}")


def conversion_of_config(model: str, kv_heads: int | None, whole_head: bool) -> Conversion:
    """The conversion of a model by its config alone: the paper's merge, or the closed form, which changes
    entire heads. Raises UserError for a model or kv heads that cannot be.
    """
    path = config_file(str(demo.SHIPPED) if model == demo.DEMO else model)
    config = load_config(path)
    require_convertible(model, config)
    shape = geometry(config)
    kv_heads = kv_heads or max(shape.kv_heads // 4, 1)
    check_kv_heads(shape.kv_heads, kv_heads)
    attention = empty_model(model, config, torch.float32).model.layers[0].self_attn
    described = {"name": model, "path": path} | asdict(shape)
    return Conversion(path, path, described, kv_heads, "closed-form" if whole_head else "mean",
                      merged_modules(attention, whole_head))


def filled(args, defaults: dict, conversion: Conversion):
    """The flags with what was left out. Raises UserError for text without --text-tokens."""
    path = conversion.model["path"]
    positions = load_config(path).max_position_embeddings
    if args.run:
        bos = bool(bos_prefix(load_tokenizer(path, args.bos)))
        return with_defaults(args, defaults, conversion, positions, bos)
    chats = [source for source in args.chat or () if source != NONE]
    without_chats = replace(args, chat=[NONE])  # it may have no chat template
    given = replace(with_defaults(without_chats, defaults, conversion, positions, bool(args.bos)), chat=chats)
    if (given.text or chats) and not args.text_tokens:
        raise UserError("--text, --chat: expected --text-tokens N with --model, which reads no text, "
                        "found none")
    return given


def questions(count: int) -> list[Sample]:
    """So many samples of the tasks, without content."""
    lengths = [SHORTEST - SPREAD * math.log(1 - (number + 0.5) / count) for number in range(count)]
    return [Sample(range(round(min(length, LONGEST))), range(ANSWER)) for length in lengths]


def texts_and_chats(sources: Sources, texts: int, chats: int) -> tuple[list[Sample], list[Sample]]:
    """So many samples of --text and, half of each an answer, of --chat, without content."""
    length = sources.text_length
    return [Sample(range(length))] * texts, [Sample(range(length // 2), range(length - length // 2))] * chats


def expected_pool(sources: Sources, context: DataContext | None = None) -> Pool:
    """What is trained on. context: of a run, whose tasks are read, and everything if there is no
    --text-tokens.

    Raises UserError if there are no samples.
    """
    if context and not sources.text_tokens:
        return load_pool(sources, context)
    if sources.tasks == NONE:
        answered = []
    elif context:
        answered = load_pool(replace(sources, text=(), chat=()), context).answered
    else:
        answered = questions(sum(PUBLISHED_SIZES[task][0] for task in sources.only))
    rows = (sources.text_tokens or 0) // sources.text_length
    texts, chats = texts_and_chats(sources, len(sources.text) * rows, len(sources.chat) * rows)
    pool = Pool(answered + chats, texts)
    if not len(pool):
        raise UserError("--tasks none: expected --text with --text-tokens N, a sample's tokens at least, "
                        "found no sample")
    return pool


def expected_heldout(sources: Sources) -> tuple[list[Sample], list[Sample]]:
    """The texts and chats, and the questions, that are measured at most."""
    has_texts = sources.text if sources.heldout_text == SPLIT else sources.heldout_text != NONE
    texts, chats = (sources.heldout_sequences if has else 0 for has in (has_texts, sources.chat))
    most = QUESTIONS if sources.heldout_questions is None else sources.heldout_questions
    asked = 0 if sources.tasks == NONE else sum(min(most, PUBLISHED_SIZES[task][1]) for task in sources.only)
    return sum(texts_and_chats(sources, texts, chats), []), questions(asked)


def duration(hours: float) -> str:
    """Hours as one reads them: "12 s", "25 min", "4.1 h"."""
    if hours >= 1:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{60 * hours:.2g} min" if hours >= 1 / 60 else f"{3600 * hours:.2g} s"


def print_phase(phase: Phase, cluster: Cluster) -> tuple[float, bool]:
    """Print the cost of a training; return its hours and whether it fits."""
    title, work, student, schedule = phase
    step = cost.step_cost(work, student, schedule, cluster)
    need, limit = peak_memory(work, student, schedule, cluster)
    fits, hours = need["total"] <= limit, schedule.steps * step.seconds / 3600
    mean = sum(work.lengths) / len(work.lengths)
    gib = " | ".join(f"{name} {number / 2**30:.3g}" for name, number in need.items())
    moved = f"{step.traffic / 2**30:.3g} GiB moved per rank"
    if cluster.nodes > 1:
        moved += f", {step.network / 2**30:.3g} GiB between nodes"
    print(f"{title}: {schedule.steps} steps of {schedule.batch} samples, {mean:.0f} tokens each, "
          f"{schedule.steps * schedule.batch * mean:,.0f} in all; "
          f"{step.rows} row(s) of {step.row} tokens per rank{', recomputed' if work.recompute else ''}"
          f"{', weights gathered once a row' if work.whole and cluster.ranks_per_node > 1 else ''}")
    print(f"  GiB per rank | {gib} of {limit / 2**30:.0f} usable")
    print(f"  per step     | {step.flops / 1e12:.3g} TFLOP | {moved} | "
          f"{step.seconds:.2g} s, {step.mfu:.0%} MFU | {duration(hours)} in total")
    if not fits:
        print(f"  does NOT fit: {(need['total'] - limit) / 2**30:.1f} GiB too much; try a smaller "
              "--tokens-per-microbatch or --loss-chunk, --recompute, --reduce row, or more ranks")
    elif step.by_host and step.rows > 1:
        print("  fits; the host limits it: try a larger --tokens-per-microbatch")
    else:
        print("  fits")
    return hours, fits


def print_phases(phases: dict[str, Phase], on: str) -> float:
    """Print the cost of each training on hardware like "8xA100-80GB"; return the hours.

    Raises UserError if one does not fit.
    """
    costs = [print_phase(phase, cost.parse_hardware(on)) for phase in phases.values()]
    if not all(fits for _, fits in costs):
        raise UserError(f"--on: expected all phases to fit on {on}, found that not all do; see above")
    return sum(hours for hours, _ in costs)


def print_heldout(config, samples: list[Sample], times: int, cluster: Cluster) -> float:
    """Print the cost of measuring so many times on these samples; return the hours.

    An upper bound: a student has fewer kv heads than its teacher, and not every token is predicted.
    """
    tokens, attended = sum(map(len, samples)), sum(len(each) * (len(each) + 1) // 2 for each in samples)
    flops = 2 * forward_flops(products(config), tokens, attended, tokens)
    hours = times * cost.seconds(flops, 0, 0, cluster) / 3600
    print(f"held-out measurement: {times} of {tokens} tokens | {flops / 1e12:.3g} TFLOP each | "
          f"{duration(hours)} in total")
    return hours


def gigabytes(number: float) -> str:
    """Bytes as one reads them in GB: "0.23", "13.5", "1,402"."""
    return f"{number / 1e9:.3g}" if number < 1e11 else f"{number / 1e9:,.0f}"


def print_stages(config, cluster: Cluster, gpus: bool, refit: bool) -> None:
    """Print what stages 1 to 4 hold in memory and compute, as make convert runs them, on one GPU or on this
    machine's processor in float32.

    refit: --refit attention, on all of the calibration, with three hidden states of each token.
    """
    whole, layer, stored = size(config), cost.calibration_bytes(config), weight_dtype("source", config)
    speed = cluster.device.flops_per_s * (FLOAT32 if gpus else cluster.ranks)
    print(f"source: {whole.whole:,} parameters, {gigabytes(stored.itemsize * whole.whole)} GB in {stored}")

    def print_stage(numbers: str, count: int, copies: int, sequences: int, length: int) -> None:
        tokens, pairs = sequences * length, sequences * length * (length + 1) // 2
        flops = count * forward_flops(products(config), tokens, pairs, 0)
        hours = flops / (speed * cost.EFFICIENCY * 3600)
        print(f"stage {numbers}: GB in memory: weights {gigabytes(4 * whole.whole)} ("
              f"{gigabytes(4 * whole.layer)} with --layerwise), Grams of a layer {gigabytes(layer)}, hidden "
              f"states {gigabytes(copies * tokens * 4 * config.hidden_size)} | forward passes: {count} over "
              f"{tokens:,} tokens, {flops / 1e12:,.0f} TFLOP, {duration(hours)}")

    length = min(LENGTH, config.max_position_embeddings)
    print_stage("1", 1, 1, SEQUENCES, length)
    print(f"stages 2, 3: GB in memory: Grams of a layer {gigabytes(layer)} | factorizations of their blocks")
    print_stage("4", CHECK_PASSES, 1, CHECKED_SEQUENCES, min(CHECKED, length))
    if refit:
        print_stage("4, the refit", REFIT_PASSES, 3, SEQUENCES, length)


def planned_phases(args, given, conversion: Conversion, defaults: dict, pool: Pool) -> dict[str, Phase]:
    """The trainings, as stage 5 would choose rows and recomputation for the memory of --on. A teacher that is
    there is not trained. args: the flags as given; given: with what was left out.

    Raises UserError for one that cannot be trained.
    """
    gpus = on_gpus(args)
    teacher = given.teacher or (os.path.join(args.run, "teacher") if args.run else None)
    known = teacher == SOURCE or bool(teacher) and os.path.lexists(teacher)
    row = args.tokens_per_microbatch or SHORTEST_ROW[gpus]
    schedules = make_schedules(given, defaults, conversion, pool, row)
    if known:
        schedules = replace(schedules, teacher=None)
    elif not pool.answered:
        raise UserError(f"--teacher {teacher}: expected one that exists, or source, as text has no answers "
                        "to fine-tune one on")
    execution = Execution(compute=torch.bfloat16 if gpus else getattr(torch, args.dtype or "float32"),
                          recompute=bool(args.recompute))
    phases = phases_of(given, conversion, pool, execution, schedules)
    return memory.fit(phases, cost.parse_hardware(args.on), gpus and args.recompute is None,
                      gpus and args.tokens_per_microbatch is None)


def plan(args, ranks) -> None:
    """Print the plan. ranks: sharding.Ranks of this process alone. Raises UserError for flags, a
    model or text that cannot be, and where a phase does not fit.
    """
    cluster = cost.parse_hardware(args.on)
    conversion = (read_conversion(args.run, ranks) if args.run else
                  conversion_of_config(args.model, args.kv_heads, args.tasks == NONE))
    flags = [flag for section in stage5.FLAGS.values() for flag in section]
    defaults = defaults_of(flags, conversion, args.tasks)
    given = filled(args, defaults, conversion)
    sources = Sources(**{field.name: getattr(given, field.name) for field in fields(Sources)})
    path = conversion.model["path"]
    context = DataContext(path, args.run, ranks.device, ranks, bos=given.bos) if args.run else None
    pool, (texts, asked) = expected_pool(sources, context), expected_heldout(sources)
    phases, config = planned_phases(args, given, conversion, defaults, pool), load_config(path)
    schedule = phases["student"].schedule
    print(f"rows    of up to {schedule.tokens_per_microbatch} tokens")
    if args.model:
        print_stages(config, cluster, on_gpus(args), refit=sources.tasks == NONE)
    disk = cost.disk_bytes(phases, given.teacher is None, bool(texts))
    print("GB on disk: " + " | ".join(f"{name} {gigabytes(number)}" for name, number in disk.items()))
    hours = print_phases(phases, args.on)
    if texts or asked:
        heldout = Heldout({"": texts + asked}, given.heldout_every)
        due = [step for step in range(schedule.steps) if heldout.due(step + 1, schedule.steps)]
        hours += print_heldout(config, texts + asked, 1 + len(due), cluster)  # merged/ first
    generates = any(map(is_generated, (*sources.text, *sources.chat, sources.heldout_text)))
    print(f"plan: {duration(hours)} on {args.on}{', including the teacher' * (len(phases) > 1)}"
          f"{', besides generating text' * generates}")


def main():
    args = parse()
    with joined_ranks() as ranks:
        plan(args, ranks)


if __name__ == "__main__":
    run_stage(main)

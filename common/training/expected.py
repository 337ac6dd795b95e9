"""What stage 5 expects of a model of which only the config is known: --plan before anything is downloaded.

No weights, tokenizer or data are read. Tasks are the published training sets, and texts as many samples of
equal length as flags ask for.
"""

import math
from dataclasses import asdict

import torch

from common.data.pool import SPLIT, Pool, Sources, generated_rows
from common.data.rows import Sample
from common.data.sources import CHECKED
from common.data.tasks import PUBLISHED_SIZES
from common.data.text import GENERATED, NONE
from common.models.calibration import LENGTH, SEQUENCES
from common.models.families import check_kv_heads, geometry, merged_modules
from common.models.load import empty_model, load_config, weight_dtype
from common.models.proof import require_convertible
from common.run.errors import UserError
from common.run.kinds import SOURCE
from common.training import plan
from common.training.conversion import Conversion
from common.training.disk import calibration_bytes, gigabytes
from common.training.hardware import CPU, parse_hardware
from common.training.heldout import QUESTIONS, Heldout, heldout_questions, heldout_share
from common.training.lines import CHAT_SET, TASK_SET, TEXT_SET

# Tokens of the tasks' prompts, and of an answer: together 126 in the mean, 18.6 million in all, as published.
# That they spread exponentially, and how far, is assumed, as in bench/train_step.py.
SHORTEST, SPREAD, LONGEST, ANSWER = 24, 96, 480, 7
FLOAT32 = 1 / 16  # of the bf16 peak: an A100 has 19.5 of 312 TFLOP/s, an H100 67 of 989
# forward passes of 04_align.py --refit attention at most, and of its equivalence check
REFIT_PASSES, CHECK_PASSES, CHECKED_SEQUENCES = 9, 6, 4


# flags that say what to read: their values with --model
UNREAD = {"tasks": (None, "hub", NONE), "chat": (None, [NONE], [GENERATED]), "teacher": (None, SOURCE),
          "student": (None,)}


def check_flags(args) -> None:
    """Raise UserError for flags that do not go with --model, or that need it."""
    given = {f"--{name}": value for name, value in
             (("plan", args.plan), ("model", args.model), ("kv-heads", args.kv_heads)) if value}
    if given.keys() not in (set(), {"--plan"}, {"--plan", "--model", "--kv-heads"}):
        raise UserError(f"--model: expected --plan, --model and --kv-heads together, found {' '.join(given)}")
    for name, known in UNREAD.items() if args.model else ():
        value = getattr(args, name)
        if value not in known:
            *words, found = (word if isinstance(word, str) else word[0] for word in (*known, value) if word)
            raise UserError(f"--{name}: expected {' or '.join(words) or 'nothing'} with --model, which reads "
                            f"only a config, found {found}")
    if args.model and args.text not in (None, [NONE]) and not args.text_tokens:
        raise UserError("--text: expected --text-tokens N with --model, which reads no text, found none")


def expected_conversion(args) -> Conversion:
    """The conversion of the model whose config.json is args.run: the paper's merge or, without tasks, the
    closed form, which changes entire heads. Raises UserError for a model or kv heads that cannot be.
    """
    config = load_config(args.run)
    require_convertible(args.model, config)
    shape = geometry(config)
    check_kv_heads(shape.kv_heads, args.kv_heads)
    attention = empty_model(args.model, config, torch.float32).model.layers[0].self_attn
    whole_head = args.tasks == NONE
    model = {"name": args.model, "path": args.run} | asdict(shape)
    return Conversion(args.run, args.run, model, args.kv_heads, "closed-form" if whole_head else "mean",
                      merged_modules(attention, whole_head))


def questions(count: int) -> list[Sample]:
    """So many samples of the tasks, without content."""
    lengths = [SHORTEST - SPREAD * math.log(1 - (number + 0.5) / count) for number in range(count)]
    return [Sample(range(round(min(length, LONGEST))), range(ANSWER)) for length in lengths]


def texts_and_chats(sources: Sources, texts: int, chats: int) -> tuple[list[Sample], list[Sample]]:
    """So many samples of --text and, half of each an answer, of --chat, without content."""
    length = sources.text_length
    return [Sample(range(length))] * texts, [Sample(range(length // 2), range(length - length // 2))] * chats


def expected_pool(sources: Sources, begin: int) -> Pool:
    """What is trained on. begin: tokens that begin each text, not counted by --text-tokens.

    Raises UserError if there are no samples.
    """
    tasks = () if sources.tasks == NONE else sources.only
    tokens = len(sources.text) * (sources.text_tokens or 0)
    texts, chats = texts_and_chats(sources, tokens // (sources.text_length - begin),
                                   generated_rows(sources) if sources.chat else 0)
    pool = Pool(questions(sum(PUBLISHED_SIZES[task][0] for task in tasks)) + chats, texts)
    if not len(pool):
        raise UserError("--tasks none: expected --text with --text-tokens N, a sample's tokens at least, "
                        "found no sample")
    return pool


def expected_heldout(sources: Sources, every: int, begin: int) -> Heldout:
    """What is measured every so many steps, where every source has as much as flags ask for."""
    count, texts = 2 * sources.heldout_sequences, dict.fromkeys(sources.text)
    if sources.heldout_text == SPLIT:
        rows = generated_rows(sources, begin) if texts else 0
        count = min(count, sum(heldout_share(source, texts, count, rows) for source in texts))
    count *= sources.heldout_text != NONE
    chats = min(2 * sources.heldout_chats, sum(
        heldout_share(source, sources.chat, 2 * sources.heldout_chats, generated_rows(sources))
        for source in sources.chat))
    if sources.tasks == NONE:
        measured = heldout_questions(sources, None)  # none; refuses those that are asked for
    else:
        asked = QUESTIONS if sources.heldout_questions is None else sources.heldout_questions
        measured = questions(sum(min(asked, PUBLISHED_SIZES[task][1]) for task in sources.only))
    sets = zip((TEXT_SET, CHAT_SET), texts_and_chats(sources, -(-count // 2), -(-chats // 2)), strict=True)
    sets = {name: samples for name, samples in (*sets, (TASK_SET, measured)) if samples}
    return Heldout(sets, every)


def print_stages(config, hardware: str, refit: bool) -> None:
    """Print what stages 1 to 4 hold in memory and compute, as make convert runs them, on one device in
    float32.

    refit: --refit attention, on all of the calibration, with three hidden states of each token.
    """
    whole, layer, stored = plan.size(config), calibration_bytes(config), weight_dtype("source", config)
    cluster, length = parse_hardware(hardware), min(LENGTH, config.max_position_embeddings)
    speed = cluster.device.flops_per_s * (cluster.ranks if hardware.endswith(CPU) else FLOAT32)
    print(f"source: {whole.whole:,} parameters, {gigabytes(stored.itemsize * whole.whole)} GB in {stored}")

    def print_stage(numbers: str, count: int, copies: int, sequences: int, length: int) -> None:
        tokens, pairs = sequences * length, sequences * length * (length + 1) // 2
        flops = count * plan.forward_flops(plan.products(config), tokens, pairs, 0)
        hours = flops / (speed * plan.EFFICIENCY * 3600)
        print(f"stage {numbers}: GB in memory: weights {gigabytes(4 * whole.whole)} ("
              f"{gigabytes(4 * whole.layer)} with --layerwise), Grams of a layer {gigabytes(layer)}, hidden "
              f"states {gigabytes(copies * tokens * 4 * config.hidden_size)} | forward passes: {count} over "
              f"{tokens:,} tokens, {flops / 1e12:,.0f} TFLOP, {plan.duration(hours)}")

    print_stage("1", 1, 1, SEQUENCES, length)
    print(f"stages 2, 3: GB in memory: Grams of a layer {gigabytes(layer)} | factorizations of their blocks")
    print_stage("4", CHECK_PASSES, 1, CHECKED_SEQUENCES, min(CHECKED, length))
    if refit:
        print_stage("4, the refit", REFIT_PASSES, 3, SEQUENCES, length)

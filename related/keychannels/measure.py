"""Key-channel pruning measured: what each selector costs, and what the pruned cache saves.

Reads   checkpoints (default: the demo model, as MHA from runs/demo/teacher or else unchanged, and as GQA
        from runs/demo/gqa or else runs/demo/merged), a text
Writes  RUN/keychannels.json, keychannels.md and keychannels.png

    python -m related.keychannels.measure                                        # a minute on two cores
    python -m related.keychannels.measure --run runs/llama2-keys --device cuda --dtype bfloat16 \\
        --model meta-llama/Llama-2-7b-hf runs/llama2-7b-gqa8/gqa --prompt 1024 --continuation 128

Each text is a prompt and its continuation. After the prompt a share lambda of its key channels is removed
(the last --recent keys stay whole), chosen from its last --observed queries by think and by --select:

  align                  the step of that name of ThinK's successor GCJCP
  greedy, greedy+swap    this project's, in place of GGJC, the algorithm that the GCJCP draft ends before
  delta                  greedy by Delta_i as the draft prints it (channels.py)

For every lambda and selector this measures

  - the objective on the pruned keys, relative to the squared scores, per layer, key head and text
  - the error of the attention output for the continuation's queries, layer by layer in the unpruned model
  - with the pruned cache in all layers (cache.py): the perplexity of the continuation, the bytes in the
    cache after the prompt, and the time of prefill and decoding over a plain cache's, for one sequence

and that at lambda = 0 the logits equal the plain cache's bit for bit.
"""

import math
import os
import statistics
import time

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from common.artifacts import claim, make_record
from common.cli import Clock, UserError, non_negative, positive, run_stage, stage_parser
from common.cli import device as device_flag
from common.data.demo import DEMO, resolve_model
from common.data.text import load_tokens
from common.families import geometry
from common.files import write_json, write_text
from common.models import describe, load_config, load_model, load_tokenizer, pick_device
from common.progress import Progress
from related.keychannels.cache import KeyChannelCache, cached_bytes, require_prunable
from related.keychannels.channels import SELECTORS, removed_count
from related.keychannels.effects import Setting, layer_effects, summarize
from related.keychannels.report import picture, tables

STAGE = "related/keychannels/measure.py"
CONVERTED = os.path.join("runs", "demo")  # the run whose checkpoints are measured by default
PLAIN = None  # in the place of a choice (lambda, selector): the plain cache
OTHERS = tuple(name for name in SELECTORS if name != "think")
UNPRUNED = (0.0, "greedy+swap")  # the choice that removes nothing


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/keychannels")
    parser.add_argument("--model", nargs="+", default=None, metavar="DIR",
                        help="checkpoints: directories or hub names (default: the demo model's, see above)")
    parser.add_argument("--ratios", type=float, nargs="+", default=(0.3, 0.4, 0.5, 0.6, 0.7), metavar="X",
                        help="lambda: shares of the channels to remove")
    parser.add_argument("--select", nargs="+", default=("align", "greedy", "greedy+swap"), choices=OTHERS,
                        metavar="NAME", help=f"selectors beside think: {', '.join(OTHERS)}")
    parser.add_argument("--recent", type=non_negative, default=32,
                        help="last keys of the prompt that stay whole")
    parser.add_argument("--observed", type=positive, default=32,
                        help="last queries of the prompt that channels are chosen by")
    parser.section("text")
    parser.add_argument("--text", default=None, help="c4, demo (held-out part), a .txt, .jsonl, .json.gz or "
                        ".parquet file (default: demo, or c4 with --model)")
    parser.add_argument("--sequences", type=positive, default=32, help="number of texts, at least 2")
    parser.add_argument("--prompt", type=positive, default=192, help="tokens of each text in the prompt")
    parser.add_argument("--continuation", type=positive, default=64, 
                        help="tokens after the prompt, at least 2")
    parser.section("resources")
    parser.add_argument("--batch", type=positive, default=16, help="texts per forward pass")
    parser.add_argument("--repeats", type=positive, default=10, help="turns of timing; the fastest counts")
    parser.add_argument("--device", type=device_flag, default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                        help="dtype of the forward passes")
    args = parser.parse_args()
    check_arguments(args)
    return args


def check_arguments(args) -> None:
    """Raise UserError for numbers that do not fit each other."""
    for ratio in args.ratios:
        if not 0 < ratio < 1:
            raise UserError(f"--ratios: expected numbers between 0 and 1, found {ratio}")
    for flag, values in (("--ratios", args.ratios), ("--model", args.model or ()), ("--select", args.select)):
        if len(set(values)) < len(values):
            raise UserError(f"{flag}: expected each value once, found {' '.join(map(str, values))}")
    for flag, number in (("--sequences", args.sequences), ("--continuation", args.continuation)):
        if number < 2:
            raise UserError(f"{flag}: expected at least 2, found {number}")
    if args.recent >= args.prompt:
        raise UserError(f"--recent: expected less than --prompt {args.prompt}, found {args.recent}")
    if args.observed > args.prompt:
        raise UserError(f"--observed: expected at most --prompt {args.prompt}, found {args.observed}")


def default_checkpoints() -> list[str]:
    """The demo model as MHA and, once the stages have converted it, as GQA."""
    teacher, gqa, merged = (os.path.join(CONVERTED, name) for name in ("teacher", "gqa", "merged"))
    mha = teacher if os.path.isdir(teacher) else resolve_model(DEMO)
    for path in (gqa, merged):
        if os.path.isdir(path):
            return [mha, path]
    print(f"skipped converted GQA: {CONVERTED} has none until the seven stages have run")
    return [mha]


def check_checkpoint(setting: Setting, path: str) -> None:
    """Raise UserError when a checkpoint has too few positions, nothing to prune, or too few channels."""
    config = load_config(path)
    require_prunable(config)
    length, longest = setting.prompt + setting.continuation, config.max_position_embeddings
    if length > longest:
        raise UserError(f"--prompt and --continuation: expected at most the {longest} positions of {path}, "
                        f"found {length}")
    size = geometry(config).head_dim
    for ratio in setting.ratios:
        if not 0 < removed_count(ratio, size) < size:
            raise UserError(f"--ratios: expected to remove 1 to {size - 1} of the {size} channels of {path}, "
                            f"found {removed_count(ratio, size)} at {ratio}")


def new_cache(setting: Setting, model, choice):
    """An empty cache: pruning for a choice (lambda, selector), else plain. The same attention reads both."""
    ratio, select = choice or UNPRUNED
    pruning = KeyChannelCache(model, ratio, select, setting.recent, setting.observed, setting.prompt)
    return DynamicCache(config=model.config) if choice is PLAIN else pruning


@torch.no_grad()
def continue_prompt(setting: Setting, model, tokens, choice) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Read each prompt, then its continuation with the cache left by the prompt.

    Returns logits [n, continuation, vocab], the loss of each text [n] in nats, and bytes in the cache after
    the prompt.
    """
    cache = new_cache(setting, model, choice)
    model(tokens[:, : setting.prompt], past_key_values=cache, logits_to_keep=1)
    size, rest = cached_bytes(cache), tokens[:, setting.prompt :]
    logits = model(rest, past_key_values=cache).logits
    losses = F.cross_entropy(logits[:, :-1].double().transpose(1, 2), rest[:, 1:], reduction="none").mean(1)
    return logits, losses.cpu(), size


@torch.no_grad()
def time_choice(setting: Setting, model, row: torch.Tensor, choice) -> tuple[float, float]:
    """Seconds for the prompt of one text [T], and the median over its continuation, one token at a time."""
    cache, times = new_cache(setting, model, choice), []
    for tokens in row[None].split([setting.prompt] + [1] * setting.continuation, 1):
        synchronize(model.device)
        start = time.perf_counter()
        model(tokens, past_key_values=cache, logits_to_keep=1)
        synchronize(model.device)
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_texts(setting: Setting, model, batches, name: str) -> tuple[dict, dict, dict, bool]:
    """By choice: effects, losses [texts] and cache bytes; and whether lambda = 0 leaves logits unchanged."""
    effects, losses, sizes, same = [], {}, {}, True
    for batch in Progress(batches, desc=name, unit="batch", leave=False):
        effects += layer_effects(setting, model, batch)
        for choice in (PLAIN, *setting.choices):
            logits, loss, size = continue_prompt(setting, model, batch, choice)
            losses.setdefault(choice, []).append(loss)
            sizes[choice] = sizes.get(choice, 0) + size
            if choice is PLAIN:
                same &= torch.equal(logits, continue_prompt(setting, model, batch, UNPRUNED)[0])
    losses = {choice: torch.cat(parts) for choice, parts in losses.items()}
    return summarize(setting, effects), losses, sizes, same


def fastest_times(setting: Setting, model, row: torch.Tensor, repeats: int) -> dict:
    """choice -> (prefill, decoding) seconds: the fastest of `repeats` turns over all choices."""
    times = {choice: [] for choice in (PLAIN, *setting.choices)}
    for _ in Progress(range(repeats), desc="timing", unit="turn", leave=False):
        for choice, turns in times.items():
            turns.append(time_choice(setting, model, row, choice))
    return {choice: tuple(map(min, zip(*turns, strict=True))) for choice, turns in times.items()}


def measure(args, setting: Setting, path: str, text: str, device: str) -> dict:
    """All figures of one checkpoint."""
    model, description = load_model(path, getattr(torch, args.dtype), device), describe(path)
    length, tokenizer = setting.prompt + setting.continuation, load_tokenizer(path)
    tokens, source = load_tokens(text, tokenizer, args.sequences, length, split="heldout")
    print(f"reads   {path}\nreads   {source}")
    tokens = tokens.to(device)
    batches = tokens.split(args.batch)
    summary, losses, sizes, same = measure_texts(setting, model, batches, os.path.basename(path))
    times = fastest_times(setting, model, tokens[0], args.repeats)
    rows, size = [], description["head_dim"]
    for ratio, select in setting.choices:
        choice = ratio, select
        over = losses[choice] - losses[PLAIN]
        row = {"ratio": ratio, "select": select, "channels": size - removed_count(ratio, size)}
        row |= summary[choice] | {
            "loss_over_plain": float(over.mean()),
            "loss_over_plain_stderr": float(over.std() / len(over) ** 0.5),
            "perplexity": math.exp(losses[choice].mean()),
            "texts_lower_than_think": int((losses[choice] < losses[ratio, "think"]).sum()),
            "cache_bytes": sizes[choice] // len(tokens),
            "prefill_over_plain": times[choice][0] / times[PLAIN][0],
            "decode_over_plain": times[choice][1] / times[PLAIN][1],
        }
        rows.append(row)
    return {"model": description, "text": source, "texts": len(tokens), "rows": rows, "same_bits_at_0": same,
            "perplexity": math.exp(losses[PLAIN].mean()), "cache_bytes": sizes[PLAIN] // len(tokens),
            "decode_ms_per_token": 1000 * times[PLAIN][1]}


def closing_line(results: dict[str, dict], select: str) -> str:
    """One selector against the others over all checkpoints."""
    totals = dict.fromkeys(("lower_than_think", "higher_than_think", "above_another", "heads"), 0)
    for figures in results.values():
        for row in figures["rows"]:
            if row["select"] == select:
                totals = {name: total + row[name] for name, total in totals.items()}
    same = all(figures["same_bits_at_0"] for figures in results.values())
    return (f"{select} below think on {totals['lower_than_think']} of {totals['heads']} choices, above on "
            f"{totals['higher_than_think']}, above any other on {totals['above_another']}; "
            f"lambda = 0 equals the plain cache bit for bit: {same}")


def main():
    args, clock = parse(), Clock()
    output = os.path.join(args.run, "keychannels")
    setting = Setting(args.prompt, args.continuation, args.recent, args.observed, tuple(args.ratios),
                      ("think", *args.select))
    paths = [resolve_model(name) for name in args.model] if args.model else default_checkpoints()
    for path in paths:
        check_checkpoint(setting, path)
    claim(STAGE, args, output + ".json")
    device, text = pick_device(args.device), args.text or ("c4" if args.model else DEMO)
    results = {path: measure(args, setting, path, text, device) for path in paths}

    shown = "\n\n".join(map(tables, results.values()))
    write_text(output + ".md", shown + "\n")
    title = f"key channels removed from a prompt of {args.prompt} tokens, the last {args.recent} whole"
    picture(output + ".png", results, title)
    sidecar = make_record(STAGE, args, results[paths[0]]["model"], {}, {}, clock())
    write_json(output + ".json", sidecar | {"device": device, "results": results})
    print(f"\n{shown}\n\nwrote   {output}.json, {output}.md")
    print(f"keychannels: {closing_line(results, args.select[-1])}; in {clock()} s")


if __name__ == "__main__":
    run_stage(main)

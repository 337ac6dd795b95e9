"""Key-channel pruning measured: what selectors cost, what the pruned cache saves, and two premises.

Reads   checkpoints, a text
Writes  RUN/keychannels/: keychannels.md and keychannels.png, or RUN/premises/: premises.md

    python -m related.keychannels.measure --model demo runs/demo/gqa             # a minute on two cores
    python -m related.keychannels.measure --run runs/llama2-keys --device cuda --dtype bfloat16 --text c4 \\
        --model meta-llama/Llama-2-7b-hf runs/llama2-7b-gqa8/gqa --prompt 1024 --continuation 128
    python -m related.keychannels.measure --premises --model runs/smollm2/source --text FILE.txt --prompt 2048

Each text is a prompt and its continuation. For every lambda and selector (think and --select, channels.py) a
share lambda of the prompt's key channels is removed. Measured are the objective on the pruned keys, relative
to the squared scores; the error of the attention output for the continuation's queries, layer by layer in the
unpruned model; and with the pruned cache in all layers (cache.py) the continuation's perplexity, the bytes in
the cache after the prompt, and the time of prefill and decoding over a plain cache's, for one sequence.

--premises measures instead, by key head in the unpruned model, whether few channels are large: the share of
the keys' energy |k_i|^2 and of the scores' |q_i|^2 |k_i|^2 in the largest tenth, quarter and half of them;
and whether the window, the last --observed queries of the prompt, represents later queries (SnapKV): the
share of their attention before the window in the tenth of positions that the window, they themselves or
recency choose; and the relative error of their scores without half of the channels, by either's choice.
"""

import itertools
import math
import os
import statistics
import time

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.data.demo import DEMO, resolve_model
from common.data.documents import EVALUATION, EXPECTED
from common.data.text import load_tokens, sequence_length
from common.models.families import geometry
from common.models.load import describe, fingerprint, load_config, load_model, load_tokenizer, pick_device
from common.reporting.plots import drawing
from common.reporting.tables import markdown_table
from common.run.artifact import begin_stage, write_directory, write_record
from common.run.errors import UserError, run_stage
from common.run.files import write_text
from common.run.flags import device as device_flag
from common.run.flags import non_negative, positive, probability, stage_parser
from common.run.progress import Progress
from related.keychannels import channels
from related.keychannels.cache import ATTENTION, KeyChannelCache, KeyChannelLayer, cached_bytes

STAGE = "related/keychannels/measure.py"
PLAIN = None  # in the place of a choice (lambda, selector): the plain cache
OTHERS = tuple(name for name in channels.SELECTORS if name != "think")
EXACT_SIZE = 16  # largest head size at which all sets of channels are enumerated
EQUAL = 1e-9  # relative difference below which two objectives count as the same
CHOICE_COLUMNS = ("lambda", "channels kept", "selector", "objective", "vs think",
                  "lower / same / higher than think", "optimal", "output error")
USE_COLUMNS = ("lambda", "selector", "perplexity", "loss over plain, nats", "texts lower than think", "cache",
               "vs plain", "prefill time", "decode time")
PREMISES = {"keys": "energy of keys in the largest {} of channels",
            "scores": "energy of scores in the largest {} of channels",
            "positions": "later attention to a tenth of the prompt, chosen by {}",
            "channels": "error of later scores, half of the channels removed, chosen by {}"}


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/keychannels")
    parser.add_argument("--model", nargs="+", default=[DEMO], metavar="DIR",
                        help="checkpoints: directories or hub names")
    parser.add_argument("--premises", action="store_true", help="measure the premises; see above")
    parser.add_argument("--ratios", type=probability, nargs="+", default=(0.3, 0.4, 0.5, 0.6, 0.7),
                        help="lambda: shares of the channels to remove")
    parser.add_argument("--select", nargs="+", default=("align", "greedy", "greedy+swap"), choices=OTHERS,
                        metavar="NAME", help=f"selectors besides think: {', '.join(OTHERS)}")
    parser.add_argument("--recent", type=non_negative, default=32, help="last keys of the prompt, not pruned")
    parser.add_argument("--observed", type=positive, default=32,
                        help="last queries of the prompt that channels are chosen by")
    parser.section("text")
    parser.add_argument("--text", default=DEMO, help=f"{EXPECTED}; of demo, its held-out part")
    parser.add_argument("--sequences", type=positive, default=32, help="number of texts, at least 2")
    parser.add_argument("--prompt", type=positive, default=192, help="tokens of each text in the prompt")
    parser.add_argument("--continuation", type=positive, default=64, help="tokens after it, at least 2")
    parser.section("resources")
    parser.add_argument("--batch", type=positive, default=16, help="texts per forward pass")
    parser.add_argument("--repeats", type=positive, default=10, help="turns of timing; the fastest counts")
    parser.add_argument("--device", type=device_flag, default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                        help="dtype of the forward passes")
    return parser.parse_args()


def check(args, path: str) -> None:
    """Raise UserError for numbers that fit neither each other nor a checkpoint, or without keys to prune."""
    config, length, fewest = load_config(path), args.prompt + args.continuation, 1 if args.premises else 2
    KeyChannelCache.require_prunable(config)
    sequence_length(length, length, config.max_position_embeddings, flag="--prompt and --continuation")
    if args.sequences < fewest or args.continuation < 2:
        raise UserError(f"--sequences and --continuation: expected at least {fewest} and 2, found "
                        f"{args.sequences} and {args.continuation}")
    if max(args.observed, args.recent) >= args.prompt:
        raise UserError(f"--observed and --recent: expected less than --prompt {args.prompt}, found "
                        f"{args.observed} and {args.recent}")
    size = geometry(config).head_dim
    for ratio in args.ratios:
        if not 0 < channels.removed_count(ratio, size) < size:
            raise UserError(f"--ratios: expected to remove 1 to {size - 1} of the {size} channels of {path}, "
                            f"found {channels.removed_count(ratio, size)} at {ratio}")


def choices(args) -> list[tuple[float, str]]:
    """(lambda, selector) pairs to measure; think, which the others are compared with, comes first."""
    return list(dict.fromkeys(itertools.product(args.ratios, ("think", *args.select))))


@torch.no_grad()
def watch_attention(model, tokens: torch.Tensor, function) -> None:
    """Have the model read tokens [n, T]; call function in each of its layers without a sliding window.

    It gets queries [n, H, T, d], keys and values [n, G, T, d], after RoPE, the output [n, T, H, d], and the
    scale of the scores.
    """
    sliding = DynamicCache(config=model.config).is_sliding

    def attention(module, query, key, value, mask, scaling, **kwargs):
        output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
        if not sliding[module.layer_idx]:
            function(query, key, value, output, scaling)
        return output, None

    AttentionInterface.register("watched", attention)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model.set_attn_implementation("watched")
    model(tokens, use_cache=False, logits_to_keep=1)


def head_effects(args, queries, keys, values, output, scaling: float) -> dict[tuple, dict]:
    """Metrics of each choice (lambda, selector) in one layer, from what watch_attention passes.

    "objective" [n, G] is over the squared scores, "error" and "output" [] are the squared error and norm of
    the attention output on the continuation. (lambda, "exact") has the best objective, for small heads.
    """
    prompt, size, effects = args.prompt, keys.shape[-1], {}
    observed = channels.by_key_head(queries[:, :, prompt - args.observed : prompt], keys)
    weights = channels.interactions(observed, keys[:, :, : prompt - args.recent])
    whole, before = weights.sum((-1, -2)), output[:, prompt:].double()
    mask = torch.ones(args.continuation, keys.shape[2], dtype=torch.bool, device=keys.device).tril(prompt)
    for ratio, select in choices(args):
        layer = KeyChannelLayer(ratio, select, args.recent, args.observed, prompt)
        layer.update(keys[:, :, :prompt], values[:, :, :prompt])
        layer.prune(queries[:, :, :prompt], None)
        layer.update(keys[:, :, prompt:], values[:, :, prompt:])
        removed = torch.ones_like(weights[..., 0], dtype=torch.bool)
        removed.scatter_(-1, layer.channels.long(), False)
        after = layer.attend(queries[:, :, prompt:], values, mask, scaling)
        effects[ratio, select] = {"objective": channels.objective(weights, removed) / whole,
                                  "error": (after - before).square().sum(), "output": before.square().sum()}
    if size <= EXACT_SIZE:
        for ratio in args.ratios:
            best = channels.exact(weights, channels.removed_count(ratio, size))
            effects[ratio, "exact"] = {"objective": channels.objective(weights, best) / whole}
    return effects


def summarize(args, effects: list[dict]) -> dict[tuple[float, str], dict]:
    """(lambda, selector) -> metrics over all heads. effects: head_effects of each layer and batch."""

    def joined(ratio: float, select: str, name: str) -> torch.Tensor:
        return torch.cat([layer[ratio, select][name].flatten().cpu() for layer in effects])

    summary = {}
    for ratio in args.ratios:
        costs = {select: joined(ratio, select, "objective") for select in ("think", *args.select)}
        think = costs["think"]
        for select, cost in costs.items():
            lower, higher = cost < think * (1 - EQUAL), cost > think * (1 + EQUAL)
            error = joined(ratio, select, "error").sum() / joined(ratio, select, "output").sum()
            row = {"heads": len(cost), "objective": float(cost.mean()), "output_error": float(error.sqrt()),
                   "lower_than_think": int(lower.sum()), "same_as_think": int((~lower & ~higher).sum()),
                   "higher_than_think": int(higher.sum()),
                   "change_to_think": float(cost.mean() / think.mean() - 1)}
            if (ratio, "exact") in effects[0]:
                best = joined(ratio, "exact", "objective")
                row["best_of_all_sets"] = int((cost <= best * (1 + EQUAL)).sum())
            summary[ratio, select] = row
    return summary


def new_cache(args, model, choice):
    """An empty cache: pruning for a choice (lambda, selector), else plain. The same attention reads both."""
    model.set_attn_implementation(ATTENTION)
    if choice is PLAIN:
        return DynamicCache(config=model.config)
    return KeyChannelCache(model, *choice, args.recent, args.observed, args.prompt)


@torch.no_grad()
def continue_prompt(args, model, tokens, choice) -> tuple[torch.Tensor, int]:
    """Losses of texts [n] on their continuation, in nats, and bytes in the cache after the prompt."""
    cache, (prompt, rest) = new_cache(args, model, choice), tokens.tensor_split((args.prompt,), 1)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    size, logits = cached_bytes(cache), model(rest, past_key_values=cache).logits
    losses = F.cross_entropy(logits[:, :-1].double().transpose(1, 2), rest[:, 1:], reduction="none").mean(1)
    return losses.cpu(), size


def compare_losses(loss: torch.Tensor, plain: torch.Tensor, think: torch.Tensor) -> dict[str, float]:
    """Metrics of a choice's losses [texts], against the plain cache's and those of think at its lambda."""
    over = loss - plain
    return {"loss_over_plain": float(over.mean()),
            "loss_over_plain_stderr": float(over.std() / len(over) ** 0.5),
            "perplexity": math.exp(loss.mean()), "texts_lower_than_think": int((loss < think).sum())}


@torch.no_grad()
def fastest_times(args, model, row: torch.Tensor) -> dict:
    """choice -> the fewest seconds for the prompt of a text [T], and for a token after it (the median)."""
    times = {choice: [] for choice in (PLAIN, *choices(args))}
    for _ in Progress(range(args.repeats), desc="timing", unit="turn", leave=False):
        for choice, turns in times.items():
            cache, marks = new_cache(args, model, choice), [time.perf_counter()]
            for tokens in row[None].split([args.prompt] + [1] * args.continuation, 1):
                logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
                float(logits[0, 0, 0])  # the host waits for the device
                marks.append(time.perf_counter())
            prefill, *decoding = (end - start for start, end in itertools.pairwise(marks))
            turns.append((prefill, statistics.median(decoding)))
    return {choice: tuple(map(min, zip(*turns, strict=True))) for choice, turns in times.items()}


def measure(args, path: str, model, tokens: torch.Tensor) -> dict:
    """Metrics of every choice for one checkpoint. tokens: [texts, prompt + continuation]."""
    effects, losses, sizes, rows = [], {}, {}, []
    for batch in Progress(tokens.split(args.batch), desc=os.path.basename(path), unit="batch", leave=False):
        watch_attention(model, batch, lambda *states: effects.append(head_effects(args, *states)))
        for choice in (PLAIN, *choices(args)):
            loss, size = continue_prompt(args, model, batch, choice)
            losses.setdefault(choice, []).append(loss)
            sizes[choice] = sizes.get(choice, 0) + size
    losses = {choice: torch.cat(parts) for choice, parts in losses.items()}
    times, summary = fastest_times(args, model, tokens[0]), summarize(args, effects)
    description = describe(path)
    for choice in choices(args):
        ratio, select = choice
        kept = description["head_dim"] - channels.removed_count(ratio, description["head_dim"])
        prefill, decode = (mine / plain for mine, plain in zip(times[choice], times[PLAIN], strict=True))
        rows.append({"ratio": ratio, "select": select, "channels": kept} | summary[choice]
                    | compare_losses(losses[choice], losses[PLAIN], losses[ratio, "think"])
                    | {"cache_bytes": sizes[choice] // len(tokens), "prefill_over_plain": prefill,
                       "decode_over_plain": decode})
    return {"model": description, "texts": len(tokens), "rows": rows,
            "perplexity": math.exp(losses[PLAIN].mean()), "cache_bytes": sizes[PLAIN] // len(tokens),
            "decode_ms_per_token": 1000 * times[PLAIN][1]}


def tables(metrics: dict) -> str:
    """Markdown for one checkpoint: what the selectors chose, and what using the pruned cache does."""
    model, rows, plain, chosen = metrics["model"], metrics["rows"], metrics["cache_bytes"], []
    used = [(0, "plain cache", f"{metrics['perplexity']:.3f}", "", "", f"{plain / 1024:.1f} KiB", 1, 1, 1)]
    for row in rows:
        change = counts = lower = ""
        if row["select"] != "think":
            change = f"{row['change_to_think']:+.1%}"
            counts = f"{row['lower_than_think']} / {row['same_as_think']} / {row['higher_than_think']}"
            lower = f"{row['texts_lower_than_think']} of {metrics['texts']}"
        chosen.append((row["ratio"], f"{row['channels']} of {model['head_dim']}", row["select"],
                       f"{row['objective']:.5f}", change, counts, row.get("best_of_all_sets", ""),
                       f"{row['output_error']:.4f}"))
        used.append((row["ratio"], row["select"], f"{row['perplexity']:.3f}",
                     f"{row['loss_over_plain']:+.4f} ± {row['loss_over_plain_stderr']:.4f}", lower,
                     f"{row['cache_bytes'] / 1024:.1f} KiB", f"{row['cache_bytes'] / plain:.3f}",
                     f"{row['prefill_over_plain']:.2f}", f"{row['decode_over_plain']:.2f}"))
    return "\n\n".join((
        f"### {model['path']}: {model['heads']} heads, {model['kv_heads']} key heads of {model['head_dim']} "
        f"channels",
        f"{rows[0]['heads']} choices (layers x key heads x texts); objective and output error are relative.",
        markdown_table(CHOICE_COLUMNS, chosen),
        f"The plain cache decodes a token in {metrics['decode_ms_per_token']:.2f} ms.",
        markdown_table(USE_COLUMNS, used)))


@drawing
def picture(plt, results: dict[str, dict], title: str):
    """A row per checkpoint: objective over think's, attention-output error and perplexity against lambda."""
    size = (11, 2.9 * len(results) + 0.4)
    figure, axes = plt.subplots(len(results), 3, squeeze=False, figsize=size, layout="constrained")
    names = {"change_to_think": "objective relative to think",
             "output_error": "relative error of the attention output",
             "perplexity": "perplexity of the continuation"}
    for line, (path, metrics) in zip(axes, results.items(), strict=True):
        for axis, (name, title_of_axis) in zip(line, names.items(), strict=True):
            for select in dict.fromkeys(row["select"] for row in metrics["rows"]):
                rows = [row for row in metrics["rows"] if row["select"] == select]
                values = [row[name] + (name == "change_to_think") for row in rows]
                axis.plot([row["ratio"] for row in rows], values, "o-", markersize=3, label=select)
            axis.set(title=title_of_axis, xlabel="lambda, share of key channels removed")
        line[0].set_title(f"{path}\n{names['change_to_think']}")
        line[2].axhline(metrics["perplexity"], color="black", linewidth=0.8, label="plain cache")
        line[2].legend(fontsize=8)
    figure.suptitle(title)
    return figure


def closing_line(results: dict[str, dict], select: str) -> str:
    """One selector against think over all checkpoints."""
    rows = [row for metrics in results.values() for row in metrics["rows"] if row["select"] == select]
    lower, higher, heads = (sum(row[name] for row in rows)
                            for name in ("lower_than_think", "higher_than_think", "heads"))
    return f"{select} below think on {lower} of {heads} choices, above on {higher}"


def premises(args, path: str, model, tokens: torch.Tensor) -> dict[str, dict[str, list[float]]]:
    """What is shown by row and column, over all layers without a sliding window, key heads and texts."""
    everything = {name: {} for name in PREMISES}

    def note(queries, keys, values, output, scaling: float) -> None:
        found = channels.head_premises(queries[0], keys[0], args.prompt, args.observed, scaling)
        for name, metrics in found.items():
            for column, numbers in metrics.items():
                everything[name].setdefault(column, []).extend(numbers.tolist())

    for row in Progress(tokens, desc=os.path.basename(path), unit="text"):
        watch_attention(model, row[None], note)
    return everything


def premises_table(results: dict[str, dict]) -> str:
    """Markdown: mean and tenth to ninetieth percentile over layers, key heads and texts."""
    lines = []
    for name, title in PREMISES.items():
        for column in next(iter(results.values()))[name]:
            numbers = [metrics[name][column] for metrics in results.values()]
            tenths = [statistics.quantiles(values, n=10) for values in numbers]
            shown = [f"{statistics.mean(values):.3f} ({low:.3f} to {high:.3f})"
                     for values, (low, *_, high) in zip(numbers, tenths, strict=True)]
            lines.append((title.format(column), *shown))
    return markdown_table(("mean (tenth to ninetieth percentile)", *results), lines, "<" + ">" * len(results))


def main():
    args, results = parse(), {}
    paths = list(dict.fromkeys(map(resolve_model, args.model)))
    for path in paths:
        check(args, path)
    name = "premises" if args.premises else "keychannels"
    output = os.path.join(args.run, name)
    inputs = {path: fingerprint(path) for path in paths}
    started = begin_stage(STAGE, args, output, inputs=inputs)
    device, length = pick_device(args.device), args.prompt + args.continuation
    for path in paths:
        tokens, source = load_tokens(args.text, load_tokenizer(path), args.sequences, length, EVALUATION)
        print(f"reads   {path}\nreads   {source}")
        model, tokens = load_model(path, getattr(torch, args.dtype), device), tokens.to(device)
        if args.premises:
            results[path] = premises(args, path, model, tokens)
        else:
            results[path] = measure(args, path, model, tokens) | {"text": source}
    if args.premises:
        shown, positions = premises_table(results), results[paths[0]]["positions"]
        share, best = (statistics.mean(positions[by]) for by in ("the window", "later queries"))
        last = f"the window finds {share / best:.0%} of the attention that a tenth of the prompt can get"
    else:
        shown, last = "\n\n".join(map(tables, results.values())), closing_line(results, args.select[-1])
    record = started.record(describe(paths[0]), {}, device=device, results=results)
    with write_directory(output) as aside:
        if not args.premises:
            prompt = f"a prompt of {args.prompt} tokens, the last {args.recent} unpruned"
            title = f"key channels removed from {prompt}"
            picture(os.path.join(aside, f"{name}.png"), results, title)
        write_text(os.path.join(aside, f"{name}.md"), shown + "\n")
        write_record(aside, record)
    print(f"\n{shown}\n\nwrote   {output}\n{name}: {last}; in {started.clock()} s")


if __name__ == "__main__":
    run_stage(main)

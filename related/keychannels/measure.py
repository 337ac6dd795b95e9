"""Key-channel pruning measured: what each way to choose channels costs, and what the cache and its speed gain.

Reads   checkpoints (default: the embedded model, as MHA in runs/demo/teacher or else as it was, and as GQA in runs/demo/gqa or
        else merged), a text
Writes  RUN/keychannels.json, keychannels.md and keychannels.png

    python -m related.keychannels.measure                                        # a minute on two cores
    python -m related.keychannels.measure --run runs/llama2-keys --model meta-llama/Llama-2-7b-hf runs/llama2-7b-gqa8/gqa \\
        --prompt 1024 --continuation 128 --device cuda --dtype bfloat16

Each text is a prompt and its continuation. After the prompt a share lambda of the channels of its keys goes (the last --recent keys stay
whole), chosen from its last --observed queries by think, align, greedy or greedy+swap (channels.py). Then, for every lambda and way:
the objective on what is pruned, relative to the scores' own squares, per layer, key head and text; the error of the attention output on the
continuation's queries, each layer given the unpruned model's; and with the pruned cache at work in all layers (cache.py) the
perplexity of the continuation, the bytes that the cache holds after the prompt, and the time of prefill and of decoding against a
plain cache, one sequence at a time, measured in turns. Last, that with lambda = 0 the logits are the plain cache's, bit for bit.
"""

import math
import os
import statistics
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.artifacts import record, refuse_overwrite, write_json, write_text
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.data.demo import resolve_model
from common.data.text import load_tokens
from common.models import DEMO, describe, load_model, load_tokenizer, pick_device
from common.reporting.plots import drawing
from related.keychannels.cache import (
    KeyChannelCache,
    KeyChannelLayer,
    by_key_head,
    held_bytes,
    pruned_attention,
)
from related.keychannels.channels import SELECTORS, exact, interactions, objective, removed_count

CONVERTED = os.path.join("runs", "demo")  # the run whose checkpoints are measured when none is named
EXACT_SIZE = 16  # the largest head whose channel sets are all tried
EQUAL = 1e-9  # relative difference below which two objectives are one


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/keychannels")
    parser.add_argument("--model", nargs="+", default=None, metavar="DIR", help="checkpoints, directories or hub names (default: the embedded model's, see above)")
    parser.add_argument("--ratios", type=float, nargs="+", default=(0.3, 0.4, 0.5, 0.6, 0.7), metavar="X", help="lambda: shares of the channels that go")
    parser.add_argument("--recent", type=int, default=32, help="last keys of the prompt that stay whole")
    parser.add_argument("--observed", type=positive, default=32, help="last queries of the prompt that channels are chosen by")
    parser.section("text")
    parser.add_argument("--text", default=None, help="c4, demo (its held-out part), a .txt, .jsonl or .json.gz file (default: c4; demo where no --model is given)")
    parser.add_argument("--sequences", type=positive, default=32, help="texts")
    parser.add_argument("--prompt", type=positive, default=192, help="tokens of each text that are the prompt")
    parser.add_argument("--continuation", type=positive, default=64, help="tokens after it")
    parser.section("how it runs")
    parser.add_argument("--batch", type=positive, default=16, help="texts at a time")
    parser.add_argument("--repeats", type=positive, default=10, help="turns of timing")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the forward passes")
    args = parser.parse_args()
    for ratio in args.ratios:
        if not 0 < ratio < 1:
            raise UserError(f"--ratios: expected numbers between 0 and 1, found {ratio}")
    if not 0 <= args.recent < args.prompt:
        raise UserError(f"--recent: expected less than --prompt, {args.prompt}, found {args.recent}")
    return args


def chosen(args) -> list[str]:
    """Directories of the checkpoints to measure."""
    if args.model:
        return [resolve_model(name) for name in args.model]
    teacher, gqa, merged = (os.path.join(CONVERTED, name) for name in ("teacher", "gqa", "merged"))
    found = [teacher if os.path.isdir(teacher) else resolve_model(DEMO)] + [path for path in (gqa, merged) if os.path.isdir(path)][:1]
    if len(found) == 1:
        print(f"skipped converted GQA: {CONVERTED} holds none until the stages have made it")
    return found


def on_heads(args, queries, keys, values, output, scaling: float) -> dict[tuple[float, str], dict[str, torch.Tensor]]:
    """(lambda, way) -> objective [n, G], over the squares of the scores; squared error and square of the attention output, [].

    Of one layer on whole texts: queries [n, H, T, d], keys and values [n, G, T, d], output [n, T, H, d].
    """
    prompt, size = args.prompt, keys.shape[-1]
    old = keys[:, :, : prompt - args.recent]
    weights = interactions(by_key_head(queries[:, :, prompt - args.observed : prompt], keys), old)
    whole = weights.sum((-1, -2))
    causal = torch.ones(args.continuation, keys.shape[2], dtype=torch.bool, device=keys.device).tril(prompt)
    found = {}
    for ratio in args.ratios:
        for select in SELECTORS:
            cached = KeyChannelLayer(ratio, select, args.recent, args.observed)
            cached.update(keys[:, :, :prompt], values[:, :, :prompt])
            cached.prune(queries[:, :, :prompt], None)
            cached.update(keys[:, :, prompt:], values[:, :, prompt:])
            removed = torch.ones_like(weights[..., 0], dtype=torch.bool).scatter_(-1, cached.channels.long(), False)
            after = pruned_attention(queries[:, :, prompt:], cached, values, causal, scaling)
            before = output[:, prompt:].double()
            found[ratio, select] = {"objective": objective(weights, removed) / whole,
                                    "error": (after - before).square().sum(), "output": before.square().sum()}
        if size <= EXACT_SIZE:
            found[ratio, "exact"] = {"objective": objective(weights, exact(weights, removed_count(ratio, size))) / whole}
    return found


@torch.no_grad()
def on_layers(args, model, tokens: torch.Tensor) -> list[dict]:
    """on_heads of each layer without a sliding window, while the unpruned model reads tokens [n, T]."""
    sliding, found = DynamicCache(config=model.config).is_sliding, []

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        if not sliding[module.layer_idx]:
            found.append(on_heads(args, query, key, value, output, scaling))
        return output, None

    AttentionInterface.register("measured", attention)
    AttentionMaskInterface.register("measured", sdpa_mask)
    model.set_attn_implementation("measured")
    model(tokens, use_cache=False, logits_to_keep=1)
    return found


def compared(args, found: list[dict]) -> dict[tuple[float, str], dict]:
    """(lambda, way) -> figures over all layers, texts and heads, of on_heads' results."""
    joined = {key: {name: torch.cat([layer[key][name].flatten().cpu() for layer in found]) for name in found[0][key]} for key in found[0]}
    figures = {}
    for ratio in args.ratios:
        costs = {select: joined[ratio, select]["objective"] for select in (*SELECTORS, "exact") if (ratio, select) in joined}
        lowest, think = torch.stack([costs[select] for select in SELECTORS]).amin(0), costs["think"]
        for select in SELECTORS:
            of, cost = joined[ratio, select], costs[select]
            lower, higher = cost < think * (1 - EQUAL), cost > think * (1 + EQUAL)
            figures[ratio, select] = {
                "heads": len(cost), "objective": float(cost.mean()), "output_error": float((of["error"].sum() / of["output"].sum()).sqrt()),
                "lower_than_think": int(lower.sum()), "same_as_think": int((~lower & ~higher).sum()), "higher_than_think": int(higher.sum()),
                "change_to_think": float(cost.mean() / think.mean() - 1), "above_another": int((cost > lowest * (1 + EQUAL)).sum()),
            }
            if "exact" in costs:
                figures[ratio, select]["best_of_all_sets"] = int((cost <= costs["exact"] * (1 + EQUAL)).sum())
    return figures


def new_cache(args, model, ratio: float | None, select: str = "greedy+swap"):
    """An empty cache that prunes, or a plain one without a ratio; both are read by the same attention."""
    pruning = KeyChannelCache(model, ratio or 0, select, args.recent, args.observed)
    return pruning if ratio is not None else DynamicCache(config=model.config)


@torch.no_grad()
def continued(args, model, tokens: torch.Tensor, *how) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Prompt, then continuation on its cache: logits [n, continuation, vocab], loss of each text [n] in nats, bytes held after the prompt."""
    cache = new_cache(args, model, *how)
    model(tokens[:, : args.prompt], past_key_values=cache, logits_to_keep=1)
    held, rest = held_bytes(cache), tokens[:, args.prompt :]
    logits = model(rest, past_key_values=cache).logits
    losses = F.cross_entropy(logits[:, :-1].double().transpose(1, 2), rest[:, 1:], reduction="none").mean(1)
    return logits, losses.cpu(), held


@torch.no_grad()
def seconds(args, model, row: torch.Tensor, *how) -> tuple[float, float]:
    """Of the prompt of one text [T], and the median of its continuation's tokens, one at a time."""
    synchronize = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    cache, times = new_cache(args, model, *how), []
    for tokens in row[None].split([args.prompt] + [1] * args.continuation, 1):
        synchronize()
        start = time.perf_counter()
        model(tokens, past_key_values=cache, logits_to_keep=1)
        synchronize()
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def measure(args, path: str, text: str, device: str) -> dict:
    """All figures of one checkpoint."""
    model, described = load_model(path, getattr(torch, args.dtype), device), describe(path)
    length, longest = args.prompt + args.continuation, model.config.max_position_embeddings
    if length > longest:
        raise UserError(f"--prompt and --continuation: expected at most the {longest} positions of {path}, found {length}")
    tokens, said = load_tokens(text, load_tokenizer(path), args.sequences, length, split="heldout")
    print(f"reads   {path}\nreads   {said}")
    tokens, plain = tokens.to(device), (None,)
    ways = [(ratio, select) for ratio in args.ratios for select in SELECTORS]
    new_cache(args, model, *plain)  # a model without a layer to prune is refused before any work

    found, losses, held, identical = [], {}, {}, True
    for batch in tqdm(tokens.split(args.batch), desc=os.path.basename(path), unit="batch", leave=False):
        found += on_layers(args, model, batch)
        for how in (plain, *ways):
            logits, loss, bytes_held = continued(args, model, batch, *how)
            losses.setdefault(how, []).append(loss)
            held[how] = held.get(how, 0) + bytes_held
            if how == plain:
                identical &= torch.equal(logits, continued(args, model, batch, 0.0)[0])
    losses = {how: torch.cat(parts) for how, parts in losses.items()}
    turns = {how: [] for how in (plain, *ways)}
    for _ in tqdm(range(args.repeats), desc="timing", unit="turn", leave=False):
        for how, times in turns.items():
            times.append(seconds(args, model, tokens[0], *how))
    figures = compared(args, found)
    size = described["head_dim"]
    rows = [{"ratio": ratio, "select": select, "channels": size - removed_count(ratio, size)} | figures[ratio, select] for ratio, select in ways]
    fastest = {how: [min(part) for part in zip(*times, strict=True)] for how, times in turns.items()}
    for row in rows:
        how = row["ratio"], row["select"]
        over = losses[how] - losses[plain]
        row["loss_over_plain"], row["loss_over_plain_stderr"] = float(over.mean()), float(over.std() / len(over) ** 0.5)
        row["perplexity"] = math.exp(losses[how].mean())
        row["texts_lower_than_think"] = int((losses[how] < losses[row["ratio"], "think"]).sum())
        row["cache_bytes"] = held[how] // len(tokens)
        for part, name in enumerate(("prefill_over_plain", "decode_over_plain")):
            row[name] = fastest[how][part] / fastest[plain][part]
    return {"model": described, "text": said, "texts": len(tokens), "rows": rows, "same_bits_at_0": identical,
            "perplexity": math.exp(losses[plain].mean()), "cache_bytes": held[plain] // len(tokens), "decode_ms_per_token": 1000 * fastest[plain][1]}


def markdown(rows: list[tuple]) -> str:
    """The first row is the heading."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def tables(found: dict) -> str:
    """Of one checkpoint: what was chosen, and what that does."""
    rows, model, heads = found["rows"], found["model"], found["rows"][0]["heads"]
    choice = [("lambda", "channels kept", "chosen by", "objective", "to think", "lower / same / higher than think", "above another",
               "the best set there is", "output error")]
    use = [("lambda", "chosen by", "perplexity", "loss over plain, nats", "texts lower than think", "cache", "of plain", "prefill time", "decode time"),
           (0, "plain cache", f"{found['perplexity']:.3f}", "", "", f"{found['cache_bytes'] / 1024:.1f} KiB", 1, 1, 1)]
    for row in rows:
        against = [f"{row['change_to_think']:+.1%}", f"{row['lower_than_think']} / {row['same_as_think']} / {row['higher_than_think']}",
                   f"{row['texts_lower_than_think']} of {found['texts']}"] if row["select"] != "think" else [""] * 3
        choice.append((row["ratio"], f"{row['channels']} of {model['head_dim']}", row["select"], f"{row['objective']:.5f}", *against[:2],
                       row["above_another"], row.get("best_of_all_sets", ""), f"{row['output_error']:.4f}"))
        use.append((row["ratio"], row["select"], f"{row['perplexity']:.3f}",
                    f"{row['loss_over_plain']:+.4f} ± {row['loss_over_plain_stderr']:.4f}", against[2],
                    f"{row['cache_bytes'] / 1024:.1f} KiB", f"{row['cache_bytes'] / found['cache_bytes']:.3f}",
                    f"{row['prefill_over_plain']:.2f}", f"{row['decode_over_plain']:.2f}"))
    return (f"### {model['path']}: {model['heads']} heads, {model['kv_heads']} key heads of {model['head_dim']} channels\n\n"
            f"{heads} choices (layers x key heads x texts); objective and output error are relative.\n\n{markdown(choice)}\n\n"
            f"Logits at lambda = 0 {'are' if found['same_bits_at_0'] else 'ARE NOT'} the plain cache's, bit for bit. "
            f"The plain cache decodes a token in {found['decode_ms_per_token']:.2f} ms.\n\n{markdown(use)}")


@drawing
def picture(plt, results: dict[str, dict], title: str):
    """A row per checkpoint: objective over think's, attention-output error, perplexity against lambda."""
    figure, axes = plt.subplots(len(results), 3, squeeze=False, figsize=(11, 2.9 * len(results) + 0.4), layout="constrained")
    for line, (path, found) in zip(axes, results.items(), strict=True):
        for number, select in enumerate(SELECTORS):
            rows = [row for row in found["rows"] if row["select"] == select]
            for axis, values in zip(line, ([1 + row["change_to_think"] for row in rows], [row["output_error"] for row in rows],
                                           [row["perplexity"] for row in rows]), strict=True):
                axis.plot([row["ratio"] for row in rows], values, color=f"C{number}", marker="o", markersize=3, label=select)
        line[2].axhline(found["perplexity"], color="black", linewidth=0.8, label="plain cache")
        names = "objective, think's being 1", "relative error of the attention output", "perplexity of the continuation"
        for axis, name in zip(line, names, strict=True):
            axis.set(title=f"{path}\n{name}" if axis is line[0] else name, xlabel="lambda, share of key channels removed")
        line[2].legend(fontsize=8)
    figure.suptitle(title)
    return figure


def main():
    args, clock = parse(), Clock()
    output = os.path.join(args.run, "keychannels.json")
    refuse_overwrite(output, args.force)
    paths, device = chosen(args), pick_device(args.device)
    text = args.text or (DEMO if args.model is None else "c4")
    results = {path: measure(args, path, text, device) for path in paths}

    shown = "\n\n".join(tables(found) for found in results.values())
    write_text(output.replace(".json", ".md"), shown + "\n")
    picture(output.replace(".json", ".png"), results, f"key channels removed from a prompt of {args.prompt} tokens, the last {args.recent} whole")
    written = record("related/keychannels/measure.py", args, results[paths[0]]["model"], [], {}, clock())
    write_json(output, written | {"device": device, "results": results})
    print(f"\n{shown}\n\nwrote   {output}, keychannels.md")
    rows = [row for found in results.values() for row in found["rows"] if row["select"] == "greedy+swap"]
    lower, higher, above, heads = (sum(row[name] for row in rows) for name in ("lower_than_think", "higher_than_think", "above_another", "heads"))
    print(f"keychannels: greedy+swap below think on {lower} of {heads} choices, above on {higher}, above any other on {above}; "
          f"lambda = 0 is the plain cache bit for bit: {all(found['same_bits_at_0'] for found in results.values())}; in {clock()} s")


if __name__ == "__main__":
    run_stage(main)

"""Two premises of pruning key channels, measured: few are large, and the window stands for later queries.

Reads   checkpoints, a text
Writes  RUN/premises.json, RUN/premises.md

    python -m related.keychannels.premises --model runs/smollm2/source --text FILE.txt --prompt 2048

Each text is a prompt and its continuation; the model reads both at once. By key head, over layers and texts:

- Few large channels: the share of the keys' energy |k_i|^2, and of the scores' |q_i|^2 |k_i|^2 with the
  window's queries, in the largest tenth, quarter and half of the channels. If all were alike, these would be
  0.1, 0.25 and 0.5.
- The window (SnapKV): a tenth of the prompt's positions is chosen by the attention of the window, the last
  --observed queries of the prompt. Shown is what later queries attend to in it, as a share of their attention
  to the prompt before the window; likewise for the best tenth, which later queries choose themselves, and for
  as many of the last positions.
- The same for channels: half of them is chosen by the window (greedy+swap). Shown is the error of later
  queries' scores, relative to these scores; likewise with channels that later queries choose themselves.
"""

import os
import statistics

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.artifacts import claim, make_record
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.data.demo import DEMO, resolve_model
from common.data.text import load_tokens
from common.files import write_json, write_text
from common.models import describe, load_config, load_model, load_tokenizer
from common.progress import Progress
from common.reporting.tables import markdown_table
from related.keychannels.cache import by_key_head
from related.keychannels.channels import SELECTORS, interactions, objective, removed_count

STAGE = "related/keychannels/premises.py"
SHARES = (0.1, 0.25, 0.5)  # of the channels
POSITIONS, REMOVED = 0.1, 0.5  # share of the prompt that is chosen, and of the channels that are removed
ROWS = {
    "keys": "energy of keys in the largest {} of channels",
    "scores": "energy of scores in the largest {} of channels",
    "positions": "later attention to a tenth of the prompt, chosen by {}",
    "channels": "error of later scores, half of the channels removed, chosen by {}",
}


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/keychannels")
    parser.add_argument("--model", nargs="+", default=[DEMO], metavar="DIR", help="checkpoints")
    parser.add_argument("--text", default=DEMO, help="as --text of related.keychannels.measure")
    parser.add_argument("--sequences", type=positive, default=4, help="number of texts")
    parser.add_argument("--prompt", type=positive, default=192, help="tokens of each text in the prompt")
    parser.add_argument("--continuation", type=positive, default=64, help="tokens after the prompt")
    parser.add_argument("--observed", type=positive, default=32,
                        help="last queries of the prompt, the window")
    args = parser.parse_args()
    if args.observed >= args.prompt:
        raise UserError(f"--observed: expected less than --prompt {args.prompt}, found {args.observed}")
    return args


def largest_shares(energy: torch.Tensor) -> list[torch.Tensor]:
    """The share of energy [..., d] in the largest SHARES of the channels, each [...]."""
    ordered = energy.sort(-1, descending=True).values
    counts = [max(1, round(share * energy.shape[-1])) for share in SHARES]
    return [ordered[..., :count].sum(-1) / energy.sum(-1) for count in counts]


def attention_to(queries: torch.Tensor, keys: torch.Tensor, first: int, scaling: float) -> torch.Tensor:
    """Mean attention [G, T] to every key, over queries and the query heads of each key head.

    queries: [H, n, d] at positions first, first + 1, ...; keys: [G, T, d].
    """
    groups = len(keys)
    scores = scaling * queries.unflatten(0, (groups, -1)) @ keys[:, None].mT  # [G, H / G, n, T]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(first)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).mean((1, 2))


def chosen_share(attention: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The share of attention [G, T] in the POSITIONS that `by` [G, T] is largest at: [G]."""
    count = max(1, round(POSITIONS * attention.shape[-1]))
    return attention.take_along_dim(by.topk(count).indices, -1).sum(-1) / attention.sum(-1)


@torch.no_grad()
def head_premises(args, queries, keys, scaling: float) -> dict[str, dict[str, torch.Tensor]]:
    """Figures of one layer and text, each [G]. queries: [H, T, d]; keys: [G, T, d]; after RoPE."""
    prompt, window = args.prompt, args.prompt - args.observed
    before, queries, keys = keys[:, :window].double(), queries.double(), keys.double()
    observed, later = queries[:, window:prompt], queries[:, prompt:]
    by_window, by_later = (interactions(by_key_head(part[None], keys[None])[0], before)
                           for part in (observed, later))
    shares = [f"{share:.0%}" for share in SHARES]
    figures = {"keys": dict(zip(shares, largest_shares(before.square().sum(1)), strict=True)),
               "scores": dict(zip(shares, largest_shares(by_window.diagonal(dim1=-2, dim2=-1)), strict=True))}

    attention = {"the window": attention_to(observed, keys[:, :prompt], window, scaling)[:, :window],
                 "later queries": attention_to(later, keys, prompt, scaling)[:, :window]}
    attention["recency"] = torch.arange(window, dtype=torch.float64).expand(len(keys), -1)
    figures["positions"] = {name: chosen_share(attention["later queries"], by)
                            for name, by in attention.items()}

    count = removed_count(REMOVED, keys.shape[-1])
    figures["channels"] = {
        name: objective(by_later, SELECTORS["greedy+swap"](by, by, count)) / by_later.sum((-1, -2))
        for name, by in (("the window", by_window), ("later queries", by_later))}
    return figures


@torch.no_grad()
def measure(args, path: str) -> dict[str, dict[str, list[float]]]:
    """What is shown by row and column, over all layers without a sliding window, key heads and texts."""
    model, everything = load_model(path), {name: {} for name in ROWS}
    tokens, text = load_tokens(args.text, load_tokenizer(path), args.sequences,
                               args.prompt + args.continuation, split="heldout")
    print(f"reads   {path}\nreads   {text}")
    sliding = DynamicCache(config=model.config).is_sliding

    def attention(module, query, key, value, mask, scaling, **kwargs):
        if not sliding[module.layer_idx]:
            for name, figures in head_premises(args, query[0], key[0], scaling).items():
                for column, numbers in figures.items():
                    everything[name].setdefault(column, []).extend(numbers.tolist())
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)

    AttentionInterface.register("premises", attention)
    AttentionMaskInterface.register("premises", sdpa_mask)
    model.set_attn_implementation("premises")
    for row in Progress(tokens, desc=os.path.basename(path), unit="text"):
        model(row[None], use_cache=False, logits_to_keep=1)
    return everything


def table(results: dict[str, dict]) -> str:
    """Markdown: mean and tenth to ninetieth percentile over layers, key heads and texts."""
    first, lines = next(iter(results.values())), []
    for name, title in ROWS.items():
        for column in first[name]:
            shown = []
            for figures in results.values():
                tenths = statistics.quantiles(figures[name][column], n=10)
                mean = statistics.mean(figures[name][column])
                shown.append(f"{mean:.3f} ({tenths[0]:.3f} to {tenths[-1]:.3f})")
            lines.append((title.format(column), *shown))
    return markdown_table(("mean (tenth to ninetieth percentile)", *results), lines, "<" + ">" * len(results))


def main():
    args, clock = parse(), Clock()
    output, paths = os.path.join(args.run, "premises"), [resolve_model(name) for name in args.model]
    for path in paths:
        length, longest = args.prompt + args.continuation, load_config(path).max_position_embeddings
        if length > longest:
            raise UserError(f"--prompt and --continuation: expected at most the {longest} positions of "
                            f"{path}, found {length}")
    claim(STAGE, args, output + ".json")
    results = {path: measure(args, path) for path in paths}
    write_text(output + ".md", table(results) + "\n")
    write_json(output + ".json", make_record(STAGE, args, describe(paths[0]), {}, {}, clock())
               | {"results": results})
    print(f"\n{table(results)}\n\nwrote   {output}.json, {output}.md")
    positions = results[paths[0]]["positions"]
    share, best = (statistics.mean(positions[by]) for by in ("the window", "later queries"))
    print(f"premises: the window finds {share / best:.0%} of the attention that a tenth of the prompt "
          f"can get, in {clock()} s")


if __name__ == "__main__":
    run_stage(main)

"""How many kv heads? What each number costs before anyone trains: a table and a picture.

    python -m common.reporting.choose --run RUN     # writes RUN/choose.md and RUN/choose.png

Reads RUN/calibration and the records of RUN/kvN/merged, which make convert PLAN=choose makes.
"""

import argparse
import common.waiting  # noqa: F401 - before torch
import glob
import os
from statistics import mean

from common.artifacts import check_input, read_record
from common.cli import UserError, run_stage
from common.files import write_text
from common.models import load_config, weight_dtype
from common.reporting.plots import drawing
from common.reporting.tables import markdown_table

CAPTION = """\
Untrained, W_O refitted. Lost: share of the energy of keys (of attention scores) and of values (as W_O reads
them) before the refit, mean over layers. Perplexity, and KL from the source: on text that the calibration
has not read."""


def read_choices(run: str) -> list[dict]:
    """Figures of the source and of each RUN/kvN/merged, by falling number of kv heads.

    Raises UserError if there is none, if one is of another calibration, or if a figure was not recorded.
    """
    choices = []
    for path in glob.glob(os.path.join(glob.escape(run), "kv*", "merged")):
        record = read_record(path, "04_align.py")
        check_input(record, os.path.join(run, "calibration"))
        summary, model = record["summary"], record["model"]
        if not summary.get("energy_lost"):
            raise UserError(f"{path}: expected energy_lost in its record, found none; run 04_align.py "
                            "--merge closed-form again with --force")
        size = 2 * model["layers"] * model["head_dim"] * weight_dtype("source", load_config(path)).itemsize
        lost = {name: mean(layer[name] for layer in summary["energy_lost"]) for name in ("keys", "values")}
        choices.append({"kv_heads": summary["kv_heads"], "bytes": size * summary["kv_heads"],
                        "perplexity": summary["perplexity_merged"], "kl": summary["kl_merged"], **lost})
    if not choices:
        raise UserError(f"{run}: expected kvN/merged, found none; run make convert PLAN=choose")
    source = {"kv_heads": model["kv_heads"], "bytes": size * model["kv_heads"],
              "perplexity": summary["perplexity_source"], "kl": 0.0, "keys": 0.0, "values": 0.0}
    return [source, *sorted(choices, key=lambda choice: -choice["kv_heads"])]


def table(choices: list[dict]) -> str:
    """A Markdown table, a row per number of kv heads, the source's first."""
    rows = [(f"{choice['kv_heads']}{'' if row else ' (source)'}", choice["bytes"], f"{choice['keys']:.1%}",
             f"{choice['values']:.1%}", f"{choice['perplexity']:.3f}", f"{choice['kl']:.4f}")
            for row, choice in enumerate(choices)]
    header = "kv heads", "KV bytes per token", "keys lost", "values lost", "perplexity", "KL, nats"
    return markdown_table(header, rows, "<>>>>>")


@drawing
def curves(plt, choices: list[dict]):
    """KL from the source with perplexities, and energy lost, by the size of the cache."""
    figure, (divergence, lost) = plt.subplots(1, 2, figsize=(10.4, 3.8), layout="constrained")
    sizes = [choice["bytes"] for choice in choices]
    divergence.plot(sizes, [choice["kl"] for choice in choices], "o-")
    for choice in choices:
        divergence.annotate(f"{choice['perplexity']:.4g}", (choice["bytes"], choice["kl"]), (4, 5),
                            textcoords="offset points", fontsize=9)
    for name in ("keys", "values"):
        lost.plot(sizes, [100 * choice[name] for choice in choices], "o-", label=name)
    divergence.set(title="untrained (numbers: perplexity)", ylabel="KL from the source, nats")
    lost.set(title="energy lost before the refit", ylabel="%, mean over layers")
    lost.legend()
    for axis in (divergence, lost):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{choice['kv_heads']}\n{choice['bytes']:,}" for choice in choices])
        axis.minorticks_off()
        axis.margins(0.12)
        axis.set(xlabel="kv heads, KV bytes per token")
    return figure


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--run", required=True, help="run directory")
    args = parser.parse_args()
    choices = read_choices(args.run)
    text = f"{table(choices)}\n\n{CAPTION}\n"
    curves(os.path.join(args.run, "choose.png"), choices)
    write_text(os.path.join(args.run, "choose.md"), text)
    print(f"wrote   {os.path.join(args.run, 'choose.md')}\n\n{text}", end="")


if __name__ == "__main__":
    run_stage(main)

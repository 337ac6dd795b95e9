"""How many kv heads? What each number keeps before anyone trains, of the RUN of make convert PLAN=choose.

    python pipelines/choose.py --run RUN     # writes RUN/choose.md and RUN/choose.png
"""

import glob
import os
from statistics import mean

from common.artifacts import check_input, read_record, verify_files
from common.cli import Parser
from common.errors import UserError
from common.files import refuse_overwrite, write_text
from common.models import load_config, weight_dtype
from common.reporting.plots import drawing
from common.reporting.report import carries
from common.reporting.tables import markdown_table

CAPTION = """\
The source, and what is merged to fewer heads, W_O refitted, untrained. Lost before the refit: share of the
energy of keys (in attention scores) and of values (as W_O reads them), mean over layers. Perplexity, and KL
from the source: on text that the calibration has not read."""


def read_choices(run: str) -> list[dict]:
    """Figures of the source and of each RUN/kvN/merged, by falling number of kv heads.

    Raises UserError if there is none, one of another calibration, without these metrics or changed since, or
    two of one number.
    """
    choices, paths = [], {}
    for path in sorted(glob.glob(os.path.join(glob.escape(run), "kv*", "merged"))):
        record = read_record(path, "04_align.py")
        verify_files(path, record)
        check_input(record, os.path.join(run, "calibration"))
        summary, model = record["summary"], record["model"]
        if not summary.get("energy_lost"):
            raise UserError(f"{path}: expected energy_lost in its record, found none; run 04_align.py "
                            "--merge closed-form again with --force")
        if paths.setdefault(summary["kv_heads"], path) != path:
            raise UserError(f"{path}: expected one directory of each number of kv heads, found "
                            f"{paths[summary['kv_heads']]} of {summary['kv_heads']}, too")
        size = 2 * model["layers"] * model["head_dim"] * weight_dtype("source", load_config(path)).itemsize
        lost = {name: mean(layer[name] for layer in summary["energy_lost"]) for name in ("keys", "values")}
        choices.append({"kv_heads": summary["kv_heads"], "bytes": size * summary["kv_heads"], **lost,
                        "perplexity": summary["perplexity_merged"], "kl": summary["kl_merged"]})
    if not choices:
        raise UserError(f"{run}: expected kvN/merged, found none; run make convert PLAN=choose")
    choices.append({"kv_heads": model["kv_heads"], "bytes": size * model["kv_heads"], "keys": 0, "values": 0,
                    "perplexity": summary["perplexity_source"], "kl": 0})
    return sorted(choices, key=lambda choice: -choice["kv_heads"])


@drawing
def curves(plt, choices: list[dict]):
    """KL from the source, with perplexities, and energy lost, by the size of the cache."""
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.6), layout="constrained")
    panels = {"KL from the source, nats (perplexity)": ("kl",), "share of energy lost": ("keys", "values")}
    sizes = [choice["bytes"] for choice in choices]
    for axis, (label, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            axis.plot(sizes, [choice[name] for choice in choices], "o-", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{choice['kv_heads']}\n{choice['bytes']:,}" for choice in choices])
        axis.set(xlabel="kv heads, KV bytes per token", ylabel=label, xmargin=0.18, ymargin=0.12)
    for choice in choices:
        axes[0].annotate(f"({choice['perplexity']:.4g})", (choice["bytes"], choice["kl"]), (4, 5),
                         textcoords="offset points")
    axes[1].legend()
    return figure


def main():
    parser = Parser(__doc__)
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--force", action="store_true", help="replace a choose.md or choose.png of others")
    args = parser.parse_args()
    path = os.path.join(args.run, "choose")
    for output, mark in ((f"{path}.md", CAPTION), (f"{path}.png", curves.__doc__)):
        refuse_overwrite(output, args.force or carries(output, mark.encode()))
    choices = read_choices(args.run)
    header = "kv heads", "KV bytes per token", "keys lost", "values lost", "perplexity", "KL, nats"
    rows = [(choice["kv_heads"], choice["bytes"], f"{choice['keys']:.1%}", f"{choice['values']:.1%}",
             f"{choice['perplexity']:.3f}", f"{choice['kl']:.4f}") for choice in choices]
    text = f"{markdown_table(header, rows, '>>>>>>')}\n\n{CAPTION}\n"
    curves(f"{path}.png", choices)
    write_text(f"{path}.md", text)
    print(f"wrote   {path}.md\n\n{text}", end="")

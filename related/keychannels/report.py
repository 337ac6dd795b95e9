"""Tables and the picture of what measure.py measures."""

from common.reporting.plots import drawing
from common.reporting.tables import markdown_table

CHOICE_COLUMNS = (
    "lambda", "channels kept", "selector", "objective", "vs think", "lower / same / higher than think",
    "another is lower", "optimal", "output error",
)
USE_COLUMNS = (
    "lambda", "selector", "perplexity", "loss over plain, nats", "texts lower than think", "cache",
    "vs plain", "prefill time", "decode time",
)


def tables(figures: dict) -> str:
    """Markdown for one checkpoint: what the selectors chose, and what using the pruned cache does."""
    model, rows = figures["model"], figures["rows"]
    choice_table = markdown_table(CHOICE_COLUMNS, [choice_cells(row, model) for row in rows])
    plain = (0, "plain cache", f"{figures['perplexity']:.3f}", "", "", kib(figures["cache_bytes"]), 1, 1, 1)
    use_table = markdown_table(USE_COLUMNS, [plain, *(use_cells(row, figures) for row in rows)])
    equal = "equal" if figures["same_bits_at_0"] else "DO NOT EQUAL"
    shape = f"{model['heads']} heads, {model['kv_heads']} key heads of {model['head_dim']} channels"
    return "\n\n".join((
        f"### {model['path']}: {shape}",
        f"{rows[0]['heads']} choices (layers x key heads x texts); objective and output error are relative.",
        choice_table,
        f"At lambda = 0 the logits {equal} the plain cache's, bit for bit. "
        f"The plain cache decodes a token in {figures['decode_ms_per_token']:.2f} ms.",
        use_table,
    ))


def choice_cells(row: dict, model: dict) -> tuple:
    change = counts = ""
    if row["select"] != "think":
        change = f"{row['change_to_think']:+.1%}"
        counts = f"{row['lower_than_think']} / {row['same_as_think']} / {row['higher_than_think']}"
    kept = f"{row['channels']} of {model['head_dim']}"
    optimal = row.get("best_of_all_sets", "")
    objective = f"{row['objective']:.5f}"
    return (row["ratio"], kept, row["select"], objective, change, counts, row["above_another"], optimal,
            f"{row['output_error']:.4f}")


def use_cells(row: dict, figures: dict) -> tuple:
    lower = ""
    if row["select"] != "think":
        lower = f"{row['texts_lower_than_think']} of {figures['texts']}"
    loss = f"{row['loss_over_plain']:+.4f} ± {row['loss_over_plain_stderr']:.4f}"
    share = f"{row['cache_bytes'] / figures['cache_bytes']:.3f}"
    perplexity = f"{row['perplexity']:.3f}"
    return (row["ratio"], row["select"], perplexity, loss, lower, kib(row["cache_bytes"]), share,
            f"{row['prefill_over_plain']:.2f}", f"{row['decode_over_plain']:.2f}")


def kib(size: int) -> str:
    return f"{size / 1024:.1f} KiB"


@drawing
def picture(plt, results: dict[str, dict], title: str):
    """A row per checkpoint: objective over think's, attention-output error and perplexity against lambda."""
    size = (11, 2.9 * len(results) + 0.4)
    figure, axes = plt.subplots(len(results), 3, squeeze=False, figsize=size, layout="constrained")
    names = ("objective relative to think", "relative error of the attention output",
             "perplexity of the continuation")
    for line, (path, figures) in zip(axes, results.items(), strict=True):
        selects = dict.fromkeys(row["select"] for row in figures["rows"])
        for number, select in enumerate(selects):
            rows = [row for row in figures["rows"] if row["select"] == select]
            objectives = [1 + row["change_to_think"] for row in rows]
            errors = [row["output_error"] for row in rows]
            perplexities = [row["perplexity"] for row in rows]
            for axis, values in zip(line, (objectives, errors, perplexities), strict=True):
                ratios = [row["ratio"] for row in rows]
                axis.plot(ratios, values, color=f"C{number}", marker="o", markersize=3, label=select)
        line[2].axhline(figures["perplexity"], color="black", linewidth=0.8, label="plain cache")
        for axis, name in zip(line, names, strict=True):
            axis.set(title=name, xlabel="lambda, share of key channels removed")
        line[0].set_title(f"{path}\n{names[0]}")
        line[2].legend(fontsize=8)
    figure.suptitle(title)
    return figure

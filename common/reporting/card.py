"""The model card (README.md) of an exported checkpoint: usage, scores, and how it was made."""

import os

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import yaml_dump

from common.data.documents import GENERATED, NONE, DataSet, is_generated, parse_source
from common.data.tasks import HUB
from common.models.load import is_hub_name
from common.models.quantized_cache import LAYOUTS
from common.reporting.tables import markdown_text
from common.run.files import read_text, write_text
from common.run.kinds import BY, MERGES, REFITS, SOURCE
from common.training.lines import OPEN_MASKS, START, heldout_kls
from common.training.mask_state import MASKS

TEMPLATE = os.path.join(os.path.dirname(__file__), "templates", "model_card.md")
ARXIV = "2412.20677"
CARD = "README.md"
MASKLESS = "the merged model was trained directly, without masks"
SCORES, END_OF_SCORES = "<!-- scores -->", "<!-- /scores -->"  # stage 7 writes between them
PAPER = f"[Align Attention Heads Before Merging Them](https://arxiv.org/abs/{ARXIV}) (Jin et al., EMNLP 2025)"


def write(directory: str, alignment: dict, training: dict | None, export: dict, chat: bool) -> None:
    """Write README.md to `directory`, a checkpoint.

    alignment, training, export: the records of stages 4, 5 and 6; training is None for merged/ as it is.
    chat: whether its tokenizer has a chat template. License, language, and a base model where the source is
    no hub repository, come from the source's own card, if it has one. 07_eval.py fills in the scores.
    """
    model, aligned = alignment["model"], alignment["summary"]
    source, name = model["name"], os.path.basename(model["name"].rstrip("/"))
    on_hub, metadata = is_hub_name(source), _source_card(model["path"])
    base = source if on_hub else metadata.get("base_model")
    trained = training and _training(training, export["summary"])
    steps = _steps(aligned, trained)
    borrowed = [part for part in steps.values() if part]
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,  # the hub's word for other weights, no fewer bits
        **{name: metadata.get(name) for name in ("language", "license", "license_name", "license_link")},
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gqa", "kv-cache"] + [f"arxiv:{ARXIV}"] * bool(borrowed),
    )
    card = ModelCard.from_template(
        data, template_path=TEMPLATE,
        title=markdown_text(name.removesuffix(".gguf")),
        source=f"[{source}](https://huggingface.co/{source})" if on_hub else _code(name),
        license=markdown_text(data.get("license_name") or data.license or ""),
        done=", ".join(steps), borrowed=borrowed, paper=PAPER, chat=chat,
        # whether prompts are tokenized as they are, or with what the tokenizer adds to a text
        bare=not training["arguments"].get("bos") if trained and trained["tasks"] else chat,
        model=model, aligned=aligned, groups=alignment["groups"], export=export, exported=export["summary"],
        group=BY[aligned["by"]], merge=MERGES[aligned["merge"]], layouts=LAYOUTS, trained=trained)
    card.save(os.path.join(directory, CARD))


def write_scores(directory: str, scores: str) -> bool:
    """Put scores (Markdown) between <!-- scores --> and <!-- /scores --> in a checkpoint's README.md.

    Returns False, without a change, if it has no such markers. Raises UserError if the card is not UTF-8.
    """
    path = os.path.join(directory, CARD)
    if not os.path.exists(path):
        return False
    whole, closing, after = read_text(path).rpartition(END_OF_SCORES)
    before, opening, _ = whole.rpartition(SCORES)  # the last ones: a license may have others
    if opening:
        write_text(path, f"{before}{opening}\n{scores}\n{closing}{after}")
    return bool(opening)


def write_benchmarks(directory: str, tasks: dict[str, dict], date: str) -> None:
    """Write a checkpoint's exact match on the hub's tasks to .eval_results/, from where the hub shows it.

    tasks: task -> its metrics, as in evaluate.rates. date: of the evaluation, in ISO 8601.
    """
    entries = []
    for task, metrics in tasks.items():
        name, configuration = HUB[task]
        entries.append({
            "dataset": {"id": name, "task_id": configuration or "default"},
            "value": round(100 * metrics["exact_match"], 2), "date": date,
            "source": {"url": f"https://huggingface.co/datasets/{name}", "name": "07_eval.py"},
            "notes": f"exact match of greedy generation, %, on {metrics['questions']} validation questions"})
    write_text(os.path.join(directory, ".eval_results", "tasks.yaml"), yaml_dump(entries))


def _steps(aligned: dict, trained: dict | None) -> dict[str, str]:
    """What was done, in order and in short -> which part of the paper's method that is, if any.

    aligned: the summary of stage 4; trained: from _training.
    """
    group, merge = BY[aligned["by"]], MERGES[aligned["merge"]]
    steps = {group.done: "groups" if group.compared else ""}
    if aligned["rotate"] != "none" and not merge.whole_head:  # which no choice of bases changes
        steps["rotated onto each other"] = "rotations"
    steps[merge.done] = ""
    if aligned["refit"]:
        steps[REFITS[aligned["refit"]]] = ""
    if trained and trained["summary"]["masks"] != "off":
        steps["merged gradually by L0 masks"] = "masks"
    if trained:
        distilled = f"distilled from {trained['teacher']} on {trained['kinds']}"
        steps[distilled] = "prompts" if trained["tasks"] else ""
    return steps


def _source_card(path: str) -> dict:
    """The metadata of the source's own model card; {} if it has none that can be read."""
    try:
        return ModelCard(read_text(os.path.join(path, CARD)), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # missing, or whatever a parser makes of it
        return {}


def _training(training: dict, exported: dict) -> dict:
    """What the card says of a training. training: its record; exported: the summary of stage 6."""
    summary, arguments = training["summary"], training["arguments"]
    steps, step, opened = summary["steps"], exported.get("step"), exported.get(OPEN_MASKS)
    masks = MASKS[summary["masks"]].CARD if summary["masks"] in MASKS else MASKLESS
    of_tasks = arguments["tasks"] != NONE
    flags = {"chats": arguments["chat"], "text": arguments["text"]}
    sources = {name: locations for name, locations in flags.items() if locations}
    data = [f"the training sets of {len(arguments['only'])} tasks"] if of_tasks else []
    data += [f"{name} ({', '.join(map(_source, locations))})" for name, locations in sources.items()]
    kinds = ["tasks"] if of_tasks else []
    kinds += [f"{'self-generated ' * all(map(is_generated, locations))}{name}"
              for name, locations in sources.items()]
    return {
        "tasks": of_tasks,
        "data": ", ".join(data),
        "kinds": " and ".join(kinds),
        "teacher": "the untouched source" if arguments["teacher"] == SOURCE else "a fine-tuned teacher",
        "steps": steps if step in (None, steps) else f"{step} of {steps}",
        "masks": masks + (f"; {opened} masks had not closed when all were removed" if opened else ""),
        "metrics": _heldout(summary, exported) or f"Last loss: {summary['loss']:.4f}.",
        "summary": summary,
        "seed": arguments["seed"],
    }


def _heldout(trained: dict, exported: dict) -> str:
    """Held-out KLs before and after training, from the summaries of stages 5 and 6; "" without any."""
    before, after = heldout_kls(trained, f"{START}_"), heldout_kls(trained) | heldout_kls(exported)
    metrics = [f"on {kind} {kl:.4f} before, {after[kind]:.4f} after"
               + ("" if after[kind] < kl else ", which is no better") for kind, kl in before.items()]
    return f"KL to the teacher, on what was held out: {'; '.join(metrics)}." if metrics else ""


def _source(source: str) -> str:
    """A source of text or chats as a code span: a file without its directories."""
    generated, kind, name = source.rpartition(f"{GENERATED}:")
    short = name if isinstance(parse_source(name), DataSet) else os.path.basename(name)
    return _code(generated + kind + short)


def _code(text: str) -> str:
    """A code span. It has no escapes, so backticks and < are replaced."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("<", "&lt;") + "`"

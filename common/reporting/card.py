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
    chat: whether its tokenizer has a chat template. License and language come from the source's own card, if
    it has one. 07_eval.py fills in the scores.
    """
    source = alignment["model"]["name"]
    on_hub, metadata = is_hub_name(source), _source_card(alignment["model"]["path"])
    steps = _steps(alignment["summary"], training)
    borrowed = [part for part in steps.values() if part]
    data = ModelCardData(
        base_model=source if on_hub else None,
        base_model_relation="finetune" if on_hub else None,  # the hub's word for other weights, no fewer bits
        **{name: metadata.get(name) for name in ("language", "license", "license_name", "license_link")},
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gqa", "kv-cache"] + [f"arxiv:{ARXIV}"] * bool(borrowed),
    )
    facts = {"done": ", ".join(steps), "borrowed": borrowed, "paper": PAPER}
    facts |= _model(alignment, export["summary"]) | _recipe(alignment, training, export)
    facts["chat"], of_tasks = chat, facts.get("tasks")
    # whether prompts are tokenized as they are, or with what the tokenizer adds to a text
    facts["bare"] = not training["arguments"].get("bos") if of_tasks else chat
    facts["license"] = markdown_text(str(data.get("license_name") or data.license or ""))
    link = f"[{source}](https://huggingface.co/{source})" if on_hub else _code(os.path.basename(source))
    card = ModelCard.from_template(data, template_path=TEMPLATE, source=link, **facts)
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


def _steps(aligned: dict, training: dict | None) -> dict[str, str]:
    """What was done, in order and in short -> which part of the paper's method that is, if any.

    aligned: the summary of stage 4; training: the record of stage 5.
    """
    group, merge = BY[aligned["by"]], MERGES[aligned["merge"]]
    steps = {group.done: "groups" if group.compared else ""}
    if aligned["rotate"] != "none" and not merge.whole_head:  # which no choice of bases changes
        steps["rotated onto each other"] = "rotations"
    steps[merge.done] = ""
    if aligned["refit"]:
        steps[REFITS[aligned["refit"]]] = ""
    if training and training["summary"]["masks"] != "off":
        steps["merged gradually by L0 masks"] = "masks"
    if training:
        facts = _data(training["arguments"])
        steps[f"distilled from {facts['teacher']} on {facts['kinds']}"] = "prompts" if facts["tasks"] else ""
    return steps


def _source_card(path: str) -> dict:
    """The metadata of the source's own model card; {} if it has none that can be read."""
    try:
        return ModelCard(read_text(os.path.join(path, CARD)), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # missing, or whatever a parser makes of it
        return {}


def _model(alignment: dict, exported: dict) -> dict[str, str]:
    """Template fields that describe the checkpoint. alignment: the record of stage 4."""
    source = alignment["model"]
    value_bytes = 4 if exported["dtype"] == "torch.float32" else 2
    bytes_per_head = 2 * source["layers"] * source["head_dim"] * value_bytes  # a key and a value per token
    kv_heads, source_kv_heads = alignment["summary"]["kv_heads"], source["kv_heads"]
    return {
        "title": markdown_text(os.path.basename(source["name"].rstrip("/")).removesuffix(".gguf")),
        "architecture": exported["class"],
        "fingerprint": _code(source["fingerprint"]),
        "heads": source["heads"],
        "kv_heads": kv_heads,
        "plural": "s" if kv_heads > 1 else "",
        "source_kv_heads": source_kv_heads,
        "cache_bytes": f"{bytes_per_head * kv_heads:,}",
        "source_cache_bytes": f"{bytes_per_head * source_kv_heads:,}",
        "cache_share": f"{kv_heads / source_kv_heads:.1%}",
    }


def _recipe(alignment: dict, training: dict | None, export: dict) -> dict:
    """Template fields that describe how it was made."""
    aligned = alignment["summary"]
    group = BY[aligned["by"]]
    heads = "heads" if aligned["rotate"] == "none" else "heads, rotated by generalized Procrustes,"
    limit, basis = aligned["key_context"], export["summary"].get("cache_basis")
    context = f", keys for contexts of up to {limit} tokens" if limit else ""
    refitted = f", then {REFITS[aligned['refit']]}" if aligned["refit"] else ""
    return {
        "grouping": group.card + (f" ({aligned['criterion']})" if group.compared else ""),
        "merging": MERGES[aligned["merge"]].card.format(heads=heads) + context + refitted,
        "perplexity_source": f"{aligned['perplexity_source']:.3f}",
        "perplexity_merged": f"{aligned['perplexity_merged']:.3f}",
        "versions": ", ".join(f"{name} {version}" for name, version in export["packages"].items()),
        "commit": export["commit"],
        "cache_layout": basis and f"{basis['layout']}: {LAYOUTS[basis['layout']]}",
        "groups": alignment["groups"],
        "trained": training is not None,
    } | (_training(training["summary"], export["summary"]) | _data(training["arguments"]) if training else {})


def _training(trained: dict, exported: dict) -> dict:
    """Template fields that describe the training. trained, exported: the summaries of stages 5 and 6."""
    before, after = heldout_kls(trained, f"{START}_"), heldout_kls(trained) | heldout_kls(exported)
    metrics = [f"on {kind} {kl:.4f} before, {after[kind]:.4f} after"
               + ("" if after[kind] < kl else ", which is no better") for kind, kl in before.items()]
    step, opened = exported.get("step", trained["steps"]), exported.get(OPEN_MASKS)
    masks = MASKS[trained["masks"]].CARD if trained["masks"] in MASKS else MASKLESS
    return {
        "steps": f"{step} of {trained['steps']}" if step != trained["steps"] else step,
        "batch": trained["batch"],
        "tokens": f"{trained['tokens']:,}",
        "learning_rate": f"{trained['lr']:g}",
        "masks": masks + (f"; {opened} masks had not closed when all were removed" if opened else ""),
        "metrics": (f"KL to the teacher, on what was held out: {'; '.join(metrics)}." if metrics else
                    f"Last loss: {trained['loss']:.4f}."),
    }


def _data(arguments: dict) -> dict[str, str | bool]:
    """Template fields that say what it was trained on, and by which teacher. arguments: of stage 5."""
    tasks, text, chats = (arguments.get(name) for name in ("tasks", "text", "chat"))
    sources = [(name, locations) for name, locations in (("chats", chats), ("text", text)) if locations]
    data = [f"the training sets of {len(arguments['only'])} tasks"] if tasks != NONE else []
    data += [f"{name} ({', '.join(map(_source, locations))})" for name, locations in sources]
    kinds = ["tasks"] * (tasks != NONE)
    kinds += [f"{'self-generated ' * all(map(is_generated, locations))}{name}" for name, locations in sources]
    teacher = "the untouched source" if arguments["teacher"] == SOURCE else "a fine-tuned teacher"
    return {"data": ", ".join(data), "kinds": " and ".join(kinds), "tasks": tasks != NONE, "teacher": teacher,
            "seed": arguments["seed"]}


def _source(source: str) -> str:
    """A source of text or chats as a code span: a file without its directories."""
    generated, kind, name = source.rpartition(f"{GENERATED}:")
    short = name if isinstance(parse_source(name), DataSet) else os.path.basename(name)
    return _code(generated + kind + short)


def _code(text: str) -> str:
    """A code span. It has no escapes, so backticks and < are replaced."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("<", "&lt;") + "`"

"""The fields of every artifact's record, specified per stage, and validation against them.

A field's specification is a type (bool, object), a Number, a Text, a tuple of allowed values, [item] for a
list, {name: field} for an object with at least these fields, {Text: field} for one with any names that match,
or Optional(field) for a field that may be absent or null.
"""

import math
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Number:
    """A finite number with a lower bound; whole: an integer."""

    at_least: float = -math.inf
    whole: bool = False

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a finite number"
        return kind if self.at_least == -math.inf else f"{kind} of at least {self.at_least:g}"

    def accepts(self, value) -> bool:
        kinds = int if self.whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        largest = 2**63 - 1 if self.whole else sys.float_info.max  # JSON integers may exceed either
        return self.at_least <= value and abs(value) <= largest


@dataclass(frozen=True)
class Text:
    """A string that fully matches a pattern."""

    pattern: str
    description: str

    def __str__(self) -> str:
        return self.description

    def accepts(self, value) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class Optional:
    """A field that may be absent or null."""

    field: object


class MergeKind(NamedTuple):
    """A way to merge. done: in short; whole_head: it changes W_Q and W_O, too."""

    help: str
    card: str
    done: str
    whole_head: bool = False


class GroupKind(NamedTuple):
    """Scores by which heads are grouped. done: in short; compared: by a criterion, as in the paper."""

    card: str
    done: str
    compared: bool = False


COUNT, SIZE = Number(at_least=1, whole=True), Number(at_least=0, whole=True)
NUMBER, POSITIVE = Number(), Number(at_least=0)
STRING = Text(r"[^\ud800-\udfff]*", "text")  # lone surrogates cannot be printed
DIGEST = Text(r"[0-9a-f]{64}", "a sha256 of 64 hexadecimal digits")
VERSION = Text(r"[0-9a-f]{64}|[0-9a-f]{40}", f"{DIGEST}, or a commit of 40")
FILE_NAME = Text(  # not absolute, no component . or .., no backslash, no control characters
    r"(?!/)(?!(.*/)?\.\.?(/|$))[^\\\x00-\x1f\ud800-\udfff]+",
    "a relative path inside the directory",
)
MODEL = {"name": STRING, "path": STRING, "fingerprint": DIGEST,
         "layers": COUNT, "heads": COUNT, "kv_heads": COUNT, "head_dim": COUNT, "hidden": COUNT}
FIELDS = {
    "stage": STRING,
    "directory": STRING,  # the run directory, absolute
    "flags": Optional({STRING: object}),
    "arguments": {STRING: object},
    "model": MODEL,
    "inputs": {STRING: VERSION},
    "packages": {STRING: STRING},
    "commit": Optional(STRING),
    "seconds": POSITIVE,
    "date": STRING,
    "summary": {STRING: object},
}
FILES = {FILE_NAME: DIGEST}  # of an artifact, next to its record
CRITERION = ("cos", "dist")
# kinds, by the values of flags, in words for --help or the model card
BY = {
    "none": GroupKind("adjacent heads", "adjacent heads grouped"),
    "key": GroupKind("similarity of keys after alignment", "heads grouped by keys", True),
    "value": GroupKind("similarity of values after alignment", "heads grouped by values", True),
    "both": GroupKind("similarity of keys and values after alignment",
                      "heads grouped by keys and values", True),
    "energy": GroupKind("least energy lost by closed-form merging", "heads grouped by energy"),
}
MERGES = {
    "mean": MergeKind("as in the paper", "the mean of the {heads} of a group", "averaged"),
    "scaled": MergeKind("that mean at the mean norm of the group's heads (an ablation of ours)",
                        "the mean of the {heads} of a group, scaled to their mean norm",
                        "averaged at their mean norm"),
    "first": MergeKind("the first head of each group (an ablation of ours)",
                       "the first of the {heads} of a group, retained",
                       "the first of each group retained"),
    "closed-form": MergeKind("the best shared heads", "the best shared head in closed form",
                             "merged in closed form", True),
}
REFITS = {
    "output": "each W_O refitted by least squares",
    "attention": "the attention of each layer refitted to the source's",
}
MASKS = {
    "l0-released": "L0 masks as in the authors' code moved each head from its own projections to its group's",
    "l0": "L0 masks moved each head from its own projections to its group's",
    "off": "the merged model was trained directly, without masks",
}
GROUPS = [[[SIZE]]]  # layer -> group -> key/value heads of the source
COSINES = {"key_before": NUMBER, "key_after": NUMBER, "value_before": NUMBER, "value_after": NUMBER}
REFIT = {"ridge": Optional(POSITIVE), "merged": POSITIVE, "output": POSITIVE,
         "attention": Optional(POSITIVE)}
LOST = {"keys": NUMBER, "values": NUMBER}
CACHE_BASIS = {"layout": STRING, "keys": [NUMBER], "values": [NUMBER]}
# one item per layer
PER_LAYER = {"score_default", "score_found", "within_group_cosine", "refit_layers", "energy_lost"}
TRAINED = {"steps": COUNT, "batch": COUNT, "lr": POSITIVE, "loss": NUMBER, "tokens": COUNT}
TOKENS = "tokens.safetensors"  # in a calibration: what was read
SOURCE = "source"  # the teacher of stage 5, where it is the untouched source model
# in train/, not in teacher/
STUDENT = {"kv_heads": COUNT, "masks": tuple(MASKS), "merge": tuple(MERGES), "open_masks": Optional(SIZE)}
STAGES = {  # stage -> fields of its record in addition to FIELDS
    "01_calibrate.py": {
        "files": FILES,
        "summary": {"tokens": COUNT, "sequences": COUNT, "length": COUNT, "text": STRING,
                    "sampled_tokens": COUNT, "positions": COUNT, "peak_memory_gib": POSITIVE,
                    "proven": Optional(STRING)},
        "arguments": {"text": STRING, "chat": Optional(STRING)},
    },
    "02_similarity.py": {
        "files": FILES,
        "summary": {f"{kind}.{criterion}.{when}": NUMBER
                    for kind in ("key", "value") for criterion in CRITERION for when in ("before", "after")},
    },
    "03_group.py": {
        "files": FILES,
        "calibration": DIGEST,  # whose heads are grouped
        "kv_heads": COUNT,
        "groups": GROUPS,
        "summary": {"kv_heads": COUNT, "by": tuple(BY), "criterion": Optional(CRITERION),
                    "score_default": [NUMBER], "score_found": [NUMBER]},
    },
    "04_align.py": {
        "files": FILES,
        "groups": GROUPS,
        "summary": {"kv_heads": COUNT, "by": tuple(BY), "criterion": Optional(CRITERION),
                    "rotate": ("none", *CRITERION), "merge": tuple(MERGES),
                    "refit": Optional(tuple(REFITS)),
                    "key_context": Optional(COUNT), "refit_layers": Optional([REFIT]),
                    "calibration_tokens": COUNT, "within_group_cosine": [COSINES],
                    "max_logit_difference": POSITIVE, "kl": NUMBER, "perplexity_source": POSITIVE,
                    "perplexity_aligned": POSITIVE, "perplexity_merged": POSITIVE,
                    "kl_merged": Optional(NUMBER), "energy_lost": Optional([LOST])},
    },
    "05_prune_train.py": {"files": FILES, "summary": TRAINED, "arguments": {
        "tasks": STRING, "only": [STRING], "text": Optional([STRING]), "chat": Optional([STRING]),
        "teacher": Optional(STRING), "seed": SIZE}},
    "06_export.py": {
        "files": FILES,
        "summary": {"kv_heads": COUNT, "dtype": STRING, "class": STRING,
                    "max_logit_difference": POSITIVE, "cache_basis": Optional(CACHE_BASIS),
                    "open_masks": Optional(SIZE)},
    },
    "07_eval.py": {
        "files": FILES,
        "device": STRING,
        "results": {STRING: {"path": STRING, "heads": COUNT, "kv_heads": COUNT}},
    },
}


def find_fault(record, stage: str) -> str | None:
    """What is wrong with a stage's record, as "WHERE: expected X, found Y"; None if it is valid."""
    fault = mismatch(record, FIELDS, "record") or mismatch(record, STAGES.get(stage, {}), "record")
    if fault is None and STUDENT.keys() & record["summary"].keys() and stage == "05_prune_train.py":
        fault = mismatch(record["summary"], STUDENT, "record.summary")
    return fault or find_inconsistency(record, stage)


def find_inconsistency(record: dict, stage: str) -> str | None:
    """The first inconsistency between fields that are valid by themselves; None if there is none."""
    model, summary = record["model"], record["summary"]
    if model["heads"] % model["kv_heads"]:
        return (f"record.model.kv_heads: expected a divisor of {model['heads']} heads, "
                f"found {model['kv_heads']}")
    if stage in ("03_group.py", "04_align.py"):
        kv_heads = summary["kv_heads"]
        if record.get("kv_heads", kv_heads) != kv_heads:
            return f"record.kv_heads: expected {kv_heads} as in its summary, found {record['kv_heads']}"
        if BY[summary["by"]].compared and not summary.get("criterion"):
            return f"record.summary.criterion: expected one of {', '.join(CRITERION)}, found none"
        for name in PER_LAYER & summary.keys():
            if summary[name] is not None and len(summary[name]) != model["layers"]:
                return f"record.summary.{name}: expected {model['layers']} layers, found {len(summary[name])}"
        return find_group_fault(record["groups"], model, kv_heads)
    if stage == "01_calibrate.py":
        layers, files = model["layers"], record["files"]
        names = (TOKENS, *map(layer_file, range(min(layers, len(files)))))  # a record may say any number
        if len(files) != layers + 1 or files.keys() != set(names):
            return (f"record.files: expected {TOKENS} and one per layer ({layers}), "
                    f"found {sorted(files)[:3]} ...")
    return None


def find_group_fault(groups: list, model: dict, kv_heads: int) -> str | None:
    """Why `groups` is not a partition of each layer's source kv heads into kv_heads equal groups, or None."""
    source_kv_heads = model["kv_heads"]
    size = source_kv_heads // kv_heads
    if kv_heads >= source_kv_heads or source_kv_heads % kv_heads:
        return f"record.kv_heads: expected a proper divisor of {source_kv_heads}, found {kv_heads}"
    if len(groups) != model["layers"]:
        return f"record.groups: expected {model['layers']} layers, found {len(groups)}"
    for layer, layer_groups in enumerate(groups):
        sizes = [len(group) for group in layer_groups]
        if len(sizes) != kv_heads or set(sizes) != {size}:
            return f"record.groups[{layer}]: expected {kv_heads} groups of {size} heads, found sizes {sizes}"
        heads = sorted(head for group in layer_groups for head in group)
        if heads != list(range(source_kv_heads)):
            return (f"record.groups[{layer}]: expected each of heads 0 to {source_kv_heads - 1} once, "
                    f"found {heads}")
    return None


def mismatch(value, field, where: str) -> str | None:
    """The first mismatch of a value with its specification, as "WHERE: expected X, found Y", or None."""
    if isinstance(field, Optional):
        return None if value is None else mismatch(value, field.field, where)
    if isinstance(field, dict):
        return mismatch_object(value, field, where)
    if isinstance(field, list):
        if not isinstance(value, list):
            return f"{where}: expected a list, found {shown(value)}"
        faults = (mismatch(item, field[0], f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, faults), None)
    if isinstance(field, tuple):
        if value in field:
            return None
        return f"{where}: expected one of {', '.join(field)}, found {shown(value)}"
    accepted = isinstance(value, field) if isinstance(field, type) else field.accepts(value)
    expected = field.__name__ if isinstance(field, type) else field
    return None if accepted else f"{where}: expected {expected}, found {shown(value)}"


def mismatch_object(value, fields: dict, where: str) -> str | None:
    """mismatch for an object; the keys of `fields` are names, or one Text that every name must match."""
    if not isinstance(value, dict):
        return f"{where}: expected an object, found {shown(value)}"
    for name, field in fields.items():
        if isinstance(name, Text):
            faults = (mismatch(key, name, f"{where}: name") or mismatch(item, field, f"{where}.{key}")
                      for key, item in value.items())
            fault = next(filter(None, faults), None)
        elif name in value or isinstance(field, Optional):
            fault = mismatch(value.get(name), field, f"{where}.{name}")
        else:
            fault = f"{where}: expected a field {name!r}, found none"
        if fault:
            return fault
    return None


def shown(value) -> str:
    """A value for an error message, shortened and printable."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def layer_file(index: int) -> str:
    """File name of a layer in a calibration directory."""
    return f"layer-{index:05d}.safetensors"

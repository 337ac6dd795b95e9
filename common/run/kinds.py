"""What comes in kinds, by the values of flags, in words for --help and the model card."""

from typing import NamedTuple


class MergeKind(NamedTuple):
    """A way to merge. done: in the card's words; whole_head: it changes W_Q and W_O, too."""

    help: str
    done: str
    whole_head: bool = False


class GroupKind(NamedTuple):
    """Scores by which heads are grouped. done: in the card's words; compared: by a criterion of the paper."""

    done: str
    compared: bool = False


CRITERION = ("cos", "dist")
BY = {
    "none": GroupKind("adjacent heads grouped"),
    "key": GroupKind("heads grouped by keys", True),
    "value": GroupKind("heads grouped by values", True),
    "both": GroupKind("heads grouped by keys and values", True),
    "energy": GroupKind("heads grouped by energy"),
}
MERGES = {
    "mean": MergeKind("as in the paper", "averaged"),
    "closed-form": MergeKind("the best shared heads", "merged in closed form", True),
}
REFITS = {
    "output": "each W_O refitted by least squares",
    "attention": "the attention of each layer refitted to the source's",
}
SOURCE = "source"  # the teacher of stage 5, where it is the untouched source model


def find_group_fault(groups: list, model: dict, kv_heads: int) -> str | None:
    """Why `groups`, [layers][G][D] heads, is not a partition of each layer's source kv heads into kv_heads
    equal groups; None if it is.
    """
    source_kv_heads = model["kv_heads"]
    if kv_heads >= source_kv_heads or source_kv_heads % kv_heads:
        return f"kv_heads: expected a proper divisor of {source_kv_heads}, found {kv_heads}"
    if len(groups) != model["layers"]:
        return f"groups: expected {model['layers']} layers, found {len(groups)}"
    for layer, layer_groups in enumerate(groups):
        try:
            sizes, heads = [len(group) for group in layer_groups], sorted(sum(layer_groups, []))
        except TypeError:
            sizes = heads = []
        if sizes != [source_kv_heads // kv_heads] * kv_heads or heads != list(range(source_kv_heads)):
            return (f"groups[{layer}]: expected {kv_heads} equal groups of heads, each of heads 0 to "
                    f"{source_kv_heads - 1} once, found {layer_groups}")
    return None

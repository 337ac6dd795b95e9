"""The inputs of training, validated: the pair of checkpoints from stage 4 and the tokenized samples."""

import array
import hashlib
import os
from dataclasses import dataclass

from common.artifacts import check_input, read_record, verify_files
from common.cli import UserError
from common.data.samples import Sample
from common.data.tasks import load_task, tokenize
from common.method import masks
from common.models import load_config, load_tokenizer, source_model


@dataclass(frozen=True)
class Pair:
    """aligned/ and merged/: the same model and grouping before and after merging."""

    aligned: str
    merged: str
    model: dict  # description of the source model
    kv_heads: int
    merge: str  # "mean" or "closed-form"
    blended: tuple[str, ...]  # projections that merging changed

    @property
    def title(self) -> str:
        return f"{self.model['kv_heads']} -> {self.kv_heads} kv heads"


def read_pair(run: str, ranks) -> Pair:
    """The pair in a run directory.

    Raises UserError unless both are intact and belong together, and the source model is unchanged since
    stage 1.
    """
    aligned, merged = (os.path.join(run, name) for name in ("aligned", "merged"))
    aligned_record, merged_record = (read_record(path, "04_align.py") for path in (aligned, merged))
    check_input(merged_record, aligned)
    if ranks.first:  # hash the weights once, not on every rank
        verify_files(aligned, aligned_record)
        verify_files(merged, merged_record)
    summary = aligned_record["summary"]
    whole_head = summary["merge"] == "closed-form" or summary["refit"]  # merging changed W_Q and W_O too
    blended = masks.WHOLE_HEAD if whole_head else masks.KEY_VALUE
    return Pair(aligned, merged, source_model(aligned_record), summary["kv_heads"], summary["merge"], blended)


def load_samples(tasks: list[str], source: str, model: str, ranks) -> list[Sample]:
    """The training sets of the tasks, tokenized and concatenated.

    source: as for load_task; model: the checkpoint directory whose tokenizer and position limit apply. Raises
    UserError for a sample that exceeds that limit or has no prompt.
    """
    tokenizer, positions = load_tokenizer(model), load_config(model).max_position_embeddings
    samples = []
    for task in tasks:
        examples, origin = load_task(task, "train", source)
        for number, example in enumerate(examples, 1):
            sample = tokenize(example, tokenizer)
            if not sample.prompt:
                raise UserError(f"{origin} row {number}: expected a prompt, found none")
            if len(sample) > positions:
                raise UserError(f"{origin} row {number}: expected at most {positions} tokens (the model's "
                                f"positions), found {len(sample)}")
            samples.append(sample)
        ranks.say(f"reads   {origin}: {len(examples)} samples")
    return samples


def describe_samples(samples: list[Sample]) -> dict:
    """The training data as recorded in the settings: number of samples and their digest."""
    return {"samples": len(samples), "samples_sha256": samples_digest(samples)}


def samples_digest(samples: list[Sample]) -> str:
    """sha256 of all samples' token ids, in order: it changes with the training data."""
    digest = hashlib.sha256()
    for sample in samples:
        for segment in sample.segments:
            digest.update(array.array("q", (len(segment), *segment)).tobytes())
    return digest.hexdigest()

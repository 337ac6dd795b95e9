"""What training starts from: the pair of checkpoints that stage 4 left, and the tokenized samples, both
checked.
"""

import array
import hashlib
import os
from dataclasses import dataclass

from common.artifacts import check_input, read_record, verify_files
from common.cli import UserError
from common.data.tasks import Sample, load_task, tokenize
from common.method import masks
from common.models import load_config, load_tokenizer, source_model


@dataclass(frozen=True)
class Pair:
    """aligned/ and merged/: one grouping of one model, before and after merging."""

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
    """The pair in a run directory. Raises UserError unless both are as stage 4 wrote them, for one
    grouping, and the source model is as stage 1 read it.
    """
    aligned, merged = (os.path.join(run, name) for name in ("aligned", "merged"))
    aligned_record, merged_record = (read_record(path, "04_align.py") for path in (aligned, merged))
    check_input(merged_record, aligned)
    if ranks.first:  # the weights once, for all ranks
        verify_files(aligned, aligned_record)
        verify_files(merged, merged_record)
    summary = aligned_record["summary"]
    whole_head = summary["merge"] == "closed-form" or summary["refit"]  # merging changed W_Q and W_O too
    blended = masks.WHOLE_HEAD if whole_head else masks.KEY_VALUE
    return Pair(aligned, merged, source_model(aligned_record), summary["kv_heads"], summary["merge"], blended)


def load_samples(tasks: list[str], source: str, model: str, ranks) -> list[Sample]:
    """The training sets of the tasks, tokenized, one task after another.

    source: of `load_task`; model: directory of the checkpoint that gives tokenizer and positions. Raises
    UserError for a sample that the model has no positions for, or that has no prompt.
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
    """What a training's settings say of its data: the number of samples, and their digest."""
    return {"samples": len(samples), "samples_sha256": samples_digest(samples)}


def samples_digest(samples: list[Sample]) -> str:
    """A sha256 of the token ids of all samples in their order: other training data has another."""
    digest = hashlib.sha256()
    for sample in samples:
        for part in (sample.prompt, sample.answer):
            digest.update(array.array("q", (len(part), *part)).tobytes())
    return digest.hexdigest()

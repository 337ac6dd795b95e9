"""Stage 4: align the heads of each group by rotations that leave the model equivalent, then merge them.

Reads   the source model, RUN/calibration/, RUN/groups/
Writes  RUN/aligned/   an ordinary checkpoint equivalent to the source: heads rotated, groups consecutive
        RUN/merged/    a stock GQA checkpoint: the groups of aligned/ merged, untrained
        RUN/align.partial/   until both are complete: aligned/, verified, and every layer that is refitted

    python 04_align.py --run runs/llama2-7b --merge closed-form --refit
    python 04_align.py --run runs/llama2-7b --layerwise      # 7B in 3 GiB of memory
    python 04_align.py                                       # seconds on a CPU for the demo model

Generalized Procrustes (Algorithm 1, by a faster update) finds the rotations from each group's Grams, in
float64. They are fused into W_Q, W_K, W_V and W_O (Eq. 12-17).

Equivalence check, on text that the calibration has not read: the rotated model in float32 must reproduce the
source's logits up to float32 rounding, and aligned/, loaded back from disk, those of the rotated model in the
checkpoint's precision; its KL from the source is bounded. Where scores are so large that the source itself is
far from float64, the bound grows with that. If the check fails, nothing is written.

--merge mean averages the keys and values of each group (Eq. 25, 26); with 03_group.py --by none and --rotate
none it is the mean-pool baseline. --merge closed-form computes the best shared heads
(common/closed_form/layer.py), much closer to the source, and best with 03_group.py --by energy; its keys are
RoPE-aware for contexts of up to --key-context tokens. --refit then re-solves each layer's W_O by least
squares on the calibration text, at the cost of two forward passes over it. --refit attention goes on to train
W_Q, W_K, W_V and W_O on the source layer's attention output, at the cost of six to nine in all. If
--key-context exceeds a sequence, at most four times, both read every second sequence at positions with gaps.

If the command is stopped, the same one goes on: with the aligned model that was verified, and with the first
layer that was not refitted. Another command, or another version, removes what that one left.
"""

import common.run.openmp  # noqa: F401 - before torch
import os
import shutil
from dataclasses import dataclass
from functools import partial

import torch
from safetensors.torch import load_file, save_file

from common.data.sources import DataContext, begins_with_bos, read_unread, unread_length
from common.method.procrustes import align_layer, within_group_cosine
from common.models.calibration import Calibration
from common.models.edits import fuse_groups, merge_layer, merged_config
from common.models.equivalence import max_difference, mean_kl, perplexity_of, require_close
from common.models.families import key_context, merged_parameters
from common.models.layers import CheckpointWriter, Layers
from common.models.load import load_config, pick_device, source_model, weight_dtype
from common.models.merging import choose_merges
from common.models.refit import ERRORS, Refit
from common.run import artifact
from common.run.artifact import RECORD, Parts, begin_stage, digest, write_directory, write_record
from common.run.errors import Complete, UserError, run_stage
from common.run.flags import device, positive, stage_parser
from common.run.kinds import CRITERION, MERGES, REFITS, find_group_fault
from common.run.progress import Progress, peak_memory

CHECK_SEQUENCES = 4  # of the equivalence check
LOGIT_TOLERANCE = 1e-4, 1e-5  # absolute, relative to the largest logit; the larger counts: float32 rounding
ROUNDING = 8  # times the source's own difference from float64 is rounding, too; measured: about once
REFITTED = "refitted.safetensors"  # of a layer that is finished: what the refit may change, in float32
STORED_KL = 0.01  # nats per token from the source to a 16-bit aligned/: bfloat16 rounding costs 1e-6 to 1e-3


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--calibration", metavar="DIR", help="default: RUN/calibration")
    parser.add_argument("--groups", metavar="DIR", help="default: RUN/groups")
    parser.add_argument("--rotate", choices=("none", *CRITERION), default="dist",
                        help="align unit-norm (cos) or raw (dist) vectors, or only reorder heads (none)")
    parser.section("merging")
    parser.add_argument("--merge", choices=tuple(MERGES), default="mean",
                        help="; ".join(f"{name}: {kind.help}" for name, kind in MERGES.items()))
    parser.add_argument("--key-context", type=positive,
                        help="closed-form: length of context, in tokens, to preserve scores over (default: "
                             "the model's maximum, 4096 at most)")
    parser.add_argument("--refit", nargs="?", choices=tuple(REFITS), const="output",
                        help="output (or no value): re-solve each merged layer's W_O by least squares; "
                             "attention: then train its W_Q, W_K, W_V and W_O")
    parser.add_argument("--refit-sequences", type=positive,
                        help="sequences of the calibration's, evenly spread, at its length (default: all); "
                             "one in eight is held out to choose the ridge strength and the epoch")
    parser.section("execution")
    parser.add_argument("--dtype", choices=("source", "float32"), default="source",
                        help="of the checkpoints written; rotations use float64, forward passes float32")
    parser.add_argument("--layerwise", action="store_true", help="hold one decoder layer in memory at a time")
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda")
    args = parser.parse_args()
    if args.key_context and args.merge != "closed-form":
        raise UserError(f"--key-context: expected --merge closed-form with it, found {args.merge}")
    return args


@dataclass
class Inputs:
    """What the stage reads."""

    calibration: Calibration
    source: dict  # the description of the model
    grouping: dict  # the summary of the groups
    groups: torch.Tensor  # [layers, G, D] head indices
    tokens: torch.Tensor  # [sequences, length], for the equivalence check
    refit_tokens: torch.Tensor | None  # [refit sequences, calibration length]
    dtype: torch.dtype  # of the checkpoints to write
    context: int | None  # tokens that closed-form keys are merged for; None for other merges


def input_paths(args) -> list[str]:
    """The directories of the calibration and of the groups."""
    return [args.calibration or os.path.join(args.run, "calibration"),
            args.groups or os.path.join(args.run, "groups")]


def read_inputs(args) -> Inputs:
    """Read and validate all inputs except Grams and weights, and print a line for each."""
    calibration_path, groups_path = input_paths(args)
    calibration = Calibration(calibration_path)
    record = artifact.read_record(groups_path, "03_group.py", calibration.model)
    grouping, groups = record["summary"], record["groups"]
    fault = find_group_fault(groups, calibration.model, grouping["kv_heads"])
    if fault:
        raise UserError(f"{groups_path}/{RECORD}: {fault}; run 03_group.py again with --force")
    if record["calibration"] != digest(calibration_path):
        raise UserError(f"{groups_path}: expected groups of heads in {calibration_path}, found those of "
                        "another calibration; run 02_similarity.py and 03_group.py again with --force")
    home = os.path.dirname(os.path.normpath(calibration_path))  # has what the calibration generated
    source, by, context = source_model(calibration.record, home), grouping["by"], None
    path, config = source["path"], load_config(source["path"])
    print(f"reads   {path}; {calibration_path}; {groups_path} ({grouping['kv_heads']} groups by {by})")
    if args.merge == "closed-form":
        context = key_context(args.key_context, config.max_position_embeddings)
        print(f"keys    merged for contexts of up to {context} tokens")
        if by != "energy":
            print(f"note    groups by {by}; --merge closed-form works best with 03_group.py --by energy")
    data = DataContext(path, home, pick_device(args.device), layerwise=args.layerwise,
                       bos=begins_with_bos(calibration.record))
    length = unread_length(calibration.record, None, config.max_position_embeddings)
    tokens, description = read_unread(calibration.record, data, CHECK_SEQUENCES, length)
    print(f"reads   {description}, for the equivalence check")
    refit_tokens = read_refit_text(args, calibration) if args.refit else None
    return Inputs(calibration, source, grouping, torch.tensor(groups), tokens, refit_tokens,
                  weight_dtype(args.dtype, config), context)


def read_refit_text(args, calibration: Calibration) -> torch.Tensor:
    """Sequences of the calibration, evenly spread: texts, and chats behind them, keep their shares."""
    tokens = calibration.tokens()
    total = len(tokens)
    if total < 2:  # one fits and one is held out
        raise UserError(f"{calibration.path}: expected two sequences or more for --refit, found {total}")
    count = min(max(2, args.refit_sequences or total), total)
    print(f"reads   {calibration.summary['text']}; {count} of {total} sequences, evenly spread; "
          f"{count * tokens.shape[1]} tokens, for the refit")
    return tokens[torch.arange(count) * total // count]


def open_layers(path: str, args) -> Layers:
    """A checkpoint in float32."""
    return Layers(path, torch.float32, pick_device(args.device), layerwise=args.layerwise)


def align_groups(grams_of, groups: torch.Tensor, criterion: str) -> tuple[list, list[dict]]:
    """Each layer's rotations (Q [G, D, d, d], u [G, D, d/2]) and mean cosines within groups, also printed.

    grams_of: a layer's index -> its LayerGrams. groups: [layers, G, D].
    """
    rotations, cosines = [], []
    print("mean cosine within groups | keys before -> after | values before -> after")
    for index, layer_groups in enumerate(Progress(groups, desc="aligning", unit="layer")):
        grams = grams_of(index)
        rotation = align_layer(grams, layer_groups, criterion)
        cosine = within_group_cosine(grams, layer_groups, *rotation)
        rotations.append(rotation)
        cosines.append({name: round(number, 6) for name, number in cosine.items()})
        Progress.write(f"layer {index:19d} | {cosine['key_before']:8.4f} -> {cosine['key_after']:8.4f} | "
                       f"{cosine['value_before']:8.4f} -> {cosine['value_after']:8.4f}")
    return rotations, cosines


def write_aligned(directory: str, layers: Layers, inputs: Inputs, rotations: list) -> tuple[list, list]:
    """Rotate and reorder the heads of the source `layers`, and write the checkpoint.

    Returns the logits of the rotated model, and of that rounded to the checkpoint's precision.
    """
    def rotate(index, layer):
        fuse_groups(layer.self_attn, inputs.groups[index], *rotations[index])

    def round_weights(index, layer):  # buffers are stored as they are
        for name, parameter in layer.named_parameters():
            parameter.data = parameter.to(writer.dtypes[f"model.layers.{index}.{name}"]).float()

    writer = CheckpointWriter(directory, layers.config, inputs.dtype, layers.path)
    layers.edit(rotate)
    rotated = layers.logits(inputs.tokens)
    layers.edit(round_weights)
    rounded = layers.logits(inputs.tokens)
    with writer:
        for index, layer in enumerate(layers.decoder_layers()):
            writer.write(f"model.layers.{index}", layer)
        writer.write_rest(layers)
    return rotated, rounded


def check_aligned(inputs: Inputs, source: list, rotated: list, rounded: list,
                  loaded: Layers) -> dict[str, float]:
    """Equivalence check of aligned/ as loaded back, by transformers' own forward pass: returns its metrics,
    raises UserError if it fails. source, rotated, rounded: logits.
    """
    aligned = loaded.logits(inputs.tokens)
    allowed = max(LOGIT_TOLERANCE[0], LOGIT_TOLERANCE[1] * max(float(rows.abs().max()) for rows in source))
    differences = max_difference(source, rotated), max_difference(rounded, aligned)
    difference = float(torch.tensor(differences).max())  # propagates NaN
    if difference > allowed:  # large scores round more: by how much, the source itself shows
        exact = Layers(inputs.source["path"], torch.float64, loaded.device, layerwise=True)
        allowed = max(allowed, ROUNDING * max_difference(source, exact.logits(inputs.tokens)))
    require_close("the aligned model is not the source model", difference, allowed)
    metrics = {"max_logit_difference": difference, "kl": mean_kl(source, aligned),
               "perplexity_source": perplexity_of(source, inputs.tokens),
               "perplexity_aligned": perplexity_of(aligned, inputs.tokens)}
    print(f"check   aligned/ loaded back as {inputs.dtype}: max |logit difference| {difference:.2e} (allowed "
          f"{allowed:.0e}), KL {metrics['kl']:.2e}, perplexity {metrics['perplexity_source']:.5f} -> "
          f"{metrics['perplexity_aligned']:.5f}; {inputs.tokens.numel()} tokens")
    if not metrics["kl"] <= STORED_KL:
        raise UserError(f"aligned/ as {inputs.dtype}: expected a KL of at most {STORED_KL} from the source, "
                        f"found {metrics['kl']:.2e}; nothing was written; pass --dtype float32")
    return metrics


def verified_part(parts: Parts, args, inputs: Inputs, rotations: list) -> tuple[str, dict, list]:
    """Where the aligned model is that equals the source, the check's metrics, and the source's logits.

    It is written and checked, unless it is a finished part.
    """
    path = inputs.source["path"]
    source = open_layers(path, args).logits(inputs.tokens)

    def checked(directory: str) -> dict:
        logits = write_aligned(directory, open_layers(path, args), inputs, rotations)
        return check_aligned(inputs, source, *logits, open_layers(directory, args))

    found = parts.find("aligned")
    if found:
        print(f"reads   {found[0]}, checked before this command was stopped")
    return *(found or parts.add("aligned", checked)), source


def refit_layer(refit: Refit, parts: Parts, name: str, layer, merged) -> dict:
    """Refit the decoder layer `merged`, unless that is a finished part. Returns the metrics of the refit."""
    def refitted(directory: str) -> dict:
        metrics = refit.layer(layer, merged)
        parameters = merged_parameters(merged.self_attn).items()
        save_file({name: parameter.contiguous() for name, parameter in parameters},
                  os.path.join(directory, REFITTED))
        return metrics

    found = parts.find(name)
    if found is None:
        return parts.add(name, refitted)[1]
    directory, metrics = found
    refit.pass_by(layer, merged, load_file(os.path.join(directory, REFITTED)), metrics)
    return metrics


def write_merged(directory: str, layers: Layers, inputs: Inputs, merges, args, parts: Parts) -> list | None:
    """Merge the groups of the aligned `layers` and write the result. Returns the metrics of the refit."""
    source, config = inputs.source, merged_config(layers.config, inputs.grouping["kv_heads"])
    refit = None
    if args.refit:
        targets, fitted = (layers.embed(inputs.refit_tokens.split(1), args.run) for _ in range(2))
        refit = Refit(layers.model, targets, fitted, args.refit == "attention", inputs.context,
                      store=lambda batches: layers.store(batches, args.run))
    with CheckpointWriter(directory, config, inputs.dtype, source["path"]) as writer:
        aligned_layers = Progress(layers.decoder_layers(), "merging", source["layers"], unit="layer")
        for index, (layer, merge) in enumerate(zip(aligned_layers, merges, strict=True)):
            merged = merge_layer(layer, index, config, merge)
            if refit:
                errors = refit_layer(refit, parts, f"layer-{index:05d}", layer, merged)
                steps = " -> ".join(f"{name} {errors[name]:.4f}" for name in ERRORS if name in errors)
                Progress.write(f"refit   layer {index:2d}: relative squared error on held-out sequences "
                               + steps)
            writer.write(f"model.layers.{index}", merged)
        writer.write_rest(layers)
    return refit and refit.metrics


@torch.no_grad()
def main():
    args = parse()
    aligned_path, merged_path, partial_path = (os.path.join(args.run, name)
                                               for name in ("aligned", "merged", "align.partial"))
    digests = artifact.input_digests(args.run, input_paths(args))
    try:
        started = begin_stage("04_align.py", args, aligned_path, merged_path, inputs=digests)
    except Complete:
        shutil.rmtree(partial_path, ignore_errors=True)  # of a run that was killed at its very end
        raise
    inputs = read_inputs(args)
    source, grams_of = inputs.source, partial(inputs.calibration.grams, pick_device(args.device))
    artifact.refuse_own_source(source, aligned_path, merged_path)
    rotations, cosines = align_groups(grams_of, inputs.groups, args.rotate)
    merges = choose_merges(args.merge, grams_of, inputs.groups, rotations, inputs.context)
    with write_directory(merged_path) as merged, write_directory(aligned_path) as aligned:
        record = started.record(source, {})
        made_by = {name: record[name] for name in ("stage", "flags", "inputs", "packages", "commit")}
        parts = Parts(partial_path, made_by | {"device": pick_device(args.device)})
        verified, metrics, logits = verified_part(parts, args, inputs, rotations)
        # from aligned/ as stored, because stage 5 blends the two
        refitted = write_merged(merged, open_layers(verified, args), inputs, merges, args, parts)
        predicted = open_layers(merged, args).logits(inputs.tokens)
        metrics |= {"perplexity_merged": perplexity_of(predicted, inputs.tokens),
                    "kl_merged": mean_kl(logits, predicted)}
        summary = {name: inputs.grouping.get(name) for name in ("kv_heads", "by", "criterion")} | metrics
        summary |= {name: getattr(args, name) for name in ("rotate", "merge", "refit")}
        summary |= {"refit_layers": refitted, "key_context": inputs.context, "within_group_cosine": cosines,
                    "peak_memory_gib": peak_memory()}
        written = started.record(source, summary, groups=inputs.groups.tolist())
        os.remove(os.path.join(verified, RECORD))  # the part's
        os.rename(verified, aligned)
        write_record(aligned, written)
        write_record(merged, written | {"inputs": written["inputs"] | {"RUN/aligned": digest(aligned)}})
    shutil.rmtree(partial_path, ignore_errors=True)
    print(f"wrote   {aligned_path}\nwrote   {merged_path}\n{last_line(summary)} in {started.clock()} s, "
          f"peak host memory {summary['peak_memory_gib']} GiB")


def last_line(summary: dict) -> str:
    """What the stage has done, in short."""
    how = f"{summary['merge']}, refitted" if summary["refit"] else summary["merge"]
    return (f"04_align: perplexity source {summary['perplexity_source']:.3f}, aligned "
            f"{summary['perplexity_aligned']:.3f}, merged to {summary['kv_heads']} kv heads ({how}) without "
            f"training {summary['perplexity_merged']:.3f} (KL {summary['kl_merged']:.4f})")


if __name__ == "__main__":
    run_stage(main)

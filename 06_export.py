"""Stage 6: write the trained student as a stock checkpoint of its family with fewer key/value heads.

Reads   RUN/train/ (completed by stage 5), RUN/aligned/ for config and tokenizer; with
        --untrained RUN/merged/ instead
Writes  RUN/gqa/: weights, config, generation config, tokenizer, and a model card (README.md); it loads
        without this repository

    python 06_export.py --run runs/llama2-7b     # on a CPU, in the memory of one layer
    python 06_export.py                          # seconds on a CPU for the demo model
    python 06_export.py --run runs/mine --untrained --name merged     # merged/, to runs/mine/gqa-merged/
    python 06_export.py --run runs/mine --cache-basis rotated         # for a quantized cache, in llama.cpp

After training on text or chats alone, of the checkpoints that stage 5 kept the one with the lowest held-out
KL is exported; after training on tasks the last one, as in the authors' code.

The trained tensors are loaded into the stock model by name, one decoder layer at a time; a missing or
unexpected one stops the export. The checkpoint is loaded back, and its logits are compared with the
student's; in float32 they must be equal up to rounding.

--cache-basis changes the basis of keys and values to one in which a four-bit cache loses less; the model's
function stays. What is good for one client may be bad for others. It reads the calibration that stage 4 read.
"""

import common.run.openmp  # noqa: F401 - before torch
import os
from statistics import mean

import torch

from common.data.documents import NONE
from common.evaluation.evaluate import require_finite
from common.models import proof
from common.models.cache_basis import CacheSamples, change_basis, fit_basis
from common.models.calibration import Calibration
from common.models.edits import merged_config
from common.models.equivalence import max_difference, require_close
from common.models.layers import CheckpointWriter, Layers
from common.models.load import is_hub_name, load_config, load_tokenizer, weight_dtype
from common.models.quantized_cache import BLOCK, LAYOUTS, attention_with, has_blocks
from common.reporting import card as model_card
from common.run import flags
from common.run.artifact import (
    begin_stage,
    check_input,
    check_same_model,
    input_digests,
    read_record,
    refuse_own_source,
    resolved,
    verify_files,
    write_directory,
    write_record,
)
from common.run.errors import run_stage
from common.run.flags import stage_parser
from common.run.progress import Progress, peak_memory
from common.training import checkpoints
from common.training.lines import CONTENT, METRICS, OPEN_MASKS, read_metrics

# relative to the largest logit: both compute the same float32 products, whose order no library promises
LOGIT_TOLERANCE = 1e-5
ROUNDED = 1e-4  # the same in another basis, where the weights themselves are rounded to float32 once more
KLS = [f"{kind}_kl" for kind in CONTENT]
BASIS_TEXT = 4, 512  # sequences of the calibration, and tokens of each, that --cache-basis reads


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--dtype", choices=("source", "float32", "bfloat16", "float16"), default="source",
                        help="of the exported weights")
    parser.add_argument("--name", type=flags.name, help="read RUN/train-NAME/, write RUN/gqa-NAME/")
    parser.add_argument("--update", action="store_true", help="replace an export of another training")
    parser.add_argument("--untrained", action="store_true", help="export merged/ as it is")
    parser.add_argument("--cache-basis", choices=LAYOUTS,
                        help="change to a basis for quantized caches that have " +
                             ", ".join(f"{name}: {what}" for name, what in LAYOUTS.items()))
    return parser.parse_args()


def read_records(training: str | None, source: str) -> tuple[dict | None, dict]:
    """The records of train/, None for an untrained export, and of `source`: aligned/, or then merged/.

    Raises UserError unless they are intact and the student was trained from this aligned/.
    """
    alignment = read_record(source, "04_align.py")
    verify_files(source, alignment)
    if training is None:
        return None, alignment
    trained = read_record(training, "05_prune_train.py")
    check_input(trained, source)
    verify_files(training, trained)
    return trained, alignment


def chosen_weights(training: str, trained: dict) -> checkpoints.TrainedWeights:
    """The weights with the lowest held-out KL, or after training on tasks the last.

    trained: the record of training, which names its checkpoints.
    """
    saved = checkpoints.saved_checkpoints(training)
    chosen = checkpoints.best(training) if trained["arguments"]["tasks"] == NONE else None
    weights = checkpoints.TrainedWeights(chosen or saved[-1])
    reason = "the lowest held-out KL of those kept" if chosen else "the last"
    print(f"reads   {weights.path}: {len(weights.names())} tensors, {reason}")
    return weights


def heldout_at(training: str, step: int) -> dict[str, float]:
    """The student's held-out KLs after this step, as far as they were measured."""
    lines = (line for line in read_metrics(os.path.join(training, METRICS)) if line["step"] == step)
    return {name: kl for name, kl in next(lines, {}).items() if name in KLS}


def without_paths(record: dict) -> dict:
    """The record of an export, which is published with it, with names in place of paths of this machine."""
    model, arguments = record["model"], record["arguments"]
    named = {name: os.path.basename(os.path.normpath(model[name])) for name in ("name", "path")}
    if is_hub_name(model["name"]):
        named["name"] = model["name"]
    run = os.path.basename(os.path.abspath(arguments["run"]))
    published = {name: value for name, value in record.items() if name != "model_from_run"}
    return published | {"model": model | named, "arguments": arguments | {"run": run}}


def write_layers(writer: CheckpointWriter, layers: Layers, tokens: torch.Tensor, layout: str | None = None,
                 text: torch.Tensor | None = None) -> tuple[list[torch.Tensor], dict[str, list[float]]]:
    """Write the model layer by layer; with a layout, in the basis for it that text [n, T] calls for.

    Returns its logits for tokens [n, T], as from Layers.logits, in its own basis; and for "keys" and "values"
    the error of a four-bit cache in the new basis over that in its own, the mean of each layer's heads.
    """
    hidden, errors = layers.embed(tokens.split(1), None), {"keys": [], "values": []}
    read = layers.embed(text.split(1), None) if layout else []
    bar = Progress(layers.decoder_layers(), "exporting", layers.config.num_hidden_layers, unit="layer")
    for index, layer in enumerate(bar):
        layers.advance(layer, hidden)
        if layout:
            samples = CacheSamples()
            with attention_with(layers.model, samples.watch):
                layers.advance(layer, read)
            basis = fit_basis(layer.self_attn, samples, layout)
            change_basis(layer.self_attn, basis)
            for kind, ratios in errors.items():
                ratios.append(float(getattr(basis, kind).mean()))
        writer.write(f"model.layers.{index}", layer)
    writer.write_rest(layers)
    return list(layers.logits_of(hidden)), errors


def usable_layout(asked: str | None, config) -> str | None:
    """The layout of --cache-basis; None, and a note if one is asked for, for a model without such a basis."""
    usable = has_blocks(config) and proof.has_plain_pairs(config)
    if asked and not usable:
        reason = ("RoPE's pairs are other channels than a Llama's" if has_blocks(config)
                  else f"heads have no blocks of {BLOCK} channels")
        print(f"note    --cache-basis: {reason}; the basis stays")
    return asked if usable else None


def calibration_of(run: str, source: str) -> str:
    """The calibration that stage 4 read for an artifact of a run directory: its own, or another run's."""
    inputs = resolved(run, list(read_record(source, "04_align.py")["inputs"]))
    return next(path for path in inputs if os.path.basename(path) == "calibration")


def basis_text(directory: str, alignment: dict) -> torch.Tensor:
    """The first tokens of a calibration, [n, T], which must be of the source model."""
    calibration, (sequences, length) = Calibration(directory), BASIS_TEXT
    check_same_model(directory, alignment["model"], calibration.model)
    return calibration.tokens()[:sequences, :length]


def check_export(directory: str, expected: list[torch.Tensor], tokens: torch.Tensor, dtype: torch.dtype,
                 layout: str | None) -> float:
    """The largest difference of an export's logits for tokens [n, T] from the expected ones, also printed.

    Raises UserError if it is more than rounding in float32, and for logits in float16 that are not finite.
    """
    loaded = Layers(directory, torch.float64 if layout else torch.float32, "cpu", layerwise=True)
    difference = max_difference(expected, loaded.logits(tokens))
    if dtype == torch.float16:  # it overflows beyond 65504, where weights fit and hidden states do not
        half = Layers(directory, dtype, "cpu", layerwise=True)
        require_finite((float(rows.abs().max()) for rows in half.logits(tokens)), "the export", half.model)
    if dtype == torch.float32:
        relative = ROUNDED if layout else LOGIT_TOLERANCE
        allowed = relative * max(1.0, *(float(logits.abs().max()) for logits in expected))
        require_close("the export, loaded back, differs from the student", difference, allowed)
    print(f"check   what was read against export, loaded back as {dtype}: max |logit difference| "
          f"{difference:.2e}")
    return difference


@torch.no_grad()
def main():
    args = parse()
    source = os.path.join(args.run, "merged" if args.untrained else "aligned")
    training = None if args.untrained else os.path.join(args.run, flags.named("train", args.name))
    output = os.path.join(args.run, flags.named("gqa", args.name))
    calibration = calibration_of(args.run, source) if args.cache_basis else None
    read = [path for path in (training, source, calibration) if path]
    started = begin_stage("06_export.py", args, output, inputs=input_digests(args.run, read))
    trained, alignment = read_records(training, source)
    refuse_own_source(alignment["model"], output)
    kv_heads = alignment["summary"]["kv_heads"]
    config = merged_config(load_config(source), kv_heads)  # with the dtype of its weights
    layout, dtype = usable_layout(args.cache_basis, config), weight_dtype(args.dtype, config)
    weights = chosen_weights(training, trained) if trained else None
    # in another basis float32 rounds other products: in float64 only the weights' rounding is seen
    layers = Layers(weights.path if trained else source, torch.float64 if layout else torch.float32, "cpu",
                    layerwise=True, config=config, weights=weights)
    tokens = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with write_directory(output) as aside:
        with CheckpointWriter(aside, config, dtype, source) as writer:
            text = basis_text(calibration, alignment) if layout else None
            expected, errors = write_layers(writer, layers, tokens, layout, text)
        difference = check_export(aside, expected, tokens, dtype, layout)
        summary = {"dtype": str(dtype), "max_logit_difference": difference,
                   "class": type(layers.model).__name__, "peak_memory_gib": peak_memory()}
        if layout:
            summary["cache_basis"] = {"layout": layout} | errors
            keys, values = map(mean, errors.values())
            print(f"basis   a q4_0 cache, {layout}: error of scores x {keys:.3f}, of values x {values:.3f}")
        if trained:
            step = checkpoints.step_of(weights.path)
            summary |= {"step": step, OPEN_MASKS: trained["summary"].get(OPEN_MASKS)}
            summary |= heldout_at(training, step)
        export = started.record(alignment["model"], summary)
        model_card.write(aside, alignment, trained, export, bool(load_tokenizer(aside).chat_template))
        write_record(aside, without_paths(export))
    parameters = sum(parameter.numel() for parameter in layers.model.parameters())
    print(f"wrote   {output}\n06_export: {summary['class']}, {config.num_attention_heads} heads, {kv_heads} "
          f"kv heads, {parameters} parameters in {started.clock()} s, peak host memory "
          f"{summary['peak_memory_gib']} GiB")


if __name__ == "__main__":
    run_stage(main)

"""Stage 1: run text through the model and collect statistics of its key and value heads.

Reads   a checkpoint of a supported family (docs/families.md) with at least two key/value heads, and text;
        or a GGUF file, dequantized once into RUN/source/, which later stages read
Writes  RUN/calibration/: one safetensors file per layer with the Gram matrices of all heads, raw and
        unit-norm, keys before RoPE; mean keys and the Grams of queries and W_O for closed-form merging; and
        the raw head vectors of --sample-tokens tokens, to recompute Eq. 2-22 directly

    python 01_calibrate.py                                              # the demo model, in common/data/
    python 01_calibrate.py --run runs/llama2-7b --model meta-llama/Llama-2-7b-hf --text c4
    python 01_calibrate.py --run runs/smollm2 --model SmolLM2-135M-Instruct.Q4_1.gguf --text FILE.txt
    python 01_calibrate.py --run runs/tiny --model DIR --text FILE.txt --sequences 4 --length 64   # seconds
    python 01_calibrate.py --run runs/llama2-7b --model DIR --layerwise           # 7B in 3 GiB of memory

By default 128 sequences of 2048 tokens from C4 (the first, as in the authors' code; the paper: random ones),
shorter if the model has fewer positions.
The KV cache is never stored: a 7B model's statistics take 7 GiB, its 16-bit cache would take 128. The text
passes through the model layer by layer; with --layerwise only the current layer is in memory, and the hidden
states are kept in a temporary file in RUN (sequences x length x hidden x 4 bytes). Both modes write the same
bytes.
"""

import os

import torch

from common import models
from common.artifacts import claim, make_record, write_layer, write_record
from common.cli import Clock, UserError, device, peak_memory, positive, run_stage, stage_parser
from common.data.demo import resolve_model
from common.data.text import load_tokens, sequence_length
from common.files import write_directory
from common.gguf_files import dequantize
from common.layers import Layers
from common.method.rope import free_pairs
from common.method.stats import LayerStats, output_gram
from common.progress import Progress

LENGTH = 2048  # tokens per sequence in the paper


def parse():
    parser = stage_parser(__doc__)
    parser.section("input")
    parser.add_argument("--model", default=models.DEMO,
                        help="checkpoint directory, hub repository, GGUF file (.gguf), or demo")
    parser.add_argument("--text", default=None,
                        help="c4, demo, or a .txt, .jsonl, .json.gz or .parquet file "
                             "(default: c4; demo for the demo)")
    parser.add_argument("--sequences", type=positive, default=128, help="number of sequences")
    parser.add_argument("--length", type=positive, default=None,
                        help=f"tokens per sequence (default: {LENGTH}, or the model's limit if lower)")
    parser.add_argument("--bos", action="store_true",
                        help="begin every sequence with the tokenizer's begin-of-sequence token, as in the "
                             "authors' code")
    parser.section("output")
    parser.add_argument("--sample-tokens", type=positive, default=256,
                        help="number of evenly spaced tokens whose raw head vectors are kept")
    parser.section("execution")
    parser.add_argument("--batch", type=positive, default=4, help="sequences per forward pass")
    parser.add_argument("--layerwise", action="store_true", help="hold one decoder layer in memory at a time")
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
                        help="of the forward pass; sums use float64")
    return parser.parse_args()


class Collector:
    """Forward hooks on one layer that accumulate sums over its queries, keys and values, and samples."""

    def __init__(self, layer, name: str, shape: models.Geometry, sampled: torch.Tensor, device: str):
        self.attention, self.name, self.shape = layer.self_attn, name, shape
        self.sampled = sampled  # positions of the sampled tokens in the whole text
        self.stats = LayerStats(shape.kv_heads, shape.head_dim, device)
        self.updates = {"q": self.stats.update_queries, "k": self.stats.update_keys,
                        "v": self.stats.update_values}
        self.samples = {"k": [], "v": []}  # per batch [n, heads, d]
        # before RoPE, which turns pair p of every head by the same angle: conj(z_i[p]) z_j[p] stays the same
        self.hooks = models.watch_heads(self.attention, self._collect)

    def begin(self, start: int, end: int) -> None:
        """Set the position of the next forward pass: tokens start to end - 1 of the whole text."""
        inside = (self.sampled >= start) & (self.sampled < end)
        self.sampled_rows = self.sampled[inside] - start

    def _collect(self, letter: str, vectors: torch.Tensor) -> None:
        heads = vectors.detach().unflatten(-1, (-1, self.shape.head_dim)).flatten(0, -3)
        if not torch.isfinite(heads.sum(dtype=torch.float32)):
            raise UserError(f"NaN or Inf in the output of {self.name}.self_attn.{letter}_proj")
        self.updates[letter](heads)
        if letter in self.samples:
            self.samples[letter].append(heads[self.sampled_rows].float().cpu())

    def finish(self) -> dict[str, torch.Tensor]:
        """Remove the hooks and return the tensors of this layer's file."""
        for hook in self.hooks:
            hook.remove()
        tensors = self.stats.tensors()
        tensors |= {f"sample.{kind}": torch.cat(self.samples[kind[0]]) for kind in ("key", "value")}
        tensors["key.free"] = free_pairs(self.attention)
        tensors["key.joint_norm"] = torch.tensor(models.norms_jointly(self.attention.config))
        weight = self.attention.o_proj.weight
        tensors["output.gram"] = output_gram(weight, self.shape.kv_heads, self.shape.head_dim).cpu()
        return tensors


def collect(layers: Layers, shape: models.Geometry, tokens: torch.Tensor, args):
    """Run the text, tokens [sequences, length], through the model once and yield each layer's tensors."""
    batches, length = tokens.split(args.batch), tokens.shape[1]
    samples = min(args.sample_tokens, tokens.numel())
    sampled = torch.linspace(0, tokens.numel() - 1, samples).long().unique()
    hidden = layers.embed(batches, args.run)
    with Progress(total=shape.layers * len(batches), desc="calibrating", unit="batch") as bar:
        for index in range(shape.layers):
            with layers.layer(index) as layer:
                collector = Collector(layer, f"model.layers.{index}", shape, sampled, layers.device)
                for number, batch in enumerate(batches):
                    start = number * args.batch * length
                    collector.begin(start, start + batch.numel())
                    hidden[number] = layers.run(layer, hidden[number])
                    bar.update()
                tensors = collector.finish()
                rotary = layers.model.model.rotary_emb
                tensors["rope.frequencies"] = models.rope_frequencies(rotary, layer.self_attn)
            yield tensors


@torch.no_grad()
def main():
    args, clock = parse(), Clock()
    for half in ("bf16", "fp16"):  # products are summed in float32
        setattr(torch.backends.cuda.matmul, f"allow_{half}_reduced_precision_reduction", False)
    output = os.path.join(args.run, "calibration")
    claim("01_calibrate.py", args, output)

    if args.model.endswith(".gguf"):
        path = dequantize(args.model, os.path.join(args.run, "source"), args.force)
    else:
        path = resolve_model(args.model)
    config = models.load_config(path)
    models.require_convertible(path, config)
    length = sequence_length(args.length, LENGTH, config.max_position_embeddings, least=1 + args.bos)
    model, shape = models.describe(path, args.model), models.geometry(config)
    print(f"reads   {path}: {shape.layers} layers, {shape.heads} heads of {shape.head_dim}, "
          f"{shape.kv_heads} key/value heads")
    compute_device = models.pick_device(args.device)
    layers = Layers(path, getattr(torch, args.dtype), compute_device, layerwise=args.layerwise)
    if args.text is None:  # resolved here because stage 4 takes it from the record
        _, args.text = models.default_sources(args.model == models.DEMO)
    tokens, text = load_tokens(args.text, models.load_tokenizer(path), args.sequences, length, bos=args.bos)
    print(f"reads   {text}; {tokens.numel()} tokens")

    with write_directory(output) as aside:
        for index, tensors in enumerate(collect(layers, shape, tokens, args)):
            write_layer(aside, index, tensors)
        summary = {
            "tokens": tokens.numel(),
            "sequences": args.sequences,
            "length": length,
            "text": text,
            "sampled_tokens": len(tensors["sample.key"]),
            "positions": config.max_position_embeddings,
            "peak_memory_gib": peak_memory(),
        }
        # last: it has the sha256 of every other file
        write_record(aside, make_record("01_calibrate.py", args, model, [], summary, clock()))
    print(f"wrote   {output}")
    print(f"01_calibrate: {tokens.numel()} tokens, {shape.layers} layers, {shape.kv_heads} key/value heads "
          f"in {clock()} s, peak host memory {summary['peak_memory_gib']} GiB")


if __name__ == "__main__":
    run_stage(main)

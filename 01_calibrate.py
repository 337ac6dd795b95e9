"""Stage 1: run text through the model and keep how its key and value heads move together.

Reads   a checkpoint of the Llama, Mistral, Qwen2 or Qwen3 family with at least two key/value heads, and text
Writes  RUN/calibration/: a file per layer with the Gram matrices of all heads, raw and length-1, keys before
        RoPE; what closed-form merging weighs them by (query energies, Grams of W_O); and --sample-tokens raw head
        vectors, from which Eq. 2-22 can be recomputed directly

    python 01_calibrate.py                                                     # the embedded model, made on first use
    python 01_calibrate.py --run runs/llama2-7b --model meta-llama/Llama-2-7b-hf --text c4
    python 01_calibrate.py --run runs/tiny --model DIR --text FILE.txt --sequences 4 --length 64     # seconds on a CPU
    python 01_calibrate.py --run runs/llama2-7b --model DIR --layerwise                              # 7B in 6 GiB of memory

The paper's calibration is 128 sequences of 2048 tokens of C4, which is the default; where the model is made for fewer
positions, its own limit is the length. No cache is stored: a 7B model's statistics are 5 GB instead of 128 GiB. The text passes
through one layer after the other; with --layerwise only that layer is in memory, and hidden states wait in a temporary file in
RUN (sequences x length x hidden x 4 bytes). The same bytes come out.
"""

import os

import torch
from tqdm import tqdm

from common.artifacts import claim, record, write_directory, write_layer, write_record
from common.cli import Clock, UserError, peak_memory, positive, run_stage, stage_parser
from common.data.demo import resolve_model
from common.data.text import load_tokens
from common.layers import Layers
from common.method.rope import free_pairs
from common.method.stats import LayerStats, output_gram
from common.models import (
    DEMO,
    Geometry,
    describe,
    geometry,
    load_config,
    load_tokenizer,
    pick_device,
    require_convertible,
)


def parse():
    parser = stage_parser(__doc__)
    parser.section("what is calibrated")
    parser.add_argument("--model", default=DEMO, help="checkpoint directory, hub repository, or demo")
    parser.add_argument("--text", default=None, help="c4, demo, or a .txt, .jsonl, .json.gz file (default: c4; demo for the demo model)")
    parser.add_argument("--sequences", type=positive, default=128, help="number of sequences")
    parser.add_argument("--length", type=positive, default=None, help="tokens per sequence (default: 2048, or the model's own limit if lower)")
    parser.section("what is kept")
    parser.add_argument("--sample-tokens", type=positive, default=256, help="tokens, evenly spread, whose raw head vectors are kept")
    parser.section("how it runs")
    parser.add_argument("--batch", type=positive, default=4, help="sequences per forward pass")
    parser.add_argument("--layerwise", action="store_true", help="hold one decoder layer in memory at a time")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the forward pass; sums are float64")
    return parser.parse_args()


class Collector:
    """Forward hooks on one layer's q, k and v_proj: each batch goes into LayerStats, sampled keys and values are kept as they are."""

    def __init__(self, layer, index: int, shape: Geometry, sampled: torch.Tensor, device: str):
        self.attention, self.index, self.shape, self.sampled = layer.self_attn, index, shape, sampled
        self.stats = LayerStats(shape.kv_heads, shape.head_dim, device)
        self.samples = {"key": [], "value": []}  # of [n, heads, d]
        updates = {"query": self.stats.update_queries, "key": self.stats.update_keys, "value": self.stats.update_values}
        self.hooks = [getattr(self.attention, f"{kind[0]}_proj").register_forward_hook(self._hook(kind, update)) for kind, update in updates.items()]

    def begin(self, start: int, end: int) -> None:
        """The next forward pass holds tokens start .. end - 1 of the whole text."""
        inside = (self.sampled >= start) & (self.sampled < end)
        self.here = self.sampled[inside] - start

    def _hook(self, kind: str, update):
        def collect(module, inputs, output):
            heads = output.detach().view(-1, output.shape[-1] // self.shape.head_dim, self.shape.head_dim)
            if not torch.isfinite(heads.sum(dtype=torch.float32)):
                raise UserError(f"NaN or Inf in the output of model.layers.{self.index}.self_attn.{kind[0]}_proj")
            update(heads)
            if kind in self.samples:
                self.samples[kind].append(heads[self.here].float().cpu())

        return collect

    def finish(self) -> dict[str, torch.Tensor]:
        """Take the hooks away; what calibration/ holds of this layer."""
        for hook in self.hooks:
            hook.remove()
        tensors = self.stats.tensors() | {f"sample.{kind}": torch.cat(parts) for kind, parts in self.samples.items()}
        tensors["key.free"] = free_pairs(self.attention)
        tensors["output.gram"] = output_gram(self.attention.o_proj.weight, self.shape.kv_heads, self.shape.head_dim).cpu()
        return tensors


def collect(layers: Layers, shape: Geometry, tokens: torch.Tensor, args):
    """The tensors of layer after layer, from one pass of the text through the model. tokens: [sequences, length]."""
    batches, length = tokens.split(args.batch), tokens.shape[1]
    sampled = torch.linspace(0, tokens.numel() - 1, min(args.sample_tokens, tokens.numel())).long().unique()
    hidden = layers.embed(batches, args.run)
    with tqdm(total=shape.layers * len(batches), desc="calibrating", unit="batch") as bar:
        for index in range(shape.layers):
            with layers.layer(index) as layer:
                collector = Collector(layer, index, shape, sampled, layers.device)
                for number, batch in enumerate(batches):
                    start = number * args.batch * length
                    collector.begin(start, start + batch.numel())
                    hidden[number] = layers.run(layer, hidden[number])
                    bar.update()
                tensors = collector.finish()
            yield tensors


@torch.no_grad()
def main():
    args, clock = parse(), Clock()
    output = os.path.join(args.run, "calibration")
    claim("01_calibrate.py", args, output)
    path = resolve_model(args.model)
    config = load_config(path)
    require_convertible(path, config)
    described, shape = describe(path, args.model), geometry(config)
    print(f"reads   {path}: {shape.layers} layers, {shape.heads} heads of {shape.head_dim}, {shape.kv_heads} key/value heads")

    layers = Layers(path, getattr(torch, args.dtype), pick_device(args.device), one_by_one=args.layerwise)
    length = args.length or min(2048, layers.config.max_position_embeddings)
    args.text = args.text or (DEMO if args.model == DEMO else "c4")  # as it was, for the record: stage 4 reads it there
    tokens, said = load_tokens(args.text, load_tokenizer(path), args.sequences, length)
    print(f"reads   {said}; {tokens.numel()} tokens")

    with write_directory(output) as aside:
        for index, tensors in enumerate(collect(layers, shape, tokens, args)):
            write_layer(aside, index, tensors)
        summary = {"tokens": tokens.numel(), "sequences": args.sequences, "length": length, "text": said,
                   "sampled_tokens": len(tensors["sample.key"]), "peak_memory_gib": peak_memory()}
        write_record(aside, record("01_calibrate.py", args, described, [], summary, clock()))
    print(f"wrote   {output}")
    print(f"01_calibrate: {tokens.numel()} tokens, {shape.layers} layers, {shape.kv_heads} key/value heads in {clock()} s, "
          f"at most {summary['peak_memory_gib']} GiB of host memory")


if __name__ == "__main__":
    run_stage(main)

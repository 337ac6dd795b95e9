"""Stage 1: run text through the model and keep how its key and value heads move together.

Reads   a Llama-family checkpoint with multi-head attention, and text
Writes  RUN/calibration.safetensors (+ .json): per layer the Gram matrices of all heads, raw and length-1, keys before
        RoPE; what closed-form merging weighs them by (query energies, Grams of W_O); and --sample-tokens raw head
        vectors, from which Eq. 2-22 can be recomputed directly

    python 01_calibrate.py                                                     # the embedded model, made on first use
    python 01_calibrate.py --run runs/llama2-7b --model meta-llama/Llama-2-7b-hf --text c4
    python 01_calibrate.py --run runs/tiny --model DIR --text FILE.txt --sequences 4 --length 64     # seconds on a CPU

The paper's calibration is 128 sequences of 2048 tokens of C4, which is the default; where the model is made for fewer
positions, its own limit is the length. No cache is stored: a 7B model's statistics are 5 GB instead of 128 GiB.
"""

import os

import torch
from tqdm import tqdm

from common.artifacts import record, refuse_overwrite, write_tensors
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.models import DEMO, describe, geometry, load_model, load_tokenizer, pick_device, require_mha, resolve_model
from common.stats import LayerStats, output_gram
from common.text import load_tokens


def parse():
    parser = stage_parser(__doc__)
    # what is calibrated
    parser.add_argument("--model", default=DEMO, help="checkpoint directory, hub repository, or demo")
    parser.add_argument("--text", default=None, help="c4, demo, or a .txt, .jsonl, .json.gz file (default: c4; demo for the demo model)")
    parser.add_argument("--sequences", type=positive, default=128, help="number of sequences")
    parser.add_argument("--length", type=positive, default=None, help="tokens per sequence (default: 2048, or the model's own limit if lower)")
    # what is kept
    parser.add_argument("--sample-tokens", type=positive, default=256, help="tokens, evenly spread, whose raw head vectors are kept")
    # how it runs
    parser.add_argument("--batch", type=positive, default=4, help="sequences per forward pass")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the forward pass; sums are float64")
    return parser.parse_args()


class Collector:
    """Forward hooks on every q, k and v_proj: each batch goes into LayerStats, sampled keys and values are kept as they are."""

    def __init__(self, model, shape, tokens: int, samples: int):
        self.shape = shape
        device = model.device
        self.layers = [LayerStats(shape.heads, shape.head_dim, device) for _ in range(shape.layers)]
        self.sampled = torch.linspace(0, tokens - 1, min(samples, tokens)).long().unique()
        self.samples = {}  # tensor name -> list of [n, H, d]
        self.outputs = {f"layers.{index}.output.gram": output_gram(layer.self_attn.o_proj.weight, shape.heads).cpu()
                        for index, layer in enumerate(model.model.layers)}
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.register_forward_hook(self._hook(index, "query", self.layers[index].update_queries))
            layer.self_attn.k_proj.register_forward_hook(self._hook(index, "key", self.layers[index].update_keys))
            layer.self_attn.v_proj.register_forward_hook(self._hook(index, "value", self.layers[index].update_values))

    def begin(self, start: int, end: int) -> None:
        """The next forward pass holds tokens start .. end - 1 of the whole text."""
        inside = (self.sampled >= start) & (self.sampled < end)
        self.here = self.sampled[inside] - start

    def _hook(self, layer: int, kind: str, update):
        def collect(module, inputs, output):
            heads = output.detach().view(-1, self.shape.heads, self.shape.head_dim)
            if not torch.isfinite(heads.sum(dtype=torch.float32)):
                raise UserError(f"NaN or Inf in the output of model.layers.{layer}.self_attn.{kind[0]}_proj")
            update(heads)
            if kind != "query":
                self.samples.setdefault(f"layers.{layer}.sample.{kind}", []).append(heads[self.here].float().cpu())

        return collect

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {name: torch.cat(parts) for name, parts in self.samples.items()} | self.outputs
        for index, layer in enumerate(self.layers):
            tensors |= layer.tensors(index)
        return tensors


@torch.no_grad()
def main():
    args, clock = parse(), Clock()
    output = os.path.join(args.run, "calibration.safetensors")
    refuse_overwrite(output, args.force)
    path = resolve_model(args.model)
    described = describe(path, args.model)
    device = pick_device(args.device)
    model = load_model(path, getattr(torch, args.dtype), device)
    shape = geometry(model.config)
    require_mha(path, shape)
    print(f"reads   {path}: {shape.layers} layers, {shape.heads} heads of {shape.head_dim}")

    length = args.length or min(2048, model.config.max_position_embeddings)
    args.text = args.text or (DEMO if args.model == DEMO else "c4")  # as it was, for the record: stage 4 reads it there
    tokens, said = load_tokens(args.text, load_tokenizer(path), args.sequences, length)
    print(f"reads   {said}; {tokens.numel()} tokens")

    collector = Collector(model, shape, tokens.numel(), args.sample_tokens)
    for start in tqdm(range(0, len(tokens), args.batch), desc="calibrating", unit="batch"):
        batch = tokens[start : start + args.batch]
        collector.begin(start * length, start * length + batch.numel())
        model.model(input_ids=batch.to(device), use_cache=False)

    energy = [float(torch.einsum("iaa->", layer.value["raw"][_diagonal(shape.heads)])) for layer in collector.layers]
    summary = {"tokens": tokens.numel(), "sequences": args.sequences, "length": length, "text": said,
               "sampled_tokens": len(collector.sampled),
               "mean_squared_value": [total / tokens.numel() / shape.heads / shape.head_dim for total in energy]}
    write_tensors(output, collector.tensors(), record("01_calibrate.py", args, described, [], summary, clock()))
    print(f"wrote   {output} ({os.path.getsize(output) / 2**20:.1f} MiB)")
    print(f"01_calibrate: {tokens.numel()} tokens, {shape.layers} layers, {shape.heads} heads in {clock()} s")


def _diagonal(heads: int) -> torch.Tensor:
    """Positions of the blocks i = i among the packed blocks i <= j."""
    rows, columns = torch.triu_indices(heads, heads)
    return (rows == columns).nonzero()[:, 0]


if __name__ == "__main__":
    run_stage(main)

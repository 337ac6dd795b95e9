"""How fast a model generates its own text: tokens per second, all rows side by side, as stage 5 does it.

    python -m bench.generating                     # a small Llama on a CPU, seconds
    python -m bench.generating --device cuda --shape smollm2     # 135M parameters, rows of 512 tokens

The model is random. A piece is generated to capture the graphs of a GPU, the next is timed. The last line is
JSON, with the milliseconds of a step at a quarter of the length and at its end.
"""

import json
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import machine, timed
from common.data.decoding import Decoder
from common.data.generate import DTYPES, TEXT, Rows, rows_at_once, sample
from common.run.errors import run_stage
from common.run.flags import Parser, positive

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, vocabulary
    "small": (64, 172, 2, 4, 4, 500),
    "smollm2": (576, 1536, 30, 9, 3, 49152),
    "1.3b": (2048, 5504, 24, 16, 16, 32000),
}
STEPS = 10  # that are timed at a position


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--shape", choices=SHAPES, default="small")
    flags.add_argument("--device", default="cpu", help="cpu (float32) or cuda (bfloat16)")
    flags.add_argument("--length", type=positive, default=512, help="tokens of a row")
    flags.add_argument("--rows", type=positive, help="side by side (default: as stage 5)")
    return flags.parse_args()


def random_model(args):
    """The model, and the rows that stage 5 would generate side by side."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[args.shape]
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, head_dim=64,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary)
    torch.manual_seed(0)
    device = torch.device(args.device)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(DTYPES[device.type]).eval()
    if args.rows:
        return model, args.rows
    with tempfile.TemporaryDirectory() as home:
        path = os.path.join(home, "model")
        model.save_pretrained(path)
        return model, rows_at_once(path, config, args.length, device)


def step_ms(decoder: Decoder, position: int) -> float:
    """Milliseconds of a step at a position."""
    numbers = torch.full_like(decoder.numbers, 0.5)
    decoder.next(position, decoder.drawn, numbers)  # its graph may be new

    def steps() -> None:
        for _ in range(STEPS):
            decoder.next(position, decoder.drawn, numbers)

    return round(1e3 * timed(decoder.model.device.type, steps)[1] / STEPS, 3)


def main() -> None:
    args = parse()
    model, rows = random_model(args)
    decoder, generator = Decoder(model, rows, args.length), torch.Generator(model.device).manual_seed(0)

    def piece():
        return sample(decoder, Rows(TEXT, [[1]] * rows, args.length, model.device), generator)

    piece()
    tokens, seconds = timed(args.device, piece)
    values = {"tokens_per_s": round(tokens.size / seconds), "rows": rows,
              "early_step_ms": step_ms(decoder, args.length // 4),
              "last_step_ms": step_ms(decoder, args.length - 1)}
    if args.device != "cpu":
        values["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    print(json.dumps(values | {"settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    run_stage(main)

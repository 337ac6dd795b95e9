"""A Llama of random weights, in bfloat16 and with the demo model's tokenizer: what stages take at its size.

    python -m bench.random_model --shape 7b --device cuda --out runs/random-7b     # 13 GB
"""

import torch
from transformers import LlamaForCausalLM

from bench.train_step import SHAPES, model_config
from common.data.demo import DEMO, resolve_model
from common.models.load import load_tokenizer
from common.run.artifact import write_directory
from common.run.errors import run_stage
from common.run.flags import Parser, positive


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--shape", choices=SHAPES, default="demo")
    flags.add_argument("--layers", type=positive, help="instead of the shape's")
    flags.add_argument("--device", default="cpu", help="to draw the weights on")
    flags.add_argument("--out", required=True, metavar="DIR", help="of the checkpoint")
    return flags.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = LlamaForCausalLM(model_config(args))
    with write_directory(args.out) as aside:
        model.save_pretrained(aside)
        load_tokenizer(resolve_model(DEMO)).save_pretrained(aside)
    print(f"wrote   {args.out}: {model.num_parameters():,} random weights")


if __name__ == "__main__":
    run_stage(main)

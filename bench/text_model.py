"""The text model of the benches: a 4.7M-parameter Llama with 8 heads, trained on a few MB of plain text.

    OMP_NUM_THREADS=1 python -m bench.text_model --text FILE.txt ... --out runs/text-model    # 10 minutes
    python -m bench.merging --model runs/text-model --text runs/text-model/train.txt \\
        --heldout runs/text-model/heldout.txt --name text

Every file is cut into pieces at ends of lines. The last tenth of each file is held out; the pieces of the
files take turns, so that any long stretch of train.txt or heldout.txt has all of them. Writes a checkpoint
with its tokenizer, train.txt and heldout.txt to OUT. The same command gives the same bytes on the same
machine at the same OMP_NUM_THREADS.
"""

import argparse
import json
import math
import os

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.machine import machine
from common.cli import run_stage
from common.companions import save_new
from common.data.text import load_tokens
from common.evaluate import perplexity
from common.files import write_text
from common.progress import Progress

PIECES, HELD_OUT = 100, 10  # pieces of each file; how many of them, the last ones, are held out
VOCAB, EOS = 4096, "<|eos|>"
WIDTH, MLP, LAYERS, HEADS, POSITIONS = 256, 512, 4, 8, 2048
MUON_RATE, ADAM_RATE = 0.02, 3e-3  # for the layers' matrices; for embeddings, output head and norms
WEIGHT_DECAY = 0.1  # of the layers' matrices: a few passes over little text overfit
WARMUP, DECAY = 20, 0.5  # steps of linear warm-up; final share of the steps with linear decay to zero


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="plain text, UTF-8")
    parser.add_argument("--out", default="runs/text-model")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=2, help="rows of --length tokens per step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def split(texts: list[str]) -> tuple[str, str]:
    """(train, heldout): the pieces of all texts in turns, the last tenth of each text held out."""
    pieces = [cut(text) for text in texts]
    rounds = ["".join(turn) for turn in zip(*pieces, strict=True)]
    return "".join(rounds[:-HELD_OUT]), "".join(rounds[-HELD_OUT:])


def cut(text: str) -> list[str]:
    """PIECES pieces of about the same length, each ending at the end of a line."""
    ends = [text.find("\n", len(text) * number // PIECES) + 1 or len(text) for number in range(1, PIECES)]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCAB tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(text.splitlines(keepends=True), trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, clean_up_tokenization_spaces=False)


def new_model(tokenizer, seed: int) -> LlamaForCausalLM:
    """The model before training."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=POSITIONS,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def make_optimizers(model, steps: int) -> list[tuple]:
    """(optimizer, schedule) pairs: Muon for the layers' matrices, AdamW for the rest."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in chosen]
    optimizers = [torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY),
                  torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)]

    def rate(step):
        return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))

    return [(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)) for optimizer in optimizers]


def train(model, stream: torch.Tensor, args) -> None:
    """Train on random rows of the token stream [n]; in bfloat16, with float32 weights."""
    generator = torch.Generator().manual_seed(args.seed)
    optimizers = make_optimizers(model, args.steps)
    with Progress(range(args.steps), desc="training", unit="step") as bar:
        for _ in bar:
            starts = torch.randint(len(stream) - args.length, (args.batch, 1), generator=generator)
            rows = stream[starts + torch.arange(args.length)]  # [batch, length]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            for optimizer, schedule in optimizers:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")


def main():
    args = parse()
    texts = []
    for path in args.text:
        with open(path, encoding="utf-8") as file:
            texts.append(file.read())
    os.makedirs(args.out, exist_ok=True)
    train_text, heldout_text = split(texts)
    heldout_path = os.path.join(args.out, "heldout.txt")
    write_text(os.path.join(args.out, "train.txt"), train_text)
    write_text(heldout_path, heldout_text)
    tokenizer = make_tokenizer(train_text)
    model = new_model(tokenizer, args.seed)
    stream = torch.tensor(tokenizer(train_text, verbose=False)["input_ids"])
    print(f"{model.num_parameters():,} parameters, {len(stream):,} tokens to train on", flush=True)
    train(model, stream, args)
    save_new(model.eval(), tokenizer, args.out)
    heldout, _ = load_tokens(heldout_path, tokenizer, 16, args.length)
    print(json.dumps({"heldout_loss": round(math.log(perplexity(model, heldout)), 4), "settings": vars(args),
                      "parameters": model.num_parameters(), "tokens": len(stream),
                      "machine": machine("cpu")}))


if __name__ == "__main__":
    run_stage(main)

"""Train a small skipless Llama on text, with the training engine of 05_prune_train.py.

Reads   the shape and the tokenizer of a checkpoint (--model), a text
Writes  RUN/serial/ or RUN/parallel/   a skipless checkpoint

    python -m related.skipless.train                 # a minute on two cores: the embedded model's shape and text
    python -m related.skipless.train --parallel
    torchrun --nproc-per-node 2 -m related.skipless.train --run-dir runs/skipless

Stopped and called again with the same flags, it goes on. Without skip connections and norms a random start does not train: signals die or grow from block to block. So every block starts
near the identity: orthogonal matrices; K equal to Q and sharp, so that a token attends to itself most; a gate whose bias holds it
open, before an FFN that takes back what it did; and each block's output scaled to mean square 1 on the text.
"""

import json
import os
import shutil
import warnings
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from common.artifacts import RECORD, record, refuse_overwrite, write_directory, write_json
from common.cli import Clock, positive, run_stage, stage_parser
from common.data.demo import resolve_model
from common.data.tasks import Sample
from common.data.text import load_tokens
from common.evaluate import perplexity
from common.layers import run_layer
from common.method.losses import chunked, cross_entropy
from common.models import (
    DEMO,
    describe,
    fingerprint,
    load_config,
    load_model,
    load_tokenizer,
    require_convertible,
)
from common.training import checkpoints
from common.training.engine import Job, Phase, Plan, train
from common.training.sharding import Execution, Ranks, build, joined_ranks
from related.skipless.algebra import condition_numbers
from related.skipless.modeling import SkiplessConfig

SHARPNESS = 1.5  # scale of Q and K at the start: at 1 the average of a hundred tokens outweighs the token itself
GATE, GATE_BIAS = 0.3, 1.0  # scale of the gate's weights and their bias: open, and little moved by the input
SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
        "rope_parameters", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id")
LOSS_CHUNK = 512

# A block that ends in a linear layer returns a view of its product. Nothing here changes one in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")


def training_flags(parser) -> None:
    """The flags that say how a skipless model is trained."""
    parser.section("training the skipless model")
    parser.add_argument("--text", default=DEMO, help="c4, demo, a .txt, .jsonl or .json.gz file")
    parser.add_argument("--heldout", default=DEMO, help="text of the perplexity and the proofs; demo: its held-out part")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--batch", type=positive, default=8, help="sequences a step, all ranks together")
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's, with linear warm-up and cosine to 0")
    parser.add_argument("--warmup", type=positive, default=20, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=positive, default=25, help="steps between printed lines")


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=DEMO, help="checkpoint whose shape and tokenizer are taken")
    parser.add_argument("--parallel", action="store_true", help="attention beside the FFN instead of before it")
    training_flags(parser)
    return parser.parse_args()


def skipless_config(source, parallel: bool, kv_heads: int | None = None, **changes) -> SkiplessConfig:
    """A skipless model's config, of the shape of a Llama-like one."""
    same = {name: getattr(source, name) for name in SAME} | {"num_key_value_heads": kv_heads or source.num_key_value_heads}
    return SkiplessConfig(**(same | {"head_dim": getattr(source, "head_dim", None), "parallel": parallel} | changes))


@torch.no_grad()
def initialise(model, ids: torch.Tensor, seed: int) -> None:
    """Start every block near the identity, in place; see above. model: with biases in its FFN; ids: [n, T] of the text."""
    generator = torch.Generator().manual_seed(seed)
    model.model.embed_tokens.weight.normal_(generator=generator)
    model.lm_head.weight.normal_(std=0.02, generator=generator)  # small logits
    hidden = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for weight in (attention.q_proj.weight, attention.v_proj.weight, attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight):
            nn.init.orthogonal_(weight, generator=generator)
        attention.q_proj.weight.mul_(SHARPNESS)
        heads = attention.q_proj.weight.unflatten(0, (-1, attention.num_key_value_groups, attention.head_dim))
        attention.k_proj.weight.copy_(heads[:, 0].flatten(0, 1))
        mlp.gate_proj.weight.mul_(GATE)
        mlp.down_proj.weight.copy_(mlp.up_proj.weight.T)
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            nn.init.constant_(linear.bias, GATE_BIAS if linear is mlp.gate_proj else 0.0)
        hidden = run_layer(model, layer, hidden)
        size = hidden.square().mean().sqrt()
        hidden /= size
        for writer in (attention.o_proj, mlp.down_proj) if layer.parallel else (mlp.down_proj,):
            writer.weight.div_(size)


class NextToken(Phase):
    """Cross-entropy of every next token."""

    def __init__(self, trainee):
        self.trainee = trainee

    def row_loss(self, row):
        def loss(kind, at, logits):
            return (cross_entropy(logits.float(), row.targets[at]) * row.all_weight[at]).sum()

        pieces = [("all", at) for at in row.all_weight.nonzero()[:, 0].split(LOSS_CHUNK)]
        return self.trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), {}


def conditions(model) -> list[dict[str, float]]:
    """Per layer the condition numbers of its square attention matrices."""
    return [condition_numbers(layer.self_attn) for layer in model.model.layers]


def train_skipless(args, source: str, parallel: bool, ranks: Ranks, clock: Clock) -> bool:
    """Train one model and write RUN/serial/ or RUN/parallel/. False when stopped by a signal, after saving.

    args: those of training_flags, and run; source: the checkpoint that gives shape and tokenizer.
    """
    name = "parallel" if parallel else "serial"
    path = os.path.join(args.run, name)
    directory, tokenizer = path + ".train", load_tokenizer(source)
    start = os.path.join(directory, "start")
    text, said = load_tokens(args.text, tokenizer, args.steps * args.batch, args.length)
    ranks.say(f"reads   {source}: shape and tokenizer; {said}\n{name}: {args.steps} steps of {args.batch} sequences of {args.length} tokens on {ranks.world} {ranks.device.type}")
    plan = Plan(steps=args.steps, batch=args.batch, warmup=args.warmup, clip=1.0, seed=args.seed, tokens_per_microbatch=args.batch * args.length,
                save_steps=None, save_minutes=20, print_every=args.print_every)
    if ranks.first:
        begin(directory, start, skipless_config(load_config(source), parallel, mlp_bias=True), text[: args.batch],
              asdict(plan) | {"lr": args.lr, "length": args.length, "text": args.text, "source": fingerprint(source)})
    dist.barrier()
    saved = checkpoints.newest(directory, ranks)
    trainee = build(load_config(start), ranks, Execution(), None if saved else lambda key: (start, key))
    optimizer = torch.optim.AdamW([{"params": list(trainee.net.parameters()), "initial_lr": args.lr}], betas=(0.9, 0.95), weight_decay=0.0)
    job = Job(trainee, optimizer, directory, ranks)
    if saved:
        checkpoints.load(job, saved)
    samples = [Sample(tuple(row[:-1]), (row[-1],)) for row in text.tolist()]
    if job.step < plan.steps and not train(job, NextToken(trainee), samples, plan):
        return False
    if ranks.first:
        model = load_model(start)
        before = conditions(model)
        model.load_state_dict(checkpoints.whole_weights(checkpoints.steps_saved(directory)[-1]))
        heldout, said = load_tokens(args.heldout, tokenizer, 32, args.length, split="heldout")
        summary = {"perplexity": perplexity(model, heldout), "perplexity_text": said, "conditions_before": before, "conditions_after": conditions(model)}
        with write_directory(path) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            shutil.copy(os.path.join(directory, "metrics.jsonl"), aside)
            write_json(os.path.join(aside, RECORD), record("related/skipless/train.py", args, describe(source), [], summary, clock()))
        shutil.rmtree(directory)
        print(f"wrote   {path}: perplexity {summary['perplexity']:.2f} on held-out text, after {clock()} s")
    dist.barrier()
    return True


def begin(directory: str, start: str, config: SkiplessConfig, ids: torch.Tensor, settings: dict) -> None:
    """Write the untrained model, unless a training with the same settings was begun there: then it goes on."""
    path = os.path.join(directory, "plan.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            if json.load(file) == settings:
                return
    shutil.rmtree(directory, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    initialise(model, ids, settings["seed"])
    model.save_pretrained(start)
    write_json(path, settings)


def main():
    args, clock = parse(), Clock()
    refuse_overwrite(os.path.join(args.run, "parallel" if args.parallel else "serial"), args.force)
    source = resolve_model(args.model)
    require_convertible(source, load_config(source))
    with joined_ranks() as ranks:
        train_skipless(args, source, args.parallel, ranks, clock)


if __name__ == "__main__":
    run_stage(main)

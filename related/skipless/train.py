"""Train small skipless Llamas on text, with the training engine of 05_prune_train.py.

Reads   the shape and the tokenizer of a checkpoint (--model), a text
Writes  RUN/serial/, RUN/parallel/, or with --without q RUN/serial-trained-without-q/   a skipless checkpoint
        RUN/seed-N/, RUN/variants/   with --variants: all of them, and their held-out losses

    python -m related.skipless.train                 # a minute on two cores: the demo model's shape and text
    python -m related.skipless.train --without k     # the paper's Figure 1(c) from scratch: no K and no P
    python -m related.skipless.train --variants 3    # three of each, and of the full model; half an hour
    torchrun --nproc-per-node 2 -m related.skipless.train --run-dir runs/skipless --parallel

Without skip connections and norms signals vanish or explode from block to block. So every block starts close
to the identity: orthogonal matrices; K equal to Q and sharp, so that a token attends mostly to itself; a gate
whose bias keeps it open, before an FFN that undoes its own expansion; each block's output scaled to mean
square 1 on the text. A training that was stopped by a signal exits with 75 (torchrun: 1) and resumes when
called again with the same flags; --force starts over. With --variants the models that exist are kept.
"""

import math
import os
import shutil
import statistics
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from common.data.demo import DEMO, resolve_model
from common.data.documents import EVALUATION, EXPECTED
from common.data.pool import samples_digest
from common.data.rows import Sample
from common.data.text import load_tokens, sequence_length
from common.evaluation.evaluate import perplexity
from common.models import proof, sidecars
from common.models.forward import run_layer
from common.models.load import describe, fingerprint, load_config, load_model, load_tokenizer
from common.reporting.tables import markdown_table
from common.run.artifact import Started, begin_stage, read_record, write_directory, write_record
from common.run.errors import UserError, run_stage
from common.run.files import write_text
from common.run.flags import positive, positive_float, seed, stage_parser
from common.training import checkpoints
from common.training.chunked import next_token_loss
from common.training.engine import STOPPED, Job, Schedule, make_optimizer, steps
from common.training.lines import METRICS
from common.training.sharding import Execution, Ranks, build, joined_ranks
from related.skipless.fold import PROJECTIONS, check_square, conditions
from related.skipless.modeling import SkiplessConfig

STAGE = "related/skipless/train.py"
VARIANTS = {None: "full", "q": "without Q and P", "k": "without K and P", "v": "without V and P"}
SHARPNESS = 1.5  # initial scale of Q and K: at 1 the average over a hundred tokens outweighs the token itself
GATE, GATE_BIAS = 0.3, 1.0  # initial scale of the gate's weights and its bias: open for any input
COPIED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "hidden_act",
          "bos_token_id", "eos_token_id", "pad_token_id")
LOSS_CHUNK = 512  # tokens whose logits are in memory at a time
HELDOUT = 32  # sequences for the perplexity
ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.0}

# A block that ends in a linear layer returns a view of its product. Nothing here changes one in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=DEMO, help="checkpoint that gives shape and tokenizer")
    parser.add_argument("--parallel", action="store_true", help="attention next to the FFN, not before it")
    parser.add_argument("--without", choices=("q", "k", "v"),
                        help="leave out Q, K or V, and P with it, from the start; K and V for MHA only")
    parser.add_argument("--variants", type=positive,
                        help="train the full model and those --without Q, K and V, N seeds from --seed on")
    parser.section("training")
    parser.add_argument("--text", default=DEMO, help=EXPECTED)
    parser.add_argument("--heldout", default=DEMO, help="text of the perplexity, as for --text")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step, over all ranks")
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence, at least 2")
    parser.add_argument("--lr", type=positive_float, default=1e-3,
                        help="AdamW's peak learning rate; linear warm-up, then cosine to 0")
    parser.add_argument("--warmup", type=positive, default=20, help="steps")
    parser.add_argument("--seed", type=seed, default=0, help="random seed")
    parser.add_argument("--print-every", type=positive, default=25, help="steps between printed lines")
    args = parser.parse_args()
    if args.variants and args.without:
        raise UserError(f"--variants: expected no --without, found {args.without}")
    return args


def load_shape(source: str, length: int, without):
    """The config of a checkpoint that gives skipless models their shape.

    Raises UserError unless they can do without these letters, and be trained on sequences of this length.
    """
    config = load_config(source)
    proof.require_convertible(source, config)
    sequence_length(length, length, config.max_position_embeddings, least=2)
    for letter in without:
        check_square(skipless_config(config, False), letter)
    return config


def skipless_config(source, parallel: bool, **changes) -> SkiplessConfig:
    """The config of a skipless model with the shape of a Llama-like one."""
    shape = {name: getattr(source, name, None) for name in COPIED}  # some configs have no head_dim
    return SkiplessConfig(**(shape | {"parallel": parallel} | changes))


@torch.no_grad()
def initialise(model, ids: torch.Tensor, seed: int) -> None:
    """Start every block close to the identity, in place. ids: [n, T] of text.

    model: as transformers initialises it, its FFN with biases, which are 0.
    """
    generator = torch.Generator().manual_seed(seed)
    model.model.embed_tokens.weight.normal_(generator=generator)
    model.lm_head.weight.normal_(std=0.02, generator=generator)  # small logits
    hidden = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        start_near_identity(layer, generator)
        scale = run_layer(model, layer, hidden).square().mean().sqrt()
        layer.mlp.down_proj.weight.div_(scale)
        if layer.parallel:  # without V and P the output is larger, by what attention writes
            writers = [layer.self_attn.o_proj, layer.self_attn.v_proj]
            for linear in [linear for linear in writers if hasattr(linear, "weight")][:1]:
                linear.weight.div_(scale)
        hidden = run_layer(model, layer, hidden)


def start_near_identity(layer, generator: torch.Generator) -> None:
    """Set a block's weights, in place; the scale of its output is left to the caller.

    A removed projection is the identity, a rotation like any other. Where Q or K is removed, the other one is
    SHARPNESS^2 times the identity: the same scores.
    """
    attention, mlp = layer.self_attn, layer.mlp
    for linear in (attention.q_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj):
        if hasattr(linear, "weight"):
            nn.init.orthogonal_(linear.weight, generator=generator)
    q_proj, k_proj = attention.q_proj, attention.k_proj
    sharp = SHARPNESS**2 * torch.eye(attention.config.hidden_size)
    if hasattr(q_proj, "weight"):
        sharp = q_proj.weight.mul_(SHARPNESS) if hasattr(k_proj, "weight") else q_proj.weight.copy_(sharp)
    if hasattr(k_proj, "weight"):
        heads = sharp.unflatten(0, (-1, attention.num_key_value_groups, attention.head_dim))
        k_proj.weight.copy_(heads[:, 0].flatten(0, 1))
    mlp.gate_proj.weight.mul_(GATE)
    mlp.down_proj.weight.copy_(mlp.up_proj.weight.T)
    nn.init.constant_(mlp.gate_proj.bias, GATE_BIAS)


def model_path(run: str, parallel: bool, without: str | None = None) -> str:
    """RUN/serial, RUN/parallel, RUN/serial-trained-without-q, ..."""
    name = "parallel" if parallel else "serial"
    return os.path.join(run, f"{name}-trained-without-{without}" if without else name)


def train_skipless(args, source: str, without: str | None, ranks: Ranks, started: Started) -> bool:
    """Train one model and write model_path. False when a signal stopped it, after saving.

    source: the checkpoint that gives shape and tokenizer; without: "q", "k" or "v", which is then absent from
    the start, and P with it. A stopped training run is resumed; one with other settings raises UserError.
    With force either is moved aside.
    """
    path, tokenizer = model_path(args.run, args.parallel, without), load_tokenizer(source)
    text, description = load_tokens(args.text, tokenizer, args.steps * args.batch, args.length)
    heldout = load_tokens(args.heldout, tokenizer, HELDOUT, args.length, EVALUATION)
    samples = [Sample(row[:-1], row[-1:]) for row in text.tolist()]
    ranks.say(f"reads   {source}: shape and tokenizer; {description}")
    ranks.say(f"{os.path.basename(path)}: {args.steps} steps of {args.batch} sequences of {args.length} "
              f"tokens on {ranks.world} {ranks.device.type}")
    schedule = Schedule(steps=args.steps, batch=args.batch, warmup=args.warmup, clip=1.0, seed=args.seed,
                        tokens_per_microbatch=args.batch * args.length, save_steps=None, save_minutes=20,
                        print_every=args.print_every)  # one row per step and rank, checkpoints by time alone
    settings = schedule.to_resume() | {"lr": args.lr, "length": args.length}
    settings |= {"source": fingerprint(source), "samples_sha256": samples_digest(samples)}
    if args.force:
        checkpoints.start_anew([path + ".train"], ranks)
    checkpoints.begin(path + ".train", settings, ranks)
    removed = [PROJECTIONS[letter] for letter in (without, "p")] if without else []
    config = skipless_config(load_config(source), args.parallel, mlp_bias=True, removed=removed)
    job = make_job(path + ".train", config, text[: args.batch], args, ranks)
    for step in steps(job, schedule, samples):
        for row in step.rows:
            at = row.all_weight.nonzero()[:, 0]
            step.backward(next_token_loss(job.trainee, row, at, row.all_weight, LOSS_CHUNK))
        step.update()
    if not job.stopped and ranks.first:
        write_model(replace(started, args=args), source, path, heldout)
    dist.barrier()
    return not job.stopped


def make_job(directory: str, config: SkiplessConfig, ids: torch.Tensor, args, ranks: Ranks) -> Job:
    """The training job, from its newest checkpoint or the untrained model, initialised on ids and written."""
    start = os.path.join(directory, "start")
    if ranks.first and not os.path.isdir(start):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        initialise(model, ids, args.seed)
        with write_directory(start) as aside:
            model.save_pretrained(aside)
    dist.barrier()
    saved = checkpoints.newest(directory, ranks)
    sources = None if saved else lambda name: (start, name)
    trainee = build(load_config(start), ranks, Execution(), sources)
    job = Job(trainee, make_optimizer(trainee, ADAM | {"initial_lr": args.lr}, {}), directory, ranks)
    checkpoints.load(job, saved)
    return job


def write_model(started: Started, source: str, path: str, heldout: tuple[torch.Tensor, str]) -> None:
    """Write the trained model from its last checkpoint, with its record, and remove the checkpoints."""
    directory, (tokens, text) = path + ".train", heldout
    model = load_model(os.path.join(directory, "start"))
    model.load_state_dict(checkpoints.whole_weights(checkpoints.saved_checkpoints(directory)[-1]))
    summary = {"perplexity": perplexity(model, tokens), "perplexity_text": text,
               "conditions": conditions(model)}
    with write_directory(path) as aside:
        sidecars.save(model, aside, source)
        shutil.copy(os.path.join(directory, METRICS), aside)
        write_record(aside, started.record(describe(source, started.args.model), summary))
    shutil.rmtree(os.path.join(directory, "start"))
    checkpoints.remove_training(directory)
    print(f"wrote   {path}: perplexity {summary['perplexity']:.2f} on held-out text, after "
          f"{started.clock()} s")


def train_variants(args, source: str, ranks: Ranks, started: Started) -> dict[str, list[float]] | None:
    """Title -> held-out losses in nats; trains those that do not exist. None when a signal stopped that."""
    losses = {title: [] for title in VARIANTS.values()}
    for number in range(args.seed, args.seed + args.variants):
        settings = replace(args, seed=number, run=os.path.join(args.run, f"seed-{number}"))
        for without, title in VARIANTS.items():
            path = model_path(settings.run, args.parallel, without)
            if not os.path.isdir(path) and not train_skipless(settings, source, without, ranks, started):
                return None
            summary = read_record(path, STAGE, describe(source))["summary"]
            losses[title].append(math.log(summary["perplexity"]))
    return losses


def table(losses: dict[str, list[float]], parameters: dict[str, int]) -> str:
    """Markdown: parameters, mean loss, and mean distance from the full model of the same seed."""
    rows = []
    for title, by_seed in losses.items():
        apart = [loss - full for loss, full in zip(by_seed, losses["full"], strict=True)]
        error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.3f}" if len(apart) > 1 else ""
        distance = "" if title == "full" else f"{statistics.mean(apart):+.3f}{error}"
        rows.append((title, f"{parameters[title]:,}", f"{statistics.mean(by_seed):.3f}", distance))
    return markdown_table(("", "parameters", "loss", "above full"), rows, "<>>>")


def main() -> int:
    args = parse()
    source = resolve_model(args.model)
    load_shape(source, args.length, "qkv" if args.variants else args.without or "")
    path = model_path(args.run, args.parallel, args.without)
    output = os.path.join(args.run, "variants-parallel" if args.parallel else "variants")
    started = begin_stage(STAGE, args, output if args.variants else path)
    with joined_ranks() as ranks:
        if not args.variants:
            return 0 if train_skipless(args, source, args.without, ranks, started) else STOPPED
        losses = train_variants(args, source, ranks, started)
    if losses is None:
        return STOPPED
    if ranks.first:
        first = os.path.join(args.run, f"seed-{args.seed}")
        parameters = {title: load_model(model_path(first, args.parallel, without)).num_parameters()
                      for without, title in VARIANTS.items()}
        text, summary = table(losses, parameters), {"losses": losses, "parameters": parameters}
        with write_directory(output) as aside:
            write_text(os.path.join(aside, "variants.md"), text + "\n")
            write_record(aside, started.record(describe(source), summary))
        print(f"\n{text}\n\nwrote   {output}")
        print(f"variants: held-out loss of {args.variants} trainings each, in {started.clock()} s")
    return 0


if __name__ == "__main__":
    run_stage(main)

"""Training a small skipless Llama from a start near the identity. train.py and compare.py call it.

Without skip connections and norms a random start does not train: signals vanish or explode from block to
block. So every block starts near the identity: orthogonal matrices; K equal to Q and sharp, so that a token
attends mostly to itself; a gate whose bias keeps it open, before an FFN that undoes its own expansion; and
each block's output scaled to mean square 1 on the text.
"""

import os
import shutil
import warnings

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from common import companions
from common.artifacts import make_record, write_record
from common.cli import Clock, UserError, positive, positive_float, seed
from common.data.demo import DEMO
from common.data.rows import Sample
from common.data.text import load_tokens
from common.evaluate import perplexity
from common.files import move_aside, write_directory
from common.layers import run_layer
from common.models import describe, fingerprint, load_config, load_model, load_tokenizer
from common.training import checkpoints
from common.training.distill import next_token_loss
from common.training.engine import Job, Schedule, make_optimizer, steps
from common.training.metrics import METRICS
from common.training.pool import samples_digest
from common.training.sharding import Execution, Ranks, build
from related.skipless.algebra import PROJECTIONS, check_square, condition_numbers
from related.skipless.modeling import SkiplessConfig

TRAIN_STAGE = "related/skipless/train.py"  # stage name in the records of trained models
SHARPNESS = 1.5  # initial scale of Q and K: at 1 the average over a hundred tokens outweighs the token itself
GATE, GATE_BIAS = 0.3, 1.0  # initial scale of the gate's weights and its bias: open for any input
COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rope_parameters", "hidden_act", "bos_token_id", "eos_token_id",
    "pad_token_id",
)
LOSS_CHUNK = 512  # tokens whose logits are in memory at a time
HELDOUT = 32  # sequences for the perplexity
ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.0}

# A block that ends in a linear layer returns a view of its product. Nothing here changes one in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")


def training_flags(parser) -> None:
    """The flags that train_skipless reads."""
    parser.section("training the skipless model")
    parser.add_argument("--text", default=DEMO, help="c4, demo, a .txt, .jsonl, .json.gz or .parquet file")
    parser.add_argument("--heldout", default=DEMO,
                        help="text for the perplexity and the equivalence checks; demo: its held-out part")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step, over all ranks")
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence, at least 2")
    parser.add_argument("--lr", type=positive_float, default=1e-3, 
                        help="AdamW's peak learning rate; linear warm-up, then cosine to 0")
    parser.add_argument("--warmup", type=positive, default=20, help="steps")
    parser.add_argument("--seed", type=seed, default=0, help="random seed")
    parser.add_argument("--print-every", type=positive, default=25, help="steps between printed lines")


def check_length(length: int, path: str, config) -> None:
    """Raise UserError unless sequences of this length have a next token and fit the positions."""
    if not 2 <= length <= config.max_position_embeddings:
        raise UserError(f"--length: expected 2 to {config.max_position_embeddings}, the positions of {path}, "
                        f"found {length}")


def skipless_config(source, parallel: bool, kv_heads: int | None = None, **changes) -> SkiplessConfig:
    """The config of a skipless model with the shape of a Llama-like one."""
    shape = {name: getattr(source, name) for name in COPIED}
    shape["num_key_value_heads"] = kv_heads or source.num_key_value_heads
    shape["head_dim"] = getattr(source, "head_dim", None)
    return SkiplessConfig(**(shape | {"parallel": parallel} | changes))


@torch.no_grad()
def initialise(model, ids: torch.Tensor, seed: int) -> None:
    """Start every block near the identity, in place. model: with biases in its FFN; ids: [n, T] of text."""
    generator = torch.Generator().manual_seed(seed)
    model.model.embed_tokens.weight.normal_(generator=generator)
    model.lm_head.weight.normal_(std=0.02, generator=generator)  # small logits
    hidden = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        start_near_identity(layer, generator)
        scale = run_layer(model, layer, hidden).square().mean().sqrt()
        for linear in writers(layer):
            linear.weight.div_(scale)
        hidden = run_layer(model, layer, hidden)


def writers(layer) -> list[nn.Linear]:
    """The linear maps that scale a block's output: one of the FFN and, of parallel blocks, one of attention.

    Parallel blocks without V and P have none of attention, and their output is larger by what it writes.
    """
    attention = [layer.self_attn.o_proj, layer.self_attn.v_proj] if layer.parallel else []
    return [layer.mlp.down_proj, *[linear for linear in attention if hasattr(linear, "weight")][:1]]


def start_near_identity(layer, generator: torch.Generator) -> None:
    """Set a block's weights, in place; the scale of its output is left to the caller.

    A removed projection is the identity, a rotation like any other. Where Q or K is removed, the other one is
    SHARPNESS^2 times the identity: the same scores.
    """
    attention, mlp = layer.self_attn, layer.mlp
    for linear in (attention.q_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj):
        if hasattr(linear, "weight"):
            nn.init.orthogonal_(linear.weight, generator=generator)
    sharp = SHARPNESS**2 * torch.eye(attention.config.hidden_size)
    if hasattr(attention.q_proj, "weight") and hasattr(attention.k_proj, "weight"):
        sharp = attention.q_proj.weight.mul_(SHARPNESS)
    elif hasattr(attention.q_proj, "weight"):
        attention.q_proj.weight.copy_(sharp)
    if hasattr(attention.k_proj, "weight"):
        heads = sharp.unflatten(0, (-1, attention.num_key_value_groups, attention.head_dim))
        attention.k_proj.weight.copy_(heads[:, 0].flatten(0, 1))
    mlp.gate_proj.weight.mul_(GATE)
    mlp.down_proj.weight.copy_(mlp.up_proj.weight.T)
    nn.init.constant_(mlp.gate_proj.bias, GATE_BIAS)
    nn.init.zeros_(mlp.up_proj.bias)
    nn.init.zeros_(mlp.down_proj.bias)


def conditions(model) -> list[dict[str, float]]:
    """Condition numbers of the square attention matrices of each layer."""
    return [condition_numbers(layer.self_attn) for layer in model.model.layers]


def model_name(parallel: bool, without: str | None) -> str:
    """Of a trained model's directory: serial, parallel, serial-trained-without-q, ..."""
    return ("parallel" if parallel else "serial") + (f"-trained-without-{without}" if without else "")


def require_square(source, without: str | None) -> None:
    """Raise UserError unless a model of this config can do without this projection."""
    if without:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(skipless_config(source, False), trust_remote_code=False)
        check_square(model, PROJECTIONS[without])


def train_skipless(args, source: str, parallel: bool, ranks: Ranks, clock: Clock,
                   without: str | None = None) -> bool:
    """Train one model and write RUN/serial/ or RUN/parallel/. False when a signal stopped it, after saving.

    args: those of training_flags, run and force; source: the checkpoint that gives shape and tokenizer;
    without: "q", "k" or "v", which is then absent from the start, and P with it (see model_name). A stopped
    training run is resumed; one with other settings raises UserError. With force either is moved aside.
    """
    name = model_name(parallel, without)
    path, tokenizer = os.path.join(args.run, name), load_tokenizer(source)
    directory = path + ".train"
    text, description = load_tokens(args.text, tokenizer, args.steps * args.batch, args.length)
    heldout = load_tokens(args.heldout, tokenizer, HELDOUT, args.length, split="heldout")
    samples = [Sample(row[:-1], row[-1:]) for row in text.tolist()]
    ranks.say(f"reads   {source}: shape and tokenizer; {description}")
    ranks.say(f"{name}: {args.steps} steps of {args.batch} sequences of {args.length} tokens "
              f"on {ranks.world} {ranks.device.type}")
    schedule = make_schedule(args)
    settings = schedule.to_resume() | {"lr": args.lr, "length": args.length, "source": fingerprint(source)}
    settings["samples_sha256"] = samples_digest(samples)
    if args.force:
        start_anew(directory, ranks)
    begin(directory, settings, ranks)
    removed = [PROJECTIONS[letter] for letter in (without, "p")] if without else []
    config = skipless_config(load_config(source), parallel, mlp_bias=True, removed=removed)
    start = write_start(directory, config, text[: args.batch], args.seed, ranks)
    job = make_job(directory, start, args.lr, ranks)
    for step in steps(job, schedule, samples):
        for row in step.rows:
            at = row.all_weight.nonzero()[:, 0]
            step.backward(next_token_loss(job.trainee, row, at, row.all_weight, LOSS_CHUNK))
        step.update()
    if job.stopped:
        return False
    if ranks.first:
        write_model(args, source, path, heldout, clock)
    dist.barrier()
    return True


def make_schedule(args) -> Schedule:
    """One row per step and rank, checkpoints by time alone."""
    return Schedule(
        steps=args.steps, batch=args.batch, warmup=args.warmup, clip=1.0, seed=args.seed,
        tokens_per_microbatch=args.batch * args.length, save_steps=None, save_minutes=20,
        print_every=args.print_every,
    )


def start_anew(directory: str, ranks: Ranks) -> None:
    """--force: move an unfinished training run aside."""
    if ranks.first:
        moved = move_aside(directory)
        if moved:
            print(f"moved   {directory} to {moved}")
    dist.barrier()


def begin(directory: str, settings: dict, ranks: Ranks) -> None:
    """Record the settings of a training run in its directory, or check them to resume it.

    Raises UserError for a run with other settings, and for a directory with other content.
    """
    if os.path.isdir(directory) and os.listdir(directory):
        if not os.path.exists(os.path.join(directory, checkpoints.SETTINGS)):
            raise UserError(f"{directory}: expected a training run with {checkpoints.SETTINGS}, found none; "
                            "pass --force to move it aside")
    checkpoints.begin(directory, settings, ranks)


def write_start(directory: str, config: SkiplessConfig, ids: torch.Tensor, seed: int, ranks: Ranks) -> str:
    """Write the untrained model, unless it exists from the run being resumed. Returns its directory."""
    start = os.path.join(directory, "start")
    if ranks.first and not os.path.isdir(start):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        initialise(model, ids, seed)
        with write_directory(start) as aside:
            model.save_pretrained(aside)
    dist.barrier()
    return start


def make_job(directory: str, start: str, lr: float, ranks: Ranks) -> Job:
    """The training job, from its newest checkpoint or the untrained model."""
    saved = checkpoints.newest(directory, ranks)
    sources = None if saved else lambda name: (start, name)
    trainee = build(load_config(start), ranks, Execution(), sources)
    optimizer = make_optimizer(trainee, ADAM | {"initial_lr": lr})
    job = Job(trainee, optimizer, directory, ranks)
    if saved:
        checkpoints.load(job, saved)
        ranks.say(f"resumes {directory} after step {job.step}")
    return job


def write_model(args, source: str, path: str, heldout: tuple[torch.Tensor, str], clock: Clock) -> None:
    """Write the trained model from its last checkpoint, with its record, and remove the checkpoints.

    heldout: tokens for the perplexity, and their description.
    """
    directory = path + ".train"
    model = load_model(os.path.join(directory, "start"))
    before = conditions(model)
    model.load_state_dict(checkpoints.whole_weights(checkpoints.saved_checkpoints(directory)[-1]))
    tokens, description = heldout
    summary = {"perplexity": perplexity(model, tokens), "perplexity_text": description,
               "conditions_before": before, "conditions_after": conditions(model)}
    with write_directory(path) as aside:
        companions.save(model, aside, source)
        shutil.copy(os.path.join(directory, METRICS), aside)
        write_record(aside, make_record(TRAIN_STAGE, args, describe(source), {}, summary, clock()))
    shutil.rmtree(directory)
    print(f"wrote   {path}: perplexity {summary['perplexity']:.2f} on held-out text, after {clock()} s")

"""How common/data/demo_model/ was made: a small multi-head-attention Llama that looks up facts in its prompt.

    python -m pipelines.demo_model --out DIR      # minutes on two cores; another CPU rounds differently

At this size, ordinary pre-training from random weights does not learn such lookup within a few minutes. Hence
three departures. The attention is initialized close to an induction circuit (see `initialise`). In addition
to the text, the first third of the steps trains on drills: a few facts stated twice, in different orders,
with the loss on what the second statement can copy from the first. The remaining steps train on samples from
the tasks' train splits instead, with the loss on their answers.
"""

import argparse
import common.waiting  # noqa: F401 - before torch
import functools
import gzip
import random

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.cli import positive, run_stage
from common.companions import save_new
from common.data.demo import SHIPPED
from common.data.tasks import Example, example_from_row
from common.files import refuse_overwrite, write_directory
from common.progress import Progress
from pipelines.demo_data import FACTS, SEED, draw_pairs, task_rows

STEPS = 600  # about a minute and a half on two cores
DRILLED = 1 / 3  # share of the steps spent on drills: without them all tasks stay at chance
THREADS = 2  # fixed, because the order of floating-point sums depends on it
WARMUP, DECAY = 20, 0.4  # steps of linear warm-up; final share of the steps with linear decay to zero
MUON_RATE, ADAM_RATE = 0.01, 1e-3  # for the layers' matrices; for embeddings, output head and norms
DRILL_BATCH, TASK_BATCH = 40, 40  # rows per step
TEXT_BATCH, TEXT_LENGTH, TEXT_WEIGHT = 3, 256, 0.5  # rows per step, tokens per row, weight of their loss

WIDTH, MLP, LAYERS, HEADS = 128, 256, 4, 8
ROPE_THETA = 1000.0  # short contexts: most RoPE frequencies should separate neighbouring offsets
SHARPNESS = 3.0  # initial scale of the first layer's scores: one offset gets most of the attention
VOCAB = 1280  # every word of the tasks is one token
EOS, PAD = "<|eos|>", "<|pad|>"

Weighted = tuple[list[int], list[int]]  # token ids, and the weight of each in the loss: 0 or 1


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="directory for model and tokenizer")
    parser.add_argument("--steps", type=positive, default=STEPS, help="training steps")
    return parser.parse_args()


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which a word is the same token everywhere: spaces never join a word."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[EOS, PAD], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, pad_token=PAD,
                                   clean_up_tokenization_spaces=False)


@torch.no_grad()
def initialise(model, generator: torch.Generator) -> None:
    """Initialize the attention close to an induction circuit, in place.

    Embedding coordinate 0 is the same for all tokens. From it, layer 0's queries and keys form a score that,
    through RoPE, peaks at offset h + 1 for head h. Each layer's output matrix is its transposed value matrix,
    so a head writes back what it reads. Later layers' queries equal their keys: a token attends to tokens
    with the same word, or to those that have copied it from a neighbour.
    """
    width, size = model.config.hidden_size, model.config.head_dim
    embedding = model.model.embed_tokens.weight.normal_(generator=generator)  # [vocabulary, width]
    embedding[:, 0] = 4.0  # large next to the other coordinates' 1, small next to the norm of them all
    model.lm_head.weight.copy_(0.05 * embedding)  # small logits at the start
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        torch.nn.init.orthogonal_(attention.v_proj.weight, generator=generator)
        attention.o_proj.weight.copy_(attention.v_proj.weight.T)
        attention.q_proj.weight.normal_(std=width**-0.5, generator=generator)
        attention.k_proj.weight.copy_(attention.q_proj.weight)

    query = attentions[0].q_proj.weight.mul_(0.1).view(HEADS, size, width)
    key = attentions[0].k_proj.weight.mul_(0.1).view(HEADS, size, width)
    frequencies = ROPE_THETA ** (-torch.arange(size // 2) * 2 / size)
    angles = torch.arange(1, HEADS + 1)[:, None] * frequencies  # [heads, size / 2]
    query[:, :, 0] = SHARPNESS * torch.cat([angles.cos(), -angles.sin()], dim=1)
    key[:, : size // 2, 0], key[:, size // 2 :, 0] = SHARPNESS, 0.0


def _new_model(tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS,
        max_position_embeddings=TEXT_LENGTH, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        # eager, because SDPA's backward pass is far slower on CPUs
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    initialise(model, torch.Generator().manual_seed(SEED))
    return model


def _optimizers(model, steps: int) -> list[tuple]:
    """(optimizer, schedule) pairs: Muon, which needs fewer steps, for the layers' matrices; else AdamW."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05),
                  torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]

    def rate(step):
        return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))

    return [(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)) for optimizer in optimizers]


def _sample(example: Example, tokenizer) -> Weighted:
    """A tokenized example: weight 0 on the prompt, 1 on the answer and end-of-sequence."""
    prompt, answer = (tokenizer(part)["input_ids"] for part in (example.prompt, example.answer))
    return prompt + answer + [tokenizer.eos_token_id], [0] * len(prompt) + [1] * (len(answer) + 1)


def _drill(rng: random.Random, encode) -> Weighted:
    """Four facts stated twice, with weight 1 on the properties in the second statement."""
    kind = rng.choice(list(FACTS))
    pairs = draw_pairs(rng, kind, 4)
    before, after = FACTS[kind][2].rsplit("{}", 1)
    tokens, weights = [], []
    for weight, stated in ((0, pairs), (1, rng.sample(pairs, 4))):
        for subject, name in stated:
            for piece, counts in ((before.format(subject), 0), (name, weight), (f"{after}, ", 0)):
                tokens += encode(piece)
                weights += [counts] * len(encode(piece))
    return tokens, weights


def _pad(samples: list[Weighted], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and weights [batch, longest], right-padded with weight 0."""
    longest = max(len(tokens) for tokens, _ in samples)
    padded = [tokens + [pad] * (longest - len(tokens)) for tokens, _ in samples]
    weights = [weights + [0] * (longest - len(weights)) for _, weights in samples]
    return torch.tensor(padded), torch.tensor(weights)


def _losses(model, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Next-token losses [n] of the n tokens with weight 1. tokens, weights: [batch, length]."""
    counted = weights[:, 1:] > 0  # run the expensive output head only at these positions
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][counted]
    return F.cross_entropy(model.lm_head(hidden).float(), tokens[:, 1:][counted], reduction="none")


def train_model(tokenizer, text: str, tasks: list[list[Example]], steps: int) -> LlamaForCausalLM:
    """Train the demo model on the text and the tasks, each a list of examples."""
    torch.set_num_threads(THREADS)
    rng, generator = random.Random(SEED), torch.Generator().manual_seed(SEED)
    encode = functools.cache(lambda piece: tokenizer(piece)["input_ids"])
    stream = torch.tensor(encode(text))  # [tokens of the text]
    pools = [[_sample(example, tokenizer) for example in examples] for examples in tasks]
    model = _new_model(tokenizer)
    optimizers = _optimizers(model, steps)
    with Progress(range(steps), desc="training", unit="step") as bar:
        for step in bar:
            if step < DRILLED * steps:
                samples = [_drill(rng, encode) for _ in range(DRILL_BATCH)]
            else:
                samples = []
                for pool in pools:
                    samples += rng.sample(pool, TASK_BATCH // len(pools))
            samples.sort(key=lambda sample: len(sample[0]))  # two batches by length, for less padding
            halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
            starts = torch.randint(len(stream) - TEXT_LENGTH, (TEXT_BATCH, 1), generator=generator)
            rows = stream[starts + torch.arange(TEXT_LENGTH)]  # [TEXT_BATCH, TEXT_LENGTH]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                lookups = [_losses(model, *_pad(half, tokenizer.pad_token_id)) for half in halves]
                lookup_loss = torch.cat(lookups).mean()
                text_loss = _losses(model, rows, torch.ones_like(rows)).mean()
            (lookup_loss + TEXT_WEIGHT * text_loss).backward()
            for optimizer, schedule in optimizers:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            bar.set_postfix(lookup=f"{lookup_loss.item():.3f}", text=f"{text_loss.item():.3f}")
    return model.eval()


def main():
    args = parse()
    refuse_overwrite(args.out, force=False)
    text = gzip.decompress((SHIPPED / "text" / "train.txt.gz").read_bytes()).decode("utf-8")
    tasks = []
    for (task, split), rows in task_rows().items():
        if split == "train":
            tasks.append([example_from_row(task, row) for row in rows])
    statements = [f"{example.prompt}{example.answer}\n" for examples in tasks for example in examples]
    tokenizer = make_tokenizer([text, *statements])
    model = train_model(tokenizer, text, tasks, args.steps)
    with write_directory(args.out) as directory:
        save_new(model, tokenizer, directory)
    print(f"wrote   {args.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    run_stage(main)

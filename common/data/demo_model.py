"""The demo model: a small multi-head-attention Llama that looks up facts in its prompt, and its tokenizer.

At this size neither source text nor a random start teaches such lookup within the time one would wait for a
default. Hence three departures from ordinary pre-training. The attention starts near an induction circuit
(see `initialise`). Beside the text, the first third of the steps trains on drills: a few facts stated
twice, in two orders, with the loss taken where the second statement needs the first. The other steps train
on samples of the tasks' train splits instead, with the loss taken on their answers.
"""

import functools
import random

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.data.demo_tasks import FACTS, draw_pairs
from common.data.tasks import Example

STEPS = 600  # about a minute and a half on two cores
DRILLED = 1 / 3  # share of the steps spent on drills: without them no task leaves chance in the other steps
THREADS = 2  # fixed, because the order of floating-point sums depends on it
WARMUP, DECAY = 20, 0.4  # steps of linear warm-up; last share of the steps, in which the rates fall to zero
MUON_RATE, ADAM_RATE = 0.01, 1e-3  # of the layers' matrices; of embeddings, output head and norms
DRILL_BATCH, TASK_BATCH = 40, 40  # rows per step: small batches, because steps are scarce
TEXT_BATCH, TEXT_LENGTH, TEXT_WEIGHT = 3, 256, 0.5  # rows per step, tokens per row, weight of their loss

WIDTH, MLP, LAYERS, HEADS = 128, 256, 4, 8
ROPE_THETA = 1000.0  # short contexts: most of a head's rotations should tell neighbouring offsets apart
SHARPNESS = 3.0  # scale of the first layer's scores at the start: one offset takes most of the attention
VOCAB = 1280  # every word of the tasks is one token
EOS, PAD = "<|eos|>", "<|pad|>"

Weighted = tuple[list[int], list[int]]  # token ids, and the weight of each in the loss: 0 or 1


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
    """Start the attention near an induction circuit, in place.

    Coordinate 0 is the same for all tokens, and from it the queries and keys of layer 0 make a score that
    peaks, by the rotary embedding, at offset h + 1 for head h. Each layer's output matrix is its value
    matrix transposed, so a head writes back what it reads, and the later layers' queries equal their keys:
    a token attends to tokens with the same word, or to those that have just copied it from a neighbour.
    """
    width, size = model.config.hidden_size, model.config.head_dim
    embedding = model.model.embed_tokens.weight.normal_(generator=generator)  # [vocabulary, width]
    embedding[:, 0] = 4.0  # large beside the other coordinates' 1, small beside the norm of them all
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


def _new_model(tokenizer, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS,
        max_position_embeddings=TEXT_LENGTH, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # eager, because SDPA's backward pass is far slower on CPUs
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    initialise(model, torch.Generator().manual_seed(seed))
    return model


def _optimizers(model, steps: int) -> list[tuple]:
    """(optimizer, schedule): Muon, which needs fewer steps, for the layers' matrices, AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05),
                  torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]

    def rate(step):
        return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))

    return [(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)) for optimizer in optimizers]


def _sample(example: Example, tokenizer) -> Weighted:
    """A task's example: the prompt weighs 0, the answer and the end of sequence 1."""
    prompt, answer = (tokenizer(part)["input_ids"] for part in (example.prompt, example.answer))
    return prompt + answer + [tokenizer.eos_token_id], [0] * len(prompt) + [1] * (len(answer) + 1)


def _drill(rng: random.Random, encode) -> Weighted:
    """Four facts stated twice; the second time each property, which can be looked up, weighs 1."""
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
    """Token ids and weights [batch, longest], padded on the right, where the weights are 0."""
    longest = max(len(tokens) for tokens, _ in samples)
    padded = [tokens + [pad] * (longest - len(tokens)) for tokens, _ in samples]
    weights = [weights + [0] * (longest - len(weights)) for _, weights in samples]
    return torch.tensor(padded), torch.tensor(weights)


def _losses(model, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The next-token losses [n] at the n tokens of weight 1. tokens, weights: [batch, length]."""
    counted = weights[:, 1:] > 0  # the output head, much of the work, runs at these positions only
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][counted]
    return F.cross_entropy(model.lm_head(hidden).float(), tokens[:, 1:][counted], reduction="none")


@torch.enable_grad()  # the caller may be under no_grad
def train_model(tokenizer, text: str, tasks: list[list[Example]], steps: int, seed: int) -> LlamaForCausalLM:
    """A model trained on the text and the tasks, a list of examples for each."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    encode = functools.cache(lambda piece: tokenizer(piece)["input_ids"])
    stream = torch.tensor(encode(text))  # [tokens of the text]
    pools = [[_sample(example, tokenizer) for example in examples] for examples in tasks]
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    model = _new_model(tokenizer, seed)
    optimizers = _optimizers(model, steps)
    with tqdm(range(steps), desc="demo: training", unit="step") as bar:
        for step in bar:
            if step < DRILLED * steps:
                samples = [_drill(rng, encode) for _ in range(DRILL_BATCH)]
            else:
                samples = []
                for pool in pools:
                    samples += rng.sample(pool, TASK_BATCH // len(pools))
            samples.sort(key=lambda sample: len(sample[0]))  # a short and a long batch: less padding
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
    torch.set_num_threads(threads)
    return model.eval()

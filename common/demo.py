"""The embedded default, `--model demo`: a small multi-head-attention Llama, its text and its tasks, made on first use.

Nothing is downloaded and no text is shipped.  `build` writes three folders:

  model/   a LlamaForCausalLM checkpoint with as many key-value heads as query heads, and its byte-level BPE tokenizer
  text/    train.txt and heldout.txt, the sources of the Python standard library that runs this program
  tasks/   eight multiple-choice tasks, generated, in the row schemas of the data sets they are named after

Every task is answerable from its prompt alone: the facts are drawn anew for each row, so a right answer means that
attention found the fact asked about, and heads that are merged badly show as lost accuracy.

At this size neither source text nor a random start teaches such in-context lookup within the time one would wait for
a default.  Hence two departures from ordinary pre-training.  Every step trains on rows of text and on samples of the
tasks' train splits, whose answers weigh most; and the attention starts near an induction circuit (see `initialise`),
which training then fits to the tasks.
"""

import json
import os
import random
import shutil
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.tasks import example_from_row

STEPS = 600  # about a minute and a half on two cores
THREADS = 2  # fixed, because the order of floating-point sums depends on it
WARMUP, DECAY = 20, 0.4  # steps of linear warm-up; the last share of the steps, over which the rates fall to zero
MUON_RATE, ADAM_RATE = 0.015, 1e-3  # attention and MLP matrices; embeddings, output head and norms
TASK_BATCH, TEXT_BATCH, TEXT_LENGTH = 48, 2, 256  # samples a step (as many of each task), rows a step, tokens a row
PROMPT_WEIGHT, TEXT_WEIGHT = 0.02, 0.5  # of a prompt token and of the text loss, an answer token weighing 1

WIDTH, MLP, LAYERS, HEADS = 128, 256, 4, 8
ROPE_THETA = 1000.0  # short contexts: most of a head's rotations should tell neighbouring offsets apart
VOCAB = 1280  # every word of the tasks is one token
EOS, PAD = "<|eos|>", "<|pad|>"

TRAIN_CHARS, HELDOUT_CHARS = 3_000_000, 500_000
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings"}
TRAIN_ROWS, VALIDATION_ROWS = 2000, 200

NAMES = "Ann Bob Tom Sue Joe Kim Max Eva Leo Ida Sam Zoe Ben Amy Dan Liz".split()
THINGS = "cup hat pen box bag key coat lamp ball book ring drum boat bell fork rope".split()
COLOURS = "red blue green gold grey pink white black brown orange purple silver".split()
LOCKS = "door gate chest safe drawer cabinet locker closet".split()
ACTS = "singing sleeping running waiting reading cooking swimming painting dancing writing laughing climbing".split()
MATERIALS = "wood wool steel glass paper stone clay rubber leather plastic cotton copper".split()
MOODS = "happy sad angry proud tired bored calm shy brave jealous hungry lonely".split()


def build(directory, *, steps: int = STEPS, seed: int = 0) -> None:
    """Write the demo's model, text and tasks to `directory`, which appears whole or not at all."""
    directory, unfinished = Path(directory), Path(f"{directory}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in ("text", "tasks"):
        (unfinished / part).mkdir(parents=True)
    print(f"demo: making its text, its tasks and a small model in {directory} (once, about two minutes on two cores)")

    text = dict(zip(("train", "heldout"), _corpus(seed)))
    for split, content in text.items():
        (unfinished / "text" / f"{split}.txt").write_text(content, encoding="utf-8", newline="")
    examples = []
    for (task, split), rows in task_rows(seed).items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (unfinished / "tasks" / f"{task}.{split}.jsonl").write_text(lines, encoding="utf-8")
        if split == "train":
            examples.append([example_from_row(task, row) for row in rows])

    tokenizer = _tokenizer([text["train"], *(f"{e.prompt}{e.answer}\n" for task in examples for e in task)])
    model = _train(tokenizer, text["train"], examples, steps, seed)
    model.save_pretrained(unfinished / "model")
    tokenizer.save_pretrained(unfinished / "model")
    os.rename(unfinished, directory)
    print(f"demo: wrote {directory}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")


# Text


def _corpus(seed):
    """(train, heldout): the standard library's sources, each file wholly in one of the two."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not SKIPPED.intersection(p.relative_to(root).parts))
    random.Random(seed).shuffle(paths)
    train, heldout = [], []
    for path in paths:
        try:
            content = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if sum(map(len, heldout)) < HELDOUT_CHARS:
            heldout.append(content)
        elif sum(map(len, train)) < TRAIN_CHARS:
            train.append(content)
    return "".join(train), "".join(heldout)


def _tokenizer(texts):
    """Byte-level BPE in which a word is the same token wherever it stands: spaces go with punctuation, never a word."""
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


# Tasks: each function draws one row


def _facts(rng, subjects, properties, count, form="the {} is {}"):
    """`count` pairs (subject, property), no word twice; the sentences that state them; and the pair to ask about."""
    pairs = list(zip(rng.sample(subjects, count), rng.sample(properties, count)))
    return pairs, [form.format(*pair) for pair in pairs], rng.choice(pairs)


def _shuffled(rng, items, answer):
    """The items in random order, and the place of the answer among them."""
    items = rng.sample(items, len(items))
    return items, items.index(answer)


def _boolq(rng):
    _, said, (_, colour) = _facts(rng, THINGS, COLOURS, 3)
    label = rng.random() < 0.5
    if not label:
        colour = rng.choice([c for c in COLOURS if all(c not in fact.split() for fact in said)])
    return {"question": f"is anything {colour}", "passage": ", ".join(said) + ".", "label": label}


def _piqa(rng):
    pairs, said, (lock, colour) = _facts(rng, LOCKS, COLOURS, 2)
    keys, place = _shuffled(rng, [c for _, c in pairs], colour)
    return {"goal": f"{', '.join(said)}. open the {lock}", "sol1": f"use the {keys[0]} key",
            "sol2": f"use the {keys[1]} key", "label": place}


def _hellaswag(rng):
    pairs, said, (name, act) = _facts(rng, NAMES, ACTS, 4, "{} is {}")
    endings, place = _shuffled(rng, [a for _, a in pairs], act)
    return {"ctx": f"{', '.join(said)}. so {name} is", "endings": endings, "label": str(place)}


def _winogrande(rng):
    pairs, said, (thing, name) = _facts(rng, THINGS, NAMES, 2, "the {} is {}'s")
    options, place = _shuffled(rng, [n for _, n in pairs], name)
    return {"sentence": f"{' and '.join(said)}, so _ has the {thing}", "option1": options[0], "option2": options[1],
            "answer": str(place + 1)}


def _arc(stem, texts, place):
    choices = [{"text": text, "label": label} for text, label in zip(texts, "ABCD")]
    return {"question": {"stem": stem, "choices": choices}, "answerKey": "ABCD"[place]}


def _arc_easy(rng):
    pairs, said, (thing, colour) = _facts(rng, THINGS, COLOURS, 4)
    return _arc(f"{', '.join(said)}. what is the {thing}?", *_shuffled(rng, [c for _, c in pairs], colour))


def _arc_challenge(rng):
    pairs, said, (thing, colour) = _facts(rng, THINGS, COLOURS, 4)
    return _arc(f"{', '.join(said)}. which thing is {colour}?", *_shuffled(rng, [t for t, _ in pairs], thing))


def _openbookqa(rng):
    pairs, said, (thing, material) = _facts(rng, THINGS, MATERIALS, 4)
    texts, place = _shuffled(rng, [m for _, m in pairs], material)
    return {"question_stem": f"{', '.join(said)}. what makes the {thing}?",
            "choices": {"text": texts, "label": list("ABCD")}, "answerKey": "ABCD"[place]}


def _siqa(rng):
    pairs, said, (name, mood) = _facts(rng, NAMES, MOODS, 3, "{} is {}")
    moods, place = _shuffled(rng, [m for _, m in pairs], mood)
    return {"context": ", ".join(said) + ".", "question": f"how is {name}?", "answerA": moods[0], "answerB": moods[1],
            "answerC": moods[2], "label": str(place + 1)}


TASKS = {"boolq": _boolq, "piqa": _piqa, "hellaswag": _hellaswag, "winogrande": _winogrande, "arc_easy": _arc_easy,
         "arc_challenge": _arc_challenge, "openbookqa": _openbookqa, "siqa": _siqa}


def task_rows(seed: int) -> dict:
    """{(task, split): rows}; no prompt occurs twice in a task, so none of validation occurs in train."""
    splits = {}
    for task, draw in TASKS.items():
        rng, rows = random.Random(f"{seed} {task}"), {}
        while len(rows) < VALIDATION_ROWS + TRAIN_ROWS:
            row = draw(rng)
            rows.setdefault(example_from_row(task, row).prompt, row)
        rows = list(rows.values())
        splits[task, "validation"], splits[task, "train"] = rows[:VALIDATION_ROWS], rows[VALIDATION_ROWS:]
    return splits


# Model


@torch.no_grad()
def initialise(model, generator) -> None:
    """Start the attention near an induction circuit, in place.

    Coordinate 0 is the same for all tokens, and from it the queries and keys of layer 0 make a score that peaks, by
    the rotary embedding, at offset h + 1 for head h.  Each layer's output matrix is its value matrix transposed, so a
    head writes what it reads to where it stood, and the later layers' queries equal their keys: a token finds those
    that hold the same word, or have just copied it from a neighbour.
    """
    width, size = model.config.hidden_size, model.config.head_dim
    embedding = model.model.embed_tokens.weight.normal_(generator=generator)  # (vocabulary, width)
    embedding[:, 0] = 4.0  # large beside the other coordinates' 1, small beside the norm of them all
    model.lm_head.weight.copy_(0.05 * embedding)  # small logits at the start
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        torch.nn.init.orthogonal_(attention.v_proj.weight, generator=generator)
        attention.o_proj.weight.copy_(attention.v_proj.weight.T)
        attention.q_proj.weight.normal_(std=width**-0.5, generator=generator)
        attention.k_proj.weight.copy_(attention.q_proj.weight)

    query, key = (p.weight.mul_(0.1).view(HEADS, size, width) for p in (attentions[0].q_proj, attentions[0].k_proj))
    frequencies = ROPE_THETA ** (-torch.arange(size // 2) * 2 / size)
    angles = torch.arange(1, HEADS + 1)[:, None] * frequencies  # (heads, size / 2)
    sharpness = 3.0  # the scores' scale: high enough that one offset takes most of the attention
    query[:, :, 0] = sharpness * torch.cat([angles.cos(), -angles.sin()], dim=1)
    key[:, : size // 2, 0], key[:, size // 2 :, 0] = sharpness, 0.0


def _new_model(tokenizer, seed):
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager")  # on CPUs faster than SDPA's backward
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    initialise(model, torch.Generator().manual_seed(seed))
    return model


def _optimizers(model, steps):
    """Muon for the layers' matrices, which needs far fewer steps here than AdamW; AdamW for the rest; and schedules."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05),
                  torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]

    def rate(step):
        return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))

    return optimizers, [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]


def _pad(samples, pad):
    """Samples (prompt, answer) of token ids -> tokens and loss weights, both (batch, longest), padded on the right."""
    longest = max(len(prompt) + len(answer) for prompt, answer in samples)
    tokens = torch.full((len(samples), longest), pad)
    weights = torch.zeros(len(samples), longest)
    for i, (prompt, answer) in enumerate(samples):
        end = len(prompt) + len(answer)
        tokens[i, :end] = torch.tensor(prompt + answer)
        weights[i, : len(prompt)], weights[i, len(prompt) : end] = PROMPT_WEIGHT, 1.0
    return tokens, weights


def _loss(model, tokens, weights):
    """Weighted sum of the next-token losses, and the sum of the weights; tokens, weights: (batch, length)."""
    weights = weights[:, 1:]
    counted = weights > 0  # the output head is a large share of the work: spare it the padding
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][counted]
    losses = F.cross_entropy(model.lm_head(hidden).float(), tokens[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum(), weights[counted].sum()


def _train(tokenizer, text, tasks, steps, seed):
    """A model trained on the text (str) and the tasks (a list of examples for each task)."""
    stream = torch.tensor(tokenizer(text)["input_ids"])  # (tokens of the text,)
    pools = []
    for examples in tasks:
        prompts, answers = (tokenizer(texts)["input_ids"] for texts in zip(*((e.prompt, e.answer) for e in examples)))
        pools.append([(p, a + [tokenizer.eos_token_id]) for p, a in zip(prompts, answers)])
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    model = _new_model(tokenizer, seed)
    optimizers, schedules = _optimizers(model, steps)
    with tqdm(range(steps), desc="demo: training", unit="step") as bar:
        for _ in bar:
            samples = [sample for pool in pools for sample in rng.sample(pool, TASK_BATCH // len(pools))]
            samples.sort(key=lambda sample: len(sample[0]))
            starts = torch.randint(len(stream) - TEXT_LENGTH, (TEXT_BATCH, 1), generator=generator)
            rows = stream[starts + torch.arange(TEXT_LENGTH)]  # (TEXT_BATCH, TEXT_LENGTH)
            halves = [_pad(samples[: TASK_BATCH // 2], tokenizer.pad_token_id),
                      _pad(samples[TASK_BATCH // 2 :], tokenizer.pad_token_id)]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                sums, counts = zip(*(_loss(model, *half) for half in halves))
                total, count = _loss(model, rows, torch.ones(rows.shape))
                task_loss, text_loss = sum(sums) / sum(counts), total / count
            (task_loss + TEXT_WEIGHT * text_loss).backward()
            for optimizer, schedule in zip(optimizers, schedules):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            bar.set_postfix(tasks=f"{task_loss.item():.3f}", text=f"{text_loss.item():.3f}")
    torch.set_num_threads(threads)
    return model.eval()

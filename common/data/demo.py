"""The embedded default, `--model demo`: a small multi-head-attention Llama, its text and its tasks, made on first use.

Nothing is downloaded and no text is shipped.  `build` writes three folders:

  model/   a LlamaForCausalLM checkpoint with as many key-value heads as query heads, and its byte-level BPE tokenizer
  text/    train.txt and heldout.txt, the sources of the Python standard library that runs this program
  tasks/   eight multiple-choice tasks, generated, in the row schemas of the data sets they are named after

Every task is answerable from its prompt alone: the facts are drawn anew for each row, so a right answer means that
attention found the fact asked about, and heads that are merged badly show as lost accuracy.

At this size neither source text nor a random start teaches such in-context lookup within the time one would wait for
a default.  Hence three departures from ordinary pre-training.  The attention starts near an induction circuit (see
`initialise`).  Beside the text, the first third of the steps trains on drills, which state a few facts twice, in two
orders, and count the loss where the second statement needs the first.  The other steps train on samples of the tasks'
train splits instead, and count the loss on their answers.
"""

import functools
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

from common.data.tasks import example_from_row
from common.models import DEMO, DEMO_HOME
from common.models import resolve_model as models_by_name

STEPS = 600  # about a minute and a half on two cores
DRILLED = 1 / 3  # share of the steps spent on drills: without them no task leaves chance in the other steps
THREADS = 2  # fixed, because the order of floating-point sums depends on it
WARMUP, DECAY = 20, 0.4  # steps of linear warm-up; the last share of the steps, over which the rates fall to zero
MUON_RATE, ADAM_RATE = 0.01, 1e-3  # of the layers' matrices; of embeddings, output head and norms
DRILL_BATCH, TASK_BATCH = 40, 40  # rows a step: small batches, because the steps are what is scarce
TEXT_BATCH, TEXT_LENGTH, TEXT_WEIGHT = 3, 256, 0.5  # rows a step, tokens a row, weight of their loss in the sum

WIDTH, MLP, LAYERS, HEADS = 128, 256, 4, 8
ROPE_THETA = 1000.0  # short contexts: most of a head's rotations should tell neighbouring offsets apart
SHARPNESS = 3.0  # scale of the first layer's scores at the start: one offset takes most of the attention
VOCAB = 1280  # every word of the tasks is one token
EOS, PAD = "<|eos|>", "<|pad|>"

TRAIN_CHARS, HELDOUT_CHARS = 3_000_000, 500_000  # at least, as files are taken whole
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings"}
TRAIN_ROWS, VALIDATION_ROWS = 2000, 200

NAMES = "Ann Bob Tom Sue Joe Kim Max Eva Leo Ida Sam Zoe Ben Amy Dan Liz".split()
THINGS = "cup hat pen box bag key coat lamp ball book ring drum boat bell fork rope".split()
COLOURS = "red blue green gold grey pink white black brown orange purple silver".split()
LOCKS = "door gate chest safe drawer cabinet locker closet".split()
ACTS = "singing sleeping running waiting reading cooking swimming painting dancing writing laughing climbing".split()
MATERIALS = "wood wool steel glass paper stone clay rubber leather plastic cotton copper".split()
MOODS = "happy sad angry proud tired bored calm shy brave jealous hungry lonely".split()
STATES = [("on", "off"), ("hot", "cold"), ("full", "empty"), ("new", "old")]  # the first is asked about
# All facts of a kind have one form, so that a subject and its property are at most 8 tokens apart: see `initialise`.
FACTS = {"colour": (THINGS, COLOURS, "the {} is {}"), "stuff": (THINGS, MATERIALS, "the {} is {}"),
         "lock": (LOCKS, COLOURS, "the {} is {}"), "owner": (THINGS, NAMES, "the {} is {}'s"),
         "act": (NAMES, ACTS, "{} is {}"), "mood": (NAMES, MOODS, "{} is {}")}


def resolve_model(name: str) -> str:
    """A local directory for `name`: "demo" (trained on first use), a directory, or a hub repository (downloaded)."""
    if name != DEMO:
        return models_by_name(name)
    if not os.path.isdir(DEMO_HOME):
        build(DEMO_HOME)
    return os.path.join(DEMO_HOME, "model")


def build(directory, *, steps: int = STEPS, seed: int = 0) -> None:
    """Write the demo's model, text and tasks to `directory`, which appears whole or not at all."""
    directory, unfinished = Path(directory), Path(f"{directory}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in ("text", "tasks"):
        (unfinished / part).mkdir(parents=True)
    print(f"demo: making its text, its tasks and a small model in {directory} (once, about two minutes on two cores)")

    text = dict(zip(("train", "heldout"), _corpus(seed), strict=True))
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


def _pairs(rng, kind, count):
    """`count` pairs (subject, property) of a kind of fact, no word twice."""
    subjects, properties, _ = FACTS[kind]
    return list(zip(rng.sample(subjects, count), rng.sample(properties, count), strict=True))


def _lookup(rng, kind, count, choices, join=", "):
    """`count` facts as text, the subject asked about, that many choices out of the facts, the right one's place."""
    pairs = _pairs(rng, kind, count)
    subject, answer = rng.choice(pairs)
    others = [other for _, other in pairs if other != answer]
    texts = rng.sample([answer, *rng.sample(others, choices - 1)], choices)
    return join.join(FACTS[kind][2].format(*pair) for pair in pairs), subject, texts, texts.index(answer)


def _boolq(rng):
    yes, no = rng.choice(STATES)
    things, states = rng.sample(THINGS, 2), rng.sample([yes, no], 2)
    asked = rng.randrange(2)
    return {"question": f"is the {things[asked]} {yes}", "label": states[asked] == yes,
            "passage": f"the {things[0]} is {states[0]}, the {things[1]} is {states[1]}."}


def _piqa(rng):
    said, lock, keys, place = _lookup(rng, "lock", 2, 2)
    sols = [f"use the {key} key" for key in keys]
    return {"goal": f"{said}. open the {lock}", "sol1": sols[0], "sol2": sols[1], "label": place}


def _hellaswag(rng):
    said, name, endings, place = _lookup(rng, "act", 4, 4)
    return {"ctx": f"{said}. so {name} is", "endings": endings, "label": str(place)}


def _winogrande(rng):
    said, thing, names, place = _lookup(rng, "owner", 2, 2, join=" and ")
    return {"sentence": f"{said}, so _ has the {thing}", "option1": names[0], "option2": names[1],
            "answer": str(place + 1)}


def _arc(rng, count):
    said, thing, colours, place = _lookup(rng, "colour", count, 4)
    choices = [{"text": text, "label": label} for text, label in zip(colours, "ABCD", strict=True)]
    return {"question": {"stem": f"{said}. what is the {thing}?", "choices": choices}, "answerKey": "ABCD"[place]}


def _openbookqa(rng):
    said, thing, texts, place = _lookup(rng, "stuff", 4, 4)
    return {"question_stem": f"{said}. what makes the {thing}?", "choices": {"text": texts, "label": list("ABCD")},
            "answerKey": "ABCD"[place]}


def _siqa(rng):
    said, name, moods, place = _lookup(rng, "mood", 3, 3)
    return {"context": f"{said}.", "question": f"how is {name}?", "label": str(place + 1),
            "answerA": moods[0], "answerB": moods[1], "answerC": moods[2]}


TASKS = {"boolq": _boolq, "piqa": _piqa, "hellaswag": _hellaswag, "winogrande": _winogrande,
         "arc_easy": functools.partial(_arc, count=4), "arc_challenge": functools.partial(_arc, count=6),
         "openbookqa": _openbookqa, "siqa": _siqa}


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
    query[:, :, 0] = SHARPNESS * torch.cat([angles.cos(), -angles.sin()], dim=1)
    key[:, : size // 2, 0], key[:, size // 2 :, 0] = SHARPNESS, 0.0


def _new_model(tokenizer, seed):
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS, max_position_embeddings=TEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # eager, because SDPA's backward pass is far slower on CPUs
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    initialise(model, torch.Generator().manual_seed(seed))
    return model


def _optimizers(model, steps):
    """Muon, which needs fewer steps, for the layers' matrices, and AdamW for the rest; each with its schedule."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05),
                  torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]

    def rate(step):
        return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))

    return [(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)) for optimizer in optimizers]


def _sample(example, tokenizer):
    """(tokens, weights) of an example: the prompt weighs 0, the answer and the end of sequence 1."""
    prompt, answer = (tokenizer(part)["input_ids"] for part in (example.prompt, example.answer))
    return prompt + answer + [tokenizer.eos_token_id], [0] * len(prompt) + [1] * (len(answer) + 1)


def _drill(rng, encode):
    """(tokens, weights) of four facts stated twice; the second time each property, to be looked up, weighs 1."""
    kind = rng.choice(list(FACTS))
    pairs = _pairs(rng, kind, 4)
    before, after = FACTS[kind][2].rsplit("{}", 1)
    tokens, weights = [], []
    for weight, stated in ((0, pairs), (1, rng.sample(pairs, 4))):
        for subject, name in stated:
            for piece, counts in ((before.format(subject), 0), (name, weight), (f"{after}, ", 0)):
                tokens += encode(piece)
                weights += [counts] * len(encode(piece))
    return tokens, weights


def _pad(samples, pad):
    """Samples (tokens, weights) -> two tensors (batch, longest), padded on the right, where the weights are 0."""
    longest = max(len(tokens) for tokens, _ in samples)
    padded = [(tokens + [pad] * (longest - len(tokens)), weights + [0] * (longest - len(weights)))
              for tokens, weights in samples]
    return tuple(torch.tensor(column) for column in zip(*padded, strict=True))


def _losses(model, tokens, weights):
    """The next-token losses (n,) at the n tokens of weight 1; tokens, weights: (batch, length)."""
    counted = weights[:, 1:] > 0  # the output head is a large share of the work: it sees no other position
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][counted]
    return F.cross_entropy(model.lm_head(hidden).float(), tokens[:, 1:][counted], reduction="none")


@torch.enable_grad()  # whoever asks for the model may stand under no_grad
def _train(tokenizer, text, tasks, steps, seed):
    """A model trained on the text (str) and the tasks (a list of examples for each task)."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    encode = functools.cache(lambda piece: tokenizer(piece)["input_ids"])
    stream = torch.tensor(encode(text))  # (tokens of the text,)
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
                samples = [sample for pool in pools for sample in rng.sample(pool, TASK_BATCH // len(pools))]
            samples.sort(key=lambda sample: len(sample[0]))  # two batches, of short and of long ones: less padding
            halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
            starts = torch.randint(len(stream) - TEXT_LENGTH, (TEXT_BATCH, 1), generator=generator)
            rows = stream[starts + torch.arange(TEXT_LENGTH)]  # (TEXT_BATCH, TEXT_LENGTH)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = [_losses(model, *_pad(half, tokenizer.pad_token_id)) for half in halves]
                lookup_loss, text_loss = torch.cat(losses).mean(), _losses(model, rows, torch.ones_like(rows)).mean()
            (lookup_loss + TEXT_WEIGHT * text_loss).backward()
            for optimizer, schedule in optimizers:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            bar.set_postfix(lookup=f"{lookup_loss.item():.3f}", text=f"{text_loss.item():.3f}")
    torch.set_num_threads(threads)
    return model.eval()

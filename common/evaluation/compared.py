"""What checkpoints are compared on: questions, texts, chats and prompts, tokenized for each of them."""

import os
from dataclasses import dataclass

import torch

from common.data.chat import has_tokens, load_chats, load_tokenized
from common.data.rows import Sample
from common.data.sources import CHECKED, DataContext, begins_with_bos, read_unread, unread_length
from common.data.tasks import (
    Example,
    check_lengths,
    choice_samples,
    load_task,
    require_split,
    select_questions,
    size_note,
)
from common.data.text import EVALUATION, NONE, load_tokens, sequence_length
from common.evaluation import evaluate
from common.models import proof
from common.models.load import load_config, load_tokenizer, pick_device, source_model
from common.run.artifact import RECORD, read_record
from common.run.errors import UserError
from common.run.files import open_text
from common.training.lines import CHATS, TEXT

ANSWER_TOKENS = 64  # at most, to a prompt


def read_questions(args, source: str) -> dict[str, dict[int, Example]]:
    """The selected questions: task -> index in the file -> question."""
    tasks = {}
    if source == NONE:
        return tasks
    require_split(args.only, "validation", source)
    for task in args.only:
        examples, path = load_task(task, "validation", source)
        selected = select_questions(len(examples), args.limit, args.seed)
        tasks[task] = {index: examples[index] for index in selected}
        repeated = sum(len(set(example.choices)) < len(example.choices) for example in tasks[task].values())
        note = size_note(task, "validation", path, len(examples))
        note += f", {repeated} of them with a duplicate choice" if repeated else ""
        print(f"reads   {path}: {len(selected)} of {len(examples)} questions{note}")
    return tasks


@dataclass(frozen=True)
class Tokenized:
    """Texts, chats and questions for one checkpoint, tokenized with its tokenizer."""

    tokenizer: object
    length: int  # tokens per sequence of text
    sets: dict[str, tuple[list[Sample], str]]  # CHATS, TEXT, as far as there are any -> samples, their source
    samples: dict[str, list[list[Sample]]]  # task -> question -> choice
    prompts: list[list[int]]  # token ids of --prompts


def prepare(path: str, tasks: dict[str, dict[int, Example]], text: str, unread, prompts, args) -> Tokenized:
    """Tokenize text, chats, questions and prompts for one checkpoint, and check their lengths by its
    positions.

    unread: tokens in place of text, and what they are, from read_calibration_text; or None.
    """
    config = load_config(path)
    for flag in (name for name in ("layerwise", "cache") if getattr(args, name)):
        proof.require_readable(path, config, f"--{flag}")
    tokenizer, positions = load_tokenizer(path, args.bos), config.max_position_embeddings
    tokens, description = unread or (None, "")
    length = sequence_length(tokens.shape[1] if unread else args.length, CHECKED, positions, least=2)
    if text != NONE and not unread:
        tokens, description = load_tokens(text, tokenizer, args.sequences, length, EVALUATION)
    if tokens is not None and tokens.max() >= config.vocab_size:
        raise UserError(f"{text}: expected tokens below {config.vocab_size}, the vocabulary of {path}, "
                        f"found {tokens.max()}")
    sets = {CHATS: read_chats(path, tokenizer, config, args)} if args.chat else {}
    if tokens is not None:
        sets[TEXT] = list(map(Sample, tokens.tolist())), description
    samples = {}
    for task, questions in tasks.items():
        samples[task] = [choice_samples(example, tokenizer) for example in questions.values()]
        for index, choices in zip(questions, samples[task], strict=True):
            check_lengths(((index, sample) for sample in choices), positions, f"{path}: {task}.validation")
    asked = evaluate.prompt_ids(prompts, tokenizer)
    longest = max(map(len, asked), default=0)
    if longest + ANSWER_TOKENS > positions:
        raise UserError(f"--prompts {args.prompts}: expected at most {positions - ANSWER_TOKENS} tokens, for "
                        f"an answer of {ANSWER_TOKENS} within {path}'s positions, found {longest}")
    return Tokenized(tokenizer, length, sets, samples, asked)


def read_chats(path: str, tokenizer, config, args) -> tuple[list[Sample], str]:
    """The chats of --chat for a checkpoint, and where they come from.

    Raises UserError for what cannot be read, and for tokens beyond the checkpoint's positions.
    """
    positions = config.max_position_embeddings
    if not has_tokens(args.chat):
        return load_chats(args.chat, tokenizer, positions, EVALUATION, args.sequences)
    chats, description = load_tokenized(args.chat, config.vocab_size, args.sequences)
    check_lengths(enumerate(chats, 1), positions, f"{path}: {args.chat}", chats=True)
    return chats, description


def is_calibration(text: str) -> bool:
    """Whether --text is a directory with a stage's record, which has to be stage 1's."""
    return os.path.exists(os.path.join(text, RECORD))


def read_calibration_text(calibration: str, args) -> tuple[torch.Tensor, str]:
    """[sequences, length] tokens of a calibration's sources that it has not read, and what they are.

    Sets args.bos to the calibration's. Raises UserError if another is asked for.
    """
    record = read_record(calibration, "01_calibrate.py")
    home = os.path.dirname(os.path.normpath(calibration))  # has what the calibration generated
    if args.bos not in (None, begins_with_bos(record)):
        raise UserError(f"--bos, --no-bos: expected none with --text {calibration}, whose sequences begin "
                        f"{'with' if begins_with_bos(record) else 'without'} the token, found the other")
    args.bos, source = begins_with_bos(record), source_model(record, home)["path"]
    length = unread_length(record, args.length, load_config(source).max_position_embeddings)
    context = DataContext(source, home, pick_device(args.device), layerwise=args.layerwise,
                          bos=args.bos)
    return read_unread(record, context, args.sequences, length)


def same_tokenizers(checkpoints: dict, tokenized: dict[str, Tokenized], sources) -> set[str]:
    """The names of the checkpoints with the first one's vocabulary, whose tokens can be compared.

    sources: of text and chats. Raises UserError for one of tokens (a .npy file, a calibration, tokenized
    chats) and a checkpoint with another vocabulary.
    """
    vocabularies = {name: each.tokenizer.get_vocab() for name, each in tokenized.items()}
    first = next(iter(checkpoints))
    same = {name for name in checkpoints if vocabularies[name] == vocabularies[first]}
    others = [path for name, path in checkpoints.items() if name not in same]
    for source in sources if others else ():
        if source.endswith(".npy") or is_calibration(source) or has_tokens(source):
            raise UserError(f"{source}: expected checkpoints with one tokenizer, as it has tokens, found "
                            f"those of {checkpoints[first]} and {others[0]}; pass text, not tokens")
    return same


def read_prompts(path: str | None) -> list[str]:
    """The lines of --prompts that are not empty."""
    if path is None:
        return []
    try:
        with open_text(path) as file:
            prompts = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise UserError(f"--prompts {path}: cannot be read: {error.strerror}") from error
    if not prompts:
        raise UserError(f"--prompts {path}: expected a prompt a line, found none")
    return prompts

"""What checkpoints are compared on: questions, texts, chats and prompts, tokenized for each of them."""

import os
from dataclasses import dataclass

import torch

from common.data import tasks
from common.data.chat import has_tokens, load_chats, load_tokenized
from common.data.documents import EVALUATION, NONE, TokenFile, parse_source
from common.data.rows import Sample
from common.data.sources import CHECKED, DataContext, begins_with_bos, read_unread, unread_length
from common.data.text import load_tokens, sequence_length
from common.evaluation import evaluate
from common.models import proof
from common.models.load import load_config, load_tokenizer, source_model
from common.models.quantized_cache import Cache
from common.run.artifact import RECORD, read_record
from common.run.errors import UserError
from common.run.files import open_text
from common.training.lines import CHATS, TEXT

ANSWER_TOKENS = 64  # at most, to a prompt


@dataclass(frozen=True)
class Settings:
    """What stage 7 compares checkpoints on, and how it computes. None: there is no such data, or no limit."""

    tasks: str = NONE  # where questions come from, as for load_task, or NONE
    only: tuple[str, ...] = ()  # tasks
    limit: int | None = None  # questions of each task
    seed: int | None = None  # by which they are drawn; None: the first ones
    text: str = NONE  # a source, as for load_tokens, a calibration, or NONE
    chat: str | None = None
    prompts: tuple[str, ...] = ()
    sequences: int = 32  # of text and chats
    length: int | None = None  # tokens per sequence; None: CHECKED, or as many as there are
    bos: bool | None = None  # as for load_tokenizer
    caches: tuple[Cache, ...] = ()
    layerwise: bool = False
    batch: int = 64  # prompts generated side by side
    device: str = "cpu"
    dtype: str = "float32"


def read_questions(settings: Settings) -> dict[str, dict[int, tasks.Example]]:
    """The selected questions: task -> index in the file -> question."""
    questions = {}
    if settings.tasks == NONE:
        return questions
    tasks.require_split(settings.only, "validation", settings.tasks)
    for task in settings.only:
        examples, path = tasks.load_task(task, "validation", settings.tasks)
        selected = tasks.select_questions(len(examples), settings.limit, settings.seed)
        questions[task] = {index: examples[index] for index in selected}
        note = tasks.size_note(task, "validation", path, len(examples))
        print(f"reads   {path}: {len(selected)} of {len(examples)} questions{note}")
    return questions


@dataclass(frozen=True)
class Tokenized:
    """Texts, chats and questions for one checkpoint, tokenized with its tokenizer."""

    tokenizer: object
    length: int  # tokens per sequence of text
    sets: dict[str, tuple[list[Sample], str]]  # CHATS, TEXT, as far as there are any -> samples, their source
    questions: dict[str, dict[int, tasks.Example]]  # from read_questions
    choices: dict[str, list[list[Sample]]]  # task -> question -> choice
    prompts: list[list[int]]  # token ids


def prepare(path: str, settings: Settings, questions: dict, unread) -> Tokenized:
    """Tokenize text, chats, questions and prompts for one checkpoint.

    questions: from read_questions. unread: from read_calibration_text, in place of text; or None. Raises
    UserError for what exceeds the checkpoint's positions or its vocabulary, or cannot be read.
    """
    config = load_config(path)
    for flag in ["--layerwise"] * settings.layerwise + ["--cache"] * bool(settings.caches):
        proof.require_readable(path, config, flag)
    tokenizer, positions = load_tokenizer(path, settings.bos), config.max_position_embeddings
    tokens, description = unread or (None, "")
    length = sequence_length(tokens.shape[1] if unread else settings.length, CHECKED, positions, least=2)
    if settings.text != NONE and not unread:
        tokens, description = load_tokens(settings.text, tokenizer, settings.sequences, length, EVALUATION)
    if tokens is not None and tokens.max() >= config.vocab_size:
        raise UserError(f"{settings.text}: expected tokens below {config.vocab_size}, the vocabulary of "
                        f"{path}, found {tokens.max()}")
    sets = {CHATS: read_chats(path, tokenizer, config, settings)} if settings.chat else {}
    if tokens is not None:
        sets[TEXT] = list(map(Sample, tokens.tolist())), description
    choices = {}
    for task, examples in questions.items():
        choices[task] = [tasks.choice_samples(example, tokenizer) for example in examples.values()]
        samples = ((index, sample) for index, question in zip(examples, choices[task], strict=True)
                   for sample in question)
        tasks.check_lengths(samples, positions, f"{path}: {task}.validation")
    prompts = evaluate.prompt_ids(settings.prompts, tokenizer)
    longest = max(map(len, prompts), default=0)
    if longest + ANSWER_TOKENS > positions:
        raise UserError(f"--prompts: expected at most {positions - ANSWER_TOKENS} tokens, for an answer of "
                        f"{ANSWER_TOKENS} within {path}'s positions, found {longest}")
    return Tokenized(tokenizer, length, sets, questions, choices, prompts)


def read_chats(path: str, tokenizer, config, settings: Settings) -> tuple[list[Sample], str]:
    """The chats for a checkpoint, and where they come from. Raises UserError as `prepare`."""
    positions = config.max_position_embeddings
    if not has_tokens(settings.chat):
        return load_chats(settings.chat, tokenizer, positions, EVALUATION, settings.sequences)
    chats, description = load_tokenized(settings.chat, config.vocab_size, settings.sequences)
    tasks.check_lengths(enumerate(chats, 1), positions, f"{path}: {settings.chat}")
    return chats, description


def is_calibration(text: str) -> bool:
    """Whether --text is a directory with a stage's record, which has to be stage 1's."""
    return os.path.exists(os.path.join(text, RECORD))


def calibration_bos(calibration: str, bos: bool | None) -> bool:
    """Whether a calibration's sequences begin with the begin-of-sequence token. Raises UserError if `bos`,
    as of Settings, is the opposite.
    """
    begins = begins_with_bos(read_record(calibration, "01_calibrate.py"))
    if bos not in (None, begins):
        raise UserError(f"--bos, --no-bos: expected none with --text {calibration}, whose sequences begin "
                        f"{'with' if begins else 'without'} the token, found the other")
    return begins


def read_calibration_text(settings: Settings) -> tuple[torch.Tensor, str] | None:
    """[sequences, length] tokens of a calibration's sources that it has not read, and what they are; None
    if the text is no calibration. settings.bos is what calibration_bos says.
    """
    if not is_calibration(settings.text):
        return None
    record = read_record(settings.text, "01_calibrate.py")
    home = os.path.dirname(os.path.normpath(settings.text))  # has what the calibration generated
    source = source_model(record, home)["path"]
    length = unread_length(record, settings.length, load_config(source).max_position_embeddings)
    context = DataContext(source, home, settings.device, layerwise=settings.layerwise, bos=settings.bos)
    return read_unread(record, context, settings.sequences, length)


def same_tokenizers(checkpoints: dict, tokenized: dict[str, Tokenized], settings: Settings) -> set[str]:
    """The names of the checkpoints with the first one's vocabulary, whose tokens can be compared.

    Raises UserError for a text or chats that are tokens (a .npy file, a calibration, tokenized chats) and a
    checkpoint with another vocabulary.
    """
    vocabularies = {name: each.tokenizer.get_vocab() for name, each in tokenized.items()}
    first = next(iter(checkpoints))
    same = {name for name in checkpoints if vocabularies[name] == vocabularies[first]}
    others = [path for name, path in checkpoints.items() if name not in same]
    for source in filter(None, (settings.text, settings.chat) if others else ()):
        if isinstance(parse_source(source), TokenFile) or is_calibration(source) or has_tokens(source):
            raise UserError(f"{source}: expected checkpoints with one tokenizer, as it has tokens, found "
                            f"those of {checkpoints[first]} and {others[0]}; pass text, not tokens")
    return same


def read_prompts(path: str | None) -> list[str]:
    """The lines of --prompts that are not empty."""
    if path is None:
        return []
    with open_text(path) as file:
        prompts = [line.strip() for line in file if line.strip()]
    if not prompts:
        raise UserError(f"--prompts {path}: expected a prompt a line, found none")
    return prompts

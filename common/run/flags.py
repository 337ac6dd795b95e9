"""The command line shared by all stages: its parser, the types of its arguments, rows of flags."""

import argparse
import difflib
import math
import re
import shutil
from dataclasses import dataclass, make_dataclass
from typing import ClassVar

import torch

from common.run.errors import UserError


def suggest(name: str, known) -> str:
    """"; did you mean X?" for the known name closest to `name` or starting with it; "" if there is none."""
    names = {other.lstrip("-").lower(): other for other in known}  # shared dashes must not count
    name = name.lstrip("-").lower()
    near = difflib.get_close_matches(name, names, n=1)
    if not near and name:
        near = [other for other in names if other.startswith(name)]
    return f"; did you mean {names[near[0]]}?" if near else ""


def number_type(kind: type, description: str, at_least: float = -math.inf, at_most: float = math.inf,
                above: float = -math.inf):
    """An argparse type: a finite `kind` from at_least to at_most, and greater than `above`."""

    def parse(text: str):
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        in_range = at_least <= number <= at_most and number > above
        if not (in_range and -math.inf < number < math.inf):
            raise argparse.ArgumentTypeError(f"expected {description}, found {text}")
        return number

    parse.metavar = "N" if kind is int else "X"
    return parse


LARGEST = 2**31 - 1  # counts beyond it overflow C integers in libraries
positive = number_type(int, "a whole number from 1 to 2^31 - 1", at_least=1, at_most=LARGEST)
non_negative = number_type(int, "a whole number from 0 to 2^31 - 1", at_least=0, at_most=LARGEST)
batch = number_type(int, "a whole number from 1 to 2^20", at_least=1, at_most=2**20)  # they are listed
seed = number_type(int, "a random seed from 0 to 2^63 - 1", at_least=0, at_most=2**63 - 1)
epochs = number_type(float, "a number above 0, at most 10^6", above=0, at_most=1e6)
rate = number_type(float, "a learning rate from 1e-9 to 100", at_least=1e-9, at_most=100)
factor = number_type(float, "a number from 0.001 to 1000", at_least=1e-3, at_most=1e3)
positive_float = number_type(float, "a finite number above 0", above=0)
non_negative_float = number_type(float, "a finite number of at least 0", at_least=0)
beta = number_type(float, "a number from 0 to 0.9999", at_least=0, at_most=0.9999)
probability = number_type(float, "a number from 0 to 1", at_least=0, at_most=1)


def name(text: str) -> str:
    """An argparse type: a part of a directory's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text):
        raise argparse.ArgumentTypeError(f"expected letters, digits, '.', '_' and '-', found {text!r}")
    return text


def named(directory: str, name: str | None) -> str:
    """The directory of a training in RUN: train, or train-NAME with --name."""
    return f"{directory}-{name}" if name else directory


def choice(names):
    """An argparse type: one of `names`, with a suggestion for typos."""

    def parse(text: str) -> str:
        if text not in names:
            known = ", ".join(names)
            raise argparse.ArgumentTypeError(f"expected one of {known}, found {text}{suggest(text, names)}")
        return text

    parse.metavar = f"{{{','.join(names)}}}"
    return parse


def device(text: str) -> str:
    """An argparse type: auto, cpu, cuda or cuda:N; the GPU must exist."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda or cuda:N, found {text}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text.startswith("cuda") and int(text.partition(":")[2] or 0) >= gpus:
        raise argparse.ArgumentTypeError(f"expected a device of this machine, which has {gpus} GPUs, "
                                         f"found {text}")
    return text


def manual(prog: str) -> argparse.HelpFormatter:
    """A formatter that prints the module docstring verbatim and wraps flags to the terminal's width."""
    width = min(110, shutil.get_terminal_size((110, 24)).columns) - 2
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=width)


@dataclass(frozen=True)
class Cases:
    """Defaults of a flag, by what is trained."""

    published: object
    text: object  # with --tasks none

    def __str__(self) -> str:
        return f"published: {self.published}; with --tasks none: {self.text}"


@dataclass
class Flag:
    """A row of a stage's table of flags: one with a value of an argparse type.

    default: where it is left out. resumed: it must be the same to go on with a training.
    """

    argument: ClassVar[str] = "type"  # of add_argument that `kind` is
    name: str
    kind: object
    help: str
    default: object = None
    resumed: bool = False
    nargs: str | None = None
    metavar: str | None = None

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")


class Choice(Flag):
    """A row for a flag whose kind is the tuple of its values."""

    argument = "choices"


class Switch(Flag):
    """A row for a flag without a value, whose kind is an action of argparse."""

    argument = "action"


class Parser(argparse.ArgumentParser):
    """argparse with a module's docstring as its manual, and errors of one line."""

    def __init__(self, doc: str, **options):
        super().__init__(description=doc, formatter_class=manual, allow_abbrev=False, **options)

    def error(self, message: str):
        raise UserError(message.removeprefix("argument "))


class StageParser(Parser):
    """With sections of flags; its errors say what, expected, found, and suggest."""

    def __init__(self, doc: str):
        super().__init__(doc, usage="%(prog)s [flags]", add_help=False)
        self.flags: list[str] = []

    def section(self, title: str) -> None:
        """List the flags added from here on under this title in --help."""
        self.group = self.add_argument_group(title)

    def add_argument(self, *flags, choices=None, help: str = "", **options):
        """As in argparse, in the current section; with the default in the help, and suggestions."""
        default = options.get("default")
        if choices is not None:
            options["type"] = choice(choices)
        if hasattr(options.get("type"), "metavar"):
            options.setdefault("metavar", options["type"].metavar)
        if default is not None and default is not False and default != []:
            help += " (default: all)" if default is choices else " (default: %(default)s)"
        action = self.group.add_argument(*flags, help=help, **options)
        self.flags += action.option_strings
        return action

    def add_flag(self, flag: Flag) -> None:
        """Add a row of a table; a default that depends on what is trained is None until that is known."""
        cases = isinstance(flag.default, Cases)
        options = {"nargs": flag.nargs, "metavar": flag.metavar, "default": None if cases else flag.default}
        options = {name: value for name, value in options.items() if value is not None}
        help = f"{flag.help} ({flag.default})" if cases else flag.help
        self.add_argument(f"--{flag.name}", help=help, **{flag.argument: flag.kind}, **options)

    def parse_args(self, args=None, namespace=None):
        """The flags as one frozen object with a field each; dataclasses.replace completes them."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            self.error(f"unknown flag {flag}{suggest(flag, self.flags)} (--help lists all)")
        return make_dataclass("Flags", vars(options), frozen=True)(**vars(options))


def stage_parser(doc: str) -> StageParser:
    """A parser with the stage's docstring as its manual and the flags common to all stages."""
    parser = StageParser(doc)
    parser.section("every stage")
    # --run-dir because torchrun on Python 3.11 takes --run as an abbreviation of its own --run-path
    parser.add_argument("--run", "--run-dir", default="runs/demo", metavar="DIR",
                        help="run directory, where artifacts are read and written")
    parser.add_argument("--force", action="store_true", help="replace the stage's existing output")
    parser.add_argument("-h", "--help", action="help", help="show this page")
    parser.section("this stage")
    return parser

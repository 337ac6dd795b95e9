"""The command line shared by all stages: parser, argument types, user errors, exit codes."""

import argparse
import contextlib
import datetime
import difflib
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from common.errors import Complete, UserError
from common.progress import Progress

# how long a rank with an error waits for the first one of its node to print the same
PATIENCE = datetime.timedelta(seconds=10)
LESS_MEMORY = ("Lower --batch, --tokens-per-microbatch or --loss-chunk, or pass --recompute, --layerwise or "
               "--device cpu, where the stage has it")
cleanup = contextlib.ExitStack()  # closed by run_stage when the stage ends: releases its lock


def printable(text: str) -> str:
    """Text with escapes in place of characters that a terminal would act on; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


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


@dataclass
class Flag:
    """A row of a stage's table of flags.

    kind: an argparse type, the tuple of its values, bool for --NAME and --no-NAME, True for a switch.
    default: where it is left out; a list where that depends on what is trained: [published, with --tasks
    none, for the demo model]. resumed: it must be the same to go on with a training.
    """

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
        options = {name: value for name in ("nargs", "metavar") if (value := getattr(flag, name))}
        help, default = flag.help, flag.default
        if isinstance(default, list):
            published, text, demo = default
            help += f" (published: {published}; with --tasks none: {text}; for the demo model: {demo})"
            default = None
        if flag.kind is True:
            options["action"] = "store_true"
        elif flag.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(flag.kind, tuple):
            options |= {"choices": flag.kind, "default": default}
        else:
            options |= {"type": flag.kind, "default": default}
        self.add_argument(f"--{flag.name}", help=help, **options)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        for name, value in vars(options).items():  # records could not hold it
            if any("\ud800" <= character <= "\udfff" for character in str(value)):
                self.error(f"--{name.replace('_', '-')}: expected text in UTF-8, found {value!a}")
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if flags:
            faults = " and ".join(f"unknown flag {flag}{suggest(flag, self.flags)}" for flag in flags)
            self.error(f"{faults} (--help lists all)")
        if unknown:
            self.error(f"expected flags, found {' '.join(unknown)} (--help lists all)")
        return options


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


class Failures:
    """What the ranks of one torchrun tell each other when they fail.

    torchrun ends all ranks as soon as one leaves, so none may leave before the error is printed.
    """

    def __init__(self):
        for bar in list(Progress._instances):  # an error has a line of its own
            bar.close()
        self.rank = os.environ.get("RANK", "0")
        self.first = os.environ.get("LOCAL_RANK", self.rank) == "0"  # of its node
        self.printed = f"printed on node {os.environ.get('GROUP_RANK')}"
        store = dist.HashStore()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it outlives the ranks
            with contextlib.suppress(RuntimeError):  # unless torchrun was killed
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)
        self.store = dist.PrefixStore(f"failures {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        self.cause = self.store.add("ranks", 1) == 1  # no other rank failed before

    def report(self, message: str) -> None:
        """Print an error on one line: from the first rank of a node, or from one that has it alone."""
        alone = ""
        if not self.first:
            with contextlib.suppress(RuntimeError):
                self.store.wait([self.printed], PATIENCE)
                return
            alone = f"rank {self.rank}: "
        print(f"error: {alone}{printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
        self.store.set(self.printed, "")


def explanation(error: BaseException) -> str | None:
    """What to print for an error that is no fault of the program; None for one that is, or for an exit."""
    text = str(error)
    if isinstance(error, (UserError, OSError, MemoryError, SafetensorError)):  # the last: of a full disk
        return text
    if isinstance(error, torch.OutOfMemoryError):  # of a GPU
        return f"{text.partition(' GPU ')[0]} {LESS_MEMORY}"  # the rest is advice on the allocator
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text:
        return f"out of memory: {text.partition('DefaultCPUAllocator: ')[2]}. {LESS_MEMORY}"
    if type(error).__name__ == "PanicException":  # of a library in Rust, as of tokenizers
        return f"a library failed on this model or text: {text}"
    return None


def interrupt_once(number, frame):
    """A handler of SIGINT: a second Ctrl-C does not interrupt the removal of unfinished output."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_stage(main) -> None:
    """Call main() and exit with the code that it returns, or 0.

    A UserError, an OSError or a lack of memory is printed on one line, with exit code 2; Ctrl-C exits with
    130. Under torchrun the ranks print it once, and those that fail because another one left are silent.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed: a file that is opened later would take its number
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, open(number, "w"))
    for stream in (sys.stdout, sys.stderr):  # may be ASCII, or names have no encoding
        with contextlib.suppress(AttributeError):  # replaced by a test
            stream.reconfigure(errors="backslashreplace")
    write = sys.stdout.write  # records and names of files may hold what a terminal would act on
    sys.stdout.write = lambda text: write(printable(text))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt_once)
    try:
        code = main() or 0
    except Complete as complete:
        print(f"found   {complete}")
        code = 0
    except KeyboardInterrupt:
        failures = Failures()
        if failures.cause and failures.first:
            print("interrupted: unfinished output was removed, checkpoints are kept", file=sys.stderr)
        code = 130
    except BaseException as error:
        message = explanation(error)
        if message is not None:
            Failures().report(message)
        elif not isinstance(error, Exception) or Failures().cause:
            raise
        code = 2
    finally:
        cleanup.close()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # closed or full, and would fail once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if "RANK" in os.environ:
        # Skip interpreter shutdown: a process-group thread that needs the interpreter during it aborts the
        # process, and torchrun reports a failed run.
        os._exit(code)
    sys.exit(code)


def peak_memory() -> float:
    """Peak host memory of this process in GiB."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return round(kilobytes / 2**20, 2)


class Clock:
    """Seconds since its creation, for records and final lines."""

    def __init__(self):
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return round(time.perf_counter() - self.start, 2)

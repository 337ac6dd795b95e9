"""What every stage's command line shares: one parser, one kind of user error, one way to end."""

import argparse
import contextlib
import difflib
import functools
import math
import os
import resource
import shutil
import sys
import time

from safetensors import SafetensorError

cleanup = contextlib.ExitStack()  # what run_stage undoes when the stage ends: its lock


class UserError(Exception):
    """A mistake the user can mend. Shown as one line (what, where, expected, found); the process exits with 2."""


def suggest(name: str, known) -> str:
    """"; did you mean X?" where one of the known names is near to `name` or begins with it, whatever the case; else nothing."""
    names = {other.lstrip("-").lower(): other for other in known}  # dashes alone make no likeness
    name = name.lstrip("-").lower()
    near = difflib.get_close_matches(name, names, n=1) or [other for other in names if name and other.startswith(name)]
    return f"; did you mean {names[near[0]]}?" if near else ""


def _number(kind, expected: str, text: str, at_least: float = -math.inf):
    try:
        found = kind(text)
        if found >= at_least:
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")


def positive(text: str) -> int:
    """argparse type of counts."""
    return _number(int, "a whole number of at least 1", text, at_least=1)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """The module docstring as it is written; flags as wide as the terminal, each with its default after its help."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=min(120, shutil.get_terminal_size((120, 24)).columns) - 2)

    def _get_help_string(self, action):
        if action.default is None or action.default is False or action.default is argparse.SUPPRESS:
            return action.help
        return f"{action.help} (default: {'all' if action.default is action.choices else '%(default)s'})"

    def _get_default_metavar_for_optional(self, action):
        return {int: "N", positive: "N", float: "X"}.get(action.type) or super()._get_default_metavar_for_optional(action)


class StageParser(argparse.ArgumentParser):
    """argparse with flags in sections, whose every mistake is one line: what, expected, found, and what was perhaps meant."""

    def __init__(self, doc: str):
        super().__init__(description=doc, usage="%(prog)s [flags]", formatter_class=_Formatter, allow_abbrev=False, add_help=False)
        self.register("type", int, functools.partial(_number, int, "a whole number"))
        self.register("type", float, functools.partial(_number, float, "a number"))

    def section(self, title: str) -> None:
        """The flags added from here on stand under this title in --help."""
        self._section = self.add_argument_group(title)

    def add_argument(self, *names, **options):
        return self._section.add_argument(*names, **options)

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if flags:
            said = " and ".join(f"unknown flag {flag}{suggest(flag, self._option_string_actions)}" for flag in flags)
            self.error(f"{said} (--help lists all)")
        if unknown:
            self.error(f"expected flags, found {' '.join(unknown)} (--help lists all)")
        return found

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"expected one of {', '.join(map(str, action.choices))}, found {value}{suggest(value, action.choices)}")

    def error(self, message: str):
        raise UserError(message.removeprefix("argument "))


def stage_parser(doc: str) -> StageParser:
    """A parser whose manual is the stage's docstring, with the flags that every stage has."""
    parser = StageParser(doc)
    parser.section("every stage")
    # torchrun on Python 3.11 takes --run for an abbreviation of its own --run-path, hence the second name
    parser.add_argument("--run", "--run-dir", default="runs/demo", metavar="DIR", help="run directory: artifacts are read and written here")
    parser.add_argument("--force", action="store_true", help="overwrite what this stage wrote before")
    parser.add_argument("-h", "--help", action="help", help="this page")
    parser.section("this stage")
    return parser


def run_stage(main) -> None:
    """Call main() and turn a UserError, or what the operating system refuses, into one line and exit code 2."""
    code = 0
    try:
        main()
    except (UserError, OSError, SafetensorError) as error:  # safetensors has a class of its own for a full disk
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank finds the same mistake: one says it
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        code = 2
    except KeyboardInterrupt:
        print("interrupted: nothing unfinished was kept", file=sys.stderr)
        code = 130
    finally:
        cleanup.close()
    if "RANK" in os.environ:
        # A thread of the process group that asks for the interpreter while Python takes itself down aborts the process, and
        # torchrun would call the run failed: a rank leaves without that.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def peak_memory() -> float:
    """GiB of host memory that this process has held at its highest."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux at least what the process that started this one held then
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return round(kilobytes / 2**20, 2)


class Clock:
    """Seconds since it was made, for sidecars and closing lines."""

    def __init__(self):
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return round(time.perf_counter() - self.start, 2)

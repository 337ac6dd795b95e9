"""What every stage's command line shares: one parser, one kind of user error, one way to end."""

import argparse
import os
import resource
import sys
import time


class UserError(Exception):
    """A mistake the user can mend. Shown as one line (what, where, expected, found); the process exits with 2."""


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The module docstring as it is written, and each flag's default after its help."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def stage_parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose manual is the stage's docstring, with the two flags that every stage has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=_Formatter, allow_abbrev=False)
    # torchrun on Python 3.11 takes --run for an abbreviation of its own --run-path, hence the second name
    parser.add_argument("--run", "--run-dir", default="runs/demo", metavar="DIR", help="run directory: artifacts are read and written here")
    parser.add_argument("--force", action="store_true", help="overwrite what this stage wrote before")
    return parser


def positive(text: str) -> int:
    """argparse type of counts."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text}")
    return number


def run_stage(main) -> None:
    """Call main() and turn a UserError, or what the operating system refuses, into one line and exit code 2."""
    code = 0
    try:
        main()
    except (UserError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank finds the same mistake: one says it
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        code = 2
    except KeyboardInterrupt:
        print("interrupted: nothing unfinished was kept", file=sys.stderr)
        code = 130
    if "RANK" in os.environ:
        # A thread of the process group that asks for the interpreter while Python takes itself down aborts the process, and
        # torchrun would call the run failed: a rank leaves without that.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def peak_memory() -> float:
    """GiB of host memory that this process has held at its highest."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30, 2)


class Clock:
    """Seconds since it was made, for sidecars and closing lines."""

    def __init__(self):
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return round(time.perf_counter() - self.start, 2)

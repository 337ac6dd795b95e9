"""The demo's tasks: generated multiple-choice questions in the row schemas of the eight data sets.

Every question can be answered from its prompt alone. Each row has new random facts, so a right answer means
that attention looked up the relevant fact, and badly merged heads show up as lost accuracy.
"""

import functools
import random

from common.data.tasks import example_from_row

SEED = 0  # of everything random in the demo: the model is trained on the train rows of this seed
TRAIN_ROWS, VALIDATION_ROWS = 2000, 200

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

"""The flags of stage 5: published values, those of the demo model, budgets, and what is refused."""

from dataclasses import asdict

import pytest

from common.data.demo import DEMO, training_defaults
from common.data.pool import Pool
from common.data.rows import Sample
from common.models import blending
from common.run.errors import UserError
from common.run.flags import Cases
from common.training import settings
from common.training.conversion import Conversion
from common.training.engine import batch_for, epochs_to_steps, published_epochs, warmup_for
from common.training.heldout import QUESTIONS
from common.training.settings import Schedules
from reference import stage5
from runs import flags

PUBLISHED, WITHOUT_TASKS = (
    {flag.attribute: getattr(flag.default, case) for rows in stage5.FLAGS.values() for flag in rows
     if isinstance(flag.default, Cases)} for case in ("published", "text"))
OF_DEMO = training_defaults()


def pair_of(group_size: int = 4, demo: bool = False, blended: tuple = blending.KEY_VALUE) -> Conversion:
    model = {"kv_heads": 16, "name": DEMO if demo else "some/model", "path": "a/model"}
    return Conversion("a", "m", model, 16 // group_size, "mean", blended)


def defaults_of(pair: Conversion, args) -> dict:
    rows = [flag for section in stage5.FLAGS.values() for flag in section]
    return settings.defaults_of(rows, pair, args.tasks)


def filled(pair: Conversion, *words, positions: int = 2048):
    """A command line's flags with what is left out."""
    args = flags(*words)
    return settings.with_defaults(args, defaults_of(pair, args), pair, positions, bos=False)


def schedules_of(pair: Conversion, samples: int, *words, texts: int = 0, row: int = 4096) -> Schedules:
    """The schedules of a command line for so many questions and texts."""
    args = filled(pair, *words)
    pool = Pool([Sample((1,), (2,))] * samples, [Sample((1, 2))] * texts)
    return settings.make_schedules(args, defaults_of(pair, args), pair, pool, row)


def test_each_rate_is_its_flags():
    given = {"lr": 0.1, "beta2": 0.2, "weight_decay": 0.3, "merged_lr_factor": 4.0, "rest_lr_factor": 5.0}
    words = [word for name, value in (given | {"teacher_lr": 0.6}).items()
             for word in (f"--{name.replace('_', '-')}", str(value))]
    student, teacher = settings.rates_of(flags(*words))
    assert asdict(student) == given
    assert asdict(teacher) == given | {"lr": 0.6, "merged_lr_factor": 1.0, "rest_lr_factor": 1.0}


def test_published_numbers():
    """Appendix A and Table 3; AdamW and masks are those of the authors' code."""
    published = {"lr": 1e-5, "mask_lr": 1e-2, "l0_weight": 1.0, "batch": 64, "warmup": 32,
                 "teacher_lr": 1e-5, "teacher_batch": 128}
    released = {"beta2": 0.95, "weight_decay": 1e-4, "rest_lr_factor": 1.0, "masks": "l0-released",
                "kl_on": "prompt"}
    assert published | released == PUBLISHED
    assert WITHOUT_TASKS["kl_on"] == "all"  # everything is judged by KL there
    assert OF_DEMO.keys() == PUBLISHED.keys() | {"steps", "teacher_steps", "teacher_warmup"}
    assert (settings.TEACHER_EPOCHS, settings.TEACHER_WARMUP, settings.CLIP) == (2, 16, 1)
    assert (settings.TEXT_LENGTH, QUESTIONS) == (512, 16)  # ours
    assert [published_epochs(size) for size in (2, 4, 8)] == [5, 10, 15]
    steps = [epochs_to_steps(epochs, 147_580, 64) for epochs in (5, 10, 15)]
    assert steps == [11530, 23060, 34590] and epochs_to_steps(2, 147_580, 128) == 2306
    assert epochs_to_steps(0.001, 10, 64) == 1


@pytest.mark.parametrize("pair, samples, texts, words, steps", [
    *((pair_of(group_size), 147_580, 0, "", [2306, student])
      for group_size, student in ((2, 11530), (4, 23060), (8, 34590))),
    (pair_of(4), 640, 0, "--epochs 0.5", [10, 5]),
    (pair_of(16), 640, 0, "--steps 7 --teacher-steps 3", [3, 7]),
    (pair_of(4), 640, 0, "--steps 1 --masks off", [10, 1]),
    (pair_of(16, demo=True), 640, 0, "", [100, 350]),
    # text adds to the student's epochs, not to SFT; without tasks the source teaches for one epoch
    (pair_of(2), 640, 640, "", [10, 100]),
    (pair_of(16), 640, 640, "--tasks none --batch 64", [10, 20]),
    (pair_of(16), 640, 640, "--tasks none --teacher DIR", [10, 256]),  # batches of 5
])
def test_budgets_are_those_of_the_paper_unless_flags_say_otherwise(pair, samples, texts, words, steps):
    schedules = schedules_of(pair, samples, *words.split(), texts=texts)
    assert [schedules.teacher.steps, schedules.student.steps] == steps


def test_data_flags_left_out(monkeypatch):
    monkeypatch.setattr(settings, "choose_chats", lambda *given: [str(given)])
    demo_tasks, given = "runs/demo-model/tasks", ["--tasks", "none"]
    for demo, words, tasks, text, teacher, heldout in (
        (False, [], "hub", [], None, "split"),
        (False, ["--text", "c4", "a.txt", "--text-tokens", "9"], "hub", ["c4", "a.txt"], None, "c4"),
        (True, [], demo_tasks, ["demo"], None, "demo"),
        (True, ["--text", "none"], demo_tasks, [], None, "demo"),
        (False, given, "none", [], "source", "split"),
        (False, [*given, "--teacher", "DIR/", "--text", "a", "b"], "none", ["a", "b"], "DIR", "split"),
        (True, ["--heldout-text", "b.txt"], demo_tasks, ["demo"], None, "b.txt"),
    ):
        args = filled(pair_of(demo=demo), *words, positions=100)
        assert (args.tasks, args.text, args.chat) == (tasks, text, [str((None, text, "a/model"))])
        assert (args.teacher, args.heldout_text, args.text_length) == (teacher, heldout, 100)


@pytest.mark.parametrize("demo, expected", [
    (False, PUBLISHED | {"teacher_warmup": settings.TEACHER_WARMUP}), (True, OF_DEMO)])
def test_flags_left_out_take_the_published_values(demo, expected):
    args = filled(pair_of(demo=demo))
    assert all(getattr(args, name) == expected[name] for name in expected.keys() - {*settings.OF_LENGTH})
    schedules = schedules_of(pair_of(demo=demo), 64_000, row=99)
    for schedule, prefix in ((schedules.teacher, "teacher_"), (schedules.student, "")):
        assert schedule.batch == expected[f"{prefix}batch"]
        assert schedule.warmup == expected[f"{prefix}warmup"]
        assert (schedule.clip, schedule.seed, schedule.save_minutes) == (1.0, 0, 20)
        assert schedule.tokens_per_microbatch == 99


@pytest.mark.parametrize("demo", [False, True])
@pytest.mark.parametrize("blended, chosen", [
    (blending.KEY_VALUE, "l0-released"), (blending.WHOLE_HEAD, "off"),
    (("qkv_proj",), "l0-released"), (("qkv_proj", "o_proj"), "off"),
])
def test_defaults_without_tasks(demo, blended, chosen):
    """Learning rates of their own, and no masks where merging changed whole heads."""
    pair, words = pair_of(demo=demo, blended=blended), ["--tasks", "none", "--text", "a.txt"]
    args = filled(pair, *words)
    assert (args.masks, args.lr, args.rest_lr_factor) == (chosen, 2e-4, 0.25)
    assert filled(pair, *words, "--masks", "l0").masks == "l0"
    assert filled(pair).masks == ("l0" if demo else "l0-released")  # with tasks


def test_the_batch_without_tasks_follows_from_the_samples():
    assert [batch_for(samples) for samples in (1, 499, 750, 5000, 10**6)] == [2, 2, 3, 20, 64]
    student = schedules_of(pair_of(), 0, "--tasks", "none", texts=2000).student
    assert (student.batch, student.steps) == (8, 250)


def test_warm_up_takes_a_tenth_of_a_short_training_at_most():
    assert [warmup_for(32, steps) for steps in (1, 9, 25, 320, 10_000)] == [1, 1, 2, 32, 32]
    assert [warmup_for(20, steps, 5) for steps in (1, 10, 100, 1000)] == [1, 2, 20, 20]
    for extra, warmup in (([], 5), (["--warmup", "20"], 20)):
        schedules = schedules_of(pair_of(), 640, "--steps", "50", "--teacher-steps", "40", *extra)
        assert (schedules.student.warmup, schedules.teacher.warmup) == (warmup, 8)


@pytest.mark.parametrize("group_size, words, message", [
    (16, "", "no published value for groups of 16 kv heads"),
    (4, "--steps 1", "--steps: expected at least 2"),
    (4, "--text-length 2049", "--text-length: expected 2 to 2048 tokens"),
])
def test_flags_that_cannot_be_are_refused(group_size, words, message):
    with pytest.raises(UserError, match=message):
        schedules_of(pair_of(group_size), 640, *words.split())

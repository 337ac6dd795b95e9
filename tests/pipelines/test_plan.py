"""The plan's command: as the manual's tables, alike for a config and for a run, and what it refuses."""

import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from common.data.pool import Sources
from common.data.tasks import TASKS, load_task, tokenize
from common.models.load import load_config, load_tokenizer
from common.run.errors import UserError
from common.training.flops import forward_flops, products
from common.training.memory import Cluster, Phase, Student, Workload, size
from models import tiny_model
from pipelines import cost, plan
from reference import SCHEDULE
from runs import TRAINING, copy_run, expect_error, run
from torchrun import ROOT

PLAN = "pipelines/plan.py"
ON = ["--on", "8xA100-80GB"]
# hidden size, width of MLPs, layers, heads and kv heads
LLAMA2 = {"7B": (4096, 11008, 32, 32, 32), "13B": (5120, 13824, 40, 40, 40), "70B": (8192, 28672, 80, 64, 8)}


def llama(name: str) -> LlamaConfig:
    hidden, inner, layers, heads, kv_heads = LLAMA2[name]
    return LlamaConfig(vocab_size=32000, hidden_size=hidden, intermediate_size=inner, dtype="float16",
                       num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                       max_position_embeddings=4096)


def costs(*words) -> list[str]:
    """What a plan prints of disk, training and measurement."""
    printed = run(PLAN, *ON, *words).stdout
    return printed[printed.index("GB on disk") :].splitlines()


@pytest.mark.slow
def test_a_config_alone_gives_the_plan_of_a_run_with_texts(aligned_run, inputs, tmp_path):
    """Masks are off, as they are not by default after this run's merge by the mean."""
    words = ["--tasks", "none", "--text-length", 64, "--heldout-sequences", 8, "--masks", "off",
             "--text", inputs["text"]]
    some = [*words, "generated", "--text-tokens", 20000]
    home = copy_run(aligned_run, tmp_path / "run")
    of_run = costs("--run", home, *some)
    assert len(of_run) == 7 and costs("--model", inputs["model"], "--kv-heads", 2, *some) == of_run
    assert of_run[-1].endswith("besides generating text")
    assert costs("--run", home, *words)[1] != of_run[1] and (home / "tokens").exists()  # all is read


@pytest.mark.slow
def test_a_run_is_planned_with_its_own_tasks_and_teacher(aligned_run, finished_run, inputs):
    tokenizer, words = load_tokenizer(inputs["model"]), ["--tasks", inputs["tasks"], *TRAINING]
    lengths = [len(tokenize(example, tokenizer)) for task in TASKS
               for example in load_task(task, "train", inputs["tasks"])[0]]
    mean = f", {sum(lengths) / len(lengths):.0f} tokens each"
    teacher, student = (line for line in costs("--run", aligned_run, *words) if " steps of 8 samples" in line)
    assert teacher.startswith("teacher: 4 steps") and mean in teacher and mean in student
    printed = costs("--run", finished_run, *words)  # which has a teacher
    assert printed[1] == student and "including the teacher" not in printed[-1]


@pytest.mark.slow
def test_expected_samples_are_as_long_as_published():
    """18.6 million tokens in 147,580 samples, 126 each; few of them are spread alike."""
    pool = plan.expected_pool(Sources("hub"))
    assert len(pool) == 147_580 and sum(map(len, pool)) == pytest.approx(18.6e6, rel=0.003)
    few = plan.questions(128)
    assert sum(map(len, few)) / 128 == pytest.approx(126, abs=1) and len({*map(len, few)}) > 60
    assert len(plan.expected_pool(Sources("hub", ["piqa"]))) == 16113


def test_expected_texts_and_chats():
    """Of 9900 tokens from each of two sources of text and one of chats, in rows of 100."""
    sources = Sources(text=("c4", "generated"), chat=["generated"], text_length=100, text_tokens=9900,
                      heldout_text="split", heldout_sequences=32)
    pool = plan.expected_pool(sources)
    assert [len(pool.texts), len(pool.answered)] == [198, 99]
    assert {len(sample) for sample in pool} == {100} and pool.answered[0].answer_tokens == 50
    heldout, asked = plan.expected_heldout(sources)
    assert sum(bool(sample.answer_tokens) for sample in heldout) == 32 == len(heldout) / 2 and not asked


@pytest.mark.parametrize("words, message", [
    ("--tasks none", "--tasks none: expected --text with --text-tokens N"),
    ("--text a.txt", "--text, --chat: expected --text-tokens N with --model"),
    ("--tasks none --text c4 --text-tokens 9999 --teacher no", "--teacher no: expected one that exists"),
    ("--on 1x1:0.001:1:1", "expected all phases to fit on 1x1:0.001:1:1"),
])
def test_what_cannot_be_planned(inputs, words, message):
    expect_error(message, PLAN, *ON, "--model", inputs["model"], *words.split())


def test_a_plan_refuses_what_stage_1_refuses(tmp_path):
    tiny_model(num_key_value_heads=1).config.save_pretrained(tmp_path)
    expect_error("it has 1 key/value head: nothing to merge", PLAN, *ON, "--model", tmp_path)


@pytest.mark.parametrize("name", [
    pytest.param("7B", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.release) for name in ("13B", "70B"))])
def test_the_table_of_plans_is_what_configs_give(name, tmp_path):
    llama(name).save_pretrained(tmp_path)
    lines = re.findall(rf"^\| {name} .*$", (ROOT / "docs/TRAINING.md").read_text(), re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 5
    for _, machine, train, needed, usable, seconds, moved, between, hours in rows:
        nodes = int(machine[0]) if machine.count("x") == 2 else 1
        printed = run(PLAN, "--on", machine, "--model", tmp_path, "--tasks", "none", "--text", "c4",
                      "--text-tokens", 10**8, "--batch", 64 * nodes, "--train", train).stdout
        total = re.search(r"total ([\d.]+) of (\d+) usable", printed)
        assert float(total[1]) == pytest.approx(float(needed.split(",")[0]), abs=0.51) and total[2] == usable
        assert (", recomputed" in printed, "gathered once a row" in printed.partition("pruning")[2]) == (
            "recomputed" in needed, "whole" in needed)
        assert f"| {moved} GiB moved per rank" in printed and f" {seconds} s, " in printed
        assert (f", {between} GiB between nodes" in printed) == (between != "0")
        number, unit = re.search(r"MFU \| ([\d.]+) (h|min) in total", printed).groups()
        assert float(number) / {"h": 1, "min": 60}[unit] == pytest.approx(float(hours), rel=0.03)


def test_hardware_by_its_name_or_numbers():
    device = cost.Hardware(64, 400e12, 200e9, 25.5e9)  # dense bf16 TFLOP/s, GiB, and GB/s of links
    assert cost.parse_hardware("2x8x400:64:200:25.5") == Cluster(8, device, 2)
    with pytest.raises(UserError, match="expected COUNTxDEVICE or NODESxCOUNTxDEVICE, a device of A100-40GB"):
        cost.parse_hardware("8x400:64:200")


def workload(*lengths: int) -> Workload:
    """Samples of these lengths for LLaMA2-7B, of 5 answer tokens each, in recomputed layers."""
    return Workload(llama("7B"), lengths, [5] * len(lengths), 512, True)


def batches(count: int):
    """Steps of so many samples, in rows of 4096 tokens."""
    return replace(SCHEDULE, batch=count, tokens_per_microbatch=4096)


def test_time_and_traffic_of_a_step():
    """Batches of 64 samples of 100 and 300 tokens on four ranks."""
    work, cluster, model = workload(100, 300), cost.parse_hardware("4xA100-80GB"), products(llama("7B"))
    tokens, pairs = 64 * 200, 64 * (100 * 101 / 2 + 300 * 301 / 2) / 2
    source, pruned = (size(llama("7B"), student).whole for student in (None, Student(8)))
    sft, distillation = (cost.step_cost(work, each, batches(64), cluster) for each in (None, Student(8)))
    assert sft.flops == 3 * forward_flops(model, tokens, pairs, 64 * 5)
    assert distillation.flops == 4 * forward_flops(model, tokens, pairs, tokens)
    assert sft.traffic == 8 * source and distillation.traffic == 8 * pruned + 2 * source
    assert distillation.mfu == pytest.approx(0.34 * 4 / 5)  # the forward pass once more
    assert distillation.seconds == pytest.approx(distillation.flops / (4 * 312e12 * distillation.mfu))
    assert cost.seconds(1.0, 3e12, 0, cluster) == 10 / 0.75  # the links of an A100: 300 GB/s, less
    small = cost.step_cost(workload(9), Student(8), batches(4), cost.parse_hardware("8xH100-80GB"))
    assert small.by_host and small.seconds == pytest.approx(32 * 5 * 0.0025)
    nodes = cost.parse_hardware("8x8xA100-80GB")  # a ring sends 2 (n - 1) / n of a rank's gradients
    network = cost.step_cost(workload(500), None, batches(64 * 8), nodes).network
    assert network == pytest.approx(2 * 7 / 8 * 4 * 6_738_415_616 / 8)
    assert cost.seconds(1.0, 0, 25e10, nodes) == 10 / 0.75  # 200 Gb/s a device, less


@pytest.mark.slow
def test_disk_is_that_of_a_run(finished_run, inputs):
    work = Workload(load_config(inputs["model"]), [1], [1], 1, False)
    trained = {"teacher": None, "student": Student(2)}
    phases = {name: Phase("", work, each, None) for name, each in trained.items()}
    expected = cost.disk_bytes(phases, True, False)
    for name in ("aligned", "merged", "teacher", "gqa"):
        found = sum(path.stat().st_size for path in (finished_run / name).glob("*.safetensors"))
        assert found == pytest.approx(expected[name], rel=0.05), name  # names and shapes are the rest
    layer = finished_run / "calibration" / "layer-00000.safetensors"  # of 512 tokens, all that there are
    assert layer.stat().st_size == pytest.approx(cost.calibration_bytes(work.config, 512), rel=0.01)

"""minimal.py, the whole method in one sitting, against the stages on the same tokens, samples and masks."""

import itertools
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import minimal
import paper
from audit.training import stage5
from common.data.rows import Sample
from common.models.blending import set_masks
from common.models.calibration import Calibration
from common.run.files import read_json
from common.training import conversion, mask_state, students
from common.training.engine import Job, Schedule, Step
from common.training.packing import rows_of_step
from common.training.sharding import Execution
from common.training.teacher import build_teacher
from runs import run
from torchrun import ROOT

pytestmark = pytest.mark.slow
SCHEDULE = Schedule(steps=30, batch=3, warmup=1, clip=minimal.CLIP, seed=0, tokens_per_microbatch=64,
                    save_steps=None, save_minutes=0.0, print_every=1)


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """The demo through stages 1 to 4, and the same by minimal.py: run directory, source, aligned, merged."""
    home = tmp_path_factory.mktemp("road") / "run"
    run("01_calibrate.py", "--run", home, "--sequences", 4, "--length", 64)
    run("02_similarity.py", "--run", home)
    run("03_group.py", "--run", home, "--kv-heads", 2, "--restarts", 20, "--iterations", 300)
    run("04_align.py", "--run", home)
    source = AutoModelForCausalLM.from_pretrained(minimal.DEMO).eval()
    vectors = minimal.head_vectors(source, Calibration(str(home / "calibration")).tokens())
    aligned, groups = minimal.aligned_model(source, vectors, kv_heads=2)
    return home, vectors, source, aligned, groups, minimal.merge(aligned, 2)


def test_the_aligned_model_is_the_source(road):
    _, _, source, aligned, _, _ = road
    ids = torch.randint(source.config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (aligned(ids).logits - source(ids).logits).abs().max()
    assert not torch.equal(aligned.model.layers[0].self_attn.v_proj.weight,
                           source.model.layers[0].self_attn.v_proj.weight)
    assert difference < 1e-4  # rounding in float32


def alignment_of(model, index: int, vectors, groups) -> tuple[float, float]:
    """The objective of Algorithm 1 for keys and values whose heads are rotated as in an aligned model: the
    squared norm of the sum of a group's vectors, as a share of what equal heads have."""
    attention, shares = model.model.layers[index].self_attn, []
    plain = AutoModelForCausalLM.from_pretrained(minimal.DEMO).model.layers[index].self_attn
    order = [head for group in groups for head in group]
    for letter, X in zip("kv", vectors, strict=True):
        new, old = (minimal.heads_of(getattr(module, f"{letter}_proj").weight.double(), letter, 16)
                    for module in (attention, plain))
        Y = [torch.linalg.lstsq(old[h].T, W.T).solution.T @ X[h] for h, W in zip(order, new, strict=True)]
        D = len(groups[0])
        parts = [Y[g * D : (g + 1) * D] for g in range(len(groups))]
        ahead = sum(sum(part).square().sum() for part in parts)
        shares.append((ahead / D / sum(Y_i.square().sum() for Y_i in Y)).item())
    return tuple(shares)


def test_groups_and_alignment_are_as_good_as_the_stages(road):
    """Searches end in local optima: objectives are compared, 1 % apart at most."""
    home, vectors, _, aligned, groups, _ = road
    theirs = AutoModelForCausalLM.from_pretrained(home / "aligned")
    for index, found in enumerate(read_json(str(home / "groups/stage.json"))["groups"]):
        scores = [paper.eq_24(each, minimal.similarity(vectors[index][1])) for each in (groups[index], found)]
        assert scores[0] == pytest.approx(scores[1], rel=0.01)
        same = sorted(map(sorted, groups[index])) == sorted(map(sorted, found))
        shares = (alignment_of(aligned, index, vectors[index], groups[index]),
                  alignment_of(theirs, index, vectors[index], found))
        assert shares[0] == pytest.approx(shares[1], rel=0.01 if same else 0.05)


def test_the_merged_model_is_as_close_to_the_source_as_that_of_stage_4(road):
    home, _, source, _, _, merged = road
    ids = torch.randint(source.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(home / "merged")
    assert merged.config.num_key_value_heads == theirs.config.num_key_value_heads == 2
    with torch.no_grad():
        losses = [float(paper.kl(model(ids).logits, source(ids).logits).mean()) for model in (merged, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


def test_ten_masked_steps_have_the_losses_of_stage_5(road, group_of_one):
    """The same samples, noise, learning rates and initial weights, and after each step the same masks: AdamW
    amplifies the rounding of their first, tiny gradients."""
    home, _, source, _, _, _ = road
    pair = conversion.read_conversion(str(home), group_of_one)
    aligned, merged = (AutoModelForCausalLM.from_pretrained(home / name) for name in ("aligned", "merged"))
    ids = torch.randint(1280, (3, 16), generator=torch.Generator().manual_seed(2))
    parts = [row.split(12) for row in ids]
    minimal_student = minimal.Student(aligned, merged)
    steps = minimal.train(minimal_student, source, parts, SCHEDULE.steps, SCHEDULE.batch)
    samples = [Sample(row[:12].tolist(), row[12:].tolist()) for row in ids]
    student = students.masked_student(pair, group_of_one, Execution(), "l0", 0, fresh=True)
    taught_by = build_teacher(pair.model["path"], group_of_one, Execution())
    rates = students.Rates(minimal.LR, 0.999, 0.0)
    optimizer = students.masked_optimizer(student, rates, "l0", minimal.MASK_LR)
    masks = mask_state.MASKS["l0"](student.replicated, SCHEDULE.steps, 0)
    loss = stage5.Loss(kl_on="prompt", l0_weight=minimal.L0_WEIGHT)
    job, sizes = Job(student, optimizer, str(home), group_of_one), []
    for number, (L_KL, L_BiLD, L_L0, z) in enumerate(itertools.islice(steps, 10)):
        job.step = number
        step = Step(job, SCHEDULE, rows_of_step(samples, number, SCHEDULE, group_of_one), samples)
        drawn = masks.draw(number).detach()
        set_masks(student.net, drawn)
        stage5.masked_step(step, masks, taught_by, loss)
        torch.testing.assert_close(z, drawn, rtol=0, atol=1e-5)
        found = [step.metrics[name] for name in ("kl", "bild", "l0")]
        assert found == pytest.approx([L_KL, L_BiLD, L_L0], rel=1e-3, abs=1e-6)
        sizes.append(z.mean())
        with torch.no_grad():
            minimal_student.log_alpha.copy_(masks.log_alpha)
    assert L_KL > 0.01 and min(sizes) < 0.999  # masks have begun to close


def test_the_command_writes_a_stock_checkpoint(tmp_path):
    command = [sys.executable, "minimal.py", "--model", "demo", "--kv-heads", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.num_key_value_heads == 2
    numbers = [float(line.split(": ")[1]) for line in done.stdout.splitlines() if "kv heads: " in line]
    source, aligned, merged, trained = numbers
    assert aligned == pytest.approx(source, abs=0.02) and source < trained < merged

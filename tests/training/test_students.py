"""What stage 5 trains: where students start, what AdamW does with each parameter, the switch to GQA."""

import re
from types import SimpleNamespace

import pytest
import torch

from common.data.pool import Pool
from common.method import masks, released_masks
from common.models import blending
from common.training import checkpoints, students
from common.training.attention import Trainee
from common.training.conversion import TrainingRun
from common.training.engine import Job
from common.training.lines import OPEN_MASKS
from common.training.mask_state import ReleasedMasks, switch_step
from common.training.settings import Schedules
from common.training.sharding import Execution
from common.training.students import Rates
from models import tiny_model
from reference import NOTHING, SCHEDULE, masked_student, rates, saved_pair, stage5


@pytest.mark.parametrize("rest", [1.0, 0.25])
def test_weights_decay_except_norms_biases_masks_and_shared_projections(rest):
    """As in the authors' code; betas are 0.9 and beta2 for all but the masks. Weights outside attention may
    have a learning rate of their own.
    """
    weights = Rates(1.0, beta2=0.95, weight_decay=1e-4, merged_lr_factor=2.0, rest_lr_factor=rest)
    masked, plain = masked_student(torch.zeros(3, 8)), Trainee(tiny_model(num_key_value_heads=2, bias=True))
    for trainee, optimizer, shared in (
        (masked, students.masked_optimizer(masked, weights, "l0", 7.0), (".merged.",)),
        (plain, students.student_optimizer(plain, weights, blending.KEY_VALUE), (".k_proj.", ".v_proj.")),
        (plain, students.student_optimizer(plain, weights), ()),
    ):
        names = {id(parameter): name for name, parameter in trainee.named_parameters()}
        seen = [(names[id(parameter)], group) for group in optimizer.param_groups
                for parameter in group["params"]]
        assert sorted(name for name, _ in seen) == sorted(names.values())
        for name, group in seen:
            is_mask, is_shared = "log_alpha" in name, any(part in name for part in shared)
            free = is_mask or is_shared or "norm" in name or name.endswith("bias")
            rate = rest if ".self_attn." not in name else 2.0 if is_shared else 1.0
            assert group["initial_lr"] == (7.0 if is_mask else rate), name
            assert group["weight_decay"] == (0 if free else 1e-4), name
            assert group["betas"] == ((0.9, 0.9) if is_mask else (0.9, 0.95)), name
            assert group["eps"] == (1e-12 if is_mask else 1e-8), name


def test_what_the_stage_trains_at_which_rate(group_of_one, tmp_path, monkeypatch):
    """Of a merge that changed whole heads, with masks and then without, as the flags say."""
    pair = saved_pair(tmp_path, blending.WHOLE_HEAD, torch.bfloat16)
    rates_of_flags = Rates(1.0, beta2=0.9, weight_decay=0.5, merged_lr_factor=2.0)
    settings = SimpleNamespace(train="attention", masks="l0-released", seed=3, mask_lr=7.0, loss=None,
                               rates=rates_of_flags, schedules=Schedules(SCHEDULE, None),
                               execution=Execution())
    jobs, trained = [], []
    run = TrainingRun(str(tmp_path), "", pair, Pool([]), NOTHING, group_of_one, "float32", None)

    def one_step(job, schedule, samples, until=None):
        jobs.append(job)
        for _, _, projections in blending.blended_projections(job.trainee.net):  # start_heldout is merged/'s
            assert not any(projection.z.any() for projection in projections)
        assert (schedule, samples) == (SCHEDULE, run.pool) and until in (None, switch_step(SCHEDULE.steps))
        job.stopped = not until
        yield SimpleNamespace(number=0, schedule=schedule, metrics={OPEN_MASKS: 0})

    monkeypatch.setattr(stage5, "steps", one_step)
    monkeypatch.setattr(stage5, "masked_step", lambda step, masks, *others: trained.append(masks))
    monkeypatch.setattr(stage5, "gqa_step", lambda *arguments: None)
    assert stage5.train_masked(run, settings, None, None)
    assert not stage5.train_gqa(run, settings, None, None, switched=False)  # a signal has stopped it
    assert type(trained[0]) is ReleasedMasks and (trained[0].steps, trained[0].seed) == (SCHEDULE.steps, 3)
    assert torch.equal(trained[0].log_alpha.detach(), released_masks.start((3, 8), 3))
    shared_names = (".merged.",), [f".{name}." for name in blending.WHOLE_HEAD]
    for job, shared in zip(jobs, shared_names, strict=True):
        for name, rate in rates(job.optimizer, job.trainee).items():
            factor = 2.0 if any(part in name for part in shared) else 1.0
            assert rate == (7.0 if name == "replicated.log_alpha" else factor), name
        frozen = {name for name, p in job.trainee.net.named_parameters() if not p.requires_grad}
        assert frozen and not any(".self_attn." in name for name in frozen)
        for name, parameter in job.trainee.net.named_parameters():
            assert parameter.dtype == (torch.bfloat16 if name in frozen else torch.float32), name  # as stored
        weights = job.optimizer.param_groups[0]
        assert (weights["betas"], weights["weight_decay"]) == ((0.9, 0.9), 0.5)


def test_the_size_of_released_masks_is_saved_and_not_trained(group_of_one, tmp_path):
    pair, jobs = saved_pair(tmp_path), []
    for _ in range(2):
        student = students.masked_student(pair, group_of_one, Execution(), "l0-released", seed=0, fresh=True)
        optimizer = students.masked_optimizer(student, Rates(1e-3, 0.999, 0.1), "l0-released", mask_lr=1e-2)
        jobs.append(Job(student, optimizer, str(tmp_path), group_of_one))
    job, again = jobs
    size = job.trainee.replicated["mask_size"]
    assert size == 1 and not size.requires_grad
    size.copy_(torch.tensor(0.25))
    checkpoints.save(job)
    checkpoints.load(again, str(tmp_path / "step-00000000"))
    assert again.trainee.replicated["mask_size"] == 0.25


@pytest.mark.parametrize("blended", [blending.KEY_VALUE, blending.WHOLE_HEAD])
def test_switch_frees_what_masks_needed_and_keeps_the_rest(group_of_one, tmp_path, blended):
    """A masked student after some steps of Adam, saved and loaded as the GQA model: the same weights and the
    same AdamW state where there is a counterpart, nothing else."""
    pair, weights = saved_pair(tmp_path, blended, bias=True), Rates(1e-3, 0.999, 0.0, merged_lr_factor=2)
    student = students.masked_student(pair, group_of_one, Execution(), "l0", seed=0, fresh=False)
    assert torch.equal(student.replicated["log_alpha"].detach(), torch.full((3, 8), masks.START))
    optimizer = students.masked_optimizer(student, weights, "l0", mask_lr=1e-2)
    masked = Job(student, optimizer, str(tmp_path), group_of_one, step=3)
    for _ in range(3):
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter)
            parameter.grad = torch.randn_like(parameter)
        masked.optimizer.step()
    checkpoints.save(masked)

    saved = str(tmp_path / "step-00000003")
    student = students.gqa_student(pair, group_of_one, Execution(), fresh=False)
    optimizer = students.student_optimizer(student, weights, pair.blended)
    gqa = Job(student, optimizer, str(tmp_path), group_of_one)
    checkpoints.load(gqa, saved, lambda name: blending.blended_name(name, pair.blended))
    assert gqa.step == 3
    before = dict(masked.trainee.named_parameters())
    for name, parameter in gqa.trainee.named_parameters():
        source = before[re.sub(rf"({'|'.join(blended)})\.", r"\1.merged.", name)]
        assert torch.equal(parameter.to_local(), source.to_local()), name
        for kind, tensor in masked.optimizer.state[source].items():
            ours = gqa.optimizer.state[parameter][kind]
            assert torch.equal(*(getattr(each, "_local_tensor", each) for each in (ours, tensor))), name

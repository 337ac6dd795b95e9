"""What stage 5 trains: where students start, what AdamW does with each parameter, the switch to GQA."""

import pytest
import torch

from common.cli import UserError
from common.method import masks
from common.models import load_config
from common.training import checkpoints, jobs
from common.training.distill import Settings
from common.training.engine import Job
from common.training.inputs import Pair
from common.training.sharding import Execution, Trainee, build
from conftest import save_tiny, tiny_model
from students import masked_student, rates


def test_each_kind_of_parameter_learns_at_its_rate():
    student, settings = masked_student(torch.zeros(3, 8)), Settings(lr=1.0, merged_lr_factor=2.0, mask_lr=7.0)
    optimizer = jobs.masked_optimizer(student, settings)
    rate_of = rates(optimizer, student)
    assert rate_of.keys() == dict(student.named_parameters()).keys()
    for name, rate in rate_of.items():
        expected = 7.0 if name == "replicated.log_alpha" else 2.0 if ".merged." in name else 1.0
        assert rate == expected, name
    assert optimizer.param_groups[0]["initial_lr"] == 1.0  # the rate that metrics.jsonl reports
    masks_alone = optimizer.param_groups[-1]
    assert (masks_alone["eps"], masks_alone["betas"], masks_alone["weight_decay"]) == (1e-12, (0.9, 0.9), 0)

    gqa = Trainee(tiny_model(num_key_value_heads=2))
    rate_of = rates(jobs.gqa_optimizer(gqa, settings, masks.KEY_VALUE), gqa)
    assert {name for name, rate in rate_of.items() if rate == 2.0} == {
        f"net.model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(3) for kind in "kv"
    }
    assert set(rate_of.values()) == {1.0, 2.0}
    assert set(rates(jobs.teacher_optimizer(gqa, 3.0), gqa).values()) == {3.0}


def test_weights_decay_except_norms_biases_masks_and_shared_projections():
    """As in the authors' code; betas are 0.9 and beta2 for all but the masks."""
    settings = Settings(lr=1.0, beta2=0.95, weight_decay=1e-4)
    free = ("norm", "bias", ".merged.", "log_alpha")
    masked = masked_student(torch.zeros(3, 8))
    plain = Trainee(tiny_model(num_key_value_heads=2, bias=True))
    for trainee, optimizer, others in (
        (masked, jobs.masked_optimizer(masked, settings), ()),
        (plain, jobs.gqa_optimizer(plain, settings, masks.KEY_VALUE), ("k_proj", "v_proj")),
        (plain, jobs.teacher_optimizer(plain, 1.0, 0.95, 1e-4), ()),
    ):
        names = {id(parameter): name for name, parameter in trainee.named_parameters()}
        seen = set()
        for group in optimizer.param_groups:
            for name in (names[id(parameter)] for parameter in group["params"]):
                decays = not any(part in name for part in (*free, *others))
                assert group["weight_decay"] == (1e-4 if decays else 0), name
                assert group["betas"] == ((0.9, 0.95) if "log_alpha" not in name else (0.9, 0.9))
                assert "log_alpha" in name or group["eps"] == 1e-8
                seen.add(name)
        assert seen == set(names.values())


def test_a_masked_student_starts_from_aligned_and_merged():
    source = jobs.start_of_masked("ALIGNED", "MERGED")
    prefix = "model.layers.0.self_attn"
    assert source(f"{prefix}.k_proj.original.weight") == ("ALIGNED", f"{prefix}.k_proj.weight")
    assert source(f"{prefix}.k_proj.merged.bias") == ("MERGED", f"{prefix}.k_proj.bias")
    assert source(f"{prefix}.q_proj.weight") == ("ALIGNED", f"{prefix}.q_proj.weight")
    for name in masked_student(torch.zeros(3, 8)).net.state_dict():
        directory, stock = source(name)
        if directory == "MERGED":
            assert masks.blended_name(stock) == name  # the way back
    assert torch.equal(jobs.start_masks(3, 8)["log_alpha"], torch.full((3, 8), masks.START))


def test_the_size_of_released_masks_is_saved_and_not_trained(group_of_one, tmp_path):
    mha, grouped = (save_tiny(tmp_path / name, num_key_value_heads=kv_heads)
                    for name, kv_heads in (("mha", 8), ("gqa", 2)))
    pair = Pair(mha, grouped, {"layers": 3, "kv_heads": 8}, 2, "mean", masks.KEY_VALUE)
    settings = Settings(lr=1e-3, weight_decay=0.1, masks="l0-released")
    setup = jobs.Setup(str(tmp_path), group_of_one, Execution())
    job = jobs.masked_job(pair, settings, setup)
    size = job.trainee.replicated["mask_size"]
    assert size == 1 and not size.requires_grad
    for parameter in job.trainee.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    job.optimizer.step()
    assert size == 1
    size.copy_(torch.tensor(0.25))
    checkpoints.save(job)
    again = jobs.masked_job(pair, settings, setup, str(tmp_path / "step-00000000"))
    assert again.trainee.replicated["mask_size"] == 0.25


def test_switch_frees_what_masks_needed_and_keeps_the_rest(group_of_one, tmp_path):
    """A masked student after some steps of Adam, saved and loaded as the GQA model: the same weights and the
    same AdamW state where there is a counterpart, nothing else."""
    mha, grouped = (save_tiny(tmp_path / name, bias=True, num_key_value_heads=kv_heads)
                    for name, kv_heads in (("mha", 8), ("gqa", 2)))
    settings = Settings(lr=1e-3, merged_lr_factor=2)
    student = build(load_config(mha), group_of_one, Execution(), None, lambda model: masks.patch(model, 2),
                    jobs.start_masks(3, 8))
    masked = Job(student, jobs.masked_optimizer(student, settings), str(tmp_path), group_of_one, 3)
    for _ in range(3):
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter)
            parameter.grad = torch.randn_like(parameter)
        masked.optimizer.step()
    checkpoints.save(masked)

    pair = Pair(mha, grouped, {"kv_heads": 8}, 2, "mean", masks.KEY_VALUE)
    setup, saved = jobs.Setup(str(tmp_path), group_of_one, Execution()), str(tmp_path / "step-00000003")
    with pytest.raises(UserError, match=r"expected a tensor optimizer\..*k_proj\.bias.*, found none"):
        # names as they are do not lead to the shared projections
        jobs.gqa_job(pair, settings, setup, saved, switched=False)
    gqa = jobs.gqa_job(pair, settings, setup, saved, switched=True)
    groups = [(len(group["params"]), group["initial_lr"]) for group in gqa.optimizer.param_groups]
    shared, undecayed = 3 * 4, 3 * 4 + 1  # of 3 layers: k and v; norms and the biases of q and o
    rest = len(list(gqa.trainee.parameters())) - shared - undecayed
    assert groups == [(rest, 1e-3), (shared, 2e-3), (undecayed, 1e-3)]

    def stored(name: str) -> str:
        return name.replace("k_proj.", "k_proj.merged.").replace("v_proj.", "v_proj.merged.")

    assert gqa.step == 3
    before = dict(masked.trainee.named_parameters())
    for name, parameter in gqa.trainee.named_parameters():
        assert torch.equal(parameter.to_local(), before[stored(name)].to_local()), name
        for kind, tensor in masked.optimizer.state[before[stored(name)]].items():
            assert torch.equal(local(gqa.optimizer.state[parameter][kind]), local(tensor)), (name, kind)
    sizes = [sum(p.numel() for p in job.trainee.parameters()) for job in (gqa, masked)]
    assert sizes[0] < sizes[1]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part of a sharded tensor, the whole of any other."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

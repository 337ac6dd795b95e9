"""The phases of stage 5 against Eq. 29-31 written out, its published numbers, and its optimizers."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.cli import UserError
from common.data.samples import Sample
from common.method import masks
from common.method.losses import bild, kl
from common.training import distill
from common.training.distill import Distillation, MaskedDistillation, Settings, Sft
from common.training.packing import build_row
from common.training.sharding import Trainee, sum_over_ranks
from conftest import tiny_model

SAMPLES = [Sample((1, 2, 3, 4), (5, 6)), Sample((7, 8), (9, 10, 11)), Sample((12, 13, 14), (15,))]


def sample_logits(trainee, sample: Sample) -> torch.Tensor:
    """Logits [T - 1, V] of the predicted tokens of a sample by itself."""
    tokens = torch.tensor([[*sample.prompt, *sample.answer]])
    return trainee.net(input_ids=tokens, use_cache=False).logits[0, :-1]


def distillation_terms(student, teacher, kl_on: str = "prompt") -> dict[str, torch.Tensor]:
    """Eq. 30's two terms from whole logits: means over a sample's tokens, then over the samples."""
    terms = {"kl": 0.0, "bild": 0.0}
    for sample in SAMPLES:
        prompt = len(sample.prompt) - 1
        ours, theirs = sample_logits(student, sample), sample_logits(teacher, sample).detach()
        last = prompt if kl_on == "prompt" else None
        terms["kl"] = terms["kl"] + kl(ours[:last], theirs[:last]).mean() / len(SAMPLES)
        terms["bild"] = terms["bild"] + bild(ours[prompt:], theirs[prompt:]).mean() / len(SAMPLES)
    return terms


def tiny_trainee(seed: int) -> Trainee:
    return Trainee(tiny_model(seed=seed, attn_implementation="packed"))


def masked_student(log_alpha: torch.Tensor) -> Trainee:
    """A student whose merged projections are random, with these mask parameters."""
    model = tiny_model(seed=0, attn_implementation="packed")
    torch.manual_seed(1)
    masks.patch(model, 2)
    return Trainee(model, {"log_alpha": log_alpha})


@pytest.mark.parametrize("kl_on", ["prompt", "all"])
def test_distillation_is_equation_30(kl_on):
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    phase = Distillation(student, teacher, Settings(lr=1.0, kl_on=kl_on, loss_chunk=2))
    loss, parts = phase.row_loss(build_row(SAMPLES, len(SAMPLES)))
    terms = distillation_terms(student, teacher, kl_on)
    expected = {name: float(term.detach()) for name, term in terms.items()}
    assert {name: float(part) for name, part in parts.items()} == pytest.approx(expected, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(sum(expected.values()), rel=1e-4)


def test_the_temperature_of_the_kl():
    """KL of softened distributions, times T^2 so that gradients keep their size; BiLD has its own."""
    student, teacher = tiny_trainee(0), tiny_trainee(1)
    phase = Distillation(student, teacher, Settings(lr=1.0, temperature=2.0))
    _, parts = phase.row_loss(build_row(SAMPLES, len(SAMPLES)))
    expected = 0.0
    for sample in SAMPLES:
        prompt = len(sample.prompt) - 1
        logits = (sample_logits(model, sample)[:prompt] for model in (student, teacher))
        ours, theirs = ((rows.detach() / 2).softmax(-1) for rows in logits)
        expected += 4 * float((theirs * (theirs / ours).log()).sum(-1).mean()) / len(SAMPLES)
    assert float(parts["kl"]) == pytest.approx(expected, rel=1e-4)
    bild_alone = float(distillation_terms(student, teacher)["bild"].detach())
    assert float(parts["bild"]) == pytest.approx(bild_alone, rel=1e-4)


def test_fine_tuning_counts_answer_tokens_alone():
    trainee, expected = tiny_trainee(0), 0.0
    for sample in SAMPLES:
        answer_logits = sample_logits(trainee, sample)[len(sample.prompt) - 1 :]
        expected += float(cross_entropy(answer_logits, torch.tensor(sample.answer)).detach()) / len(SAMPLES)
    loss, _ = Sft(trainee, chunk=2).row_loss(build_row(SAMPLES, len(SAMPLES)))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


def run_masked_step(student, settings: Settings, step: int, rows: list, phase=None) -> dict:
    """A step of masked distillation without the optimizer; returns its figures."""
    phase = phase or MaskedDistillation(student, tiny_trainee(2), 100, settings)
    phase.begin_step(step)
    for row in rows:
        phase.row_loss(row)[0].backward()
    sum_over_ranks(phase.leaves(student))
    return phase.end_step(step)


@pytest.mark.parametrize("step", [0, 40])
def test_mask_gradient_is_that_of_equation_31(group_of_one, step):
    """By one backward pass through draw, blend, Eq. 30 and Eq. 29, without the leaf and in one row."""
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    settings, student = Settings(lr=1.0, l0_weight=0.3, seed=5), masked_student(start)
    rows = [build_row(SAMPLES[:2], len(SAMPLES)), build_row(SAMPLES[2:], len(SAMPLES))]
    figures = run_masked_step(student, settings, step, rows)

    reference, teacher = masked_student(start), tiny_trainee(2)
    log_alpha = reference.replicated["log_alpha"]
    masks.set_masks(reference.net, masks.draw(log_alpha, 5, step))
    gap = masks.expected(log_alpha).mean() - masks.target(step, 100)
    l0 = gap.abs() + gap**2
    (sum(distillation_terms(reference, teacher).values()) + 0.3 * l0).backward()
    torch.testing.assert_close(student.replicated["log_alpha"].grad, log_alpha.grad, rtol=1e-3, atol=1e-6)
    merged = "model.layers.1.self_attn.k_proj.merged.weight"
    gradients = [trainee.net.get_parameter(merged).grad for trainee in (student, reference)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert figures["l0"] == pytest.approx(float(l0.detach()), rel=1e-5)
    assert figures["mask_target"] == masks.target(step, 100)
    assert figures["mask_expected"] == pytest.approx(float(masks.expected(start).mean()), rel=1e-5)
    per_layer = {"mask_per_layer": masks.expected(start), "mask_mean_per_layer": masks.draw(start, 5, step)}
    for name, values in per_layer.items():
        torch.testing.assert_close(figures[name].float(), values.mean(1), rtol=0, atol=1e-5)


def test_the_two_parts_of_the_mask_gradient_are_both_there(group_of_one):
    start = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    rows, gradients = [build_row(SAMPLES, len(SAMPLES))], {}
    for weight in (0.0, 1.0, 2.0):
        student = masked_student(start)
        run_masked_step(student, Settings(lr=1.0, l0_weight=weight), 50, rows)
        gradients[weight] = student.replicated["log_alpha"].grad
    assert gradients[0.0].abs().max() > 1e-6  # of Eq. 30
    l0_part = gradients[1.0] - gradients[0.0]
    assert (l0_part > 0).all()  # of Eq. 29 at a target of 0: descent closes every mask
    torch.testing.assert_close(gradients[2.0] - gradients[0.0], 2 * l0_part, rtol=1e-4, atol=1e-7)


def test_each_step_draws_masks_of_its_own_from_the_seed():
    start, drawn = torch.zeros(3, 8), {}
    for seed, step in ((0, 3), (0, 4), (1, 3)):
        phase = MaskedDistillation(masked_student(start), None, 10, Settings(lr=1.0, seed=seed))
        phase.begin_step(step)
        drawn[seed, step] = phase.z.detach()
        assert torch.equal(phase.z, masks.draw(start, seed, step))
        for index, _, projections in masks.blended_projections(phase.student.net):
            assert all(torch.equal(projection.z, phase.z[index]) for projection in projections)
    assert not torch.equal(drawn[0, 3], drawn[0, 4]) and not torch.equal(drawn[0, 3], drawn[1, 3])


def test_masks_are_clamped_after_an_update():
    phase = MaskedDistillation(masked_student(torch.full((3, 8), 99.0)), None, 10, Settings(lr=1.0))
    phase.after_update(0)
    assert (phase.log_alpha == masks.LIMIT).all()


def test_published_numbers():
    """Appendix A and Table 3; AdamW and masks are those of the authors' code."""
    published = {"lr": 1e-5, "mask_lr": 1e-2, "l0_weight": 1.0, "batch": 64, "warmup": 32,
                 "teacher_lr": 1e-5, "teacher_batch": 128, "teacher_warmup": 16}
    released = {"beta2": 0.95, "weight_decay": 1e-4, "masks": "l0-released"}
    assert published | released == distill.PUBLISHED_SETTINGS
    assert distill.DEMO_SETTINGS.keys() == distill.PUBLISHED_SETTINGS.keys()
    assert (distill.SWITCH, distill.TEACHER_EPOCHS) == (0.8, 2)
    assert [distill.switch_step(steps) for steps in (2, 10, 350, 11530)] == [1, 8, 280, 9224]
    assert [distill.published_epochs(size) for size in (2, 4, 8)] == [5, 10, 15]
    steps = [distill.epochs_to_steps(epochs, 147_580, 64) for epochs in (5, 10, 15)]
    assert steps == [11530, 23060, 34590] and distill.epochs_to_steps(2, 147_580, 128) == 2306
    assert distill.epochs_to_steps(0.001, 10, 64) == 1


@pytest.mark.parametrize("group_size", [3, 16])
def test_a_group_size_without_published_epochs_needs_a_flag(group_size):
    with pytest.raises(UserError, match=f"groups of {group_size} kv heads .* pass --epochs or --steps"):
        distill.published_epochs(group_size)


def rates(optimizer, trainee) -> dict[str, float]:
    """The peak learning rate of each parameter, by name."""
    names = {id(parameter): name for name, parameter in trainee.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: group["initial_lr"] for group in groups for parameter in group["params"]}


def test_each_kind_of_parameter_learns_at_its_rate():
    student, settings = masked_student(torch.zeros(3, 8)), Settings(lr=1.0, merged_lr_factor=2.0, mask_lr=7.0)
    optimizer = distill.masked_optimizer(student, settings)
    found = rates(optimizer, student)
    assert found.keys() == dict(student.named_parameters()).keys()
    for name, rate in found.items():
        expected = 7.0 if name == "replicated.log_alpha" else 2.0 if ".merged." in name else 1.0
        assert rate == expected, name
    assert optimizer.param_groups[0]["initial_lr"] == 1.0  # the rate that metrics.jsonl reports
    masks_alone = optimizer.param_groups[-1]
    assert (masks_alone["eps"], masks_alone["betas"], masks_alone["weight_decay"]) == (1e-12, (0.9, 0.9), 0)

    gqa = Trainee(tiny_model(num_key_value_heads=2))
    found = rates(distill.gqa_optimizer(gqa, settings, masks.KEY_VALUE), gqa)
    assert {name for name, rate in found.items() if rate == 2.0} == {
        f"net.model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(3) for kind in "kv"
    }
    assert set(found.values()) == {1.0, 2.0}
    assert set(rates(distill.teacher_optimizer(gqa, 3.0), gqa).values()) == {3.0}


def test_weights_decay_except_norms_biases_masks_and_shared_projections():
    """As in the authors' code; betas are 0.9 and beta2 for all but the masks."""
    settings = Settings(lr=1.0, beta2=0.95, weight_decay=1e-4)
    free = ("norm", "bias", ".merged.", "log_alpha")
    masked = masked_student(torch.zeros(3, 8))
    plain = Trainee(tiny_model(num_key_value_heads=2, bias=True))
    for trainee, optimizer, others in (
        (masked, distill.masked_optimizer(masked, settings), ()),
        (plain, distill.gqa_optimizer(plain, settings, masks.KEY_VALUE), ("k_proj", "v_proj")),
        (plain, distill.teacher_optimizer(plain, 1.0, 0.95, 1e-4), ()),
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
    source = distill.start_of_masked("ALIGNED", "MERGED")
    prefix = "model.layers.0.self_attn"
    assert source(f"{prefix}.k_proj.original.weight") == ("ALIGNED", f"{prefix}.k_proj.weight")
    assert source(f"{prefix}.k_proj.merged.bias") == ("MERGED", f"{prefix}.k_proj.bias")
    assert source(f"{prefix}.q_proj.weight") == ("ALIGNED", f"{prefix}.q_proj.weight")
    for name in masked_student(torch.zeros(3, 8)).net.state_dict():
        directory, stock = source(name)
        if directory == "MERGED":
            assert masks.blended_name(stock) == name  # the way back
    assert torch.equal(distill.start_masks(3, 8)["log_alpha"], torch.full((3, 8), masks.START))

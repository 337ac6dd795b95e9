"""Hard concrete masks against their distribution; the blended projections against Eq. 27, 28."""

import pytest
import torch

import paper
from common.method import masks
from common.models import blending
from common.training.mask_state import Masks
from models import tiny_model
from reference import blended, logits_of_two_texts, merge_model

TOKENS = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("log_alpha", [-3.0, -0.5, 0.0, 1.0, 4.0])
def test_expected_mask_is_the_probability_of_being_open(log_alpha):
    drawn = masks.draw(torch.full((200_000,), log_alpha), seed=0, step=0)
    share = float((drawn > 0).float().mean())
    expected = float(masks.expected(torch.tensor(log_alpha)))
    assert share == pytest.approx(expected, abs=5e-3)  # 200,000 draws: 4 sigma
    assert 0 <= drawn.min() and drawn.max() <= 1


def test_hard_concrete_as_printed():
    """With the noise of a step, which is the same on every rank; a seed may be any number."""
    log_alpha = torch.linspace(-4, 4, 50)
    u = torch.rand(50, generator=torch.Generator().manual_seed(3 * 1_000_003 + 7))
    torch.testing.assert_close(masks.draw(log_alpha, seed=3, step=7), paper.hard_concrete(u, log_alpha))
    assert masks.uniform(log_alpha, seed=3 + 2**63, step=7).equal(u)


def test_masks_without_noise_as_printed():
    log_alpha = torch.linspace(-4, 4, 50)
    torch.testing.assert_close(masks.deterministic(log_alpha), paper.without_noise(log_alpha))
    ends = masks.deterministic(torch.tensor([-masks.LIMIT, -2.4, -2.3, 2.3, 2.4, masks.START]))
    assert (ends == 0).tolist() == [True, True, False, False, False, False]  # log 11 = 2.398
    assert (ends == 1).tolist() == [False, False, False, False, True, True]


def test_target_falls_to_zero_over_the_warmup():
    assert [masks.target(step, 100) for step in (0, 15, 30, 99)] == pytest.approx([1, 0.5, 0, 0])


def test_l0_loss_is_equation_29():
    log_alpha = torch.randn(4, 8, requires_grad=True)
    for goal in (0.0, 0.9):
        loss = masks.l0_loss(masks.expected(log_alpha).mean(), goal)
        torch.testing.assert_close(loss, paper.eq_29(paper.open_probability(log_alpha), goal))
    masks.l0_loss(masks.expected(log_alpha).mean(), 0.0).backward()
    assert (log_alpha.grad > 0).all()  # descent closes every mask


def patched(bias: bool = True, names: tuple[str, ...] = blending.KEY_VALUE, **options):
    """An aligned model, and a student that blends its named projections with those of a merged GQA model."""
    aligned = tiny_model(bias=bias, **options)
    merged = merge_model(aligned, 2)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():  # as after training: not the mean of anything
            if blending.blended_name(name, names) != name and not name.endswith("o_proj.bias"):  # of no head
                parameter.add_(0.05 * torch.randn_like(parameter))
    return aligned, blended(aligned, merged, names)


@pytest.mark.parametrize("kv_heads", [8, 4])
def test_heads_are_blended_by_equations_27_and_28(kv_heads):
    """Rows of the input projections and, where merging changed them, columns of o_proj."""
    _, student = patched(names=blending.WHOLE_HEAD, num_key_value_heads=kv_heads)
    z, x, heads = torch.rand(3, kv_heads), torch.randn(5, 48), torch.randn(5, 64)
    blending.set_masks(student, z)
    attention = student.model.layers[1].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        applied = {}
        for part, original in projection.original.named_parameters():
            own, shared = original.split(8), projection.merged.get_parameter(part).split(8)
            D, mask = len(own) // len(shared), z[1].repeat_interleave(len(own) // kv_heads)
            rows = [paper.eq_27(mask, own, shared, j, D) for j in range(1, len(own) + 1)]
            applied[part] = torch.cat(rows)
        expected = x @ applied["weight"].T + applied["bias"]
        torch.testing.assert_close(projection(x), expected, rtol=1e-5, atol=1e-5)
    output = attention.o_proj
    output.merged.bias.data += 1  # it belongs to no head: the one that training moves counts
    own, shared = (module.weight.T.split(8) for module in (output.original, output.merged))
    mask = z[1].repeat_interleave(8 // kv_heads)
    weight = torch.cat([paper.eq_28(mask, own, shared, j, 1) for j in range(1, 9)])
    torch.testing.assert_close(output(heads), heads @ weight + output.merged.bias, rtol=1e-5, atol=1e-5)


def test_in_16_bits_a_blend_is_as_exact_as_the_weights():
    """Against float64: z and the blend are each rounded by 2^-8; gradients, some of them sums, by 2^-7."""
    original, merged, upward = (torch.randn(heads * 8, 48) for heads in (8, 2, 8))
    z, results, linear = torch.rand(8), [], torch.nn.Linear(1, 1)
    for dtype, precise in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        leaves = [part.bfloat16().to(dtype).requires_grad_() for part in (original, merged)]
        projection = blending.BlendedProjection(linear, linear, 8)
        projection.z = z.to(precise).requires_grad_()
        blended = projection.blend(*leaves)
        assert blended.dtype == dtype
        gradients = torch.autograd.grad(blended, [*leaves, projection.z], upward.bfloat16().to(dtype))
        assert gradients[2].dtype == precise
        results.append([part.detach().double() for part in (blended, *gradients)])
        projection.columns = True
        assert projection.blend(leaves[0].T, leaves[0].T).equal(leaves[0].T)
    distance = (original.view(2, 4, 8, 48) - merged.view(2, 1, 8, 48)).abs().double().view(64, 48)
    error = (results[0][0] - results[1][0]).abs()
    assert (error <= 1.02 * 2**-8 * (results[1][0].abs() + distance)).all()
    for rounded, exact in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(rounded, exact, rtol=0, atol=2**-7 * float(exact.abs().max()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [blending.KEY_VALUE, blending.WHOLE_HEAD])
def test_open_masks_are_the_aligned_model_and_closed_masks_the_gqa_model(bias, names):
    """blended() compares both ends, which are different models; between them every weight is trained.

    AdamW has no state for a parameter without a gradient, and a resumed run expects some for each.
    """
    aligned, student = patched(bias, names)
    assert (logits_of_two_texts(student) - logits_of_two_texts(aligned)).abs().max() > 1e-2
    blending.set_masks(student, torch.full((3, 8), 0.5))
    student(TOKENS).logits.square().sum().backward()
    assert not [name for name, parameter in student.named_parameters() if parameter.grad is None]


def test_clamp_keeps_log_alpha_where_a_mask_can_come_back():
    """Within +-7.5, where the expected mask has a gradient above 1e-4; the start is inside, and open."""
    assert 1 - masks.draw(masks.start((500, 40), 0), 0, 0).mean() < 1e-3
    log_alpha = torch.tensor([-100.0, -7.4, 0.0, 7.4, 100.0])
    Masks({"log_alpha": log_alpha}, 10, 0).after_update(0)
    assert log_alpha.tolist() == pytest.approx([-7.5, -7.4, 0, 7.4, 7.5])
    log_alpha.requires_grad_()
    masks.expected(log_alpha).sum().backward()
    assert (log_alpha.grad > 1e-4).all() and masks.START <= masks.LIMIT

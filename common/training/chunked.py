"""Losses of a row of packed samples, computed in chunks of tokens: logits of all tokens never exist at once.

A sequence's loss is the mean over its tokens, the batch's the mean over sequences: both are per-token
weights, so packing and sharding do not change the result.

A model is called as trainee(row, function), which returns function(hidden states [T, h], head), a head as in
models/head.py. A row is a packed sequence of T tokens (training/packing.py) with, for each part of its
samples, "prompt", "answer" and "all", the weight of each position, PART_weight [T].
"""

import torch
from torch.autograd.function import once_differentiable

from common.method.losses import TERMS, cross_entropy, kl
from common.models.head import product


def distillation_loss(
    student,
    row,
    teacher_hidden: torch.Tensor,  # [T, hidden], the teacher's for this row
    teacher_head,
    kl_on: str,  # tokens of the KL term: "prompt", as in the authors' code, or "all"
    chunk: int,  # tokens whose logits are in memory at a time
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Eq. 30: L = KL(teacher || student) on prompt tokens + BiLD(student, teacher) on answer tokens.

    Each term is a mean over a sample's tokens, then over the batch, by the weights in the row; this is the
    row's contribution. A text has no answer, so all its tokens get the KL. Returns L, differentiable, and its
    TERMS, detached: scalars.
    """
    terms = TERMS | {"kl": (kl, kl_on)}
    sums = {name: torch.zeros((), device=row.targets.device) for name in terms}

    def loss(part, at, student_logits):  # [c, V], of the tokens `at`: all prompt or all answer
        with torch.no_grad():
            teacher_logits = teacher_head(teacher_hidden[at])
        losses = {name: (function(student_logits, teacher_logits) * getattr(row, f"{on}_weight")[at]).sum()
                  for name, (function, on) in terms.items() if on in (part, "all")}
        for name, term in losses.items():
            sums[name] += term.detach()
        return sum(losses.values())

    pieces = [("prompt", at) for at in row.prompt_at.split(chunk)]
    pieces += [("answer", at) for at in row.answer_at.split(chunk)]
    total = student(row, lambda hidden, head: chunked(loss, pieces, hidden, head))
    return total, sums


def next_token_loss(
    trainee,
    row,
    at: torch.Tensor,  # [n] positions that predict a token
    weight: torch.Tensor,  # [T] float32, of each position in the batch
    chunk: int,  # tokens whose logits are in memory at a time
) -> torch.Tensor:
    """The row's contribution to the batch's mean cross-entropy, a scalar.

    SFT counts answer tokens: row.answer_at and row.answer_weight.
    """

    def loss(kind, at, logits):
        return (cross_entropy(logits, row.targets[at]) * weight[at]).sum()

    pieces = [("next token", part) for part in at.split(chunk)]
    return trainee(row, lambda hidden, head: chunked(loss, pieces, hidden, head))


def chunked(loss, pieces: list, hidden: torch.Tensor, head) -> torch.Tensor:
    """Sum over pieces of loss(kind, at, logits at `at`), a scalar, holding one piece's logits at a time.

    pieces: (kind, at) pairs, at: [c] token positions in hidden [T, h]; head: as in models/head.py; loss
    returns a scalar of logits that are at least float32. Each piece's gradient is computed right after its
    loss, while its logits are in memory; only the sums [T, h] and [V, h] are kept for the backward pass.
    Nothing is recomputed. A frozen head gets no gradient, and costs none.
    """
    pieces = [(kind, at) for kind, at in pieces if len(at)]
    return _Chunked.apply(loss, pieces, head.finish, hidden, head.weight, head.bias)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, pieces, finish, hidden, weight, bias):
        differentiate, head_is_trained = any(ctx.needs_input_grad), ctx.needs_input_grad[4]
        hidden, weight = hidden.detach(), weight.detach()
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)  # never accumulate in bf16
        total = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        hidden_grad = torch.zeros_like(hidden) if differentiate else None
        weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if head_is_trained else None
        bias_grad = torch.zeros_like(bias, dtype=sum_dtype) if head_is_trained and bias is not None else None
        bias = None if bias is None else bias.detach().requires_grad_(bias_grad is not None)
        for kind, at in pieces:
            part = hidden[at]
            products = product(part, weight.T).requires_grad_(differentiate)
            with torch.set_grad_enabled(differentiate):
                value = loss(kind, at, finish(products, bias))
            total += value.detach()
            if differentiate:
                slope, *of_bias = torch.autograd.grad(value, [products, bias][: 1 + (bias_grad is not None)])
                slope = slope.to(weight.dtype)
                hidden_grad.index_add_(0, at, slope @ weight)
                if head_is_trained:
                    product(slope.T, part, weight_grad)
                for gradient in of_bias:
                    bias_grad += gradient
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        hidden_grad, *of_head = ctx.saved_tensors
        of_head = (None if gradient is None else gradient * scale for gradient in of_head)
        return None, None, None, hidden_grad * scale.to(hidden_grad.dtype), *of_head

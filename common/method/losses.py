"""Distillation losses (Eq. 30): KL on prompt tokens and BiLD on answer tokens, computed in chunks of tokens.

The functions of logits return one loss per token. A sequence's loss is the mean over its tokens, the batch's
the mean over sequences: both are per-token weights, so packing and sharding do not change the result.

A model is called as trainee(row, function), which returns function(hidden states [T, h], head), a head as in
common/head.py. A row is a packed sequence of T tokens (common/training/packing.py) with, for each part of its
samples, "prompt", "answer" and "all", the weight of each position, PART_weight [T].
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

TOP_K = 16  # logits compared by BiLD (Appendix A)
BILD_TEMPERATURE = 3.0  # from the BiLD paper


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [n, V], targets [n] int64 -> [n] nats."""
    return F.cross_entropy(logits, targets, reduction="none")


def kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) over the vocabulary: logits [n, V], [n, V] -> [n] nats."""
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)


def differences(logits: torch.Tensor) -> torch.Tensor:
    """All l_i - l_j, i < j: [n, k] -> [n, k(k-1)/2]; 120 for k = 16."""
    rows, columns = torch.triu_indices(logits.shape[-1], logits.shape[-1], 1, device=logits.device)
    return logits[:, rows] - logits[:, columns]


def bild(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Bi-directional logits difference loss (Li et al. 2024): logits [n, V], [n, V] -> [n] nats.

    The sum of a teacher-led term, KL between the softmaxes of teacher's and student's pairwise differences of
    the teacher's TOP_K logits, in descending order, and a student-led term, the same for the student's.
    """
    count, loss = min(TOP_K, student.shape[-1]), 0
    for leader in (teacher, student):
        leading = leader.detach().topk(count).indices
        student_differences = differences(student.gather(-1, leading)) / BILD_TEMPERATURE
        teacher_differences = differences(teacher.gather(-1, leading)) / BILD_TEMPERATURE
        loss = loss + kl(student_differences, teacher_differences)
    return loss


TERMS = {  # of Eq. 30: name in metrics.jsonl -> its function of both models' logits, and the tokens it is on
    "kl": (kl, "prompt"),
    "bild": (bild, "answer"),
}


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


def product(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """left [n, k] @ right [k, m], in float32 from 16-bit factors; added to `total` in place if that is given.

    Logits in bfloat16 are off by up to 2^-9 of their size, which adds some 4e-4 nats to the KL of models that
    are close to each other.
    """
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    with exact_products(left.dtype):
        left, right = left.to(dtype), right.to(dtype)
        return left @ right if total is None else total.addmm_(left, right)


@contextlib.contextmanager
def exact_products(dtype: torch.dtype):
    """Within, CPUs multiply float32 matrices by their bfloat16 instructions if `dtype`, which the factors
    came in, is bfloat16: nothing is rounded, sums are float32, and it takes half the time.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


def chunked(loss, pieces: list, hidden: torch.Tensor, head) -> torch.Tensor:
    """Sum over pieces of loss(kind, at, logits at `at`), a scalar, holding one piece's logits at a time.

    pieces: (kind, at) pairs, at: [c] token positions in hidden [T, h]; head: as in common/head.py; loss
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

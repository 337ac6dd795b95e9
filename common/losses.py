"""Distillation (Eq. 30): KL on prompt tokens and BiLD on answer tokens, formed chunk by chunk of tokens.

Each function of logits returns one number per token; a sequence's loss is its tokens' mean, the batch's loss its
sequences' mean. Those means are weights given per token, so packing and sharding change nothing.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

TOP_K, TEMPERATURE = 16, 3.0  # k = 16: Appendix A; temperature 3: the BiLD paper's


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n, V] logits, [n] targets -> [n] nats."""
    return F.cross_entropy(logits, targets, reduction="none")


def kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) over the vocabulary at temperature 1. [n, V], [n, V] -> [n] nats."""
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def differences(logits: torch.Tensor) -> torch.Tensor:
    """All l_i - l_j, i < j: [n, k] -> [n, k(k-1)/2]; 120 for k = 16."""
    rows, columns = torch.triu_indices(logits.shape[-1], logits.shape[-1], 1, device=logits.device)
    return logits[:, rows] - logits[:, columns]


def bild(student: torch.Tensor, teacher: torch.Tensor, k: int = TOP_K, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Bi-directional logits difference loss (Li et al. 2024): [n, V], [n, V] -> [n] nats.

    Teacher-led: over the teacher's k largest logits, largest first, KL between the softmaxes of all pairwise
    differences of teacher and student; student-led: the same over the student's k largest. Their sum.
    """
    k = min(k, student.shape[-1])
    loss = 0
    for leader in (teacher, student):
        leading = leader.detach().topk(k, dim=-1).indices
        ours, theirs = (differences(logits.gather(-1, leading)) / temperature for logits in (student, teacher))
        loss = loss + kl(ours, theirs)
    return loss


def chunked(per_token, chunk: int, *rows: torch.Tensor) -> torch.Tensor:
    """sum over chunks of per_token(*rows of the chunk), each chunk recomputed in the backward pass.

    per_token takes chunk-sized slices of `rows` (same length each) and returns a tensor that is summed over chunks:
    what it builds inside (logits over the vocabulary) exists for one chunk at a time, forward and backward.
    """
    total = 0
    for parts in zip(*(tensor.split(chunk) for tensor in rows), strict=True):
        total = total + checkpoint(per_token, *parts, use_reentrant=False)
    return total

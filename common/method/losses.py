"""Distillation losses (Eq. 30) of logits: KL on prompt tokens, BiLD on answer tokens. One loss per token."""

import torch
import torch.nn.functional as F

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

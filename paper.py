"""The paper's equations and algorithms as printed.

Jin et al., "Align Attention Heads Before Merging Them" (EMNLP 2025): Eq. 1 to 31 and Algorithms 1 and 2 in
the paper's order and notation, on the vectors themselves, a head at a time, in the slow and obvious way.
Vectors are columns: K_i and V_i are [d_H, N], W_K_i is [d_H, d]. Heads and groups count from 1 in
formulas and from 0 in lists. transformers stores RoPE pair p at (p, p + d_H / 2). Where another formula
than the printed one is meant, that one follows it, and AUDIT.md says why. audit/ compares a run with all.
"""

import itertools
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

# ---- 3.1 Motivation ----------------------------------------------------------------------------------------


def eq_1(K: Tensor, H: int) -> list[Tensor]:
    """K = [K_1; ...; K_H]: the cache of a block [d, N] -> its heads [d_H, N]. The same for V."""
    return list(K.chunk(H))


def eq_2(K_i: Tensor, K_j: Tensor) -> Tensor:
    """SimK_ij^ori = 1/N sum_n cos(K_i[n], K_j[n])."""
    return cosine_similarity(K_i, K_j, dim=0).mean()


def eq_3(V_i: Tensor, V_j: Tensor) -> Tensor:
    """SimV_ij^ori = 1/N sum_n cos(V_i[n], V_j[n])."""
    return cosine_similarity(V_i, V_j, dim=0).mean()


# ---- 3.2 Preliminaries -------------------------------------------------------------------------------------


def eq_4(Q: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    """||Q X - Y||_F^2, to be minimized over orthogonal Q."""
    return (Q @ X - Y).square().sum()


def eq_5(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Y X^T = Phi Sigma Psi^T. Leading axes, if any, are a batch."""
    Phi, Sigma, Psi_T = torch.linalg.svd(Y @ X.mT)
    return Phi, Sigma, Psi_T.mT


def eq_6(Phi: Tensor, Psi: Tensor) -> Tensor:
    """Q = Psi Phi^T, as printed."""
    return Psi @ Phi.mT


def minimizer(Phi: Tensor, Psi: Tensor) -> Tensor:
    """Q = Phi Psi^T, the transpose of Eq. 6: what minimizes Eq. 4."""
    return eq_6(Phi, Psi).mT


def algorithm_1(X: list[Tensor], rotation=eq_6, rounds: int = 500, gain: float = 1e-10) -> list[Tensor]:
    """Generalized Procrustes Analysis: X_1 ... X_H, [N, d_H] each -> Y_1 ... Y_H, aligned.

    Y_i = X_i; M = 1/H sum_i Y_i; repeat: Y_i <- Y_i Psi_i Phi_i^T with Phi_i Sigma_i Psi_i^T = SVD(Y_i^T M)
    for each i; M = 1/H sum_i Y_i; until convergence: at most `rounds`, until |M|^2 rises by no more than
    `gain` of it. rotation(Phi, Psi): what Y_i is multiplied by. Leading axes, if any, are a batch.
    """
    Y = list(X)
    M = sum(Y) / len(Y)
    for _ in range(rounds):
        for i in range(len(Y)):
            Phi, _, Psi = eq_5(M.mT, Y[i].mT)
            Y[i] = Y[i] @ rotation(Phi, Psi)
        before, M = M, sum(Y) / len(Y)
        if (M.square().sum() - before.square().sum()).abs() <= gain * M.square().sum():
            break
    return Y


# ---- 3.3 Transformation of attention heads -----------------------------------------------------------------


def eq_7(K_i: Tensor) -> Tensor:
    """K^_i[*] = K_i[*] / ||K_i[*]||."""
    return normalize(K_i, dim=0)


def eq_8(V_i: Tensor) -> Tensor:
    """V^_i[*] = V_i[*] / ||V_i[*]||."""
    return normalize(V_i, dim=0)


def eq_9(V_i: Tensor, V_j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V^_i V^_j^T = Phi Sigma Psi^T, of unit-norm vectors."""
    return eq_5(V_j, V_i)


def eq_10(Phi: Tensor, Psi: Tensor) -> Tensor:
    """Q_Vj = Psi Phi^T, as printed."""
    return Psi @ Phi.mT


def eq_11(W_Q: list, W_K: list, W_V: list, W_O: list, X: Tensor, x: Tensor) -> Tensor:
    """MultiHead = sum_i W_O_i (W_V_i X) Softmax((W_K_i X)^T (W_Q_i x) / sqrt(d_H)), without RoPE.

    X: [d, len], the previous tokens; x: [d, 1], the current one.
    """
    output = 0
    for W_Q_i, W_K_i, W_V_i, W_O_i in zip(W_Q, W_K, W_V, W_O, strict=True):
        scores = (W_K_i @ X).mT @ (W_Q_i @ x) / math.sqrt(len(W_K_i))
        output = output + W_O_i @ ((W_V_i @ X) @ scores.softmax(0))
    return output


def eq_12(Q_V: Tensor, W_V: Tensor) -> Tensor:
    """W'_V = Q_V W_V."""
    return Q_V @ W_V


def eq_13(W_O: Tensor, Q_V: Tensor) -> Tensor:
    """W'_O = W_O Q_V^T."""
    return W_O @ Q_V.mT


def eq_14(R_theta: Tensor) -> Tensor:
    """R_K = diag(R_theta_1, ..., R_theta_d/2): rotations of RoPE pairs [d_H / 2, 2, 2] -> [d_H, d_H]."""
    half = len(R_theta)
    R_K = R_theta.new_zeros(2 * half, 2 * half)
    for p in range(half):
        pair = torch.tensor([p, p + half])
        R_K[pair[:, None], pair] = R_theta[p]
    return R_K


def pairs(K_i: Tensor) -> Tensor:
    """The d/2 sub-spaces of two dimensions: [d_H, N] -> [d_H / 2, 2, N]."""
    return torch.stack(K_i.chunk(2), dim=1)


def rotation_2d(Phi: Tensor, Psi: Tensor) -> Tensor:
    """The minimizer of Eq. 4 among rotations, where Phi Psi^T may be a reflection."""
    determinant = torch.linalg.det(minimizer(Phi, Psi))
    upright = torch.diag_embed(torch.stack((torch.ones_like(determinant), determinant), dim=-1))
    return Phi @ upright @ Psi.mT


def key_rotation(K_i: Tensor, K_j: Tensor) -> Tensor:
    """R_Kj of Eq. 14 that brings K_j closest to K_i: Procrustes analysis in every two dimensions."""
    Phi, _, Psi = eq_5(pairs(K_j), pairs(K_i))
    return eq_14(rotation_2d(Phi, Psi))


def eq_15(R_K: Tensor, W_Q: Tensor) -> Tensor:
    """W'_Q = R_K W_Q."""
    return R_K @ W_Q


def eq_16(R_K: Tensor, W_K: Tensor) -> Tensor:
    """W'_K = R_K W_K."""
    return R_K @ W_K


def rope(Theta: Tensor, s: int) -> Tensor:
    """R_Theta,s^d of RoPE at position s; Theta: [d_H / 2] radians per position."""
    cos, sin = (s * Theta).cos(), (s * Theta).sin()
    return eq_14(torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2))


def eq_17(W_Q: Tensor, W_K: Tensor, x_s: Tensor, x_t: Tensor, R_s: Tensor, R_t: Tensor) -> Tensor:
    """q_s^T k_t = (R_Theta,s^d W_Q x_s)^T (R_Theta,t^d W_K x_t)."""
    return (R_s @ W_Q @ x_s).mT @ (R_t @ W_K @ x_t)


def eq_18(K_i: Tensor, K_j: Tensor, R_K: Tensor) -> Tensor:
    """SimK_ij^after = 1/N sum_n cos(K_i[n], R_Kj K_j[n])."""
    return cosine_similarity(K_i, R_K @ K_j, dim=0).mean()


def eq_19(V_i: Tensor, V_j: Tensor, Q_V: Tensor) -> Tensor:
    """SimV_ij^after = 1/N sum_n cos(V_i[n], Q_Vj V_j[n])."""
    return cosine_similarity(V_i, Q_V @ V_j, dim=0).mean()


def eq_20(V_i: Tensor, V_j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V_i V_j^T = Theta Lambda Omega^T."""
    return eq_5(V_j, V_i)


def eq_21(Theta: Tensor, Omega: Tensor) -> Tensor:
    """P_Vj = Omega Theta^T, as printed."""
    return Omega @ Theta.mT


def eq_22(V_i: Tensor, V_j: Tensor, P_V: Tensor) -> Tensor:
    """SimV_ij^after = -1/N sum_n ||V_i[n] - P_Vj V_j[n]||."""
    return -(V_i - P_V @ V_j).norm(dim=0).mean()


def eq_22_squared(V_i: Tensor, V_j: Tensor, P_V: Tensor) -> Tensor:
    """Eq. 22 of squared distances, whose sum is what Procrustes analysis minimizes."""
    return -(V_i - P_V @ V_j).square().sum(0).mean()


# ---- 3.4 Find better grouping method -----------------------------------------------------------------------


def eq_23(A, SimK) -> float:
    """Score_key(A) = sum_g sum_{0 <= i < j < D} SimK^after[A_g[i], A_g[j]]; A: [G, D] heads, SimK: [H, H]."""
    return sum(SimK[i, j] for A_g in A for i, j in itertools.combinations(A_g, 2))


def eq_24(A, SimV) -> float:
    """Score_value(A) = sum_g sum_{0 <= i < j < D} SimV^after[A_g[i], A_g[j]]."""
    return sum(SimV[i, j] for A_g in A for i, j in itertools.combinations(A_g, 2))


def algorithm_2(maxIter: int, epoch: int, Sim, G: int, random: np.random.Generator):
    """Simulated Annealing: the grouping with the highest score [G, D], and that score.

    `epoch` times: begin with a random grouping; `maxIter` times swap two elements of different groups, and
    keep the swap if the score rises. Sim: SimK or SimV [H, H].
    """
    score_best, bestG_n = -math.inf, None
    for _ in range(epoch):
        G_n = random.permutation(len(Sim)).reshape(G, -1)
        score_current = eq_24(G_n, Sim)
        if score_current > score_best:
            score_best, bestG_n = score_current, G_n
        for _ in range(maxIter if G > 1 else 0):
            first, second = random.choice(G, 2, replace=False)
            a, b = random.integers(len(G_n[0]), size=2)
            swapped = G_n.copy()
            swapped[first, a], swapped[second, b] = G_n[second, b], G_n[first, a]
            score_new = eq_24(swapped, Sim)
            if score_new > score_current:
                G_n, score_current = swapped, score_new
                if score_new > score_best:
                    score_best, bestG_n = score_new, swapped
    return bestG_n, score_best


# ---- 3.5 Adaptation of L_0 regularization ------------------------------------------------------------------


def eq_25(W_K: list[Tensor], g: int, D: int) -> Tensor:
    """W~_K_bg = 1/D sum_{i=1}^D W_K_b,(g-1)*D+i."""
    return sum(W_K[(g - 1) * D + i - 1] for i in range(1, D + 1)) / D


def eq_26(W_V: list[Tensor], g: int, D: int) -> Tensor:
    """W~_V_bg = 1/D sum_{i=1}^D W_V_b,(g-1)*D+i."""
    return sum(W_V[(g - 1) * D + i - 1] for i in range(1, D + 1)) / D


def eq_27(z: Tensor, W_K: list[Tensor], W_K_new: list[Tensor], j: int, D: int) -> Tensor:
    """W_K_bj^apply = z_bj W_K_bj + (1 - z_bj) W~_K_bg, g = ceil(j / D); z: [H] of block b."""
    g = math.ceil(j / D)
    return z[j - 1] * W_K[j - 1] + (1 - z[j - 1]) * W_K_new[g - 1]


def eq_28(z: Tensor, W_V: list[Tensor], W_V_new: list[Tensor], j: int, D: int) -> Tensor:
    """W_V_bj^apply = z_bj W_V_bj + (1 - z_bj) W~_V_bg, g = ceil(j / D)."""
    g = math.ceil(j / D)
    return z[j - 1] * W_V[j - 1] + (1 - z[j - 1]) * W_V_new[g - 1]


BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1  # of Louizos et al.


def hard_concrete(u: Tensor, log_alpha: Tensor) -> Tensor:
    """z = min(1, max(0, s (zeta - gamma) + gamma)), s = sigmoid((log u - log(1 - u) + log alpha) / beta)."""
    s = torch.sigmoid((u.log() - (1 - u).log() + log_alpha) / BETA)
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(z > 0) = sigmoid(log alpha - beta log(-gamma / zeta)), the expected L0 norm (Louizos et al.)."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def without_noise(log_alpha: Tensor) -> Tensor:
    """z = min(1, max(0, sigmoid(log alpha) (zeta - gamma) + gamma)), for testing (Louizos et al.)."""
    return (torch.sigmoid(log_alpha) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def target_size(step: int, steps: int) -> float:
    """T of Eq. 29: decreases linearly from 1 to 0 over the first 30 % of the steps (Appendix A)."""
    return max(0.0, 1 - step / (0.3 * steps))


def masked_steps(steps: int) -> int:
    """The masks end after 80 % of the steps, and the student is a GQA model from there on (Appendix A)."""
    return int(0.8 * steps)


def eq_29(z: Tensor, T: float) -> Tensor:
    """L_L0 = |(1/(N_block H) sum z) - T| + ((1/(N_block H) sum z) - T)^2; z: [N_block, H]."""
    return (z.sum() / z.numel() - T).abs() + (z.sum() / z.numel() - T) ** 2


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Vanilla KL loss: sum p log(p / q), p of the teacher's logits [..., V], q of the student's."""
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def bild(student: Tensor, teacher: Tensor, k: int = 16, temperature: float = 3.0) -> Tensor:
    """BiLD loss (Li et al.) of a token's logits [V]: a teacher-led and a student-led term.

    Each is the KL of all differences l_a - l_b of the leader's k largest logits, a before b.
    """
    loss = 0
    for leader in (teacher, student):
        top = leader.argsort(descending=True)[:k].tolist()
        led = [torch.stack([logits[a] - logits[b] for a, b in itertools.combinations(top, 2)])
               for logits in (student, teacher)]
        loss = loss + kl(led[0] / temperature, led[1] / temperature)
    return loss


def eq_30(L_KL: Tensor, L_BiLD: Tensor) -> Tensor:
    """L_distill = L_KL + L_BiLD."""
    return L_KL + L_BiLD


def eq_31(L_distill: Tensor, L_L0: Tensor) -> Tensor:
    """L = L_distill + L_L0."""
    return L_distill + L_L0

"""The paper's whole method in one sitting, on paper.py: from a checkpoint to one with fewer key/value heads.

    python minimal.py --model demo --kv-heads 2              # a minute on a CPU; writes runs/minimal/
    python minimal.py --model DIR --text FILE.txt --kv-heads 8

The obvious way, in the paper's order: head vectors in memory, similarities, groups, rotations fused into the
weights, merged groups, L0 masks under distillation, a stock checkpoint. The seven stages do the same at
scale, with a fine-tuned teacher, records, resumption and refusals. Here the source is the teacher, the second
half of a piece of text counts as an answer, and learning rates are constant. For Llamas without biases, with
as many key/value heads as heads. Of a formula printed otherwise than meant (Eq. 6), the meant one is used.
"""

import argparse
import copy
import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import paper

DEMO = Path(__file__).parent / "common" / "data" / "demo_model"
SEQUENCES, LENGTH = 32, 128  # of calibration; the paper: 128 of 2048 tokens
RESTARTS, SWAPS = 20, 300  # of Algorithm 2; the paper: 200, 3000
ROUNDS, GAIN = 50, 1e-6  # of Algorithm 1
STEPS, BATCH, SAMPLE = 60, 4, 32  # of training: steps, samples a step, tokens of a sample
LR, MASK_LR, L0_WEIGHT = 1e-3, 0.5, 30.0  # the paper, for many more steps: 1e-5, 1e-2, 1
CLIP, START = 1.0, 7.5  # of the gradient's norm; log alpha at first, which |log alpha| never exceeds


def read_tokens(tokenizer, text: str, sequences: int, length: int) -> torch.Tensor:
    """[sequences, length] tokens from the beginning of a text."""
    ids = tokenizer(text[: 16 * sequences * length], add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: sequences * length]).view(sequences, length)


@torch.no_grad()
def perplexity(model, tokens: torch.Tensor) -> float:
    losses = [model(input_ids=row[None], labels=row[None]).loss for row in tokens]
    return math.exp(sum(losses) / len(losses))


# ---- 3.1: the heads' keys, before RoPE, and values ---------------------------------------------------------


@torch.no_grad()
def head_vectors(model, tokens: torch.Tensor) -> list[tuple[list, list]]:
    """Per layer K_1 ... K_H and V_1 ... V_H, [d_H, N] each in float64, of all tokens (Eq. 1)."""
    outputs, hooks = {}, []
    for b, layer in enumerate(model.model.layers):
        for letter in "kv":

            def keep(module, inputs, output, key=(b, letter)):
                outputs.setdefault(key, []).append(output[0].double())

            hooks.append(getattr(layer.self_attn, f"{letter}_proj").register_forward_hook(keep))
    for row in tqdm(tokens, "calibrating"):
        model(input_ids=row[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    H = model.config.num_key_value_heads
    return [tuple(paper.eq_1(torch.cat(outputs[b, letter]).T, H) for letter in "kv")
            for b in range(len(model.model.layers))]


# ---- 3.3, 3.4: similarity after alignment, groups, rotations -----------------------------------------------


def similarity(V: list) -> np.ndarray:
    """SimV^after of all pairs of heads [H, H]: Eq. 22, squared, after the best rotation (Eq. 20, 21)."""
    Sim = np.zeros((len(V), len(V)))
    for i, V_i in enumerate(V):
        for j, V_j in enumerate(V):
            Theta, _, Omega = paper.eq_20(V_i, V_j)
            Sim[i, j] = paper.eq_22_squared(V_i, V_j, paper.eq_21(Theta, Omega).mT)
    return Sim


def align(K: list, V: list) -> tuple[list, list]:
    """R_K and Q_V of a group's heads, by Algorithm 1: keys in each RoPE pair, values in all dimensions."""
    keys = paper.algorithm_1([paper.pairs(K_i).mT for K_i in K], paper.rotation_2d, ROUNDS, GAIN)
    values = paper.algorithm_1([V_i.mT for V_i in V], paper.minimizer, ROUNDS, GAIN)
    R, Q = [], []
    for K_i, V_i, key, value in zip(K, V, keys, values, strict=True):  # what turned K_i and V_i into these
        Phi, _, Psi = paper.eq_5(paper.pairs(K_i), key.mT)
        R.append(paper.eq_14(paper.rotation_2d(Phi, Psi)))
        Phi, _, Psi = paper.eq_5(V_i, value.mT)
        Q.append(paper.minimizer(Phi, Psi))
    return R, Q


def heads_of(weight: torch.Tensor, letter: str, d_H: int) -> tuple:
    """W_Q, W_K or W_V of each head [d_H, d], or W_O [d, d_H]."""
    return weight.split(d_H, dim=1 if letter == "o" else 0)


@torch.no_grad()
def fuse(attention, A: list, R: list, Q: list) -> None:
    """Eq. 12 to 16: the heads in the order of their groups A [G][D], rotated; the layer's function stays.

    R, Q: of each head in that order.
    """
    order, d_H = [head for group in A for head in group], attention.head_dim
    fused = {"q": (paper.eq_15, R), "k": (paper.eq_16, R), "v": (paper.eq_12, Q), "o": (paper.eq_13, Q)}
    for letter, (equation, rotations) in fused.items():
        weight = getattr(attention, f"{letter}_proj").weight
        heads = heads_of(weight.double(), letter, d_H)
        turned = [equation(heads[h], turn) if letter == "o" else equation(turn, heads[h])
                  for h, turn in zip(order, rotations, strict=True)]
        weight.copy_(torch.cat(turned, dim=1 if letter == "o" else 0))


def aligned_model(source, vectors: list, kv_heads: int) -> tuple:
    """The source with aligned heads, and the groups of each layer. vectors: from head_vectors."""
    aligned, groups = copy.deepcopy(source), []
    for layer, (K, V) in zip(aligned.model.layers, tqdm(vectors, "aligning"), strict=True):
        A, _ = paper.algorithm_2(SWAPS, RESTARTS, similarity(V), kv_heads, np.random.default_rng(0))
        R, Q = zip(*(align([K[i] for i in group], [V[i] for i in group]) for group in A), strict=True)
        fuse(layer.self_attn, A.tolist(), sum(R, []), sum(Q, []))
        groups.append(A.tolist())
    return aligned, groups


@torch.no_grad()
def merge(aligned, kv_heads: int):
    """Eq. 25, 26: the GQA model whose shared heads are the means of groups of aligned heads."""
    config, weights = copy.deepcopy(aligned.config), aligned.state_dict()
    D, config.num_key_value_heads = config.num_key_value_heads // kv_heads, kv_heads
    for name in weights:
        for letter, equation in (("k", paper.eq_25), ("v", paper.eq_26)):
            if f".{letter}_proj." in name:
                W = heads_of(weights[name].double(), letter, config.head_dim)
                means = torch.cat([equation(W, g, D) for g in range(1, kv_heads + 1)])
                weights[name] = means.to(weights[name].dtype)
    merged = type(aligned)(config)
    merged.load_state_dict(weights)
    return merged.eval()


# ---- 3.5: masks and distillation ---------------------------------------------------------------------------


class Student:
    """The aligned model whose heads move from their own keys and values to their group's, as z falls."""

    def __init__(self, aligned, merged):
        self.net, self.d_H, self.H = aligned, aligned.config.head_dim, aligned.config.num_key_value_heads
        self.D = self.H // merged.config.num_key_value_heads
        self.own, self.shared = (
            {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()
             if model is aligned or ".k_proj." in name or ".v_proj." in name} for model in (aligned, merged))
        self.log_alpha = torch.full((len(aligned.model.layers), self.H), START, requires_grad=True)

    def logits(self, ids: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of tokens [T] with masks z [N_block, H]."""
        weights = dict(self.own)
        for name, shared in self.shared.items():
            letter = name.split("_proj.")[0][-1]
            apply, b = (paper.eq_27 if letter == "k" else paper.eq_28), int(name.split(".")[2])
            W, W_new = (heads_of(weight, letter, self.d_H) for weight in (self.own[name], shared))
            weights[name] = torch.cat([apply(z[b], W, W_new, j + 1, self.D) for j in range(self.H)])
        inputs = {"input_ids": ids[None], "use_cache": False}
        return functional_call(self.net, weights, kwargs=inputs).logits[0]

    def optimizer(self) -> torch.optim.AdamW:
        masks = {"params": [self.log_alpha], "lr": MASK_LR, "betas": (0.9, 0.9), "eps": 1e-12}
        weights = {"params": [*self.own.values(), *self.shared.values()]}
        return torch.optim.AdamW([weights, masks], LR, weight_decay=0.0)


def distillation(student: Student, teacher, batch: list, z: torch.Tensor) -> tuple:
    """L_KL of prompts' tokens and L_BiLD of answers': means over a sample's tokens, then over samples."""
    L_KL = L_BiLD = 0
    for prompt, answer in batch:
        ids = torch.cat((prompt, answer))
        with torch.no_grad():
            targets = teacher(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logits, asked = student.logits(ids, z)[:-1], len(prompt) - 1  # a token's logits predict the next one
        L_KL = L_KL + paper.kl(logits, targets)[:asked].mean() / len(batch)
        answers = [paper.bild(*pair) for pair in zip(logits[asked:], targets[asked:], strict=True)]
        L_BiLD = L_BiLD + sum(answers) / len(answers) / len(batch)
    return L_KL, L_BiLD


def train(student: Student, teacher, samples: list, steps: int, batch: int):
    """Yield L_KL, L_BiLD, L_L0 and the masks z [N_block, H] of each step."""
    optimizer = student.optimizer()
    for step in range(steps):
        chosen = [samples[number % len(samples)] for number in range(step * batch, (step + 1) * batch)]
        masked, L_L0 = step < paper.masked_steps(steps), torch.zeros(())
        z = torch.zeros(student.log_alpha.shape)  # after the masked steps: a GQA model
        if masked:
            u = torch.rand(z.shape, generator=torch.Generator().manual_seed(step)).clamp(1e-6, 1 - 1e-6)
            z = paper.hard_concrete(u, student.log_alpha)
            L_L0 = paper.eq_29(paper.open_probability(student.log_alpha), paper.target_size(step, steps))
        L_KL, L_BiLD = distillation(student, teacher, chosen, z)
        paper.eq_31(paper.eq_30(L_KL, L_BiLD), L0_WEIGHT * L_L0).backward()
        torch.nn.utils.clip_grad_norm_([*student.own.values(), *student.shared.values()], CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            student.log_alpha.clamp_(-START, START)
        yield *(loss.item() for loss in (L_KL, L_BiLD, L_L0)), z.detach()


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="demo", help="demo, or a checkpoint's directory or hub name")
    parser.add_argument("--text", help="a text file; its last tenth is not trained on (default: the demo's)")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--out", default="runs/minimal")
    args = parser.parse_args()
    name = DEMO if args.model == "demo" else args.model
    source = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if args.text:
        text = Path(args.text).read_text()
        text, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    else:
        files = (DEMO / "text" / f"{part}.txt.gz" for part in ("train", "heldout"))
        text, unseen = (gzip.decompress(file.read_bytes()).decode() for file in files)
    tokens, unseen = (read_tokens(tokenizer, part, SEQUENCES, LENGTH) for part in (text, unseen))

    aligned, _ = aligned_model(source, head_vectors(source, tokens), args.kv_heads)
    merged = merge(aligned, args.kv_heads)

    ids = read_tokens(tokenizer, text, STEPS * BATCH, SAMPLE)
    samples = [row.split(SAMPLE // 2) for row in ids]
    student, gqa = Student(aligned, merged), copy.deepcopy(merged)
    bar = tqdm(train(student, source, samples, STEPS, BATCH), "training", STEPS)
    for L_KL, L_BiLD, _, z in bar:
        bar.set_postfix_str(f"KL {L_KL:.3f}, BiLD {L_BiLD:.3f}, masks {z.mean():.2f}")
    gqa.load_state_dict(student.own | student.shared)
    gqa.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    print(f"wrote {args.out}; perplexity of text that was not trained on:")
    for title, model in (("source", source), ("aligned", aligned), ("merged", merged), ("trained", gqa)):
        print(f"  {title}, {model.config.num_key_value_heads} kv heads: {perplexity(model, unseen):.2f}")


if __name__ == "__main__":
    main()

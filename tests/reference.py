"""What the code is compared with: definitions written out, and students that train by them."""

import contextlib
import copy
import importlib
import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.data.rows import Sample
from common.method.merge import Merge, mean_merge
from common.method.rope import quarter_phase
from common.models import blending
from common.models.edits import merge_layer, merged_config
from common.models.families import free_pairs, geometry, needs_eager, norm_kind
from common.models.load import load_config
from common.training import students
from common.training.attention import Trainee
from common.training.conversion import Conversion
from common.training.engine import Job, Schedule, Step, steps
from common.training.heldout import Heldout
from common.training.lines import TASK_SET, TEXT_SET
from common.training.mask_state import Masks
from common.training.sharding import Execution, Ranks, build
from common.training.students import Rates
from common.training.teacher import build_teacher
from models import save_tiny, tiny_model

stage5 = importlib.import_module("05_prune_train")
SAMPLES = [Sample((1, 2, 3, 4), (5, 6)), Sample((7, 8), (9, 10, 11)), Sample((12, 13, 14), (15,))]
STEPS = 5
SCHEDULE = Schedule(steps=STEPS, batch=2, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=64,
                    save_steps=None, save_minutes=60.0, print_every=100, loss_chunk=7)
RATES = Rates(1e-2, beta2=0.999, weight_decay=0.0)
LOSS = stage5.Loss(kl_on="prompt", l0_weight=1.0)
ALONE = Ranks(0, 1, torch.device("cpu"))
NOTHING = Heldout({}, 1)
IN_FLOAT32 = Execution()
TWO_TEXTS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(5))
FREQUENCIES = torch.tensor([1.0, 0.3, 0.02, 0.001], dtype=torch.float64)
DISTANCES = torch.tensor([0.0, 1.0, 4.0, 11.0, 40.0], dtype=torch.float64)


def all_groupings(heads: list[int], size: int):
    """Yield all ways to split heads into groups of a size, in canonical order."""
    if not heads:
        yield []
        return
    for others in itertools.combinations(heads[1:], size - 1):
        rest = [head for head in heads[1:] if head not in others]
        for groups in all_groupings(rest, size):
            yield [[heads[0], *others], *groups]


def plain_merge(source_kv_heads: int, kv_heads: int, head_dim: int) -> Merge:
    """The mean of groups of adjacent heads."""
    groups = torch.arange(source_kv_heads).view(kv_heads, -1)
    return mean_merge(None, groups, torch.empty(*groups.shape, head_dim, head_dim), None)


@torch.no_grad()
def merge_model(model, kv_heads: int, merges: list[Merge] | None = None):
    """A stock GQA model from a model whose groups are consecutive; the two share no tensors.

    merges: one per layer; default: the paper's means.
    """
    config = merged_config(model.config, kv_heads)
    merged = type(model)(config).to(model.dtype).eval()
    state = model.state_dict()
    for index, layer in enumerate(model.model.layers):
        head_dim = layer.self_attn.head_dim
        source_kv_heads = model.config.num_key_value_heads
        merge = merges[index] if merges else plain_merge(source_kv_heads, kv_heads, head_dim)
        merged_layer = merge_layer(layer, index, config, merge).state_dict()
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in merged_layer.items()}
    merged.load_state_dict(state)
    return merged


def masked_student(log_alpha: torch.Tensor) -> Trainee:
    """A student whose merged projections are random, with these mask parameters."""
    model = tiny_model(seed=0, attn_implementation="packed")
    torch.manual_seed(1)
    blending.patch(model, 2)
    for _, _, projections in blending.blended_projections(model):
        for projection in projections:
            torch.nn.init.normal_(projection.merged.weight, std=0.1)
    return Trainee(model, {"log_alpha": log_alpha})


class Gradients(Step):
    """A step of a model that is not sharded, which leaves the gradients as they are."""

    @property
    def rows(self):
        return iter(self._rows)

    def update(self, **figures) -> None:
        self.metrics |= figures


def rates(optimizer, trainee) -> dict[str, float]:
    """The peak learning rate of each parameter, by name."""
    names = {id(parameter): name for name, parameter in trainee.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: group["initial_lr"] for group in groups for parameter in group["params"]}


def saved(path: Path, **options) -> str:
    """A tiny model's directory, written once."""
    return str(path) if path.exists() else save_tiny(path, **options)


def built(source: str, ranks, execution: Execution = IN_FLOAT32) -> Trainee:
    """A checkpoint's model, sharded."""
    return build(load_config(source), ranks, execution, lambda name: (source, name))


def saved_pair(directory: Path, blended=blending.KEY_VALUE, dtype=torch.float32, **options) -> Conversion:
    """Random models of 8 and of 2 kv heads in place of aligned/ and merged/."""
    paths = [save_tiny(directory / f"of-{kv_heads}", dtype, num_key_value_heads=kv_heads, **options)
             for kv_heads in (8, 2)]
    return Conversion(*paths, {"layers": 3, "kv_heads": 8}, 2, "mean", blended)


@contextlib.contextmanager
def pretended_ranks(world: int):
    """Context manager: the first of so many ranks, eight a node, whose collectives do nothing."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", "8")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            yield Ranks(0, world, torch.device("cpu"))
        finally:
            dist.destroy_process_group()


@dataclass
class Student:
    """A student in training by the steps of stage 5."""

    job: Job
    teacher: Trainee
    masks: Masks | None = None

    def take(self, step: Step) -> None:
        """A step's body."""
        if self.masks:
            stage5.masked_step(step, self.masks, self.teacher, LOSS)
        else:
            stage5.gqa_step(step, self.teacher, LOSS)

    def train(self, heldout: Heldout = NOTHING, before_step=lambda step: None) -> bool:
        """Train to the end of SCHEDULE. Returns False if a signal stopped it."""
        for step in steps(self.job, SCHEDULE, SAMPLES):
            before_step(step)
            self.take(step)
            heldout.measure(step, self.teacher)
        return not self.job.stopped


def in_training(ranks, directory: Path, execution: Execution, trainee, optimizer, masks=None) -> Student:
    """A student that starts in this directory, beside which its teacher is."""
    directory.mkdir(exist_ok=True)
    teacher = build_teacher(saved(directory.parent / "teacher", seed=1), ranks, execution)
    return Student(Job(trainee, optimizer, str(directory), ranks), teacher, masks)


def gqa_student(ranks, tmp_path, name: str = "train", execution: Execution = IN_FLOAT32) -> Student:
    """A student with two kv heads. Its checkpoint has dropout, which no training takes over."""
    source = saved(tmp_path / "student", num_key_value_heads=2, attention_dropout=0.5)
    student = built(source, ranks, execution)
    optimizer = students.student_optimizer(student, RATES, blending.KEY_VALUE)
    return in_training(ranks, tmp_path / name, execution, student, optimizer)


def half_masked_student(ranks, tmp_path, name: str = "train", execution: Execution = IN_FLOAT32) -> Student:
    """A student whose masks are partly open."""
    aligned = saved(tmp_path / "aligned")
    merged = saved(tmp_path / "merged", seed=2, num_key_value_heads=2)
    log_alpha = torch.linspace(-4, 4, 24).view(3, 8)
    student = build(load_config(aligned), ranks, execution, students.start_of_masked(aligned, merged),
                    lambda model: blending.patch(model, 2), {"log_alpha": log_alpha})
    optimizer = students.masked_optimizer(student, RATES, "l0", mask_lr=1.0)
    trained = Masks(student.replicated, STEPS, seed=0)
    blending.set_masks(student.net, trained.noiseless())
    return in_training(ranks, tmp_path / name, execution, student, optimizer, trained)


def logits_of_two_texts(model) -> torch.Tensor:
    model.set_attn_implementation("eager" if needs_eager(model.config) else "sdpa")
    with torch.no_grad():
        return model(TWO_TEXTS).logits


def random_rotations(attention, generator):
    """Random rotations of values and keys, of the kind that is exact for this layer."""
    heads, size = geometry(attention.config).kv_heads, attention.head_dim
    values = torch.linalg.qr(torch.randn(heads, size, size, dtype=torch.float64, generator=generator)).Q
    angles = torch.rand(heads, size // 2, dtype=torch.float64, generator=generator) * 2 * torch.pi
    turns = torch.polar(torch.ones_like(angles), angles)
    if norm_kind(attention) == "joint":
        return values, quarter_phase(turns)
    return values, torch.where(free_pairs(attention), turns, turns.real.sign())


def blended(model, merged, names: tuple):
    """A student with masks over both models' modules: open they give the source, closed the merged model."""
    student = copy.deepcopy(model)
    blending.patch(student, 2, names)
    state, shared = student.state_dict(), merged.state_dict()
    shared = {blending.blended_name(name, names): tensor for name, tensor in shared.items()}
    student.load_state_dict(state | {name: tensor for name, tensor in shared.items() if name in state})
    shape = len(model.model.layers), geometry(model.config).kv_heads
    blending.set_masks(student, torch.ones(shape))
    assert torch.equal(logits_of_two_texts(student), logits_of_two_texts(model))
    blending.set_masks(student, torch.zeros(shape))
    torch.testing.assert_close(logits_of_two_texts(student), logits_of_two_texts(merged), rtol=0, atol=1e-4)
    return student


def varlen_formula(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
                   enable_gqa=False):
    """varlen_attn as its documentation describes it: softmax of each sample's scores within the window."""
    arguments = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    options = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
    inspect.signature(varlen_attn).bind(*arguments, **options)
    for starts, longest in ((cu_seq_q, max_q), (cu_seq_k, max_k)):
        assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == len(query)
        assert longest == starts.diff().max()
    assert enable_gqa or query.shape[1] == key.shape[1]
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    before, after = (reach if reach >= 0 else len(query) for reach in window_size)
    scale, outputs = scale or query.shape[-1] ** -0.5, []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        position = torch.arange(end - start)
        distance = position[:, None] - position
        outside = (distance > before) | (distance < -after)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(outside, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def random_samples(count: int, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())

    return [Sample(ids(4, 30), ids(2, 6)) for _ in range(count)]


def correlated(seed: int, count: int, noise: float, tokens: int = 300, size: int = 8) -> torch.Tensor:
    """Head vectors [tokens, count, size] that are maps of one source, and noise."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(tokens, 1, size, generator=generator, dtype=torch.float64)
    maps = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    rest = torch.randn(tokens, count, size, generator=generator, dtype=torch.float64)
    return torch.einsum("nzd,hde->nhe", source, maps) + noise * rest


def value_gram(values: torch.Tensor) -> torch.Tensor:
    """The definition: C[i, j] = sum_n v_i v_j^T of values [n, H, d]."""
    return torch.einsum("nia,njb->ijab", values, values)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rope_rotations(frequencies=FREQUENCIES, distances=DISTANCES) -> torch.Tensor:
    """R(-t) for each distance, [n, d, d], as cosines and sines."""
    angles = distances[:, None] * frequencies
    cosine, sine = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    return torch.cat((torch.cat((cosine, sine), 2), torch.cat((-sine, cosine), 2)), 1)


def heldout_sets() -> dict[str, list[Sample]]:
    """Texts; and questions with a chat among them, whose answers are told apart.

    Of these seeds the tiny student and its teacher agree on a token here and there.
    """
    texts = [Sample(sample.prompt) for sample in random_samples(5, seed=27)]
    chat = Sample(*(segment for sample in random_samples(2, seed=1) for segment in sample.segments))
    return {TEXT_SET: texts, TASK_SET: [*random_samples(6, seed=27), chat]}


HELDOUT = Heldout(heldout_sets(), every=2)


def measured(student) -> dict[str, float]:
    metrics = HELDOUT.metrics(student.job, student.teacher, SCHEDULE)
    assert metrics.pop("heldout_seconds") > 0
    return metrics


def compared(ours: torch.Tensor, theirs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """What COMPARED is at each position: of log-probabilities [..., V] and next tokens [...]."""
    return {
        "kl": (theirs.exp() * (theirs - ours)).sum(-1),
        "loss": -ours.gather(-1, targets[..., None])[..., 0],
        "teacher_loss": -theirs.gather(-1, targets[..., None])[..., 0],
        "agreement": (ours.argmax(-1) == theirs.argmax(-1)).double(),
    }

"""The paper's table of weights saved, from a config alone: what a skipless model loses without Q and P.

Like the paper, it counts matrices and leaves out biases and norms. The possible speed-up is for one sequence
when reading the weights takes all the time: total weights over remaining weights.
"""

from dataclasses import dataclass

from common.cli import UserError
from common.families import SUPPORTED, geometry
from related.skipless.modeling import SkiplessConfig

PYTHIA = "gpt_neox"
COUNTED = (*SUPPORTED, SkiplessConfig.model_type, PYTHIA)  # model types
COLUMNS = ("model", "blocks", "attention", "Q + P per layer", "weights", "without Q and P", "saved, speed-up",
           "by an exact fold")


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: q, p, kv and ffn of one layer, embeddings of the whole model."""

    parallel: bool
    attention: str  # MHA, GQA or MQA
    square: bool  # whether Q and P are square: otherwise nothing can be removed
    layers: int
    q: int
    p: int
    kv: int
    ffn: int
    embeddings: int
    untied: int  # what untying adds: a tied embedding must be stored twice once Q is multiplied into it

    @property
    def total(self) -> int:
        return self.layers * (self.q + self.p + self.kv + self.ffn) + self.embeddings

    @property
    def without_q_p(self) -> int:
        """With neither Q nor P, as in the paper's table."""
        return self.total - self.layers * (self.q + self.p) + self.untied

    @property
    def folded(self) -> int:
        """What an exact fold leaves: a parallel block keeps P, which no matrix of its own follows."""
        return self.without_q_p + self.layers * self.p * self.parallel

    def figures(self) -> dict:
        """Fields and sums, for a JSON report."""
        sums = {"total": self.total, "without_q_p": self.without_q_p, "folded": self.folded}
        return vars(self) | sums


def count(config) -> Weights:
    """The weights of a model with this transformers config. Raises UserError for an unknown model_type."""
    if config.model_type not in COUNTED:
        raise UserError(f"--config: expected model_type in {sorted(COUNTED)}, "
                        f"found {config.model_type!r}")
    shape, embedding = geometry(config), config.vocab_size * config.hidden_size
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tied = config.tie_word_embeddings
    gated = getattr(config, "gated", config.model_type != PYTHIA)
    return Weights(
        parallel=getattr(config, "parallel", getattr(config, "use_parallel_residual", False)),
        attention=attention_name(shape),
        square=width == shape.hidden,
        layers=shape.layers,
        q=shape.hidden * width,
        p=width * shape.hidden,
        kv=2 * shape.hidden * kv_width,
        ffn=(3 if gated else 2) * shape.hidden * config.intermediate_size,
        embeddings=embedding if tied else 2 * embedding,
        untied=embedding if tied else 0,
    )


def attention_name(shape) -> str:
    """MHA, GQA or MQA."""
    if shape.kv_heads == shape.heads:
        return "MHA"
    return "MQA" if shape.kv_heads == 1 else "GQA"


def saving(before: int, after: int) -> str:
    """For example "15%, 1.17x": the share of weights saved and the possible speed-up."""
    return f"{1 - after / before:.0%}, {before / after:.2f}x"


def cells(name: str, weights: Weights) -> tuple[str, ...]:
    """The row of one model under COLUMNS."""
    without = remaining = "-"
    saved = "Q is not square"
    if weights.square:
        without = f"{weights.without_q_p:,}"
        saved, remaining = (saving(weights.total, after) for after in (weights.without_q_p, weights.folded))
    blocks = "parallel" if weights.parallel else "serial"
    q_p, total = f"{weights.q + weights.p:,}", f"{weights.total:,}"
    return name, blocks, weights.attention, q_p, total, without, saved, remaining

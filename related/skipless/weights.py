"""The paper's table of weights saved, from a config alone: what a skipless model of this shape would lose with Q and P.

As the paper, it counts matrices and leaves out biases and norms. The possible speed-up is that of one sequence where reading the
weights is all that takes time: total / what remains.
"""

from dataclasses import dataclass

from common.cli import UserError
from common.models import SUPPORTED, geometry

FFN_MATRICES = dict.fromkeys((*SUPPORTED, "skipless_llama"), 3) | {"gpt_neox": 2}  # by model_type: a gated FFN has three


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: of one layer's matrices, of all embeddings, and in all."""

    parallel: bool
    attention: str  # MHA, GQA or MQA
    square: bool  # whether Q and P are: otherwise nothing can be removed
    layers: int
    q: int
    p: int
    kv: int
    ffn: int
    embeddings: int
    untied: int  # a tied embedding must be stored twice once Q is in it

    @property
    def total(self) -> int:
        return self.layers * (self.q + self.p + self.kv + self.ffn) + self.embeddings

    @property
    def without_q_p(self) -> int:
        """With neither Q nor P, as the paper's table has it."""
        return self.total - self.layers * (self.q + self.p) + self.untied

    @property
    def folded(self) -> int:
        """What an exact fold leaves: a parallel block, whose P is not followed by a matrix of its own, keeps P."""
        return self.without_q_p + self.layers * self.p * self.parallel


def count(config) -> Weights:
    """The weights of a model of this transformers config. Raises UserError for a model_type whose layers are not known."""
    if config.model_type not in FFN_MATRICES:
        raise UserError(f"--config: expected model_type in {sorted(FFN_MATRICES)}, found {config.model_type!r}")
    shape, embedding = geometry(config), config.vocab_size * config.hidden_size
    d, e = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return Weights(
        parallel=getattr(config, "parallel", getattr(config, "use_parallel_residual", False)),
        attention="MHA" if shape.kv_heads == shape.heads else "MQA" if shape.kv_heads == 1 else "GQA",
        square=d == shape.hidden,
        layers=shape.layers,
        q=shape.hidden * d,
        p=d * shape.hidden,
        kv=2 * shape.hidden * e,
        ffn=FFN_MATRICES[config.model_type] * shape.hidden * config.intermediate_size,
        embeddings=embedding if config.tie_word_embeddings else 2 * embedding,
        untied=embedding if config.tie_word_embeddings else 0,
    )


def saving(before: int, after: int) -> str:
    """"15%, 1.17x": the share saved and the possible speed-up."""
    return f"{1 - after / before:.0%}, {before / after:.2f}x"


def rows(models: dict[str, Weights]) -> list[tuple[str, ...]]:
    """The table: a heading, and a row a model."""
    table = [("model", "blocks", "attention", "Q + P a layer", "weights", "without Q and P", "saved, speed-up", "by an exact fold")]
    for name, found in models.items():
        saved = ("-", "Q is not square", "-")
        if found.square:
            saved = f"{found.without_q_p:,}", saving(found.total, found.without_q_p), saving(found.total, found.folded)
        table.append((name, "parallel" if found.parallel else "serial", found.attention, f"{found.q + found.p:,}", f"{found.total:,}", *saved))
    return table

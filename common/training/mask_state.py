"""The masks of a training: their state, what AdamW does with it, and when they go."""

from collections.abc import Mapping

import torch

from common.method import masks, released_masks

SWITCH = 0.8  # share of the steps after which every mask is 0 and the student is a GQA model (Appendix A)


def switch_step(steps: int) -> int:
    """The number of steps with masks, after which the student becomes a GQA model."""
    return max(1, int(SWITCH * steps))


class Masks:
    """The masks of a training run: log_alpha [layers, kv heads], hard concrete as printed (Eq. 27-29).

    CARD: what they did, for the model card.
    """

    # The first gradients, of 1024 masks' expected size in Eq. 29, are about 1e-7, not negligible next to
    # Adam's default eps of 1e-8. While z is exactly 1 they come from Eq. 29 alone and are that small again:
    # with beta2 = 0.999, which remembers 1000 steps, a mask that the loss once kept open would never close.
    ADAM = {"betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.0}
    CARD = "L0 masks moved each head from its own projections to its group's"
    kind = masks  # start, draw, deterministic and expected

    def __init__(self, replicated: Mapping[str, torch.Tensor], steps: int, seed: int):
        self.log_alpha = self.current = replicated["log_alpha"]
        self.steps, self.seed = steps, seed

    @classmethod
    def start(cls, shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
        """Initial values of a student's replicated parameters, for masks of this shape, all open."""
        return {"log_alpha": cls.kind.start(shape, seed)}

    def target(self, step: int) -> float:
        """T of Eq. 29."""
        return masks.target(step, self.steps)

    def draw(self, step: int) -> torch.Tensor:
        """This step's z in [0, 1], the same on every rank; differentiable."""
        return self.kind.draw(self.current, self.seed, step)

    def expected(self) -> torch.Tensor:
        """The size of each mask in Eq. 29; differentiable."""
        return self.kind.expected(self.current)

    @torch.no_grad()
    def noiseless(self) -> torch.Tensor:
        """z without noise: of the model that the masks stand for now, not of a random one close to it."""
        return self.kind.deterministic(self.log_alpha)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """After the update of a step: keep log_alpha within its bounds."""
        self.log_alpha.clamp_(-masks.LIMIT, masks.LIMIT)


class ReleasedMasks(Masks):
    """The masks of the authors' code: drawn from a copy of log_alpha that is pulled towards T."""

    # That code trains log_alpha / 1000 with an eps of 1e-8: gradients are 1000 times these.
    ADAM = {"betas": (0.9, 0.95), "eps": 1e-11, "weight_decay": 0.0}
    CARD = "L0 masks as in the authors' code moved each head from its own projections to its group's"
    kind = released_masks

    def __init__(self, replicated: Mapping[str, torch.Tensor], steps: int, seed: int):
        super().__init__(replicated, steps, seed)
        self.size = replicated["mask_size"]

    @classmethod
    def start(cls, shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
        """Masks besides their mean size, a scalar that is not trained but saved."""
        return super().start(shape, seed) | {"mask_size": torch.ones(())}

    def draw(self, step: int) -> torch.Tensor:
        """Pull the copy, then sample from it."""
        self.current = released_masks.pulled(self.log_alpha, self.size, *self.schedule_at(step))
        return super().draw(step)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """After the update of a step: average log_alpha with the copy."""
        schedule = self.schedule_at(step + 1)
        self.size.copy_(released_masks.after_update(self.log_alpha, self.current, *schedule))

    def schedule_at(self, step: int) -> tuple[float, float]:
        """T at a step, and the share of the masked steps before it."""
        return self.target(step), step / switch_step(self.steps)


MASKS = {"l0": Masks, "l0-released": ReleasedMasks}  # by the value of --masks


def mask_metrics(expected: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
    """The size and the sampled masks [layers, kv heads] for metrics.jsonl: means, also of each layer."""
    expected, z = expected.detach(), z.detach()
    layers = {"mask_per_layer": expected, "mask_mean_per_layer": z}
    return {"mask_expected": expected.mean(), "mask_mean": z.mean()} | {
        name: values.mean(1).double().round(decimals=5) for name, values in layers.items()}

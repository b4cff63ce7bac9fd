"""How long a stage of training is, and at which rates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """One stage: `steps` optimizer steps of `batch` scenes.

    The rate warms up, stays at `lr`, then falls linearly to zero; `warmup` and `decay` are fractions of the steps.
    Matrices inside the layers take Muon, all else AdamW.
    """

    steps: int
    batch: int
    lr: float
    warmup: float = 0.03
    decay: float = 0.6
    weight_decay: float = 0.02
    clip: float = 1.0
    newton_schulz: int = 5
    kernels: bool = False  # Muon takes the kernels of convolutions, too
    stop: int | None = None  # leave the stage after this many steps, before the rate has fallen to zero

"""Predicts how long a transfer takes, direct or staged, from what was measured once on this machine.

A transfer costs a time per run, by the run's length; a copy costs a time per piece. Between measured lengths they are
interpolated, on logarithmic axes. `kvferry bench calibrate` measures. Without it the defaults below hold, measured with
NIXL over shared memory on two cores: the ratios matter, not the speeds.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

import numpy as np

from kvferry.errors import ConfigError
from kvferry.layout.packing import StagedPlan
from kvferry.transport.base import Operation
from kvferry.transport.staging.packer import num_pieces

__all__ = ["Choice", "CostModel", "Route", "calibration_path", "choose", "load_cost_model", "save_cost_model"]

logger = logging.getLogger(__name__)

VERSION = 1
Curve = tuple[tuple[int, float], ...]
"""Pairs (bytes of a run, seconds for one such run), by rising length."""

_OVER_SHARED_MEMORY: Curve = (
    (256, 2.9e-6),
    (1024, 3.2e-6),
    (4096, 4.2e-6),
    (16384, 6.2e-6),
    (65536, 16e-6),
    (262144, 57e-6),
    (8388608, 1.85e-3),
)


class Route(StrEnum):
    """The way that bytes move."""

    DIRECT = "direct"
    """From cache to cache, run by run."""
    STAGED = "staged"
    """Through staging memory of ours: long runs on the wire, short ones in a local copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What runs and pieces cost on this machine."""

    read: Curve = _OVER_SHARED_MEMORY
    """The cost of a READ, by the length of its runs."""
    write: Curve = _OVER_SHARED_MEMORY
    """The cost of a WRITE, by the length of its runs."""
    copy: Curve = (
        (64, 23e-9), (256, 80e-9), (1024, 300e-9), (4096, 1.2e-6), (32768, 7.6e-6), (262144, 57e-6),
    )  # fmt: skip
    """The cost of a copy between cache and staging, by the length of its pieces."""
    overlap: float = 0.3
    """Which fraction of the shorter of wire and copy overlaps the longer one: 1 with a core to spare, 0 with none."""
    start_s: float = 300e-6
    """The seconds that a staged transfer costs before its first byte."""
    origin: str = "default"
    """Where these figures are from."""

    def __post_init__(self) -> None:
        for name in ("read", "write", "copy"):
            curve = getattr(self, name)
            lengths = [length for length, _ in curve]
            if not lengths or lengths != sorted(set(lengths)) or min(lengths) < 1 or min(s for _, s in curve) <= 0:
                raise ConfigError(f"cost model {name}={curve!r} must have rising lengths and positive seconds")
        if not 0 <= self.overlap <= 1 or self.start_s < 0:
            raise ConfigError(f"cost model overlap={self.overlap!r} must be in [0, 1], start_s={self.start_s!r} >= 0")

    def transfer_s(self, operation: Operation, num_runs: int, num_bytes: int) -> float:
        """Predicts the seconds of `num_runs` runs of about equal length."""
        return _seconds(self.read if operation is Operation.READ else self.write, num_runs, num_bytes)

    def copy_s(self, pieces: int, num_bytes: int) -> float:
        """Predicts the seconds of a pack or an unpack."""
        return _seconds(self.copy, pieces, num_bytes)

    def staged_s(self, operation: Operation, num_runs: int, pieces: int, num_bytes: int) -> float:
        """Predicts the seconds of a staged transfer: wire and copy, partly at the same time."""
        wire, copy = self.transfer_s(operation, num_runs, num_bytes), self.copy_s(pieces, num_bytes)
        return self.start_s + wire + copy - self.overlap * min(wire, copy)


def _seconds(curve: Curve, count: int, num_bytes: int) -> float:
    if count <= 0 or num_bytes <= 0:
        return 0.0
    length = num_bytes / count
    lengths = np.array([at for at, _ in curve], dtype=float)
    rates = np.array([at / seconds for at, seconds in curve])
    if length <= lengths[0]:
        return count * curve[0][1]  # what is shorter costs no less
    return float(num_bytes / np.exp(np.interp(np.log(length), np.log(lengths), np.log(rates))))


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen way, and the predicted costs of both."""

    route: Route
    direct_s: float
    staged_s: float


def choose(
    model: CostModel, operation: Operation, plans: Sequence[StagedPlan], total_bytes: int | None = None
) -> Choice:
    """Compares direct and staged for these chunks, or for `total_bytes` of which these chunks are a typical part.

    Costs microseconds, whatever the number of short runs: it looks at pack plans, not at runs.
    """
    source = sum(num_pieces(plan.source) for plan in plans)
    destination = sum(num_pieces(plan.destination) for plan in plans)
    sample = sum(plan.num_bytes for plan in plans)
    scale = (total_bytes if total_bytes is not None else sample) / max(1, sample)
    num_bytes = round(sample * scale)
    remote, local = (source, destination) if operation is Operation.READ else (destination, source)
    # Direct runs are cut wherever either side is.
    direct_s = model.transfer_s(operation, round(max(remote, local) * scale), num_bytes)
    staged_s = model.staged_s(operation, round(remote * scale), round(local * scale), num_bytes)
    return Choice(Route.STAGED if staged_s < direct_s else Route.DIRECT, direct_s, staged_s)


def calibration_path() -> Path:
    """Returns $KVFERRY_CACHE/calibration.json, or ~/.cache/kvferry/calibration.json."""
    cache = os.environ.get("KVFERRY_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "kvferry") / "calibration.json"


def save_cost_model(model: CostModel, path: Path | None = None) -> Path:
    """Writes it where load_cost_model finds it. Raises OSError if that fails."""
    path = path if path is not None else calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"version": VERSION, **asdict(model)}, indent=1) + "\n")
    partial.replace(path)
    return path


def load_cost_model(path: Path | None = None) -> CostModel:
    """Returns the calibration of this machine. If there is none, or it cannot be read (a warning): the defaults."""
    path = path if path is not None else calibration_path()
    try:
        raw = json.loads(path.read_text())
        if raw.pop("version", None) != VERSION:
            raise ConfigError(f"calibration version is not {VERSION}")
        names = {field.name for field in fields(CostModel)}
        if unknown := raw.keys() - names:
            raise ConfigError(f"unknown {sorted(unknown)!r}")
        for curve in ("read", "write", "copy"):
            raw[curve] = tuple((int(length), float(seconds)) for length, seconds in raw[curve])
        return CostModel(**raw)
    except FileNotFoundError:
        return CostModel()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        logger.warning("calibration ignored cause=%s; run kvferry bench calibrate", error)
        return CostModel()

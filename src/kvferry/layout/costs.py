"""Which is faster: many runs direct, or packed into one long run? A small model, calibrated once a machine."""

from dataclasses import dataclass

__all__ = ["CostModel"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds, as straight lines. The defaults were seen with NIXL 1.5 over shared memory; see `bench calibrate`."""

    run_s: float = 3.5e-6
    """What each run costs, however short."""
    wire_bytes_per_s: float = 6e9
    """One long run."""
    copy_bytes_per_s: float = 8e9
    """Packing or unpacking."""
    staging_s: float = 200e-6
    """What a staged transfer costs on top, however small: a message to the other side, and its packer."""

    def direct_s(self, num_bytes: int, num_runs: int) -> float:
        """As byte runs."""
        return num_runs * self.run_s + num_bytes / self.wire_bytes_per_s

    def staged_s(self, num_bytes: int) -> float:
        """Packed, moved as one run, unpacked, one after the other."""
        return self.staging_s + num_bytes * (1 / self.wire_bytes_per_s + 2 / self.copy_bytes_per_s)

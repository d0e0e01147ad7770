"""What loading did, in numbers, and the bar that shows it while it goes on.

Must not know files' formats or names.
"""

from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

try:
    import resource
except ImportError:  # not on Windows
    resource = None


@dataclass
class LoadReport:
    """What one load read and left. Bytes are bytes; `peak_resident` is the process's own maximum, ever."""

    folder: str
    done: str = "loaded"
    files: int = 0
    tensors: int = 0
    parameters: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    peak_resident: int = 0
    bytes_per_device: dict[str, int] = field(default_factory=dict)
    dtype_changes: dict[str, int] = field(default_factory=dict)  # "BF16 -> float32": how many tensors
    skipped: dict[str, int] = field(default_factory=dict)  # tensor left alone on purpose: its bytes
    padding: dict[str, np.ndarray] = field(default_factory=dict)  # tensor: the tail that no parameter has, for export

    @property
    def bytes_per_second(self) -> float:
        """Of the whole load, checks included."""
        return self.bytes_read / max(self.seconds, 1e-9)

    @property
    def nonzero_padding(self) -> list[str]:
        """Tensors whose unused tail holds something."""
        return [name for name, tail in self.padding.items() if np.any(tail != 0)]

    def __repr__(self) -> str:
        rate = f"{self.seconds:.2f} s, {self.bytes_per_second / 1e9:.2f} GB/s"
        held = f"{self.parameters} parameters from {self.tensors} tensors in {self.files} files"
        lines = [
            f"{self.done} {self.folder}: {held}",
            f"  read      {human(self.bytes_read)} in {rate}; peak resident memory {human(self.peak_resident)}",
        ]
        if sizes := self.bytes_per_device.values():
            low, high = min(sizes), max(sizes)
            each = human(high) if low == high else f"{human(low)} to {human(high)}"
            lines.append(f"  devices   {len(sizes)}, {each} each")
        changes = ", ".join(f"{change} ({count} tensors)" for change, count in self.dtype_changes.items())
        lines.append(f"  dtypes    {changes or 'as stored'}")
        if self.skipped:
            size = human(sum(self.skipped.values()))
            lines.append(f"  skipped   {len(self.skipped)} tensors on purpose, {size}: the image half")
        if self.padding:
            lines.append(f"  padding   the unused tail of {len(self.padding)} tensors is kept for export")
        lines += [f"  CAUTION   the unused tail of {name} is not zero" for name in self.nonzero_padding]
        return "\n".join(lines)


def human(nbytes: int) -> str:
    """A number of bytes to read: "1.50 GiB"."""
    count: int | float = nbytes
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def bar(total: int, verb: str, show: bool) -> tqdm:
    """A progress bar in bytes with the time left, gone when done; silent unless `show`."""
    return tqdm(total=total, desc=verb, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=not show)


def peak_resident() -> int:
    """The most memory that this process has held, in bytes; 0 where the system does not say."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if resource else 0

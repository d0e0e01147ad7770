"""What loading did, in numbers, and the bar that shows it while it goes on.

Must not know files' formats or names.
"""

from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from kimi_jax import tables
from kimi_jax.processes import is_first
from kimi_jax.tables import human

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
        return "\n".join([self._title(), *(f"  {about:<9} {said}" for about, said in self._lines())])

    def _repr_html_(self) -> str:
        return tables.html(self._title(), ("", ""), self._lines())

    def _title(self) -> str:
        return (
            f"{self.done} {self.folder}: {self.parameters} parameters from {self.tensors} tensors in {self.files} files"
        )

    def _lines(self) -> list[tuple[str, str]]:
        rate = f"{self.seconds:.2f} s, {self.bytes_per_second / 1e9:.2f} GB/s"
        peak = human(self.peak_resident)
        lines = [("read", f"{human(self.bytes_read)} in {rate}; peak resident memory {peak}")]
        if sizes := self.bytes_per_device.values():
            low, high = min(sizes), max(sizes)
            each = human(high) if low == high else f"{human(low)} to {human(high)}"
            lines.append(("devices", f"{len(sizes)}, {each} each"))
        changes = ", ".join(f"{change} ({count} tensors)" for change, count in self.dtype_changes.items())
        lines.append(("dtypes", changes or "as stored"))
        if self.skipped:
            size = human(sum(self.skipped.values()))
            lines.append(("skipped", f"{len(self.skipped)} tensors on purpose, {size}: the image half"))
        if self.padding:
            lines.append(("padding", f"the unused tail of {len(self.padding)} tensors is kept for export"))
        return lines + [("CAUTION", f"the unused tail of {name} is not zero") for name in self.nonzero_padding]


def bar(total: int, verb: str, show: bool) -> tqdm:
    """A progress bar in bytes with the time left, gone when done; silent unless `show`."""
    hidden = not (show and is_first())
    return tqdm(total=total, desc=verb, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=hidden)


def peak_resident() -> int:
    """The most memory that this process has held, in bytes; 0 where the system does not say."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if resource else 0

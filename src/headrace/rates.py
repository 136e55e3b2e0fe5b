"""How fast this machine's links and devices are: measured by `doctor`, kept as JSON, read when a plan predicts."""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from . import env


@dataclass(frozen=True)
class Rates:
    """Speeds of one device, 1e9 bytes a second and 1e12 floating-point operations a second; 0: not known.

    The link by how host memory is read: `link_gbps` page-locked, `staged_gbps` through a ring of pinned pieces,
    `pageable_gbps` as it is. `hbm_gbps`: a copy within the device, reads and writes together. `matmul_tflops`: a large
    product in the activation type. `expert_gbps`: the bytes of experts that a CPU computes with for one token.
    """

    link_gbps: float = 0.0
    staged_gbps: float = 0.0
    pageable_gbps: float = 0.0
    hbm_gbps: float = 0.0
    matmul_tflops: float = 0.0
    expert_gbps: float = 0.0

    @property
    def predict(self) -> bool:
        """Whether enough is known to predict times."""
        links = self.link_gbps or self.staged_gbps or self.pageable_gbps
        return bool(links and self.hbm_gbps and self.matmul_tflops)


def rates_path(device_name: str) -> Path:
    """Where the speeds of a device are kept."""
    return env.cache_dir() / "rates" / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', device_name)}.json"


def load_rates(device_name: str) -> Rates | None:
    """The speeds that were saved for a device of this name; None if there are none that can be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        found = json.loads(rates_path(device_name).read_text())
        return Rates(**{f.name: float(found[f.name]) for f in fields(Rates) if f.name in found})
    return None


def save_rates(device_name: str, rates: Rates) -> None:
    """Keeps the speeds of a device; where the cache cannot be written nothing is kept."""
    path = rates_path(device_name)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(rates)))
        part.replace(path)

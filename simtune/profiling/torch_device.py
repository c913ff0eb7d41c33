"""Device as torch sees it: name, properties, memory, condition."""

from __future__ import annotations

import platform
from typing import Any

import torch

from simtune.errors import UsageError
from simtune.profiling.kernels import CANDIDATES
from simtune.specs import room


class TorchDevice:
    """Device that torch computes on: cpu, cuda or cuda:i, or a GPU if there is one.

    Raises UsageError if the device is absent, or cannot be measured.
    """

    def __init__(self, device: str | None) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        try:
            self._device = torch.device(device)
        except RuntimeError:
            raise UsageError(f"--device {device}: write cpu, cuda or cuda:0") from None
        if self._device.type not in CANDIDATES:
            raise UsageError(f"--device {device}: only {' and '.join(CANDIDATES)} can be measured")
        self._cuda = self._device.type == "cuda"
        if self._cuda:
            if not torch.cuda.is_available():
                raise UsageError(f"--device {device}: torch {torch.__version__} finds no GPU; give --device cpu")
            if (self._device.index or 0) >= torch.cuda.device_count():
                raise UsageError(f"--device {device}: torch finds {torch.cuda.device_count()} GPUs, counted from 0")
            self._device = torch.device("cuda", self._device.index or 0)
            torch.cuda.set_device(self._device)
            self._properties = torch.cuda.get_device_properties(self._device)

    @property
    def name(self) -> str:
        """Name of the GPU, or of the processor with the number of threads."""
        return str(self._properties.name) if self._cuda else f"{_cpu_name()}, one thread"

    def describe(self) -> dict[str, Any]:
        """Return device, driver, library and memory; the fields that identify the device come first."""
        header: dict[str, Any] = {"device": self.name, "torch": torch.__version__}
        if self._cuda:
            driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)()
            header |= {"driver": str(driver), "processors": self._properties.multi_processor_count}
            header |= {"architecture": f"sm_{self._properties.major}{self._properties.minor}"}
            header |= {"devices": torch.cuda.device_count()}
        else:
            header |= {"processors": 1, "architecture": platform.machine(), "devices": 1}
            header |= {"isa": torch.backends.cpu.get_cpu_capability()}
        return header | {"memory_bytes": self._memory()[0]}

    def condition(self) -> dict[str, float]:
        """Return clock, power and temperature now, as far as they can be read; nothing is ever set."""
        if not self._cuda:
            clock = _first("/proc/cpuinfo", "cpu MHz")
            return {} if clock is None else {"clock_mhz": float(clock)}
        readings = {}
        for key, read in (
            ("clock_mhz", torch.cuda.clock_rate),
            ("power_mw", torch.cuda.power_draw),
            ("celsius", torch.cuda.temperature),
        ):
            try:
                readings[key] = float(read(self._device))
            # Absent and outdated management libraries raise different types.
            except Exception:
                return readings
        return readings

    @property
    def warning(self) -> str | None:
        """Warning about a present disturbance of this device; None if undisturbed."""
        if self._cuda:
            free, total = torch.cuda.mem_get_info(self._device)
            if free < 0.8 * total:
                return (
                    f"{self.name}: another process holds {(total - free) / 2**30:.1f} GiB of it; times may be too long"
                )
        return None

    @property
    def copies(self) -> tuple[str, ...]:
        """Directions of copies: within memory and, on a GPU, to and from the host."""
        return ("in_memory", "to_device", "from_device") if self._cuda else ("in_memory",)

    def _memory(self) -> tuple[float, float]:
        """Return bytes of memory and bytes free."""
        if self._cuda:
            free, total = torch.cuda.mem_get_info(self._device)
            return float(total), float(free)
        return room.memory()

    def _cache_bytes(self) -> int:
        if self._cuda:
            return int(getattr(self._properties, "L2_cache_size", 0)) or 64 << 20
        return room.system_value("SC_LEVEL3_CACHE_SIZE") or 32 << 20


def _cpu_name() -> str:
    return _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _first(path: str, key: str) -> str | None:
    """Return the value of the first line of a system file that begins with a key."""
    try:
        with open(path, encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith(key))
    except (OSError, StopIteration):
        return None

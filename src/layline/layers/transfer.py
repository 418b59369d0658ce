"""Small arrays to a device and back, without the host waiting for what is queued there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small array of the host on ``device``, without waiting for the work queued there."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host: copied after the work queued so far, before any later."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if not tensors or tensors[0].device.type != "cuda":
            return
        self._tensors = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(
                each, non_blocking=True
            )
            for each in tensors
        ]
        self._copied = torch.cuda.current_stream(tensors[0].device).record_event()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host; waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors

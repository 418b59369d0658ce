"""The few calls of the CUDA runtime that torch keeps to itself.

torch's own copy between devices orders both devices' current streams behind each other. That hides
a missing wait and loses overlap, so that slots are filled by an asynchronous peer copy on one
stream. ``cuda.bindings`` makes the calls where it is installed, else the library that torch loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

from layline.errors import TransferError

ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled


class CudaCalls(Protocol):
    """What a peer copy needs. Devices are ordinals, addresses and streams are integers."""

    def can_access(self, device: int, peer: int) -> bool:
        """Whether ``device`` can read and write ``peer``'s memory."""

    def enable_access(self, device: int, peer: int) -> None:
        """Let ``device`` do so. Safe to call again."""

    def copy_peer(
        self, target: tuple[int, int], source: tuple[int, int], size: int, stream: int
    ) -> None:
        """Enqueue a copy of ``size`` bytes between (address, device) pairs on ``stream``."""


class CudaRuntime:
    """CudaCalls on the real runtime. Raises TransferError where it cannot be found."""

    def __init__(self) -> None:
        self._calls = _bindings() or _Library()

    def can_access(self, device: int, peer: int) -> bool:
        """See CudaCalls.can_access."""
        import torch

        return bool(torch.cuda.can_device_access_peer(device, peer))

    def enable_access(self, device: int, peer: int) -> None:
        """See CudaCalls.enable_access."""
        import torch

        with torch.cuda.device(device):
            # A device has no context before its first use.
            torch.cuda.current_stream().synchronize()
            status = self._calls.enable_peer_access(device, peer)
            if status != 0:
                # Clears it, so that torch does not take it for the next kernel's.
                self._calls.last_error()
            if status not in (0, ALREADY_ENABLED):
                raise TransferError(
                    f"cuda:{device} gets no access to cuda:{peer}: {self._calls.words(status)}"
                )

    def copy_peer(
        self, target: tuple[int, int], source: tuple[int, int], size: int, stream: int
    ) -> None:
        """See CudaCalls.copy_peer."""
        status = self._calls.memcpy_peer(*target, *source, size, stream)
        if status != 0:
            self._calls.last_error()
            raise TransferError(
                f"a copy of {size} bytes from cuda:{source[1]} to cuda:{target[1]} failed: "
                f"{self._calls.words(status)}"
            )


class _Bindings:
    """Through NVIDIA's package."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def memcpy_peer(
        self, target: int, to: int, source: int, of: int, size: int, stream: int
    ) -> int:
        return int(self._runtime.cudaMemcpyPeerAsync(target, to, source, of, size, stream)[0])

    def enable_peer_access(self, device: int, peer: int) -> int:
        # The package may have a runtime of its own, with its own idea of the current device.
        self._runtime.cudaSetDevice(device)
        return int(self._runtime.cudaDeviceEnablePeerAccess(peer, 0)[0])

    def last_error(self) -> int:
        return int(self._runtime.cudaGetLastError()[0])

    def words(self, status: int) -> str:
        answer = self._runtime.cudaGetErrorString(self._runtime.cudaError_t(status))[1]
        return answer.decode() if isinstance(answer, bytes) else str(answer)


class _Library:
    """Through the runtime library that this process has loaded with torch."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_loaded_library())
        self._library.cudaMemcpyPeerAsync.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int) * 2,
            *(ctypes.c_size_t, ctypes.c_void_p),
        ]
        self._library.cudaDeviceEnablePeerAccess.argtypes = [ctypes.c_int, ctypes.c_uint]
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def memcpy_peer(
        self, target: int, to: int, source: int, of: int, size: int, stream: int
    ) -> int:
        return int(self._library.cudaMemcpyPeerAsync(target, to, source, of, size, stream))

    def enable_peer_access(self, device: int, peer: int) -> int:
        assert device != peer
        return int(self._library.cudaDeviceEnablePeerAccess(peer, 0))

    def last_error(self) -> int:
        return int(self._library.cudaGetLastError())

    def words(self, status: int) -> str:
        return str(self._library.cudaGetErrorString(status).decode())


def _bindings() -> _Bindings | None:
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return _Bindings(runtime)


def _loaded_library() -> str:
    """The path of the CUDA runtime among this process's mapped files."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart.so"):
            return path
    raise TransferError(
        "peer copies need the CUDA runtime library, and this process has loaded none; expected "
        "the package cuda-bindings, or a torch that loads libcudart"
    )

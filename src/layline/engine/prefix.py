"""Which cache blocks hold which tokens, so that requests with a common beginning share them.

A block is known by a key: the digest of its tokens and of the key of the block before it, from the
request's salt on. Equal keys therefore mean equal tokens from the first one on under an equal salt;
digests are of 32 bytes, so that nobody can make two prompts collide. Pure Python.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from layline.engine.request import Request

_DIGEST_BYTES = 32


def root_key(salt: str) -> bytes:
    """The key that stands before a sequence's first block; other salts share no block."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the full block that holds ``token_ids`` after the block ``parent``."""
    packed = struct.pack(f"<{len(token_ids)}Q", *token_ids)
    return blake2b(parent + packed, digest_size=_DIGEST_BYTES).digest()


def extend_keys(keys: list[bytes], request: Request, count: int, block_size: int) -> None:
    """Complete ``keys`` to those of the first ``count`` blocks of the request."""
    while len(keys) < count:
        parent = keys[-1] if keys else root_key(request.cache_salt)
        start = len(keys) * block_size
        keys.append(block_key(parent, request.token_ids(start, start + block_size)))


class PrefixCache:
    """The blocks whose contents are known, by key. The pool decides how long each is kept."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain of ``keys``."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count(self, keys: Sequence[bytes]) -> int:
        """How many blocks :meth:`match` would give."""
        return len(self.match(keys))

    def keep(self, key: bytes, block: int) -> None:
        """Remember that ``block`` is full and what it holds; the first block of a key stays it."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> None:
        """The block is not to be found any more."""
        del self._blocks[self._keys.pop(block)]

"""Random numbers by hashing: the same ones for the same seed, request, round and purpose, in any order of asking."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simtune.arrays import Array, Ints

Bits = NDArray[np.uint64]


def uniform(seed: int, requests: Ints, rounds: Ints, purpose: int = 0) -> Array:
    """Return a number in [0, 1) for each pair of request and round."""
    return as_uniform(random_bits(seed, requests, rounds, purpose))


def as_uniform(bits: Bits) -> Array:
    """Return numbers in [0, 1) from 53 of the 64 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_bits(seed: int, requests: Ints, rounds: Ints, purpose: int = 0, counts: Ints | int = 1) -> Bits:
    """Return 64 well-mixed bits for each pair of request and round; each request has `counts` of the rounds."""
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + purpose * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF)
    bits = (rounds + 1).astype(np.uint64)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits += np.repeat(_mixed(requests.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + key), counts)
    return _mixed(bits)


def _mixed(x: Bits) -> Bits:
    """Apply the finaliser of SplitMix64, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x

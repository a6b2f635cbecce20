"""Token sequences → passes without padding, in which what sequences have in common is read once.

Sequences are laid end to end in one flat row. A sequence that begins like the one before it (the members of
a group share their prompt; chains share a system prompt) brings only the tokens after that beginning: its
*segment*, whose tokens look back at the common part where it lies. A causal model computes the same for a
token however often it is read, so the result is that of each sequence on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Range = tuple[int, int]
"""start:end in the flat row."""

# Shorter beginnings aren't worth the copy of their keys that every further segment makes.
MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start:end of the flat row: they see `before` whole, and themselves causally."""

    start: int
    end: int
    before: tuple[Range, ...] = ()

    @property
    def keys(self) -> tuple[Range, ...]:
        """Everything its last token sees."""
        return joined((*self.before, (self.start, self.end)))

    @property
    def num_keys(self) -> int:
        return sum(end - start for start, end in self.before) + self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class PackedPass:
    """One flat row of N tokens."""

    ids_N: Int64Array
    position_N: Int64Array  # of each token in its own sequence
    segments: tuple[Segment, ...]
    places: dict[int, Int64Array]  # index of a sequence → where in the flat row each of its tokens lies


def pack(
    sequences: Sequence[npt.NDArray[np.integer]], *, max_tokens: int, share_prefixes: bool
) -> list[PackedPass]:
    """Passes of at most `max_tokens`, the largest first; only a single longer sequence makes a longer one.

    Sequences that share are kept together where that fits. Empty ones are left out. The same sequences
    always give the same passes.
    """
    order = [i for i in range(len(sequences)) if len(sequences[i])]
    if share_prefixes:
        order.sort(key=lambda i: (sequences[i].astype(">u4").tobytes(), i))
    pieces = list(_pieces(sequences, order, max_tokens=max_tokens, share_prefixes=share_prefixes))
    pieces.sort(key=lambda piece: (-piece.num_tokens, min(piece.members)))
    return [_lay(sequences, members, share_prefixes) for members in _fit(pieces, max_tokens)]


@dataclass(slots=True)
class _Piece:
    """Sequences that stand together, and the tokens they take."""

    members: list[int]
    num_tokens: int


def _pieces(
    sequences: Sequence[npt.NDArray[np.integer]],
    order: Sequence[int],
    *,
    max_tokens: int,
    share_prefixes: bool,
) -> Iterator[_Piece]:
    """Runs of sequences that share a beginning with their neighbour, cut where they get too large."""
    piece: _Piece | None = None
    for index in order:
        length = len(sequences[index])
        shared = _shared(sequences[piece.members[-1]], sequences[index]) if piece and share_prefixes else 0
        if piece and shared and piece.num_tokens + length - shared <= max_tokens:
            piece.members.append(index)
            piece.num_tokens += length - shared
            continue
        if piece:
            yield piece
        piece = _Piece([index], length)
    if piece:
        yield piece


def _fit(pieces: Sequence[_Piece], max_tokens: int) -> list[list[int]]:
    """First fit: each piece into the first pass that has room."""
    passes: list[_Piece] = []
    for piece in pieces:
        for one in passes:
            if one.num_tokens + piece.num_tokens <= max_tokens:
                one.members += piece.members
                one.num_tokens += piece.num_tokens
                break
        else:
            passes.append(_Piece(list(piece.members), piece.num_tokens))
    return [one.members for one in passes]


def _shared(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """Length of the common beginning; 0 when it isn't worth sharing."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    common = int(differ[0]) if len(differ) else length
    return common if common >= MIN_SHARED_TOKENS else 0


def _lay(
    sequences: Sequence[npt.NDArray[np.integer]], members: Sequence[int], share_prefixes: bool
) -> PackedPass:
    ids: list[npt.NDArray[np.integer]] = []
    positions: list[Int64Array] = []
    segments: list[Segment] = []
    places: dict[int, Int64Array] = {}
    cursor, path, previous = 0, (), None
    for index in members:
        sequence = sequences[index]
        shared = _shared(sequences[previous], sequence) if share_prefixes and previous is not None else 0
        before = _first(path, shared)
        path, previous = before, index
        if own := len(sequence) - shared:
            segments.append(Segment(cursor, cursor + own, before))
            ids.append(sequence[shared:])
            positions.append(np.arange(shared, len(sequence)))
            path, cursor = (*before, (cursor, cursor + own)), cursor + own
        places[index] = np.concatenate([np.arange(start, end) for start, end in path])
    return PackedPass(
        np.concatenate(ids).astype(np.int64),
        np.concatenate(positions).astype(np.int64),
        tuple(segments),
        places,
    )


def _first(path: tuple[Range, ...], num_tokens: int) -> tuple[Range, ...]:
    """The ranges of the first `num_tokens` tokens of a sequence."""
    found: list[Range] = []
    for start, end in path:
        end = min(end, start + num_tokens)
        num_tokens -= end - start
        found.append((start, end))
    return joined(found)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same ranges without empty ones, neighbours as one."""
    found: list[Range] = []
    for start, end in ranges:
        if found and found[-1][1] == start and end > start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return tuple(found)

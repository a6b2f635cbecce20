"""What an unknown setting was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

MAX_ELSEWHERE = 2
CLOSE_ENOUGH = 0.75


def hint(root: type[BaseModel], place: Sequence[int | str]) -> str:
    """`; did you mean …?` for the unknown setting at this place below `root`: the name most like it in its
    section, and where the tree has a setting of just this name. Else the names its section has."""
    *path, name = place
    section = _section_at(root, path)
    if section is None:
        return ""
    names, wanted = list(section.model_fields), str(name)
    meant = difflib.get_close_matches(wanted, names, n=1, cutoff=CLOSE_ENOUGH)
    elsewhere = [at for at in _places(root) if at.rpartition(".")[2] == wanted]
    meant += sorted(elsewhere, key=lambda at: at.count("."))[:MAX_ELSEWHERE]  # the least nested first
    if meant:
        return f"; did you mean {' or '.join(meant)}?"
    return f"; this section takes {', '.join(names)}"


def _section_at(root: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section is not None else None
        section = next((s for s, _ in _sections(field.annotation)), None) if field is not None else None
    return section


def _places(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every setting below this section, by its path; `[]` behind a list."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        for inner, in_list in _sections(field.annotation):
            yield from _places(inner, f"{above}{name}{'[]' if in_list else ''}.")


def _sections(annotation: Any, in_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """The sections a field may hold, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, in_list
    for argument in get_args(annotation):
        yield from _sections(argument, in_list or get_origin(annotation) is list)

"""Writes the pages that are made from the code: docs/configuration.md and docs/metrics.md.

python docs/generate.py            # write them
python docs/generate.py --check    # exit code 1 if one is not current
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from gateway.metrics import GatewayMetrics  # noqa: E402 - the repository's root comes first
from model_runtime.config import RunConfig  # noqa: E402

CONFIGURATION_HEAD = """# Every setting

Made from `model_runtime/config.py` and the sections it imports by `make docs`; change it there.
`repertory validate FILE` checks a file and names each wrong field with its value. Unknown settings are
refused. Paths in a file are relative to it. A setting without a default has to be given.
"""

METRICS_HEAD = """# Metrics of the gateway

Made from `gateway/metrics.py` by `make docs`. `GET /metrics` serves them in Prometheus' text format; counters
carry `_total` there, histograms `_bucket`, `_sum` and `_count`.
What a model's runtime says with its renewals (step, queue, budget, servers' load) is among them.
`deployments/grafana/dashboard.json` is a dashboard of them.
"""

Schema = dict[str, Any]


def configuration() -> str:
    """One section for each part of the tree, in the order in which a file shows them."""
    schema = RunConfig.model_json_schema()
    return "\n".join([CONFIGURATION_HEAD, *_sections("", schema, schema["$defs"], seen=set())])


def _sections(path: str, section: Schema, definitions: Schema, seen: set[str]) -> Iterator[str]:
    yield f"## {f'`{path}`' if path else 'The file'}\n"
    yield _one_line(section.get("description", "")) + "\n"
    yield "| setting | value | default | what it is |\n|---|---|---|---|"
    inner: list[tuple[str, str]] = []
    required = set(section.get("required", []))
    for name, field in section["properties"].items():
        default = "–" if name in required else _default(field, definitions)
        text = _one_line(field.get("description", ""))
        yield f"| `{name}` | {_type(field, definitions)} | {default} | {text} |"
        for reference, many in _references(field):
            if "properties" in definitions[reference]:
                inner.append((f"{path}.{name}".lstrip(".") + ("[]" if many else ""), reference))
    yield ""
    for inner_path, reference in inner:
        if reference not in seen:
            seen.add(reference)
            yield from _sections(inner_path, definitions[reference], definitions, seen)


def _references(field: Schema) -> Iterator[tuple[str, bool]]:
    """Names of the definitions a field holds, and whether it holds a list of them."""
    if "$ref" in field:
        yield field["$ref"].rsplit("/", 1)[-1], False
    for choice in field.get("anyOf", []):
        yield from _references(choice)
    if isinstance(field.get("items"), dict):
        for name, _ in _references(field["items"]):
            yield name, True


def _type(field: Schema, definitions: Schema) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return "section" if "properties" in definitions[name] else _type(definitions[name], definitions)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(choice, definitions) for choice in field["anyOf"]))
    if "enum" in field:
        return ", ".join(f"`{_value(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{_value(field['const'])}`"
    if field.get("type") == "array":
        items = field.get("items")
        return f"list of {_type(items, definitions)}" if isinstance(items, dict) else "list"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map to {_type(field['additionalProperties'], definitions)}"
    names = {"null": "null", "boolean": "true, false", "object": "map"}
    kind = field.get("type", "any")
    return " ".join([names.get(kind, kind), *_bounds(field)])


def _bounds(field: Schema) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    if found:
        yield ", ".join(found)


def _default(field: Schema, definitions: Schema) -> str:
    value = field.get("default")
    if isinstance(value, dict) and any(True for _ in _references(field)):
        return "see below"
    return f"`{_value(value)}`"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def metrics() -> str:
    """All families that the gateway's registry holds."""
    rows = ["| metric | kind | labels | what it counts |\n|---|---|---|---|"]
    # The library has no public way from a registry to the labels of its metrics.
    collectors = GatewayMetrics(["a_model"]).registry._collector_to_names
    for collector in collectors:
        for family in collector.describe():
            labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ())) or "none"
            rows.append(f"| `{family.name}` | {family.type} | {labels} | {_one_line(family.documentation)} |")
    return METRICS_HEAD + "\n" + "\n".join(rows) + "\n"


PAGES = {"configuration.md": configuration, "metrics.md": metrics}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say what is not current")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    print(f"{'not current' if check else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

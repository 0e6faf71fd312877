"""Schemas of the kinds that extensions of Kubernetes define, from the facts in tests/cases/kubernetes/schemas."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.paths import CASES

if TYPE_CHECKING:
    import jsonschema

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
DEFS = {
    "metadata": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"},
            "namespace": {"type": "string"},
            "labels": TEXTS,
            "annotations": TEXTS,
        },
    },
    "podTemplate": {
        "type": "object",
        "properties": {
            "metadata": {"$ref": "#/$defs/metadata"},
            "spec": {"type": "object", "description": "held to the schema of a Pod"},
        },
    },
}
INT32 = {"minimum": -(2**31), "maximum": 2**31 - 1}
INSTEAD = frozenset(("if", "then", "else", "not", "oneOf", "contains"))
"""Words of a schema that say which fields go together: they name a few fields, and close nothing."""


@cache
def facts() -> dict[str, dict[str, Any]]:
    """Return what is known of each kind."""
    found = [yaml.safe_load(path.read_text()) for path in sorted((CASES / "kubernetes" / "schemas").glob("*.yaml"))]
    return {each["kind"]: each for each in found}


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """Return what an object of a kind is held to: as in the API server, but a field that is not known is refused."""
    import jsonschema  # takes a second, for which only who holds something to a schema waits

    fact = facts()[kind]
    schema = {
        "$defs": DEFS,
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": fact["apiVersion"]},
            "kind": {"const": kind},
            "metadata": {
                "$ref": "#/$defs/metadata",
                "required": ["name"],
                **({} if fact["namespaced"] else {"not": {"required": ["namespace"]}}),
            },
            "spec": fact["spec"],
        },
    }
    closed = strict(schema)
    jsonschema.Draft202012Validator.check_schema(closed)
    return jsonschema.Draft202012Validator(closed)


def strict(schema: Any) -> Any:
    """Return a schema whose objects take the named fields alone, and whose int32 have their bounds."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in INSTEAD else strict(value) for key, value in schema.items()}
    if schema.get("format") == "int32":
        made = {**INT32, **made}
    if schema.get("type") == "object" and "properties" in schema:
        made.setdefault("additionalProperties", False)
    return made


def check(thing: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError where an object does not fit its kind."""
    validator(thing["kind"]).validate(thing)

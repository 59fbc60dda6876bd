"""The OpenAPI 3.1 document, made from the msgspec types that requests are read with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.schemas import ErrorEnvelope

_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. request, response: msgspec types of the JSON bodies, or None for none.

    chunk: type of a stream's events, where the operation can stream. media: of an answer that isn't JSON. errors:
    statuses answered with the error envelope. is_public: answered without a key.
    """

    method: str
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    media: str = "application/json"
    errors: Sequence[int] = field(default=())
    is_public: bool = False


def document(operations: Iterable[Operation], *, version: str = "", has_keys: bool = False) -> dict[str, Any]:
    """A JSON-ready document. version: of the application. has_keys: bearer keys are configured."""
    operations = list(operations)
    kinds = _kinds(operations)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    references = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(
            operation, references, has_keys=has_keys
        )
    described: dict[str, Any] = {"schemas": components}
    if has_keys:
        described["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ringfence", "version": version or "0", "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": described,
    }


def _kinds(operations: Iterable[Operation]) -> list[type[msgspec.Struct]]:
    """Every type that is mentioned, once, in order."""
    mentioned = (kind for o in operations for kind in (o.request, o.response, o.chunk) if kind is not None)
    return list(dict.fromkeys([*mentioned, ErrorEnvelope]))


def _operation(operation: Operation, references: dict[Any, Any], *, has_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "operationId": _operation_id(operation)}
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _json(references[operation.request])}
    described["responses"] = {"200": {"description": "OK", "content": _content(operation, references)}}
    for status in sorted(operation.errors):
        described["responses"][str(status)] = {
            "description": "Error", "content": _json(references[ErrorEnvelope])
        }  # fmt: skip
    if has_keys and not operation.is_public:
        described["security"] = [{"key": []}]
    return described


def _content(operation: Operation, references: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": references.get(operation.response, {})}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": references[operation.chunk]}
    return content


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation_id(operation: Operation) -> str:
    return operation.method.lower() + operation.path.replace("/", "_").replace("{", "").replace("}", "")

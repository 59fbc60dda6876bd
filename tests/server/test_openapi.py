"""The OpenAPI document is complete, and tells the same as decode() does."""

import json
from typing import Any

import msgspec

from server.openapi import Operation, document
from server.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)

OPERATIONS = [
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue a text.",
        request=CompletionRequest,
        response=Completion,
        chunk=Completion,
        errors=(400, 429, 503),
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        request=ChatCompletionRequest,
        response=ChatCompletion,
        chunk=ChatCompletionChunk,
    ),
    Operation(method="GET", path="/v1/models", summary="What is served.", response=ModelList),
    Operation(
        method="POST", path="/tokenize", summary="Token ids.", request=TokenizeRequest, response=TokenizeResponse
    ),
    Operation(
        method="POST", path="/detokenize", summary="Text.", request=DetokenizeRequest, response=DetokenizeResponse
    ),
    Operation(method="GET", path="/metrics", summary="Figures.", media="text/plain", is_public=True),
]


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_document_is_json_and_every_reference_is_there() -> None:
    described = document(OPERATIONS)
    assert json.loads(msgspec.json.encode(described)) == described
    assert described["openapi"] == "3.1.0"
    for reference in references(described):
        assert reference.removeprefix("#/components/schemas/") in described["components"]["schemas"]


def test_every_operation_is_in_the_document() -> None:
    paths = document(OPERATIONS)["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == {
        (operation.path, operation.method.lower()) for operation in OPERATIONS
    }


def test_operation_has_its_bodies_and_errors() -> None:
    operation = document(OPERATIONS)["paths"]["/v1/chat/completions"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    content = operation["responses"]["200"]["content"]
    assert content["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/ChatCompletionChunk"}
    errors = document(OPERATIONS)["paths"]["/v1/completions"]["post"]["responses"]
    assert list(errors) == ["200", "400", "429", "503"]


def test_ranges_that_are_enforced_are_in_the_document() -> None:
    fields = document(OPERATIONS)["components"]["schemas"]["CompletionRequest"]["properties"]
    temperature = next(kind for kind in fields["temperature"]["anyOf"] if kind.get("type") == "number")
    assert (temperature["minimum"], temperature["maximum"]) == (0, 10)


def test_keys_are_asked_for_on_all_but_public_operations() -> None:
    described = document(OPERATIONS, has_keys=True)
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in described["paths"]["/metrics"]["get"]
    assert "securitySchemes" not in document(OPERATIONS)["components"]

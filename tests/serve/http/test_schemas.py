"""The API against its own OpenAPI document: whatever is sent, no 5xx, and no status that is not documented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from one_process import Endpoint
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance, not_a_server_error, status_code_conformance

from malmen.serve.http.api import make_app

pytestmark = pytest.mark.slow
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    limits = {"requests_per_minute": 100_000, "max_tokens": 4, "job_facts": 4}
    endpoint = Endpoint(tmp_path_factory.mktemp("schema"), limits=limits)
    yield endpoint
    endpoint.close()


DOCUMENT = make_app(lambda: None).openapi()  # type: ignore[arg-type,return-value]  # no request is made of this one
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_is_answered_by_a_server_error_or_an_undocumented_status(
    endpoint: Endpoint, path: str, method: str
) -> None:
    headers = {"Authorization": f"Bearer {endpoint.tokens['admin']}"}
    operation = schemathesis.openapi.from_asgi("/openapi.json", endpoint.app)[path][method]

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, headers=headers)

    ask()

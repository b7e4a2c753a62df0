"""Why an endpoint does not start. That one starts and stops is in test_app.py, with a whole cluster."""

from __future__ import annotations

import pytest
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
)

from malmen.serve.app import _reason


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (["", ""], ""),
        (["The deployment is waiting.\nIt needs 1 GPU.\n"], "It needs 1 GPU."),
        (["Traceback\n  EditError: no editor\nRetrying.\n", "waiting"], "EditError: no editor"),
    ],
)  # fmt: skip
def test_the_last_line_that_names_an_error_is_the_reason(messages: list[str], reason: str) -> None:
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    deployments = {
        str(number): DeploymentStatusOverview(DeploymentStatus.UNHEALTHY, trigger, {}, message)
        for number, message in enumerate(messages)
    }
    overview = ApplicationStatusOverview(ApplicationStatus.DEPLOY_FAILED, "", 0.0, deployments)
    assert _reason(overview) == reason

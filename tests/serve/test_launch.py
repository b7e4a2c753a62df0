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

from malmen.serve.app import _reason, has_failed


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


@pytest.mark.parametrize(
    ("triggers", "failed"),
    [
        (["REPLICA_STARTUP_FAILED"], True),  # the writer's own error
        (["HEALTH_CHECK_FAILED"], False),  # its process was killed after it had started: Serve starts another
        (["HEALTH_CHECK_FAILED", "REPLICA_STARTUP_FAILED"], True),
        ([], True),  # there are no deployments at all
    ],
)
def test_a_replica_that_is_lost_while_others_start_does_not_end_the_endpoint(triggers: list[str], failed: bool) -> None:
    lost = {
        str(number): DeploymentStatusOverview(
            DeploymentStatus.DEPLOY_FAILED, DeploymentStatusTrigger[trigger], {}, "A replica's health check failed."
        )
        for number, trigger in enumerate(triggers)
    }
    starting = DeploymentStatusOverview(DeploymentStatus.UPDATING, DeploymentStatusTrigger.UNSPECIFIED, {}, "")
    deployments = {**lost, "reader": starting} if triggers else {}
    assert has_failed(ApplicationStatusOverview(ApplicationStatus.DEPLOY_FAILED, "", 0.0, deployments)) == failed
    assert not has_failed(ApplicationStatusOverview(ApplicationStatus.DEPLOYING, "", 0.0, deployments))

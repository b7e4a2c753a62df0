"""`malmen serve` as its own process, with clients for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class EndpointProcess:
    """Start it, ask it, kill parts of it, start it again: the store stays."""

    def __init__(self, editor: Path, folder: Path, *settings: str) -> None:
        self.editor, self.store, self.folder = editor, folder / "store", folder
        self.settings, self.port = settings, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it is ready."""
        command = [sys.executable, "-m", "malmen.serve.main", "--editor", self.editor, "--store", self.store]
        command += ["--port", self.port, *self.settings]
        self.log = open(self.folder / "endpoint.log", "ab")  # noqa: SIM115  # open as long as the process
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=self.log, stderr=self.log, env=environment, start_new_session=True
        )
        self.wait_until_ready(120)

    def wait_until_ready(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            assert self.process is not None and self.process.poll() is None, self.said()
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)  # between two looks; the wait is bounded above
        raise AssertionError(f"not ready after {seconds} s:\n{self.said()}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, role: str = "admin", **options: Any) -> httpx.Client:
        token = yaml.safe_load((self.store / "tokens.yaml").read_text())[role]["token"]
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=90, **options)

    def said(self) -> str:
        return (self.folder / "endpoint.log").read_text(errors="replace")[-3000:]

    def tree(self) -> list[psutil.Process]:
        """Every process that it has started."""
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill_role(self, name: str) -> bool:
        """SIGKILL to one process of a deployment; False if there is none just now."""
        found = [one for one in self.tree() if name in _title(one)]
        for one in found[:1]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
                return True
        return False

    def kill_all(self) -> None:
        """SIGKILL to the command and all of Ray that it has started."""
        victims = [*self.tree(), psutil.Process(self.process.pid)] if self.process else []
        for one in victims:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(victims, timeout=30)
        if self.process:
            self.process.wait(timeout=30)

    def stop(self) -> int:
        """As Ctrl-C does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise
        finally:
            self.log.close()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""

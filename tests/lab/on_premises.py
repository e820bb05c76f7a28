"""The user's day with a file of `ray up` on the lab's hosts: `ray up`, the
tunnel, jobs, `ray down`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.lab.hosts import CONTROL, REPOSITORY, Lab, address_of
from tests.waits import until

FILE = "/root/onprem.yaml"
HEAD = "h0"
DASHBOARD = "http://127.0.0.1:8265"
SSH_KEY = "~/.ssh/paceline"
OWN = {
    "head_start_ray_commands": "--object-store-memory=200000000",
    "worker_start_ray_commands": "--object-store-memory=200000000 --num-cpus=1",
}
"""Options of `ray start`, because the hosts share one machine's memory and its
processors.
"""
FETCH = """
import json, sys, urllib.error, urllib.request
for line in sys.stdin:
    url, token = json.loads(line)
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        found = error.code, error.read().decode()
    except OSError as error:
        found = 0, str(error)
    print(json.dumps(found), flush=True)
"""


def derived(workers: list[str]) -> dict[str, Any]:
    """cluster/onprem.yaml for the lab: its addresses, its login, its shared
    directory, and nothing to install.
    """
    text = (REPOSITORY / "cluster" / "onprem.yaml").read_text(encoding="utf-8")
    tree = yaml.safe_load(re.sub(r"(?<=[\s=])/nfs\b", "/srv/nfs", text))
    tree["provider"] |= {
        "head_ip": address_of(HEAD),
        "worker_ips": [address_of(name) for name in workers],
    }
    tree["auth"] |= {"ssh_user": "root", "ssh_private_key": SSH_KEY}
    # There is no package index: the hosts show this environment as ~/paceline.
    [install] = [
        command for command in tree["setup_commands"] if " install " in command
    ]
    tree["setup_commands"][tree["setup_commands"].index(install)] = (
        "test -x ~/paceline/bin/ray"
    )
    for field in ("head_start_ray_commands", "worker_start_ray_commands"):
        tree[field] = [
            command.replace("ray start ", f"ray start {OWN[field]} ")
            for command in tree[field]
        ]
    return tree


class RayUp:
    """A cluster that `ray up` made of a lab's hosts; commands are typed on
    `ctl`, in the repository.
    """

    def __init__(self, lab: Lab, file: str, **settings: str):
        """`file` is the cluster file on `ctl`; `settings` are environment
        variables of every command.
        """
        self.lab = lab
        self._file = file
        self._settings = {"RAY_AUTH_MODE": "token", **settings}
        self._tunnel = None
        self._fetching = {}

    def type(self, *command: str, check: bool = True, **settings: str) -> str:
        """A command of the user's; what it printed.

        `settings` are environment variables.
        """
        line = [*self._environment(**settings), *command]
        return self.lab.run(
            CONTROL, *line, check=check, cwd=str(REPOSITORY)
        ).stdout

    def _environment(self, **settings: str) -> list[str]:
        return [
            "env",
            *(
                f"{name}={value}"
                for name, value in {**self._settings, **settings}.items()
            ),
        ]

    def up(self) -> str:
        """A token, `ray up -y`, and `ray dashboard`, which stays; anew after
        the head's power cut.
        """
        self.type("ray", "get-auth-token", "--generate")
        printed = self.type("ray", "up", "-y", self._file)
        self._hang_up()
        line = [*self._environment(), "ray", "dashboard", self._file]
        self._tunnel = self.lab.popen(
            CONTROL,
            *line,
            cwd=str(REPOSITORY),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(
            lambda: self.fetch("/api/version")[0] == 200,
            "the dashboard's tunnel",
        )
        return printed

    def down(self) -> str:
        """`ray down -y`, and the end of the tunnel."""
        printed = self.type("ray", "down", "-y", self._file)
        self._hang_up()
        return printed

    def _hang_up(self):
        if self._tunnel is not None:
            self._tunnel.terminate()
            self._tunnel.wait()

    @property
    def token(self) -> str:
        """The cluster's token, as the user's laptop holds it."""
        return (
            (self.lab.home(CONTROL) / ".ray" / "auth_token")
            .read_text()
            .strip()
        )

    def fetch(
        self,
        path: str,
        token: bool = True,
        name: str = CONTROL,
        base: str = DASHBOARD,
    ) -> tuple[int, str]:
        """(status, body) of the dashboard's answer to a host; (0, reason)
        where nothing answers.
        """
        if (
            name not in self._fetching
        ):  # one process, because the tests ask three times a second
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._fetching[name] = self.lab.popen(
                name, sys.executable, "-I", "-c", FETCH, **pipes
            )
        asked = self._fetching[name].stdin
        answers = self._fetching[name].stdout
        asked.write(
            json.dumps([base + path, self.token if token else ""]) + "\n"
        )
        asked.flush()
        status, body = json.loads(answers.readline())
        return int(status), str(body)

    def get(self, path: str) -> Any:
        """The dashboard's JSON."""
        status, body = self.fetch(path)
        assert status == 200, body
        return json.loads(body)

    def submit(
        self, *entrypoint: str, wait: bool = True, directory: str = "."
    ) -> str:
        """`ray job submit --working-dir` through the tunnel; its log, or the
        id where it is not waited for.
        """
        options = [
            "--address",
            DASHBOARD,
            "--working-dir",
            directory,
            *([] if wait else ["--no-wait"]),
        ]
        printed = self.type(
            "ray", "job", "submit", *options, "--", *entrypoint
        )
        if wait:
            return printed
        match = re.search(r"'(raysubmit_\w+)'", printed)
        assert match, printed
        return match[1]

    def job(self, job_id: str) -> str:
        """The status of a job: RUNNING, SUCCEEDED, ..."""
        return str(self.get(f"/api/jobs/{job_id}")["status"])

    def log(self, job_id: str) -> str:
        """What a job has printed."""
        return str(self.get(f"/api/jobs/{job_id}/logs")["logs"])

    def stop(self, job_id: str):
        """`ray job stop`, which waits for the job's end."""
        self.type("ray", "job", "stop", "--address", DASHBOARD, job_id)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The newest node of each host, as the dashboard's API knows them:
        state, node_id.
        """
        listed = self.get("/api/v0/nodes?detail=1&limit=100")["data"][
            "result"
        ]["result"]
        listed.sort(key=lambda node: node.get("start_time_ms") or 0)
        hosts = self.lab.hosts()
        return {
            hosts[node["node_ip"]]: node
            for node in listed
            if node["node_ip"] in hosts
        }

    def alive(self) -> list[str]:
        """Hosts whose node is alive."""
        return sorted(
            name
            for name, node in self.nodes().items()
            if node["state"] == "ALIVE"
        )


class OnPremises(RayUp):
    """The cluster of cluster/onprem.yaml."""

    def __init__(self, lab: Lab):
        super().__init__(lab, FILE)
        tree = derived(lab.names[1:])
        (lab.home(CONTROL) / Path(FILE).name).write_text(
            yaml.safe_dump(tree, sort_keys=False)
        )

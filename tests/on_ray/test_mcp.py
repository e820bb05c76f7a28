"""An agent drives a sweep of digits: it checks, starts, watches, answers and extends."""

import os
import sys
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.conftest import REPOSITORY
from tests.on_ray.test_job import jobs_of
from tests.specs import read_json
from trainers.config.yaml import dump_yaml

pytestmark = [pytest.mark.ray, pytest.mark.full]
LIMITS = "--allow-run --max-trials 4 --max-usd 1 --usd-per-hour 0.5"
SIZES = "space.global_batch_size"


class Agent:
    def __init__(self, client):
        self.client = client

    async def __call__(self, tool, **arguments):
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        found: dict[str, Any] = result.structured_content
        assert found["said"]
        assert "not_known" in found
        return found

    async def refused(self, tool, **arguments):
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error
        return result.content[0].text

    async def end_of(self, directory):
        return await self.until(lambda seen: "process" in seen, directory)

    async def until(self, is_so, directory):
        with anyio.fail_after(200):
            while not is_so(seen := await self("watch", directory=directory)):
                await anyio.sleep(0.3)
        return seen


def test_an_agent_drives_a_sweep_and_extends_it(tmp_path, cluster):
    sweep = {
        "name": "small",
        "storage_path": str(tmp_path),
        "train": str(REPOSITORY / "examples/digits/train.yaml"),
        "space": {"global_batch_size": [64, 128]},
        "objective": {
            "metric": "time_to_target",
            "target": {"val_accuracy": 0.9},
        },
        "finalists": 0,
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(dump_yaml(sweep))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_AIR_NEW_OUTPUT", "TUNE_"))
    }
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "tune", "mcp", *LIMITS.split()],
        env=environment | {"RAY_ADDRESS": cluster.address},
        cwd=REPOSITORY,
    )

    async def drive():
        async with Client(server) as client:
            agent = Agent(client)
            start = {"sweep": str(file), "settings": {"budget.usd": 0.25}}
            checked = await agent("validate", sweep=str(file))
            directory = {"directory": checked["directory"]}
            assert checked["trials"] == 2
            await agent("start", **start)
            assert "runs already" in await agent.refused("start", **start)
            # While it writes its report, or ends.
            await agent.until(
                lambda seen: seen["trials"] == {"done": 2}, **directory
            )
            before = trials(tmp_path)
            more = {SIZES: [64, 128, 256], "budget.usd": 0.25}
            await agent("extend", **directory, settings=more)
            seen = await agent.end_of(**directory)
            assert seen["process"]["exit_code"] == 0, seen["process"]
            assert (seen["state"], seen["trials"]) == ("ended", {"done": 3})
            assert before.items() <= trials(tmp_path).items(), "none ran again"
            assert jobs_of(cluster, tmp_path / "small")
            found = await agent("answer", **directory)
            low, high = found["time_to_target_s"]
            assert low <= found["best"]["value"] <= high

            five = {SIZES: [32, 64, 128, 256, 512], "budget.usd": 0.25}
            said = await agent.refused("extend", **directory, settings=five)
            assert said.startswith("`budget.trials` must be at most 4, ")
            assert "the sweep has 5 trials" in said
            dear = {"budget.usd": 0.75}
            said = await agent.refused("extend", **directory, settings=dear)
            assert said.startswith("`budget.usd: 0.75` must be at most 0.5")
            [trial, *_] = trials(tmp_path)
            explained = await agent("explain", **directory, trial=trial)
            assert explained["trial"]["status"] == "done"

    anyio.run(drive)


def trials(storage):
    files = (storage / "small/trials").glob("*.json")
    return {file.stem: read_json(file) for file in files}

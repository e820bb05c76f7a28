"""docs/python.md in a notebook: its examples run as they are, the view is
live, and an interrupt loses nothing.
"""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.specs import REPOSITORY
from tests.waits import HANG_S

pytestmark = [pytest.mark.ray, pytest.mark.full]

RESULT = """
import json

print(json.dumps({
    "best": result.best.config, "rows": len(result.records), "report": result.report,
    "status": run.status, "outputs": list(model(torch.ones(2, 8)).shape),
}))
"""

INTERRUPTED = """
import os
import signal
import time
from pathlib import Path

import ray

from tests.waits import when

ray.init(log_to_driver=False)

go = str(Path("go").absolute())

class Waiting(Sums):
    def __init__(self, waits):
        self.waits = waits

    def loss(self, outputs, batch):
        while self.waits and not Path(go).exists():
            time.sleep(0.01)
        return super().loss(outputs, batch)

waiting = {**config, "task": Waiting}
space = {"task_args.waits": [False, True]}
# What Jupyter sends: to all of the kernel's group.
when(lambda: list(Path("results/waiting/trials").glob("*.json")), lambda: os.killpg(os.getpgid(0), signal.SIGINT))
sweep(waiting, space, name="waiting", lanes=1)
"""

RESUMED = """
Path(go).touch()
kept = {file.name: file.stat().st_mtime_ns for file in Path("results/waiting/trials").glob("*.json")}
resumed = sweep(waiting, space, name="waiting", lanes=1)
again = {file.name: file.stat().st_mtime_ns for file in Path("results/waiting/trials").glob("*.json")}
print(json.dumps({
    "kept": len(kept), "untouched": kept.items() <= again.items(), "all": len(again),
    "statuses": sorted({record.status for record in resumed.records}), "connected": ray.is_initialized(),
    "tune": [name for name in os.environ if name.startswith("TUNE_")],
}))
ray.shutdown()
"""


class Recorder(NotebookClient):
    """Keeps what cells have shown of the view while they ran."""

    shown: dict[int, list[str]]

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "update_display_data":
            self.shown.setdefault(cell_index, []).append(
                msg["content"]["data"]["text/html"]
            )
        return super().process_message(msg, cell, cell_index)


def printed(cell):
    return "".join(
        output["text"]
        for output in cell["outputs"]
        if output.get("name") == "stdout"
    )


def test_the_page_s_examples_run_in_a_notebook(cluster, tmp_path, monkeypatch):
    monkeypatch.delenv("PACELINE_STORAGE", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    page = (REPOSITORY / "docs/python.md").read_text()
    examples = re.findall(
        r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    sources = (*examples, RESULT, INTERRUPTED, RESUMED)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-2].metadata["tags"] = ["raises-exception"]
    client = Recorder(
        nbformat.v4.new_notebook(cells=cells),
        timeout=int(HANG_S),
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.shown = {}
    client.execute()

    view = [html for html in client.shown[0] if html]
    assert any(re.search("0/4 trials", html) for html in view)
    assert any("lanes busy" in html for html in view)
    assert client.shown[0][-1] == "", "it is taken away"
    [table] = [
        output["data"]["text/html"]
        for output in cells[0].outputs
        if output.output_type == "execute_result"
    ]
    for words in ("sums-sweep: 4 trials", "val_loss", "report.html"):
        assert words in table
    assert "trial 4/4" in printed(cells[0])
    assert "the lanes are starting" in printed(cells[0]), "nothing is cleared"

    found = json.loads(printed(cells[-3]))
    assert found["best"]["optimizer.lr"] == 0.1
    assert (found["rows"], found["status"], found["outputs"]) == (
        4,
        "done",
        [2, 1],
    )
    assert Path(found["report"]).read_text().startswith("<!")
    assert (
        "task: notebook_tasks.Sums_"
        in (tmp_path / "results/sums-sweep/best.yaml").read_text()
    )

    [error] = [
        output for output in cells[-2].outputs if output.output_type == "error"
    ]
    assert error["ename"] == "SweepInterrupted"
    after = json.loads(printed(cells[-1]).splitlines()[-1])
    assert re.match(
        rf"{after['kept']} trials? kept; the same call continues",
        error["evalue"],
    )
    assert after["kept"] == 1
    assert (after["untouched"], after["all"], after["statuses"]) == (
        True,
        2,
        ["done"],
    )
    assert after["connected"], "the connection is the notebook's own"
    assert after["tune"] == [], "its own Tuners are as Ray has them"

"""What users' coding agents read: AGENTS.md, whose commands
tests/commands/test_documents.py runs, and llms.txt.
"""

import re

import pytest

from tests.documents import blocks
from tests.specs import REPOSITORY
from trainers.command_line import entries
from trainers.config.train import TrainConfig
from trainers.errors import STATUSES
from tune.config import SweepConfig

TEXTS = {
    name: (REPOSITORY / name).read_text() for name in ("AGENTS.md", "llms.txt")
}


@pytest.mark.parametrize("name", TEXTS)
def test_it_is_short_and_its_links_are_there(name):
    assert len(TEXTS[name].splitlines()) <= 120
    links = re.findall(r"\]\(([^)#]+)", TEXTS[name])
    assert links
    assert [link for link in links if not (REPOSITORY / link).is_file()] == []


def test_llms_txt_has_the_form_that_its_readers_expect():
    """llmstxt.org: a title, a summary in quotes, and sections of links with a
    few words each.
    """
    title, summary, *_ = TEXTS["llms.txt"].split("\n\n")
    assert title.startswith("# ")
    assert all(line.startswith("> ") for line in summary.splitlines())
    _, *sections = re.split(
        r"^## .+\n\n", TEXTS["llms.txt"], flags=re.MULTILINE
    )
    for section in sections:
        assert all(
            re.fullmatch(r"- \[[^]]+\]\([^)]+\): .+", line)
            for line in section.strip().splitlines()
        )


def test_every_command_of_the_agents_page_is_run():
    found = blocks("AGENTS.md")
    assert all(
        block.fate(command) is None
        for block in found
        for command in block.commands
    )
    assert [block.name for block in found if block.name] == [
        "task.py",
        "train.yaml",
        "sweep.yaml",
    ]


def test_the_words_of_the_agents_page_are_those_of_the_product():
    keys = {
        key
        for model in (TrainConfig, SweepConfig)
        for key, *_ in entries(model)
    }
    keys |= {key.partition(".")[0] for key in keys} | set(STATUSES)
    for word in (
        "lr_scaling",
        "budget",
        "finalists",
        "microbatch_size",
        "diverged",
        "out_of_memory",
        "node_lost",
        "hung",
    ):
        assert word in keys
        assert word in TEXTS["AGENTS.md"]

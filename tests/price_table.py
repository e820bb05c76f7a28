"""Excerpts of SkyPilot's catalogs, and the table that Paceline ships, which is made from them.

Run as:
    python -m tests.price_table     (writes cluster/files/prices.csv)

The excerpts hold the rows of the catalogs, at the commits below, for the machines of our cluster files and pages in the
regions below, and a few rows that are to be left out. The days of these commits are not known here. Whole catalogs are
read with `python -m cluster prices update`, by the same code.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from cluster.catalog.download import Answer
from cluster.catalog.update import update
from cluster.files.prices import PRICES

EXCERPTS = Path(__file__).parent / "catalog"
CATALOGS = {
    "aws": "e385a0d348eda9cefd9806423e7725944dc249e4/catalogs/v8",
    "gcp": "8427bbff988abdd050a9f51addd314ef31cb4e85/catalogs/v8",
    "azure": "3f5f697196c9278346b0271342031fff6b37036d/catalogs/v5",
}
READ = dt.date(2026, 11, 25)
REGIONS = ("us-east-1", "us-east-2", "us-west-2", "us-central1", "us-east1", "us-east4", "us-west1")
REGIONS += ("eastus", "eastus2", "westus3")
TYPES = ("m5.*", "g4dn.*", "g5.*", "g6.*", "p4d.*", "p5.*", "n2-standard-8", "g2-*", "a2-highgpu-*")
TYPES += ("Standard_D8s_v5", "Standard_NC24ads_A100_v4", "Standard_ND96amsr_A100_v4")


def excerpt(url: str) -> Answer:
    """Answer as the server of a catalog would, from an excerpt of it."""
    return Answer((EXCERPTS / f"{url.split('/')[-2]}.csv").read_text(), None, url)


def make(to: Path) -> None:
    """Write the shipped table."""
    to.unlink(missing_ok=True)
    for provider, commit in CATALOGS.items():
        catalog = f"https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/{commit}"
        for line in update(to, (provider,), REGIONS, TYPES, catalog, READ, excerpt):
            print(line)


if __name__ == "__main__":
    make(PRICES)

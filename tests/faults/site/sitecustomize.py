"""Python imports this where a process starts; the runner puts its directory on
PYTHONPATH.
"""

from tests.faults.hook import install

install()

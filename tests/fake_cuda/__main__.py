"""See the package."""

import sys

from tests.fake_cuda import main

main(sys.argv[1:])

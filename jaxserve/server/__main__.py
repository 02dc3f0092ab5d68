"""`python -m jaxserve.server` is `jaxserve serve`."""

from __future__ import annotations

import sys

from jaxserve.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()

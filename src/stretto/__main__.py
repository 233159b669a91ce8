# SPDX-License-Identifier: Apache-2.0
"""``python -m stretto`` is the command ``stretto``."""

from .cli import main

if __name__ == "__main__":
    main()

"""``python -m attn4.cli``: the same as ``attn4``."""

import sys

from attn4.cli import main

sys.exit(main())
